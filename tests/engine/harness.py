"""The real engine in process, driven command by command, with everything it answers checked.

It keeps what a broker would: the tokens of every session as the journals tell them, and that each
request gets its replies in order with exactly one final one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from stateroom.caches.snapshots.library import Library
from stateroom.caches.snapshots.limits import Limits
from stateroom.client import protocol as p
from stateroom.daemon.engine.commands import Commands
from stateroom.daemon.engine.disk import Disk
from stateroom.daemon.engine.engine import Engine
from stateroom.daemon.engine.files import Files
from stateroom.daemon.engine.kept import kept_of
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.engine.session import Session
from stateroom.daemon.link import (
    Adopt,
    Answer,
    CancelCommand,
    ChatTurn,
    Command,
    FromWorker,
    Journal,
    Journals,
    Kept,
    Part,
    Shelved,
)
from stateroom.daemon.parts import Parts
from stateroom.daemon.scheduler.pace import Pace

TURNS_MAX = 5_000
DISK_S = 20.0  # nothing on the disk takes so long
MODEL = {"weights": "w", "config": "c", "tokenizer": "t", "dtype": "float32"}
PROMPT = [10, 20, 30, 40, 50, 60, 70]
FINAL = p.Result | p.ErrorBody
QUANTISED_BOUND = 0.02  # of the largest logit


class Bench:
    """An engine and the broker's view of it."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        folder: Path | None = None,
        limits: Limits | None = None,
        model: Mapping[str, str] = MODEL,
        **options: object,
    ) -> None:
        """`folder`: where it keeps snapshots, within `limits`; `model`: by what fingerprint."""
        self.loaded = loaded
        self.bodies: dict[int, list[p.Body]] = {}
        self.journal: dict[str, list[int]] = {}
        self.chat: dict[str, list[ChatTurn]] = {}
        self.asides: list[Journal] = []
        self.incidents: list[BaseException] = []
        self.forks: dict[int, tuple[str, list[str]]] = {}
        self.others: list[FromWorker] = []
        self.shelved: dict[str, Kept] = {}  # snapshots on disk, as a broker knows them
        self.parts = Parts()
        self.told: dict[str, tuple[int, list[Part]]] = {}
        self._rids = itertools.count(1)
        self._names = itertools.count(1)
        self._wall_ms = itertools.count(int(time.time() * 1000))
        options.setdefault("pace", Pace(idle_ms=5.0))
        self.engine = Engine(
            loaded,
            clock_ms=lambda: time.monotonic() * 1000.0,
            emit=self._emit,
            report=self._report,
            **options,  # type: ignore[arg-type]
        )
        if folder is not None:
            library = Library(folder, limits)
            self.engine.disk = Disk(self.engine, library, Files(), lambda: model, lambda: next(self._wall_ms))
            self.shelved = {entry.id: kept_of(entry) for entry in library.entries.values()}
        self.commands = Commands(self.engine)

    def close(self) -> None:
        """Another may have its folder."""
        if self.engine.disk is not None:
            self.engine.disk.files.close()
            self.engine.disk.library.close()

    def _report(self, error: BaseException, rids: Sequence[int] = ()) -> str:
        self.incidents.append(error)
        return "incident"

    def _emit(self, answer: FromWorker) -> None:
        if isinstance(answer, Shelved):
            for kept in answer.kept:
                self.shelved[kept.id] = kept
            for snapshot in answer.gone:
                self.shelved.pop(snapshot, None)
            return
        if isinstance(answer, Journals):
            self.asides.extend(answer.changes)
            for journal in answer.changes:
                self._hear(journal)
            return
        if not isinstance(answer, Answer):
            self.others.append(answer)
            return
        bodies = self.bodies[answer.rid]
        assert not bodies or not isinstance(bodies[-1], FINAL), "a reply after the final one"
        bodies.append(answer.body)
        if answer.journal is not None:
            told = self.journal.setdefault(answer.journal.session, [])
            assert answer.journal.keep <= len(told)
            told[answer.journal.keep :] = answer.journal.tokens
            if answer.journal.chat is not None:
                self.chat[answer.journal.session] = answer.journal.chat
            self._hear(answer.journal)
        for journal in answer.born:
            self._hear(journal)
        if answer.rid in self.forks and isinstance(answer.body, p.ForkResult | p.PublishResult):
            parent, children = self.forks[answer.rid]
            for child in children:
                self.journal[child] = list(self.journal[parent])

    def _hear(self, journal: Journal) -> None:
        """What a broker's catalog does with the bytes that it is told."""
        parts = self.told[journal.session][1] if journal.session in self.told else []
        if journal.parts is not None:
            self.parts.replace(0, parts, journal.parts)
            parts = journal.parts
        self.told[journal.session] = (journal.private_bytes, parts)

    # ------------------------------------------------------------ driving

    def start(
        self,
        request: p.Request,
        session: str | None = None,
        owner: str = "",
        snapshot: str | None = None,
        base: int | None = None,
    ) -> int:
        """Hands a request over without running it. `base`: of a decode that another engine began."""
        rid = next(self._rids)
        self.bodies[rid] = []
        children = []
        if isinstance(request, p.Open | p.Restore):
            session = f"s{next(self._names)}"
        else:
            session = session or getattr(request, "session", None)
        if isinstance(request, p.Fork | p.Publish):
            n = request.n if isinstance(request, p.Fork) else 1
            children = [f"s{next(self._names)}" for _ in range(n)]
            self.forks[rid] = (session or "", children)
        self.commands.take(Command(rid, request, session, children, owner, snapshot, base))
        return rid

    def adopt(
        self,
        session: str,
        tokens: Sequence[int],
        *,
        background: bool = False,
        chat: Sequence[ChatTurn] = (),
        owner: str = "",
        trunk: str | None = None,
        trunk_length: int = 0,
        snapshot: str | None = None,
        kv: p.KV | None = None,
    ) -> p.Body:
        rid = next(self._rids)
        self.bodies[rid] = []
        self.journal[session] = list(tokens)
        adopted = (list(tokens), background, list(chat), kv, owner, trunk, trunk_length, snapshot)
        self.commands.take(Adopt(rid, session, *adopted))
        return self.finish(rid)

    def cancel(self, rid: int) -> None:
        self.commands.take(CancelCommand(rid))

    def finish(self, *rids: int) -> p.Body:
        """Runs until these requests have their final replies; gives the last one's."""
        for _ in range(TURNS_MAX):
            if all(self.final(rid) is not None for rid in rids):
                body = self.final(rids[-1])
                assert body is not None
                self.check_conserved()
                return body
            self.turn()
        raise AssertionError(f"no final reply within {TURNS_MAX} turns")

    def idle(self) -> None:
        """Runs until nothing is left to do."""
        for _ in range(TURNS_MAX):
            if not self.turn():
                self.check_conserved()
                return
        raise AssertionError(f"not idle within {TURNS_MAX} turns")

    def turn(self) -> bool:
        """One turn of the loop, which waits for the disk if there is nothing else to do."""
        disk = self.engine.disk
        if self.engine.step():
            return True
        if disk is None or not disk.busy:
            return False
        assert disk.files.wait(DISK_S)
        return True

    def call(self, request: p.Request) -> p.Body:
        return self.finish(self.start(request))

    def final(self, rid: int) -> p.Body | None:
        bodies = self.bodies[rid]
        return bodies[-1] if bodies and isinstance(bodies[-1], FINAL) else None

    # ------------------------------------------------------------ in short

    def open(self, tokens: Sequence[int] = (), **arguments: object) -> str:
        body = self.call(p.Open(tokens=list(tokens), **arguments))  # type: ignore[arg-type]
        assert isinstance(body, p.OpenResult), body
        return body.session

    def decode(self, session: str, max_tokens: int, **arguments: object) -> p.DecodeResult:
        body = self.call(p.Decode(session=session, max_tokens=max_tokens, **arguments))  # type: ignore[arg-type]
        assert isinstance(body, p.DecodeResult), body
        return body

    def session(self, session_id: str) -> Session:
        return self.engine.sessions[session_id]

    # ------------------------------------------------------------ the law

    def next_logits(self, session_id: str) -> np.ndarray:
        """What the session would decode from next, without touching it; computes what is missing."""
        session = self.session(session_id)
        cache = session.cache.fork() if session.cache is not None else session.served.empty()
        fed = session.tokens[session.stored :]
        logits = cache.forward(self.loaded.model, mx.array([fed], dtype=mx.uint32))
        return np.array(logits[0, -1].astype(mx.float32))

    def fresh_logits(self, tokens: Sequence[int]) -> np.ndarray:
        """The same in one pass over mlx-lm's own caches, which have never seen anything else."""
        caches = make_prompt_cache(self.loaded.model)
        logits = self.loaded.model(mx.array([list(tokens)], dtype=mx.uint32), cache=caches)
        return np.array(logits[0, -1].astype(mx.float32))

    def check_law(self, session_id: str, bound: float = 1e-4) -> None:
        """Next logits equal a fresh session's; tokens, KV and journal agree.

        Quantised sessions have a bound of their own: other pieces of a prompt round otherwise, and a value at
        the edge of two levels may then be stored as the other one.
        """
        session = self.session(session_id)
        assert self.journal[session_id] == session.tokens
        held = session.cache.offsets[0] if session.cache is not None else 0
        assert session.stored == held
        assert not session.lent
        assert session.stored <= max(session.length - 1, 0)
        if not session.tokens:
            return
        if session.served.blueprint.scheme.name == "dense":
            wanted = self.fresh_logits(session.tokens)
        else:  # nobody else's caches store like that
            fresh = session.served.empty()
            logits = fresh.forward(self.loaded.model, mx.array([session.tokens], dtype=mx.uint32))
            wanted = np.array(logits[0, -1].astype(mx.float32))
            bound = max(bound, QUANTISED_BOUND)
        got = self.next_logits(session_id)
        assert np.isfinite(got).all()
        error = np.abs(got - wanted).max() / max(np.abs(wanted).max(), 1e-6)
        assert error <= bound, f"{session_id}: logits differ by {error:.2e} of their size"

    def check_conserved(self) -> None:
        """Trunks, tails and checkpoints are all there is, and the broker was told of all of it."""
        assert list(self.engine.conservation.violations()) == []
        for gone in self.told.keys() - self.engine.sessions.keys():
            self.parts.replace(0, self.told.pop(gone)[1], [])
        if self.engine.requests:
            return
        for name, session in self.engine.sessions.items():
            own, parts = self.told.get(name, (0, []))
            private, shared = self.parts.split(0, parts)
            assert (own + private, shared) == self.engine.memory.told(session)[:2], name


def greedy(bench: Bench, tokens: list[int], count: int) -> list[int]:
    """The plainest loop: a fresh mlx-lm cache, one token at a time."""
    model = bench.loaded.model
    caches = make_prompt_cache(model)
    logits = model(mx.array([tokens]), cache=caches)
    drawn: list[int] = []
    for _ in range(count):
        drawn.append(int(mx.argmax(logits[0, -1]).item()))
        logits = model(mx.array([[drawn[-1]]]), cache=caches)
    return drawn
