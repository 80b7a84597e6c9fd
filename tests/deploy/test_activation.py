"""B85: a socket that systemd or launchd listens at. What is refused, and real daemons that are handed one."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.daemon.test_other_users import ANSWERED, NOBODY, REFUSED, visit
from tests.tiny import write_tiny_model

from stateroom.client import connect, connect_async
from stateroom.client.timeouts import CONNECT_TIMEOUT_S
from stateroom.daemon.activation import FIRST, SYSTEMD, from_launchd, from_systemd, taken
from stateroom.daemon.exits import CONFIG, FORBIDDEN, OK, RUNNING, Leave

ANSWER_S = 60.0
WAITING = 4  # clients that are there before the daemon is
HAND_OVER = Path(__file__).with_name("hand_over.py")
ACTIVATE = shutil.which("systemd-socket-activate")


class Place:
    """A home, a socket that listens where clients look, and the daemons that were handed it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.run.mkdir(mode=0o700)
        self.path = self.run / "stateroom.sock"
        self.endpoint = f"ipc://{self.path}"
        self.log = folder / "daemon.log"
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("STATEROOM_")}
        self.env |= {
            "HOME": str(folder),
            "STATEROOM_HOME": str(folder / "home"),
            "STATEROOM_RUNTIME_DIR": str(self.run),
        }
        self.started: list[subprocess.Popen[bytes]] = []
        self.sockets: list[socket.socket] = []

    def listen(
        self, path: Path | None = None, family: int = socket.AF_UNIX, kind: int = socket.SOCK_STREAM
    ) -> socket.socket:
        made = socket.socket(family, kind)
        self.sockets.append(made)
        if family == socket.AF_UNIX:
            made.bind(str(path or self.path))
            (path or self.path).chmod(0o600)
        if kind == socket.SOCK_STREAM:
            made.listen(16)
        return made

    def start(self, *arguments: str, handed: socket.socket | None = None) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "stateroom.daemon.cli", "serve", "--log", "json", *arguments]
        if handed is not None:
            command = [sys.executable, str(HAND_OVER), str(handed.fileno()), *command]
        return self.run_program(command, () if handed is None else (handed.fileno(),))

    def run_program(self, command: list[str], descriptors: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            self.started.append(
                subprocess.Popen(command, env=self.env, stderr=log, pass_fds=descriptors, umask=0o077)
            )
        return self.started[-1]

    def refused(self, *arguments: str, handed: socket.socket | None = None) -> tuple[int, str]:
        process = self.start(*arguments, handed=handed)
        return process.wait(ANSWER_S), self.log.read_text().splitlines()[-1]

    def ask(self) -> str:
        with connect(endpoint=self.endpoint, app="test", timeout_s=ANSWER_S) as room:
            return room.hello().server

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                below = psutil.Process(process.pid).children(recursive=True)
                process.kill()
                for child in below:
                    child.kill()
            process.wait()
        for made in self.sockets:
            made.close()


@pytest.fixture
def place(short_folder: Path) -> Iterator[Place]:
    made = Place(short_folder)
    yield made
    made.close()


# ---------------------------------------------------------------- what systemd and launchd say


def variables(pid: int, count: str = "1") -> dict[str, str]:
    return {"LISTEN_FDS": count, "LISTEN_PID": str(pid), "LISTEN_FDNAMES": "a", "PATH": "/bin"}


@pytest.mark.parametrize(
    "told",
    [
        {"PATH": "/bin"},
        variables(os.getpid() + 1),
        *(variables(os.getpid(), count) for count in ("0", "x", "-1", "\N{SUPERSCRIPT TWO}", "9" * 5_000)),
    ],
)
def test_variables_for_somebody_else_hand_nothing_over(told: dict[str, str]) -> None:
    assert from_systemd(told, os.getpid()) is None
    assert told == {"PATH": "/bin"}  # and no child of ours takes them for its own


def test_variables_that_name_what_is_not_there() -> None:
    limit = 3 + 16
    free = next(at for at in range(FIRST, limit + 1) if not Path(f"/proc/self/fd/{at}").exists())
    with pytest.raises(Leave, match="not there") as refused:
        from_systemd(variables(os.getpid(), str(free - FIRST + 1)), os.getpid())
    assert refused.value.code == CONFIG


class Library:
    """libSystem, as far as its launch_activate_socket(3) goes."""

    def __init__(self, code: int, *descriptors: int) -> None:
        self.code, self.array = code, (ctypes.c_int * len(descriptors))(*descriptors)
        self.freed = 0
        self.asked: list[bytes] = []

    def launch_activate_socket(self, name: bytes, descriptors: Any, count: Any) -> int:
        self.asked.append(name)
        descriptors._obj.contents = ctypes.cast(self.array, ctypes.POINTER(ctypes.c_int)).contents
        count._obj.value = len(self.array)
        return self.code

    def free(self, array: Any) -> None:
        assert ctypes.addressof(array.contents) == ctypes.addressof(self.array)
        self.freed += 1


def test_what_launchd_hands_over_is_taken_once(place: Place) -> None:
    handed = place.listen().detach()
    library = Library(0, handed)
    assert taken(place.endpoint, {}, library) == handed
    assert (library.asked, library.freed) == ([b"Listeners"], 1)
    assert not os.get_inheritable(handed)
    assert not os.get_blocking(handed)
    os.close(handed)


def test_launchd_that_did_not_start_us_hands_nothing_over(place: Place) -> None:
    with pytest.raises(Leave, match="No socket was handed over"):
        taken(place.endpoint, {}, Library(errno.ESRCH))
    assert from_launchd(object()) is None


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EALREADY])
def test_launchd_without_that_socket(place: Place, code: int) -> None:
    with pytest.raises(Leave, match=f"no socket 'Listeners' for this service: {os.strerror(code)}"):
        taken(place.endpoint, {}, Library(code))


# ---------------------------------------------------------------- what is handed over


def refusal(place: Place, *descriptors: int) -> Leave:
    with pytest.raises(Leave) as refused:
        taken(place.endpoint, {}, Library(0, *descriptors))
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)  # nothing that was refused stays open
    return refused.value


def test_what_is_no_listening_stream_is_refused_by_name(place: Place) -> None:
    network = place.listen(family=socket.AF_INET)
    datagrams = place.listen(place.run / "d", kind=socket.SOCK_DGRAM)
    connected, other = socket.socketpair()
    place.sockets.append(other)
    file = os.open(place.run / "file", os.O_CREAT | os.O_RDWR)
    for descriptor, what in (
        (network.detach(), "a socket of a network"),
        (datagrams.detach(), "a socket that is no stream"),
        (connected.detach(), "a socket that doesn't listen"),
        (file, "no socket"),
    ):
        refused = refusal(place, descriptor)
        assert refused.code == CONFIG
        assert f"launchd handed over {what}, not a socket that listens at {place.path}" in refused.message


def test_another_path_is_refused_with_both(place: Place) -> None:
    elsewhere = place.run / "other.sock"
    refused = refusal(place, place.listen(elsewhere).detach())
    assert refused.code == CONFIG
    assert str(elsewhere) in refused.message
    assert str(place.path) in refused.message


def test_two_sockets_are_one_too_many(place: Place) -> None:
    refused = refusal(place, place.listen().detach(), place.listen(place.run / "b").detach())
    assert "2 sockets" in refused.message


def test_a_socket_that_others_can_open_is_refused(place: Place) -> None:
    handed = place.listen().detach()
    place.path.chmod(0o666)
    assert refusal(place, handed).code == FORBIDDEN


def test_a_socket_whose_file_is_gone_is_refused(place: Place) -> None:
    handed = place.listen().detach()
    place.path.unlink()
    assert "nothing is any more" in refusal(place, handed).message


def test_a_path_over_a_link_is_the_same_path(place: Place) -> None:
    link = place.folder / "link"
    link.symlink_to(place.run)
    handed = place.listen().detach()
    assert taken(f"ipc://{link}/stateroom.sock", {}, Library(0, handed)) == handed
    os.close(handed)


def test_a_network_endpoint_takes_none(place: Place) -> None:
    with pytest.raises(Leave, match="a local one"):
        taken("tcp://127.0.0.1:5555", {}, Library(0))


# ---------------------------------------------------------------- real daemons


@pytest.mark.system
def test_nothing_handed_over_is_said_and_permanent(place: Place) -> None:
    code, said = place.refused("--activated")
    assert (code, "No socket was handed over" in said) == (CONFIG, True)


@pytest.mark.system
def test_who_came_before_the_daemon_is_answered_and_the_socket_outlives_it(
    place: Place, tmp_path: Path
) -> None:
    """They wait in the backlog. Killed, it leaves the socket, and the next one answers there."""
    handed = place.listen()
    answers: list[str] = []
    clients = [threading.Thread(target=lambda: answers.append(place.ask())) for _ in range(WAITING)]
    for client in clients:
        client.start()
    model = write_tiny_model(tmp_path / "tiny")
    first = place.start("--activated", f"--model={model}", handed=handed)
    for client in clients:
        client.join(ANSWER_S)
    assert answers == ["stateroom"] * WAITING
    inode = f"socket:[{os.fstat(handed.fileno()).st_ino}]"
    assert inode in open_in(first.pid)
    until(lambda: "stateroom.daemon.engine.worker" in commands_below(first.pid), first)
    for child in psutil.Process(first.pid).children(recursive=True):
        assert inode not in open_in(child.pid)
        assert not set(SYSTEMD) & set(child.environ())
    first.send_signal(signal.SIGKILL)
    first.wait(ANSWER_S)
    second = place.start("--activated", handed=handed)
    assert place.ask() == "stateroom"
    second.terminate()
    assert second.wait(ANSWER_S) == OK
    assert place.path.is_socket()


@pytest.mark.system
def test_a_client_that_set_no_limit_waits_for_a_daemon_that_starts(place: Place) -> None:
    """Longer than for one that isn't there: somebody listens, who doesn't speak yet."""
    handed = place.listen()

    def patient() -> str:
        with connect(endpoint=place.endpoint, app="test") as room:
            return room.hello().server

    async def patient_async() -> str:
        async with connect_async(endpoint=place.endpoint, app="test") as room:
            return (await room.hello()).server

    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(patient), threads.submit(lambda: asyncio.run(patient_async()))]
        time.sleep(CONNECT_TIMEOUT_S + 0.3)
        place.start("--activated", handed=handed)
        assert [each.result(ANSWER_S) for each in waiting] == ["stateroom"] * 2


def until(so: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + ANSWER_S
    while not so():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)


def commands_below(pid: int) -> str:
    """Of a process and all below it; one that has not begun yet still looks like its parent."""
    return " ".join(word for each in psutil.Process(pid).children(recursive=True) for word in each.cmdline())


def open_in(pid: int) -> list[str]:
    return [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]


@pytest.mark.system
def test_the_second_endpoint_is_bound_as_ever(place: Place) -> None:
    """What is handed over is for one bind, and no other of that socket."""
    handed = place.listen()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place.start("--activated", "--insecure-loopback", f"--listen=tcp://127.0.0.1:{port}", handed=handed)
    assert place.ask() == "stateroom"
    with connect(endpoint=f"tcp://127.0.0.1:{port}", app="test", timeout_s=ANSWER_S) as room:
        assert room.hello().server == "stateroom"


@pytest.mark.system
@pytest.mark.skipif(os.getuid() != 0, reason="NOBODY needs a process that may become another user")
def test_other_users_are_refused_there_too(place: Place) -> None:
    place.start("--activated", handed=place.listen())
    assert place.ask() == "stateroom"
    for path, mode in ((place.folder, 0o755), (place.run, 0o755), (place.path, 0o666)):
        path.chmod(mode)
    assert visit(place.endpoint, os.getuid()) == ANSWERED
    assert visit(place.endpoint, NOBODY) == REFUSED


@pytest.mark.system
def test_the_lock_counts_as_ever(place: Place) -> None:
    place.start("--endpoint", f"ipc://{place.run}/by-hand")
    with connect(endpoint=f"ipc://{place.run}/by-hand", app="test", timeout_s=ANSWER_S) as room:
        room.hello()
    code, said = place.refused("--activated", handed=place.listen())
    assert (code, "A daemon is running already" in said) == (RUNNING, True)
    assert place.path.is_socket()


@pytest.mark.system
@pytest.mark.skipif(ACTIVATE is None, reason="no systemd-socket-activate here")
def test_systemd_hands_its_socket_over(place: Place) -> None:
    """systemd's own program listens, and becomes the daemon with the first client."""
    assert ACTIVATE is not None
    keys = ["STATEROOM_HOME", "STATEROOM_RUNTIME_DIR", "HOME"]
    serve = [sys.executable, "-m", "stateroom.daemon.cli", "serve", "--log=json", "--activated"]
    command = [ACTIVATE, f"--listen={place.path}", *(f"--setenv={name}" for name in keys), *serve]
    process = place.run_program(command)
    until(place.path.exists, process)
    place.path.chmod(0o600)  # it gives 0644, whatever the umask; a unit's SocketMode is obeyed
    assert place.ask() == "stateroom"
    process.terminate()
    assert process.wait(ANSWER_S) == OK
    assert place.path.is_socket()
