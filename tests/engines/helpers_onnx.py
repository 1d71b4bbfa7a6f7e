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


# Where the float16 scales stand in a block.
_SCALES: Mapping[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def random_weights(kind: quants.QuantType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random bytes of a type whose weights have a root mean square of about 1 / sqrt(columns)."""
    if kind.bits == 0:
        return gguf.quants.quantize(
            (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32),
            gguf.GGMLQuantizationType(kind.id),
        )
    n = int(np.prod(shape)) // kind.block
    blocks = rng.integers(0, 256, (n, kind.block_bytes), dtype=np.uint8)
    if kind.name == "MXFP4":
        blocks[:, 0] = rng.integers(118, 124, n)
    for begin in _SCALES.get(kind.name, ()):
        sizes = (rng.random(n) * 0.5 + 0.75).astype(np.float16)
        # The offset of Q4_1 and Q5_1 is added, that of K-quants taken away: both about the middle of the codes.
        if kind.name in ("Q4_1", "Q5_1") and begin:
            sizes *= np.float16(-7.5 if kind.name == "Q4_1" else -15.5)
        elif begin == 82:
            sizes *= np.float16(1.5)
        elif kind.name in ("Q4_K", "Q5_K") and begin:
            sizes *= np.float16(7.5 if kind.name == "Q4_K" else 15.5)
        blocks[:, begin : begin + 2] = sizes.view(np.uint8).reshape(-1, 2)
    raw = blocks.reshape(*shape[:-1], -1)
    size = float(np.sqrt(np.mean(quants.dequantize(raw, kind.id, shape).astype(np.float64) ** 2)))
    for begin in _SCALES.get(kind.name, ()):
        field = np.ascontiguousarray(blocks[:, begin : begin + 2]).view(np.float16)
        field = (field.astype(np.float64) / (size * np.sqrt(shape[-1]))).astype(np.float16)
        blocks[:, begin : begin + 2] = field.view(np.uint8)
    return raw


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
        raw = random_weights(kind, values.shape, rng)
        typed[tensor] = (raw, gguf.GGMLQuantizationType(kind.id))
        floats[tensor] = quants.dequantize(raw, kind.id, values.shape)
    paths = folder / f"{name}.gguf", folder / f"{name}-f32.gguf"
    tiny_models.write_gguf(paths[0], tiny_models.metadata_of(model), typed)
    tiny_models.write_gguf(paths[1], tiny_models.metadata_of(model), floats)
    return paths


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square difference, as a part of the expected root mean square."""
    return float(np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)))
