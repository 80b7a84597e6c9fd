"""The lifecycles of sessions, requests and engines, drawn from their tables as Mermaid state diagrams.

Mermaid, because what shows pictures of it (GitHub, GitLab, most editors) draws it, and anything else shows
lines that can be read as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from stateroom.daemon.lifecycle import (
    ENGINES,
    REQUESTS,
    SESSIONS,
    EngineState,
    RequestState,
    SessionState,
)

Table = Mapping[Any, Mapping[Any, Enum]]

BEGIN = "<!-- lifecycles: make pictures -->"
END = "<!-- end of lifecycles -->"
# What is drawn, under which heading, and where it begins.
DRAWN: dict[str, tuple[Table, Enum]] = {
    "A session": (SESSIONS, SessionState.OPENING),
    "A request": (REQUESTS, RequestState.HELD),
    "An engine": (ENGINES, EngineState.STOPPED),
}


def diagram(table: Table, first: Enum) -> str:
    """One table. Events between the same two states share an arrow; what has no way out is an end."""
    lines = ["stateDiagram-v2", f"    [*] --> {first.value}"]
    for state, ways in table.items():
        arrows: dict[str, list[str]] = {}
        for event, following in ways.items():
            arrows.setdefault(following.value, []).append(event.value)
        lines += [f"    {state.value} --> {to}: {', '.join(events)}" for to, events in arrows.items()]
        if not ways:
            lines.append(f"    {state.value} --> [*]")
    return "\n".join(lines)


def section() -> str:
    """All of them, between the marks that `into` looks for."""
    parts = [
        f"**{heading}**\n\n```mermaid\n{diagram(table, first)}\n```\n"
        for heading, (table, first) in DRAWN.items()
    ]
    return f"{BEGIN}\n" + "\n".join(parts) + END


def into(page: str) -> str:
    """The page with its diagrams as the tables are now.

    Raises:
        ValueError: the page has no place for them.
    """
    before, found, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"the page lacks {BEGIN} … {END}")
    return before + section() + after
