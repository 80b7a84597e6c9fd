"""`stateroom serve`."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import typer

from stateroom.client.errors import BadEndpoint
from stateroom.client.limits import BATCH_MAX
from stateroom.client.paths import check_endpoint, default_endpoint, home_dir, ipc_path, runtime_dir
from stateroom.daemon.config import STATE_NAME, Config, model_specs, parse_bytes, parse_weights
from stateroom.daemon.exits import CONFIG, Leave
from stateroom.daemon.logs import LogFormat
from stateroom.daemon.models import models_dir

LogLevel = Literal["debug", "info", "warning", "error"]


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(help="To load: an installed name, a directory, a GGUF file or a Hugging Face id."),
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Where to listen", envvar="STATEROOM_ENDPOINT")] = None,
    home: Annotated[
        Path | None, typer.Option(help="Where models and sessions are kept", envvar="STATEROOM_HOME")
    ] = None,
    kv_budget: Annotated[
        str | None,
        typer.Option(
            help="The most KV that each model's sessions may take, like 8GiB. Checked when a request is "
            "admitted: for a decode, by its next 256 tokens."
        ),
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option(help="APP=N: this app gets N times what others get of a device when they all wait."),
    ] = None,
    gap_ms: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="How long a prefill may keep running streams waiting. [50 on a GPU, 3 steps on a CPU]",
        ),
    ] = None,
    rows_max: Annotated[
        int, typer.Option(min=1, max=BATCH_MAX, help="Streams of a model that decode at once; others wait.")
    ] = BATCH_MAX,
    allow_any_model: Annotated[
        bool, typer.Option(help="Let clients open any model by its path or Hugging Face id.")
    ] = False,
    log: Annotated[LogFormat, typer.Option(help="The log's form, on stderr.", envvar="STATEROOM_LOG")] = (
        "console"
    ),
    log_level: Annotated[LogLevel, typer.Option(help="The least that is logged.")] = "info",
    log_content: Annotated[
        bool, typer.Option(help="Log prompts and answers too; by default they never are.")
    ] = False,
) -> None:
    """Run the daemon in the foreground, until Ctrl-C or `stateroom stop`."""
    from stateroom.daemon.serve import serve as run

    if home is not None:
        os.environ["STATEROOM_HOME"] = str(home.expanduser().resolve())  # for the workers, too
    try:
        where = endpoint or default_endpoint()
        check_endpoint(where)
    except BadEndpoint as error:
        raise Leave(CONFIG, str(error)) from error
    check_public(where)
    path = ipc_path(where)
    config = Config(
        endpoint=where if path is None else f"ipc://{path}",
        runtime_dir=runtime_dir(),
        models_dir=models_dir(),
        state_dir=home_dir() / STATE_NAME,
        models=model_specs(model or [], models_dir()),
        allow_any_model=allow_any_model,
        kv_budget_bytes=parse_bytes(kv_budget) if kv_budget else None,
        weights=parse_weights(weight or []),
        gap_ms=gap_ms,
        rows_max=rows_max,
        log_format=log,
        log_level=log_level,
        log_content=log_content,
    )
    raise typer.Exit(run(config))


def check_public(endpoint: str) -> None:
    """Refuses an endpoint that others on the network could reach: nothing there asks who they are.

    Raises:
        Leave: it is not `ipc://` with a path, nor `tcp://` on this machine alone.
    """
    if endpoint.startswith("ipc://"):
        if ipc_path(endpoint) is None:
            raise Leave(CONFIG, "An abstract socket (ipc://@…) is open to every user; name a path.")
        return
    host = urlsplit(endpoint).hostname or ""
    if endpoint.startswith("tcp://"):
        try:
            if ipaddress.ip_address(host).is_loopback:
                return
        except ValueError:
            pass
        raise Leave(CONFIG, f"tcp is served on this machine alone: tcp://127.0.0.1:PORT, not {endpoint}.")
    raise Leave(CONFIG, f"The daemon listens on ipc:// or tcp://127.0.0.1, not on {endpoint}.")
