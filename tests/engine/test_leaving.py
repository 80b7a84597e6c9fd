"""Why a session's KV isn't on the device any more: told with the journal that says so, and with no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from tests.engine.harness import Bench
from tests.tiny import make_tiny_model

from stateroom.caches.snapshots.limits import Limits
from stateroom.client import protocol as p
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.link import Answer, Budget, FromWorker, Journals


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return make_tiny_model(context=2048)


class Told:
    """A bench, and of each session why its KV left, whenever that was said."""

    def __init__(self, loaded: LoadedModel, folder: Path | None, rows: float) -> None:
        row = Bench(loaded).engine.schemes.dense.projected_bytes(300, 512)
        self.budget = int(rows * row)
        limits = Limits(free_min_bytes=0)
        self.bench = Bench(loaded, folder=folder, kv_budget_bytes=self.budget, limits=limits)
        self.left: list[tuple[str, str | None]] = []
        emit: Callable[[FromWorker], None] = self.bench.engine.emit

        def heard(message: FromWorker) -> None:
            changes = message.changes if isinstance(message, Journals) else []
            if isinstance(message, Answer) and message.journal is not None:
                changes = [message.journal]
            self.left += [(each.session, each.left) for each in changes if not each.resident]
            assert all(each.left is None for each in changes if each.resident)
            emit(message)

        self.bench.engine.emit = heard

    def open(self, start: int) -> str:
        return self.bench.open([(start + 7 * i) % 250 for i in range(300)])


@pytest.mark.parametrize("on_disk", [False, True])
def test_for_another_for_a_smaller_budget_and_when_asked(
    loaded: LoadedModel, tmp_path: Path, on_disk: bool
) -> None:
    told = Told(loaded, tmp_path if on_disk else None, rows=3)
    sessions = [told.open(n) for n in range(4)]
    assert told.left == [(sessions[0], "memory")]
    told.left.clear()
    told.bench.commands.take(Budget(told.budget // 3, told.budget // 3))
    told.bench.idle()
    assert told.left == [(sessions[1], "budget"), (sessions[2], "budget")]
    told.left.clear()
    told.bench.call(p.Park(session=sessions[3]))
    assert told.left == [(sessions[3], "asked")]
    told.left.clear()
    told.bench.decode(sessions[3], 2, ignore_eos=True)  # it is there again
    assert told.left == []


def test_when_its_pass_gave_no_numbers(loaded: LoadedModel) -> None:
    told = Told(loaded, None, rows=3)
    session = told.open(0)
    cache = told.bench.session(session).cache
    assert cache is not None
    for store in cache.stores:
        store.planes[:] = [mx.full(plane.shape, float("nan")) for plane in store.planes]  # type: ignore[union-attr]
    failed = told.bench.call(p.Decode(session=session, max_tokens=2, ignore_eos=True))
    assert isinstance(failed, p.ErrorBody)
    assert told.left == [(session, "failed")]


def test_who_gets_another_content_was_never_away(loaded: LoadedModel) -> None:
    told = Told(loaded, None, rows=3)
    session = told.open(0)
    told.bench.call(p.Sync(session=session, tokens=[9] * 300))
    told.bench.call(p.Sync(session=session, tokens=[8]))
    told.bench.call(p.Trim(session=session, to=0))
    told.bench.call(p.Prefill(session=session, tokens=[1, 2, 3]))
    assert told.left == []
