"""structlog, once, for the daemon: lines on stderr, and JSON in a file. Prompts and tokens are not logged."""

from __future__ import annotations

import logging
import secrets
import sys
from typing import Any, TextIO

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from stateroom.daemon.clock import Clock
from stateroom.daemon.log_file import LogFile
from stateroom.daemon.log_file import LogFormat as LogFormat  # for workers, too

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
INCIDENT_BYTES = 6


def make_log(
    log_format: LogFormat, level: str, stream: TextIO | None = None, file: LogFile | None = None
) -> FilteringBoundLogger:
    """A logger that writes to `stream`, by default to stderr; and to a file, always as JSON."""
    stream = stream or sys.stderr
    ending: list[Processor]
    if log_format == "json":
        ending = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        # Strings are quoted: some are a client's own, and may hold what a terminal would obey.
        ending = [
            structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=16, repr_native_str=True)
        ]
    logger: FilteringBoundLogger = structlog.wrap_logger(
        structlog.WriteLogger(stream),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _without_nothing,
            *([] if file is None else [_copied(file)]),
            *ending,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
    )
    return logger


def _copied(file: LogFile) -> Processor:
    render = structlog.processors.JSONRenderer()

    def copy(logger: Any, name: str, entry: structlog.typing.EventDict) -> structlog.typing.EventDict:
        told = structlog.processors.format_exc_info(logger, name, dict(entry))
        file.write_line(str(render(logger, name, told)))
        return entry

    return copy


class Rate:
    """Lets so many entries through in a second, and counts those it keeps back."""

    def __init__(self, clock: Clock, per_s: int) -> None:
        self._clock, self._per_s = clock, per_s
        self._since_s, self._passed, self._kept_back = clock(), 0, 0

    def passes(self) -> tuple[bool, int | None]:
        """Whether the next entry may be written, and how many were not since the last that was."""
        now_s = self._clock()
        if now_s - self._since_s >= 1.0:
            self._since_s, self._passed = now_s, 0
        if self._passed >= self._per_s:
            self._kept_back += 1
            return False, None
        self._passed += 1
        kept_back, self._kept_back = self._kept_back, 0
        return True, kept_back or None


def incident() -> str:
    """A name that an `internal` error and its log entry share."""
    return secrets.token_hex(INCIDENT_BYTES)


def _without_nothing(_: object, __: str, entry: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {key: value for key, value in entry.items() if value is not None}
