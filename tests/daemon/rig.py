"""A broker in a thread with scripted workers, and raw clients that speak the protocol by hand."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import zmq

from stateroom.daemon.blas import Blas
from stateroom.daemon.broker import Broker
from stateroom.daemon.config import Config, ModelSpec, Patience
from stateroom.daemon.logs import make_log

WORKER = (sys.executable, str(Path(__file__).with_name("scripted_worker.py")))
QUICK = Patience(silence_s=3.0, hang_s=6.0, stop_s=1.0, term_s=0.3, restart_first_s=0.05)
REPLY_S = 10.0

T = TypeVar("T")


class Rig:
    """A running broker. Its state may be read from the test through `look`, which runs in its loop."""

    def __init__(self, folder: Path, models: tuple[ModelSpec, ...], **options: Any) -> None:
        self.endpoint = options.pop("endpoint", f"ipc://{folder}/stateroom.sock")
        self.folder = folder
        self.log = io.StringIO()
        self.config = Config(
            endpoint=self.endpoint,
            runtime_dir=folder,
            models_dir=folder / "models",
            models=models,
            log_format="json",
            **{"patience": QUICK, "worker_command": WORKER, **options},
        )
        self.context = zmq.Context()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        log = make_log("json", self.config.log_level, self.log)
        self.broker = Broker(self.config, log, Blas(None))
        self.broker.start()
        self._ready.set()
        await self._stop.wait()
        await self.broker.stop()

    def look(self, read: Callable[[Broker], T]) -> T:
        """Runs `read` in the broker's loop and gives what it gives."""

        async def call() -> T:
            return read(self.broker)

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(10)

    def until(self, read: Callable[[Broker], bool], seconds: float = 10.0) -> None:
        """Waits until something is so in the broker."""
        deadline = time.monotonic() + seconds
        while not self.look(read):
            assert time.monotonic() < deadline, "it did not come about in time"
            time.sleep(0.01)

    def client(self, app: str | None = None) -> Raw:
        made = Raw(self.context, self.endpoint)
        if app is not None:
            assert made.ask("hello", app=app)["app"] == app
        return made

    def entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.getvalue().splitlines()]

    def begin_to_stop(self) -> None:
        """What `look` reads from here on, it reads of a broker that is stopping."""
        self.loop.call_soon_threadsafe(self._stop.set)

    def stop(self) -> float:
        """Stops the broker and gives the seconds that took."""
        began = time.monotonic()
        if self._thread.is_alive():
            self.begin_to_stop()
            self._thread.join(10)
            assert not self._thread.is_alive()
        return time.monotonic() - began

    def close(self) -> None:
        self.stop()
        self.context.destroy(linger=0)
        bugs = [entry for entry in self.entries() if entry["event"] == "internal error"]
        assert not bugs, json.dumps(bugs)


class Raw:
    """One connection: requests as maps, replies as maps, in the order in which they come."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        kind: int = zmq.DEALER,
        receive_queue: int | None = None,
    ) -> None:
        self.socket = context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        if receive_queue is not None:
            self.socket.setsockopt(zmq.RCVHWM, receive_queue)
        self.socket.connect(endpoint)
        self._ids = itertools.count(1)
        self.kept: list[dict[str, Any]] = []

    def send(self, op: str, **arguments: Any) -> int:
        """Sends a request and gives its id. A trailing `_` in a name is dropped: `class_`, `from_`."""
        request_id = next(self._ids)
        named = {name.rstrip("_"): value for name, value in arguments.items()}
        self.socket.send(msgpack.packb({"v": 1, "id": request_id, "op": op, **named}))
        return request_id

    def receive(self, seconds: float = REPLY_S) -> dict[str, Any]:
        """The next reply of any request."""
        assert self.socket.poll(int(seconds * 1000)), f"no reply within {seconds} s"
        reply: dict[str, Any] = msgpack.unpackb(self.socket.recv())
        return reply

    def replies(self, request_id: int, seconds: float = REPLY_S) -> list[dict[str, Any]]:
        """All replies of one request, up to its final one; those of others are kept."""
        mine = [reply for reply in self.kept if reply["id"] == request_id]
        self.kept = [reply for reply in self.kept if reply["id"] != request_id]
        while not (mine and mine[-1]["final"]):
            reply = self.receive(seconds)
            (mine if reply["id"] == request_id else self.kept).append(reply)
        assert [reply["seq"] for reply in mine] == list(range(len(mine)))
        assert [reply["final"] for reply in mine] == [False] * (len(mine) - 1) + [True]
        return mine

    def final(self, request_id: int, seconds: float = REPLY_S) -> dict[str, Any]:
        return self.replies(request_id, seconds)[-1]

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Sends a request and gives its final reply."""
        return self.final(self.send(op, **arguments))

    def refusal(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Sends a request that must be refused and gives the error."""
        reply = self.ask(op, **arguments)
        assert reply["kind"] == "error", reply
        error: dict[str, Any] = reply["error"]
        return error

    def open(self, tokens: list[int] | None = None, **arguments: Any) -> str:
        reply = self.ask("open", tokens=tokens or [1, 2, 3], **arguments)
        assert reply["kind"] == "result", reply
        session: str = reply["session"]
        return session

    def begun(self, request_id: int) -> None:
        """Waits for the first reply of a request."""
        while not any(reply["id"] == request_id for reply in self.kept):
            self.kept.append(self.receive())

    def nothing_more(self, seconds: float = 0.2) -> None:
        assert self.kept == []
        if self.socket.poll(int(seconds * 1000)):
            raise AssertionError(f"a reply too many: {msgpack.unpackb(self.socket.recv())}")

    def close(self) -> None:
        self.socket.close()
