"""A second, smaller model that guesses what the served one will say.

Of each session that it drafts for it holds KV of its own, in `Drafts`: of the same tokens as the served
model's, all but the pending one, whenever it begins to guess. Behind a round its KV goes back with the
session's; it is never cut by more than was guessed wrongly. It draws with the options and the keys of the
positions it guesses at, so that sampled guesses are those that a like model would draw.

Shapes: B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from stateroom.caches import attention
from stateroom.caches.errors import UnknownKind
from stateroom.caches.group import Group
from stateroom.caches.probe import pieces_agree
from stateroom.caches.session import SessionCache
from stateroom.client.errors import Unsupported
from stateroom.daemon.engine.cpu_forms import use_forms
from stateroom.daemon.engine.kv import Schemes
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.engine.sampling import Row, sample
from stateroom.daemon.engine.speculation.verify import rows_after

FEED_MAX = 256  # tokens that a session's drafts catch up by in one step; until they have, nothing is guessed
FIELD = "speculate.model"


@dataclass(slots=True, eq=False)
class Drafts:
    """The drafting model's KV of one session: of its first `held` tokens."""

    cache: SessionCache

    @property
    def held(self) -> int:
        return self.cache.offsets[0]

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes_capacity

    def cut(self, length: int) -> None:
        """The session has only so many tokens now whose KV is of use."""
        if self.held > length:
            self.cache.trim(0, self.held - length)


class Drafter:
    """A loaded drafting model.

    Args:
        loaded: the model that drafts.
        served: the model it drafts for.

    Raises:
        Unsupported: it can't draft for that model; the message says why.
    """

    def __init__(self, loaded: LoadedModel, served: LoadedModel) -> None:
        if not same_tokens(loaded, served):
            raise Unsupported("That model has other tokens than the session's: it can't draft.", field=FIELD)
        if loaded is not served:
            attention.install(loaded.model)
            if mx.default_device().type == mx.DeviceType.cpu:
                use_forms(loaded.model)
        try:
            agree = pieces_agree(loaded.model)
            self.schemes = Schemes(loaded.model)
        except UnknownKind as error:
            raise Unsupported(f"That model can't draft: {error}.", field=FIELD) from error
        if not agree or not self.schemes.dense.caps.trim == "any":
            raise Unsupported(
                "That model can't draft: it has layers that can't be taken back token by token.", field=FIELD
            )
        self._model = loaded.model
        self._vocab = served.vocab
        self.context = loaded.context

    def projected_bytes(self, length: int) -> int:
        """What a session's drafts take, at the most, when it has come to so many tokens."""
        return self.schemes.dense.projected_bytes(min(length, self.context), FEED_MAX)

    def begin(self) -> Drafts:
        return Drafts(self.schemes.dense.empty())

    def guess(
        self, drafts: Sequence[Drafts], tokens: Sequence[Sequence[int]], first: Sequence[Row], most: int
    ) -> list[list[int]]:
        """Up to `most` guesses for each session; none for one that is still catching up.

        Args:
            drafts: of each session.
            tokens: all of each session's tokens.
            first: what each session's next draw needs.
        """
        ready = [at for at, own in enumerate(drafts) if self._caught_up(own, tokens[at])]
        guesses: list[list[int]] = [[] for _ in drafts]
        for some in [ready] if self.schemes.groupable else [[at] for at in ready]:
            if some:
                self._draw(some, drafts, tokens, first, most, guesses)
        return guesses

    def _caught_up(self, own: Drafts, tokens: Sequence[int]) -> bool:
        """Feeds what it lacks of all but the pending token, at most `FEED_MAX` tokens of it."""
        missing = tokens[own.held : len(tokens) - 1][:FEED_MAX]
        if missing:
            own.cache.forward(self._model, mx.array([missing], dtype=mx.uint32))
            mx.async_eval(own.cache.arrays())
        return own.held == len(tokens) - 1

    def _draw(
        self,
        ready: Sequence[int],
        drafts: Sequence[Drafts],
        tokens: Sequence[Sequence[int]],
        first: Sequence[Row],
        most: int,
        guesses: list[list[int]],
    ) -> None:
        group = Group([drafts[at].cache for at in ready], apart=self.schemes.groupable)
        fed = mx.array([[tokens[at][-1]] for at in ready], dtype=mx.uint32)
        for _ in range(most):
            logits = group.forward(self._model, fed)[:, -1, : self._vocab]
            fed = sample(logits, [rows_after(first[at], guesses[at])[-1] for at in ready]).tokens[:, None]
            for at, drawn in zip(ready, cast("list[list[int]]", fed.tolist()), strict=True):
                guesses[at] += drawn


def same_tokens(one: LoadedModel, other: LoadedModel) -> bool:
    """Both tokenizers spell every token alike."""
    mine, theirs = one.tokenizer, other.tokenizer
    if mine.vocab != theirs.vocab or mine.prefix != theirs.prefix:
        return False
    if mine.pieces is not None and theirs.pieces is not None:
        return all(mine.pieces[token] == theirs.pieces[token] for token in range(mine.vocab))
    spelled = ([token] for token in range(mine.vocab))
    return all(mine.decode(each, first=False) == theirs.decode(each, first=False) for each in spelled)
