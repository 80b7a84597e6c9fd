"""Rooms: the connection of an app to its daemon. `async_room.py` has the same with coroutines."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import zip_longest
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

from stateroom.client.arguments import Inputs, children_of, inputs_of
from stateroom.client.carrying import File, Reading, Writing
from stateroom.client.inbox import Inbox
from stateroom.client.protocol import (
    KV,
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
from stateroom.client.session import OnProgress, Session
from stateroom.client.stream import EventStream

if TYPE_CHECKING:
    from stateroom.client.blocking import SocketThread

R = TypeVar("R", bound=Result)
# In a class with a method `list`, the word means that.
Infos = list[SessionInfo]
Trunks = list[TrunkInfo]
SnapshotInfos = list[SnapshotInfo]
RequestInfos = list[RequestInfo]
Sessions = list[Session]


class OpenOptions(Inputs, total=False):
    """The keyword arguments of `open`."""

    model: str | None  # id or path; the daemon's first model unless given
    name: str | None  # unique within the app: letters, digits, `.`, `_`, `-`
    kv: KV | None
    session_class: SessionClass  # "interactive" or "background"
    ttl_s: float | None  # closed after so long without use; None: never


class Room:
    """An app's connection to the daemon; any number of threads may use it at once.

    Leaving its `with` closes the connection. Sessions stay in the daemon; get at one again with `session`.
    If the daemon goes away, open requests fail with `Disconnected`, and the next request connects anew.
    A Room can't be used in a forked child: connect again there.

    Any method may raise a `StateroomError`, the daemon's answer, or a `ClientError`, when there was none.
    """

    def __init__(self, thread: SocketThread) -> None:
        self._thread = thread
        self._finalizer = weakref.finalize(self, thread.stop)
        self._finalizer.atexit = False  # the thread sees to that itself

    @property
    def endpoint(self) -> str:
        return self._thread.endpoint

    @property
    def app(self) -> str:
        return self._thread.app

    @property
    def closed(self) -> bool:
        return self._thread.closed

    @property
    def server(self) -> HelloResult:
        """What the daemon said of itself when this Room (last) connected: version, models, limits."""
        return self._thread.greeting

    def open(self, *, timeout_s: float | None = None, **options: Unpack[OpenOptions]) -> Session:
        """Opens a session, and prefills it with `text`, `tokens` or `messages` where given.

        Other options: `model`, `name`, `kv`, `session_class`, `ttl_s`; see `OpenOptions`.
        """
        result = self.call(Open(**inputs_of(options)), OpenResult, timeout_s=timeout_s)
        session = Session(self, result.session, options.get("name"), result.length, result.caps)
        session.receipt = result.receipt
        return session

    def session(self, ref: str) -> Session:
        """A handle on a session that exists, by its name or id.

        Raises:
            NotFound: this app has no such session.
        """
        info = self.call(Info(session=ref), InfoResult).info
        return Session(self, info.session, info.name, info.length)

    def fork(
        self,
        trunk: str,
        n: int | None = None,
        *,
        names: Sequence[str] | None = None,
        timeout_s: float | None = None,
    ) -> Sessions:
        """Sessions of this app that begin with what was published, maybe by another app.

        `trunk`: what `Session.publish` gave there, or the name of one of this app's own.

        Raises:
            NotFound: there is no such trunk, or no longer.
        """
        result = self.call(Fork(trunk=trunk, **children_of(n, names)), ForkResult, timeout_s=timeout_s)
        named = zip_longest(result.sessions, names or ())
        return [Session(self, id, name, result.length) for id, name in named]

    def restore(
        self,
        snapshot: str,
        *,
        name: str | None = None,
        session_class: SessionClass = "interactive",
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Session:
        """A new session with what a snapshot of this app's holds; the arguments are as for `open`.

        Raises:
            NotFound: this app has no such snapshot.
            Mismatch: it is of another model, tokenizer or KV scheme; `details` has `part`, `here`, `there`.
            Corrupt: a byte of it isn't as it was written.
        """
        request = Restore(snapshot=snapshot, name=name, session_class=session_class, ttl_s=ttl_s)
        result = self.call(request, OpenResult, timeout_s=timeout_s)
        session = Session(self, result.session, name, result.length, result.caps)
        session.receipt = result.receipt
        return session

    def snapshots(self) -> SnapshotInfos:
        """What this app has saved or imported."""
        return self.call(Snapshots(), SnapshotsResult).snapshots

    def forget(self, snapshot: str) -> ForgetResult:
        """Deletes a snapshot. Sessions that came from it stay."""
        return self.call(Forget(snapshot=snapshot), ForgetResult)

    def export(
        self,
        snapshot: str,
        to: File,
        *,
        on_progress: OnProgress | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Writes a snapshot as one file, which another daemon can `import_`; gives its bytes.

        `to`: a path, where it appears once it is complete, in place of what is there; or an open file.
        `on_progress` is called in this thread, with bytes. `timeout_s` is for each piece.
        """
        with Writing(snapshot, to) as writing:
            while (request := writing.next) is not None:
                progress = writing.take(self.call(request, ExportResult, timeout_s=timeout_s))
                if on_progress is not None:
                    on_progress(progress)
            return writing.finish()

    def import_(
        self,
        snapshot: str,
        file: File,
        *,
        model: str | None = None,
        on_progress: OnProgress | None = None,
        timeout_s: float | None = None,
    ) -> SnapshotInfo:
        """Takes in what `export` wrote, as a snapshot of this app's under a name that is free.

        It is checked from its first byte to its last. A checksum is no signature: take files from those you
        trust. `file`: a path, or an open file. `on_progress` and `timeout_s` are as for `export`.

        Raises:
            Exists: the name is taken.
            Corrupt, Mismatch: it isn't what was written, or of another format.
        """
        with Reading(snapshot, file, model) as reading:
            while True:
                piece = reading.next()
                answer = self.call(piece, ImportResult, timeout_s=timeout_s)
                progress = reading.sent(piece, answer)
                if on_progress is not None:
                    on_progress(progress)
                if answer.snapshot is not None:
                    return answer.snapshot

    def verify(self, *, timeout_s: float | None = None) -> VerifyResult:
        """As `Session.verify`, of an idle session that the daemon picks, whosever it is.

        Raises:
            NotFound: none is idle and has its KV.
        """
        return self.call(Verify(), VerifyResult, timeout_s=timeout_s)

    def unpublish(self, name: str) -> CloseResult:
        """Takes back what this app published under that name. What was forked from it stays."""
        return self.call(Unpublish(name=name), CloseResult)

    def trunks(self, *, everyone: bool = False) -> Trunks:
        """What this app has published; with `everyone`, what all apps have that this one may see."""
        return self.call(List(everyone=everyone), ListResult).trunks

    def list(self, *, everyone: bool = False) -> Infos:
        """This app's sessions; with `everyone`, those of all apps that this one may see.

        Over the daemon's local socket that is every app; with a key, those that came with the same.
        """
        return self.call(List(everyone=everyone), ListResult).sessions

    def requests(self, session: str | None = None, *, everyone: bool = False) -> RequestInfos:
        """This app's requests, or of a session those: what they do or wait for, and the last that ended.

        `everyone` is as for `list`.

        Raises:
            NotFound: this app has, or may see, no such session.
        """
        return self.call(Requests(session=session, everyone=everyone), RequestsResult).requests

    def trace(self, rid: int, *, everyone: bool = False) -> TraceResult:
        """What happened to one of this app's requests, by the daemon's number of it: `RequestInfo.rid`.

        `everyone` is as for `list`.

        Raises:
            NotFound: the daemon remembers no such request, or this app may not see it.
        """
        return self.call(Trace(request=rid, everyone=everyone), TraceResult)

    def cancel(self, session: str) -> bool:
        """Ends the request that runs on a session, by its name or id; False if none did."""
        return self.call(Cancel(session=session), CancelResult).cancelled

    def hello(self) -> HelloResult:
        """Asks the daemon what it is and which models it has."""
        return self.call(Hello(app=self.app), HelloResult)

    def stats(self) -> StatsResult:
        """The daemon's counters and gauges."""
        return self.call(Stats(), StatsResult)

    def watch(
        self, *, sessions: bool = True, stats_every_s: float | None = None, everyone: bool = False
    ) -> EventStream:
        """What happens in the daemon, as it happens, until the stream is closed.

        `everyone`: to sessions of other owners, too, as far as they may be seen.
        """
        return EventStream(
            self.start(Watch(sessions=sessions, stats_every_s=stats_every_s, everyone=everyone))
        )

    def load(self, model: str, *, timeout_s: float | None = None) -> ModelInfo:
        """Loads a model; returns when it is there."""
        return self.call(Load(model=model), ModelResult, timeout_s=timeout_s).model

    def unload(self, model: str, *, timeout_s: float | None = None) -> ModelInfo:
        """Frees a model's memory."""
        return self.call(Unload(model=model), ModelResult, timeout_s=timeout_s).model

    def call(
        self,
        request: Request,
        result_type: type[R],
        *,
        timeout_s: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> R:
        """Sends any request of `stateroom.client.protocol` and waits for its result.

        `on_progress` is called in this thread with each `progress` before it.
        """
        inbox = self.start(request, timeout_s=timeout_s)
        try:
            while not isinstance(reply := inbox.take(), Result):
                if on_progress is not None and isinstance(reply, Progress):
                    on_progress(reply)
        finally:
            inbox.cancel()  # if it hasn't ended: interrupted, or `on_progress` raised
        return result_of(reply, result_type)

    def start(self, request: Request, *, timeout_s: float | None = None) -> Inbox:
        """Sends any request; its replies come into the inbox, and one thread takes them from there."""
        return self._thread.start(request, self._thread.timeouts.wait_for(request.op, timeout_s))

    def close(self) -> None:
        """Closes the connection; what still runs on it fails with `Disconnected`."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<{type(self).__name__} of app {self.app!r} at {self.endpoint}{state}>"


def result_of(result: Result, result_type: type[R]) -> R:
    """The result, which the wire has typed by the request's operation.

    Raises:
        TypeError: the caller expected another.
    """
    if not isinstance(result, result_type):
        raise TypeError(f"This request's result is a {type(result).__name__}, not a {result_type.__name__}.")
    return result
