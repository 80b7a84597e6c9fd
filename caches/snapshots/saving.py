"""Saving and restoring in one call each, for programs with one thread; the daemon calls the halves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stateroom.caches.session import SessionCache
from stateroom.caches.snapshots.library import Library
from stateroom.caches.snapshots.manifest import About, Manifest
from stateroom.caches.snapshots.materialise import kv_parts, materialise
from stateroom.caches.snapshots.rebuild import rebuild
from stateroom.caches.snapshots.refusals import RunGone
from stateroom.caches.snapshots.trunks import Trunks


@dataclass(frozen=True, slots=True)
class Restored:
    """`cache` holds KV of the first of the `tokens`."""

    cache: SessionCache
    tokens: list[int]
    chat: bytes
    manifest: Manifest


def save(
    library: Library,
    cache: SessionCache,
    tokens: Sequence[int],
    model: Mapping[str, str],
    about: About,
    trunks: Trunks,
    *,
    chat: bytes = b"",
    replaces: str | None = None,
) -> Manifest:
    """A snapshot of a lone session. `model`: its fingerprint. Raises what `Library.write` does."""
    while True:
        material = materialise(cache, tokens, trunks, chat)
        try:
            made = library.write(material, model, about, replaces)
        except RunGone as error:  # at most once for each run: what is forgotten is copied the next time
            trunks.gone(error.digest)
            continue
        trunks.written(material, made)
        return made


def restore(
    library: Library,
    snapshot: str,
    empty: SessionCache,
    model: Mapping[str, str],
    trunks: Trunks,
    samples: Sequence[SessionCache] = (),
) -> Restored:
    """What was saved. `empty`: an unused cache of the model and scheme; it stays as it is.

    `samples`: see `rebuild`.

    Raises `Missing`, `Mismatch`, `Corrupt`.
    """
    alive = trunks.alive(library.manifest(snapshot).runs)
    content = library.read(snapshot, {**model, **kv_parts(empty.blueprint)}, alive)
    cache = rebuild(content, empty, trunks, alive, samples)
    return Restored(cache, content.tokens.tolist(), content.chat, content.manifest)
