"""When trunks are read by each row by itself, and that it gives what reading them apart gives."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.caches.reading import FULL, VOCAB

from stateroom.caches import shared_reads
from stateroom.caches.read_costs import ALWAYS, BYTE_NS, NEVER, PASS_US, USUAL, ReadCosts
from stateroom.caches.read_trial import measured
from stateroom.caches.session import SessionCache
from stateroom.kernels.dispatch import forced

COSTS = st.builds(ReadCosts, st.floats(*PASS_US), st.floats(*BYTE_NS))


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = shared_reads.costs()
    with forced("folded"):
        yield
    shared_reads.use_costs(before)


@given(COSTS, st.integers(0, 2**40))
def test_a_lone_row_has_nobody_to_share_with(costs: ReadCosts, nbytes: int) -> None:
    assert costs.plain(1, nbytes)
    assert not NEVER.plain(1, nbytes)
    assert ALWAYS.plain(64, nbytes)


@given(COSTS, st.integers(1, 64), st.integers(1, 2**34), st.integers(1, 8))
def test_more_rows_or_tokens_never_make_it_plain(
    costs: ReadCosts, rows: int, nbytes: int, passes: int
) -> None:
    if not costs.plain(rows, nbytes, passes):
        assert not costs.plain(rows + 1, nbytes, passes)
        assert not costs.plain(rows, nbytes + 1, passes)
    else:
        assert costs.plain(rows, nbytes, passes + 1)


@given(st.floats(-1e4, 1e4), st.floats(-1e4, 1e4))
def test_a_disturbed_trial_gives_costs_within_bounds(small_us: float, large_us: float) -> None:
    costs = ReadCosts.of(small_us, large_us, 8, 1 << 20)
    assert PASS_US[0] <= costs.pass_us <= PASS_US[1]
    assert BYTE_NS[0] <= costs.byte_ns <= BYTE_NS[1]


def test_costs_are_those_that_the_trial_saw() -> None:
    # 150 µs lost on few bytes, nothing on 1 MiB in 4 rows: 3 MiB read again took those 150 µs.
    costs = ReadCosts.of(150.0, 0.0, 4, 1 << 20)
    assert costs.pass_us == 150.0
    assert costs.byte_ns == pytest.approx(150_000 / (3 << 20))
    assert costs.plain(4, (1 << 20) - 1)
    assert not costs.plain(4, (1 << 20) + 1)


def test_the_trial_leaves_the_costs_as_they_were() -> None:
    shared_reads.use_costs(NEVER)
    measured.cache_clear()
    found = measured()
    assert shared_reads.costs() is NEVER
    assert found is measured()
    assert PASS_US[0] <= found.pass_us <= PASS_US[1]


def test_usual_costs_tell_few_tokens_from_many() -> None:
    token = 3 * 64 * 2 * 4  # bytes, of the demo model's layers
    assert USUAL.plain(8, 256 * token)
    assert not USUAL.plain(8, 2_048 * token)
    assert USUAL.plain(2, 2_048 * token)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("trunks", [1, 2])
def test_both_ways_give_the_same(rows: int, trunks: int) -> None:
    """Of rows with as many trunks and different own lengths, teacher-forced; and what fresh rows say."""
    random = np.random.default_rng(rows * 10 + trunks)

    def tokens(n: int) -> list[int]:
        return [int(token) for token in random.integers(0, VOCAB, n)]

    base, told = SessionCache.create(FULL), []
    for n in (70, 67)[:trunks]:
        told += (piece := tokens(n))
        base.forward(FULL, mx.array([piece]))
        child = base.branch()
    own = [tokens(2 + 3 * i) for i in range(rows)]
    steps = [tokens(rows) for _ in range(3)]
    answers = {}
    for name, costs in (("apart", NEVER), ("plain", ALWAYS)):
        shared_reads.use_costs(costs)
        branches = [child.branch() for _ in range(rows)]
        for branch, more in zip(branches, own, strict=True):
            branch.forward(FULL, mx.array([more]))
        group = SessionCache.merge_rows(branches)
        assert group.stores[0].shares
        answers[name] = [np.array(group.forward(FULL, mx.array(step)[:, None])[:, -1]) for step in steps]
    for apart, plain in zip(answers["apart"], answers["plain"], strict=True):
        assert np.abs(apart - plain).max() <= 1e-5 * np.abs(apart).max()
    for row in range(rows):
        fresh = SessionCache.create(FULL)
        whole = [*told, *own[row], *(step[row] for step in steps)]
        wanted = np.array(fresh.forward(FULL, mx.array([whole]))[0, -1])
        assert np.abs(answers["plain"][-1][row] - wanted).max() <= 1e-4 * np.abs(wanted).max()
