"""`stateroom generate`: one answer, streamed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from stateroom.client import connect
from stateroom.client.protocol import KV, Message, Sampling
from stateroom.daemon.commands.options import (
    COMMANDS_APP,
    App,
    Endpoint,
    KVScheme,
    MaxTokens,
    Model,
    Seed,
    Temperature,
)
from stateroom.daemon.commands.terminal import say_if_loading, write

FORGET_S = 60.0  # for the daemon to forget the session by itself, when this program is killed


def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="What to answer; - reads it from the standard input.")
    ],
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    model: Model = None,
    kv: KVScheme = "dense",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it stands, without chat template.")
    ] = False,
    app: App = COMMANDS_APP,
    endpoint: Endpoint = None,
) -> None:
    """Answer one prompt, and forget it.

    stateroom generate "What is the capital of France?"
    stateroom generate - --max-tokens 64 --temperature 0.8 < prompt.txt
    """
    if prompt == "-":
        prompt = sys.stdin.read()
    sampling = Sampling(temperature=temperature, seed=seed)
    with connect(endpoint, app=app) as room:
        say_if_loading(room.server.models, model)
        if raw:
            session = room.open(model=model, kv=KV(scheme=kv), ttl_s=FORGET_S, text=prompt)
        else:
            message = Message(role="user", content=prompt)
            session = room.open(model=model, kv=KV(scheme=kv), ttl_s=FORGET_S, messages=[message])
        begun = False
        try:
            with session.decode(max_tokens=max_tokens, sampling=sampling) as stream:
                for token in stream:
                    write(token.text)
                    begun = True
        finally:
            if begun:
                write("\n")
            session.close()
