"""`stateroom trace` over real processes, and one request followed through the log by its number."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tests.conftest import RunningDaemon, StartDaemon
from tests.daemon.test_recorder import check_format
from tests.system import failing
from tests.system.conftest import ConnectTo
from tests.system.test_commands import stateroom
from typer.testing import CliRunner

from stateroom.client import Room, connect
from stateroom.client import errors as e
from stateroom.client.protocol import Span, TokenEvent, TraceResult
from stateroom.daemon.commands import app
from stateroom.daemon.exits import CONFIG
from stateroom.daemon.log_file import log_path
from stateroom.daemon.timeline import WIDTH, drawn, rows

pytestmark = pytest.mark.system

LONG = [(7 * place) % 240 + 1 for place in range(3_000)]
DRAWN = 400
START_S = 60.0
SLACK_MS = 60.0  # between two processes' moments, on a busy machine


def newest(room: Room, op: str) -> int:
    return max(info.rid for info in room.requests() if info.op == op)


def of(trace: TraceResult, *names: str, where: str = "engine") -> list[Span]:
    return [span for span in trace.spans if span.where == where and span.name in names]


def within(trace: TraceResult) -> None:
    """Nothing lies before the request, nor behind its end."""
    assert trace.request.ms is not None
    for span in trace.spans:
        assert span.start_ms >= -0.01, span
        assert span.start_ms + span.ms <= trace.request.ms + SLACK_MS, span


def test_a_decode_beside_a_prefill(
    start_daemon: StartDaemon, tiny_folder: Path, connect_to: ConnectTo, tmp_path: Path
) -> None:
    daemon = start_daemon(model=tiny_folder)
    room, other = connect_to(daemon, "editor"), connect_to(daemon, "agent")
    session = room.open(tokens=LONG[:50])  # while the model loads
    first = room.trace(newest(room, "open"))
    (queued,) = of(first, "queued", where="broker")
    assert queued.details == {"why": "engine"}
    assert sum(span.details["tokens"] for span in of(first, "prefill")) == 49
    within(first)

    beside = threading.Thread(target=lambda: other.open(tokens=LONG))
    streams: list[TraceResult] = []
    while not streams or beside.is_alive():  # on a busy machine it may come when the first is over
        for number, _ in enumerate(session.decode(DRAWN, ignore_eos=True)):
            if number == 5 and not streams:
                beside.start()
        streams.append(room.trace(newest(room, "decode")))
    beside.join()
    met = [each for each in streams if any("prefill_ms" in span.details for span in of(each, "others"))]
    ours, theirs = met[0], other.trace(newest(other, "open"))
    for trace in (ours, theirs):
        within(trace)
        assert (trace.dropped, trace.missing) == (0, None)
        parts = sum(row.ms for row in rows(trace) if row.name != "sends")
        assert trace.request.ms is not None
        assert parts == pytest.approx(trace.request.ms, rel=0.1)
    assert sum(span.details["tokens"] for span in of(ours, "decode")) == DRAWN
    assert sum(span.details["steps"] for span in of(ours, "decode")) == DRAWN
    assert sum(span.details["tokens"] for span in of(theirs, "prefill")) == len(LONG) - 1
    assert any("decode_ms" in span.details for span in of(theirs, "others"))
    sends = of(ours, "sends", where="broker")
    assert sum(span.details["replies"] for span in sends) == DRAWN
    assert of(ours, "worker", "first token", where="broker")

    with pytest.raises(e.NotFound):
        other.trace(ours.request.rid)
    assert other.trace(ours.request.rid, everyone=True).spans == ours.spans
    shows_it(daemon, ours, tmp_path / "trace.json")


def shown(daemon: RunningDaemon, *arguments: str) -> str:
    """What the command prints, in this process."""
    done = CliRunner().invoke(app, ["trace", *arguments, "--endpoint", daemon.endpoint])
    assert done.exit_code == 0, done.exception
    return done.stdout


def shows_it(daemon: RunningDaemon, trace: TraceResult, file: Path) -> None:
    """The command, in each of its forms."""
    rid = str(trace.request.rid)
    assert any(line.split()[0] == rid for line in shown(daemon).splitlines())
    for form in ((rid,), (rid, "--spans"), ("last",)):
        assert max(map(len, shown(daemon, *form).splitlines())) <= WIDTH
    # How old the request is by now, it doesn't say: what it took stays.
    assert shown(daemon, rid).splitlines() == drawn(trace)
    assert len(json.loads(shown(daemon, rid, "--json"))["spans"]) == len(trace.spans)
    assert shown(daemon, rid, "--chrome", str(file)) == ""
    check_format(json.loads(file.read_text()))
    plain = stateroom({**daemon.env, "PYTHONIOENCODING": "ascii"}, "trace", rid)
    assert "#" in plain.stdout
    assert plain.stdout.isascii()
    failed = stateroom(daemon.env, "trace", "nothing")
    assert (failed.returncode, failed.stdout) == (CONFIG, "")
    assert len(failed.stderr.splitlines()) == 1


def test_a_stream_that_two_workers_had(
    start_daemon: StartDaemon, tiny_folder: Path, connect_to: ConnectTo
) -> None:
    daemon = start_daemon(model=tiny_folder)
    room = connect_to(daemon, "editor")
    session = room.open(tokens=LONG[:50])
    (pid,) = daemon.workers()
    tokens = 0
    for event in session.decode(DRAWN, ignore_eos=True):
        if isinstance(event, TokenEvent):
            if tokens == 0:
                os.kill(pid, signal.SIGKILL)
            tokens += len(event.tokens)
    assert tokens == DRAWN
    trace = room.trace(newest(room, "decode"))
    within(trace)
    first, second = of(trace, "worker", where="broker")
    assert (first.details["lost"], second.details.get("lost")) == ("yes", None)
    assert [span.details["why"] for span in of(trace, "queued", where="broker")][-1] == "engine"
    assert trace.missing is not None
    assert f"#{first.details['generation']}" in trace.missing
    # Of the second one's part nothing lies before it had the request.
    assert min(span.start_ms for span in trace.spans if span.where == "engine") >= second.start_ms
    assert 0 < sum(span.details["tokens"] for span in of(trace, "decode", "rounds")) < DRAWN + 1
    (line,) = [line for line in drawn(trace) if "died" in line]
    assert f"worker #{first.details['generation']} died" in line


@pytest.fixture
def failing_daemon(tiny_folder: Path) -> Iterator[tuple[str, Path]]:
    """Its endpoint and its folder."""
    with TemporaryDirectory(prefix="sr-", dir="/tmp") as name:
        folder, endpoint = Path(name), f"ipc://{name}/stateroom.sock"
        command = [sys.executable, failing.__file__, name, endpoint, str(tiny_folder)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield endpoint, folder
        finally:
            process.terminate()
            process.wait(10)


def entries_of(log: Path, rid: int) -> dict[str, Any]:
    """By what they say."""
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    return {entry["event"]: entry for entry in entries if entry.get("rid") == rid}


def test_one_number_finds_a_request_in_the_broker_s_entries_and_the_worker_s(
    failing_daemon: tuple[str, Path],
) -> None:
    endpoint, folder = failing_daemon
    deadline = time.monotonic() + START_S
    while not (folder / "stateroom.sock").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with connect(endpoint=endpoint, app="editor", timeout_s=START_S) as room:
        good = room.open(tokens=LONG[:10])
        with pytest.raises(e.Internal) as caught:
            good.prefill(tokens=[failing.BAD, 1])
        details = caught.value.details
        rid = newest(room, "prefill")
        assert details["rid"] == rid
        assert room.trace(rid).request.code == "internal"
    while len(about := entries_of(log_path(folder), rid)) < 2:  # the worker's comes by way of its stderr
        assert time.monotonic() < deadline + START_S
        time.sleep(0.05)
    assert set(about) == {"internal error", "request"}
    worker, broker = about["internal error"], about["request"]
    assert (worker["engine"], worker["incident"]) == ("tiny", details["incident"])
    assert "the token that fails" in worker["exception"]
    assert (broker["code"], broker["op"], broker["owner"]) == ("internal", "prefill", "editor")
    assert broker["client"].startswith("stateroom-python")
    assert broker["id"] > 0
