"""The doctor's findings, each brought about: what is wrong is made wrong, and then looked at."""

from __future__ import annotations

import json
import os
import plistlib
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import write_tiny_model
from typer.testing import CliRunner

from stateroom.client.paths import IPC_PATH_BYTES_MAX
from stateroom.daemon import commands
from stateroom.daemon import models as installed
from stateroom.daemon.config import STATE_NAME
from stateroom.daemon.doctor import bundle, gathered, running, weights
from stateroom.daemon.doctor import examine as examining
from stateroom.daemon.doctor.check import Check
from stateroom.daemon.doctor.configuration import configuration
from stateroom.daemon.doctor.device import device
from stateroom.daemon.doctor.examine import CHECKS, examine, told
from stateroom.daemon.doctor.installation import packages, program
from stateroom.daemon.doctor.machine import clock, files, memory
from stateroom.daemon.doctor.models import model, models
from stateroom.daemon.doctor.places import disk, kept, permissions
from stateroom.daemon.doctor.places import socket as socket_check
from stateroom.daemon.doctor.running import daemon
from stateroom.daemon.doctor.service import Told, judged
from stateroom.daemon.doctor.service import told as told_by
from stateroom.daemon.lock import LOCK_NAME, Lock
from stateroom.daemon.machine import memory_bytes
from stateroom.deploy.launchd import plist
from stateroom.deploy.service import Service, Status
from stateroom.deploy.systemd import SOCKET, UNIT, unit

Checks = Callable[[], Iterator[Check]]
AT_ONCE = {"device"}  # starts a process and takes a second: tried by itself


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home and a runtime directory of the test's own; the latter short, for the sake of socket paths."""
    for name in [name for name in os.environ if name.startswith("STATEROOM_")]:
        monkeypatch.delenv(name)
    short = Path("/tmp") / f"sr-{tmp_path.name[:20]}-{os.getpid()}"
    short.mkdir(mode=0o700)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)  # where a service of ours would be
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("STATEROOM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("STATEROOM_RUNTIME_DIR", str(short / "run"))
    (tmp_path / "home").mkdir()
    yield tmp_path / "home"
    shutil.rmtree(short, ignore_errors=True)


def one(check: Checks) -> Check:
    (found,) = check()
    return found


def runtime(mode: int = 0o700) -> Path:
    made = Path(os.environ["STATEROOM_RUNTIME_DIR"])
    made.mkdir()
    made.chmod(mode)
    return made


def wrong(check: Check, *words: str) -> None:
    """A problem that says so, and what to do."""
    assert check.state == "problem", check
    assert check.advice, check
    for word in words:
        assert word in f"{check.finding} {check.advice}", check


# ---------------------------------------------------------------- all of them


def test_on_a_machine_where_all_is_well_nothing_is_wrong_and_nothing_changes(home: Path) -> None:
    before = sorted(home.parent.rglob("*"))
    found = [each for check in CHECKS if check.__name__ not in AT_ONCE for each in check()]
    assert [check for check in found if check.state == "problem"] == []
    assert sorted(home.parent.rglob("*")) == before


def test_what_programs_are_told(home: Path) -> None:
    found = [Check("a", "pass", "b"), Check("c", "note", "d", "e")]
    assert told(found)["ok"] is True
    made = told([*found, Check("f", "problem", "g", "h")])
    assert made["ok"] is False
    assert made["checks"][2] == {"name": "f", "state": "problem", "finding": "g", "advice": "h"}
    assert set(made) == {"version", "ok", "checks"}


def test_a_check_that_fails_itself_ends_no_other(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Check]:
        raise RuntimeError("no such thing")
        yield

    monkeypatch.setattr("stateroom.daemon.doctor.examine.CHECKS", (broken, clock))
    first, second = examine()
    assert (first.name, first.state) == ("broken", "problem")
    assert "no such thing" in first.finding
    assert second.name == "clock"


# ---------------------------------------------------------------- installation


def package(folder: Path, name: str, version: str) -> Path:
    """What pip leaves of a package."""
    made = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def test_a_package_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(packages).state == "pass"
    monkeypatch.syspath_prepend(str(package(tmp_path, "mlx-lm", "0.1.0")))
    wrong(one(packages), "mlx-lm is 0.1.0", "pip install")


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stateroom.daemon.doctor.installation.PACKAGES", ("stateroom", "not-a-package"))
    wrong(one(packages), "not installed: not-a-package", "pip install")


def test_which_program_the_shell_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(sys.executable).parent
    monkeypatch.setenv("PATH", str(here))
    assert one(program).state == "pass"
    monkeypatch.setenv("PATH", "/nowhere")
    assert "not on PATH" in one(program).finding
    (other := tmp_path / "stateroom").write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{here}")
    found = one(program)
    assert found.state == "note"
    assert str(other) in found.finding


# ---------------------------------------------------------------- device


def test_what_computes_here() -> None:
    found = {check.name: check for check in device(driver=Path("/nowhere"))}
    assert found["mlx"].state == "pass"
    assert "GFLOP/s" in found["mlx"].finding


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        ("import no_such_module", "No module named"),
        ("import os; os.abort()", "exit code -6"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
    ],
)
def test_an_engine_that_cannot_compute(probe: str, words: str) -> None:
    (found,) = device(probe, limit_s=1.0 if "sleep" in probe else 30.0)
    wrong(found, words, "pip install")


CPU = '{"device": "cpu", "metal": false, "name": "x", "working_set": 0, "gflops": 1.0}'


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_an_nvidia_gpu_that_is_not_used(tmp_path: Path) -> None:
    (driver := tmp_path / "version").write_text("NVRM version: NVIDIA")
    found = {check.name: check for check in device(f"print('''{CPU}''')", driver)}
    wrong(found["gpu"], "NVIDIA", "stateroom[daemon,cuda]")


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_a_slow_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATEROOM_BLAS", "none")
    found = {check.name: check for check in device(f"print('''{CPU}''')", Path("/nowhere"))}
    wrong(found["blas"], "reference BLAS", "STATEROOM_BLAS")


# ---------------------------------------------------------------- machine


def test_a_model_that_is_larger_than_the_memory(home: Path) -> None:
    assert "for KV by default" in one(memory).finding
    (home / "models" / "vast").mkdir(parents=True)
    weights_file = home / "models" / "vast" / "model.safetensors"
    weights_file.touch()
    os.truncate(weights_file, (memory_bytes() or 2**40) * 4 // 5)  # takes no room
    tight = one(memory)
    assert tight.state == "note"
    assert "256.0 MiB for KV by default beside vast" in tight.finding
    os.truncate(weights_file, (memory_bytes() or 2**40) + 2**30)
    wrong(one(memory), "vast alone is ", "smaller")


def test_few_open_files() -> None:
    """In a process of its own: what was lowered can't be raised again."""
    code = """
import resource
from stateroom.daemon.doctor.machine import files
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
(found,) = files()
print(found.state, found.finding, found.advice)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("problem a daemon may have 256 open")
    assert "ulimit -Hn" in said
    assert one(files).state == "pass"


def test_a_clock_that_was_set_back(home: Path) -> None:
    assert one(clock).state == "pass"
    (home / STATE_NAME).mkdir()
    (catalog := home / STATE_NAME / "catalog.db").touch()
    later = time.time() + 7_200
    os.utime(catalog, (later, later))
    wrong(one(clock), "from now", "clock")


# ---------------------------------------------------------------- places


def test_a_socket_path_that_is_too_long(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATEROOM_RUNTIME_DIR", "/tmp/" + "x" * IPC_PATH_BYTES_MAX)
    found = one(socket_check)
    assert found.state == "problem"
    assert "STATEROOM_RUNTIME_DIR to a shorter directory" in found.finding


def test_what_is_no_socket_in_its_place(home: Path) -> None:
    (runtime() / "stateroom.sock").write_text("")
    wrong(one(socket_check), "is no socket", "Move it")


def test_a_socket_that_a_daemon_left(home: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(runtime() / "stateroom.sock"))
    found = one(socket_check)
    assert found.state == "note"
    assert "left by a daemon that is gone" in found.finding


@pytest.mark.skipif(sys.platform != "linux", reason="of systemd")
def test_a_service_manager_that_listens_is_not_disturbed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who connected would start a daemon."""
    (home / "systemctl").write_text("#!/bin/sh\necho ActiveState=inactive\necho MainPID=0\n")
    (home / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    (home / "systemd" / "user").mkdir(parents=True)
    for name in (UNIT, SOCKET):
        (home / "systemd" / "user" / name).touch()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(runtime() / "stateroom.sock"))
        listening.listen()
        listening.setblocking(False)
        assert "where the service manager listens" in one(socket_check).finding
        (found,) = daemon()
        assert (found.state, "the first client starts it" in found.finding) == ("note", True)
        assert gathered.ask().failure == "not started"
        with pytest.raises(BlockingIOError):
            listening.accept()


def test_who_listens_and_where(home: Path) -> None:
    folder = runtime()
    lock = Lock(folder / LOCK_NAME)
    lock.take(f"ipc://{folder}/stateroom.sock")
    assert f"of process {os.getpid()}" in one(socket_check).finding
    lock.release()
    lock.take("ipc:///elsewhere.sock")
    wrong(one(socket_check), "listens at ipc:///elsewhere.sock", "STATEROOM_ENDPOINT=ipc:///elsewhere.sock")
    lock.release()


def test_a_runtime_directory_below_a_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATEROOM_RUNTIME_DIR", "/dev/null/run")
    for check in (socket_check, permissions):
        wrong(one(check), "Not a directory", "STATEROOM_RUNTIME_DIR")


@pytest.mark.parametrize("part", ["run", STATE_NAME, "keys"])
def test_others_can_reach_in(home: Path, part: str) -> None:
    assert one(permissions).state == "pass"
    if part == "run":
        runtime(0o755)
    else:
        (home / part).mkdir()
        (home / part).chmod(0o750)
    wrong(one(permissions), "others can reach into", "chmod 700")


def test_a_file_where_a_directory_belongs(home: Path) -> None:
    (home / STATE_NAME).touch()
    wrong(one(permissions), "is no directory", "Move it")


def test_a_directory_above_that_anybody_could_replace(home: Path) -> None:
    folder = runtime()
    folder.parent.chmod(0o777)
    wrong(one(permissions), f"anybody can write to {folder.parent.resolve()}", "chmod o-w")


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives directories away")
def test_a_directory_of_another_user(home: Path) -> None:
    os.chown(runtime(), 65_534, 65_534)
    wrong(one(permissions), "belongs to another user", "STATEROOM_RUNTIME_DIR")


def test_a_home_that_cannot_be_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(disk).state == "pass"
    monkeypatch.setenv(
        "STATEROOM_HOME", "/proc/stateroom" if sys.platform == "linux" else "/System/stateroom"
    )
    wrong(one(disk), "can't be written", "STATEROOM_HOME")


@pytest.mark.skipif(os.getuid() != 0 or sys.platform != "linux", reason="mounting needs root")
def test_a_small_disk(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (small := tmp_path / "small").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(small)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed")
    monkeypatch.setenv("STATEROOM_HOME", str(small / "home"))
    try:
        wrong(one(disk), "0.0 GiB free", "larger disk")
        (small / "ballast").write_bytes(bytes(120 * 1024))
        wrong(one(disk), "No space left", "larger disk")
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_what_is_kept(home: Path) -> None:
    assert "nothing is kept" in one(kept).finding
    (home / STATE_NAME / "snapshots").mkdir(parents=True)
    (home / STATE_NAME / "catalog.db").write_bytes(bytes(2048))
    assert "database 2.0 KiB, snapshots 0 B" in one(kept).finding


def test_a_configuration_that_cannot_be_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(configuration).state == "pass"
    (home / "config.toml").write_text("rows-maxx = 3\n")
    wrong(one(configuration), "config.toml:1", "rows-maxx", "config check")
    (home / "config.toml").write_text("rows-max = 3\n")
    assert one(configuration).state == "pass"
    monkeypatch.setenv("STATEROOM_ROWS_MAXX", "3")
    found = one(configuration)
    assert found.state == "note"
    assert "STATEROOM_ROWS_MAXX" in found.finding


@pytest.mark.parametrize(
    "text",
    [
        f'rows-max = "of acme {"." * 80}"',
        "[acme]\nsessions = 3",
        "acme = 4",
        'endpoint = "acme"',
        "[quota]\nacme = 3",
    ],
)
def test_a_bundle_has_no_names_of_a_configuration_that_is_wrong(
    home: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "HELLO_S", 0.05)  # nobody is there
    monkeypatch.setattr(gathered, "HELLO_S", 0.05)
    (home / "config.toml").write_text(text)
    found = [each for check in (configuration, socket_check, daemon) for each in check()]
    assert any("acme" in check.finding for check in found)
    assert "acme" not in b"".join(bundle.parts(found, []).values()).decode()


@pytest.mark.parametrize("variable", ["KV_BUDGET", "ROWS_MAX", "HOME"])
def test_a_variable_that_serve_would_refuse_hinders_no_bundle(
    home: Path, tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examining, "CHECKS", (configuration,))
    monkeypatch.setattr(gathered, "HELLO_S", 0.05)
    asked = ["doctor", "--bundle", str(tmp_path / "b.tar.gz")]
    done = CliRunner().invoke(commands.app, asked, env={f"STATEROOM_{variable}": "acme"})
    assert done.exit_code == 0, done.exception
    assert f"STATEROOM_{variable}" in done.stdout
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        content = archive.extractfile("stateroom-bundle/doctor.json")
        assert content is not None
        told = content.read().decode()
    assert f"$STATEROOM_{variable}" in told
    assert "acme" not in told


# ---------------------------------------------------------------- models


def test_models_that_are_whole(home: Path) -> None:
    assert one(models).advice == "stateroom model add demo"
    write_tiny_model(home / "models" / "tiny")
    found = one(models)
    assert found.state == "pass"
    assert found.finding.startswith("tiny: whole, ")


def damaged_model(home: Path, how: str) -> None:
    folder = write_tiny_model(home / "models" / "tiny")
    file = folder / "model.safetensors"
    if how == "cut off":
        os.truncate(file, file.stat().st_size - 1)
    elif how == "has no header":
        file.write_bytes(b"\xff" * 64)
    elif how == "no .safetensors":
        file.unlink()
    elif how == "there is no":
        index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "is no JSON":
        (folder / "config.json").write_text("{")
    elif how == "names no model_type":
        (folder / "config.json").write_text("{}")
    elif how == "Not a directory":
        shutil.rmtree(folder)
        folder.symlink_to("/dev/null")


@pytest.mark.parametrize(
    "how", ["cut off", "has no header", "no .safetensors", "there is no", "is no JSON", "names no model_type"]
)
def test_a_damaged_model(home: Path, how: str) -> None:
    damaged_model(home, how)
    wrong(one(models), "tiny: ", how, "add it again")


def test_a_model_of_the_configuration_that_is_gone(home: Path) -> None:
    (home / "config.toml").write_text('model = ["/nowhere/tiny"]\n')
    wrong(one(models), "there is no /nowhere/tiny")
    (home / "config.toml").write_text('model = ["~/models/qwen", "~nobody-of-that-name/x"]\n')
    wrong(one(models), f"there is no {Path.home()}/models/qwen")


def test_a_model_on_a_disk_that_does_not_answer(tmp_path: Path) -> None:
    """A pipe without a writer lets its reader wait, as such a disk does."""
    (tmp_path / "asleep").mkdir()
    os.mkfifo(tmp_path / "asleep" / "model.gguf")
    wrong(model("asleep", tmp_path / "asleep", limit_s=0.2), "gives no answer within 0.2 s", "awake")


def test_the_demo_model_cut_off(home: Path, tmp_path: Path) -> None:
    """A GGUF file says how long it must be, too."""
    whole = gguf(tmp_path / "whole.gguf")
    weights.check(whole)
    (home / "models" / "demo").mkdir(parents=True)
    shutil.copy(whole, cut := home / "models" / "demo" / "model.gguf")
    os.truncate(cut, cut.stat().st_size - 1)
    wrong(one(models), "cut off", "stateroom model remove demo; stateroom model add demo")
    for size in (3, 20, 60):
        os.truncate(cut, size)
        with pytest.raises(weights.NotWhole):
            weights.check(cut)
    assert installed.DEMO == "demo"


def gguf(path: Path) -> Path:
    """A file of three tensors and entries of several kinds, by mlx itself."""
    import mlx.core as mx

    arrays = {"a": mx.ones((3, 64)), "b": mx.ones((5,)), "c": mx.ones((7, 32)).astype(mx.float16)}
    entries: dict[str, Any] = {"general.name": "x", "n": mx.array(3), "list": ["one", "two"]}
    mx.save_gguf(str(path), arrays, entries)
    return path


# ---------------------------------------------------------------- the service


def managed(tmp_path: Path, kind: str) -> Path:
    """What `service install` writes for this home, as launchd or systemd is told."""
    service = Service(("--model=/models/one", "--kv-budget=1"))
    path = tmp_path / ("agent.plist" if kind == "launchd" else "stateroom.service")
    text = plistlib.dumps(plist(service)) if kind == "launchd" else unit(service).encode()
    path.write_bytes(text)
    return path


@pytest.mark.parametrize("kind", ["launchd", "systemd"])
def test_a_service(home: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = told_by(managed(tmp_path, kind))
    assert asked.command[0] == sys.executable
    assert asked.models == ["/models/one"]
    running = Status(True, True, 7, where="/somewhere")
    assert judged(Status(False, False), Told()).state == "pass"
    assert judged(running, asked).state == "pass"
    stopped = judged(Status(True, False, last_exit="exit-code (65)"), asked)
    wrong(stopped, "not running", "exit-code (65)", "service logs")
    monkeypatch.setenv("STATEROOM_HOME", "/another")
    wrong(judged(running, asked), f"STATEROOM_HOME is {home}", "/another")


def test_a_service_whose_python_is_gone(home: Path, tmp_path: Path) -> None:
    asked = Told(["/nowhere/bin/python"], {})
    wrong(judged(Status(True, False), asked), "/nowhere/bin/python, is gone", "service install")
