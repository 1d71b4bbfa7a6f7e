"""The onnxruntime engine: makes stacks and banks, and says before what they will take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvasir_peer.engines.architectures import EXPERT_BIASES, EXPERT_WEIGHTS, ModelShape, parse
from kvasir_peer.engines.base import (
    ExpertBank,
    ExpertRange,
    LayerStack,
    MemoryEstimate,
    Precision,
    Progress,
    StackSpec,
)
from kvasir_peer.engines.onnx_attention import head_width
from kvasir_peer.engines.onnx_bank import OnnxBank
from kvasir_peer.engines.onnx_linear import Kernels, packed_bytes
from kvasir_peer.engines.onnx_parts import heads_of
from kvasir_peer.engines.onnx_stack import OnnxStack

if TYPE_CHECKING:
    from kvasir_peer.models.gguf import TensorInfo
    from kvasir_peer.models.sources import TensorSource


class _Counter:
    """Turns names of tensors taken in into bytes of progress."""

    def __init__(self, sizes: Mapping[str, int], progress: Progress | None) -> None:
        self._sizes = dict(sizes)
        self._total = sum(sizes.values())
        self._done = 0
        self._progress = progress

    def taken(self, name: str) -> None:
        self._done += self._sizes.pop(name, 0)
        if self._progress is not None:
            self._progress(self._done, self._total)


def _expert_ranges(shape: ModelShape, spec: StackSpec) -> tuple[ExpertRange, ...]:
    return tuple(
        (layer.index, 0, layer.moe.n_expert)
        for layer in shape.layers[spec.first : spec.end]
        if layer.moe is not None
    )


def make_stack(source: TensorSource, spec: StackSpec, progress: Progress | None) -> LayerStack:
    """Load layers; see :func:`kvasir_peer.engines.base.create_stack`."""
    shape = parse(source.metadata, source.tensors)
    names = shape.stage_tensors(spec.first, spec.end)
    counter = _Counter({name: source.tensors[name].n_bytes for name in names}, progress)
    kernels = Kernels()
    memory = estimate_stack(source.metadata, source.tensors, spec)
    ranges = _expert_ranges(shape, spec)
    bank = _bank(shape, source, ranges, spec.precision, spec.threads, spec.device, kernels, counter)
    stack = OnnxStack(shape, source, spec, memory=memory, kernels=kernels, bank=bank, progress=counter.taken)
    source.release()
    return stack


def _bank(
    shape: ModelShape,
    source: TensorSource,
    ranges: tuple[ExpertRange, ...],
    precision: Precision,
    threads: int,
    device: str,
    kernels: Kernels,
    counter: _Counter,
) -> OnnxBank | None:
    if not ranges:
        return None

    def taken(layer: int, count: int) -> None:
        for suffix in EXPERT_WEIGHTS + EXPERT_BIASES:
            counter.taken(shape.layers[layer].name(suffix))

    memory = estimate_bank(
        source.metadata, source.tensors, ranges, max_rows=1, device=device, precision=precision
    )
    return OnnxBank(
        shape,
        source,
        ranges,
        memory=memory,
        precision=precision,
        threads=threads,
        device=device,
        kernels=kernels,
        taken=taken,
    )


def make_bank(
    source: TensorSource,
    ranges: tuple[ExpertRange, ...],
    *,
    max_rows: int,
    threads: int,
    device: str,
    precision: Precision,
) -> ExpertBank:
    """Load experts; see :func:`kvasir_peer.engines.base.create_bank`."""
    shape = parse(source.metadata, source.tensors)
    bank = _bank(shape, source, ranges, precision, threads, device, Kernels(), _Counter({}, None))
    assert bank is not None
    source.release()
    return bank


def estimate_stack(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], spec: StackSpec
) -> MemoryEstimate:
    """Say what a stack would take; see :func:`kvasir_peer.engines.base.estimate_stack`."""
    shape = parse(metadata, tensors)
    kernels = Kernels()
    layers = shape.layers[spec.first : spec.end]
    experts = {
        layer.name(suffix) for layer in layers if layer.moe for suffix in EXPERT_WEIGHTS + EXPERT_BIASES
    }
    weights = 0
    for name in shape.stage_tensors(spec.first, spec.end):
        info = tensors[name]
        if name in experts:
            continue
        if name == "token_embd.weight" and spec.first == 0:
            weights += info.n_bytes
            if not (shape.tied and spec.end == shape.n_layer):
                continue
        columns = info.shape[-1]
        weights += packed_bytes(info.type, math.prod(info.shape) // columns, columns, spec.precision, kernels)
    bank = estimate_bank(
        metadata,
        tensors,
        _expert_ranges(shape, spec),
        max_rows=spec.max_rows,
        device=spec.device,
        precision=spec.precision,
    )
    kv = 0
    for layer in layers:
        heads = heads_of(layer, tensors)
        caches = 1 if heads.latent else 2
        kv += 4 * caches * spec.n_slots * spec.context_length * heads.n_head_kv * head_width(heads)
    return MemoryEstimate(weights + bank.weights, kv, _workspace(shape, spec) + bank.workspace)


def _workspace(shape: ModelShape, spec: StackSpec) -> int:
    """Return the bytes of the buffers between parts, and of the widest part's own values."""
    widest = 0
    for layer in shape.layers[spec.first : spec.end]:
        a = layer.attention
        attention = a.n_head * (a.key_length + a.value_length) + a.n_head_kv * (a.key_length + a.value_length)
        width = layer.n_ff or (layer.moe.shared_width if layer.moe else 0)
        widest = max(widest, attention + 5 * width + 8 * shape.n_embd)
    return 4 * spec.max_rows * (widest + 4 * shape.n_embd)


def estimate_bank(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    ranges: tuple[ExpertRange, ...],
    *,
    max_rows: int,
    device: str,
    precision: Precision,
) -> MemoryEstimate:
    """Say what a bank would take; see :func:`kvasir_peer.engines.base.estimate_bank`."""
    shape = parse(metadata, tensors)
    weights = workspace = 0
    for index, lo, hi in ranges:
        layer = shape.layers[index]
        for name in shape.expert_tensors(index):
            info = tensors[name]
            columns = info.shape[-1]
            rows = (hi - lo) * (math.prod(info.shape[1:]) // columns)
            weights += packed_bytes(info.type, rows, columns, precision, Kernels())
        if layer.moe is not None:
            workspace = max(workspace, 4 * max_rows * layer.moe.n_used * (4 * layer.moe.width + shape.n_embd))
    return MemoryEstimate(weights, 0, workspace)
