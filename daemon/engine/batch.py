"""Rows that decode together, and the step in flight.

A batch owns one `SessionCache` of as many rows as it has members. `launch` starts the next step on the
device, feeding the last draws before the host has seen them; the engine then reads the flight before
it. Sessions join by `merge_rows` and leave by `extract_row` and `filter_rows`, at any step; a lone
session's own cache serves as it is, with nothing copied on the way in or out.

A stream whose end shows only in the drawn token (a stop) leaves with one step too many in its KV;
`Session.settle` trims it. Models with recurrent states, which can't be trimmed, are therefore stepped
without looking ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from mlx import nn

from stateroom.caches.session import SessionCache
from stateroom.daemon.engine.sampling import Drawn, sample
from stateroom.daemon.engine.stream import Stream


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step: whose draws it holds, in the order of its rows."""

    members: tuple[Stream, ...]
    drawn: Drawn


@dataclass(slots=True, eq=False)
class Batch:
    """Streams whose rows take one forward pass together."""

    model: nn.Module
    rows_max: int
    lookahead: bool
    members: list[Stream] = field(default_factory=list)
    cache: SessionCache | None = None
    flight: Flight | None = None
    landing: Flight | None = None  # being read; its streams may have left already

    def join(self, streams: Sequence[Stream]) -> None:
        """Takes the sessions' rows in; their KV must hold all but the pending token."""
        caches = [] if self.cache is None else [self.cache]
        for stream in streams:
            assert stream.session.cache is not None
            assert stream.session.missing == 0
            stream.session.cache.take_back()
            caches.append(stream.session.cache)
        if len(caches) > 1:
            for cache in caches:
                cache.forget_unseen()  # what one row's window no longer shows would pad the others
        self.cache = caches[0] if len(caches) == 1 else SessionCache.merge_rows(caches)
        for stream in streams:
            stream.session.cache = None
            stream.session.lent = True
            self.members.append(stream)

    def leave(self, leaving: Sequence[Stream]) -> None:
        """Gives the rows of these streams back to their sessions, unsettled."""
        if not leaving:
            return
        assert self.cache is not None
        if len(self.members) == 1:
            rows = [self.cache]
            self.cache = None
        else:
            rows = [self.cache.extract_row(self.members.index(stream)) for stream in leaving]
            keep = [i for i, stream in enumerate(self.members) if stream not in leaving]
            if keep:
                self.cache.filter_rows(keep)
            else:
                self.cache = None
            # A lazy row would pin the whole batch's planes.
            mx.async_eval([array for row in rows for array in row.arrays()])
        self.members = [stream for stream in self.members if stream not in leaving]
        for stream, row in zip(leaving, rows, strict=True):
            stream.session.cache = row
            stream.session.lent = False

    def leave_due(self) -> list[Stream]:
        """Rows of a group that are to be quantised now leave, to join others that are."""
        if self.cache is None or len(self.members) < 2 or self.cache.tokens_left_dense:
            return []
        longest = max(self.cache.offsets)
        due = [stream for stream, at in zip(self.members, self.cache.offsets, strict=True) if at == longest]
        self.leave(due)
        return due

    def launch(self) -> None:
        """Starts the next step for those who may draw; the others' rows leave first."""
        self.leave([stream for stream in self.members if not stream.may_draw])
        # Until it is read, it is told in `landing` whose draws are out, should the launch fail.
        previous = self.landing = self.flight
        self.flight = None
        if not self.members:
            return
        assert self.cache is not None
        places = {}
        if previous is not None:
            places = {stream: place for place, stream in enumerate(previous.members)}
        lasts = [self._last(stream, places, previous) for stream in self.members]
        logits = self.cache.forward(self.model, self._inputs(places, previous))[:, -1, :]
        drawn = sample(logits, [stream.row(last) for stream, last in zip(self.members, lasts, strict=True)])
        for stream in self.members:
            stream.launched += 1
        self.flight = Flight(tuple(self.members), drawn)
        if self.lookahead:
            mx.async_eval(drawn.arrays())
        else:
            # A state may hold small arrays that nothing reads; unevaluated, their graph grows.
            mx.async_eval(drawn.arrays() + self.cache.arrays())

    def _last(self, stream: Stream, places: dict[Stream, int], previous: Flight | None) -> mx.array | None:
        if not stream.penalised or previous is None or stream not in places:
            return None
        place = places[stream]
        return previous.drawn.tokens[place : place + 1]

    def _inputs(self, places: dict[Stream, int], previous: Flight | None) -> mx.array:
        """The pending token of each member, [B, 1]: lazily from the step in flight where it is newer."""
        if not places or previous is None:
            return mx.array([[stream.session.tokens[-1]] for stream in self.members], dtype=mx.uint32)
        if tuple(self.members) == previous.members:
            return previous.drawn.tokens[:, None]
        flown = [places[stream] for stream in self.members if stream in places]
        fresh = [stream.session.tokens[-1] for stream in self.members if stream not in places]
        # Members keep their order and new ones join at the end, so this is the order of the rows.
        parts = [previous.drawn.tokens[mx.array(flown, dtype=mx.int32)]] if flown else []
        if fresh:
            parts.append(mx.array(fresh, dtype=mx.uint32))
        return mx.concatenate(parts)[:, None]
