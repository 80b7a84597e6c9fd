"""A trace in the Chrome trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open. Pure.

Format: "Trace Event Format", JSON object form. A process each for the broker and the engine, a thread for
each name of a span, so that spans of one thread never cross; times are microseconds since the request came.
"""

from __future__ import annotations

from typing import Any

from stateroom.client.protocol import TraceResult

PROCESSES = {"broker": 1, "engine": 2}


def events(trace: TraceResult) -> dict[str, Any]:
    """The whole file, to be written as JSON."""
    threads: dict[tuple[str, str], int] = {}
    made: list[dict[str, Any]] = []
    for where, pid in PROCESSES.items():
        name = where if where == "broker" else f"engine of {trace.request.model}"
        made.append(_named("process_name", pid, 0, name))
    for span in trace.spans:
        pid = PROCESSES[span.where]
        tid = threads.setdefault((span.where, span.name), len(threads) + 1)
        event = {
            "name": span.name,
            "cat": span.where,
            "pid": pid,
            "tid": tid,
            "ts": round(span.start_ms * 1000.0, 3),
            "args": span.details,
        }
        made.append(
            event | ({"ph": "X", "dur": round(span.ms * 1000.0, 3)} if span.ms else {"ph": "i", "s": "t"})
        )
    made += [_named("thread_name", PROCESSES[where], tid, name) for (where, name), tid in threads.items()]
    info = trace.request
    about = {"rid": info.rid, "op": info.op, "owner": info.owner, "code": info.code, "missing": trace.missing}
    return {"traceEvents": made, "displayTimeUnit": "ms", "otherData": about}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
