"""A simulated worker process: it loads, runs its engine turn by turn, pulses, and ends one of many ways."""

from __future__ import annotations

import asyncio
import random
import signal
from dataclasses import dataclass

from tests.sim.engine import KINDS, Costs, Engine, Turn
from tests.sim.language import CONTEXT, VOCAB
from tests.sim.loop import VirtualLoop
from tests.sim.network import Link

from stateroom.client.protocol import ModelInfo
from stateroom.daemon.link import (
    Doing,
    Failed,
    FromWorker,
    Pulse,
    Ready,
    Stop,
    decode_to_worker,
    encode_from_worker,
)

PULSE_S = 1.0
COMMANDS_PER_TURN = 256
STOP_TURNS_S = 3.0
BABBLE = (b"\x81\xa4link\xa5hello", b"\xc1", b"", b"\x83\xa3rid\x01\xa4kind\xa6result\xa4body\x80")


@dataclass(frozen=True)
class Fate:
    """How one process will do: how long it loads, and whether it comes to serve."""

    spawns: bool
    connect_s: float
    load_s: float
    fails: str | None  # "soon" or "for good" instead of `Ready`; "dumb": it leaves without a word
    stubborn: bool  # ignores SIGTERM
    lingers: bool  # stays after it failed, or was told to stop


class Process:
    """What `asyncio.create_subprocess_exec` gives."""

    def __init__(
        self,
        loop: VirtualLoop,
        draw: random.Random,
        pid: int,
        model: str,
        link: Link,
        fate: Fate,
        costs: Costs,
        poisonable: bool = False,
    ) -> None:
        self.loop, self.draw, self.pid, self.model, self.link, self.fate = loop, draw, pid, model, link, fate
        self.costs, self.poisonable = costs, poisonable
        self.returncode: int | None = None
        self.stderr = asyncio.StreamReader(loop=loop)
        self.engine: Engine | None = None
        self.hung = False
        self.stopping = False
        self.stall_ms = 0.0  # that the next turn takes longer
        self._exited: asyncio.Future[int] = loop.create_future()
        self._working = False
        self._stop_by_s = 0.0
        loop.after(fate.connect_s, self._connect)
        loop.after(fate.load_s, self._loaded)

    # ------------------------------------------------------------ as the supervisor sees it

    async def wait(self) -> int:
        return await self._exited

    def send_signal(self, how: signal.Signals) -> None:
        if how is signal.SIGUSR1:  # it says where it is, and goes on
            if self.alive and not self.hung:
                self.stderr.feed_data(b"Thread 1\n")
            return
        if how is signal.SIGKILL or not (self.fate.stubborn or self.hung):
            self.loop.after(0.001, self.exit, -int(how))

    # ------------------------------------------------------------ its life

    @property
    def alive(self) -> bool:
        return self.returncode is None

    @property
    def serving(self) -> bool:
        return self.alive and self.engine is not None

    def exit(self, code: int) -> None:
        if not self.alive:
            return
        self.returncode = code
        if code:
            self.link.cut()
        self.stderr.feed_data(b"the last line\n")
        self.stderr.feed_eof()
        self._exited.set_result(code)

    def say(self, message: FromWorker) -> None:
        if self.alive:
            self.link.tell(encode_from_worker(message))

    def babble(self) -> None:
        if self.serving:
            self.link.tell(self.draw.choice(BABBLE))

    def _connect(self) -> None:
        self.link.connected = self.alive

    def _loaded(self) -> None:
        if not self.alive or self.hung:
            return
        if self.fate.fails is not None:
            if self.fate.fails != "dumb":
                self.say(Failed("the seed says so", permanent=self.fate.fails == "for good"))
            if not self.fate.lingers:
                self.exit(1)
            return
        self.engine = Engine(self.say, self.draw, self.costs)
        info = ModelInfo(id=self.model, loaded=True, context=CONTEXT, vocab=VOCAB, kinds=KINDS)
        self.say(Ready(info, {"device": "none"}))
        self.link.wake = self._woken
        self._pulse()
        self._woken()

    def _pulse(self) -> None:
        if self.alive and not self.hung:
            if not self._working:  # else it comes with the turn's end
                requests = [] if self.engine is None else self.engine.requests
                self.say(Pulse({}, [Doing(rid, "turn", 1, 2) for rid in requests]))
            self.loop.after(PULSE_S, self._pulse)

    def _woken(self) -> None:
        if not self._working and self.serving and not self.hung:
            self._working = True
            self._turn()

    def _turn(self) -> None:
        assert self.engine is not None
        if not self.alive or self.hung:
            return
        if not self.stopping:
            for frame in self.link.take(COMMANDS_PER_TURN):
                message = decode_to_worker(frame)
                if isinstance(message, Stop):
                    self.stopping, self._stop_by_s = True, self.loop.time() + STOP_TURNS_S
                    self.engine.cancel_all()
                    break
                self.engine.take(message)
        turn = self.engine.begin()
        if turn is not None and not (self.stopping and self.loop.time() >= self._stop_by_s):
            if self.poisonable and self.engine.poisoned(turn):
                self.exit(-int(signal.SIGKILL))
                return
            turn.ms += self.stall_ms
            self.stall_ms = 0.0
            self.loop.after(turn.ms / 1000, self._landed, turn)
        elif self.stopping and not self.fate.lingers:
            self.exit(0)
        else:
            self._working = False

    def _landed(self, turn: Turn) -> None:
        if self.alive and not self.hung:
            assert self.engine is not None
            self.engine.land(turn)
            self._turn()
