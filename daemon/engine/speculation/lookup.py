"""Drafts by looking up: what followed the last time when the same tokens stood before. Pure.

One log of all that the session has held: its tokens, and, behind seams, what trims and syncs replaced. A
guess is what follows the most recent place where the session's last tokens stand, the most of them
first. Text that repeats itself, and the previous version of an edited buffer, are found by the same look.

A token costs a few dictionary entries when it comes and nothing afterwards. Of a long log the older half goes
at once, entries and all.

Source: Saxena, "Prompt Lookup Decoding", 2023 (github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

GRAM_MAX = 5  # tokens by which a place is found, at the most; more than that hardly ever decides
MATCH_MAX = 16  # tokens for which it is then seen whether they match too
GRAM_MIN = 2  # fewer match anywhere
LOG_MAX = 16_384  # tokens of one log; with entries about 400 bytes each
FOLLOW_MAX = 2_048  # tokens taken over at once, in 2 ms or so; a long session takes some steps
SEAM = -1  # stands in no session

Grams = dict[tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses at what comes next. `matched`: how many tokens stood before them, up to 16; 0: unknown."""

    tokens: list[int]
    matched: int = 0


NOTHING = Draft([])


@dataclass(slots=True)
class Lookup:
    """The log of one session, and where each run of 2 to 5 tokens stands in it.

    Attributes:
        log_max: tokens that are remembered; never fewer than half of it, once they were there.
        taken: how many of the session's tokens the log has, in its last part.
    """

    log_max: int = LOG_MAX
    taken: int = 0
    _log: list[int] = field(default_factory=list)
    _first: int = 0  # the place, counted from the start, of the log's first token
    # Where what follows a run of tokens stands, counted from the start: of the newer half, and of the older.
    _newer: Grams = field(default_factory=dict)
    _older: Grams = field(default_factory=dict)
    _halved: int = 0  # where the newer half begins

    @property
    def held(self) -> int:
        """Tokens and seams in the log."""
        return len(self._log)

    @property
    def entries(self) -> int:
        return len(self._newer) + len(self._older)

    def remember(self, tokens: Sequence[int]) -> None:
        """Tokens that stood in the session and do no more."""
        for token in tokens:
            self._append(token)
        self._append(SEAM)

    def follow(self, tokens: Sequence[int], most: int = FOLLOW_MAX) -> bool:
        """Takes over up to `most` of the session's tokens that are new; whether all are now."""
        until = min(len(tokens), self.taken + most)
        for at in range(self.taken, until):
            self._append(tokens[at])
        self.taken = max(self.taken, until)
        return until == len(tokens)

    def cut(self, tokens: Sequence[int], length: int) -> None:
        """The session, which holds `tokens`, goes back to `length` of them. The others stay in the log."""
        if length >= self.taken:
            return
        self._append(SEAM)
        # So that what comes next is found by what stands before it.
        for token in tokens[max(length - GRAM_MAX, 0) : length]:
            self._append(token)
        self.taken = length

    def draft(self, tokens: Sequence[int], most: int) -> Draft:
        """Up to `most` guesses at what follows `tokens`, the whole session; fewer where a seam follows."""
        complete = self.follow(tokens)
        if most < 1:
            return NOTHING
        last = tuple(tokens[-GRAM_MAX:])
        for gram in range(len(last), GRAM_MIN - 1, -1):
            run = last[-gram:]
            at = self._newer.get(run) or self._older.get(run)
            if at is not None:
                at -= self._first
                return Draft(self._following(at, most, complete), self._matched(at, tokens, gram))
        return NOTHING

    def _matched(self, at: int, tokens: Sequence[int], matched: int) -> int:
        """How many of the last tokens stand before a place of the log, which has `matched` of them."""
        if matched < GRAM_MAX:
            return matched
        most = min(MATCH_MAX, at, len(tokens))
        while matched < most and self._log[at - matched - 1] == tokens[-matched - 1]:
            matched += 1
        return matched

    def _following(self, at: int, most: int, complete: bool) -> list[int]:
        found = self._log[at : at + most]
        if SEAM in found:
            return found[: found.index(SEAM)]
        if len(found) < most and complete:  # up to now: a run that repeats itself goes on so
            found = (found * (most // len(found) + 1))[:most]
        return found

    def _append(self, token: int) -> None:
        log, grams = self._log, self._newer
        at = self._first + len(log)  # never 0 for what has a run before it
        if token != SEAM:
            for gram in range(GRAM_MIN, min(GRAM_MAX, len(log)) + 1):
                if log[-gram] == SEAM:
                    break
                grams[tuple(log[-gram:])] = at
        log.append(token)
        if at + 1 - self._halved >= self.log_max // 2:
            self._forget()

    def _forget(self) -> None:
        """The older half goes; a run that ended in it and is followed by the newer goes with it."""
        gone = self._halved - self._first
        del self._log[:gone]
        self._first += gone
        self._halved = self._first + len(self._log)
        self._older, self._newer = self._newer, {}
