"""What claims are made of: rates of streams, goals, plots, and that every claim runs."""

from __future__ import annotations

import ast
import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from benchmarks import plots, report, run
from benchmarks.claims import gap, speculation
from benchmarks.measurement import Measurement
from benchmarks.streams import Drawn
from typer.testing import CliRunner

SVG = "{http://www.w3.org/2000/svg}"


def test_streams_are_fast_while_all_draw() -> None:
    """From when the last one began: what the first drew alone doesn't count."""
    drawn = Drawn([[1, 2, 3, 4], [5, 6, 7]], [[1.0, 2.0, 3.0, 5.0], [2.0, 4.0, 6.0]])
    assert drawn.all_s == 2.0
    assert drawn.tokens_per_s == 4 / 4.0


def test_the_gap_is_looked_for_while_the_other_waits() -> None:
    times = [-9.0, -1.0, 0.5, 3.5, 4.0, 5.5, 9.0]
    assert gap.Scene("", times, "", first_s=4.5).gap_s == 3.0
    assert gap.Scene("", times, "", first_s=6.0).gap_s == 3.5


def test_limits_need_no_peer() -> None:
    held = Measurement("a claim", "ms", ours=(0.5, 0.7, 3.0), most=1.0)
    assert (held.met, held.ratio, held.goal) == (True, None, "≤ 1 ms")
    assert Measurement("a claim", "bytes", ours=(0.0, 8.0, 8.0), most=0).met is False
    with report.console.capture() as captured:
        report.table([held])
    assert "0.7 ms" in captured.get()


def test_what_is_added_is_shown_in_its_unit() -> None:
    with report.console.capture() as captured:
        report.table([Measurement("a claim", "µs", (3.0,), (1.0,), "a peer", most_added=5.0)])
    assert "+2.000 µs" in captured.get()


def test_prompts_are_code_that_is_there_twice() -> None:
    """Ten functions of the repository, each whole, and begun again with one name changed."""
    made = speculation.prompts()
    assert len(set(made)) == speculation.PROMPTS
    for prompt in made:
        _, code, after = re.split(r"^# (?:Before:|After .*:)\n", prompt, flags=re.MULTILINE)
        (function,) = ast.parse(code).body
        assert isinstance(function, ast.FunctionDef)
        begun = after.strip()
        assert "new_" in begun
        assert code.strip().startswith(begun.replace("new_", ""))


# ---------------------------------------------------------------- plots


def saved(folder: Path, name: str, measurements: list[Measurement]) -> None:
    about = dict.fromkeys(plots.TOLD, "a & b")
    report.save(folder / f"{name}.json", about, measurements)


def forked(count: int, length: int, ours: float, peer: float) -> Measurement:
    return Measurement(
        "forks", "tokens/s", (ours,), (peer,), "a peer", series={"forks": (count,), "length": (length,)}
    )


@pytest.fixture
def drawn(tmp_path: Path) -> dict[str, ElementTree.Element]:
    results = tmp_path / "results"
    saved(
        results, "forks", [forked(8, 100, 90.0, 40.0), forked(2, 100, 30.0, 20.0), forked(8, 300, 1.0, 1.0)]
    )
    series = {"ours_s": (-1.0, 0.0, 0.5, 1.0), "peer_s": (-3.0, -1.0, 9.0), "length": (100,)}
    saved(results, "gap", [Measurement("gap", "s", (0.5,), (9.0,), "a peer", series=series)])
    made = plots.draw(results, tmp_path / "plots")
    return {path.stem: ElementTree.parse(path).getroot() for path in made}


def points(svg: ElementTree.Element, kind: str) -> list[tuple[float, float]]:
    (path,) = (p for p in svg.iter(f"{SVG}path") if p.get("class") == f"line {kind}")
    places = path.attrib["d"].removeprefix("M").split("L")
    return [(float(x), float(y)) for x, y in (place.split() for place in places)]


def test_a_plot_has_both_lines_of_the_shorter_session(drawn: dict[str, ElementTree.Element]) -> None:
    ours, peer = points(drawn["forks"], "ours"), points(drawn["forks"], "peer")
    assert [x for x, _ in ours] == [x for x, _ in peer] == sorted(x for x, _ in ours)
    assert len(ours) == 2
    floor = plots.HEIGHT - plots.BOTTOM
    heights = [floor - y for _, y in (*ours, *peer)]
    assert [height / heights[0] for height in heights] == pytest.approx([1, 3, 2 / 3, 4 / 3], rel=0.01)


def test_a_gap_is_as_high_as_it_is_long(drawn: dict[str, ElementTree.Element]) -> None:
    """A tooth for each token after the request; nothing leaves the picture."""
    ours, peer = points(drawn["gap"], "ours"), points(drawn["gap"], "peer")
    assert (len(ours), len(peer)) == (4, 2)
    floor = plots.HEIGHT - plots.BOTTOM
    assert (floor - peer[1][1]) / (floor - ours[1][1]) == pytest.approx(20, rel=0.01)
    assert (floor - peer[1][1]) / (floor - peer[0][1]) == pytest.approx(10, rel=0.01)
    for x, y in (*ours, *peer):
        assert plots.LEFT <= x <= plots.WIDTH - plots.RIGHT
        assert plots.TOP <= y <= floor


def test_plots_are_readable_on_dark_pages_and_say_where_they_are_from(
    drawn: dict[str, ElementTree.Element],
) -> None:
    for svg in drawn.values():
        style = svg.find(f"{SVG}style")
        assert style is not None
        assert "prefers-color-scheme: dark" in (style.text or "")
        assert any("a & b" in (text.text or "") for text in svg.iter(f"{SVG}text"))


def test_a_plot_without_data_is_left_alone(tmp_path: Path) -> None:
    assert plots.draw(tmp_path, tmp_path / "plots") == []


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.007), (0.0, 1.0), (-3.2, 47.0), (2.0, 2.0), (0, 1e6)])
def test_an_axis_holds_its_values_in_few_round_steps(low: float, high: float) -> None:
    ticks = plots._steps(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 1 <= len(ticks) <= plots.TICKS + 3
    gaps = {round(b - a, 9) for a, b in pairwise(ticks)}
    assert all(f"{step:.0e}"[0] in "125" for step in gaps)


def test_a_measurement_is_saved_with_what_plots_need(tmp_path: Path) -> None:
    saved(tmp_path, "forks", [forked(8, 100, 90.0, 40.0)])
    kept: dict[str, Any] = json.loads((tmp_path / "forks.json").read_text())
    assert kept["figures"][0]["series"] == {"forks": [8], "length": [100]}
    assert math.isclose(kept["figures"][0]["ratio"], 2.25)


# ---------------------------------------------------------------- all of it


@pytest.mark.system
def test_every_claim_runs() -> None:
    """With daemons, peers and a server of mlx-lm's, on toys: the same tokens everywhere."""
    with report.console.capture() as captured:
        result = CliRunner().invoke(run.app, ["--quick"])
    assert result.exit_code == 0, f"{result.output}\n{captured.get()}"
    for name in run.CLAIMS:
        assert f"{name}: " in captured.get()
