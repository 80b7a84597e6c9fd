"""What mlx may take of a GPU, beside KV: from what the device tells and the budget alone."""

from __future__ import annotations

import mlx.core as mx
from hypothesis import given
from hypothesis import strategies as st

from stateroom.daemon.engine.device_limits import WIRED_PART, DeviceLimits, device_bytes, limits

GIB = 2**30
SIZES = st.integers(0, 2**40)


@given(st.integers(2**28, 2**40), SIZES, SIZES)
def test_limits_never_pass_the_device(device: int, weights: int, budget: int) -> None:
    made = limits(device, weights, budget)
    assert 0 <= made.wired <= device * WIRED_PART
    assert made.wired <= weights + budget
    assert 0 < made.cache <= device // 8
    assert 0 < made.memory < device


def test_what_several_workers_wire_is_what_they_were_granted() -> None:
    """B49: not a part of the machine for each of them."""
    one, other = limits(48 * GIB, 4 * GIB, 6 * GIB), limits(48 * GIB, 8 * GIB, 2 * GIB)
    assert (one.wired, other.wired) == (10 * GIB, 10 * GIB)


def test_the_device_tells_by_several_names() -> None:
    assert device_bytes({"memory_size": 64, "max_recommended_working_set_size": 48}) == 48  # Metal
    assert device_bytes({"device_name": "H200", "total_memory": 141, "free_memory": 3}) == 141  # CUDA
    assert device_bytes({"device_name": "a processor"}) is None


def test_a_cpu_is_left_as_it_is() -> None:
    if mx.default_device().type == mx.DeviceType.cpu:
        made = DeviceLimits(1)
        made.apply(2**20)
        assert made.set is None
        assert made.facts() == {}


def test_limits_are_set_where_there_is_a_device() -> None:
    """On a CPU mlx takes the calls, too; what was set before is put back."""
    made = DeviceLimits(GIB)
    made.device_bytes = 8 * GIB
    before = mx.get_memory_limit()
    cache = mx.set_cache_limit(2**25)
    try:
        made.apply(2 * GIB)
        assert mx.get_memory_limit() == limits(8 * GIB, GIB, 2 * GIB).memory == 4 * GIB
        made.apply(GIB)
        assert mx.get_memory_limit() == 3 * GIB
        assert made.gauges()["memory_limit_bytes"] == 3 * GIB
    finally:
        mx.set_memory_limit(before)
        mx.set_cache_limit(cache)
