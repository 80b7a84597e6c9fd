"""A trace as people read it, in 80 columns: where the time of one request went. Pure text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import wrap

from stateroom.client.protocol import RequestInfo, Span, TraceResult
from stateroom.daemon.shown import short

WIDTH = 80
BAR = 28  # columns of the request's time
NAME = 8
# What takes a request's time, in the order in which it is shown; one at a time.
TAKES = (
    "queued", "memory", "disk", "turn", "yielded", "others", "prefill", "score", "verify", "decode", "rounds",
)  # fmt: skip
BESIDE = ("sends", "unread")  # beside those
REST = "between"  # where none of them is: on its way, or the engine's own work
UNKNOWN = "unknown"  # the same, where no worker told its part
FULL, HALF, LITTLE = "█", "▒", "·"
PLAIN = str.maketrans({FULL: "#", HALF: "+", LITTLE: "."})  # on a terminal that has no more

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Row:
    """Spans of one name: what they took together, and of the request's time."""

    name: str
    spans: tuple[Interval, ...]  # milliseconds, apart from each other
    ms: float
    told: str


def rows(trace: TraceResult) -> list[Row]:
    """A row for each name that took time, and one for the rest of it."""
    total_ms = duration_ms(trace)
    by_name: dict[str, list[Span]] = {}
    for span in trace.spans:
        by_name.setdefault(span.name, []).append(span)
    strange = [name for name in by_name if name not in TAKES + BESIDE and _lasts(by_name[name])]
    made = []
    covered: list[Interval] = []
    for name in (*TAKES, *(name for name in strange if name != "worker")):
        if name in by_name:
            row = _row(name, by_name[name], total_ms)
            covered += row.spans
            made.append(row)
    rest = _complement(_united(covered), total_ms)
    untold = trace.missing and all(span.where != "engine" for span in trace.spans)
    made.append(Row(UNKNOWN if untold else REST, tuple(rest), _length(rest), ""))
    return made + [_row(name, by_name[name], total_ms) for name in BESIDE if name in by_name]


def _lasts(spans: Sequence[Span]) -> bool:
    return any(span.ms > 0 for span in spans)


def _row(name: str, spans: Sequence[Span], total_ms: float) -> Row:
    apart = _united((max(s.start_ms, 0.0), min(s.start_ms + s.ms, total_ms)) for s in spans)
    return Row(name, tuple(apart), _length(apart), summed_up(name, spans))


def duration_ms(trace: TraceResult) -> float:
    """What the request took, or has taken so far."""
    info = trace.request
    return info.age_s * 1000.0 if info.ms is None else info.ms


def _united(spans: Iterable[Interval]) -> list[Interval]:
    made: list[Interval] = []
    for start, end in sorted(span for span in spans if span[1] >= span[0]):
        if made and start <= made[-1][1]:
            made[-1] = made[-1][0], max(made[-1][1], end)
        else:
            made.append((start, end))
    return made


def _complement(spans: Sequence[Interval], total_ms: float) -> list[Interval]:
    made, at = [], 0.0
    for start, end in spans:
        if start > at:
            made.append((at, start))
        at = max(at, end)
    return [*made, (at, total_ms)] if at < total_ms else made


def _length(spans: Iterable[Interval]) -> float:
    return sum(end - start for start, end in spans)


# ---------------------------------------------------------------- what spans say


def summed_up(name: str, spans: Sequence[Span]) -> str:
    """What several spans of one name come to, in a few words."""

    def together(detail: str) -> float:
        return sum(float(span.details.get(detail, 0)) for span in spans)

    ms = sum(span.ms for span in spans)
    if name in ("decode", "rounds"):
        steps, tokens = together("steps"), together("tokens")
        if name == "rounds":
            return f"{tokens:,.0f} tokens, {together('guesses'):,.0f} guessed"
        return f"{tokens:,.0f} tokens, {ms / steps:.1f} ms each" if steps else ""
    if name in ("prefill", "score", "verify"):
        return f"{together('tokens'):,.0f} tokens in {len(spans)}"
    if name == "others":
        kinds = {key for span in spans for key in span.details}
        most = sorted(kinds, key=lambda kind: -together(kind))
        return ", ".join(f"{kind.removesuffix('_ms')} {together(kind):.0f}" for kind in most)
    if name == "queued":
        return ", ".join(dict.fromkeys(str(span.details.get("why", "")) for span in spans))
    if name == "sends":
        return f"{together('replies'):,.0f} replies"
    if name == "disk":
        return ", ".join(dict.fromkeys(str(span.details.get("does", "")) for span in spans))
    return "" if len(spans) == 1 else f"{len(spans)} times"


def details(span: Span) -> str:
    """All that one span says."""
    return ", ".join(f"{name} {_figure(told)}" for name, told in sorted(span.details.items()))


def _figure(told: object) -> str:
    return f"{told:,.1f}" if isinstance(told, float) else f"{told:,}" if isinstance(told, int) else str(told)


# ---------------------------------------------------------------- lines


def bar(spans: Sequence[Interval], total_ms: float, columns: int = BAR) -> str:
    """Columns of a request's time, each as full as its part of it is covered."""
    each, drawn = total_ms / columns, ""
    if each <= 0:
        return " " * columns
    for column in range(columns):
        start, end = column * each, (column + 1) * each
        covered = sum(max(min(end, to) - max(start, of), 0.0) for of, to in spans) / each
        touched = any(of < end and to >= start for of, to in spans)
        drawn += FULL if covered > 0.6 else HALF if covered > 0.2 else LITTLE if touched else " "
    return drawn


def title(info: RequestInfo) -> str:
    whose = f"{info.op} of {info.owner}" + (f" ({info.client})" if info.client else "")
    where = f", session {short(info.session)}" if info.session else ""
    if info.ms is not None:
        end = f"{info.code} in {info.ms:,.0f} ms"
    else:
        end = f"{info.state} for {info.age_s * 1000:,.0f} ms"
        end += f", waits for {info.waiting}" if info.waiting else ""
    return f"request {info.rid}: {whose}{where}: {end}"


def moments(trace: TraceResult) -> str:
    """What happened at once, with its time; and who had it."""
    told = [
        f"{span.name} at {span.start_ms:,.0f} ms"
        for span in trace.spans
        if span.ms == 0 and span.name in ("first token", "cancelled", "cut", "client gone")
    ]
    workers = [span for span in trace.spans if span.name == "worker"]
    for span in workers if len(workers) > 1 or any("lost" in span.details for span in workers) else []:
        fate = "died" if "lost" in span.details else "had it"
        told.append(f"worker #{span.details.get('generation')} {fate} at {span.start_ms + span.ms:,.0f} ms")
    return "; ".join(told)


def _head(trace: TraceResult) -> list[str]:
    return [*wrap(title(trace.request), WIDTH, subsequent_indent="  ", break_on_hyphens=False), ""]


def drawn(trace: TraceResult) -> list[str]:
    """The lines of a whole trace: a row for each name."""
    total_ms = duration_ms(trace)
    scale = f"0{total_ms:>{BAR - 1},.0f}"
    lines = [*_head(trace), f"{'':{NAME}} {scale} {'ms':>9} {'%':>4}"]
    for row in rows(trace):
        part = f"{100.0 * row.ms / total_ms:.0f}" if total_ms and row.name not in BESIDE else ""
        line = f"{row.name:{NAME}} {bar(row.spans, total_ms)} {row.ms:>9,.1f} {part:>4}  {row.told}"
        lines.append(line[:WIDTH].rstrip())
    return lines + _below(trace)


def listed(trace: TraceResult) -> list[str]:
    """The lines of a trace, one for each span."""
    lines = [*_head(trace), f"{'AT MS':>10} {'TOOK MS':>10}  WHAT"]
    for span in trace.spans:
        took = f"{span.ms:,.1f}" if span.ms else ""
        told = details(span)
        lines.append(f"{span.start_ms:>10,.1f} {took:>10}  {span.name:{NAME}}  {told}".rstrip()[:WIDTH])
    return lines + _below(trace)


def _below(trace: TraceResult) -> list[str]:
    dropped = f"{trace.dropped:,} spans or more aren't told: there were too many, or they are forgotten."
    said = [moments(trace), dropped if trace.dropped else "", trace.missing or ""]
    return [line for text in said if text for line in ("", *wrap(text, WIDTH))]
