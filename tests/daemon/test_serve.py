"""Real processes: the lock, the places on disk, signals, and the ends of it all."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from tests.daemon.rig import Raw

from stateroom.daemon.exits import CONFIG, FORBIDDEN, OK, RUNNING, Leave
from stateroom.daemon.lock import LOCK_NAME, Lock, holder

RUN_DAEMON = Path(__file__).with_name("run_daemon.py")
ROOT = Path(__file__).parent.parent.parent


class Place:
    """A runtime directory of a test's own, and the daemons started there."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="srd-", dir="/tmp"))
        self.run = self.folder / "run"
        self.socket = self.run / "stateroom.sock"
        self.endpoint = f"ipc://{self.socket}"
        self.log = self.folder / "daemon.log"
        self.context = zmq.Context()
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *scripts: str, endpoint: str | None = None) -> subprocess.Popen[bytes]:
        """A daemon with scripted workers; not waited for."""
        command = [sys.executable, str(RUN_DAEMON), str(self.run), endpoint or self.endpoint, *scripts]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with self.log.open("a") as log:
            self.started.append(subprocess.Popen(command, stderr=log, env=environment, cwd=self.folder))
        return self.started[-1]

    def client(self, endpoint: str | None = None) -> Raw:
        """A client once a daemon answers."""
        made = Raw(self.context, endpoint or self.endpoint)
        assert made.ask("hello")["server"] == "stateroom"
        return made

    def refused(self, *scripts: str, endpoint: str | None = None) -> tuple[int, str]:
        """Starts a daemon that must leave at once; its exit code and what it said last."""
        process = self.start(*scripts, endpoint=endpoint)
        return process.wait(20), self.log.read_text().splitlines()[-1]

    def cli(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.folder),
            "STATEROOM_RUNTIME_DIR": str(self.run),
            **environment,
        }
        command = [sys.executable, "-m", "stateroom.daemon.cli", *arguments]
        return subprocess.run(
            command, env=env, cwd="/", capture_output=True, text=True, timeout=30, check=False
        )

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.context.destroy(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_places_are_private(place: Place) -> None:
    """B63: directory 0700, socket 0600; a worker's socket too."""
    place.start("step_s=0.01")
    place.client()
    assert mode(place.run) == 0o700
    assert mode(place.socket) == 0o600
    assert mode(place.run / LOCK_NAME) == 0o600
    (link,) = place.run.glob("engine-*.sock")
    assert mode(link) == 0o600


def test_a_second_daemon_says_who_is_there_and_leaves(place: Place) -> None:
    """B63: lock first, then bind; the first keeps its socket and its clients."""
    first = place.start()
    client = place.client()
    code, said = place.refused()
    assert code == RUNNING
    assert f"process {first.pid}" in said
    assert place.endpoint in said
    assert "since 20" in said
    assert client.ask("hello")["kind"] == "result"
    assert place.client().ask("list")["kind"] == "result"


def test_two_daemons_of_different_directories_cannot_share_an_endpoint(place: Place) -> None:
    shared = place.folder / "shared"
    shared.mkdir(mode=0o700)
    endpoint = f"ipc://{shared}/s"
    place.start(endpoint=endpoint)
    client = place.client(endpoint)
    place.run = place.folder / "other"
    assert place.refused(endpoint=endpoint)[0] == RUNNING
    assert client.ask("hello")["kind"] == "result"


def test_what_a_killed_daemon_left_is_cleared(place: Place) -> None:
    """B63, B83: after SIGKILL the workers leave within 2 s, and the next start finds nothing in its way."""
    first = place.start("step_s=0.01")
    place.client().open()
    workers = psutil.Process(first.pid).children()
    assert len(workers) == 1
    first.kill()
    first.wait()
    assert psutil.wait_procs(workers, timeout=2)[1] == []
    assert place.socket.exists()
    assert holder(place.run / LOCK_NAME) is None
    second = place.start("step_s=0.01")
    place.client().open()
    assert holder(place.run / LOCK_NAME).pid == second.pid  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["file", "directory", "link to a socket"])
def test_what_is_no_socket_is_never_touched(place: Place, kind: str) -> None:
    """B63: binding would destroy a regular file."""
    place.run.mkdir(mode=0o700)
    elsewhere = place.folder / "elsewhere"
    if kind == "file":
        place.socket.write_text("precious")
    elif kind == "directory":
        place.socket.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(elsewhere))
        place.socket.symlink_to(elsewhere)
    code, said = place.refused()
    assert code == FORBIDDEN
    assert str(place.socket) in said
    assert place.socket.is_symlink() or place.socket.is_dir() or place.socket.read_text() == "precious"
    assert kind != "link to a socket" or elsewhere.is_socket()
    assert not list(place.run.glob("engine-*"))


def test_a_directory_that_others_can_write_is_refused(place: Place) -> None:
    """B63: whoever can write there can put a socket of his own in place of ours; others see nothing."""
    place.run.mkdir()
    for wrong in (0o777, 0o770, 0o1777, 0o755, 0o711):
        place.run.chmod(wrong)
        code, said = place.refused()
        assert code == FORBIDDEN
        assert f"chmod 700 {place.run}" in said
    place.run.chmod(0o700)
    place.start()
    assert place.client().ask("list")["kind"] == "result"


def test_a_directory_above_that_anybody_can_write_to_is_refused(place: Place) -> None:
    """B63: ours could be moved away and another put there; the sticky bit keeps that from happening."""
    open_to_all = place.folder / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    place.run = open_to_all / "run"
    place.socket = place.run / "s"
    place.endpoint = f"ipc://{place.socket}"
    code, said = place.refused()
    assert code == FORBIDDEN
    assert f"chmod o-w {open_to_all}" in said
    assert not place.run.exists()
    open_to_all.chmod(0o1777)
    place.start()
    assert place.client().ask("list")["kind"] == "result"


def test_a_lock_that_can_not_be_opened_is_said_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / LOCK_NAME
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Leave, match=str(path)) as refused:
        Lock(path).take("ipc:///nowhere")
    assert refused.value.code == FORBIDDEN
    assert not (tmp_path / "elsewhere").exists()


def test_a_lock_left_by_another_process_id_is_no_lock(place: Place) -> None:
    """B78: the lock dies with its process, whatever the file says."""
    place.run.mkdir(mode=0o700)
    (place.run / LOCK_NAME).write_text('{"pid": 1, "endpoint": "x", "since": "y"}')
    place.start()
    assert place.client().ask("list")["kind"] == "result"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_within_five_seconds(place: Place, how: signal.Signals) -> None:
    """Running requests get their final reply, workers and sockets are gone, the exit code is 0."""
    process = place.start("step_s=0.01", "load_s=60")
    client = place.client()
    sessions = [client.open() for _ in range(3)]
    decodes = [client.send("decode", session=session, max_tokens=100_000) for session in sessions]
    waiting = client.send("open", model="toy1")
    for decode in decodes:
        client.begun(decode)
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    began = time.monotonic()
    process.send_signal(how)
    for decode in decodes:
        assert client.final(decode)["finish"] == "cancelled"
    assert client.final(waiting)["error"]["code"] == "shutting_down"
    assert process.wait(10) == OK
    assert time.monotonic() - began < 5.0
    assert not any(worker.is_running() for worker in workers)
    assert sorted(path.name for path in place.run.iterdir()) == [LOCK_NAME]


def test_it_stops_within_five_seconds_though_a_client_does_not_read(place: Place) -> None:
    """B65: nothing unsent holds the exit."""
    process = place.start("step_s=0,text=5000")
    client = place.client()
    session = client.open()
    client.send("decode", session=session, max_tokens=100_000)
    time.sleep(2)
    began = time.monotonic()
    process.terminate()
    assert process.wait(10) == OK
    assert time.monotonic() - began < 5.0


def test_the_limit_of_open_files_is_raised(place: Place) -> None:
    """B80: launchd gives 256 files; each client needs one."""
    command = f"ulimit -S -n 64; exec {sys.executable} {RUN_DAEMON} {place.run} {place.endpoint}"
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
        cwd="/",
    )
    place.started.append(process)
    clients = [place.client() for _ in range(100)]
    assert clients[0].ask("stats")["gauges"]["clients"] == 100


def test_more_clients_than_open_files_do_not_end_it(place: Place) -> None:
    """B80: libzmq aborts where a connection finds no file. Those one too many are ended, others stay."""
    command = f"ulimit -n 128; exec {sys.executable} {RUN_DAEMON} {place.run} {place.endpoint}"
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
        cwd="/",
    )
    place.started.append(process)
    first, crowd = place.client(), []
    for _ in range(12):
        for _ in range(15):  # more than these at once may come before one of them is counted
            crowd.append(place.context.socket(zmq.DEALER))
            crowd[-1].set(zmq.LINGER, 0)
            crowd[-1].set(zmq.RECONNECT_IVL, 10**6)
            crowd[-1].connect(place.endpoint)
        before = first.ask("stats")["gauges"]["clients"]
        assert before <= 64
    counters = first.ask("stats")["counters"]
    assert counters["clients_expelled"] > 0
    assert process.poll() is None
    for client in crowd:
        client.close()
    assert first.ask("list")["kind"] == "result"
    until_s = time.monotonic() + 20
    while first.ask("stats")["gauges"]["clients"] > 1:  # who comes before they are gone may be one too many
        assert time.monotonic() < until_s
        time.sleep(0.05)
    assert place.client().ask("list")["kind"] == "result"


def test_it_is_idle_when_idle(place: Place) -> None:
    """B59: no processor time without work, after clients came and went."""
    process = place.start()
    for _ in range(20):
        place.client().close()
    watched = psutil.Process(process.pid)
    before = sum(watched.cpu_times()[:2])
    time.sleep(2)
    assert sum(watched.cpu_times()[:2]) - before < 0.1


def test_the_command_stops_what_runs(place: Place) -> None:
    process = place.start()
    place.client()
    stopped = place.cli("stop")
    assert (stopped.returncode, stopped.stdout) == (0, f"Stopped process {process.pid}.\n")
    assert process.wait(5) == OK
    again = place.cli("stop")
    assert (again.returncode, again.stdout) == (0, "No daemon is running.\n")


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--model", "/no/such/model"], {}, "There is no model at /no/such/model."),
        (["--model", "/" + "x" * 1023], {}, "There is no model at /xxx"),
        (["--kv-budget", "much"], {}, "'much' is no size"),
        (["--endpoint", "tcp://0.0.0.0:5555"], {}, "stateroom keys init"),
        (["--endpoint", "tcp://127.0.0.1:5555"], {}, "stateroom keys init"),
        (["--listen", "tcp://127.0.0.1:5555"], {}, "stateroom keys init"),
        (["--listen", "ipc:///tmp/s"], {}, "--listen takes tcp://HOST:PORT"),
        (["--insecure-loopback", "--endpoint", "tcp://0.0.0.0:5555"], {}, "this machine alone"),
        (["--insecure-loopback", "--endpoint", "tcp://example.org:5555"], {}, "this machine alone"),
        (["--insecure-loopback", "--listen", "tcp://*:5555"], {}, "this machine alone"),
        (["--endpoint", "ipc://@abstract"], {}, "open to every user"),
        (["--endpoint", "inproc://x"], {}, "ipc:// or tcp://, not on"),
        ([], {"STATEROOM_RUNTIME_DIR": "/tmp/" + "long/" * 30}, "bytes, and this system takes"),
        ([], {"STATEROOM_RUNTIME_DIR": "/tmp/" + "é" * 45}, "bytes, and this system takes"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_made(
    place: Place, arguments: list[str], environment: dict[str, str], said: str
) -> None:
    """B64, B76: one clear line and an exit code."""
    done = place.cli("serve", *arguments, **environment)
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.returncode == CONFIG
    assert not place.run.exists()


def test_tcp_on_this_machine(place: Place) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    place.start("step_s=0.01", endpoint=endpoint)
    client = place.client(endpoint)
    session = client.open()
    client.send("decode", session=session, max_tokens=100_000)
    client.close()
    other = place.client(endpoint)
    deadline = time.monotonic() + 2
    while other.ask("stats")["gauges"]["running"]:
        assert time.monotonic() < deadline


def test_an_endpoint_that_cannot_be_bound_is_said(place: Place) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, said = place.refused(endpoint=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
    assert code == CONFIG
    assert "Address already in use" in said
