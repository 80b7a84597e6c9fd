"""SVGs that need nothing from anywhere: no font that is fetched, no place of the machine that drew them."""

from __future__ import annotations

import re

FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SVG_BYTES_MAX = 200_000
_FETCHED = re.compile(r"@font-face\s*\{[^}]*\}\s*")
_FAMILY = re.compile(r"font-family:[^;]*Fira Code[^;]*;")
_PLACE = re.compile(
    r"/(?:root|work|tmp|home|Users|private|var)/|(?<![\w.-])[\w.-]+@[\w.-]+|https?://(?!www\.w3\.org/)"
)


def plain(svg: str) -> str:
    """As rich draws it, but with the reader's own font. Each run of letters has its length, so that any fits.

    Raises:
        ValueError: it is too large, or names a place.
    """
    svg = _FAMILY.sub(f"font-family: {FONTS};", _FETCHED.sub("", svg))
    svg = svg.replace("https://www.textualize.io", "").replace("<!-- Generated with Rich  -->", "")
    svg = "\n".join(line.rstrip() for line in svg.strip().splitlines()) + "\n"
    for problem in problems(svg):
        raise ValueError(problem)
    return svg


def problems(svg: str) -> list[str]:
    found = [f"it names {place!r}" for place in _PLACE.findall(svg)]
    if len(svg.encode()) > SVG_BYTES_MAX:
        found.append(f"it has {len(svg.encode()):,} bytes, more than {SVG_BYTES_MAX:,}")
    if "@font-face" in svg or "url(http" in svg or "<image" in svg:
        found.append("it fetches something")
    return found
