"""What a client may rely on: the tokens its sessions must hold, by what it asked and what it was told.

A `Handle` is a session of one client alone. Every final reply of a request in it has to fit to what was
believed before, and tells what to believe from then on. Where the protocol leaves it open (a cancel in the
midst), the client is unsure until it has read the session's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.sim.engine import given
from tests.sim.language import EOS, continuation
from tests.sim.must import must

from stateroom.client import protocol as p
from stateroom.client.errors import ClientError, EngineLost, NotFound, Numeric, SlowConsumer, StateroomError


@dataclass(eq=False)
class Handle:
    session: str
    tokens: list[int]
    sure: bool = True
    may_go: bool = False  # it has a time to live, or was told to close
    asked: int = 0  # requests that may change it and have not ended
    changes: int = 0  # that have ended; so that a read knows whether anything came between


@dataclass(eq=False)
class Asked:
    """A request in flight."""

    request: Any
    handle: Handle | None
    sent_s: float
    streamed: list[int] = field(default_factory=list)
    changes: int = 0
    quiet: bool = False  # nothing else was going on in the session when it was sent
    cancelled: bool = False
    trunk: list[int] | None = None  # what the trunk holds that it forks
    common: bool = False  # of a session that others of the owner use, too: nothing can be believed of it

    @property
    def changing(self) -> bool:
        return p.OPERATIONS[self.request.op].changes


class Ledger:
    """Checks the ends of requests, and keeps the handles."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []

    def began(self, asked: Asked) -> None:
        handle = asked.handle
        if handle is None:
            return
        asked.changes, asked.quiet = handle.changes, not handle.asked
        handle.asked += asked.changing
        handle.may_go |= asked.request.op == "close"

    def ended(self, asked: Asked, outcome: p.Result | StateroomError | ClientError) -> None:
        handle, request = asked.handle, asked.request
        if handle is not None and asked.changing:
            handle.asked -= 1
            handle.changes += 1
        if asked.common:
            return
        if isinstance(outcome, p.OpenResult):
            tokens = given(request)
            must(outcome.finish == "cancelled" or outcome.length == len(tokens), "an open lost tokens")
            handle = Handle(outcome.session, tokens[: outcome.length], may_go=request.ttl_s is not None)
            self.handles.append(handle)
        elif isinstance(outcome, p.ForkResult) and request.trunk is not None:
            self._forked_trunk(asked.trunk, outcome)
        elif handle is None:
            return
        elif isinstance(outcome, StateroomError | ClientError):
            self._failed(asked, handle, outcome)
        elif isinstance(outcome, p.DecodeResult):
            self._decoded(asked, handle, outcome)
        elif isinstance(outcome, p.LengthResult):
            self._changed(request, handle, outcome)
        elif isinstance(outcome, p.ForkResult):
            must(not handle.sure or outcome.length == len(handle.tokens), "a fork of another length")
            for child in outcome.sessions:
                made = Handle(child, list(handle.tokens), handle.sure, handle.may_go)
                self.handles.append(made)
        elif isinstance(outcome, p.TokensResult):
            self._read(asked, handle, outcome.tokens)
        elif isinstance(outcome, p.CloseResult) and handle in self.handles:
            self.handles.remove(handle)

    def _decoded(self, asked: Asked, handle: Handle, result: p.DecodeResult) -> None:
        request = asked.request
        must(not request.stream or asked.streamed == result.tokens, "a stream's tokens are not its result's")
        must(len(result.tokens) == result.usage.decoded, "more decoded than told, or less")
        if handle.sure:
            self._follows(handle, result.tokens)
            must(result.length == len(handle.tokens) + len(result.tokens), "a decode of another length")
        if result.finish == "length":
            must(len(result.tokens) == request.max_tokens, "a decode ended early")
        elif result.finish == "stop_token":
            must(result.tokens[-1] == EOS, "a decode stopped at no stop")
        elif result.finish == "cancelled":
            must(asked.cancelled, "a decode was cancelled that nobody cancelled")
        handle.tokens += result.tokens

    def _forked_trunk(self, tokens: list[int] | None, result: p.ForkResult) -> None:
        """`tokens`: what was published, where that is known."""
        must(tokens is None or result.length == len(tokens), "a trunk of another length")
        self.handles += [Handle(child, list(tokens or []), tokens is not None) for child in result.sessions]

    @staticmethod
    def _follows(handle: Handle, tokens: list[int]) -> None:
        must(
            tokens == continuation(handle.tokens, len(tokens)),
            f"{tokens} don't follow the {len(handle.tokens)} tokens of session {handle.session}",
        )

    @staticmethod
    def _changed(request: Any, handle: Handle, result: p.LengthResult) -> None:
        before, length, receipt = handle.tokens, result.length, result.receipt
        must(receipt.reused + receipt.prefilled <= length, "a receipt of more tokens than there are")
        if isinstance(request, p.Trim):
            wanted = before[: request.to] if request.to is not None else before[: len(before) - request.count]
        elif isinstance(request, p.Sync):
            wanted = given(request)
        else:
            wanted = before + given(request)
        if result.finish == "done":
            must(not handle.sure or length == len(wanted), f"a {request.op} of another length")
            handle.sure |= isinstance(request, p.Sync)
            handle.tokens = wanted
        elif isinstance(request, p.Sync) and before[:length] != wanted[:length]:
            handle.sure = False  # was it cancelled before it began, or in the midst?
        elif isinstance(request, p.Sync):
            handle.tokens = before if length == len(before) else wanted[:length]
        elif isinstance(request, p.Trim):
            must(
                not handle.sure or length in (len(before), len(wanted)), "a cancelled trim of another length"
            )
            handle.tokens = before[:length]
        else:
            must(not handle.sure or len(before) <= length <= len(wanted), "a cancelled prefill lost tokens")
            handle.tokens = wanted[:length]

    def _failed(self, asked: Asked, handle: Handle, error: StateroomError | ClientError) -> None:
        if isinstance(error, NotFound) and asked.request.op != "cancel":
            must(handle.may_go, f"{asked.request.op}: session {handle.session} is gone, and nobody closed it")
            if handle in self.handles:
                self.handles.remove(handle)
        elif isinstance(error, EngineLost | Numeric | SlowConsumer) and asked.changing:
            self._kept(asked, handle, error)
        elif isinstance(error, ClientError):
            handle.sure = False  # it gave up waiting: anything may have happened

    def _kept(self, asked: Asked, handle: Handle, error: StateroomError) -> None:
        """A request failed in the midst: the session is kept at a length that was told."""
        length = error.details.get("length")
        if not isinstance(length, int):
            must(isinstance(error, EngineLost), "nobody said what is kept")
            return  # it never began
        request, before = asked.request, len(handle.tokens)
        if not handle.sure:
            return
        if isinstance(request, p.Decode):
            seen = asked.streamed
            must(
                length >= before + len(seen),
                f"tokens were lost: {length} after {before}+{len(seen)}",
            )
            must(
                isinstance(error, SlowConsumer) or not request.stream or length == before + len(seen),
                f"{length} tokens are kept, and {before}+{len(seen)} were told",
            )
            handle.tokens += continuation(handle.tokens, length - before)
            must(handle.tokens[before : before + len(seen)] == seen, "a stream went astray")
        elif isinstance(error, SlowConsumer):
            handle.sure = False
        else:
            must(length == before, f"{request.op} failed, and {length} tokens are left of {before}")

    @staticmethod
    def _read(asked: Asked, handle: Handle, tokens: list[int]) -> None:
        if not asked.quiet or handle.asked or asked.changes != handle.changes:
            return  # something ran meanwhile
        must(not handle.sure or tokens == handle.tokens, f"session {handle.session} holds other tokens")
        handle.tokens, handle.sure = tokens, True
