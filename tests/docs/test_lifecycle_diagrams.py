"""docs/architecture.md draws the lifecycles as the tables in code have them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs.pictures.lifecycle import BEGIN, DRAWN, END, into

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
ARROW = re.compile(r"^    (\w+) --> (\w+): (.+)$", re.MULTILINE)


def test_the_page_is_as_it_would_be_drawn_now() -> None:
    """`make pictures` writes it."""
    assert into(PAGE) == PAGE


def test_every_entry_of_every_table_is_an_arrow_and_no_arrow_is_made_up() -> None:
    """Read back from the page, so that a drawing that leaves something out shows, too."""
    diagrams = re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)
    assert len(diagrams) == len(DRAWN)
    for drawing, (table, first) in zip(diagrams, DRAWN.values(), strict=True):
        drawn = {
            (state, event, to) for state, to, events in ARROW.findall(drawing) for event in events.split(", ")
        }
        assert drawn == {
            (state.value, event.value, to.value)
            for state, ways in table.items()
            for event, to in ways.items()
        }
        assert re.findall(r"\[\*\] --> (\w+)", drawing) == [first.value]
        assert set(re.findall(r"(\w+) --> \[\*\]", drawing)) == {
            state.value for state, ways in table.items() if not ways
        }


def test_another_table_would_be_noticed() -> None:
    assert into(PAGE.replace("idle --> running: start", "idle --> running: begin")) == PAGE
    with pytest.raises(ValueError, match="lacks"):
        into(PAGE.replace(END, ""))
    with pytest.raises(ValueError, match="lacks"):
        into(PAGE.replace(BEGIN, ""))
