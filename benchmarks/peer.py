"""The peer's process from outside: mlx-lm on the same weights, asked over a pipe."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from benchmarks.streams import Drawn

from stateroom.daemon.blas import find_blas, preloaded

ANSWER_S = 300.0  # no single piece of work takes so long
STOP_S = 5.0


class PeerFailed(RuntimeError):
    """The peer's process died, or does not answer; what it said is on stderr."""


@dataclass(frozen=True)
class Run:
    """One answer.

    Attributes:
        first_s: from the question to the first token.
        decode_s: what `steps` forward passes of one token took.
        prefill_s: from the question until all but its last token were computed.
    """

    tokens: list[int]
    first_s: float
    decode_s: float
    steps: int
    prefill_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.steps / self.decode_s


class Peer:
    """A process that has a model loaded and sleeps until it is asked. A context manager."""

    def __init__(self, model: Path) -> None:
        self._command = [sys.executable, "-m", "benchmarks.peer_process", str(model)]
        self._process: subprocess.Popen[bytes]

    def generate(self, prompt: list[int], max_tokens: int, switched: bool = False) -> Run:
        """`mlx_lm.stream_generate`; `switched`: with BLAS threads as our engine sets them."""
        answer = self.ask("generate", prompt=prompt, max_tokens=max_tokens, switched=switched)
        tokens, times = answer["tokens"], answer["times"]
        return Run(tokens, times[0], times[-1] - times[0], len(tokens) - 1, answer["prefill_s"])

    def batch(
        self, prompts: list[list[int]], max_tokens: int, stagger: int, switched: bool = False
    ) -> tuple[list[list[int]], float]:
        """`mlx_lm.generate.BatchGenerator`: prompt i goes in once the first has `i * stagger` tokens.

        Returns the tokens of each, and the seconds from the first insert to the last token.
        """
        answer = self.ask("batch", prompts=prompts, max_tokens=max_tokens, stagger=stagger, switched=switched)
        return answer["tokens"], answer["seconds"]

    def forks(self, prompt: list[int], count: int, max_tokens: int) -> tuple[Drawn, int]:
        """`BatchGenerator` over so many copies of the prompt's cache, which is made before and kept.

        Returns what was drawn, and the bytes of the batch's cache at the last token.
        """
        answer = self.ask("forks", prompt=prompt, count=count, max_tokens=max_tokens)
        return Drawn(answer["tokens"], answer["times"]), answer["bytes"]

    def export(self, folder: Path) -> None:
        """Writes the model as a directory that mlx-lm loads."""
        self.ask("export", folder=str(folder))

    def short_of_best(self, tokens: list[int], token: int) -> float:
        """By how much the likeliest token's logit after `tokens` exceeds that of `token`."""
        return float(self.ask("short_of_best", tokens=tokens, token=token)["gap"])

    def gap(self, tokens: list[int], theirs: int, ours: int) -> float:
        """Logit of `theirs` less that of `ours` after `tokens`."""
        return float(self.ask("gap", tokens=tokens, theirs=theirs, ours=ours)["gap"])

    def encode(self, text: str) -> list[int]:
        return cast("list[int]", self.ask("encode", text=text)["tokens"])

    def facts(self) -> dict[str, str]:
        """Device and BLAS of the process."""
        facts = self.ask("facts")
        return {"device": facts["device"], "blas": facts["blas"]}

    def ways(self) -> tuple[bool, ...]:
        """Values of `switched` that make a difference here; the goals are held against the first."""
        return (False, True) if self.ask("facts")["switches"] else (False,)

    def ask(self, work: str, **arguments: Any) -> dict[str, Any]:
        """One piece of work of `peer_process.py`, and its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"work": work, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailed("the peer's process is gone") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        pipe = self._process.stdout
        assert pipe is not None
        # One line an answer, and never two on the way: nothing can be left in Python's buffer.
        if not select.select([pipe], [], [], ANSWER_S)[0]:
            raise PeerFailed(f"no answer in {ANSWER_S:g} s")
        line = pipe.readline()
        if not line:
            raise PeerFailed("the peer's process is gone")
        return cast("dict[str, Any]", json.loads(line))

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            env=preloaded(os.environ, find_blas().library),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            self._answer()  # it is ready
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
