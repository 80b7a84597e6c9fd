"""Lines of a frame: pieces of text with one of a few styles, each line as wide as the screen. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style

from stateroom.daemon.top.words import clean

Line = tuple[Segment, ...]

PLAIN = Style()
STRONG = Style(bold=True)
QUIET = Style(dim=True)
HEAD = Style(bold=True, underline=True)
HERE = Style(reverse=True)
GOOD = Style(color="green")
WARN = Style(color="yellow")
BAD = Style(color="red", bold=True)

Piece = str | tuple[str, Style]


def line(width: int, *pieces: Piece, fill: Style = PLAIN) -> Line:
    """Pieces one after the other, cut or filled up to so many cells."""
    made: list[Segment] = []
    left = width
    for piece in pieces:
        text, style = (piece, PLAIN) if isinstance(piece, str) else piece
        text = clean(text)
        if cell_len(text) > left:
            text = set_cell_size(text, left - 1) + "…" if left > 0 else ""
        if text:
            made.append(Segment(text, style))
        left -= cell_len(text)
    if left > 0:
        made.append(Segment(" " * left, fill))
    return tuple(made)


def spread(width: int, left: Iterable[Piece], right: Piece) -> Line:
    """What `left` says, and at the right end of the line `right`, where there is room for it."""
    left = list(left)
    said = sum(cell_len(clean(_text(piece))) for piece in left)
    gap = width - said - cell_len(clean(_text(right)))
    return line(width, *left, " " * gap, right) if gap > 0 else line(width, *left)


def shown(of: Line) -> str:
    """As plain text."""
    return "".join(segment.text for segment in of).rstrip()


def _text(piece: Piece) -> str:
    return piece if isinstance(piece, str) else piece[0]
