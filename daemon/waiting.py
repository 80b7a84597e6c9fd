"""Why a request doesn't go on, in one word of `client.protocol.WAITING`. Pure.

What no engine has waits for a reason that the broker knows; of what one has, the worker tells with its pulse.
"""

from __future__ import annotations

from stateroom.client.protocol import Waiting
from stateroom.daemon.lifecycle import RequestState
from stateroom.daemon.tickets import Ticket

FILES = ("export", "import")  # what the broker reads and writes itself


def waits_for(ticket: Ticket, *, ready: bool, told: Waiting | None) -> Waiting | None:
    """Why an open request waits; None: it doesn't, as far as is known.

    `ready`: its engine takes requests. `told`: what that said of it last.
    """
    if ticket.state is not RequestState.HELD:
        return told
    if ticket.session is not None and ticket.session.held == ticket.rid:
        return "session"
    if ticket.model is None:
        return "disk" if ticket.op in FILES else None
    # What could go to an engine that is ready has gone, unless a suspect is tried there.
    return "trial" if ready else "engine"
