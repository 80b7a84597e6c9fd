"""What `make pictures` drew for README.md: it needs nothing from anywhere, and names no machine's places."""

from __future__ import annotations

import html
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from docs.pictures.screens import drawn
from docs.pictures.svg import SVG_BYTES_MAX, plain, problems

ROOT = Path(__file__).parents[2]
PICTURES = {path.name: path.read_text() for path in (ROOT / "docs" / "pictures").glob("*.svg")}
SVG = "{http://www.w3.org/2000/svg}"


def words(svg: str) -> str:
    """All text of a picture, line by line."""
    texts = ElementTree.fromstring(svg).iter(f"{SVG}text")
    return "\n".join(html.unescape("".join(text.itertext())).replace("\xa0", " ") for text in texts)


def test_the_readme_shows_what_was_drawn() -> None:
    shown = re.findall(r"!\[[^\]]+\]\(docs/pictures/([^)]+)\)", (ROOT / "README.md").read_text())
    assert sorted(shown) == sorted(PICTURES) == ["demo.svg", "top.svg"]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_whole_small_and_names_no_place(name: str) -> None:
    svg = PICTURES[name]
    assert problems(svg) == []
    assert plain(svg) == svg
    assert len(words(svg)) > 500


def test_the_pictures_show_what_the_readme_says() -> None:
    top, demo = words(PICTURES["top.svg"]), words(PICTURES["demo.svg"])
    for owner in ("my-editor", "chat", "agent", "indexer"):
        assert owner in top
    assert "waits" in top
    assert "receipt: reused" in demo
    assert "suggestion 4" in demo


def test_what_a_spinner_wrote_and_a_processs_number_are_not_drawn() -> None:
    spinner = "\x1b[?25l| loads …\r\x1b[2K/ loads …\n\x1b[?25h\r\x1b[1A\x1b[2K"
    svg = drawn(spinner + "A daemon (process 7) is \x1b[1mthere\x1b[0m.\n")
    assert "".join(words(svg).split()) == "stateroomdemo$stateroomdemoAdaemonisthere."
    assert problems(svg) == []


def test_a_picture_with_a_place_a_font_or_too_much_would_be_noticed() -> None:
    good = drawn("hello\n")
    for bad in (
        good.replace("hello", "/root/x"),
        good.replace("hello", "https://example.org"),
        good.replace("hello", "me@machine"),
        good + "x" * SVG_BYTES_MAX,
        good.replace("<style>", "<style>@font-face { src: url(x) }"),
    ):
        assert problems(bad)
    with pytest.raises(ValueError, match="it names"):
        drawn("/home/somebody/models\n")
