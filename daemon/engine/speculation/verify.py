"""One forward over guesses, and which of them plain decode would have drawn.

A draw is a function of its logits, its options, its history and the key of its position, and of nothing else
(`sampling.py`). Where all tokens before a position are those that plain decode draws, its logits are too, up
to rounding; so drawing with the position's own key gives plain decode's token, and a guess is accepted while
it is that token. What a stream says is therefore the same with speculation and without, token by token for a
seed, and so also in distribution. A guess is accepted with the probability that the model gives it, which is
as much as rejection sampling could accept of one guess.

Shapes: B rows, w columns (the pending token and up to w - 1 guesses), V vocabulary, n draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from stateroom.daemon.engine.sampling import Drawn, Row, has_penalty, sample

PADDING = 0  # a token of every vocabulary, behind the guesses of rows that have fewer


def inputs(pending: Sequence[int], guesses: Sequence[Sequence[int]]) -> mx.array:
    """What the round feeds, [B, w]: each row's pending token and guesses; w is one more than the most."""
    width = 1 + max(map(len, guesses))
    rows = [
        [token, *row, *[PADDING] * (width - 1 - len(row))]
        for token, row in zip(pending, guesses, strict=True)
    ]
    return mx.array(rows, dtype=mx.uint32)


def rows_after(first: Row, guesses: Sequence[int]) -> list[Row]:
    """What the draws of one row need: `first` behind its pending token, then behind each of its guesses."""
    rows = [first]
    for at in range(1, len(guesses) + 1):
        history = [*first.history, *guesses[:at]] if has_penalty(first.sampling) else first.history
        rows.append(replace(first, position=first.position + at, history=history))
    return rows


def draw(logits: mx.array, rows: Sequence[Sequence[Row]]) -> Drawn:
    """Draws behind every token that was fed, but not behind padding: row after row, not evaluated.

    Args:
        logits: the model's, [B, w, V].
        rows: for each row its draws, `rows_after`.
    """
    width = logits.shape[1]
    draws = [draw for row in rows for draw in row]
    flat = logits.reshape(-1, logits.shape[2])
    if len(draws) < flat.shape[0]:
        places = [at * width + column for at, row in enumerate(rows) for column in range(len(row))]
        flat = flat[mx.array(places, dtype=mx.uint32)]
    return sample(flat, draws)


def taken(drawn: Sequence[int], guesses: Sequence[int]) -> list[int]:
    """The tokens that a round adds to a row: the guesses that were drawn, and the draw behind them."""
    accepted = 0
    while accepted < len(guesses) and drawn[accepted] == guesses[accepted]:
        accepted += 1
    return list(drawn[: accepted + 1])
