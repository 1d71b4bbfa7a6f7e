"""The onnxruntime engine: makes stacks and banks, and says before what they will take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvasir_peer.engines.architectures import EXPERT_WEIGHTS, ModelShape, parse
from kvasir_peer.engines.base import (
    BankSpec,
    ExpertBank,
    LayerStack,
    MemoryEstimate,
    Precision,
    Progress,
    StackSpec,
    experts_by_layer,
    say_dequantised,
)
from kvasir_peer.engines.heap import trim_heap
from kvasir_peer.engines.onnx_attention import head_width
from kvasir_peer.engines.onnx_bank import OnnxBank, fusible, paneled
from kvasir_peer.engines.onnx_containers import Kernels, container, packed_bytes
from kvasir_peer.engines.onnx_graph import CONTAINER_HEAP_BYTES, HEAP_BYTES, SESSION_BYTES
from kvasir_peer.engines.onnx_parts import PER_HEAD_SUFFIXES, heads_of
from kvasir_peer.engines.onnx_probe import probe, usable_kernels
from kvasir_peer.engines.onnx_row_attention import cache_floats, scores_bytes
from kvasir_peer.engines.onnx_stack import OnnxStack

if TYPE_CHECKING:
    from kvasir_peer.models.gguf import TensorInfo
    from kvasir_peer.models.sources import TensorSource


# As HEAP_BYTES and SESSION_BYTES, for a bank without a stack, and for a session of one expert.
_BANK_HEAP_BYTES = 1_000_000
_EXPERT_SESSION_BYTES = 200_000
# What a layer's nodes take in a graph of all layers, as measured.
_LAYER_BYTES = 100_000
# Rows that the C kernels round take a byte a value, a scale for 32 values and a sum for 16.
_ROUNDED_BYTES = 1 + 4 / 32 + 4 / 16


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


def _own_experts(shape: ModelShape, spec: StackSpec) -> BankSpec | None:
    """Return what bank a stack has of its own, or None where its layers have no experts."""
    ranges = tuple(
        (layer.index, 0, layer.moe.n_expert)
        for layer in shape.layers[spec.first : spec.end]
        if layer.moe is not None
    )
    return BankSpec(ranges, spec.max_rows, spec.precision, spec.threads, spec.device) if ranges else None


def make_stack(source: TensorSource, spec: StackSpec, progress: Progress | None) -> LayerStack:
    """Load layers; see :func:`kvasir_peer.engines.base.create_stack`."""
    shape = parse(source.metadata, source.tensors)
    names = shape.stage_tensors(spec.first, spec.end)
    kernels = usable_kernels(spec.device)
    _say_what_is_dequantised([source.tensors[name] for name in names], spec.precision, kernels)
    counter = _Counter({name: source.tensors[name].n_bytes for name in names}, progress)
    experts = _own_experts(shape, spec)
    bank = None
    if experts is not None:
        # The stack's own estimate counts its experts.
        nothing = MemoryEstimate(0, 0, 0)
        bank = OnnxBank(shape, source, experts, memory=nothing, kernels=kernels, taken=counter.taken)
    memory = _stack_memory(shape, source.tensors, spec, kernels)
    stack = OnnxStack(shape, source, spec, memory=memory, kernels=kernels, bank=bank, progress=counter.taken)
    source.release()
    trim_heap()
    return stack


def make_bank(source: TensorSource, spec: BankSpec) -> ExpertBank:
    """Load experts; see :func:`kvasir_peer.engines.base.create_bank`."""
    shape = parse(source.metadata, source.tensors)
    kernels = usable_kernels(spec.device)
    layers = experts_by_layer(shape, spec.ranges)
    names = [name for index in layers for name in shape.expert_tensors(index)]
    _say_what_is_dequantised([source.tensors[name] for name in names], spec.precision, kernels)
    memory = _bank_memory(shape, source.tensors, spec, kernels)
    bank = OnnxBank(
        shape,
        source,
        spec,
        memory=replace(memory, workspace=memory.workspace + _BANK_HEAP_BYTES),
        kernels=kernels,
        taken=lambda name: None,
    )
    source.release()
    trim_heap()
    return bank


def estimate_stack(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], spec: StackSpec
) -> MemoryEstimate:
    """Say what a stack would take; see :func:`kvasir_peer.engines.base.estimate_stack`."""
    return _stack_memory(parse(metadata, tensors), tensors, spec, probe(spec.device).kernels)


def estimate_bank(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], spec: BankSpec
) -> MemoryEstimate:
    """Say what a bank would take; see :func:`kvasir_peer.engines.base.estimate_bank`."""
    shape = parse(metadata, tensors)
    memory = _bank_memory(shape, tensors, spec, probe(spec.device).kernels)
    return replace(memory, workspace=memory.workspace + _BANK_HEAP_BYTES)


# ------------------------------------------------------------------------------------------------ memory


def _stack_memory(
    shape: ModelShape, tensors: Mapping[str, TensorInfo], spec: StackSpec, kernels: Kernels
) -> MemoryEstimate:
    layers = shape.layers[spec.first : spec.end]
    own = _own_experts(shape, spec)
    experts = set()
    if own is not None:
        experts = {name for index, _, _ in own.ranges for name in shape.expert_tensors(index)}
    # Without experts, and with attention by the C kernels, all layers are one graph; with experts there are the parts,
    # which take more than the one graph that there may be beside them.
    whole = kernels.panels is not None and own is None
    weights = _LAYER_BYTES * len(layers) if kernels.panels is not None else 0
    # A layer with experts is two parts.
    parts = len(layers) + sum(layer.moe is not None for layer in layers)
    weights += SESSION_BYTES * (1 if whole else parts + 2)
    contained = 0
    for name in shape.stage_tensors(spec.first, spec.end):
        if name in experts:
            continue
        info = tensors[name]
        in_place = container(info.type, spec.precision, kernels) == "panels"
        if name == "token_embd.weight" and spec.first == 0 and not in_place:
            weights += info.n_bytes
            if not (shape.tied and spec.end == shape.n_layer):
                continue
        taken = _container_bytes(info, 1.0, spec.precision, kernels)
        weights += taken
        contained += 0 if in_place else taken
    kv = 0
    for layer in layers:
        heads = heads_of(layer, tensors)
        if kernels.panels is not None:
            kv += 4 * spec.n_slots * sum(cache_floats(heads, spec.context_length))
            continue
        caches = 1 if heads.latent else 2
        kv += 4 * caches * spec.n_slots * spec.context_length * heads.n_head_kv * head_width(heads)
    workspace = HEAP_BYTES + min(contained // 4, CONTAINER_HEAP_BYTES)
    workspace += _workspace(shape, tensors, spec, kernels, whole)
    if own is not None:
        if len(layers) == 1 and spec.end == shape.n_layer:
            own = replace(own, max_rows=min(spec.n_slots, spec.max_rows))
        bank = _bank_memory(shape, tensors, own, kernels)
        weights += bank.weights
        workspace += bank.workspace
    return MemoryEstimate(weights, kv, workspace)


def _bank_memory(
    shape: ModelShape, tensors: Mapping[str, TensorInfo], spec: BankSpec, kernels: Kernels
) -> MemoryEstimate:
    weights = workspace = 0
    for index, held in experts_by_layer(shape, spec.ranges).items():
        layer = shape.layers[index]
        moe = layer.moe
        assert moe is not None
        count = sum(hi - lo for lo, hi in held)
        for name in shape.expert_tensors(index):
            weights += _container_bytes(tensors[name], count / moe.n_expert, spec.precision, kernels)
        types = {suffix: tensors[layer.name(suffix)].type for suffix in EXPERT_WEIGHTS}
        used = min(moe.n_used, count)
        # The rows, where they are read and written, and their sums.
        per_row = 4 * 4.0 * shape.n_embd
        if paneled(types, spec.precision, kernels):
            weights += SESSION_BYTES
            per_row += _forward_bytes(shape.n_embd, moe.width, used)
        elif fusible(layer, types, spec.precision, kernels):
            weights += SESSION_BYTES
            per_row += 4 * (used * shape.n_embd + 4 * moe.width + 2 * count)
        else:
            # Each expert's rows are laid together, and its results wait for their sum.
            weights += _EXPERT_SESSION_BYTES * count
            per_row += 4 * (2 * used * shape.n_embd + 4 * moe.width)
        workspace = max(workspace, int(spec.max_rows * per_row))
    return MemoryEstimate(weights, 0, workspace)


def _container_bytes(info: TensorInfo, part: float, precision: Precision, kernels: Kernels) -> int:
    """Return the bytes of a tensor, or a part of it, once loaded."""
    columns = info.shape[-1]
    rows = math.prod(info.shape) // columns
    if info.name.endswith(PER_HEAD_SUFFIXES):
        return int(4 * rows * columns * part)
    # Experts of a stacked tensor are each a matrix of their own.
    count = rows // info.shape[-2] if len(info.shape) > 2 else 1
    return int(packed_bytes(info.type, rows // count, columns, precision, kernels) * count * part)


def _forward_bytes(columns: int, width: int, used: int) -> float:
    """Return the bytes that the C kernels take for a row's feed-forward part: it and hidden rows, rounded."""
    return _ROUNDED_BYTES * columns + used * (4 + _ROUNDED_BYTES) * width


def _workspace(
    shape: ModelShape, tensors: Mapping[str, TensorInfo], spec: StackSpec, kernels: Kernels, whole: bool
) -> int:
    """Return the bytes of the buffers between parts, and of the widest layer's own values, without its experts.

    Args:
        shape: the model.
        tensors: its tensors.
        spec: of the stack.
        kernels: what is at hand.
        whole: whether all layers are one graph.
    """
    layers = shape.layers[spec.first : spec.end]
    tail = spec.end == shape.n_layer
    embd = shape.n_embd
    crossing = within = 0.0
    for layer in layers:
        heads = heads_of(layer, tensors)
        crossing = max(crossing, heads.attended + heads.q + heads.k + heads.v)
        # Norms of heads, rotations and latent projections each have a copy of their own.
        apart = 0 if heads.packed else (1 if whole else 2) * (heads.q + heads.k)
        width = layer.n_ff or (layer.moe.shared_width if layer.moe else 0)
        gates = (tensors.get(layer.name(f"{stem}.weight")) for stem in ("ffn_gate", "ffn_gate_shexp"))
        in_place = all(container(g.type, spec.precision, kernels) == "panels" for g in gates if g is not None)
        forward = _forward_bytes(embd, width, 1) if in_place else 4 * 8 * width
        within = max(within, 4 * ((5 if whole else 8) * embd + apart) + forward)
    # The hidden state as it comes and goes; at the head what embeds it.
    states = (4 if spec.first == 0 else 2) * embd
    wanted = min(spec.n_slots, spec.max_rows)  # rows whose logits are asked for, at most
    once = 4 * wanted * shape.n_vocab if tail else 0  # logits
    if kernels.panels is not None:
        once += max(
            scores_bytes(heads_of(layer, tensors), spec.max_rows, spec.context_length) for layer in layers
        )
    each = 4 * (states + crossing) + within
    if whole:
        return int(spec.max_rows * each + once)
    # After the last attention there are other buffers, at the tail for few rows.
    routed = 2 * embd if any(layer.moe is not None for layer in layers) else 0
    last = 4 * (2 * embd + heads_of(layers[-1], tensors).attended + routed)
    if len(layers) > 1:
        each += 4 * routed
    return int(spec.max_rows * each + (wanted if tail else spec.max_rows) * last + once)


def _say_what_is_dequantised(infos: list[TensorInfo], precision: Precision, kernels: Kernels) -> None:
    """Say which types are not computed as the file has them."""
    say_dequantised(
        info
        for info in infos
        if container(info.type, precision, kernels) == "float" or info.name.endswith(PER_HEAD_SUFFIXES)
    )
