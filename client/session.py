"""Handles on sessions: `Session` and, with the same methods as coroutines, `AsyncSession`.

A handle is an id and what was last heard of it. Two handles on one session are fine, and so are several
threads on one handle: the daemon lets one request at a time change a session, and a second gets `Busy`.
Only a stream that its reader has left is waited for first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

from stateroom.client.arguments import (
    DecodeOptions,
    Inputs,
    children_of,
    decode_request,
    inputs_of,
    token_ids,
)
from stateroom.client.connection import Part
from stateroom.client.errors import ClientError, EngineLost, Numeric, SlowConsumer, StateroomError
from stateroom.client.inbox import AsyncInbox, Inbox
from stateroom.client.protocol import (
    Cancel,
    CancelResult,
    Caps,
    Close,
    CloseResult,
    DecodeResult,
    Fork,
    ForkResult,
    Info,
    InfoResult,
    Lease,
    LeaseResult,
    LengthResult,
    Park,
    ParkResult,
    Prefill,
    Progress,
    Publish,
    PublishResult,
    ReadTokens,
    Receipt,
    Request,
    Result,
    Save,
    SaveResult,
    Score,
    ScoreResult,
    SessionInfo,
    Sync,
    TokenEvent,
    TokensResult,
    Trim,
    Verify,
    VerifyResult,
)
from stateroom.client.stream import AsyncTokenStream, TokenStream

if TYPE_CHECKING:
    from stateroom.client.async_room import AsyncRoom
    from stateroom.client.room import Room

R = TypeVar("R", bound=Result)

OnProgress = Callable[[Progress], None]
ID_SHOWN = 10  # characters of an id in a repr


class SessionState:
    """What a handle knows without asking.

    Attributes:
        id: the daemon's id.
        name: the name it was opened with, or None.
        length: its tokens when last heard of, the pending one among them.
        receipt: what the last operation that could reuse KV did reuse, or None.
        caps: what the session can do; None for a handle from `Room.session`.
        closed: closed through this handle.
    """

    def __init__(self, id: str, name: str | None, length: int, caps: Caps | None) -> None:
        self.id = id
        self.name = name
        self.length = length
        self.caps = caps
        self.receipt: Receipt | None = None
        self.closed = False

    def note(self, heard: Part | Result | StateroomError | ClientError) -> None:
        """Takes what a reply says about the session."""
        if isinstance(heard, TokenEvent):
            self.length += len(heard.tokens)
        elif isinstance(heard, LengthResult):
            self.length, self.receipt = heard.length, heard.receipt
        elif isinstance(heard, DecodeResult | ForkResult | PublishResult | ParkResult):
            self.length = heard.length
        elif isinstance(heard, SaveResult):
            self.length = heard.tokens
        elif isinstance(heard, CloseResult):
            self.closed = True
        elif isinstance(heard, EngineLost | Numeric | SlowConsumer):
            self.length = heard.details.get("length", self.length)

    def __repr__(self) -> str:
        short = self.id if len(self.id) <= ID_SHOWN else self.id[:ID_SHOWN] + "…"
        name = "" if self.name is None else f" {self.name!r}"
        state = "closed" if self.closed else f"{self.length:,} tokens"
        return f"<{type(self).__name__}{name} {short}, {state}>"


class Session(SessionState):
    """A session in the daemon. Leaving its `with` closes it there; dropping the handle does not.

    Any method may raise a `StateroomError`, the daemon's answer, or a `ClientError`, when there was none
    (see `stateroom.client.errors`). `timeout_s` limits the wait for the next reply; see `Timeouts`.
    """

    def __init__(self, room: Room, id: str, name: str | None, length: int, caps: Caps | None = None) -> None:
        super().__init__(id, name, length, caps)
        self._room = room
        self._decoding: Inbox | None = None  # the last decode through this handle

    def prefill(
        self,
        *,
        on_progress: OnProgress | None = None,
        timeout_s: float | None = None,
        **inputs: Unpack[Inputs],
    ) -> LengthResult:
        """Appends `text`, `tokens` or `messages`; nothing is a legal no-op.

        `on_progress` is called in this thread as the prefill goes on.
        """
        request = Prefill(session=self.id, progress=on_progress is not None, **inputs_of(inputs))
        return self._call(request, LengthResult, timeout_s, on_progress)

    def decode(
        self, max_tokens: int, *, timeout_s: float | None = None, **options: Unpack[DecodeOptions]
    ) -> TokenStream:
        """Starts drawing at most `max_tokens` tokens: iterate over the stream, or call its `wait`.

        Options: `stop`, `stop_tokens`, `ignore_eos`, `logprobs`, `stream`, `speculate`, `grammar`, and
        `sampling` or its single fields: `temperature` (0, greedy, unless given), `top_p`, `top_k`,
        `min_p`, `repetition_penalty`, `repetition_window`, `frequency_penalty`, `presence_penalty`,
        `logit_bias`, `seed`. docs/protocol.md gives their meaning and ranges. With `stream=False` the
        result is the first reply, so `timeout_s` limits the whole.
        """
        request = decode_request(self.id, max_tokens, options)
        self._settle()
        self._decoding = self._room.start(request, timeout_s=timeout_s)
        return TokenStream(self._decoding, self)

    def trim(
        self,
        *,
        to: int | None = None,
        count: int | None = None,
        replay: bool = False,
        timeout_s: float | None = None,
    ) -> LengthResult:
        """Keeps the first `to` tokens, or drops the last `count`.

        Raises `Unsupported`, changing nothing, where some layer can't; with `replay` it recomputes instead.
        """
        request = Trim(session=self.id, to=to, count=count, replay=replay)
        return self._call(request, LengthResult, timeout_s)

    def fork(
        self, n: int | None = None, *, names: Sequence[str] | None = None, timeout_s: float | None = None
    ) -> list[Session]:
        """Makes `n` children, or one for each name, that hold this session's tokens and go their own ways."""
        result = self._call(Fork(session=self.id, **children_of(n, names)), ForkResult, timeout_s)
        return [
            Session(self._room, id, name, result.length, self.caps)
            for id, name in zip_longest(result.sessions, names or ())
        ]

    def publish(self, name: str, *, timeout_s: float | None = None) -> PublishResult:
        """Lets whoever is told its `trunk` fork what the session holds now: `Room.fork(trunk)`.

        It stays, whatever becomes of the session, until `Room.unpublish(name)`. Names are the app's own.
        """
        return self._call(Publish(session=self.id, name=name), PublishResult, timeout_s)

    def sync(self, *, timeout_s: float | None = None, **inputs: Unpack[Inputs]) -> LengthResult:
        """Makes the session hold exactly `text`, `tokens` or `messages`, computing only what is new.

        Supersedes a sync or decode of this session that still runs: that one ends as cancelled.
        """
        return self._call(Sync(session=self.id, **inputs_of(inputs)), LengthResult, timeout_s)

    def tokens(self, start: int | None = None, to: int | None = None) -> TokensResult:
        """The session's tokens from `start` up to, not including, `to`; and their text."""
        return self._call(ReadTokens(session=self.id, start=start, to=to), TokensResult)

    def score(
        self,
        *,
        text: str | None = None,
        tokens: Iterable[int] | None = None,
        timeout_s: float | None = None,
    ) -> ScoreResult:
        """Natural-log probabilities of a continuation, which isn't kept."""
        request = Score(session=self.id, text=text, tokens=token_ids(tokens, "tokens"))
        return self._call(request, ScoreResult, timeout_s)

    def park(self, *, timeout_s: float | None = None) -> ParkResult:
        """Moves its KV from the device to disk now. Whatever uses the session next brings it back."""
        return self._call(Park(session=self.id), ParkResult, timeout_s)

    def save(self, snapshot: str, *, replace: bool = False, timeout_s: float | None = None) -> SaveResult:
        """Keeps what it holds on disk, under a name of this app's, for `Room.restore`.

        Raises:
            Exists: there is one of that name, which may not be replaced.
        """
        request = Save(session=self.id, snapshot=snapshot, replace=replace)
        return self._call(request, SaveResult, timeout_s)

    def verify(self, *, timeout_s: float | None = None) -> VerifyResult:
        """Computes the session again from its tokens, in the background, and compares the next logits."""
        return self._call(Verify(session=self.id), VerifyResult, timeout_s)

    def lease(self, ttl_s: float | None) -> LeaseResult:
        """From now on the session is closed when nobody used it for so long; None: never by itself."""
        return self._room.call(Lease(session=self.id, ttl_s=ttl_s), LeaseResult)

    def info(self) -> SessionInfo:
        """Everything the daemon tells about the session; answered while it works, too."""
        info = self._room.call(Info(session=self.id), InfoResult).info
        self.length = info.length
        return info

    def cancel(self) -> bool:
        """Ends the request that runs on the session, whoever made it; False if none did."""
        return self._room.call(Cancel(session=self.id), CancelResult).cancelled

    def close(self) -> CloseResult:
        """Ends the session in the daemon and frees its memory; again is harmless."""
        if self.closed:
            return CloseResult(freed_bytes=0)
        return self._call(Close(session=self.id), CloseResult)

    def _call(
        self,
        request: Request,
        result_type: type[R],
        timeout_s: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> R:
        self._settle()
        try:
            result = self._room.call(request, result_type, timeout_s=timeout_s, on_progress=on_progress)
        except StateroomError as error:
            self.note(error)
            raise
        self.note(result)
        return result

    def _settle(self) -> None:
        """A stream that was left still holds the session for a moment: until then, it would be busy."""
        if self._decoding is not None and self._decoding.cancelled and self._decoding.final is None:
            self.note(self._decoding.drain())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.closed or isinstance(error, ConnectionError):
            return
        try:
            self.close()
        except (StateroomError, ClientError):
            if error is None:  # else what went wrong first says more
                raise


class AsyncSession(SessionState):
    """As `Session`, for asyncio: every method but `decode` is a coroutine."""

    def __init__(
        self, room: AsyncRoom, id: str, name: str | None, length: int, caps: Caps | None = None
    ) -> None:
        super().__init__(id, name, length, caps)
        self._room = room
        self._decoding: AsyncInbox | None = None

    async def prefill(
        self,
        *,
        on_progress: OnProgress | None = None,
        timeout_s: float | None = None,
        **inputs: Unpack[Inputs],
    ) -> LengthResult:
        """As `Session.prefill`."""
        request = Prefill(session=self.id, progress=on_progress is not None, **inputs_of(inputs))
        return await self._call(request, LengthResult, timeout_s, on_progress)

    def decode(
        self, max_tokens: int, *, timeout_s: float | None = None, **options: Unpack[DecodeOptions]
    ) -> AsyncTokenStream:
        """As `Session.decode`, but it starts when the stream is first waited for."""
        request = decode_request(self.id, max_tokens, options)

        async def begin() -> AsyncInbox:
            await self._settle()
            self._decoding = await self._room.start(request, timeout_s=timeout_s)
            return self._decoding

        return AsyncTokenStream(begin, self)

    async def trim(
        self,
        *,
        to: int | None = None,
        count: int | None = None,
        replay: bool = False,
        timeout_s: float | None = None,
    ) -> LengthResult:
        """As `Session.trim`."""
        request = Trim(session=self.id, to=to, count=count, replay=replay)
        return await self._call(request, LengthResult, timeout_s)

    async def fork(
        self, n: int | None = None, *, names: Sequence[str] | None = None, timeout_s: float | None = None
    ) -> list[AsyncSession]:
        """As `Session.fork`."""
        result = await self._call(Fork(session=self.id, **children_of(n, names)), ForkResult, timeout_s)
        return [
            AsyncSession(self._room, id, name, result.length, self.caps)
            for id, name in zip_longest(result.sessions, names or ())
        ]

    async def publish(self, name: str, *, timeout_s: float | None = None) -> PublishResult:
        """As `Session.publish`."""
        return await self._call(Publish(session=self.id, name=name), PublishResult, timeout_s)

    async def sync(self, *, timeout_s: float | None = None, **inputs: Unpack[Inputs]) -> LengthResult:
        """As `Session.sync`."""
        return await self._call(Sync(session=self.id, **inputs_of(inputs)), LengthResult, timeout_s)

    async def tokens(self, start: int | None = None, to: int | None = None) -> TokensResult:
        """As `Session.tokens`."""
        return await self._call(ReadTokens(session=self.id, start=start, to=to), TokensResult)

    async def score(
        self,
        *,
        text: str | None = None,
        tokens: Iterable[int] | None = None,
        timeout_s: float | None = None,
    ) -> ScoreResult:
        """As `Session.score`."""
        request = Score(session=self.id, text=text, tokens=token_ids(tokens, "tokens"))
        return await self._call(request, ScoreResult, timeout_s)

    async def park(self, *, timeout_s: float | None = None) -> ParkResult:
        """As `Session.park`."""
        return await self._call(Park(session=self.id), ParkResult, timeout_s)

    async def save(
        self, snapshot: str, *, replace: bool = False, timeout_s: float | None = None
    ) -> SaveResult:
        """As `Session.save`."""
        request = Save(session=self.id, snapshot=snapshot, replace=replace)
        return await self._call(request, SaveResult, timeout_s)

    async def verify(self, *, timeout_s: float | None = None) -> VerifyResult:
        """As `Session.verify`."""
        return await self._call(Verify(session=self.id), VerifyResult, timeout_s)

    async def lease(self, ttl_s: float | None) -> LeaseResult:
        """As `Session.lease`."""
        return await self._room.call(Lease(session=self.id, ttl_s=ttl_s), LeaseResult)

    async def info(self) -> SessionInfo:
        """As `Session.info`."""
        info = (await self._room.call(Info(session=self.id), InfoResult)).info
        self.length = info.length
        return info

    async def cancel(self) -> bool:
        """As `Session.cancel`."""
        return (await self._room.call(Cancel(session=self.id), CancelResult)).cancelled

    async def close(self) -> CloseResult:
        """As `Session.close`."""
        if self.closed:
            return CloseResult(freed_bytes=0)
        return await self._call(Close(session=self.id), CloseResult)

    async def _call(
        self,
        request: Request,
        result_type: type[R],
        timeout_s: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> R:
        await self._settle()
        try:
            result = await self._room.call(request, result_type, timeout_s=timeout_s, on_progress=on_progress)
        except StateroomError as error:
            self.note(error)
            raise
        self.note(result)
        return result

    async def _settle(self) -> None:
        if self._decoding is not None and self._decoding.cancelled and self._decoding.final is None:
            self.note(await self._decoding.drain())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.closed or isinstance(error, ConnectionError):
            return
        try:
            await self.close()
        except (StateroomError, ClientError):
            if error is None:
                raise
