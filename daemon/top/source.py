"""Where snapshots come from: a daemon, looked at with care.

The daemon answers `list` and `stats` by itself, and while it does it serves nobody: with 16,384 sessions for
some 50 ms. So what a look keeps it busy decides how soon the next one may be.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from stateroom.client.async_room import AsyncRoom
from stateroom.client.asynchronous import connect_async
from stateroom.client.errors import Disconnected, Invalid, NoDaemon, UnknownOperation
from stateroom.client.protocol import (
    Close,
    CloseResult,
    Park,
    ParkResult,
    SessionInfo,
    StatsResult,
)
from stateroom.client.timeouts import Timeouts
from stateroom.daemon.exits import FAILED, Leave
from stateroom.daemon.shown import short
from stateroom.daemon.top.snapshot import Snapshot
from stateroom.daemon.top.view import Act
from stateroom.daemon.top.words import clean, size

APP = "top"
BUSY_PART = 0.025  # of the time that the daemon may spend on each of the two kinds of looks: 5 % in all
LOOKS_COUNTED = 4  # the quickest of the last ones is what a look needs: others had to wait on the way
CONNECT_S = 2.0  # to find it, at first and whenever it was lost; tried again and again
ANSWER_S = 10.0  # for the daemon to answer a look; then it is said that it doesn't
ACT_S = 60.0  # for what a key began: a park waits for what runs, and writes to the disk

Clock = Callable[[], float]


class Source(Protocol):
    """Looks and acts. Both raise what the client raises, and `Leave` where there is no use in going on."""

    async def look(self) -> Snapshot: ...

    async def act(self, act: Act, session: SessionInfo) -> str:
        """Does it to a session, as its owner, and says what came of it."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class Pace:
    """How often something may be asked: not sooner than `interval_s`, nor for much of the daemon's time."""

    interval_s: float
    every_s: float = 0.0
    last_s: float = float("-inf")
    _busy_s: deque[float] = field(default_factory=lambda: deque(maxlen=LOOKS_COUNTED))

    def due(self, now_s: float) -> bool:
        # A look is due a little early rather than a whole interval late.
        return now_s - self.last_s >= self.every_s - self.interval_s / 2

    def took(self, now_s: float, busy_s: float) -> None:
        self._busy_s.append(busy_s)
        self.last_s, self.every_s = now_s, max(self.interval_s, min(self._busy_s) / BUSY_PART)

    def hurry(self) -> None:
        """The next one is due at once."""
        self.every_s = 0.0


class DaemonSource:
    """A connection, made anew whenever it was lost. `interval_s`: the least time between looks."""

    def __init__(self, endpoint: str | None, interval_s: float, clock: Clock = time.monotonic) -> None:
        self._endpoint, self._clock = endpoint, clock
        self._room = connect_async(endpoint, app=APP, timeout_s=CONNECT_S, timeouts=Timeouts(call_s=ANSWER_S))
        self._figures, self._lists = Pace(interval_s), Pace(interval_s)
        self._sessions: list[SessionInfo] = []

    async def look(self) -> Snapshot:
        room = self._room
        try:
            await room  # connected: making a connection is no time of the daemon's
            began_s = self._clock()
            requests = await room.requests(everyone=True)
            stats = await room.stats()
            self._figures.took(self._clock(), self._clock() - began_s)
            if self._lists.due(self._clock()):
                stats = await self._list(stats)
        except (UnknownOperation, Invalid) as error:
            raise Leave(
                FAILED,
                f"The daemon, of version {clean(room.server.version)}, is too old for this command; restart "
                "it with the version that is installed.",
            ) from error
        except (Disconnected, NoDaemon):
            self._lists.hurry()  # it may be another daemon when it is back
            raise
        return Snapshot(
            endpoint=room.endpoint,
            version=clean(room.server.version),
            at_s=self._clock(),
            every_s=self._figures.every_s,
            stats=stats,
            sessions=self._sessions,
            sessions_at_s=self._lists.last_s,
            sessions_every_s=self._lists.every_s,
            requests=requests,
        )

    async def _list(self, before: StatsResult) -> StatsResult:
        """Reads the sessions, and the stats after that.

        What it took is the CPU time that the daemon counts: to send and read many sessions takes long, too.
        """
        self._sessions = await self._room.list(everyone=True)
        after = await self._room.stats()
        cpu_s = after.gauges.get("cpu_s", 0.0) - before.gauges.get("cpu_s", 0.0)
        self._lists.took(self._clock(), max(cpu_s, 0.0))
        return after

    async def act(self, act: Act, session: SessionInfo) -> str:
        async with connect_async(self._endpoint, app=self._as_client(session.owner)) as room:
            told = await _done(room, act, session)
        self._lists.hurry()  # who pressed the key wants to see what came of it
        return told

    def _as_client(self, owner: str) -> str:
        """What a client is to call itself to be this owner. With a key all stand below the key's name."""
        return owner.removeprefix(self._room.server.app.removesuffix(APP))

    async def close(self) -> None:
        await self._room.close()


async def _done(room: AsyncRoom, act: Act, session: SessionInfo) -> str:
    name = session.name or short(session.session)
    if act is Act.CANCEL:
        ended = await room.cancel(session.session)
        return f"What ran in {name} was cancelled." if ended else f"Nothing runs in {name}."
    if act is Act.PARK:
        parked = await room.call(Park(session=session.session), ParkResult, timeout_s=ACT_S)
        return f"{name} is parked ({parked.tier}): {size(parked.freed_bytes)} freed on the device."
    assert act is Act.CLOSE, act
    closed = await room.call(Close(session=session.session), CloseResult, timeout_s=ACT_S)
    return f"{name} is closed: {size(closed.freed_bytes)} freed."
