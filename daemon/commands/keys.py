"""`stateroom keys init | client | allow | list | revoke`: who may come over a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stateroom.client.paths import home_dir
from stateroom.daemon.commands.options import AsJson
from stateroom.daemon.commands.switches import Commands
from stateroom.daemon.commands.terminal import err, out
from stateroom.daemon.exits import CONFIG, Leave
from stateroom.daemon.keys import (
    KEYS_NAME,
    Keys,
    Pair,
    check_name,
    is_key,
    read_key_file,
    write_key_file,
)

app = Commands(help="Make and list keys for clients of other machines: `serve --listen`.")
Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="The client's name. What it opens belongs to NAME/its app."),
]


def _keys() -> Keys:
    return Keys(home_dir() / KEYS_NAME)


def _make_pair() -> Pair:
    from stateroom.daemon.curve import make_pair  # brings in ZeroMQ, which the other commands can do without

    return make_pair()


@app.command("init")
def make_server_key() -> None:
    """Make this daemon's own key, once; prints the half of it that clients need."""
    pair = _make_pair()
    _keys().keep_server(pair)
    out.print(pair.public, markup=False)


@app.command("client")
def make_client_key(
    name: Name,
    file: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Where to write the client's file.", show_default="NAME.key"
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="The daemon is on another machine, and this is its key: writes a second file, NAME.pub, to "
            "be allowed there. The secret then never leaves this machine.",
        ),
    ] = None,
) -> None:
    """Make a client's key, allow it, and write the file that the client needs.

    stateroom keys client laptop
    """
    check_name(name)
    keys, pair = _keys(), _make_pair()
    if server is not None and not is_key(server):
        raise Leave(CONFIG, "--server takes the 40 characters that `stateroom keys init` printed there.")
    if server is None:
        own = keys.server()
        if own is None:
            raise Leave(CONFIG, "Make the daemon's key first: stateroom keys init")
        keys.check_new(name, pair.public)
        server_key = own.public
    else:
        server_key = server
    path = file or Path(f"{name}.key")
    half = {"name": name, "public": pair.public}
    write_key_file(path, {**half, "secret": pair.secret, "server": server_key})
    if server is None:
        keys.allow(name, pair.public)
        err.print(f"{name} is allowed. Its key: {path}; keep it secret.", markup=False, soft_wrap=True)
    else:
        public = path.with_suffix(".pub")
        write_key_file(public, half)
        err.print(f"Its key: {path}; keep it secret.", markup=False, soft_wrap=True)
        err.print(f"Where the daemon is: stateroom keys allow {public.name}", markup=False, soft_wrap=True)


@app.command("allow")
def allow_client(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A client's NAME.pub.")],
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Another name for it here.")] = None,
) -> None:
    """Let a client in whose key was made elsewhere."""
    told = read_key_file(file, secret=False)
    chosen = name or told.get("name", "")
    _keys().allow(chosen, told["public"])
    out.print(f"{chosen} is allowed.", markup=False)


@app.command("list")
def list_clients(as_json: AsJson = False) -> None:
    """List who is let in, with their public keys."""
    clients = _keys().clients()
    if as_json:
        out.print_json(data=[{"name": name, "public": key} for name, key in clients.items()])
        return
    if not clients:
        err.print("Nobody is; `stateroom keys client NAME` makes a key.")
    for name, key in clients.items():
        out.print(f"{name}  {key}", markup=False, soft_wrap=True)


@app.command("revoke")
def revoke_client(name: Name) -> None:
    """Let a client in no more. A running daemon hears nothing from it after a second; its sessions stay."""
    _keys().revoke(name)
    out.print(f"{name} is let in no more.", markup=False)
