"""`mlx_lm.server` in a process of its own, and its streams: text, as they come over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from stateroom.daemon.blas import find_blas, preloaded

START_S = 120.0
STOP_S = 10.0
ANSWER_S = 300.0  # no piece of a stream takes so long
HOST = "127.0.0.1"


class Server:
    """A server that answers."""

    def __init__(self, port: int) -> None:
        self.port = port

    def stream(self, prompt: str, max_tokens: int) -> Generator[str, None, None]:
        """Greedy text after the prompt, piece by piece. Leaving it early ends the request."""
        with closing(http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_S)) as connection:
            body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0.0}
            connection.request("POST", "/v1/completions", json.dumps(body))
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise RuntimeError(f"mlx_lm.server: {response.status} {response.read(1000)!r}")
            for line in response:
                kind, _, value = line.decode().strip().partition(": ")
                if kind != "data":
                    continue  # progress of a prefill is told as comments
                if value == "[DONE]":
                    return
                text = json.loads(value)["choices"][0]["text"]
                if text:
                    yield text


@contextmanager
def serving(folder: Path, log: Path) -> Iterator[Server]:
    """Serves a directory of mlx-lm's form, with the BLAS that an engine worker gets."""
    with closing(socket.socket()) as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(folder)]
    command += ["--host", HOST, "--port", str(port), "--log-level", "WARNING"]
    environment = preloaded(os.environ, find_blas().library) | {"HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        server = Server(port)
        _wait(server, process, log)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until it has drawn a token: it loads the model only when it is first asked."""
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            for _ in server.stream("Once", 2):
                pass
        except ConnectionRefusedError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"mlx_lm.server does not answer: {log.read_text(errors='replace')[-2000:]}")
