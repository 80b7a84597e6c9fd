"""Draws docs/plots/*.svg from benchmarks/results/*.json: plain SVG, for light and dark pages.

python -m benchmarks.plots        # `make bench ARGS=--save` does it at its end
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS, PLOTS = ROOT / "benchmarks" / "results", ROOT / "docs" / "plots"
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 64, 84  # around the plot's area
TICKS = 5  # on an axis, about
TOLD = ("cpu", "cores", "mlx", "mlx-lm")  # of the machine, below each plot
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-size: 16px; font-weight: 600 }
  .small { font-size: 11px; fill: #656d76 }
  .axis { stroke: #8c959f; fill: none }
  .grid { stroke: #d0d7de; fill: none }
  .line { fill: none; stroke-width: 2.2; stroke-linejoin: round }
  .ours { stroke: #0969da } .peer { stroke: #bc4c00 }
  .dot.ours, .name.ours { fill: #0969da; stroke: none } .dot.peer, .name.peer { fill: #bc4c00; stroke: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 } .axis { stroke: #656d76 } .grid { stroke: #30363d }
    .ours { stroke: #58a6ff } .peer { stroke: #f0883e }
    .dot.ours, .name.ours { fill: #58a6ff } .dot.peer, .name.peer { fill: #f0883e }
  }
"""

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One line of a plot. `kind`: "ours" or "peer", which gives its colour."""

    name: str
    kind: str
    points: Sequence[Point]
    dots: bool = False


@dataclass(frozen=True)
class Plot:
    """Lines over two axes; y begins at zero. `ticks`: of the x axis, which is then logarithmic."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    caption: str
    ticks: Sequence[float] = ()

    def svg(self) -> str:
        xs = [x for line in self.lines for x, _ in line.points]
        y_ticks = _steps(0.0, max(y for line in self.lines for _, y in line.points))
        x_ticks = list(self.ticks) or _steps(min(xs), max(xs))
        across = _scale(x_ticks[0], x_ticks[-1], LEFT, WIDTH - RIGHT, logarithmic=bool(self.ticks))
        up = _scale(0.0, y_ticks[-1], HEIGHT - BOTTOM, TOP)
        parts = [f'<text class="title" x="{LEFT}" y="24">{escape(self.title)}</text>']
        for y in y_ticks:
            parts.append(f'<path class="grid" d="M{LEFT} {up(y):.1f}H{WIDTH - RIGHT}"/>')
            parts.append(_text(LEFT - 8, up(y) + 4, f"{y:g}", "end"))
        for x in x_ticks:
            parts.append(_text(across(x), HEIGHT - BOTTOM + 20, f"{x:g}", "middle"))
        parts.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 40, self.x_label, "middle"))
        parts.append(_text(LEFT, TOP - 12, self.y_label, "start", "small"))
        for at, line in enumerate(self.lines):
            parts += self._drawn(line, across, up)
            name = f'class="name {line.kind}"'
            parts.append(f'<circle {name} cx="{LEFT + 200 * at + 180}" cy="{TOP - 16}" r="5"/>')
            parts.append(_text(LEFT + 200 * at + 192, TOP - 12, line.name, "start"))
        parts.append(_text(LEFT, HEIGHT - 14, self.caption, "start", "small"))
        inner = "\n".join(parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n{inner}\n</svg>\n"
        )

    @staticmethod
    def _drawn(line: Line, across: Callable[[float], float], up: Callable[[float], float]) -> list[str]:
        at = [(across(x), up(y)) for x, y in line.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
        made = [f'<path class="line {line.kind}" d="M{path}"/>']
        if line.dots:
            made += [f'<circle class="dot {line.kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in at]
        return made


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _scale(
    low: float, high: float, start: float, end: float, *, logarithmic: bool = False
) -> Callable[[float], float]:
    """From an axis' values to places in the picture."""
    of: Callable[[float], float] = math.log2 if logarithmic else float
    span = (of(high) - of(low)) or 1.0
    return lambda value: start + (of(value) - of(low)) / span * (end - start)


def _steps(low: float, high: float) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    rough = max(high - low, 1e-9) / TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(i * step, 9) for i in range(first, last + 1)]


def _caption(result: dict[str, Any]) -> str:
    machine = result["machine"]
    told = [machine[name] if name == "cpu" else f"{name} {machine[name]}" for name in TOLD]
    return " · ".join(["SmolLM2-135M, float32", *told, result["date"]])


def forks(result: dict[str, Any]) -> Plot:
    """Tokens per second against the number of forks."""
    figures = [f for f in result["figures"] if f["series"].get("forks") and "switched" not in f["peer_name"]]
    length = min(f["series"]["length"][0] for f in figures)
    figures = [f for f in figures if f["series"]["length"][0] == length and f["ours"]]
    figures.sort(key=lambda f: f["series"]["forks"])
    counts = [f["series"]["forks"][0] for f in figures]

    def line(side: str) -> list[Point]:
        return [(count, median(f[side])) for count, f in zip(counts, figures, strict=True)]

    return Plot(
        f"Forks of one session of {length:,} tokens, decoding at once",
        "forks",
        "tokens per second",
        [
            Line("stateroom", "ours", line("ours"), dots=True),
            Line("mlx-lm's BatchGenerator, copies", "peer", line("peer"), dots=True),
        ],
        _caption(result),
        ticks=counts,
    )


def gap(result: dict[str, Any]) -> Plot:
    """Seconds since the running stream's last token, while another app's prompt is computed."""
    figure = next(f for f in result["figures"] if f["series"].get("ours_s"))

    def line(times: Sequence[float]) -> list[Point]:
        after = [(a, b) for a, b in pairwise(times) if b > 0]
        teeth = [[(max(a, 0.0), max(-a, 0.0)), (b, b - a)] for a, b in after]
        return [point for tooth in teeth for point in tooth]

    return Plot(
        f"A stream, while another app's prompt of {figure['series']['length'][0]:,} tokens is computed",
        "seconds after the other app's request",
        "seconds since its last token",
        [
            Line("mlx_lm.server", "peer", line(figure["series"]["peer_s"])),
            Line("stateroom", "ours", line(figure["series"]["ours_s"])),
        ],
        _caption(result),
    )


DRAWN: dict[str, Callable[[dict[str, Any]], Plot]] = {"forks": forks, "gap": gap}


def draw(results: Path = RESULTS, plots: Path = PLOTS) -> list[Path]:
    """Draws every plot whose data is there, and gives the files."""
    plots.mkdir(parents=True, exist_ok=True)
    made = []
    for name, plot in DRAWN.items():
        kept = results / f"{name}.json"
        if kept.exists():
            made.append(plots / f"{name}.svg")
            made[-1].write_text(plot(json.loads(kept.read_text())).svg())
    return made


if __name__ == "__main__":
    for path in draw():
        print(path.relative_to(ROOT))
