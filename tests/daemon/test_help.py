"""`--help` of every command, in a terminal of 80 columns; and what the shell is offered."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from tests.daemon.rig import Rig
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
    assert "<bool>" not in text, "a switch takes no value"
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


# ---------------------------------------------------------------- completion


def test_what_is_slow_to_load_is_loaded_by_those_who_need_it() -> None:
    """A shell that asks for completions waits for every import."""
    loads = "import sys, stateroom.daemon.commands; print(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", loads], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.returncode == 0, done.stderr
    slow = {"mlx", "numpy", "pydantic", "structlog", "textual", "prometheus_client", "jinja2", "sqlite3"}
    assert slow & set(done.stdout.split()) == set()


def completed(**asked: str) -> str:
    return CliRunner().invoke(commands.app, prog_name="stateroom", env=asked).stdout


def test_each_shell_is_offered_commands_options_and_choices() -> None:
    for line, offered in (
        ("stateroom ser", {"serve", "service"}),
        ("stateroom config ch", {"check"}),
        ("stateroom serve --kv", {"--kv-budget"}),
        ("stateroom serve --log-level w", {"warning"}),
    ):
        words = line.split()
        bash = completed(_STATEROOM_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1))
        assert set(bash.split()) == offered
        zsh = completed(_STATEROOM_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=line)
        fish = completed(
            _STATEROOM_COMPLETE="complete_fish",
            _TYPER_COMPLETE_ARGS=line,
            _TYPER_COMPLETE_FISH_ACTION="get-args",
        )
        for each in offered:
            assert f'"{each}"' in zsh
            assert each in fish


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(shell: str) -> None:
    assert "_STATEROOM_COMPLETE=complete_" in completed(_STATEROOM_COMPLETE=f"source_{shell}")


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_itself_completes() -> None:
    asks = """
        eval "$(_STATEROOM_COMPLETE=source_bash stateroom)"
        COMP_WORDS=(stateroom model rem); COMP_CWORD=2
        _stateroom_completion stateroom
        echo "${COMPREPLY[@]}"
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", asks],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "remove\n", done.stderr


def test_installed_models_are_offered(tmp_path: Path) -> None:
    for name in ("demo", "mine", ".unfinished-x"):
        (tmp_path / "models" / name).mkdir(parents=True)
    home = {"STATEROOM_HOME": str(tmp_path), "_STATEROOM_COMPLETE": "complete_bash"}
    for line in ("stateroom serve --model ", "stateroom model remove "):
        assert completed(COMP_WORDS=line, COMP_CWORD=str(len(line.split())), **home).split() == [
            "demo",
            "mine",
        ]


def test_no_shell_is_offered_what_it_could_obey(rig: Rig) -> None:
    """A shell evaluates what it is offered (zsh: in double quotes), and names of apps are anybody's."""
    for app in ("plain", "key/app.2:b", "\\$(touch x)", '";x', "a\nb", "`x`", "two words", "-x"):
        rig.client(app=app).ask("open")
    asked = {
        "STATEROOM_ENDPOINT": rig.endpoint,
        "_STATEROOM_COMPLETE": "complete_zsh",
        "_TYPER_COMPLETE_ARGS": "stateroom ps --app ",
    }
    assert set(re.findall(r'"([^"]*)"', completed(**asked))) == {"plain", r"key/app.2\\:b"}
