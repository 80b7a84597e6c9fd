"""The pace of prefill quanta beside running streams, over a device that is only simulated."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateroom.daemon.scheduler.pace import ALONE_EVERY, FLOOR_MAX, QUANTUM_MAX, QUANTUM_MIN, Pace, PassCost

EXPERT_ROWS_MAX = 32_768  # above it, rows of a quantised expert product came out wrong on Metal
EXPERTS_MOST = 32  # that a token is sent to, in any model served


def run(
    pace: Pace, turns: int, *, step_ms: float, token_ms: float, pass_ms: float = 0.0, streams: bool = True
) -> list[int]:
    """Turns of the loop as the engine makes them; gives the quanta, 0 for a turn without one."""
    quanta = []
    for _ in range(turns):
        tokens = 0 if streams and pace.alone_due() else pace.room(hurried=streams)
        quantum_ms = (pass_ms + token_ms * tokens) if tokens else 0.0
        pace.measured_turn(step_ms * streams + quantum_ms, tokens=tokens, streams=streams)
        quanta.append(tokens)
    return quanta


@pytest.mark.parametrize(("step_ms", "token_ms"), [(10.0, 0.3), (30.0, 1.0), (2.0, 0.05), (100.0, 10.0)])
def test_a_quantum_beside_streams_takes_three_steps(step_ms: float, token_ms: float) -> None:
    """B19: whatever was measured before, it settles there, and stays."""
    pace = Pace()
    run(pace, 20, step_ms=step_ms, token_ms=token_ms, streams=False)
    quanta = run(pace, 300, step_ms=step_ms, token_ms=token_ms)
    wanted = min(QUANTUM_MAX, max(QUANTUM_MIN, int(3 * step_ms / token_ms) // QUANTUM_MIN * QUANTUM_MIN))
    assert all(abs(tokens - wanted) <= QUANTUM_MIN for tokens in quanta[40:] if tokens)
    assert max(quanta) <= wanted + QUANTUM_MIN


def test_a_step_that_grows_dearer_is_noticed() -> None:
    """B19: steps are measured alone now and then, also while a prefill never rests."""
    pace = Pace()
    run(pace, 50, step_ms=10.0, token_ms=0.5)
    quanta = run(pace, 400, step_ms=40.0, token_ms=0.5)
    assert pace.step_ms == pytest.approx(40.0, rel=0.05)
    assert abs(quanta[-1] - 240) <= QUANTUM_MIN
    without = quanta.count(0)
    assert without <= len(quanta) // ALONE_EVERY + 1


def test_a_prefill_always_moves() -> None:
    """However dear its tokens, and though no step was ever measured (rows come and go in every turn)."""
    pace = Pace()
    moved = 0
    for _ in range(90):
        if not pace.alone_due():
            moved += pace.room(hurried=True)
    assert moved >= 70 * QUANTUM_MIN


def test_alone_a_quantum_takes_its_time_and_no_more() -> None:
    quanta = run(Pace(idle_ms=500.0), 50, step_ms=0.0, token_ms=5.0, streams=False)
    assert quanta[-1] == 96


def test_a_budget_in_milliseconds() -> None:
    quanta = run(Pace(gap_ms=50.0), 100, step_ms=12.0, token_ms=0.25)
    assert abs([tokens for tokens in quanta if tokens][-1] - 192) <= QUANTUM_MIN


def test_what_a_pass_costs_by_itself_is_part_of_the_budget() -> None:
    quanta = run(Pace(gap_ms=50.0), 200, step_ms=12.0, token_ms=0.25, pass_ms=10.0)
    settled = [tokens for tokens in quanta if tokens][-20:]
    assert max(10.0 + 0.25 * tokens for tokens in settled) <= 50.0 * 1.1
    assert min(settled) >= 112


@pytest.mark.parametrize("step_ms", [1.0, 70.0, 110.0])
def test_a_pass_spends_half_of_its_time_on_tokens(step_ms: float) -> None:
    """Once passes of some sizes were seen; however many small ones follow, it isn't forgotten."""
    pace = Pace()
    for tokens in (16, 64, 448, 300):
        pace.measured_turn(110.0 + 2.0 * tokens, tokens=tokens, streams=False)
    quanta = run(pace, 400, step_ms=step_ms, token_ms=2.0, pass_ms=110.0)
    wanted = max(64, int((3 * step_ms - 110.0) / 2.0) // QUANTUM_MIN * QUANTUM_MIN)
    settled = [tokens for tokens in quanta if tokens][-50:]
    assert all(abs(tokens - wanted) <= QUANTUM_MIN for tokens in settled)


def test_a_second_size_is_tried_beside_streams() -> None:
    """Else tokens would seem as dear as in the smallest passes for ever."""
    quanta = run(Pace(), 60, step_ms=70.0, token_ms=2.0, pass_ms=110.0)
    assert [tokens for tokens in quanta if tokens][-1] >= 48


def test_the_floor_is_bounded() -> None:
    pace = Pace(gap_ms=1.0)
    for tokens in (16, 64, 256):
        pace.cost.add(tokens, 1e5 + tokens)
    assert pace.room(hurried=True) <= FLOOR_MAX


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_two_costs_are_told_apart(noise: float) -> None:
    """From passes of many sizes; from passes of one size they can't be, and none is made up."""
    draw = random.Random(7)
    cost = PassCost()
    for _ in range(200):
        tokens = draw.randint(16, 200)
        cost.add(tokens, (30.0 + 0.5 * tokens) * (1.0 + noise * draw.uniform(-1.0, 1.0)))
    assert cost.of_pass == pytest.approx(30.0, abs=10.0)
    assert cost.of(100) == pytest.approx(80.0, rel=0.1)
    level = PassCost()
    for _ in range(50):
        level.add(64, 62.0)
    assert level.of_pass == pytest.approx(0.0, abs=1e-9)
    assert level.of(64) == pytest.approx(62.0)


@given(passes=st.lists(st.tuples(st.integers(1, 512), st.floats(0.0, 1e6)), min_size=1, max_size=40))
def test_costs_are_never_negative(passes: list[tuple[int, float]]) -> None:
    cost = PassCost()
    for tokens, ms in passes:
        cost.add(tokens, ms)
    assert cost.per_token >= 0.0
    assert cost.of_pass >= 0.0
    assert cost.of(100) <= cost.of(200)


@given(
    passes=st.lists(st.tuples(st.integers(1, 512), st.floats(1e-6, 1e6)), max_size=5),
    step=st.none() | st.floats(1e-6, 1e6),
    gap=st.none() | st.floats(0.0, 1e6),
    hurried=st.booleans(),
)
def test_a_quantum_is_bounded_and_aligned(
    passes: list[tuple[int, float]], step: float | None, gap: float | None, hurried: bool
) -> None:
    """B04: whatever was measured, a pass is far below the row count that quantised experts got wrong."""
    pace = Pace(gap_ms=gap, step_ms=step)
    for tokens, ms in passes:
        pace.cost.add(tokens, ms)
    size = pace.room(hurried=hurried)
    assert QUANTUM_MIN <= size <= QUANTUM_MAX
    assert size % QUANTUM_MIN == 0
    assert size * EXPERTS_MOST < EXPERT_ROWS_MAX


@given(ms=st.floats(0.0, 1e6), step=st.none() | st.floats(0.0, 1e6), tokens=st.integers(0, 512))
def test_a_turn_is_split_without_loss(ms: float, step: float | None, tokens: int) -> None:
    for streams in (False, True):
        parts = Pace(step_ms=step).split(ms, tokens=tokens, streams=streams)
        assert all(part >= 0.0 for part in parts)
        if streams or tokens:
            assert sum(parts) == pytest.approx(ms)
