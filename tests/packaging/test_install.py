"""The distribution: wheel, sdist and editable install, each put into an empty environment and imported.

Everything happens in a copy of the repository, in the order that once went wrong: first an editable
install, which makes links in `build/`, then an sdist of that tree, then a wheel of that sdist.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parent.parent.parent
PARTS = ("client", "daemon", "caches", "kernels", "deploy")
COPIED = (*PARTS, "tests", "benchmarks", "docs")
FILES = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Makefile",
    ".gitignore",
)
BUILD_ONLY = {"deploy/hatch_build.py", "deploy/setup.sh", "deploy/check_on_mac.sh"}
STEP_S = 300


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a program away from this checkout, so that nothing is imported from it by chance."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=STEP_S,
    )
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@dataclass(frozen=True)
class Environment:
    """An empty virtual environment; pip works on it from outside."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def command(self) -> Path:
        return self.folder / "bin" / "stateroom"

    @property
    def site(self) -> Path:
        return next(self.folder.glob("lib/python3.*/site-packages"))

    def pip(self, *arguments: str | Path) -> None:
        run(sys.executable, "-m", "pip", "--python", self.python, *arguments, cwd=self.folder)

    def evaluate(self, code: str) -> str:
        return run(self.python, "-c", code, cwd=self.folder).stdout.strip()


def new_environment(folder: Path) -> Environment:
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    return Environment(folder)


@dataclass(frozen=True)
class Built:
    tree: Path
    sdist: Path
    wheel: Path
    editable: Environment


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    base = tmp_path_factory.mktemp("dist")
    tree = base / "tree"
    skip = shutil.ignore_patterns("__pycache__", "*.pyc", ".*_cache")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=skip)
    for name in FILES:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, tree / name)
    editable = new_environment(base / "editable")
    editable.pip("install", "--quiet", "--editable", tree)
    run(sys.executable, "-m", "build", "--outdir", base / "out", tree, cwd=base)
    (sdist,) = (base / "out").glob("*.tar.gz")
    (wheel,) = (base / "out").glob("*.whl")
    yield Built(tree, sdist, wheel, editable)
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture(scope="module", params=["wheel", "sdist", "editable"])
def installed(
    request: pytest.FixtureRequest, built: Built, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    if request.param == "editable":
        return built.editable
    environment = new_environment(tmp_path_factory.mktemp(request.param) / "env")
    environment.pip("install", "--quiet", getattr(built, request.param))
    return environment


def part_files(tree: Path) -> set[str]:
    """The files of the package's folders, as paths below the repository."""
    found = {
        path.relative_to(tree).as_posix()
        for part in PARTS
        for path in (tree / part).rglob("*")
        if path.is_file()
    }
    return {name for name in found if "__pycache__" not in name}


def importable(environment: Environment, *modules: str) -> str:
    """Those of `modules` that the environment would find, printed as a list."""
    probe = f"import importlib.util as u; print([m for m in {list(modules)!r} if u.find_spec(m)])"
    return environment.evaluate(probe)


def test_the_client_imports_alone(installed: Environment) -> None:
    """With pyzmq and msgpack and nothing else."""
    assert installed.evaluate("from stateroom.client import connect; print(connect.__module__)").startswith(
        "stateroom.client"
    )
    assert importable(installed, "mlx", "typer", "pydantic", "numpy") == "[]"


def test_nothing_of_ours_lands_at_the_top(installed: Environment) -> None:
    top = {path.name for path in installed.site.iterdir()}
    assert top.isdisjoint({*PARTS, "tests", "benchmarks", "docs"})
    assert importable(installed, *PARTS, "benchmarks") == "[]"


def test_the_command_without_the_extra_says_what_to_install(installed: Environment) -> None:
    done = run(installed.command, "version", cwd=installed.folder, check=False)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "pip install 'stateroom[daemon]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_wheel_holds_exactly_the_folders(built: Built) -> None:
    names = set(zipfile.ZipFile(built.wheel).namelist())
    ours = {name for name in names if not name.startswith("stateroom-")}
    assert ours == {f"stateroom/{name}" for name in part_files(built.tree) - BUILD_ONLY}
    assert {f"stateroom/{part}/py.typed" for part in PARTS} <= ours
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_after_an_editable_install_is_whole(built: Built) -> None:
    assert (built.tree / "build" / "editable" / "stateroom" / "client").is_symlink()
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        assert not [member.name for member in archive.getmembers() if member.issym() or member.islnk()]
    assert part_files(built.tree) <= names
    assert {name for name in FILES if (built.tree / name).is_file()} <= names
    assert not [name for name in names if name.startswith(("build/", "dist/", ".venv", ".ci"))]


def test_an_editable_install_sees_new_files(built: Built) -> None:
    new = built.tree / "kernels" / "added_later.py"
    new.write_text("HERE = 7\n")
    try:
        assert built.editable.evaluate("from stateroom.kernels.added_later import HERE; print(HERE)") == "7"
    finally:
        new.unlink()


def test_extras_ask_for_the_right_mlx(installed: Environment) -> None:
    requires = installed.evaluate(
        "from importlib.metadata import requires; print('\\n'.join(requires('stateroom')))"
    )
    lines = [line.replace('"', "'") for line in requires.splitlines()]
    plain = sorted(line.split(">")[0].split("<")[0] for line in lines if "extra ==" not in line)
    assert plain == ["msgpack", "pyzmq"]
    daemon = [line for line in lines if "extra == 'daemon'" in line]
    assert any(line.startswith("mlx==") and "sys_platform == 'darwin'" in line for line in daemon)
    assert any(line.startswith("mlx[cpu]==") and "sys_platform == 'linux'" in line for line in daemon)
    assert any(line.startswith("mlx[cuda13]==") and "extra == 'cuda'" in line for line in lines)
