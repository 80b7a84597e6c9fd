"""What the commands share at the terminal: two consoles, and figures as people read them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from stateroom.client.protocol import ModelInfo, Receipt
from stateroom.daemon.top.words import clean

WIDE = 1_000  # columns of what is no terminal: programs read it, and nothing is cut or wrapped

out = Console(
    highlight=False, emoji=False, width=None if sys.stdout is not None and sys.stdout.isatty() else WIDE
)
err = Console(stderr=True, highlight=False, emoji=False)

_CONTROL = {code: "�" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def plain(text: str) -> str:
    """Text of others' without control characters: it must not be able to drive the terminal."""
    return text.translate(_CONTROL)


def cell(text: str) -> str:
    """Text of others' in a table: also on one line, and taken for no markup."""
    return escape(clean(text))


def write(text: str) -> None:
    """A piece of a stream, at once."""
    sys.stdout.write(plain(text))
    sys.stdout.flush()


def say(line: str) -> None:
    """A line on its own, as long as it is."""
    out.print(plain(line), markup=False, soft_wrap=True)


def say_if_loading(models: Sequence[ModelInfo], model: str | None) -> None:
    """To who looks at it: why nothing happens for a while. `models` as `hello` tells, the default first."""
    wanted = next((info for info in models if model in (None, info.id)), None)
    if wanted is not None and not wanted.loaded and err.is_terminal:
        err.print(f"{plain(wanted.id)} is being loaded …", style="dim", markup=False)


def size(count: float) -> str:
    """Bytes, as 512 B, 1.5 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def age(seconds: float) -> str:
    """A duration in its largest unit: 12 s, 3 min, 5 h, 2 d."""
    for limit, unit, length in ((60, "s", 1), (3600, "min", 60), (86400, "h", 3600)):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def receipt_line(receipt: Receipt) -> str:
    """A receipt in one line."""
    parts = [f"{receipt.reused} tokens reused"]
    if receipt.trimmed:
        parts.append(f"{receipt.trimmed} trimmed")
    parts.append(f"{receipt.prefilled} computed in {receipt.ms:.0f} ms")
    if receipt.why:
        parts.append(receipt.why)
    return ", ".join(parts)
