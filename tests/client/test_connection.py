"""The pure connection: its table, then two ends wired back to back in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from stateroom.client.connection import (
    TABLE,
    Connection,
    Done,
    Failed,
    Happening,
    Ignored,
    Input,
    State,
    Update,
    Why,
)
from stateroom.client.errors import (
    Busy,
    Capacity,
    Disconnected,
    Invalid,
    RequestTimeout,
    SlowConsumer,
    StreamBroken,
)
from stateroom.client.limits import REQUESTS_PER_CLIENT_MAX
from stateroom.client.protocol import (
    OPERATIONS,
    Body,
    CancelResult,
    Decode,
    DecodeResult,
    ErrorBody,
    Info,
    Reply,
    Stats,
    StatsResult,
    Sync,
    TokenEvent,
    Usage,
)
from stateroom.client.timeouts import Wait
from stateroom.client.wire import encode_reply, wire_names

FOR_EVER = Wait(None)
# Enough for any operation.
REQUIRED = {
    "session": "s", "max_tokens": 1, "to": 0, "text": "a", "model": "m", "name": "n", "snapshot": "s",
    "total": 1, "data": b"x", "request": 1,
}  # fmt: skip
DECODE = Decode(session="s", max_tokens=9)


def token(n: int) -> TokenEvent:
    return TokenEvent(tokens=[n], text=str(n))


def result(n: int) -> DecodeResult:
    return DecodeResult(finish="length", tokens=list(range(n)), text="", length=n, usage=Usage())


def reply(request_id: int | None, seq: int, body: Body) -> bytes:
    return encode_reply(Reply(id=request_id, seq=seq, body=body))


def sent(connection: Connection) -> list[dict[str, object]]:
    return [msgpack.unpackb(frame) for frame in connection.frames_to_send()]


# ---------------------------------------------------------------- the table


def test_the_table_answers_every_input_in_every_living_state() -> None:
    living = [state for state in State if state is not State.ENDED]
    assert set(TABLE) == {(state, what) for state in living for what in Input}


def test_the_table_tells_the_daemon_once_at_most_and_ends_what_it_must() -> None:
    for (state, what), step in TABLE.items():
        assert step.tell == (state is State.OPEN and what in (Input.CANCEL, Input.ABANDON))
        ends = what in (Input.LAST, Input.ABANDON, Input.LOSE)
        assert (step.state is State.ENDED) == ends


# ---------------------------------------------------------------- single steps


def test_a_stream_from_request_to_result() -> None:
    connection = Connection()
    request_id = connection.start(DECODE, FOR_EVER, 0.0)
    assert sent(connection) == [{"v": 1, "id": request_id, "op": "decode", "session": "s", "max_tokens": 9}]
    assert connection.frames_to_send() == []
    assert connection.receive(reply(request_id, 0, token(5)), 0.0) == [Update(request_id, token(5))]
    assert connection.receive(reply(request_id, 1, result(3)), 0.0) == [Done(request_id, result(3))]
    assert connection.open_requests == 0


def test_requests_are_matched_by_id_whatever_the_order() -> None:
    connection = Connection()
    first, second = (connection.start(Stats(), FOR_EVER, 0.0) for _ in range(2))
    answer = StatsResult(counters={"a": 1}, gauges={})
    assert connection.receive(reply(second, 0, answer), 0.0) == [Done(second, answer)]
    assert connection.receive(reply(first, 0, answer), 0.0) == [Done(first, answer)]


def test_an_error_reply_becomes_its_class_with_field_and_details() -> None:
    connection = Connection()
    request_id = connection.start(Info(session="s"), FOR_EVER, 0.0)
    body = ErrorBody(code="busy", message="Wait.", field="session", details={"request": 3})
    (failed,) = connection.receive(reply(request_id, 0, body), 0.0)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, Busy)
    assert (failed.error.message, failed.error.field, failed.error.details) == (
        "Wait.",
        "session",
        {"request": 3},
    )


@pytest.mark.parametrize("seq", [0, 2, 7])
def test_a_reply_out_of_sequence_breaks_the_stream(seq: int) -> None:
    connection = Connection()
    request_id = connection.start(DECODE, FOR_EVER, 0.0)
    connection.receive(reply(request_id, 0, token(1)), 0.0)
    sent(connection)
    (failed,) = connection.receive(reply(request_id, seq, token(2)), 0.0)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, StreamBroken)
    (cancel,) = sent(connection)
    assert (cancel["op"], cancel["request"]) == ("cancel", request_id)
    assert connection.open_requests == 0


def test_a_late_reply_is_dropped_and_the_next_request_gets_its_own() -> None:
    """B67: after a timeout the answer to the old request must not be taken for the next one's."""
    connection = Connection()
    old = connection.start(Stats(), Wait(0.01), 0.0)
    (failed,) = connection.expire(0.02)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, RequestTimeout)
    new = connection.start(Stats(), FOR_EVER, 0.02)
    stale, fresh = StatsResult(counters={"old": 1}, gauges={}), StatsResult(counters={"new": 1}, gauges={})
    (ignored,) = connection.receive(reply(old, 0, stale), 0.03)
    assert isinstance(ignored, Ignored)
    assert ignored.why is Why.LATE
    assert connection.receive(reply(new, 0, fresh), 0.03) == [Done(new, fresh)]


def test_a_timeout_cancels_at_the_daemon_and_the_answer_to_that_is_dropped() -> None:
    """B67."""
    connection = Connection()
    request_id = connection.start(Stats(), Wait(1.0), 10.0)
    assert connection.next_deadline == 11.0
    assert connection.expire(10.99) == []
    assert len(connection.expire(11.0)) == 1
    cancel = sent(connection)[-1]
    assert (cancel["op"], cancel["request"]) == ("cancel", request_id)
    cancel_id = cancel["id"]
    assert isinstance(cancel_id, int)
    (ignored,) = connection.receive(reply(cancel_id, 0, CancelResult(cancelled=True)), 11.0)
    assert isinstance(ignored, Ignored)
    assert ignored.why is Why.LATE
    assert connection.next_deadline is None


def test_a_wait_for_each_reply_starts_anew_and_one_for_the_whole_does_not() -> None:
    connection = Connection()
    each = connection.start(DECODE, Wait(1.0, each=True), 0.0)
    whole = connection.start(DECODE, Wait(1.0), 0.0)
    for request_id in (each, whole):
        connection.receive(reply(request_id, 0, token(1)), 0.5)
    assert [h.request_id for h in connection.expire(1.2) if isinstance(h, Failed)] == [whole]
    assert [h.request_id for h in connection.expire(1.6) if isinstance(h, Failed)] == [each]


def test_a_cancelled_request_has_its_own_time_to_end() -> None:
    connection = Connection(cancel_s=5.0)
    request_id = connection.start(DECODE, Wait(1.0, each=True), 0.0)
    connection.cancel(request_id, 0.5)
    connection.cancel(request_id, 0.6)
    assert [frame["op"] for frame in sent(connection)] == ["decode", "cancel"]
    assert connection.receive(reply(request_id, 0, token(1)), 0.7) == [Update(request_id, token(1))]
    assert connection.next_deadline == 5.5
    (failed,) = connection.expire(5.5)
    assert isinstance(failed, Failed)
    assert "cancelled `decode` did not end within 5 s" in str(failed.error)
    assert sent(connection) == []


def test_no_more_requests_than_the_limit_are_open() -> None:
    connection = Connection()
    ids = [connection.start(Stats(), FOR_EVER, 0.0) for _ in range(REQUESTS_PER_CLIENT_MAX)]
    with pytest.raises(Capacity):
        connection.start(Stats(), FOR_EVER, 0.0)
    connection.receive(reply(ids[0], 0, StatsResult(counters={}, gauges={})), 0.0)
    connection.start(Stats(), FOR_EVER, 0.0)


def test_what_cannot_be_sent_leaves_the_connection_as_it_was() -> None:
    connection = Connection()
    with pytest.raises(Invalid):
        connection.start(Sync(session="s"), FOR_EVER, 0.0)
    assert (connection.open_requests, connection.next_id, connection.frames_to_send()) == (0, 1, [])


def test_a_lost_connection_ends_every_request_and_takes_no_more() -> None:
    connection = Connection()
    ids = [connection.start(DECODE, FOR_EVER, 0.0) for _ in range(3)]
    connection.cancel(ids[1], 0.0)
    failures = connection.lose("Gone.")
    assert [h.request_id for h in failures if isinstance(h, Failed)] == ids
    assert all(isinstance(h, Failed) and isinstance(h.error, Disconnected) for h in failures)
    assert connection.frames_to_send() == []
    with pytest.raises(Disconnected):
        connection.start(DECODE, FOR_EVER, 0.0)
    assert connection.lose("Again.") == []


def test_ids_go_on_where_the_last_connection_ended() -> None:
    old = Connection()
    old.start(DECODE, FOR_EVER, 0.0)
    new = Connection(first_id=old.next_id)
    request_id = new.start(DECODE, FOR_EVER, 0.0)
    assert request_id == 2
    (ignored,) = new.receive(reply(1, 0, token(1)), 0.0)
    assert isinstance(ignored, Ignored)
    assert ignored.why is Why.STRANGER


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x81",
        b"\x93\x01\x02\x03",
        msgpack.packb({"id": 1}),
        msgpack.packb({1: 2}),
        b"\xff" * 40,
    ],
)
def test_garbage_is_ignored(frame: bytes) -> None:
    """B70, B71, from the daemon's side."""
    connection = Connection()
    connection.start(DECODE, FOR_EVER, 0.0)
    (ignored,) = connection.receive(frame, 0.0)
    assert isinstance(ignored, Ignored)
    assert ignored.why is Why.UNREADABLE
    assert connection.open_requests == 1


@pytest.mark.parametrize(
    "fields", [{"kind": "result", "final": True}, {"kind": "surprise", "final": False}, {"kind": "token"}]
)
def test_an_unreadable_reply_to_an_open_request_fails_that_request_by_name(fields: dict[str, object]) -> None:
    connection = Connection()
    request_id = connection.start(DECODE, FOR_EVER, 0.0)
    other = connection.start(DECODE, FOR_EVER, 0.0)
    (failed,) = connection.receive(msgpack.packb({"v": 1, "id": request_id, "seq": 0, **fields}), 0.0)
    assert isinstance(failed, Failed)
    assert failed.request_id == request_id
    assert isinstance(failed.error, StreamBroken)
    assert connection.receive(reply(other, 0, token(1)), 0.0) == [Update(other, token(1))]


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
words = sorted({name for operation in OPERATIONS.values() for name in wire_names(operation.result).values()})


@pytest.mark.parametrize("op", OPERATIONS)
@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(["result", "error", "token", "progress", "event"]),
    fields=st.dictionaries(st.sampled_from([*words, "error", "top", "kv"]), plain, max_size=6),
    error=st.dictionaries(st.sampled_from(["code", "message", "field", "details"]), plain) | plain,
)
def test_a_reply_with_any_content_is_taken_or_fails_its_request(
    op: str, kind: str, fields: dict[str, object], error: object
) -> None:
    """Whatever a daemon sends, the thread that reads it lives on."""
    connection = Connection()
    known = {
        name: strategy for name, strategy in REQUIRED.items() if name in wire_names(OPERATIONS[op].request)
    }
    if "session" in known:
        known.pop("request", None)  # `cancel` takes one of them
    request_id = connection.start(OPERATIONS[op].request(**known), FOR_EVER, 0.0)
    wire = {**fields, "v": 1, "id": request_id, "seq": 0, "kind": kind, "error": error}
    (happening,) = connection.receive(msgpack.packb(wire), 0.0)
    assert isinstance(happening, Update | Done | Failed)
    assert connection.open_requests == isinstance(happening, Update)


def test_an_error_without_an_id_belongs_to_nobody() -> None:
    connection = Connection()
    connection.start(DECODE, FOR_EVER, 0.0)
    body = ErrorBody(code="malformed", message="What?")
    assert connection.receive(reply(None, 0, body), 0.0) == [Ignored(Why.NOBODY, "What?")]


# ---------------------------------------------------------------- back to back


@dataclass
class Expected:
    """What must come of one request."""

    id: int
    seq: int = 0  # of the daemon's next reply
    told: int = 0  # cancels the daemon got
    cancelled: bool = False
    broken: bool = False  # a reply was lost: the next one breaks the stream
    deadline: float | None = None
    ended: bool = False
    heard: list[object] = field(default_factory=list)
    said: list[object] = field(default_factory=list)


class BackToBack(RuleBasedStateMachine):
    """A connection against a daemon in memory: replies in any order, lost, repeated, late, and not ours."""

    requests: Bundle[Expected] = Bundle("requests")
    frames: Bundle[bytes] = Bundle("frames")  # on their way to the client

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.connection = Connection(cancel_s=7.0)
        self.all: dict[int, Expected] = {}
        self.last_said: dict[int, bytes] = {}

    def take(self, happenings: list[Happening]) -> None:
        for happening in happenings:
            if isinstance(happening, Ignored):
                continue
            expected = self.all[happening.request_id]
            assert not expected.ended, "something came after the end"
            expected.ended = not isinstance(happening, Update)
            expected.heard.append(happening)

    def carry(self) -> None:
        """The daemon takes the client's frames."""
        for wire in sent(self.connection):
            if wire["op"] == "cancel":
                assert isinstance(wire["request"], int)
                self.all[wire["request"]].told += 1

    @rule(target=requests, timeout_s=st.sampled_from([None, 1.0, 3.0]))
    def start(self, timeout_s: float | None) -> Expected:
        request_id = self.connection.start(DECODE, Wait(timeout_s, each=True), self.now)
        assert request_id not in self.all
        deadline = None if timeout_s is None else self.now + timeout_s
        self.all[request_id] = Expected(request_id, deadline=deadline)
        self.all[request_id].said.append(timeout_s)
        return self.all[request_id]

    @rule(expected=requests, last=st.booleans(), lost=st.booleans())
    def answer(self, expected: Expected, last: bool, lost: bool) -> None:
        """The daemon replies once more (after the end too: it hasn't heard of it yet)."""
        body: Body = result(expected.seq) if last else token(expected.seq)
        frame = reply(expected.id, expected.seq, body)
        expected.seq += 1
        if lost:
            expected.broken = True
            return
        self.last_said[expected.id] = frame
        was_ended = expected.ended
        happenings = self.connection.receive(frame, self.now)
        self.take(happenings)
        (happening,) = happenings
        if was_ended:
            assert isinstance(happening, Ignored)
            assert happening.why in (Why.LATE, Why.STRANGER)  # a stranger to a new connection
        elif expected.broken:
            assert isinstance(happening, Failed)
            assert isinstance(happening.error, StreamBroken)
        elif last:
            assert happening == Done(expected.id, body)
        else:
            assert happening == Update(expected.id, body)
            timeout_s = expected.said[0]
            if isinstance(timeout_s, float) and not expected.cancelled:
                expected.deadline = self.now + timeout_s

    @rule(expected=requests)
    def repeat(self, expected: Expected) -> None:
        """The transport never repeats a frame; if it did, no token may be shown twice."""
        frame = self.last_said.get(expected.id)
        if frame is None:
            return
        was_ended = expected.ended
        (happening,) = self.connection.receive(frame, self.now)
        self.take([happening])
        assert isinstance(happening, Ignored if was_ended else Failed)

    @rule(expected=requests)
    def cancel(self, expected: Expected) -> None:
        self.connection.cancel(expected.id, self.now)
        if not expected.ended and not expected.cancelled:
            expected.cancelled = True
            expected.deadline = self.now + 7.0

    @rule(expected=consumes(requests))
    def abandon(self, expected: Expected) -> None:
        self.take(self.connection.abandon(expected.id, SlowConsumer("Slow.")))
        assert expected.ended

    @rule(passed_s=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, passed_s: float) -> None:
        self.now += passed_s
        due = {
            e.id
            for e in self.all.values()
            if not e.ended and e.deadline is not None and e.deadline <= self.now
        }
        happenings = self.connection.expire(self.now)
        self.take(happenings)
        assert {h.request_id for h in happenings if isinstance(h, Failed)} == due

    @rule(frame=st.binary(max_size=30))
    def garbage(self, frame: bytes) -> None:
        before = self.connection.open_requests
        (happening,) = self.connection.receive(frame, self.now)
        assert isinstance(happening, Ignored)
        assert self.connection.open_requests == before

    @rule(ahead=st.integers(1, 9))
    def stranger(self, ahead: int) -> None:
        (happening,) = self.connection.receive(reply(self.connection.next_id + ahead, 0, token(0)), self.now)
        assert isinstance(happening, Ignored)
        assert happening.why is Why.STRANGER

    @rule()
    def lose(self) -> None:
        self.take(self.connection.lose("Gone."))
        assert all(expected.ended for expected in self.all.values())
        self.connection = Connection(first_id=self.connection.next_id, cancel_s=7.0)
        # What the old daemon still had to say comes to nobody: ids of this one are all new.
        for expected in self.all.values():
            (happening,) = self.connection.receive(reply(expected.id, expected.seq, token(0)), self.now)
            assert isinstance(happening, Ignored)

    @invariant()
    def books_agree(self) -> None:
        self.carry()
        alive = [expected for expected in self.all.values() if not expected.ended]
        assert self.connection.open_requests == len(alive)
        deadlines = [expected.deadline for expected in alive if expected.deadline is not None]
        assert self.connection.next_deadline == min(deadlines, default=None)
        for expected in self.all.values():
            assert expected.told <= 1
            ends = [h for h in expected.heard if not isinstance(h, Update)]
            assert len(ends) == int(expected.ended)
            updates = [h.body for h in expected.heard if isinstance(h, Update)]
            assert updates == [token(n) for n in range(len(updates))], "lost, repeated or out of order"


TestBackToBack = BackToBack.TestCase
TestBackToBack.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
