"""Speculative rounds and ragged prompts on tiny models: exact, or refused before anything changes."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from tests.caches.content import raw
from tests.caches.models import ARCHITECTURES, WINDOW
from tests.caches.sessions import Rows, assert_same, drawn, fresh_logits, model_of

from stateroom.caches.errors import CannotTrim
from stateroom.caches.session import SessionCache

STATES = ["lfm2", "mamba2", "qwen3_next", "falcon_h1"]
WITHOUT_STATES = [name for name in ARCHITECTURES if name not in STATES]
BATCHABLE = [name for name in WITHOUT_STATES if name != "llama4"]
RAGGED = ["llama", "gemma3_text", "gpt_oss", "lfm2", "mamba2", "qwen3_next"]


@pytest.mark.parametrize("architecture", ["llama_windows", "gemma3_text", "gpt_oss", "llama4"])
def test_rounds_across_the_wrap_of_a_window(architecture: str) -> None:
    """B26: window 8, rounds of 4 from position 5 on, 3 rejected each round; the same as plain decode."""
    model, random = model_of(architecture), np.random.default_rng(3)
    tokens = drawn(random, 5)
    rounds, plain = Rows.of(model, [tokens]), Rows.of(model, [tokens])
    for _ in range(3 * WINDOW):
        token = drawn(random, 1)
        rounds.cache.spec_round_begin()
        got = rounds.feed([[*token, *drawn(random, 3)]])
        rounds.cache.spec_round_rollback([1])
        rounds.cut([len(rounds.tokens[0]) - 3])
        assert_same(got[0, :1], plain.feed([token])[0])
    assert rounds.tokens == plain.tokens


@pytest.mark.parametrize("architecture", BATCHABLE)
def test_rows_keep_their_own_part_of_a_round(architecture: str) -> None:
    """B26: 0, 1, 2, … tokens of one round, by turns, beyond the window's wrap; a row leaves inside of one."""
    model, random = model_of(architecture), np.random.default_rng(4)
    group = Rows.of(model, [drawn(random, n) for n in (3, 17, 6, 9)])
    for turn in range(6):
        rows = len(group.tokens)
        before = group.cache.offsets
        group.cache.spec_round_begin()
        group.feed([drawn(random, 3) for _ in range(rows)])
        group.feed([drawn(random, 1) for _ in range(rows)])
        if turn == 3:
            group.cache.filter_rows([2, 0, 3])
            group.tokens, before = [group.tokens[i] for i in (2, 0, 3)], tuple(before[i] for i in (2, 0, 3))
        keep = [(turn + row) % 5 for row in range(len(group.tokens))]
        group.cache.spec_round_rollback(keep)
        group.cut([then + n for then, n in zip(before, keep, strict=True)])
    group.cache.spec_round_begin()
    group.feed([drawn(random, 2) for _ in group.tokens])
    group.cache.spec_round_commit()
    group.feed([drawn(random, 1) for _ in group.tokens])


@pytest.mark.parametrize("architecture", STATES)
def test_a_state_keeps_all_of_a_round_or_nothing(architecture: str) -> None:
    """B26: each row by itself; anything else is refused, and the round goes on."""
    model, random = model_of(architecture), np.random.default_rng(5)
    group = Rows.of(model, [drawn(random, n) for n in (3, 17, 6)])
    for keep in ([0, 3, 0], [3, 3, 3], [0, 0, 0], [3, 0, 3]):
        before = group.cache.offsets
        group.cache.spec_round_begin()
        group.feed([drawn(random, 3) for _ in range(3)])
        held = [[raw(array) for array in store.arrays()] for store in group.cache.stores]
        for wrong in ([1, 3, 0], [0, 0, 2]):
            with pytest.raises(CannotTrim, match="all of a round or nothing"):
                group.cache.spec_round_rollback(wrong)
            assert group.cache.offsets == tuple(n + 3 for n in before)
            assert held == [[raw(array) for array in store.arrays()] for store in group.cache.stores]
        group.cache.spec_round_rollback(keep)
        group.cut([then + n for then, n in zip(before, keep, strict=True)])
    assert not group.cache.speculative


def ragged(group: Rows, prompts: Sequence[Sequence[int]], pieces: Sequence[int]) -> None:
    """Feeds prompts of different lengths in shared forwards; what follows each is junk."""
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    assert sum(pieces) == longest
    junk = np.random.default_rng(0)
    padded = [[*prompt, *drawn(junk, longest - len(prompt))] for prompt in prompts]
    group.cache.prepare_prefill(lengths, probed=True)
    start = 0
    for n in pieces:
        logits = group.cache.forward(group.model, mx.array([row[start : start + n] for row in padded]))
        mx.eval(group.cache.arrays())
        got = np.array(logits)
        for row, prompt in enumerate(prompts):
            real = min(max(lengths[row] - start, 0), n)
            if real:
                want = fresh_logits(group.model, [*group.tokens[row], *prompt[: start + real]])[-real:]
                assert_same(got[row, :real], want)
        start += n
    group.cache.finalize_prefill()
    for row, prompt in enumerate(prompts):
        group.tokens[row].extend(prompt)
    group.cut([len(tokens) for tokens in group.tokens])


@pytest.mark.parametrize("pieces", [[9], [2, 4, 3], [1, 1, 7]])
@pytest.mark.parametrize("architecture", RAGGED)
def test_ragged_prompts_are_fed_together(architecture: str, pieces: list[int]) -> None:
    """Each row's logits, and all that follows, are those of its prompt alone."""
    model, random = model_of(architecture), np.random.default_rng(6)
    group = Rows.of(model, [drawn(random, n) for n in (4, 11, 2, 7)])
    for _ in range(2):
        ragged(group, [drawn(random, n) for n in (9, 1, 6, 0)], pieces)
        group.feed([drawn(random, 1) for _ in range(4)])
        group.feed([drawn(random, 3) for _ in range(4)])


@pytest.mark.parametrize("architecture", RAGGED)
def test_rows_leave_a_ragged_prefill(architecture: str) -> None:
    """Even the longest: padding that all others share is no longer stored."""
    model, random = model_of(architecture), np.random.default_rng(7)
    group = Rows.of(model, [drawn(random, n) for n in (4, 11, 2)])
    prompts = [drawn(random, n) for n in (2, 8, 3)]
    padded = [[*prompt, *[0] * (8 - len(prompt))] for prompt in prompts]
    group.cache.prepare_prefill([2, 8, 3], probed=True)
    group.cache.forward(model, mx.array([row[:5] for row in padded]))
    mx.eval(group.cache.arrays())
    group.cache.filter_rows([2, 0])
    group.cache.forward(model, mx.array([padded[i][5:] for i in (2, 0)]))
    group.cache.finalize_prefill()
    group.tokens = [[*group.tokens[i], *prompts[i]] for i in (2, 0)]
    group.feed([drawn(random, 2) for _ in range(2)])
    alone = group.cache.extract_row(1)
    assert_same(
        np.array(alone.forward(model, mx.array([[5]]))[0]), fresh_logits(model, [*group.tokens[1], 5])[-1:]
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_a_ragged_prefill_ends_when_it_was_fed(architecture: str) -> None:
    model = model_of(architecture)
    group = Rows.of(model, [[1, 2], [3]])
    group.cache.prepare_prefill([4, 2], probed=True)
    group.cache.forward(model, mx.array([[1, 2, 3], [4, 5, 0]]))
    with pytest.raises(RuntimeError, match="prompts end at"):
        group.cache.finalize_prefill()
    with pytest.raises(RuntimeError, match="ragged prefill is open"):
        group.cache.extract_row(0)
    assert group.cache.offsets == (5, 4)
    group.cache.forward(model, mx.array([[9], [0]]))
    group.cache.finalize_prefill()
    assert group.cache.offsets == (6, 3)


def test_rounds_of_what_holds_nothing() -> None:
    """A draft of a session that was never fed."""
    model = model_of("llama")
    rows = Rows(model, SessionCache.create(model), [[]])
    rows.cache.spec_round_begin()
    rows.feed([[1, 2, 3]])
    rows.cache.spec_round_rollback([0])
    rows.cut([0])
    rows.feed([[4, 5]])


def test_a_prompt_of_nothing_gives_no_state() -> None:
    """What a model's first forward makes of padding isn't the state of a session that was never fed."""
    model = model_of("mamba2")
    group = SessionCache.merge_rows([SessionCache.create(model) for _ in range(2)])
    with pytest.raises(ValueError, match="each prompt needs one"):
        group.prepare_prefill([3, 0], probed=True)
    group.prepare_prefill([3, 1], probed=True)
