"""The table's columns, and which of them a screen has room for. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stateroom.daemon.shown import short
from stateroom.daemon.top.board import Row
from stateroom.daemon.top.words import TIERS, clean, count_of, fit, long_wait, rate, size, span

MARK = 1  # the cell before the first column, which marks the selected row


@dataclass(frozen=True, slots=True)
class Column:
    """`rank`: those of lower rank stay when there is no room for all. `most`: as wide as it may grow."""

    head: str
    width: int
    rank: int
    cell: Callable[[Row], str]
    right: bool = False
    most: int = 0
    sort: str | None = None  # the order that it shows
    tail: int = 0  # characters of its end that stay when it is too long: names differ there


def _idle(row: Row) -> str:
    return span(row.session.idle_s) if row.session.idle_s else ""


COLUMNS = (
    Column("SESSION", 11, 0, lambda row: row.title, most=32, sort="session", tail=3),
    Column("OWNER", 9, 4, lambda row: row.session.owner, most=28, sort="owner"),
    Column("C", 1, 8, lambda row: row.session.session_class[:1]),
    Column("LEN", 6, 1, lambda row: count_of(row.session.length), right=True, sort="length"),
    Column("PRIV", 5, 5, lambda row: size(row.session.private_bytes), right=True, sort="private"),
    Column("SHRD", 5, 7, lambda row: size(row.session.shared_bytes), right=True, sort="shared"),
    Column("KV ON", 6, 6, lambda row: TIERS.get(row.session.tier, row.session.tier)),
    Column("TOK/S", 6, 3, lambda row: rate(row.per_s), right=True, sort="tok/s"),
    Column("STATE", 16, 0, lambda row: row.state, sort="activity"),
    Column("IDLE", 5, 2, _idle, right=True, sort="idle"),
    Column("WAITS FOR", 38, 9, lambda row: long_wait(row.waiting) if row.waiting else ""),
    Column("MODEL", 12, 10, lambda row: row.session.model, most=28),
    Column("DISK", 5, 11, lambda row: size(row.session.disk_bytes), right=True),
    Column("AGE", 4, 12, lambda row: span(row.session.age_s), right=True),
    Column("ID", 8, 13, lambda row: short(row.id)),
)  # fmt: skip


def columns(width: int) -> list[Column]:
    """Those that fit beside each other, a space between; what is left makes names and models wider."""
    room = width - MARK
    chosen: list[Column] = []
    for column in sorted(COLUMNS, key=lambda column: column.rank):
        if room < column.width + bool(chosen):
            break  # not a later one in its place, or columns would jump as the screen grows
        room -= column.width + bool(chosen)
        chosen.append(column)
    grown = []
    for column in (column for column in COLUMNS if column in chosen):
        more = min(max(column.most - column.width, 0), max(room, 0))
        room -= more
        grown.append(replace(column, width=column.width + more))
    return grown


def cells(row: Row, shown: list[Column]) -> str:
    """A row's line."""
    return " ".join(
        fit(clean(column.cell(row)), column.width, right=column.right, tail=column.tail) for column in shown
    )
