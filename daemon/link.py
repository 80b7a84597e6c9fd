"""What the broker and an engine worker say to each other, as data. Pure.

The broker has validated every request and resolved names, owners and new ids before it sends a
`Command`; the worker trusts it. `rid` is the broker's own number for a request, unique in its life.
Every command gets any number of `Answer`s and exactly one whose body is final. A journal rides on
the answers, so that the broker always knows the tokens of every session and can hand them to a new
worker (`Adopt`) when one dies.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from stateroom.client.protocol import (
    KV,
    OPERATIONS,
    Body,
    ErrorBody,
    Event,
    KindCaps,
    Message,
    ModelInfo,
    Progress,
    Request,
    TokenEvent,
    Waiting,
)
from stateroom.client.wire import (
    DecodeError,
    body_to_wire,
    decode_map,
    encode_map,
    from_wire,
    kind_of,
    to_wire,
)
from stateroom.daemon.timings import Spread

# ---------------------------------------------------------------- broker → worker


@dataclass(frozen=True)
class Command:
    """One request. `session`: its id, for `open` the new one. `children`: new ids, for `fork`, `publish`.

    `snapshot`: the id of the one that `restore` takes, or that `save` replaces. `base`: the length that the
    session had when a decode began which another worker could not end; what it drew is in the session by now.
    """

    rid: int
    request: Request
    session: str | None = None
    children: list[str] = field(default_factory=list)
    owner: str = ""  # whose it is
    snapshot: str | None = None
    base: int | None = None


CHAT_CHARACTERS_MAX = 2_000_000  # of one session's messages: with its tokens they must fit into one frame


@dataclass(frozen=True)
class ChatTurn:
    """Messages as a request gave them, and the session's length with them and before it took them.

    What lies between one turn's end and the next one's messages was decoded: the assistant's answer. A turn
    without messages is what a cut or a cancelled prefill left of one: nobody can tell what it says.
    """

    messages: list[Message]
    end: int
    start: int = 0


def bounded(chat: list[ChatTurn]) -> list[ChatTurn]:
    """The chat, or nothing when it is too long to be told."""
    characters = sum(len(message.content) for turn in chat for message in turn.messages)
    return chat if characters <= CHAT_CHARACTERS_MAX else []


@dataclass(frozen=True)
class Adopt:
    """A session that another worker held: its tokens are to be computed when it is next used.

    Answered with a `LengthResult`.
    """

    rid: int
    session: str
    tokens: list[int]
    background: bool = False
    chat: list[ChatTurn] = field(default_factory=list)
    kv: KV | None = None
    owner: str = ""
    trunk: str | None = None  # the published trunk that it is, or stems from; the first so many of its tokens
    trunk_length: int = 0
    snapshot: str | None = None  # an automatic one: KV of its first tokens


@dataclass(frozen=True)
class CancelCommand:
    """Ends the request `rid` at the next token or chunk, with its own final answer. Never answered itself."""

    rid: int


@dataclass(frozen=True)
class Stop:
    """Finish the step in flight, answer every open request as cancelled, park for so long, leave."""

    park_s: float = 0.0


@dataclass(frozen=True)
class Discard:
    """Snapshots that nobody wants any more; ids that are unknown are passed over. Never answered."""

    snapshots: list[str]


@dataclass(frozen=True)
class Budget:
    """The most KV to hold from now on; what is idle gives way.

    Answered by `Within` once that is so, unless another one came meanwhile. `most`: what it could come to be
    given at the most; no `Short` brings more.
    """

    nbytes: int
    most: int = 0


@dataclass(frozen=True)
class Recall:
    """What is remembered of a request, for `trace`. Answered by `Recorded`, between two steps."""

    rid: int


ToWorker = Command | Adopt | CancelCommand | Stop | Discard | Budget | Recall


# ---------------------------------------------------------------- worker → broker

# Why a session's KV left the device: another needed the room, the budget became smaller, `park` asked for it,
# a pass failed, or nothing of it fits the content that the session has now.
Left = Literal["memory", "budget", "asked", "failed", "content"]


@dataclass(frozen=True)
class Part:
    """KV that several sessions may hold: a trunk, else a checkpoint. The worker numbers each but once."""

    number: int
    bytes: int
    trunk: bool


@dataclass(frozen=True)
class Journal:
    """How a session's tokens changed: the first `keep` stay, `tokens` follow. Bytes are of its KV now."""

    session: str
    keep: int
    tokens: list[int]
    private_bytes: int = 0  # columns and states of its own; its parts come on top
    live_bytes: int = 0
    parts: list[Part] | None = None  # what it holds that others may hold too, when that changed
    kinds: list[KindCaps] | None = None  # as they are stored, when that changed
    resident: bool = True  # KV is on the device
    trim_floor: int | None = None  # the shortest length that a trim reaches exactly, when it is known
    checkpoints: list[int] | None = None  # shorter lengths that it reaches, when they are known
    chat: list[ChatTurn] | None = None  # all turns, when they changed
    snapshot: str | None = None  # the automatic one that it has on disk, when that changed; "": none
    kv: KV | None = None  # of a session that was restored: the scheme that it was saved with
    left: Left | None = None  # why its KV isn't on the device any more


@dataclass(frozen=True)
class Answer:
    rid: int
    body: Body
    journal: Journal | None = None
    born: list[Journal] = field(default_factory=list)  # of the sessions that it made


@dataclass(frozen=True)
class Kept:
    """A snapshot on disk. `name`: what its owner called it; None: an automatic one, of `session`."""

    id: str
    owner: str
    session: str
    name: str | None = None
    length: int = 0
    nbytes: int = 0
    created_ms: int = 0  # of the wall clock


@dataclass(frozen=True)
class Ready:
    """The model is loaded. `facts`: strings and numbers for the log and `doctor` (device, blas, dtype, …).

    `kept`: the snapshots that are there; `broken`: ids of those that can't be read.
    """

    model: ModelInfo
    facts: dict[str, Any]
    kept: list[Kept] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Shelved:
    """Snapshots that are on disk now, and ids of those that went. Before the answer that speaks of them."""

    kept: list[Kept] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Within:
    """The worker holds, and will hold, no more KV than this `Budget` said."""

    nbytes: int


@dataclass(frozen=True)
class Short:
    """A request needs so many bytes of KV beyond the budget; it waits for a while."""

    nbytes: int


@dataclass(frozen=True)
class Failed:
    """The model can't be loaded. `permanent`: trying again won't help (bad path, unknown architecture)."""

    message: str
    permanent: bool


WAITS_TOLD = 256  # requests of which a pulse tells; of others it isn't known why they wait


@dataclass(frozen=True)
class Doing:
    """What a request that a worker has waits for, if it does. `done` of `total` tokens; 0 of 0: not known."""

    rid: int
    waiting: Waiting | None = None
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class Pulse:
    """Sent about once a second while working or not: proof of life, with gauges by name."""

    gauges: dict[str, float]
    doing: list[Doing] = field(default_factory=list)
    timings: list[Spread] = field(default_factory=list)  # since the worker's start


@dataclass(frozen=True)
class Mark:
    """What took a request's time, or a moment of it (0 ms). Milliseconds of the machine's monotonic clock."""

    name: str
    start_ms: float
    ms: float
    details: dict[str, Any]


@dataclass(frozen=True)
class Recorded:
    """In the order of time. `dropped`: how many, at the least, aren't there any more, or were too many."""

    rid: int
    marks: list[Mark]
    dropped: int = 0


@dataclass(frozen=True)
class Journals:
    """What changed in sessions without a request of their own."""

    changes: list[Journal]


FromWorker = Answer | Journals | Ready | Failed | Pulse | Shelved | Within | Short | Recorded


# ---------------------------------------------------------------- frames


def encode_to_worker(message: ToWorker) -> bytes:
    if isinstance(message, Command):
        return encode_map(
            {
                "rid": message.rid,
                "op": message.request.op,
                "args": to_wire(message.request),
                "session": message.session,
                "children": message.children,
                "owner": message.owner,
                "snapshot": message.snapshot,
                "base": message.base,
            }
        )
    return encode_map({"link": type(message).__name__, **to_wire(message)})


_TO_WORKER: dict[str, type[Any]] = {
    each.__name__: each for each in (Adopt, CancelCommand, Stop, Discard, Budget, Recall)
}
_FROM_WORKER: dict[str, type[Any]] = {
    each.__name__: each for each in (Journals, Ready, Failed, Pulse, Shelved, Within, Short, Recorded)
}


def decode_to_worker(frame: bytes) -> ToWorker:
    wire = decode_map(frame)
    name = wire.get("link")
    if name is not None:
        return typing.cast("ToWorker", from_wire(_TO_WORKER[name], wire))
    request = from_wire(OPERATIONS[wire["op"]].request, wire["args"])
    return Command(
        wire["rid"],
        request,
        wire["session"],
        wire["children"],
        wire["owner"],
        wire["snapshot"],
        wire["base"],
    )


def encode_from_worker(message: FromWorker) -> bytes:
    if isinstance(message, Answer):
        made: dict[str, Any] = {
            "rid": message.rid,
            "kind": kind_of(message.body),
            "body": body_to_wire(message.body),
        }
        made["type"] = type(message.body).__name__
        if message.journal is not None:
            made["journal"] = to_wire(message.journal)
        if message.born:
            made["born"] = [to_wire(journal) for journal in message.born]
        return encode_map(made)
    return encode_map({"link": type(message).__name__, **to_wire(message)})


_BODIES: dict[str, type[Any]] = {
    body.__name__: body
    for body in (TokenEvent, Progress, Event, *{operation.result for operation in OPERATIONS.values()})
}


def decode_from_worker(frame: bytes) -> FromWorker:
    wire = decode_map(frame)
    name = wire.get("link")
    if name is not None:
        return typing.cast("FromWorker", from_wire(_FROM_WORKER[name], wire))
    if wire["kind"] == "error":
        body: Body = from_wire(ErrorBody, wire["body"]["error"])
    else:
        if wire["type"] not in _BODIES:
            raise DecodeError(f"The worker sent a body of unknown type {wire['type']!r}.")
        body = typing.cast("Body", from_wire(_BODIES[wire["type"]], wire["body"]))
    journal = from_wire(Journal, wire["journal"]) if "journal" in wire else None
    born = [from_wire(Journal, each) for each in wire.get("born", [])]
    return Answer(wire["rid"], body, journal, born)
