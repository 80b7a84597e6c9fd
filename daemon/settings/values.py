"""One value of the file: whether its setting takes it, and the form in which the option does. Pure."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Annotated, Any

from stateroom.client.errors import BadEndpoint
from stateroom.client.paths import check_endpoint
from stateroom.daemon.config import parse_bytes, parse_quotas, parse_weights
from stateroom.daemon.exits import Leave
from stateroom.daemon.quotas import Quota
from stateroom.daemon.settings.known import Setting
from stateroom.daemon.settings.lines import Place

SHOWN_MAX = 60  # characters of a wrong value
TABLES = {"weight": "[weight] editor = 4", "quota": "[quota.editor] sessions = 9"}  # by app
ENDPOINTS = ("endpoint", "listen")
MODEL = "model"
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class Wrong(Exception):
    """A value that can't be. `place`: where below its setting, in a table."""

    def __init__(self, message: str, *place: str) -> None:
        super().__init__(message)
        self.message = message
        self.place: Place = place


def taken(setting: Setting, value: Any) -> Any:
    """The value as the option of its name takes it.

    Raises:
        Wrong: it isn't one.
    """
    if setting.name in TABLES:
        return list(_texts(setting.name, value))
    if setting.is_size:
        return _size(value)
    from pydantic import ConfigDict, Field, TypeAdapter, ValidationError  # slow to load, and few have a file

    kind = setting.kind
    if kind == list[str] and isinstance(value, str):
        value = [value]
    if setting.option.min is not None or setting.option.max is not None:
        kind = Annotated[kind, Field(ge=setting.option.min, le=setting.option.max)]
    try:
        strict = ConfigDict(strict=True, allow_inf_nan=False)
        value = TypeAdapter(kind, config=strict).validate_python(value)
    except ValidationError:
        raise Wrong(f"takes {takes(setting)}, not {_shown(value)}.") from None
    if setting.name in ENDPOINTS:
        _parsed(check_endpoint, value)
    if setting.name == MODEL:
        for spec in value:
            if spec.startswith(("./", "../")) or (spec.endswith(".gguf") and spec[0] not in "/~"):
                raise Wrong(f"takes whole paths: {_shown(spec)} depends on where the daemon is started.")
    return value


def takes(setting: Setting) -> str:
    """What a setting takes, in words."""
    if setting.name in TABLES:
        return f"a table, like {TABLES[setting.name]}"
    if setting.is_size:
        return 'a size like "8GiB", or a number of bytes'
    if setting.choices:
        return f"one of {', '.join(setting.choices)}"
    if setting.kind == list[str]:
        return "text, or a list of texts"
    least, most = setting.option.min, setting.option.max
    bounds = "" if least is None else f" from {least:g}" + (" on" if most is None else f" to {most:g}")
    return KINDS[setting.kind] + bounds


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a sentence that says that there is no such name."""
    found = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {found[0]}?" if found else "."


def _size(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Wrong(f'takes a size like "8GiB", or a number of bytes, not {_shown(value)}.')
    _parsed(parse_bytes, str(value))
    return str(value)


def _texts(name: str, table: Any) -> Iterator[str]:
    """Of a table by app, what the option takes: `editor=4`, `editor=sessions:9,bytes:8GiB`."""
    if not isinstance(table, dict):
        raise Wrong(f"is a table, like {TABLES[name]}; {_shown(table)} is none.")
    for app, said in table.items():
        if name == "weight":
            if isinstance(said, bool) or not isinstance(said, int | float):
                raise Wrong(f"takes a number, not {_shown(said)}.", app)
            text = f"{app}={said}"
            _parsed(parse_weights, [text], app)
        else:
            text = f"{app}={','.join(_limits(app, said))}"
            _parsed(parse_quotas, [text], app)
        yield text


def _limits(app: str, limits: Any) -> Iterator[str]:
    if not isinstance(limits, dict) or not limits:
        raise Wrong(f"takes a table, like {{ sessions = 9 }}, not {_shown(limits)}.", app)
    names = [limit.name for limit in fields(Quota)]
    for limit, most in limits.items():
        if limit not in names:
            raise Wrong(f"is no limit{nearest(limit, names)}", app, limit)
        if isinstance(most, bool) or not isinstance(most, int | str) or "," in str(most):
            raise Wrong(f"takes a number or a size, not {_shown(most)}.", app, limit)
        yield f"{limit}:{most}"


def _parsed(parse: Callable[[Any], object], value: Any, *place: str) -> None:
    try:
        parse(value)
    except (Leave, BadEndpoint) as refused:
        raise Wrong(f"can't be that: {refused}", *place) from None


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
