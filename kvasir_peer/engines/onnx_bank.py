"""Banks of experts in onnxruntime.

Two ways, chosen for each layer by its quant types:

* *fused*: ``QMoE`` over all experts of the bank, for symmetric types. The caller's routing goes in as router
  weights; an expert whose weight is zero is skipped by the operator, so any subset costs what it needs.
* *single*: a small graph for each expert, for asymmetric types (whose offsets ``QMoE`` can't add) and for floats.
  Each graph computes on one thread and the experts of a pass are spread over threads, which saves handing every
  operator from thread to thread.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.engines import quants
from kvasir_peer.engines.architectures import EXPERT_WEIGHTS, LayerShape, ModelShape
from kvasir_peer.engines.base import ExpertBank, ExpertRange, MemoryEstimate, Precision, experts_by_layer
from kvasir_peer.engines.onnx_graph import Graph, Runtime, Session, spinning_threads
from kvasir_peer.engines.onnx_linear import (
    Kernels,
    Linears,
    Matrix,
    centred,
    container,
    extra_columns,
    widen,
)
from kvasir_peer.errors import EngineError
from kvasir_peer.models.sources import TensorSource

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

# Experts that are taken apart at once: bounds what loading takes beside the container.
_LOADED_AT_ONCE = 8

# gpt-oss: gate * sigmoid(1.702 * gate) * (up + 1), both limited to 7.
_OAI_ALPHA = 1.702
_OAI_LIMIT = 7.0


@dataclass(frozen=True)
class BankStatistics:
    """What a bank has done since it was loaded.

    Attributes:
        calls: calls of compute.
        rows: rows of all calls.
        expert_runs: experts computed; each once per call, for all its rows.
        expert_rows: rows of all experts computed.
    """

    calls: int
    rows: int
    expert_runs: int
    expert_rows: int


def fusible(layer: LayerShape, types: Mapping[str, int], precision: Precision, kernels: Kernels) -> bool:
    """Whether ``QMoE`` can take a layer's experts.

    Args:
        layer: the layer.
        types: ggml type of each suffix in ``EXPERT_WEIGHTS``.
        precision: of the products.
        kernels: what onnxruntime can do here.
    """
    if not kernels.experts or layer.activation == "gelu_tanh":
        return False
    gate, up, down = (quants.quant_type(types[suffix]) for suffix in EXPERT_WEIGHTS)
    return (
        gate == up
        and not (gate.asymmetric or down.asymmetric)
        and (gate.bits, gate.group) == (down.bits, down.group)
        and container(gate.id, precision, kernels) != "float"
    )


def _experts(source: TensorSource, layer: LayerShape, suffix: str, lo: int, hi: int) -> NDArray[Any]:
    """Return the bytes of experts [lo, hi) of a stacked tensor, uint8 [hi - lo, rows, row bytes]."""
    info = source.tensors[layer.name(suffix)]
    return source.read_experts(info.name, lo, hi).reshape(hi - lo, info.shape[1], -1)


def _biases(source: TensorSource, layer: LayerShape, suffix: str, lo: int, hi: int) -> F32 | None:
    """Return the experts' biases, float32 [hi - lo, rows], or None."""
    if not layer.has(suffix):
        return None
    info = source.tensors[layer.name(suffix)]
    rows = (hi - lo, *info.shape[1:])
    return quants.dequantize(source.read_experts(info.name, lo, hi), info.type, rows)


class _Experts(abc.ABC):
    """The experts of one layer."""

    def __init__(self, n_expert: int, held: list[tuple[int, int]]) -> None:
        # Place of each expert of the model here, -1 for those that are not held.
        self.n_expert = n_expert
        self._place = np.full(n_expert, -1, np.int32)
        for lo, hi in held:
            first = int(np.count_nonzero(self._place >= 0))
            self._place[lo:hi] = np.arange(first, first + hi - lo)
        self.count = int(np.count_nonzero(self._place >= 0))

    @abc.abstractmethod
    def compute(self, x: F32, ids: I32, weights: F32) -> tuple[F32, int, int]:
        """Return the weighted sum, and how many experts and rows of experts were computed."""


class _Fused(_Experts):
    def __init__(
        self,
        source: TensorSource,
        layer: LayerShape,
        held: list[tuple[int, int]],
        precision: Precision,
        runtime: Runtime,
    ) -> None:
        moe = layer.moe
        assert moe is not None
        super().__init__(moe.n_expert, held)
        oai = layer.activation == "swiglu_oai"
        g = Graph()
        width = source.tensors[layer.name(EXPERT_WEIGHTS[0])].shape[2]
        inputs = [
            g.input("x", ["n", width]),
            g.input("chosen", ["n", self.count]),
            *self._stage(g, source, layer, EXPERT_WEIGHTS[:2], held),
            *self._stage(g, source, layer, EXPERT_WEIGHTS[2:], held),
            *[""] * 6,
            g.input("mix", ["n", self.count]),
        ]
        t = quants.quant_type(source.tensors[layer.name(EXPERT_WEIGHTS[0])].type)
        limit = {"swiglu_limit": _OAI_LIMIT} if oai else {}
        y = g.op(
            "QMoE",
            *inputs,
            microsoft=True,
            k=min(moe.n_used, self.count),
            activation_type="swiglu",
            activation_alpha=_OAI_ALPHA if oai else 1.0,
            activation_beta=1.0 if oai else 0.0,
            swiglu_fusion=1,
            normalize_routing_weights=0,
            expert_weight_bits=t.bits,
            block_size=t.group,
            weights_prepacked=0,
            accuracy_level=4 if precision == "fast" else 0,
            **limit,
        )
        g.output(y, "y", ["n", width])
        self._session = g.session(runtime)

    @staticmethod
    def _stage(
        g: Graph,
        source: TensorSource,
        layer: LayerShape,
        suffixes: tuple[str, ...],
        held: list[tuple[int, int]],
    ) -> list[str]:
        """Add weights, scales and biases of gate and up, row by row in turn, or of down."""
        info = source.tensors[layer.name(suffixes[0])]
        t = quants.quant_type(info.type)
        rows, columns = len(suffixes) * info.shape[1], info.shape[2]
        count = sum(hi - lo for lo, hi in held)
        packed = np.empty((count, rows, columns * t.bits // 8), np.uint8)
        scales = np.empty((count, rows, columns // t.group), np.float32)
        biases = []
        at = 0
        for first, end in held:
            for lo in range(first, end, _LOADED_AT_ONCE):
                hi = min(lo + _LOADED_AT_ONCE, end)
                parts = [_experts(source, layer, suffix, lo, hi) for suffix in suffixes]
                raw = parts[0] if len(parts) == 1 else np.stack(parts, axis=2)
                c = centred(quants.unpack(raw, info.type, (hi - lo, rows, columns)))
                packed[at : at + hi - lo] = c.packed.reshape(hi - lo, rows, -1)
                scales[at : at + hi - lo] = c.scales.reshape(hi - lo, rows, -1)
                found = [_biases(source, layer, s.replace(".weight", ".bias"), lo, hi) for s in suffixes]
                bias = [one for one in found if one is not None]
                if bias:
                    biases.append(np.stack(bias, axis=2).reshape(hi - lo, -1))
                at += hi - lo
        bias_name = g.weight(np.concatenate(biases)) if biases else ""
        return [g.weight(packed), g.weight(scales), bias_name]

    def compute(self, x: F32, ids: I32, weights: F32) -> tuple[F32, int, int]:
        places = self._place[ids]
        rows, columns = np.nonzero(places >= 0)
        if not len(rows):
            return np.zeros_like(x), 0, 0
        chosen = np.zeros((len(x), self.count), np.float32)
        mix = np.zeros_like(chosen)
        here = places[rows, columns]
        chosen[rows, here] = 1.0
        mix[rows, here] = weights[rows, columns]
        y = self._session.run({"x": x, "chosen": chosen, "mix": mix})[0]
        return y, len(np.unique(here)), len(rows)


class _Single(_Experts):
    def __init__(
        self,
        source: TensorSource,
        layer: LayerShape,
        held: list[tuple[int, int]],
        precision: Precision,
        runtime: Runtime,
        kernels: Kernels,
        pool: ThreadPoolExecutor | None,
    ) -> None:
        moe = layer.moe
        assert moe is not None
        super().__init__(moe.n_expert, held)
        self._pool = pool
        one_thread = replace(runtime, threads=1)
        infos = [source.tensors[layer.name(suffix)] for suffix in EXPERT_WEIGHTS]
        gate, up = infos[0].type, infos[1].type
        takes_sums = (
            precision == "fast"
            and gate == up
            and quants.quant_type(gate).asymmetric
            and container(gate, precision, kernels) != "float"
        )
        # Type whose sums are added to the input once for all experts, or None.
        self._wide = gate if takes_sums else None

        def load(expert: int) -> Session:
            matrices = [
                Matrix(
                    info.name,
                    source.read_experts(info.name, expert, expert + 1),
                    info.type,
                    info.shape[1],
                    info.shape[2],
                )
                for info in infos
            ]
            biases = [
                None if found is None else found[0]
                for found in (
                    _biases(source, layer, suffix.replace(".weight", ".bias"), expert, expert + 1)
                    for suffix in EXPERT_WEIGHTS
                )
            ]
            graph = _expert_graph(
                matrices, biases, layer.activation, precision, kernels, self._wide is not None
            )
            return graph.session(one_thread)

        # Experts are loaded side by side, each taken apart by one thread.
        with ThreadPoolExecutor(min(runtime.threads, _LOADED_AT_ONCE)) as loaders:
            self._sessions = list(loaders.map(load, (e for lo, hi in held for e in range(lo, hi))))

    def compute(self, x: F32, ids: I32, weights: F32) -> tuple[F32, int, int]:
        places = self._place[ids].reshape(-1)
        # Sort the choices by expert, so that each expert gets all its rows at once.
        order = np.argsort(places, kind="stable")
        order = order[np.searchsorted(places, 0, sorter=order) :]
        out = np.zeros_like(x)
        if not len(order):
            return out, 0, 0
        experts, begins = np.unique(places[order], return_index=True)
        ends = [*begins[1:].tolist(), len(order)]
        rows = order // ids.shape[1]
        mix = weights.reshape(-1)[order][:, None]
        if self._wide is not None:
            x = widen(x, self._wide)

        def one(index: int) -> F32:
            part = slice(begins[index], ends[index])
            inputs = {"x": x[rows[part]], "mix": mix[part]}
            return self._sessions[experts[index]].run(inputs)[0]

        indices = range(len(experts))
        results = map(one, indices) if self._pool is None else self._pool.map(one, indices)
        for index, result in enumerate(results):
            out[rows[begins[index] : ends[index]]] += result
        return out, len(experts), len(order)


def _expert_graph(
    matrices: list[Matrix],
    biases: list[F32 | None],
    activation: str,
    precision: Precision,
    kernels: Kernels,
    wide: bool,
) -> Graph:
    """Return gate, up, activation and down of one expert: x [n, width], mix [n, 1] to y [n, width].

    With ``wide`` the input has the sums of its groups beside it, made once for all experts of a layer.
    """
    g = Graph()
    linears = Linears(g, precision, kernels, threads=1)
    width = matrices[0].columns
    extra = extra_columns(matrices[0].type, width) if wide else 0
    x = g.input("x", ["n", width + extra])
    mix = g.input("mix", ["n", 1])
    gate, up = (linears.wide if wide else linears.each)(x, matrices[:2], biases[:2])
    if activation == "swiglu_oai":
        limit = g.constant(_OAI_LIMIT, np.float32)
        gate = g.op("QuickGelu", g.op("Min", gate, limit), microsoft=True, alpha=_OAI_ALPHA)
        up = g.op("Clip", up, g.constant(-_OAI_LIMIT, np.float32), limit)
        up = g.op("Add", up, g.constant(1.0, np.float32))
    elif activation == "silu":
        gate = g.op("QuickGelu", gate, microsoft=True, alpha=1.0)
    else:
        gate = g.op("Gelu", gate, approximate="tanh")
    y = linears.one(g.op("Mul", gate, up), matrices[2], biases[2])
    g.output(g.op("Mul", y, mix), "y", ["n", width])
    return g


class OnnxBank(ExpertBank):
    """Experts of some layers.

    Args:
        shape: the model.
        source: the weights.
        ranges: (layer, lo, hi) of what is held.
        memory: what was estimated.
        max_rows: most rows of one call.
        precision: of the products.
        threads: threads of computation, 0 for all cores.
        device: ``cpu`` or the name of an execution provider.
        kernels: what onnxruntime can do here.
        taken: called with the name of each tensor that was read.

    Raises:
        EngineError: no range, or one that is not within its layer's experts.
        ModelFileError: a layer without experts.
    """

    def __init__(
        self,
        shape: ModelShape,
        source: TensorSource,
        ranges: tuple[ExpertRange, ...],
        *,
        memory: MemoryEstimate,
        max_rows: int,
        precision: Precision,
        threads: int,
        device: str,
        kernels: Kernels,
        taken: Callable[[str], None],
    ) -> None:
        self.shape = shape
        self.ranges = ranges
        self._memory = memory
        self._max_rows = max_rows
        runtime = Runtime.of(threads, device)
        # With a shared pool every operator is spread over its threads, so experts run one after another.
        spread = runtime.threads > 1 and not spinning_threads()
        self._pool = ThreadPoolExecutor(runtime.threads, thread_name_prefix="expert") if spread else None
        self._calls = self._rows = self._expert_runs = self._expert_rows = 0
        self._layers: dict[int, _Experts] = {}
        for index, held in experts_by_layer(shape, ranges).items():
            layer = shape.layers[index]
            types = {suffix: source.tensors[layer.name(suffix)].type for suffix in EXPERT_WEIGHTS}
            if fusible(layer, types, precision, kernels):
                self._layers[index] = _Fused(source, layer, held, precision, runtime)
            else:
                self._layers[index] = _Single(source, layer, held, precision, runtime, kernels, self._pool)
            for name in shape.expert_tensors(index):
                taken(name)

    def memory(self) -> MemoryEstimate:
        return self._memory

    def compute(self, layer: int, x: F32, ids: I32, weights: F32) -> F32:
        experts = self._layers.get(layer)
        if experts is None:
            raise EngineError(f"no experts of layer {layer} are held here, only of {sorted(self._layers)}")
        n = len(x)
        if not 1 <= n <= self._max_rows or x.shape != (n, self.shape.n_embd) or x.dtype != np.float32:
            raise EngineError(
                f"rows of shape {x.shape}, {x.dtype}; need 1 to {self._max_rows} of {self.shape.n_embd}, float32"
            )
        if ids.ndim != 2 or ids.shape != weights.shape or len(ids) != n or not ids.shape[1]:
            raise EngineError(f"expert ids {ids.shape} and weights {weights.shape} do not fit {n} rows")
        if ids.min() < 0 or ids.max() >= experts.n_expert:
            raise EngineError(f"expert {ids.max()} or {ids.min()} outside {experts.n_expert} experts")
        moe = self.shape.layers[layer].moe
        assert moe is not None
        if ids.shape[1] > moe.n_used:  # QMoE would leave out what is beyond
            raise EngineError(f"{ids.shape[1]} experts a row; the model uses {moe.n_used}")
        y, runs, rows = experts.compute(np.ascontiguousarray(x), ids, weights)
        self._calls += 1
        self._rows += n
        self._expert_runs += runs
        self._expert_rows += rows
        return y

    def statistics(self) -> BankStatistics:
        """Return what has been done so far."""
        return BankStatistics(self._calls, self._rows, self._expert_runs, self._expert_rows)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._layers.clear()
