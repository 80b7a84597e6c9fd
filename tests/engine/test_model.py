"""Loading mlx-lm directories: several architectures, quantised ones, and refusals that name the thing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tests.tiny import (
    ARCHITECTURES,
    BOS,
    CONTEXT,
    ENDS,
    VOCAB,
    make_tiny_model,
    tiny_backend,
    tiny_config,
    tiny_tokenizer,
    write_tiny_model,
)
from transformers import PreTrainedTokenizerFast

from stateroom.client.protocol import Message
from stateroom.daemon.engine import gguf
from stateroom.daemon.engine import model as loading
from stateroom.daemon.engine.model import LoadedModel, ModelError, load
from stateroom.daemon.engine.pieces import ByteLevelPieces
from stateroom.daemon.engine.text import Detokenizer, Tokenizer

TOKENS = [5, 80, 7, 250, 31, 31, 9]


def logits(loaded: LoadedModel) -> np.ndarray:
    return np.array(loaded.model(mx.array([TOKENS], dtype=mx.uint32))[0].astype(mx.float32))


# ---------------------------------------------------------------- what is loaded


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_directory_gives_the_model_that_was_written(architecture: str, tmp_path: Path) -> None:
    loaded = load(str(write_tiny_model(tmp_path / "some-model", architecture)))
    original = make_tiny_model(architecture)
    np.testing.assert_array_equal(logits(loaded), logits(original))
    assert loaded.id == "some-model"
    assert (loaded.vocab, loaded.context) == (VOCAB, CONTEXT)
    assert loaded.eos == {tiny_backend().token_to_id(ENDS)} == original.eos
    assert loaded.config["model_type"] == architecture
    assert loaded.facts["architecture"] == architecture
    assert loaded.facts["parameters"] > 10_000


def test_facts_of_a_model(tmp_path: Path) -> None:
    facts = load(str(write_tiny_model(tmp_path / "m"))).facts
    assert facts["device"] == "cpu"
    assert facts["dtype"] == "float32"
    assert facts["weight_bytes"] == 4 * facts["parameters"]
    assert 0 < facts["load_s"] < 60


def test_the_tokenizer_of_a_directory_is_the_same_as_in_process(tmp_path: Path) -> None:
    tokenizer = load(str(write_tiny_model(tmp_path / "m"))).tokenizer
    tiny = tiny_tokenizer()
    messages = [Message(role="system", content="s"), Message(role="user", content="naïve 🎉")]
    for text in ("Hello the world, 日本 12", f"x{ENDS}y", "", " a"):
        assert tokenizer.encode(text, first=True) == tiny.encode(text, first=True)
        assert tokenizer.decode(tokenizer.encode(text, first=True)) == text
    assert tokenizer.render(messages) == tiny.render(messages)
    assert isinstance(tokenizer.pieces, ByteLevelPieces)
    assert tokenizer.prefix == []


def test_a_bos_of_the_tokenizer_goes_before_the_first_text_only(tmp_path: Path) -> None:
    tokenizer = load(str(write_tiny_model(tmp_path / "m", bos=True))).tokenizer
    bos = tiny_backend().token_to_id(BOS)
    assert tokenizer.prefix == [bos]
    assert tokenizer.encode("ab", first=True)[0] == bos
    assert bos not in tokenizer.encode("ab", first=False)
    assert bos not in tokenizer.render([Message(role="user", content="x")])  # the template names none


def test_more_ends_from_the_generation_config(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert load(str(folder)).eos == {3, 4, tiny_backend().token_to_id(ENDS)}


def test_context_from_a_nested_configuration() -> None:
    assert loading._context({"text_config": {"max_position_embeddings": 77}}) == 77
    assert loading._context({"n_positions": 5}) == 5
    assert loading._context({}) == gguf.CONTEXT_DEFAULT


class Newlines(PreTrainedTokenizerFast):
    """As some models bring: newlines are rewritten in Python, around the Rust tokenizer."""

    def encode(self, text: str, **options: object) -> list[int]:
        return list(super().encode(text.replace("\n", "<n>"), **options))

    def decode(self, tokens: list[int], **options: object) -> str:
        return str(super().decode(tokens, **options)).replace("<n>", "\n")


def test_a_tokenizer_that_does_more_than_its_rust_part() -> None:
    wrapper = loading.mlx_lm.tokenizer_utils.TokenizerWrapper(Newlines(tokenizer_object=tiny_backend()))
    tokenizer = Tokenizer.wrapping(wrapper)
    text = "one\ntwo 🎉"
    tokens = tokenizer.encode(text, first=True)
    assert tokens == tiny_tokenizer().encode("one<n>two 🎉", first=True)
    assert tokenizer.pieces is None
    assert tokenizer.decode(tokens) == text
    detokenizer = Detokenizer(tokenizer, [])
    shown = [detokenizer.add(token) for token in tokens]
    assert shown[-1] == "🎉"
    assert tokenizer.vocab == tiny_backend().get_vocab_size()


def test_the_vocabulary_is_that_of_the_embedding_of_tokens() -> None:
    class Two(nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            for i, name in enumerate(names):
                self[name] = nn.Embedding(10 + i, 4)

    assert loading._vocab(Two("wte", "wpe"), {}) == 10
    assert loading._vocab(Two("positions", "something"), {}) == 11
    assert loading._vocab(Two(), {"text_config": {"vocab_size": 7}}) == 7
    with pytest.raises(ModelError):
        loading._vocab(Two(), {})


# ---------------------------------------------------------------- float32 on a CPU


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_becomes_float32(dtype: mx.Dtype, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", change=lambda module: module.set_dtype(dtype))
    loaded = load(str(folder))
    assert {array.dtype for _, array in tree_flatten(loaded.model.parameters())} == {mx.float32}
    assert loaded.model(mx.array([[1]])).dtype == mx.float32
    np.testing.assert_allclose(logits(loaded), logits(make_tiny_model()), atol=1.0)


def quantise(bits: int, dtype: mx.Dtype) -> object:
    def change(module: nn.Module) -> None:
        module.set_dtype(dtype)
        nn.quantize(
            module,
            group_size=32,
            bits=bits,
            class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0,
        )

    return change


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_directories_are_dequantised_in_float32(bits: int, tmp_path: Path) -> None:
    """Embedding and head too; the values are scale × code + bias in float32, not rounded to bfloat16."""
    packed = {}

    def change(module: nn.Module) -> None:
        quantise(bits, mx.bfloat16)(module)  # type: ignore[operator]
        layer = module.model.layers[0].mlp.up_proj
        packed["up"] = (layer.weight, layer.scales, layer.biases)

    more = {"quantization": {"group_size": 32, "bits": bits}}
    loaded = load(str(write_tiny_model(tmp_path / "m", change=change, **more)))
    kinds = {type(module).__name__ for _, module in loaded.model.named_modules()}
    assert not {kind for kind in kinds if kind.startswith("Quantized")}
    assert {array.dtype for _, array in tree_flatten(loaded.model.parameters())} == {mx.float32}
    words, scales, biases = packed["up"]
    exact = mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), 32, bits)
    assert mx.array_equal(loaded.model.model.layers[0].mlp.up_proj.weight, exact)
    assert loaded.vocab == VOCAB
    if bits == 8:
        np.testing.assert_allclose(logits(loaded), logits(make_tiny_model()), atol=1.5)


@pytest.mark.parametrize(
    ("mode", "group_size", "bits"), [("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8)]
)
def test_other_packed_forms_are_dequantised_too(
    mode: str, group_size: int, bits: int, tmp_path: Path
) -> None:
    packed = {}

    def change(module: nn.Module) -> None:
        how = {"group_size": group_size, "bits": bits, "mode": mode}
        layer = module.model.layers[0].mlp.up_proj = module.model.layers[0].mlp.up_proj.to_quantized(**how)
        packed["up"] = mx.dequantize(layer.weight, layer.scales, None, **how)

    more = {"quantization": {"group_size": group_size, "bits": bits, "mode": mode}}
    loaded = load(str(write_tiny_model(tmp_path / "m", change=change, **more)))
    weight = loaded.model.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == mx.float32
    assert mx.array_equal(weight, packed["up"].astype(mx.float32))


def test_on_a_gpu_weights_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "on_cpu", lambda: False)
    folder = write_tiny_model(
        tmp_path / "m",
        change=quantise(4, mx.float16),  # type: ignore[arg-type]
        quantization={"group_size": 32, "bits": 4},
    )
    loaded = load(str(folder))
    assert isinstance(loaded.model.model.embed_tokens, nn.QuantizedEmbedding)
    assert loaded.vocab == VOCAB
    assert loaded.facts["parameters"] == make_tiny_model().facts.get("parameters", 39328)
    assert np.isfinite(logits(loaded)).all()


# ---------------------------------------------------------------- refusals


def refusal(spec: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        load(str(spec))
    assert caught.value.permanent
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_path_that_is_not_there() -> None:
    assert "/no/such/model" in refusal("/no/such/model")
    assert "gone.gguf" in refusal("gone.gguf")
    assert "demo" in refusal("demo")
    assert "a/b/c" in refusal("a/b/c")


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    assert "model.bin" in refusal(path)


def test_an_empty_directory(tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model_type": 3}', "\xff"])
def test_a_bad_configuration(content: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / "config.json").write_text(content, encoding="latin-1")
    assert "config.json" in refusal(folder)


def test_an_unknown_architecture(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(tiny_config() | {"model_type": "martian"}))
    assert "martian" in refusal(folder)


def test_code_from_the_directory_is_not_run(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", model_file="evil.py")
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    assert "custom module" in refusal(folder)


def test_code_of_a_tokenizer_is_not_run_nor_asked_about(tmp_path: Path) -> None:
    """transformers would wait for an answer on stdin, which in a worker is the broker's pipe."""
    folder = write_tiny_model(tmp_path / "m")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    begin = time.monotonic()
    assert "custom code" in refusal(folder)
    assert time.monotonic() - begin < 5


def test_missing_or_wrong_weights(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(tiny_config(layers=3)))
    assert "layers.2" in refusal(folder)
    (folder / "model.safetensors").unlink()
    assert "safetensors" in refusal(folder)


def test_truncated_weights(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert str(folder) in refusal(folder)


def test_no_tokenizer(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert str(folder) in refusal(folder)


# ---------------------------------------------------------------- the process


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment or None
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_what_brings_in_mlx_lm_leaves_the_limits_of_open_files() -> None:
    """mlx-lm sets them to 2048 and 4096 when it is imported."""
    out = run(
        "import resource as r; before = r.getrlimit(r.RLIMIT_NOFILE)\n"
        "import stateroom.daemon.engine.model\n"
        "print(before == r.getrlimit(r.RLIMIT_NOFILE), r.setrlimit.__module__)"
    )
    assert out.split() == ["True", "resource"]


def test_a_model_that_cannot_be_fetched_now_is_no_permanent_failure() -> None:
    """A Hugging Face id without a network."""
    code = (
        "from stateroom.daemon.engine.model import load, ModelError\n"
        "try: load('some-org/some-model')\n"
        "except ModelError as error: print(error.permanent, error.message)"
    )
    out = run(code, PATH="/usr/bin", HF_HUB_OFFLINE="1", HF_HOME="/nonexistent")
    assert out.startswith("False ")
    assert "some-org/some-model" in out


@pytest.mark.skipif(sys.platform != "linux", reason="mlx's wheel brings its own BLAS only on Linux")
def test_the_blas_in_use_is_named() -> None:
    """numpy's private OpenBLAS, loaded as well, is not taken for mlx's."""
    code = "from stateroom.daemon.engine.model import blas_in_use; import numpy; print(blas_in_use())"
    assert run(code, PATH="/usr/bin") == "reference\n"
    found = sorted(Path("/usr/lib").glob("*-linux-gnu/openblas-pthread/libblas.so.3"))
    if found:
        assert run(code, PATH="/usr/bin", LD_PRELOAD=str(found[0])) == "openblas\n"


def test_a_module_that_calls_exit_is_an_error_like_any_other(tmp_path: Path) -> None:
    """mlx-lm's olmo does, where a package that it needs is missing."""
    folder = write_tiny_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "olmo"}))
    assert str(folder) in refusal(folder)
