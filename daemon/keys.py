"""Keys of the network: the daemon's own pair, and whom it lets in. Files below the home, nothing of sockets.

    keys/server.json      the daemon's pair, mode 0600
    keys/allowed/NAME     the public key of a client, in one line

Keys are CURVE25519, 32 bytes in Z85 (40 characters). A client's secret is never here: `keys client` hands it
out in a file of the client's own, and `keys allow` takes public keys that were made elsewhere. The list of
those allowed is a directory, so that adding or removing one is one link or unlink; `Allowed` follows it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stateroom.client.limits import NAME_PATTERN
from stateroom.daemon.exits import CONFIG, FORBIDDEN, Leave
from stateroom.daemon.lock import OTHERS, make_private

KEYS_NAME = "keys"  # below the home
SERVER_NAME = "server.json"
ALLOWED_NAME = "allowed"
CLIENTS_MAX = 1_024  # on the list; all are read again when one changes
FILE_BYTES_MAX = 4_096  # of a key file; ours have 250
FORMAT = 1

ZAP_VERSION = b"1.0"
ZAP_ALLOWED, ZAP_REFUSED = (b"200", b"OK"), (b"400", b"This key is not allowed here.")

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_KEY_CHARS = 40


@dataclass(frozen=True, slots=True)
class Pair:
    """A CURVE pair, each half in Z85."""

    public: str
    secret: str


@dataclass(frozen=True, slots=True)
class Guest:
    """Who came with a key that is allowed: what it owns stands below its name."""

    name: str
    key: str


def is_key(text: object) -> bool:
    """Whether it is 32 bytes in Z85: each 5 characters are 4 bytes, so not every text will do."""
    if not isinstance(text, str) or len(text) != _KEY_CHARS or not set(text) <= set(_Z85):
        return False
    return all(_number(text[at : at + 5]) < 2**32 for at in range(0, _KEY_CHARS, 5))


def _number(digits: str) -> int:
    value = 0
    for digit in digits:
        value = value * 85 + _Z85.index(digit)
    return value


def over_network(endpoint: str) -> bool:
    """Whether the modes of files don't protect it: also on loopback, where every user of the machine is."""
    return endpoint.startswith("tcp://")


def check_name(name: str) -> str:
    """A client's name, which becomes a file's.

    Raises:
        Leave: it isn't of the form that names have everywhere, or is `.` or `..`.
    """
    if not re.fullmatch(NAME_PATTERN, name) or name.startswith("."):
        raise Leave(CONFIG, f"{name!r} is no name for a client; take letters, digits, - and _.")
    return name


class Keys:
    """The folder of keys of one home. Nothing is made before it is needed."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder or Path(os.devnull)  # None: there are none, and none can be made
        self._server, self._allowed = self.folder / SERVER_NAME, self.folder / ALLOWED_NAME

    def server(self) -> Pair | None:
        """The daemon's pair; None before `keep_server`.

        Raises:
            Leave: it can't be read, or isn't ours alone.
        """
        if not self._server.exists():
            return None
        told = read_key_file(self._server, secret=True)
        return Pair(told["public"], told["secret"])

    def pair_for(self, *endpoints: str | None) -> Pair | None:
        """The daemon's pair, if one of these endpoints can be reached over a network; None: none can.

        Raises:
            Leave: one can, and there is no pair; or it can't be read.
        """
        if not any(endpoint is not None and over_network(endpoint) for endpoint in endpoints):
            return None
        pair = self.server()
        if pair is None:
            raise Leave(
                CONFIG, "tcp:// is open to those who have a key; make the daemon's first: stateroom keys init"
            )
        return pair

    def keep_server(self, pair: Pair) -> None:
        """Raises: Leave: there is one. Another would make all that clients have worthless."""
        make_private(self.folder)
        if self._server.exists():
            raise Leave(
                CONFIG,
                f"There is a key already. Another one makes the files of all clients worthless; if that is "
                f"what you want, remove {self._server} first.",
            )
        write_key_file(self._server, {"public": pair.public, "secret": pair.secret})

    def clients(self) -> dict[str, str]:
        """The public key of each client that is allowed, by name."""
        return dict(_entries(self._allowed))

    def allow(self, name: str, public: str) -> None:
        """Lets a client in, from its next connection on. Errors as for `check_new`."""
        self.check_new(name, public)
        make_private(self.folder)
        make_private(self._allowed)
        _write(self._allowed / name, f"{public}\n")

    def check_new(self, name: str, public: str) -> None:
        """Sees whether a client could be allowed.

        Raises:
            Leave: the name or key is no such, is taken, or there are too many.
        """
        check_name(name)
        if not is_key(public):
            raise Leave(CONFIG, f"The public key of {name} is none: it has 40 characters of Z85.")
        known = self.clients()
        if name in known:
            raise Leave(CONFIG, f"There is a client {name}; revoke it first, or take another name.")
        if public in known.values():
            raise Leave(CONFIG, f"That key is allowed already, as {_named(known, public)}.")
        if len(known) >= CLIENTS_MAX:
            raise Leave(CONFIG, f"There can be {CLIENTS_MAX} clients; revoke some.")

    def revoke(self, name: str) -> None:
        """Raises: Leave: there is no such client."""
        path = self._allowed / check_name(name)
        if not path.is_file():
            raise Leave(CONFIG, f"There is no client {name}; `stateroom keys list` names those there are.")
        path.unlink()


def _named(known: dict[str, str], public: str) -> str:
    return next(name for name, key in known.items() if key == public)


class Allowed:
    """Who is let in, as the directory says now. Read again when something in it changed."""

    def __init__(self, keys: Keys) -> None:
        self._folder = keys.folder / ALLOWED_NAME
        self._seen: object = None
        self._guests: dict[str, Guest] = {}

    def refresh(self) -> None:
        seen = _signature(self._folder)
        if seen == self._seen:
            return
        unread: list[OSError] = []
        guests = {key: Guest(name, key) for name, key in _entries(self._folder, unread.append)}
        self._seen = unread or seen  # what could not be read is tried again
        # The same object while nothing changes: whoever holds one may compare by `is`.
        self._guests = {
            key: self._guests[key] if self._guests.get(key) == guest else guest
            for key, guest in guests.items()
        }

    def guest(self, key: str) -> Guest | None:
        return self._guests.get(key)

    def knows(self, guest: Guest) -> bool:
        return self._guests.get(guest.key) == guest


def _signature(folder: Path) -> object:
    try:
        with os.scandir(folder) as entries:
            found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    except OSError:
        return None
    return sorted((name, about.st_ino, about.st_mtime_ns, about.st_size) for name, about in found)


def _entries(
    folder: Path, unread: Callable[[OSError], None] = lambda error: None
) -> Iterator[tuple[str, str]]:
    """Name and key of each client. What isn't one is passed over: a broken file lets nobody in."""
    try:
        paths = sorted(folder.iterdir())[: 2 * CLIENTS_MAX] if folder.is_dir() else []
    except OSError as error:
        unread(error)
        return
    for path in paths:
        if not re.fullmatch(NAME_PATTERN, path.name) or path.name.startswith("."):
            continue
        try:
            if not path.is_file():
                continue
            with path.open(encoding="ascii", errors="replace") as file:
                key = file.read(FILE_BYTES_MAX).strip()
        except OSError as error:  # revoked meanwhile, or not readable
            unread(error)
        else:
            if is_key(key):
                yield path.name, key


# ---------------------------------------------------------------- files


def read_key_file(path: Path, *, secret: bool) -> dict[str, str]:
    """The fields of a key file; with `secret` it must be readable by its owner alone.

    Raises:
        Leave: it can't be read, isn't private, or is no key file.
    """
    try:
        about = path.stat()
        with path.open(encoding="utf-8") as file:
            told = json.loads(file.read(FILE_BYTES_MAX))
    except OSError as error:
        raise Leave(FORBIDDEN, f"The key file {path} can't be read: {error.strerror}.") from error
    except ValueError as error:
        raise Leave(CONFIG, f"{path} is no key file of Stateroom.") from error
    if secret and about.st_mode & OTHERS:
        raise Leave(FORBIDDEN, f"Others can read the secret in {path}; make it private: chmod 600 {path}.")
    wanted = ("public", "secret") if secret else ("public",)
    if (
        not isinstance(told, dict)
        or told.get("stateroom_key") != FORMAT
        or not all(is_key(told.get(field)) for field in wanted)
    ):
        raise Leave(CONFIG, f"{path} is no key file of Stateroom.")
    return {str(name): value for name, value in told.items() if isinstance(value, str)}


def write_key_file(path: Path, fields: dict[str, str]) -> None:
    """A key file of mode 0600, there completely or not at all.

    Raises:
        Leave: it can't be written, or something is there already: keys are never overwritten.
    """
    _write(path, json.dumps({"stateroom_key": FORMAT, **fields}, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    try:
        descriptor, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)  # 0600
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.link(name, path)  # unlike a rename it never overwrites
        finally:
            Path(name).unlink(missing_ok=True)
    except FileExistsError as error:
        raise Leave(CONFIG, f"{path} is there already; it was left as it is.") from error
    except OSError as error:
        raise Leave(FORBIDDEN, f"{path} can't be written: {error.strerror}.") from error


# ---------------------------------------------------------------- ZAP (rfc.zeromq.org/spec/27)


def zap_key(frames: list[bytes]) -> bytes | None:
    """The raw public key that a ZAP request is about, in frames as a ROUTER gets them; None: not CURVE's."""
    body = frames[_delimiter(frames) + 1 :]
    if len(body) != 7 or body[0] != ZAP_VERSION or body[5] != b"CURVE" or len(body[6]) != 32:
        return None
    return body[6]


def zap_answer(frames: list[bytes], user: str | None) -> list[bytes]:
    """The answer to a ZAP request: `user` becomes the `User-Id` of all messages; None refuses."""
    at = _delimiter(frames)
    request_id = frames[at + 2] if len(frames) > at + 2 else b""
    status = ZAP_REFUSED if user is None else ZAP_ALLOWED
    return [*frames[: at + 1], ZAP_VERSION, request_id, *status, (user or "").encode(), b""]


def _delimiter(frames: list[bytes]) -> int:
    return frames.index(b"") if b"" in frames else len(frames) - 1
