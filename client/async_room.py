"""`AsyncRoom`: as `Room`, with coroutines."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import zip_longest
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from stateroom.client.arguments import children_of, inputs_of
from stateroom.client.carrying import File, Reading, Writing
from stateroom.client.inbox import AsyncInbox
from stateroom.client.protocol import (
    Cancel,
    CancelResult,
    CloseResult,
    ExportResult,
    Forget,
    ForgetResult,
    Fork,
    ForkResult,
    Hello,
    HelloResult,
    ImportResult,
    Info,
    InfoResult,
    List,
    ListResult,
    Load,
    ModelInfo,
    ModelResult,
    Open,
    OpenResult,
    Progress,
    Request,
    RequestInfo,
    Requests,
    RequestsResult,
    Restore,
    Result,
    SessionClass,
    SessionInfo,
    SnapshotInfo,
    Snapshots,
    SnapshotsResult,
    Stats,
    StatsResult,
    Trace,
    TraceResult,
    TrunkInfo,
    Unload,
    Unpublish,
    Verify,
    VerifyResult,
    Watch,
)
from stateroom.client.room import OpenOptions, result_of
from stateroom.client.session import AsyncSession, OnProgress
from stateroom.client.stream import AsyncEventStream

if TYPE_CHECKING:
    from stateroom.client.asynchronous import AsyncSocket

R = TypeVar("R", bound=Result)
# In a class with a method `list`, the word means that.
Infos = list[SessionInfo]
Trunks = list[TrunkInfo]
SnapshotInfos = list[SnapshotInfo]
RequestInfos = list[RequestInfo]
AsyncSessions = list[AsyncSession]


class AsyncRoom:
    """As `Room`, for asyncio, in one event loop: every method but `watch` is a coroutine.

    It connects when it is entered, awaited, or first used.
    """

    def __init__(self, socket: AsyncSocket) -> None:
        self._socket = socket

    @property
    def endpoint(self) -> str:
        return self._socket.endpoint

    @property
    def app(self) -> str:
        return self._socket.app

    @property
    def closed(self) -> bool:
        return self._socket.closed

    @property
    def server(self) -> HelloResult:
        """As `Room.server`; there once it is connected."""
        return self._socket.greeting

    async def open(self, *, timeout_s: float | None = None, **options: Unpack[OpenOptions]) -> AsyncSession:
        """As `Room.open`."""
        request = Open(**inputs_of(options))
        result = await self.call(request, OpenResult, timeout_s=timeout_s)
        session = AsyncSession(self, result.session, options.get("name"), result.length, result.caps)
        session.receipt = result.receipt
        return session

    async def session(self, ref: str) -> AsyncSession:
        """As `Room.session`."""
        info = (await self.call(Info(session=ref), InfoResult)).info
        return AsyncSession(self, info.session, info.name, info.length)

    async def fork(
        self,
        trunk: str,
        n: int | None = None,
        *,
        names: Sequence[str] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncSessions:
        """As `Room.fork`."""
        request = Fork(trunk=trunk, **children_of(n, names))
        result = await self.call(request, ForkResult, timeout_s=timeout_s)
        named = zip_longest(result.sessions, names or ())
        return [AsyncSession(self, id, name, result.length) for id, name in named]

    async def restore(
        self,
        snapshot: str,
        *,
        name: str | None = None,
        session_class: SessionClass = "interactive",
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> AsyncSession:
        """As `Room.restore`."""
        request = Restore(snapshot=snapshot, name=name, session_class=session_class, ttl_s=ttl_s)
        result = await self.call(request, OpenResult, timeout_s=timeout_s)
        session = AsyncSession(self, result.session, name, result.length, result.caps)
        session.receipt = result.receipt
        return session

    async def snapshots(self) -> SnapshotInfos:
        """As `Room.snapshots`."""
        return (await self.call(Snapshots(), SnapshotsResult)).snapshots

    async def forget(self, snapshot: str) -> ForgetResult:
        """As `Room.forget`."""
        return await self.call(Forget(snapshot=snapshot), ForgetResult)

    async def export(
        self,
        snapshot: str,
        to: File,
        *,
        on_progress: OnProgress | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """As `Room.export`; the file is written in a thread."""
        import asyncio  # which programs without a loop don't load

        with Writing(snapshot, to) as writing:
            while (request := writing.next) is not None:
                part = await self.call(request, ExportResult, timeout_s=timeout_s)
                progress = await asyncio.to_thread(writing.take, part)
                if on_progress is not None:
                    on_progress(progress)
            return await asyncio.to_thread(writing.finish)

    async def import_(
        self,
        snapshot: str,
        file: File,
        *,
        model: str | None = None,
        on_progress: OnProgress | None = None,
        timeout_s: float | None = None,
    ) -> SnapshotInfo:
        """As `Room.import_`; the file is read in a thread."""
        import asyncio

        with Reading(snapshot, file, model) as reading:
            while True:
                piece = await asyncio.to_thread(reading.next)
                answer = await self.call(piece, ImportResult, timeout_s=timeout_s)
                progress = reading.sent(piece, answer)
                if on_progress is not None:
                    on_progress(progress)
                if answer.snapshot is not None:
                    return answer.snapshot

    async def verify(self, *, timeout_s: float | None = None) -> VerifyResult:
        """As `Room.verify`."""
        return await self.call(Verify(), VerifyResult, timeout_s=timeout_s)

    async def unpublish(self, name: str) -> CloseResult:
        """As `Room.unpublish`."""
        return await self.call(Unpublish(name=name), CloseResult)

    async def trunks(self, *, everyone: bool = False) -> Trunks:
        """As `Room.trunks`."""
        return (await self.call(List(everyone=everyone), ListResult)).trunks

    async def list(self, *, everyone: bool = False) -> Infos:
        """As `Room.list`."""
        return (await self.call(List(everyone=everyone), ListResult)).sessions

    async def requests(self, session: str | None = None, *, everyone: bool = False) -> RequestInfos:
        """As `Room.requests`."""
        return (await self.call(Requests(session=session, everyone=everyone), RequestsResult)).requests

    async def trace(self, rid: int, *, everyone: bool = False) -> TraceResult:
        """As `Room.trace`."""
        return await self.call(Trace(request=rid, everyone=everyone), TraceResult)

    async def cancel(self, session: str) -> bool:
        """As `Room.cancel`."""
        return (await self.call(Cancel(session=session), CancelResult)).cancelled

    async def hello(self) -> HelloResult:
        """As `Room.hello`."""
        return await self.call(Hello(app=self.app), HelloResult)

    async def stats(self) -> StatsResult:
        """As `Room.stats`."""
        return await self.call(Stats(), StatsResult)

    def watch(
        self, *, sessions: bool = True, stats_every_s: float | None = None, everyone: bool = False
    ) -> AsyncEventStream:
        """As `Room.watch`; it starts when the stream is first waited for."""
        request = Watch(sessions=sessions, stats_every_s=stats_every_s, everyone=everyone)
        return AsyncEventStream(lambda: self.start(request))

    async def load(self, model: str, *, timeout_s: float | None = None) -> ModelInfo:
        """As `Room.load`."""
        return (await self.call(Load(model=model), ModelResult, timeout_s=timeout_s)).model

    async def unload(self, model: str, *, timeout_s: float | None = None) -> ModelInfo:
        """As `Room.unload`."""
        return (await self.call(Unload(model=model), ModelResult, timeout_s=timeout_s)).model

    async def call(
        self,
        request: Request,
        result_type: type[R],
        *,
        timeout_s: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> R:
        """As `Room.call`. When its task is cancelled, so is the request."""
        inbox = await self.start(request, timeout_s=timeout_s)
        try:
            while not isinstance(reply := await inbox.take(), Result):
                if on_progress is not None and isinstance(reply, Progress):
                    on_progress(reply)
        finally:
            inbox.cancel()
        return result_of(reply, result_type)

    async def start(self, request: Request, *, timeout_s: float | None = None) -> AsyncInbox:
        """As `Room.start`; one task takes the replies."""
        return await self._socket.start(request, self._socket.timeouts.wait_for(request.op, timeout_s))

    async def close(self) -> None:
        """As `Room.close`."""
        self._socket.close()

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        await self._socket.link()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<{type(self).__name__} of app {self.app!r} at {self.endpoint}{state}>"
