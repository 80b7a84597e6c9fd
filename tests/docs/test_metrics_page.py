"""docs/metrics.md has every metric of the page for Prometheus, and no query asks for another."""

from __future__ import annotations

import json
import re
from pathlib import Path

from stateroom.daemon.families import PREFIX, families
from stateroom.daemon.timings import OF_ENGINE, Timings

FOLDER = Path(__file__).parents[2] / "docs"
PAGE = FOLDER / "metrics.md"
DASHBOARD = FOLDER.parent / "deploy" / "grafana.json"
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


def queries() -> list[tuple[str, str]]:
    """Those of the page and of the dashboard, each with what its legend names."""
    asked = re.findall(
        r"`((?:\w+ ?(?:by \([^)]*\) )?\()[^`]*)`", PAGE.read_text().partition("## What to ask")[2]
    )
    board = json.loads(DASHBOARD.read_text())
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    return [(query, "") for query in asked] + [(each["expr"], each["legendFormat"]) for each in targets]


def test_every_query_asks_for_what_there_is_in_a_way_that_makes_sense() -> None:
    metrics, found = known(), queries()
    assert len(found) > 25
    for query, legend in found:
        names = re.findall(rf"(\w+\()?({PREFIX}_\w+)(?:\{{(\w+)!?=[^}}]*\}})?(\[)?", query)
        assert names, query
        for call, name, label, window in names:
            metric = name if name in metrics else re.sub(OF_HISTOGRAMS, "", name)
            kind, labels, _ = metrics[metric]
            assert (kind == "histogram") == (name != metric), query
            # What only grows says something by how fast it does, and nothing else does.
            assert (kind != "gauge") == (call in ("rate(", "increase(")) == bool(window), query
            assert label in ("", *labels), query
            by = [one for group in re.findall(r"by \(([^)]*)\)", query) for one in group.split(", ")]
            assert set(by) <= {*labels, "le"}, query
            assert ("le" in by) == ("histogram_quantile" in query) == name.endswith("_bucket"), query
            assert set(re.findall(r"\{\{(\w+)\}\}", legend)) == set(by) - {"le"} or not legend, query
        assert query.count("(") == query.count(")"), query
