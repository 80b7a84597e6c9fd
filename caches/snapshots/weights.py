"""The fingerprint of a model that has no files of its own: by its tensors, on mlx's thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from stateroom.caches.snapshots.fingerprint import of_config
from stateroom.caches.snapshots.materialise import plain
from stateroom.caches.snapshots.tensors import Told, digest_of, name_of, told


def of_model(model: nn.Module, config: Mapping[str, Any], tokenizer: bytes = b"") -> dict[str, str]:
    """`tokenizer`: whatever tells it wholly. Reads every weight once: half a GB takes about a second."""
    parameters: Any = tree_flatten(model.parameters())
    found: list[Told] = []
    sizes: dict[mx.Dtype, int] = {}
    for name, tensor in sorted(parameters):
        found += told([plain(name, tensor)])
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return {
        "weights": name_of(found),
        "config": of_config(config),
        "tokenizer": digest_of(tokenizer),
        "dtype": str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("mlx.core."),
    }
