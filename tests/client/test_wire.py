"""Messages to frames and back; frames that are none; and what must not even be sent."""

from __future__ import annotations

import math
import struct
import tracemalloc
import types
import typing
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateroom.client.errors import CLASSES, DaemonError, Invalid, error_from
from stateroom.client.limits import DEPTH_MAX, MESSAGE_BYTES_MAX, UINT64_MAX, Pattern, Range, Size
from stateroom.client.protocol import (
    ERROR_CODES,
    OPERATIONS,
    Decode,
    ErrorBody,
    Event,
    Hello,
    Message,
    Open,
    Prefill,
    Progress,
    Reply,
    Request,
    Sampling,
    Stats,
    Sync,
    TokenEvent,
    TokensResult,
    Trim,
    Watch,
)
from stateroom.client.wire import (
    DecodeError,
    decode_map,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    field_types,
    from_wire,
    wire_names,
)

# ---------------------------------------------------------------- there and back


def strategy_for(annotation: Any) -> st.SearchStrategy[Any]:
    """Values that an annotation of the protocol allows."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _within(args[0], args[1])
    if origin in (typing.Union, types.UnionType):
        return st.one_of([strategy_for(arg) for arg in args])
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is list:
        return st.lists(strategy_for(args[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*(strategy_for(arg) for arg in args))
    if origin is dict:
        return st.dictionaries(st.text(max_size=3), strategy_for(args[1]), max_size=2)
    if is_dataclass(annotation):
        return messages(annotation)  # type: ignore[arg-type]
    known: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(0, 2**31 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(max_size=5),
        bool: st.booleans(),
        bytes: st.binary(max_size=5),
        type(None): st.none(),
        Any: st.none() | st.integers(-9, 9) | st.text(max_size=3),
    }
    return known[annotation]


def _within(kind: Any, mark: object) -> st.SearchStrategy[Any]:
    if isinstance(mark, Pattern):
        return st.from_regex(mark.regex, fullmatch=True)
    if isinstance(mark, Range):
        least = mark.least if mark.least is not None else mark.above
        if kind is int:
            return st.integers(least and int(least), mark.most and int(mark.most))
        return st.floats(least, mark.most, exclude_min=mark.above is not None)
    assert isinstance(mark, Size)
    if kind is str:
        return st.text(st.characters(exclude_categories=["Cs"]), min_size=mark.least, max_size=mark.least + 4)
    if kind is bytes:
        return st.binary(min_size=mark.least, max_size=mark.least + 4)
    (item,) = typing.get_args(kind)
    return st.lists(strategy_for(item), min_size=mark.least, max_size=mark.least + 3)


def messages(message_type: type[Any]) -> st.SearchStrategy[Any]:
    annotations = field_types(message_type)
    return st.builds(
        message_type, **{f.name: strategy_for(annotations[f.name]) for f in fields(message_type)}
    )


@pytest.mark.parametrize("op", OPERATIONS)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), request_id=st.integers(0, UINT64_MAX))
def test_every_request_survives_the_wire(op: str, data: st.DataObject, request_id: int) -> None:
    request_type = OPERATIONS[op].request
    request: Request = data.draw(messages(request_type).filter(lambda made: made.problem() is None))
    wire = decode_map(encode_request(request_id, request))
    assert (wire["v"], wire["id"], wire["op"]) == (1, request_id, op)
    assert set(wire) - {"v", "id", "op"} <= set(wire_names(request_type).values())
    assert from_wire(request_type, wire) == request


@pytest.mark.parametrize("op", OPERATIONS)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), seq=st.integers(0, 2**40))
def test_every_reply_survives_the_wire(op: str, data: st.DataObject, seq: int) -> None:
    kinds = (OPERATIONS[op].result, TokenEvent, Progress, Event, ErrorBody)
    body = data.draw(st.one_of([messages(kind) for kind in kinds]))
    reply = Reply(id=7, seq=seq, body=body)
    frame = encode_reply(reply)
    assert decode_reply(frame, {7: op}) == reply
    assert decode_map(frame)["final"] == reply.final


def test_words_reserved_in_python_go_by_their_wire_names() -> None:
    wire = decode_map(encode_request(1, Open(session_class="background")))
    assert wire["class"] == "background"
    assert "session_class" not in wire


def test_defaults_and_nones_are_left_out() -> None:
    decode = Decode(session="s", max_tokens=1, sampling=Sampling(temperature=0.5))
    wire = decode_map(encode_request(1, decode))
    assert wire == {
        "v": 1,
        "id": 1,
        "op": "decode",
        "session": "s",
        "max_tokens": 1,
        "sampling": {"temperature": 0.5},
    }


def test_every_error_code_has_its_class_and_an_unknown_one_is_the_daemons() -> None:
    assert set(CLASSES) == set(ERROR_CODES)
    for code in ERROR_CODES:
        raised = error_from(ErrorBody(code=code, message="m", field="f", details={"n": 1}))
        assert type(raised).code == code
        assert raised.body() == ErrorBody(code=code, message="m", field="f", details={"n": 1})
    assert type(error_from(ErrorBody(code="new", message="m"))) is DaemonError  # type: ignore[arg-type]


def test_an_older_client_reads_a_newer_daemon() -> None:
    frame = msgpack.packb(
        {"v": 1, "id": 1, "seq": 0, "kind": "result", "final": True, "freed_bytes": 3, "new": [1]}
    )
    reply = decode_reply(frame, {1: "close"})
    assert reply.body == OPERATIONS["close"].result(freed_bytes=3)


# ---------------------------------------------------------------- what is no message

BAD = {
    "empty": b"",
    "reserved byte": b"\xc1",
    "truncated": msgpack.packb({"v": 1, "id": 1})[:-1],
    "trailing": msgpack.packb({}) + b"\x00",
    "two values": msgpack.packb({}) * 2,
    "list on top": msgpack.packb([1]),
    "number on top": msgpack.packb(3),
    "nil": b"\xc0",
    "integer key": msgpack.packb({1: 2}),
    "array as key": b"\x81\x91\x01\x02",
    "map as key": b"\x81\x80\x02",
    "bytes key": msgpack.packb({b"v": 1}),
    "nil key": msgpack.packb({None: 1}),
    "bool key": msgpack.packb({True: 1}),
    "duplicate key": b"\x82\xa1v\x01\xa1v\x02",
    "nested duplicate": b"\x81\xa1a\x91\x82\xa1v\x01\xa1v\x02",
    "nested integer key": msgpack.packb({"a": [{1: 2}]}),
    "bad utf-8": b"\x81\xa1v\xa2\xff\xfe",
    "surrogate": b"\x81\xa1v\xa3\xed\xa0\x80",
    "ext 42": msgpack.packb({"v": msgpack.ExtType(42, b"x")}),
    "timestamp": msgpack.packb({"v": msgpack.Timestamp(1)}),
    "ext -1 of odd length": b"\x81\xa1v\xc7\x03\xff\x00\x00\x00",
    "timestamp with bad nanoseconds": b"\x81\xa1v\xc7\x0c\xff" + struct.pack(">Iq", 2**32 - 1, 1),
    "huge array": b"\x81\xa1v\xdd\xff\xff\xff\xff",
    "huge map": b"\xdf\xff\xff\xff\xff",
    "huge bin": b"\x81\xa1v\xc6\xff\xff\xff\xff",
    "huge string": b"\x81\xa1v\xdb\xff\xff\xff\xff",
    "huge ext": b"\x81\xa1v\xc9\xff\xff\xff\xff\x01",
    "2000 arrays deep": b"\x81\xa1v" + b"\x91" * 2_000 + b"\x00",
    "2000 maps deep": b"\x81\xa1v" * 2_000 + b"\x00",
    "just too deep": b"\x81\xa1v" * (DEPTH_MAX + 1) + b"\x80",
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_message_is_a_decode_error_and_costs_no_memory(name: str) -> None:
    """B70, B71, B73: keys of all kinds, huge declared lengths, deep nesting, extension types."""
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            decode_map(BAD[name])
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_a_message_of_the_greatest_depth_is_read() -> None:
    assert decode_map(b"\x81\xa1v" * (DEPTH_MAX - 1) + b"\x80")


def test_a_frame_above_the_limit_is_refused_unread() -> None:
    """B71."""
    with pytest.raises(DecodeError, match="bytes at most"):
        decode_request(bytes(MESSAGE_BYTES_MAX + 1))


def test_an_answer_may_be_larger_than_any_request() -> None:
    """The limit is for what anyone may send: a list of all sessions must arrive."""
    body = TokensResult(tokens=[1, 2, 3], text="x" * (MESSAGE_BYTES_MAX + 1))
    frame = encode_reply(Reply(id=1, seq=0, body=body))
    assert decode_reply(frame, {1: "tokens"}).body == body


def test_the_largest_legal_request_fits() -> None:
    """B71: a limit must not drop a big legal message."""
    tokens = [2**31 - 1] * 1_000_000
    assert len(decode_map(encode_request(1, Prefill(session="s", tokens=tokens)))["tokens"]) == 1_000_000
    text = "é" * (4 * 1024 * 1024)
    assert decode_map(encode_request(1, Sync(session="s", text=text)))["text"] == text


def test_a_flaw_deep_in_a_readable_message_leaves_its_id_to_answer_to() -> None:
    with pytest.raises(DecodeError) as caught:
        decode_map(msgpack.packb({"id": 12, "a": {1: 2}}))
    assert caught.value.request_id == 12


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_are_a_map_or_a_decode_error(frame: bytes) -> None:
    with suppress(DecodeError):
        assert isinstance(decode_map(frame), dict)


# ---------------------------------------------------------------- what must not be sent

UNSENDABLE: list[tuple[Request, str, str]] = [
    (Decode(session="s", max_tokens=1, sampling=Sampling(seed=2**64)), "sampling.seed", "64 bits"),
    (Decode(session="s", max_tokens=-(2**63) - 1), "max_tokens", "64 bits"),
    (
        Decode(session="s", max_tokens=1, sampling=Sampling(temperature=math.nan)),
        "sampling.temperature",
        "finite",
    ),
    (Decode(session="s", max_tokens=1, sampling=Sampling(top_p=math.inf)), "sampling.top_p", "finite"),
    (
        Decode(session="s", max_tokens=1, sampling=Sampling(logit_bias=[(1, 0.0), (5, -math.inf)])),
        "sampling.logit_bias.1.1",
        "finite",
    ),
    (Watch(stats_every_s=math.nan), "stats_every_s", "finite"),
    (Hello(app="\ud800"), "app", "surrogate at 0"),
    (Prefill(session="s", text="fine \udfff"), "text", "surrogate at 5"),
    (
        Prefill(session="s", messages=[Message(role="user", content="\ud800")]),
        "messages.0.content",
        "surrogate",
    ),
    (Decode(session="s", max_tokens=1, stop=["a", "\udc80"]), "stop.1", "surrogate"),
    (Prefill(session="s", tokens=[1, 2, 2**70]), "tokens.2", "64 bits"),
    (Prefill(session="s", tokens=[1, object()]), "tokens.1", "can't be sent: a object"),  # type: ignore[list-item]
    (Prefill(session="s", tokens={1, 2}), "tokens", "can't be sent: a set"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(
    ("request_", "field", "wrong"), UNSENDABLE, ids=[field for _, field, _ in UNSENDABLE]
)
def test_what_cannot_travel_is_refused_here_with_its_field(request_: Request, field: str, wrong: str) -> None:
    """B73: seed 2^64, NaN, lone surrogates: never a raw OverflowError or UnicodeEncodeError."""
    with pytest.raises(Invalid, match=wrong) as caught:
        encode_request(1, request_)
    assert caught.value.field == field
    assert f"`{field}` of `{request_.op}`" in caught.value.message


def test_seeds_up_to_64_bits_can_travel() -> None:
    """B73."""
    for seed in (0, 2**63, UINT64_MAX):
        wire = decode_map(encode_request(1, Decode(session="s", max_tokens=1, sampling=Sampling(seed=seed))))
        assert wire["sampling"]["seed"] == seed


def test_arguments_that_exclude_each_other_are_refused_here() -> None:
    with pytest.raises(Invalid) as caught:
        encode_request(1, Trim(session="s", to=1, count=2))
    assert caught.value.field == "count"


def test_a_request_above_the_frame_limit_is_refused_here() -> None:
    """B71: the daemon's socket would drop the connection."""
    with pytest.raises(Invalid, match="in parts"):
        encode_request(1, Prefill(session="s", text="x" * (MESSAGE_BYTES_MAX + 1)))


def test_a_request_without_arguments() -> None:
    assert decode_map(encode_request(0, Stats())) == {"v": 1, "id": 0, "op": "stats"}
