"""Options that several commands take, declared once."""

from __future__ import annotations

from typing import Annotated

import typer

from stateroom.client.protocol import Scheme

Endpoint = Annotated[
    str | None,
    typer.Option(
        help="Where the daemon listens; by default the one of this user.", envvar="STATEROOM_ENDPOINT"
    ),
]
App = Annotated[
    str,
    typer.Option(
        help="The owner of the sessions: programs with the same name share theirs.", show_default=True
    ),
]
Model = Annotated[str | None, typer.Option(help="The model, by the name that `serve` gave it.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens an answer may have.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")]
Seed = Annotated[int | None, typer.Option(min=0, help="The same seed gives the same answer.")]
KVScheme = Annotated[
    Scheme,
    typer.Option("--kv", help="How a new session stores its keys and values; fewer bits take less memory."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

COMMANDS_APP = "stateroom"  # the owner under which the commands keep sessions
