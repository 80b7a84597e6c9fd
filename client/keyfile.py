"""The file that lets a client in over a network: its own CURVE pair, and the public key of the daemon.

`stateroom keys client NAME` makes one. JSON of mode 0600, with `stateroom_key: 1`, `name`, `public`, `secret`
and `server`; each key is 40 characters of Z85.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from stateroom.client.errors import BadKey

VARIABLE = "STATEROOM_KEY_FILE"
FORMAT = 1
FILE_BYTES_MAX = 4_096  # ours have 250
KEY_CHARS = 40  # 32 bytes in Z85
OTHERS = 0o077


@dataclass(frozen=True)
class ClientKey:
    """A client's pair, and the key of the daemon that it is for. `path`: the file they are from."""

    path: Path
    public: str
    secret: str
    server: str

    def __repr__(self) -> str:
        return f"ClientKey({str(self.path)!r})"  # no secret in tracebacks


def key_for(endpoint: str, file: str | os.PathLike[str] | None) -> ClientKey | None:
    """The key to use at a `tcp://` endpoint: that of `file`, else of `$STATEROOM_KEY_FILE`; else None.

    Raises:
        BadKey: it can't be read or used, or others can read it.
    """
    chosen = file or os.environ.get(VARIABLE)
    return read(Path(chosen).expanduser()) if chosen and endpoint.startswith("tcp://") else None


def read(path: Path) -> ClientKey:
    """Reads a key file.

    Raises:
        BadKey: it can't be read or used, or others can read it.
    """
    import json  # most clients never come here, and it takes milliseconds

    try:
        mode = path.stat().st_mode
        with path.open(encoding="utf-8") as opened:
            told = json.loads(opened.read(FILE_BYTES_MAX))
    except OSError as error:
        raise BadKey(f"The key file {path} can't be read: {error.strerror}.") from error
    except ValueError as error:
        raise BadKey(f"{path} is no key file of Stateroom.") from error
    if mode & OTHERS:
        raise BadKey(f"Others can read the secret in {path}; make it private: chmod 600 {path}.")
    if not isinstance(told, dict) or told.get("stateroom_key") != FORMAT:
        raise BadKey(f"{path} is no key file of Stateroom.")
    keys = [str(told.get(field)) for field in ("public", "secret", "server")]
    if not all(len(key) == KEY_CHARS for key in keys):
        raise BadKey(f"{path} lacks the keys of a client; `stateroom keys client NAME` makes such a file.")
    return ClientKey(path, *keys)
