"""Every command, in everything that can go wrong around it: one clear line, a code, and no traceback.

The commands are those that the program has when the test runs; one without arguments below fails it.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest
import typer
import zmq
from tests.conftest import RunningDaemon
from tests.system.many import Done, Job, Many
from tests.tiny import write_tiny_model

from stateroom.client import connect
from stateroom.daemon.commands import app
from stateroom.daemon.exits import CONFIG, FAILED, INTERRUPTED

pytestmark = pytest.mark.system

START_ONE = "Start one with `stateroom serve`"
INTERRUPT_S = 0.7  # imported it has everything by then, and waits for an answer
FULL_BYTES = 64 * 1024
OTHER_VERSION = 9
APP = "stateroom"
NOBODY = 65_534
PROGRAM = (Path(sys.executable), *Path(sys.executable).parents, *Path(__file__).resolve().parents)


@dataclass(frozen=True)
class Row:
    """How a command is called. In braces: what is made for each call anew (see `World.filled`).

    Attributes:
        asks: it can do nothing without a daemon.
        works: with a daemon it leaves with 0.
        stdin: what it gets to read.
        tells: it may print what it found, and still leave with another code than 0.
        slow: it takes seconds, so it is tried in fewer ways.
        notes: it says on stderr what it does, too.
    """

    arguments: str = ""
    asks: bool = False
    works: bool = False
    stdin: str = ""
    tells: bool = False
    slow: bool = False
    notes: bool = False


ROWS = {
    "serve": Row("--model {missing}"),  # else it would go on for ever
    "stop": Row(),
    "demo": Row(slow=True),
    "generate": Row("hello --max-tokens 4", asks=True, works=True),
    "chat": Row("--name {name} --max-tokens 4", asks=True, works=True, stdin="hello\n"),
    "ps": Row(asks=True, works=True),
    "top": Row("--once", asks=True, works=True),
    "close": Row("{session}", asks=True, works=True),
    "park": Row("{session}", asks=True, works=True),
    "verify": Row("{session}", asks=True, works=True),
    "save": Row("{session} {name}", asks=True, works=True),
    "restore": Row("{snapshot}", asks=True, works=True),
    "snapshots": Row(asks=True, works=True),
    "forget": Row("{snapshot}", asks=True, works=True),
    "export": Row("{snapshot} {file}", asks=True, works=True),
    "import": Row("{exported} {name}", asks=True, works=True),
    "stats": Row(asks=True, works=True),
    "watch": Row(asks=True),  # with a daemon it goes on for ever
    "logs": Row(works=True),
    "trace": Row("last", asks=True, works=True),
    "doctor": Row(tells=True, slow=True),
    "bench": Row("--model {missing}"),
    "version": Row(works=True),
    "model add": Row("demo", slow=True),
    "model list": Row(works=True),
    "model remove": Row("nothing"),
    "config show": Row(works=True),
    "config path": Row(works=True),
    "config init": Row(),
    "config check": Row(works=True),
    "service install": Row(),
    "service show": Row(works=True, notes=True),
    "service uninstall": Row(),
    "service start": Row(),
    "service stop": Row(),
    "service restart": Row(),
    "service status": Row(tells=True),
    "service logs": Row(),
    "keys init": Row(),
    "keys client": Row("{name} --out {file}"),
    "keys allow": Row("{file}"),
    "keys list": Row(works=True),
    "keys revoke": Row("nobody"),
}


def commands() -> dict[str, Any]:
    """Every command of the program, those in groups too, by what is typed."""

    def below(command: Any, typed: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        if not hasattr(command, "commands"):
            yield " ".join(typed), command
            return
        for name, inner in command.commands.items():
            yield from below(inner, (*typed, name))

    return dict(below(typer.main.get_command(app), ()))


COMMANDS = commands()
WITH_JSON = [
    name for name, command in COMMANDS.items() if any("--json" in each.opts for each in command.params)
]


MANY = Many()


@pytest.fixture(scope="module", autouse=True)
def many() -> Iterator[None]:
    yield
    MANY.close()


def test_every_command_has_a_row() -> None:
    assert set(COMMANDS) == set(ROWS)


class World:
    """A home without anything, and what commands are given in it."""

    def __init__(self, folder: Path, daemon: RunningDaemon | None = None, **more: str) -> None:
        self.folder, self._daemon, self._numbers = folder, daemon, itertools.count()
        (folder / "user").mkdir(exist_ok=True)
        self.env = {
            # No service manager is found, and pip finds nothing: a test must not touch either.
            "PATH": str(folder / "bin"),
            "PIP_NO_INDEX": "1",
            "PIP_RETRIES": "0",
            "HOME": str(folder / "user"),
            "XDG_CONFIG_HOME": str(folder / "user" / "config"),
            "STATEROOM_HOME": str(folder / "home"),
            "STATEROOM_RUNTIME_DIR": str(folder / "run"),
            "COLUMNS": "100",
            **({} if daemon is None else daemon.env),
            **more,
        }
        self.env["PATH"] = str(folder / "bin")

    def filled(self, arguments: str) -> list[str]:
        """Names that nobody has, and sessions, snapshots and files that are there, each for one call only."""
        number = next(self._numbers)
        session, snapshot, exported = f"s{number}", f"k{number}", self.folder / f"exported{number}"
        if self._daemon is not None and ("{session}" in arguments or "{snapshot}" in arguments):
            with connect(self._daemon.endpoint, app=APP) as room:
                opened = room.open(tokens=[1, 2, 3], name=session)
                if "{snapshot}" in arguments:
                    opened.save(snapshot)
        if self._daemon is not None and "{exported}" in arguments:
            with connect(self._daemon.endpoint, app=APP) as room:
                room.open(tokens=[1, 2, 3], name=session).save(snapshot)
                room.export(snapshot, exported)
        return [
            word.format(
                name=f"n{number}",
                session=session,
                snapshot=snapshot,
                exported=exported,
                file=self.folder / f"file{number}",
                missing=self.folder / "missing",
            )
            for word in arguments.split()
        ]

    def job(self, name: str, row: Row, *more: str, **options: Any) -> Job:
        given = [*name.split(), *more, *self.filled(row.arguments)]
        return Job(given, self.env, **{"stdin": row.stdin, "cwd": str(self.folder), **options})


def named(done: Done) -> str:
    return f"stateroom {' '.join(done.arguments)} left with {done.code}: {done.err!r}, {done.out!r}"


def clear(done: Done, row: Row) -> None:
    """What holds of a command whatever went wrong: it ends, and says what it has to say in a line."""
    said = named(done)
    assert done.code is not None, f"hangs: {said}"
    assert "Traceback" not in done.err, said
    assert "Exception ignored" not in done.err, said
    assert len(done.lines) <= 1 + row.notes, said
    if done.code != 0:
        assert done.lines or (row.tells and done.out), said
        assert done.out == "" or row.tells, said


def try_all(world: World, rows: dict[str, Row], *more: str, **options: Any) -> dict[str, Done]:
    jobs = [world.job(name, row, *more, **options) for name, row in rows.items()]
    return dict(zip(rows, MANY.run(jobs), strict=True))


def quick(names: Iterable[str]) -> dict[str, Row]:
    return {name: ROWS[name] for name in names if not ROWS[name].slow}


def asking() -> dict[str, Row]:
    return {name: row for name, row in ROWS.items() if row.asks}


# ---------------------------------------------------------------- no daemon, and others than ours


def test_without_a_daemon(tmp_path: Path) -> None:
    world = World(tmp_path)
    for name, done in try_all(world, ROWS).items():
        clear(done, ROWS[name])
        if ROWS[name].asks:
            assert START_ONE in done.err, named(done)
            assert done.code == 1
    for name, done in try_all(world, quick(set(WITH_JSON) & set(ROWS)), "--json").items():
        clear(done, ROWS[name])
        assert done.out == "" or done.out[0] in "{[", named(done)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Callable[[bool], str]]:
    """`peer(silent)`: listens where a daemon would, and says that its version is another, or nothing."""
    context: zmq.Context[Any] = zmq.Context()
    ending = threading.Event()
    threads: list[threading.Thread] = []

    def answer(router: zmq.Socket[Any], silent: bool) -> None:
        while not ending.is_set():
            if not router.poll(100):
                continue
            sender, body = router.recv_multipart()
            if silent:
                continue
            error = {"code": "version", "message": f"This daemon speaks version {OTHER_VERSION}."}
            error |= {"field": None, "details": {"supported": [OTHER_VERSION]}}
            reply = {"v": OTHER_VERSION, "id": msgpack.unpackb(body)["id"], "seq": 0, "kind": "error"}
            router.send_multipart([sender, msgpack.packb({**reply, "final": True, "error": error})])
        router.close(0)

    def listen(silent: bool) -> str:
        endpoint = f"ipc://{tmp_path}/peer.sock"
        router = context.socket(zmq.ROUTER)
        router.bind(endpoint)
        threads.append(threading.Thread(target=answer, args=(router, silent)))
        threads[-1].start()
        return endpoint

    yield listen
    ending.set()
    for thread in threads:
        thread.join()
    context.term()


def test_a_daemon_of_another_version(tmp_path: Path, peer: Callable[[bool], str]) -> None:
    world = World(tmp_path, STATEROOM_ENDPOINT=peer(False))
    for name, done in try_all(world, asking()).items():
        clear(done, ROWS[name])
        assert done.code == 1, named(done)
        assert f"version {OTHER_VERSION}" in done.err, named(done)


def test_a_daemon_that_never_answers(tmp_path: Path, peer: Callable[[bool], str]) -> None:
    world = World(tmp_path, STATEROOM_ENDPOINT=peer(True))
    for name, done in try_all(world, asking()).items():
        clear(done, ROWS[name])
        assert done.code == 1, named(done)
        assert "did not answer within" in done.err, named(done)


def test_interrupted(tmp_path: Path, peer: Callable[[bool], str]) -> None:
    """By Ctrl-C, while they wait for a daemon; those that don't may have ended."""
    world = World(tmp_path, STATEROOM_ENDPOINT=peer(True))
    (tmp_path / "home" / "logs").mkdir(parents=True)
    for log in ("stateroom.log", "service.log"):
        (tmp_path / "home" / "logs" / log).write_text("{}\n")
    following = {"logs": Row("--follow"), "service logs": Row("--follow")}
    following["bench"] = Row(f"--model {write_tiny_model(tmp_path / 'model')}")
    rows = {**quick(ROWS), "doctor": ROWS["doctor"], **following}
    waits = {*asking(), *following, "doctor"}
    for name, done in try_all(world, rows, interrupt_s=INTERRUPT_S).items():
        assert "Traceback" not in done.err, named(done)
        assert len(done.lines) <= 1, named(done)
        if name in waits:
            assert done.code == INTERRUPTED, named(done)


# ---------------------------------------------------------------- with a daemon


@pytest.fixture(scope="module")
def world(tiny_daemon: RunningDaemon, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), tiny_daemon)


@pytest.fixture(scope="module")
def worked(world: World) -> dict[str, Done]:
    return try_all(world, {name: row for name, row in ROWS.items() if row.works})


def test_the_rows_are_of_commands_that_work(worked: dict[str, Done]) -> None:
    """Else the others would only see that nonsense is refused."""
    for done in worked.values():
        assert done.code == 0, named(done)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_what_cannot_be_written_to_stdout_is_told(world: World, worked: dict[str, Done]) -> None:
    rows = {name: ROWS[name] for name, done in worked.items() if done.out}
    assert len(rows) > 10
    for name, done in try_all(world, rows, stdout="full").items():
        clear(done, ROWS[name])
        assert done.code == 1, named(done)
        assert "No space left" in done.err, named(done)


def test_nobody_reads_stdout(world: World, worked: dict[str, Done]) -> None:
    """As in `stateroom ps | head -0`: no word of it, as in every shell."""
    rows = {name: ROWS[name] for name, done in worked.items() if done.out}
    for name, done in try_all(world, rows, stdout="unread").items():
        assert done.code == 1, named(done)
        assert done.err == "" or ROWS[name].notes, named(done)


def test_without_stdin(world: World) -> None:
    rows = {"chat": ROWS["chat"], "generate": Row("- --max-tokens 4 --raw"), "top": ROWS["top"]}
    found = try_all(world, rows, stdin=None)
    for done in found.values():
        clear(done, Row())
    assert found["chat"].code == 0, named(found["chat"])
    assert found["generate"].code == 1, named(found["generate"])  # an empty prompt


def test_a_model_that_is_not_there(world: World) -> None:
    rows = {
        "generate": Row("hello --model nothing"),
        "chat": Row("--name {name} --model nothing", stdin="hello\n"),
        "serve": Row("--model nothing"),
        "bench": Row("--model nothing"),
        "model add": Row("nothing"),
        "model remove": Row("nothing"),
        "service install": Row("--model nothing"),
        "import": Row("{exported} {name} --model nothing"),
    }
    for done in try_all(world, rows).values():
        clear(done, Row())
        assert done.code != 0, named(done)
        assert "nothing" in done.err or "no such model" in done.err, named(done)


def test_a_model_that_is_none(tmp_path: Path) -> None:
    """Weights that were cut off."""
    cut = write_tiny_model(tmp_path / "cut") / "model.safetensors"
    os.truncate(cut, cut.stat().st_size // 2)
    done = try_all(World(tmp_path), {"bench": Row(f"--model {tmp_path / 'cut'}")})["bench"]
    clear(done, Row())
    assert done.code == 1, named(done)


# ---------------------------------------------------------------- places


@pytest.mark.parametrize("where", ["below a file", "closed"])
def test_a_home_that_cannot_be_used(tmp_path: Path, where: str) -> None:
    """Closed: to another user than us, if nothing is closed to us."""
    home, uid = "/dev/null/nowhere", None
    if where == "closed":
        (tmp_path / "closed").mkdir(mode=0o000)
        home = str(tmp_path / "closed")
        uid = NOBODY if os.getuid() == 0 else None
        if uid is not None and not all(place.stat().st_mode & 0o005 == 0o005 for place in PROGRAM):
            pytest.skip("another user can't run this program")
    world = World(tmp_path, HOME=home, STATEROOM_HOME=home, STATEROOM_RUNTIME_DIR=home, XDG_CONFIG_HOME=home)
    for name, done in try_all(world, quick(ROWS), uid=uid, cwd="/").items():
        clear(done, ROWS[name])
        if ROWS[name].asks:
            assert done.code in (FAILED, CONFIG), named(done)


NOT_FILES = ("config.toml", "keys/server.json", "keys/allowed/one", "logs/stateroom.log", "logs/service.log")
NOT_FOLDERS = ("models", "state", "keys", "logs")


@pytest.mark.parametrize("nonsense", ["folders", "files"])
def test_a_home_full_of_nonsense(tmp_path: Path, nonsense: str) -> None:
    """Folders where files belong, and files where folders do."""
    for name in NOT_FILES if nonsense == "folders" else ():
        (tmp_path / "home" / name).mkdir(parents=True)
    for name in NOT_FOLDERS if nonsense == "files" else ():
        (tmp_path / "home").mkdir(exist_ok=True)
        (tmp_path / "home" / name).write_text("")
    world = World(tmp_path)
    without = ("generate", "logs", "stop", "config ", "keys ", "model ", "service ")
    rows = {name: row for name, row in quick(ROWS).items() if name.startswith(without)}
    rows |= {"doctor": ROWS["doctor"], "serve": Row(f"--model {write_tiny_model(tmp_path / 'model')}")}
    for name, done in try_all(world, rows).items():
        clear(done, rows[name])


def test_a_home_that_is_not_absolute(tmp_path: Path) -> None:
    world = World(tmp_path, STATEROOM_HOME="relative", STATEROOM_RUNTIME_DIR="relative")
    some = quick(["ps", "logs", "stop", "model list", "keys list", "serve"])
    for name, done in try_all(world, some).items():
        clear(done, ROWS[name])
        assert "must be an absolute path" in done.err, named(done)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own without a free byte; skips where we may not mount one."""
    folder = tmp_path / "full"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={FULL_BYTES}", "none", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting needs root")
    try:
        with suppress(OSError), (folder / "ballast").open("wb") as file:
            while True:
                file.write(bytes(4096))
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(tmp_path: Path, full_disk: Path, world: World) -> None:
    """All that commands write, the daemon's own files among it."""
    here = World(tmp_path, STATEROOM_HOME=str(full_disk / "home"), XDG_CONFIG_HOME=str(full_disk / "config"))
    model = write_tiny_model(tmp_path / "model")
    rows = {
        "serve": Row(f"--model {model}"),
        "model add": Row("demo"),
        "keys init": Row(),
        "keys client": Row("{name} --server " + "a" * 40 + f" --out {full_disk / 'key'}"),
    }
    for done in try_all(here, rows).values():
        clear(done, Row())
        assert done.code != 0, named(done)
    exports = {
        "export": Row("{snapshot} " + str(full_disk / "exported")),
        "trace": Row(f"last --chrome {full_disk / 'trace'}"),
        "doctor": Row(f"--bundle {full_disk / 'bundle'}", tells=True),
    }
    for name, done in try_all(world, exports).items():
        clear(done, exports[name])
        assert "No space left" in done.err, named(done)
    assert {path.name for path in full_disk.iterdir()} <= {"ballast", "home"}


def test_files_that_may_not_grow(world: World) -> None:
    """The same without a mount: a limit of the process's own."""
    done = try_all(world, {"export": ROWS["export"]}, file_bytes=512)["export"]
    clear(done, Row())
    assert done.code == 1, named(done)
    assert "too large" in done.err, named(done)
