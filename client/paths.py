"""Where the daemon and its clients meet: endpoint, runtime directory, home, configuration file.

`$STATEROOM_ENDPOINT` names the endpoint on both sides, else the configuration file's `endpoint`; otherwise
it is the socket `stateroom.sock` in the runtime directory: `$STATEROOM_RUNTIME_DIR`, else
`$XDG_RUNTIME_DIR/stateroom`, else `~/.stateroom/run`. What outlives a boot (models, catalog, logs) is
below the home: `$STATEROOM_HOME`, else `~/.stateroom`; so is `config.toml`, unless `$STATEROOM_CONFIG` names
another file. An empty variable counts as unset. Of the disk, that file alone is read.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any, NamedTuple

from stateroom.client.errors import BadConfig, BadEndpoint

# The kernel's `sun_path` less its closing zero. Counted in bytes: a path of few characters may have many.
IPC_PATH_BYTES_MAX = 103 if sys.platform == "darwin" else 107
SOCKET_NAME = "stateroom.sock"
CONFIG_NAME = "config.toml"
CONFIG_VARIABLE = "STATEROOM_CONFIG"
CONFIG_BYTES_MAX = 64 * 1024  # a file of this size is no configuration
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
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
        BadConfig: see `read_config`.
    """
    named = os.environ.get("STATEROOM_ENDPOINT") or _configured_endpoint()
    endpoint = named or f"{_IPC}{runtime_dir() / SOCKET_NAME}"
    check_endpoint(endpoint)
    return endpoint


class ConfigFile(NamedTuple):
    """The configuration file as it was read; what its values mean is `daemon/settings/`'s to say."""

    path: Path
    text: str
    values: dict[str, Any]


def config_path() -> Path:
    """The configuration file, whether or not it is there.

    Raises:
        BadEndpoint: the variable that names it, or the home, isn't absolute.
    """
    return _from_environment(CONFIG_VARIABLE) or home_dir() / CONFIG_NAME


def read_config() -> ConfigFile | None:
    """The configuration file; None where there is none.

    Raises:
        BadConfig: it can't be read or is no TOML, others may write it, or the one that was named isn't there.
        BadEndpoint: see `config_path`.
    """
    try:
        path = config_path()
    except RuntimeError:  # this user has no home, in a container say
        return None
    if path == Path(os.devnull):  # named so: without any
        return None
    try:
        about = path.stat()
        _refuse_foreign(path, about)
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if os.environ.get(CONFIG_VARIABLE):
            raise BadConfig(f"There is no file at {path}, which ${CONFIG_VARIABLE} names.") from None
        return None
    except OSError as error:
        raise BadConfig(f"{path} can't be read: {error.strerror}.") from error
    import tomllib  # most clients have no file

    try:
        text = data.decode("utf-8-sig")  # some editors write a mark of the byte order
        return ConfigFile(path, text, tomllib.loads(text))
    except UnicodeDecodeError as error:
        raise BadConfig(f"{path} is not in UTF-8: {error.reason} at byte {error.start}.") from None
    except ValueError as error:  # what TOML is not, and whole numbers of thousands of digits
        raise BadConfig(f"{path} is no TOML: {error}.") from None
    except RecursionError:
        raise BadConfig(f"{path} can't be read: its tables or lists are nested too deeply.") from None


def _refuse_foreign(path: Path, about: os.stat_result) -> None:
    """Refuses a file that others may write: it says what is run, and to whom prompts are sent."""
    if not stat.S_ISREG(about.st_mode):
        raise BadConfig(f"{path} is no file.")
    if about.st_size > CONFIG_BYTES_MAX:
        raise BadConfig(f"{path} has {about.st_size} bytes; {CONFIG_BYTES_MAX} are taken at most.")
    if about.st_uid not in (os.getuid(), 0):
        raise BadConfig(f"{path} belongs to another user, so it isn't used.")
    if about.st_mode & _OTHERS_WRITE:
        raise BadConfig(f"Others may write {path}, so it isn't used: chmod go-w {path}")
    above = path.parent.stat().st_mode
    if above & stat.S_IWOTH and not above & stat.S_ISVTX:
        raise BadConfig(f"Anybody can replace {path}, so it isn't used: chmod o-w {path.parent}")


def _configured_endpoint() -> str | None:
    found = read_config()
    endpoint = None if found is None else found.values.get("endpoint")
    if found is None or endpoint is None or isinstance(endpoint, str):
        return endpoint
    raise BadConfig(f"{found.path}: endpoint takes text, not {endpoint!r}.")


def ipc_path(endpoint: str) -> Path | None:
    """The socket file of an `ipc://` endpoint; None for another kind, or Linux's abstract names (`ipc://@…`)."""
    path = endpoint.removeprefix(_IPC)
    return None if path == endpoint or path.startswith("@") else Path(path)


def check_endpoint(endpoint: str) -> None:
    """Refuses what ZeroMQ would refuse later and less clearly.

    Raises:
        BadEndpoint: no `ipc://` or `tcp://` endpoint, one with control characters, or an ipc path that the
            kernel has no room for; the message names it, its length in bytes, the limit and the way out.
    """
    if not endpoint.startswith(_SCHEMES):
        raise BadEndpoint(f"{endpoint!r} is no endpoint; it would look like ipc:///run/stateroom.sock.")
    if any(character < " " for character in endpoint):  # at a NUL the kernel would take the path to end
        raise BadEndpoint(f"{endpoint!r} is no endpoint; there are control characters in it.")
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
