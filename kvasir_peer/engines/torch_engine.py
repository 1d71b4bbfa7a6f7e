"""The torch engine's front door: stacks, banks, and what they take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kvasir_peer.engines.architectures import (
    LAYER_TENSORS,
    MODEL_TENSORS,
    LayerShape,
    ModelShape,
    MoeShape,
    parse,
)
from kvasir_peer.engines.base import (
    BankSpec,
    ExpertBank,
    LayerStack,
    MemoryEstimate,
    Progress,
    StackSpec,
    experts_by_layer,
    say_dequantised,
)
from kvasir_peer.engines.torch_experts import Experts, TorchExpertBank
from kvasir_peer.engines.torch_stack import TorchStack
from kvasir_peer.engines.torch_weights import (
    PIECE_WEIGHTS,
    Loader,
    TorchOptions,
    float_bytes,
    matrix_bytes,
    options_for,
    stays_bytes,
)
from kvasir_peer.models.gguf import TensorInfo
from kvasir_peer.models.sources import TensorSource


def make_stack(
    source: TensorSource,
    spec: StackSpec,
    progress: Progress | None = None,
    options: TorchOptions | None = None,
) -> LayerStack:
    """Load layers; see :func:`kvasir_peer.engines.base.create_stack`.

    Args:
        source: of the weights.
        spec: which layers, how many slots.
        progress: called with bytes loaded and bytes in all.
        options: how to use the device; None takes what is best for it.
    """
    options = options or options_for(spec.device, spec.precision)
    shape = parse(source.metadata, source.tensors)
    names = shape.stage_tensors(spec.first, spec.end)
    _use_threads(spec.threads)
    _say_what_is_dequantised(source.tensors, names, options)
    total = sum(source.tensors[name].n_bytes for name in names)
    loader = Loader(source, options, total, progress)
    stack = TorchStack(shape, spec, options, loader, _stack_memory(shape, source.tensors, spec, options))
    source.release()
    return stack


def make_bank(source: TensorSource, spec: BankSpec, options: TorchOptions | None = None) -> ExpertBank:
    """Load experts; see :func:`kvasir_peer.engines.base.create_bank`.

    Args:
        source: of the weights.
        spec: which experts.
        options: how to use the device; None takes what is best for it.
    """
    options = options or options_for(spec.device, spec.precision)
    shape = parse(source.metadata, source.tensors)
    layers = experts_by_layer(shape, spec.ranges)
    _use_threads(spec.threads)
    names = [name for layer in layers for name in shape.expert_tensors(layer)]
    _say_what_is_dequantised(source.tensors, names, options)
    estimate = _bank_memory(shape, source.tensors, layers, spec.max_rows, options)
    loader = Loader(source, options, 0, None)
    experts = {layer: Experts(shape.layers[layer], held, loader, options) for layer, held in layers.items()}
    source.release()
    return TorchExpertBank(shape, spec.ranges, experts, estimate, options, spec.max_rows)


def estimate_stack(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], spec: StackSpec
) -> MemoryEstimate:
    """Say what :func:`make_stack` takes."""
    return _stack_memory(parse(metadata, tensors), tensors, spec, options_for(spec.device, spec.precision))


def estimate_bank(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], spec: BankSpec
) -> MemoryEstimate:
    """Say what :func:`make_bank` takes."""
    shape = parse(metadata, tensors)
    options = options_for(spec.device, spec.precision)
    return _bank_memory(shape, tensors, experts_by_layer(shape, spec.ranges), spec.max_rows, options)


def _use_threads(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)


# Matrices that are held as float32 whatever the options say: routers, and biases of experts.
_FLOAT32 = frozenset(
    name
    for name, symbols in (*MODEL_TENSORS.items(), *LAYER_TENSORS.items())
    if len(symbols) == 1 or "gate_inp" in name or name.endswith("_exps.bias")
)
# Taken apart into two when it is loaded, so held as floats.
_FLOATS = frozenset(["attn_kv_b.weight"])


def _weight_bytes(info: TensorInfo, key: str, options: TorchOptions) -> int:
    if key in _FLOAT32:
        return float_bytes(info, torch.float32)
    if key in _FLOATS:
        return float_bytes(info, options.dtype)
    return matrix_bytes(info, options)


def _say_what_is_dequantised(
    tensors: Mapping[str, TensorInfo], names: Iterable[str], options: TorchOptions
) -> None:
    """Say which types are not kept as the file has them."""
    infos = (tensors[name] for name in names)
    say_dequantised(
        (info for info in infos if info.name.endswith(tuple(_FLOATS)) or not stays_bytes(info, options)),
        options.dtype.itemsize,
    )


def _stack_memory(
    shape: ModelShape, tensors: Mapping[str, TensorInfo], spec: StackSpec, options: TorchOptions
) -> MemoryEstimate:
    weights = 0
    tail = spec.end == shape.n_layer
    for name in shape.stage_tensors(spec.first, spec.end):
        info = tensors[name]
        if name == "token_embd.weight" and not (shape.tied and tail):
            weights += info.n_bytes  # rows are taken apart as they are asked for
        else:
            key = name if name in MODEL_TENSORS else name.split(".", 2)[2]
            weights += _weight_bytes(info, key, options)
    layers = shape.layers[spec.first : spec.end]
    positions = spec.n_slots * spec.context_length
    kv = sum(sum(layer.attention.cache_widths) for layer in layers) * positions * options.dtype.itemsize
    return MemoryEstimate(weights, kv, _stack_workspace(shape, spec, options, tail))


# What torch, its threads and the allocator keep once they have worked, whatever the model (measured on a CPU).
_BASE_WORKSPACE = 16 << 20


def _stack_workspace(shape: ModelShape, spec: StackSpec, options: TorchOptions, tail: bool) -> int:
    """The largest scratch space of a pass: the activations of a layer, and the logits."""
    n = spec.max_rows
    layers = shape.layers[spec.first : spec.end]
    widest = max(_layer_floats(shape, layer) for layer in layers)
    changed = shape.logit_scale != 1.0 or shape.logit_softcap or options.dtype != torch.float32
    logits = (2 if changed else 1) * shape.n_vocab if tail else 0
    return _BASE_WORKSPACE + 4 * n * (widest + logits) + _piece_bytes(options)


def _layer_floats(shape: ModelShape, layer: LayerShape) -> int:
    """Values per row that are alive at once in a layer."""
    attention = layer.attention
    inner = attention.n_head * (attention.key_length + attention.value_length) * 3
    dense = 2 * (4 * shape.n_embd + max(inner, 4 * layer.n_ff))
    return dense if layer.moe is None else max(dense, 8 * shape.n_embd + _expert_floats(shape, layer.moe))


def _expert_floats(shape: ModelShape, moe: MoeShape) -> int:
    """Values per row that are alive at once in the experts: input, halves, inner and output of each pair."""
    return moe.n_used * (2 * shape.n_embd + 4 * moe.width) + 4 * moe.shared_width


def _piece_bytes(options: TorchOptions) -> int:
    """Weights that are being taken apart: codes, products, and the result."""
    return PIECE_WEIGHTS * (5 + options.dtype.itemsize) if options.keep_bytes else 0


def _bank_memory(
    shape: ModelShape,
    tensors: Mapping[str, TensorInfo],
    layers: Mapping[int, list[tuple[int, int]]],
    max_rows: int,
    options: TorchOptions,
) -> MemoryEstimate:
    weights = workspace = 0
    for index, held in layers.items():
        layer = shape.layers[index]
        moe = layer.moe
        assert moe is not None
        count = sum(hi - lo for lo, hi in held)
        for name in shape.expert_tensors(index):
            whole = _weight_bytes(tensors[name], name.split(".", 2)[2], options)
            weights += whole * count // moe.n_expert
        floats = max_rows * _expert_floats(shape, moe)
        workspace = max(workspace, _BASE_WORKSPACE + 4 * floats + _piece_bytes(options))
    return MemoryEstimate(weights, 0, workspace)
