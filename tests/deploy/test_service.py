"""`stateroom service` as it is typed, and what a service's daemon leaves in its manager's file."""

from __future__ import annotations

import os
import plistlib
import pwd
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stateroom.client import connect
from stateroom.client.errors import ClientError
from stateroom.daemon.doctor.service import Told, judged
from stateroom.daemon.exits import CONFIG, OK, RUNNING
from stateroom.daemon.lock import LOCK_NAME, Lock
from stateroom.daemon.serve import STDERR_BYTES_MOST
from stateroom.deploy.service import Service, Status

ANSWER_S = 60.0
NAME = pwd.getpwuid(os.getuid()).pw_name


class Account:
    """A user's home, and commands typed in it."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.run = self.home / "run"
        self.run.mkdir(mode=0o700, parents=True)
        self.env = {
            "HOME": str(folder),
            "PATH": "/usr/bin:/bin",
            "STATEROOM_HOME": str(self.home),
            "STATEROOM_RUNTIME_DIR": str(self.run),
        }

    def types(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "stateroom.daemon.cli", *words]
        return subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=ANSWER_S, stdin=subprocess.DEVNULL
        )


@pytest.fixture
def account(short_folder: Path) -> Account:
    return Account(short_folder)


def test_show_prints_what_would_be_installed_and_installs_nothing(account: Account) -> None:
    before = sorted(account.home.rglob("*"))
    done = account.types("service", "show", "--kv-budget", "1GiB", "--", "--rows-max", "4")
    assert done.returncode == OK
    assert '"serve" "--log" "json" "--kv-budget=1073741824" "--rows-max" "4"' in done.stdout
    assert "WantedBy=default.target" in done.stdout
    assert "stateroom.service" in done.stderr
    assert sorted(account.home.rglob("*")) == before


def test_show_a_service_of_the_machine(account: Account) -> None:
    done = account.types("service", "show", "--boot", "--activate")
    assert done.returncode == OK
    assert f"User={NAME}" in done.stdout
    assert f"SocketUser={NAME}" in done.stdout
    assert f"ListenStream={account.run}/stateroom.sock" in done.stdout
    assert "/etc/systemd/system/stateroom.socket" in done.stderr


def test_a_service_of_somebody_else_has_none_of_our_places(account: Account) -> None:
    """His daemon would refuse a configuration of ours, and could not write where our models are cached."""
    (account.home / "own.toml").touch(mode=0o600)
    account.env |= {"STATEROOM_CONFIG": str(account.home / "own.toml"), "HF_HOME": str(account.home)}
    other = next(user.pw_name for user in pwd.getpwall() if user.pw_uid != os.getuid())
    assert f"STATEROOM_CONFIG={account.home}" in account.types("service", "show", "--boot").stdout
    done = account.types("service", "show", "--boot", "--user", other)
    assert f"User={other}" in done.stdout
    assert str(account.home) not in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("show", "--user", NAME), "--user goes with --boot"),
        (("show", "--boot", "--user", "nobody-of-that-name"), "There is no user nobody-of-that-name"),
        (("install", "--activate", "--", "--endpoint", "tcp://127.0.0.1:5555"), "for a local endpoint"),
        (("install", "--activate", "--", "--endpoint=ipc://@abstract"), "for a local endpoint"),
        (("install", "--model", "/nowhere/at/all"), "There is no model at /nowhere/at/all"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_done(
    account: Account, words: tuple[str, ...], says: str
) -> None:
    before = sorted(account.home.rglob("*"))
    done = account.types("service", *words)
    assert (done.returncode, says in done.stderr) == (CONFIG, True), done.stderr
    assert sorted(account.home.rglob("*")) == before


@pytest.mark.parametrize("words", [("install", "--activate"), ("install",), ("start",), ("restart",)])
def test_a_manager_is_not_put_before_a_daemon_that_runs(account: Account, words: tuple[str, ...]) -> None:
    """One that listens would take the path of its socket."""
    lock = Lock(account.run / LOCK_NAME)
    lock.take("ipc:///somewhere")
    try:
        done = account.types("service", *words)
    finally:
        lock.release()
    assert done.returncode == RUNNING
    assert f"A daemon is running already, process {os.getpid()}" in done.stderr


def test_what_is_activated_is_told_its_endpoint(account: Account) -> None:
    service = Service(socket=account.run / "s")
    assert service.command[-2:] == ["--activated", f"--endpoint=ipc://{account.run}/s"]
    assert plistlib.dumps({"ProgramArguments": service.command})


def test_the_doctor_finds_nothing_wrong_with_one_that_waits() -> None:
    waits = judged(Status(True, False, where="x.service", listening=True), Told())
    assert (waits.state, "its first client starts it" in waits.finding) == ("pass", True)
    assert judged(Status(True, False, where="x.service"), Told()).state != "pass"


@pytest.mark.system
def test_the_managers_file_stays_small(account: Account) -> None:
    """B81: cut short in place, since the manager holds it open; and the log's lines don't go there too."""
    file = account.home / "service.log"
    file.write_bytes(b"x" * (STDERR_BYTES_MOST + 1))
    with file.open("ab") as stderr:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "stateroom.daemon.cli", "serve", "--log", "json"],
            env=account.env | {"STATEROOM_SERVICE": "launchd"},
            stderr=stderr,
        )
    try:
        end = time.monotonic() + ANSWER_S
        while True:
            try:
                with connect(endpoint=f"ipc://{account.run}/stateroom.sock", app="test") as room:
                    room.hello()
                break
            except ClientError:
                assert time.monotonic() < end
    finally:
        daemon.terminate()
        daemon.wait(ANSWER_S)
    assert file.read_text() == ""
    assert '"event": "serving"' in (account.home / "logs" / "stateroom.log").read_text()


@pytest.mark.parametrize("option", ["--rows-max=nine", "--rows-max=9999", "--no-such-option"])
def test_launchd_does_not_try_again_what_is_not_understood(account: Account, option: str) -> None:
    """It would for ever, for any code but 0; a person, and systemd, are told by 2."""
    command = [sys.executable, "-m", "stateroom.daemon.cli", "serve", option]
    by_launchd = account.env | {"STATEROOM_SERVICE": "launchd"}
    told = [
        subprocess.run(command, env=env, capture_output=True).returncode for env in (account.env, by_launchd)
    ]
    assert told == [2, 0]
