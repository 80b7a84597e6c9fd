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
from stateroom.daemon.config import STATE_NAME, Config, model_specs, parse_bytes, parse_quotas, parse_weights
from stateroom.daemon.exits import CONFIG, Leave
from stateroom.daemon.keys import KEYS_NAME, Keys, over_network
from stateroom.daemon.log_file import log_path
from stateroom.daemon.logs import LogFormat
from stateroom.daemon.models import models_dir

MIN_VERIFY_HOURS = 0.01

UNLOAD_AFTER_S = 3_600.0
LogLevel = Literal["debug", "info", "warning", "error"]


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(help="To load: an installed name, a directory, a GGUF file or a Hugging Face id."),
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Where to listen", envvar="STATEROOM_ENDPOINT")] = None,
    listen: Annotated[
        str | None,
        typer.Option(help="A second endpoint, tcp://HOST:PORT, for those with a key: see `stateroom keys`."),
    ] = None,
    activated: Annotated[
        bool,
        typer.Option(
            "--activated", help="Take the socket from systemd or launchd: see `stateroom service install`."
        ),
    ] = False,
    insecure_loopback: Annotated[
        bool,
        typer.Option(
            "--insecure-loopback", help="Serve tcp:// without keys, on this machine, to every user of it."
        ),
    ] = False,
    home: Annotated[
        Path | None, typer.Option(help="Where models and sessions are kept", envvar="STATEROOM_HOME")
    ] = None,
    keep: Annotated[
        bool, typer.Option(help="Keep sessions on disk, so that they outlive the daemon.")
    ] = True,
    disk: Annotated[
        str | None,
        typer.Option(
            help="The most that one model's snapshots may take, like 32GiB; what the daemon keeps by itself "
            "goes first, the oldest before others. [32GiB]"
        ),
    ] = None,
    disk_free: Annotated[
        str | None,
        typer.Option(help="What snapshots leave free on their disk. [4GiB, on a small disk a twentieth]"),
    ] = None,
    kv_budget: Annotated[
        str | None,
        typer.Option(
            help="The most KV that all sessions may take together, like 8GiB; idle ones move to disk before "
            "it is passed. By default three quarters of the memory, less weights and 1 GiB."
        ),
    ] = None,
    unload_after: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds without a request until a model is unloaded; 0: never."),
    ] = UNLOAD_AFTER_S,
    weight: Annotated[
        list[str] | None,
        typer.Option(help="APP=N: this app gets N times what others get of a device when they all wait."),
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            help="APP=LIMITS, like sessions:9,bytes:8GiB (also disk:, requests:): the most that this app may "
            "have at once; default=… for all that have none of their own."
        ),
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
    verify_every: Annotated[
        float | None,
        typer.Option(
            min=MIN_VERIFY_HOURS,
            help="HOURS: so often every idle session is computed again in the background and compared with "
            "what is stored; `stats` counts, the log tells of those that differ.",
        ),
    ] = None,
    allow_any_model: Annotated[
        bool,
        typer.Option("--allow-any-model", help="Let clients open any model by its path or Hugging Face id."),
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Tell Prometheus how things are, on 127.0.0.1; 0 takes any port."
        ),
    ] = None,
    log: Annotated[LogFormat, typer.Option(help="The log's form, on stderr.", envvar="STATEROOM_LOG")] = (
        "console"
    ),
    log_level: Annotated[LogLevel, typer.Option(help="The least that is logged.")] = "info",
    log_content: Annotated[
        bool, typer.Option("--log-content", help="Log prompts and answers too; by default they never are.")
    ] = False,
    record: Annotated[
        bool, typer.Option(help="Remember what happened to each of the last requests, for `trace`.")
    ] = True,
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
    keys_dir = home_dir() / KEYS_NAME
    check_public(where, insecure_loopback)
    if listen is not None:
        check_second(listen, insecure_loopback)
    if not insecure_loopback:
        Keys(keys_dir).pair_for(where, listen)
    path = ipc_path(where)
    config = Config(
        endpoint=where if path is None else f"ipc://{path}",
        runtime_dir=runtime_dir(),
        models_dir=models_dir(),
        state_dir=home_dir() / STATE_NAME if keep else None,
        keys_dir=keys_dir,
        activated=activated,
        listen=listen,
        insecure_loopback=insecure_loopback,
        models=model_specs(model or [], models_dir()),
        allow_any_model=allow_any_model,
        kv_budget_bytes=parse_bytes(kv_budget) if kv_budget else None,
        unload_after_s=unload_after or None,
        weights=parse_weights(weight or []),
        quotas=parse_quotas(quota or []),
        gap_ms=gap_ms,
        rows_max=rows_max,
        verify_every_s=None if verify_every is None else verify_every * 3600.0,
        log_format=log,
        log_level=log_level,
        log_content=log_content,
        record=record,
        log_file=log_path(home_dir()),
        metrics_port=metrics_port,
        disk_bytes_max=parse_bytes(disk) if disk else None,
        disk_free_bytes=parse_bytes(disk_free) if disk_free else None,
    )
    raise typer.Exit(run(config))


def check_public(endpoint: str, insecure: bool) -> None:
    """Refuses an endpoint where somebody could come whom nothing there would ask who he is.

    Raises:
        Leave: it is not `ipc://` with a path, nor `tcp://`; or without keys and not on this machine alone.
    """
    if endpoint.startswith("ipc://"):
        if ipc_path(endpoint) is None:
            raise Leave(CONFIG, "An abstract socket (ipc://@…) is open to every user; name a path.")
    elif not over_network(endpoint):
        raise Leave(CONFIG, f"The daemon listens on ipc:// or tcp://, not on {endpoint}.")
    elif insecure and not on_loopback(endpoint):
        raise Leave(CONFIG, f"Without keys tcp is served on this machine alone, not at {endpoint}.")


def check_second(endpoint: str, insecure: bool) -> None:
    """Raises: Leave: a second endpoint that isn't `tcp://`, or that `check_public` refuses."""
    if not over_network(endpoint):
        raise Leave(CONFIG, f"--listen takes tcp://HOST:PORT, not {endpoint}.")
    check_public(endpoint, insecure)


def on_loopback(endpoint: str) -> bool:
    """Whether the address is this machine's alone, as it stands: names are not looked up."""
    try:
        return ipaddress.ip_address(urlsplit(endpoint).hostname or "").is_loopback
    except ValueError:
        return False
