"""The books of the engine: kept as sums, checked at rest, and every flaw that is planted is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.engine.harness import PROMPT, Bench
from tests.tiny import make_tiny_model

from stateroom.caches.trunk import twin
from stateroom.client import protocol as p
from stateroom.daemon.engine import memory
from stateroom.daemon.engine.conservation import EVERY_MS, SESSIONS, Unconserved
from stateroom.daemon.engine.model import LoadedModel


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return make_tiny_model("gemma3_text", context=1024)


def populated(loaded: LoadedModel) -> tuple[Bench, str, str]:
    bench = Bench(loaded)
    session = bench.open([n % 200 for n in range(400)])
    body = bench.call(p.Fork(session=session))
    assert isinstance(body, p.ForkResult)
    assert list(bench.engine.conservation.violations()) == []
    return bench, session, body.sessions[0]


def a_view_more(bench: Bench, session: str) -> object:
    cache = bench.session(session).cache
    assert cache is not None
    return [twin(chain) for store in cache.stores for chain in getattr(store, "chains", ())]


def a_closed_one_that_holds(bench: Bench, session: str) -> object:
    closed = bench.session(session)
    bench.call(p.Close(session=session))
    closed.cache = closed.served.empty()
    return closed


def a_sum_that_is_off(bench: Bench, session: str) -> object:
    bench.engine.memory._own += 7
    return None


def a_prefix_too_long(bench: Bench, session: str) -> object:
    bench.session(session)._stored -= 3
    return None


def a_trail_of_nobody(bench: Bench, session: str) -> object:
    return bench.session(session).trail.copy()


PLANTED: dict[Callable[[Bench, str], object], str] = {
    a_view_more: "holders",
    a_closed_one_that_holds: "closed",
    a_sum_that_is_off: "own columns",
    a_prefix_too_long: "known by",
    a_trail_of_nobody: "no session",
}


@pytest.mark.parametrize("plant", PLANTED)
def test_what_is_planted_is_found_and_harms_nobody(
    loaded: LoadedModel, plant: Callable[[Bench, str], object]
) -> None:
    bench, session, child = populated(loaded)
    planted = plant(bench, child)
    assert any(PLANTED[plant] in wrong for wrong in bench.engine.conservation.violations())
    assert bench.engine.conservation.at_rest()
    assert [type(incident) for incident in bench.incidents] == [Unconserved]
    assert bench.engine.gauges()["unconserved"] == 1
    rid = bench.start(p.Decode(session=session, max_tokens=3, ignore_eos=True))
    while bench.final(rid) is None:
        bench.engine.step()
    assert isinstance(bench.final(rid), p.DecodeResult)
    del planted


def test_the_check_is_as_rare_as_it_is_dear(loaded: LoadedModel) -> None:
    bench = Bench(loaded)
    now_ms = 0.0
    bench.engine.clock_ms = lambda: now_ms
    assert bench.engine.conservation.at_rest()
    now_ms = EVERY_MS - 1
    assert not bench.engine.conservation.at_rest()
    now_ms = EVERY_MS
    assert bench.engine.conservation.at_rest()
    bench.engine.sessions.update((f"x{n}", bench.engine.sessions[bench.open()]) for n in range(SESSIONS))
    now_ms = 2 * EVERY_MS
    assert not bench.engine.conservation.at_rest()


def test_parked_sessions_are_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: with 300 at rest, a step and a checkpoint's question look at those that run."""
    bench = Bench(make_tiny_model(), kv_budget_bytes=2**30)
    for n in range(300):
        bench.open([n % 200, n // 200, 5])
    running = [bench.open([*PROMPT, n]) for n in range(2)]
    looked = 0
    plain = memory._holding

    def counted(*of: object) -> memory.Holding:
        nonlocal looked
        looked += 1
        return plain(*of)  # type: ignore[arg-type]

    monkeypatch.setattr(memory, "_holding", counted)
    rids = [bench.start(p.Decode(session=s, max_tokens=20, ignore_eos=True, stream=False)) for s in running]
    while any(bench.final(rid) is None for rid in rids):
        bench.engine.step()
        assert bench.engine.memory.has_room(1)
    assert looked < 2 * 2 * 30 + 20
