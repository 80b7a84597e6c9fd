"""What a worker's death means for the requests that it had: which go on, and which sessions caused it. Pure.

Nobody is told which request killed a worker, so a death counts against every session that had one there,
until that session gets on again: by an answer, or `CLEARED_TOKENS` tokens. Sessions with `SUSPECT_DEATHS` are
suspects. They go to the next worker first, those with the most deaths before the others, and one at a time:
nothing else is sent until such a one got on or ended. If it was alone when its worker died, with `DEATHS_MAX`
deaths by then, it is the cause, and is quarantined. So no session pays for another one's input.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from stateroom.client.protocol import Decode
from stateroom.daemon.tickets import Ticket

SUSPECT_DEATHS = 2  # chance may put a session under one, or beside the cause
DEATHS_MAX = 3  # the last of them alone: then it is quarantined
CLEARED_TOKENS = (
    8  # drawn since the last death; fewer, and a session that dies at every second one went on forever
)
RESUMES_MAX = 32  # of one request: more often its worker hardly dies by chance

# What may be sent to a second worker as it was to the first: it changes nothing before its one answer, or
# says how far it got in its journal.
AGAIN = (
    "open", "prefill", "decode", "sync", "trim", "fork", "publish", "score", "tokens", "verify",
    "save", "park", "restore", "import",
)  # fmt: skip
# What isn't done with a session in quarantine: it would run the input that killed, or spread it.
QUARANTINED = ("decode", "prefill", "score", "fork", "publish", "save", "verify")
LIFTS = ("sync", "trim")  # they give it another content


@dataclass(slots=True)
class Record:
    """Deaths against a session since it last got on, and tokens that it drew since the last of them."""

    deaths: int = 0
    tokens: int = 0


class Suspicion:
    """The records of all sessions that have one."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def deaths(self, session_id: str) -> int:
        record = self._records.get(session_id)
        return record.deaths if record is not None else 0

    def is_suspect(self, session_id: str) -> bool:
        return self.deaths(session_id) >= SUSPECT_DEATHS

    def died(self, session_ids: Iterable[str], company: bool = False) -> str | None:
        """A worker died that had requests of these sessions; gives the one that is known to be the cause.

        `company`: it had other work beside, which may have been the cause as well.
        """
        blamed = set(session_ids)
        for session_id in blamed:
            record = self._records.setdefault(session_id, Record())
            record.deaths, record.tokens = record.deaths + 1, 0
        alone = next(iter(blamed)) if len(blamed) == 1 and not company else None
        return alone if alone is not None and self.deaths(alone) >= DEATHS_MAX else None

    def got_on(self, session_id: str, tokens: int | None = None) -> bool:
        """It drew so many tokens, or got its answer (None). Whether it was cleared by that."""
        record = self._records.get(session_id)
        if record is None:
            return False
        record.tokens += CLEARED_TOKENS if tokens is None else tokens
        if record.tokens < CLEARED_TOKENS:
            return False
        del self._records[session_id]
        return True

    def forget(self, session_id: str) -> None:
        """The session is gone."""
        self._records.pop(session_id, None)


def computes(ticket: Ticket) -> bool:
    """Whether it may have been what killed its worker: all but what only looks up and frees."""
    if ticket.session is None or ticket.op in ("adopt", "close", "unpublish"):
        return False
    return not ticket.reads and not ticket.forks_trunk


def goes_on(ticket: Ticket) -> bool:
    """Whether its next worker may take it over; it was with one that died."""
    return ticket.op in AGAIN and ticket.resumes < RESUMES_MAX


def order(tickets: Iterable[Ticket], suspicion: Suspicion) -> list[Ticket]:
    """Those that wait for an engine, as they are to be sent: what computes nothing, suspects, the others."""

    def place(ticket: Ticket) -> tuple[bool, int]:
        deaths = suspicion.deaths(ticket.session.id) if ticket.session is not None else 0
        return computes(ticket), -deaths if deaths >= SUSPECT_DEATHS else 0

    return sorted(tickets, key=place)


def seeded(request: Decode, seed: int) -> Decode:
    """With a seed, if it draws by chance and has none: whichever worker goes on with it draws the same."""
    sampling = request.sampling
    if sampling is None or sampling.seed is not None:
        return request
    return replace(request, sampling=replace(sampling, seed=seed))


def why_quarantined(deaths: int, reason: str) -> str:
    return (
        f"Its engine stopped {deaths} times in a row while this session ran, at last with nothing beside it "
        f"({reason}). sync or trim it to another content, or close it."
    )
