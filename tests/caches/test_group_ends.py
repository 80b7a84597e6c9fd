"""Groups of parts when something fails at any operation of mlx, and over very many steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from tests.caches.injected import failures
from tests.caches.reading import ALL, MERGEABLE, Reading, fed, window
from tests.caches.test_failures import everything

from stateroom.caches.codecs.scheme import Scheme
from stateroom.caches.group import Group
from stateroom.caches.layout import CAPACITY_STEP
from stateroom.caches.session import SessionCache

PAGES = 60_000  # bytes by which mlx may round up what it allocates for a few arrays
LATER = Scheme("affine4", quantise_after=42)


def mixed(model: Reading = MERGEABLE) -> Group:
    """A lone row, one that forgets at the next piece, two over a trunk, and quantised ones."""
    parent = fed(model, range(20))
    branches = [parent, parent.branch(shared_min=1)] if parent.batchable else [parent]
    lone = [
        fed(model, range(5)),
        fed(model, [n % 50 for n in range(250)]),
        fed(model, range(30), Scheme("affine8")),
    ]
    return Group([*lone, SessionCache.merge_rows(branches)])


def with_late() -> Group:
    return Group(
        [fed(MERGEABLE, range(40), LATER), fed(MERGEABLE, range(3)), fed(MERGEABLE, range(39), LATER)]
    )


def in_round() -> Group:
    group = mixed()
    group.spec_round_begin()
    feed(group, 3)
    return group


def feed(group: Group, n: int, model: Reading = MERGEABLE) -> None:
    mx.eval(group.forward(model, mx.array([[7] * n] * group.rows)), group.arrays())


NEW = fed(MERGEABLE, range(9))
OPERATIONS: dict[str, tuple[Callable[[], Group], Callable[[Group], object]]] = {
    "step": (mixed, lambda g: g.forward(MERGEABLE, mx.array([[7]] * g.rows))),
    "piece": (mixed, lambda g: g.forward(MERGEABLE, mx.array([[7] * 9] * g.rows))),
    "step of chunks": (lambda: mixed(ALL), lambda g: g.forward(ALL, mx.array([[7]] * g.rows))),
    "across quantise_after": (with_late, lambda g: g.forward(MERGEABLE, mx.array([[7] * 5] * g.rows))),
    "begin a round": (mixed, lambda g: g.spec_round_begin()),
    "commit a round": (in_round, lambda g: g.spec_round_commit()),
    "roll back": (in_round, lambda g: g.spec_round_rollback([0, 3, 2, 1, 2])),
    "add": (mixed, lambda g: g.add([NEW])),
    "merge": (lambda: Group([fed(MERGEABLE, range(3))], apart=False), lambda g: g.add([NEW])),
    "remove": (mixed, lambda g: g.remove([3, 0, 4])),
    "pack": (mixed, lambda g: g.pack([1, 4])),
}
NO_OPERATION = {"begin a round", "commit a round", "add"}  # of mlx's: nothing can fail


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_fails_half_way_changes_nothing_and_leaves_nothing(name: str) -> None:
    """B16: whichever part it is in."""
    prepare, operation = OPERATIONS[name]
    group = prepare()
    parts, before = list(group.parts), [everything(part) for part in group.parts]
    ALL.caches = MERGEABLE.caches = []
    gc.collect()
    at = mx.get_active_memory()

    def unchanged() -> None:
        assert all(now is then for now, then in zip(group.parts, parts, strict=True))
        assert [everything(part) for part in group.parts] == before
        ALL.caches = MERGEABLE.caches = []
        assert mx.get_active_memory() == at, "no array is left behind"

    failed = failures(lambda: operation(group), unchanged)
    assert (failed == 0) == (name in NO_OPERATION)
    assert group.apart == (name != "merge"), "a failure is no reason to give up"


def test_twenty_thousand_steps_with_joins_and_leaves(tmp_path: Path) -> None:
    """B50: no growth of capacity, of the graph, or of what mlx has allocated, without garbage collection.

    Every 25 steps a row leaves and a new one joins; some are packed, and every fifth step is a round.
    """
    model = Reading(KVCache, window)
    gc.collect()
    gc.disable()
    try:
        settled: tuple[int, ...] = ()
        group = Group()
        for step in range(20_000 // 3):
            if step % 25 == 0:
                if group.rows == 3:
                    group.remove([0])
                group.add([fed(model, [1, 2, 3], Scheme("affine8") if step % 4 == 0 else None)])
                dense = [
                    row for row in range(group.rows) if group.place(row)[0].blueprint.scheme.name == "dense"
                ]
                if step % 3 == 0:
                    group.pack(dense)
            if step % 5 == 0:
                group.spec_round_begin()
            logits = group.forward(model, mx.array([[7]] * group.rows))
            if step % 5 == 0:
                group.spec_round_rollback([row % 2 for row in range(group.rows)])
            mx.eval(logits)
            if step in (1500 + 23, 1500 + 23 + 300 * ((20_000 // 3 - 1600) // 300)):
                mx.eval(group.arrays())
                mx.export_to_dot(str(tmp_path / "graph"), *group.arrays())
                graph = len((tmp_path / "graph").read_text())
                capacity = sum(part.stores[0].planes[0].shape[2] for part in group.parts)
                sizes = (mx.get_active_memory(), graph, len(group.parts), capacity)
                if settled:
                    assert sizes[0] <= settled[0] + PAGES
                    assert sizes[1:] == settled[1:]
                settled = sizes
        assert settled
        assert settled[-1] == CAPACITY_STEP * settled[2]
    finally:
        gc.enable()
