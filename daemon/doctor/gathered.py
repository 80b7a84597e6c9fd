"""What a bundle is made of: what a daemon tells, the ends of logs; and the names that it must not have."""

from __future__ import annotations

import getpass
import os
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from stateroom.client import Room, connect
from stateroom.client.errors import BadConfig, BadEndpoint, ClientError, StateroomError
from stateroom.client.paths import home_dir, read_config, runtime_dir
from stateroom.client.protocol import RequestInfo, SessionInfo
from stateroom.client.wire import to_wire
from stateroom.daemon.doctor.places import endpoint
from stateroom.daemon.doctor.running import HELLO_S, not_started
from stateroom.daemon.exits import Leave
from stateroom.daemon.keys import KEYS_NAME, Keys
from stateroom.daemon.log_file import OLDER_FILES, log_path
from stateroom.daemon.settings.known import known
from stateroom.deploy.service import LOG_NAME

LOG_LINES = 2_000  # of the daemon's own log
SERVICE_LINES = 500  # of what a service manager caught
SESSIONS_MAX = 256


@dataclass(frozen=True)
class Running:
    """What a daemon that runs tells; nothing where none answers."""

    version: str = ""
    models: list[dict[str, Any]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    sessions: list[SessionInfo] = field(default_factory=list)
    requests: list[RequestInfo] = field(default_factory=list)
    failure: str | None = None

    def names(self) -> Iterator[str]:
        """All that clients called something, as far as it tells."""
        for session in self.sessions:
            yield from (session.owner, session.session, *session.published)
            yield session.name or ""
        for request in self.requests:
            yield request.owner


def places() -> dict[str, str]:
    """Directories of the user, by what stands for them: the innermost first."""
    user = Path.home()
    known = {str(user): "~"}
    for where, stands in ((home_dir, "<home>"), (runtime_dir, "<run>")):
        with suppress(BadEndpoint):  # a variable names none
            place = where()
            if not place.is_relative_to(user):
                known[str(place)] = stands
    known |= {str(Path(place).resolve()): stands for place, stands in known.items()}
    return dict(sorted(known.items(), key=lambda each: -len(each[0])))


def persons() -> list[str]:
    found = [os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")]
    with suppress(OSError, KeyError, ImportError):
        found.append(getpass.getuser())
    found += [Path.home().name, socket.gethostname(), socket.gethostname().partition(".")[0]]
    return [name for name in found if name not in ("root", "localhost")]


def key_names() -> list[str]:
    try:
        return list(Keys(home_dir() / KEYS_NAME).clients())
    except (OSError, Leave, BadEndpoint):
        return []


def configured_names() -> list[str]:
    """The apps that the configuration file names, though it be wrong; and what it takes for settings."""
    with suppress(BadConfig, BadEndpoint):
        file = read_config()
        values = {} if file is None else file.values
        tables = [value for value in (values.get("weight"), values.get("quota")) if isinstance(value, dict)]
        # One that is nearly a setting is a slip of the pen, and worth telling.
        strange = [name for name in values if name not in known() and not get_close_matches(name, known())]
        return [str(values.get("app", "")), *(app for table in tables for app in table), *strange]
    return []


def ask() -> Running:
    if not_started():
        return Running(failure="not started")
    try:
        with connect(endpoint(), app="doctor", timeout_s=HELLO_S) as room:
            return told_by(room)
    except (ClientError, StateroomError) as error:
        return Running(failure=type(error).__name__)


def told_by(room: Room) -> Running:
    sessions: list[SessionInfo] = []
    requests: list[RequestInfo] = []
    with suppress(StateroomError):  # an older daemon knows neither
        sessions = room.list(everyone=True)[:SESSIONS_MAX]
        requests = room.requests(everyone=True)
    models = [to_wire(model) for model in room.server.models]
    return Running(room.server.version, models, to_wire(room.stats()), sessions, requests)


def log_lines() -> list[str]:
    """Of the daemon's own log, from the file before as well, if need be."""
    found: deque[str] = deque(maxlen=LOG_LINES)
    with suppress(BadEndpoint):
        path = log_path(home_dir())
        older = (path.with_name(f"{path.name}.{number}") for number in range(OLDER_FILES, 0, -1))
        for each in (*older, path):
            found.extend(_end(each, LOG_LINES))
    return list(found)


def _end(path: Path, lines: int) -> list[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=lines)]
    except OSError:
        return []


def service_lines() -> list[str]:
    with suppress(BadEndpoint):
        return _end(home_dir() / "logs" / LOG_NAME, SERVICE_LINES)
    return []
