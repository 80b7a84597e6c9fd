"""What a session has to guess from, and what became of its guesses; kept between its requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stateroom.daemon.engine.speculation.depth import Chances, Prospect
from stateroom.daemon.engine.speculation.lookup import NOTHING, Draft, Lookup

if TYPE_CHECKING:
    from stateroom.daemon.engine.session import Session
    from stateroom.daemon.engine.speculation.drafter import Drafts

GUESSERS_MAX = 64  # sessions of one engine that have one; with logs as long as may be, 400 MB


@dataclass(slots=True, eq=False)
class Guesser:
    """Of one session. `drawn`: tokens since it was made."""

    lookup: Lookup = field(default_factory=Lookup)
    chances: Chances = field(default_factory=Chances)
    drafts: Drafts | None = None  # of the model that drafts for it
    drawn: int = 0

    def guess(self, tokens: Sequence[int], most: int) -> Draft:
        """Up to `most` guesses at what follows the session's tokens, unless such guesses rest."""
        draft = self.lookup.draft(tokens, most)
        return NOTHING if draft.tokens and self.chances.of(draft.gram).rests(self.drawn) else draft

    def cut(self, tokens: Sequence[int], length: int) -> None:
        """The session, which holds `tokens`, goes back to `length` of them."""
        self.lookup.follow(tokens)
        self.lookup.cut(tokens, length)
        if self.drafts is not None:
            self.drafts.cut(max(length - 1, 0))

    def prospect(self, gram: int, guesses: int) -> Prospect:
        """Of so many guesses of one kind; none while they rest."""
        chance = self.chances.of(gram)
        return Prospect(guesses, chance.value) if guesses > 0 and not chance.rests(self.drawn) else Prospect()

    def lost(self, gram: int) -> None:
        """Such guesses wouldn't pay even if all rows had them."""
        self.chances.of(gram).lost(self.drawn)

    def learn(self, draft: Draft, right: int, drawn: int) -> None:
        """Of a draft the first `right` guesses were right; `drawn` tokens came of it."""
        if draft.tokens:
            self.chances.of(draft.gram).learn(len(draft.tokens), right)
        self.drawn += drawn


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

    @property
    def nbytes(self) -> int:
        """KV of drafting models."""
        guessers = (session.guesser for session in self._used.values())
        return sum(guesser.drafts.nbytes for guesser in guessers if guesser and guesser.drafts)

    def forget(self, session: Session) -> None:
        """The session is gone."""
        self._used.pop(session.id, None)
