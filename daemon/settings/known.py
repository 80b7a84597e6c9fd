"""The settings there are: what `serve` takes, and what the commands use. Read from the signatures of those.

So a new option of `serve` is at once a key of the file, a variable of the environment, and a row that
docs/configuration.md must have.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from typer.models import OptionInfo

PREFIX = "STATEROOM_"
HOME = "home"  # is none: it says where the file is
# Variables that are no setting of `serve`: they say where things are, before any file is read.
OTHER_VARIABLES = tuple(
    PREFIX + name for name in ("HOME", "CONFIG", "RUNTIME_DIR", "KEY_FILE", "BLAS", "SERVICE")
)
REPEATED = " May be given several times."  # of an option
COMMANDS = "Commands"  # the part of the file that isn't about `serve`


@dataclass(frozen=True)
class Setting:
    """One of them. `name`: as in the file, and of the option; `parameter`: the same as a Python name."""

    parameter: str
    kind: Any  # bool, int, float, str, a Literal, or list[str]
    default: object  # None: see `default_words`
    option: OptionInfo
    part: str

    @property
    def name(self) -> str:
        return self.parameter.replace("_", "-")

    @property
    def variable(self) -> str:
        return variable_of(self.parameter)

    @property
    def default_words(self) -> str:
        """What holds where nobody says anything."""
        shown = self.option.show_default
        if isinstance(shown, str):
            return shown
        if isinstance(self.default, bool):
            return "true" if self.default else "false"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def help(self) -> str:
        """What it is for, as far as a file goes."""
        return (self.option.help or "").replace(REPEATED, "")

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def is_size(self) -> bool:
        return self.option.metavar == "SIZE"


def variable_of(parameter: str) -> str:
    """As click makes it."""
    return PREFIX + parameter.upper()


@cache
def known() -> dict[str, Setting]:
    """All settings by their names, in the order of `serve --help`; last what the commands use."""
    # Not above: the package of the commands brings in every command, and some of those come here.
    from stateroom.daemon.commands.options import COMMANDS_APP, App
    from stateroom.daemon.commands.serve import serve

    made = list(_options_of(serve))
    app = next(each for each in get_args(App) if isinstance(each, OptionInfo))
    made.append(Setting("app", str, COMMANDS_APP, app, COMMANDS))
    return {each.name: each for each in made if each.name != HOME and each.option.allow_from_autoenv}


def _options_of(command: Any) -> Iterator[Setting]:
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if get_origin(hints[name]) is not Annotated:
            continue
        kind, option = get_args(hints[name])[:2]
        if isinstance(kind, UnionType):  # with None
            (kind,) = (each for each in get_args(kind) if each is not NoneType)
        yield Setting(name, kind, parameter.default, option, str(option.rich_help_panel))
