"""Loading a model: an mlx-lm directory, a Hugging Face id, or a GGUF file.

On a CPU everything becomes float32, dequantised: half precision and packed weights are many times
slower there. On a GPU weights stay as they are stored.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import resource
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from stateroom.daemon.engine import gguf, vocabulary
from stateroom.daemon.engine.problem import ModelError
from stateroom.daemon.engine.text import Tokenizer


@contextlib.contextmanager
def _limits_kept() -> Iterator[None]:
    """Importing mlx-lm lowers the limits of open files, and a lowered hard limit can't be raised again."""
    original = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = original


with _limits_kept():
    import mlx_lm.models.llama
    import mlx_lm.utils

MESSAGE_CHARACTERS_MAX = 300  # of another library's message in ours
CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
)
EMBEDDING_NAMES = (
    "embed_tokens",
    "wte",
    "tok_embeddings",
    "word_embeddings",
    "embedding",
    "embeddings",
    "embed_in",
)
HF_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

__all__ = ["LoadedModel", "ModelError", "blas_in_use", "load"]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be stepped, by the thread that loaded it.

    Attributes:
        id: the name that clients use.
        model: called as `model(tokens, cache=…)` with tokens [B, N] uint32; gives logits [B, N, V].
        tokenizer: text to tokens and back.
        config: the model's own configuration.
        context: the most tokens of a session.
        vocab: token ids are 0 to vocab - 1; another would be read out of bounds.
        eos: tokens that end an answer.
        facts: device, dtype, blas, architecture, parameters, load_s, for the log and the doctor.
        path: its GGUF file or its directory, if it has any.
    """

    id: str
    model: nn.Module
    tokenizer: Tokenizer
    config: dict[str, Any]
    context: int
    vocab: int
    eos: frozenset[int]
    facts: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None


def load(spec: str, model_id: str | None = None) -> LoadedModel:
    """Loads a model and evaluates its weights.

    Args:
        spec: a directory (of mlx-lm's form, or with one GGUF file), a `.gguf` file, or a Hugging Face id
            (fetched unless it is in the local cache).
        model_id: the model's name; by default the last part of `spec`.

    Raises:
        ModelError: permanent for a wrong path, a wrong configuration or an unknown architecture.
    """
    begin = time.monotonic()
    path = _local(spec) or _fetch(spec)
    is_file = path.is_file()
    model, tokenizer, config = (_load_gguf if is_file else _load_directory)(path)
    mx.eval(model.parameters())
    return LoadedModel(
        id=model_id or (Path(spec).stem if is_file else Path(spec).name),
        model=model,
        tokenizer=tokenizer,
        config=config,
        context=_context(config),
        vocab=_vocab(model, config),
        eos=tokenizer.eos,
        facts=_facts(model, config) | {"load_s": round(time.monotonic() - begin, 3)},
        path=path,
    )


def on_cpu() -> bool:
    return bool(mx.default_device() == mx.cpu)


def blas_in_use() -> str:
    """The BLAS that mlx calls on this CPU: accelerate, openblas, mkl, blis, reference or unknown."""
    if sys.platform == "darwin":
        return "accelerate"
    try:
        loaded = Path("/proc/self/maps").read_text()
    except OSError:
        return "unknown"
    # A wheel's private copies (numpy's OpenBLAS) are of no use to mlx; a preloaded one is global.
    if hasattr(ctypes.CDLL(None), "cblas_sgemm"):
        shared = [line for line in loaded.splitlines() if "/" in line and ".libs/" not in line]
        for name in ("openblas", "mkl", "blis"):
            if any(name in line.rpartition("/")[2] for line in shared):
                return name
        return "unknown"
    return "reference" if "mlx_cpu.libs/libblas" in loaded else "unknown"


# ---------------------------------------------------------------- where


def _local(spec: str) -> Path | None:
    """The GGUF file or the directory that a spec means; None for a Hugging Face id."""
    path = Path(spec).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists() or not files:
            return path
        if len(files) > 1:
            raise ModelError(f"{spec} holds {len(files)} .gguf files; give the path of one.", permanent=True)
        return files[0]
    if path.exists():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{spec} is neither a model directory nor a .gguf file.", permanent=True)
        return path
    if path.suffix.lower() == ".gguf" or not HF_ID.fullmatch(spec):
        raise ModelError(f"There is no model at {spec}.", permanent=True)
    return None


def _fetch(hf_id: str) -> Path:
    try:
        return Path(mlx_lm.utils._download(hf_id))
    except Exception as error:
        missing = type(error).__name__ in ("RepositoryNotFoundError", "GatedRepoError", "HFValidationError")
        raise ModelError(
            f"The model {hf_id} can't be fetched: {_one_line(error)}", permanent=missing
        ) from error


def _one_line(error: BaseException) -> str:
    """An exception's message on one line, of a length that a sentence can hold."""
    return textwrap.shorten(str(error), MESSAGE_CHARACTERS_MAX, placeholder=" …") or type(error).__name__


# ---------------------------------------------------------------- mlx-lm directories


def _load_directory(path: Path) -> tuple[nn.Module, Tokenizer, dict[str, Any]]:
    _check_config(path)
    try:
        model, config = mlx_lm.utils.load_model(path, lazy=True)
        # Asked for nothing, transformers would ask on stdin whether to run the directory's code.
        no_code = {"trust_remote_code": False}
        wrapper = mlx_lm.utils.load_tokenizer(path, no_code, eos_token_ids=config.get("eos_token_id"))
    except ModelError:
        raise
    # Whatever a broken directory makes mlx-lm or transformers raise; a module of mlx-lm may even call exit.
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"The model at {path} can't be loaded: {_one_line(error)}", permanent=True
        ) from error
    if on_cpu():
        model = _to_float32(model)
    return model, Tokenizer.wrapping(wrapper), config


def _check_config(path: Path) -> None:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} has no config.json; it is not a model directory.", permanent=True) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path / 'config.json'} can't be read: {error}", permanent=True) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path / 'config.json'} names no model_type.", permanent=True)


def _to_float32(model: nn.Module) -> nn.Module:
    """Dequantised in float32, not in the scales' own half precision."""
    for _, module in model.named_modules():
        for name in ("scales", "biases"):
            if isinstance(module.get(name), mx.array) and mx.issubdtype(module[name].dtype, mx.floating):
                module[name] = module[name].astype(mx.float32)
    model = mlx_lm.utils.dequantize_model(model)
    model.set_dtype(mx.float32)
    return model


# ---------------------------------------------------------------- GGUF


def _load_gguf(path: Path) -> tuple[nn.Module, Tokenizer, dict[str, Any]]:
    file = gguf.read(path)
    config = gguf.config(file)
    tokenizer = vocabulary.tokenizer(file)
    if tokenizer.vocab > config["vocab_size"]:
        raise ModelError(
            f"{path} has {tokenizer.vocab} tokens but only {config['vocab_size']} embeddings.", permanent=True
        )
    llama = mlx_lm.models.llama
    model = llama.Model(llama.ModelArgs.from_dict(config))
    weights = gguf.weights(file, dense=on_cpu())
    if not on_cpu():
        _quantise(model, weights)
    if (factors := gguf.rope_factors(file)) is not None:
        for layer in model.layers:
            layer.self_attn.rope = FactoredRoPE(config["head_dim"], gguf.wavelengths(config, factors))
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        raise ModelError(
            f"{path} doesn't hold a whole llama model: {_one_line(error)}", permanent=True
        ) from error
    model.eval()
    return model, tokenizer, config


def _quantise(model: nn.Module, weights: dict[str, mx.array]) -> None:
    """Gives each layer that is stored packed a packed layer of its own width."""

    def width(path: str, module: nn.Module) -> bool | dict[str, int]:
        scales = weights.get(f"{path}.scales")
        if scales is None or not hasattr(module, "to_quantized"):
            return False
        return {"group_size": gguf.GROUP, "bits": gguf.bits(weights[f"{path}.weight"], scales)}

    nn.quantize(model, group_size=gguf.GROUP, bits=4, class_predicate=width)


class FactoredRoPE(nn.Module):
    """Rotary embedding of neighbouring pairs with given wavelengths."""

    def __init__(self, dims: int, wavelengths: mx.array) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dims = dims
        self._wavelengths = wavelengths  # underscore: no parameter of the model

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return mx.fast.rope(
            x, self.dims, traditional=True, base=None, scale=1.0, offset=offset, freqs=self._wavelengths
        )


# ---------------------------------------------------------------- facts


def _context(config: dict[str, Any]) -> int:
    for source in (config, config.get("text_config") or {}):
        for key in CONTEXT_KEYS:
            if isinstance(source.get(key), int) and source[key] > 0:
                return int(source[key])
    return gguf.CONTEXT_DEFAULT


def _vocab(model: nn.Module, config: dict[str, Any]) -> int:
    """Rows of the embedding of tokens: of several by that name the fewest, of others (positions) the most."""
    rows = [
        (path.rpartition(".")[2], int(module.weight.shape[0]))
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
    ]
    if named := [count for name, count in rows if name in EMBEDDING_NAMES]:
        return min(named)
    if rows:
        return max(count for _, count in rows)
    stated = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if not stated:
        raise ModelError("The model has no embedding of tokens that could be found.", permanent=True)
    return int(stated)


def _facts(model: nn.Module, config: dict[str, Any]) -> dict[str, Any]:
    parameters: Any = tree_flatten(model.parameters())
    return {
        "device": mx.default_device().type.name,
        "dtype": str(_main_dtype(parameters)).removeprefix("mlx.core."),
        "blas": blas_in_use(),
        "architecture": config.get("model_type", "unknown"),
        "parameters": int(mlx_lm.utils.get_total_parameters(model)),
        "weight_bytes": sum(array.nbytes for _, array in parameters),
    }


def _main_dtype(parameters: list[tuple[str, mx.array]]) -> Any:
    """The type that holds most of the bytes."""
    sizes: dict[Any, int] = {}
    for _, array in parameters:
        sizes[array.dtype] = sizes.get(array.dtype, 0) + array.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype])
