"""The streams that `decode` and `watch` return: iterators of typed parts, with a result at the end.

A stream ends its request in the daemon when its reader leaves it early: by `break`, an exception, the
end of a `with`, `close`, or by dropping it. `cancel` (and so `break`) does not wait for the daemon; `close`
does. One thread (or task) reads a stream; `cancel` may come from any.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from stateroom.client.connection import Part
from stateroom.client.errors import ClientError, NotEnded, StateroomError
from stateroom.client.inbox import AsyncInbox, Ending, Inbox
from stateroom.client.protocol import DecodeResult, Event, Result, TokenEvent, WatchResult

if TYPE_CHECKING:
    from stateroom.client.session import SessionState

P = TypeVar("P", bound=Part)
R = TypeVar("R", bound=Result)


class StreamState(Generic[P, R]):
    """What a stream knows of its request, whichever way it is read."""

    _part_type: type[P]
    _result_type: type[R]
    _inbox: Ending | None = None

    @property
    def ended(self) -> bool:
        """Whether the last reply has been read."""
        return self._inbox is not None and self._inbox.final is not None

    @property
    def result(self) -> R:
        """The result, once the stream has ended.

        Raises:
            NotEnded: it has not.
            StateroomError, ClientError: it ended with this error.
        """
        final = self._inbox.final if self._inbox is not None else None
        if isinstance(final, self._result_type):
            return final
        if isinstance(final, StateroomError | ClientError):
            raise final
        raise NotEnded("The stream has not ended: read it to its end, or call wait() or close().")

    def _see(self, seen: Part | Result | StateroomError | ClientError) -> P | None:
        """Takes note of a reply, and gives it back if it is one for the reader."""
        return seen if isinstance(seen, self._part_type) else None

    def __repr__(self) -> str:
        how = "running" if self._inbox is None or self._inbox.final is None else "ended"
        return f"<{type(self).__name__}, {how}>"


class Transcript(StreamState[TokenEvent, DecodeResult]):
    """A stream's tokens and text so far. Keeps the session's `length` up to date as they are read."""

    _part_type = TokenEvent
    _result_type = DecodeResult

    def __init__(self, session: SessionState) -> None:
        self._session = session
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._events: list[Event] = []

    @property
    def tokens(self) -> list[int]:
        """The tokens so far; after the end, all."""
        final = self._inbox.final if self._inbox is not None else None
        return list(final.tokens if isinstance(final, DecodeResult) else self._tokens)

    @property
    def text(self) -> str:
        """The text so far; after the end, all."""
        final = self._inbox.final if self._inbox is not None else None
        return final.text if isinstance(final, DecodeResult) else "".join(self._texts)

    @property
    def events(self) -> list[Event]:
        """What else happened to it so far, while the iteration went on.

        When its engine stops, that is `engine_lost`, then `engine_recovered`; the next token follows.
        """
        return list(self._events)

    def _see(self, seen: Part | Result | StateroomError | ClientError) -> TokenEvent | None:
        if isinstance(seen, TokenEvent):
            self._tokens.extend(seen.tokens)
            self._texts.append(seen.text)
        elif isinstance(seen, Event):
            self._events.append(seen)
        self._session.note(seen)
        return super()._see(seen)

    def __repr__(self) -> str:
        final = self._inbox.final if self._inbox is not None else None
        if isinstance(final, DecodeResult):
            how = f"ended by {final.finish!r}"
        else:
            how = "running" if final is None else f"failed: {final}"
        return f"<{type(self).__name__}, {len(self.tokens)} tokens, {how}: {self.text[-60:]!r}>"


# ---------------------------------------------------------------- blocking


class Stream(StreamState[P, R]):
    """An iterator over the parts of one request; also a context manager."""

    _inbox: Inbox

    def __iter__(self) -> Iterator[P]:
        # A generator, so that leaving the loop is noticed though a variable still holds the stream.
        try:
            while (part := self._next()) is not None:
                yield part
        finally:
            self.cancel()

    def __next__(self) -> P:
        """Waits for the next part.

        Raises:
            StopIteration: the stream has ended; `result` is there.
            StateroomError, ClientError: the request failed.
        """
        part = self._next()
        if part is None:
            raise StopIteration
        return part

    def _next(self) -> P | None:
        while not self.ended:
            try:
                part = self._see(self._inbox.take())
            except (StateroomError, ClientError) as error:
                self._see(error)
                raise
            if part is not None:
                return part
        return None

    def wait(self) -> R:
        """Reads to the end, passing over the parts, and gives the result.

        Raises:
            StateroomError, ClientError: the request failed.
        """
        try:
            while self._next() is not None:
                pass
        finally:
            self.cancel()  # nothing, but when interrupted
        return self.result

    def cancel(self) -> None:
        """Asks the daemon to end the request, without waiting: before its next operation a session does."""
        self._inbox.cancel()

    def close(self) -> None:
        """Cancels what still runs, and waits until it has ended."""
        self._inbox.cancel()
        self._see(self._inbox.drain())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._inbox.cancel()


class TokenStream(Transcript, Stream[TokenEvent, DecodeResult]):
    """What `Session.decode` returns: iterate for `TokenEvent`s, then read `result`."""

    def __init__(self, inbox: Inbox, session: SessionState) -> None:
        super().__init__(session)
        self._inbox = inbox


class EventStream(Stream[Event, WatchResult]):
    """What `Room.watch` returns: iterate for `Event`s, until it is closed."""

    _part_type = Event
    _result_type = WatchResult

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox


# ---------------------------------------------------------------- asyncio


class AsyncStream(StreamState[P, R]):
    """As `Stream`, for asyncio. The first `async for`, `async with` or `wait` starts the request.

    Args:
        begin: starts the request.
    """

    _inbox: AsyncInbox | None

    def __init__(self, begin: Callable[[], Awaitable[AsyncInbox]]) -> None:
        self._begin = begin
        self._inbox = None
        self._closed = False

    def __aiter__(self) -> AsyncIterator[P]:
        return _Reader(self)

    async def __anext__(self) -> P:
        """As `Stream.__next__`, with StopAsyncIteration at the end."""
        part = await self._next()
        if part is None:
            raise StopAsyncIteration
        return part

    async def _started(self) -> AsyncInbox:
        if self._inbox is None:
            self._inbox = await self._begin()
        return self._inbox

    async def _next(self) -> P | None:
        if self._inbox is None and self._closed:
            return None
        inbox = await self._started()
        while inbox.final is None:
            try:
                part = self._see(await inbox.take())
            except (StateroomError, ClientError) as error:
                self._see(error)
                raise
            if part is not None:
                return part
        return None

    async def wait(self) -> R:
        """As `Stream.wait`."""
        try:
            while await self._next() is not None:
                pass
        finally:
            self.cancel()
        return self.result

    def cancel(self) -> None:
        """As `Stream.cancel`; not a coroutine."""
        self._closed = True
        if self._inbox is not None:
            self._inbox.cancel()

    async def close(self) -> None:
        """As `Stream.close`."""
        self.cancel()
        if self._inbox is not None:
            self._see(await self._inbox.drain())

    async def __aenter__(self) -> Self:
        await self._started()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        self.cancel()


class _Reader(AsyncIterator[P]):
    """What an `async for` holds: gone when the loop is left, which ends the request."""

    def __init__(self, stream: AsyncStream[P, R]) -> None:
        self._stream = stream

    async def __anext__(self) -> P:
        return await self._stream.__anext__()

    def __del__(self) -> None:
        self._stream.cancel()


class AsyncTokenStream(Transcript, AsyncStream[TokenEvent, DecodeResult]):
    """What `AsyncSession.decode` returns: iterate for `TokenEvent`s, then read `result`."""

    def __init__(self, begin: Callable[[], Awaitable[AsyncInbox]], session: SessionState) -> None:
        Transcript.__init__(self, session)
        AsyncStream.__init__(self, begin)


class AsyncEventStream(AsyncStream[Event, WatchResult]):
    """What `AsyncRoom.watch` returns: iterate for `Event`s, until it is closed."""

    _part_type = Event
    _result_type = WatchResult
