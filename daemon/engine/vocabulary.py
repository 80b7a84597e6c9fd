"""The tokenizer of a GGUF file: byte-level BPE, special tokens and chat template from its metadata."""

from __future__ import annotations

from typing import Any

import jinja2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from stateroom.daemon.engine.gguf import GGUF
from stateroom.daemon.engine.problem import ModelError
from stateroom.daemon.engine.template import ChatTemplate
from stateroom.daemon.engine.text import Render, Tokenizer

# Kinds of token, as the format numbers them.
CONTROL = 3
USER_DEFINED = 4

# Tokens that end an answer, if the file has them as control tokens: chat models use others than `eos`.
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "</s>")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _gpt2(*first: Any) -> list[Any]:
    return [*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


# How text is cut before the merges, by the file's `tokenizer.ggml.pre`.
_CUTS: dict[str, list[Any]] = {
    **dict.fromkeys(("gpt-2", "gpt2", "jina-es", "jina-de", "phi-2"), _gpt2()),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r"), _gpt2(pre_tokenizers.Digits(individual_digits=True))
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe"), _split(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _split(_QWEN2)),
    "tekken": _split(_TEKKEN),
}
_WHOLE_WORDS = {
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "tekken",
}  # a word that is a token is never merged
_COMPOSED = {"qwen2", "deepseek-r1-qwen"}  # text is put in Unicode's composed form first
_BOS_BY_DEFAULT = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # for files without `add_bos_token`


def tokenizer(file: GGUF) -> Tokenizer:
    """The file's tokenizer.

    Raises:
        ModelError: another kind than byte-level BPE, an unknown way to cut text, or bad tables.
    """
    pre = _supported_cut(file)
    tokens = [str(token) for token in file.metadata.get("tokenizer.ggml.tokens", [])]
    if not tokens:
        raise ModelError(f"{file.path} has no tokens (tokenizer.ggml.tokens).", permanent=True)
    backend = _backend(file, pre, tokens)
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    add_bos = bool(file.metadata.get("tokenizer.ggml.add_bos_token", pre in _BOS_BY_DEFAULT))
    return Tokenizer.over(
        backend,
        prefix=[bos] if add_bos and bos is not None else [],
        eos=_ends(file, tokens),
        render=_render(file, backend, tokens),
    )


def _supported_cut(file: GGUF) -> str:
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"{file.path} has a tokenizer of kind {kind!r}; of GGUF files only byte-level BPE ('gpt2') is "
            "supported. Use the model's mlx-lm form instead.",
            permanent=True,
        )
    pre = str(file.metadata.get("tokenizer.ggml.pre", "gpt-2"))
    if pre == "default":
        pre = "gpt-2"
    if pre not in _CUTS:
        raise ModelError(
            f"{file.path} cuts text in a way called {pre!r} (tokenizer.ggml.pre), which is not known here. "
            f"Known are {', '.join(sorted(_CUTS))}.",
            permanent=True,
        )
    return pre


def _backend(file: GGUF, pre: str, tokens: list[str]) -> Backend:
    merges = [_pair(file, str(merge)) for merge in file.metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{file.path} has a bad table of merges: {error}", permanent=True) from error
    backend = Backend(model)
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_CUTS[pre])
    backend.decoder = decoders.ByteLevel()
    kinds = _kinds(file, len(tokens))
    backend.add_special_tokens(
        [
            AddedToken(token, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL
        ]
    )
    backend.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == USER_DEFINED
        ]
    )
    return backend


def _pair(file: GGUF, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ModelError(f"{file.path} has a bad table of merges: {merge!r}.", permanent=True)
    return left, right


def _kinds(file: GGUF, count: int) -> list[int]:
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    if kinds is None:
        return [1] * count
    listed: list[int] = kinds.tolist()
    if len(listed) != count:
        raise ModelError(f"{file.path} has {count} tokens but {len(listed)} kinds of them.", permanent=True)
    return listed


def _ends(file: GGUF, tokens: list[str]) -> set[int]:
    named = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    kinds = _kinds(file, len(tokens))
    listed = (i for i, token in enumerate(tokens) if kinds[i] == CONTROL and token in END_TOKENS)
    return {token for token in named if token is not None} | set(listed)


def _render(file: GGUF, backend: Backend, tokens: list[str]) -> Render | None:
    source = file.metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and 0 <= token < len(tokens):
            special[f"{name}_token"] = tokens[token]
    try:
        template = ChatTemplate(source, special)
    except jinja2.TemplateError as error:
        raise ModelError(
            f"{file.path} has a chat template that can't be parsed: {error}", permanent=True
        ) from error

    def render(messages: list[dict[str, str]], generation_prompt: bool) -> list[int]:
        text = template.render(messages, generation_prompt)
        made: list[int] = backend.encode(text, add_special_tokens=False).ids
        return made

    return render
