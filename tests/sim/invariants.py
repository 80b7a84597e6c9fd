"""What must hold of the broker and its workers: at every tick what is cheap, at the end everything."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.sim.clients import Client
from tests.sim.language import POISON, continuation
from tests.sim.must import must

from stateroom.client.protocol import Body, Cancel, Decode, ErrorBody, Hello, Info, List, Requests, Stats
from stateroom.client.wire import decode_map
from stateroom.daemon import desk, peers
from stateroom.daemon.lifecycle import EngineState, RequestState, SessionState
from stateroom.daemon.quotas import account_of
from stateroom.daemon.tickets import Ticket
from stateroom.daemon.work import WITH_ENGINE

if TYPE_CHECKING:
    from tests.sim.world import World

AT_ONCE = (Hello, List, Requests, Info, Stats, Cancel)
HELD_FOR = ("engine", "session", "trial")
OWN_MAX = 2  # tickets of the broker's own for each session: an adoption and a close
END_S = 8.0  # within which a request that was told to end has ended; a worker that hangs is ended after 5
ENDING = (RequestState.CANCELLING, RequestState.CUT, RequestState.ORPHANED)


class Invariants:
    """Looks at a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._ending: dict[int, float] = {}  # rid → since when it is told to end

    # ------------------------------------------------------------ at every tick

    def tick(self) -> None:
        self.tickets()
        self.sessions()
        self.quotas()
        self.peers()
        self.workers()

    def tickets(self) -> None:
        broker, now_s = self.world.broker, self.world.loop.awake_s
        queued = {ticket.rid for ticket in broker.work.queues}
        held = {session.held for session in broker.catalog} - {None}
        must(len(queued) == sum(1 for _ in broker.work.queues), "a request is queued twice")
        others = 0
        still: dict[int, float] = {}
        for ticket in broker.tickets:
            must(ticket.state is not RequestState.DONE, f"a {ticket.op} is done and open")
            must(not isinstance(ticket.request, AT_ONCE), f"a {ticket.op} was not answered at once")
            others += ticket.id is not None
            if ticket.state is RequestState.HELD:
                must((ticket.rid in queued) != (ticket.rid in held), f"a held {ticket.op} waits for nothing")
            else:
                must(ticket.rid not in queued and ticket.rid not in held, f"a {ticket.op} is sent and held")
            info = broker.view.request(ticket)
            if ticket.state is RequestState.HELD:
                must(info.waiting in HELD_FOR, f"a held {ticket.op} waits for {info.waiting}")
                must(
                    (info.waiting == "session") == (ticket.rid in held), f"a held {ticket.op} told otherwise"
                )
            must(info.waiting is None or info.waiting in HELD_FOR or info.waiting == "turn", "no such reason")
            if ticket.op != "watch" and ticket.state in WITH_ENGINE:
                engine = broker.supervisor.engine(ticket.model or "")
                must(ticket.generation == engine.generation, f"a {ticket.op} is with a worker that is gone")
                must(
                    engine.state in (EngineState.READY, EngineState.STOPPING),
                    f"a {ticket.op} is with an engine that is {engine.state.value}",
                )
            if ticket.state in ENDING and ticket.op != "watch":
                still[ticket.rid] = self._ending.get(ticket.rid, now_s)
                waited_s = now_s - still[ticket.rid]
                must(waited_s < END_S, f"a {ticket.op} has not ended in {waited_s:.1f} s")
        self._ending = still
        must(others <= desk.REQUESTS_QUEUED_MAX, "more requests are open than may be")
        own = len(broker.tickets) - others
        must(own <= OWN_MAX * len(broker.catalog), "the broker's own requests pile up")

    def sessions(self) -> None:
        broker = self.world.broker
        tickets, names = broker.tickets, broker.catalog._names
        for session in broker.catalog:
            state, what = session.state, f"a session that is {session.state.value}"
            running, held = tickets.get(session.running), tickets.get(session.held)
            must((session.running is None) == (running is None), f"{what} is run by a request that ended")
            must((session.held is None) == (held is None), f"{what} holds a request that ended")
            op = running.op if running else None
            told = "close" if op == "unpublish" else op  # of a trunk, which nobody is told of
            must(session.running_op == told, f"{what} tells of another request")
            if state is SessionState.IDLE:
                must(running is None and held is None, f"{what} has a request")
            elif state is not SessionState.OPENING:
                must(running is not None and running.session is session, f"{what} has no request")
            if state in (SessionState.REPLACING, SessionState.ENDING):
                wanted = "sync" if state is SessionState.REPLACING else "close"
                must(held is not None and held.op == wanted, f"{what} holds no {wanted}")
            else:
                must(held is None, f"{what} holds a request")
            must(state is not SessionState.CLOSED, "a closed session is in the catalog")
            if session.name is not None:
                must(names[session.owner, session.name] is session, f"{what} lost its name")
        must(len(broker.catalog) <= self.world.nature.sessions_max, "more sessions than may be")
        must(len(names) == sum(s.name is not None for s in broker.catalog), "a name of nobody")

    def quotas(self) -> None:
        """What is counted as it comes and goes is what there is."""
        broker, there = self.world.broker, Counter[tuple[str, str]]()
        shared: dict[tuple[str, int, int], int] = {}
        for session in broker.catalog:
            account = account_of(session.owner)
            there[account, "sessions"] += 1
            there[account, "bytes"] += session.own_bytes
            shared |= {(account, session.generation, part.number): part.bytes for part in session.parts}
        for (account, _, _), nbytes in shared.items():
            there[account, "bytes"] += nbytes
        for ticket in broker.tickets:
            if ticket.account:
                there[account_of(ticket.account), "requests"] += 1
        for (account, what), count in there.items():
            held = broker.catalog.quotas.held(account, what)
            must(held == count, f"an account has {count} {what}, and {held} are counted")
        accounts = {account for account, _ in there}
        must(len(broker.catalog.quotas) <= len(accounts), "an account of nobody is kept")

    def peers(self) -> None:
        for peer in self.world.broker.peers:
            # It isn't heard any more from FINALS_MAX on; what it has open by then still ends.
            most = peers.FINALS_MAX + desk.REQUESTS_PER_CLIENT_MAX
            must(len(peer.outbox) <= most, f"an outbox of {len(peer.outbox)} replies")
            if len(peer.outbox) > peers.OUTBOX_MESSAGES_MAX:
                parts = sum(not decode_map(frames[-1])["final"] for frames in peer.outbox)
                must(parts <= peers.OUTBOX_MESSAGES_MAX, f"an outbox of {parts} replies that aren't final")
            there = sum(len(frame) for frames in peer.outbox for frame in frames)
            must(peer.outbox_bytes == there, "an outbox's bytes are miscounted")
            must(not (peer.gone and peer.outbox), "replies wait for a client that is gone")
            most = desk.REQUESTS_PER_CLIENT_MAX
            must(len(peer.open) <= most, f"{len(peer.open)} requests of one client are open")
            for number, ticket in peer.open.items():
                must(ticket.id == number and ticket.peer is peer, "a request is another client's")

    def workers(self) -> None:
        for process in self.world.processes:
            if process.serving:
                assert process.engine is not None
                pool = process.engine.pool
                problem = pool.problem(process.engine.views())
                must(problem is None, f"KV: {problem}")
                must(pool.used_bytes <= pool.budget_bytes, "more KV than the budget")

    # ------------------------------------------------------------ where only input kills workers

    def blamed(self, ticket: Ticket, body: Body) -> None:
        """Nobody's request is lost, so no session put in quarantine, but those that kill workers."""
        session = ticket.session
        if session is None or not isinstance(body, ErrorBody) or body.code != "engine_lost":
            return
        if ticket.state is not RequestState.SENT or ticket.id is None or "retry_after_s" in body.details:
            return  # it was to end, or never began
        asked = getattr(ticket.request, "tokens", None) or ()
        most = ticket.request.max_tokens if isinstance(ticket.request, Decode) else 0
        drawn = continuation(session.tokens, most)  # it may draw the poison itself, and tell nobody
        guilty = any(POISON in tokens for tokens in (session.tokens, asked, drawn))
        must(guilty or body.details.get("quarantined"), f"a {ticket.op} was lost that killed nothing")
        deaths = self.world.broker.supervisor.engine(session.model).deaths
        must(ticket.resumes <= deaths, "a request went on more often than workers died")

    # ------------------------------------------------------------ at the end

    def quiet(self) -> None:
        """Nobody asks for anything any more, and everybody has read."""
        self.tick()
        broker = self.world.broker
        must(not len(broker.tickets), f"still open: {[ticket.op for ticket in broker.tickets]}")
        must(not len(broker.watchers), "a watch goes on")
        must(not broker.peers.waiting, "replies were never sent")
        for peer in broker.peers:
            line = self.world.network.lines[peer.routing_id]
            must(
                line.descriptor == peer.descriptor and not line.unreachable, "a client that is gone is known"
            )
        for client in self.world.clients:
            must(client.gone or not client.waits, f"{client.name!r} waits for replies")
        for session in broker.catalog:
            must(session.state is SessionState.IDLE, f"a session is {session.state.value}")
            must(
                session.name or session.published_as or session.id in self.world.told,
                f"session {session.id} was told to nobody",
            )
        self.agree()

    def agree(self) -> None:
        """The broker's tokens are the workers'."""
        broker = self.world.broker
        known = {session.id: session for session in broker.catalog}
        for process in self.world.processes:
            if not process.serving:
                continue
            assert process.engine is not None
            must(not process.engine.requests, "an engine still works")
            engine = broker.supervisor.engine(process.model)
            for session_id, held in process.engine.sessions.items():
                must(session_id in known, "an engine keeps a session that nobody can close")
                session = known[session_id]
                must(session.generation == engine.generation, "a session is held by an engine it isn't in")
                must(session.tokens == held.tokens, f"{session.length} tokens here, {held.length} there")
        serving = {process.model: process.engine for process in self.world.processes if process.serving}
        for session in known.values():
            engine = broker.supervisor.engine(session.model)
            worker = serving.get(session.model)  # one that has just died is missed in a moment
            if worker is not None and engine.ready and session.generation == engine.generation:
                must(session.id in worker.sessions, "an engine lost a session")
        if all(broker.supervisor.engine(model).ready for model in serving):
            trunks = sum(len(worker.pool.trunks) for worker in serving.values())
            must(broker.catalog.parts.trunks == trunks, f"the broker counts other trunks than {trunks}")

    def empty(self) -> None:
        """Every session was closed: nothing may be left anywhere."""
        must(not len(self.world.broker.catalog), "sessions are left")
        for process in self.world.processes:
            if process.serving:
                assert process.engine is not None
                must(not process.engine.sessions, "an engine still holds sessions")
                must(not process.engine.pool.used_bytes, "KV leaked")
                must(not process.engine.pool.trunks, "a trunk leaked")

    def stopped(self, readers: dict[Client, int]) -> None:
        """The daemon has left. `readers`: clients that read when it was told to, and their pauses by then."""
        must(not len(self.world.broker.tickets), f"unanswered: {[t.op for t in self.world.broker.tickets]}")
        must(not any(process.alive for process in self.world.processes), "a worker outlived the daemon")
        for client, pauses in readers.items():
            if client.line.pauses == pauses and not client.gone:
                left = [n for n in client.asked if n in self.world.received[client.line.descriptor]]
                must(not left, f"{client.name!r} was left without an answer to {left}")
