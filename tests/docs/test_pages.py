"""Every page: its links lead somewhere; the commands and options that it names exist; no machine's places.

What a reader of the pages for users types is typed in test_what_is_typed.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

import stateroom.client
from stateroom.client import Room, Session, TokenStream, errors
from stateroom.client.session import SessionState
from stateroom.daemon.commands import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
CODE = re.compile(r"```(?:sh|console)?\n(.*?)```|`([^`\n]+)`", re.DOTALL)
WORD = r"[a-z][a-z-]*"
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
MACHINES = re.compile(
    r"(?<![\w.])/(?:root|work|home/(?!you\b)\w+|Users/(?!you\b)\w+|tmp/\w+)\b|https?://(?:\d+\.){3}\d+:\d+/simple"
)

FOLDERS = ("caches", "client", "daemon", "deploy", "kernels", "tests", "benchmarks", "examples", "docs")
FILES = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
NOT_OURS = {"config.toml", "stateroom.toml"}  # of a home

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name} links to {target}#{anchor}"


def test_the_readme_leads_to_every_page() -> None:
    linked = {target for target, _ in LINK.findall((ROOT / "README.md").read_text())}
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= linked


@cache
def commands() -> Any:
    return typer.main.get_command(app)


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that words after `stateroom` name, and the words behind it."""
    found: Any = commands()
    while (known := getattr(found, "commands", None)) is not None and words and re.fullmatch(WORD, words[0]):
        assert words[0] in known, f"there is no `{words[0]}` in {sorted(known)}"
        found, words = known[words[0]], words[1:]
    return found, words


def shown_commands(page: Path) -> list[list[str]]:
    """The words after `stateroom`, or after a `serve` that stands for it, of each command in code."""
    shown = []
    for block, quoted in CODE.findall(page.read_text()):
        for line in re.split(r"\n|;|&&", block or quoted):
            words = re.sub(r"\s#.*$", "", line).split()
            for at, word in enumerate(words):
                if re.fullmatch(r"(\S*/)?stateroom", word) and at + 1 < len(words):
                    shown.append(words[at + 1 :])
            if words[:1] == ["serve"]:
                shown.append(words)
    return shown


@each_page
def test_commands_and_options_that_are_named_exist(page: Path) -> None:
    for words in shown_commands(page):
        names = re.split(r"\||,", words[0])  # `stateroom save|restore`
        for name in names:
            if not re.fullmatch(WORD, name):
                continue
            found, rest = command_of([name, *words[1:]])
            takes = [found]
            if found.context_settings.get("ignore_unknown_options"):  # of `serve`, that is
                takes.append(command_of(["serve"])[0])
            params = [each for command in takes for each in command.params]
            known = {option for each in params for option in (*each.opts, *each.secondary_opts)} | {"--help"}
            for word in rest:
                if word in ("--", "|", "&"):
                    break  # what follows is another program's, or `serve`'s
                if re.match(r"--?[a-z]", word):
                    option = re.split(r"[=…,.;:)\]]", word)[0]
                    assert option in known, f"{page.name}: {' '.join(words)}"


@each_page
def test_files_that_are_named_exist(page: Path) -> None:
    """By their path from the root, from their package, or by the end of it."""
    named = set(re.findall(r"`(?:stateroom/)?([\w/]+\.(?:py|sh|toml))(?:::\w+)?[`:]", page.read_text()))
    assert {name for name in named - NOT_OURS if not any(f"/{name}" in each for each in FILES)} == set()


@each_page
def test_no_page_names_a_machines_places(page: Path) -> None:
    assert MACHINES.findall(page.read_text()) == []


def test_commands_are_found_at_all() -> None:
    shown = [words for page in PAGES for words in shown_commands(page)]
    assert len(shown) > 50
    with pytest.raises(AssertionError, match="there is no `sing`"):
        command_of(["sing"])
    with pytest.raises(AssertionError, match="there is no `sing`"):
        command_of(["model", "sing"])


def test_the_cache_pages_example_runs_as_it_stands() -> None:
    """In a process of its own, which loads nothing of the daemon or the client."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "caches.md").read_text(), re.DOTALL)
    check = """
import sys
assert not any(name.startswith(("stateroom.daemon", "stateroom.client")) for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", example + check], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first == "(6, 5)"
    assert last.startswith("(3,) [Kind(kind='full', scheme='affine8', layers=2)]")


def test_what_the_pages_name_of_the_client_is_there() -> None:
    session = SessionState("id", None, 0, None)  # what a handle knows is set when it is made
    owners = {"room": {*dir(Room)}, "session": {*dir(Session), *dir(session)}, "stream": {*dir(TokenStream)}}
    pages = [
        (ROOT / "docs" / f"{name}.md").read_text() for name in ("python", "editor-plugins", "agents", "faq")
    ]
    for page in pages:
        for owner, name in re.findall(r"`(room|session|stream)\.(\w+)", page):
            assert name in owners[owner], f"{owner}.{name}"
        for name in re.findall(r"`([A-Z]\w*[a-z]\w*)`", page):
            assert hasattr(stateroom.client, name) or hasattr(errors, name), name
