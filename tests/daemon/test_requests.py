"""Validation: what is refused, under which name, and what passes unharmed."""

from __future__ import annotations

import math
import time
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measured import best

from stateroom.client.limits import (
    LOGIT_BIAS_MAX,
    MESSAGE_BYTES_MAX,
    MESSAGES_MAX,
    REQUEST_NAMES_MAX,
    TEXT_BYTES_MAX,
    TOKENS_PER_REQUEST_MAX,
)
from stateroom.client.protocol import (
    ERROR_CODES,
    OPERATIONS,
    Decode,
    Fork,
    Message,
    Open,
    Prefill,
    ReadTokens,
    Request,
    Sampling,
)
from stateroom.client.wire import encode_request
from stateroom.daemon.requests import NO_ARGUMENT, Parsed, Refused, loggable, parse

DECODE = {"op": "decode", "session": "s", "max_tokens": 3}
OPEN = {"op": "open"}


def frame(**message: Any) -> bytes:
    packed: bytes = msgpack.packb({"v": 1, "id": 3, **message})
    return packed


def outcome(raw: bytes) -> Parsed | Refused:
    try:
        return parse(raw)
    except Refused as refused:
        return refused


def refusal(raw: bytes) -> tuple[int | None, str, str | None]:
    with pytest.raises(Refused) as caught:
        parse(raw)
    assert caught.value.error.message
    return caught.value.request_id, caught.value.error.code, caught.value.error.field


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_tokens": "1"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"session": b"s"}, "session"),
        ({"session": ""}, "session"),
        ({"session": "s" * 129}, "session"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p"),
        ({"sampling": {"top_p": 1.0001}}, "sampling.top_p"),
        ({"sampling": {"top_p": True}}, "sampling.top_p"),
        ({"sampling": {"temperature": math.nan}}, "sampling.temperature"),
        ({"sampling": {"temperature": math.inf}}, "sampling.temperature"),
        ({"sampling": {"temperature": -0.1}}, "sampling.temperature"),
        ({"sampling": {"seed": -1}}, "sampling.seed"),
        ({"sampling": {"topp": 1}}, "sampling.topp"),
        ({"sampling": []}, "sampling"),
        ({"sampling": {"logit_bias": [[1, 2.0, 3]]}}, "sampling.logit_bias.0"),
        ({"sampling": {"logit_bias": [[1]]}}, "sampling.logit_bias.0.1"),
        ({"sampling": {"logit_bias": [[1, 2.0], [True, 2.0]]}}, "sampling.logit_bias.1.0"),
        ({"sampling": {"logit_bias": [[1, math.nan]]}}, "sampling.logit_bias.0.1"),
        ({"sampling": {"logit_bias": [[1, 0.0]] * (LOGIT_BIAS_MAX + 1)}}, "sampling.logit_bias"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"stop": "a"}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"stream": 1}, "stream"),
        ({"speculate": {"kind": "magic"}}, "speculate.kind"),
        ({"speculate": {}}, "speculate.kind"),
        ({"grammar": {"kind": "regex"}}, "grammar.value"),
        ({"max_token": 3}, "max_token"),
        ({"self": 3}, "self"),
        ({"model_config": 3}, "model_config"),
    ],
)
def test_the_field_at_fault_is_named_as_on_the_wire(wrong: dict[str, Any], field: str) -> None:
    """B73, B25: types and ranges of each field; bool is no int, NaN no number, unknown names errors."""
    assert refusal(frame(**{**DECODE, **wrong})) == (3, "invalid", field)


def test_a_name_that_can_t_be_is_refused_in_words() -> None:
    with pytest.raises(Refused) as refused:
        parse(frame(**{**OPEN, "name": "my notes"}))
    assert str(refused.value) == (
        "The argument `name` of `open` should have 1 to 64 characters, of ASCII letters, digits, dots, "
        "underscores and hyphens."
    )


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"class": "urgent"}, "class"),
        ({"session_class": "background"}, "session_class"),
        ({"name": "a b"}, "name"),
        ({"name": "a\n"}, "name"),
        ({"name": "é"}, "name"),
        ({"name": "a" * 65}, "name"),
        ({"name": "../x"}, "name"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": math.nan}, "ttl_s"),
        ({"kv": {"group_size": 48}}, "kv.group_size"),
        ({"kv": {"group_size": True}}, "kv.group_size"),
        ({"tokens": [-1]}, "tokens.0"),
        ({"tokens": [1, 2**31]}, "tokens.1"),
        ({"tokens": [2**63]}, "tokens.0"),
        ({"tokens": [1.0]}, "tokens.0"),
        ({"tokens": [True]}, "tokens.0"),
        ({"tokens": [None]}, "tokens.0"),
        ({"tokens": b"\x00"}, "tokens"),
        ({"tokens": [], "text": ""}, "text"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0.name"),
        ({"messages": [{"role": "u", "content": ""}] * (MESSAGES_MAX + 1)}, "messages"),
        ({"text": "é" * (TEXT_BYTES_MAX // 2 + 1)}, "text"),
        ({"messages": [{"role": "u", "content": "é" * (TEXT_BYTES_MAX // 4 + 1)}] * 2}, "messages"),
    ],
)
def test_open_refuses(wrong: dict[str, Any], field: str) -> None:
    """B25 on token ids; limits of text count bytes, all of a request together."""
    assert refusal(frame(**{**OPEN, **wrong})) == (3, "invalid", field)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"v": 1, "op": "list"}, (None, "malformed", None)),
        ({"v": 1, "id": -1, "op": "list"}, (None, "malformed", None)),
        ({"v": 1, "id": True, "op": "list"}, (None, "malformed", None)),
        ({"v": 1, "id": 1.0, "op": "list"}, (None, "malformed", None)),
        ({"id": 3, "op": "list"}, (3, "version", "v")),
        ({"v": 2, "id": 3, "op": "list"}, (3, "version", "v")),
        ({"v": True, "id": 3, "op": "list"}, (3, "version", "v")),
        ({"v": 1, "id": 3}, (3, "malformed", "op")),
        ({"v": 1, "id": 3, "op": 7}, (3, "malformed", "op")),
        ({"v": 1, "id": 3, "op": "fly"}, (3, "unknown_op", None)),
        ({"v": 1, "id": 3, "op": "__class__"}, (3, "unknown_op", None)),
        ({"v": 1, "id": 3, "op": "list", "x": 1}, (3, "invalid", "x")),
        ({"v": 1, "id": 2**64 - 1, "op": "fly"}, (2**64 - 1, "unknown_op", None)),
    ],
)
def test_the_envelope(message: dict[str, Any], expected: tuple[int | None, str, str | None]) -> None:
    assert refusal(msgpack.packb(message)) == expected


@pytest.mark.parametrize(
    ("raw", "request_id"),
    [
        (b"", None),
        (b"\xc1", None),
        (b"\x93\x01\x02\x03", None),  # a list
        (frame(op="list") + b"\x00", None),  # trailing byte
        (frame(op="list")[:-1], None),  # truncated
        (b"\xdd\xff\xff\xff\xff", None),  # array32 of 4 G elements
        (b"\xc6\xff\xff\xff\xff", None),  # bin32 of 4 GB
        (b"\xdf\xff\xff\xff\xff", None),  # map32 of 4 G entries
        (b"\x91" * 2000 + b"\x00", None),  # 2,000 levels
        (b"\x81\xa2id\xcf" + b"\xff" * 8 + b"\x00", None),
        (msgpack.packb({"v": 1, "id": 3, "op": "open", 5: 1}), 3),
        (b"\x82\xa2id\x03\x93\x01\x02\x03\x01", None),  # an array as key: unhashable
        (b"\x83\xa2id\x03\xa2id\x04\xa1v\x01", None),  # the same key twice
        (msgpack.packb({"v": 1, "id": 3, "op": "list", b"x": 1}), 3),
        (msgpack.packb({"v": 1, "id": 3, "op": "open", "tokens": msgpack.ExtType(42, b"abc")}), 3),
        (b"\x82\xa2id\x03\xa1t\xc7\x03\xffabc", None),  # a timestamp of odd length
        (
            msgpack.packb({"v": 1, "id": 3, "op": "open", "text": "\ud800"}, unicode_errors="surrogatepass"),
            None,
        ),
    ],
)
def test_what_is_no_message(raw: bytes, request_id: int | None) -> None:
    """B70, B71, B73: each is refused as malformed, with its id where that could be read."""
    got_id, code, _ = refusal(raw)
    assert code == "malformed"
    if request_id is not None:
        assert got_id == request_id


def test_good_requests_arrive_as_they_were_meant() -> None:
    sampling = Sampling(top_p=0.5, seed=2**64 - 1, logit_bias=[(7, -1.5)])
    sent: list[Request] = [
        Decode(session="s", max_tokens=3, sampling=sampling, stop=["x"], stop_tokens=[2]),
        Open(name="a.b-c_1", session_class="background", messages=[Message(role="user", content="é")]),
        ReadTokens(session="s", start=1, to=2),
        Fork(session="s", n=2, names=["a", "b"]),
        Prefill(session="s", tokens=[0, 2**31 - 1], progress=True),
    ]
    for request in sent:
        parsed = parse(encode_request(2**64 - 1, request))
        assert (parsed.id, parsed.op, parsed.request) == (2**64 - 1, request.op, request)
    whole = parse(frame(**DECODE, sampling={"top_p": 1, "temperature": 2**40 - 2**40}))
    assert isinstance(whole.request, Decode)
    assert whole.request.sampling is not None
    assert type(whole.request.sampling.top_p) is float  # an integer serves where a number is asked for


def test_every_operation_has_its_model() -> None:
    for op in OPERATIONS:
        assert refusal(frame(op=op, no_argument=1)) == (3, "invalid", "no_argument")


def test_a_hundred_thousand_tokens_are_quick() -> None:
    raw = frame(op="prefill", session="s", tokens=list(range(100_000)))
    assert best(lambda: _timed(raw), 0.05, attempts=5) < 0.05  # about 10 ms


def test_a_flood_of_wrong_names_or_items_is_cut_short() -> None:
    """B71: an error for each of them would take the daemon's memory and time."""
    several = {f"x{i}": i for i in range(REQUEST_NAMES_MAX - 3)}
    for raw in (
        frame(op="open", **several),
        frame(op="decode", session="s", max_tokens=1, sampling=several),
        frame(op="open", tokens=["x"] * 200_000),
    ):
        assert refusal(raw)[:2] == (3, "invalid")
        assert best(lambda raw=raw: _timed(raw), 0.5) < 0.5


@pytest.mark.parametrize("part", [b"\x01", b"\xc0", b"\x90", b"\x80", b"\x91\x90", b"\xa0"])
def test_the_largest_frame_of_the_smallest_parts_costs_little(part: bytes) -> None:
    """B71: sixteen million parts would take seconds and gigabytes; the id is found all the same."""
    head = b"\x84\xa1v\x01\xa6tokens\xdd"
    many = (MESSAGE_BYTES_MAX - 100) // len(part)
    raw = head + many.to_bytes(4, "big") + part * many + b"\xa2id\x07\xa2op\xa4open"
    assert refusal(raw)[:2] == (7, "malformed")
    assert best(lambda: _timed(raw), 1.0) < 1.0
    pieces = b"\xdd" + (10**6).to_bytes(4, "big") + b"\x01" * 10**6
    nested = b"\x84\xa1v\x01\xa2id\x07\xa2op\xa4open\xa6tokens\x9f" + pieces * 15
    assert refusal(nested)[:2] == (7, "malformed")
    assert best(lambda: _timed(nested), 1.0) < 1.0


def test_the_largest_requests_pass() -> None:
    """B71: the limits are above the largest legal message."""
    raw = frame(op="prefill", session="s", tokens=[2**31 - 1] * TOKENS_PER_REQUEST_MAX)
    assert isinstance(parse(raw).request, Prefill)
    raw = frame(op="open", messages=[{"role": "user", "content": "x"}] * MESSAGES_MAX)
    assert isinstance(parse(raw).request, Open)
    raw = frame(**DECODE, sampling={"logit_bias": [[1, 0.5]] * LOGIT_BIAS_MAX}, stop=["x"] * 16)
    assert isinstance(parse(raw).request, Decode)
    assert refusal(frame(op="open", tokens=[1] * (TOKENS_PER_REQUEST_MAX + 1))) == (3, "invalid", "tokens")


def _timed(raw: bytes) -> float:
    began = time.process_time()  # not what other processes take
    got = outcome(raw)
    took_s = time.process_time() - began
    assert isinstance(got, Parsed) or len(got.error.message) < 500
    return took_s


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = sorted({name for op in OPERATIONS.values() for name in typing.get_type_hints(op.request)} - {"op"})


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(OPERATIONS)),
    st.dictionaries(st.sampled_from([*NAMES, "class", "from"]), PLAIN, max_size=5),
)
def test_any_arguments_give_a_request_or_a_named_error(op: str, arguments: dict[str, Any]) -> None:
    got = outcome(frame(op=op, **arguments))
    if isinstance(got, Refused):
        assert got.request_id == 3
        assert got.error.code in ERROR_CODES
    else:
        assert got.request.problem() is None
        assert parse(encode_request(3, got.request)).request == got.request


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_refused_by_name(raw: bytes) -> None:
    with pytest.raises(Refused):
        parse(raw)


@pytest.mark.parametrize(
    ("field", "logged"),
    [
        (None, None),
        ("session", "session"),
        ("messages.0.content", "messages.0.content"),
        ("sampling.logit_bias.12", "sampling.logit_bias.12"),
        ("speculate.model", "speculate.model"),
        ("my secret", NO_ARGUMENT),
        ("sampling.my secret", NO_ARGUMENT),
        ("messages.0.secret", NO_ARGUMENT),
        ("", NO_ARGUMENT),
    ],
)
def test_the_log_has_no_word_of_the_callers(field: str | None, logged: str | None) -> None:
    """A misspelt argument is named to its caller, and to nobody else: it may be a text gone astray."""
    assert loggable(field) == logged
