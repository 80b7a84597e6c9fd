"""The daemon's own log on disk: JSON lines, in files that take turns, so that it never fills the disk.

Ours, and not what a service manager's redirection gives: launchd holds that file open, and goes on writing to
it under whatever name it has by then.
"""

from __future__ import annotations

import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal

LogFormat = Literal["json", "console"]  # on stderr; here, without structlog, for what only names it
LOG_NAME = "stateroom.log"
FILE_BYTES_MAX = 10 * 2**20
OLDER_FILES = 4  # beside the one that is written: stateroom.log.1 is the youngest of them
FOLDER_MODE = 0o700


def log_path(home: Path) -> Path:
    return home / "logs" / LOG_NAME


class LogFile:
    """Takes lines. One that can't be written (the disk is full) is dropped and counted: the daemon goes on.

    Raises OSError, when made, where there can be no such file.
    """

    def __init__(self, path: Path, file_bytes: int = FILE_BYTES_MAX, older: int = OLDER_FILES) -> None:
        path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        self.dropped = 0
        self._handler = _Handler(self, path, file_bytes, older)

    def write_line(self, line: str) -> None:
        self._handler.emit(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        try:
            self._handler.close()
        except OSError:  # the end of the last line had no room
            self.dropped += 1


class _Handler(RotatingFileHandler):
    def __init__(self, of: LogFile, path: Path, file_bytes: int, older: int) -> None:
        super().__init__(path, maxBytes=file_bytes, backupCount=older, encoding="utf-8", errors="replace")
        self._of = of

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (the library's name)
        self._of.dropped += 1
