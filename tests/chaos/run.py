"""A chaotic run from its start to the last comparison; `__main__.py` and a test call it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.client import ChaosClient, Wrong
from tests.chaos.daemon import Daemon
from tests.chaos.monkey import Monkey

from stateroom.client import protocol as p
from stateroom.client.errors import ClientError, Corrupt, StateroomError

CLIENT = (sys.executable, "-m", "tests.chaos.client")
BOOK_S = 120.0  # for a client to end what it is at
VERIFY_ERROR_MAX = 1e-3  # of a logit, for dense KV of the tiny model
GREEDY = 8  # tokens that each session draws at the end, beside a fresh one


@dataclass
class Report:
    seconds: float = 0.0
    misfortunes: dict[str, int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    sessions: int = 0
    most_lost: int = 0
    worst_logit_error: float = 0.0
    complaints: list[str] = field(default_factory=list)

    def words(self) -> str:
        lines = [
            f"{self.seconds:.0f} s; misfortunes: {self.misfortunes}",
            f"done: {dict(sorted(self.counts.items()))}",
            f"{self.sessions} sessions compared with fresh ones",
            f"largest logit error {self.worst_logit_error:.2g}",
            f"at most {self.most_lost} tokens lost that a client was told",
            f"{len(self.complaints)} complaints",
        ]
        return "\n".join([*lines, *self.complaints])


def run(
    daemon: Daemon,
    folder: Path,
    *,
    clients: int,
    seed: int,
    enough: Callable[[Monkey, float], bool],
    kinds: list[str] | None = None,
) -> Report:
    """`enough(monkey, seconds)`: it may end. The daemon is stopped and started once more before the end."""
    daemon.start()
    books = [folder / f"book-{n}.json" for n in range(clients)]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.chaos.client",
                daemon.endpoint,
                f"app-{n}",
                str(seed + n),
                str(book),
            ],
            env=daemon.env,
            cwd=Path(__file__).parents[2],
        )
        for n, book in enumerate(books)
    ]
    monkey = Monkey(daemon, [process.pid for process in processes], seed, kinds)
    began = time.monotonic()
    report = Report()
    try:
        while not enough(monkey, time.monotonic() - began):
            monkey.act()
        monkey.make_up()
        for process in processes:
            os.kill(process.pid, signal.SIGTERM)
        for process in processes:
            process.wait(BOOK_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    report.seconds = time.monotonic() - began
    report.misfortunes = dict(monkey.done)
    daemon.stop()
    daemon.start()
    for book in books:
        _compare(daemon, json.loads(book.read_text()), report)
    return report


def _compare(daemon: Daemon, book: dict[str, Any], report: Report) -> None:
    """Every session of a client is as its book says, and draws what a fresh one does."""
    report.counts.update(book["counts"])
    report.most_lost = max(report.most_lost, book["most_lost"])
    report.complaints += book["complaints"]
    client = ChaosClient(daemon.endpoint, book["app"], 0)
    client.sessions = book["sessions"]
    try:
        for session, tokens in list(book["sessions"].items()):
            report.sessions += 1
            try:
                _compare_session(client, session, tokens, report)
            except (Wrong, StateroomError, ClientError) as wrong:
                report.complaints.append(f"at the end: {type(wrong).__name__}: {wrong}")
        for name, tokens in book["snapshots"].items():
            try:
                made = client.ask(p.Restore(snapshot=name), p.OpenResult)
            except Corrupt:
                report.counts["refused.corrupt"] += 1
                continue
            found = client.ask(p.ReadTokens(session=made.session), p.TokensResult).tokens
            if found != tokens:
                report.complaints.append(f"at the end: the snapshot {name} holds other tokens")
    finally:
        client.drop()


def _compare_session(client: ChaosClient, session: str, tokens: list[int], report: Report) -> None:
    found = client.held(session)
    if found != tokens:
        raise Wrong(f"{session} holds {len(found)} tokens, not the {len(tokens)} of the book")
    checked = client.ask(p.Verify(session=session), p.VerifyResult)
    report.worst_logit_error = max(report.worst_logit_error, checked.max_abs_logit_error)
    if checked.max_abs_logit_error > VERIFY_ERROR_MAX or not checked.argmax_agree:
        raise Wrong(f"{session}: logits differ by {checked.max_abs_logit_error:.3g}")
    asked = p.Decode(session=session, max_tokens=GREEDY, ignore_eos=True, stream=False)
    client.compare(tokens, client.ask(asked, p.DecodeResult).tokens, p.Sampling())
