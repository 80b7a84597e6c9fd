"""How long a client waits. Only `watch` may wait without limit: for what may never happen."""

from __future__ import annotations

from dataclasses import dataclass

# For `connect`: how long to keep trying until a daemon answers. Well below 2 s, for there may be none.
CONNECT_TIMEOUT_S = 1.5
STARTING_TIMEOUT_S = 10.0  # somebody listens and says nothing yet: a service manager that starts the daemon
CALL_TIMEOUT_S = 30.0  # the daemon answers these within milliseconds; a machine that swaps takes longer
# A long prefill on a slow CPU, behind others; or a model that loads, for which the daemon has less patience.
COMPUTE_TIMEOUT_S = 960.0
CANCEL_TIMEOUT_S = 60.0  # one token or one prefill chunk, on a slow CPU

# What the daemon answers by itself, without the model.
_CALLS = frozenset(
    {
        "hello", "info", "list", "close", "cancel", "stats", "tokens", "unload", "unpublish", "lease",
        "snapshots", "forget", "requests", "trace",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Wait:
    """One request's patience; None is endless. `each`: counted anew from every reply, else for the whole."""

    timeout_s: float | None
    each: bool = False


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """A room's patience by kind of request; most calls take a `timeout_s` of their own besides.

    Attributes:
        call_s: for the whole of a request that computes nothing (`info`, `list`, `close`, …).
        compute_s: for the next reply of one that does (`prefill`, `decode`, `sync`, `load`, …).
        cancel_s: for a cancelled request to end.
    """

    call_s: float = CALL_TIMEOUT_S
    compute_s: float = COMPUTE_TIMEOUT_S
    cancel_s: float = CANCEL_TIMEOUT_S

    def wait_for(self, op: str, timeout_s: float | None = None) -> Wait:
        """The patience for a request of operation `op`, of which the caller may have said `timeout_s`."""
        if op == "watch":
            return Wait(timeout_s, each=True)
        if op in _CALLS:
            return Wait(self.call_s if timeout_s is None else timeout_s)
        return Wait(self.compute_s if timeout_s is None else timeout_s, each=True)
