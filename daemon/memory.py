"""The machine's memory: how much of it is for KV, and how much of that each worker may hold.

The shell around `budget.py` (who gets what) and `pressure.py` (what the machine's shortage leaves): it reads
the system, and sends the workers their budgets. All of it is told by `gauges`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from structlog.typing import FilteringBoundLogger

from stateroom.client.protocol import Event
from stateroom.daemon.budget import KvBudget
from stateroom.daemon.clock import Clock
from stateroom.daemon.link import Budget, Pulse, Short, ToWorker, Within
from stateroom.daemon.machine import memory_bytes
from stateroom.daemon.pressure import Pressure, Source, system_level

USED_PART = 0.75  # of the memory, for weights and KV together: the rest is the system's and other programs'
DEVICE_PART = 0.9  # of the memory of a device that says how much it has
WORK_BYTES = 2**30  # for what a pass computes and what mlx keeps for the next one
TOTAL_MIN_BYTES = 256 * 2**20  # however small the machine is: enough to serve something
HELD_GAUGES = ("kv_bytes", "kv_busy_bytes", "demoted")  # of a pulse
UNKNOWN_BYTES = 8 * 2**30  # taken for the memory of a machine that doesn't tell


class Grantee(Protocol):
    """`supervisor.Engine`."""

    generation: int
    facts: dict[str, Any]
    used_s: float  # when it was last sent a request

    @property
    def ready(self) -> bool: ...

    def send(self, message: ToWorker) -> None: ...


def default_bytes(memory: int, device: int | None, weights: int) -> int:
    """KV for all workers on a machine of so much memory, beside the weights of what is loaded."""
    usable = memory * USED_PART
    if device is not None:
        usable = min(usable, device * DEVICE_PART)
    return max(int(usable) - weights - WORK_BYTES, TOTAL_MIN_BYTES)


class Memory:
    """One budget of KV for all workers.

    Args:
        fixed_bytes: `--kv-budget`; None: by the machine.
        publish: tells watchers of every owner.
        level: how short of memory the system says it is.
    """

    def __init__(
        self,
        fixed_bytes: int | None,
        clock: Clock,
        log: FilteringBoundLogger,
        publish: Callable[[Event], None],
        level: Source = system_level,
        machine_bytes: Callable[[], int | None] = memory_bytes,
    ) -> None:
        self._fixed_bytes, self._clock, self._log = fixed_bytes, clock, log
        self._publish, self._level = publish, level
        self.machine_bytes = machine_bytes() or UNKNOWN_BYTES
        self._workers: dict[int, Grantee] = {}
        self.pressure = Pressure()
        self.budget = KvBudget(self.total_bytes)

    @property
    def total_bytes(self) -> int:
        """KV that all workers may hold together now."""
        total = self.unpressed_bytes
        most = self.pressure.most_bytes
        return total if most is None else min(total, most)

    @property
    def unpressed_bytes(self) -> int:
        """The same while the machine isn't short of memory."""
        if self._fixed_bytes is not None:
            return self._fixed_bytes
        facts = [worker.facts for worker in self._workers.values()]
        devices = [_figure(each, "device_memory_bytes") for each in facts]
        weights = sum(_figure(each, "weight_bytes") or 0 for each in facts)
        return default_bytes(self.machine_bytes, min(filter(None, devices), default=None), weights)

    # ------------------------------------------------------------ workers

    def begin(self, worker: Grantee) -> None:
        """A worker is being started, without any budget; its share is made ready meanwhile."""
        self._workers[worker.generation] = worker
        self.budget.join(worker.generation)
        self.settle()

    def ready(self, worker: Grantee) -> None:
        """Its model is loaded, which takes memory, too. To be called before it is sent anything."""
        self._resize()
        worker.send(self._message(self.budget.ready(worker.generation)))
        self.settle()

    def gone(self, generation: int) -> None:
        if self._workers.pop(generation, None) is not None:
            self.budget.leave(generation)
            self.settle()

    def take(self, worker: Grantee, message: Pulse | Short | Within) -> None:
        """What a worker says of what it holds."""
        who = worker.generation
        if isinstance(message, Pulse):
            held, busy, demoted = (int(message.gauges.get(name, 0)) for name in HELD_GAUGES)
            self.budget.holds(who, held, busy, demoted, worker.used_s, self._clock())
        elif isinstance(message, Short):
            self.budget.short(who, message.nbytes, self._clock())
        else:
            self.budget.within(who, message.nbytes)
        self.settle()

    def settle(self) -> None:
        """Tells the workers what changed for them."""
        self._resize()
        for who, nbytes in self.budget.settle(self._clock()).items():
            if self._workers[who].ready:  # one that is on its way out reads no more
                self._workers[who].send(self._message(nbytes))

    def _message(self, nbytes: int) -> Budget:
        return Budget(nbytes, max(self.budget.most, nbytes))

    def _resize(self) -> None:
        self.budget.total = self.total_bytes

    # ------------------------------------------------------------ the machine

    def tick(self) -> None:
        """About once a second: how the machine is."""
        if self.pressure.tell(self._level(), self.budget.held, self._clock()):
            level = self.pressure.level.name.lower()
            details = {"level": level, "kv_budget_bytes": self.total_bytes, "kv_bytes": self.budget.held}
            self._log.warning("memory pressure", **details)
            self._publish(Event(event="pressure", details=details))
        self.settle()

    def gauges(self) -> dict[str, float]:
        """For `stats`."""
        return {
            "memory_bytes": self.machine_bytes,
            "memory_pressure": self.pressure.level.value,
            "kv_budget_bytes": self.budget.total,
            "kv_granted_bytes": self.budget.granted,
            "kv_held_bytes": self.budget.held,
        }


def _figure(facts: dict[str, Any], name: str) -> int | None:
    value = facts.get(name)
    return value if isinstance(value, int) else None
