"""The LaunchAgent: what launchd is told, and all of its life with a stand-in that runs the real daemon.

B78 (what can't work isn't started again for ever), B79 (time to stop), B80 (an empty environment, `/`), B82
(no desktop session).
"""

from __future__ import annotations

import json
import os
import plistlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.tiny import write_tiny_model

from stateroom.client import connect
from stateroom.client.errors import ClientError
from stateroom.daemon.activation import LAUNCHD_NAME
from stateroom.daemon.config import Patience
from stateroom.daemon.exits import CONFIG
from stateroom.deploy.launchd import BUSY, LABEL, NO_DOMAIN, NO_SCREEN, TRIES, Launchd, plist
from stateroom.deploy.programs import Said, run
from stateroom.deploy.service import PATH, STOP_S, Service, ServiceError, Status, User

ANSWER_S = 60.0
UID = 501
TRANSCRIPTS = Path(__file__).with_name("transcripts")
FAKE = Path(__file__).parent / "fake_launchctl.py"
KEYS = {  # of launchd.plist(5), with the type of each
    "Label": str,
    "ProgramArguments": list,
    "EnvironmentVariables": dict,
    "WorkingDirectory": str,
    "RunAtLoad": bool,
    "KeepAlive": dict,
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "SoftResourceLimits": dict,
    "Umask": int,
    "StandardOutPath": str,
    "StandardErrorPath": str,
    "LimitLoadToSessionType": list,
}


class Mac:
    """A home, and launchd's stand-in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "launchd"
        self.agents = folder / "LaunchAgents"
        (self.folder / "agents").mkdir(parents=True)
        self.domains(f"gui/{UID}", f"user/{UID}")
        self.pauses = 0

    def domains(self, *names: str) -> None:
        (self.folder / "domains").write_text(" ".join(names))

    def fail(self, *failures: tuple[str, int]) -> None:
        (self.folder / "failures.json").write_text(json.dumps(failures))

    @property
    def transcript(self) -> list[str]:
        file = self.folder / "transcript"
        return file.read_text().splitlines() if file.exists() else []

    def launchd(self) -> Launchd:
        os.environ["FAKE_LAUNCHD"] = str(self.folder)

        def program(command: Any) -> Said:
            assert command[0] == "launchctl"
            return run([sys.executable, str(FAKE), *command[1:]])

        return Launchd(program, self._pause, UID, self.agents)

    def _pause(self, seconds: float) -> None:
        self.pauses += 1
        time.sleep(seconds / 10)

    def end(self) -> None:
        for file in (self.folder / "agents").glob("*/state.json"):
            state = json.loads(file.read_text())
            for pid in (state["own"], state["pid"]):
                if pid and psutil.pid_exists(pid):
                    for process in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):
                        process.kill()


@pytest.fixture
def mac(tmp_path: Path) -> Iterator[Mac]:
    made = Mac(tmp_path)
    yield made
    made.end()
    os.environ.pop("FAKE_LAUNCHD", None)


@pytest.fixture
def service(short_folder: Path) -> Service:
    """Of something that stays and does nothing, until a test wants the daemon."""
    return Sleeper(
        home=short_folder / "home", runtime=short_folder / "run", user_home=short_folder, inherited={}
    )


class Sleeper(Service):
    @property
    def command(self) -> list[str]:
        return [self.python, "-c", "import time; time.sleep(60)", *self.arguments]


def until(so: Callable[[], bool], seconds: float = ANSWER_S) -> None:
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


# ---------------------------------------------------------------- what launchd is told


def test_the_plist_is_one(service: Service) -> None:
    made = plist(service)
    assert plistlib.loads(plistlib.dumps(made)) == made
    assert {key: type(value) for key, value in made.items()} == KEYS
    assert made["ProcessType"] != "Background"
    assert made["KeepAlive"] == {"SuccessfulExit": False}


def test_a_plist_that_listens_starts_nothing_by_itself(service: Service) -> None:
    """KeepAlive with SuccessfulExit would: launchd.plist(5) says that it implies RunAtLoad."""
    made = plist(replace(service, socket=service.runtime / "s"))
    assert plistlib.loads(plistlib.dumps(made)) == made
    assert not {"RunAtLoad", "KeepAlive"} & set(made)
    assert made["Sockets"] == {
        LAUNCHD_NAME.decode(): {
            "SockType": "stream",
            "SockPathName": str(service.runtime / "s"),
            "SockPathMode": 0o600,
        }
    }


def test_a_service_of_the_machine_runs_as_its_user(service: Service) -> None:
    """A LaunchDaemon: no session to be limited to, a user named, and his the socket."""
    user = User("ann", 502, service.user_home)
    made = plist(service, user)
    assert {*KEYS, "UserName"} - set(made) == {"LimitLoadToSessionType"}
    assert made["UserName"] == "ann"
    assert made["EnvironmentVariables"]["HOME"] == str(service.user_home)
    assert (
        plist(replace(service, socket=service.home / "s"), user)["Sockets"]["Listeners"]["SockPathOwner"]
        == 502
    )
    ((path, text),) = Launchd(folder=service.home).files(service, user).items()
    assert path == Path(f"/Library/LaunchDaemons/{LABEL}.plist")
    assert plistlib.loads(text.encode()) == made


def test_nothing_is_left_to_launchd_to_find(short_folder: Path) -> None:
    """B80: absolute paths, no `~`, no variable to expand, its own PATH."""
    made = plist(Service(("--model=/m/x",), short_folder / "h", short_folder / "r", short_folder, {}))
    paths = [made["ProgramArguments"][0], made["WorkingDirectory"], made["StandardErrorPath"]]
    paths += [
        made["EnvironmentVariables"][name] for name in ("HOME", "STATEROOM_HOME", "STATEROOM_RUNTIME_DIR")
    ]
    assert all(Path(path).is_absolute() for path in paths)
    words = [*made["ProgramArguments"], *made["EnvironmentVariables"].values(), *paths]
    assert not any("~" in word or "$" in word for word in words)
    assert made["EnvironmentVariables"]["PATH"] == PATH


def test_it_has_time_to_stop() -> None:
    """B79: more than the daemon takes at the most."""
    patience = Patience()
    assert patience.finals_s + patience.leave_s + patience.kill_s < STOP_S


# ---------------------------------------------------------------- verbs


def test_install_twice_changes_nothing(mac: Mac, service: Service) -> None:
    launchd = mac.launchd()
    first = launchd.install(service)
    assert (first.installed, first.running) == (True, True)
    again = launchd.install(service)
    assert again.pid == first.pid
    assert sum(line.startswith("bootstrap") for line in mac.transcript) == 1


def test_an_upgrade_takes_the_place_of_the_old_one(mac: Mac, service: Service) -> None:
    launchd = mac.launchd()
    first = launchd.install(service)
    newer = Sleeper(("--new",), service.home, service.runtime, service.user_home, {})
    second = launchd.install(newer)
    assert second.running
    assert second.pid != first.pid
    assert first.pid is not None
    assert not psutil.pid_exists(first.pid)
    assert second.pid is not None
    assert "--new" in psutil.Process(second.pid).cmdline()


def test_uninstall_leaves_nothing_and_may_be_repeated(mac: Mac, service: Service) -> None:
    launchd = mac.launchd()
    pid = launchd.install(service).pid
    launchd.uninstall()
    launchd.uninstall()
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert list(mac.agents.iterdir()) == []
    assert list((mac.folder / "agents").iterdir()) == []
    found = launchd.status()
    assert (found.installed, found.running, found.pid) == (False, False, None)


def test_start_stop_restart(mac: Mac, service: Service) -> None:
    launchd = mac.launchd()
    with pytest.raises(ServiceError, match="service install"):
        launchd.start()
    first = launchd.install(service).pid
    assert launchd.start().pid == first
    launchd.restart()
    until(lambda: launchd.status().pid not in (None, first))
    launchd.stop()
    stopped = launchd.status()
    assert (stopped.installed, stopped.running) == (True, False)
    assert launchd.start().running


# ---------------------------------------------------------------- what launchctl complains of


@pytest.mark.parametrize("code", BUSY)
def test_what_is_not_gone_yet_is_waited_for(mac: Mac, service: Service, code: int) -> None:
    mac.fail(("bootstrap", code), ("bootstrap", code))
    assert mac.launchd().install(service).running
    assert mac.pauses >= 2


def test_but_not_for_ever(mac: Mac, service: Service) -> None:
    mac.fail(*[("bootstrap", 5)] * (TRIES + 1))
    with pytest.raises(ServiceError, match=r"launchctl refused \(5\)"):
        mac.launchd().install(service)


def test_without_a_desktop_it_lives_in_the_background(mac: Mac, service: Service) -> None:
    """B82: over ssh."""
    mac.domains(f"user/{UID}")
    launchd = mac.launchd()
    found = launchd.install(service)
    assert found.running
    assert found.note == NO_SCREEN
    assert launchd.install(service).pid == found.pid
    launchd.uninstall()
    assert not launchd.status().running


@pytest.mark.parametrize("code", NO_DOMAIN)
def test_a_desktop_that_takes_no_agents(mac: Mac, service: Service, code: int) -> None:
    mac.fail(("bootstrap", code))
    found = mac.launchd().install(service)
    assert found.running
    assert found.note == NO_SCREEN


def test_other_codes_are_told(mac: Mac, service: Service) -> None:
    mac.fail(("bootstrap", 133))
    with pytest.raises(ServiceError, match=r"launchctl refused \(133\): bootstrap failed"):
        mac.launchd().install(service)


def test_an_upgrade_that_was_refused_is_done_when_it_is_asked_for_again(mac: Mac, service: Service) -> None:
    launchd = mac.launchd()
    first = launchd.install(service)
    newer = Sleeper(("--new",), service.home, service.runtime, service.user_home, {})
    mac.fail(("bootout", 133))
    with pytest.raises(ServiceError, match=r"launchctl refused \(133\)"):
        launchd.install(newer)
    assert launchd.status().pid == first.pid
    second = launchd.install(newer).pid
    assert second is not None
    assert "--new" in psutil.Process(second).cmdline()


# ---------------------------------------------------------------- all of it, as it was said


def retold(mac: Mac, *folders: Path) -> list[str]:
    """A transcript without this machine's paths, nor how often it was asked whether something is gone yet."""
    lines: list[str] = []
    booting_out = False
    for line in mac.transcript:
        for folder, name in zip(folders, ("HOME", "AGENTS"), strict=True):
            line = line.replace(str(folder), name)
        booting_out = line.startswith("bootout") or (booting_out and line.startswith("print"))
        if not (booting_out and line.startswith("print") and line.endswith("-> 0")):
            lines.append(line)
    return lines


def compare(name: str, told: list[str]) -> None:
    """With what is kept; WRITE_TRANSCRIPTS=1 keeps it anew."""
    file = TRANSCRIPTS / f"{name}.txt"
    if os.environ.get("WRITE_TRANSCRIPTS") == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(told) + "\n")
    assert told == file.read_text().splitlines()


class Story:
    """Verbs with what launchctl was told for each."""

    def __init__(self, mac: Mac, folder: Path) -> None:
        self.mac, self.launchd, self.folder = mac, mac.launchd(), folder
        self.told: list[str] = []

    def does(self, what: str, verb: Callable[[], Any]) -> Any:
        before = len(retold(self.mac, self.folder, self.mac.agents))
        try:
            result = verb()
            said = "done" if result is None else shown(result)
        except ServiceError as error:
            result, said = error, f"refused: {error}"
        lines = retold(self.mac, self.folder, self.mac.agents)[before:]
        self.told += [f"# {what}: {said}", *lines]
        return result


def shown(found: Status) -> str:
    words = [word for word in ("installed", "running", "listening") if getattr(found, word)]
    return ", ".join(words or ["nothing"]) + (f" ({found.note})" if found.note else "")


def test_the_whole_story(mac: Mac, service: Service, short_folder: Path) -> None:
    """Install, look, kill, upgrade, uninstall: what launchctl is told for each."""
    story = Story(mac, short_folder)
    launchd = story.launchd
    first = story.does("install", lambda: launchd.install(service)).pid
    story.does("install again", lambda: launchd.install(service))
    os.kill(first, signal.SIGKILL)
    until(lambda: launchd.status().pid not in (None, first))
    (mac.folder / "transcript").write_text("")
    story.does("status", launchd.status)
    newer = Sleeper(("--new",), service.home, service.runtime, service.user_home, {})
    story.does("upgrade", lambda: launchd.install(newer))
    story.does("uninstall", launchd.uninstall)
    story.does("status", launchd.status)
    compare("life", story.told)


@pytest.mark.parametrize("code", [5, 37, 113, 125])
def test_each_code_through_the_whole_story(mac: Mac, service: Service, short_folder: Path, code: int) -> None:
    """launchctl fails once in each verb: done all the same, or refused in words and done when asked again."""
    story = Story(mac, short_folder)
    launchd = story.launchd
    mac.fail(("bootstrap", code))
    if isinstance(story.does("install", lambda: launchd.install(service)), ServiceError):
        assert code == 113
        story.does("install again", lambda: launchd.install(service))
    first = launchd.status()
    assert first.running
    newer = Sleeper(("--new",), service.home, service.runtime, service.user_home, {})
    mac.fail(("bootout", code), ("bootstrap", code))
    if isinstance(story.does("upgrade", lambda: launchd.install(newer)), ServiceError):
        assert code in (113, 125)  # 125: of the background's domain, where it was put before
        story.does("upgrade again", lambda: launchd.install(newer))
    second = launchd.status()
    assert second.pid is not None
    assert second.pid != first.pid
    assert "--new" in psutil.Process(second.pid).cmdline()
    mac.fail(("bootout", code))
    story.does("uninstall", launchd.uninstall)
    assert list(mac.agents.iterdir()) == []
    assert list((mac.folder / "agents").iterdir()) == []
    assert not psutil.pid_exists(second.pid)
    compare(f"code-{code}", story.told)


# ---------------------------------------------------------------- launchd listens


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """launchd's own function, for a program that it started."""
    compiler = shutil.which("cc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler here")
    made = tmp_path_factory.mktemp("library") / "liblaunch.so"
    source = Path(__file__).with_name("launch_activate_socket.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-xc", str(source), "-o", str(made)], check=True, timeout=60
    )
    return made


@pytest.mark.system
def test_launchd_listens_and_starts_it_for_its_first_client(
    mac: Mac, short_folder: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B85: there and back again, by installing it anew; and nothing is left."""
    monkeypatch.setenv("MINI_LAUNCHD_LIBRARY", str(library))
    home = short_folder / "home"
    plain = Service((), home, home / "run", short_folder, {})
    path = plain.runtime / "stateroom.sock"
    activated = replace(plain, socket=path)
    before = set(short_folder.rglob("*"))

    def answers() -> bool:
        try:
            with connect(endpoint=f"ipc://{path}", app="test") as room:
                return room.hello().server == "stateroom"
        except ClientError:
            return False

    story = Story(mac, short_folder)
    launchd = story.launchd
    found = story.does("install --activate", lambda: launchd.install(activated))
    assert (found.installed, found.running, found.listening) == (True, False, True)
    assert answers()
    first = launchd.status().pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: launchd.status().pid != first)
    assert answers()
    (mac.folder / "transcript").write_text("")
    story.does("stop", launchd.stop)
    assert not path.exists()
    assert story.does("start", launchd.start).listening
    until(lambda: launchd.status().running)
    assert answers()
    (mac.folder / "transcript").write_text("")
    assert not story.does("install", lambda: launchd.install(plain)).listening
    until(answers)
    (mac.folder / "transcript").write_text("")
    assert story.does("install --activate", lambda: launchd.install(activated)).listening
    story.does("uninstall", launchd.uninstall)
    compare("activated", story.told)
    assert list(mac.agents.iterdir()) == []
    left = {path.relative_to(home).as_posix() for path in set(short_folder.rglob("*")) - before - {home}}
    assert {name for name in left if not name.startswith(("logs", "state"))} <= {"run", "run/stateroom.lock"}


# ---------------------------------------------------------------- the real daemon


@pytest.mark.system
def test_the_whole_life(mac: Mac, short_folder: Path, tmp_path: Path) -> None:
    """Install, kill, upgrade, uninstall: it is there, it comes back, it is anew, it is gone."""
    model = write_tiny_model(tmp_path / "tiny")
    home, runtime = short_folder / "home", short_folder / "run"
    service = Service((f"--model={model}",), home, runtime, short_folder, {})
    launchd = mac.launchd()
    endpoint = f"ipc://{runtime}/stateroom.sock"

    def answers() -> bool:
        try:
            with connect(endpoint=endpoint, app="test") as room:
                return bool(room.hello().models)
        except ClientError:
            return False

    first = launchd.install(service).pid
    until(answers)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: launchd.status().pid not in (None, first))
    until(answers)
    second = launchd.status().pid
    upgraded = Service((f"--model={model}", "--rows-max=4"), home, runtime, short_folder, {})
    third = launchd.install(upgraded).pid
    assert third not in (None, second)
    until(answers)
    launchd.uninstall()
    assert not answers()
    assert not any(
        "stateroom" in word for p in psutil.process_iter() for word in _words(p) if str(home) in word
    )
    assert list(mac.agents.iterdir()) == []


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.system
def test_what_cannot_work_is_not_tried_for_ever(mac: Mac, short_folder: Path) -> None:
    """B78: a model that isn't there. It leaves with 0, and the log tells why."""
    home = short_folder / "home"
    service = Service(("--model=/nowhere/at/all",), home, short_folder / "run", short_folder, {})
    launchd = mac.launchd()
    launchd.install(service)
    until(lambda: launchd.status().last_exit == "0")
    time.sleep(1.0)
    (state,) = (mac.folder / "agents").glob("*/state.json")
    assert json.loads(state.read_text())["starts"] == 1
    assert "There is no model at /nowhere/at/all" in service.log.read_text()
    assert CONFIG != 0  # and without launchd that is its code
    assert LABEL in state.parent.name
