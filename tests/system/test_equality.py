"""Greedy text through the daemon is mlx-lm's own, token for token, on the real 135M model.

The peer is `stream_generate` in a process of its own, with the same weights and the same BLAS. Sums in
another order may turn a near-tie, so a difference is accepted where the peer's best two logits lie closer
than `MARGIN`; each one is listed in what the run measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import RunningDaemon, StartDaemon
from tests.demo import demo_gguf
from tests.system.conftest import ConnectTo, Tell, await_model

from stateroom.client import Room
from stateroom.daemon.blas import find_blas, preloaded

# About two minutes on two idle cores, most of it the peer and the daemon decoding one row at a time.
pytestmark = [pytest.mark.system, pytest.mark.model, pytest.mark.timeout(600)]

MARGIN = 1e-3  # natural logarithms
COMPANY = 4  # sessions decoding at once: one looked at, three others
PEER_S = 240.0
PEER = Path(__file__).with_name("equality_peer.py")

POEM = """Two roads diverged in a yellow wood,
And sorry I could not travel both
And be one traveler, long I stood
And looked down one as far as I could
To where it bent in the undergrowth;
"""
LETTER = (
    "Dear Ms. Okafor,\n\nThank you for your order of 12 March. Of the four items, three left our warehouse "
    "this morning; the fourth, a reading lamp (no. 4471-B), is out of stock until the end of the month. You "
    "may wait for it, choose another model at the same price, or have its price of €39.90 returned. Please "
    "answer by Friday, and excuse the delay.\n\nYours sincerely,\nT. Lindqvist\n\nP.S. The "
)
CODE = '''import json


def load(path: str) -> dict[str, int]:
    """Reads a file of counts."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def total(counts: dict[str, int]) -> int:
    """The sum of all counts."""
'''


def asked(*contents: str, system: str | None = None, max_tokens: int = 16) -> dict[str, Any]:
    """A chat: the user's and the assistant's words in turn."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
    return {"messages": messages, "max_tokens": max_tokens}


def said(text: str, max_tokens: int = 16) -> dict[str, Any]:
    return {"text": text, "max_tokens": max_tokens}


CASES = [
    asked("What is the capital of France?"),
    asked("Write one sentence about the sea."),
    asked("What is 7 times 8? Answer with the number only."),
    asked("Translate 'good morning' into Spanish."),
    asked("Hi!", "Hello! How can I help you today?", "Name three colours."),
    asked("Who wrote Hamlet?", system="You answer in one short sentence."),
    asked("Continue: 1, 1, 2, 3, 5, 8,", system="You are a calculator."),
    asked(f"Who signed this letter?\n\n{LETTER}"),
    asked("Give a Python one-liner that reverses a string."),
    asked("ما هي عاصمة مصر؟"),
    said("Once upon a time", 24),
    said("The"),
    said("def fibonacci(n):\n", 24),
    said(POEM),
    said(CODE, 24),
    said(LETTER),
    said("Q: How many legs has a spider?\nA:"),
    said("Straße, naïve, 東京, 🙂 and"),
    said('{"name": "Ada", "born": 1815, "languages": ["'),
    said("<html>\n  <head>\n    <title>"),
]


@pytest.fixture(scope="module")
def peer_answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What mlx-lm draws for each case: prompt, tokens, margins."""
    cases = tmp_path_factory.mktemp("equality") / "cases.json"
    cases.write_text(json.dumps(CASES))
    done = subprocess.run(
        [sys.executable, str(PEER), str(demo_gguf()), str(cases)],
        env=preloaded(os.environ, find_blas().library),
        capture_output=True,
        timeout=PEER_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2_000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(answers) == len(CASES) == 20
    return answers


@pytest.fixture(scope="module")
def equality_daemon(start_shared_daemon: StartDaemon) -> RunningDaemon:
    daemon = start_shared_daemon(model=demo_gguf())
    await_model(daemon)
    return daemon


def answer(room: Room, case: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The prompt's and the drawn tokens, as the daemon has them."""
    options = {name: case[name] for name in ("text", "messages") if name in case}
    with room.open(**options) as session:
        result = session.decode(case["max_tokens"]).wait()
        tokens = session.tokens().tokens
    prompt = tokens[: len(tokens) - len(result.tokens)]
    assert prompt + result.tokens == tokens
    return prompt, result.tokens


def compare(number: int, peer: dict[str, Any], prompt: list[int], drawn: list[int], tell: Tell) -> int:
    """Fails at a difference that is no near-tie; gives how many tokens were the same."""
    assert prompt == peer["prompt"], f"case {number}: another prompt"
    for i, (ours, theirs) in enumerate(zip(drawn, peer["tokens"], strict=False)):
        if ours != theirs:
            margin = peer["margins"][i]
            tell(f"case {number}, token {i}: {ours} for {theirs}, at a margin of {margin:.2e}")
            assert margin < MARGIN, f"case {number} differs at token {i}: {drawn} for {peer['tokens']}"
            return i
    assert len(drawn) == len(peer["tokens"]), f"case {number}: {drawn} for {peer['tokens']}"
    return len(drawn)


def report(peers: list[dict[str, Any]], same: int, took_s: float, tell: Tell) -> None:
    drawn = sum(len(peer["tokens"]) for peer in peers)
    smallest = min(margin for peer in peers for margin in peer["margins"])
    tell(f"{same} of {drawn} tokens equal, in {took_s:.0f} s; smallest margin of the peer's {smallest:.1e}")


def test_alone(
    equality_daemon: RunningDaemon, peer_answers: list[dict[str, Any]], connect_to: ConnectTo, tell: Tell
) -> None:
    room = connect_to(equality_daemon)
    same, began = 0, time.monotonic()
    for number, (case, peer) in enumerate(zip(CASES, peer_answers, strict=True)):
        same += compare(number, peer, *answer(room, case), tell)
    report(peer_answers, same, time.monotonic() - began, tell)


class Company:
    """Four threads work the cases off; one with nothing left decodes anything, so that four always do."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.waiting = deque(range(len(CASES)))
        self.answers: dict[int, tuple[list[int], list[int]]] = {}
        self.errors: list[BaseException] = []
        self.rows: list[float] = []
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(COMPANY)]

    @property
    def over(self) -> bool:
        return len(self.answers) == len(CASES) or bool(self.errors)

    def run(self) -> None:
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join(PEER_S)
        if self.errors:
            raise self.errors[0]

    def _work(self) -> None:
        try:
            while self.waiting:
                number = self.waiting.popleft()
                self.answers[number] = answer(self.room, CASES[number])
            with self.room.open(text="All work and no play") as session:
                for _ in session.decode(500, ignore_eos=True, temperature=1.0):
                    if self.over:
                        break
        except BaseException as error:
            self.errors.append(error)


def test_in_company(
    equality_daemon: RunningDaemon, peer_answers: list[dict[str, Any]], connect_to: ConnectTo, tell: Tell
) -> None:
    """Three others decode all the while; they join and leave, and their lengths differ."""
    company = Company(connect_to(equality_daemon))
    began = time.monotonic()
    company.run()
    took_s = time.monotonic() - began
    same = sum(
        compare(number, peer, *company.answers[number], tell) for number, peer in enumerate(peer_answers)
    )
    report(peer_answers, same, took_s, tell)
