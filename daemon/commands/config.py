"""`stateroom config show | path | init | check`: what the daemon is started with, and why."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, Any, cast

import typer
from rich.table import Table
from typer.core import TyperGroup

from stateroom.client.paths import default_endpoint, home_dir
from stateroom.daemon import settings
from stateroom.daemon.commands.options import AsJson
from stateroom.daemon.commands.serve import refuse
from stateroom.daemon.commands.switches import Commands
from stateroom.daemon.commands.terminal import cell, err, out
from stateroom.daemon.exits import CONFIG, FAILED, Leave
from stateroom.daemon.settings.known import COMMANDS, HOME, variable_of
from stateroom.daemon.settings.template import template

app = Commands(help="Write, check and explain the configuration file.")
Options = Annotated[
    list[str] | None,
    typer.Argument(metavar="OPTION", help="Options of `serve`, to be taken into account."),
]
LIKE_SERVE = {"ignore_unknown_options": True}  # they aren't unknown to `serve`


@dataclass(frozen=True)
class Held:
    """A setting as it holds. `origin`: option, environment, file or default; `where`: which of these."""

    name: str
    value: Any  # None: `shown` says what holds then
    origin: str
    where: str
    shown: str

    def told(self) -> dict[str, Any]:
        """For programs."""
        return {"name": self.name, "value": self.value, "origin": self.origin, "where": self.where}


@app.command(context_settings=LIKE_SERVE)
def show(context: typer.Context, options: Options = None, as_json: AsJson = False) -> None:
    """Show what `serve` would take here, and where each value comes from.

    stateroom config show
    stateroom config show --kv-budget 8GiB
    """
    held = list(holding(context, options or []))
    _note_strange_variables()
    if as_json:
        told = {"path": str(settings.config_path()), "settings": [each.told() for each in held]}
        out.print_json(data=told)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("SETTING", "VALUE", "FROM"):
        table.add_column(heading, overflow="fold")
    for each in held:
        style = "dim" if each.origin == "default" else None
        table.add_row(*(cell(text) for text in (each.name, each.shown, each.where)), style=style)
    out.print(table)


@app.command()
def path() -> None:
    """Print where the configuration file is, or would be: config.toml in the home, or $STATEROOM_CONFIG."""
    out.print(str(settings.config_path()), markup=False, soft_wrap=True)


@app.command()
def init() -> None:
    """Write a file with every setting, its default and its help, all of it as comments."""
    file = settings.config_path()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.") as whole:  # 0600
        whole.write(template())
        whole.flush()
        try:
            os.link(whole.name, file)  # never half a file, and never in the place of another
        except FileExistsError:
            raise Leave(FAILED, f"{file} is there already; it was left as it is.") from None
    out.print(f"Written: {file}", markup=False, soft_wrap=True)


@app.command(context_settings=LIKE_SERVE)
def check(context: typer.Context, options: Options = None) -> None:
    """Tell all that is wrong with the file and the environment; the exit code is 64 when something is."""
    _, problems = settings.examine()
    for problem in problems[:-1]:
        err.print(f"stateroom: {problem}", markup=False, soft_wrap=True)
    if problems:
        raise Leave(CONFIG, problems[-1])
    refuse(taken_by("serve", options or [], context).params)
    list(holding(context, options or []))
    _note_strange_variables()
    there = settings.config_path()
    out.print(f"{there} is well." if there.exists() else f"There is no file at {there}, and needn't be.")


def _note_strange_variables() -> None:
    """Nothing wrong: another program may have its reasons."""
    for sentence in settings.strange_variables():
        err.print(f"Note: {sentence}", markup=False, soft_wrap=True)


def holding(context: typer.Context, options: list[str]) -> Iterator[Held]:
    """Every setting as `serve`, and the commands, would take it: click parses them, and says whence."""
    of_serve, of_others = taken_by("serve", options, context), taken_by("ps", [], context)
    found = settings.load()
    yield _held(of_serve, found, HOME, str(home_dir()))
    for setting in settings.known().values():
        taker = of_others if setting.part == COMMANDS else of_serve
        words = default_endpoint() if setting.name == "endpoint" else setting.default_words
        yield _held(taker, found, setting.parameter, words)


def taken_by(name: str, options: Sequence[str], context: typer.Context) -> typer.Context:
    """A command's options as it would take them, without running it.

    Raises what the command would, when they can't work.
    """
    root = context.find_root()
    assert isinstance(root.command, TyperGroup)
    command = root.command.get_command(context, name)
    assert command is not None
    return cast(typer.Context, command.make_context(name, list(options), parent=root))


def _held(context: typer.Context, found: settings.Settings, parameter: str, default_words: str) -> Held:
    name, value = parameter.replace("_", "-"), context.params[parameter]
    value = str(value) if isinstance(value, Path) else value
    source = context.get_parameter_source(parameter)
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if source is not None and source.name == "COMMANDLINE":
        return Held(name, value, "option", f"--{name}", shown)
    if source is not None and source.name == "ENVIRONMENT":
        return Held(name, value, "environment", variable_of(parameter), shown)
    if parameter in found.values:
        return Held(name, value, "file", found.where(parameter), shown)
    return Held(name, value, "default", "default", default_words)
