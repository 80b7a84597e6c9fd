"""What the layers of a model are, read once from the caches that the model itself makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import KVCache, make_prompt_cache

from stateroom.caches import foreign
from stateroom.caches.errors import UnknownKind
from stateroom.caches.layers import FullLayer
from stateroom.caches.rows import PackedRows


@dataclass(frozen=True, slots=True)
class Kind:
    """How many layers of a model are of one kind, and how they store keys and values."""

    kind: str
    scheme: str
    layers: int


@dataclass(frozen=True, slots=True, eq=False)
class Blueprint:
    """The layers of one model. Plain `KVCache` layers are ours; the others stay mlx-lm's."""

    make: Callable[[], list[Any]]  # the model's own caches, unused; keeps the model alive
    ours: tuple[bool, ...]  # per layer
    kinds: tuple[Kind, ...]
    batchable: bool
    stateful: bool  # has recurrent state
    signature: Hashable

    @classmethod
    def of(cls, model: Any) -> Blueprint:
        """Raises `UnknownKind` when a layer's cache is of a class that isn't understood."""

        def make() -> list[Any]:
            caches: list[Any] = make_prompt_cache(model)
            return caches

        blank = make()
        names = sorted({name for cache in blank for name in foreign.unknown(cache)})
        if names:
            raise UnknownKind(names)
        counts = Counter((foreign.kind(cache), foreign.scheme(cache)) for cache in blank)
        return cls(
            make=make,
            ours=tuple(type(cache) is KVCache for cache in blank),
            kinds=tuple(Kind(kind, scheme, n) for (kind, scheme), n in sorted(counts.items())),
            batchable=all(map(foreign.batches, blank)),
            stateful=any(map(foreign.holds_state, blank)),
            signature=(id(model), *map(foreign.signature, blank)),
        )

    def blank_others(self) -> list[Any]:
        """Unused caches for the layers that aren't ours."""
        if all(self.ours):
            return []
        return [cache for cache, is_ours in zip(self.make(), self.ours, strict=True) if not is_ours]

    def layers(self, full: PackedRows, others: Sequence[Any]) -> list[Any]:
        """The list that the model takes as its cache."""
        views, rest = iter(range(sum(self.ours))), iter(others)
        return [FullLayer(full, next(views)) if is_ours else next(rest) for is_ours in self.ours]
