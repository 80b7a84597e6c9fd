"""Runs the claims and prints one table. The exit code is 1 when tokens differ, and never about speed.

    make bench                                 # all of it, in minutes
    make bench ARGS="--only overhead"
    make bench ARGS="--quick"                  # toys and single rounds: do the scripts work?

Ours and the peer run in turns, A B A B …, each alone while it works. The ratio is the median of the rounds'
own ratios, so that a machine that slows down meets both sides alike; the spread is their least and most.
Where greedy tokens differ, beyond ties of logits closer than `TIE_MARGIN`, no speed is printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from benchmarks import plots, report
from benchmarks.claims import (
    cache_step,
    company,
    edit,
    fork,
    forks,
    gap,
    idle,
    journal,
    kv_quality,
    observability,
    overhead,
    round_trip,
    single,
    speculation,
    sync,
)
from benchmarks.machine import machine
from benchmarks.measurement import Measurement
from benchmarks.rig import TOY, Rig

CLAIMS: dict[str, Callable[[Rig], list[Measurement]]] = {
    "single": single.run,
    "company": company.run,
    "forks": forks.run,
    "edit": edit.run,
    "sync": sync.run,
    "gap": gap.run,
    "speculation": speculation.run,
    "idle": idle.run,
    "journal": journal.run,
    "fork": fork.run,
    "cache-step": cache_step.run,
    "overhead": overhead.run,
    "observability": observability.run,
    "round-trip": round_trip.run,
    "kv-quality": kv_quality.run,
}
RESULTS = Path(__file__).parent / "results"

app = typer.Typer(add_completion=False)


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(CLAIMS)}; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option(help="Toys and single rounds: the figures mean nothing.")] = False,
    save: Annotated[
        bool, typer.Option(help="Write the figures to benchmarks/results, and the plots.")
    ] = False,
) -> None:
    """Measures what the README claims."""
    wrong = set(only or ()) - set(CLAIMS)
    if wrong:
        raise typer.BadParameter(
            f"{', '.join(sorted(wrong))}: not among {', '.join(CLAIMS)}", param_hint="--only"
        )
    found: list[Measurement] = []
    with Rig(quick) as rig:
        about = machine() | _peer_facts(rig)
        report.header(about, quick)
        for name in only or CLAIMS:
            begin = time.monotonic()
            measurements = CLAIMS[name](rig)
            report.progress(name, time.monotonic() - begin)
            if save and not quick:
                report.save(RESULTS / f"{name}.json", about, measurements)
            found += measurements
    report.table(found)
    if save and not quick:
        plots.draw()
    raise typer.Exit(0 if all(measurement.valid for measurement in found) else 1)


def _peer_facts(rig: Rig) -> dict[str, str]:
    """Device and BLAS, which are the same for the daemon's worker: both are started in the same way."""
    with rig.peer(TOY) as peer:
        return peer.facts()
