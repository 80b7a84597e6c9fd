"""The commands for what outlives a worker and a daemon, against a real daemon with a tiny model."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import RunningDaemon, StartDaemon
from tests.system.conftest import await_model
from tests.system.test_commands import chat, length_of, stateroom

from stateroom.client import connect

pytestmark = pytest.mark.system

Run = Callable[..., str]
HELLO = "hello there, this is long enough that reading it from the disk is worth the while"


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """What a command says that could not do it: one line, nothing else."""
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


@pytest.fixture
def run(tiny_daemon: RunningDaemon) -> Run:
    """`run("save", …)`: what a command prints that succeeds."""

    def command(*arguments: str) -> str:
        done = stateroom(tiny_daemon.env, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return command


@pytest.fixture
def talk(tiny_daemon: RunningDaemon, request: pytest.FixtureRequest) -> str:
    """A conversation of its own for each test."""
    name = f"talk-{request.node.name[5:40]}".partition("[")[0]
    chat(tiny_daemon, name, HELLO)
    return name


def tokens_of(daemon: RunningDaemon, name: str, app: str = "stateroom") -> list[int]:
    with connect(daemon.endpoint, app=app) as room:
        return room.session(name).tokens().tokens


def tier_of(run: Run, name: str) -> str:
    return {session["name"]: session["tier"] for session in json.loads(run("ps", "--json"))}[name]


# ---------------------------------------------------------------- sessions


def test_a_session_is_closed_by_name_id_or_how_that_begins(
    tiny_daemon: RunningDaemon, run: Run, talk: str
) -> None:
    with connect(tiny_daemon.endpoint, app="stateroom") as room:
        by_id, by_beginning = room.open(tokens=[1, 2]).id, room.open(tokens=[1, 2]).id
    assert run("close", talk).startswith(f"Closed {talk}: ")
    run("close", by_id)
    assert by_beginning in run("close", by_beginning[:8])
    for gone in (talk, by_id, by_beginning[:8], "abc", ""):
        refused(stateroom(tiny_daemon.env, "close", gone))


def test_a_beginning_that_two_ids_have_closes_neither(tiny_daemon: RunningDaemon) -> None:
    with connect(tiny_daemon.endpoint, app="crowd") as room:
        ids = [room.open().id for _ in range(2)]
        shared = "xxxx"
        assert not any(id.startswith(shared) for id in ids)
        refused(stateroom(tiny_daemon.env, "close", shared, "--app", "crowd"))
        refused(stateroom(tiny_daemon.env, "close", ids[0]))  # of another app
        assert len(room.list()) == 2


def test_park_moves_to_disk_and_the_chat_goes_on(tiny_daemon: RunningDaemon, run: Run, talk: str) -> None:
    assert "on disk" in run("park", talk)
    assert tier_of(run, talk) == "disk"
    assert " disk " in run("ps")
    length = length_of(tiny_daemon, talk)
    assert chat(tiny_daemon, talk, "and on")[-1].startswith(f"{length} tokens reused")
    assert tier_of(run, talk) == "resident"


def test_verify_says_that_a_session_is_what_its_tokens_give(
    tiny_daemon: RunningDaemon, run: Run, talk: str
) -> None:
    assert "the same token comes next" in run("verify", talk)
    assert "is what its tokens give" in run("verify")
    refused(stateroom(tiny_daemon.env, "verify", "nothing"))
    checks = json.loads(stateroom(tiny_daemon.env, "doctor", "--json").stdout)["checks"]
    found = {check["name"]: check for check in checks}
    assert found["sessions"]["state"] == "pass"
    assert "the same as stored" in found["sessions"]["finding"]
    assert "database" in found["state"]["finding"]
    assert json.loads(run("stats", "--json"))["counters"]["verified"] >= 3


# ---------------------------------------------------------------- snapshots


def test_save_restore_list_forget(tiny_daemon: RunningDaemon, run: Run, talk: str) -> None:
    length = length_of(tiny_daemon, talk)
    assert run("save", talk, "one").startswith(f"Saved {talk} as one: {length} tokens, ")
    assert "already" in refused(stateroom(tiny_daemon.env, "save", talk, "one"))
    run("save", talk, "one", "--replace")
    chat(tiny_daemon, talk, "more")
    kept = json.loads(run("snapshots", "--json"))
    (one,) = [each for each in kept["snapshots"] if each["snapshot"] == "one"]
    assert (one["length"], one["model"]) == (length, "tiny")
    assert kept["used_bytes"] >= one["bytes"] > 0
    assert "one " in run("snapshots")
    restored = run("restore", "one", "--as", "again")
    assert re.match(rf"one is session again now: ({length}|{(length or 0) - 1}) tokens reused", restored)
    assert tokens_of(tiny_daemon, "again") == tokens_of(tiny_daemon, talk)[:length]
    run("forget", "one")
    assert "no such snapshot" in refused(stateroom(tiny_daemon.env, "restore", "one"))
    refused(stateroom(tiny_daemon.env, "forget", "one"))
    assert length_of(tiny_daemon, "again") == length


def test_snapshots_belong_to_an_app(tiny_daemon: RunningDaemon, run: Run, talk: str) -> None:
    run("save", talk, "mine")
    assert "nobody has no snapshots" in stateroom(tiny_daemon.env, "snapshots", "--app", "nobody").stderr
    refused(stateroom(tiny_daemon.env, "restore", "mine", "--app", "nobody"))
    refused(stateroom(tiny_daemon.env, "forget", "mine", "--app", "nobody"))


def test_a_snapshot_is_carried_in_a_file(
    tiny_daemon: RunningDaemon, run: Run, talk: str, tmp_path: Path
) -> None:
    run("save", talk, "carried")
    file = str(tmp_path / "file")
    assert run("export", "carried", file).startswith(f"Exported carried to {file}: ")
    assert "exists" in refused(stateroom(tiny_daemon.env, "export", "carried", file))
    assert "taken" in (said := refused(stateroom(tiny_daemon.env, "import", file, "carried"))) or (
        "already" in said
    )
    run("forget", "carried")
    assert "`stateroom restore back`" in run("import", file, "back")
    run("restore", "back", "--as", "returned")
    assert tokens_of(tiny_daemon, "returned") == tokens_of(tiny_daemon, talk)
    content = bytearray(Path(file).read_bytes())
    content[-1] ^= 1
    (damaged := tmp_path / "damaged").write_bytes(content)
    refused(stateroom(tiny_daemon.env, "import", str(damaged), "damaged"))
    refused(stateroom(tiny_daemon.env, "import", str(tmp_path / "nothing"), "nothing"))
    refused(stateroom(tiny_daemon.env, "export", "nothing", str(tmp_path / "nothing")))
    assert {path.name for path in tmp_path.iterdir()} == {"file", "damaged"}


# ---------------------------------------------------------------- another daemon, the same conversation


def test_a_chat_goes_on_after_a_restart_and_says_what_stays_as_it_was(
    start_daemon: StartDaemon, tiny_folder: Path
) -> None:
    daemon = start_daemon(model=tiny_folder)
    await_model(daemon)
    chat(daemon, "lasting", HELLO)
    length, tokens = length_of(daemon, "lasting"), tokens_of(daemon, "lasting")
    assert stateroom(daemon.env, "save", "lasting", "kept").returncode == 0
    assert stateroom(daemon.env, "stop").returncode == 0
    command = list(map(str, daemon.process.args))  # type: ignore[arg-type]
    with open(daemon.log, "ab") as log:
        daemon.process = subprocess.Popen(
            command, env=daemon.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    daemon.wait_until_answering()
    assert tokens_of(daemon, "lasting") == tokens
    done = stateroom(
        daemon.env, "chat", "--name", "lasting", "--max-tokens", "4", "--kv", "affine8", text="go on\n"
    )
    assert done.returncode == 0, done.stderr
    assert "lasting stays stored as it was; --kv is for new ones." in done.stderr
    assert f"{length} tokens reused" in done.stdout
    assert stateroom(daemon.env, "restore", "kept", "--as", "branch").returncode == 0
    assert tokens_of(daemon, "branch") == tokens
    assert stateroom(daemon.env, "verify", "lasting").returncode == 0
