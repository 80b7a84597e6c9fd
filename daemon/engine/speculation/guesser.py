"""What a session has to guess from, and what became of its guesses; kept between its requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stateroom.daemon.engine.speculation.depth import Chances, Prospect
from stateroom.daemon.engine.speculation.lookup import Draft, Lookup

if TYPE_CHECKING:
    from stateroom.daemon.engine.session import Session
    from stateroom.daemon.engine.speculation.drafter import Drafts

BY_MODEL = 0  # what a model's guesses have for the tokens that matched
GUESSERS_MAX = 64  # sessions of one engine that have one; with logs as long as may be, 400 MB


@dataclass(slots=True, eq=False)
class Guesser:
    """Of one session. `drawn`: tokens since it was made."""

    lookup: Lookup = field(default_factory=Lookup)
    chances: Chances = field(default_factory=Chances)
    drafts: Drafts | None = None  # of the model that drafts for it
    drawn: int = 0
    _foreseen: tuple[int, Draft] | None = None  # what was looked up last, behind so many tokens

    def guess(self, tokens: Sequence[int], most: int) -> Draft:
        """Up to `most` guesses at what follows the session's tokens."""
        draft = self.lookup.draft(tokens, most)
        self._foreseen = (len(tokens), draft) if draft.tokens else None
        return draft

    def cut(self, tokens: Sequence[int], length: int) -> None:
        """The session, which holds `tokens`, goes back to `length` of them."""
        self.lookup.follow(tokens)
        self.lookup.cut(tokens, length)
        if self.drafts is not None:
            self.drafts.cut(max(length - 1, 0))

    def prospect(self, matched: int, guesses: int) -> Prospect:
        """Of so many guesses of one kind; none while they rest."""
        chance = self.chances.of(matched)
        return Prospect(guesses, chance.value) if guesses > 0 and not chance.rests(self.drawn) else Prospect()

    def model_lost(self) -> None:
        """A model's guesses wouldn't pay even if all rows had them."""
        self.chances.of(BY_MODEL).lost(self.drawn)

    def learn(self, draft: Draft, right: int, taken: Sequence[int], before: int) -> None:
        """What was drawn behind `before` tokens of the session, and how many guesses of a round were right.

        What was looked up and not verified tells as well whether it would have been right.
        """
        if draft.tokens:
            self.chances.of(draft.matched).learn(len(draft.tokens), right)
        elif taken and self._foreseen is not None and self._foreseen[0] == before:
            looked_up = self._foreseen[1]
            self.chances.of(looked_up.matched).learn(1, int(looked_up.tokens[0] == taken[0]))
        self._foreseen = None
        self.drawn += len(taken)


class Guessers:
    """Those of an engine's sessions; the one that was least recently used goes when there are too many."""

    def __init__(self, most: int = GUESSERS_MAX) -> None:
        self._most = most
        self._used: OrderedDict[str, Session] = OrderedDict()

    def of(self, session: Session) -> Guesser:
        """The session's, made from what it remembers when it has none."""
        if session.guesser is None:
            session.guesser = Guesser()
            session.guesser.lookup.remember(session.replaced)
        self._used[session.id] = session
        self._used.move_to_end(session.id)
        if len(self._used) > self._most:
            self._used.popitem(last=False)[1].guesser = None
        return session.guesser

    def sessions(self) -> Collection[Session]:
        """Those that have one."""
        return self._used.values()

    def forget(self, session: Session) -> None:
        """The session is gone."""
        self._used.pop(session.id, None)
