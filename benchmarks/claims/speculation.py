"""Code that is edited, drawn with lookup speculation against the same without it.

Each prompt is a function of this repository and the beginning of its next version, so that most of what is
drawn stands in the prompt already. Four sessions draw at any time.
"""

from __future__ import annotations

import ast
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

from benchmarks import report
from benchmarks.measurement import Measurement, Tokens, compare, together
from benchmarks.rig import DEMO, ROOT, Rig, Sides

from stateroom.client import Session
from stateroom.client.errors import Unsupported
from stateroom.client.protocol import Speculate

ROUNDS = 2
PROMPTS = 10
AT_ONCE = 4
TOKENS = 64  # drawn by each
SOURCES = "client"  # the folder whose functions are edited
LINES = range(12, 25)  # of a function
KEPT_LINES = 2  # of it that its next version begins with
LOOKUP = Speculate(kind="lookup")
LEAST = 1.5
EDITS = (
    "with a comment before each step",
    "with shorter names",
    "with the error messages in capitals",
    "without the docstring",
    "with type hints on every variable",
)


def run(rig: Rig) -> list[Measurement]:
    sides = rig.sides(DEMO)
    tokens = 16 if rig.quick else TOKENS
    plain: list[float] = []
    looked_up: list[float] = []
    parts: list[Tokens] = []
    with ExitStack() as opened:
        sessions = [opened.enter_context(sides.room.open(text=text)) for text in prompts()]
        if not _is_served(sessions[0]):
            report.console.print("speculation: this engine does not serve it", style="yellow")
            return []
        before = [session.tokens().tokens for session in sessions]
        for _ in range(rig.rounds(ROUNDS)):
            ours, speed = _draw(sessions, tokens, LOOKUP)
            looked_up.append(speed)
            theirs, speed = _draw(sessions, tokens, None)
            plain.append(speed)
            parts.append(compare(ours, theirs, partial(_gap, sides, before, ours, theirs)))
    return [
        Measurement(
            claim=f"{PROMPTS} code edits, {AT_ONCE} at once, speculating by lookup, {sides.model.name}",
            unit="tokens/s",
            ours=tuple(looked_up),
            peer=tuple(plain),
            peer_name="without speculation",
            least_ratio=LEAST,
            tokens=together(parts),
        )
    ]


def prompts() -> list[str]:
    """A function as it is, what is to be changed, and how its next version begins."""
    made: list[str] = []
    for path in sorted((ROOT / SOURCES).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef) or node.end_lineno is None or len(made) == PROMPTS:
                continue
            code = source.splitlines()[node.lineno - 1 : node.end_lineno]
            if len(code) in LINES:
                edit = EDITS[len(made) % len(EDITS)]
                now, then = "\n".join(code), "\n".join(code[:KEPT_LINES])
                made.append(f"```python\n{now}\n```\n\nThe same, {edit}:\n\n```python\n{then}\n")
    assert len(made) == PROMPTS, f"{SOURCES} has only {len(made)} functions of {LINES}"
    return made


def _is_served(session: Session) -> bool:
    length = session.length
    try:
        session.decode(1, speculate=LOOKUP).wait()
    except Unsupported:
        return False
    session.trim(to=length)
    return True


def _draw(sessions: list[Session], tokens: int, speculate: Speculate | None) -> tuple[list[list[int]], float]:
    """What each draws, and tokens per second of all; the sessions are then as they were."""

    def draw(session: Session) -> list[int]:
        return list(session.decode(tokens, ignore_eos=True, speculate=speculate).wait().tokens)

    lengths = [session.length for session in sessions]
    begin = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as clients:
        drawn = list(clients.map(draw, sessions))
    seconds = time.perf_counter() - begin
    for session, length in zip(sessions, lengths, strict=True):
        session.trim(to=length)
    return drawn, sum(map(len, drawn)) / seconds


def _gap(
    sides: Sides,
    before: list[list[int]],
    ours: list[list[int]],
    theirs: list[list[int]],
    sequence: int,
    place: int,
) -> float:
    mine, others = ours[sequence], theirs[sequence]
    return sides.peer.gap(before[sequence] + others[:place], others[place], mine[place])
