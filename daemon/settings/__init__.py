"""The configuration file, as docs/configuration.md tells: what it may say (`known`), what it says (`load`).

Click settles who overrides whom: the file gives the defaults of `serve`'s options, the environment comes
before it, an option before both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stateroom.client.errors import BadConfig, BadEndpoint
from stateroom.client.paths import config_path, read_config
from stateroom.daemon.settings.known import HOME, OTHER_VARIABLES, PREFIX, known
from stateroom.daemon.settings.lines import lines_of
from stateroom.daemon.settings.values import Wrong, nearest, taken

__all__ = ["Settings", "app", "config_path", "examine", "known", "load", "problem", "strange_variables"]


@dataclass(frozen=True)
class Settings:
    """What the file says. Both maps are by `Setting.parameter`."""

    path: Path | None = None  # None: there is no file
    values: dict[str, Any] = field(default_factory=dict)  # as the options take them
    lines: Mapping[str, int] = field(default_factory=dict)

    def where(self, parameter: str) -> str:
        return f"{self.path}:{self.lines[parameter]}"


def load() -> Settings:
    """The file's settings; none where there is no file.

    Raises:
        BadConfig: it can't be used; the message names the line and what is wrong with it.
        BadEndpoint: a variable that says where it is can't work.
    """
    found, problems = examine()
    if problems:
        raise BadConfig(problems[0])
    return found


def problem() -> str | None:
    """What is wrong with the file; None where it can be used, or isn't there."""
    try:
        load()
    except (BadConfig, BadEndpoint) as error:
        return str(error)
    return None


def app() -> str | None:
    """The owner that the file gives to the commands. Errors as for `load`."""
    owner: str | None = load().values.get("app")
    return owner


def examine() -> tuple[Settings, list[str]]:
    """What the file says, and all that is wrong with it, by line.

    Raises:
        BadConfig: it can't be read at all.
        BadEndpoint: a variable that says where it is can't work.
    """
    file = read_config()
    if file is None:
        return Settings(), []
    lines = lines_of(file.text)
    values: dict[str, Any] = {}
    at: dict[str, int] = {}
    problems: list[tuple[int, str]] = []
    for name, value in file.values.items():
        line = lines.get((name,), 1)
        setting = known().get(name)
        if setting is None:
            problems.append((line, _unknown(name)))
            continue
        try:
            values[setting.parameter], at[setting.parameter] = taken(setting, value), line
        except Wrong as wrong:
            place = (name, *wrong.place)
            problems.append((lines.get(place, line), f"{'.'.join(place)} {wrong.message}"))
        except ValueError:  # of 0xfff…, which TOML takes and Python then can't write
            problems.append((line, f"{name} has a number of thousands of digits."))
    return Settings(file.path, values, at), [f"{file.path}:{line}: {said}" for line, said in sorted(problems)]


def _unknown(name: str) -> str:
    if name == HOME:
        return f"{name} can't be set here, for it says where this file is; set ${PREFIX}HOME."
    return f"{name} is no setting{nearest(name, known())}"


def strange_variables(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Variables that look like settings and are none, each in a sentence."""
    variables = [*(setting.variable for setting in known().values()), *OTHER_VARIABLES]
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in variables:
            yield f"${name} is no setting{nearest(name, variables)}"
