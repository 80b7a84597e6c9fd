"""Decode steps of an engine that records what they were, and of the same engine when it doesn't, by turns.

python -m benchmarks.recording MODEL STREAMS TOKENS. Runs in a process of its own.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks.forking import Direct

from stateroom.client.protocol import Decode, DecodeResult, Open
from stateroom.daemon.engine.engine import Engine
from stateroom.daemon.engine.model import load
from stateroom.daemon.link import Command

BLOCK = 8  # steps, then the other way: shorter than what else goes on here lasts
PROMPT = 32  # tokens
LEFT_OUT = 2  # blocks, of the first steps, and again of the last


def measure(path: str, streams: int, tokens: int, first_on: bool) -> dict[str, Any]:
    """Milliseconds of a step, block by block, {"on": …, "off": …}, and what each stream drew."""
    loaded = load(path)

    def engine(emit: Any) -> Engine:
        return Engine(loaded, clock_ms=lambda: time.monotonic() * 1000.0, emit=emit, report=lambda *_: "")

    direct = Direct(engine)
    for stream in range(streams):
        prompt = [(7 * i + stream) % loaded.vocab for i in range(PROMPT)]
        direct.ask(Open(tokens=prompt), str(stream))
    done = len(direct.answers)
    for stream in range(streams):
        request = Decode(session=str(stream), max_tokens=tokens, ignore_eos=True)
        direct.commands.take(Command(1000 + stream, request, str(stream)))
    blocks: list[float] = []
    going = True
    while going:
        direct.engine.recorder.on = (len(blocks) % 2 == 0) is first_on
        begin = time.perf_counter()
        for _ in range(BLOCK):
            going = direct.engine.step()
        blocks.append((time.perf_counter() - begin) * 1000 / BLOCK)
    blocks = blocks[LEFT_OUT : (len(blocks) - LEFT_OUT) // 2 * 2]
    ended = [answer for answer in direct.answers[done:] if isinstance(answer.body, DecodeResult)]
    ended.sort(key=lambda answer: answer.rid)
    even, odd = blocks[::2], blocks[1::2]
    return {
        "on": even if first_on else odd,
        "off": odd if first_on else even,
        "tokens": [answer.body.tokens for answer in ended if isinstance(answer.body, DecodeResult)],
    }


def main() -> None:
    path, streams, tokens = sys.argv[1:]
    print(json.dumps([measure(path, int(streams), int(tokens), first) for first in (True, False)]))


if __name__ == "__main__":
    main()
