"""The command for machines with a GPU: it must see what is wrong, and print no speed then."""

from __future__ import annotations

import mlx.core as mx
import pytest

from stateroom.kernels import check
from stateroom.kernels.check_cases import Case
from stateroom.kernels.join_segments.reference import Attended
from stateroom.kernels.packed_attention import fused
from stateroom.kernels.spans import Spans

SMALL = Case(4, 2, 64, mx.float32, None, Spans.of([2, 5], [11, 5]), 13, 3)


def attended(output: list[list[float]], lse: list[float]) -> Attended:
    return Attended(mx.array([[output]]), mx.array([[lse]]))


def test_differences() -> None:
    inf = float("inf")
    want = attended([[3.0, 4.0], [0.0, 0.0]], [1.0, -inf])
    assert check.wrong_by(want, want) == (0, 0)
    assert check.wrong_by(attended([[3.0, 4.5], [0.0, 0.0]], [1.0, -inf]), want) == (pytest.approx(0.1), 0)
    assert check.wrong_by(attended([[3.0, 4.0], [0.0, 1e-9]], [1.0, -inf]), want) == (inf, 0)
    assert check.wrong_by(attended([[3.0, 4.0], [0.0, 0.0]], [1.5, -9.0]), want) == (0, inf)
    nothing = attended([[float("nan"), 4.0], [0.0, 0.0]], [float("nan"), -inf])
    assert check.wrong_by(nothing, want) == (inf, inf)


def test_all_is_right_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "right_cases", lambda: iter([SMALL]))
    monkeypatch.setattr(check, "set_cases", lambda: iter([(SMALL, False), (SMALL, True)]))
    monkeypatch.setattr(check, "speed_cases", lambda tokens, dtype: iter([SMALL]))
    lines: list[str] = []
    assert check.main([], lines.append) == 0
    text = "".join(lines)
    assert "WRONG" not in text
    assert text.count("right") >= 2
    assert "GB/s" in text


def test_a_wrong_kernel_is_named_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "right_cases", lambda: iter([SMALL]))
    monkeypatch.setattr(check, "set_cases", lambda: iter([(SMALL, False), (SMALL, True)]))
    monkeypatch.setattr(check, "emulated_forms", lambda: ["host"])
    real = fused.packed_attention

    def off(*args: object, **named: object) -> Attended:
        output, lse = real(*args, **named)  # type: ignore[arg-type]
        return Attended(output * 1.0001, lse)

    monkeypatch.setattr(fused, "packed_attention", off)
    lines: list[str] = []
    assert check.main([], lines.append) == 1
    assert [line for line in lines if line.startswith("WRONG  host       packed_attention 2 x 11 tokens")]
    assert not [line for line in lines if "GB/s" in line]
