"""What mlx may take of a GPU's memory beside what the budget counts: set low, since too high is a panic.

- **Wired**: macOS keeps that much of a process in memory whatever else is short. No more than the weights
  and the KV that was granted, and never more than a part of what the system recommends: several workers, each
  with a limit of its own for the whole machine, have wired all of it (and a kernel that can't page panics).
- **Cache**: buffers that mlx keeps for the next pass. Its default is the memory itself, so every size that a
  session had on its way up would stay.
- **Memory**: beyond it mlx frees its cache first and waits for the passes in flight.

On a CPU nothing is set: mlx keeps 32 MiB for the next pass there, and wires nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

WIRED_PART = 0.75  # of what the system recommends as working set
MEMORY_PART = 0.95  # of the same
WORK_BYTES = 2**30  # what passes compute with, beside weights and KV
CACHE_BYTES = 2**29
CACHE_PART = 32  # of the device's memory, one part in so many at the most


@dataclass(frozen=True)
class Limits:
    """Bytes; 0 wires nothing."""

    wired: int
    cache: int
    memory: int


def limits(device_bytes: int, weight_bytes: int, budget_bytes: int) -> Limits:
    """For one worker on a device of so much memory. Pure."""
    theirs = weight_bytes + budget_bytes
    return Limits(
        wired=min(theirs, int(device_bytes * WIRED_PART)),
        cache=min(CACHE_BYTES, device_bytes // CACHE_PART),
        memory=min(theirs + WORK_BYTES, int(device_bytes * MEMORY_PART)),
    )


def device_bytes(told: Mapping[str, object]) -> int | None:
    """Of what `mx.device_info` tells: Metal names what it recommends, CUDA what there is, a CPU nothing."""
    for name in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        value = told.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return None


class DeviceLimits:
    """Sets them, at the start and with each budget.

    Args:
        weight_bytes: of the model.
    """

    def __init__(self, weight_bytes: int) -> None:
        self._weight_bytes = weight_bytes
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        self.device_bytes = device_bytes(mx.device_info()) if on_gpu else None
        self._wires = mx.metal.is_available()
        self.set: Limits | None = None

    def apply(self, budget_bytes: int) -> None:
        """From now on the engine holds so much KV."""
        if self.device_bytes is None:
            return
        wanted = limits(self.device_bytes, self._weight_bytes, budget_bytes)
        if wanted != self.set:
            mx.set_memory_limit(wanted.memory)
            mx.set_cache_limit(wanted.cache)
            if self._wires:
                mx.set_wired_limit(wanted.wired)
            self.set = wanted

    def facts(self) -> dict[str, int]:
        """What the broker is told at the start: the memory to reckon with, where it isn't the machine's."""
        return {} if self.device_bytes is None else {"device_memory_bytes": self.device_bytes}

    def gauges(self) -> dict[str, float]:
        """What is set, and what mlx has taken."""
        made: dict[str, float] = {"mlx_active_bytes": mx.get_active_memory()}
        made["mlx_cache_bytes"] = mx.get_cache_memory()
        if self.set is not None:
            made |= {"wired_limit_bytes": self.set.wired, "cache_limit_bytes": self.set.cache}
            made["memory_limit_bytes"] = self.set.memory
        return made
