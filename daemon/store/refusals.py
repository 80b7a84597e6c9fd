"""Why the store can't be opened or written: each names the file and says what to do. Nothing was changed."""

from __future__ import annotations

from pathlib import Path


class StoreRefused(Exception):
    """The daemon must not start over: what is in the file may still be wanted."""

    def __init__(self, file: Path, problem: str, remedy: str) -> None:
        super().__init__(f"{file} {problem}. {remedy}")
        self.file, self.problem, self.remedy = file, problem, remedy


class Corrupt(StoreRefused):
    def __init__(self, file: Path, problem: str) -> None:
        super().__init__(
            file,
            f"is damaged: {problem}",
            f"`sqlite3 {file.name} .recover` may still get sessions out of it. To start without them, move "
            f"{file.name} and {file.name}-wal away; snapshots are files of their own and stay.",
        )


class Newer(StoreRefused):
    def __init__(self, file: Path, version: int, known: int) -> None:
        super().__init__(
            file,
            f"was written by a newer stateroom: its version is {version}, and {known} is known here",
            "Install that stateroom again, or move the file away to start without its sessions.",
        )
        self.version = version


class Foreign(StoreRefused):
    def __init__(self, file: Path) -> None:
        super().__init__(file, "is a database of another program", "Move it away, or choose another --home.")


class Locked(StoreRefused):
    def __init__(self, file: Path) -> None:
        super().__init__(
            file, "is in use by another process", "Stop the other daemon (`stateroom stop`) or program first."
        )


class NotWritten(Exception):
    """What was to be written isn't; the batch is to be put back. `file` names the store."""

    def __init__(self, file: Path, problem: str) -> None:
        super().__init__(f"{file} could not be written: {problem}")
        self.file = file
