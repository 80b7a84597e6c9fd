"""A real daemon that is told what it is by its file, the environment and an option."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import RunningDaemon

from stateroom.client import connect, errors
from stateroom.daemon.exits import CONFIG

pytestmark = pytest.mark.system

COMMAND = [sys.executable, "-m", "stateroom.daemon.cli"]
RUN_S = 60.0
CONNECTS = """
from stateroom.client import connect
with connect(app="elsewhere") as room:
    print(room.server.models[0].id)
"""


@pytest.fixture(scope="module")
def daemon(tiny_folder: Path) -> Iterator[RunningDaemon]:
    """One whose endpoint, model, quotas and app are the file's, its budget the environment's."""
    folder = Path(tempfile.mkdtemp(prefix="src-", dir="/tmp"))
    home = folder / "home"
    home.mkdir(mode=0o700)
    endpoint = f"ipc://{folder}/own.sock"
    text = f"""
        model = "{tiny_folder}"
        endpoint = "{endpoint}"
        kv-budget = "1GiB"
        rows-max = 2
        keep = false
        log = "json"
        app = "mine"
        [quota.mine]
        sessions = 1
    """
    (home / "config.toml").write_text(text)
    (home / "config.toml").chmod(0o600)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("STATEROOM_")}
    env = inherited | {
        "HOME": str(folder),
        "STATEROOM_HOME": str(home),
        "STATEROOM_RUNTIME_DIR": str(folder / "run"),
        "STATEROOM_KV_BUDGET": "2GiB",
    }
    with open(folder / "daemon.log", "wb") as log:
        process = subprocess.Popen(
            [*COMMAND, "serve", "--rows-max", "3"], env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    running = RunningDaemon(endpoint, process, folder, env)
    try:
        running.wait_until_answering()
        yield running
    finally:
        running.stop()
        sys.stdout.write(running.log_tail())
        shutil.rmtree(folder, ignore_errors=True)


def run(daemon: RunningDaemon, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env=daemon.env | environment, capture_output=True, text=True, timeout=RUN_S
    )


def test_show_tells_the_truth_about_the_daemon(daemon: RunningDaemon) -> None:
    told = json.loads(run(daemon, "config", "show", "--json", "--", "--rows-max", "3").stdout)
    held = {each["name"]: (each["value"], each["origin"]) for each in told["settings"]}
    with connect(daemon.endpoint, app="test") as room:
        models, stats = room.server.models, room.stats()
    assert told["path"] == f"{daemon.folder}/home/config.toml"
    assert held["endpoint"] == (daemon.endpoint, "file")
    assert held["model"][1] == "file"
    assert [Path(path).name for path in held["model"][0]] == [model.id for model in models]
    assert held["kv-budget"] == ("2GiB", "environment")
    assert stats.gauges["kv_budget_bytes"] == 2 * 2**30
    assert held["rows-max"] == (3, "option")
    assert held["keep"] == (False, "file")
    assert "journal_pending" not in stats.gauges
    assert not (daemon.folder / "home" / "state").exists()
    assert daemon.log_tail().startswith("{")
    workers = [Path(f"/proc/{pid}/cmdline") for pid in daemon.workers()]
    if workers and workers[0].exists():
        assert b"--rows-max\x003\x00" in b"".join(path.read_bytes() for path in workers)


def test_clients_and_commands_find_it_by_the_file(daemon: RunningDaemon) -> None:
    """In processes of their own: a client that knows nothing, and the commands with the file's app."""
    found = subprocess.run(
        [sys.executable, "-c", CONNECTS], env=daemon.env, capture_output=True, text=True, timeout=RUN_S
    )
    assert found.stdout == "tiny\n", found.stderr
    with connect(daemon.endpoint, app="mine") as mine, mine.open(tokens=[1, 2], name="first") as session:
        listed = json.loads(run(daemon, "ps", "--json").stdout)
        assert [each["name"] for each in listed] == ["first"]
        assert json.loads(run(daemon, "ps", "--json", STATEROOM_APP="other").stdout) == []
        with pytest.raises(errors.Capacity):  # the file's quota
            mine.open(tokens=[1])
        completed = complete(daemon, "close", "f"), complete(daemon, "close", "--app", "other", "f")
        assert completed == (["first"], [])
        assert complete(daemon, "ps", "--app", "m") == ["mine"]
        assert complete(daemon, "top", "--app", "m") == ["mine"]
        rids = [str(request.rid) for request in mine.requests(everyone=True)]
        assert complete(daemon, "trace", "") == ["last", *sorted(rids, key=int)]
        assert complete(daemon, "generate", "--model", "") == ["tiny"]
        session.close()


def test_the_shell_gets_nothing_and_no_noise_without_a_daemon(daemon: RunningDaemon) -> None:
    nowhere = {"STATEROOM_ENDPOINT": f"ipc://{daemon.folder}/nobody.sock"}
    assert complete(daemon, "close", "f", **nowhere) == []
    assert complete(daemon, "serve", "--log-l", **nowhere) == ["--log-level"]
    broken = daemon.folder / "broken.toml"
    broken.write_text("endpoint")
    broken.chmod(0o600)
    assert complete(daemon, "close", "f", STATEROOM_CONFIG=str(broken)) == []
    assert complete(daemon, "close", "--e", STATEROOM_CONFIG=str(broken)) == ["--endpoint"]


def complete(daemon: RunningDaemon, *words: str, **environment: str) -> list[str]:
    """What bash is offered for the last of these words."""
    asked = {
        "_STATEROOM_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["stateroom", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = run(daemon, **asked, **environment)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("rows_max = 2\n", 0o600, ":1: rows_max is no setting; did you mean rows-max?"),
        ("rows-max = 2\n", 0o666, "chmod go-w"),
    ],
)
def test_with_a_wrong_file_nothing_starts_and_nothing_is_asked(
    daemon: RunningDaemon, text: str, mode: int, said: str
) -> None:
    """One line, with file and what to do; the code is that of a configuration that can't work."""
    file = daemon.folder / "wrong.toml"
    file.write_text(text)
    file.chmod(mode)
    for arguments in (["serve"], ["ps"]):
        done = run(daemon, *arguments, STATEROOM_CONFIG=str(file))
        assert done.returncode == CONFIG, done.stderr
        assert done.stderr.startswith("stateroom: ")
        assert str(file) in done.stderr
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
