"""What snapshots on disk refuse, by type. Whatever is raised, nothing was changed."""

from __future__ import annotations

from pathlib import Path

from stateroom.caches import errors


class Mismatch(errors.Mismatch):
    """A snapshot of something else: `part` is `there` in it, and `here` is what was expected."""

    def __init__(self, part: str, here: str, there: str) -> None:
        super().__init__(f"the snapshot's {part} is {there}; here it is {here}")
        self.part, self.here, self.there = part, here, there


class Corrupt(ValueError):
    """A file isn't what was written. `file`: which."""

    def __init__(self, file: Path | str, why: str) -> None:
        super().__init__(f"{file} {why}")
        self.file, self.why = str(file), why


class Missing(LookupError):
    """No such snapshot."""


class RunGone(LookupError):
    """A shared run that was on disk when the session was materialised has been removed: do that again."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"the run {digest} is no longer on disk")
        self.digest = digest


class NoRoom(ValueError):
    """The limits leave no room, even without all automatic snapshots; none of them was removed."""

    def __init__(self, needed_bytes: int, short_bytes: int, count_max: int | None) -> None:
        many = f"there can be {count_max} snapshots" if count_max is not None else ""
        few = f"{needed_bytes} bytes are needed, {short_bytes} too many" if short_bytes else ""
        super().__init__("; ".join(word for word in (few, many) if word))
        self.needed_bytes, self.short_bytes, self.count_max = needed_bytes, short_bytes, count_max


class InUse(RuntimeError):
    """Another process has the library open."""
