"""All of Stateroom in one process and no time: the real broker, supervisor and clients' connections, over a
simulated network, simulated workers and a clock of its own. One seed decides everything: same seed, same run.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import PosixPath
from typing import Any
from unittest.mock import patch

import msgpack
from tests.sim.clients import Client, Hungry
from tests.sim.faults import Faults
from tests.sim.invariants import Invariants
from tests.sim.loop import VirtualLoop
from tests.sim.must import must
from tests.sim.nature import Nature, nature_of
from tests.sim.network import Line, Link, Network
from tests.sim.rude import Rude
from tests.sim.worker import Fate, Process

from stateroom.client import protocol as p
from stateroom.daemon import broker as broker_module
from stateroom.daemon import catalog as catalog_module
from stateroom.daemon import desk, peers, supervisor
from stateroom.daemon.blas import Blas
from stateroom.daemon.broker import Broker
from stateroom.daemon.config import Config, ModelSpec

TICK_S = 0.1
QUIET_S = 300.0  # after the last request, until everything has ended
LINK_QUEUE_MAX = 4096
STOP_S = 5.0  # within which the daemon has left
BUGS = {"internal error", "supervision failed", "answer to no request"}


class Nowhere(PosixPath):
    """A runtime folder that holds no files."""

    def chmod(self, mode: int, *, follow_symlinks: bool = True) -> None:
        pass

    def unlink(self, missing_ok: bool = False) -> None:
        pass


class Log:
    """Takes the daemon's log; an entry that tells of a bug ends the run."""

    def __init__(self, world: World) -> None:
        self._world = world

    def info(self, event: str, **details: Any) -> None:
        babbles = "worker_babbles" in self._world.nature.faults
        if event in BUGS or (event == "engine link broken" and not babbles):
            error = details.get("exc_info")
            what = AssertionError(f"the daemon logged {event!r}: {details}")
            what.__cause__ = error if isinstance(error, BaseException) else None
            self._world.loop.fail(what)

    warning = error = exception = info


class World:
    """One run. `nature`: instead of that which the seed gives."""

    def __init__(self, seed: int, nature: Nature | None = None) -> None:
        self.seed = seed
        self.nature = nature or nature_of(seed)
        self.draw = random.Random(f"{seed}/world")
        self.loop = VirtualLoop()
        self.network = Network(self.loop, random.Random(f"{seed}/network"), self.nature.queue_max)
        self.network.on_sent = self._sent
        self.clients: list[Client | Rude] = []
        self.processes: list[Process] = []
        self.common: dict[str, list[str]] = defaultdict(list)  # sessions that all clients of an owner use
        self.trunks: dict[
            str, list[int] | None
        ] = {}  # published ones and what they hold, where that is known
        self.told: set[str] = set()  # sessions whose ids were sent to somebody
        self.outcomes: set[str] = set()
        self.received: dict[int, set[int]] = defaultdict(set)  # what reached the daemon, by connection
        self.trace = hashlib.blake2b(digest_size=16)
        self.broker: Broker
        self._links: dict[str, Link] = {}
        self._replies: dict[tuple[bytes, int], int] = {}  # by client and request: the next seq
        self._numbers = 0
        self.closing = False  # nobody arrives any more

    # ------------------------------------------------------------ the run

    def run(self) -> str:
        """Runs to the end, raises what went wrong, and gives the digest of all that was said."""
        with self._patched():
            try:
                self.loop.run_until_complete(self._run())
                self.loop.run_until_complete(asyncio.sleep(0))  # raises what came last
            finally:
                self._close()
        return self.trace.hexdigest()

    async def _run(self) -> None:
        nature, loop = self.nature, self.loop
        specs = tuple(ModelSpec(name, name) for name in nature.models)
        config = Config(
            endpoint="ipc://public",
            runtime_dir=Nowhere("/nowhere"),
            models_dir=Nowhere("/nowhere/models"),
            models=specs,
            worker_command=("worker",),
            patience=nature.patience,
        )
        self.broker = Broker(config, Log(self), Blas(None), clock=loop.time)
        self.broker.catalog._sessions_max = nature.sessions_max
        self._overhear()
        self.broker.start()
        loop.set_exception_handler(lambda _, context: loop.fail(context.get("exception") or Failure(context)))
        self.invariants = Invariants(self)
        for owner, habit, think_s, most in nature.clients:
            loop.after(self.draw.random() * 0.5, self.arrive, owner, habit, think_s, most)
        for owner, sessions, tokens in nature.hungry:
            self._numbers += 1
            self.clients.append(Hungry(self, self._numbers, owner, sessions, tokens))
        for number in range(nature.rude):
            self.clients.append(Rude(self, number))
        self.faults = Faults(self)
        self._tick()
        await asyncio.sleep(nature.run_s)
        if nature.stops:
            await self._stop()
        else:
            await self._settle()

    def arrive(self, owner: str, habit: str, think_s: float, most: int, before: Client | None = None) -> None:
        if not self.closing:
            self._numbers += 1
            self.clients.append(Client(self, self._numbers, owner, habit, think_s, most, before))

    def _tick(self) -> None:
        self.invariants.tick()
        self.loop.after(TICK_S, self._tick)

    async def _settle(self) -> None:
        """All goes quiet; then whoever is left reads its sessions, and everything is closed."""
        self.faults.end()
        self.closing = True
        for client in self.clients:
            if not client.gone:
                client.rest()
        await self._until(self._is_quiet, "it never went quiet")
        self.invariants.quiet()
        for client in self.clients:
            if isinstance(client, Client) and not client.gone:
                for handle in client.ledger.handles:
                    client.ask(p.ReadTokens(session=handle.session), handle)
        await self._until(self._is_quiet, "reads were never answered")
        self.invariants.quiet()
        for owner in sorted({session.owner for session in self.broker.catalog}):
            self._numbers += 1
            caretaker = Client(self, self._numbers, owner, "crowd", 1.0, 0)
            self.clients.append(caretaker)
            caretaker.rest()
            for session in self.broker.catalog:
                if session.owner == owner:
                    request: p.Request = p.Close(session=session.id)
                    if session.published_as is not None:
                        request = p.Unpublish(name=session.published_as)
                    caretaker.ask(request, common=True)
                    await self._until(self._is_quiet, "a close was never answered")
        self.invariants.empty()
        await self._stop()

    async def _stop(self) -> None:
        began_s, self.closing = self.loop.awake_s, True
        # Whose replies wait, or may have to since hardly any pass at once, may not hear the last of them.
        behind = {peer.routing_id for peer in self.broker.peers if peer.outbox}
        room = self.nature.queue_max >= 8
        readers = {
            client: client.line.pauses
            for client in self.clients
            if isinstance(client, Client) and client.line.reads and client.name not in behind and room
        }
        await self.broker.stop()
        took_s = self.loop.awake_s - began_s
        must(took_s <= STOP_S, f"the daemon took {took_s:.1f} s to leave")
        await asyncio.sleep(1.0)  # what was sent arrives
        self.invariants.stopped(readers)

    def _is_quiet(self) -> bool:
        if len(self.broker.tickets) or self.broker.peers.waiting or self.network.busy:
            return False
        return not any(client.waits for client in self.clients if not client.gone)

    async def _until(self, done: Any, what: str) -> None:
        until_s = self.loop.time() + QUIET_S
        while not done():
            left = [ticket.op for ticket in self.broker.tickets]
            must(self.loop.time() < until_s, f"{what}; open: {left}")
            await asyncio.sleep(0.05)

    def _close(self) -> None:
        with contextlib.suppress(Exception):
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.first = None
            self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    # ------------------------------------------------------------ what is real no more

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        ids = random.Random(f"{self.seed}/ids")
        nature = self.nature
        with contextlib.ExitStack() as stack:
            for module, name, value in (
                (broker_module, "PublicSocket", self.network.bound_to),
                (broker_module, "is_local", lambda descriptor: True),
                (broker_module, "usage", dict),  # of the process that runs the tests
                (supervisor, "LinkSocket", self._link),
                (asyncio, "create_subprocess_exec", self._spawn),
                (catalog_module.secrets, "token_urlsafe", lambda size: f"{ids.getrandbits(64):016x}"),
                (peers, "OUTBOX_MESSAGES_MAX", nature.outbox_max),
                (peers, "FINALS_MAX", nature.outbox_max + 2 * nature.requests_per_client_max),
                (desk, "REQUESTS_PER_CLIENT_MAX", nature.requests_per_client_max),
                (desk, "REQUESTS_QUEUED_MAX", nature.requests_max),
            ):
                stack.enter_context(patch.object(module, name, value))
            yield

    def _link(self, context: Any, endpoint: str, on_frame: Any) -> Link:
        link = Link(self.loop, self.network.draw, LINK_QUEUE_MAX, on_frame)
        self._links[endpoint] = link
        return link

    async def _spawn(self, *command: str, **options: Any) -> Process:
        given = dict(zip(command[1::2], command[2::2], strict=True))
        fate = self._fate()
        if not fate.spawns:
            raise OSError("the seed says so")
        process = Process(
            self.loop,
            random.Random(f"{self.seed}/worker {len(self.processes)}"),
            1000 + len(self.processes),
            given["--model-id"],
            self._links[given["--endpoint"]],
            fate,
            self.nature.costs,
            self.nature.poison,
        )
        self.processes = [old for old in self.processes if old.alive] + [process]
        return process

    def _fate(self) -> Fate:
        draw = self.draw
        bad = draw.random() < self.nature.bad_start
        how = draw.choice(["soon", "soon", "dumb", "for good", "late", "no process"]) if bad else "well"
        return Fate(
            spawns=how != "no process",
            connect_s=0.01,
            load_s=60.0 if how == "late" else draw.choice([0.02, 0.2, 1.0]),
            fails=how if how in ("soon", "dumb", "for good") else None,
            stubborn=draw.random() < 0.2,
            lingers=draw.random() < 0.2,
        )

    # ------------------------------------------------------------ what is said

    def _overhear(self) -> None:
        """Notes what clients were told and what reached the daemon, without changing it."""
        broker = self.broker
        send, receive = broker.peers.send, broker.desk.receive
        reply = broker.tickets.reply

        def replied(ticket: Any, body: Any) -> None:
            if self.nature.poison:
                self.invariants.blamed(ticket, body)
            reply(ticket, body)

        broker.tickets.reply = replied  # type: ignore[method-assign]

        def sent(peer: Any, frames: list[bytes], final: bool) -> bool:
            done = send(peer, frames, final)
            if final and not peer.gone:
                reply = msgpack.unpackb(frames[-1])
                if "caps" in reply:
                    self.told.add(reply["session"])
                elif "copied_bytes" in reply:
                    self.told.update(reply.get("sessions", []))
            return done

        def received(routing_id: bytes, descriptor: int, frames: list[bytes], guest: Any = None) -> None:
            self.trace.update(b"%a > %r %r\n" % (self.loop.time(), routing_id, frames))
            with contextlib.suppress(Exception):
                self.received[descriptor].add(msgpack.unpackb(frames[-1])["id"])
            dropped = broker.metrics.counters()["requests_dropped"]
            receive(routing_id, descriptor, frames)
            if broker.metrics.counters()["requests_dropped"] > dropped:
                for client in self.clients:
                    if client.line.descriptor == descriptor:
                        self.loop.soon(client.unheard, frames)

        broker.peers.send, broker.desk.receive = sent, received  # type: ignore[method-assign]

    def _sent(self, line: Line, frame: bytes) -> None:
        """Every frame to a client, as the daemon's socket takes it: in order, and nothing after the last."""
        self.trace.update(b"%a < %r %r\n" % (self.loop.time(), line.routing_id, frame))
        reply = msgpack.unpackb(frame)
        if line.routing_id.startswith(b"\0rude") or reply["id"] is None:
            return
        key = (line.routing_id, reply["id"])
        due = self._replies.get(key, 0)
        must(due >= 0, f"request {key} has had its final reply")
        must(reply["seq"] == due, f"reply {reply['seq']} of {key} came where {due} was due")
        self._replies[key] = -1 if reply["final"] else due + 1


class Failure(AssertionError):
    """What asyncio reports without an exception."""
