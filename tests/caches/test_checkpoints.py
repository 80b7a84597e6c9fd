"""Checkpoints: which of them a session keeps, and that going back to one and on is as if nothing had been."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache
from tests.caches.content import raw
from tests.caches.models import WINDOW
from tests.caches.scripted import Scripted, fed, feed
from tests.caches.sessions import Rows, drawn, model_of

from stateroom.caches.checkpoints import CHECKPOINTS_MAX, Checkpoint, Trail
from stateroom.caches.codecs.scheme import Scheme
from stateroom.caches.errors import CannotTrim
from stateroom.caches.layers.state import StateRows
from stateroom.caches.session import SessionCache
from stateroom.caches.stored_rows import TRIM_BACK

CHECKPOINTED = [
    "llama_windows",
    "gemma3_text",
    "gpt_oss",
    "llama4",
    "lfm2",
    "mamba2",
    "qwen3_next",
    "falcon_h1",
]


def checkpoint(length: int, nbytes: int = 4) -> Checkpoint:
    """Of one state of so many bytes."""
    store = StateRows([1])
    store.layers[0][0] = mx.zeros((1, nbytes // 4))
    return Checkpoint(length, "some model", (store, None))


def missed(lengths: Sequence[int]) -> list[float]:
    """What the loss of each costs: tokens to compute again, the likelier the nearer they are to the end."""
    return [
        (at - before) / (lengths[-1] - at + 1) for before, at in zip([0, *lengths], lengths, strict=False)
    ]


# ------------------------------------------------------------ which are kept


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=14),
    st.integers(1, 5),
    st.integers(4, 60),
)
def test_a_trail_keeps_within_its_bounds(
    added: list[tuple[int, int]], count_max: int, bytes_max: int
) -> None:
    """Count and bytes; what is dropped costs least, and never is the last one for others' sake."""
    trail = Trail(count_max=count_max, bytes_max=bytes_max)
    for length, words in added:
        new = checkpoint(length, 4 * words)
        want = sorted([*(c for c in trail if c.length != length), new], key=lambda c: c.length)
        while len(want) > count_max or sum(c.nbytes for c in want) > bytes_max:
            costs = missed([c.length for c in want])
            del want[costs.index(min(costs[:-1])) if len(want) > 1 else 0]
        trail.add(new)
        assert list(trail) == want
        assert len(trail) == len(want) <= count_max
        assert trail.nbytes == sum(c.nbytes for c in want) <= bytes_max
        assert trail.lengths == [c.length for c in want]


@pytest.mark.parametrize("every", [1, 7, 256])
def test_what_is_near_the_end_costs_little(every: int) -> None:
    """Going back by some tokens computes at most four times as many again, if it isn't to before them all."""
    trail = Trail()
    for end in range(every, 200 * every + 1, every):
        trail.add(checkpoint(end))
        assert trail.lengths[-1] == end
        for length in range(trail.lengths[0], end + 1, every):
            nearest = trail.nearest(length)
            assert nearest is not None
            assert length - nearest.length <= 4 * (end - length) + every
    assert len(trail) == CHECKPOINTS_MAX


@given(st.lists(st.integers(0, 30), unique=True, max_size=8), st.integers(0, 31))
def test_the_nearest_and_the_cut(lengths: list[int], length: int) -> None:
    trail = Trail([], count_max=8)
    for each in lengths:
        trail.add(checkpoint(each))
    fork = trail.copy()
    before = [each for each in sorted(lengths) if each <= length]
    nearest = trail.nearest(length)
    assert (nearest.length if nearest else None) == (before[-1] if before else None)
    trail.cut(length)
    assert trail.lengths == before
    assert fork.lengths == sorted(lengths), "a fork has a trail of its own"
    assert (fork.count_max, fork.bytes_max) == (trail.count_max, trail.bytes_max)


# ------------------------------------------------------------ of sessions


def bytes_of(taken: Checkpoint) -> list[bytes]:
    return [raw(array) for store in taken.stores if store is not None for array in store.arrays()]


@pytest.mark.parametrize("architecture", CHECKPOINTED)
def test_a_session_goes_back_and_on(architecture: str) -> None:
    """B26, B30, B32: restored and fed anew it is a fresh session; so are its forks, each by itself."""
    model, random = model_of(architecture), np.random.default_rng(9)
    session = Rows.of(model, [drawn(random, 3)])
    taken: list[tuple[Checkpoint, list[int]]] = []
    for n in (2, 9, 1, 20, 40):
        session.feed([drawn(random, n)])
        made = session.cache.checkpoint(0)
        assert made is not None
        assert made.length == len(session.tokens[0])
        taken.append((made, list(session.tokens[0])))
    before = [bytes_of(made) for made, _ in taken]
    session.feed([drawn(random, 5)])
    for made, tokens in reversed(taken[:4]):
        twins = [
            Rows(model, session.cache.fork(), [list(session.tokens[0])]),
            Rows(model, session.cache.fork(), [list(session.tokens[0])]),
            session,
        ]
        for twin in twins:
            assert twin.cache.can_restore(made)
            twin.cache.restore(made)
            twin.tokens = [list(tokens)]
            assert twin.cache.offsets == (made.length,)
        for twin in twins:
            twin.feed([drawn(random, 1)])
            twin.feed([drawn(random, 4)])
    assert [bytes_of(made) for made, _ in taken] == before, "nobody writes into a checkpoint"


@pytest.mark.parametrize("architecture", [name for name in CHECKPOINTED if name != "llama4"])
def test_a_row_of_a_group_leaves_a_checkpoint(architecture: str) -> None:
    """Which a session of its own goes back to; others of the group are none the wiser."""
    model, random = model_of(architecture), np.random.default_rng(10)
    group = Rows.of(model, [drawn(random, n) for n in (40, 6, 17)])
    group.feed([drawn(random, 2) for _ in range(3)])
    made, tokens = group.cache.checkpoint(2), list(group.tokens[2])
    assert made is not None
    group.feed([drawn(random, 3) for _ in range(3)])
    with pytest.raises(CannotTrim):
        group.cache.restore(made)
    alone = Rows(model, group.cache.extract_row(2), [list(group.tokens[2])])
    alone.cache.restore(made)
    alone.tokens = [tokens]
    alone.feed([drawn(random, 2)])
    joined = Rows(model, SessionCache.merge_rows([group.cache, alone.cache]), [*group.tokens, *alone.tokens])
    joined.feed([drawn(random, 2) for _ in range(4)])


@pytest.mark.parametrize("name", ["affine8", "affine4", "turbo"])
@pytest.mark.parametrize("architecture", ["gemma3_text_64", "gpt_oss_64", "qwen3_next_64"])
def test_checkpoints_of_quantised_rows(architecture: str, name: str) -> None:
    """The bytes of a session that was fed the same tokens in the same pieces."""
    model, random = model_of(architecture), np.random.default_rng(11)
    scheme = Scheme(name)  # type: ignore[arg-type]
    session, fresh = (SessionCache.create(model, scheme) for _ in range(2))
    first, second = drawn(random, 30), drawn(random, 12)
    session.forward(model, mx.array([first]))
    made = session.checkpoint(0)
    assert made is not None
    session.forward(model, mx.array([drawn(random, 20)]))
    session.restore(made)
    fresh.forward(model, mx.array([first]))
    got, want = (np.array(each.forward(model, mx.array([second]))) for each in (session, fresh))
    assert (got == want).all()


def test_windows_are_kept_no_longer_than_they_are_seen() -> None:
    model = Scripted(KVCache, lambda: RotatingKVCache(max_size=WINDOW), lambda: RotatingKVCache(50, keep=3))
    session = fed(model, range(500), chunk=100)
    made = session.checkpoint(0)
    assert made is not None
    token = session.stores[0].bytes_per_token
    assert made.nbytes <= (WINDOW + 50 + 2 * TRIM_BACK) * token
    assert made.stores[0] is None, "full attention is trimmed"
    feed(model, session, [range(500, 600)])
    session.restore(made)
    assert session.trim_floor(0) == 500 - TRIM_BACK


def test_full_attention_needs_none() -> None:
    session = fed(Scripted(KVCache), range(5))
    assert not session.checkpointed
    assert session.checkpoint(0) is None


def test_a_checkpoint_of_something_else_is_refused() -> None:
    """Another model, another scheme, rows before and after they were quantised, a longer session."""

    def of(make: Scripted, scheme: Scheme | None = None, n: int = 20) -> SessionCache:
        return fed(make, range(n), scheme=scheme)

    def layers() -> Scripted:
        return Scripted(KVCache, lambda: RotatingKVCache(max_size=WINDOW))

    model = layers()
    late = Scheme("affine8", quantise_after=30)
    session = of(model)
    made = session.checkpoint(0)
    dense = of(model, late).checkpoint(0)
    assert made is not None
    assert dense is not None
    others = [
        of(layers()),
        of(model, Scheme("affine8")),
        of(model, Scheme("turbo")),
        of(model, late),
        of(model, n=19),
        SessionCache.merge_rows([of(model), of(model)]),
        SessionCache.create(model),
    ]
    for other in others:
        offsets = other.offsets
        assert not other.can_restore(made)
        with pytest.raises(CannotTrim, match="go back to 20"):
            other.restore(made)
        assert other.offsets == offsets
    quantised = of(model, late, n=40)
    assert not quantised.can_restore(dense)
    assert of(model, late, n=30).can_restore(dense)
