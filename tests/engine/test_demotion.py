"""Who gives way: enough, no more than must, the oldest first; what is shared is free with its last holder."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stateroom.daemon.engine.demotion import BACKGROUND_OLDER_MS, Held, Idle, freeable, plan

PARTS = 6

sessions = st.lists(
    st.tuples(
        st.integers(0, 20),  # last use
        st.integers(0, 50),  # own bytes
        st.sets(st.integers(0, PARTS - 1), max_size=3),
        st.booleans(),
    ),
    max_size=12,
)
others = st.lists(st.integers(0, 2), min_size=PARTS, max_size=PARTS)  # holders that aren't idle
sizes = st.lists(st.integers(1, 60), min_size=PARTS, max_size=PARTS)


def made(
    drawn: list[tuple[int, int, set[int], bool]], others: list[int], sizes: list[int]
) -> tuple[list[Idle], dict[int, Held]]:
    idle = [
        Idle(f"s{n}", float(used), own, tuple(parts), bg) for n, (used, own, parts, bg) in enumerate(drawn)
    ]
    count = Counter(part for each in idle for part in each.parts)
    return idle, {part: Held(sizes[part], n + others[part]) for part, n in count.items()}


def freed(idle: list[Idle], parts: dict[int, Held], ids: set[str]) -> int:
    """Counted anew: what is left when these have gone."""
    gone = [each for each in idle if each.id in ids]
    held = Counter(part for each in gone for part in each.parts)
    return sum(each.own for each in gone) + sum(
        parts[p].nbytes for p, n in held.items() if n == parts[p].holders
    )


@given(sessions, others, sizes, st.integers(1, 300))
def test_a_plan_frees_enough_and_nobody_goes_in_vain(
    drawn: list[tuple[int, int, set[int], bool]], others: list[int], sizes: list[int], wanted: int
) -> None:
    idle, parts = made(drawn, others, sizes)
    everybody = freed(idle, parts, {each.id for each in idle})
    assert freeable(idle, parts) == everybody
    ids = plan(idle, parts, wanted)
    if ids is None:
        assert everybody < wanted
        return
    chosen = set(ids)
    assert len(ids) == len(chosen)
    assert freed(idle, parts, chosen) >= wanted
    for each in chosen:
        assert freed(idle, parts, chosen - {each}) < wanted, f"{each} could have stayed"


@given(sessions, others, sizes, st.integers(1, 300))
def test_the_least_recently_used_go_first(
    drawn: list[tuple[int, int, set[int], bool]], others: list[int], sizes: list[int], wanted: int
) -> None:
    """Nobody goes while all who are older would have been enough."""
    idle, parts = made(drawn, others, sizes)
    order = sorted(idle, key=lambda each: each.age_key)
    ids = plan(idle, parts, wanted)
    if not ids:
        return
    places = {each.id: n for n, each in enumerate(order)}
    assert [places[each] for each in ids] == sorted(places[each] for each in ids)
    older = {each.id for each in order[: places[ids[-1]]]}
    assert freed(idle, parts, older) < wanted


def test_what_others_hold_is_not_freed() -> None:
    trunk = {1: Held(100, 3)}
    family = [Idle("a", 1.0, 5, (1,)), Idle("b", 2.0, 5, (1,))]
    assert plan(family, trunk, 20) is None
    assert plan([*family, Idle("c", 3.0, 5, (1,))], trunk, 20) == ["a", "b", "c"]
    assert plan([*family, Idle("c", 3.0, 12)], trunk, 12) == ["c"]


def test_background_goes_before_an_editor_that_had_a_rest() -> None:
    editor = Idle("editor", 1000.0, 10)
    recent = Idle("batch", 1000.0 + BACKGROUND_OLDER_MS - 1, 10, background=True)
    assert plan([editor, recent], {}, 10) == ["batch"]
    later = Idle("batch", 1000.0 + BACKGROUND_OLDER_MS + 1, 10, background=True)
    assert plan([editor, later], {}, 10) == ["editor"]
