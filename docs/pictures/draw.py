"""`make pictures`: what is drawn in README.md and docs/, drawn again.

The lifecycles come from their tables; screens from the programs themselves, run against real daemons in
homes of their own.
"""

from __future__ import annotations

from pathlib import Path

from docs.pictures import screens
from docs.pictures.lifecycle import into

DOCS = Path(__file__).resolve().parents[1]


def main() -> None:
    page = DOCS / "architecture.md"
    page.write_text(into(page.read_text()))
    for name, drawn in (("top", screens.top), ("demo", screens.demo)):
        (DOCS / "pictures" / f"{name}.svg").write_text(drawn())


if __name__ == "__main__":
    main()
