"""The peer's process: mlx-lm on the weights of a model, and nothing of ours but the loader.

Takes one JSON object a line on stdin and answers with one a line on stdout; leaves at the end of stdin.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from benchmarks import step
from benchmarks.export import write_folder
from mlx_lm import stream_generate
from mlx_lm.generate import BatchGenerator, PromptProcessingBatch, generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from stateroom.daemon.engine.blas_threads import BlasThreads
from stateroom.daemon.engine.model import LoadedModel, load
from stateroom.daemon.engine.text import Tokenizer

Answer = dict[str, Any]
PREFILL_STEP = 2048  # tokens; mlx-lm's own
PREFILL_ROWS = 8  # of `BatchGenerator`, unless more come at once


class Endless(TokenizerWrapper):  # type: ignore[misc]
    """mlx-lm's tokenizer, for answers that only their length ends."""

    @property
    def eos_token_ids(self) -> set[int]:
        return set()


class PlainTokenizer:
    """What mlx-lm's wrapper asks of a tokenizer, for a model whose tokenizer isn't in its form (GGUF)."""

    eos_token_id = None
    chat_template = None
    apply_chat_template = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, first=add_special_tokens)

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)

    def get_vocab(self) -> dict[str, int]:
        return {}


def tokenizer_of(path: Path, loaded: LoadedModel) -> Endless:
    if (path / "tokenizer.json").exists():
        wrapper = load_tokenizer(path)
        return Endless(wrapper._tokenizer, type(wrapper.detokenizer))
    return Endless(PlainTokenizer(loaded.tokenizer))


class Threads:
    """BLAS threads as they come, or switched between prefill and decode as our engine does it."""

    def __init__(self) -> None:
        self.blas = BlasThreads.find()
        self.switched = False
        self.prefilled_at = (
            0.0  # when the last prompt of `stream_generate` was computed but for its last token
        )
        plain = PromptProcessingBatch.prompt

        def prompt(batch: PromptProcessingBatch, tokens: list[list[int]]) -> None:
            if tokens:
                mx.synchronize(generation_stream)  # a step may be in flight, and threads are switched at rest
                self.prefill()
            plain(batch, tokens)
            self.decode()

        PromptProcessingBatch.prompt = prompt

    def begin(self, switched: bool) -> None:
        self.switched = switched
        self.prefill()

    def prefill(self) -> None:
        if self.blas is not None:
            self.blas.many()

    def decode(self) -> None:
        if self.blas is not None and self.switched:
            self.blas.few()

    def progress(self, done: int, total: int) -> None:
        """Of `stream_generate`: all but the last token is prefill."""
        if done == total - 1:
            self.prefilled_at = time.perf_counter()
            self.decode()


class Works:
    """What the process can be asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.loaded = load(str(path))
        self.model = self.loaded.model
        self.tokenizer = tokenizer_of(path, self.loaded)
        self.threads = Threads()
        self.kept: tuple[list[int], list[Any]] = ([], [])  # tokens, and the cache that holds them

    def generate(self, prompt: list[int], max_tokens: int, switched: bool) -> Answer:
        tokens, times = [], []
        self.threads.begin(switched)
        begin = time.perf_counter()
        for response in stream_generate(
            self.model, self.tokenizer, prompt, max_tokens, prompt_progress_callback=self.threads.progress
        ):
            times.append(time.perf_counter() - begin)
            tokens.append(response.token)
        mx.synchronize(generation_stream)  # it has begun one step more than was asked for
        return {"tokens": tokens, "times": times, "prefill_s": max(0.0, self.threads.prefilled_at - begin)}

    def batch(self, prompts: list[list[int]], max_tokens: int, stagger: int, switched: bool) -> Answer:
        tokens: list[list[int]] = [[] for _ in prompts]
        sequence: dict[int, int] = {}
        self.threads.begin(switched)
        begin = time.perf_counter()
        generator = BatchGenerator(self.model, max_tokens=max_tokens)
        while any(len(made) < max_tokens for made in tokens):
            while len(sequence) < len(prompts) and len(tokens[0]) >= len(sequence) * stagger:
                (uid,) = generator.insert([prompts[len(sequence)]])
                sequence[uid] = len(sequence)
            for response in generator.next()[1]:
                tokens[sequence[response.uid]].append(response.token)
        seconds = time.perf_counter() - begin
        generator.close()
        return {"tokens": tokens, "seconds": seconds}

    def forks(self, prompt: list[int], count: int, max_tokens: int) -> Answer:
        cache = self._resident(prompt[:-1])
        tokens: list[list[int]] = [[] for _ in range(count)]
        times: list[list[float]] = [[] for _ in range(count)]
        self.threads.begin(switched=False)
        begin = time.perf_counter()
        # One token more than is read: what the generator does at an end doesn't count.
        generator = BatchGenerator(
            self.model, max_tokens=max_tokens + 1, prefill_batch_size=max(PREFILL_ROWS, count)
        )
        generator.insert([prompt[-1:]] * count, caches=[cache] * count)  # merging copies it into each row
        while len(tokens[-1]) < max_tokens:
            for response in generator.next()[1]:
                tokens[response.uid].append(response.token)
                times[response.uid].append(time.perf_counter() - begin)
        nbytes = generator.prompt_cache_nbytes
        mx.synchronize(generation_stream)
        generator.close()
        return {"tokens": tokens, "times": times, "bytes": nbytes}

    def _resident(self, tokens: list[int]) -> list[Any]:
        """mlx-lm's cache of these tokens; the last one is kept, and goes on where it is their beginning."""
        held, cache = self.kept
        if not cache or held != tokens[: len(held)]:
            held, cache = [], make_prompt_cache(self.model)
        self.threads.begin(switched=False)
        for start in range(len(held), len(tokens), PREFILL_STEP):
            self.model(mx.array([tokens[start : start + PREFILL_STEP]]), cache=cache)
            mx.eval([layer.state for layer in cache])
        self.kept = (tokens, cache)
        return cache

    def export(self, folder: str) -> Answer:
        write_folder(self.loaded, self.path, Path(folder))
        return {}

    def short_of_best(self, tokens: list[int], token: int) -> Answer:
        logits = self.model(mx.array([tokens]))[0, -1].astype(mx.float32)
        return {"gap": (logits.max() - logits[token]).item()}

    def gap(self, tokens: list[int], theirs: int, ours: int) -> Answer:
        logits = self.model(mx.array([tokens]))[0, -1].astype(mx.float32)
        return {"gap": (logits[theirs] - logits[ours]).item()}

    def encode(self, text: str) -> Answer:
        return {"tokens": self.loaded.tokenizer.encode(text, first=True)}

    def prepare(self) -> Answer:
        step.prepare(self.loaded)
        return {}

    def steps(self, kinds: list[str], prompt: int, steps: int) -> Answer:
        self.threads.begin(switched=True)
        self.threads.decode()
        return step.measure(self.loaded, kinds, prompt, steps)

    def facts(self) -> Answer:
        return {
            "device": str(self.loaded.facts["device"]),
            "blas": str(self.loaded.facts["blas"]),
            "switches": self.threads.blas is not None,
        }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints goes to stderr
    works = Works(Path(sys.argv[1]))
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        work: Callable[..., Answer] = getattr(works, asked.pop("work"))
        answers.write(json.dumps(work(**asked)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
