"""What the daemon shows of itself: sessions, requests and figures, to those who may see them.

An owner sees what is its own. Who asks for `everyone`'s sees those of all owners where it came over the local
socket, which this user's programs alone can reach and where each may call itself what it likes; who came with
a key sees what is below the key's name; who came without one over a network, its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from stateroom.client.protocol import (
    List,
    ModelInfo,
    RequestInfo,
    Requests,
    RequestsResult,
    SessionInfo,
    StatsResult,
    Waiting,
)
from stateroom.client.wire import PlainResult, to_wire
from stateroom.daemon.catalog import Catalog
from stateroom.daemon.clock import Clock
from stateroom.daemon.lifecycle import RequestState
from stateroom.daemon.metrics import TIERS, Metrics
from stateroom.daemon.peers import Peer, Peers
from stateroom.daemon.session import Session
from stateroom.daemon.shelf import Shelf
from stateroom.daemon.shown import request_shown
from stateroom.daemon.snapshots import Snapshots
from stateroom.daemon.supervisor import Supervisor
from stateroom.daemon.tickets import AT_ONCE, Ticket, Tickets
from stateroom.daemon.waiting import waits_for
from stateroom.daemon.watchers import Watchers

Sight = Callable[[str], bool]  # whether what an owner has may be seen


class View:
    """Reads the parts of a broker.

    Args:
        local: whether a connection, by its descriptor, came over the local socket.

    Attributes:
        more_gauges: of parts that only some daemons have.
    """

    def __init__(
        self,
        peers: Peers,
        tickets: Tickets,
        catalog: Catalog,
        supervisor: Supervisor,
        watchers: Watchers,
        shelf: Shelf,
        snapshots: Snapshots,
        metrics: Metrics,
        clock: Clock,
        local: Callable[[int], bool],
    ) -> None:
        self._peers, self._tickets, self._catalog = peers, tickets, catalog
        self._supervisor, self._watchers, self._shelf = supervisor, watchers, shelf
        self._snapshots, self._metrics, self._clock, self._local = snapshots, metrics, clock, local
        self.more_gauges: list[Callable[[], dict[str, float]]] = []

    def sight(self, peer: Peer, everyone: bool) -> Sight:
        """Whose things a connection may see."""
        own = peer.app
        if not everyone:
            return lambda owner: owner == own
        if peer.guest is not None:
            below = f"{peer.guest.name}/"
            return lambda owner: owner.startswith(below)
        if self._local(peer.descriptor):
            return lambda owner: True
        return lambda owner: owner == own

    # ------------------------------------------------------------ sessions

    def sessions(self, peer: Peer, request: List) -> PlainResult:
        """There may be thousands: see `Catalog.listed`."""
        sees = self.sight(peer, request.everyone)
        listed = self._catalog.listed(sees)
        for session, info in listed:
            if session.running is not None and (ticket := self._tickets.get(session.running)) is not None:
                if ticket.state is RequestState.HELD:
                    info["state"] = "queued"
                if (waiting := self.waiting(ticket)) is not None:
                    info["waiting"] = waiting
        trunks = [to_wire(trunk) for trunk in self._catalog.trunks_of(sees)]
        return PlainResult({"sessions": [info for _, info in listed], "trunks": trunks})

    def info(self, session: Session) -> SessionInfo:
        info, ticket = self._catalog.info(session), self._tickets.get(session.running)
        if ticket is None:
            return info
        state = "queued" if ticket.state is RequestState.HELD else info.state
        return replace(info, state=state, waiting=self.waiting(ticket))

    # ------------------------------------------------------------ requests

    def requests(self, peer: Peer, request: Requests) -> RequestsResult:
        """Raises NotFound: it may see no such session."""
        sees = self.sight(peer, request.everyone)
        wanted = None if request.session is None else self._seen(peer, sees, request.session).id
        now_s = self._clock()
        still = [
            self.request(ticket)
            for ticket in self._tickets
            if not isinstance(ticket.request, AT_ONCE) and sees(ticket.owner)
        ]
        ended = [told.aged(now_s).info for told in self._tickets.recent if sees(told.info.owner)]
        return RequestsResult(
            requests=[info for info in (*still, *ended) if wanted is None or info.session == wanted]
        )

    def request(self, ticket: Ticket) -> RequestInfo:
        """An open one."""
        return request_shown(ticket, self._clock(), self.waiting(ticket))

    def waiting(self, ticket: Ticket) -> Waiting | None:
        """Why an open request doesn't go on."""
        engine = self._supervisor.known(ticket.model or "")
        if engine is None:
            return waits_for(ticket, ready=False, told=None)
        doing = engine.doing.get(ticket.rid)
        return waits_for(ticket, ready=engine.ready, told=None if doing is None else doing.waiting)

    def _seen(self, peer: Peer, sees: Sight, reference: str) -> Session:
        """A session by its id, if it may be seen, or an own one by its name."""
        session = self._catalog.get(reference)
        if session is not None and session.published_as is None and sees(session.owner):
            return session
        return self._catalog.find(peer.app, reference)

    # ------------------------------------------------------------ models and figures

    def models(self) -> list[ModelInfo]:
        """Those that can be opened, and those opened by their path, which nothing else lists."""
        specs = self._shelf.all()
        engines = {spec.id: self._supervisor.known(spec.id) for spec in specs}
        engines |= {engine.id: engine for engine in self._supervisor.engines}
        return [
            engine.info if engine else ModelInfo(id=name, loaded=False) for name, engine in engines.items()
        ]

    def figures(self) -> StatsResult:
        """As `stats`, of everybody: for whoever runs the daemon."""
        return self.stats(None)

    def stats(self, owner: str | None) -> StatsResult:
        """Counters since start, gauges of now. Of what is told by owner: this one's; None: everybody's."""
        lasting = [ticket for ticket in self._tickets if not isinstance(ticket.request, AT_ONCE)]
        held = sum(ticket.state is RequestState.HELD for ticket in lasting)
        sessions = [session for session in self._catalog if session.published_as is None]
        tiers = Counter(session.tier for session in sessions)
        parts, own_bytes = self._catalog.parts, sum(session.own_bytes for session in self._catalog)
        gauges: dict[str, float] = {
            "clients": len(self._peers),
            "requests_open": len(lasting),
            "running": len(lasting) - held - len(self._watchers),
            "queued": held,
            "watchers": len(self._watchers),
            "sessions": len(sessions),
            **{f"sessions_{tier}": tiers[tier] for tier in TIERS},
            "quarantined": sum(session.quarantined is not None for session in sessions),
            "tokens": sum(session.length for session in sessions),
            "published": self._catalog.trunks,
            "kv_private_bytes": own_bytes + parts.private_bytes,
            "kv_shared_bytes": parts.shared_bytes,
            "trunks": parts.trunks,
            "trunk_bytes": parts.trunk_bytes,
            **self._snapshots.gauges(),
            "engines_ready": sum(engine.ready for engine in self._supervisor.engines),
        }
        for more in self.more_gauges:
            gauges |= more()
        models = [engine.health(owner) for engine in self._supervisor.engines]
        return StatsResult(counters=self._metrics.counters(), gauges=gauges, models=models)
