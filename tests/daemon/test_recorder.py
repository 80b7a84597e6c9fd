"""What the broker saw of a request, the two parts on one clock, and how a trace is shown. Pure."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateroom.client.protocol import RequestInfo, Span, TraceResult
from stateroom.daemon.chrome import events
from stateroom.daemon.clock import ManualClock
from stateroom.daemon.lifecycle import RequestEvent
from stateroom.daemon.link import Mark, Recorded
from stateroom.daemon.recorder import PAUSE_S, SENDS_MAX, SPANS_MAX, Record, timeline
from stateroom.daemon.timeline import BAR, WIDTH, bar, drawn, listed, rows

LAST = 2 * SPANS_MAX


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def record(clock: ManualClock) -> Record:
    return Record(clock)


def told(record: Record) -> list[tuple[str, float, float]]:
    """Names, starts and lengths, in seconds since the clock's beginning."""
    return [(s.name, round(s.start_s - 1000, 3), round(s.end_s - s.start_s, 3)) for s in record.seen()]


def test_a_request_that_two_workers_had(record: Record, clock: ManualClock) -> None:
    record.waits("engine")
    clock.advance(2)
    record.sent("toy", 1)
    clock.advance(3)
    record.replied(50, tokens=True, waits=False)
    record.moved(RequestEvent.LOSE)
    clock.advance(1)
    record.sent("toy", 2)
    clock.advance(1)
    assert told(record)[-1] == ("worker", 6.0, 1.0)  # which goes on
    record.replied(50, tokens=True, waits=False)
    clock.advance(1)
    record.ended("ok")
    assert told(record) == [
        ("queued", 0.0, 2.0),
        ("worker", 2.0, 3.0),
        ("first token", 5.0, 0.0),
        ("queued", 5.0, 1.0),
        ("sends", 5.0, 0.0),
        ("worker", 6.0, 2.0),
        ("sends", 7.0, 0.0),
        ("ended", 8.0, 0.0),
    ]
    assert record.workers == [("toy", 1), ("toy", 2)]
    details = {(seen.name, seen.start_s - 1000): seen.details for seen in record.seen()}
    assert details["queued", 0] == details["queued", 5] == {"why": "engine"}
    assert details["worker", 2] == {"model": "toy", "generation": 1, "lost": "yes"}
    assert details["worker", 6] == {"model": "toy", "generation": 2}
    assert details["ended", 8] == {"code": "ok"}


def test_replies_are_told_together_and_what_is_not_read_by_itself(record: Record, clock: ManualClock) -> None:
    for _ in range(1000):
        record.replied(10, tokens=True, waits=False)
        clock.advance(0.01)
    for _ in range(10):
        record.replied(10, tokens=True, waits=True)
        clock.advance(0.1)
    record.replied(10, tokens=True, waits=False)
    clock.advance(2 * PAUSE_S)
    record.replied(10, tokens=True, waits=False)
    record.moved(RequestEvent.OVERFLOW)
    record.ended("slow_consumer")
    by_name: dict[str, list[Any]] = {}
    for seen in record.seen():
        by_name.setdefault(seen.name, []).append(seen)
    assert [each.details for each in by_name["sends"]] == [
        {"replies": 1011, "bytes": 10_110},
        {"replies": 1, "bytes": 10},
    ]
    (unread,) = by_name["unread"]
    assert unread.end_s - unread.start_s == pytest.approx(1.0)
    assert [name for name in by_name if len(by_name[name]) == 1] == ["first token", "unread", "cut", "ended"]


def test_a_record_has_an_end_and_the_end_is_in_it(record: Record, clock: ManualClock) -> None:
    record.waits("engine")
    for generation in range(LAST):
        clock.advance(1)
        record.sent("toy", generation)
        clock.advance(1)
        record.moved(RequestEvent.LOSE)
    record.ended("engine_lost")
    assert len(record.seen()) == SPANS_MAX + 1
    assert record.seen()[-1].name == "ended"
    assert record.dropped == 2 * LAST - SPANS_MAX + 1  # and the wait that its end ended
    assert len(record.workers) == SPANS_MAX


def test_a_slow_stream_leaves_room_for_what_else_happens(record: Record, clock: ManualClock) -> None:
    for _ in range(LAST):
        record.replied(10, tokens=True, waits=False)
        clock.advance(2 * PAUSE_S)
    record.moved(RequestEvent.CANCEL)
    record.ended("ok")
    seen = record.seen()
    assert record.dropped == 0
    assert len(seen) <= SENDS_MAX + 4
    assert sum(int(each.details["replies"]) for each in seen if each.name == "sends") == LAST
    assert [each.name for each in seen][-2:] == ["cancelled", "ended"]


def test_nothing_is_recorded_where_nobody_will_ask(clock: ManualClock) -> None:
    record = Record(clock, on=False)
    record.waits("engine")
    record.sent("toy", 1)
    record.replied(1, tokens=True, waits=True)
    record.moved(RequestEvent.LOSE)
    record.ended("ok")
    assert record.seen() == []
    assert record.workers == []


def test_the_parts_are_put_on_one_clock(record: Record, clock: ManualClock) -> None:
    record.waits("engine")
    clock.advance(0.5)
    record.sent("toy", 1)
    clock.advance(0.5)
    marks = [
        Mark("taken", 1_000_500.2, 0.0, {}),
        Mark("decode", 1_000_600.0, 300.123456, {"slowest_ms": 1.00049}),
    ]
    spans = timeline(1000.0, record.seen(), Recorded(1, marks))
    assert [(span.name, span.where, span.start_ms, span.ms) for span in spans] == [
        ("queued", "broker", 0.0, 500.0),
        ("worker", "broker", 500.0, 500.0),
        ("taken", "engine", 500.2, 0.0),
        ("decode", "engine", 600.0, 300.123),
    ]
    assert spans[-1].details == {"slowest_ms": 1.0}


# ---------------------------------------------------------------- shown


def at_engine(name: str, start_ms: float, ms: float, **details: object) -> Span:
    return Span(name=name, where="engine", start_ms=start_ms, ms=ms, details=details)


TRACE = TraceResult(
    request=RequestInfo(
        rid=41,
        op="decode",
        owner="my-editor",
        client="nvim",
        session="a1b2c3d4e5",
        model="toy",
        state="done",
        age_s=5.0,
        ms=1000.0,
        code="ok",
    ),
    spans=[
        Span(name="queued", ms=100.0, details={"why": "engine"}),
        Span(name="worker", start_ms=100.0, ms=900.0, details={"model": "toy", "generation": 3}),
        at_engine("taken", 100.0, 0.0, op="decode"),
        at_engine("prefill", 100.0, 150.0, tokens=512, rows=1, width=512),
        at_engine("prefill", 250.0, 50.0, tokens=88, rows=2, width=90),
        at_engine("decode", 300.0, 300.0, steps=30, tokens=30, rows=1),
        Span(name="first token", start_ms=312.0),
        Span(name="sends", start_ms=312.0, ms=600.0, details={"replies": 60, "bytes": 3000}),
        at_engine("others", 600.0, 100.0, prefill_ms=100.0),
        at_engine("decode", 700.0, 250.0, steps=25, tokens=25, rows=1),
    ],
    dropped=3,
    missing="The worker is gone.",
)


def test_where_the_time_went_adds_up_to_the_whole() -> None:
    made = {row.name: row for row in rows(TRACE)}
    assert {name: row.ms for name, row in made.items()} == {
        "queued": 100.0,
        "others": 100.0,
        "prefill": 200.0,
        "decode": 550.0,
        "between": 50.0,
        "sends": 600.0,
    }
    assert sum(row.ms for name, row in made.items() if name != "sends") == 1000.0
    assert made["decode"].told == "55 tokens, 10.0 ms each"
    assert made["prefill"].told == "600 tokens in 2"
    assert made["others"].told == "prefill 100"
    assert made["between"].spans == ((950.0, 1000.0),)


def test_a_drawing_of_it() -> None:
    lines = drawn(TRACE)
    assert lines[0] == "request 41: decode of my-editor (nvim), session a1b2c3d4: ok in 1,000 ms"
    assert "decode           █████████  ▒███████      550.0   55  55 tokens, 10.0 ms each" in lines
    assert "queued   ███                              100.0   10  engine" in lines
    assert lines[-5:] == [
        "first token at 312 ms",
        "",
        "3 spans or more aren't told: there were too many, or they are forgotten.",
        "",
        "The worker is gone.",
    ]
    assert max(map(len, lines + listed(TRACE))) <= WIDTH
    assert "     600.0      100.0  others    prefill_ms 100.0" in listed(TRACE)


def test_what_a_silent_worker_did_is_unknown_and_not_between() -> None:
    told = [Span(name="worker", where="broker", start_ms=0.2, ms=999.8)]
    trace = replace(TRACE, spans=told)
    assert [(row.name, row.ms) for row in rows(trace)] == [("unknown", 1000.0)]
    assert [row.name for row in rows(replace(trace, missing=None))] == ["between"]


spans = st.lists(
    st.builds(
        Span,
        name=st.sampled_from(["queued", "turn", "decode", "prefill", "others", "worker", "odd", "taken"]),
        where=st.sampled_from(["broker", "engine"]),
        start_ms=st.floats(-5, 2000),
        ms=st.floats(0, 2000),
        details=st.dictionaries(st.sampled_from(["steps", "tokens", "rows"]), st.integers(0, 9)),
    ),
    max_size=30,
)


@settings(max_examples=50)
@given(spans, st.floats(0, 1500), st.booleans())
def test_any_trace_can_be_shown(told: list[Span], ms: float, ended: bool) -> None:
    info = RequestInfo(rid=1, op="decode", age_s=ms / 1000, ms=ms if ended else None)
    trace = TraceResult(request=info, spans=told)
    for row in rows(trace):
        assert -1e-6 <= row.ms <= ms + 1e-6
        assert len(bar(row.spans, ms)) == BAR
    assert max(map(len, drawn(trace) + listed(trace))) <= WIDTH
    check_format(events(trace))


# ---------------------------------------------------------------- the Chrome trace event format


def check_format(made: dict[str, Any]) -> None:
    """The rules of the format's JSON object form for the events that we write."""
    json.loads(json.dumps(made), parse_constant=lambda _: pytest.fail("no number of JSON"))
    assert isinstance(made["traceEvents"], list)
    assert made["displayTimeUnit"] in ("ms", "ns")
    named: dict[str, set[Any]] = {"process_name": set(), "thread_name": set()}
    for event in made["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["ts"], int | float)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert isinstance(event["args"]["name"], str)
            key = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
            named[event["name"]].add(key)
        elif event["ph"] == "X":
            assert event["dur"] >= 0
        else:
            assert event["ph"] == "i"
            assert event["s"] in ("g", "p", "t")
    for event in made["traceEvents"]:
        assert event["pid"] in named["process_name"]
        assert event["ph"] == "M" or (event["pid"], event["tid"]) in named["thread_name"]


def test_the_export_names_processes_and_threads_and_has_every_span() -> None:
    made = events(TRACE)
    check_format(made)
    real = [event for event in made["traceEvents"] if event["ph"] != "M"]
    assert [(event["name"], event["ts"]) for event in real] == [
        (s.name, s.start_ms * 1000) for s in TRACE.spans
    ]
    queued, taken = real[0], real[2]
    assert (queued["ph"], queued["dur"], queued["args"]) == ("X", 100_000.0, {"why": "engine"})
    assert taken["ph"] == "i"
    names = {event["args"]["name"] for event in made["traceEvents"] if event["ph"] == "M"}
    assert names >= {"broker", "engine of toy", "decode", "sends"}
    assert made["otherData"]["rid"] == 41
