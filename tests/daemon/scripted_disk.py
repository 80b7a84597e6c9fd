"""The disk of a scripted worker: a real library; of sessions nothing but their tokens is written."""

from __future__ import annotations

import time
from array import array
from pathlib import Path

from stateroom.caches.snapshots import carried
from stateroom.caches.snapshots.content import Material
from stateroom.caches.snapshots.library import Library
from stateroom.caches.snapshots.manifest import About
from stateroom.caches.snapshots.places import library_of
from stateroom.caches.snapshots.refusals import Missing
from stateroom.daemon.engine.kept import kept_of
from stateroom.daemon.link import Kept

FINGERPRINT = {"weights": "scripted"}


class Disk:
    """Of one model. What a call adds or removes is told by the worker, as a real one does."""

    def __init__(self, state: str, model: str) -> None:
        self.model = model
        self.library = Library(library_of(Path(state), model))

    def kept(self) -> list[Kept]:
        return [kept_of(entry) for entry in self.library.entries.values()]

    def write(
        self, tokens: list[int], owner: str, session: str, name: str | None, replaces: str | None
    ) -> tuple[Kept, list[str]]:
        """What there is now, and ids of what went for it."""
        before = set(self.library.entries)
        about = About(owner, self.model, time.time_ns() // 10**6, name, session, automatic=name is None)
        facts = {"length": len(tokens)}
        material = Material(array("I", tokens), {}, facts, (), (), b"")
        made = self.library.write(material, FINGERPRINT, about, replaces)
        return kept_of(self.library.entries[made.id]), sorted(before - set(self.library.entries))

    def take_in(self, path: str, owner: str, name: str) -> Kept:
        about = About(owner, self.model, time.time_ns() // 10**6, name)
        with open(path, "rb") as file:
            return kept_of(self.library.entries[carried.take_in(self.library, file, about).id])

    def read(self, snapshot: str) -> list[int]:
        return self.library.read(snapshot, FINGERPRINT).tokens.tolist()

    def discard(self, snapshots: list[str]) -> None:
        for snapshot in snapshots:
            try:
                self.library.remove(snapshot)
            except Missing:
                continue
