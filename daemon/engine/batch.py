"""Rows that decode together, and the step in flight.

A batch owns one `Group` of as many rows as it has members, in their order. `launch` starts the next step on
the device, feeding the last draws before the host has seen them; the engine then reads the flight before it.
Sessions join and leave at any step. Where the model allows it they are stored apart: the session's own cache
serves as it is, with nothing copied on the way in or out. `arrange` packs rows where that pays.

A stream whose end shows only in the drawn token (a stop) leaves with one step too many in its KV;
`Session.settle` trims it. Models with recurrent states, which can't be trimmed, are therefore stepped
without looking ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from mlx import nn

from stateroom.caches.group import Group
from stateroom.caches.layout import CAPACITY_STEP, capacity_for
from stateroom.caches.session import SessionCache
from stateroom.daemon.engine.flight import Flight
from stateroom.daemon.engine.sampling import sample
from stateroom.daemon.engine.session import Session
from stateroom.daemon.engine.speculation import verify
from stateroom.daemon.engine.speculation.depth import WIDTHS
from stateroom.daemon.engine.speculation.lookup import Draft
from stateroom.daemon.engine.speculation.rounds import Rounds
from stateroom.daemon.engine.stream import Stream
from stateroom.daemon.scheduler import packing

STEPS_LEAST = 16  # that a row is expected to stay; later on as many as it has stayed, up to what it may draw


@dataclass(slots=True, eq=False)
class Batch:
    """Streams whose rows take one forward pass together.

    Args:
        apart: rows may be stored apart.
        costs: of steps and moves.
        has_room: whether so many bytes more may be held.
    """

    model: nn.Module
    rows_max: int
    lookahead: bool
    apart: bool
    costs: packing.Costs
    has_room: Callable[[int], bool]
    members: list[Stream] = field(default_factory=list)
    cache: Group = field(init=False)
    flight: Flight | None = None
    landing: Flight | None = None  # being read; its streams may have left already
    _steps: int = field(default=0, init=False)  # since rows came or went
    _arrange_at: int = field(default=0, init=False)  # steps; twice as many each time
    _places: dict[Session, tuple[SessionCache, int]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.cache = Group(apart=self.apart)

    # ------------------------------------------------------------ coming and going

    def join(self, streams: Sequence[Stream]) -> None:
        """Takes the sessions' rows in; their KV must hold all but the pending token."""
        caches = []
        for stream in streams:
            assert stream.session.cache is not None
            assert stream.session.missing == 0
            stream.session.cache.take_back()
            caches.append(stream.session.cache)
        self.cache.add(caches)
        for stream in streams:
            stream.session.cache = None
            stream.session.lent = True
            self.members.append(stream)
        self._changed()

    def leave(self, leaving: Sequence[Stream]) -> None:
        """Gives the rows of these streams back to their sessions, unsettled."""
        if not leaving:
            return
        caches = self.cache.remove([self.members.index(stream) for stream in leaving])
        self.members = [stream for stream in self.members if stream not in leaving]
        for stream, cache in zip(leaving, caches, strict=True):
            stream.session.cache = cache
            stream.session.lent = False
        self._changed()

    def leave_due(self) -> list[Stream]:
        """Rows of a larger part that are to be quantised now leave, to join others that are."""
        if all(part.rows == 1 or part.tokens_left_dense for part in self.cache.parts):
            return []  # alone it is done in the forward
        due = [
            stream
            for stream, (part, row) in zip(self.members, self.cache.places(), strict=True)
            if part.rows > 1 and not part.tokens_left_dense and part.offsets[row] == max(part.offsets)
        ]
        self.leave(due)
        return due

    def clear(self) -> None:
        """Lets everything go: a step failed."""
        self._places = None
        self.members, self.cache, self.flight, self.landing = [], Group(apart=self.apart), None, None

    # ------------------------------------------------------------ what is stored together

    @property
    def unarranged(self) -> bool:
        """It is time to look whether packing pays: rows came or went, or have stayed twice as long."""
        return self._steps >= self._arrange_at and len(self.members) > 1

    def _changed(self) -> None:
        self._steps = self._arrange_at = 0
        self._places = None

    def place(self, session: Session) -> tuple[SessionCache, int] | None:
        """The part that holds a member's row, and which row of it that is; None: it is no member."""
        if (
            self._places is None
        ):  # made once for as long as rows stay where they are: it is asked for every token
            members = (stream.session for stream in self.members)
            self._places = dict(zip(members, self.cache.places(), strict=True))
        return self._places.get(session)

    def arrange(self) -> None:
        """Packs rows that gain by it, and parts those that pad each other too much. RuntimeError in a round.

        The members' order may change. When it fails, all rows are there and go on as they stand.
        """
        self._arrange_at = max(2 * self._steps, STEPS_LEAST)
        places = self.cache.places()
        rows = [_facts(*place, stream) for place, stream in zip(places, self.members, strict=True)]
        held: dict[int, list[int]] = {}
        for number, (part, _) in enumerate(places):
            held.setdefault(id(part), []).append(number)
        present = [tuple(numbers) for numbers in held.values()]
        wanted = packing.partition(rows, present, self.costs) if self.cache.apart else packing.by_kind(rows)
        standing = list(self.members)  # by the numbers in `wanted`; each packing changes the order
        for part_wanted in set(wanted) - set(present):
            together = [standing[number] for number in part_wanted]
            columns = max(rows[number].columns for number in part_wanted) * len(part_wanted)
            if self.has_room(int(columns * places[part_wanted[0]][0].bytes_per_token)):
                order = self.cache.pack([self.members.index(stream) for stream in together])
                self.members = [self.members[number] for number in order]
                self._places = None

    # ------------------------------------------------------------ a step

    def launch(self, rounds: Rounds, now_ms: float) -> None:
        """Starts the next step for those who may draw; the others' rows leave first."""
        self.leave([stream for stream in self.members if not stream.may_draw])
        # Until it is read, it is told in `landing` whose draws are out, should the launch fail.
        previous = self.landing = self.flight
        self.flight = None
        if not self.members:
            return
        guesses = self._guesses(rounds) if previous is None else []
        self._steps += 1
        if guesses:
            self.flight = self._round(guesses, now_ms)
            return
        places = {}
        if previous is not None:
            places = {stream: place for place, stream in enumerate(previous.members)}
        lasts = [self._last(stream, places, previous) for stream in self.members]
        logits = self.cache.forward(self.model, self._inputs(places, previous))[:, -1, :]
        drawn = sample(logits, [stream.row(last) for stream, last in zip(self.members, lasts, strict=True)])
        for stream in self.members:
            stream.launched += 1
        self.flight = Flight(tuple(self.members), drawn, now_ms)
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
        if previous is not None and tuple(self.members) == previous.members:
            return previous.drawn.tokens[:, None]
        fresh = [stream for stream in self.members if stream not in places]
        tokens = mx.array([stream.session.tokens[-1] for stream in fresh], dtype=mx.uint32)
        if previous is None or len(fresh) == len(self.members):
            return tokens[:, None]
        # Behind the draws in flight, those that the host knows.
        known = {stream: len(previous.members) + place for place, stream in enumerate(fresh)}
        drawn = mx.concatenate([previous.drawn.tokens, tokens]) if fresh else previous.drawn.tokens
        order = mx.array([(places | known)[stream] for stream in self.members], dtype=mx.int32)
        return drawn[order][:, None]

    # ------------------------------------------------------------ rounds

    @property
    def in_round(self) -> bool:
        """The step in flight verifies guesses."""
        return self.flight is not None and bool(self.flight.guesses)

    def wants_round(self, rounds: Rounds) -> bool:
        """Guesses would pay, as far as is known before the step in flight is read."""
        return self.in_round or (self._speculates and rounds.wants(self.members, self._widest()))

    def _guesses(self, rounds: Rounds) -> list[Draft]:
        """What to feed behind each row's pending token; [] for a plain step."""
        doubting = [stream for stream in self.members if stream.doubts]
        for stream in doubting:
            stream.doubts = False
        return [] if doubting or not self._speculates else rounds.plan(self.members, self._widest())

    @property
    def _speculates(self) -> bool:
        return self.cache.speculative and any(stream.guesser is not None for stream in self.members)

    def _widest(self) -> int:
        """Tokens that each row can take at once: up to its context's end, and to where it is quantised."""
        room = min(stream.context - stream.session.length for stream in self.members)
        dense = min(part.tokens_left_dense for part in self.cache.parts)
        widest = max(min(room, dense, WIDTHS[-1]), 1)
        # Of what a step needs the bytes were promised, but not of guesses for which planes must grow.
        granted = min(capacity_for(columns + 1) - columns for columns in self.cache.columns)
        if granted < widest:
            each = CAPACITY_STEP * max(part.bytes_per_token for part in self.cache.parts)
            if not self.has_room(int(each * len(self.members))):
                return granted
        return widest

    def _round(self, guesses: list[Draft], now_ms: float) -> Flight:
        """Feeds every row its pending token and guesses; `end_round` takes back what wasn't drawn."""
        drafts = [draft.tokens for draft in guesses]
        rows = [
            verify.rows_after(stream.row(None), draft)
            for stream, draft in zip(self.members, drafts, strict=True)
        ]
        pending = [stream.session.tokens[-1] for stream in self.members]
        self.cache.spec_round_begin()
        logits = self.cache.forward(self.model, verify.inputs(pending, drafts))
        draws = verify.draw(logits, rows)
        for stream in self.members:
            stream.launched += 1
        mx.async_eval(draws.arrays())
        return Flight(tuple(self.members), draws, now_ms, tuple(guesses))

    def end_round(self, taken: Sequence[int]) -> None:
        """Each row keeps the KV of so many tokens of the round that was read: of all but its pending one."""
        self.cache.spec_round_rollback(taken)
        for stream in self.members:
            stream.launched = len(stream.drawn)


def _facts(part: SessionCache, row: int, stream: Stream) -> packing.Row:
    left = stream.most - stream.base - stream.launched
    mergeable = part.batchable and part.quantised  # else it is due to be re-coded, by itself
    return packing.Row(
        columns=part.columns[row],
        nbytes=part.row_bytes(row) - part.shared_bytes(row),
        trunks=tuple((view.trunk, view.length) for view in part.views(row)),
        kind=part.signature if mergeable else None,
        steps=min(left, max(stream.launched, STEPS_LEAST)),
    )
