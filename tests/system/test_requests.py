"""`requests`, `list` of everyone and `ps` with a real worker: who waits for what, how fast others are."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from tests.conftest import RunningDaemon, StartDaemon
from tests.system.conftest import ConnectTo, await_model
from tests.tiny import write_tiny_model

from stateroom.client import Room, connect_async
from stateroom.client.protocol import RequestInfo, Score

pytestmark = pytest.mark.system

BUDGET = 8 * 2**20
WAIT_S = 20.0


@pytest.fixture(scope="module")
def daemon(start_shared_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory) -> RunningDaemon:
    """One place for streams, and a few MiB for their KV."""
    model = write_tiny_model(tmp_path_factory.mktemp("long") / "model", context=32_768)
    daemon = start_shared_daemon("--rows-max", "1", f"--kv-budget={BUDGET}", model=model)
    await_model(daemon)
    return daemon


def until(
    room: Room, right: Callable[[dict[str | None, RequestInfo]], bool]
) -> dict[str | None, RequestInfo]:
    """The open requests by their sessions, once they are as they should be."""
    deadline = time.monotonic() + WAIT_S
    while True:
        told = {info.session: info for info in room.requests(everyone=True) if info.state != "done"}
        if right(told):
            return told
        assert time.monotonic() < deadline, told
        time.sleep(0.05)


def ps(daemon: RunningDaemon, *arguments: str) -> str:
    command = [sys.executable, "-m", "stateroom.daemon.cli", "ps", *arguments]
    return subprocess.run(command, env=daemon.env, capture_output=True, text=True, timeout=60).stdout


def until_yielded(daemon: RunningDaemon) -> str:
    """`ps --all` once the agent's stream stands there as waiting; now and then it has the place."""
    deadline = time.monotonic() + WAIT_S
    while True:
        table = ps(daemon, "--all")
        (row,) = (line for line in table.splitlines() if line.startswith("agent"))
        if row.split()[4:6] == ["decode", "yielded"]:
            return table
        assert time.monotonic() < deadline, table


def test_an_interactive_stream_runs_and_a_background_one_yields(
    daemon: RunningDaemon, connect_to: ConnectTo
) -> None:
    agent, editor = connect_to(daemon, app="agent"), connect_to(daemon, app="editor")
    slow = agent.open(tokens=[1, 2, 3], session_class="background")
    quick = editor.open(tokens=[4, 5, 6], name="draft")
    most = int(0.45 * BUDGET / (quick.caps.bytes_per_token if quick.caps else 1))
    streams = [each.decode(max_tokens=most, ignore_eos=True) for each in (slow, quick)]
    drawn = [iter(stream) for stream in streams]  # a stream ends when nobody reads it any more
    assert all(next(each).tokens for each in drawn)
    told = until(agent, lambda told: told[slow.id].waiting == "yielded")
    running = told[quick.id]
    assert (running.state, running.waiting, running.owner, running.total) == ("running", None, "editor", most)
    assert running.client is not None
    assert running.client.startswith("stateroom-python")
    assert running.done > 1
    assert running.tokens_per_s > 1
    assert slow.info().waiting == "yielded"
    table = until_yielded(daemon)
    assert table.split()[0] == "OWNER"
    assert "draft" in table
    listed = {info["session"]: info for info in json.loads(ps(daemon, "--all", "--json"))}
    assert {info["owner"] for info in listed.values()} == {"agent", "editor"}
    assert listed[slow.id]["running"] == "decode"
    for stream in streams:
        stream.close()
    until(agent, lambda told: not told)
    for session in (slow, quick):
        session.close()


def test_of_two_streams_one_has_its_turn(daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    room = connect_to(daemon, app="editor")
    sessions = [room.open(tokens=[n + 1] * 4) for n in range(2)]
    most = int(0.45 * BUDGET / (sessions[0].caps.bytes_per_token if sessions[0].caps else 1))
    streams = [each.decode(max_tokens=most, ignore_eos=True) for each in sessions]
    drawn = [iter(stream) for stream in streams]  # a stream ends when nobody reads it any more
    assert all(next(each).tokens for each in drawn)
    told = until(room, lambda told: "turn" in {info.waiting for info in told.values()})
    assert sorted(str(info.waiting) for info in told.values()) == ["None", "turn"]

    async def look() -> tuple[set[str], set[str]]:
        async with connect_async(daemon.endpoint, app="onlooker") as onlooker:
            assert await onlooker.list() == await onlooker.requests() == []
            listed, asked = await onlooker.list(everyone=True), await onlooker.requests(everyone=True)
            return {info.session for info in listed}, {info.session or "" for info in asked[:2]}

    ids = {session.id for session in sessions}
    assert asyncio.run(look()) == (ids, ids)
    for stream in streams:
        stream.close()
    for session in sessions:
        session.close()


def test_who_does_not_fit_waits_for_memory(daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    """Until the stream ends that has it; then it goes on, and is told as done with what it took."""
    room = connect_to(daemon, app="editor")
    session = room.open(tokens=[1, 2, 3])
    tokens = BUDGET / (session.caps.bytes_per_token if session.caps else 1)
    stream = session.decode(max_tokens=int(tokens * 0.95), ignore_eos=True)
    drawn = iter(stream)
    next(drawn)
    other = room.open(tokens=[9])
    scored = room.start(Score(session=other.id, tokens=[7] * int(tokens * 0.1)))
    told = until(room, lambda told: other.id in told and told[other.id].waiting == "memory")
    assert (told[other.id].op, told[other.id].state) == ("score", "running")
    assert other.info().waiting == "memory"
    stream.close()
    scored.take()
    (last, *_) = (info for info in room.requests(other.id) if info.op == "score")
    assert (last.state, last.code, last.waiting) == ("done", "ok", None)
    assert last.ms is not None
    assert last.ms > 0
