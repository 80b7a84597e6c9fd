"""The host's emulation itself: what it computes, and what it must notice."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from stateroom.kernels import host
from stateroom.kernels.build import gpu_run
from stateroom.kernels.host import EmulationError, host_run
from stateroom.kernels.source import Kernel, Launch

pytestmark = pytest.mark.skipif(host.compiler() is None, reason="no g++")


def launched(body: str, given: mx.array, groups: int = 1, threads: int = 64, out: int = 64) -> Launch:
    kernel = Kernel("probe", ("given",), ("made",), body)
    return Launch(kernel, (given,), (groups, 1, 1), threads, ((out,),), (mx.float32,))


def ran(body: str, given: mx.array, groups: int = 1, threads: int = 64, out: int = 64) -> np.ndarray:
    launch = launched(body, given, groups, threads, out)
    (forwards,), (backwards,) = host_run(launch), host_run(launch, backwards=True)
    np.testing.assert_array_equal(np.array(forwards), np.array(backwards))
    return np.array(forwards)


GIVEN = mx.array(np.random.default_rng(1).normal(size=192).astype(np.float32))


def test_collectives_stay_within_their_simd_group() -> None:
    x = np.array(GIVEN).reshape(3, 2, 32)
    body = "const float x = given[GROUP_X * 64 + THREAD]; made[GROUP_X * 64 + SIMD * 32 + LANE] = {};"
    for collective, wanted in (
        ("SIMD_SUM(x)", np.broadcast_to(x.sum(-1, keepdims=True), x.shape)),
        ("SIMD_MAX(x)", np.broadcast_to(x.max(-1, keepdims=True), x.shape)),
        ("SIMD_SHUFFLE(x, (LANE + 5) % 32)", np.roll(x, -5, -1)),
    ):
        got = ran(body.format(collective), GIVEN, groups=3, out=192).reshape(x.shape)
        np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_shared_memory_is_seen_after_a_barrier() -> None:
    body = "SHARED(float, all, 64); all[THREAD] = given[THREAD]; BARRIER(); made[THREAD] = all[63 - THREAD];"
    np.testing.assert_array_equal(ran(body, GIVEN), np.array(GIVEN)[63::-1])


def test_a_missing_barrier_shows() -> None:
    body = "SHARED(float, all, 64); all[THREAD] = given[THREAD]; made[THREAD] = all[63 - THREAD];"
    launch = launched(body, GIVEN)
    (forwards,), (backwards,) = host_run(launch), host_run(launch, backwards=True)
    assert np.isnan(np.array(forwards)[:32]).all()
    assert np.isnan(np.array(backwards)[32:]).all()


def test_what_is_never_written_stays_poisoned() -> None:
    got = ran("if (THREAD != 7) made[THREAD] = 1.0f;", GIVEN)
    assert np.flatnonzero(np.isnan(got)).tolist() == [7]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("made[THREAD] = given[THREAD * 4];", "index 192 of an array of 192"),
        ("made[THREAD + 1] = given[THREAD];", "index 64 of an array of 64"),
        ("SHARED(float, all, 9); all[THREAD] = 0;", "index 9 of an array of 9"),
        ("if (LANE < 9) made[LANE] = SIMD_SUM(1.0f);", "never come"),
        ("if (SIMD == 0) BARRIER();", "never come"),
        (
            "float x = given[THREAD];\nif (LANE < 9) x = SIMD_SUM(x);\nelse x = SIMD_SUM(x);\nmade[0] = x;",
            "meet",
        ),
    ],
)
def test_what_a_gpu_would_let_pass_is_refused(body: str, message: str) -> None:
    with pytest.raises(EmulationError, match=message):
        host_run(launched(body, GIVEN))
    assert ran("made[THREAD] = given[THREAD];", GIVEN)[3] == GIVEN[3].item()  # and the next one runs


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(("macro", "dtype"), [("HALF", mx.float16), ("BFLOAT", mx.bfloat16)])
def test_sixteen_bit_floats_round_as_mlx_rounds(macro: str, dtype: mx.Dtype) -> None:
    """All of them back and forth, and floats around every boundary between two of them."""
    every = mx.arange(1 << 16).astype(mx.uint16).view(dtype)
    wide = np.array(every.astype(mx.float32))
    between = np.concatenate(
        [wide, *(np.nextafter(wide, to) for to in (np.float32(np.inf), -np.float32(np.inf)))]
    )
    middle = (wide[:-1].astype(np.float64) + wide[1:]) / 2
    middle = middle[np.isfinite(middle) & (np.abs(middle) < 3e38)].astype(np.float32)
    for floats in (between, middle):
        given = mx.array(floats)
        body = f"for (int i = THREAD; i < {given.size}; i += 32) {{ made[i] = {macro}(given[i]); }}"
        kernel = Kernel("rounds", ("given",), ("made",), body)
        (got,) = host_run(Launch(kernel, (given,), (1, 1, 1), 32, ((given.size,),), (dtype,)))
        wanted = given.astype(dtype)
        np.testing.assert_array_equal(np.array(got.astype(mx.float32)), np.array(wanted.astype(mx.float32)))
    kernel = Kernel(
        "widens", ("given",), ("made",), "for (int i = THREAD; i < 65536; i += 32) made[i] = float(given[i]);"
    )
    (got,) = host_run(Launch(kernel, (every,), (1, 1, 1), 32, ((1 << 16,),), (mx.float32,)))
    np.testing.assert_array_equal(np.array(got), wide)


def test_a_text_that_does_not_compile_names_its_line() -> None:
    with pytest.raises(RuntimeError, match="probe:2"):
        host_run(launched("\nmade[0] = nothing;", GIVEN))


@pytest.mark.skipif(mx.metal.is_available() or mx.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_launch_says_so() -> None:
    with pytest.raises(RuntimeError, match="probe needs a GPU"):
        gpu_run(launched("made[THREAD] = 0;", GIVEN))


def test_a_launch_is_checked() -> None:
    with pytest.raises(ValueError, match="33 threads"):
        launched("", GIVEN, threads=33)
    with pytest.raises(ValueError, match="not 0 arrays"):
        Launch(Kernel("probe", ("given",), ("made",), ""), (), (1, 1, 1), 32, ((1,),), (mx.float32,))
