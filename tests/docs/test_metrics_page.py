"""docs/metrics.md has every metric of the page for Prometheus, as it is, and asks for no other."""

from __future__ import annotations

import re
from pathlib import Path

from stateroom.daemon.families import PREFIX, families
from stateroom.daemon.timings import OF_ENGINE, Timings

FOLDER = Path(__file__).parents[2] / "docs"
PAGE = FOLDER / "metrics.md"
ROW = re.compile(r"\| `(\w+)` \| (\w+) \| (.+?) \| (.+) \|")
OF_HISTOGRAMS = r"_(bucket|sum|count)$"


def known() -> dict[str, tuple[str, tuple[str, ...], str]]:
    made = {each.shown: (_kind(each.counts), each.labels, each.words) for each in families()}
    for name, (words, _) in Timings().by_name().items():
        made[f"{PREFIX}_{name}"] = ("histogram", (), words)
    for name, words in OF_ENGINE.items():
        made[f"{PREFIX}_engine_{name}"] = ("histogram", ("model",), words)
    return made


def _kind(counts: bool) -> str:
    return "counter" if counts else "gauge"


def test_every_metric_is_on_the_page() -> None:
    rows = [ROW.fullmatch(line) for line in PAGE.read_text().splitlines()]
    told = {
        row[1]: (row[2], tuple(re.findall(r"`(\w+)`", row[3])), row[4]) for row in rows if row is not None
    }
    assert told == known()


def test_the_pages_ask_for_what_there_is() -> None:
    for page in FOLDER.glob("*.md"):
        asked = set(re.findall(rf"\b{PREFIX}_[a-z_]*[a-z]\b", page.read_text()))
        asked -= {name for name in asked if re.fullmatch(rf"{PREFIX}_(engine|process)_", name)}
        unknown = {name for name in asked if re.sub(OF_HISTOGRAMS, "", name) not in known()}
        assert unknown - known().keys() == set(), page.name
