"""The broker's parts without sockets or processes: random clients, a random engine, one seed for each run.

Everything that the loop would do is a step that the seed chooses: a client asks, vanishes, stops reading
or reads again; the engine takes a command, works, dies, comes back; time passes. In the end all goes quiet,
and what must hold is looked at: one final reply each, no gap, nothing left open, and the catalog's tokens
are the engine's.
"""

from __future__ import annotations

import io
import os
import random
from collections import deque
from itertools import count
from pathlib import Path
from typing import Any

import msgpack
import pytest
from tests.daemon.scripted_worker import Worker

from stateroom.client.errors import EngineLost
from stateroom.client.protocol import ERROR_CODES, ModelInfo
from stateroom.daemon.catalog import Catalog
from stateroom.daemon.clock import ManualClock
from stateroom.daemon.config import ModelSpec
from stateroom.daemon.desk import Desk
from stateroom.daemon.lifecycle import ENGINES, EngineEvent, EngineState, SessionState, after
from stateroom.daemon.link import Answer, decode_from_worker, encode_from_worker, encode_to_worker
from stateroom.daemon.link import decode_to_worker as decoded
from stateroom.daemon.logs import make_log
from stateroom.daemon.metrics import Metrics
from stateroom.daemon.peers import Delivery, Peer, Peers
from stateroom.daemon.shelf import Shelf
from stateroom.daemon.tickets import Tickets
from stateroom.daemon.watchers import Watchers
from stateroom.daemon.work import Work

SEEDS = int(os.environ.get("STATEROOM_SIMULATIONS", "40"))
STEPS = 600
CLIENTS = 4


class SimWorker(Worker):
    """The scripted worker with a list for a socket."""

    def __init__(self) -> None:
        self.script = {"step_s": "0", "chunk_s": "0"}
        self.sessions, self.jobs, self.cancelled = {}, deque(), set()
        self.adopted, self.stopping = 0, False
        self.said: deque[bytes] = deque()

    def send(self, message: object) -> None:
        self.said.append(encode_from_worker(message))  # type: ignore[arg-type]


class SimEngine:
    """Stands where `supervisor.Engine` and `Supervisor` do."""

    id = "toy"
    pid = None

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.state = EngineState.STOPPED
        self.generation = -1
        self.deaths = 0
        self.listener: Work
        self.asked: deque[bytes] = deque()
        self.worker = SimWorker()
        self.far = False  # its next start is too far away to wait for

    ready = property(lambda self: self.state is EngineState.READY)
    stopping = property(lambda self: self.state in (EngineState.STOPPED, EngineState.STOPPING))
    info = property(lambda self: ModelInfo(id="toy", loaded=self.ready))
    engines = property(lambda self: [self])

    def advance(self, event: EngineEvent) -> None:
        self.state = after(ENGINES, self.state, event)

    def health(self) -> dict[str, Any]:
        return {}

    def send(self, message: Any) -> None:
        assert self.state in (EngineState.READY, EngineState.STOPPING)
        self.asked.append(encode_to_worker(message))

    def begin(self) -> None:
        self.advance(EngineEvent.START)
        self.generation += 1
        self.worker, self.far = SimWorker(), False
        self.asked.clear()

    def engine(self, model: str) -> SimEngine:
        return self

    def engine_for(self, spec: ModelSpec) -> SimEngine:
        return self

    def known(self, model: str) -> SimEngine:
        return self

    def ensure(self, engine: SimEngine) -> None:
        if self.state is EngineState.WAITING and self.far:
            raise EngineLost("it keeps stopping", retry_after_s=9.0)
        if self.state is EngineState.STOPPED:
            self.begin()

    def unload(self, engine: SimEngine) -> None:
        self.advance(EngineEvent.STOP)

    def die(self) -> None:
        while self.worker.said and self.draw.random() < 0.5:
            self.deliver()
        self.worker.said.clear()
        self.far = self.draw.random() < 0.3
        was_asked = self.stopping
        self.advance(EngineEvent.DIED)
        self.deaths += not was_asked
        self.listener.on_down(self, self.generation, "the seed said so")  # type: ignore[arg-type]

    def deliver(self) -> None:
        message = decode_from_worker(self.worker.said.popleft())
        assert isinstance(message, Answer)
        self.listener.on_answer(self, message)  # type: ignore[arg-type]

    def step(self) -> bool:
        """Does one thing; False if there was none to do."""
        if self.state is EngineState.STARTING:
            self.advance(EngineEvent.READY)
            self.listener.on_ready(self)  # type: ignore[arg-type]
        elif self.state is EngineState.WAITING:
            self.begin()
        elif self.state is EngineState.STOPPING:
            self.die()
        elif self.worker.said and self.draw.random() < 0.6:
            self.deliver()
        elif self.asked and self.draw.random() < 0.6:
            self.worker.take(decoded(self.asked.popleft()))
        elif self.worker.jobs:
            self.worker.jobs.rotate(-self.draw.randrange(len(self.worker.jobs)))
            rid, job = self.worker.jobs.popleft()
            if next(job, StopIteration) is not StopIteration:
                self.worker.jobs.append((rid, job))
        else:
            return bool(self.worker.said or self.asked)
        return True


class SimPeers(Peers):
    """Keeps what was said to somebody, whether or not it got there."""

    said: set[str]

    def send(self, peer: Peer, frames: list[bytes], final: bool) -> bool:
        sent = super().send(peer, frames, final)
        reply = msgpack.unpackb(frames[-1])
        made = [reply["session"]] if "caps" in reply else reply.get("sessions", [])
        if not peer.gone:
            self.said |= {session for session in made if isinstance(session, str)}
        return sent


class Client:
    def __init__(self, name: bytes, descriptor: int) -> None:
        self.name, self.descriptor = name, descriptor
        self.reads = True
        self.sent: dict[int, str] = {}
        self.replies: dict[int, list[dict[str, Any]]] = {}
        self.sessions: list[str] = ["own-name"]


class Simulation:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.clock = ManualClock()
        self.ids = count(1)
        self.clients: dict[bytes, Client] = {}
        self.engine: Any = SimEngine(self.draw)
        self.metrics = Metrics()
        self.catalog = Catalog(self.clock)
        self.peers = SimPeers(self.transmit, self.vanished, lambda: None)
        self.peers.said = set()
        self.log = io.StringIO()
        log = make_log("json", "error", self.log)
        self.tickets = Tickets(self.peers, self.metrics, self.clock, log, lambda peer: self.work.cut(peer))
        self.watchers = Watchers(self.tickets, self.clock, lambda: self.desk.stats(), lambda _: None)
        self.work = Work(self.tickets, self.catalog, self.engine, self.watchers, self.metrics, log)
        self.engine.listener = self.work
        shelf = Shelf((ModelSpec("toy", "toy"),), Path("/nowhere"))
        self.desk = Desk(
            self.peers, self.tickets, self.catalog, self.engine, self.work, self.watchers, shelf,
            self.metrics, log,
        )  # fmt: skip

    def vanished(self, peer: Peer) -> None:
        self.work.vanish(peer)

    def transmit(self, routing_id: bytes, frames: list[bytes]) -> Delivery:
        client = self.clients.get(routing_id)
        if client is None:
            return Delivery.GONE
        if not client.reads:
            return Delivery.FULL
        reply = msgpack.unpackb(frames[-1])
        mine = client.replies.setdefault(reply["id"], [])
        assert reply["seq"] == len(mine)
        assert not (mine and mine[-1]["final"]), "a reply after the final one"
        mine.append(reply)
        made = [reply["session"]] if "caps" in reply else reply.get("sessions", [])
        client.sessions += [session for session in made if isinstance(session, str)]
        return Delivery.SENT

    def ask(self, client: Client, op: str, **arguments: Any) -> None:
        request_id = next(self.ids)
        client.sent[request_id] = op
        frame = msgpack.packb({"v": 1, "id": request_id, "op": op, **arguments})
        self.desk.receive(client.name, client.descriptor, [frame])

    def arrive(self) -> None:
        number = next(self.ids)
        client = Client(b"client %d" % number, number)
        self.clients[client.name] = client
        self.ask(client, "hello", app=self.draw.choice(["one", "two"]))

    def request(self, client: Client) -> None:
        draw = self.draw
        session = draw.choice(client.sessions[-6:])
        tokens = [draw.randrange(4) for _ in range(draw.choice([0, 1, 5, 200]))]
        op, arguments = draw.choice(
            [
                ("open", {"tokens": tokens}),
                ("open", {"name": "own-name", "ttl_s": 30.0}),
                ("decode", {"session": session, "max_tokens": draw.choice([1, 5, 500])}),
                ("decode", {"session": session, "max_tokens": 20, "stream": False}),
                ("prefill", {"session": session, "tokens": tokens, "progress": draw.random() < 0.5}),
                ("sync", {"session": session, "tokens": tokens}),
                ("sync", {"session": session, "tokens": tokens}),
                ("trim", {"session": session, "to": 0}),
                ("fork", {"session": session, "n": draw.randrange(1, 3)}),
                ("fork", {"session": session, "n": 1, "names": ["own-name"]}),
                ("tokens", {"session": session}),
                ("close", {"session": session}),
                ("info", {"session": session}),
                ("list", {}),
                ("stats", {}),
                ("watch", {}),
                ("cancel", {"session": session}),
                ("cancel", {"request": draw.choice([*client.sent, 10**9])}),
                ("load", {"model": "toy"}),
                ("unload", {"model": "toy"}),
                ("fly", {}),
            ]
        )
        self.ask(client, op, **arguments)

    def step(self) -> None:
        draw = self.draw
        chance = draw.random()
        client = draw.choice([*self.clients.values()])
        if chance < 0.30:
            self.request(client)
        elif chance < 0.93:
            for _ in range(draw.randrange(1, 6)):
                self.engine.step()
        elif chance < 0.94:
            del self.clients[client.name]
            if draw.random() < 0.5:  # else it is found out when something is sent
                self.peers.lost(client.descriptor)
                self.peers.bury()
            self.arrive()
        elif chance < 0.96:
            client.reads = not client.reads
            self.peers.flush()
        elif chance < 0.97 and self.engine.state in (EngineState.READY, EngineState.STARTING):
            self.engine.die()
        elif chance < 0.98:
            self.clock.advance(draw.choice([0.1, 20.0]))
            self.work.expire()
            self.watchers.tick()
        elif chance < 0.99:
            self.peers.flush()
        else:
            self.peers.bury()

    def quiet(self) -> None:
        """Everybody reads, watches end, decodes run out, and the engine has nothing left to do."""
        for client in self.clients.values():
            client.reads = True
        for peer in self.peers:
            if peer.routing_id not in self.clients:
                self.peers.lost(peer.descriptor)
        self.peers.bury()
        for _ in range(3):
            self.peers.flush()
            for client in list(self.clients.values()):
                for request_id in [number for number, op in client.sent.items() if op == "watch"]:
                    if not client.replies.get(request_id, [{"final": False}])[-1]["final"]:
                        self.ask(client, "cancel", request=request_id)
            for _ in range(200_000):
                if not self.engine.step() and not (self.engine.worker.said or self.engine.asked):
                    break
        self.peers.flush()
        self.peers.bury()


@pytest.fixture(autouse=True)
def _small_outboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stateroom.daemon.peers.OUTBOX_MESSAGES_MAX", 8)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_happens_each_request_ends_once_and_nothing_is_left(seed: int) -> None:
    simulation = Simulation(seed)
    for _ in range(CLIENTS):
        simulation.arrive()
    for _ in range(STEPS):
        simulation.step()
    simulation.quiet()

    for client in simulation.clients.values():
        for request_id, op in client.sent.items():
            replies = client.replies.get(request_id, [])
            assert replies, f"seed {seed}: no reply to {op} {request_id}"
            assert replies[-1]["final"], f"seed {seed}: no end of {op} {request_id}"
            if replies[-1]["kind"] == "error":
                error = replies[-1]["error"]
                assert error["code"] in ERROR_CODES
                assert error["code"] != "internal", f"seed {seed}: {simulation.log.getvalue()}"
    assert [ticket.op for ticket in simulation.tickets] == []
    assert len(simulation.watchers) == 0
    assert not simulation.peers.waiting
    assert all(not queue for queue in simulation.work._waiting.values())
    names = set()
    for session in simulation.catalog:
        assert session.state is SessionState.IDLE
        assert (session.running, session.held, session.running_op) == (None, None, None)
        names.add((session.owner, session.name))
        if session.generation == simulation.engine.generation and simulation.engine.ready:
            assert session.tokens.tolist() == simulation.engine.worker.sessions[session.id]
    assert len([name for name in names if name[1]]) == len(
        [1 for session in simulation.catalog if session.name]
    )
    known = set(simulation.engine.worker.sessions) if simulation.engine.ready else set()
    unnamed = {session.id for session in simulation.catalog if session.name is None}
    assert unnamed <= simulation.peers.said, "a session that nobody can ever close"
    assert known <= {session.id for session in simulation.catalog}, "the engine keeps what nobody can close"


def test_the_simulation_reaches_what_it_is_for() -> None:
    """Else it would prove little: each outcome worth fearing happens in some run."""
    seen: set[str] = set()
    for seed in range(min(SEEDS, 30)):
        simulation = Simulation(seed)
        for _ in range(CLIENTS):
            simulation.arrive()
        for _ in range(STEPS):
            simulation.step()
        seen |= {name.rpartition(".")[2] for name in simulation.metrics.counters()}
        seen |= {f"deaths {simulation.engine.deaths > 0}"}
        names = simulation.metrics.counters()
        seen |= {name for name in names if name.startswith("requests.tokens.")}
        # An own close that no `ttl_s` asked for is that of an orphan.
        seen |= {f"orphans {names.get('own.close.ok', 0) > names['sessions_expired']}"}
    feared = {"ok", "busy", "engine_lost", "not_found", "exists", "gone", "slow_consumer", "deaths True"}
    feared |= {f"requests.tokens.{end}" for end in ("ok", "engine_lost", "not_found", "gone")}
    feared |= {"orphans True"}
    assert feared <= seen
