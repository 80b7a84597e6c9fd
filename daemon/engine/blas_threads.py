"""How many threads the preloaded OpenBLAS uses, switched between decode and prefill.

On a CPU mlx multiplies through BLAS. OpenBLAS's threads make the large products of a prefill faster and
the small ones of a small model's decode step several times slower, because handing out such a product
costs more than it takes. A model of 135M parameters is past that point; which it is, a trial shows.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DECODE_THREADS = 1
TRIAL_S = 2.0  # for the trial; a step of a large model takes longer than that
ROUNDS_MOST = 8
GAIN = 0.95  # of the time; less is not worth running quanta by themselves


class BlasThreads:
    """`few()` before decode steps, `many()` before prefill. Switch only while the device is idle."""

    def __init__(self, library: Any, most: int) -> None:
        self._set = library.openblas_set_num_threads
        self._most = most
        self._now = 0
        self.few()

    @classmethod
    def find(cls) -> BlasThreads | None:
        """Of the OpenBLAS that this process was started with; None when there is no such thing."""
        if not sys.platform.startswith("linux"):
            return None
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.rpartition(" ")[2]
            # A wheel's private copy (numpy has one) is not what mlx calls.
            if "openblas" in path.rpartition("/")[2] and ".libs/" not in path:
                library = ctypes.CDLL(path)
                if hasattr(library, "openblas_set_num_threads"):
                    return cls(library, len(os.sched_getaffinity(0)))
        return None

    def pays(self, step: Callable[[], None]) -> bool:
        """Whether a decode step takes less with few threads than with many, by the least of some rounds."""
        least = [math.inf, math.inf]
        end_s = time.perf_counter() + TRIAL_S
        for _ in range(ROUNDS_MOST):
            for i, switch in enumerate((self.few, self.many)):
                switch()
                began_s = time.perf_counter()
                step()
                least[i] = min(least[i], time.perf_counter() - began_s)
            if time.perf_counter() > end_s:
                break
        return least[0] < GAIN * least[1]

    def few(self) -> None:
        self._switch(min(DECODE_THREADS, self._most))

    def many(self) -> None:
        self._switch(self._most)

    def _switch(self, threads: int) -> None:
        if threads != self._now:
            self._set(threads)
            self._now = threads
