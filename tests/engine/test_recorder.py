"""The worker's flight recorder: bounded, and no time is lost in putting events together."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateroom.daemon.engine.recorder import OPEN_MAX, OWN_MAX, STEPS_MAX, Event, Recorder, behind_others
from stateroom.daemon.link import Mark

RIDS = (1, 2, 3)
WORK = ("prefill", "decode", "rounds")


def named(marks: list[Mark], *names: str) -> list[Mark]:
    return [mark for mark in marks if mark.name in names]


Happening = tuple[str, tuple[int, ...], float, list[int]]
rows = st.sets(st.sampled_from(RIDS), min_size=1).map(lambda rids: tuple(sorted(rids)))
happenings = st.lists(
    st.tuples(
        st.sampled_from(("step", "step", "step", "round", "quantum", "pause")),
        rows,
        st.floats(0.5, 30.0),
        st.lists(st.integers(1, 5), min_size=3, max_size=3),
    ),
    max_size=80,
)


@settings(max_examples=50)
@given(happenings)
def test_what_is_put_together_loses_no_time_and_no_tokens(happened: list[Happening]) -> None:
    recorder, now_ms = Recorder(), 0.0
    tokens, busy, passes = dict.fromkeys(RIDS, 0), dict.fromkeys(RIDS, 0.0), dict.fromkeys(RIDS, 0)
    for rid in RIDS:
        recorder.taken(rid, "decode", 0.0)
    for what, rids, ms, brought in happened:
        began_ms, now_ms = now_ms, now_ms + ms
        each = [brought[rid - 1] for rid in rids]
        if what == "step":
            recorder.stepped(7, rids, began_ms, now_ms)
            each = [1] * len(rids)
        elif what == "round":
            recorder.stepped(7, rids, began_ms, now_ms, each, [4] * len(rids))
        elif what == "quantum":
            recorder.quantum("prefill", rids, each, began_ms, now_ms)
        else:
            continue
        for rid, count in zip(rids, each, strict=True):
            tokens[rid] += count
            busy[rid] += ms
            passes[rid] += 1
    for rid in RIDS:
        marks, dropped = recorder.marks(rid, now_ms)
        assert dropped == 0
        work = named(marks, *WORK)
        assert sum(mark.details["tokens"] for mark in work) == tokens[rid]
        assert sum(mark.details.get("steps", 1) for mark in work) == passes[rid]
        # Where nothing lay between, a span is as long as what it was made of.
        assert sum(mark.details.get("busy_ms", mark.ms) for mark in work) == pytest.approx(busy[rid], abs=0.2)
        assert all(before.start_ms <= after.start_ms for before, after in pairwise(marks))
        ends = [mark.start_ms + mark.ms for mark in work]
        assert all(mark.start_ms >= end - 1e-6 for mark, end in zip(work[1:], ends, strict=False))


@settings(max_examples=50)
@given(happenings)
def test_time_is_its_own_or_others_or_nobody_s(happened: list[Happening]) -> None:
    recorder, now_ms, idle = Recorder(), 0.0, 0.0
    for rid in RIDS:
        recorder.taken(rid, "decode", 0.0)
    for what, rids, ms, brought in happened:
        began_ms, now_ms = now_ms, now_ms + ms
        if what == "pause":
            idle += ms
        elif what == "quantum":
            recorder.quantum("prefill", rids, brought[: len(rids)], began_ms, now_ms)
        else:
            recorder.stepped(7, rids, began_ms, now_ms)
    for rid in RIDS:
        marks, _ = recorder.marks(rid, now_ms)
        covered = sum(mark.ms for mark in named(marks, *WORK, "others"))
        assert covered <= now_ms + 1e-6
        # A pause short enough is part of the steps around it.
        assert covered >= now_ms - idle - 0.1 * len(happened) - 1e-6


def test_a_ring_stays_as_small_as_it_was_made_and_tells_that_a_beginning_is_gone() -> None:
    recorder = Recorder(events_max=100)
    recorder.taken(1, "decode", 0.0)
    for number in range(500):
        recorder.quantum("prefill", (2,), [5], number, number + 1.0)
    recorder.stepped(7, (1,), 500.0, 501.0)
    marks, dropped = recorder.marks(1, 502.0)
    assert [mark.name for mark in marks] == ["decode", "now"]
    assert dropped == 1
    assert recorder.marks(3, 502.0) == ([], 0)
    assert len(recorder._past) == 100


def test_steps_are_counted_in_runs_that_have_an_end() -> None:
    recorder = Recorder()
    for number in range(3 * STEPS_MAX):
        recorder.stepped(7, (1, 2), number, number + 1.0)
    marks, _ = recorder.marks(2, 3.0 * STEPS_MAX)
    assert [mark.details["steps"] for mark in named(marks, "decode")] == [STEPS_MAX] * 3
    for batch in range(5 * OPEN_MAX):
        recorder.stepped(batch, (batch,), 1000.0 + batch, 1001.0 + batch)
    assert len(recorder._runs) <= OPEN_MAX


def test_what_is_told_of_one_request_has_an_end() -> None:
    """Its first events and its last, and between them nothing is taken for others'."""
    recorder = Recorder()
    recorder.taken(1, "prefill", 0.0)
    for number in range(2 * OWN_MAX):
        recorder.quantum("prefill", (1,), [16], 2.0 * number, 2.0 * number + 1.0)
        recorder.stepped(7, (2,), 2.0 * number + 1.0, 2.0 * number + 2.0)
    recorder.answered(1, "ok", 4.0 * OWN_MAX)
    marks, dropped = recorder.marks(1, 4.0 * OWN_MAX)
    assert dropped == OWN_MAX + 2
    assert (marks[0].name, marks[-1].name) == ("taken", "answered")
    assert len(named(marks, "prefill")) == OWN_MAX - 2
    others = named(marks, "others")
    assert len(others) == OWN_MAX - 3  # between each two of the first, and of the last
    assert max(mark.ms for mark in others) == 1.0


def test_a_wait_lasts_until_the_next_one_or_until_it_goes_on() -> None:
    recorder = Recorder()
    recorder.taken(1, "decode", 0.0)
    recorder.wait(1, "memory", 1.0, needed_bytes=7)
    recorder.wait(1, "turn", 11.0)
    recorder.go(1, 13.0)
    recorder.go(1, 14.0)
    recorder.wait(1, "yielded", 20.0)
    told = [(mark.name, mark.start_ms, mark.ms) for mark in recorder.marks(1, 25.0)[0]]
    assert told == [
        ("taken", 0.0, 0.0),
        ("memory", 1.0, 10.0),
        ("turn", 11.0, 2.0),
        ("yielded", 20.0, 5.0),
        ("now", 25.0, 0.0),
    ]
    recorder.answered(1, "busy", 30.0)
    assert [mark.name for mark in recorder.marks(1, 99.0)[0]][-2:] == ["yielded", "answered"]


def test_the_pass_behind_a_step_is_not_the_step_s() -> None:
    recorder = Recorder()
    recorder.taken(1, "decode", 0.0)
    recorder.taken(2, "prefill", 0.0)
    recorder.stepped(7, (1,), 0.0, 100.0, most_ms=10.0)  # read when the quantum behind it was done, too
    recorder.quantum("prefill", (2,), [64], 1.0, 101.0)
    step, others = named(recorder.marks(1, 101.0)[0], "decode", "others")
    assert (step.ms, others.start_ms, others.ms) == (10.0, 10.0, 91.0)
    assert others.details == {"prefill_ms": 91.0}
    assert [(mark.name, mark.ms) for mark in recorder.marks(2, 101.0)[0]][1:3] == [
        ("others", 10.0),
        ("prefill", 91.0),
    ]


def test_it_takes_nothing_while_it_is_off() -> None:
    recorder = Recorder(on=False)
    recorder.taken(1, "decode", 0.0)
    recorder.wait(1, "turn", 0.0)
    recorder.quantum("prefill", (1,), [16], 0.0, 1.0)
    recorder.stepped(7, (1,), 1.0, 2.0)
    recorder.answered(1, "ok", 3.0)
    assert recorder.marks(1, 4.0) == ([], 0)
    recorder.on = True
    recorder.wait(1, "turn", 5.0)
    recorder.on = False
    recorder.answered(1, "ok", 6.0)  # what waits is let go of all the same
    assert not recorder._waits


def test_gaps_are_filled_with_what_others_had_in_them() -> None:
    own = [Mark("taken", 0.0, 0.0, {}), Mark("turn", 10.0, 5.0, {}), Mark("decode", 20.0, 5.0, {})]
    spans = [(-5.0, 2.0, "decode"), (4.0, 12.0, "prefill"), (14.0, 17.0, "decode"), (17.0, 30.0, "prefill")]
    foreign = [Event((2,), name, start_ms, end_ms, {}) for start_ms, end_ms, name in spans]
    told = [(mark.start_ms, mark.ms, mark.details) for mark in behind_others(own, foreign)]
    assert told == [
        (0.0, 10.0, {"decode_ms": 2.0, "prefill_ms": 6.0}),
        (15.0, 5.0, {"decode_ms": 2.0, "prefill_ms": 3.0}),
    ]


def test_work_that_overlaps_counts_in_each_gap_where_it_was() -> None:
    """Runs of two batches lie across each other; both go on behind a step of its own."""
    own = [Mark("taken", 0.0, 0.0, {}), Mark("decode", 10.0, 5.0, {}), Mark("now", 20.0, 0.0, {})]
    foreign = [Event((2,), "decode", 1.0, 19.0, {}), Event((3,), "rounds", 2.0, 17.0, {})]
    told = [(mark.start_ms, mark.ms, mark.details) for mark in behind_others(own, foreign)]
    assert told == [
        (1.0, 9.0, {"decode_ms": 9.0, "rounds_ms": 8.0}),
        (15.0, 4.0, {"decode_ms": 4.0, "rounds_ms": 2.0}),
    ]
