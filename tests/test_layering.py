"""Who may import whom, read from the syntax trees, and what importing the client costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("client", "daemon", "caches", "kernels", "deploy")
IMPORT_MS_MAX = 50.0
IMPORT_TRIES = 5


@dataclass(frozen=True)
class Layer:
    """Files whose path matches `files`, and the modules of ours that they may import."""

    files: str
    may_import: str


# The first layer whose pattern matches a file rules it.
LAYERS = (
    Layer(r"client/.*", r"client(\..*)?"),
    Layer(r"kernels/.*", r"kernels(\..*)?"),
    Layer(r"caches/(layout|reach)\.py", r"caches\.(layout|reach)"),
    Layer(r"caches/.*", r"(caches|kernels)(\..*)?"),
    Layer(
        r"daemon/engine/.*",
        r"(daemon\.engine|caches|kernels)(\..*)?|daemon\.(link|clock|logs|scheduler(\..*)?|blas|models|timings|usage)"
        r"|client\.(protocol|limits|wire|errors|paths)",
    ),
    # The commands and the demo are clients that happen to be installed with the daemon.
    Layer(
        r"daemon/cli\.py|daemon/(commands|demo|doctor|top)/.*",
        r"client(\..*)?|daemon(?!\.engine).*|deploy(\..*)?",
    ),
    # Files of snapshots, which nothing of mlx is needed to read.
    Layer(
        r"daemon/carriage\.py",
        r"daemon(?!\.engine).*|client\.(protocol|errors)"
        r"|caches\.snapshots\.(carried|limits|places|reading|refusals)|caches\.snapshots",
    ),
    Layer(r"daemon/.*", r"daemon(?!\.engine).*|client\.(protocol|limits|wire|errors|paths)"),
    Layer(r"deploy/.*", r"deploy(\..*)?|client\.paths"),
)

MLX = re.compile(r"mlx|mlx_lm|mlx_metal")
MAY_IMPORT_MLX = re.compile(r"kernels/.*|caches/(?!(layout|reach)\.py).*|daemon/engine/.*")
MAY_IMPORT_ZMQ = re.compile(
    r"client/(blocking|asynchronous)\.py|daemon/(broker|curve|serve|sockets|supervisor)\.py"
    r"|daemon/engine/(worker|profile)\.py"
)


def sources() -> list[Path]:
    found = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]
    assert len(found) > 10
    return found


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.removeprefix("stateroom.").split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports_of(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """(module, relative level, line) of each import, wherever in the file it stands.

    `from a.b import c` gives `a.b.c` where c is a module of ours, else `a.b`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, 0, node.lineno
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                ours = module.split(".")[0] == "stateroom" and is_module(inner)
                yield inner if ours else module, node.level, node.lineno


def allowed(module: str, pattern: str) -> bool:
    return re.fullmatch(pattern, module.removeprefix("stateroom.")) is not None


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.AST]:
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sources()}


def test_every_file_keeps_to_its_layer(trees: dict[str, ast.AST]) -> None:
    wrong = []
    for name, tree in trees.items():
        layer = next(layer for layer in LAYERS if re.fullmatch(layer.files, name))
        for module, _, line in imports_of(tree):
            if module.split(".")[0] == "stateroom" and not allowed(module, layer.may_import):
                wrong.append(f"{name}:{line} imports {module}")
            if module.split(".")[0] in PARTS:
                wrong.append(f"{name}:{line} imports {module}, which is not the package's name")
    assert wrong == []


def test_no_import_is_relative(trees: dict[str, ast.AST]) -> None:
    wrong = [f"{name}:{line}" for name, tree in trees.items() for _, level, line in imports_of(tree) if level]
    assert wrong == []


@pytest.mark.parametrize(
    ("library", "may"),
    [(MLX, MAY_IMPORT_MLX), (re.compile("zmq"), MAY_IMPORT_ZMQ)],
    ids=["mlx", "zmq"],
)
def test_only_the_shells_and_the_gpu_side_import_it(
    trees: dict[str, ast.AST], library: re.Pattern[str], may: re.Pattern[str]
) -> None:
    wrong = [
        f"{name}:{line} imports {module}"
        for name, tree in trees.items()
        for module, _, line in imports_of(tree)
        if library.fullmatch(module.split(".")[0]) and not may.fullmatch(name)
    ]
    assert wrong == []


def test_one_thread_owns_mlx_and_no_process_is_forked(trees: dict[str, ast.AST]) -> None:
    """B56, B57: streams of mlx belong to a thread; a fork after its first step, or ZeroMQ's, hangs.

    A worker has two threads more, of which one watches a pipe, the other does files; neither touches mlx.
    """
    concurrency = re.compile(r"(threading|concurrent|multiprocessing|asyncio|_thread)(\..*)?")
    threads = [
        name
        for name, tree in trees.items()
        for module, _, _ in imports_of(tree)
        if MAY_IMPORT_MLX.fullmatch(name) and concurrency.fullmatch(module)
    ]
    assert set(threads) <= {"daemon/engine/files.py", "daemon/engine/worker.py"}
    forks = [
        f"{name}:{node.lineno}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("fork", "forkpty", "fork_exec")
        if isinstance(node.value, ast.Name) and node.value.id in ("os", "pty")
    ]
    assert forks == []
    assert not [
        name for name, tree in trees.items() if "multiprocessing" in {m for m, _, _ in imports_of(tree)}
    ]


def test_frames_are_sent_as_copies(trees: dict[str, ast.AST]) -> None:
    """B66: a frame sent without copying is rewritten in flight when its buffer is used again."""
    wrong = [
        f"{name}:{node.lineno}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "send" in node.func.attr
        if any(keyword.arg in ("copy", "track") for keyword in node.keywords)
    ]
    assert wrong == []


def test_the_rules_can_fail() -> None:
    """A wrong import of each kind is seen; else a slip in a pattern would pass everything."""
    tree = ast.parse(
        "def f():\n    from stateroom.daemon.engine.worker import run\n    import mlx.core\n"
        "    from stateroom.daemon import engine\n    from stateroom.client.errors import NoDaemon\n"
    )
    assert [module for module, _, _ in imports_of(tree)] == [
        "stateroom.daemon.engine.worker",
        "mlx.core",
        "stateroom.daemon.engine",
        "stateroom.client.errors",
    ]
    broker = next(layer for layer in LAYERS if re.fullmatch(layer.files, "daemon/broker.py"))
    assert not allowed("stateroom.daemon.engine.worker", broker.may_import)
    assert not allowed("stateroom.client.blocking", broker.may_import)
    assert allowed("stateroom.client.protocol", broker.may_import)
    assert not MAY_IMPORT_MLX.fullmatch("caches/layout.py")
    assert not MAY_IMPORT_MLX.fullmatch("daemon/broker.py")


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT / "tests",
    )


def test_the_client_loads_neither_mlx_nor_numpy_nor_the_daemon() -> None:
    loaded = run_python(
        "-c", "import sys, stateroom.client as c; c.connect; print('\\n'.join(sys.modules))"
    ).stdout.split()
    heavy = re.compile(
        r"(mlx|mlx_lm|numpy|pydantic|typer|rich|structlog)(\..*)?|stateroom\.(daemon|caches|kernels|deploy)(\..*)?"
    )
    assert [name for name in loaded if heavy.fullmatch(name)] == []
    assert "stateroom.client" in loaded


def test_importing_the_client_is_quick() -> None:
    """Under 50 ms, the best of five: the whole import, zmq and msgpack included."""
    clock = "import time; t = time.perf_counter(); import stateroom.client; print(time.perf_counter() - t)"
    took_ms = min(float(run_python("-c", clock).stdout) * 1000 for _ in range(IMPORT_TRIES))
    assert took_ms < IMPORT_MS_MAX
