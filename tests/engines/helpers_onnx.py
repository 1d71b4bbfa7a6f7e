"""Making onnxruntime stacks for tests, and model files with quantised weights of any type."""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny_models
from random_blocks import random_blocks

from kvasir_peer.engines import quants
from kvasir_peer.engines.base import StackSpec, create_stack
from kvasir_peer.engines.onnx_stack import OnnxStack
from kvasir_peer.models.sources import GgufSource


@contextmanager
def stages(path: Path, borders: list[int], **changes: Any) -> Iterator[list[OnnxStack]]:
    """Exact stacks between the given layer borders; the last border may be -1 for the model's end."""
    with GgufSource(path) as source, ExitStack() as closing:
        blocks = int(source.metadata[f"{source.metadata['general.architecture']}.block_count"])
        borders = [blocks if border < 0 else border for border in borders]
        stacks = []
        for first, end in itertools.pairwise(borders):
            spec = StackSpec(first, end, 4, tiny_models.CONTEXT, 128, precision="exact", threads=1)
            stack = create_stack("onnx", source, replace(spec, **changes))
            assert isinstance(stack, OnnxStack)
            closing.callback(stack.close)
            stacks.append(stack)
        yield stacks


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
