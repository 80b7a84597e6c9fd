"""The errors of the protocol as classes: one map from wire code to class, grouped by whose fault it is.

`CallerError`: the request can't work as it is. `MomentError`: the same request may work later.
`SessionError`: this session (or snapshot) is at fault. `DaemonError`: the daemon's side failed.
The daemon raises the same classes to answer with them, so both sides mean the same by a code.
"""

from __future__ import annotations

from typing import Any, ClassVar

from stateroom.client.protocol import ErrorBody, ErrorCode


class StateroomError(Exception):
    """Base of everything this library raises about a request.

    Attributes:
        code: the wire code.
        field: the argument at fault, or None.
        details: figures that go with the code (see docs/protocol.md).
    """

    code: ClassVar[ErrorCode] = "internal"

    def __init__(self, message: str, *, field: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.details = details

    def body(self) -> ErrorBody:
        """The error as a reply's body."""
        return ErrorBody(code=self.code, message=self.message, field=self.field, details=self.details)


class CallerError(StateroomError):
    """The request can't work as it is."""


class MomentError(StateroomError):
    """The same request may work later."""


class SessionError(StateroomError):
    """The session or snapshot is at fault."""


class DaemonError(StateroomError):
    """The daemon's side failed."""


class Malformed(CallerError):
    code = "malformed"


class WrongVersion(CallerError):
    code = "version"


class UnknownOperation(CallerError):
    code = "unknown_op"


class Invalid(CallerError):
    code = "invalid"


class NotFound(CallerError):
    code = "not_found"


class Exists(CallerError):
    code = "exists"


class TooLong(CallerError):
    code = "too_long"


class Unsupported(CallerError):
    code = "unsupported"


class Busy(MomentError):
    code = "busy"


class Capacity(MomentError):
    code = "capacity"


class SlowConsumer(MomentError):
    code = "slow_consumer"


class ShuttingDown(MomentError):
    code = "shutting_down"


class Mismatch(SessionError):
    code = "mismatch"


class Corrupt(SessionError):
    code = "corrupt"


class Numeric(SessionError):
    code = "numeric"


class EngineLost(DaemonError):
    code = "engine_lost"


class Internal(DaemonError):
    code = "internal"


CLASSES: dict[ErrorCode, type[StateroomError]] = {
    cls.code: cls
    for cls in (
        Malformed, WrongVersion, UnknownOperation, Invalid, NotFound, Exists, TooLong, Unsupported, Busy,
        Capacity, SlowConsumer, ShuttingDown, Mismatch, Corrupt, Numeric, EngineLost, Internal,
    )
}  # fmt: skip


def error_from(body: ErrorBody) -> StateroomError:
    """The exception for an error reply; a code newer than this library becomes `DaemonError`."""
    kind = CLASSES.get(body.code, DaemonError) if isinstance(body.code, str) else DaemonError
    made = kind(str(body.message), field=body.field)
    made.details = body.details if isinstance(body.details, dict) else {}
    return made


class ClientError(Exception):
    """Base of what goes wrong on this side of the socket."""


class NoDaemon(ClientError, ConnectionError):
    """Nothing answers at the endpoint; the message says how to start a daemon."""


class RequestTimeout(ClientError, TimeoutError):
    """No reply within the time given. The request was cancelled; the connection stays usable."""


class Disconnected(ClientError, ConnectionError):
    """The daemon went away, or the connection was closed, under an open request."""


class StreamBroken(ClientError):
    """Replies were lost (a gap in the sequence numbers) or can't be read. The request was cancelled."""


class NotEnded(ClientError, RuntimeError):
    """The result of a stream was asked for before its end."""


class BadEndpoint(ClientError, ValueError):
    """The endpoint, or a variable that names it, can't work; the message says why and what to do."""


class BadConfig(ClientError, ValueError):
    """The configuration file can't be used; the message says why and what to do."""


class BadKey(ClientError, ValueError):
    """The key file can't be used; the message says why and what to do."""


class KeyRefused(ClientError, ConnectionError):
    """A daemon is there, and doesn't let this key in, or wants one; the message says what to do."""


class WrongProcess(ClientError, RuntimeError):
    """A Room was used in another process (a forked child) or event loop than the one it was made in."""
