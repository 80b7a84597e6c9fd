"""The wire protocol, version 1, as data: every message and error code. See docs/protocol.md.

Nothing here opens a socket. A request is a frozen dataclass with the name of its operation; its
annotations carry the ranges (`Range`, `Size`, `Pattern`) from which the daemon builds its validation,
so that what is documented, sent and checked can't drift apart. Replies are dataclasses too.
`wire.py` turns them into frames and back; `limits.py` holds the limits.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from stateroom.client.limits import (
    APP_MAX,
    BATCH_MAX,
    CARRIED_BYTES_MAX,
    CHUNK_BYTES_MAX,
    DRAFT_MAX,
    FORKS_MAX,
    LOGIT_BIAS_MAX,
    LOGPROBS_MAX,
    MESSAGE_BYTES_MAX,
    MESSAGES_MAX,
    NAME_PATTERN,
    NAME_WORDS,
    REPETITION_WINDOW_MAX,
    SESSIONS_MAX,
    STOP_STRING_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKENS_MAX,
    TEXT_BYTES_MAX,
    TOKENS_PER_REQUEST_MAX,
    TTL_S_MAX,
    UINT64_MAX,
    Pattern,
    Range,
    Size,
)

TokenId = Annotated[int, Range(0, 2**31 - 1)]  # the model's vocabulary is checked by the engine
Name = Annotated[str, Pattern(NAME_PATTERN, NAME_WORDS)]
SessionRef = Annotated[str, Size(1, 128)]  # a session id or an own name
TrunkRef = Annotated[str, Size(1, 128)]  # what `publish` gave, or the name of an own one
ModelRef = Annotated[str, Size(1, 1024)]
Tokens = Annotated[list[TokenId], Size(0, TOKENS_PER_REQUEST_MAX)]
Text = Annotated[str, Size(0, TEXT_BYTES_MAX)]
Count = Annotated[int, Range(0, TOKENS_PER_REQUEST_MAX)]
Chunk = Annotated[bytes, Size(0, CHUNK_BYTES_MAX)]
CarriedBytes = Annotated[int, Range(0, CARRIED_BYTES_MAX)]
TtlS = Annotated[float, Range(above=0, most=TTL_S_MAX)]
SessionClass = Literal["interactive", "background"]
Scheme = Literal["dense", "affine8", "affine4", "turbo"]


# ---------------------------------------------------------------- parts of requests


@dataclass(frozen=True, kw_only=True)
class Message:
    """One chat message, as the model's template takes it."""

    role: Annotated[str, Size(1, 64)]
    content: Text


@dataclass(frozen=True, kw_only=True)
class KV:
    """How a session's keys and values are stored."""

    scheme: Scheme = "dense"
    group_size: Literal[32, 64, 128] | None = None
    quantise_after: Count | None = None
    key_bits: Annotated[int, Range(1, 8)] | None = None
    value_bits: Annotated[int, Range(1, 8)] | None = None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn; temperature 0 is greedy. docs/protocol.md: the order of the filters."""

    temperature: Annotated[float, Range(0, 100)] = 0.0
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    top_k: Annotated[int, Range(0, 2**31 - 1)] = 0
    min_p: Annotated[float, Range(0, 1)] = 0.0
    repetition_penalty: Annotated[float, Range(above=0, most=100)] = 1.0
    repetition_window: Annotated[int, Range(1, REPETITION_WINDOW_MAX)] = 64
    frequency_penalty: Annotated[float, Range(-100, 100)] = 0.0
    presence_penalty: Annotated[float, Range(-100, 100)] = 0.0
    logit_bias: (
        Annotated[list[tuple[TokenId, Annotated[float, Range(-1e4, 1e4)]]], Size(0, LOGIT_BIAS_MAX)] | None
    ) = None
    seed: Annotated[int, Range(0, UINT64_MAX)] | None = None


@dataclass(frozen=True, kw_only=True)
class Speculate:
    kind: Literal["lookup", "model"]
    model: ModelRef | None = None  # that drafts, for kind "model"
    max_draft: Annotated[int, Range(1, DRAFT_MAX)] | None = None


@dataclass(frozen=True, kw_only=True)
class Grammar:
    kind: Literal["json_schema", "regex", "lark"]
    value: Text


# ---------------------------------------------------------------- requests


@dataclass(frozen=True, kw_only=True)
class Request:
    """An operation's arguments, without `v`, `id` and `op`, which belong to the envelope."""

    op: ClassVar[str] = ""

    def problem(self) -> tuple[str, str] | None:
        """What no single field can tell: (field at fault, sentence), or None."""
        return None


@dataclass(frozen=True, kw_only=True)
class InputRequest(Request):
    """A request that takes at most one of three inputs."""

    tokens: Tokens | None = None
    text: Text | None = None
    messages: Annotated[list[Message], Size(0, MESSAGES_MAX)] | None = None

    def problem(self) -> tuple[str, str] | None:
        given = [name for name in ("tokens", "text", "messages") if getattr(self, name) is not None]
        if len(given) > 1:
            return given[1], f"Give at most one of tokens, text and messages; got {' and '.join(given)}."
        return None


@dataclass(frozen=True, kw_only=True)
class SessionRequest(Request):
    session: SessionRef


@dataclass(frozen=True, kw_only=True)
class Hello(Request):
    op: ClassVar[str] = "hello"
    app: Annotated[str, Size(1, APP_MAX)] | None = None
    client: Annotated[str, Size(0, 256)] | None = None


@dataclass(frozen=True, kw_only=True)
class Open(InputRequest):
    op: ClassVar[str] = "open"
    model: ModelRef | None = None
    name: Name | None = None
    kv: KV | None = None
    session_class: SessionClass = field(default="interactive", metadata={"wire": "class"})
    ttl_s: TtlS | None = None


@dataclass(frozen=True, kw_only=True)
class Prefill(InputRequest):
    op: ClassVar[str] = "prefill"
    session: SessionRef
    progress: bool = False


@dataclass(frozen=True, kw_only=True)
class Decode(SessionRequest):
    op: ClassVar[str] = "decode"
    max_tokens: Annotated[int, Range(1, TOKENS_PER_REQUEST_MAX)]
    sampling: Sampling | None = None
    stop: Annotated[list[Annotated[str, Size(1, STOP_STRING_MAX)]], Size(0, STOP_STRINGS_MAX)] | None = None
    stop_tokens: Annotated[list[TokenId], Size(0, STOP_TOKENS_MAX)] | None = None
    ignore_eos: bool = False
    logprobs: Annotated[int, Range(0, LOGPROBS_MAX)] | None = None
    stream: bool = True
    speculate: Speculate | None = None
    grammar: Grammar | None = None

    def problem(self) -> tuple[str, str] | None:
        asked = self.speculate
        if asked is not None and (asked.kind == "model") != (asked.model is not None):
            return "speculate.model", "Name the model that drafts, with kind model and with no other."
        return None


@dataclass(frozen=True, kw_only=True)
class Trim(SessionRequest):
    op: ClassVar[str] = "trim"
    to: Count | None = None
    count: Count | None = None
    replay: bool = False

    def problem(self) -> tuple[str, str] | None:
        if self.to is None and self.count is None:
            return "to", "Give either to (the length to keep) or count (how many tokens to drop)."
        if self.to is not None and self.count is not None:
            return "count", "Give either to or count, not both."
        return None


@dataclass(frozen=True, kw_only=True)
class Fork(Request):
    op: ClassVar[str] = "fork"
    session: SessionRef | None = None
    trunk: TrunkRef | None = None
    n: Annotated[int, Range(1, FORKS_MAX)] = 1
    names: Annotated[list[Name], Size(1, FORKS_MAX)] | None = None

    def problem(self) -> tuple[str, str] | None:
        if self.session is None and self.trunk is None:
            return "session", "Give either session (an own one) or trunk (a published one)."
        if self.session is not None and self.trunk is not None:
            return "trunk", "Give either session or trunk, not both."
        if self.names is not None:
            if len(self.names) != self.n:
                return "names", f"Give one name for each child: {self.n} children, {len(self.names)} names."
            if len(set(self.names)) != len(self.names):
                return "names", "The names of the children must differ."
        return None


@dataclass(frozen=True, kw_only=True)
class Publish(SessionRequest):
    op: ClassVar[str] = "publish"
    name: Name = field(metadata={"wire": "as"})


@dataclass(frozen=True, kw_only=True)
class Unpublish(Request):
    op: ClassVar[str] = "unpublish"
    name: Name = field(metadata={"wire": "as"})


@dataclass(frozen=True, kw_only=True)
class Sync(InputRequest):
    op: ClassVar[str] = "sync"
    session: SessionRef

    def problem(self) -> tuple[str, str] | None:
        if self.tokens is None and self.text is None and self.messages is None:
            return "tokens", "Give the whole content of the session as tokens, text or messages."
        return InputRequest.problem(self)


@dataclass(frozen=True, kw_only=True)
class ReadTokens(SessionRequest):
    op: ClassVar[str] = "tokens"
    start: Count | None = field(default=None, metadata={"wire": "from"})
    to: Count | None = None


@dataclass(frozen=True, kw_only=True)
class Info(SessionRequest):
    op: ClassVar[str] = "info"


@dataclass(frozen=True, kw_only=True)
class List(Request):
    """`everyone`: of all owners, as far as who asks may see them."""

    op: ClassVar[str] = "list"
    everyone: bool = False


@dataclass(frozen=True, kw_only=True)
class Requests(Request):
    """Those that are open, and the last that ended; of a session, or of all of them."""

    op: ClassVar[str] = "requests"
    session: SessionRef | None = None
    everyone: bool = False


@dataclass(frozen=True, kw_only=True)
class Close(SessionRequest):
    op: ClassVar[str] = "close"


@dataclass(frozen=True, kw_only=True)
class Cancel(Request):
    op: ClassVar[str] = "cancel"
    request: Annotated[int, Range(0, UINT64_MAX)] | None = None
    session: SessionRef | None = None

    def problem(self) -> tuple[str, str] | None:
        if (self.request is None) == (self.session is None):
            return "request", "Give either request (an id of this connection) or session."
        return None


@dataclass(frozen=True, kw_only=True)
class Score(SessionRequest):
    op: ClassVar[str] = "score"
    tokens: Tokens | None = None
    text: Text | None = None

    def problem(self) -> tuple[str, str] | None:
        if (self.tokens is None) == (self.text is None):
            return "tokens", "Give the continuation as either tokens or text."
        return None


@dataclass(frozen=True, kw_only=True)
class Lease(SessionRequest):
    """From now on the session is kept for `ttl_s` after its last use; None: until it is closed."""

    op: ClassVar[str] = "lease"
    ttl_s: TtlS | None = None


@dataclass(frozen=True, kw_only=True)
class Park(SessionRequest):
    op: ClassVar[str] = "park"


@dataclass(frozen=True, kw_only=True)
class Save(SessionRequest):
    op: ClassVar[str] = "save"
    snapshot: Name
    replace: bool = False


@dataclass(frozen=True, kw_only=True)
class Restore(Request):
    op: ClassVar[str] = "restore"
    snapshot: Name
    name: Name | None = None
    session_class: SessionClass = field(default="interactive", metadata={"wire": "class"})
    ttl_s: TtlS | None = None


@dataclass(frozen=True, kw_only=True)
class Snapshots(Request):
    op: ClassVar[str] = "snapshots"


@dataclass(frozen=True, kw_only=True)
class Forget(Request):
    op: ClassVar[str] = "forget"
    snapshot: Name


@dataclass(frozen=True, kw_only=True)
class Export(Request):
    """Bytes of a snapshot as one file, from `offset` on; ask again with `next` until that is None."""

    op: ClassVar[str] = "export"
    snapshot: Name
    offset: CarriedBytes = 0


@dataclass(frozen=True, kw_only=True)
class Import(Request):
    """The next bytes of such a file, which has `total`; with the last ones it becomes the snapshot."""

    op: ClassVar[str] = "import"
    snapshot: Name
    total: CarriedBytes
    offset: CarriedBytes = 0
    data: Chunk = field(repr=False)
    model: ModelRef | None = None

    def problem(self) -> tuple[str, str] | None:
        if self.offset + len(self.data) > self.total:
            return "data", "These bytes would end behind the file's total."
        if not self.data:
            return "data", "Give the next bytes of the file."
        return None


@dataclass(frozen=True, kw_only=True)
class Verify(Request):
    """Without a session, one that the daemon picks among all that are idle and have KV."""

    op: ClassVar[str] = "verify"
    session: SessionRef | None = None


@dataclass(frozen=True, kw_only=True)
class Stats(Request):
    op: ClassVar[str] = "stats"


@dataclass(frozen=True, kw_only=True)
class Trace(Request):
    """What happened to one request; `request` is the daemon's own number of it, `RequestInfo.rid`."""

    op: ClassVar[str] = "trace"
    request: Annotated[int, Range(0, UINT64_MAX)]
    everyone: bool = False


@dataclass(frozen=True, kw_only=True)
class Watch(Request):
    op: ClassVar[str] = "watch"
    sessions: bool = True
    stats_every_s: Annotated[float, Range(0.1, 3600)] | None = None
    everyone: bool = False


@dataclass(frozen=True, kw_only=True)
class Load(Request):
    op: ClassVar[str] = "load"
    model: ModelRef


@dataclass(frozen=True, kw_only=True)
class Unload(Request):
    op: ClassVar[str] = "unload"
    model: ModelRef


# ---------------------------------------------------------------- parts of replies

Finish = Literal["stop", "stop_token", "length", "context", "cancelled"]
Source = Literal["session", "fork", "shared", "snapshot", "none"]
# Why a request doesn't go on. The broker knows the first three, its engine the others.
Waiting = Literal["engine", "session", "trial", "memory", "disk", "turn", "yielded"]
WAITING: tuple[Waiting, ...] = typing.get_args(Waiting)


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What an operation reused and what it had to compute; together they are the session's length.

    Only where nothing was computed and KV is gone (a trim without replay, a request cancelled before it
    began) does what is still missing count in neither.
    """

    reused: int = 0  # tokens kept, whose KV was already there
    source: Source = "none"
    prefilled: int = 0  # tokens computed (the last one, pending, is computed by the operation that follows)
    trimmed: int = 0  # tokens dropped
    why: str | None = None  # why less was reused than could be hoped
    ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Usage:
    decoded: int = 0
    prefilled: int = 0  # tokens fed before the first draw: the pending one, and any that had to be recomputed
    drafted: int = 0
    accepted: int = 0
    ms: float = 0.0
    queue_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class KindCaps:
    """One kind of layer: how many there are and how their state is stored."""

    kind: str
    scheme: str
    layers: int


@dataclass(frozen=True, kw_only=True)
class Caps:
    """What a session can do, known when it is opened."""

    trim: Literal["any", "checkpoints", "none"]
    trim_floor: int
    fork: Literal["shared", "copy"]
    batch: bool
    speculative: bool
    kv: list[KindCaps]
    bytes_per_token: float


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    token: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    id: str
    loaded: bool
    context: int = 0
    vocab: int = 0
    kinds: list[KindCaps] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    max_message_bytes: int = MESSAGE_BYTES_MAX
    max_sessions: int = SESSIONS_MAX
    max_tokens_per_request: int = TOKENS_PER_REQUEST_MAX
    max_batch: int = BATCH_MAX


@dataclass(frozen=True, kw_only=True)
class SessionInfo:
    """One session as `list` and `info` show it.

    Bytes are of KV on the device: `private_bytes` all that is allocated for it alone, checkpoints too;
    `live_bytes` what its tokens fill, shared or not, and `capacity_bytes` what is allocated for them.
    """

    session: str
    name: str | None = None
    owner: str = "default"
    model: str = ""
    session_class: SessionClass = field(default="interactive", metadata={"wire": "class"})
    length: int = 0
    state: str = "idle"  # idle | queued | running
    tier: str = "resident"  # resident | disk | tokens: where its KV is
    kinds: list[KindCaps] = field(default_factory=list)
    private_bytes: int = 0
    shared_bytes: int = 0
    live_bytes: int = 0
    capacity_bytes: int = 0
    disk_bytes: int = 0  # of the snapshot that the daemon keeps of it by itself
    trim_floor: int = 0
    checkpoints: list[int] = field(default_factory=list)
    age_s: float = 0.0
    idle_s: float = 0.0
    ttl_s: float | None = None
    expires_in_s: float | None = None  # when nothing touches it
    quarantined: str | None = None  # why nothing runs in it until its content changes
    parents: list[str] = field(default_factory=list)
    published: list[str] = field(default_factory=list)  # what it was published as, and still is
    trunk: str | None = None  # the published trunk that it stems from
    running: str | None = None  # the operation that is running
    waiting: Waiting | None = None  # why that doesn't go on


@dataclass(frozen=True, kw_only=True)
class RequestInfo:
    """One request, open or ended, as `requests` shows it. Of the broker's own, `id` and `client` are None.

    `done` of `total`: tokens computed by a prefill, or drawn of `max_tokens`; 0 of 0 while that isn't known.
    """

    rid: int  # the daemon's own number of it
    op: str
    owner: str = "default"
    client: str | None = None  # what that calls itself
    id: int | None = None  # the client's own number of it
    session: str | None = None
    model: str | None = None
    state: Literal["queued", "running", "ending", "done"] = "running"
    waiting: Waiting | None = None
    done: int = 0
    total: int = 0
    tokens_per_s: float = 0.0  # of a running decode, since its first token
    age_s: float = 0.0  # since it arrived
    ms: float | None = None  # it took, once ended
    code: str | None = None  # once ended: "ok", an error's, or "gone" where its client went before


@dataclass(frozen=True, kw_only=True)
class SnapshotInfo:
    """One of the snapshots that an owner asked for, as `snapshots` shows it."""

    snapshot: str
    model: str = ""
    length: int = 0
    bytes: int = 0  # on disk; what it shares with others counts in each
    age_s: float = 0.0
    session: str | None = None  # whose content it is, if that is still there


@dataclass(frozen=True, kw_only=True)
class TrunkInfo:
    """What was published, as `list` shows it. Bytes are as in `SessionInfo`."""

    name: str = field(metadata={"wire": "as"})
    trunk: str
    owner: str = "default"
    model: str = ""
    length: int = 0
    tier: str = "resident"  # resident | disk | tokens
    private_bytes: int = 0
    shared_bytes: int = 0
    age_s: float = 0.0


# ---------------------------------------------------------------- replies


@dataclass(frozen=True, kw_only=True)
class Result:
    """The body of a final reply of kind `result`."""


@dataclass(frozen=True, kw_only=True)
class HelloResult(Result):
    server: str
    version: str
    protocol: list[int]
    app: str
    models: list[ModelInfo]
    limits: ServerLimits


@dataclass(frozen=True, kw_only=True)
class OpenResult(Result):
    session: str
    length: int
    caps: Caps
    receipt: Receipt | None = None
    finish: Literal["done", "cancelled"] = "done"


@dataclass(frozen=True, kw_only=True)
class LengthResult(Result):
    """Of prefill, sync and trim. `cancelled`: the finished part of the prefill is kept, up to `length`."""

    length: int
    receipt: Receipt
    finish: Literal["done", "cancelled"] = "done"


@dataclass(frozen=True, kw_only=True)
class DecodeResult(Result):
    finish: Finish
    tokens: list[int]
    text: str
    length: int
    usage: Usage
    logprobs: list[TokenLogprob] | None = None  # only of a decode that did not stream


@dataclass(frozen=True, kw_only=True)
class ForkResult(Result):
    sessions: list[str]
    length: int
    shared_bytes: int
    copied_bytes: int


@dataclass(frozen=True, kw_only=True)
class PublishResult(Result):
    """`trunk` lets whoever knows it fork what was published; it can't be guessed."""

    trunk: str
    name: str = field(metadata={"wire": "as"})
    length: int
    shared_bytes: int
    copied_bytes: int


@dataclass(frozen=True, kw_only=True)
class TokensResult(Result):
    tokens: list[int]
    text: str


@dataclass(frozen=True, kw_only=True)
class InfoResult(Result):
    info: SessionInfo


@dataclass(frozen=True, kw_only=True)
class ListResult(Result):
    sessions: list[SessionInfo]
    trunks: list[TrunkInfo] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RequestsResult(Result):
    """Open ones first, the oldest first; then those that ended, the latest first."""

    requests: list[RequestInfo]


@dataclass(frozen=True, kw_only=True)
class CloseResult(Result):
    freed_bytes: int


@dataclass(frozen=True, kw_only=True)
class CancelResult(Result):
    cancelled: bool


@dataclass(frozen=True, kw_only=True)
class ScoreResult(Result):
    """Natural-log probabilities of each token of the continuation, and their sum."""

    tokens: list[int]
    logprobs: list[float]
    total: float


@dataclass(frozen=True, kw_only=True)
class LeaseResult(Result):
    expires_in_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ParkResult(Result):
    """`bytes`: on disk; `freed_bytes`: on the device."""

    tier: str
    length: int
    bytes: int
    freed_bytes: int


@dataclass(frozen=True, kw_only=True)
class SaveResult(Result):
    snapshot: str
    tokens: int
    bytes: int
    checksum: str  # of its manifest, which has those of all that belongs to it


@dataclass(frozen=True, kw_only=True)
class SnapshotsResult(Result):
    """`used_bytes`: what all of an owner's snapshots take, automatic ones too."""

    snapshots: list[SnapshotInfo]
    used_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ForgetResult(Result):
    freed_bytes: int


@dataclass(frozen=True, kw_only=True)
class ExportResult(Result):
    data: bytes = field(repr=False)
    total: int
    next: int | None = None


@dataclass(frozen=True, kw_only=True)
class ImportResult(Result):
    received: int
    snapshot: SnapshotInfo | None = None  # once all is there


@dataclass(frozen=True, kw_only=True)
class VerifyResult(Result):
    """The next token's logits as the session's KV gives them, against those of its tokens computed anew.

    A healthy session's differ by no more than `bound` of the largest; a cancelled one tells nothing.
    """

    max_abs_logit_error: float
    max_abs_logit: float
    argmax_agree: bool
    length: int
    bound: float = 0.0
    finish: Literal["done", "cancelled"] = "done"

    @property
    def healthy(self) -> bool:
        within = self.max_abs_logit_error <= self.bound * self.max_abs_logit
        return within and self.finish == "done"


@dataclass(frozen=True, kw_only=True)
class Span:
    """What took a request's time, or with 0 ms a moment of it; `details` are strings and numbers."""

    name: str
    where: Literal["broker", "engine"] = "broker"
    start_ms: float = 0.0  # since the request arrived
    ms: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TraceResult(Result):
    """The spans in the order of their starts."""

    request: RequestInfo
    spans: list[Span]
    dropped: int = 0  # spans that aren't told, at the least: there were too many, or they are forgotten
    missing: str | None = None  # what of its engines' part isn't there, and why


@dataclass(frozen=True, kw_only=True)
class StatsResult(Result):
    """Counters (since start) and gauges (now), by name; see docs/protocol.md."""

    counters: dict[str, int]
    gauges: dict[str, float]
    models: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class WatchResult(Result):
    events: int


@dataclass(frozen=True, kw_only=True)
class ModelResult(Result):
    model: ModelInfo


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """Reply kind `token`: tokens as they are drawn. `text` may lag behind them, never the other way."""

    tokens: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Reply kind `progress` of a prefill: tokens done of all."""

    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Event:
    """Reply kind `event`: what happened, and to whom."""

    event: str
    session: str | None = None
    model: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


ErrorCode = Literal[
    "malformed", "version", "unknown_op", "invalid", "not_found", "exists", "busy", "capacity", "too_long",
    "unsupported", "mismatch", "corrupt", "engine_lost", "numeric", "slow_consumer", "shutting_down",
    "internal",
]  # fmt: skip
ERROR_CODES: tuple[ErrorCode, ...] = typing.get_args(ErrorCode)


@dataclass(frozen=True, kw_only=True)
class ErrorBody:
    """Reply kind `error`: one sentence that says what to do; `field` is the argument at fault."""

    code: ErrorCode
    message: str
    field: str | None = None
    details: dict[str, Any] = dataclasses.field(default_factory=dict)


Body = Result | TokenEvent | Progress | Event | ErrorBody
Kind = Literal["result", "error", "progress", "token", "event"]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One reply frame: the envelope and its body."""

    id: int | None
    seq: int
    body: Body

    @property
    def final(self) -> bool:
        return isinstance(self.body, Result | ErrorBody)


@dataclass(frozen=True)
class Operation:
    """What an operation takes and gives. `changes`: it needs the session to itself; a read doesn't."""

    request: type[Request]
    result: type[Result]
    changes: bool = False
    streams: bool = False


OPERATIONS: dict[str, Operation] = {
    operation.request.op: operation
    for operation in (
        Operation(Hello, HelloResult),
        Operation(Open, OpenResult),
        Operation(Prefill, LengthResult, changes=True, streams=True),
        Operation(Decode, DecodeResult, changes=True, streams=True),
        Operation(Trim, LengthResult, changes=True),
        Operation(Fork, ForkResult, changes=True),
        Operation(Publish, PublishResult, changes=True),
        Operation(Unpublish, CloseResult),
        Operation(Sync, LengthResult, changes=True),
        Operation(ReadTokens, TokensResult),
        Operation(Info, InfoResult),
        Operation(List, ListResult),
        Operation(Requests, RequestsResult),
        Operation(Trace, TraceResult),
        Operation(Close, CloseResult, changes=True),
        Operation(Cancel, CancelResult),
        Operation(Score, ScoreResult, changes=True),
        Operation(Lease, LeaseResult),
        Operation(Park, ParkResult, changes=True),
        Operation(Save, SaveResult, changes=True),
        Operation(Restore, OpenResult),
        Operation(Snapshots, SnapshotsResult),
        Operation(Forget, ForgetResult),
        Operation(Export, ExportResult),
        Operation(Import, ImportResult),
        Operation(Verify, VerifyResult, changes=True),
        Operation(Stats, StatsResult),
        Operation(Watch, WatchResult, streams=True),
        Operation(Load, ModelResult),
        Operation(Unload, ModelResult),
    )
}
