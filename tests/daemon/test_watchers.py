"""Many who want figures often: each gets some, and the broker does other things meanwhile."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from stateroom.client.protocol import Event, StatsResult, Watch
from stateroom.daemon.watchers import FIGURES_MAX, REST_S, Watchers

WATCHERS = 5 * FIGURES_MAX
EVERY_S = 0.1


class Scene:
    """A clock that is moved by hand, and what was told to whom (by rid)."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.told: list[int] = []
        self.read: list[str] = []
        self.wakes: list[float] = []
        self.watchers = Watchers(self, lambda: self.now_s, self.stats, self.wakes.append)  # type: ignore[arg-type]

    def stats(self, owner: str) -> StatsResult:
        self.read.append(owner)
        return StatsResult(counters={}, gauges={}, models=[])

    def reply(self, ticket: Any, body: Event) -> None:
        self.told.append(ticket.rid)

    def watch(self, rid: int, owner: str) -> None:
        ticket: Any = SimpleNamespace(rid=rid, owner=owner)
        self.watchers.add(ticket, Watch(stats_every_s=EVERY_S), lambda owner: True)


def test_figures_for_hundreds_are_told_in_small_parts_and_to_each_in_turn() -> None:
    scene = Scene()
    for rid in range(WATCHERS):
        scene.watch(rid, f"app{rid % 2}")
    scene.now_s = EVERY_S
    for _ in range(10):
        scene.told.clear()
        scene.read.clear()
        scene.wakes.clear()
        scene.watchers.tick()
        assert len(scene.told) == FIGURES_MAX
        assert sorted(scene.read) == ["app0", "app1"]  # once for each owner
        assert scene.wakes == [REST_S]
        scene.now_s += REST_S
    before = Counter(scene.told)
    for _ in range(5):
        scene.watchers.tick()
        scene.now_s += REST_S
    assert set((Counter(scene.told) - before).values()) == {1}
    assert len(Counter(scene.told) - before) == WATCHERS


def test_figures_for_a_few_come_when_they_were_asked_for() -> None:
    scene = Scene()
    scene.watch(1, "app")
    scene.now_s = EVERY_S / 2
    scene.watchers.tick()
    assert scene.told == []
    scene.now_s = EVERY_S
    scene.watchers.tick()
    assert scene.told == [1]
    assert scene.wakes[-1] == EVERY_S
