"""B82: a model whose files can't be read, or are never there, is told of within a limit of time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stateroom.daemon import readable
from stateroom.daemon.config import ModelSpec
from stateroom.daemon.exits import CONFIG, FAILED, FORBIDDEN, Leave
from stateroom.daemon.readable import readable_specs

LIMIT_S = 0.3
FOREIGN = "another user's file needs a process that may become another user: run as root, as CI does"
AS_NOBODY = """
import os, sys
from pathlib import Path
from stateroom.daemon.exits import Leave
from stateroom.daemon.readable import readable_specs
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
try:
    readable_specs([sys.argv[1]], Path("/nowhere"))
except Leave as leaving:
    print(leaving.code, leaving.message)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    (made / "below").mkdir(parents=True)
    (made / "config.json").write_text("{}")
    (made / "empty").touch()
    return made


def test_what_can_be_read_is_given_as_it_is(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    given = [str(model), str(file), "org/of-a-hub"]
    assert readable_specs(given, tmp_path) == (
        ModelSpec("model", str(model)),
        ModelSpec("a", str(file)),
        ModelSpec("org/of-a-hub", "org/of-a-hub"),
    )


def test_a_model_that_is_not_there_is_refused_as_ever(tmp_path: Path) -> None:
    with pytest.raises(Leave, match="There is no model at"):
        readable_specs([str(tmp_path / "gone")], tmp_path)


def test_a_read_without_an_end_is_left_behind(model: Path, tmp_path: Path) -> None:
    """A pipe that nobody writes to: opening it hangs, as a file does that macOS asks its user about."""
    os.mkfifo(model / "weights.safetensors")
    with pytest.raises(Leave, match=f"{model} had no end within 0.3 s.*Privacy & Security") as refused:
        readable_specs([str(model)], tmp_path, LIMIT_S)
    assert refused.value.code == FAILED  # a disk may be back, so it is tried again
    assert sys.executable in refused.value.message
    with open(model / "weights.safetensors", "wb"):  # the thread goes on, and ends
        pass


def test_a_disk_that_does_not_even_tell_what_is_there(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()
    monkeypatch.setattr(readable, "model_specs", lambda given, models_dir: end.wait() and ())
    with pytest.raises(Leave, match="had no end"):
        readable_specs([str(model)], tmp_path, LIMIT_S)
    end.set()


@pytest.mark.skipif(os.getuid() != 0, reason=FOREIGN)
def test_a_file_that_may_not_be_read_is_named(short_folder: Path) -> None:
    short_folder.chmod(0o755)
    model = short_folder / "model"
    model.mkdir(mode=0o755)
    weights = model / "weights.safetensors"
    weights.touch(mode=0o600)
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(model)], cwd="/", capture_output=True, text=True, timeout=60
    )
    code, _, said = done.stdout.partition(" ")
    assert int(code) == FORBIDDEN, done
    assert f"The model at {weights} can't be read: Permission denied" in said


def test_other_trouble_of_a_disk_is_told_with_the_path(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: str, flags: int) -> int:
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(Leave, match=r"config\.json can't be read: Input/output error") as refused:
        readable_specs([str(model)], tmp_path)
    assert refused.value.code == CONFIG
