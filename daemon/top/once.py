"""One frame as plain text, for scripts and pipes."""

from __future__ import annotations

import asyncio

from stateroom.daemon.top.board import ORDERS, arranged, board
from stateroom.daemon.top.frame import whole
from stateroom.daemon.top.rates import Rates
from stateroom.daemon.top.source import Source
from stateroom.daemon.top.text import shown


async def once(source: Source, owner: str | None, apart_s: float, width: int) -> str:
    """The frame after two looks, `apart_s` from each other: without a first one there are no rates."""
    try:
        rates = Rates()
        rates.take(await source.look())
        await asyncio.sleep(apart_s)
        snapshot = await source.look()
        rates.take(snapshot)
    finally:
        await source.close()
    made = board(snapshot, rates, owner)
    lines = whole(made, arranged(made.rows, ORDERS[0], False, ""), width)
    return "".join(f"{shown(line)}\n" for line in lines)
