"""The support bundle has what helps, and nothing that anybody said or named.

Words that are said and named in every way there is are looked for in every byte of it.
"""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import RunningDaemon, StartDaemon
from tests.system.conftest import await_model
from tests.system.test_commands import stateroom

from stateroom.client import connect
from stateroom.client.errors import StateroomError
from stateroom.client.protocol import Message

pytestmark = pytest.mark.system

# Said, or given as a name, in one place each, so that a leak shows whence it comes.
PROMPT, ANSWERED, SYSTEM = "zanzibar prompts", "quagga replies", "okapi instructs"
APP, OTHER_APP, SESSION, SNAPSHOT, TRUNK = "tapirapp", "gnuapp", "lemurname", "ibexsnap", "manateetrunk"
KEY, USER, WEIGHTED = "walruskey", "narwhaluser", "axolotlapp"
WORDS = (
    "zanzibar", "quagga", "okapi", APP, OTHER_APP, SESSION, SNAPSHOT, TRUNK, KEY, USER, WEIGHTED,
)  # fmt: skip


@pytest.fixture
def daemon(start_daemon: StartDaemon, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunningDaemon:
    """It logs all that is said, has an app's weight and quota, and a user with a name that is looked for."""
    monkeypatch.setenv("USER", USER)
    arguments = (
        "--log-content",
        "--log-level",
        "debug",
        "--weight",
        f"{WEIGHTED}=2",
        "--quota",
        f"{WEIGHTED}=bytes:8GiB",
    )
    made = start_daemon(*arguments, model=tiny_folder)
    await_model(made)
    return made


def say_everything(daemon: RunningDaemon) -> tuple[list[int], list[str]]:
    """Gives ids that must not be there: of tokens, and of what one may use who knows them."""
    with connect(daemon.endpoint, app=APP) as room:
        session = room.open(text=PROMPT, name=SESSION)
        ids = session.tokens().tokens
        session.decode(max_tokens=4, stop=[ANSWERED]).wait()
        session.sync(messages=[Message(role="system", content=SYSTEM)])
        session.save(SNAPSHOT)
        trunk = session.publish(TRUNK).trunk
        for wrong in ("model", "name"):
            with pytest.raises(StateroomError):
                room.open(text=PROMPT, **{wrong: SYSTEM})
    with connect(daemon.endpoint, app=OTHER_APP) as room:
        room.fork(trunk, names=[SESSION])[0].park()
    return ids, [session.id, trunk]


def unpacked(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as archive:
        found = {each.name: archive.extractfile(each) for each in archive.getmembers()}
        return {name: inner.read() for name, inner in found.items() if inner is not None}


def test_a_bundle_has_what_helps_and_nothing_that_was_said(daemon: RunningDaemon, tmp_path: Path) -> None:
    env = {**daemon.env, "USER": USER, "LOGNAME": USER}
    ids, keys = say_everything(daemon)
    assert stateroom(env, "keys", "init").returncode == 0
    assert stateroom(env, "keys", "client", KEY, "--out", str(tmp_path / "client.key")).returncode == 0
    secrets = json.loads((tmp_path / "client.key").read_text())
    home = Path(env["STATEROOM_HOME"])
    weights = f"weight = {{ {WEIGHTED} = 2.0 }}\n"
    (home / "config.toml").write_text(f'{weights}kv-budget = "1GiB"\n[quota.{WEIGHTED}]\nsessions = 9\n')
    (home / "logs" / "service.log").write_text(
        "Fatal Python error: Aborted\n\nThread 0x00007f0000000000 (most recent call first):\n"
        f'  File "{env["HOME"]}/lib/python3.11/site-packages/stateroom/daemon/x.py", line 7 in step\n'
        f"{PROMPT}\n"
        f"ValueError: {PROMPT}\n"
    )
    file = tmp_path / "bundle.tar.gz"
    done = stateroom(env, "doctor", "--bundle", str(file))
    assert done.returncode == 0, done.stderr
    assert "Look through it before you send it" in done.stderr
    assert file.stat().st_mode & 0o777 == 0o600

    content = unpacked(file)
    everything = b"\n".join([*content.values(), *map(str.encode, content)]).decode()
    assert [word for word in WORDS if word in everything.lower()] == []
    assert not re.search(r"\D+".join(map(str, ids[:4])), everything)
    assert [key for key in keys if key in everything] == []
    assert [part for part in ("public", "secret", "server") if secrets[part] in everything] == []
    for place in (env["HOME"], str(daemon.folder)):
        assert place not in everything

    parts = {Path(name).name: text.decode() for name, text in content.items()}
    assert "Please look through it" in parts["README.txt"]
    assert all(name in parts["README.txt"] for name in parts if name != "README.txt")
    helps(parts)
    again = stateroom(env, "doctor", "--bundle", str(file))
    assert again.returncode == 1
    assert "exists" in again.stderr
    assert len(again.stderr.splitlines()) == 1
    assert again.stdout == ""


def helps(parts: dict[str, str]) -> None:
    """What somebody who helps would look for."""
    findings = {check["name"]: check for check in json.loads(parts["doctor.json"])["checks"]}
    assert findings["daemon"]["state"] == "pass"
    running = json.loads(parts["daemon.json"])
    assert running["answers"] == "yes"
    assert running["engines"][0]["facts"]["architecture"] == "llama"
    assert running["counters"]["requests.open.ok"] == 1
    first, second = running["sessions"]
    assert first["name"] == second["name"] != first["owner"]  # the same hash for the same name
    assert {first["tier"], second["tier"]} == {"resident", "disk"}
    ended = running["requests"]
    assert {"decode", "save", "publish"} <= {request["op"] for request in ended}
    settings = {setting["name"]: setting for setting in json.loads(parts["configuration.json"])}
    assert settings["kv-budget"]["value"] == "1GiB"
    assert settings["kv-budget"]["origin"] == "file"
    assert settings["kv-budget"]["where"].endswith("config.toml:2")
    entries = [json.loads(line) for line in parts["log.jsonl"].splitlines()]
    events = {entry["event"] for entry in entries}
    assert {"serving", "engine ready", "request"} <= events
    decodes: list[dict[str, Any]] = [entry for entry in entries if entry.get("op") == "decode"]
    assert decodes[0]["code"] == "ok"
    assert decodes[0]["session"] == first["session"] or decodes[0]["session"] == second["session"]
    (crash,) = [json.loads(line) for line in parts["service.jsonl"].splitlines()]
    assert crash["lines"] == [
        "Fatal Python error: Aborted",
        "Thread 0x00007f0000000000 (most recent call first):",
        "stateroom/daemon/x.py:7 step",
        "ValueError: …",
        "(2 lines left out)",
    ]
    assert "mlx" in json.loads(parts["versions.json"])["packages"]


def test_a_bundle_without_a_daemon(tmp_path: Path) -> None:
    """Where all is wrong that can be, a bundle is wanted most."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.toml").write_text(f"[quota.{WEIGHTED}]\nsessions = '{PROMPT}'\n")
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "STATEROOM_RUNTIME_DIR": f"{tmp_path}/run"}
    env["STATEROOM_HOME"] = f"{tmp_path}/home"
    done = stateroom(env, "doctor", "--bundle", str(tmp_path / "b.tar.gz"))
    assert done.returncode == 0, done.stderr
    parts = unpacked(tmp_path / "b.tar.gz")
    assert json.loads(parts["stateroom-bundle/daemon.json"])["answers"] == "NoDaemon"
    checks = json.loads(parts["stateroom-bundle/doctor.json"])["checks"]
    assert [check["state"] for check in checks if check["name"] == "configuration"] == ["problem"]
    everything = b"".join(parts.values()).decode()
    assert str(tmp_path) not in everything
    assert [word for word in WORDS if word in everything.lower()] == []
