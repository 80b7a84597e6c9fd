"""Snapshots of a folder as anybody may read them, also while another process has the library open. No mlx.

A snapshot never changes while it is there. One that is removed meanwhile is `Missing`.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Mapping
from pathlib import Path

from stateroom.caches.snapshots import durable, manifest
from stateroom.caches.snapshots.content import Content
from stateroom.caches.snapshots.manifest import ID, MANIFEST_BYTES_MAX, Manifest, Part, Run
from stateroom.caches.snapshots.refusals import Corrupt, Mismatch, Missing
from stateroom.caches.snapshots.tensors import Buffer, Plain, Told, cut, digest_of, file_bytes, wrong_in

MANIFEST, TOKENS, CHAT, TAIL = "manifest", "tokens", "chat", "tail.safetensors"


class Reader:
    """What may be asked of a library without having it open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def manifest(self, snapshot: str) -> Manifest:
        """What it says of itself. Raises `Missing`, `Corrupt`, `Mismatch` for another format."""
        if ID.fullmatch(snapshot) is None or not self._kept(snapshot).is_dir():
            raise Missing(f"there is no snapshot {snapshot}")
        file = self._kept(snapshot) / MANIFEST
        found = manifest.decode(durable.read(file, MANIFEST_BYTES_MAX), file)
        if found.id != snapshot:
            raise Corrupt(file, f"is that of the snapshot {found.id}")
        return found

    def beginning(self, snapshot: str) -> tuple[Manifest, array[int], bytes]:
        """A snapshot but for its KV: the manifest, all tokens, and what else belongs to the session.

        Raises what `manifest` does.
        """
        found = self.manifest(snapshot)
        tokens, chat = (self._part(*file) for file in self.files(found)[:2])
        return found, array("I", tokens), chat

    def read(self, snapshot: str, expected: Mapping[str, str], held: Container[str] = frozenset()) -> Content:
        """All of it, every byte checked. Any thread, without mlx. Runs of `held` are left out.

        Raises `Missing`; `Mismatch`, naming the part of the fingerprint that isn't as `expected`; `Corrupt`,
        naming the file.
        """
        found = self.manifest(snapshot)
        check_fingerprint(found, expected)
        try:
            return self._content(found, held)
        except Corrupt:
            self.manifest(snapshot)  # `Missing`, when it was removed meanwhile
            raise

    def _content(self, found: Manifest, held: Container[str]) -> Content:
        files = self.files(found)
        tokens, chat = self._part(*files[0]), self._part(*files[1])
        tail = self._tensors(self._kept(found.id) / TAIL, found.tail)
        runs = [
            None if run.digest in held else self._tensors(self._run(run.digest), run.tensors)
            for run in found.runs
        ]
        return Content(found, array("I", tokens), chat, tail, tuple(runs))

    def files(self, of: Manifest) -> list[tuple[Path, Part | tuple[Told, ...]]]:
        """A snapshot's files in the order in which they are carried; each run once."""
        folder = self._kept(of.id)
        own: list[tuple[Path, Part | tuple[Told, ...]]] = [
            (folder / TOKENS, of.tokens),
            (folder / CHAT, of.chat),
            (folder / TAIL, of.tail),
        ]
        return own + [(self._run(digest), run.tensors) for digest, run in by_digest(of).items()]

    def _part(self, file: Path, part: Part | tuple[Told, ...]) -> bytes:
        assert isinstance(part, Part)
        content = durable.read(file, part.nbytes, part.nbytes)
        if wrong := wrong_with(content, part):
            raise Corrupt(file, wrong)
        return content

    def _whole(self, file: Path, tensors: tuple[Told, ...]) -> bytes:
        expected = file_bytes(tensors)
        content = durable.read(file, expected, expected)
        if wrong := wrong_in(content, tensors):
            raise Corrupt(file, wrong)
        return content

    def _tensors(self, file: Path, tensors: tuple[Told, ...]) -> tuple[Plain, ...]:
        parts = cut(self._whole(file, tensors), tensors)
        return tuple(Plain(tensor.name, tensor.dtype, tensor.shape, part) for tensor, part in parts)

    def _kept(self, snapshot: str) -> Path:
        return self.folder / "kept" / snapshot

    def _run(self, digest: str) -> Path:
        return self.folder / "runs" / digest


def check_fingerprint(of: Manifest, expected: Mapping[str, str]) -> None:
    """Raises `Mismatch`, naming the first part that differs."""
    for part in dict.fromkeys([*expected, *of.fingerprint]):
        here, there = expected.get(part, "not told"), of.fingerprint.get(part, "not told")
        if here != there:
            raise Mismatch(part, here, there)


def wrong_with(content: Buffer, part: Part) -> str | None:
    """What of a file isn't as told, in words."""
    if len(content) != part.nbytes:
        return f"has {len(content)} bytes, not {part.nbytes}"
    return None if digest_of(content) == part.digest else "holds other bytes than were written"


def by_digest(of: Manifest) -> dict[str, Run]:
    return {run.digest: run for run in of.runs}
