"""Whether a batch's next pass verifies guesses, and which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stateroom.daemon.engine.speculation.depth import Costs, Prospect, best_width
from stateroom.daemon.engine.speculation.guesser import BY_MODEL
from stateroom.daemon.engine.speculation.lookup import NOTHING, Draft
from stateroom.daemon.engine.stream import Stream


@dataclass(slots=True)
class Rounds:
    """Plans the rounds of an engine's batches by what passes were found to take.

    Attributes:
        costs: of passes over looked-up guesses, and of plain ones.
        drafting: of those that a model had to guess for first, guessing included.
    """

    costs: Costs = field(default_factory=Costs)
    drafting: Costs = field(default_factory=Costs)

    def measured(self, streams: Sequence[Stream], width: int, ms: float) -> None:
        """A pass of so many tokens a row took so long, from its planning to its end."""
        by_model = any(stream.drafter is not None for stream in streams)
        for costs in (self.costs, self.drafting):
            if width == 1 or (costs is self.drafting) == by_model:
                costs.measured(len(streams), width, ms)

    def wants(self, streams: Sequence[Stream], widest: int) -> bool:
        """Whether a pass over guesses seems to pay, without making a model guess."""
        return self._choose(streams, widest)[0] > 1

    def plan(self, streams: Sequence[Stream], widest: int) -> list[Draft]:
        """What each row guesses in a pass of up to `widest` tokens; [] when plain decoding is better."""
        width, drafts = self._choose(streams, widest)
        if width == 1:
            return []
        drafts = [Draft(draft.tokens[: width - 1], draft.matched) for draft in drafts]
        _let_models_guess(streams, drafts, width - 1)
        return drafts if any(draft.tokens for draft in drafts) else []

    def _choose(self, streams: Sequence[Stream], widest: int) -> tuple[int, list[Draft]]:
        """The width of the next pass, and what was looked up. A model that would lose goes to rest."""
        drafts, prospects = [NOTHING] * len(streams), [Prospect()] * len(streams)
        for at, stream in enumerate(streams):
            if stream.guesser is None:
                continue
            if stream.drafter is not None:
                prospects[at] = stream.guesser.prospect(BY_MODEL, stream.room(widest - 1))
            else:
                drafts[at] = stream.guesser.guess(stream.session.tokens, stream.room(widest - 1))
                prospects[at] = stream.guesser.prospect(drafts[at].matched, len(drafts[at].tokens))
        if not any(prospect.guesses for prospect in prospects):
            return 1, drafts
        costs = self.drafting if any(stream.drafter is not None for stream in streams) else self.costs
        width = best_width(prospects, costs, widest)
        if width == 1:
            for stream, prospect in zip(streams, prospects, strict=True):
                if stream.guesser is None or stream.drafter is None or not prospect.guesses:
                    continue
                if best_width([prospect] * len(streams), costs, widest) == 1:
                    stream.guesser.model_lost()
        return width, drafts


def _let_models_guess(streams: Sequence[Stream], drafts: list[Draft], most: int) -> None:
    """Fills in the drafts of the streams that a model guesses for; all of them have the same one."""
    asked = [at for at, stream in enumerate(streams) if stream.drafter is not None]
    if not asked:
        return
    drafter = streams[asked[0]].drafter
    assert drafter is not None
    owns = [streams[at].drafts for at in asked]
    tokens = [streams[at].session.tokens for at in asked]
    guessed = drafter.guess(owns, tokens, [streams[at].row(None) for at in asked], most)
    for at, guesses in zip(asked, guessed, strict=True):
        drafts[at] = Draft(guesses[: max(streams[at].room(most), 0)], BY_MODEL)
