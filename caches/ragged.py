"""Prompts of different lengths, fed to a group in one pass and padded at the right. Pure: no mlx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ragged:
    """The padding behind each row's prompt, and the row's offset when the prompt is in."""

    right_pad: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, offset: Sequence[int], lengths: Sequence[int]) -> Ragged:
        """Prompts of `lengths`, still to be fed to rows of `offset` tokens."""
        if len(lengths) != len(offset) or min(lengths, default=0) < 0:
            raise ValueError(f"prompts of {list(lengths)} tokens for {len(offset)} rows")
        longest = max(lengths, default=0)
        return cls(
            tuple(longest - n for n in lengths), tuple(o + n for o, n in zip(offset, lengths, strict=True))
        )

    @classmethod
    def fed(cls, offset: Sequence[int], right_pad: Sequence[int]) -> Ragged:
        """Rows of `offset` tokens, of which the last `right_pad` are padding."""
        ends = tuple(o - n for o, n in zip(offset, right_pad, strict=True))
        if min(right_pad, default=0) < 0 or min(ends, default=0) < 0:
            raise ValueError(f"right padding {list(right_pad)} of rows of {list(offset)} tokens")
        return cls(tuple(right_pad), ends)

    def filter(self, keep: Sequence[int]) -> Ragged:
        return Ragged(tuple(self.right_pad[i] for i in keep), tuple(self.ends[i] for i in keep))

    def real(self, offset: Sequence[int]) -> tuple[int, ...]:
        """How many of a row's `offset` tokens aren't padding."""
        return tuple(min(pair) for pair in zip(offset, self.ends, strict=True))

    def check_fed(self, offset: Sequence[int]) -> None:
        """RuntimeError unless rows of `offset` tokens have been fed all of the longest prompt."""
        if any(o - n != end for o, n, end in zip(offset, self.right_pad, self.ends, strict=True)):
            raise RuntimeError(
                f"the prompts end at {self.ends} tokens with {self.right_pad} of padding, rows hold {offset}"
            )
