"""Real workers that are killed or hang under clients that decode: every token is there, once, and right.

`STATEROOM_KILLS=200` says how often the worker is killed; a few times else. The broker runs in this process,
so that a worker starts again at once.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.daemon.rig import Rig
from tests.system.conftest import Tell

from stateroom.client import Room, connect
from stateroom.client import protocol as p
from stateroom.client.errors import EngineLost
from stateroom.daemon.broker import Broker
from stateroom.daemon.config import WORKER_COMMAND, ModelSpec, Patience
from stateroom.daemon.lifecycle import RequestState
from stateroom.daemon.recovery import DEATHS_MAX

pytestmark = pytest.mark.system

KILLS = int(os.environ.get("STATEROOM_KILLS", "5"))
# Of the moment when a worker is ready. Three deaths before it drew anything look like input that kills.
KILL_WITHIN_S = 4.0
KILL_S = 15.0  # for one worker to start and to be killed, on a busy machine
READY_S = 60.0  # on the busiest
VARIANTS = 2  # prompts of each client
MOST = 100  # tokens of a decode
ENDED_S = 60.0  # for what goes on when the last worker was killed
PATIENCE = Patience(restart_first_s=0.05, restart_most_s=0.1, silence_s=1.5, hang_s=2.5, stacks_s=0.3)
SEEDED = p.Sampling(temperature=1.0, top_p=0.95, seed=7)

OPTIONS: list[dict[str, Any]] = [
    {},
    {"sampling": SEEDED},
    {"sampling": p.Sampling(temperature=1.5, seed=8, repetition_penalty=1.3, repetition_window=20)},
    {"stop": ["qq", "\ufffd\ufffd\ufffd"], "sampling": p.Sampling(temperature=1.3, seed=9)},
    {"speculate": p.Speculate(kind="lookup")},
    {"logprobs": 1, "sampling": p.Sampling(temperature=0.8, top_k=40, seed=10)},
    {"stream": False, "sampling": p.Sampling(temperature=1.1, seed=11)},
    {"sync": True},
]


def prompt_of(number: int, variant: int) -> list[int]:
    draw = random.Random(100 * number + variant)
    return [draw.randrange(200) for _ in range(30 + 40 * variant)]


@dataclass
class Decoder:
    """One client: the same few decodes again and again, each compared with how it went undisturbed."""

    room: Room
    number: int
    wanted: dict[int, tuple[list[int], str]] = field(default_factory=dict)
    decodes: int = 0
    events: int = 0
    errors: list[BaseException] = field(default_factory=list)

    def run(self, over: threading.Event) -> None:
        try:
            while not over.is_set():
                variant = self.decodes % VARIANTS
                assert self.decode(variant) == self.wanted[variant]
                self.decodes += 1
        except BaseException as error:
            self.errors.append(error)

    def decode(self, variant: int) -> tuple[list[int], str]:
        """What one decode gives; what was streamed, and what the session holds then, must agree with it."""
        options, prompt = dict(OPTIONS[self.number]), prompt_of(self.number, variant)
        session = self.room.open(tokens=prompt[:20] if "sync" in options else prompt)
        if options.pop("sync", False):
            for length in range(20, len(prompt) + 1):
                assert session.sync(tokens=prompt[:length]).length == length
        stream = session.decode(MOST, ignore_eos=True, **options)
        parts = list(stream)
        result = stream.result
        if options.get("stream", True):
            assert [token for part in parts for token in part.tokens] == result.tokens
            assert "".join(part.text for part in parts) == result.text
            assert all((part.logprobs is not None) == ("logprobs" in options) for part in parts)
            self.events += len(stream.events)
        assert session.tokens().tokens == prompt + result.tokens
        session.close()
        return result.tokens, result.text


StartBroker = Callable[..., Rig]


@pytest.fixture
def start_broker(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartBroker]:
    started: list[Rig] = []

    def start(**options: Any) -> Rig:
        folder = tmp_path_factory.mktemp("r")
        model = ModelSpec("tiny", str(tiny_folder))
        options = {"patience": PATIENCE, "worker_command": WORKER_COMMAND, **options}
        started.append(Rig(folder, (model,), **options))
        return started[-1]

    yield start
    for rig in started:
        rig.close()


def worker_of(rig: Rig) -> int:
    """Waits for the worker, and gives its pid."""
    rig.until(lambda broker: broker.supervisor.engine("tiny").ready, READY_S)
    pid = rig.look(lambda broker: broker.supervisor.engine("tiny").pid)
    assert pid is not None
    return pid


def decoders_of(rig: Rig, rooms: list[Room]) -> list[Decoder]:
    """Clients that know what comes of their decodes."""
    worker_of(rig)
    rooms += [connect(endpoint=rig.endpoint, app=f"app {n}") for n in range(len(OPTIONS))]
    made = [Decoder(room, number) for number, room in enumerate(rooms)]
    for decoder in made:
        decoder.wanted = {variant: decoder.decode(variant) for variant in range(VARIANTS)}
    assert made[3].wanted  # stop strings
    return made


@pytest.fixture
def rooms() -> Iterator[list[Room]]:
    opened: list[Room] = []
    yield opened
    for room in opened:
        room.close()


def disturbed(decoders: list[Decoder], disturb: Callable[[], None]) -> None:
    """Lets them decode while something happens; they end what they have begun by then."""
    over = threading.Event()
    threads = [threading.Thread(target=decoder.run, args=(over,)) for decoder in decoders]
    for thread in threads:
        thread.start()
    try:
        disturb()
    finally:
        over.set()
        for thread in threads:
            thread.join(ENDED_S)
    for decoder in decoders:
        if decoder.errors:
            raise AssertionError(f"client {decoder.number} failed") from decoder.errors[0]
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.timeout(300 + int(KILLS * KILL_S))
def test_workers_killed_at_random_moments_cost_nobody_a_token(
    start_broker: StartBroker, rooms: list[Room], tell: Tell
) -> None:
    rig = start_broker()
    decoders = decoders_of(rig, rooms)
    draw = random.Random(int(os.environ.get("STATEROOM_SEED", "1")))
    began = time.monotonic()

    def kill() -> None:
        for _ in range(KILLS):
            pid = worker_of(rig)
            deaths = rig.look(lambda broker: broker.supervisor.engine("tiny").deaths)
            time.sleep(draw.random() * KILL_WITHIN_S)
            os.kill(pid, signal.SIGKILL)
            rig.until(lambda broker, d=deaths: broker.supervisor.engine("tiny").deaths > d)  # type: ignore[misc]

    disturbed(decoders, kill)
    counters = rig.look(lambda broker: broker.metrics.counters())
    events = sum(decoder.events for decoder in decoders)
    tell(
        f"{KILLS} kills under 8 clients in {time.monotonic() - began:.0f} s: {counters['requests_resumed']} "
        f"requests went on, {events // 2} times a stream; {sum(d.decodes for d in decoders)} decodes ended, "
        "0 wrong tokens, 0 errors"
    )
    assert counters["engine_deaths"] == KILLS
    assert counters["requests_resumed"] >= KILLS  # of those that there were
    assert events >= 2
    assert counters["sessions_quarantined"] == 0
    assert not [n for n in counters if n.startswith("requests.") and n.endswith(".engine_lost")]
    assert rig.look(lambda broker: len(broker.tickets)) == 0


def test_a_worker_that_hangs_costs_nobody_a_token(start_broker: StartBroker, rooms: list[Room]) -> None:
    """Stopped in the midst, as by a deadlock: it is replaced after `hang_s`, and what it had goes on."""
    rig = start_broker()
    decoders = decoders_of(rig, rooms)

    def stop() -> None:
        time.sleep(0.3)
        os.kill(worker_of(rig), signal.SIGSTOP)
        rig.until(lambda broker: broker.supervisor.engine("tiny").deaths == 1, 15.0)
        worker_of(rig)

    disturbed(decoders, stop)
    assert any(entry["event"] == "engine hangs" for entry in rig.entries())
    assert rig.look(lambda broker: broker.metrics.counters()["requests_resumed"]) > 0


def test_where_a_worker_hangs_is_in_the_log(start_broker: StartBroker) -> None:
    """Of all its threads; here the pulse of a worker that is well is awaited too soon."""
    rig = start_broker(patience=Patience(silence_s=0.2, hang_s=0.3, stacks_s=3.0, restart_first_s=0.05))
    rig.until(
        lambda _: any("most recent call first" in str(entry.get("line")) for entry in rig.entries()), 40.0
    )


def test_an_input_that_kills_every_worker_takes_nobody_with_it(
    start_broker: StartBroker, rooms: list[Room], tell: Tell
) -> None:
    """Whoever has it dies. Its session is found out and put in quarantine; all others get every token."""
    rig = start_broker()
    decoders = decoders_of(rig, rooms)
    room = connect(endpoint=rig.endpoint, app="poison")
    rooms.append(room)
    session = room.open(tokens=[1, 2, 3])
    ended: list[BaseException] = []

    def poison() -> None:
        try:
            session.prefill(tokens=[9] * 2_000)
        except EngineLost as error:
            ended.append(error)

    def has_it(broker: Broker) -> int | None:
        for ticket in broker.tickets:
            if ticket.owner == "poison" and ticket.op == "prefill" and ticket.state is RequestState.SENT:
                return broker.supervisor.engine("tiny").pid
        return None

    def kill() -> None:
        asking = threading.Thread(target=poison)
        asking.start()
        until = time.monotonic() + KILL_S * (DEATHS_MAX + 3)
        while asking.is_alive() and time.monotonic() < until:
            pid = rig.look(has_it)
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):  # dead already, and not yet noticed
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        asking.join(ENDED_S)

    disturbed(decoders, kill)
    deaths = rig.look(lambda broker: broker.supervisor.engine("tiny").deaths)
    tell(f"found out after {deaths} deaths")
    assert len(ended) == 1
    assert session.info().quarantined is not None
    assert DEATHS_MAX <= deaths <= DEATHS_MAX + 3
    assert rig.look(lambda broker: broker.metrics.counters()["sessions_quarantined"]) == 1
    with pytest.raises(EngineLost):
        session.decode(1).wait()
    assert session.sync(tokens=[4, 5]).length == 2
    assert len(session.decode(2, ignore_eos=True).wait().tokens) == 2
