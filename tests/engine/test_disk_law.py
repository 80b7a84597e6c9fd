"""The law again, with sessions that are parked, saved, restored, and taken over by other engines on the way.

In each engine all of a session that the disk may have is taken from there, however little.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from tests.engine.harness import Bench
from tests.engine.speculating import always
from tests.engine.test_law import SCHEMES, SESSIONS_MOST, Operations

from stateroom.client import protocol as p
from stateroom.daemon.engine import fetching, sharing
from stateroom.daemon.engine.shelf import kv_of
from stateroom.daemon.link import Kept

SAVED_MOST = 4
MEMORY = Path("/dev/shm")  # of Linux: what is synced there costs nothing


class OnDisk(Operations):
    """`Operations`, and those of the disk."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="disk-law-", dir=MEMORY if MEMORY.is_dir() else None))
        self.saved: list[tuple[str, list[int]]] = []
        self.bench = self.made()

    def made(self) -> Bench:
        return always(Bench(self.bench.loaded, folder=self.folder, shared_min=self.shared_min))

    def teardown(self) -> None:
        self.bench.close()
        shutil.rmtree(self.folder)

    @precondition(lambda self: self.ids)
    @rule(ns=st.lists(st.integers(0, 99), min_size=1, max_size=4), keep=st.floats(0.5, 1))
    def park(self, ns: list[int], keep: float) -> None:
        """All of them; then some come back, with as much of their tokens as is kept, and others."""
        for session in map(self.pick, ns):
            body = self.bench.call(p.Park(session=session))
            assert isinstance(body, p.ParkResult)
            held = self.bench.session(session)
            assert (held.cache, held.stored) == (None, 0)
            assert body.tier == ("tokens" if held.snapshot is None else "disk")
        for session in [self.pick(n) for n in ns if n % 3 != 2]:
            tokens = self.bench.session(session).tokens
            self.bench.call(p.Sync(session=session, tokens=[*tokens[: int(keep * len(tokens))], 7]))

    @precondition(lambda self: self.ids)
    @rule(
        ns=st.lists(st.integers(0, 99), min_size=1, max_size=3),
        turns=st.integers(0, 9),
        other=st.integers(0, 99),
    )
    def keep(self, ns: list[int], turns: int, other: int) -> None:
        """As the ladder does; one of the sessions may be needed meanwhile."""
        assert self.bench.engine.disk is not None
        outcomes: list[Kept | Exception] = []
        for n in ns:
            self.bench.engine.disk.keep(self.bench.session(self.pick(n)), outcomes.append)
        for _ in range(turns):
            self.bench.turn()
        self.bench.call(p.Prefill(session=self.pick(other), tokens=[other]))
        self.bench.idle()
        assert len(outcomes) == len(ns)

    @precondition(lambda self: self.ids and len(self.saved) < SAVED_MOST)
    @rule(n=st.integers(0, 99))
    def save(self, n: int) -> None:
        session = self.pick(n)
        tokens = list(self.bench.session(session).tokens)
        before = set(self.bench.shelved)
        body = self.bench.call(p.Save(session=session, snapshot="mine"))
        if tokens:
            assert isinstance(body, p.SaveResult)
            (made,) = (each for each in self.bench.shelved.keys() - before if self.bench.shelved[each].name)
            self.saved.append((made, tokens))

    @precondition(lambda self: self.saved and len(self.ids) < SESSIONS_MOST)
    @rule(n=st.integers(0, 99), turns=st.none() | st.integers(0, 9))
    def restore(self, n: int, turns: int | None) -> None:
        snapshot, tokens = self.saved[n % len(self.saved)]
        rid = self.bench.start(p.Restore(snapshot="mine"), snapshot=snapshot)
        if turns is not None:
            for _ in range(turns):
                self.bench.turn()
            self.bench.cancel(rid)
        body = self.bench.finish(rid)
        assert isinstance(body, p.OpenResult)
        assert self.bench.session(body.session).tokens == (tokens if body.finish == "done" else [])
        self.ids.append(body.session)
        self.touched.add(body.session)

    @precondition(lambda self: self.saved)
    @rule(n=st.integers(0, 99))
    def damage(self, n: int) -> None:
        """One byte of one file; what is restored or resumed from then on is right, or refused by name."""
        snapshot, _ = self.saved.pop(n % len(self.saved))
        files = sorted(path for path in (self.folder / "kept").rglob("*") if path.is_file())
        path = files[n % len(files)]
        content = bytearray(path.read_bytes())
        if content:
            content[random.Random(n).randrange(len(content))] ^= 1
            path.write_bytes(content)
        self.saved = [each for each in self.saved if each[0] != path.parent.name]
        assert snapshot in self.bench.shelved

    @rule(lost=st.integers(0, 3), used=st.integers(1, 3))
    def take_over(self, lost: int, used: int) -> None:
        """Another engine has all sessions; one may come without its snapshot, one with an old one."""
        old, ids = self.bench, list(self.ids)
        old.idle()
        old.close()
        self.bench = self.made()
        self.bench._names = old._names
        self.saved = [each for each in self.saved if each[0] in self.bench.shelved]
        for n, session in enumerate(ids):
            held = old.session(session)
            self.bench.adopt(
                session,
                held.tokens,
                kv=kv_of(held.served.blueprint.scheme),
                chat=held.chat,
                owner=held.owner,
                snapshot=None if n == lost else held.snapshot,
            )
            assert self.bench.session(session).stored == 0
        for session in ids[:used]:
            self.bench.call(p.Prefill(session=session, tokens=[used]))
        self.touched.update(ids)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token more than there is in memory is worth a look at the disk."""
    monkeypatch.setattr(sharing, "SHARE_MIN", 1)
    monkeypatch.setattr(fetching, "SHARE_MIN", 1)


def walk(architecture: str, examples: int, **attributes: object) -> None:
    machine = type(f"OnDisk_{architecture}", (OnDisk,), {"architecture": architecture, **attributes})
    bounds = settings(
        max_examples=examples, stateful_step_count=20, suppress_health_check=list(HealthCheck), deadline=None
    )
    run_state_machine_as_test(machine, settings=bounds)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2", "falcon_h1", "mamba"])
def test_law_of_sessions_on_disk(architecture: str) -> None:
    walk(architecture, 6, shared_min=3)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2"])
def test_law_of_schemes_on_disk(architecture: str) -> None:
    walk(architecture, 3, width=256, schemes=SCHEMES, shared_min=3)
