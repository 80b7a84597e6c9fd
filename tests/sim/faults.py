"""What goes wrong, and when: each fault that the seed chose happens now and then."""

from __future__ import annotations

import random
import signal
from typing import TYPE_CHECKING

from tests.sim.clients import Client
from tests.sim.worker import Process

if TYPE_CHECKING:
    from tests.sim.world import World


class Faults:
    def __init__(self, world: World) -> None:
        self.world = world
        self.draw = random.Random(f"{world.seed}/faults")
        self.happened: dict[str, int] = {}
        self._over = False
        for fault in world.nature.faults:
            self._later(fault)

    def end(self) -> None:
        """No more of them: what goes on is left to recover."""
        self._over = True

    def _later(self, fault: str) -> None:
        pause_s = self.draw.expovariate(1 / self.world.nature.fault_every_s)
        self.world.loop.after(pause_s, self._happen, fault)

    def _happen(self, fault: str) -> None:
        if self._over:
            return
        self.happened[fault] = self.happened.get(fault, 0) + 1
        getattr(self, f"_{fault}")()
        self._later(fault)

    def _process(self) -> Process | None:
        alive = [process for process in self.world.processes if process.alive]
        return self.draw.choice(alive) if alive else None

    def _client(self) -> Client | None:
        present = [c for c in self.world.clients if isinstance(c, Client) and not c.gone]
        return self.draw.choice(present) if present else None

    def _worker_dies(self) -> None:
        process = self._process()
        if process is not None:
            process.exit(-int(self.draw.choice([signal.SIGABRT, signal.SIGKILL])))

    def _worker_hangs(self) -> None:
        process = self._process()
        if process is not None:
            process.hung = True

    def _worker_babbles(self) -> None:
        process = self._process()
        if process is not None:
            process.babble()

    def _worker_stalls(self) -> None:
        process = self._process()
        if process is not None:
            process.stall_ms = self.draw.choice([300.0, 3000.0])

    def _client_vanishes(self) -> None:
        world, client = self.world, self._client()
        if client is None:
            return
        client.vanish()
        owner, habit, think_s, most = self.draw.choice(world.nature.clients)
        world.loop.after(self.draw.random(), world.arrive, owner, habit, think_s, most)

    def _client_returns(self) -> None:
        """A client that chose its routing id is killed, and connects anew."""
        world, client = self.world, self._client()
        if client is not None:
            client.line.on_unreachable = lambda: world.arrive(client.app, "all", 0.1, 3, client)
            client.vanish()

    def _client_stops_reading(self) -> None:
        client = self._client()
        if client is not None:
            client.line.pause()
            self.world.loop.after(self.draw.choice([0.1, 3.0, 10.0]), client.read_on)

    def _time_jumps(self) -> None:
        """The machine slept, or the broker's process did."""
        self.world.loop.jump(self.draw.choice([0.5, 3.0, 30.0]))
