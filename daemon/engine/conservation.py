"""Trunks, tails, checkpoints and what is free are everything: the books of an engine against what there is.

Run when the engine has nothing to do. What it finds is a bug of ours: it is logged as an incident and told in
`stats`, and nobody's request is the worse for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING
from weakref import WeakSet

from stateroom.caches.rows import PackedRows
from stateroom.caches.session import SessionCache
from stateroom.caches.trunk import Trunk, View
from stateroom.daemon.engine.memory import Part, chained
from stateroom.daemon.engine.score import Score
from stateroom.daemon.engine.session import Session
from stateroom.daemon.engine.verify import Verify

if TYPE_CHECKING:
    from stateroom.daemon.engine.engine import Engine

EVERY_MS = 1000.0  # between two checks, and so much more for each further `SESSIONS` of them
SESSIONS = 500  # take some milliseconds to check
TOLD_MAX = 8  # violations that are named; there may be one for each session


class Unconserved(Exception):
    """The books don't agree with what there is; the message says where."""


class Conservation:
    """Checks an engine.

    Attributes:
        violated: how often something was found.
        checks: how often it was looked for.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._closed: WeakSet[Session] = WeakSet()
        self._trunks: WeakSet[Trunk] = WeakSet()  # all that were seen, for as long as somebody has them
        self._last_ms = -EVERY_MS
        self.checks = self.violated = 0

    def closed(self, session: Session) -> None:
        """From now on it must hold nothing."""
        self._closed.add(session)

    def at_rest(self) -> bool:
        """The engine has nothing to do: looks, and reports what it finds; False when it is too soon."""
        now_ms = self._engine.clock_ms()
        if now_ms - self._last_ms < EVERY_MS * (1 + len(self._engine.sessions) / SESSIONS):
            return False
        self._last_ms = now_ms
        try:
            wrong = list(self.violations())
        except Exception as error:
            self._report(error)
            return True
        if wrong:
            more = f" and {len(wrong) - TOLD_MAX} more" if len(wrong) > TOLD_MAX else ""
            self._report(Unconserved("; ".join(wrong[:TOLD_MAX]) + more))
        return True

    def _report(self, error: Exception) -> None:
        self.violated += 1
        self._engine.report(error)

    def violations(self) -> Iterator[str]:
        """What doesn't agree, in words."""
        self.checks += 1
        yield from self._of_views()
        yield from self._of_sums()
        yield from self._of_prefixes()
        yield from self._of_the_closed()

    def _caches(self) -> Iterator[SessionCache]:
        """Every cache there is, each once."""
        engine = self._engine
        places = [engine.memory.place(session)[0] for session in engine.sessions.values()]
        scores = [r.cache for r in engine.requests.values() if isinstance(r, Score)]
        branches = [r.session.cache for r in engine.requests.values() if isinstance(r, Verify)]
        yield from {id(cache): cache for cache in (*places, *scores, *branches) if cache is not None}.values()

    def _of_views(self) -> Iterator[str]:
        """Every trunk has as many holders as there are views of it."""
        views: dict[int, View] = {}
        for cache in self._caches():
            for store in cache.stores:
                if isinstance(store, PackedRows):
                    views.update((id(view), view) for chain in store.chains for view in chain)
        found = Counter(view.trunk for view in views.values())
        self._trunks.update(found)
        for trunk in list(self._trunks):
            if trunk.holders != found[trunk]:
                yield f"trunk {trunk.number} has {trunk.holders} holders, of which {found[trunk]} are known"

    def _of_sums(self) -> Iterator[str]:
        """The sums that are kept are those of what sessions hold, by shapes."""
        engine = self._engine
        counted, own, shared = engine.memory.counted()
        rows, parts = 0, set[Part]()
        for session in engine.sessions.values():
            rows += session.kv_bytes
            parts |= {*session.trail, *(chained(session.cache, 0) if session.cache is not None else ())}
        if own != rows:
            yield f"own columns are {rows} bytes and were counted as {own}"
        if shared != (there := sum(part.nbytes for part in parts)):
            yield f"trunks and checkpoints are {there} bytes and were counted as {shared}"
        for session in counted.keys() - set(engine.sessions.values()):
            yield f"session {session.id[:8]} is counted, and isn't there"

    def _of_prefixes(self) -> Iterator[str]:
        """The index knows each session by as many tokens as it has stored, and nobody else."""
        engine = self._engine
        wanted = {
            (realm, session): min(session.stored, limit)
            for session in engine.sessions.values()
            for realm, limit in session.realms()
            if session.stored
        }
        known = {(realm, session): length for realm, session, length in engine.sharing.prefixes.places()}
        for realm, session in wanted.keys() | known.keys():
            want, have = wanted.get((realm, session), 0), known.get((realm, session), 0)
            if want != have:
                yield f"session {session.id[:8]} has {want} tokens stored and is known by {have}"

    def _of_the_closed(self) -> Iterator[str]:
        """Nothing of a closed session stays, and marks are held by sessions that there are."""
        for session in list(self._closed):
            if session.cache is not None or len(session.trail):
                yield f"session {session.id[:8]} is closed and holds KV"
        trails = {session.trail for session in self._engine.sessions.values()}
        for mark in {mark for trail in trails for mark in trail}:
            strangers = sum(len(trail) > 0 and trail not in trails for trail in mark.trails)
            if strangers:
                yield f"a checkpoint at {mark.length} tokens is held by {strangers} that are no session"
