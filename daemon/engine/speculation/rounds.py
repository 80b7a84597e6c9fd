"""Whether a batch's next pass verifies guesses, and which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stateroom.daemon.engine.speculation.depth import Costs, Prospect, best_width
from stateroom.daemon.engine.speculation.lookup import Draft
from stateroom.daemon.engine.stream import Stream


@dataclass(slots=True)
class Rounds:
    """Plans the rounds of an engine's batches by what passes were found to take."""

    costs: Costs = field(default_factory=Costs)

    def plan(self, streams: Sequence[Stream], widest: int) -> list[Draft]:
        """What each row guesses in a pass of up to `widest` tokens; [] when plain decoding is better."""
        drafts = [stream.guess(widest - 1) for stream in streams]
        if not any(draft.tokens for draft in drafts):
            return []
        prospects = [
            stream.guesser.prospect(draft) if stream.guesser is not None else Prospect()
            for stream, draft in zip(streams, drafts, strict=True)
        ]
        width = best_width(prospects, self.costs, widest)
        if width == 1:
            for stream, draft, prospect in zip(streams, drafts, prospects, strict=True):
                alike = [prospect] * len(streams)
                if stream.guesser is not None and draft.tokens and best_width(alike, self.costs, widest) == 1:
                    stream.guesser.lost(draft)
            return []
        return [Draft(draft.tokens[: width - 1], draft.gram) for draft in drafts]
