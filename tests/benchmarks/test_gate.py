"""No speed is printed where tokens differ, and only that fails the run."""

from __future__ import annotations

import pytest
from benchmarks import report, run
from benchmarks.measurement import (
    TIE_MARGIN,
    Agreement,
    Measurement,
    Tokens,
    compare,
    together,
)
from typer.testing import CliRunner


def no_gap(sequence: int, place: int) -> float:
    raise AssertionError("equal tokens need no look at logits")


def measured(ours: float, peer: float, tokens: Tokens, **options: object) -> Measurement:
    return Measurement("a claim", "ms", (ours,), (peer,), "a peer", tokens=tokens, **options)  # type: ignore[arg-type]


EQUAL = Tokens(Agreement.EQUAL)
DIFFER = Tokens(Agreement.DIFFER)


def test_equal_tokens_are_equal() -> None:
    assert compare([[1, 2], [3]], [[1, 2], [3]], no_gap) == EQUAL


def test_the_first_difference_decides_by_how_far_the_logits_are_apart() -> None:
    seen: list[tuple[int, int]] = []

    def gap(by: float) -> Agreement:
        def look(sequence: int, place: int) -> float:
            seen.append((sequence, place))
            return by

        return compare([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 9]], look).agreement

    assert gap(TIE_MARGIN / 2) is Agreement.TIES
    assert gap(TIE_MARGIN * 2) is Agreement.DIFFER
    assert seen == [(1, 1)] * 2


@pytest.mark.parametrize("ours", [[], [[]], [[1]], [[1, 2, 3]]])
def test_missing_and_surplus_tokens_are_no_tie(ours: list[list[int]]) -> None:
    assert compare(ours, [[1, 2]], lambda *_: 0.0).agreement is Agreement.DIFFER


def test_one_difference_among_many_comparisons_is_kept() -> None:
    assert together([EQUAL, DIFFER, EQUAL]).agreement is Agreement.DIFFER
    assert together([EQUAL, Tokens(Agreement.TIES)]).agreement is Agreement.TIES


def test_goals() -> None:
    assert measured(2.0, 2.2, EQUAL, lower_is_better=True, least_ratio=1.0).met is True
    assert measured(2.0, 2.2, EQUAL, least_ratio=1.0).met is False
    assert measured(2.0, 1.8, EQUAL, most_added=0.3).met is True
    assert measured(2.0, 1.6, EQUAL, most_added=0.3).met is False
    assert measured(2.0, 1.6, EQUAL).met is None
    assert measured(2.0, 2.2, DIFFER, least_ratio=0.1).met is None


@pytest.mark.parametrize(("tokens", "code", "shown"), [(EQUAL, 0, True), (DIFFER, 1, False)])
def test_the_run(tokens: Tokens, code: int, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = measured(77.25, 1.5, tokens, lower_is_better=True, least_ratio=1.0)
    monkeypatch.setattr(run, "CLAIMS", {"slow": lambda rig: [slow]})
    monkeypatch.setattr(run, "_peer_facts", lambda rig: {})
    with report.console.capture() as captured:
        result = CliRunner().invoke(run.app, ["--only", "slow"])
    assert result.exit_code == code, result.output
    assert ("77.2" in captured.get()) is shown
