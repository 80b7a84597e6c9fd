"""`stateroom chat`: a conversation that the daemon keeps, under a name.

The session holds everything; this program holds only where the exchanges of its own run began, for
/undo. Closing the program leaves the conversation where it is.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated

import typer

from stateroom.client import Room, Session, connect
from stateroom.client.errors import Busy, ClientError, NotFound, StateroomError, Unsupported
from stateroom.client.protocol import KV, LengthResult, Message, Sampling
from stateroom.client.timeouts import CANCEL_TIMEOUT_S
from stateroom.daemon.commands.completing import sessions
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
from stateroom.daemon.commands.ps import stored_as
from stateroom.daemon.commands.terminal import err, out, receipt_line, say_if_loading, write

BUSY_PAUSE_S = 0.05

CUT = "What is left of the conversation ends inside a message, so it can't go on: /trim 0 starts afresh."

HELP = """\
/undo            take back the last exchange
/trim N          cut the conversation to its first N tokens
/fork [NAME]     go on in a copy; the original stays as it is
/save-as NAME    leave a copy here under a name, and go on
/switch NAME     go on in another session
/sessions        what there is
/quit            leave; the conversation stays (so does Ctrl-D)
Ctrl-C stops an answer."""


@dataclass
class Chat:
    """One run of the chat. `marks`: lengths of the session before each exchange that /undo can take back."""

    room: Room
    session: Session
    name: str
    max_tokens: int
    sampling: Sampling
    marks: list[int] = field(default_factory=list)

    def say(self, text: str) -> None:
        """One exchange. Interrupted, the session keeps what was answered so far."""
        mark = self.session.length
        try:
            done = self.session.prefill(messages=[Message(role="user", content=text)])
        except KeyboardInterrupt:
            self._trim_when_free(mark)
            out.print("\n[dim](not asked)[/dim]")
            return
        except Unsupported:
            out.print(CUT)
            return
        self.marks.append(mark)
        with self.session.decode(max_tokens=self.max_tokens, sampling=self.sampling) as stream:
            try:
                for token in stream:
                    write(token.text)
            except KeyboardInterrupt:
                stream.cancel()
                write(" …")
        write("\n")
        out.print(f"[dim]{receipt_line(done.receipt)}; {self.session.length} tokens in {self.name}[/dim]")

    def undo(self, _: str) -> None:
        if not self.marks:
            out.print("Nothing said in this run to take back; /trim N cuts to a length.")
            return
        self._cut(self.marks[-1])

    def trim(self, argument: str) -> None:
        if not argument.isdecimal():
            out.print("Say how many tokens to keep: /trim 120")
            return
        self._cut(int(argument))

    def _cut(self, length: int) -> None:
        done = self._trim_when_free(length)
        self.marks = [mark for mark in self.marks if mark < done.length]
        out.print(f"{done.receipt.trimmed} tokens dropped, {done.length} left.")

    def _trim_when_free(self, length: int) -> LengthResult:
        """Trims; an interrupted prefill still has the session until its current piece is done."""
        deadline = time.monotonic() + CANCEL_TIMEOUT_S
        while True:
            try:
                return self.session.trim(to=length, replay=True)
            except Busy:
                if time.monotonic() > deadline:
                    raise
                time.sleep(BUSY_PAUSE_S)

    def fork(self, argument: str) -> None:
        name = argument or self._free_name()
        (self.session,) = self.session.fork(names=[name])
        out.print(f"Now in {name}; {self.name} stays as it was.")
        self.name = name

    def _free_name(self) -> str:
        taken = {session.name for session in self.room.list()}
        return next(name for n in range(2, len(taken) + 3) if (name := f"{self.name}-{n}") not in taken)

    def save_as(self, argument: str) -> None:
        if not argument:
            out.print("Say under what name: /save-as draft")
            return
        self.session.fork(names=[argument])
        out.print(f"{argument} holds this conversation; you go on in {self.name}.")

    def switch(self, argument: str) -> None:
        self.session, self.name = self.room.session(argument), argument
        self.marks = []
        out.print(f"Now in {argument}: {self.session.length} tokens.")

    def sessions(self, _: str) -> None:
        for session in sorted(self.room.list(), key=lambda session: session.idle_s):
            here = "→" if session.session == self.session.id else " "
            out.print(f"{here} {session.name or session.session}: {session.length} tokens", markup=False)

    def help(self, _: str) -> None:
        out.print(HELP, markup=False)

    def line(self, line: str) -> bool:
        """Does what one line asks for; False when it asks to leave."""
        if not line.startswith("/"):
            self.say(line)
            return True
        word, _, argument = line.partition(" ")
        if word == "/quit":
            return False
        act = {
            "/undo": self.undo,
            "/trim": self.trim,
            "/fork": self.fork,
            "/save-as": self.save_as,
            "/switch": self.switch,
            "/sessions": self.sessions,
            "/help": self.help,
        }.get(word)
        if act is None:
            out.print(f"{word} isn't a command; /help lists them.", markup=False)
        else:
            act(argument.strip())
        return True


def read_line(interactive: bool) -> str | None:
    """The next line, "" for one that was given up with Ctrl-C, None at the end of the input."""
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        out.print()
        return ""


def resume(room: Room, name: str, model: str | None, kv: KV) -> Session:
    """The session of that name; a new one when there is none."""
    try:
        session = room.session(name)
    except NotFound:
        say_if_loading(room.server.models, model)
        return room.open(name=name, model=model, kv=kv)
    there = session.info()
    if model is not None and model != there.model:
        err.print(f"{name} stays with {there.model}; --model is for new ones.", markup=False)
    if kv.scheme not in (
        "dense",
        stored := stored_as(there) or "it was",
    ):  # after a restart, until it is used
        err.print(f"{name} stays stored as {stored}; --kv is for new ones.", markup=False)
    return session


def chat(
    name: Annotated[
        str,
        typer.Option(
            metavar="SESSION",
            help="The session, by its name; it is made when it isn't there.",
            autocompletion=sessions,
        ),
    ] = "chat",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    model: Model = None,
    kv: KVScheme = "dense",
    app: App = COMMANDS_APP,
    endpoint: Endpoint = None,
) -> None:
    """Talk in a session that stays when you leave; /help lists what else it can do.

    stateroom chat
    stateroom chat --name trip --max-tokens 200
    """
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401  (input() then has history and editing)
    with connect(endpoint, app=app) as room:
        session = resume(room, name, model, KV(scheme=kv))
        talk = Chat(room, session, name, max_tokens, Sampling(temperature=temperature, seed=seed))
        if interactive:
            there = f"{session.length} tokens" if session.length else "new"
            out.print(f"[dim]{name} ({there}); /help, Ctrl-D to leave[/dim]")
        while (line := read_line(interactive)) is not None:
            try:
                if line and not talk.line(line):
                    break
            except (StateroomError, ClientError) as error:
                if isinstance(error, ClientError) and not interactive:
                    raise
                out.print(str(error), style="red", markup=False)  # the next line connects anew
            except KeyboardInterrupt:  # in anything but an answer: that is given up, not the program
                out.print()
        if interactive:
            out.print()
