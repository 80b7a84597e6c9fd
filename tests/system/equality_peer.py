"""mlx-lm by itself on the same weights: `python equality_peer.py MODEL CASES`, with the worker's BLAS.

Reads a list of {"text" | "messages", "max_tokens"} as JSON from the file CASES, and writes as JSON what
`stream_generate` draws greedily for each, with the margin of each draw over the second best.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import stream_generate
from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper

from stateroom.client.protocol import Message
from stateroom.daemon.engine.model import LoadedModel, load


class NoText(StreamingDetokenizer):  # type: ignore[misc]
    """Only the tokens are compared."""

    def reset(self) -> None:
        self.text, self.offset, self.tokens = "", 0, []

    def add_token(self, token: int) -> None:
        pass

    def finalize(self) -> None:
        pass


class PeerTokenizer(TokenizerWrapper):  # type: ignore[misc]
    """What `stream_generate` asks of a tokenizer, over ours."""

    def __init__(self, loaded: LoadedModel) -> None:
        object.__setattr__(self, "_tokenizer", loaded.tokenizer)
        object.__setattr__(self, "_detokenizer", NoText())
        object.__setattr__(self, "_eos_token_ids", set(loaded.eos))


def drawn(loaded: LoadedModel, tokenizer: PeerTokenizer, case: dict[str, Any]) -> dict[str, Any]:
    if "text" in case:
        prompt = loaded.tokenizer.encode(case["text"], first=True)
    else:
        prompt = loaded.tokenizer.render([Message(**message) for message in case["messages"]])
    tokens, margins = [], []
    for response in stream_generate(loaded.model, tokenizer, prompt, max_tokens=case["max_tokens"]):
        best = mx.topk(response.logprobs, 2).tolist()
        tokens.append(int(response.token))
        margins.append(max(best) - min(best))
    return {"prompt": prompt, "tokens": tokens, "margins": margins}


if __name__ == "__main__":
    model = load(sys.argv[1], "peer")
    wrapped = PeerTokenizer(model)
    cases = json.loads(Path(sys.argv[2]).read_text())
    json.dump([drawn(model, wrapped, case) for case in cases], sys.stdout)
