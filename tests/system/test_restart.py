"""Sessions outlive a real daemon, however it ends: same tokens, same next draws, as if nothing had been."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import RunningDaemon, StartDaemon
from tests.system.conftest import LONG_CONTEXT, ConnectTo, Restart, Tell, await_model
from tests.system.test_streams import ENDLESS, PROMPT, greedy
from tests.tiny import write_tiny_model

from stateroom.client import Room
from stateroom.client.errors import ClientError, StateroomError
from stateroom.client.protocol import KV
from stateroom.client.session import Session
from stateroom.daemon.exits import OK

pytestmark = pytest.mark.system

LEAVE_S = 5.0  # from SIGTERM to the end; launchd waits no longer
AGAIN_S = 60.0  # for a daemon that was started again, and its model
STREAMS = 4
ENDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL)
SAMPLING: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "seed": 6}, {}]


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads that are wide enough to be quantised."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "wide", width=128, context=LONG_CONTEXT)


@pytest.fixture
def own_daemon(start_daemon: StartDaemon, wide_folder: Path) -> RunningDaemon:
    daemon = start_daemon(model=wide_folder)
    await_model(daemon)
    return daemon


def end(daemon: RunningDaemon, how: signal.Signals) -> None:
    began = time.monotonic()
    daemon.process.send_signal(how)
    code = daemon.process.wait(2 * LEAVE_S)
    if how is signal.SIGTERM:
        assert code == OK
        assert time.monotonic() - began < LEAVE_S


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_sessions_of_every_kind_go_on(
    own_daemon: RunningDaemon, restart: Restart, connect_to: ConnectTo, how: signal.Signals
) -> None:
    """The law: each goes on as a fresh session with its tokens does; a chat knows its turns."""
    room = connect_to(own_daemon, "kinds", timeout_s=AGAIN_S)
    document = room.open(text="The same text, every time. " * 20, name="document")
    chat = room.open(messages=[{"role": "user", "content": "hello"}], name="chat")
    chat.decode(6, ignore_eos=True).wait()
    small = room.open(tokens=PROMPT * 20, kv=KV(scheme="affine8"), session_class="background", ttl_s=3600)
    (branch,) = document.fork(names=["branch"])
    branch.decode(30, temperature=1.0, seed=4, ignore_eos=True).wait()
    branch.trim(to=branch.length - 7)
    trunk = document.publish("shared").trunk
    # Greedy draws are compared, which takes sessions of one scheme: the quantised one meets its like.
    sessions = {each.id: each for each in (document, chat, small, branch)}
    tokens = {id: each.tokens().tokens for id, each in sessions.items()}
    running = [each.decode(ENDLESS, ignore_eos=True) for each in (room.open(tokens=PROMPT), branch)]
    for stream in running:
        next(stream)
    end(own_daemon, how)

    again = restart(own_daemon)
    again.wait_until_answering()
    room = connect_to(again, "kinds", timeout_s=AGAIN_S)
    before_ready = {info.session: info for info in room.list()}
    assert len(before_ready) == 5
    assert {id for id in tokens if id in before_ready} == set(tokens)
    assert before_ready[small.id].ttl_s == 3600
    assert before_ready[branch.id].parents == [document.id]
    parked = how is signal.SIGTERM
    assert before_ready[document.id].tier == ("disk" if parked else "tokens")
    assert (before_ready[document.id].disk_bytes > 0) is parked
    await_model(again)
    received = room.session(document.id).prefill(tokens=[1]).receipt
    length = len(tokens[document.id])
    assert received.source == ("snapshot" if parked else "none")
    assert received.prefilled == (1 if parked else length + 1)
    tokens[document.id].append(1)
    for id, known in tokens.items():
        session = room.session(id)
        held = session.tokens().tokens
        assert held[: len(known)] == known
        assert len(held) == len(known) or id == branch.id
        if id != small.id:
            assert session.decode(8, ignore_eos=True).wait().tokens == greedy(room, held)
    with room.open(tokens=tokens[small.id], kv=KV(scheme="affine8")) as like:
        drawn = like.decode(8, ignore_eos=True).wait().tokens
    assert room.session(small.id).decode(8, ignore_eos=True).wait().tokens == drawn
    (fork,) = connect_to(again, "stranger").fork(trunk)
    assert fork.tokens().tokens == tokens[document.id][:length]
    chat = room.session("chat")
    chat.prefill(messages=[{"role": "user", "content": "and again"}])
    assert "hello" in chat.tokens().text
    assert "and again" in chat.tokens().text


class Stream(threading.Thread):
    """Decodes in a session until the daemon ends. `length`: as it was told last."""

    def __init__(self, session: Session, sampling: dict[str, Any]) -> None:
        super().__init__()
        self.session, self.sampling = session, sampling
        self.length = 0

    def run(self) -> None:
        self.length = self.session.info().length
        try:
            for event in self.session.decode(ENDLESS, ignore_eos=True, **self.sampling):
                self.length += len(event.tokens)
        except (StateroomError, ClientError):
            return  # the daemon is gone


def undisturbed(room: Room, count: int, sampling: dict[str, Any]) -> list[int]:
    with room.open(tokens=PROMPT) as session:
        return PROMPT + session.decode(count, ignore_eos=True, **sampling).wait().tokens


def test_streams_that_are_cut_off_go_on_with_the_same_draws(
    own_daemon: RunningDaemon, restart: Restart, connect_to: ConnectTo, tell: Tell
) -> None:
    """At random moments, under streams: never a wrong token, and none that was told is missing."""
    drawn, daemon, ahead = random.Random(9), own_daemon, list[int]()
    room = connect_to(daemon, "streams", timeout_s=AGAIN_S)
    ids = [room.open(tokens=PROMPT).id for _ in range(STREAMS)]
    for how in ENDS:
        streams = [Stream(room.session(id), sampling) for id, sampling in zip(ids, SAMPLING, strict=True)]
        for stream in streams:
            stream.start()
        time.sleep(drawn.uniform(0.5, 3.0))
        end(daemon, how)
        for stream in streams:
            stream.join()
        daemon = restart(daemon)
        daemon.wait_until_answering()
        room = connect_to(daemon, "streams", timeout_s=AGAIN_S)
        await_model(daemon)
        for stream, sampling in zip(streams, SAMPLING, strict=True):
            held = room.session(stream.session.id).tokens().tokens
            assert held == undisturbed(room, len(held) - len(PROMPT), sampling)
            assert len(held) >= stream.length
            ahead.append(len(held) - stream.length)
    tell(f"tokens that were kept and not told, by end and session: {ahead}; none the other way about")
