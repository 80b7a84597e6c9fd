"""Sessions outlive the daemon: what a client was told is there at the next start, however the last ended."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.daemon.conftest import Again, StartBroker
from tests.daemon.rig import Raw
from tests.daemon.scripted_worker import STRANGE

from stateroom.daemon.exits import DAMAGED, FORBIDDEN, OK, RUNNING
from stateroom.daemon.keeper import FILE_NAME
from stateroom.daemon.store.rows import ModelRow
from stateroom.daemon.store.store import Store

RUN_DAEMON = Path(__file__).with_name("run_daemon.py")
ROOT = Path(__file__).parent.parent.parent
KILLS = int(os.environ.get("STATEROOM_KILLS", "8"))
STREAMS = 4


def shown(client: Raw) -> list[dict[str, Any]]:
    """What `list` tells but for what a restart may change."""
    passing = {"tier", "kinds", "idle_s", "age_s", "expires_in_s", "checkpoints", "trim_floor"}
    listed = client.ask("list")["sessions"]
    return [
        {key: value for key, value in info.items() if key not in passing and not key.endswith("_bytes")}
        for info in listed
    ]


def test_sessions_are_there_at_once_and_as_they_were(again: Again) -> None:
    client = again().client("editor")
    base = client.open([5, 6, 7], name="base", class_="background", ttl_s=3600, kv={"scheme": "affine8"})
    client.ask("decode", session=base, max_tokens=20)
    child = client.ask("fork", session=base, names=["child"])["sessions"][0]
    client.ask("prefill", session=child, tokens=[1] * 1000)
    client.ask("trim", session=child, to=600)
    trunk = client.ask("publish", session=base, as_="prompt")["trunk"]
    (grandchild,) = client.ask("fork", trunk=trunk)["sessions"]
    client.ask("close", session=client.open(name="gone"))
    before, held = (
        shown(client),
        {each: client.ask("tokens", session=each)["tokens"] for each in (base, child)},
    )

    rig = again()
    client = rig.client("editor")
    assert shown(client) == before
    assert [info["name"] for info in before if "name" in info] == ["base", "child"]
    listed = client.ask("list")
    assert {info["tier"] for info in listed["sessions"]} == {"tokens"}
    assert [(each["as"], each["trunk"], each["length"]) for each in listed["trunks"]] == [
        ("prompt", trunk, 23)
    ]
    assert client.ask("info", session="base")["published"] == ["prompt"]
    assert client.ask("info", session=grandchild)["trunk"] == trunk
    assert rig.client("another").ask("list")["sessions"] == []
    for session, tokens in held.items():
        assert client.ask("tokens", session=session)["tokens"] == tokens
    assert client.ask("decode", session="base", max_tokens=2)["tokens"] == [23, 24]
    (fork,) = rig.client("another").ask("fork", trunk=trunk)["sessions"]
    assert client.refusal("info", session=fork)["code"] == "not_found"
    assert client.refusal("open", name="base")["code"] == "exists"
    assert client.ask("unpublish", as_="prompt")["kind"] == "result"
    assert client.open(name="gone")


def test_what_was_changed_and_closed_is_so_after_a_second_restart(again: Again) -> None:
    client = again().client()
    kept, closed = client.open([1, 2, 3], name="kept"), client.open([4], name="closed")
    client = again().client()
    client.ask("sync", session=kept, tokens=[1, 9])
    client.ask("close", session=closed)
    client = again().client()
    assert [info["session"] for info in client.ask("list")["sessions"]] == [kept]
    assert client.ask("tokens", session="kept")["tokens"] == [1, 9]


def test_time_goes_on_while_no_daemon_runs(again: Again) -> None:
    rig = again()
    client = rig.client()
    short, long = client.open(ttl_s=0.6), client.open(ttl_s=3600)
    time.sleep(0.1)
    idle_s = client.ask("info", session=long)["idle_s"]
    rig.stop()
    time.sleep(0.8)
    client = again().client()
    assert [info["session"] for info in client.ask("list")["sessions"]] == [long]
    assert client.refusal("info", session=short)["code"] == "not_found"
    info = client.ask("info", session=long)
    assert info["idle_s"] > idle_s + 0.8
    assert info["age_s"] >= info["idle_s"]
    assert info["expires_in_s"] == pytest.approx(3600 - info["idle_s"], abs=0.1)


def test_a_model_that_only_its_session_names(again: Again) -> None:
    """It is loaded from where it was; no client has to name it, nor may."""
    session = again(more={"other": "step_s=0.001"}).client().open([1, 2], model="other")
    rig = again()
    client = rig.client()
    assert client.refusal("open", model="other")["code"] == "not_found"
    assert client.ask("decode", session=session, max_tokens=1)["tokens"] == [2]


def test_a_session_whose_model_is_gone(again: Again, state: Path) -> None:
    rig = again(more={"other": "step_s=0.001"})
    session = rig.client().open([1, 2], model="other", name="left")
    rig.stop()
    store = Store(state / FILE_NAME)
    batch = rig.broker.catalog.pending.take()
    batch.rows[ModelRow, "other"] = None
    store.write(batch)
    store.close()
    client = again().client()
    (info,) = client.ask("list")["sessions"]
    assert (info["session"], info["model"], info["length"]) == (session, "other", 2)
    for op, arguments in (("decode", {"max_tokens": 1}), ("tokens", {}), ("prefill", {"tokens": [1]})):
        error = client.refusal(op, session="left", **arguments)
        assert (error["code"], error["field"]) == ("not_found", "model")
        assert "'other'" in error["message"]
    assert client.ask("info", session="left")["state"] == "idle"
    assert client.ask("close", session="left")["kind"] == "result"
    assert client.ask("list")["sessions"] == []


def test_a_session_that_does_not_fit_its_model_any_more(again: Again) -> None:
    """Another model has its name now: every request says so, and nothing is taken for what it isn't."""
    session = again().client().open([1, STRANGE])
    client = again().client()
    for op, arguments in (("decode", {"max_tokens": 1}), ("tokens", {}), ("sync", {"tokens": [1]})):
        error = client.refusal(op, session=session, **arguments)
        assert (error["code"], error["field"], error["details"]["length"]) == ("mismatch", "session", 2)
    assert client.open([1, 2])
    info = client.ask("info", session=session)
    assert (info["state"], info["length"], info["tier"]) == ("idle", 2, "tokens")
    assert client.ask("close", session=session)["kind"] == "result"


def test_a_daemon_without_a_state_directory_keeps_nothing(start_broker: StartBroker) -> None:
    rig = start_broker()
    client = rig.client()
    client.ask("decode", session=client.open(), max_tokens=50)
    assert len(rig.look(lambda broker: broker.catalog.pending)) == 0
    assert not any(name.startswith("journal") for name in client.ask("stats")["gauges"])


def test_stats_tell_what_waits(again: Again) -> None:
    client = again().client()
    client.ask("decode", session=client.open(), max_tokens=5)
    deadline = time.monotonic() + 10
    while (gauges := client.ask("stats")["gauges"])["journal_pending"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert gauges["journal_failures"] == gauges["journal_lag_s"] == 0


# ---------------------------------------------------------------- real processes


class Home:
    """Daemons with scripted workers, one after the other, over one state directory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        self.endpoint = f"ipc://{folder}/run/stateroom.sock"
        self.log = folder / "log"
        self.context: zmq.Context[Any] = zmq.Context()
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, run: str = "run") -> subprocess.Popen[bytes]:
        endpoint = self.endpoint.replace("/run/", f"/{run}/")
        command = [sys.executable, str(RUN_DAEMON), str(self.folder / run), endpoint, "step_s=0.003"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "STATE": str(self.state)}
        with self.log.open("a") as log:
            self.started.append(subprocess.Popen(command, stderr=log, env=environment))
        return self.started[-1]

    def refused(self, run: str = "run") -> tuple[int, str]:
        return self.start(run).wait(20), self.log.read_text().splitlines()[-1]

    def client(self) -> Raw:
        made = Raw(self.context, self.endpoint)
        assert made.ask("hello")["server"] == "stateroom"
        return made

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.context.destroy(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def home() -> Iterator[Home]:
    made = Home(Path(tempfile.mkdtemp(prefix="srh-", dir="/tmp")))
    yield made
    made.close()


class Told(threading.Thread):
    """A client whose session decodes. `length`: as it was told last."""

    def __init__(self, home: Home, session: str) -> None:
        super().__init__()
        self.session = session
        self.length = 0
        self._client, self._going = home.client(), threading.Event()
        self._going.set()

    def run(self) -> None:
        self.length = self._client.ask("info", session=self.session)["length"]
        self._client.send("decode", session=self.session, max_tokens=100_000)
        while self._going.is_set():
            if self._client.socket.poll(20):
                reply = self._client.receive()
                if reply["kind"] == "token":
                    self.length += len(reply["tokens"])

    def end(self) -> None:
        self._going.clear()
        self.join()
        self._client.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_daemons_end_at_random_moments_under_streams(home: Home, how: signal.Signals) -> None:
    """Nothing that a client was told is missing, and nothing is there that its worker didn't draw."""
    drawn = random.Random(how)
    home.start()
    client = home.client()
    sessions = [client.open([0, 1], name=f"s{i}") for i in range(STREAMS)]
    least = dict.fromkeys(sessions, 2)
    for _ in range(KILLS):
        streams = [Told(home, session) for session in sessions]
        for stream in streams:
            stream.start()
        time.sleep(drawn.uniform(0.3, 2.5))
        home.started[-1].send_signal(how)
        code = home.started[-1].wait(20)
        assert code == (OK if how is signal.SIGTERM else -how)
        time.sleep(0.1)  # what it sent last is on its way
        for stream in streams:
            stream.end()
            least[stream.session] = stream.length
        home.start()
        client = home.client()
        assert {info["session"] for info in client.ask("list")["sessions"]} == set(sessions)
        for session in sessions:
            tokens = client.ask("tokens", session=session)["tokens"]
            assert tokens == [i % 1000 for i in range(len(tokens))], "each as its worker draws them"
            assert len(tokens) >= least[session]
            least[session] = len(tokens)
    assert min(least.values()) > 50


def test_a_kill_right_after_an_answer_takes_nothing_back(home: Home) -> None:
    """Opened, changed, named, forked, closed: what was answered is so."""
    sessions: dict[str, list[int]] = {}
    for number in range(4):
        home.start()
        client = home.client()
        assert {info["session"] for info in client.ask("list")["sessions"]} == set(sessions)
        for session, tokens in sessions.items():
            assert client.ask("tokens", session=session)["tokens"] == tokens
        if number == 0:
            sessions[client.open([1, 2, 3], name="first")] = [1, 2, 3]
        elif number == 1:
            (child,) = client.ask("fork", session="first", names=["child"])["sessions"]
            sessions[child] = [1, 2, 3]
        elif number == 2:
            client.ask("sync", session="child", tokens=[1, 9])
            sessions[child] = [1, 9]
        else:
            client.ask("close", session="child")
        home.started[-1].kill()
        home.started[-1].wait()
    home.start()
    (left,) = home.client().ask("list")["sessions"]
    assert left["name"] == "first"


def test_state_that_cannot_be_used_is_refused_by_name(home: Home) -> None:
    """B63, B78: nothing is reset, and the exit code says that trying again won't help."""
    home.state.mkdir(mode=0o755)
    home.state.chmod(0o755)
    code, said = home.refused()
    assert code == FORBIDDEN
    assert f"chmod 700 {home.state}" in said
    home.state.chmod(0o700)
    file = home.state / FILE_NAME
    file.write_bytes(b"what is this" * 1000)
    code, said = home.refused()
    assert code == DAMAGED
    assert str(file) in said
    assert file.read_bytes() == b"what is this" * 1000
    file.unlink()
    home.start()
    home.client()
    code, said = home.refused("elsewhere")
    assert code == RUNNING
    assert str(file) in said
    home.client().open()
