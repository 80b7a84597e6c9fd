"""`verify`: it agrees with healthy sessions, finds damaged KV, and is in nobody's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tests.engine.harness import PROMPT, Bench
from tests.tiny import make_tiny_model

from stateroom.caches.rows import PackedRows
from stateroom.client import protocol as p
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.engine.session import Session
from stateroom.daemon.engine.verify import CANCELLED, RETRY_AFTER_S, Verify, bound

DENSE_BOUND = 1e-4  # of the largest logit, as the law
QUANTISED_BOUND = 0.02
LONG = [(13 * k) % 200 for k in range(300)]
SCHEMES = {
    "dense": p.KV(),
    "affine8": p.KV(scheme="affine8", group_size=32),
    "affine4": p.KV(scheme="affine4", group_size=32),
    "late": p.KV(scheme="affine8", group_size=32, quantise_after=128),
    "turbo": p.KV(scheme="turbo"),
}


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "lfm2", "falcon_h1", "mamba"])
def family(request: pytest.FixtureRequest) -> LoadedModel:
    return make_tiny_model(request.param, width=128)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return make_tiny_model(width=256)  # heads of 64 values: what schemes can quantise


def verified(bench: Bench, session: str) -> p.VerifyResult:
    body = bench.call(p.Verify(session=session))
    assert isinstance(body, p.VerifyResult), body
    return body


def relative(result: p.VerifyResult) -> float:
    assert result.max_abs_logit > 0
    return result.max_abs_logit_error / result.max_abs_logit


def used(bench: Bench, **options: Any) -> str:
    """A session that was prefilled in pieces, decoded, forked, trimmed and decoded again."""
    session = bench.open(LONG, **options)
    bench.decode(session, 9)
    (child,) = bench.call(p.Fork(session=session)).sessions  # type: ignore[union-attr]
    bench.call(p.Trim(session=child, count=3, replay=True))
    bench.decode(child, 5)
    return child


def damage(session: Session, token: int = 3) -> None:
    """One value of the first layer's keys is another; of packed ones a word."""
    assert session.cache is not None
    session.cache.take_back()  # from the trunk that an earlier look at it made
    store = next(store for store in session.cache.stores if isinstance(store, PackedRows))
    assert store.chains == ((),)
    planes = store.planes
    plane = planes[0]
    assert plane is not None
    spot = mx.zeros(plane.shape, dtype=mx.bool_)
    spot[0, 0, token, 0] = True
    if plane.dtype == mx.uint32:
        planes[0] = mx.where(spot, plane ^ 0x7FFFFFFF, plane)
    else:
        planes[0] = mx.where(spot, plane + 50, plane)
    mx.eval(planes[0])


# ---------------------------------------------------------------- healthy


def test_healthy_sessions_of_every_kind_agree(family: LoadedModel) -> None:
    bench = Bench(family)
    session = used(bench)
    length = bench.session(session).length
    result = verified(bench, session)
    assert relative(result) <= DENSE_BOUND
    assert (result.argmax_agree, result.length, result.finish) == (True, length, "done")
    assert result.healthy
    bench.check_law(session)
    bench.decode(session, 4)
    bench.check_law(session)


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_healthy_sessions_of_every_scheme_agree(loaded: LoadedModel, scheme: str) -> None:
    bench = Bench(loaded)
    result = verified(bench, used(bench, kv=SCHEMES[scheme]))
    assert result.healthy
    assert relative(result) <= (DENSE_BOUND if scheme == "dense" else QUANTISED_BOUND)


def test_the_logits_compared_are_those_of_the_next_token(bench: Bench) -> None:
    """The largest logit that it tells is that of a fresh session of the same tokens."""
    session = bench.open(PROMPT)
    result = verified(bench, session)
    wanted = abs(bench.fresh_logits(PROMPT)).max()
    assert result.max_abs_logit == pytest.approx(float(wanted), rel=1e-4)


def test_a_session_of_one_token_and_an_empty_one(bench: Bench) -> None:
    assert relative(verified(bench, bench.open([7]))) <= DENSE_BOUND
    body = bench.call(p.Verify(session=bench.open()))
    assert isinstance(body, p.ErrorBody)
    assert body.code == "invalid"


def test_what_is_missing_comes_back_first(bench: Bench) -> None:
    bench.adopt("far", LONG)
    before = bench.engine.filling.tokens
    assert relative(verified(bench, "far")) <= DENSE_BOUND
    assert bench.session("far").stored == len(LONG) - 1
    assert bench.engine.filling.tokens - before == 2 * len(LONG) - 1
    bench.check_law("far")


def test_a_published_trunk_is_verified_as_a_session(bench: Bench) -> None:
    session = bench.open(LONG)
    published = bench.call(p.Publish(session=session, name="shared"))
    assert isinstance(published, p.PublishResult)
    assert relative(verified(bench, published.trunk)) <= DENSE_BOUND


# ---------------------------------------------------------------- damaged


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2", "falcon_h1"])
def test_one_wrong_value_is_found_out(architecture: str) -> None:
    bench = Bench(make_tiny_model(architecture, width=128))
    session = bench.open(PROMPT)
    healthy = relative(verified(bench, session))
    damage(bench.session(session))
    damaged = verified(bench, session)
    assert not damaged.healthy
    assert relative(damaged) > 10 * healthy


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme != "dense"])
def test_one_wrong_word_of_quantised_keys_is_found_out(loaded: LoadedModel, scheme: str) -> None:
    bench = Bench(loaded)
    session = bench.open(LONG[:150], kv=SCHEMES[scheme])
    healthy = verified(bench, session)
    damage(bench.session(session), token=140)
    damaged = verified(bench, session)
    assert damaged.max_abs_logit_error > 2 * healthy.max_abs_logit_error


def test_kv_that_is_no_number_is_named(bench: Bench) -> None:
    session = bench.open(PROMPT)
    store = bench.session(session).cache.stores[0]  # type: ignore[union-attr]
    assert isinstance(store, PackedRows)
    store.planes[0] = store.planes[0] * float("nan")  # type: ignore[operator]
    body = bench.call(p.Verify(session=session))
    assert isinstance(body, p.ErrorBody)
    assert (body.code, body.details) == ("numeric", {"length": len(PROMPT)})
    assert not bench.incidents


def test_sixteen_bits_are_given_more_room() -> None:
    assert bound("dense", "float32") < bound("dense", "bfloat16") == bound("dense", None)
    assert bound("affine4", "bfloat16") == bound("affine4", "float32")


# ---------------------------------------------------------------- in nobody's way


def test_it_is_behind_interactive_work(bench: Bench) -> None:
    """Counted: while an interactive prefill waits, at most one quantum of eight is the verification's."""
    session = bench.open(LONG)
    rid = bench.start(p.Verify(session=session))
    other = bench.start(p.Open(tokens=[(7 * k) % 200 for k in range(300)]), owner="other")
    fed = {rid: 0, other: 0}
    launch = bench.engine.filling._launch

    def count(plan: Any) -> None:
        for key, _ in plan.quantum:
            fed[key] += 1
        launch(plan)

    bench.engine.filling._launch = count  # type: ignore[method-assign]
    bench.finish(other)
    assert fed[other] >= 2
    assert fed[rid] <= 1 + fed[other] // 7
    bench.finish(rid)


def test_who_asks_pays(bench: Bench) -> None:
    """Nobody can spend another one's share of the device by having its sessions verified."""
    session = bench.finish(bench.start(p.Open(tokens=LONG), owner="theirs"))
    assert isinstance(session, p.OpenResult)
    spent = bench.engine.schedule.spent_ms.by_owner
    bench.idle()
    before = spent["theirs"]
    bench.finish(bench.start(p.Verify(), session.session, owner="mine"))
    bench.idle()
    assert spent["mine"] > 0
    assert spent["theirs"] == before


def test_the_session_goes_on_and_may_be_closed_meanwhile(bench: Bench) -> None:
    """Picked by the broker, it only looks: nobody gets `busy` for it, and nothing of the session changes."""
    session = bench.open(LONG)
    rid = bench.start(p.Verify(), session=session)
    assert isinstance(bench.engine.requests[rid], Verify)
    drawn = bench.decode(session, 6)
    assert len(drawn.tokens) == 6
    assert isinstance(bench.call(p.Close(session=session)), p.CloseResult)
    result = bench.finish(rid)
    assert isinstance(result, p.VerifyResult)
    assert result.length == len(LONG)
    assert relative(result) <= DENSE_BOUND


def test_one_that_was_picked_and_is_idle_no_more_is_not_there(bench: Bench) -> None:
    session = bench.open(PROMPT)
    stream = bench.start(p.Decode(session=session, max_tokens=50))
    bench.engine.step()
    body = bench.finish(bench.start(p.Verify(), session))
    assert isinstance(body, p.ErrorBody)
    assert body.code == "not_found"
    bench.finish(stream)
    bench.adopt("far", PROMPT)
    body = bench.finish(bench.start(p.Verify(), "far"))
    assert isinstance(body, p.ErrorBody)
    assert body.code == "not_found"
    assert bench.session("far").stored == 0


@pytest.mark.parametrize("missing", [False, True])
def test_cancelled_it_says_so_and_holds_nothing(bench: Bench, missing: bool) -> None:
    bench.adopt("far", LONG)
    if not missing:
        bench.call(p.Prefill(session="far", tokens=[1]))
    held = bench.engine.kv_bytes
    rid = bench.start(p.Verify(session="far"))
    bench.engine.step()
    bench.cancel(rid)
    result = bench.finish(rid)
    assert isinstance(result, p.VerifyResult)
    assert (result.finish, result.argmax_agree, result.healthy) == ("cancelled", False, False)
    bench.idle()
    assert missing or bench.engine.kv_bytes <= held
    assert not bench.engine.requests
    bench.decode("far", 3)
    bench.check_law("far")


def test_it_is_admitted_by_the_budget(loaded: LoadedModel) -> None:
    served = Bench(loaded).engine.schemes.dense
    one = served.projected_bytes(len(LONG), 512)
    for missing in (False, True):
        bench = Bench(loaded, kv_budget_bytes=one + one // 2)
        if missing:
            bench.adopt("far", LONG)
        else:
            bench.adopt("far", [])
            bench.call(p.Prefill(session="far", tokens=LONG))
        body = bench.call(p.Verify(session="far"))
        assert isinstance(body, p.ErrorBody)
        assert body.code == "capacity"
        assert body.details["needed_bytes"] >= one
        bench.engine.memory.budget_bytes = 4 * one
        assert relative(verified(bench, "far")) <= DENSE_BOUND


def test_what_is_to_be_verified_counts_though_its_session_has_gone(loaded: LoadedModel) -> None:
    bench = Bench(loaded)
    other, session = bench.open(PROMPT), bench.open(LONG)
    stream = bench.start(p.Decode(session=other, max_tokens=300, ignore_eos=True))
    bench.engine.step()
    rid = bench.start(p.Verify(), session=session)
    memory, request = bench.engine.memory, bench.engine.requests[rid]
    held = memory.held_bytes
    bench.start(p.Close(session=session))
    assert request.session.cache is not None
    assert sum(trunk.nbytes for trunk in request.session.cache.trunks) > 0
    assert memory.held_bytes == held
    assert memory.busy_bytes == held + memory._promised()
    bench.finish(rid, stream)
    assert memory.held_bytes == bench.session(other).kv_bytes


def test_nobody_gives_way_to_one_that_was_picked_nor_is_it_a_use(loaded: LoadedModel) -> None:
    one = Bench(loaded).engine.schemes.dense.projected_bytes(len(LONG), 512)
    bench = Bench(loaded, kv_budget_bytes=2 * one + one // 2)
    old, new = bench.open(LONG), bench.open(LONG[::-1])
    body = bench.finish(bench.start(p.Verify(), new))
    assert isinstance(body, p.ErrorBody)
    assert (body.code, body.details["retry_after_s"]) == ("capacity", RETRY_AFTER_S)
    assert all(bench.session(session).stored for session in (old, new))
    assert relative(verified(bench, new)) <= DENSE_BOUND  # who asks for it is served
    assert bench.session(old).stored == 0
    bench.engine.memory.budget_bytes = None
    used_ms = bench.session(new).used_ms
    assert isinstance(bench.finish(bench.start(p.Verify(), new)), p.VerifyResult)
    assert bench.session(new).used_ms == used_ms


def test_one_that_waits_for_room_can_be_cancelled(loaded: LoadedModel) -> None:
    one = Bench(loaded).engine.schemes.dense.projected_bytes(len(LONG), 512)
    bench = Bench(loaded, kv_budget_bytes=2 * one + one // 2)
    busy, session = bench.open([1, 2, 3]), bench.open(LONG)
    stream = bench.start(p.Decode(session=busy, max_tokens=300, ignore_eos=True))
    rid = bench.start(p.Verify(session=session))
    assert bench.final(rid) is None
    assert rid in bench.engine.ladder.rids
    bench.cancel(rid)
    assert bench.finish(rid) == CANCELLED
    bench.cancel(stream)
    bench.finish(stream)
    bench.check_law(session)


def test_what_was_read_from_disk_is_what_its_tokens_give(loaded: LoadedModel, tmp_path: Path) -> None:
    for name, kv in SCHEMES.items():
        bench = Bench(loaded, folder=tmp_path / name)
        session = bench.open(LONG, kv=kv)
        assert isinstance(bench.call(p.Park(session=session)), p.ParkResult)
        assert bench.session(session).stored == 0
        assert verified(bench, session).healthy, name
        assert bench.session(session).stored == len(LONG) - 1
        bench.close()


def test_a_failing_pass_ends_it_alone(bench: Bench) -> None:
    session = bench.open(LONG)
    rid = bench.start(p.Verify(session=session))
    work = bench.engine.requests[rid]
    assert isinstance(work, Verify)
    work.session.tokens[0] = -(2**40)  # which no array takes
    body = bench.finish(rid)
    assert isinstance(body, p.ErrorBody)
    assert body.code == "internal"
    assert len(bench.incidents) == 1
    bench.decode(session, 3)
    bench.check_law(session)
