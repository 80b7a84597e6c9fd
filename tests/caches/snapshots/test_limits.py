"""Which snapshots go when room is needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stateroom.caches.snapshots.limits import Held, Limits, plan, used_bytes

RUNS = {"a": 100, "b": 30, "c": 7}

held_snapshots = st.lists(
    st.builds(
        lambda own, names, automatic, at: (own, names, automatic, at),
        st.integers(0, 50),
        st.sets(st.sampled_from(sorted(RUNS))),
        st.booleans(),
        st.integers(0, 9),
    ),
    max_size=8,
).map(
    lambda drawn: [
        Held(str(n), own, {name: RUNS[name] for name in names}, automatic, at)
        for n, (own, names, automatic, at) in enumerate(drawn)
    ]
)
limits = st.builds(Limits, st.integers(0, 400), st.integers(0, 400), st.integers(1, 8))


def short(held: list[Held], within: Limits, needed: int, free: int) -> bool:
    """Written from what the limits mean, one by one."""
    return (
        used_bytes(held) + needed > within.bytes_max
        or free - needed < within.free_min_bytes
        or len(held) + 1 > within.count_max
    )


@given(held_snapshots, limits, st.integers(0, 100), st.integers(0, 500))
def test_a_plan_is_what_is_needed_and_no_more(
    held: list[Held], within: Limits, needed: int, free: int
) -> None:
    made = plan(held, within, needed, free)
    by_id = {each.id: each for each in held}
    oldest = sorted((e for e in held if e.automatic), key=lambda e: (e.created_ms, e.id))
    assert [by_id[gone] for gone in made.remove] == oldest[: len(made.remove)]

    def after(count: int) -> tuple[list[Held], int]:
        left = [each for each in held if each not in oldest[:count]]
        return left, free + used_bytes(held) - used_bytes(left)

    left, freed = after(len(made.remove))
    assert made.fits == (not short(left, within, needed, freed))
    if not made.fits:
        assert len(made.remove) == len(oldest)
    elif made.remove:
        one_fewer, freed = after(len(made.remove) - 1)
        assert short(one_fewer, within, needed, freed)


def test_a_shared_run_counts_once_and_goes_with_its_last() -> None:
    held = [Held(str(n), 10, {"a": 100}, True, n) for n in range(3)]
    assert used_bytes(held) == 130
    within = Limits(bytes_max=130, free_min_bytes=0, count_max=9)
    assert plan(held, within, 10, 1000).remove == ("0",)
    assert plan(held, within, 30, 1000).remove == ("0", "1", "2")[:3]
    assert plan(held, within, 130, 1000).remove == ("0", "1", "2")
    assert not plan(held, within, 60, 1000, needed_runs=frozenset({"a"})).fits


def test_what_is_replaced_is_not_one_more_and_does_not_go() -> None:
    held = [Held("old", 10, {}, True, 0), Held("other", 10, {}, True, 1)]
    within = Limits(bytes_max=100, free_min_bytes=0, count_max=2)
    assert plan(held, within, 10, 1000, replaced="old").remove == ()
    assert plan(held, within, 85, 1000, replaced="old").remove == ("other",)
