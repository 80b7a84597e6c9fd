"""Where the daemon and its clients meet: endpoint, runtime directory, home.

Reads the environment and touches no disk. `$STATEROOM_ENDPOINT` overrides the endpoint on both sides;
otherwise it is the socket `stateroom.sock` in the runtime directory: `$STATEROOM_RUNTIME_DIR`, else
`$XDG_RUNTIME_DIR/stateroom`, else `~/.stateroom/run`. What outlives a boot (models, catalog, logs) is
below the home: `$STATEROOM_HOME`, else `~/.stateroom`. An empty variable counts as unset.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from stateroom.client.errors import BadEndpoint

# The kernel's `sun_path` less its closing zero. Counted in bytes: a path of few characters may have many.
IPC_PATH_BYTES_MAX = 103 if sys.platform == "darwin" else 107
SOCKET_NAME = "stateroom.sock"
_IPC = "ipc://"
_SCHEMES = (_IPC, "tcp://", "inproc://")


def home_dir() -> Path:
    """Where models, the catalog and logs are kept.

    Raises:
        BadEndpoint: `$STATEROOM_HOME` isn't absolute.
    """
    return _from_environment("STATEROOM_HOME") or Path("~/.stateroom").expanduser()


def runtime_dir() -> Path:
    """Where the socket and the lock file are; the daemon makes it, with mode 0700.

    Raises:
        BadEndpoint: the variable that names it isn't absolute.
    """
    own = _from_environment("STATEROOM_RUNTIME_DIR")
    if own is not None:
        return own
    session = _from_environment("XDG_RUNTIME_DIR")
    return session / "stateroom" if session is not None else Path("~/.stateroom/run").expanduser()


def default_endpoint() -> str:
    """The endpoint of a daemon started without further words, as both sides compute it (checked).

    Raises:
        BadEndpoint: see `check_endpoint`.
    """
    endpoint = os.environ.get("STATEROOM_ENDPOINT") or f"{_IPC}{runtime_dir() / SOCKET_NAME}"
    check_endpoint(endpoint)
    return endpoint


def ipc_path(endpoint: str) -> Path | None:
    """The socket file of an `ipc://` endpoint; None for another kind, or Linux's abstract names (`ipc://@…`)."""
    path = endpoint.removeprefix(_IPC)
    return None if path == endpoint or path.startswith("@") else Path(path)


def check_endpoint(endpoint: str) -> None:
    """Refuses what ZeroMQ would refuse later and less clearly.

    Raises:
        BadEndpoint: no `ipc://` or `tcp://` endpoint, or an ipc path that the kernel has no room for; the
            message names the path, its length in bytes, the limit and the way out.
    """
    if not endpoint.startswith(_SCHEMES):
        raise BadEndpoint(f"{endpoint!r} is no endpoint; it would look like ipc:///run/stateroom.sock.")
    if not endpoint.startswith(_IPC):
        return
    path = endpoint.removeprefix(_IPC)
    size = len(os.fsencode(path))
    if size == 0:
        raise BadEndpoint("The endpoint ipc:// lacks the path of its socket.")
    if size > IPC_PATH_BYTES_MAX:
        raise BadEndpoint(
            f"The socket path {path} has {size} bytes, and this system takes {IPC_PATH_BYTES_MAX} at most. "
            f"Set STATEROOM_RUNTIME_DIR to a shorter directory (say, /tmp/stateroom-{os.getuid()}), or "
            "STATEROOM_ENDPOINT to an ipc:// endpoint with a shorter path, for the daemon and its clients."
        )


def _from_environment(variable: str) -> Path | None:
    # A relative directory would mean another place to each process; `~` is expanded since launchd doesn't.
    value = os.environ.get(variable)
    if not value:
        return None
    path = Path(value).expanduser()
    if not path.is_absolute():
        raise BadEndpoint(f"${variable} must be an absolute path; it is {value!r}.")
    return path
