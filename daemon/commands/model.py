"""`stateroom model add | list | remove`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from stateroom.daemon.commands.completing import installed_models
from stateroom.daemon.commands.options import AsJson
from stateroom.daemon.commands.switches import Commands
from stateroom.daemon.commands.terminal import err, out, size
from stateroom.daemon.exits import CONFIG, Leave
from stateroom.daemon.models import DEMO, InstalledModel, add_demo, list_installed, remove

app = Commands(help="Add, list and remove the models installed here.")
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The model's name.", autocompletion=installed_models)
]


@app.command("add")
def add_model(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Only 'demo' so far.", autocompletion=lambda: [DEMO]),
    ],
) -> None:
    """Fetch a model, once. Others are served from where they are: `serve --model PATH`."""
    if name != DEMO:
        raise Leave(
            CONFIG,
            f"Only 'demo' is fetched, not {name!r}; give `serve --model` a folder, a .gguf file or a Hugging "
            "Face id.",
        )
    model = fetch_demo()
    out.print(f"{model.name}: {size(model.bytes)} at {model.path}", markup=False, soft_wrap=True)


def fetch_demo() -> InstalledModel:
    """The demo model, with a bar while it comes; silent when it is there."""
    if any(model.name == DEMO for model in list_installed()):
        return add_demo()
    columns = (
        TextColumn("SmolLM2-135M"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None)
        return add_demo(lambda done, total: bar.update(task, completed=done, total=total))


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the installed models."""
    models = list_installed()
    if as_json:
        told = [{"name": model.name, "path": str(model.path), "bytes": model.bytes} for model in models]
        out.print_json(data=told)
        return
    if not models:
        err.print("None is installed; `stateroom model add demo` fetches a small one.")
    for model in models:
        out.print(f"{model.name}  {size(model.bytes)}  {model.path}", markup=False, soft_wrap=True)


@app.command("remove")
def remove_model(name: Name) -> None:
    """Delete an installed model."""
    out.print(f"{size(remove(name))} freed.")
