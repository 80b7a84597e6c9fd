"""What reading a trunk costs on a CPU, once for all rows or once a row: which of the two pays.

Read apart, a trunk's tokens are read once for all rows, in a pass of its own: its scores, its softmax and the
join are some fifty primitives a layer, however few tokens there are. Read plainly, every row reads them
again, from a processor's caches mostly, in the one softmax of all it sees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReadCosts:
    """Per layer: of a pass of its own, and of a byte of keys and values that is read again."""

    pass_us: float
    byte_ns: float

    def plain(self, rows: int, nbytes: int, passes: int = 1) -> bool:
        """Whether trunks of so many bytes are read by each of the rows rather than in so many passes."""
        return (rows - 1) * nbytes * self.byte_ns <= passes * self.pass_us * 1_000

    @classmethod
    def of(cls, small_us: float, large_us: float, rows: int, nbytes: int) -> ReadCosts:
        """From what a pass of its own lost on few bytes, and on so many more in so many rows.

        Bounded: a trial on a machine that is busy with something else may show anything.
        """
        pass_us = min(max(small_us, PASS_US[0]), PASS_US[1])
        byte_ns = (pass_us - large_us) * 1_000 / ((rows - 1) * nbytes)
        return cls(pass_us, min(max(byte_ns, BYTE_NS[0]), BYTE_NS[1]))


NEVER, ALWAYS = ReadCosts(-1.0, 0.0), ReadCosts(math.inf, 0.0)  # for trials and tests
PASS_US = (60.0, 600.0)
BYTE_NS = (0.008, 0.08)
USUAL = ReadCosts(pass_us=200.0, byte_ns=0.023)  # until measured: of two x86-64 cores
