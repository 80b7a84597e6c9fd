"""Processes that die, hang, stop and start: who hears of it, what is kept, what is left behind."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.conftest import RunningDaemon, StartDaemon
from tests.system.conftest import ConnectTo, RawClient, Restart, Tell, await_model
from tests.system.footprint import gone, seconds_until
from tests.system.test_streams import ENDLESS, PROMPT, begun, greedy

from stateroom.client import connect
from stateroom.client.errors import BadEndpoint, Disconnected, NoDaemon
from stateroom.client.paths import IPC_PATH_BYTES_MAX
from stateroom.daemon.exits import CONFIG, FORBIDDEN, OK, RUNNING
from stateroom.daemon.lock import LOCK_NAME

pytestmark = pytest.mark.system

MANY = 300  # tokens: enough to be caught in the midst
ENDED_S = 60.0  # for what a killed worker had to end with the next one
RECOVER_S = 30.0  # a worker starts again: mlx's import and a tiny model
ORPHANS_S = 2.0  # a worker outlives its broker by this at most
LEAVE_S = 5.0  # from SIGTERM to the end
SILENCE_S = 10.0  # of a worker, after which it is told to be silent
REFUSED_S = 20.0


@pytest.fixture
def own_daemon(start_daemon: StartDaemon, tiny_folder: Path) -> RunningDaemon:
    """A daemon of the test's own, its model loaded."""
    daemon = start_daemon(model=tiny_folder)
    await_model(daemon)
    return daemon


def worker_of(daemon: RunningDaemon) -> int:
    (worker,) = daemon.workers()
    return worker


def refused(daemon: RunningDaemon) -> tuple[int, str]:
    """Exit code of a daemon that must not start, and the last line it said."""
    code = daemon.process.wait(REFUSED_S)
    return code, daemon.log_tail().splitlines()[-1]


# ---------------------------------------------------------------- a worker's death


def test_a_killed_worker_loses_no_request_and_no_session(
    own_daemon: RunningDaemon, raw_client: RawClient, connect_to: ConnectTo, tell: Tell
) -> None:
    """B52, B60: everything goes on with the next worker, at the next token; a stream is told by events."""
    client, room = raw_client(own_daemon, app="lost"), connect_to(own_daemon, "lost")
    events = room.watch()
    sessions = [client.open([*PROMPT, i]) for i in range(6)]
    asked = [client.send("decode", session=s, max_tokens=MANY, ignore_eos=True) for s in sessions[:3]]
    asked.append(client.send("prefill", session=sessions[3], tokens=[7] * 12_000, progress=True))
    asked.append(client.send("decode", session=sessions[4], max_tokens=MANY, stream=False, ignore_eos=True))
    for request_id in asked[:4]:
        client.begun(request_id)
    os.kill(worker_of(own_daemon), signal.SIGKILL)
    killed = time.monotonic()
    replies = [client.replies(request_id, ENDED_S) for request_id in asked]
    told_s = time.monotonic() - killed
    assert [each[-1]["kind"] for each in replies] == ["result"] * 5
    for session, each in zip(sessions, replies[:3], strict=False):
        tokens = [token for reply in each if reply["kind"] == "token" for token in reply["tokens"]]
        assert tokens == each[-1]["tokens"]
        assert len(tokens) == MANY
        assert [reply["event"] for reply in each if reply["kind"] == "event"] == [
            "engine_lost",
            "engine_recovered",
        ]
        assert client.ask("tokens", session=session)["tokens"] == [
            *PROMPT,
            sessions.index(session),
            *tokens,
        ]
    assert replies[3][-1]["length"] == len(PROMPT) + 1 + 12_000
    for number in (0, 4):
        whole = greedy(room, [*PROMPT, number], MANY)
        assert replies[number][-1]["tokens"] == whole
    heard = [event.event for event in (next(events) for _ in range(8))]
    assert heard == ["session_opened"] * 6 + ["engine_lost", "engine_recovered"]
    health = room.stats()
    assert (health.models[0]["deaths"], health.models[0]["state"]) == (1, "ready")
    assert health.gauges["running"] == 0
    tell(f"5 requests survived a worker's death; all ended {told_s:.1f} s after it")
    client.nothing_more()


def test_requests_wait_for_a_worker_that_dies_while_it_starts(
    own_daemon: RunningDaemon, connect_to: ConnectTo
) -> None:
    """Twice: killed as soon as it is there again; the request that waits for it is served in the end."""
    room = connect_to(own_daemon, "starting")
    session = room.open(tokens=PROMPT)
    wanted = greedy(room, PROMPT)
    stream = begun(session)
    os.kill(worker_of(own_daemon), signal.SIGKILL)
    stream.close()
    assert stream.result.finish == "cancelled"
    held = session.info().length
    again = session.decode(4, ignore_eos=True)  # held until there is a worker
    seconds_until(lambda: len(own_daemon.workers()) == 1, RECOVER_S, "the worker starts again")
    os.kill(worker_of(own_daemon), signal.SIGKILL)
    assert len(again.wait().tokens) == 4
    assert session.length == held + 4
    with room.open(tokens=PROMPT) as fresh:
        assert fresh.decode(8, ignore_eos=True).wait().tokens == wanted
    assert room.stats().models[0]["deaths"] == 2


def test_what_was_to_begin_or_end_when_the_worker_died(
    own_daemon: RunningDaemon, raw_client: RawClient
) -> None:
    """B52: a `close` has happened, an `open` or `fork` does so later; what is told and listed agree."""
    client = raw_client(own_daemon, app="between")
    closing, parent = client.open(PROMPT, name="closing"), client.open(PROMPT, name="parent")
    worker = worker_of(own_daemon)
    os.kill(worker, signal.SIGSTOP)
    close = client.send("close", session=closing)
    opened = client.send("open", tokens=PROMPT, name="opened")
    fork = client.send("fork", session=parent, names=["left", "right"], n=2)
    taken = client.send("trim", session=parent, to=0)  # busy: the fork has the session
    assert client.final(taken)["error"]["code"] == "busy"
    read = client.send("tokens", session=parent)  # which may be read; a child that isn't answered for may not
    early = client.send("tokens", session="left")
    assert client.final(early)["error"]["details"]["request"] == {"op": "fork"}
    os.kill(worker, signal.SIGKILL)
    assert client.final(close)["kind"] == "result"
    assert [client.final(each, RECOVER_S)["kind"] for each in (opened, fork, read)] == ["result"] * 3
    names = {session["name"] for session in client.ask("list")["sessions"]}
    assert names == {"parent", "opened", "left", "right"}
    for name in sorted(names):
        assert client.ask("tokens", session=name)["tokens"] == PROMPT


def test_a_stopped_worker_does_not_stop_the_daemon(
    own_daemon: RunningDaemon, connect_to: ConnectTo, tell: Tell
) -> None:
    """B60: a worker that hangs is told of after ten seconds; what needs no engine is answered meanwhile."""
    room, other = connect_to(own_daemon, "stopped"), connect_to(own_daemon, "stopped")
    events = room.watch(sessions=False)
    session = room.open(tokens=PROMPT)
    stream = begun(session)
    worker = worker_of(own_daemon)
    os.kill(worker, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        took = []
        for _ in range(50):
            began = time.monotonic()
            other.hello(), other.list(), other.stats(), other.session(session.id)
            took.append(time.monotonic() - began)
        assert sorted(took)[len(took) // 2] < 0.5
        assert other.cancel(session.id) is True
        event = next(events)
        silent_s = time.monotonic() - stopped
        assert (event.event, event.model) == ("engine_silent", "tiny")
        assert SILENCE_S / 2 < silent_s < 2 * SILENCE_S  # since its last pulse, found out by a tick
        assert other.stats().models[0]["state"] == "silent"
    finally:
        os.kill(worker, signal.SIGCONT)
    assert stream.wait().finish == "cancelled"
    assert session.decode(4, ignore_eos=True).wait().finish == "length"
    assert other.stats().models[0]["state"] == "ready"
    tell(f"silence was told of after {silent_s:.1f} s; four calls meanwhile took {max(took) * 1000:.0f} ms")


# ---------------------------------------------------------------- the daemon's death


def test_a_killed_daemon_takes_its_worker_along_and_the_next_one_starts(
    own_daemon: RunningDaemon, restart: Restart, connect_to: ConnectTo, tell: Tell
) -> None:
    """B63, B83: in the midst of a decode; the socket file that is left is in nobody's way."""
    room = connect_to(own_daemon, "killed", timeout_s=RECOVER_S)
    stream = begun(room.open(tokens=PROMPT))
    worker = worker_of(own_daemon)
    os.kill(own_daemon.pid, signal.SIGKILL)
    own_daemon.process.wait()
    took = seconds_until(lambda: gone(worker), ORPHANS_S, "the worker leaves")
    with pytest.raises(Disconnected):
        stream.wait()
    socket = own_daemon.folder / "run" / "stateroom.sock"
    assert stat.S_ISSOCK(socket.stat().st_mode)
    with pytest.raises(NoDaemon):
        connect(endpoint=own_daemon.endpoint)
    next_one = restart(own_daemon)
    next_one.wait_until_answering()
    assert greedy(room, PROMPT)  # the same Room, connected anew
    assert len(list((own_daemon.folder / "run").glob("engine-*.sock"))) == 1
    tell(f"the worker left {took:.2f} s after its broker was killed")


def test_a_second_daemon_says_who_is_there_and_leaves(
    own_daemon: RunningDaemon, restart: Restart, connect_to: ConnectTo
) -> None:
    """B63, B78: with an exit code of its own; the first one's clients notice nothing."""
    room = connect_to(own_daemon)
    stream = begun(room.open(tokens=PROMPT))
    code, said = refused(restart(own_daemon))
    assert code == RUNNING
    assert str(own_daemon.pid) in said
    assert own_daemon.endpoint in said
    assert len([token for token, _ in zip(stream, range(20), strict=False)]) == 20
    connect_to(own_daemon).hello()


# ---------------------------------------------------------------- stopping


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_stopping_in_the_midst_of_work(
    own_daemon: RunningDaemon, raw_client: RawClient, tell: Tell, how: signal.Signals
) -> None:
    """B65, B79: every request its final reply, exit code 0 in time, no process and no socket left."""
    client = raw_client(own_daemon, app="stopping")
    sessions = [client.open([*PROMPT, i]) for i in range(4)]
    asked = [client.send("decode", session=s, max_tokens=ENDLESS, ignore_eos=True) for s in sessions[:2]]
    asked.append(client.send("prefill", session=sessions[2], tokens=[7] * 12_000, progress=True))
    asked.append(client.send("watch"))
    for request_id in asked[:3]:
        client.begun(request_id)
    worker = worker_of(own_daemon)
    own_daemon.process.send_signal(how)
    began = time.monotonic()
    finals = [client.final(request_id) for request_id in asked]
    code = own_daemon.process.wait(LEAVE_S)
    took = time.monotonic() - began
    assert code == OK
    assert took < LEAVE_S
    assert [final.get("finish") for final in finals[:3]] == ["cancelled"] * 3
    assert finals[3]["error"]["code"] == "shutting_down"
    assert gone(worker)
    assert [path.name for path in (own_daemon.folder / "run").iterdir()] == [LOCK_NAME]
    assert '"stopped"' in own_daemon.log_tail().splitlines()[-1]
    tell(f"left {took:.2f} s after {how.name}")


def test_stopping_while_the_model_loads(start_daemon: StartDaemon, tiny_folder: Path) -> None:
    daemon = start_daemon(model=tiny_folder)
    seconds_until(lambda: len(daemon.workers()) == 1, 5.0, "the worker's process is there")
    worker = worker_of(daemon)
    began = time.monotonic()
    assert daemon.stop() == OK
    assert time.monotonic() - began < LEAVE_S
    assert gone(worker)


def test_stopping_with_a_stopped_worker(own_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    """A worker that hangs is ended, not waited for."""
    stream = begun(connect_to(own_daemon).open(tokens=PROMPT))
    worker = worker_of(own_daemon)
    os.kill(worker, signal.SIGSTOP)
    own_daemon.process.terminate()
    began = time.monotonic()
    assert own_daemon.process.wait(LEAVE_S) == OK
    assert time.monotonic() - began < LEAVE_S
    assert gone(worker)
    with contextlib.suppress(Disconnected):
        assert stream.wait().finish == "cancelled"


# ---------------------------------------------------------------- places


def test_a_file_in_the_sockets_place_is_left_alone(own_daemon: RunningDaemon, restart: Restart) -> None:
    """B63: bind would destroy it, so the daemon refuses."""
    own_daemon.stop()
    path = own_daemon.folder / "run" / "stateroom.sock"
    path.write_text("precious")
    code, said = refused(restart(own_daemon))
    assert code == FORBIDDEN
    assert str(path) in said
    assert path.read_text() == "precious"


def test_the_runtime_directory_is_private(own_daemon: RunningDaemon, restart: Restart) -> None:
    run = own_daemon.folder / "run"
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in run.iterdir()} == {0o600}
    own_daemon.stop()
    run.chmod(0o777)
    code, said = refused(restart(own_daemon))
    assert code == FORBIDDEN
    assert str(run) in said


def test_a_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    """B64: by both sides, with its length in bytes, the limit, and the way out."""
    run = tmp_path / ("ü" * 60)
    env = os.environ | {"STATEROOM_RUNTIME_DIR": str(run), "STATEROOM_HOME": str(tmp_path)}
    env.pop("STATEROOM_ENDPOINT", None)
    command = [sys.executable, "-m", "stateroom.daemon.cli", "serve"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=REFUSED_S, check=False)
    said = done.stderr.strip()
    assert done.returncode in (CONFIG, 1)
    assert len(said.splitlines()) == 1
    length = len(os.fsencode(run / "stateroom.sock"))
    for part in (str(run), str(length), str(IPC_PATH_BYTES_MAX), "STATEROOM_RUNTIME_DIR"):
        assert part in said
    assert not run.exists()
    with pytest.raises(BadEndpoint, match=str(length)):
        connect(endpoint=f"ipc://{run}/stateroom.sock")


def test_a_bare_environment(
    tiny_folder: Path, start_daemon: StartDaemon, restart: Restart, connect_to: ConnectTo
) -> None:
    """B80: as launchd starts it: hardly a variable, 256 open files, in the root directory."""
    daemon = start_daemon()
    daemon.stop()
    home = daemon.folder / "home"
    bare = ["env", "-i", "PATH=/usr/bin:/bin", f"HOME={home}"]
    serve = (
        f"ulimit -S -n 256; cd /; exec {sys.executable} -m stateroom.daemon.cli serve --model {tiny_folder}"
    )
    daemon.process.args = [*bare, "/bin/sh", "-c", serve]
    bared = restart(daemon)
    bared.endpoint = f"ipc://{home}/.stateroom/run/stateroom.sock"
    bared.wait_until_answering()
    rooms = [connect_to(bared, f"app-{i}") for i in range(150)]
    sessions = [room.open(text="a bare environment") for room in rooms[:3]]
    assert len({tuple(session.decode(5, ignore_eos=True).wait().tokens) for session in sessions}) == 1
    assert rooms[-1].stats().models[0]["facts"]["device"] == "cpu"
    process = psutil.Process(bared.pid)
    assert process.cwd() == "/"
    assert process.num_fds() > 150
    soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
    assert soft == min(8_192, hard) or hard == resource.RLIM_INFINITY
    assert soft > 256


def test_a_daemon_killed_while_its_worker_starts(start_daemon: StartDaemon, tiny_folder: Path) -> None:
    """B83: importing mlx takes seconds, and the worker watches its broker all the while."""
    daemon = start_daemon(model=tiny_folder)
    seconds_until(lambda: len(daemon.workers()) == 1, 5.0, "the worker's process is there")
    worker = worker_of(daemon)
    daemon.process.kill()
    daemon.process.wait()
    seconds_until(lambda: gone(worker), ORPHANS_S, "the worker leaves")
