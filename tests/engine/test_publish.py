"""Published trunks in the engine: what they share with whom, and what is left when they go."""

from __future__ import annotations

import gc
from dataclasses import replace

import mlx.core as mx
import pytest
from tests.engine.harness import Bench
from tests.tiny import make_tiny_model

from stateroom.client import protocol as p
from stateroom.daemon.engine.model import LoadedModel

LONG = 600


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return make_tiny_model(context=2048)


def tokens_of(n: int, seed: int = 0) -> list[int]:
    return [(13 * k + 7 * seed) % 200 for k in range(n)]


def published(bench: Bench, session: str) -> p.PublishResult:
    body = bench.call(p.Publish(session=session, name="shared"))
    assert isinstance(body, p.PublishResult), body
    return body


def forked(bench: Bench, trunk: str, owner: str, n: int = 1) -> list[str]:
    body = bench.finish(bench.start(p.Fork(trunk=trunk, n=n), trunk, owner))
    assert isinstance(body, p.ForkResult), body
    return body.sessions


def test_publishing_and_forking_copy_nothing(loaded: LoadedModel) -> None:
    bench = Bench(loaded)
    session = bench.open(tokens_of(LONG))
    gc.collect()  # what other engines left
    held, at = bench.engine.kv_bytes, mx.get_active_memory()
    body = published(bench, session)
    assert (body.length, body.copied_bytes, body.shared_bytes) == (LONG, 0, held)
    children = [*forked(bench, body.trunk, "a", 2), *forked(bench, body.trunk, "b")]
    assert bench.engine.kv_bytes == held
    assert mx.get_active_memory() <= at
    bench.decode(session, 20, ignore_eos=True)
    bench.call(p.Trim(session=session, to=100))
    for child in children:
        bench.decode(child, 5, ignore_eos=True)
    bench.call(p.Close(session=session))
    late = forked(bench, body.trunk, "c")
    freed = bench.finish(bench.start(p.Unpublish(name="shared"), body.trunk))
    assert isinstance(freed, p.CloseResult)
    assert body.trunk not in bench.engine.sessions
    for child in [*children, *late]:
        bench.check_law(child)
        bench.call(p.Close(session=child))
    assert bench.engine.kv_bytes == 0


def test_an_empty_session_is_not_published(loaded: LoadedModel) -> None:
    bench = Bench(loaded)
    body = bench.call(p.Publish(session=bench.open(), name="nothing"))
    assert isinstance(body, p.ErrorBody)
    assert (body.code, body.field) == ("invalid", "session")
    assert len(bench.engine.sessions) == 1


def test_forks_of_a_lost_trunk_are_computed_once_for_all_owners() -> None:
    """What the trunk holds, no more: what an owner added is that owner's."""
    bench = Bench(make_tiny_model(context=2048))
    trunk = {"trunk": "t", "trunk_length": LONG}
    bench.adopt("t", tokens_of(LONG), owner="publisher", **trunk)  # type: ignore[arg-type]
    one, two = *forked(bench, "t", "a"), *forked(bench, "t", "b")
    same = tokens_of(200, 4)
    computed = []
    for child in (one, two):
        before = bench.engine.filling.tokens
        body = bench.call(p.Prefill(session=child, tokens=same))
        assert isinstance(body, p.LengthResult)
        computed.append((body.receipt.reused, body.receipt.source, bench.engine.filling.tokens - before))
        bench.check_law(child)
    assert computed == [(0, "none", LONG + 199), (LONG, "shared", 199)]
    # The trunk itself has them again, and so does who comes later.
    (late,) = forked(bench, "t", "c")
    body = bench.call(p.Prefill(session=late, tokens=[1]))
    assert isinstance(body, p.LengthResult)
    assert (body.receipt.reused, body.receipt.source) == (LONG, "fork")
    bench.check_law(late)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2", "mamba"])
def test_a_lost_trunk_has_its_kv_again_once_a_fork_has_computed_it(architecture: str) -> None:
    """Though that fork is closed before the next is made; and the broker is told of both."""
    bench = Bench(make_tiny_model(architecture, context=2048))
    bench.adopt("t", tokens_of(LONG), owner="publisher", trunk="t", trunk_length=LONG)
    computed = []
    for owner in ("a", "b"):
        (child,) = forked(bench, "t", owner)
        before = bench.engine.filling.tokens
        bench.decode(child, 3, ignore_eos=True)
        computed.append(bench.engine.filling.tokens - before)
        bench.check_law(child)
        bench.call(p.Close(session=child))
    assert computed == [LONG - 1, 0]
    private_bytes, parts = bench.told["t"]
    assert private_bytes + sum(part.bytes for part in parts) == bench.engine.kv_bytes > 0
    bench.check_law("t")
    bench.finish(bench.start(p.Unpublish(name="shared"), "t"))
    assert bench.engine.kv_bytes == 0


@pytest.mark.parametrize("waits", [False, True])
def test_what_replaces_a_trunks_tokens_is_its_owners_own(loaded: LoadedModel, waits: bool) -> None:
    """Another who forked it and writes the same learns nothing: neither from KV nor from who computes it."""
    bench = Bench(loaded)
    trunk = published(bench, bench.open(tokens_of(LONG))).trunk
    one, two = *forked(bench, trunk, "a"), *forked(bench, trunk, "b")
    own = p.Sync(session=one, tokens=[*tokens_of(100), *tokens_of(400, 5)])
    rids = [bench.start(own, one, "a")]
    if not waits:
        bench.finish(*rids)
    rids.append(bench.start(replace(own, session=two), two, "b"))
    body = bench.finish(*rids)
    assert isinstance(body, p.LengthResult)
    assert (body.receipt.reused, body.receipt.prefilled) == (100, 400)
    child = bench.call(p.Fork(session=one, n=1)).sessions[0]  # type: ignore[union-attr]
    assert bench.session(child).trunk_length == 100
    for session in (one, two, child):
        bench.check_law(session)


def test_who_forks_a_trunk_shares_nothing_else_with_its_publisher(loaded: LoadedModel) -> None:
    bench = Bench(loaded)
    session = bench.open(tokens_of(LONG))
    trunk = published(bench, session).trunk
    bench.call(p.Prefill(session=session, tokens=tokens_of(300, 1)))
    (child,) = forked(bench, trunk, "other")
    body = bench.call(p.Prefill(session=child, tokens=tokens_of(300, 1)))
    assert isinstance(body, p.LengthResult)
    assert (body.receipt.reused, body.receipt.source) == (LONG, "fork")
    stranger = bench.finish(bench.start(p.Open(tokens=tokens_of(LONG)), owner="stranger"))
    assert isinstance(stranger, p.OpenResult)
    assert stranger.receipt is not None
    assert stranger.receipt.reused == 0
