"""Frames from clients to requests: strict types, ranges, and the field at fault named.

The pydantic models are built once from the annotated dataclasses of `client/protocol.py`; nothing is
declared twice. Pure: no socket, no clock, no state.
"""

from __future__ import annotations

import operator
import re
import types
import typing
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial, reduce
from itertools import islice
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from stateroom.client.errors import Invalid, Malformed, StateroomError, UnknownOperation, WrongVersion
from stateroom.client.limits import SUPPORTED_VERSIONS, TEXT_BYTES_MAX, UINT64_MAX, Pattern, Range, Size
from stateroom.client.protocol import OPERATIONS, InputRequest, Request
from stateroom.client.wire import DecodeError, decode_request, field_types, wire_names

ENVELOPE = ("v", "id", "op")
SHOWN_MAX = 64  # characters of a caller's own word that an error repeats
NO_ARGUMENT = "(no argument)"  # in the log, for a caller's own word

_arguments: set[str] = {*ENVELOPE}
_forms: dict[str, str] = {}  # in words, by pattern


class Refused(Exception):
    """A frame that can't be served; `request_id` is the request's where it could be read."""

    def __init__(self, error: StateroomError, request_id: int | None, op: str | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.request_id = request_id
        self.op = op


@dataclass(frozen=True)
class Parsed:
    id: int
    op: str
    request: Request


class _Checked(BaseModel):
    """Base of the built models. A flood of unknown names is cut short before each becomes an error."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _cut_short(cls, value: Any) -> Any:
        most = len(cls.model_fields) + 1
        if type(value) is dict and len(value) > most:
            return dict(islice(value.items(), most))
        return value


def _constraint(mark: object, of_list: bool) -> Any:
    if isinstance(mark, Range):
        return Field(ge=mark.least, le=mark.most, gt=mark.above)
    if isinstance(mark, Size):
        # One wrong item says enough: a million of them would each become an error.
        size = {"min_length": mark.least or None, "max_length": mark.most}
        return Field(**size, fail_fast=True) if of_list else Field(**size)  # type: ignore[call-overload]
    if isinstance(mark, Pattern):
        pattern = f"^(?:{mark.regex})$"
        _forms[pattern] = mark.words
        return Field(pattern=pattern)
    raise TypeError(f"{mark!r} has no meaning here")


def _translate(annotation: Any) -> Any:
    """A dataclass field's annotation in pydantic's words."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        of_list = typing.get_origin(args[0]) is list
        return Annotated[_translate(args[0]), *(_constraint(mark, of_list) for mark in args[1:])]
    if origin in (typing.Union, types.UnionType):
        return reduce(operator.or_, (_translate(arg) for arg in args))
    if origin is list:
        return list[_translate(args[0])]  # type: ignore[misc]
    if origin is tuple:
        # A pair arrives as a msgpack array, so as a list; its items stay strict.
        return Annotated[tuple[tuple(_translate(arg) for arg in args)], Field(strict=False)]  # type: ignore[misc]
    if is_dataclass(annotation) and isinstance(annotation, type):
        return Annotated[_model(annotation), AfterValidator(partial(_build, annotation))]
    return annotation


def _model(message: type[Any]) -> type[BaseModel]:
    annotations = field_types(message)  # type: ignore[arg-type]  # a class is hashable
    names = wire_names(message)  # type: ignore[arg-type]
    _arguments.update(names.values())
    made: dict[str, Any] = {}
    for f in fields(message):
        alias = names[f.name]
        default = ... if f.default is MISSING else f.default
        # The parameter is named as on the wire, so that an error's path is the wire's.
        made[f.name] = (_translate(annotations[f.name]), Field(default, alias=alias))
    return create_model(message.__name__, __base__=_Checked, **made)


def _build(message: type[Any], checked: BaseModel) -> Any:
    return message(**{name: getattr(checked, name) for name in type(checked).model_fields})


_MODELS: dict[str, type[BaseModel]] = {op: _model(known.request) for op, known in OPERATIONS.items()}


def loggable(field: str | None) -> str | None:
    """An error's field as the log may have it: a word of the protocol's, never one of the caller's."""
    if field is None or all(part in _arguments or part.isdigit() for part in field.split(".")):
        return field
    return NO_ARGUMENT


def _shown(word: Any) -> str:
    text = str(word)
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…"


def _said(op: str, error: ValidationError) -> Invalid:
    """The first flaw in words; an unknown name before others, which may follow from it."""
    flaws = error.errors(include_input=False, include_url=False)
    flaw = next((f for f in flaws if f["type"] == "extra_forbidden"), flaws[0])
    path = ".".join(_shown(part) for part in flaw["loc"])
    if flaw["type"] == "extra_forbidden":
        return Invalid(f"`{op}` has no argument `{path}`; check its spelling.", field=path)
    if flaw["type"] == "missing":
        return Invalid(f"`{op}` needs the argument `{path}`.", field=path)
    wrong = re.sub(r"^(Input|String|List|Value) ", "", flaw["msg"])
    if flaw["type"] == "string_pattern_mismatch":
        wrong = f"should have {_forms[flaw['ctx']['pattern']]}"
    wrong = "should be a map" if flaw["type"] == "model_type" else wrong
    return Invalid(f"The argument `{path}` of `{op}` {wrong}.", field=path)


def _texts_fit(request: Request) -> tuple[str, str] | None:
    """Texts are limited in bytes, all of a request together; no single field can tell."""
    if not isinstance(request, InputRequest):
        text = getattr(request, "text", None)
        bytes_ = len(text.encode()) if isinstance(text, str) else 0
        name = "text"
    elif request.messages is not None:
        bytes_ = sum(len(message.content.encode()) for message in request.messages)
        name = "messages"
    else:
        bytes_ = len(request.text.encode()) if request.text is not None else 0
        name = "text"
    if bytes_ > TEXT_BYTES_MAX:
        return name, f"A request's text may have {TEXT_BYTES_MAX} bytes at most; this one has {bytes_}."
    return None


def read_id(frame: bytes) -> int | None:
    """The request id of a frame that may be anything, if it can be read."""
    try:
        value = decode_request(frame).get("id")
    except DecodeError as error:
        return error.request_id
    return value if type(value) is int and 0 <= value <= UINT64_MAX else None


def validate(op: str, arguments: dict[str, Any]) -> Request:
    """Arguments by their wire names to a request.

    Raises:
        UnknownOperation: no such operation, or one of a later version.
        Invalid: an argument is missing, unknown, of the wrong type or out of range.
    """
    known = OPERATIONS.get(op)
    if known is None:
        raise UnknownOperation(
            f"There is no operation `{_shown(op)}`; `hello` tells the version served here."
        )
    try:
        checked = _MODELS[op].model_validate(arguments)
    except ValidationError as error:
        raise _said(op, error) from None
    request: Request = _build(known.request, checked)
    problem = request.problem() or _texts_fit(request)
    if problem is not None:
        raise Invalid(problem[1], field=problem[0])
    return request


def parse(frame: bytes) -> Parsed:
    """One frame to a request.

    Raises:
        Refused: with the typed error to answer (`malformed`, `version`, `unknown_op` or `invalid`), and the
            request's id where it could be read.
    """
    try:
        wire = decode_request(frame)
    except DecodeError as error:
        raise Refused(Malformed(str(error)), error.request_id) from None
    version, request_id, op = (wire.pop(name, None) for name in ENVELOPE)
    if type(request_id) is not int or not 0 <= request_id <= UINT64_MAX:
        raise Refused(Malformed("A request needs `id`, an integer from 0 to 2^64 - 1."), None)
    if type(version) is not int or version not in SUPPORTED_VERSIONS:
        spoken = list(SUPPORTED_VERSIONS)
        other = WrongVersion("This daemon speaks protocol 1: send `v: 1`.", field="v", supported=spoken)
        raise Refused(other, request_id)
    if type(op) is not str:
        raise Refused(Malformed("A request needs `op`, the name of an operation.", field="op"), request_id)
    try:
        return Parsed(request_id, op, validate(op, wire))
    except StateroomError as error:
        raise Refused(error, request_id, op if op in OPERATIONS else None) from None
