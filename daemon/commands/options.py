"""Options that several commands take, declared once."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from stateroom.client.protocol import Scheme
from stateroom.daemon import settings
from stateroom.daemon.commands import completing


def _app_of_the_file(context: typer.Context, app: str) -> str:
    """The file's, where nobody named another."""
    source = context.get_parameter_source("app")
    return (settings.app() or app) if source is None or source.name == "DEFAULT" else app


Endpoint = Annotated[
    str | None,
    typer.Option(
        metavar="ENDPOINT",
        help="Where the daemon listens.",
        envvar="STATEROOM_ENDPOINT",
        show_default="that of this user",
    ),
]
App = Annotated[
    str,
    typer.Option(
        metavar="APP",
        help="The owner of the sessions: programs with the same name share theirs.",
        envvar="STATEROOM_APP",
        callback=_app_of_the_file,
        autocompletion=completing.apps,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="The model, by the name that `serve` gave it.",
        show_default="the daemon's first",
        autocompletion=completing.served_models,
    ),
]
MaxTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Tokens an answer may have at most.")]
Temperature = Annotated[
    float, typer.Option(metavar="T", min=0.0, help="0 takes the likeliest token each time, 1 draws.")
]
Seed = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="The same seed gives the same answer.", show_default="any"),
]
KVScheme = Annotated[
    Scheme,
    typer.Option(
        "--kv",
        metavar="SCHEME",
        help=f"How a new session stores its keys and values: {', '.join(get_args(Scheme))}. Fewer bits take "
        "less memory.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

COMMANDS_APP = "stateroom"  # the owner under which the commands keep sessions
