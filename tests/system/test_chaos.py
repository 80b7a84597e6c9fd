"""A short chaotic run; `make chaos MINUTES=…` runs a longer one. See tests/chaos."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from tests.chaos.daemon import Daemon
from tests.chaos.run import run
from tests.system.conftest import Tell

CLIENTS = 4
MISFORTUNES = 10
SEED = 3

pytestmark = pytest.mark.system


def test_whatever_dies_nothing_is_lost(tiny_folder: Path, tell: Tell) -> None:
    """B44, B52: kills, stops, a full disk and flipped bits under clients that keep a book of their own."""
    folder = Path(tempfile.mkdtemp(prefix="sr-", dir="/tmp"))
    daemon = Daemon(folder, tiny_folder, small_disk=True)
    try:
        report = run(
            daemon,
            folder,
            clients=CLIENTS,
            seed=SEED,
            enough=lambda monkey, _: monkey.done.total() >= MISFORTUNES,
        )
    finally:
        daemon.clear()
        shutil.rmtree(folder, ignore_errors=True)
    tell(report.words())
    assert report.complaints == []
    assert report.sessions > 0
    assert report.counts["decode"] > 0
