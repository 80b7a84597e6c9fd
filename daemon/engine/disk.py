"""The snapshots of an engine: sessions that are kept on disk and come back from there.

The engine's thread copies a session's tensors, one in each turn of its loop, and makes arrays of what was
read; another thread (`files.py`) does the files. A session that is needed before it was copied isn't kept
(`InUse`); once it was, it may go on. One that a request has is that request's until the answer.

A session has at most one automatic snapshot (`Session.snapshot`), which goes when the session is closed, when
a newer one is there, or when room on the disk is needed. All that comes or goes is told by `Shelved`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from stateroom.caches.snapshots.content import Material
from stateroom.caches.snapshots.library import Library
from stateroom.caches.snapshots.manifest import About, Manifest, checksum
from stateroom.caches.snapshots.materialise import materialising
from stateroom.caches.snapshots.refusals import Corrupt, Missing, RunGone
from stateroom.caches.snapshots.trunks import Trunks
from stateroom.daemon.engine import shelf
from stateroom.daemon.engine.fetching import Fetching
from stateroom.daemon.engine.files import Files
from stateroom.daemon.engine.kept import kept_of
from stateroom.daemon.engine.session import Session, common_prefix
from stateroom.daemon.link import Journals, Kept, Shelved

if TYPE_CHECKING:
    from stateroom.daemon.engine.engine import Engine

WRITING_MAX = 2  # copies of sessions that wait for the disk; each takes as much memory as its session


class InUse(RuntimeError):
    """The session was needed, or closed, before it was copied."""


@dataclass(slots=True, eq=False)
class Shelving:
    """A request that has its session while that is kept; the memory's books see nothing to come."""

    rid: int
    session: Session
    cancelled: bool = False  # what is kept is kept to the end
    most: int = 0
    drafter: None = None


@dataclass(frozen=True, slots=True)
class Written:
    """What a session has become."""

    kept: Kept
    checksum: str
    manifest: Manifest


Then = Callable[[Kept | Exception], None]
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Keep:
    """One session to be kept. `held`: a request has it, so that nothing else can."""

    session: Session
    then: Callable[[Written | Exception], None]
    name: str | None
    replaces: str | None
    held: bool
    steps: Generator[None, None, Material] | None = None
    stored: int = 0
    tokens: list[int] = field(default_factory=list)


class Disk:
    """Keeps sessions of one engine in a library.

    Args:
        library: open, and nobody else's.
        files: does all that touches it.
        model: gives the model's fingerprint, on the thread of files; it may take its time once.
        wall_ms: milliseconds since 1970.
    """

    def __init__(
        self,
        engine: Engine,
        library: Library,
        files: Files,
        model: Callable[[], Mapping[str, str]],
        wall_ms: Callable[[], int],
    ) -> None:
        self._engine = engine
        self.library = library
        self.files = files
        self.trunks = Trunks()
        self.model = model
        self.fetching = Fetching(engine, self)
        self.wall_ms = wall_ms
        self._keeps: deque[_Keep] = deque()  # the first is being copied
        self._writing = 0  # copies that wait for the disk
        self._asked = 0  # all that the thread was asked and hasn't answered
        self.shelvings: dict[int, Shelving] = {}  # requests that wait until their session is kept
        self._owners: dict[str, Session] = {}  # by the automatic snapshot of each

    @property
    def waiting(self) -> int:
        """Requests that wait for the disk."""
        return len(self.shelvings) + self.fetching.waiting

    @property
    def busy(self) -> bool:
        """Something is under way."""
        return bool(self._keeps or self._asked)

    @property
    def queued(self) -> int:
        """Sessions that are to be copied."""
        return len(self._keeps)

    @property
    def pressing(self) -> bool:
        """The next turn has something to do that needs no waiting."""
        copies = bool(self._keeps) and self._writing < WRITING_MAX
        return copies or self.files.ready or self.fetching.pressing

    def turn(self) -> None:
        """Once a turn of the loop: takes one thing that is done, and copies one tensor."""
        self.files.turn()
        self.fetching.turn()
        if self._keeps and self._writing < WRITING_MAX:
            self._copy(self._keeps[0])

    def ask(self, do: Callable[[], T], then: Callable[[T | Exception], None]) -> None:
        """`do` on the thread of files, then `then` here."""

        def taken(outcome: T | Exception) -> None:
            self._asked -= 1
            then(outcome)

        self._asked += 1
        self.files.ask(do, taken)

    def change(self, do: Callable[[], T], then: Callable[[T | Exception], None]) -> None:
        """The same for what changes the library; what came and went, even in failing, is told before."""

        def changed() -> tuple[T | Exception, list[Kept], list[str]]:
            before = set(self.library.entries)
            try:
                outcome: T | Exception = do()
            except Exception as error:
                outcome = error
            now = self.library.entries
            return outcome, [kept_of(now[each]) for each in now.keys() - before], sorted(before - now.keys())

        def told(changes: tuple[T | Exception, list[Kept], list[str]] | Exception) -> None:
            if isinstance(changes, Exception):
                then(changes)
                return
            outcome, kept, gone = changes
            if kept or gone:
                self._told(kept, gone)
            then(outcome)

        self.ask(changed, told)

    # ------------------------------------------------------------ keeping

    def keep(self, session: Session, then: Then) -> None:
        """Keeps what a session holds now, and calls `then` on this thread once that is on disk.

        At once when it is already. The caller tells the broker of the session. `then` is given an exception
        when it can't be kept: `InUse` when the session was needed meanwhile, `Capacity` for a full disk.
        """
        there = self.covering(session)
        if there is not None:
            then(there)
            return

        def written(outcome: Written | Exception) -> None:
            then(outcome if isinstance(outcome, Exception) else outcome.kept)

        self._keeps.append(_Keep(session, written, None, session.snapshot, held=False))

    def keep_held(
        self,
        session: Session,
        then: Callable[[Written | Exception], None],
        name: str | None = None,
        replaces: str | None = None,
    ) -> None:
        """The same of a session that a request has. With a `name` it is one that its owner asked for."""
        old = session.snapshot if name is None else replaces
        self._keeps.append(_Keep(session, then, name, old, held=True))

    def covering(self, session: Session) -> Kept | None:
        """The automatic snapshot of a session, if the session holds no more KV than that.

        One with tokens that were trimmed since is written anew: what was taken back isn't to stay on disk.
        """
        entry = self.library.entries.get(session.snapshot or "")
        if entry is None or not session.snapshot_sure or session.snapshot_length < entry.length:
            return None
        return kept_of(entry) if entry.stored >= session.stored else None

    def let_go(self, session: Session) -> None:
        """The session is needed: if it is being kept of the engine's own accord, it isn't any more."""
        for keep in [each for each in self._keeps if each.session is session and not each.held]:
            self._keeps.remove(keep)
            self._end(keep, InUse("the session was needed before it was copied"))

    def _copy(self, keep: _Keep) -> None:
        try:
            if keep.steps is None:
                self._begin(keep)
            assert keep.steps is not None
            next(keep.steps)
        except StopIteration as done:
            self._keeps.popleft()
            keep.steps = None
            self._write(keep, done.value)
        except Exception as error:
            self._keeps.popleft()
            keep.steps = None
            self._end(keep, error)

    def _begin(self, keep: _Keep) -> None:
        session = keep.session
        if self._engine.sessions.get(session.id) is not session:
            raise InUse("the session is no more")
        if not keep.held and session in {request.session for request in self._engine.requests.values()}:
            raise InUse("the session is in use")
        cache = session.cache if session.cache is not None else session.served.empty()
        keep.stored, keep.tokens = session.stored, list(session.tokens)
        keep.steps = materialising(cache, keep.tokens, self.trunks, shelf.packed(session))

    def _write(self, keep: _Keep, material: Material) -> None:
        session = keep.session
        automatic = keep.name is None
        about = About(session.owner, self._engine.loaded.id, self.wall_ms(), keep.name, session.id, automatic)

        def write() -> Written:
            made = self.library.write(material, self.model(), about, keep.replaces)
            return Written(kept_of(self.library.entries[made.id]), checksum(made), made)

        def then(outcome: Written | Exception) -> None:
            self._writing -= 1
            if isinstance(outcome, RunGone):  # at most once for each run: what is forgotten is copied now
                self.trunks.gone(outcome.digest)
                self._keeps.append(keep)
                return
            if isinstance(outcome, Written):
                self.trunks.written(material, outcome.manifest)
                if automatic:
                    self._has(session, outcome.kept.id, keep)
            self._end(keep, outcome)

        self._writing += 1
        self.change(write, then)

    def _has(self, session: Session, snapshot: str, keep: _Keep) -> None:
        """The session's own is on disk; it may have gone on, or be no more."""
        if self._engine.sessions.get(session.id) is not session:
            self.discard([snapshot])
            return
        if session.snapshot not in (None, keep.replaces):  # written since this one was asked for
            self.drop(session)
        session.snapshot, session.snapshot_sure = snapshot, True
        session.snapshot_stored = keep.stored
        session.snapshot_length = common_prefix(keep.tokens, session.tokens)
        self._owners[snapshot] = session

    @staticmethod
    def _end(keep: _Keep, outcome: Written | Exception) -> None:
        keep.then(shelf.refusal(outcome) if isinstance(outcome, Exception) else outcome)

    # ------------------------------------------------------------ going

    def discard(self, snapshots: Iterable[str]) -> None:
        """Removes them; those that are gone afterwards are told, whether they were there or not."""
        wanted = list(snapshots)

        def remove() -> list[str]:
            for snapshot in wanted:
                try:
                    self.library.remove(snapshot)
                except Missing:
                    continue
            return wanted

        def then(outcome: list[str] | Exception) -> None:
            if isinstance(outcome, Exception):
                self._engine.report(outcome)
                there = self.library.entries.keys() | self.library.broken.keys()
                outcome = [snapshot for snapshot in wanted if snapshot not in there]
            self._told([], outcome)

        self.ask(remove, then)

    def closed(self, session: Session) -> None:
        """A session is no more: its own snapshot goes with it."""
        self.let_go(session)
        self.drop(session)

    def drop(self, session: Session) -> None:
        """A session's own snapshot is of no use any more."""
        if session.snapshot is not None:
            self._owners.pop(session.snapshot, None)
            self.discard([session.snapshot])
            session.snapshot = None

    def doubt(self, error: Corrupt) -> None:
        """A file isn't what was written; a run that others name, too, is written anew with the next one."""
        file = Path(error.file)
        if file.parent.name == "runs":
            self.trunks.gone(file.name)
            self.library.doubt(file.name)

    def adopted(self, session: Session, snapshot: str | None) -> None:
        """A session comes with the snapshot that it had; of its tokens that may have some, and others."""
        session.snapshot_told = snapshot
        entry = self.library.entries.get(snapshot or "")
        if entry is None:
            return
        session.snapshot, session.snapshot_sure = entry.id, False
        session.snapshot_stored = entry.stored
        session.snapshot_length = min(entry.length, session.length)
        self._owners[entry.id] = session

    def _told(self, kept: list[Kept], gone: list[str]) -> None:
        """Tells what came and went, and the sessions that have none any more."""
        self._engine.emit(Shelved(kept, gone))
        renewed = {each.session for each in kept if each.name is None}
        poorer: list[Session] = []
        for snapshot in gone:
            session = self._owners.pop(snapshot, None)
            if session is not None and session.snapshot == snapshot:
                session.snapshot = None
                if session.id not in renewed:
                    poorer.append(session)
        self.tell(poorer)

    def tell(self, sessions: Iterable[Session]) -> None:
        """Tells the broker of sessions that nobody asks for now; one with a request tells with its answer."""
        running = {request.session for request in self._engine.requests.values()}
        news = [each for each in sessions if each not in running]
        if news:
            self._engine.emit(Journals([self._engine.journal(each, each.length) for each in news]))
