"""What a daemon is started with, and what of it its workers are told."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import zmq

from stateroom.daemon.blas import Blas
from stateroom.daemon.clock import monotonic_s
from stateroom.daemon.config import Config, ModelSpec, parse_bytes, parse_weights
from stateroom.daemon.engine.worker import weights_of
from stateroom.daemon.exits import Leave
from stateroom.daemon.logs import make_log
from stateroom.daemon.memory import Memory
from stateroom.daemon.metrics import Metrics
from stateroom.daemon.supervisor import Supervisor


def test_weights_are_read() -> None:
    assert parse_weights([]) == ()
    assert parse_weights(["editor=4", "a=b=0.5"]) == (("editor", 4.0), ("a=b", 0.5))


@pytest.mark.parametrize(
    "given",
    [["editor"], ["=2"], ["editor=0"], ["editor=nan"], ["editor=101"], ["editor=much"], ["a=1", "a=2"]],
)
def test_weights_that_make_no_sense_are_refused(given: list[str]) -> None:
    with pytest.raises(Leave):
        parse_weights(given)


def test_sizes() -> None:
    assert parse_bytes("8GiB") == 8 * 2**30
    with pytest.raises(Leave):
        parse_bytes("0")


def command(folder: Path, **options: object) -> list[str]:
    config = Config(endpoint="ipc://x", runtime_dir=folder, models_dir=folder, **options)  # type: ignore[arg-type]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    log = make_log("console", "error")
    memory = Memory(None, monotonic_s, log, lambda event: None)
    supervisor = Supervisor(config, context, monotonic_s, Metrics(), log, Blas(None), memory)
    context.term()
    return supervisor.command(ModelSpec("toy", "/toy"), folder / "engine.sock")


def test_a_worker_is_told_how_to_share_its_device(tmp_path: Path) -> None:
    plain = command(tmp_path)
    assert not {"--gap-ms", "--weight", "--rows-max"} & set(plain)
    told = command(tmp_path, gap_ms=20.0, rows_max=4, weights=parse_weights(["editor=4", "a=b=0.5"]))
    options = dict(itertools.pairwise(told))
    assert (options["--gap-ms"], options["--rows-max"]) == ("20.0", "4")
    weights = [value for name, value in itertools.pairwise(told) if name == "--weight"]
    assert weights_of(weights) == {"editor": 4.0, "a=b": 0.5}
