"""`python -m stateroom.kernels.check`: are the kernels right on this machine, and how fast do they read?

Every kernel in every form that runs here is held against its definition, computed on the CPU in float32; the
tests hold that to float64. Speeds are printed only when all of it is right, else the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import mlx.core as mx

from stateroom.kernels import dispatch, host, kv4_set
from stateroom.kernels.check_cases import Case, Drawn, drawn, read, right_cases, set_cases, speed_cases
from stateroom.kernels.dispatch import Form
from stateroom.kernels.join_segments import reference as join_reference
from stateroom.kernels.join_segments.reference import Attended
from stateroom.kernels.packed_attention import reference as packed_reference
from stateroom.kernels.planes import arrays, nbytes

# Norm of the difference over the norm, of one head's output; lse absolute. Twice what the tests allow against
# float64, since both sides may be off by that.
BOUND = {mx.float32: 4e-6, mx.float16: 2e-3, mx.bfloat16: 4e-3}
LSE_BOUND = 1e-5
# On a GPU mlx's own products may round float32 to a shorter type on the way (TF32).
GPU_PRODUCT_BOUND = 4e-3
WARM_UP_RUNS = 3
GPU_RUNS, CPU_RUNS = 30, 3
GPU_TOKENS, CPU_TOKENS = 32_768, 2_048  # of one speed, over all rows
GPU_COPY, CPU_COPY = 1 << 27, 1 << 24  # floats

Write = Callable[[str], object]


def read_of_the_set(case: Case, made: Drawn, masked: bool) -> Attended:
    mask = case.spans.seen(case.count, case.capacity, None)[:, None] if masked else None
    return kv4_set.attend(made.queries, made.keys, made.values, case.spans, case.width**-0.5, mask)


def wrong_by(got: Attended, want: Attended) -> tuple[float, float]:
    """The largest relative difference of a head's output, and the largest difference of an lse."""
    output, wanted = got.output.astype(mx.float32), want.output.astype(mx.float32)
    away = mx.linalg.norm(output - wanted, axis=-1)
    # A query that saw nothing must give zeros and -inf to the bit.
    size = mx.linalg.norm(wanted, axis=-1)
    relative = mx.where(size > 0, away / mx.maximum(size, 1e-30), mx.where(away > 0, mx.inf, 0.0))
    lse = mx.where(got.lse == want.lse, 0.0, mx.abs(got.lse - want.lse))
    return _worst(relative), _worst(lse)


def _worst(differences: mx.array) -> float:
    worst = mx.where(mx.isnan(differences), mx.inf, differences).max().item()
    assert isinstance(worst, float)
    return worst


def check(case: Case, form: Form, read_by: Callable[[Case, Drawn], Attended] = read) -> tuple[float, float]:
    made = drawn(case, junk=True)
    with mx.stream(mx.cpu):
        wide = made.queries.astype(mx.float32)
        want = packed_reference.packed_attention(
            wide, made.keys, made.values, case.spans, case.width**-0.5, case.window
        )
        mx.eval(*want)
    with dispatch.forced(form):
        got = read_by(case, made)
        mx.eval(*got)
    with mx.stream(mx.cpu):
        return wrong_by(got, want)


def check_join(form: Form) -> tuple[float, float]:
    outputs, lse = mx.random.normal((3, 7, 2, 41, 67)), mx.random.normal((3, 7, 2, 41)) * 5
    lse = mx.where(mx.random.uniform(shape=lse.shape) < 0.3, -mx.inf, lse)
    mx.eval(outputs, lse)
    with mx.stream(mx.cpu):
        want = join_reference.join_segments(outputs, lse)
        mx.eval(*want)
    with dispatch.forced(form):
        got = dispatch.join_segments(outputs, lse)
        mx.eval(*got)
    with mx.stream(mx.cpu):
        return wrong_by(got, want)


@dataclass(frozen=True)
class Check:
    name: str
    dtype: mx.Dtype
    products: bool  # of mlx, not of a kernel
    run: Callable[[], tuple[float, float]]


def checks(form: Form) -> Iterator[Check]:
    products = form in ("folded", "quantised")
    yield Check("join_segments", mx.float32, products, partial(check_join, form))
    for case in right_cases():
        yield Check(f"packed_attention {case}", case.dtype, products, partial(check, case, form))
    for case, masked in set_cases():
        window = case.count > 1 and len(case.spans.starts) == 1
        name = f"kv4_set {case}{', mask' if masked else ''}"
        run = partial(check, case, form, partial(read_of_the_set, masked=masked))
        yield Check(name, case.dtype, products or masked or window, run)


def all_right(form: Form, write: Write) -> bool:
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    fine = True
    for each in checks(form):
        output, lse = each.run()
        bound, lse_bound = BOUND[each.dtype], LSE_BOUND
        if each.products and on_gpu:
            bound, lse_bound = max(bound, GPU_PRODUCT_BOUND), GPU_PRODUCT_BOUND
        passed = output <= bound and lse <= lse_bound
        fine = fine and passed
        verdict = "right" if passed else "WRONG"
        write(f"{verdict}  {form:9}  {each.name}: {output:.1e} of {bound:.0e}, lse {lse:.0e}\n")
    return fine


def seconds(run: Callable[[], list[mx.array]], runs: int) -> float:
    for _ in range(WARM_UP_RUNS):
        mx.eval(*run())
    started = time.perf_counter()
    for _ in range(runs):
        mx.eval(*run())
    return (time.perf_counter() - started) / runs


def bandwidth(case: Case, form: Form, runs: int) -> float:
    """GB/s of keys and values, each counted once."""
    made = drawn(case, junk=False)
    with dispatch.forced(form):
        took_s = seconds(lambda: list(read(case, made)), runs)
    return (nbytes(made.keys) + nbytes(made.values)) / took_s / 1e9


def mlx_bandwidth(case: Case, runs: int) -> float:
    """The same of mlx's own read; rows are level in all speed cases, so it needs no mask."""
    made = drawn(case, junk=False)
    keys, values = *arrays(made.keys), *arrays(made.values)
    mask = "causal" if case.count > 1 else None
    took_s = seconds(
        lambda: [
            mx.fast.scaled_dot_product_attention(
                made.queries, keys, values, scale=case.width**-0.5, mask=mask
            )
        ],
        runs,
    )
    return (nbytes(made.keys) + nbytes(made.values)) / took_s / 1e9


def copy_bandwidth(size: int, runs: int) -> float:
    """GB/s of reading `size` floats and writing as many: what the others can be measured by."""
    numbers = mx.zeros((size,), mx.float32)
    return 2 * numbers.nbytes / seconds(lambda: [numbers + 1], runs) / 1e9


def speeds(forms: list[Form], on_gpu: bool, write: Write) -> None:
    tokens, runs = (GPU_TOKENS, GPU_RUNS) if on_gpu else (CPU_TOKENS, CPU_RUNS)
    write(f"copy {copy_bandwidth(GPU_COPY if on_gpu else CPU_COPY, runs):7.1f} GB/s\n")
    for case in speed_cases(tokens, mx.bfloat16 if on_gpu else mx.float32):
        measured = [f"{form} {bandwidth(case, form, runs):7.1f} GB/s" for form in forms]
        if case.packing is None:
            measured.append(f"mlx {mlx_bandwidth(case, runs):7.1f} GB/s")
        write(f"{'  '.join(measured)}  {case}\n")


def emulated_forms() -> list[Form]:
    """Where a GPU runs the kernels, the host need not."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    return ["host"] if host.compiler() and not on_gpu else []


def main(arguments: list[str] | None = None, write: Write = sys.stdout.write) -> int:
    parser = argparse.ArgumentParser(prog="python -m stateroom.kernels.check", description=__doc__)
    parser.add_argument("--no-speed", action="store_true", help="only whether the results are right")
    wanted = parser.parse_args(arguments)
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    forms: list[Form] = ["quantised", "fused"] if on_gpu else ["folded", "quantised"]
    write(f"{mx.device_info().get('device_name', 'a device')}, {mx.default_device()}, mlx {version('mlx')}\n")
    mx.random.seed(0)
    right = [all_right(form, write) for form in forms + emulated_forms()]
    if not all(right):
        write("Not all is right: no speeds.\n")
        return 1
    if not wanted.no_speed:
        speeds(forms, on_gpu, write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
