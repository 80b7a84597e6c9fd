"""Forks over shared tokens: what they cost, what is told of it, and what is left when they go."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest
from tests.engine.harness import Bench, greedy
from tests.tiny import make_tiny_model

from stateroom.client import protocol as p
from stateroom.daemon.engine.model import LoadedModel

LONG = 2048
CHILDREN = 8


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return make_tiny_model(context=2 * LONG)


def tokens_of(n: int, seed: int = 0) -> list[int]:
    return [(13 * k + 7 * seed) % 200 for k in range(n)]


def forked(bench: Bench, session: str, n: int) -> p.ForkResult:
    body = bench.call(p.Fork(session=session, n=n))
    assert isinstance(body, p.ForkResult)
    return body


def decoded(bench: Bench, sessions: list[str], tokens: int) -> list[list[int]]:
    rids = [bench.start(p.Decode(session=s, max_tokens=tokens, ignore_eos=True)) for s in sessions]
    bench.finish(*rids)
    bodies = [bench.final(rid) for rid in rids]
    assert all(isinstance(body, p.DecodeResult) for body in bodies)
    return [body.tokens for body in bodies]  # type: ignore[union-attr]


def active_bytes() -> int:
    """Of the device; what engines of other tests left behind would go at any moment."""
    gc.collect()
    return mx.get_active_memory()


def test_a_fork_copies_nothing_and_says_so(loaded: LoadedModel) -> None:
    bench = Bench(loaded)
    session = bench.open(tokens_of(LONG))
    assert bench.engine.schemes.dense.caps.fork == "shared"
    held, at = bench.engine.kv_bytes, active_bytes()
    body = forked(bench, session, CHILDREN)
    assert body.copied_bytes == 0
    assert body.shared_bytes == held == bench.engine.kv_bytes
    assert active_bytes() == at


def test_children_take_an_eighth_and_draw_what_each_would_alone(loaded: LoadedModel) -> None:
    """Together, each at a length of its own, with the tokens of the plainest loop."""
    bench = Bench(loaded)
    session = bench.open(tokens_of(LONG))
    one = bench.engine.kv_bytes
    children = forked(bench, session, CHILDREN).sessions
    for n, child in enumerate(children):
        bench.call(p.Prefill(session=child, tokens=tokens_of(n, n + 1)))
    drawn = decoded(bench, children, 64)
    for n, child in enumerate(children[:3]):
        assert drawn[n] == greedy(bench, tokens_of(LONG) + tokens_of(n, n + 1), 64)
        bench.check_law(child)
    assert bench.engine.kv_bytes * 6 <= one * (CHILDREN + 1)


def test_what_is_told_follows_those_who_go(loaded: LoadedModel) -> None:
    bench = Bench(loaded)
    session = bench.open(tokens_of(300))
    one = bench.engine.kv_bytes
    children = forked(bench, session, 3).sessions
    told = [bench.engine.memory.told(bench.session(s)) for s in (session, *children)]
    assert all((each.private, each.shared, each.capacity) == (0, one, one) for each in told)
    freed = []
    for child in children:
        closed = bench.call(p.Close(session=child))
        assert isinstance(closed, p.CloseResult)
        freed.append(closed.freed_bytes)
    assert freed == [0, 0, 0]
    assert bench.engine.memory.told(bench.session(session))[:2] == (one, 0)
    decoded(bench, [session], 3)
    assert not bench.session(session).cache.trunks, "the last holder took it back"  # type: ignore[union-attr]
    assert bench.engine.kv_bytes == one
    bench.check_law(session)
    bench.call(p.Close(session=session))
    assert bench.engine.kv_bytes == 0


def test_a_parent_that_goes_first_leaves_its_tokens_to_its_children(loaded: LoadedModel) -> None:
    bench = Bench(loaded)
    session = bench.open(tokens_of(300))
    children = forked(bench, session, 2).sessions
    bench.call(p.Close(session=session))
    grandchildren = forked(bench, children[0], 2).sessions
    bench.call(p.Trim(session=children[0], to=100))
    for each in (*children, *grandchildren):
        decoded(bench, [each], 5)
        bench.check_law(each)


def test_a_trunk_is_taken_back_without_a_copy(loaded: LoadedModel) -> None:
    """Not even by the first step: whoever counts bytes refers to no planes."""
    bench = Bench(loaded)
    session = bench.open(tokens_of(3900))
    (child,) = forked(bench, session, 1).sessions
    bench.call(p.Close(session=session))
    decoded(bench, [bench.open(tokens_of(5))], 3)  # what a first step makes once is made
    at, held = active_bytes(), bench.session(child).kv_bytes
    mx.reset_peak_memory()
    decoded(bench, [child], 8)
    assert mx.get_peak_memory() - at < bench.engine.kv_bytes / 2
    assert held == 0 < bench.session(child).kv_bytes
    assert bench.session(child).cache.trunks == set()  # type: ignore[union-attr]
    bench.check_law(child)


def test_a_budget_of_one_session_is_enough_for_its_forks(loaded: LoadedModel) -> None:
    probe = Bench(loaded)
    probe.open(tokens_of(LONG))
    one = probe.engine.kv_bytes
    tail = probe.engine.schemes.dense.projected_bytes(256, 1)
    bench = Bench(loaded, kv_budget_bytes=one + (CHILDREN + 1) * 2 * tail)
    session = bench.open(tokens_of(LONG))
    children = forked(bench, session, CHILDREN).sessions
    rids = [bench.start(p.Decode(session=s, max_tokens=100, ignore_eos=True)) for s in children]
    while any(bench.final(rid) is None for rid in rids):
        bench.engine.step()
        assert bench.engine.kv_bytes <= bench.engine.memory.budget_bytes  # type: ignore[operator]
    assert all(isinstance(bench.final(rid), p.DecodeResult) for rid in rids)


@pytest.mark.parametrize("architecture", ["gemma3_text", "lfm2", "mamba"])
def test_windows_and_states_are_shared_until_written(architecture: str) -> None:
    bench = Bench(make_tiny_model(architecture, context=2048))
    session = bench.open(tokens_of(300))
    at = active_bytes()
    children = forked(bench, session, 4).sessions
    assert active_bytes() == at
    decoded(bench, children, 12)
    for each in (session, *children):
        bench.check_law(each)
        bench.decode(each, 3, ignore_eos=True)
        bench.check_law(each)


@pytest.mark.usefixtures("refusing")
def test_children_that_are_quantised_later_are_admitted_as_copies() -> None:
    """When they are, each has all of its tokens by itself."""
    model = make_tiny_model("llama", width=256, context=2048)
    kv = p.KV(scheme="affine8", quantise_after=500)
    probe = Bench(model)
    served = probe.session(probe.open(tokens_of(400), kv=kv)).served
    one = probe.engine.kv_bytes
    bench = Bench(model, kv_budget_bytes=one + served.projected_bytes(600, 1))
    session = bench.open(tokens_of(400), kv=kv)
    children = forked(bench, session, 4).sessions
    rids = [bench.start(p.Decode(session=s, max_tokens=200, ignore_eos=True)) for s in children]
    while any(bench.final(rid) is None for rid in rids):
        bench.engine.step()
        assert bench.engine.kv_bytes <= bench.engine.memory.budget_bytes  # type: ignore[operator]
    ends = [bench.final(rid) for rid in rids]
    assert sum(isinstance(end, p.DecodeResult) for end in ends) == 1
    assert all(isinstance(end, p.DecodeResult) or end.code == "capacity" for end in ends)  # type: ignore[union-attr]
