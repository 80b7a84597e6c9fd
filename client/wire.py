"""Messages of the protocol to msgpack frames and back. Pure: no socket, no clock."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, partial
from typing import Annotated, Any, TypeVar

import msgpack

from stateroom.client.errors import Invalid
from stateroom.client.limits import (
    CONTAINER_PARTS,
    DEPTH_MAX,
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    REQUEST_NAMES_MAX,
    REQUEST_PARTS_MAX,
    UINT64_MAX,
)
from stateroom.client.protocol import (
    KV,
    OPERATIONS,
    Body,
    ErrorBody,
    Event,
    InfoResult,
    Kind,
    Operation,
    Progress,
    Reply,
    Request,
    Result,
    Sampling,
    SessionInfo,
    TokenEvent,
)
from stateroom.client.sendable import first_flaw


class DecodeError(ValueError):
    """A frame that isn't a message of this protocol; `id` is the request's, when it could be read."""

    def __init__(self, message: str, request_id: int | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


# msgpack's packer begins with a buffer, by default of 256 KiB: fresh pages, which cost ten times the packing.
BUFFER_BYTES = 2048
_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})


class _NotAllowed:
    """Stands where an extension type was, so that the rest of the message can still be read."""


def _pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        made["\0duplicate"] = _NotAllowed()
    return made


def _flaw(value: Any) -> str | None:
    """Says what is wrong with a decoded value, if anything: depth, key types, extension types."""
    layer = [value]
    for _ in range(DEPTH_MAX):
        inner: list[Any] = []
        for item in layer:
            if type(item) is dict:
                if not all(type(key) is str for key in item):
                    return "Map keys must be strings."
                if "\0duplicate" in item:
                    return "A map holds the same key twice."
                inner.extend(part for part in item.values() if type(part) not in _PLAIN)
            elif type(item) is list:
                if not _PLAIN.issuperset(map(type, item)):  # most lists are long and plain
                    inner.extend(part for part in item if type(part) not in _PLAIN)
            elif type(item) not in _PLAIN:
                return "Extension types are not part of the protocol."
        layer = inner
        if not layer:
            return None
    return f"The message is nested more than {DEPTH_MAX} levels deep."


def _uint(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= UINT64_MAX else None


class _TooMany(ValueError):
    """More parts than a request may have."""


class _Parts:
    """Counts what is unpacked: parts of a byte each could take the reader's time and memory."""

    def __init__(self, most: int) -> None:
        self.left = most

    def _take(self, count: int) -> None:
        self.left -= count + CONTAINER_PARTS
        if self.left < 0:
            raise _TooMany

    def items(self, items: list[Any]) -> list[Any]:
        self._take(len(items))
        return items

    def pairs(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        self._take(len(pairs))
        return _pairs(pairs)


def _skim_id(frame: bytes | memoryview) -> int | None:
    """The id of a message too large to unpack, passing over everything else."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(frame), strict_map_key=False)
    unpacker.feed(frame)
    try:
        for _ in range(min(unpacker.read_map_header(), REQUEST_NAMES_MAX)):
            if unpacker.unpack() == "id":
                return _uint(unpacker.unpack())
            unpacker.skip()
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        pass
    return None


def decode_request(frame: bytes | memoryview) -> dict[str, Any]:
    """As `decode_map`, for what anyone may send: unpacking ends at more parts than any request has.

    Raises:
        DecodeError: as `decode_map`; or more than `MESSAGE_BYTES_MAX` bytes, `REQUEST_PARTS_MAX` parts or
            `REQUEST_NAMES_MAX` names.
    """
    size = len(frame)
    if size > MESSAGE_BYTES_MAX:
        raise DecodeError(f"A message may have {MESSAGE_BYTES_MAX} bytes at most; this one has {size}.")
    return decode_map(frame, REQUEST_PARTS_MAX, REQUEST_NAMES_MAX)


def decode_map(
    frame: bytes | memoryview, parts_max: int | None = None, names_max: int | None = None
) -> dict[str, Any]:
    """Unpacks one frame, of any size (answers may be larger than requests), into a map of plain values.

    Args:
        parts_max: items of all its lists and maps together.
        names_max: entries of one map.

    Raises:
        DecodeError: not msgpack, not a map, trailing bytes, an extension type, a key that isn't a
            string, a repeated key, nested too deep, or too many parts. Nothing is allocated beyond the
            frame's own size.
    """
    size = len(frame)
    parts_max = size if parts_max is None else parts_max
    names_max = size if names_max is None else names_max
    limited = parts_max < size or names_max < size
    parts = _Parts(parts_max)
    try:
        value = msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=False,
            timestamp=0,
            ext_hook=lambda code, data: _NotAllowed(),
            list_hook=parts.items if limited else None,
            object_pairs_hook=parts.pairs if limited else _pairs,
            max_str_len=size,
            max_bin_len=size,
            max_array_len=min(size, parts_max),
            max_map_len=min(size, names_max),
            max_ext_len=size,
        )
    except (ValueError, TypeError, RecursionError, OverflowError, MemoryError) as error:
        # msgpack raises the ValueError family, TypeError for unhashable keys, and its own stack error.
        if isinstance(error, _TooMany) or (limited and "exceeds max_" in str(error)):
            raise DecodeError("The message has more parts than any request has.", _skim_id(frame)) from None
        raise DecodeError(f"The frame is not one msgpack value: {type(error).__name__}.") from error
    except msgpack.exceptions.UnpackException as error:
        raise DecodeError(f"The frame is not one msgpack value: {type(error).__name__}.") from error
    if type(value) is not dict:
        raise DecodeError("A message is a msgpack map.")
    flaw = _flaw(value)
    if flaw is not None:
        raise DecodeError(flaw, _uint(value.get("id")))
    return typing.cast("dict[str, Any]", value)


def encode_map(message: Mapping[str, Any]) -> bytes:
    """Packs a map of plain values into one frame."""
    return typing.cast("bytes", msgpack.packb(message, use_bin_type=True, buf_size=BUFFER_BYTES))


@cache
def wire_names(message_type: type[Any]) -> dict[str, str]:
    """Field name → name on the wire; they differ where the wire's word is a Python keyword."""
    return {f.name: f.metadata.get("wire", f.name) for f in fields(message_type)}


@cache
def field_types(message_type: type[Any]) -> dict[str, Any]:
    """Field name → resolved annotation, with its `Annotated` metadata."""
    return typing.get_type_hints(message_type, include_extras=True)


_SENT_ALWAYS = object()  # equal to no value of a field


@cache
def _sent_fields(message_type: Any) -> tuple[tuple[str, str, Any], ...]:
    """(field name, name on the wire, value that is left out beside None)."""
    skip_defaults = issubclass(message_type, Request | Sampling | KV)
    return tuple(
        (f.name, name, f.default if skip_defaults and f.default is not MISSING else _SENT_ALWAYS)
        for f, name in zip(fields(message_type), wire_names(message_type).values(), strict=True)
    )


def to_wire(value: Any) -> Any:
    """A dataclass as a map of plain values; fields that are None, and a request's defaults, are left out."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        if value and type(value[0]) is int:
            return value
        return [to_wire(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        made = {}
        for field_name, name, left_out in _sent_fields(kind):
            item = getattr(value, field_name)
            if item is not None and item != left_out:
                made[name] = to_wire(item)
        return made
    if isinstance(value, dict):
        return {key: to_wire(item) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class PlainResult(Result):
    """A result in wire form already, for what is too much to be made twice."""

    fields: dict[str, Any]


M = TypeVar("M")


def from_wire(message_type: type[M], wire: Any) -> M:
    """Builds a dataclass from a map that the other side has already validated.

    Unknown names are passed over, so that an older client reads a newer daemon.

    Raises:
        DecodeError: a field without default is missing, or a part isn't a map or list where it must be.
            Numbers and strings are taken as they are.
    """
    if not isinstance(wire, dict):
        raise DecodeError(f"{message_type.__name__} must be a map.")
    kind: Any = message_type  # to `cache`, mypy counts a class as not hashable
    made = {}
    try:
        for name, wire_name, build, nothing in _read_fields(kind):
            if wire_name in wire:
                value = wire[wire_name]
                made[name] = value if build is None or value is None else build(value)
            elif nothing:
                made[name] = None
        return message_type(**made)
    except TypeError as error:
        raise DecodeError(f"{message_type.__name__} can't be built: {error}.") from error


Build = Callable[[Any], Any]


@cache
def _read_fields(message_type: Any) -> tuple[tuple[str, str, Build | None, bool], ...]:
    """(field name, name on the wire, how its value is built, left out because it is None).

    No way to build: it is taken as it is. What has a default has that when it is left out.
    """
    types_of, made = field_types(message_type), []
    for f, name in zip(fields(message_type), wire_names(message_type).values(), strict=True):
        required = f.default is MISSING and f.default_factory is MISSING
        nothing = required and type(None) in typing.get_args(types_of[f.name])
        made.append((f.name, name, _builder(types_of[f.name]), nothing))
    return tuple(made)


def _builder(annotation: Any) -> Build | None:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _builder(arguments[0])
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        return _builder(inner[0]) if len(inner) == 1 else None
    if origin is list:
        return _list_builder(arguments[0])
    if origin is tuple:
        return tuple
    if is_dataclass(annotation) and isinstance(annotation, type):
        return partial(from_wire, annotation)
    return None


def _list_builder(inner_type: Any) -> Build:
    build = _builder(inner_type)

    def built(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise DecodeError("A list was expected.")
        if build is None:
            return list(value)
        return [None if item is None else build(item) for item in value]

    return built


def encode_request(request_id: int, request: Request) -> bytes:
    """One request frame.

    Raises:
        Invalid: what no daemon could read or would take: arguments that exclude each other, a value
            that has no form in the protocol (see `sendable.py`), a frame above `MESSAGE_BYTES_MAX`.
            Ranges are left to the daemon.
    """
    problem = request.problem()
    if problem is not None:
        raise Invalid(problem[1], field=problem[0])
    arguments = to_wire(request)
    flaw = first_flaw(arguments)
    if flaw is None:
        try:
            frame = encode_map({"v": PROTOCOL_VERSION, "id": request_id, "op": request.op, **arguments})
        except (ValueError, TypeError, OverflowError):
            flaw = first_flaw(arguments, every_integer=True)
            if flaw is None:
                raise  # not known to happen: msgpack refuses nothing else
    if flaw is not None:
        raise Invalid(f"The argument `{flaw.field}` of `{request.op}` {flaw.wrong}.", field=flaw.field)
    if len(frame) > MESSAGE_BYTES_MAX:
        size = f"{len(frame)} bytes; a message may have {MESSAGE_BYTES_MAX} at most"
        raise Invalid(f"This `{request.op}` has {size}. Send it in parts, say by several prefills.")
    return frame


_KIND_OF: tuple[tuple[type, Kind], ...] = (
    (TokenEvent, "token"),
    (Progress, "progress"),
    (Event, "event"),
    (ErrorBody, "error"),
    (Result, "result"),
)


def kind_of(body: Body) -> Kind:
    return next(kind for body_type, kind in _KIND_OF if isinstance(body, body_type))


def body_to_wire(body: Body) -> dict[str, Any]:
    """Reply fields other than the envelope's: an error's stand below `error`, an info's at the top."""
    if isinstance(body, ErrorBody):
        error = {"code": body.code, "message": body.message, "field": body.field, "details": body.details}
        return {"error": error}
    if isinstance(body, PlainResult):
        return body.fields
    if isinstance(body, InfoResult):
        return typing.cast("dict[str, Any]", to_wire(body.info))
    return typing.cast("dict[str, Any]", to_wire(body))


def encode_reply(reply: Reply) -> bytes:
    """One reply frame."""
    head = {
        "v": PROTOCOL_VERSION,
        "id": reply.id,
        "seq": reply.seq,
        "kind": kind_of(reply.body),
        "final": reply.final,
    }
    return encode_map(head | body_to_wire(reply.body))


def decode_reply(frame: bytes | memoryview, op_of: Mapping[int, str]) -> Reply:
    """Reads one reply frame; `op_of` tells the operation of each open request, which types its result.

    Raises:
        DecodeError: not a reply of this protocol; with the request's id, where that could be read.
            A reply to a request that isn't open is read as a plain `Result`, so that it can be dropped.
    """
    wire = decode_map(frame)
    kind, seq, request_id = wire.get("kind"), wire.get("seq"), wire.get("id")
    if type(seq) is not int or (request_id is not None and _uint(request_id) is None):
        raise DecodeError("A reply needs seq and id.")
    op = OPERATIONS.get(op_of.get(request_id, "")) if request_id is not None else None
    try:
        return Reply(id=request_id, seq=seq, body=_body_from(kind, op, wire))
    except DecodeError as error:
        error.request_id = request_id
        raise


def _body_from(kind: object, op: Operation | None, wire: dict[str, Any]) -> Body:
    if kind == "error":
        return from_wire(ErrorBody, wire.get("error"))
    if kind == "token":
        return from_wire(TokenEvent, wire)
    if kind == "progress":
        return from_wire(Progress, wire)
    if kind == "event":
        return from_wire(Event, wire)
    if kind != "result":
        raise DecodeError(f"A reply of kind {kind!r} is not known.")
    if op is None:
        return Result()
    if op.result is InfoResult:
        return InfoResult(info=from_wire(SessionInfo, wire))
    return from_wire(op.result, wire)
