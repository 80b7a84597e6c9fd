from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Socket paths are limited, and pytest's folders are long."""
    folder = Path(tempfile.mkdtemp(prefix="sr-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
