"""The daemon's one process: sockets, timers and the end of it, around parts that know nothing of them.

    clients ══ PublicSocket ── Desk ── Work ── Supervisor ── LinkSocket ══ engine workers
                                 └─ Tickets, Peers, Catalog, Watchers, Metrics (pure)

Nothing here waits for an engine. One asyncio loop, callbacks only; the tasks are the workers' lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import zmq
from structlog.typing import FilteringBoundLogger

from stateroom.daemon.alarm import Alarm
from stateroom.daemon.archive import Archive
from stateroom.daemon.blas import Blas
from stateroom.daemon.carriage import Carriage
from stateroom.daemon.catalog import Catalog
from stateroom.daemon.clock import Clock, monotonic_s
from stateroom.daemon.config import Config, ModelSpec
from stateroom.daemon.curve import Door
from stateroom.daemon.desk import Desk
from stateroom.daemon.keeper import Keeper, open_store
from stateroom.daemon.keys import Keys, over_network
from stateroom.daemon.link import Discard
from stateroom.daemon.logs import incident
from stateroom.daemon.memory import Memory
from stateroom.daemon.metrics import Metrics
from stateroom.daemon.peers import Peer, Peers
from stateroom.daemon.pressure import Source, system_level
from stateroom.daemon.prometheus import Figures, Page
from stateroom.daemon.quotas import Quotas
from stateroom.daemon.shelf import Shelf
from stateroom.daemon.sockets import NO_DESCRIPTOR, PublicSocket, is_local
from stateroom.daemon.store.rows import ModelRow
from stateroom.daemon.supervisor import Supervisor
from stateroom.daemon.tickets import Tickets
from stateroom.daemon.traces import Traces
from stateroom.daemon.unloading import Unloading
from stateroom.daemon.usage import usage
from stateroom.daemon.view import View
from stateroom.daemon.wakefulness import Wakefulness
from stateroom.daemon.watchers import Watchers
from stateroom.daemon.work import Work

TICK_S = 1.0  # housekeeping: expired sessions, silent workers
FLUSH_S = 0.02  # while replies wait for clients that do not read
POLL_S = 0.01  # while the daemon waits for its own end
FLUSH_LAST_S = 0.3  # for the last replies at the daemon's end


class Broker:
    """One daemon. Make it inside a running event loop; `start`, then `stop`, once each."""

    def __init__(
        self,
        config: Config,
        log: FilteringBoundLogger,
        blas: Blas,
        clock: Clock = monotonic_s,
        level: Source = system_level,
    ) -> None:
        self.config, self.log, self._clock, self._began_s = config, log, clock, clock()
        keys = Keys(config.keys_dir)
        self._pair = None if config.insecure_loopback else keys.pair_for(config.endpoint, config.listen)
        self.keeper = None if config.state_dir is None else Keeper(open_store(config.state_dir), clock, log)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._door = Door(self._context, keys) if self._pair else None
        self.listening: str | None = None
        self._socket = PublicSocket(
            self._context,
            lambda routing_id, fd, frames, guest: self.desk.receive(routing_id, fd, frames, guest),
            lambda fd: self.peers.lost(fd),
            lambda: self.peers.bury(),
            self._door,
            lambda count: self.metrics.count("clients_expelled", count),
        )
        self._tick_alarm, self._flush_alarm = Alarm(self._tick), Alarm(self._flush)
        self._watch_alarm = Alarm(lambda: self.watchers.tick())
        self._trace_alarm = Alarm(lambda: self.traces.tick())
        self.metrics = Metrics()
        self.metrics.others.append(self._socket.traffic)
        self._page: Page | None = None
        self.peers = Peers(self._socket.send, self._vanished, lambda: self._flush_alarm.ring_in(FLUSH_S))
        pending = self.keeper.pending if self.keeper else None
        self.catalog = Catalog(clock, pending=pending, quotas=Quotas(config.quotas))
        self.tickets = Tickets(
            self.peers,
            self.metrics,
            clock,
            log,
            lambda peer: self.work.cut(peer),
            log_content=config.log_content,
            quotas=self.catalog.quotas,
            record=config.record,
        )
        self.shelf = Shelf(config.models, config.models_dir, config.allow_any_model)
        self.memory = Memory(
            config.kv_budget_bytes, clock, log, lambda event: self.watchers.publish(event), level
        )
        self.supervisor = Supervisor(config, self._context, clock, self.metrics, log, blas, self.memory)
        self.watchers = Watchers(
            self.tickets, clock, lambda owner: self.view.stats(owner), self._watch_alarm.ring_in
        )
        self.unloading = Unloading(self.supervisor, self.tickets, clock, log, config.unload_after_s)
        patience = config.patience
        self.wakefulness = Wakefulness(
            config.keep_awake, patience.awake_after_s, patience.awake_until_s, clock, log
        )
        self.archive = Archive(
            self.catalog, self.watchers.publish, self._discard, keeps=config.state_dir is not None
        )
        self.work = Work(
            self.tickets, self.catalog, self.supervisor, self.watchers, self.archive, self.metrics, log
        )
        self.supervisor.listener, self.supervisor.recall = self.work, self.shelf.recall
        self.carriage = None
        if config.state_dir is not None:
            snapshots = self.archive.snapshots
            self.carriage = Carriage(
                config.state_dir,
                snapshots,
                self.tickets.reply,
                self.work.take_in,
                clock,
                log,
                config.disk_bytes_max,
                config.disk_free_bytes,
            )
        self.view = View(
            self.peers,
            self.tickets,
            self.catalog,
            self.supervisor,
            self.watchers,
            self.shelf,
            self.archive.snapshots,
            self.metrics,
            clock,
            is_local,
        )
        self.traces = Traces(self.tickets, self.view, self.supervisor, clock, self._trace_alarm.ring_in)
        self.supervisor.recorded = self.traces.take
        self.desk = Desk(
            self.peers,
            self.tickets,
            self.catalog,
            self.supervisor,
            self.work,
            self.watchers,
            self.view,
            self.traces,
            self.shelf,
            self.archive,
            self.carriage,
            self.metrics,
            log,
        )
        self.view.more_gauges += [self.memory.gauges, self._own_gauges]
        if self.keeper is not None:
            self._restore(self.keeper)

    def _restore(self, keeper: Keeper) -> None:
        """What the daemon before left is there at once; nothing of it is loaded until it is touched."""
        kept = keeper.loaded()
        wanted = {stored.row.model for stored in kept.sessions} | {row.model for row in kept.snapshots}
        for row in kept.models:
            if row.id not in wanted:
                keeper.pending.drop(ModelRow, row.id)
        self.shelf.remember(ModelSpec(row.id, row.spec) for row in kept.models)
        self.catalog.restore(kept)
        self.archive.snapshots.load(kept.snapshots)
        self.view.more_gauges.append(keeper.gauges)
        self.work.expire()

    @property
    def own_user_only(self) -> bool:
        return self._socket.own_user_only

    def start(self, descriptor: int = NO_DESCRIPTOR) -> str:
        """Binds, starts the engines of the given models, and gives the endpoint.

        `descriptor`: of a socket that listens there already (see `daemon/activation.py`).
        """
        asyncio.get_running_loop().set_exception_handler(self._unexpected)
        # Keys are demanded at all that is bound after they first were: local endpoints go before.
        config = self.config
        pair = self._pair if over_network(config.endpoint) else None
        endpoint = self._socket.bind(config.endpoint, pair, descriptor)
        if config.listen is not None:
            self.listening = self._socket.bind(config.listen, self._pair)
        if config.metrics_port is not None:
            self._page = self._serve_page(config.metrics_port)
        for spec in self.config.models:
            self.supervisor.ensure(self.supervisor.engine_for(spec))
        self._tick_soon()
        return endpoint

    def _serve_page(self, port: int) -> Page | None:
        try:
            page = Page(port, self._figures, asyncio.get_running_loop())
        except OSError as error:
            self.log.error("no metrics page", port=port, error=str(error))
            return None
        self.log.info("metrics page", port=page.port)
        return page

    def _own_gauges(self) -> dict[str, float]:
        return {"uptime_s": round(self._clock() - self._began_s, 1), **usage()}

    def _figures(self) -> Figures:
        engines = {engine.id: engine.timings for engine in self.supervisor.engines}
        return Figures(self.view.figures(), self.metrics.timings, engines)

    async def stop(self) -> None:
        """Refuses what is new, ends what runs, has sessions parked, ends the workers, keeps what is known."""
        patience, begin_s = self.config.patience, self._clock()
        self.desk.admitting = False
        self.work.end_all_held()
        await _until(lambda: len(self.tickets) == 0, patience.finals_s)
        left_s = max(0.0, begin_s + patience.finals_s - self._clock())
        # What a worker still had ends as `engine_lost`.
        await self.supervisor.stop(patience.park_s + left_s)
        await _until(lambda: not self.peers.waiting, FLUSH_LAST_S)
        for alarm in (self._tick_alarm, self._flush_alarm, self._watch_alarm, self._trace_alarm):
            alarm.stop()
        self.wakefulness.let_go()
        if self._page is not None:
            # Its thread may be waiting for this loop.
            await asyncio.to_thread(self._page.close)
        if self.carriage is not None:
            self.carriage.close()
        if self.keeper is not None:
            await self.keeper.close()
        self._socket.close()
        self._context.term()

    def _tick(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self.metrics.timings.loop_lag.add(max(0.0, now_s - self._tick_due_s))
        self._tick_soon()
        if self._door is not None:
            self._expel(self._door)
        self.work.expire()
        if self.carriage is not None:
            self.carriage.expire()
        self.memory.tick()
        self.supervisor.tick()
        self.unloading.tick()
        # Those that need an engine: a client that watches doesn't.
        self.wakefulness.look(any(ticket.model is not None for ticket in self.tickets))
        if self.desk.admitting:
            self.work.look_round()

    def _tick_soon(self) -> None:
        self._tick_due_s = asyncio.get_running_loop().time() + TICK_S
        self._tick_alarm.ring_in(TICK_S)

    def _expel(self, door: Door) -> None:
        door.allowed.refresh()
        expelled = self.peers.expel(lambda guest: not door.allowed.knows(guest))
        for peer in expelled:
            self._socket.expel(peer.descriptor)
        if expelled:
            self.log.info("keys revoked", connections=len(expelled))

    def _flush(self) -> None:
        self.peers.flush()
        if self.peers.waiting:
            self._flush_alarm.ring_in(FLUSH_S)

    def _vanished(self, peer: Peer) -> None:
        self.metrics.count("clients_vanished")
        self.work.vanish(peer)
        if self.carriage is not None:
            self.carriage.vanish(peer)

    def _discard(self, model: str, snapshots: list[str]) -> None:
        """A worker that isn't there is told at its next start."""
        engine = self.supervisor.known(model)
        if engine is not None and engine.ready:
            engine.send(Discard(snapshots))

    def _unexpected(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What no part handled: ours, to be found in the log, and no reason to leave."""
        name = incident()
        self.log.error(
            "internal error", incident=name, what=context["message"], exc_info=context.get("exception")
        )


async def _until(done: Callable[[], bool], seconds: float) -> None:
    """Polls: at the daemon's end only, and briefly."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + seconds
    while not done() and loop.time() < until_s:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
