"""The law, over random sequences of operations: whatever was done to a session, its next logits equal
those of a fresh session given the same tokens (within 1e-4 of their size, float32).

The real engine in process, tiny random models of several architectures. Aliasing between forks, rows in
a wrong order, wrong positions after trims, merges and leaves all show here (B14, B20, B29, B30, B32, X3).
"""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.engine.harness import Bench, greedy
from tests.engine.speculating import always, tell
from tests.tiny import make_tiny_model

from stateroom.client import protocol as p
from stateroom.daemon.engine.blas_threads import BlasThreads

SESSIONS_MOST = 5
LENGTH_MOST = 40
VOCAB = 200  # ids drawn; below the vocabulary of every tiny model

tokens_of = st.lists(st.integers(0, VOCAB - 1), max_size=14)
some_tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14)


class Operations(RuleBasedStateMachine):
    """Random operations on a handful of sessions; every touched session is checked after each."""

    architecture: ClassVar[str] = ""
    width: ClassVar[int] = 32
    schemes: ClassVar[list[p.KV | None]] = [None]
    shared_min: ClassVar[int] = 64  # tokens that forks share rather than copy
    alone: ClassVar[bool] = False  # quanta run by themselves, as with a threaded BLAS
    _loaded: ClassVar[dict[str, object]] = {}

    def __init__(self) -> None:
        super().__init__()
        model = f"{self.architecture}-{self.width}"
        if model not in self._loaded:
            self._loaded[model] = make_tiny_model(self.architecture, width=self.width)
        options: dict[str, object] = {"shared_min": self.shared_min}
        if self.alone:
            options["blas"] = BlasThreads(Recorded(), 2)
        self.bench = always(Bench(self._loaded[model], **options))  # type: ignore[arg-type]
        self.ids: list[str] = []
        self.touched: set[str] = set()

    def pick(self, n: int) -> str:
        session = self.ids[n % len(self.ids)]
        self.touched.add(session)
        return session

    def room(self, session: str) -> int:
        return LENGTH_MOST - self.bench.session(session).length

    @precondition(lambda self: len(self.ids) < SESSIONS_MOST)
    @rule(tokens=tokens_of, scheme=st.integers(0, 99))
    def open(self, tokens: list[int], scheme: int) -> None:
        session = self.bench.open(tokens, kv=self.schemes[scheme % len(self.schemes)])
        self.ids.append(session)
        self.touched.add(session)
        assert self.bench.session(session).tokens == tokens

    @precondition(lambda self: self.ids)
    @rule(n=st.integers(0, 99), tokens=tokens_of)
    def prefill(self, n: int, tokens: list[int]) -> None:
        session = self.pick(n)
        tokens = tokens[: max(self.room(session), 0)]
        before = list(self.bench.session(session).tokens)
        body = self.bench.call(p.Prefill(session=session, tokens=tokens))
        assert isinstance(body, p.LengthResult)
        assert self.bench.session(session).tokens == before + tokens
        assert body.receipt.reused + body.receipt.prefilled == body.length == len(before + tokens)

    @precondition(lambda self: self.ids)
    @rule(
        picks=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 6), st.integers(0, 3)), max_size=4),
        temperature=st.sampled_from([0.0, 1.0]),
        cancel=st.none() | st.integers(0, 3),
        guesses=st.none() | st.integers(1, 6),
    )
    def decode(
        self, picks: list[tuple[int, int, int]], temperature: float, cancel: int | None, guesses: int | None
    ) -> None:
        """Several sessions at once, each joining some turns after the one before, one maybe cancelled.

        Every second one speculates, where its model can.
        """
        started: dict[str, int] = {}
        for n, count, turns in picks:
            session = self.ids[n % len(self.ids)]
            if session in started or not self.bench.session(session).tokens or self.room(session) < count:
                continue
            self.touched.add(session)
            speculate = None
            if guesses and n % 2 and self.bench.session(session).served.caps.speculative:
                speculate = p.Speculate(kind="lookup", max_draft=guesses)
                tell(self.bench, session, self.continued(session, count), wrong=0.3, seed=n)
            started[session] = self.bench.start(
                p.Decode(
                    session=session,
                    max_tokens=count,
                    sampling=p.Sampling(temperature=temperature, seed=n),
                    stop_tokens=[t for t in range(VOCAB) if t % 5 == 0],
                    ignore_eos=True,
                    speculate=speculate,
                )
            )
            for _ in range(turns):
                self.bench.engine.step()
        if cancel is not None and started:
            self.bench.cancel(list(started.values())[cancel % len(started)])
        self.bench.idle()
        for session, rid in started.items():
            body = self.bench.final(rid)
            assert isinstance(body, p.DecodeResult)
            assert body.length == self.bench.session(session).length
            assert body.tokens == [
                t for e in self.bench.bodies[rid] if isinstance(e, p.TokenEvent) for t in e.tokens
            ]
            assert self.bench.session(session).tokens[body.length - len(body.tokens) :] == body.tokens

    def continued(self, session: str, count: int) -> list[int]:
        """What a greedy decode of dense KV would say; else any tokens."""
        held = self.bench.session(session)
        if held.served.blueprint.scheme.name != "dense":
            return [token % VOCAB for token in range(count)]
        return greedy(self.bench, held.tokens, count)

    @precondition(lambda self: self.ids)
    @rule(n=st.integers(0, 99), at=st.floats(0, 1), replay=st.booleans())
    def trim(self, n: int, at: float, replay: bool) -> None:
        session = self.pick(n)
        before = list(self.bench.session(session).tokens)
        to = int(at * len(before))
        body = self.bench.call(p.Trim(session=session, to=to, replay=replay))
        if isinstance(body, p.ErrorBody):
            assert body.code == "unsupported"
            assert not replay
            nearest = body.details["nearest"]
            assert self.bench.session(session).tokens == before
            assert nearest != to
            assert isinstance(self.bench.call(p.Trim(session=session, to=nearest)), p.LengthResult)
            assert self.bench.session(session).tokens == before[:nearest]
        else:
            assert self.bench.session(session).tokens == before[:to]

    @precondition(lambda self: self.ids and len(self.ids) < SESSIONS_MOST)
    @rule(n=st.integers(0, 99), children=st.integers(1, 3))
    def fork(self, n: int, children: int) -> None:
        session = self.pick(n)
        body = self.bench.call(p.Fork(session=session, n=min(children, SESSIONS_MOST - len(self.ids))))
        assert isinstance(body, p.ForkResult)
        for child in body.sessions:
            assert self.bench.session(child).tokens == self.bench.session(session).tokens
            self.ids.append(child)
            self.touched.add(child)

    @precondition(lambda self: self.ids)
    @rule(n=st.integers(0, 99), keep=st.floats(0, 1), tokens=tokens_of)
    def sync(self, n: int, keep: float, tokens: list[int]) -> None:
        session = self.pick(n)
        before = list(self.bench.session(session).tokens)
        wanted = (before[: int(keep * len(before))] + tokens)[:LENGTH_MOST]
        body = self.bench.call(p.Sync(session=session, tokens=wanted))
        assert isinstance(body, p.LengthResult)
        assert self.bench.session(session).tokens == wanted
        assert body.receipt.reused + body.receipt.prefilled == len(wanted)

    @precondition(lambda self: self.ids)
    @rule(n=st.integers(0, 99), tokens=some_tokens, turns=st.integers(0, 2))
    def prefill_cancelled(self, n: int, tokens: list[int], turns: int) -> None:
        session = self.pick(n)
        tokens = tokens[: max(self.room(session), 0)]
        before = list(self.bench.session(session).tokens)
        rid = self.bench.start(p.Prefill(session=session, tokens=tokens))
        for _ in range(turns):
            self.bench.engine.step()
        self.bench.cancel(rid)
        self.bench.idle()
        after = self.bench.session(session).tokens
        assert after == (before + tokens)[: len(after)]
        assert len(after) >= len(before)

    @precondition(lambda self: self.ids)
    @rule(n=st.integers(0, 99), tokens=some_tokens)
    def score(self, n: int, tokens: list[int]) -> None:
        session = self.pick(n)
        held = list(self.bench.session(session).tokens)
        body = self.bench.call(p.Score(session=session, tokens=tokens))
        if not held:
            assert isinstance(body, p.ErrorBody)
            return
        assert isinstance(body, p.ScoreResult)
        assert self.bench.session(session).tokens == held
        assert len(body.logprobs) == len(tokens)

    @precondition(lambda self: self.ids)
    @rule(n=st.integers(0, 99), picked=st.booleans(), beside=st.integers(0, 4))
    def verify(self, n: int, picked: bool, beside: int) -> None:
        """It agrees, and whatever happens beside it is no matter to it."""
        session = self.pick(n)
        held = self.bench.session(session)
        length, there = held.length, bool(held.length) and not held.missing and held.cache is not None
        rid = self.bench.start(p.Verify(session=None if picked else session), session)
        if picked and there and beside and self.room(session) > beside:
            self.bench.decode(session, beside)
        body = self.bench.finish(rid)
        if not length or (picked and not there):
            assert isinstance(body, p.ErrorBody)
            return
        assert isinstance(body, p.VerifyResult), body
        assert body.length == length
        assert body.healthy, body

    @precondition(lambda self: self.ids)
    @rule(n=st.integers(0, 99))
    def lose_kv(self, n: int) -> None:
        """As after a worker's death: the tokens come back, without KV."""
        session = self.pick(n)
        self.bench.adopt(session, self.bench.session(session).tokens)

    @precondition(lambda self: self.ids)
    @rule(n=st.integers(0, 99))
    def close(self, n: int) -> None:
        session = self.ids.pop(n % len(self.ids))
        self.touched.discard(session)
        assert isinstance(self.bench.call(p.Close(session=session)), p.CloseResult)
        assert session not in self.bench.engine.sessions

    @invariant()
    def law(self) -> None:
        assert not self.bench.incidents, self.bench.incidents
        assert not self.bench.engine.requests
        assert not self.bench.engine.decoding.batches
        # A write into a fork's sibling would show on one that wasn't touched: check those too.
        for session in self.ids:
            self.bench.check_law(session)
        self.touched.clear()


class Recorded:
    """Stands for OpenBLAS where only the order of work is tested."""

    def openblas_set_num_threads(self, threads: int) -> None:
        assert threads in (1, 2)


def walk(architecture: str, examples: int = 25, steps: int = 18, **attributes: object) -> None:
    """Random operations on sessions of one architecture, with these attributes of `Operations`."""
    machine = type(f"On_{architecture}", (Operations,), {"architecture": architecture, **attributes})
    bounds = settings(
        max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(machine, settings=bounds)


@pytest.mark.parametrize(
    ("architecture", "alone"),
    [(name, False) for name in ("llama", "qwen3", "gemma3_text", "lfm2", "falcon_h1", "mamba")]
    + [("llama", True), ("lfm2", True)],
)
def test_law(architecture: str, alone: bool) -> None:
    walk(architecture, alone=alone)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2", "falcon_h1"])
def test_law_of_forks_that_share(architecture: str) -> None:
    """Forks of forks over trunks of any length: no write of one is ever seen by another (B30)."""
    walk(architecture, shared_min=1)


SCHEMES = [
    None,
    p.KV(scheme="affine4"),
    p.KV(scheme="affine8", group_size=32),
    p.KV(scheme="turbo"),
    p.KV(scheme="affine8", quantise_after=9),
]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2"])
def test_law_of_mixed_schemes(architecture: str) -> None:
    """Sessions of several schemes side by side: each equals a fresh one of its own scheme."""
    walk(architecture, examples=12, steps=14, width=256, schemes=SCHEMES, shared_min=3)
