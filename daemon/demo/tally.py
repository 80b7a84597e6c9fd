"""What a program of the demo counts: tokens reused and computed, and the price of one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from stateroom.client import DecodeResult, Receipt


@dataclass
class Tally:
    """Tokens of one program. `cold_ms`: what each cost in its first prefill, which reused nothing."""

    reused: int = 0
    computed: int = 0
    decoded: int = 0
    cold_ms: float = 0.0

    def first(self, receipt: Receipt | None) -> str:
        """Counts the first prefill, and takes from it what a token costs."""
        assert receipt is not None
        self.cold_ms = receipt.ms / max(receipt.prefilled, 1)
        return self.add(receipt)

    def add(self, receipt: Receipt) -> str:
        """Counts a receipt and puts it into words."""
        self.reused += receipt.reused
        self.computed += receipt.prefilled
        words = [f"reused {receipt.reused} tokens"] if receipt.reused else ["nothing to reuse yet"]
        if receipt.trimmed:
            words.append(f"dropped {receipt.trimmed}")
        words.append(f"computed {receipt.prefilled} in {receipt.ms:.0f} ms")
        return "receipt: " + ", ".join(words)

    def add_fork(self, length: int, done: DecodeResult) -> None:
        """Counts a child of a fork: what it held, less what its decode had to compute again."""
        self.reused += max(length - done.usage.prefilled, 0)
        self.computed += done.usage.prefilled
        self.decoded += done.usage.decoded

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Tally:
        return cls(**json.loads(path.read_text()))


def say(text: str) -> None:
    """A line for whoever watches, at once."""
    print(text, flush=True)


def shown(text: str, width: int = 88) -> str:
    """The beginning of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"
