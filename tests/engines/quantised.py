"""Model files with quantised weights of any type, and the same weights as float32."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny_models
from random_blocks import random_blocks

from kvasir_peer.engines import quants

# Wide enough for the K-quants' blocks of 256.
WIDE = {
    "embedding_length": 256,
    "feed_forward_length": 512,
    "expert_feed_forward_length": 256,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "rope.dimension_count": 64,
    "block_count": 2,
}


def wide(name: str) -> tiny_models.TinyModel:
    """A tiny model, two layers of it, as wide as K-quants need."""
    model = tiny_models.BY_NAME[name]
    return replace(model, metadata=model.metadata | WIDE)


def write_quantised(
    folder: Path, name: str, model: tiny_models.TinyModel, kinds: Mapping[str, str]
) -> tuple[Path, Path]:
    """Write a tiny model with matrices of given types, and the same weights as float32.

    Args:
        folder: where.
        name: of the file.
        model: its shape.
        kinds: type by part of a tensor's name; "" is that of all other matrices.
    """
    rng = np.random.default_rng(5)
    typed: dict[str, Any] = {}
    floats: dict[str, np.ndarray] = {}
    for tensor, values in tiny_models.tensors_of(model).items():
        kind = next((quants.BY_NAME[k] for part, k in kinds.items() if part and part in tensor), None)
        kind = kind or quants.BY_NAME[kinds[""]]
        if values.ndim < 2 or "gate_inp" in tensor or "norm" in tensor or values.shape[-1] % kind.block:
            typed[tensor] = floats[tensor] = values
            continue
        raw = random_blocks(kind, values.shape, rng)
        typed[tensor] = (raw, gguf.GGMLQuantizationType(kind.id))
        floats[tensor] = quants.dequantize(raw, kind.id, values.shape)
    paths = folder / f"{name}.gguf", folder / f"{name}-f32.gguf"
    tiny_models.write_gguf(paths[0], tiny_models.metadata_of(model), typed)
    tiny_models.write_gguf(paths[1], tiny_models.metadata_of(model), floats)
    return paths


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square difference, as a part of the expected root mean square."""
    return float(np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)))
