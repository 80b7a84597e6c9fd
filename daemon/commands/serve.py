"""`stateroom serve`."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import typer
from typer.core import TyperOption

from stateroom.client.errors import BadEndpoint
from stateroom.client.limits import BATCH_MAX
from stateroom.client.paths import check_endpoint, default_endpoint, home_dir, ipc_path, runtime_dir
from stateroom.daemon import settings
from stateroom.daemon.commands.completing import installed_models
from stateroom.daemon.commands.switches import Command
from stateroom.daemon.config import STATE_NAME, Config, parse_bytes, parse_quotas, parse_weights
from stateroom.daemon.exits import CONFIG, Leave
from stateroom.daemon.keys import KEYS_NAME, Keys, over_network
from stateroom.daemon.log_file import LogFormat, log_path
from stateroom.daemon.models import models_dir
from stateroom.daemon.readable import readable_specs
from stateroom.daemon.settings.known import PREFIX, variable_of

MIN_VERIFY_HOURS = 0.01

UNLOAD_AFTER_S = 3_600.0
LogLevel = Literal["debug", "info", "warning", "error"]
# The panels of `serve --help`, and the parts of a configuration file.
MODELS, WHERE, MEMORY, SHARING, POWER, LOOK, LOG = (
    "Models", "Where", "Memory and disk", "Sharing a device", "Sleep", "Looking at it", "Log",
)  # fmt: skip


def configure(context: typer.Context, home: Path | None) -> Path | None:
    """Takes the home, and of its configuration file what neither options nor environment say.

    Raises:
        BadConfig: the file can't be used.
        BadEndpoint: the home is the environment's, and not absolute: to clients it would be another.
    """
    if context.resilient_parsing:  # for completions
        return home
    if home is not None:
        source = context.get_parameter_source("home")
        given = source is not None and source.name == "ENVIRONMENT"
        home = home_dir() if given else home.expanduser().resolve()
        os.environ["STATEROOM_HOME"] = str(home)  # for the workers, too
    context.default_map = settings.load().values
    return home


class ServeCommand(Command):
    """`serve` to click: it has a variable for each option, and one that can't be is named."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for parameter in self.params:
            if isinstance(parameter, TyperOption):
                parameter.show_envvar = False  # the help says once what they are called

    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        try:
            return super().make_context(*arguments, **extra, auto_envvar_prefix=PREFIX.removesuffix("_"))
        except typer.BadParameter as error:
            if error.ctx is None or error.param is None or not _of_the_environment(error.ctx, error.param):
                raise
            raise Leave(CONFIG, f"${variable_of(error.param.name)} can't be that: {error.message}") from None


def _of_the_environment(context: Any, parameter: Any) -> bool:
    source = context.get_parameter_source(parameter.name)
    return source is not None and source.name == "ENVIRONMENT"


def checked(parse: Callable[[Any], object]) -> Callable[..., Any]:
    """For an option whose text `parse` can read, or says why not; who wrote it is told, too."""

    def check(context: typer.Context, parameter: typer.CallbackParam, given: Any) -> Any:
        try:
            if given:
                parse(given)
        except Leave as refused:
            where = parameter.opts[0]
            if _of_the_environment(context, parameter):
                where = f"${variable_of(parameter.name)}"
            raise Leave(refused.code, f"{where} can't be that: {refused.message}") from None
        return given

    return check


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL",
            help="Load at the start: an installed name, a folder, a GGUF file or a Hugging Face id. The "
            "first is used where a client names none. May be given several times.",
            show_default="none",
            autocompletion=installed_models,
            rich_help_panel=MODELS,
        ),
    ] = None,
    allow_any_model: Annotated[
        bool,
        typer.Option(
            "--allow-any-model",
            help="Let clients open any model by its path or Hugging Face id.",
            rich_help_panel=MODELS,
        ),
    ] = False,
    unload_after: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            help="Unload a model that nobody has used for so many seconds; 0: never.",
            rich_help_panel=MODELS,
        ),
    ] = UNLOAD_AFTER_S,
    home: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where models, sessions, keys, logs and config.toml are.",
            envvar="STATEROOM_HOME",
            show_default="~/.stateroom",
            is_eager=True,  # it says where the file is that gives the other options' defaults
            callback=configure,
            rich_help_panel=WHERE,
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="Where to listen: ipc:// and a socket's path, for this user alone, or tcp://HOST:PORT.",
            envvar="STATEROOM_ENDPOINT",
            show_default="stateroom.sock in the runtime directory",
            rich_help_panel=WHERE,
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="TCP",
            help="Listen at tcp://HOST:PORT too, for those with a key: see `stateroom keys`.",
            show_default="nowhere",
            rich_help_panel=WHERE,
        ),
    ] = None,
    activated: Annotated[
        bool,
        typer.Option(
            "--activated",
            help="Take the socket from systemd or launchd: see `stateroom service install`.",
            allow_from_autoenv=False,  # only they can mean it
            rich_help_panel=WHERE,
        ),
    ] = False,
    insecure_loopback: Annotated[
        bool,
        typer.Option(
            "--insecure-loopback",
            help="Serve tcp:// without keys, on this machine alone, to every user of it.",
            rich_help_panel=WHERE,
        ),
    ] = False,
    kv_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="The most KV that all sessions may have in memory together, like 8GiB. Idle ones move to "
            "disk before it is passed.",
            show_default="three quarters of the memory, less weights and 1 GiB",
            callback=checked(parse_bytes),
            rich_help_panel=MEMORY,
        ),
    ] = None,
    keep: Annotated[
        bool,
        typer.Option(help="Keep sessions on disk, so that they outlive the daemon.", rich_help_panel=MEMORY),
    ] = True,
    disk: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="The most that the snapshots of one model may take. What the daemon keeps by itself goes "
            "first, the oldest before others; what was saved by name stays.",
            show_default="32GiB",
            callback=checked(parse_bytes),
            rich_help_panel=MEMORY,
        ),
    ] = None,
    disk_free: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="What snapshots leave free on their disk.",
            show_default="4GiB, on a small disk a twentieth",
            callback=checked(parse_bytes),
            rich_help_panel=MEMORY,
        ),
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option(
            metavar="APP=N",
            help="This app gets N times what others get of a device while all of them wait. May be given "
            "several times.",
            show_default="1 each",
            callback=checked(parse_weights),
            rich_help_panel=SHARING,
        ),
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            metavar="APP=LIMITS",
            help="The most that this app may have at once, like editor=sessions:9,bytes:8GiB; limits are "
            "sessions, bytes (of KV), disk and requests. APP `default` stands for all without a quota of "
            "their own. May be given several times.",
            show_default="half of the daemon's sessions and requests",
            callback=checked(parse_quotas),
            rich_help_panel=SHARING,
        ),
    ] = None,
    gap_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            min=1.0,
            help="How long a prefill may keep running streams waiting, in milliseconds.",
            show_default="50 on a GPU, 3 steps on a CPU",
            rich_help_panel=SHARING,
        ),
    ] = None,
    rows_max: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=BATCH_MAX,
            help="Streams of one model that decode at once; others wait their turn.",
            rich_help_panel=SHARING,
        ),
    ] = BATCH_MAX,
    keep_awake: Annotated[
        bool,
        typer.Option(help="Keep a Mac from going to sleep while requests run.", rich_help_panel=POWER),
    ] = True,
    verify_every: Annotated[
        float | None,
        typer.Option(
            metavar="HOURS",
            min=MIN_VERIFY_HOURS,
            help="Every so many hours compute each idle session again, in the background, and compare it "
            "with what is stored. `stats` counts those that differ, the log names them.",
            show_default="only when asked: `stateroom verify`",
            rich_help_panel=LOOK,
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65535,
            help="Tell Prometheus how things are, on 127.0.0.1; 0 takes any port.",
            show_default="no page",
            rich_help_panel=LOOK,
        ),
    ] = None,
    record: Annotated[
        bool,
        typer.Option(
            help="Remember what happened to each of the last requests, for `stateroom trace`.",
            rich_help_panel=LOOK,
        ),
    ] = True,
    log: Annotated[
        LogFormat,
        typer.Option(
            metavar="FORM",
            help="json or console: the log's form on stderr. In its file it is JSON.",
            envvar="STATEROOM_LOG",
            rich_help_panel=LOG,
        ),
    ] = "console",
    log_level: Annotated[
        LogLevel,
        typer.Option(
            metavar="LEVEL",
            help="debug, info, warning or error: the least that is logged.",
            rich_help_panel=LOG,
        ),
    ] = "info",
    log_content: Annotated[
        bool,
        typer.Option(
            "--log-content",
            help="Log prompts and answers too; by default they never are.",
            rich_help_panel=LOG,
        ),
    ] = False,
) -> None:
    """Run the daemon in the foreground, until Ctrl-C or `stateroom stop`.

    Each option may also stand in the configuration file (`stateroom config init`
    writes one) or in the environment: --kv-budget is STATEROOM_KV_BUDGET. The
    environment overrides the file, an option overrides both.

    stateroom serve --model demo
    stateroom serve --model ~/models/qwen --kv-budget 8GiB --metrics-port 9464
    """
    from stateroom.daemon.serve import serve as run
    from stateroom.daemon.wakefulness import keeper_of

    where = listened_at(endpoint, listen, insecure_loopback)
    path = ipc_path(where)
    config = Config(
        endpoint=where if path is None else f"ipc://{path}",
        runtime_dir=runtime_dir(),
        models_dir=models_dir(),
        state_dir=home_dir() / STATE_NAME if keep else None,
        keys_dir=home_dir() / KEYS_NAME,
        activated=activated,
        listen=listen,
        insecure_loopback=insecure_loopback,
        models=readable_specs(model or [], models_dir()),
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
        keep_awake=keeper_of() if keep_awake else None,
        record=record,
        log_file=log_path(home_dir()),
        metrics_port=metrics_port,
        disk_bytes_max=parse_bytes(disk) if disk else None,
        disk_free_bytes=parse_bytes(disk_free) if disk_free else None,
    )
    raise typer.Exit(run(config))


def refuse(options: Mapping[str, Any]) -> None:
    """Raises: Leave: what `serve` would refuse of its options, though each of them could be."""
    listened_at(options["endpoint"], options["listen"], options["insecure_loopback"])
    readable_specs(options["model"] or [], models_dir())


def listened_at(endpoint: str | None, listen: str | None, insecure: bool) -> str:
    """The endpoint, once it and a second one are what can be listened at, and the keys for that are there.

    Raises:
        Leave: they aren't.
    """
    try:
        where = endpoint or default_endpoint()
        check_endpoint(where)
    except BadEndpoint as error:
        raise Leave(CONFIG, str(error)) from error
    check_public(where, insecure)
    if listen is not None:
        check_second(listen, insecure)
    if not insecure:
        Keys(home_dir() / KEYS_NAME).pair_for(where, listen)
    return where


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
