"""What stands in the table's place: a session's details, and the help. Pure."""

from __future__ import annotations

from stateroom.client.protocol import RequestInfo, SessionInfo
from stateroom.daemon.shown import short
from stateroom.daemon.top.board import ENDED, Row
from stateroom.daemon.top.text import HEAD, QUIET, STRONG, Line, Piece, line
from stateroom.daemon.top.words import TIERS, WAITS, count_of, fit, long_wait, rate, short_wait, size, span

HELP = """
up down pgup pgdn home end  move          enter  its details and requests
s  S   next, previous order               r      turn the order round
/      show only sessions that have all words, in their name, id, owner, model,
       class, place or state              esc    drop the filter; leave a page
k      cancel what runs in it             p      park it: KV off the device
x      close it for good                  space  pause, and go on
?      this page    q  quit               ctrl-l draw the screen anew

SESSION  its name, or the first of its id    OWNER   the app that it belongs to
C        i interactive, b background         LEN     tokens
PRIV     bytes of KV that it has for itself  SHRD    bytes shared with others
KV ON    device, disk, or its tokens alone   TOK/S   tokens a second
STATE    what it does, or why it waits       IDLE    since its last request
↓ ↑      what the order goes by, turned round
KV budget  # held by engines, = granted to them, . free
""".strip("\n").split("\n")


def help_page(width: int) -> list[Line]:
    made = [line(width, ("Keys and columns", STRONG)), *(line(width, each) for each in HELP)]
    made += [line(width), line(width, ("Why a session waits", STRONG))]
    made += [line(width, f"{short:18}it waits for {long}") for short, long in WAITS.values()]
    return made


def details(row: Row | None, width: int) -> list[Line]:
    if row is None:
        return [line(width, ("This session is gone.", STRONG))]
    session = row.session
    made = [line(width, (row.title, STRONG), f" of {session.owner}, session {session.session}")]
    state = (
        row.state
        if row.waiting is None
        else f"{session.running or 'queued'}, waits for {long_wait(row.waiting)}"
    )
    made.append(line(width, ("state ", QUIET), state, f"  {rate(row.per_s)} tokens/s" if row.per_s else ""))
    made += [_facts(width, facts) for facts in _told(session) if any(facts.values())]
    if session.quarantined is not None:
        made.append(line(width, ("quarantined ", QUIET), session.quarantined))
    return [*made, line(width), *_requests(row.requests, width)]


def _facts(width: int, facts: dict[str, str]) -> Line:
    pieces: list[Piece] = []
    for name, value in facts.items():
        if value:
            pieces += [(f"{name} ", QUIET), f"{value}  "]
    return line(width, *pieces)


def _told(session: SessionInfo) -> list[dict[str, str]]:
    schemes = "+".join(sorted({kind.scheme for kind in session.kinds}))
    ends = span(session.expires_in_s) if session.expires_in_s is not None else ""
    return [
        {
            "model": session.model,
            "class": session.session_class,
            "tokens": count_of(session.length),
            "KV": schemes,
            "on": TIERS.get(session.tier, session.tier),
        },
        {
            "private": size(session.private_bytes),
            "shared": size(session.shared_bytes),
            "filled": f"{size(session.live_bytes)} of {size(session.capacity_bytes)}",
            "disk": size(session.disk_bytes),
        },
        {
            "age": span(session.age_s),
            "idle": span(session.idle_s),
            "expires in": ends,
            "trims from": str(session.trim_floor),
            "checkpoints": str(len(session.checkpoints)) if session.checkpoints else "",
        },
        {
            "forked from": " ".join(short(parent) for parent in session.parents),
            "trunk": short(session.trunk or ""),
            "published as": " ".join(session.published),
        },
    ]


def _requests(requests: tuple[RequestInfo, ...], width: int) -> list[Line]:
    if not requests:
        return [line(width, ("No requests that are still remembered.", QUIET))]
    heading = f"{'REQUEST':>7} {'OP':9} {'STATE':16} {'DONE':>11} {'TOK/S':>6} {'AGE':>4} {'TOOK':>8} CLIENT"
    made = [line(width, (heading, HEAD), fill=HEAD)]
    made += [line(width, _request(request)) for request in requests]
    return [*made, line(width, ("Where a request's time went: stateroom trace REQUEST", QUIET))]


def _request(request: RequestInfo) -> str:
    state = short_wait(request.waiting) if request.waiting else request.state
    if request.state == ENDED:
        state = request.code or ENDED
    done = f"{request.done}/{request.total}" if request.total else ""
    took = "" if request.ms is None else f"{request.ms:.0f} ms"
    return (
        f"{request.rid:7} {fit(request.op, 9)} {fit(state, 16)} {done:>11} {rate(request.tokens_per_s):>6} "
        f"{span(request.age_s):>4} {took:>8} {request.client or ''}"
    )
