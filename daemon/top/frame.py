"""The whole screen as lines: head, table, foot. Pure; every line is as wide as the screen."""

from __future__ import annotations

from dataclasses import dataclass

from stateroom.daemon.top.board import Board, Engine, Row
from stateroom.daemon.top.columns import Column, cells, columns
from stateroom.daemon.top.pages import details, help_page
from stateroom.daemon.top.text import BAD, GOOD, HEAD, HERE, PLAIN, QUIET, STRONG, WARN, Line, line, spread
from stateroom.daemon.top.view import Mode, View
from stateroom.daemon.top.words import clean, count_of, fit, fit_within, interval, rate, size, span

ENGINES_SHOWN = 3  # with more of them the table would have no room
HEAD_LINES = 4  # beside those of engines
ENGINE_HEAD = f"{'STATE':9}{'ROWS':>6}{'DECODE/S':>10}{'PREFILL/S':>11}{'STEP MS':>9}{'QUEUE':>7}"
BAR_MIN, BAR_MAX = 8, 40  # cells
PRESSURE = (("enough", GOOD), ("short", WARN), ("critical", BAD))
OWNER_TAIL = 3  # characters of its end that stay in a question
STATES = {"ready": GOOD, "failed": BAD, "silent": BAD}
KEYS = "q quit  ? help  / filter  s r sort  k cancel  p park  x close  space pause"


@dataclass(frozen=True, slots=True)
class Status:
    """How the view itself fares. `trouble`: why there is nothing new; `stale_s`: for how long."""

    trouble: str | None = None
    stale_s: float = 0.0


def frame(board: Board, rows: list[Row], view: View, status: Status, width: int, height: int) -> list[Line]:
    """`rows`: those chosen, in order. Of exactly `height` lines."""
    made, room = head(board, view, width), page(board, height)
    text = reading(board, view, width)
    made += table(rows, view, width, room) if text is None else text[view.scroll : view.scroll + room + 1]
    made += [line(width)] * (height - 1 - len(made))
    return [*made[: height - 1], foot(board, rows, view, status, width)]


def whole(board: Board, rows: list[Row], width: int) -> list[Line]:
    """As high as it takes, with nothing to choose: for a pipe."""
    view = View()
    return head(board, view, width) + table(rows, view, width, len(rows))


def reading(board: Board, view: View, width: int) -> list[Line] | None:
    """What stands in the table's place, if something does."""
    if view.mode is Mode.HELP:
        return help_page(width)
    if view.mode is Mode.DETAILS or (view.mode is Mode.ASK and view.back is Mode.DETAILS):
        return details(board.row(view.selected), width)
    return None


def page(board: Board, height: int) -> int:
    """Rows that a screen of that height has, below the head and the table's headings, above the foot."""
    engines = len(board.engines)
    engine_lines = 1 + min(engines, ENGINES_SHOWN) + (engines > ENGINES_SHOWN)
    return max(height - HEAD_LINES - engine_lines - 2, 1)


# ---------------------------------------------------------------- head


def head(board: Board, view: View, width: int) -> list[Line]:
    snapshot, gauges = board.snapshot, board.snapshot.stats.gauges
    uptime = f"  up {span(gauges['uptime_s'])}" if "uptime_s" in gauges else ""
    title = line(width, ("stateroom ", STRONG), snapshot.version, uptime, f"  {snapshot.endpoint}")
    return [
        title,
        *_engines(board.engines, width),
        _budget(gauges, width),
        _ladder(board, width),
        _counts(board, view, width),
    ]


def _engines(engines: list[Engine], width: int) -> list[Line]:
    if not engines:
        return [line(width, ("no model is loaded; the first `open` loads one", QUIET))]
    name = min(max(len("ENGINE"), *(len(engine.id) for engine in engines)), max(width - 56, 8))
    made = [line(width, (f"{fit('ENGINE', name)} {ENGINE_HEAD}", HEAD), fill=HEAD)]
    for engine in engines[:ENGINES_SHOWN]:
        figures = (
            f"{engine.rows:6}{rate(engine.decode_per_s) or '0':>10}{rate(engine.prefill_per_s) or '0':>11}"
            f"{engine.step_ms:9.1f}{engine.queue:7}"
        )
        said = f" {engine.trouble}" if engine.trouble else figures
        state = (f"{engine.state:9}", STATES.get(engine.state, WARN))
        made.append(line(width, f"{fit(engine.id, name)} ", state, said))
    if len(engines) > ENGINES_SHOWN:
        made.append(line(width, (f"and {len(engines) - ENGINES_SHOWN} more: see `stateroom stats`", QUIET)))
    return made


def _budget(gauges: dict[str, float], width: int) -> Line:
    """What the engines hold of KV, were granted, and may have in all; and how the machine is."""
    held, granted, total = (gauges.get(f"kv_{name}_bytes", 0.0) for name in ("held", "granted", "budget"))
    level = min(max(int(gauges.get("memory_pressure", 0)), 0), len(PRESSURE) - 1)
    said = f" {size(held)} held, {size(granted)} granted of {size(total)}  memory "
    wide = min(max(width - len(said) - len("KV budget []") - 10, BAR_MIN), BAR_MAX)
    full = [round(wide * min(part / total, 1.0)) if total else 0 for part in (held, max(granted, held))]
    bar = "#" * full[0] + "=" * (full[1] - full[0]) + "." * (wide - full[1])
    return line(width, "KV budget [", (bar, STRONG), "]", said, PRESSURE[level])


def _ladder(board: Board, width: int) -> Line:
    """How far down sessions have gone, from the device to their tokens alone."""
    device, disk, tokens = (board.tiers[name] for name in ("resident", "disk", "tokens"))
    return line(
        width,
        "KV ladder ",
        ("device ", QUIET), f"{device.sessions} ({size(device.amount)})  ",
        ("disk ", QUIET), f"{disk.sessions} ({size(disk.amount)})  ",
        ("tokens only ", QUIET), f"{tokens.sessions} ({count_of(tokens.amount)} tokens)",
    )  # fmt: skip


def _counts(board: Board, view: View, width: int) -> Line:
    snapshot, gauges = board.snapshot, board.snapshot.stats.gauges
    clients, opened, queued, sessions = (
        int(gauges.get(name, 0)) for name in ("clients", "requests_open", "queued", "sessions")
    )
    left = f"{sessions} sessions  {clients} clients  requests {opened} open, {queued} queued"
    pace = f"every {interval(snapshot.every_s)}"
    if snapshot.sessions_every_s > 1.5 * snapshot.every_s:  # reading many must not keep the daemon busy
        pace += f", sessions {interval(snapshot.sessions_every_s)}"
    return spread(width, [left], ("PAUSED", BAD) if view.paused else (pace, QUIET))


# ---------------------------------------------------------------- table and foot


def table(rows: list[Row], view: View, width: int, room: int) -> list[Line]:
    chosen = columns(width)
    made = [line(width, (" " + " ".join(_heading(column, view) for column in chosen), HEAD), fill=HEAD)]
    for row in rows[view.top : view.top + room]:
        here = row.id == view.selected
        # The mark says the same as the colours, to who sees none.
        mark, style = (">", HERE) if here else (" ", STRONG if row.busy else PLAIN)
        made.append(line(width, (mark + cells(row, chosen), style), fill=HERE if here else PLAIN))
    if not rows:
        made.append(line(width, " No session has all these words." if view.filter else " No sessions."))
    return made


def _heading(column: Column, view: View) -> str:
    arrow = ("↑" if view.reverse else "↓") if column.sort == view.sort else ""
    return fit(column.head + arrow, column.width, right=column.right)


def foot(board: Board, rows: list[Row], view: View, status: Status, width: int) -> Line:
    """One line: a question, a filter being typed, what went wrong, what was done, else the keys."""
    if view.mode is Mode.ASK and view.asking is not None:
        row = board.row(view.selected)
        name = "this session" if row is None else f"{row.title} of {row.session.owner}"
        before, after = f"{view.asking.value} ", "? y or n"
        name = fit_within(clean(name), width - len(before + after), tail=OWNER_TAIL)
        return line(width, (f"{before}{name}{after}", WARN))
    if view.mode is Mode.FILTER:
        return line(
            width, ("Filter: ", STRONG), view.filter, ("_", STRONG), ("  enter keeps it, esc drops it", QUIET)
        )
    if status.trouble is not None:
        return line(width, (f"No news for {span(status.stale_s)}, trying again. {status.trouble}", BAD))
    if view.note:
        return line(width, (view.note, STRONG))
    if view.mode is not Mode.TABLE:
        return line(width, ("esc goes back  up, down scroll  k cancel  p park  x close", QUIET))
    if view.filter:
        found = f"{len(rows)} of {len(board.rows)} have: {view.filter}"
        return line(width, (found, STRONG), ("  / changes the filter, esc drops it", QUIET))
    return line(width, (KEYS, QUIET))
