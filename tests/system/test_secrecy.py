"""What people say to a model is in no log: by every operation, answered and refused, with a real worker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import RunningDaemon, StartDaemon
from tests.daemon.rig import Raw
from tests.system.conftest import RawClient, await_model

from stateroom.client.protocol import OPERATIONS

pytestmark = pytest.mark.system

SECRET = "hunter2 meets xyzzy"  # in every text
WORDS = ("hunter2", "xyzzy")


def everything(client: Raw) -> set[str]:
    """Says the secret in each way there is; gives the operations that were answered."""
    said = {"role": "user", "content": SECRET}
    session = client.ask("open", text=SECRET, name="mine")["session"]
    ids = client.ask("tokens", session=session)["tokens"]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("hello", {"app": "talker"}),
        ("prefill", {"session": session, "text": SECRET, "progress": True}),
        ("prefill", {"session": session, "tokens": ids}),
        ("prefill", {"session": session, "messages": [said]}),
        ("sync", {"session": session, "messages": [said]}),
        ("decode", {"session": session, "max_tokens": 4, "stop": [SECRET], "logprobs": 1}),
        ("score", {"session": session, "text": SECRET}),
        ("trim", {"session": session, "count": 1, "replay": True}),
        ("fork", {"session": session, "names": ["child"]}),
        ("publish", {"session": session, "as": "prompt"}),
        ("unpublish", {"as": "prompt"}),
        ("info", {"session": session}),
        ("list", {}),
        ("lease", {"session": session, "ttl_s": 60.0}),
        ("verify", {"session": session}),
        ("park", {"session": session}),
        ("save", {"session": session, "snapshot": "kept"}),
        ("snapshots", {}),
        ("restore", {"snapshot": "kept"}),
        ("forget", {"snapshot": "kept"}),
        ("cancel", {"session": session}),
        ("stats", {}),
        ("close", {"session": "child"}),
        # Refused, one way and another.
        ("prefill", {"session": session, "text": SECRET, "tokens": [1]}),
        ("prefill", {"session": SECRET, "text": SECRET}),
        ("prefill", {"session": session, "text": SECRET, "temperature": SECRET}),
        ("prefill", {"session": session, SECRET: 1}),
        ("prefill", {"session": session, "messages": [{"role": "user", "content": SECRET, SECRET: SECRET}]}),
        ("decode", {"session": session, "max_tokens": SECRET}),
        ("decode", {"session": session, "max_tokens": 1, "sampling": {SECRET: SECRET}}),
        ("open", {"text": SECRET, "model": SECRET}),
        ("open", {"text": SECRET, "name": SECRET}),
        ("restore", {"snapshot": SECRET}),
        (SECRET, {"text": SECRET}),
    ]
    done = {"open", "tokens"}
    for op, arguments in asked:
        if client.ask(op, **{name + "_": value for name, value in arguments.items()})["kind"] == "result":
            done.add(op)
    remembered = client.ask("requests")["requests"]
    for request in remembered:
        assert client.ask("trace", request=request["rid"])["kind"] == "result"
    client.socket.send(SECRET.encode() * 10)  # no message at all
    assert client.receive()["error"]["code"] == "malformed"
    return done | {"requests"} | ({"trace"} if remembered else set())


def digits_of(ids: list[int]) -> re.Pattern[str]:
    """Some of these ids in a row, however a list of them is written."""
    return re.compile(r"\D+".join(str(known) for known in ids[:4]))


@pytest.fixture
def daemon(start_daemon: StartDaemon, tiny_folder: Path) -> RunningDaemon:
    made = start_daemon("--log-level", "debug", model=tiny_folder)
    await_model(made)
    return made


def test_no_content_in_the_log(daemon: RunningDaemon, raw_client: RawClient) -> None:
    """At its most talkative, with whatever the worker writes to stderr, and in files below the home."""
    client = raw_client(daemon, app="talker")
    done = everything(client)
    untried = set(OPERATIONS) - done - {"watch", "load", "unload", "import", "export"}
    assert not untried, f"not answered: {untried}"
    ids = client.ask("tokens", session=client.ask("open", text=SECRET)["session"])["tokens"]
    assert len(ids) >= 4
    assert daemon.stop() == 0
    logs = [daemon.log, *(path for path in daemon.folder.rglob("*.log") if path != daemon.log)]
    for path in logs:
        text = path.read_text(errors="replace")
        assert [word for word in WORDS if word in text] == [], path
        assert not digits_of(ids).search(text), path
    assert daemon.log.read_text().count('"event": "request"') > len(done)


def test_content_in_the_log_when_it_is_asked_for(
    start_daemon: StartDaemon, tiny_folder: Path, raw_client: RawClient
) -> None:
    """Else the test above would find nothing whatever was logged."""
    daemon = start_daemon("--log-content", model=tiny_folder)
    await_model(daemon)
    client = raw_client(daemon, app="talker")
    session = client.ask("open", text=SECRET)["session"]
    ids = client.ask("tokens", session=session)["tokens"]
    daemon.stop()
    text = daemon.log.read_text()
    assert all(word in text for word in WORDS)
    assert digits_of(ids).search(text)
