"""What README.md and the pages for users have a reader type is typed, in order, in a home of his own.

Each line of every block that isn't named below with a reason. His model is a tiny one in the demo's place:
what is tried is that everything works as it stands.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs.typed import CONSOLE, PYTHON, ROOT, Reader, Screen, blocks, command
from tests.system.terminal import CTRL_D

pytestmark = pytest.mark.system

DOCS = ROOT / "docs"
SERVE = "stateroom serve --model demo 2>serve.log &"
# What isn't typed here, and why. That such commands exist is tested below.
NOT_TYPED = {
    "make demo": "tests/system/test_demo.py runs what it runs, with the real model",
    "make test": "is running",
    "make setup": "has run: it made the environment of this test",
    ". .venv/bin/activate": "the same; the commands are found without it",
    "stateroom service install --model demo": "tests/deploy does, and removes what it has installed",
    "stateroom service uninstall": "the same",
}
SCREENS = {
    "stateroom chat": Screen(
        shows="> ", types="The quick brown fox\n", then_shows="in chat\r\n> ", leaves_by=CTRL_D, code=0
    ),
    "stateroom logs -f": Screen(shows="op=hello"),
    "stateroom top": Screen(shows="q quit", leaves_by="q", code=0, terminal="xterm-256color"),
    "stateroom watch --stats 1": Screen(shows="figures: "),
}
# The README's example is about an editor that has a buffer.
BEFORE = {
    "README.md": """
buffer = "def area(radius):\\n    return 3.14"
edited_buffer = buffer.replace("3.14", "pi * radius ** 2")
"""
}
SHOWS = {
    "python.md": (
        r"(stop|stop_token|length) \d+\n$",
        r"^[1-9]\d* .*\n$",
        r"^\d{3} fork\n$",
        r"^snapshot True\nTrue\n$",
        r"^decode (queued|running|ending|done) .*\n(.*\n)*my-editor tale \d+ ",
    ),
    "quick-start.md": (r"^\d+ tokens computed\n('.*'\n){3}\d+ reused, \d+ computed\n$", r"\w"),
    "editor-plugins.md": (r"^\d+ kept, \d+ dropped, \d+ computed: .*\n$", r"^'.*'\n$"),
    "agents.md": (
        r"^( *-\d+\.\d{3} '.*'\n){2,4}\d+ tokens\n$",
        r"^True \d+ tokens taken back\n$",
        r"^(snapshot \d{2,}\n){2}$",
        r"^(\d{2,} tokens not computed by worker \d\n){2}$",
    ),
}


def steps(page: Path) -> Iterator[tuple[str, str]]:
    """(language, what is typed) of a page, in order."""
    for block in blocks(page):
        if block.language == PYTHON:
            yield PYTHON, block.text
        elif block.language in CONSOLE:
            yield from (("", line) for line in block.commands)


def follow(page: Path, reader: Reader, typed: list[tuple[str, str]]) -> None:
    shown = []
    for language, text in typed:
        if language == PYTHON:
            shown.append(reader.runs(BEFORE.get(page.name, "") + text))
        elif command(text) in SCREENS:
            reader.looks_at(text, SCREENS[command(text)])
        elif command(text) not in NOT_TYPED:
            reader.types(text)
    for said, wanted in zip(shown, SHOWS.get(page.name, ()), strict=page.name in SHOWS):
        assert re.search(wanted, said), said


def test_everything_the_readme_shows_works_as_it_stands() -> None:
    page = ROOT / "README.md"
    typed = list(steps(page))
    programs = [step for step in typed if step[0] == PYTHON]
    rest = [step for step in typed if step[0] != PYTHON]
    begun = next(at for at, (_, line) in enumerate(rest) if line.startswith("stateroom serve")) + 1
    with Reader() as reader:
        follow(page, reader, rest[:begun] + programs + rest[begun:])
        assert len(programs) == 1
        assert len(programs[0][1].splitlines()) <= 6
        assert reader.leaves() == []


def test_the_quick_start_works_as_it_stands() -> None:
    page = DOCS / "quick-start.md"
    with Reader() as reader:
        follow(page, reader, list(steps(page)))
        assert reader.leaves() == []


def test_the_guides_work_as_they_stand() -> None:
    """One daemon for them all, in a clone's root; the last page ends it."""
    with Reader() as reader:
        (reader.here / "examples").symlink_to(ROOT / "examples")
        reader.types(SERVE)
        for name in ("python.md", "editor-plugins.md", "agents.md", "faq.md"):
            follow(DOCS / name, reader, list(steps(DOCS / name)))
        assert reader.leaves() == []


# ---------------------------------------------------------------- what isn't typed


def test_what_is_excepted_is_shown_and_exists() -> None:
    pages = [ROOT / "README.md", *DOCS.glob("*.md")]
    typed = {command(line) for page in pages for language, line in steps(page) if language != PYTHON}
    assert set(NOT_TYPED) <= typed
    assert set(SCREENS) <= typed
    targets = set(re.findall(r"^(\w+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in NOT_TYPED:
        words = line.split()
        assert words[0] in ("make", ".", "stateroom"), line
        assert words[0] != "make" or words[1] in targets, line


def test_what_pip_is_told_to_install_exists() -> None:
    """tests/packaging installs it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told = re.findall(r"`pip install ([^`]+)`", (ROOT / "README.md").read_text())
    assert len(told) >= 4
    for what in told:
        for named in re.findall(r"\[([\w,]+)\]", what):
            assert set(named.split(",")) <= set(extras), what


def test_a_line_that_fails_would_be_noticed() -> None:
    with Reader() as reader, pytest.raises(AssertionError, match="failed with"):
        reader.types("stateroom ps")
