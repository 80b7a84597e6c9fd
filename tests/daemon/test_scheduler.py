"""The pace of prefill quanta beside running streams, over a device that is only simulated."""

from __future__ import annotations

import pytest

from stateroom.daemon.scheduler.pace import ALONE_EVERY, QUANTUM_MAX, QUANTUM_MIN, Pace


def run(pace: Pace, turns: int, *, step_ms: float, token_ms: float, streams: bool = True) -> list[int]:
    """Turns of the loop as the engine makes them; gives the quanta, 0 for a turn without one."""
    quanta = []
    for _ in range(turns):
        tokens = 0 if streams and pace.alone_due() else pace.quantum(100_000, streams=streams)
        pace.measured_turn(step_ms * streams + token_ms * tokens, tokens=tokens, streams=streams)
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
            moved += pace.quantum(100_000, streams=True)
    assert moved >= 70 * QUANTUM_MIN


def test_alone_a_quantum_takes_its_time_and_no_more() -> None:
    pace = Pace(idle_ms=500.0)
    quanta = run(pace, 50, step_ms=0.0, token_ms=5.0, streams=False)
    assert quanta[-1] == 96
    assert pace.quantum(7, streams=False) == 7


def test_a_budget_in_milliseconds() -> None:
    pace = Pace(gap_ms=50.0)
    quanta = run(pace, 100, step_ms=12.0, token_ms=0.25)
    assert abs([tokens for tokens in quanta if tokens][-1] - 192) <= QUANTUM_MIN
