"""docs/top.md names what is on the screen, and its picture of one is a screen."""

from __future__ import annotations

import re
from pathlib import Path

from stateroom.daemon.top.board import ORDERS
from stateroom.daemon.top.columns import COLUMNS
from stateroom.daemon.top.frame import ENGINE_HEAD, KEYS
from stateroom.daemon.top.words import WAITS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "top.md").read_text()


def cells(heading: str) -> list[list[str]]:
    part = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def test_every_column_has_its_line_in_order() -> None:
    assert [row[0] for row in cells("Columns")] == [column.head for column in COLUMNS]


def test_every_reason_to_wait_has_its_line_in_order() -> None:
    expected = [[short, f"`{word}`"] for word, (short, _) in WAITS.items()]
    assert [row[:2] for row in cells("Why a session waits")] == expected


def test_the_orders_are_those_there_are() -> None:
    assert f"order: {', '.join(ORDERS)} |" in PAGE


def test_the_picture_is_a_screen_of_80_by_24() -> None:
    (picture,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    lines = picture.splitlines()
    assert len(lines) == 24
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[1:] == ENGINE_HEAD.split()
    assert lines[-1] == KEYS
