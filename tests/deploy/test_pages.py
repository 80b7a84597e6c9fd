"""What docs/operations.md, docs/hardware-checks.md and the script for a Mac have a person type exists."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from stateroom.daemon.commands import app
from stateroom.deploy.launchd import LABEL

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "check_on_mac.sh"
PAGES = (ROOT / "docs" / "operations.md", ROOT / "docs" / "hardware-checks.md")
ENDS = {"|", "||", "&&", ";", "&", ">", "<", "2>&1", ">/dev/null"}
WORDS_MIN = 30  # commands found in all, lest nothing is looked at


def typed(text: str) -> Iterator[list[str]]:
    """The words of each `stateroom …` in a text: up to what is the shell's, or a comment."""
    for found in re.findall(r"(?<![\w./-])stateroom ([^`\n\"'#>|;&)]*)", text):
        words = shlex.split(found)
        if words and re.fullmatch(r"[a-z]+", words[0]):
            yield words


def everything() -> list[tuple[str, list[str]]]:
    script = "\n".join(line for line in SCRIPT.read_text().splitlines() if not line.startswith("#"))
    texts = {SCRIPT.name: script}
    for page in PAGES:
        shown = re.findall(r"^```\n(.*?)^```|`([^`\n]+)`", page.read_text(), re.DOTALL | re.M)
        texts[page.name] = "\n".join(block or span for block, span in shown)
    return [(name, words) for name, text in texts.items() for words in typed(text)]


@cache
def program() -> Any:
    return typer.main.get_command(app)


def problem(words: list[str]) -> str | None:
    """What of a command line the program doesn't have."""
    command = program()
    behind: list[str] = []
    if "--" in words:
        at = words.index("--")
        words, behind = words[:at], words[at + 1 :]
    rest = list(words)
    while hasattr(command, "commands"):
        if not rest:
            return None  # a page that speaks of the group
        name = rest.pop(0)
        if name not in command.commands:
            return f"no command {name!r}"
        command = command.commands[name]
    options = {
        option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
    }
    strange = [word for word in rest if word[:1] == "-" and word.partition("=")[0] not in {*options, "-"}]
    if strange:
        return f"no option {strange[0]} of {command.name}"
    return problem(["serve", *behind]) if behind else None


def test_what_a_person_types_exists() -> None:
    found = everything()
    assert len(found) >= WORDS_MIN
    assert {name for name, _ in found} == {SCRIPT.name, *(page.name for page in PAGES)}
    wrong = [
        f"{name}: stateroom {' '.join(words)}: {why}" for name, words in found if (why := problem(words))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("service instal", "no command 'instal'"),
        ("service install --modle demo", "no option --modle of install"),
        ("service install --model demo -- --rows-mox 8", "no option --rows-mox of serve"),
        ("service install --model demo -- --rows-max 8", None),
    ],
)
def test_what_does_not_exist_would_be_noticed(line: str, why: str | None) -> None:
    assert problem(shlex.split(line)) == why


def test_the_script_for_a_mac_is_one() -> None:
    """A shell reads it whole; elsewhere than on a Mac it does nothing."""
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True, timeout=60)
    done = subprocess.run(["sh", str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "This is no Mac.\n")
    for part in ("install", "kill", "upgrade", "activation", "awake", "headless", "uninstall"):
        assert f'echo "--- {part}' in SCRIPT.read_text()


def test_the_commands_for_sudo_are_those_of_the_page() -> None:
    """Of a LaunchDaemon: the same file in the same place, and the same order."""
    wanted = [
        f"launchctl bootstrap system /Library/LaunchDaemons/{LABEL}.plist",
        f"launchctl bootout system/{LABEL}",
    ]
    script = SCRIPT.read_text().replace("$LABEL", LABEL)
    page = PAGES[0].read_text()
    for command in wanted:
        assert f"sudo {command}" in script
        assert f"sudo {command}" in page
