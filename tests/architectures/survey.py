"""What a session of each architecture can do, found out by doing it: `python -m tests.architectures.survey`
writes the table of docs/models.md.

A cell says "works" only where the logits kept the law of `tests.architectures.law`; "refused" where the
library said no beforehand, with its reason; "wrong" where neither held.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from tests.architectures.configs import NAMES, NOT_BUILT, WINDOW
from tests.architectures.law import (
    QUANTISED_NATS,
    RELATIVE,
    Logits,
    Rows,
    distance,
    divergence,
    fresh_logits,
    model_of,
    random_tokens,
    rows_may_share,
)

from stateroom.caches.codecs.scheme import CannotQuantise, Name, Scheme
from stateroom.caches.errors import CannotTrim, Mismatch, UnknownKind
from stateroom.caches.group import Group
from stateroom.caches.probe import branches_agree, groups_agree, prompts_agree
from stateroom.caches.session import SessionCache

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
OPENS, CLOSES = "<!-- table: python -m tests.architectures.survey -->", "<!-- end of table -->"
EVERY = sorted([*NAMES, *NOT_BUILT], key=str.lower)
SCHEMES: tuple[Name, ...] = ("affine8", "affine4", "turbo")
COLUMNS = ("architecture", "layers", "chunks", "batch", "apart", "ragged prefill", "trim", "fork", *SCHEMES)
LENGTH = 25  # wraps a window three times
SHORT = WINDOW - 3
LONG = 100  # windows have forgotten most of it
# How far a scheme's predictions may be from the dense ones, of how far those of one token are from those of
# the next. Random models are hard on it, the more so where they choose experts or tokens.
QUALITY: dict[Name, float] = {"affine8": 0.2, "affine4": 0.6, "turbo": 0.6}

Cells = dict[str, str]


class Wrong(AssertionError):
    """Logits that don't keep the law."""


def hold(far: float, bound: float = RELATIVE) -> None:
    if not far <= bound:
        raise Wrong(f"wrong: off by {far:.0e}")


# ---------------------------------------------------------------- one capability each


def layers(architecture: str) -> str:
    """The kinds of the model's layers, counted."""
    kinds = SessionCache.create(model_of(architecture)).kinds()
    return ", ".join(f"{kind.layers} {kind.kind}" for kind in kinds)


def chunks(architecture: str) -> str:
    """One chunk, chunks of 7 and single steps, and mlx-lm's own caches, give the same logits."""
    model = model_of(architecture)
    tokens = random_tokens(np.random.default_rng(1), LENGTH)
    whole, by_step = (_by_mlx_lm(model, tokens, size) for size in (LENGTH, 1))
    differ = distance(whole, by_step) > RELATIVE
    want = by_step if differ else whole
    for size in (LENGTH, 7, 1):
        forward = partial(SessionCache.create(model).forward, model)
        far = distance(_in_pieces(forward, tokens, size), want)
        if differ and far > RELATIVE:
            raise Wrong("wrong in mlx-lm: its chunks differ from its steps")
        hold(far)
    return "works, by mlx-lm's steps; its chunks differ" if differ else "works"


def _in_pieces(forward: Callable[[mx.array], mx.array], tokens: list[int], size: int) -> Logits:
    """Logits [N, V] of the tokens, fed in chunks of `size`."""
    pieces = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    return np.concatenate([np.array(forward(mx.array([piece]))[0]) for piece in pieces])


def _by_mlx_lm(model: Any, tokens: list[int], size: int) -> Logits:
    return _in_pieces(partial(model, cache=make_prompt_cache(model)), tokens, size)


def batch(architecture: str) -> str:
    """Rows of different lengths: together in steps and chunks, then fewer of them, then one alone."""
    model = model_of(architecture)
    random = np.random.default_rng(2)
    alone = [Rows.start(model, random_tokens(random, n)) for n in (SHORT, LENGTH, 2 * WINDOW)]
    rows = Rows.merge(alone)
    if not rows_may_share(architecture):
        return "refused: rows of different lengths disagree"
    for n in (1, 3, 1):
        rows.grow([random_tokens(random, n) for _ in rows.tokens])
    hold(rows.off())
    rows.filter([2, 0])
    hold(rows.feed([random_tokens(random, 1) for _ in rows.tokens]))
    hold(rows.extract(1).feed([random_tokens(random, 2)]))
    return "works"


def apart(architecture: str) -> str:
    """Rows of different lengths, stored apart: in steps and pieces, then fewer of them, then packed."""
    model = model_of(architecture)
    if not groups_agree(model):
        return "refused: only in one store"
    random = np.random.default_rng(7)
    tokens = [random_tokens(random, n) for n in (SHORT, LENGTH, LONG)]
    group = Group([Rows.start(model, row).cache for row in tokens])

    def feed(n: int) -> None:
        new = [random_tokens(random, n) for _ in tokens]
        logits = group.forward(model, mx.array(new))
        mx.eval(logits, group.arrays())
        for row, more, got in zip(tokens, new, logits, strict=True):
            row.extend(more)
            hold(distance(np.array(got), fresh_logits(model, row)[-n:]))

    for n in (1, 3, WINDOW + 3, 1):
        feed(n)
    group.remove([0])
    del tokens[0]
    feed(2)
    if rows_may_share(architecture):
        group.pack([0, 1])
        feed(1)
    return "works" if group.apart else "works, for some lengths one by one"


def ragged_prefill(architecture: str) -> str:
    """Prompts of different lengths in one forward, behind rows of different lengths."""
    model = model_of(architecture)
    if not rows_may_share(architecture):
        return "refused: rows of different lengths disagree"
    if not prompts_agree(model):
        return "refused: its states take in the padding"
    random = np.random.default_rng(6)
    rows = Rows.merge([Rows.start(model, random_tokens(random, n)) for n in (SHORT, 2 * WINDOW)])
    hold(rows.feed_ragged([random_tokens(random, n) for n in (11, 4)]))
    for n in (1, 3):
        rows.grow([random_tokens(random, n) for _ in rows.tokens])
    hold(rows.off())
    return "works"


def trim(architecture: str) -> str:
    """Down to the floor, half-way there, and to a checkpoint where some layer's floor isn't 0."""
    model = model_of(architecture)
    random = np.random.default_rng(3)
    tokens = random_tokens(random, LONG)
    rows = Rows.start(model, tokens)
    rows.cache.forget_unseen()
    floor = rows.cache.trim_floor(0)
    for left in {floor, (floor + LONG) // 2}:
        twin = rows.fork()
        twin.trim(0, LONG - left)
        hold(twin.feed([random_tokens(random, 1)]))
    if not floor:
        return "works"
    early = Rows.start(model, tokens[:SHORT])
    checkpoint = early.cache.checkpoint(0)
    early.grow([tokens[SHORT:]])
    if checkpoint is None:
        raise Wrong("wrong: neither trimmed nor checkpointed")
    early.cache.restore(checkpoint)
    del early.tokens[0][SHORT:]
    hold(early.feed([random_tokens(random, 1)]))
    return "to a checkpoint" if floor == LONG else f"by {LONG - floor} tokens, or to a checkpoint"


def fork(architecture: str) -> str:
    """Two sessions go on from one, over tokens that they share where the model reads through us."""
    model = model_of(architecture)
    random = np.random.default_rng(4)
    rows = Rows.start(model, random_tokens(random, LENGTH))
    twin = rows.fork()
    for n in (1, 4):
        twin.grow([random_tokens(random, n)])
        rows.grow([random_tokens(random, n)])
    hold(max(twin.off(), rows.off()))
    if not branches_agree(model):
        return "copied"
    rows = Rows.start(model, random_tokens(random, LENGTH))
    twin = Rows(model, rows.cache.branch(shared_min=1), [list(rows.tokens[0])])
    for n in (1, 4):
        twin.grow([random_tokens(random, n)])
        rows.grow([random_tokens(random, n)])
    hold(max(twin.off(), rows.off()))
    return "shared"


def stored_as(name: Name, architecture: str) -> str:
    """Quantised from the first token: near the dense model, and the law as for dense rows."""
    model, scheme = model_of(architecture), Scheme(name)
    random = np.random.default_rng(5)
    tokens = random_tokens(random, LENGTH)
    try:
        kinds = SessionCache.create(model, scheme).kinds()
    except CannotQuantise as refusal:
        return f"refused: {str(refusal).split(';')[0]}"
    if all(kind.scheme == "dense" for kind in kinds):
        return "nothing to quantise"
    dense, whole = fresh_logits(model, tokens), fresh_logits(model, tokens, scheme)
    hold(divergence(whole, dense), QUALITY[name] * divergence(np.roll(dense, 1, 0), dense))
    rows = Rows.start(model, tokens[:SHORT], scheme)
    for piece in (tokens[SHORT:21], *([token] for token in tokens[21:])):
        rows.grow([piece])
    hold(rows.off(), QUANTISED_NATS)
    twin = rows.fork()
    if twin.cache.can_trim(0, 3):
        twin.trim(0, 3)
    hold(twin.feed([random_tokens(random, 2)]), QUANTISED_NATS)
    if rows_may_share(architecture):
        rows = Rows.merge([rows, twin])
    for n in (1, 4, 1):
        rows.grow([random_tokens(random, n) for _ in rows.tokens])
    hold(rows.off(), QUANTISED_NATS)
    return "works"


CHECKS: dict[str, Callable[[str], str]] = {
    "layers": layers,
    "chunks": chunks,
    "batch": batch,
    "apart": apart,
    "ragged prefill": ragged_prefill,
    "trim": trim,
    "fork": fork,
    **{name: partial(stored_as, name) for name in SCHEMES},
}


# Where an error is an answer; anywhere else a session was opened that couldn't go on.
MAY_REFUSE: dict[type[Exception], tuple[str, ...]] = {
    Mismatch: ("batch", "ragged prefill"),
    CannotTrim: ("trim",),
}


# ---------------------------------------------------------------- the table


def survey(name: str) -> Cells:
    """One row of the table, by column."""
    if name in NOT_BUILT:
        return {"architecture": name, "layers": f"not tried: {NOT_BUILT[name]}"}
    cells = {"architecture": name}
    for column, check in CHECKS.items():
        try:
            cells[column] = check(name)
        except UnknownKind as refusal:
            return cells | {"layers": f"refused: {refusal}"}
        except Wrong as wrong:
            cells[column] = str(wrong)
        except (ValueError, RuntimeError) as error:
            cells[column] = f"{'refused' if column in MAY_REFUSE.get(type(error), ()) else 'wrong'}: {error}"
        if cells[column].startswith("wrong in mlx-lm"):
            break
    return cells


def table(rows: list[Cells]) -> str:
    lines = [list(COLUMNS), ["---"] * len(COLUMNS)]
    lines += [[row.get(column, "") for column in COLUMNS] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def parsed(page: str) -> list[Cells]:
    """The rows of the table in the page."""
    lines = page.split(OPENS)[1].split(CLOSES)[0].strip().splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [{column: cell for column, cell in zip(COLUMNS, row, strict=True) if cell} for row in cells]


def with_table(page: str, rows: list[Cells]) -> str:
    before, rest = page.split(OPENS)
    return f"{before}{OPENS}\n{table(rows)}\n{CLOSES}{rest.split(CLOSES)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), [survey(name) for name in EVERY]))
