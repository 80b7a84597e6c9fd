"""GGUF files: the tiny llama through a real file, refusals by name, tokenizers against an oracle."""

from __future__ import annotations

import itertools
import unicodedata
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.demo import demo_gguf
from tests.tiny import (
    BOS,
    ENDS,
    EOS,
    MERGES,
    make_tiny_model,
    tiny_backend,
    tiny_config,
    tiny_gguf_metadata,
    write_tiny_gguf,
)

from stateroom.client.protocol import Message
from stateroom.daemon.engine import gguf, vocabulary
from stateroom.daemon.engine import model as loading
from stateroom.daemon.engine.model import LoadedModel, ModelError, load
from stateroom.daemon.engine.pieces import BYTE_ALPHABET

TEXTS = (
    "The quick brown fox, it's 12345 and 3.14159!",
    "  spaces\t\ttabs\n\n\nlines   \r\n end ",
    "naïve café — “quoted” ½ ² Ⅷ ٣٤٥",
    "日本語テキスト，中文。 العربية हिन्दी ไทย",
    "🎉👩‍👩‍👧‍👦 e\u0301 x\u200dy \u00a0 nbsp",
    "def f(x):\n    return x**2  # I'LL DON'T we've\n",
    "<|im_start|>user\nhi<|im_end|>",
    "",
)


def logits(loaded: LoadedModel, tokens: list[int]) -> np.ndarray:
    return np.array(loaded.model(mx.array([tokens], dtype=mx.uint32))[0])


# ---------------------------------------------------------------- weights and configuration


def test_a_file_gives_the_same_logits_as_the_model_it_came_from(tmp_path: Path) -> None:
    """Names, tied head, and above all the order of rotary pairs."""
    loaded = load(str(write_tiny_gguf(tmp_path / "tiny.gguf")))
    original = make_tiny_model("llama")
    tokens = loaded.tokenizer.encode("Hello the world 123", first=True)
    np.testing.assert_allclose(logits(loaded, tokens), logits(original, tokens), rtol=1e-4, atol=1e-4)
    assert loaded.id == "tiny"
    assert loaded.vocab == 300
    assert loaded.context == 512
    assert loaded.facts["architecture"] == "llama"
    assert loaded.facts["dtype"] == "float32"


def test_without_an_output_tensor_the_embedding_serves(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tied.gguf", tensors={"output.weight": None})  # type: ignore[dict-item]
    loaded = load(str(path))
    assert loaded.config["tie_word_embeddings"]
    assert logits(loaded, [1, 2, 3]).shape == (3, 300)


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    """As `model add` leaves it."""
    write_tiny_gguf(tmp_path / "tiny.gguf")
    assert load(str(tmp_path), "demo").id == "demo"
    write_tiny_gguf(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"2 \.gguf files"):
        load(str(tmp_path))


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_are_unpacked_in_float32(bits: int) -> None:
    """Against the definition: scale × code + bias, in groups of 32, codes from the low bits up."""
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, size=(6, 64), dtype=np.uint32)
    scales, biases = (rng.normal(size=(6, 2)).astype(np.float16) for _ in range(2))
    per_word = 32 // bits
    shifts = np.arange(per_word, dtype=np.uint32) * bits
    words = (codes.reshape(6, -1, per_word) << shifts).sum(axis=-1, dtype=np.uint32)
    stem = "blk.0.ffn_down"
    tensors = {
        f"{stem}.weight": mx.array(words),
        f"{stem}.scales": mx.array(scales),
        f"{stem}.biases": mx.array(biases),
        "token_embd.weight": mx.zeros((3, 64), dtype=mx.float16),
    }
    file = gguf.GGUF(Path("x.gguf"), {"general.architecture": "llama"}, tensors)
    made = gguf.weights(file, dense=True)["model.layers.0.mlp.down_proj.weight"]
    expected = codes * np.repeat(scales, 32, axis=1).astype(np.float64) + np.repeat(biases, 32, axis=1)
    assert made.dtype == mx.float32
    np.testing.assert_allclose(np.array(made), expected, rtol=1e-6, atol=1e-6)
    packed = gguf.weights(file, dense=False)
    assert packed["model.layers.0.mlp.down_proj.weight"].dtype == mx.uint32
    assert gguf.bits(tensors[f"{stem}.weight"], tensors[f"{stem}.scales"]) == bits


def test_a_packed_model_kept_packed_gives_nearly_the_same_logits(tmp_path: Path) -> None:
    """The GPU's path: packed layers of several widths in one model; only rounding tells it from the dense."""
    config = tiny_config("llama")
    dense = gguf.read(write_tiny_gguf(tmp_path / "tiny.gguf"))
    tensors = dict(dense.tensors)
    for name, tensor in dense.tensors.items():
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            stem = name.removesuffix(".weight")
            bits = 8 if stem == "token_embd" else 4
            packed = mx.quantize(tensor, group_size=gguf.GROUP, bits=bits)
            tensors |= dict(zip((name, f"{stem}.scales", f"{stem}.biases"), packed, strict=True))
    file = gguf.GGUF(dense.path, dense.metadata, tensors)
    made = []
    for kept_packed in (False, True):
        weights = gguf.weights(file, dense=not kept_packed)
        llama = loading.mlx_lm.models.llama
        module = llama.Model(llama.ModelArgs.from_dict(gguf.config(file)))
        if kept_packed:
            loading._quantise(module, weights)
            assert module.model.embed_tokens.bits == 8
            assert module.model.layers[0].self_attn.q_proj.bits == 4
        module.load_weights(list(weights.items()), strict=True)
        made.append(np.array(module(mx.array([[5, 6, 7]]))))
    assert config["vocab_size"] == made[0].shape[-1]
    np.testing.assert_allclose(made[1], made[0], rtol=1e-3, atol=1e-3)


def test_rope_factors_stretch_the_wavelengths(tmp_path: Path) -> None:
    """Factors of 1 change nothing; Llama 3.1's kind gives what mlx-lm gives for the same scaling."""
    ones = load(str(write_tiny_gguf(tmp_path / "ones.gguf", tensors={"rope_freqs.weight": mx.ones((4,))})))
    plain = load(str(write_tiny_gguf(tmp_path / "plain.gguf")))
    tokens = list(range(40))
    np.testing.assert_allclose(logits(ones, tokens), logits(plain, tokens), rtol=1e-4, atol=1e-4)

    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    rope = loading.mlx_lm.models.rope_utils.Llama3RoPE(8, 512, True, 10000.0, scaling)
    factors = rope._freqs / gguf.wavelengths(plain.config, mx.ones((4,)))
    assert mx.abs(factors - 1).max().item() > 1
    path = write_tiny_gguf(tmp_path / "scaled.gguf", tensors={"rope_freqs.weight": factors})
    scaled = load(str(path))
    for layer in plain.model.layers:
        layer.self_attn.rope = rope
    np.testing.assert_allclose(logits(scaled, tokens), logits(plain, tokens), rtol=1e-4, atol=1e-4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"general.architecture": "qwen2"}, "'qwen2'"),
    "experts": ({"llama.expert_count": mx.array(8, dtype=mx.uint32)}, "mixture of experts"),
    "a part of many": ({"split.count": mx.array(3, dtype=mx.uint32)}, "several files"),
    "partial rotary": ({"llama.rope.dimension_count": mx.array(4, dtype=mx.uint32)}, "a part of each head"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
    "no layers": ({"llama.block_count": None}, "llama.block_count"),
    "sentencepiece": ({"tokenizer.ggml.model": "llama"}, "kind 'llama'"),
    "unknown cut": ({"tokenizer.ggml.pre": "martian"}, "'martian'"),
    "bad merges": ({"tokenizer.ggml.merges": ["x"]}, "merges"),
    "merges of no tokens": ({"tokenizer.ggml.merges": ["q z"]}, "merges"),
    "bad template": ({"tokenizer.chat_template": "{% if %}"}, "template"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "no tokens"),
    "kinds of fewer tokens": ({"tokenizer.ggml.token_type": mx.array([1, 1], dtype=mx.int32)}, "kinds"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case: str, tmp_path: Path) -> None:
    metadata, named = REFUSED[case]
    path = write_tiny_gguf(tmp_path / "bad.gguf", metadata=metadata)
    with pytest.raises(ModelError, match=named) as caught:
        load(str(path))
    assert caught.value.permanent
    assert "bad.gguf" in caught.value.message


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"blk.0.attn_q_norm.weight": mx.ones((8,))}, "attn_q_norm"),
        ({"blk.1.ffn_up.weight": None}, "whole llama"),
        ({"token_embd.weight": None}, "token_embd"),
        ({"token_embd.weight": mx.zeros((200, 32))}, "300 tokens"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        load(str(write_tiny_gguf(tmp_path / "bad.gguf", tensors=tensors)))
    assert caught.value.permanent


@pytest.mark.parametrize("size", [0, 3, 4, 30, 2000, 60_000])
def test_a_truncated_file_is_refused(size: int, tmp_path: Path) -> None:
    whole = write_tiny_gguf(tmp_path / "whole.gguf").read_bytes()
    assert size < len(whole)
    (tmp_path / "cut.gguf").write_bytes(whole[:size])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        load(str(tmp_path / "cut.gguf"))


# ---------------------------------------------------------------- tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ORACLE_CUTS = {
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "llama-bpe": [_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST],
    "qwen2": [_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST],
}


def cut(text: str, patterns: list[str]) -> list[str]:
    """Cut by each pattern in turn; what lies between two matches is a piece as well."""
    pieces = [text]
    for pattern in patterns:
        pieces = [part for piece in pieces for part in _cut_once(piece, pattern)]
    return pieces


def _cut_once(text: str, pattern: str) -> list[str]:
    made, at = [], 0
    for found in regex.finditer(pattern, text):
        made += [text[at : found.start()], found.group()]
        at = found.end()
    return [piece for piece in [*made, text[at:]] if piece]


def merge(piece: str, merges: list[tuple[str, str]]) -> list[str]:
    """Byte-level BPE by its definition: the earliest listed pair, leftmost first, until none is left."""
    spelled = {byte: character for character, byte in BYTE_ALPHABET.items()}
    parts = [spelled[byte] for byte in piece.encode()]
    while True:
        pairs = [merges.index(pair) for pair in itertools.pairwise(parts) if pair in merges]
        if not pairs:
            return parts
        best = merges[min(pairs)]
        at = next(i for i in range(len(parts) - 1) if (parts[i], parts[i + 1]) == best)
        parts[at : at + 2] = ["".join(best)]


def tiny_file(pre: str, **metadata: Any) -> gguf.GGUF:
    entries = tiny_gguf_metadata(tiny_config("llama"), pre) | metadata
    plain = {key: gguf._plain(value) for key, value in entries.items()}
    return gguf.GGUF(Path("tiny.gguf"), plain, {})


@pytest.mark.parametrize("pre", ORACLE_CUTS)
@given(text=st.text(max_size=30) | st.text(alphabet=" \t\n\r'stTheinra0123é.,!½٣", max_size=30))
@settings(max_examples=100, deadline=None)
def test_text_is_cut_and_merged_as_the_definition_says(pre: str, text: str) -> None:
    tokenizer = vocabulary.tokenizer(tiny_file(pre))
    if pre == "qwen2":
        text = unicodedata.normalize("NFC", text)
    merges = [(pair.split(" ")[0], pair.split(" ")[1]) for pair in MERGES]
    expected = [token for piece in cut(text, ORACLE_CUTS[pre]) for token in merge(piece, merges)]
    backend = tiny_backend()
    assert tokenizer.encode(text, first=True) == [
        *tokenizer.prefix,
        *(backend.token_to_id(token) for token in expected),
    ]


@pytest.mark.parametrize("pre", sorted(vocabulary._CUTS))
@pytest.mark.parametrize("text", TEXTS)
def test_every_known_cut_gives_the_text_back(pre: str, text: str) -> None:
    tokenizer = vocabulary.tokenizer(tiny_file(pre))
    tokens = tokenizer.encode(text, first=False)
    composed = unicodedata.normalize("NFC", text) if pre in vocabulary._COMPOSED else text
    assert tokenizer.decode(tokens) == composed
    assert tokenizer.pieces is not None


def test_digits_are_single_tokens_with_smollm() -> None:
    file = tiny_file("smollm")
    merged = {"tokenizer.ggml.merges": ["1 2", *MERGES]}
    listed = list(file.metadata["tokenizer.ggml.tokens"])
    listed[290] = "12"
    for pre, count in (("smollm", 3), ("gpt-2", 2)):
        made = vocabulary.tokenizer(tiny_file(pre, **merged, **{"tokenizer.ggml.tokens": listed}))
        assert len(made.encode("123", first=True)) == count


def test_special_tokens_and_ends() -> None:
    backend = tiny_backend()
    tokenizer = vocabulary.tokenizer(tiny_file("smollm"))
    end = backend.token_to_id(ENDS)
    assert tokenizer.encode(f"a{ENDS}", first=True) == [*tokenizer.encode("a", first=True), end]
    assert tokenizer.eos == {end, backend.token_to_id(EOS)}
    eot = mx.array(5, dtype=mx.uint32)
    assert 5 in vocabulary.tokenizer(tiny_file("smollm", **{"tokenizer.ggml.eot_token_id": eot})).eos


def test_the_prefix_is_what_the_file_says() -> None:
    bos = tiny_backend().token_to_id(BOS)
    yes, no = mx.array(True), mx.array(False)
    assert vocabulary.tokenizer(tiny_file("smollm")).prefix == []
    assert vocabulary.tokenizer(tiny_file("llama-bpe")).prefix == [bos]
    add = "tokenizer.ggml.add_bos_token"
    assert vocabulary.tokenizer(tiny_file("smollm", **{add: yes})).prefix == [bos]
    assert vocabulary.tokenizer(tiny_file("llama-bpe", **{add: no})).prefix == []


def test_the_template_of_the_file_is_used() -> None:
    tokenizer = vocabulary.tokenizer(tiny_file("smollm"))
    tokens = tokenizer.render([Message(role="user", content="hi")])
    assert tokenizer.decode(tokens) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


# ---------------------------------------------------------------- the real thing


@pytest.mark.model
def test_the_demo_model_knows_the_capital_of_france(demo_model: LoadedModel) -> None:
    tokenizer = demo_model.tokenizer
    tokens = tokenizer.render([Message(role="user", content="What is the capital of France?")])
    cache = demo_model.model.make_cache()
    answer: list[int] = []
    fed = mx.array([tokens], dtype=mx.uint32)
    while len(answer) < 20:
        drawn = mx.argmax(demo_model.model(fed, cache=cache)[:, -1], axis=-1)
        if drawn.item() in demo_model.eos:
            break
        answer.append(int(drawn.item()))
        fed = drawn[:, None]
    assert tokenizer.decode(answer) == "The capital of France is Paris."


@pytest.mark.model
def test_the_demo_tokenizer_against_the_definition(demo_model: LoadedModel) -> None:
    tokenizer = demo_model.tokenizer
    metadata = gguf.read(demo_gguf()).metadata
    ranks = {tuple(pair.split(" ")): i for i, pair in enumerate(metadata["tokenizer.ggml.merges"])}
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    spelled = {byte: character for character, byte in BYTE_ALPHABET.items()}
    for text in TEXTS:
        if "<|" in text:
            continue
        expected = []
        for piece in cut(text, ORACLE_CUTS["smollm"]):
            parts = [spelled[byte] for byte in piece.encode()]
            while pairs := [p for p in itertools.pairwise(parts) if p in ranks]:
                best = min(pairs, key=lambda pair: ranks[pair])
                at = next(i for i in range(len(parts) - 1) if (parts[i], parts[i + 1]) == best)
                parts[at : at + 2] = ["".join(best)]
            expected += [ids[part] for part in parts]
        assert tokenizer.encode(text, first=True) == expected
        assert tokenizer.decode(expected) == text
