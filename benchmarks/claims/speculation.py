"""Code that is edited, drawn with lookup speculation against the same without it.

Each prompt is a function of this repository and half of the same with a name changed, which the model goes on
with: most of what it draws stands in the prompt. Four sessions draw at any time.
"""

from __future__ import annotations

import ast
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from textwrap import dedent

from benchmarks.measurement import Agreement, Measurement, Tokens, compare, together
from benchmarks.rig import DEMO, ROOT, Rig, Sides

from stateroom.client import Session
from stateroom.client.protocol import DecodeResult, Speculate

ROUNDS = 2
PROMPTS = 10
AT_ONCE = 4
TOKENS = 64  # drawn by each
SOURCES = "client"  # the folder whose functions are edited
LINES = range(16, 31)  # of a function
NAME_LEAST = 4  # characters of the name that is changed, so that it isn't one of the language
LOOKUP = Speculate(kind="lookup")
LEAST = 1.5


def run(rig: Rig) -> list[Measurement]:
    sides = rig.sides(DEMO)
    tokens = 16 if rig.quick else TOKENS
    plain: list[float] = []
    looked_up: list[float] = []
    parts: list[Tokens] = []
    for _ in range(rig.rounds(ROUNDS)):
        results, speed, before = _draw(sides, tokens, LOOKUP)
        ours = [result.tokens for result in results]
        looked_up.append(speed)
        others, speed, _ = _draw(sides, tokens, None)
        theirs = [result.tokens for result in others]
        plain.append(speed)
        parts.append(compare(ours, theirs, partial(_gap, sides, before, ours, theirs)))
        parts.append(_accepted(results))
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
    """A function, and the first half of its lines with the name that it uses most changed."""
    made = []
    for path in sorted((ROOT / SOURCES).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and (name := _name(node)):
                lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
                if len(lines) in LINES:
                    made.append(_renamed(dedent("\n".join(lines)), name))
    assert len(made) >= PROMPTS, f"{SOURCES} has only {len(made)} functions of so many lines"
    return made[:PROMPTS]


def _name(function: ast.FunctionDef) -> str | None:
    arguments = {argument.arg for argument in function.args.args}
    used = Counter(node.id for node in ast.walk(function) if isinstance(node, ast.Name))
    own = [name for name, _ in used.most_common() if name in arguments and len(name) >= NAME_LEAST]
    return next((name for name in own if name != "self"), None)


def _renamed(code: str, name: str) -> str:
    new = re.sub(rf"\b{name}\b", f"new_{name}", code).splitlines()
    begun = "\n".join(new[: len(new) // 2])
    return f"# Before:\n\n{code}\n\n\n# After `{name}` was renamed to `new_{name}`:\n\n{begun}\n"


def _draw(
    sides: Sides, tokens: int, speculate: Speculate | None
) -> tuple[list[DecodeResult], float, list[list[int]]]:
    """What each draws, tokens per second of all, and what each held before.

    The sessions are new: one that drew before would look up its own answer.
    """

    def draw(session: Session) -> DecodeResult:
        return session.decode(tokens, ignore_eos=True, speculate=speculate).wait()

    with ExitStack() as opened:
        sessions = [opened.enter_context(sides.room.open(text=text)) for text in prompts()]
        before = [session.tokens().tokens for session in sessions]
        begin = time.perf_counter()
        with ThreadPoolExecutor(AT_ONCE) as clients:
            drawn = list(clients.map(draw, sessions))
        seconds = time.perf_counter() - begin
    return drawn, sum(len(result.tokens) for result in drawn) / seconds, before


def _accepted(results: list[DecodeResult]) -> Tokens:
    """How many of the guesses were right, as a note."""
    guessed = sum(result.usage.drafted for result in results)
    right = sum(result.usage.accepted for result in results)
    return Tokens(Agreement.NONE, (f"{right} of {guessed} guesses were right",))


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
