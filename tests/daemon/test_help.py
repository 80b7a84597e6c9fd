"""`--help` of every command, in a terminal of 80 columns; and what the shell is offered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from stateroom.daemon import commands

COLUMNS = 80
WITH_EXAMPLES = ("serve", "generate", "chat", "ps", "save", "export", "keys client", "config show")


def all_commands() -> Iterator[tuple[str, ...]]:
    def below(group: TyperGroup, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield path
        for name, command in group.commands.items():
            if isinstance(command, TyperGroup):
                yield from below(command, (*path, name))
            else:
                yield (*path, name)

    root = typer.main.get_command(commands.app)
    assert isinstance(root, TyperGroup)
    return below(root, ())


def command_at(path: tuple[str, ...]) -> typer.core.TyperCommand | TyperGroup:
    found = typer.main.get_command(commands.app)
    for name in path:
        assert isinstance(found, TyperGroup)
        found = found.commands[name]
    assert isinstance(found, typer.core.TyperCommand | TyperGroup)
    return found


def help_of(*path: str) -> str:
    done = CliRunner().invoke(
        commands.app, [*path, "--help"], prog_name="stateroom", env={"COLUMNS": str(COLUMNS), "TERM": "dumb"}
    )
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.parametrize("path", list(all_commands()), ids=" ".join)
def test_help_says_what_everything_is_in_eighty_columns(path: tuple[str, ...]) -> None:
    command = command_at(path)
    sentence = (command.help or "").split("\n\n")[0].strip()
    assert sentence[:1].isupper()
    assert sentence.endswith((".", "?"))
    for parameter in command.params:
        told = getattr(parameter, "help", None) or ""
        assert told.strip(), f"{parameter.name} of {' '.join(path)} has no help"
        assert told.rstrip().endswith((".", ")")), f"{parameter.name} of {' '.join(path)}: {told}"
    text = help_of(*path)
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert "…" not in text.replace("tcp://…", ""), "something was cut"
    for name in command.commands if isinstance(command, TyperGroup) else ():
        assert f"│ {name} " in text


@pytest.mark.parametrize("path", WITH_EXAMPLES)
def test_the_main_commands_show_an_example(path: str) -> None:
    assert f"\n stateroom {path}" in help_of(*path.split())


def test_commands_are_grouped() -> None:
    text = help_of()
    for panel in (*commands.COMMANDS, *commands.GROUPS):
        assert f"╭─ {panel} ─" in text
