"""What is written beside a session's KV, and how it is read; what disks refuse, in words of the protocol."""

from __future__ import annotations

import errno
from pathlib import Path

from stateroom.caches.codecs.scheme import Scheme
from stateroom.caches.snapshots import refusals
from stateroom.client import errors
from stateroom.client.protocol import KV
from stateroom.client.wire import DecodeError, decode_map, encode_map, from_wire, to_wire
from stateroom.daemon.engine.session import Session
from stateroom.daemon.link import ChatTurn, bounded

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RETRY_AFTER_S = 30.0  # told with `capacity`: disks don't become free in seconds


def packed(session: Session) -> bytes:
    """The scheme that a session was opened with, and its chat."""
    kv = kv_of(session.served.blueprint.scheme)
    return encode_map(
        {
            "kv": None if kv is None else to_wire(kv),
            "chat": [to_wire(turn) for turn in bounded(session.chat)],
        }
    )


def unpacked(content: bytes, file: str) -> tuple[KV | None, list[ChatTurn]]:
    """What `packed` gave. Raises `refusals.Corrupt`, naming `file`: it may come from elsewhere."""
    try:
        told = decode_map(content)
        kv = None if told["kv"] is None else from_wire(KV, told["kv"])
        return kv, bounded([from_wire(ChatTurn, turn) for turn in told["chat"]])
    except (DecodeError, errors.Invalid, KeyError, TypeError, ValueError) as error:
        raise refusals.Corrupt(file, "doesn't hold what belongs to a session") from error


def kv_of(scheme: Scheme) -> KV | None:
    """The scheme as `open` takes it; None: dense."""
    if scheme.name == "dense":
        return None
    turbo = scheme.name == "turbo"
    return KV(
        scheme=scheme.name,
        group_size=scheme.group_size,  # type: ignore[arg-type]  # one of the three
        quantise_after=scheme.quantise_after or None,
        key_bits=scheme.key_bits if turbo else None,
        value_bits=scheme.value_bits if turbo else None,
    )


def refusal(error: Exception) -> Exception:
    """What is answered for an error of snapshots; one that nobody expects stays as it is."""
    if isinstance(error, refusals.NoRoom):
        many = "" if error.count_max is None else f" There can be {error.count_max} of them."
        short = f" {error.short_bytes / 2**20:.1f} MiB are missing." if error.short_bytes else ""
        return errors.Capacity(
            f"Snapshots may not take that much of the disk.{short}{many} Forget some.",
            needed_bytes=error.needed_bytes,
            free_bytes=max(error.needed_bytes - error.short_bytes, 0),
            retry_after_s=RETRY_AFTER_S,
        )
    if isinstance(error, refusals.Corrupt):
        file = name_of(error)
        return errors.Corrupt(f"The snapshot can't be read: {file} {error.why}.", file=file)
    if isinstance(error, refusals.Mismatch):
        return errors.Mismatch(
            f"The snapshot's {error.part} isn't that of the model here.",
            part=error.part,
            here=error.here,
            there=error.there,
        )
    if isinstance(error, refusals.Missing):
        return errors.NotFound("There is no such snapshot.", field="snapshot")
    if isinstance(error, OSError) and error.errno in FULL:
        return errors.Capacity(f"The disk is full: {error.strerror}.", retry_after_s=RETRY_AFTER_S)
    return error


def words(error: Exception) -> str:
    """Why a snapshot can't be used, for a receipt."""
    if isinstance(error, refusals.Corrupt):
        return f"its {name_of(error)} {error.why}"
    if isinstance(error, refusals.Mismatch):
        return f"its {error.part} isn't that of the model here"
    return "it is gone" if isinstance(error, refusals.Missing) else "the disk failed"


def name_of(error: refusals.Corrupt) -> str:
    """The file at fault as people know it: no path."""
    file = Path(error.file)
    return f"run {file.name[:8]}" if file.parent.name == "runs" else file.name
