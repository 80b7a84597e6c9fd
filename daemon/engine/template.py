"""Chat templates: jinja2 in its sandbox, with what the templates of model repositories expect to find."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """A compiled template. `special`: the special tokens that it may name, such as `bos_token`.

    Raises:
        jinja2.TemplateSyntaxError: from the constructor.
        jinja2.TemplateError: from `render`, also by the template's own `raise_exception`.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        self._template = environment.from_string(source)
        self._special = dict(special)

    def render(self, messages: list[dict[str, str]], generation_prompt: bool) -> str:
        """The text of a conversation; with the opening of an answer at its end if `generation_prompt`."""
        return self._template.render(
            messages=messages, add_generation_prompt=generation_prompt, **self._special
        )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Unlike jinja2's own, this escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
