"""Drawing the next token of every row of a batch. Pure functions of mlx arrays.

A row's draw depends on its logits, its options, its seed and its position, and on nothing else: not on
the row's index, not on its neighbours, not on any global random state. Each row gets its own key, mixed
on the host from (seed, position), and an option that only a neighbour uses is exactly neutral here.

Order: logit_bias, then repetition, frequency and presence penalty over the last `repetition_window`
tokens, then top_p, min_p and top_k on the probabilities that come out of that, then temperature.
Top-p, min-p and top-k each keep the head of the tokens in falling order, so the order among them does
not matter. A draw is arg-max of `logit + temperature × Gumbel noise`, which no temperature can overflow.

Shapes: B rows, V vocabulary, n rows that are treated alike, K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from stateroom.client.errors import Invalid
from stateroom.client.protocol import Sampling, TokenLogprob

GREEDY = Sampling()
UNIFORM_LEAST = 2.0**-33  # half the step of a 32-bit uniform: its logarithm is finite
RANKED = 4_096  # tokens among which a nucleus is looked for first, on a CPU
UNIFORM_MOST = 1.0 - 2.0**-24  # the largest float32 below 1


@dataclass(frozen=True)
class Row:
    """What one row's draw needs.

    Attributes:
        sampling: the options, checked with `check`.
        seed: 64 bits; rows of one seed and position draw alike.
        position: the index in its session of the token to be drawn.
        history: the session's tokens on the host; only the last `repetition_window` are read.
        last: the token after `history`, when it is still on the device; shape [1].
        logprobs: how many alternatives to report; None for no log-probabilities at all.
    """

    sampling: Sampling = GREEDY
    seed: int = 0
    position: int = 0
    history: Sequence[int] = ()
    last: mx.array | None = None
    logprobs: int | None = None


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms, of the model's own distribution, of the n rows that asked.

    Attributes:
        rows: which rows of the batch, with the number of alternatives each asked for.
        chosen: of the drawn token, [n].
        values, ids: the most likely tokens in falling order, [n, K]; K is the most that any row asked for.
    """

    rows: tuple[tuple[int, int], ...]
    chosen: mx.array
    values: mx.array
    ids: mx.array


@dataclass(frozen=True)
class Drawn:
    """Lazy arrays: `tokens` [B] uint32; `sums` [B] float32, NaN or infinite where a raw logit is."""

    tokens: mx.array
    sums: mx.array
    logprobs: Logprobs | None = None

    def arrays(self) -> list[mx.array]:
        """Everything to evaluate."""
        more = self.logprobs
        return [self.tokens, self.sums, *((more.chosen, more.values, more.ids) if more else ())]

    def read_finite(self) -> list[bool]:
        """By row: whether all of the model's logits are finite numbers. Waits for the device."""
        return [math.isfinite(total) for total in cast("list[float]", self.sums.tolist())]

    def read_logprobs(self) -> dict[int, TokenLogprob]:
        """By row of the batch, for the rows that asked. Waits for the device."""
        if self.logprobs is None:
            return {}
        tokens, chosen, values, ids = (
            cast("list[Any]", array.tolist())
            for array in (self.tokens, self.logprobs.chosen, self.logprobs.values, self.logprobs.ids)
        )
        return {
            row: TokenLogprob(
                token=tokens[row],
                logprob=chosen[i],
                top=list(zip(ids[i][:count], values[i][:count], strict=True)),
            )
            for i, (row, count) in enumerate(self.logprobs.rows)
        }


def check(sampling: Sampling, vocab: int, stop_tokens: Sequence[int] | None = None) -> None:
    """Refuses token ids that the model doesn't have, which would be written out of range.

    Raises:
        Invalid: with the field at fault.
    """
    for field, tokens in (
        ("sampling.logit_bias", [token for token, _ in sampling.logit_bias or ()]),
        ("stop_tokens", stop_tokens or ()),
    ):
        wrong = next((token for token in tokens if not 0 <= token < vocab), None)
        if wrong is not None:
            raise Invalid(f"Token {wrong} is not in the vocabulary of {vocab} tokens.", field=field)


def sample(logits: mx.array, rows: Sequence[Row]) -> Drawn:
    """Draws a token for every row; nothing is evaluated, but on a CPU the logits of rows with a top_p.

    Args:
        logits: the model's, [B, V], any floating type.
        rows: B rows.
    """
    # logits: [B, V]
    logits = logits.astype(mx.float32)
    sums = logits.sum(axis=-1)  # one NaN or infinity makes the sum NaN or infinite
    if all(_is_plain(row.sampling) for row in rows):
        tokens = mx.argmax(logits, axis=-1)
    else:
        tokens = _draw_groups(_adjust(logits, rows), rows)
    return Drawn(tokens, sums, _logprobs(logits, tokens, rows))


# ---------------------------------------------------------------- bias and penalties


def has_penalty(sampling: Sampling) -> bool:
    return (
        sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
    )


def _is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature == 0 or sampling.top_k == 1


def _is_plain(sampling: Sampling) -> bool:
    """Arg-max of the logits as they are."""
    return _is_greedy(sampling) and not sampling.logit_bias and not has_penalty(sampling)


def _adjust(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """Logits with every row's bias and penalties; a row without any keeps exactly its own."""
    if any(row.sampling.logit_bias for row in rows):
        logits = logits + _biases(logits.shape, rows)
    if any(has_penalty(row.sampling) for row in rows):
        logits = _penalise(logits, rows)
    return logits


def _biases(shape: tuple[int, ...], rows: Sequence[Row]) -> mx.array:
    entries = [
        (i, token, bias)
        for i, row in enumerate(rows)
        for token, bias in row.sampling.logit_bias or ()
        if token < shape[1]  # embeddings may have more rows than the head has logits
    ]
    made = mx.zeros(shape)
    if not entries:
        return made
    index, token, bias = zip(*entries, strict=True)
    return made.at[mx.array(index), mx.array(token)].add(mx.array(bias, dtype=mx.float32))


def _penalise(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    counts = _window_counts(logits.shape, rows)
    options = [row.sampling for row in rows]
    repetition = _column([option.repetition_penalty for option in options])
    frequency = _column([option.frequency_penalty for option in options])
    presence = _column([option.presence_penalty for option in options])
    seen = counts > 0
    repeated = mx.where(logits < 0, logits * repetition, logits / repetition)
    return mx.where(seen, repeated - counts * frequency - presence, logits)


def _window_counts(shape: tuple[int, ...], rows: Sequence[Row]) -> mx.array:
    """How often each token occurs in each row's window, [B, V] float32; none for a row without penalty."""
    batch, vocab = shape
    index: list[int] = []
    tokens: list[int] = []
    lasts: list[tuple[int, mx.array]] = []
    for i, row in enumerate(rows):
        if not has_penalty(row.sampling):
            continue
        kept = row.sampling.repetition_window
        if row.last is not None:
            lasts.append((i, row.last))
            kept -= 1
        known = [token for token in row.history[max(0, len(row.history) - kept) :] if token < vocab]
        index += [i] * len(known)
        tokens += known
    counts = mx.zeros((batch, vocab))
    if tokens:
        counts = counts.at[mx.array(index), mx.array(tokens)].add(1.0)
    if lasts:  # drawn by this file, so below V
        last = mx.concatenate([token.reshape(1) for _, token in lasts])
        counts = counts.at[mx.array([i for i, _ in lasts]), last].add(1.0)
    return counts


# ---------------------------------------------------------------- draws


def _draw_groups(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """Rows that take the same steps go through them together; their figures may differ."""
    groups: dict[tuple[bool, bool, int], list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(_steps(row.sampling, logits.shape[1]), []).append(i)
    parts = []
    for (greedy, nucleus, top_k), members in groups.items():
        part = logits if len(members) == len(rows) else logits[mx.array(members)]
        if greedy:
            parts.append(mx.argmax(part, axis=-1))
        else:
            parts.append(_draw(part, [rows[i] for i in members], nucleus, top_k))
    if len(parts) == 1:
        return parts[0]
    order = [i for members in groups.values() for i in members]
    place = [0] * len(rows)
    for at, i in enumerate(order):
        place[i] = at
    return mx.concatenate(parts)[mx.array(place)]


def _steps(sampling: Sampling, vocab: int) -> tuple[bool, bool, int]:
    """(greedy, needs the falling order for top_p, candidates of top_k or 0)."""
    if _is_greedy(sampling):
        return True, False, 0
    top_k = sampling.top_k if sampling.top_k < vocab else 0
    return False, sampling.top_p < 1, top_k


def _draw(logits: mx.array, rows: Sequence[Row], nucleus: bool, top_k: int) -> mx.array:
    """One draw a row, [n] uint32. With top_k, only that many candidates are put in order and get noise."""
    floor = logits.max(axis=-1, keepdims=True) + _column([_log(row.sampling.min_p) for row in rows])
    vocab = logits.shape[1]
    if not nucleus and not top_k:
        return mx.argmax(mx.where(logits >= floor, logits + _noise(rows, vocab, vocab), -mx.inf), axis=-1)
    if not nucleus or top_k:
        ranking = _ranking(_falling(logits, top_k), logits, floor, rows, nucleus)
        return _best(ranking, rows, top_k or vocab)
    if vocab < 4 * RANKED or mx.default_device().type != mx.DeviceType.cpu:
        return _best(_ranking(_falling(logits, 0), logits, floor, rows, nucleus), rows, vocab)
    head, whole = _head_of_nucleus(logits, floor, rows)
    tokens = _best(head, rows, vocab)
    rest = [i for i, found in enumerate(whole) if not found]
    if rest:
        at, others = mx.array(rest), [rows[i] for i in rest]
        ranking = _ranking(_falling(logits[at], 0), logits[at], floor[at], others, nucleus)
        tokens[at] = _best(ranking, others, vocab)
    return tokens


Ranking = tuple[mx.array, mx.array, mx.array]  # candidates in falling order, their logits, which may be drawn


def _ranking(
    order: mx.array, logits: mx.array, floor: mx.array, rows: Sequence[Row], nucleus: bool
) -> Ranking:
    ranked = mx.take_along_axis(logits, order, axis=-1)
    kept = ranked >= floor
    if nucleus:
        # A top_p that float32 rounds to 0 keeps none; arg-max of nothing is then rank 0, as it should be.
        total = mx.logsumexp(logits, axis=-1, keepdims=True)
        before = mx.cumsum(mx.exp(ranked - total), axis=-1, inclusive=False)
        kept = kept & (before < _column([row.sampling.top_p for row in rows]))
    return order, ranked, kept


def _best(ranking: Ranking, rows: Sequence[Row], width: int) -> mx.array:
    """One draw a row; `width`: how many candidates the noise is made for, whatever part of them there is."""
    order, ranked, kept = ranking
    scores = mx.where(kept, ranked + _noise(rows, width, ranked.shape[1]), -mx.inf)
    best = mx.argmax(scores, axis=-1, keepdims=True)
    return mx.take_along_axis(order, best, axis=-1).squeeze(-1)


def _head_of_nucleus(logits: mx.array, floor: mx.array, rows: Sequence[Row]) -> tuple[Ranking, list[bool]]:
    """The first `RANKED` of the order, and of which rows no other token may be drawn.

    To know that, the logits are waited for. On a CPU, where a launched step is nearly done anyway, it is a
    fraction of what it costs to put 50,000 tokens in order.
    """
    some = mx.sort(mx.argpartition(-logits, kth=RANKED - 1, axis=-1)[:, :RANKED], axis=-1)
    # Sorting is stable: equal logits keep the order of their ids, as they would among all.
    inner = mx.argsort(-mx.take_along_axis(logits, some, axis=-1), axis=-1)
    ranking = _ranking(mx.take_along_axis(some, inner, axis=-1), logits, floor, rows, nucleus=True)
    _, ranked, kept = ranking
    least = ranked[:, -1:]  # others may be as large as this, but not larger
    whole = (ranked[:, 0] > least[:, 0]) & ~(kept & (ranked <= least)).any(axis=-1)
    return ranking, cast("list[bool]", whole.tolist())


def _noise(rows: Sequence[Row], width: int, count: int) -> mx.array:
    """Gumbel noise times each row's temperature, of the first `count` of `width` candidates, [n, count]."""
    keys = [row_key(row.seed, row.position) for row in rows]
    return _column([row.sampling.temperature for row in rows]) * _gumbel(keys, width, count)


def _falling(values: mx.array, top: int) -> mx.array:
    """Indices of the `top` largest values of each row (0: of all) in falling order, [n, K]."""
    if not top:
        return mx.argsort(-values, axis=-1)
    some = mx.argpartition(-values, kth=top - 1, axis=-1)[:, :top]
    inner = mx.argsort(-mx.take_along_axis(values, some, axis=-1), axis=-1)
    return mx.take_along_axis(some, inner, axis=-1)


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


# ---------------------------------------------------------------- randomness

_MASK = 2**64 - 1


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every output bit depends on every input bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def row_key(seed: int, position: int) -> tuple[int, int]:
    """The random key of one draw, as two 32-bit words."""
    mixed = _mix(_mix(seed & _MASK) ^ (position & _MASK))
    return mixed >> 32, mixed & 0xFFFFFFFF


def _gumbel(keys: list[tuple[int, int]], vocab: int, count: int) -> mx.array:
    """Standard Gumbel noise, the first `count` of [n, V], each row from its own key.

    −log(−log1p(−u)) rather than −log(−log u): a uniform is finest near 0, and that is where the large
    values, which decide a draw, then come from.
    """
    uniform = mx.vmap(lambda key: mx.random.uniform(shape=(vocab,), key=key))(mx.array(keys, dtype=mx.uint32))
    uniform = uniform[:, :count]
    return -mx.log(-mx.log1p(-mx.clip(uniform, UNIFORM_LEAST, UNIFORM_MOST)))


# ---------------------------------------------------------------- log-probabilities


def _logprobs(logits: mx.array, tokens: mx.array, rows: Sequence[Row]) -> Logprobs | None:
    asked = tuple((i, row.logprobs) for i, row in enumerate(rows) if row.logprobs is not None)
    if not asked:
        return None
    members = mx.array([i for i, _ in asked])
    part = logits[members]
    logprobs = part - mx.logsumexp(part, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens[members][:, None], axis=-1).squeeze(-1)
    most = min(max(count for _, count in asked), logits.shape[1])
    # [n, K]; K may be 0
    ids = _falling(logprobs, most) if most else mx.zeros((len(asked), 0), dtype=mx.uint32)
    return Logprobs(asked, chosen, mx.take_along_axis(logprobs, ids, axis=-1), ids)
