"""Is a session's KV what its tokens give? They are computed again, beside it, and the next logits compared.

What is looked at is a branch of the session as it was when the request began, in a session that nobody knows:
so the real one may go on, or close, meanwhile, and the work is the background's, whosever it is. Nothing of
the second computation is shared with anybody or read from disk, and none of it is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import mlx.core as mx
from mlx import nn

from stateroom.caches.session import SessionCache
from stateroom.client.errors import Capacity, Invalid, NotFound, Numeric
from stateroom.client.protocol import Scheme, VerifyResult
from stateroom.daemon.engine.fill import Fill
from stateroom.daemon.engine.session import Session, plan
from stateroom.daemon.link import Journals
from stateroom.daemon.scheduler.pace import QUANTUM_MAX

if TYPE_CHECKING:
    from stateroom.daemon.engine.engine import Engine
    from stateroom.daemon.engine.filling import Work


RETRY_AFTER_S = 60.0  # told to whoever had a session picked that there was no room to verify
# By how much logits of healthy sessions may differ, of the largest: ten times what was seen, or more. A
# prompt that is computed in other pieces rounds otherwise, and where that moves a value over the edge between
# two levels of a quantised store, it is stored as the other one.
BOUNDS: dict[Scheme, float] = {"dense": 1e-3, "affine8": 0.05, "affine4": 0.2, "turbo": 0.2}
HALF_BOUND = 0.05  # at the least, where the model computes in 16 bits


def bound(scheme: Scheme, dtype: object) -> float:
    """`dtype`: what the model computes in, by name."""
    return BOUNDS[scheme] if dtype == "float32" else max(BOUNDS[scheme], HALF_BOUND)


@dataclass(slots=True, eq=False)
class Verify:
    """One `verify`, by quanta like a prefill. `session`: one of its own, with a branch of the real one's KV.

    Attributes:
        nbytes: KV that it takes, at the most.
        bound: as in the result.
        cache: what is computed again.
        served: logits [V] that the session gives for its next token.
    """

    rid: int
    session: Session
    nbytes: int
    bound: float
    then: Callable[[Verify], None]
    started_ms: float | None = None
    cache: SessionCache | None = None
    served: mx.array | None = None
    fed: int = 0
    cancelled: bool = False
    result: VerifyResult | None = None

    def start(self, now_ms: float) -> None:
        self.started_ms = now_ms
        self.cache = self.session.served.empty()

    def end(self) -> None:
        self.then(self)

    @property
    def done(self) -> bool:
        return self.remaining == 0

    @property
    def to_compute(self) -> int:
        return self.remaining

    @property
    def remaining(self) -> int:
        return self.session.length - self.fed

    def piece(self, tokens: int) -> int:
        assert self.cache is not None
        return self.cache.piece(tokens)

    def launch(self, model: nn.Module, tokens: int) -> list[mx.array]:
        """Feeds the next tokens. First the branch has its pending one; in the end both are compared."""
        assert self.cache is not None
        if self.served is None:
            self.served = self._served(model)
        fed = self.session.tokens[self.fed : self.fed + tokens]
        logits = _last(self.cache.forward(model, mx.array([fed], dtype=mx.uint32)))
        arrays = [self.served, *self.cache.arrays()]
        return [_compared(self.served, logits), *arrays] if tokens == self.remaining else arrays

    def _served(self, model: nn.Module) -> mx.array:
        branch, self.session.cache = self.session.cache or self.session.served.empty(), None
        return _last(branch.forward(model, mx.array([self.session.tokens[-1:]], dtype=mx.uint32)))

    def landed(self, tokens: int, arrays: list[mx.array]) -> None:
        self.fed += tokens
        if not self.done:
            return
        error, largest, agree, finite = cast("list[float]", arrays[0].tolist())
        if not finite:
            raise Numeric(
                "The model gave NaN or infinite logits for this session, or for its tokens computed anew.",
                length=self.session.length,
            )
        self.result = VerifyResult(
            max_abs_logit_error=error,
            max_abs_logit=largest,
            argmax_agree=bool(agree),
            length=self.session.length,
            bound=self.bound,
        )


def _last(logits: mx.array) -> mx.array:
    """Of logits [1, N, V] those after the last token, [V], in float32."""
    return logits[0, -1].astype(mx.float32)


def _compared(served: mx.array, anew: mx.array) -> mx.array:
    """[largest difference, largest logit, the same argmax, all finite], the latter two as 0 or 1."""
    finite = mx.all(mx.isfinite(served) & mx.isfinite(anew))
    agree = mx.argmax(served) == mx.argmax(anew)
    figures = (mx.abs(served - anew).max(), mx.abs(anew).max(), agree, finite)
    return mx.stack([figure.astype(mx.float32) for figure in figures])


def begin_verify(engine: Engine, rid: int, session: Session, owner: str, *, picked: bool) -> None:
    """Begins a `verify`, for which `owner` pays.

    What is missing of its KV is brought back first, as by any operation: that is what would be served. A
    session that the broker has `picked` by itself is only looked at.

    Raises `Invalid` for an empty session, `NotFound` for a picked one that isn't idle and resident any more,
    `Capacity`, which for a picked one nobody else gives way to avoid; nothing has changed.
    """
    if not session.tokens:
        raise Invalid("An empty session has nothing to verify; prefill something first.", field="session")
    taken = any(request.session is session for request in engine.requests.values())
    if picked and (taken or session.missing or session.cache is None):
        raise NotFound("There is no idle session with KV right now.", field="session")
    nbytes = _needed_bytes(engine, session)
    if picked and not engine.memory.has_room(nbytes):
        raise Capacity(
            f"There is no room for {nbytes} bytes of KV now; nobody is made to leave for this.",
            needed_bytes=nbytes,
            retry_after_s=RETRY_AFTER_S,
        )
    if not session.missing:
        engine.memory.admit_bytes(nbytes, {session})
        _begin(engine, rid, session, owner, nbytes)
        return

    def then(fill: Fill) -> None:
        if fill.cancelled and not fill.done:
            engine.answer(rid, CANCELLED, engine.journal(session, session.length))
        else:
            _begin(engine, rid, session, owner, nbytes)

    change = plan(session, session.length, [])
    engine.sharing.begin(Fill(rid, session, change, then, engine.clock_ms(), beside=nbytes))


# Nothing was compared.
CANCELLED = VerifyResult(
    max_abs_logit_error=0.0, max_abs_logit=0.0, argmax_agree=False, length=0, finish="cancelled"
)


def _needed_bytes(engine: Engine, session: Session) -> int:
    """What is computed again, and the branch until its one token is: a copy, where branches are."""
    served = session.served
    anew = served.projected_bytes(session.length, QUANTUM_MAX)
    if served.caps.fork == "shared" and session.cache is not None:
        branch = session.cache.branch_bytes(engine.shared_min) + served.projected_bytes(1, 1)
    else:
        branch = served.projected_bytes(session.length, 1)
    return anew + branch


def _begin(engine: Engine, rid: int, session: Session, owner: str, nbytes: int) -> None:
    twin = Session("", session.served, owner, background=True, tokens=list(session.tokens))
    if session.cache is not None:
        twin.cache = engine.sharing.branched(session.served, session.cache)
        engine.memory.changed(session)
        # What was its own is shared now, for a moment; and a fill may have brought KV back.
        engine.emit(Journals([engine.journal(session, session.length)]))

    def then(work: Work) -> None:
        assert isinstance(work, Verify)
        work.session.cache = None
        engine.answer(rid, work.result or CANCELLED)

    most = bound(session.served.blueprint.scheme.name, engine.loaded.facts.get("dtype"))
    engine.filling.begin(Verify(rid, twin, nbytes, most, then))
