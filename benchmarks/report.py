"""The table on the terminal, and the figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from benchmarks.measurement import TIE_MARGIN, Measurement
from rich.console import Console
from rich.table import Table

WIDTH_MIN = 190  # of the table where the output is no terminal
CLAIM_WIDTH_MIN = 24

console = Console()
if not console.is_terminal:
    console = Console(width=WIDTH_MIN)


def header(about: dict[str, str], quick: bool) -> None:
    console.print(
        " · ".join(f"{name} {value}" for name, value in about.items()), style="dim", highlight=False
    )
    if quick:
        console.print("Quick: toys and single rounds. The figures mean nothing.", style="yellow")


def progress(name: str, seconds: float) -> None:
    console.print(f"{name}: {seconds:.0f} s", style="dim", highlight=False)


def table(measurements: Sequence[Measurement]) -> None:
    made = Table(show_lines=False, pad_edge=False)
    for column in ("claim", "ours", "peer", "against", "ratio", "spread", "tokens", "goal", "met"):
        right = column in ("ours", "peer", "ratio", "spread", "goal")
        least = CLAIM_WIDTH_MIN if column == "claim" else None
        made.add_column(column, justify="right" if right else "left", no_wrap=not least, min_width=least)
    for measurement in measurements:
        made.add_row(*_row(measurement), style=None if measurement.valid else "red")
    console.print(made)
    for measurement in measurements:
        for note in measurement.tokens.notes:
            console.print(f"  {measurement.claim}: {note}", style="dim", highlight=False)
    console.print(
        "Ratio: how many times as good as the peer (median of the rounds; spread: least and most). "
        f"Greedy tokens are equal but for ties within {TIE_MARGIN:g}.",
        style="dim",
        highlight=False,
    )


def _row(measurement: Measurement) -> list[str]:
    agreement = measurement.tokens.agreement.value
    if not measurement.valid:
        return [measurement.claim, "", "", measurement.peer_name, "", "", agreement, measurement.goal, "–"]
    met = {True: "yes", False: "no", None: "–"}[measurement.met]
    if measurement.most_added is not None:
        ratio = f"{median(measurement.added):+.3f} {measurement.unit}"
        spread = _spread(measurement.added, "+.2f")
    elif measurement.ratio is not None:
        ratio, spread = f"{measurement.ratio:.3f}×", _spread(measurement.ratios, ".2f")
    else:
        ratio, spread = "–", _spread(measurement.ours, ".3g")
    sides = (measurement.ours, measurement.peer)
    figures = [f"{_short(median(side))} {measurement.unit}" if side else "–" for side in sides]
    return [
        measurement.claim,
        *figures,
        measurement.peer_name,
        ratio,
        spread,
        agreement,
        measurement.goal,
        met,
    ]


def _spread(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} … {max(values):{form}}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def save(path: Path, about: dict[str, str], measurements: Sequence[Measurement]) -> None:
    """Figures round by round, with the machine and the versions they were taken on."""
    path.parent.mkdir(exist_ok=True)
    figures = []
    for measurement in measurements:
        plain = asdict(measurement)
        plain["tokens"] = {"equal": measurement.tokens.agreement.value, "notes": measurement.tokens.notes}
        if not measurement.valid:
            plain["ours"] = plain["peer"] = []
            plain["series"] = {}
        elif measurement.ratio is not None:
            plain["ratio"] = round(measurement.ratio, 4)
        figures.append(plain | {"goal": measurement.goal, "met": measurement.met})
    day = datetime.now(UTC).date().isoformat()
    path.write_text(json.dumps({"date": day, "machine": about, "figures": figures}, indent=1) + "\n")
