"""What only a whole process shows: leaving it, forking it, and how long the import takes."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time

import pytest
from tests.client.peer import Call, Peer

IMPORT_S_MAX = 0.050
EXIT_S_MAX = 4.0  # of which starting Python and importing take up to one on a busy machine


def python(code: str, *args: str, dev: bool = True) -> tuple[str, float]:
    """Runs code in a process of its own, which must leave in silence: (what it printed, seconds)."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, *(["-X", "dev"] if dev else []), "-c", textwrap.dedent(code), *args],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout, time.monotonic() - started


def endless(call: Call) -> None:
    call.token(98)


LEAVE = {
    "a stream is open and nothing was closed": """
        room = connect(endpoint)
        session = room.open(text="a")
        stream = session.decode(99)
        next(stream)
    """,
    "another thread reads a stream": """
        import threading
        room = connect(endpoint)
        stream = room.open(text="a").decode(99)
        threading.Thread(target=stream.wait, daemon=True).start()
    """,
    "in the middle of a loop": """
        for token in connect(endpoint).open(text="a").decode(99):
            sys.exit(0)
    """,
    "inside the with": """
        with connect(endpoint) as room, room.open(text="a") as session:
            sys.exit(0)
    """,
    "large unsent requests": """
        room = connect(endpoint)
        from stateroom.client.protocol import Prefill
        inboxes = [room.start(Prefill(session="s", text="x" * 4_000_000)) for _ in range(20)]
    """,
    "many rooms": """
        rooms = [connect(endpoint) for _ in range(20)]
    """,
    "asyncio, nothing closed": """
        async def main():
            global room, stream
            room = await connect_async(endpoint)
            stream = (await room.open(text="a")).decode(99)
            await anext(stream)
        asyncio.run(main())
    """,
    "asyncio, a task still reads": """
        async def main():
            room = await connect_async(endpoint)
            session = await room.open(text="a")
            global task
            task = asyncio.create_task(session.decode(99).wait())
            await asyncio.sleep(0.05)
        asyncio.run(main())
    """,
    "asyncio, all closed": """
        async def main():
            async with connect_async(endpoint) as room, await room.open(text="a") as session:
                async for token in session.decode(99):
                    break
        asyncio.run(main())
    """,
}

PRELUDE = """
import sys, asyncio
from stateroom.client import connect, connect_async
endpoint = sys.argv[1]
"""


@pytest.mark.parametrize("how", LEAVE)
def test_a_process_leaves_whatever_was_left_open(how: str, client_peer: Peer) -> None:
    """B65: unsent frames and open sockets kept processes from leaving."""
    client_peer.on["decode"] = endless
    client_peer.on["cancelled"] = lambda call: client_peer.end_decode(call, [98], 2, "cancelled")
    code = PRELUDE + textwrap.dedent(LEAVE[how])
    # In Python's development mode, pyzmq rightly warns of sockets that an event loop left open.
    _, took_s = python(code, client_peer.endpoint, dev="asyncio" not in how or "all closed" in how)
    assert took_s < EXIT_S_MAX


def test_a_process_leaves_when_its_daemon_was_there_and_has_gone(client_peer: Peer) -> None:
    """B65: with requests that nobody will read."""
    code = """
    room = connect(endpoint)
    session = room.open(text="a")
    print("ready", flush=True)
    sys.stdin.readline()
    stream = session.decode(9)
    print("asked", flush=True)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), client_peer.endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    client_peer.stop()
    started = time.monotonic()
    out, err = child.communicate("\n", timeout=10)
    assert (out, err, child.returncode) == ("asked\n", "", 0)
    assert time.monotonic() - started < EXIT_S_MAX


def test_a_process_without_a_daemon_hears_so_and_leaves(client_endpoint: str) -> None:
    """B65: the default linger waited for ever with no daemon up."""
    code = """
    from stateroom.client import NoDaemon
    try:
        connect(endpoint)
    except NoDaemon as error:
        print(error)
    """
    said, took_s = python(PRELUDE + textwrap.dedent(code), client_endpoint)
    assert "stateroom serve" in said
    assert took_s < EXIT_S_MAX + 1.5


def test_a_forked_child_leaves_and_the_parent_goes_on(client_peer: Peer) -> None:
    """B57: the child holds copies of the parent's sockets, and must neither use them nor wait for them."""
    code = """
    import os
    room = connect(endpoint)
    session = room.open(text="a")
    stream = session.decode(3)
    child = os.fork()
    if child == 0:
        try:
            session.info()
        except Exception as error:
            print(type(error).__name__, flush=True)
        with connect(endpoint, app="child") as own:
            print(own.hello().app, flush=True)
        sys.exit(0)
    print(os.waitpid(child, 0)[1], stream.wait().text, flush=True)
    """
    said, took_s = python(PRELUDE + textwrap.dedent(code), client_peer.endpoint)
    assert said.split() == ["WrongProcess", "child", "0", "bcd"]
    assert took_s < EXIT_S_MAX


MEASURE = """
import json, sys, time
before = set(sys.modules)
started = time.process_time()
{code}
print(json.dumps([time.process_time() - started, sorted(set(sys.modules) - before)]))
"""


def measure(code: str) -> tuple[float, set[str]]:
    """Seconds of the processor, the best of several since the machine may be busy; and the modules loaded."""
    runs = [
        json.loads(subprocess.check_output([sys.executable, "-c", MEASURE.format(code=code)], timeout=20))
        for _ in range(5)
    ]
    return min(seconds for seconds, _ in runs), set(runs[0][1])


def test_importing_the_client_is_quick_and_loads_nothing_heavy() -> None:
    seconds, modules = measure("import stateroom.client")
    assert seconds < IMPORT_S_MAX
    assert not modules & {"mlx", "numpy", "zmq", "msgpack", "asyncio", "stateroom.daemon"}


def test_connecting_loads_no_mlx_no_numpy_no_daemon_and_no_asyncio() -> None:
    _, modules = measure("from stateroom.client import connect")
    roots = {module.partition(".")[0] for module in modules}
    assert not roots & {"mlx", "mlx_lm", "numpy", "asyncio", "pydantic", "structlog"}
    assert {
        m for m in modules if m.startswith("stateroom.") and not m.startswith("stateroom.client")
    } == set()


def test_every_exported_name_is_there_and_an_unknown_one_is_an_attribute_error() -> None:
    code = """
    import stateroom.client as client
    print(len({name: getattr(client, name) for name in client.__all__}))
    print(set(client.__all__) <= set(dir(client)))
    print(sorted([*sum(client._MODULES.values(), ()), "errors"]) == sorted(client.__all__))
    try:
        client.nothing
    except AttributeError as error:
        print(error)
    """
    count, listed, same, error = python(code)[0].splitlines()
    assert int(count) > 20
    assert (listed, same) == ("True", "True")
    assert error == "module 'stateroom.client' has no attribute 'nothing'"
