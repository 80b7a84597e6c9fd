"""The programs of examples/, as a reader runs them: against a real daemon; in Node.js where that is here."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.conftest import RunningDaemon, StartDaemon
from tests.system.conftest import ConnectTo, Restart

from stateroom.client import connect_async
from stateroom.client.errors import NotFound

pytestmark = pytest.mark.system

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAM_S = 120.0
INSTALL_S = 180.0


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def ran(daemon: RunningDaemon, *command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        env=daemon.env | {"STATEROOM_ENDPOINT": daemon.endpoint},
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("name", ["completion_source", "best_of"])
def test_an_example_runs_by_itself(tiny_daemon: RunningDaemon, connect_to: ConnectTo, name: str) -> None:
    assert ran(tiny_daemon, sys.executable, EXAMPLES / f"{name}.py")
    for app in ("completion-example", "best-of-example"):
        assert connect_to(tiny_daemon, app).list() == [], "it left sessions behind"


# ---------------------------------------------------------------- the completion source


def typing(
    daemon: RunningDaemon, keys: Callable[[Any], Any], pause_s: float = 0.01
) -> list[tuple[str, list[str]]]:
    """What is shown while `keys(source)` types."""
    shown: list[tuple[str, list[str]]] = []

    async def run() -> None:
        async with await connect_async(endpoint=daemon.endpoint, app="typing") as room:
            module = example("completion_source")
            source = module.CompletionSource(room, lambda *seen: shown.append(seen), pause_s=pause_s)
            await keys(source)
            await source.settled()
            left = await room.list()
            assert len(left) == (1 if shown else 0), "only the buffer stays"
            await source.close()
            assert await room.list() == []

    asyncio.run(run())
    return shown


def test_only_the_last_of_many_keys_is_asked_for(tiny_daemon: RunningDaemon) -> None:
    line = "the quick brown fox"

    async def keys(source: Any) -> None:
        for n in range(1, len(line) + 1):
            source.typed(line[:n])
        await source.settled()

    shown = typing(tiny_daemon, keys)
    assert [text for text, _ in shown] == [line]
    assert 1 <= len(shown[0][1]) <= 3


def test_an_edit_computes_only_what_is_new(tiny_daemon: RunningDaemon) -> None:
    text = "the quick brown fox jumps over the lazy dog. " * 8

    async def keys(source: Any) -> None:
        source.typed(text)
        await source.settled()
        first = source.computed
        source.typed(text + "And")
        await source.settled()
        assert first > 100
        assert source.computed - first < 12

    assert [seen for seen, _ in typing(tiny_daemon, keys)] == [text, text + "And"]


def test_a_key_while_suggestions_are_drawn_drops_them(tiny_daemon: RunningDaemon) -> None:
    async def keys(source: Any) -> None:
        for n in range(12):
            source.typed("the quick brown fox"[: 6 + n])
            await asyncio.sleep(0.015)  # some are only just being asked for, some are drawn already
        source.typed("the lazy dog")
        await source.settled()

    assert typing(tiny_daemon, keys)[-1][0] == "the lazy dog"


def test_a_buffer_that_was_closed_is_opened_again(tiny_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    async def keys(source: Any) -> None:
        source.typed("the quick brown fox")
        await source.settled()
        (buffer,) = connect_to(tiny_daemon, "typing").list()
        assert buffer.expires_in_s is not None
        connect_to(tiny_daemon, "typing").session(buffer.session).close()
        source.typed("the quick brown fox jumps")
        await source.settled()

    assert [text for text, _ in typing(tiny_daemon, keys)] == [
        "the quick brown fox",
        "the quick brown fox jumps",
    ]


def test_without_a_daemon_there_are_no_suggestions_and_with_the_next_one_there_are(
    start_daemon: StartDaemon, restart: Restart, tiny_folder: Path
) -> None:
    daemon = start_daemon(model=tiny_folder)

    async def keys(source: Any) -> None:
        source.typed("the quick brown fox")
        await source.settled()
        daemon.stop()
        source.typed("the quick brown fox jumps")
        await source.settled()
        assert "stateroom serve" in source.problem
        await asyncio.to_thread(restart(daemon).wait_until_answering)
        source.typed("the quick brown fox jumps over")
        await source.settled()
        assert source.problem == ""

    assert [text for text, _ in typing(daemon, keys)] == [
        "the quick brown fox",
        "the quick brown fox jumps over",
    ]


def test_what_is_kept_of_a_long_text_begins_elsewhere_only_now_and_then() -> None:
    module = example("completion_source")
    most = module.CHARACTERS_MAX
    text = "".join(chr(33 + n % 90) for n in range(3 * most))
    begins = [len(text[:n]) - len(module.kept(text[:n])) for n in range(len(text) + 1)]
    assert all(text[:n].endswith(module.kept(text[:n])) for n in range(0, len(text), 997))
    assert max(n - begin for n, begin in enumerate(begins)) == most
    assert min(n - begin for n, begin in enumerate(begins) if n > most) > most - module.CUT
    assert sorted(set(begins)) == list(range(0, 2 * most + 1, module.CUT))


# ---------------------------------------------------------------- best of n


def test_the_best_is_kept_and_can_be_taken_back(tiny_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    best_of = example("best_of").best_of
    room = connect_to(tiny_daemon, "agent")
    with room.open(text="the quick brown fox") as session:
        before = session.tokens().tokens
        step = best_of(session, 4, max_tokens=8, seed=3)
        assert len({tuple(attempt.tokens) for attempt in step.attempts}) > 1, "they go different ways"
        assert step.best.score == max(attempt.score for attempt in step.attempts)
        assert session.tokens().tokens == before + step.best.tokens
        assert len(room.list()) == 1, "the attempts are closed"
        again = best_of(session, 2, max_tokens=4, judge=lambda _, tokens: -tokens[0])
        assert again.best.tokens[0] == min(attempt.tokens[0] for attempt in again.attempts)
        again.undo()
        step.undo()
        assert session.tokens().tokens == before
    with pytest.raises(NotFound):
        session.info()


def test_a_judge_that_fails_leaves_the_session_as_it_was(
    tiny_daemon: RunningDaemon, connect_to: ConnectTo
) -> None:
    room = connect_to(tiny_daemon, "failing agent")

    def judge(_session: Any, _tokens: list[int]) -> float:
        raise RuntimeError("no opinion")

    with room.open(text="the quick brown fox") as session:
        before = session.tokens().tokens
        with pytest.raises(RuntimeError, match="no opinion"):
            example("best_of").best_of(session, 3, max_tokens=4, judge=judge)
        assert session.tokens().tokens == before
        assert len(room.list()) == 1


# ---------------------------------------------------------------- Node.js


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client with what it needs from npm. Skipped where there is no Node.js, or npm can't install."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("no Node.js here")
    folder = tmp_path_factory.mktemp("examples") / "node"
    shutil.copytree(EXAMPLES / "node", folder)
    done = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
    )
    if done.returncode != 0:
        pytest.skip(f"npm can't install here: {done.stderr.splitlines()[-1:]}")
    return folder


def test_a_client_in_node(tiny_daemon: RunningDaemon, connect_to: ConnectTo, node_folder: Path) -> None:
    """Written from docs/protocol.md alone: the same tokens as by the Python client."""
    prompt = "the quick brown fox"
    said = ran(tiny_daemon, "node", "example.mjs", prompt, cwd=node_folder).splitlines()
    decoded, forks, refused = (json.loads(line) for line in said[1:])
    with connect_to(tiny_daemon, "python").open(text=prompt) as session:
        assert said[0] == f"session of {session.length} tokens"
        wanted = session.decode(12, ignore_eos=True).wait().tokens
        after = session.decode(6, ignore_eos=True).wait().tokens
    assert decoded == {"finish": "length", "tokens": wanted, "same": True}
    assert forks == {"forks": [after, after]}
    assert refused == {"refused": "not_found", "field": "session"}
    assert connect_to(tiny_daemon, "node-example").list() == []
