"""Who has had how much of the device: owners share by milliseconds, not by requests. Pure.

Deficit round-robin, paid afterwards: what a pass costs is known only once it ran, so nobody is given a budget
to spend; instead whoever has had the least, by its weight, goes next. Owners are compared while they *wait*:
something of theirs could run and doesn't, a prefill or a stream without a place. One whose streams all have
places gets what it can use.

- Nobody waits: nobody is kept from anything, and all accounts are void.
- An owner that begins to wait starts no lower than the least of those who wait: idleness earns nothing.
- It starts no higher than `DEBT_MS` above it: what it took before is not held against it for ever.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

DEBT_MS = 2_000.0  # at weight 1; the most that an owner which comes back is behind those who waited
OWNERS_KEPT = 1_024  # accounts; beyond, those of owners that don't wait are forgotten
WEIGHT_MIN, WEIGHT_MAX = 0.01, 100.0


class Ledger:
    """The accounts of one class. `weights`: of owners that don't count as 1."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        assert all(WEIGHT_MIN <= weight <= WEIGHT_MAX for weight in self._weights.values())
        self._accounts: dict[str, float] = {}  # milliseconds by weight, since somebody waits
        self._booked: dict[str, float] = {}  # milliseconds in flight, not yet paid
        self._waiting: Counter[str] = Counter()

    def weight(self, owner: str) -> float:
        return self._weights.get(owner, 1.0)

    @property
    def known(self) -> int:
        """Owners that it has an account of."""
        return len(self._accounts)

    @property
    def waiting(self) -> int:
        """Owners of whom something waits."""
        return len(self._waiting)

    @property
    def booked_ms(self) -> float:
        """What all owners have in flight."""
        return sum(self._booked.values())

    def wait(self, owner: str, *, comes: bool = True) -> None:
        """One more thing of this owner waits. `comes`: it is new, not one that ran until now."""
        if not self._waiting:
            self._accounts.clear()
        if owner not in self._waiting:
            least = min((self.had(other) for other in self._waiting), default=0.0)
            most = least + DEBT_MS / self.weight(owner) if comes else math.inf
            had = self.had(owner)
            self._accounts[owner] = self._accounts.get(owner, 0.0) + min(max(had, least), most) - had
            self._forget()
        self._waiting[owner] += 1

    def waits_no_more(self, owner: str) -> None:
        """One thing less of this owner waits: it is served, or gone."""
        self._waiting[owner] -= 1
        assert self._waiting[owner] >= 0
        if not self._waiting[owner]:
            del self._waiting[owner]

    def charge(self, owner: str, ms: float) -> None:
        if self._waiting:
            self._accounts[owner] = self._accounts.get(owner, 0.0) + ms / self.weight(owner)

    def book(self, owner: str, ms: float) -> None:
        """Counts what is only expected, until it is taken back (a negative `ms`) and charged as it was."""
        booked = self._booked.get(owner, 0.0) + ms
        if abs(booked) < 1e-9:
            self._booked.pop(owner, None)
        else:
            self._booked[owner] = booked

    def had(self, owner: str) -> float:
        """Milliseconds by weight, with what is in flight."""
        return self._accounts.get(owner, 0.0) + self._booked.get(owner, 0.0) / self.weight(owner)

    def _forget(self) -> None:
        if len(self._accounts) <= OWNERS_KEPT:
            return
        idle = sorted((o for o in self._accounts if o not in self._waiting), key=self._accounts.__getitem__)
        for owner in idle[: max(len(self._accounts) - OWNERS_KEPT // 2, 0)]:
            del self._accounts[owner]
