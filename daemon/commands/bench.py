"""`stateroom bench`: what a decode step takes on this machine, and where its time goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Annotated, Any

import typer
from rich.table import Table

from stateroom.client.limits import BATCH_MAX
from stateroom.daemon.blas import find_blas, preloaded
from stateroom.daemon.commands.options import AsJson
from stateroom.daemon.commands.terminal import out
from stateroom.daemon.config import model_specs
from stateroom.daemon.exits import FAILED, Leave
from stateroom.daemon.models import DEMO, list_installed, models_dir

PROCESS = (sys.executable, "-m", "stateroom.daemon.engine.profile")
TOKENS_MAX = 4096
# Of the parts that the process tells, those that are the model's own; the rest is ours.
OF_THE_MODEL = ("building the model's graph", "dispatch", "waiting")


def bench(
    model: Annotated[
        str | None, typer.Option(help="An installed name, a path or a Hugging Face id; by default the demo.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, max=BATCH_MAX, help="Sessions that decode together.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, max=TOKENS_MAX, help="Drawn by each.")] = 64,
    prompt: Annotated[int, typer.Option(min=2, help="Tokens that each holds before.")] = 128,
    profile: Annotated[bool, typer.Option("--profile", help="Show where a step's time goes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure decode steps of a model, in a process of its own like an engine's."""
    found = _measured(_spec(model), rows, tokens, prompt, profile)
    if as_json:
        out.print_json(data=found)
        return
    step_ms = found["total_s"] / found["steps"] * 1000
    if profile:
        out.print(table(found))
    facts = " · ".join(str(found["facts"][name]) for name in ("device", "dtype", "blas"))
    out.print(f"{rows} {'row' if rows == 1 else 'rows'} after {prompt} tokens, {facts}", markup=False)
    out.print(f"{step_ms:.2f} ms a step, {rows * 1000 / step_ms:.1f} tokens/s")


def _spec(model: str | None) -> str:
    names = [installed.name for installed in list_installed()]
    if model is None and not names:
        raise Leave(FAILED, "No model is installed; `stateroom model add demo` fetches a small one.")
    chosen = model or (DEMO if DEMO in names else names[0])
    return model_specs([chosen], models_dir())[0].spec


def _measured(spec: str, rows: int, tokens: int, prompt: int, profile: bool) -> dict[str, Any]:
    command = [*PROCESS, spec, "--rows", str(rows), "--tokens", str(tokens), "--prompt", str(prompt)]
    done = subprocess.run(
        [*command, "--timed" if profile else "--no-timed"],
        env=preloaded(os.environ, find_blas().library),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise Leave(FAILED, f"The model could not be measured: {last}")
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def table(found: dict[str, Any]) -> Table:
    """Milliseconds and percent of a step by part, in the order in which the process tells them."""
    total = found["total_s"]
    made = Table(box=None, pad_edge=False)
    made.add_column("PART", no_wrap=True)
    made.add_column("WHOSE", no_wrap=True)
    made.add_column("MS A STEP", justify="right", no_wrap=True)
    made.add_column("%", justify="right", no_wrap=True)

    def row(part: str, whose: str, seconds: float, style: str | None = None) -> None:
        shown = f"{seconds / found['steps'] * 1000:.3f}", f"{seconds / total * 100:.1f}"
        made.add_row(part, whose, *shown, style=style)

    parts = found["seconds"]
    for part, seconds in parts.items():
        row(part, "the model's" if part in OF_THE_MODEL else "ours", seconds)
    row("between them", "ours", total - sum(parts.values()))
    model = sum(parts[part] for part in OF_THE_MODEL)
    row("the model's forward", "", model, "bold")
    row("ours", "", total - model, "bold")
    return made
