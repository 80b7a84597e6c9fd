"""Figures and reasons as the live view writes them: short, of a known width. Pure."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size

MUCH_BYTES = 1024**5  # beyond it no figure fits; nobody has it

# Why a request waits: in a narrow column, and as a sentence goes on after "waits for".
WAITS: dict[str, tuple[str, str]] = {
    "engine": ("waits for engine", "its engine, which is being started"),
    "session": ("waits in line", "an older request of its own session"),
    "trial": ("waits for trial", "a suspect request, tried alone"),
    "memory": ("waits for memory", "room for its KV in memory"),
    "disk": ("waits for disk", "the disk, to read or write its KV"),
    "turn": ("waits its turn", "its turn: others are served first"),
    "yielded": ("gave way", "its place: an interactive one has it"),
}
# Also what turns the direction of text round: a name could look like another, or like what follows it.
_CONTROL = dict.fromkeys(
    (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "�"
) | {ord("\n"): " ", ord("\t"): " "}
TIERS = {"resident": "device", "disk": "disk", "tokens": "tokens"}


def short_wait(waiting: str) -> str:
    """In at most 16 characters; a word that a newer daemon says stays as it is."""
    return WAITS[waiting][0] if waiting in WAITS else f"waits: {waiting}"


def long_wait(waiting: str) -> str:
    return WAITS[waiting][1] if waiting in WAITS else waiting


def size(count: float) -> str:
    """Bytes in at most 5 characters: 0, 512B, 1.5K, 640M, 12G."""
    count = min(max(count, 0.0), MUCH_BYTES)
    if count < 1:
        return "0"
    for unit in "BKMGTP":
        if count < 9.95 and unit != "B":
            return f"{count:.1f}{unit}"
        if count < 999.5:
            return f"{count:.0f}{unit}"
        count /= 1024
    return f"{count:.0f}E"


def count_of(number: float) -> str:
    """A count in at most 6 characters: 999999 and then 1.0M."""
    number = max(number, 0)
    if number < 999_999.5:
        return f"{number:.0f}"
    for unit in "MGT":
        number /= 1e6 if unit == "M" else 1e3
        if number < 999.95:
            return f"{number:.1f}{unit}"
    return "much"


def rate(per_s: float) -> str:
    """Something a second in at most 5 characters; nothing for what doesn't move."""
    if per_s < 0.05:
        return ""
    if per_s < 999.95:
        return f"{per_s:.1f}"
    return f"{per_s:.0f}" if per_s < 99_999.5 else "much"


def span(seconds: float) -> str:
    """A duration in at most 4 characters: 0s, 59s, 3m, 5h, 200d."""
    seconds = max(seconds, 0.0)
    for limit, unit, length in ((60, "s", 1), (3600, "m", 60), (86400, "h", 3600)):
        if seconds < limit:
            return f"{int(seconds / length)}{unit}"
    return f"{min(int(seconds / 86400), 999)}d"


def interval(seconds: float) -> str:
    """As `span`, with tenths below 10 s."""
    return f"{seconds:.1f}".removesuffix(".0") + "s" if seconds < 9.95 else span(round(seconds))


def clean(text: str) -> str:
    """What a program called itself, on one line and without what drives a terminal."""
    return text.translate(_CONTROL)


def fit_within(text: str, width: int, *, tail: int = 0) -> str:
    """As `fit`, of at most so many cells."""
    return fit(text, min(cell_len(text), width), tail=tail)


def fit(text: str, width: int, *, right: bool = False, tail: int = 0) -> str:
    """Text of exactly so many cells; what is too long loses what stands before its last `tail` characters."""
    width = max(width, 0)
    if cell_len(text) > width:
        end = f"…{text[-tail:] if tail else ''}"
        if cell_len(end) > width:
            end = "…"[:width]
        return set_cell_size(text, width - cell_len(end)) + end
    return " " * (width - cell_len(text)) + text if right else set_cell_size(text, width)
