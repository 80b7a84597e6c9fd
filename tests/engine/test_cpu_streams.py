"""Products on two streams are those of one; a trial decides about them; and the law holds with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from tests.caches.reading import FULL, VOCAB, fed
from tests.engine.harness import Bench
from tests.engine.test_law import SCHEMES, walk
from tests.second_stream import everywhere, stream
from tests.tiny import make_tiny_model

from stateroom.caches.group import Group
from stateroom.caches.session import SessionCache
from stateroom.daemon.engine import cpu_linear, cpu_streams
from stateroom.daemon.engine.blas_threads import BlasThreads
from stateroom.daemon.engine.cpu_linear import Share, multiply
from stateroom.daemon.engine.cpu_streams import WEIGHTS_LEAST, Settled, compare, forced, share_out, shares
from stateroom.kernels import streams

FIRST, SECOND, HALVES = Share.FIRST, Share.SECOND, Share.HALVES


@pytest.fixture(autouse=True)
def nothing_settled() -> Iterator[None]:
    with forced(None, None):
        yield


def test_layers_that_are_given_the_same_are_shared_out() -> None:
    large = WEIGHTS_LEAST
    assert shares([331, 110, 110]) == [FIRST, SECOND, SECOND]  # q, k and v
    assert shares([9, 9]) == [FIRST, SECOND]  # gate and up
    assert shares([large, 5, 5]) == [HALVES, FIRST, FIRST]  # many query heads a KV head
    assert shares([large]) == [HALVES]
    assert shares([large - 1]) == [FIRST]


def test_shares_are_those_of_a_pass() -> None:
    bench = Bench(make_tiny_model("llama"))
    share_out(bench.loaded.model, bench.engine.trial_step())
    block = bench.loaded.model.layers[0]
    # The tiny model's four query heads have two KV heads.
    assert [layer.share for layer in (block.self_attn.q_proj, block.self_attn.k_proj)] == [FIRST, SECOND]
    assert {block.mlp.gate_proj.share, block.mlp.up_proj.share} == {FIRST, SECOND}
    assert block.mlp.down_proj.share is FIRST


@pytest.mark.parametrize("share", list(Share))
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 4), (9, 1)])
@pytest.mark.parametrize(("outputs", "inputs"), [(2, 5), (577, 64), (4_620, 67), (2_310, 577)])
def test_products_are_those_of_the_oracle(
    share: Share, shape: tuple[int, int], outputs: int, inputs: int
) -> None:
    random = np.random.default_rng(outputs)
    x = random.standard_normal((*shape, inputs)).astype(np.float32)
    weight = random.standard_normal((outputs, inputs)).astype(np.float32)
    with forced(stream(), None):
        made = np.array(multiply(mx.array(x), mx.array(weight), share))
    wanted = x.astype(np.float64) @ weight.astype(np.float64).T
    assert made.shape == wanted.shape
    assert np.abs(made - wanted).max() <= 2e-6 * inputs**0.5 * np.abs(wanted).max()


class Clock:
    """Seconds that steps take by where products and reads go and how many threads BLAS has."""

    def __init__(self, two: float, many: float, reads: float = 1.0) -> None:
        self.now = 0.0
        self.two, self.many, self.reads = two, many, reads
        self.threads = self.steps = 0

    def openblas_set_num_threads(self, threads: int) -> None:
        self.threads = threads

    def step(self) -> None:
        self.steps += 1
        took = 0.1 * (self.two if cpu_linear.second() else 1.0) * (self.many if self.threads > 1 else 1.0)
        self.now += took * (self.reads if streams.second() else 1.0)

    def compared(self, blas: bool = True, cores: int = 2) -> Settled:
        threads = BlasThreads(self, 2) if blas else None
        steps = [self.step, self.step]
        return compare(nn.Module(), steps, threads, cores=cores, clock_s=lambda: self.now)


@pytest.mark.parametrize("reads", [0.8, 0.98, 1.2])
@pytest.mark.parametrize(
    ("two", "many", "products", "switched"),
    [
        (0.8, 1.2, True, True),
        (0.8, 1.0, True, False),
        (1.1, 1.2, False, True),
        (1.1, 0.7, False, False),
        (0.97, 1.0, False, False),  # within the noise
    ],
)
def test_the_fastest_is_taken(two: float, many: float, products: bool, switched: bool, reads: float) -> None:
    clock = Clock(two, many, reads)
    assert clock.compared() == Settled(products, reads < 0.97, switched)
    assert (cpu_linear.second() is not None) == products
    assert (streams.second() is not None) == (reads < 0.97)
    assert clock.threads == (1 if switched else 2)


@pytest.mark.parametrize("two", [0.8, 1.1])
def test_without_threads_of_blas(two: float) -> None:
    assert Clock(two, 1.0).compared(blas=False) == Settled(two < 1, False, False)


@pytest.mark.parametrize("blas", [True, False])
def test_one_core_has_no_second_stream(blas: bool) -> None:
    clock = Clock(0.5, 1.5, 0.5)
    assert clock.compared(blas, cores=1) == Settled(False, False, blas)
    assert cpu_linear.second() is streams.second() is None
    assert (clock.steps > 0) == blas


def test_a_trial_is_bounded() -> None:
    clock = Clock(1.0, 1.0)
    clock.compared()
    round_s = 4 * 2 * 0.1
    assert clock.now <= cpu_streams.PRODUCTS_S + cpu_streams.READS_S + 2 * round_s


def test_a_real_trial_leaves_nothing_behind() -> None:
    """Whatever it finds; and one that fails leaves no stream."""
    bench = Bench(make_tiny_model("llama"))
    found = cpu_streams.settle(bench.engine, bench._report)
    assert not bench.incidents
    assert (cpu_linear.second() is not None) == found.products
    assert (streams.second() is not None) == found.reads
    assert bench.engine.schemes.dense.samples[0].offsets == (1,)
    session = bench.open([3, 5, 7])
    bench.check_law(session)


def test_a_trial_that_fails_settles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(make_tiny_model("llama"))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(cpu_streams, "compare", fail)
    cpu_streams.use(stream(), stream())
    assert cpu_streams.settle(bench.engine, bench._report) == Settled(False, False, False)
    assert cpu_linear.second() is streams.second() is None
    assert len(bench.incidents) == 1


@pytest.mark.parametrize("lengths", [(40, 40, 40, 40), (70, 3, 20, 9), (5,), (8, 1)])
def test_rows_apart_are_read_side_by_side(lengths: tuple[int, ...]) -> None:
    """Even halves of the parts, or each by itself: the logits of one stream either way."""
    random = np.random.default_rng(len(lengths))
    prompts = [[int(token) for token in random.integers(0, VOCAB, n)] for n in lengths]
    more = mx.array(random.integers(0, VOCAB, (len(lengths), 1)))
    answers = []
    for split in (False, True):
        group = Group([fed(FULL, prompt) for prompt in prompts])
        with everywhere() if split else forced(None, None):
            logits = group.forward(FULL, more)
            mx.eval(logits, group.arrays())
        answers.append(np.array(logits))
    assert np.abs(answers[0] - answers[1]).max() <= 1e-5 * np.abs(answers[0]).max()


def test_a_step_copies_no_plane() -> None:
    """Planes have one writer and no second reference while they are written, with two streams, too."""
    group = SessionCache.merge_rows([fed(FULL, list(range(7))) for _ in range(4)])
    extra = []
    with everywhere():
        for _ in range(4):
            held = mx.get_active_memory()
            mx.reset_peak_memory()
            mx.eval(group.forward(FULL, mx.zeros((4, 1), dtype=mx.int32)), group.arrays())
            extra.append(mx.get_peak_memory() - held)
    assert max(extra) < group.nbytes_capacity / 2


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2"])
def test_law(architecture: str) -> None:
    with everywhere():
        walk(architecture, examples=8, steps=14, shared_min=1)


def test_law_of_mixed_schemes() -> None:
    with everywhere():
        walk("llama", examples=6, steps=12, width=256, schemes=SCHEMES, shared_min=3)
