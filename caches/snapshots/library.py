"""Snapshots in a folder that one process at a time has open: written, listed, read, removed. No mlx.

    lock            held while the library is open
    kept/<id>/      one snapshot: manifest, tokens, chat, tail.safetensors
    runs/<digest>   tokens that sessions share, safetensors by content; there as long as a manifest names them
    new/            what is being written or removed; emptied when the library is opened

A snapshot is there when its folder is in `kept`, and is never changed there. Ids are ours; what people call a
snapshot is in its manifest alone. One thread changes a library; any thread may read from it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stateroom.caches.snapshots import durable, manifest
from stateroom.caches.snapshots.content import Material
from stateroom.caches.snapshots.limits import Held, Limits, plan, used_bytes
from stateroom.caches.snapshots.manifest import DIGEST, ID, About, Manifest, Part, Run
from stateroom.caches.snapshots.reading import CHAT, MANIFEST, TAIL, TOKENS, Reader, by_digest
from stateroom.caches.snapshots.refusals import Corrupt, Mismatch, Missing, NoRoom, RunGone
from stateroom.caches.snapshots.tensors import (
    Buffer,
    Plain,
    Told,
    digest_of,
    header,
    told,
)

ID_BYTES = 16

Files = Mapping[str, Iterable[Buffer]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One snapshot of the list: `length` tokens, of which `stored` have KV.

    `own_bytes`: its folder's; `runs`: bytes of each run that it shares.
    """

    id: str
    about: About
    fingerprint: Mapping[str, str]
    length: int
    stored: int
    own_bytes: int
    runs: Mapping[str, int]
    replaces: str | None

    @property
    def nbytes(self) -> int:
        return self.own_bytes + sum(self.runs.values())


class Library(Reader):
    """The snapshots of one folder."""

    def __init__(
        self,
        folder: Path,
        limits: Limits | None = None,
        free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    ) -> None:
        """Opens it, made if need be, and clears away what a killed process left half-done.

        Raises `InUse` when another process has it open.
        """
        super().__init__(folder)
        self.limits = limits or Limits()
        self._free_bytes = free_bytes
        self.entries: dict[str, Entry] = {}
        self.broken: dict[str, Corrupt | Mismatch] = {}  # snapshots that can't be read, and why
        self._seen_good: set[str] = set()  # runs whose bytes were checked or written by this process
        for part in ("kept", "runs", "new"):
            durable.make_folder(folder / part)
        self._lock = durable.lock(folder / "lock")
        try:
            self._clear()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets others open it; nothing may be asked of it afterwards."""
        os.close(self._lock)

    @property
    def used_bytes(self) -> int:
        """What all snapshots take; a shared run counts once."""
        return used_bytes(self._held())

    # ------------------------------------------------------------ writing

    def write(
        self,
        material: Material,
        fingerprint: Mapping[str, str],
        about: About,
        replaces: str | None = None,
    ) -> Manifest:
        """One more snapshot; until it is there completely, `replaces` stays. Any thread, without mlx.

        Raises `NoRoom`; `RunGone` when a run that `material` only names isn't on disk any more; OSError when
        the disk is full or fails. Nothing of the new one is left behind then.
        """
        runs = [Run(run.store, run.start, run.length, run.told or told(run.tensors)) for run in material.runs]
        tokens = material.tokens.tobytes()
        made = Manifest(
            id=secrets.token_hex(ID_BYTES),
            about=about,
            fingerprint={**fingerprint, **material.fingerprint},
            facts=material.facts,
            tokens=Part(len(tokens), digest_of(tokens)),
            chat=Part(len(material.chat), digest_of(material.chat)),
            tail=told(material.tail),
            runs=tuple(runs),
            replaces=replaces,
        )
        own: Files = {TOKENS: [tokens], CHAT: [material.chat], TAIL: _file(made.tail, material.tail)}
        shared = {
            run.digest: None if plain.told is not None else _file(run.tensors, plain.tensors)
            for run, plain in zip(runs, material.runs, strict=True)
        }
        self.add(made, own, shared)
        return made

    def add(self, made: Manifest, own: Files, shared: Mapping[str, Iterable[Buffer] | None]) -> None:
        """A snapshot whose files are at hand; those of `shared` that are None must be on disk."""
        content = manifest.encode(made)
        for digest, parts in shared.items():
            if parts is None and not self._run_is_there(digest):
                raise RunGone(digest)
        self._make_room(made, len(content))
        staged = self.folder / "new" / made.id
        try:
            for digest, parts in shared.items():
                if parts is not None and not self._run_is_good(made, digest):
                    written = self.folder / "new" / digest
                    durable.write(written, parts)
                    durable.move(written, self._run(digest))
                self._seen_good.add(digest)
            staged.mkdir(durable.FOLDER_MODE)
            for name, written_parts in own.items():
                durable.write(staged / name, written_parts)
            durable.write(staged / MANIFEST, [content])
            durable.sync_folder(staged)
            durable.move(staged, self._kept(made.id))
        except BaseException:
            if self._kept(made.id).exists():  # it has its name, and nobody can say for how long
                self._kept(made.id).rename(staged)
            for left in (staged, *(self.folder / "new" / digest for digest in shared)):
                durable.remove(left)
            self._drop_runs(made.run_bytes)
            raise
        self._hold(made, len(content))
        if made.replaces in self.entries or made.replaces in self.broken:
            self.remove(made.replaces)

    def remove(self, snapshot: str) -> None:
        """Takes it away, with the runs that no other names. Raises `Missing`."""
        if snapshot not in self.entries and snapshot not in self.broken:
            raise Missing(f"there is no snapshot {snapshot}")
        gone = self.folder / "new" / snapshot
        durable.move(self._kept(snapshot), gone)
        entry = self.entries.pop(snapshot, None)
        self.broken.pop(snapshot, None)
        durable.remove(gone)
        if entry is None:
            self._drop_orphans()
        else:
            self._drop_runs(entry.runs)

    def doubt(self, run: str) -> None:
        """A run was found to be bad: it is looked at, and written anew, before another snapshot names it."""
        self._seen_good.discard(run)

    # ------------------------------------------------------------ inside

    def _run_is_there(self, digest: str) -> bool:
        return digest in self._seen_good and self._run(digest).is_file()

    def _run_is_good(self, of: Manifest, digest: str) -> bool:
        """It needn't be written again; one that went bad on the disk is, and heals those who name it."""
        if self._run_is_there(digest):
            return True
        try:
            self._whole(self._run(digest), by_digest(of)[digest].tensors)
        except Corrupt:
            return False
        return True

    def _hold(self, of: Manifest, manifest_bytes: int) -> None:
        own = of.own_bytes + manifest_bytes
        self.entries[of.id] = Entry(
            of.id, of.about, of.fingerprint, of.length, of.stored, own, of.run_bytes, of.replaces
        )

    def _held(self) -> list[Held]:
        return [
            Held(each.id, each.own_bytes, each.runs, each.about.automatic, each.about.created_ms)
            for each in self.entries.values()
        ]

    def _make_room(self, made: Manifest, manifest_bytes: int) -> None:
        there = {run for each in self.entries.values() for run in each.runs}
        runs = made.run_bytes
        needed = made.own_bytes + manifest_bytes + sum(size for run, size in runs.items() if run not in there)
        free = self._free_bytes(self.folder)
        room = plan(self._held(), self.limits, needed, free, made.replaces, frozenset(runs))
        if not room.fits:
            raise NoRoom(needed, room.short_bytes, self.limits.count_max if room.too_many else None)
        for snapshot in room.remove:
            gone = self.entries[snapshot].runs
            self.entries[snapshot] = replace(
                self.entries[snapshot], runs={run: size for run, size in gone.items() if run not in runs}
            )
            self.remove(snapshot)

    def _drop_runs(self, runs: Iterable[str]) -> None:
        """Those that no manifest names; while some manifest can't be read, it may name any of them."""
        if self.broken:
            return
        named = {run for each in self.entries.values() for run in each.runs}
        for run in set(runs) - named:
            durable.remove(self._run(run))
            self._seen_good.discard(run)

    def _drop_orphans(self) -> None:
        names = [path.name for path in (self.folder / "runs").iterdir()]
        self._drop_runs(name for name in names if DIGEST.fullmatch(name))

    def _clear(self) -> None:
        for left in (self.folder / "new").iterdir():
            durable.remove(left)
        for path in sorted((self.folder / "kept").iterdir()):
            if ID.fullmatch(path.name):
                try:
                    size = (path / MANIFEST).stat().st_size if (path / MANIFEST).exists() else 0
                    self._hold(self.manifest(path.name), size)
                except (Corrupt, Mismatch) as error:
                    self.broken[path.name] = error
        for entry in list(self.entries.values()):
            if entry.replaces in self.entries or entry.replaces in self.broken:
                self.remove(entry.replaces)
        self._drop_orphans()


def _file(as_told: tuple[Told, ...], tensors: tuple[Plain, ...]) -> list[Buffer]:
    return [header(as_told), *(tensor.content for tensor in tensors)]
