"""Banks of experts in onnxruntime.

Three ways, chosen for each layer by its quant types and by what is at hand:

* *panels*: one operator of the C kernels over all experts of the bank (:mod:`kvasir_peer.engines.kernels`), for all
  block-quantised types.
* *fused*: ``QMoE`` over all experts of the bank, for symmetric types. The caller's routing goes in as router
  weights; an expert whose weight is zero is skipped by the operator, so any subset costs what it needs.
* *single*: a small graph for each expert, for asymmetric types (whose offsets ``QMoE`` can't add) and for floats.
  Each graph computes on one thread and the experts of a pass are spread over threads, which saves handing every
  operator from thread to thread.
"""

from __future__ import annotations

import abc
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.engines import panels, quants
from kvasir_peer.engines.architectures import EXPERT_WEIGHTS, LayerShape, ModelShape
from kvasir_peer.engines.base import BankSpec, ExpertBank, MemoryEstimate, Precision, experts_by_layer
from kvasir_peer.engines.onnx_graph import Bound, Graph, Runtime, Session, spinning_threads
from kvasir_peer.engines.onnx_linear import (
    Kernels,
    Linears,
    Matrix,
    centred,
    container,
    extra_columns,
    forward_node,
    widen,
)
from kvasir_peer.models.sources import TensorSource

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

# Experts that are taken apart at once: bounds what loading takes beside the container.
_LOADED_AT_ONCE = 8
# Numbers of rows whose bindings are kept; each costs a few kilobytes per layer.
_KEPT_WIDTHS = 32

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


def paneled(types: Mapping[str, int], precision: Precision, kernels: Kernels) -> bool:
    """Whether the C kernels take a layer's experts; ``types`` as for :func:`fusible`."""
    return all(container(types[suffix], precision, kernels) == "panels" for suffix in EXPERT_WEIGHTS)


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
        and container(gate.id, precision, kernels) in ("codes4", "codes8")
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


class _Buffers:
    """Flat arrays that all layers of a bank share, each as large as the bank's largest pass needs it.

    Args:
        max_rows: most rows of a pass.
        widths: of a row, by name.
    """

    def __init__(self, max_rows: int, widths: Mapping[str, int]) -> None:
        self._flat = {name: np.zeros(max_rows * width, np.float32) for name, width in widths.items()}

    def take(self, name: str, rows: int, width: int) -> F32:
        """Return the begin of a buffer as [rows, width]."""
        return self._flat[name][: rows * width].reshape(rows, width)


@dataclass(frozen=True, eq=False)
class _FusedBinding:
    """A session of all experts tied to buffers, for one number of rows."""

    x: F32
    chosen: F32
    mix: F32
    y: F32
    run: Bound


class _Fused(_Experts):
    def __init__(
        self,
        source: TensorSource,
        layer: LayerShape,
        held: list[tuple[int, int]],
        precision: Precision,
        runtime: Runtime,
        buffers: _Buffers,
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
        self._width = width
        self._buffers = buffers
        self._bound: OrderedDict[int, _FusedBinding] = OrderedDict()

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
        n = len(x)
        bound = self._bound.get(n)
        if bound is None:
            bound = self._bound[n] = self._bind(n)
            if len(self._bound) > _KEPT_WIDTHS:
                self._bound.popitem(last=False)
        places = self._place[ids]
        if self.count < self.n_expert:
            rows, columns = np.nonzero(places >= 0)
            if not len(rows):
                return np.zeros_like(x), 0, 0
            places, weights = places[rows, columns], weights[rows, columns]
        else:
            rows = np.arange(n)[:, None]
        bound.chosen.fill(0.0)
        bound.mix.fill(0.0)
        bound.chosen[rows, places] = 1.0
        bound.mix[rows, places] = weights
        np.copyto(bound.x, x)
        bound.run()
        return bound.y.copy(), int(np.count_nonzero(bound.chosen.any(0))), places.size

    def _bind(self, n: int) -> _FusedBinding:
        """Tie the session to buffers for n rows."""
        x, y = (self._buffers.take(name, n, self._width) for name in ("x", "y"))
        chosen, mix = (self._buffers.take(name, n, self.count) for name in ("chosen", "mix"))
        run = self._session.bind({"x": x, "chosen": chosen, "mix": mix}, {"y": y})
        return _FusedBinding(x, chosen, mix, y, run)


@dataclass(frozen=True, eq=False)
class _PanelBinding:
    """A session of the C kernels tied to buffers, for one number of rows and choices."""

    x: F32
    places: I32
    mix: F32
    y: F32
    done: I32
    run: Bound


class _Panels(_Experts):
    def __init__(
        self,
        source: TensorSource,
        layer: LayerShape,
        held: list[tuple[int, int]],
        precision: Precision,
        library: Path,
        runtime: Runtime,
        buffers: _Buffers,
    ) -> None:
        moe = layer.moe
        assert moe is not None
        super().__init__(moe.n_expert, held)
        self._infos = [source.tensors[layer.name(suffix)] for suffix in EXPERT_WEIGHTS]
        self._width, self._columns = self._infos[0].shape[1:]
        self._activation = layer.activation
        self._precision = precision
        self._library = library
        self._weights = [self._lay(source, layer, suffix, held, runtime.threads) for suffix in EXPERT_WEIGHTS]
        g = Graph()
        x = g.input("x", ["n", self._columns])
        places, mix = g.input("places", ["n", "k"], np.int32), g.input("mix", ["n", "k"])
        y, done = self.node(g, x, places, mix)
        g.output(y, "y", ["n", self._columns])
        g.output(done, "done", [1, 2], np.int32)
        self._session = g.session(runtime)
        self._buffers = buffers
        self._bound: OrderedDict[tuple[int, int], _PanelBinding] = OrderedDict()

    def node(self, g: Graph, x: str, places: str, mix: str) -> tuple[str, str]:
        """Add the experts to a graph.

        Args:
            g: the graph.
            x: [n, columns].
            places: int32 [n, k], of experts here; one that is out of range adds nothing.
            mix: [n, k], their weights.

        Returns:
            The weighted sum, [n, columns]; how many experts were computed and how many rows of all of them.
        """
        biases = ["" if bias is None else g.resident(bias) for _, bias in self._weights]
        inputs = [x, *(g.resident(laid) for laid, _ in self._weights), places, mix, *biases]
        y, done = forward_node(
            g,
            self._library,
            inputs,
            self._infos,
            self._columns,
            self._width,
            self.count,
            self._activation,
            self._precision,
        )
        return y, done

    def _lay(
        self,
        source: TensorSource,
        layer: LayerShape,
        suffix: str,
        held: list[tuple[int, int]],
        threads: int,
    ) -> tuple[NDArray[np.uint8], F32 | None]:
        """Return the panels of one matrix of all experts, and their biases."""
        info = source.tensors[layer.name(suffix)]
        rows, columns = info.shape[1:]
        each = panels.panel_bytes(info.type, rows, columns)
        out = np.empty(self.count * each, np.uint8)
        biases = []
        at = 0
        with ThreadPoolExecutor(threads, thread_name_prefix="pack") as pool:
            for first, end in held:
                for lo in range(first, end, _LOADED_AT_ONCE):
                    hi = min(lo + _LOADED_AT_ONCE, end)
                    raw = _experts(source, layer, suffix, lo, hi)
                    places = [out[(at + i) * each : (at + i + 1) * each] for i in range(hi - lo)]
                    pack = functools.partial(panels.pack, type_id=info.type, rows=rows, columns=columns)
                    for _ in pool.map(lambda one, to: pack(one, out=to), raw, places):  # noqa: B023
                        pass
                    bias = _biases(source, layer, suffix.replace(".weight", ".bias"), lo, hi)
                    if bias is not None:
                        biases.append(bias.reshape(hi - lo, -1))
                    at += hi - lo
        return out, np.concatenate(biases) if biases else None

    def compute(self, x: F32, ids: I32, weights: F32) -> tuple[F32, int, int]:
        bound = self._bound.get(ids.shape)
        if bound is None:
            bound = self._bound[ids.shape] = self._bind(*ids.shape)
            if len(self._bound) > _KEPT_WIDTHS:
                self._bound.popitem(last=False)
        np.take(self._place, ids, out=bound.places)
        np.copyto(bound.mix, weights)
        np.copyto(bound.x, x)
        bound.run()
        experts, rows = bound.done[0].tolist()
        return bound.y.copy(), experts, rows

    def _bind(self, n: int, k: int) -> _PanelBinding:
        """Tie the session to buffers for n rows of k choices."""
        x, y = (self._buffers.take(name, n, self._columns) for name in ("x", "y"))
        places, mix = np.empty((n, k), np.int32), np.empty((n, k), np.float32)
        done = np.zeros((1, 2), np.int32)
        run = self._session.bind({"x": x, "places": places, "mix": mix}, {"y": y, "done": done})
        return _PanelBinding(x, places, mix, y, done, run)


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
        # The thread that asks computes too.
        self._helpers = runtime.threads - 1
        self._width = source.tensors[layer.name(EXPERT_WEIGHTS[2])].shape[1]
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
        if len(x) == 1:
            return self._compute_one(x, self._place[ids[0]], weights[0])
        places = self._place[ids].reshape(-1)
        # Sort the choices by expert, so that each expert gets all its rows at once.
        order = np.argsort(places, kind="stable")
        order = order[np.searchsorted(places, 0, sorter=order) :]
        out = np.zeros_like(x)
        if not len(order):
            return out, 0, 0
        experts, begins = np.unique(places[order], return_index=True)
        ends = np.append(begins[1:], len(order))
        rows = order // ids.shape[1]
        mix = weights.reshape(-1)[order][:, None]
        if self._wide is not None:
            x = widen(x, self._wide)
        # Those with the most rows first, so that no thread ends long after the others.
        largest_first = np.argsort(begins - ends, kind="stable").tolist()
        parts = [slice(begin, end) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        results = self._run([(int(experts[i]), x[rows[parts[i]]], mix[parts[i]]) for i in largest_first])
        # In the order of the experts, so that a sum does not depend on who was first.
        for i, result in sorted(zip(largest_first, results, strict=True)):
            out[rows[parts[i]]] += result
        return out, len(experts), len(order)

    def _compute_one(self, x: F32, places: I32, weights: F32) -> tuple[F32, int, int]:
        """Do the same for one row, where all that sorting would take as long as an expert."""
        if self._wide is not None:
            x = widen(x, self._wide)
        chosen = sorted((place, at) for at, place in enumerate(places.tolist()) if place >= 0)
        if not chosen:
            return np.zeros((1, self._width), np.float32), 0, 0
        results = self._run([(place, x, weights[at : at + 1, None]) for place, at in chosen])
        out = results[0]
        for result in results[1:]:
            out += result
        return out, len(chosen), len(chosen)

    def _run(self, work: list[tuple[int, F32, F32]]) -> list[F32]:
        """Compute experts, their rows and weights [n, 1], on all threads."""
        results = [work[0][1]] * len(work)
        left = iter(range(len(work)))

        def take() -> None:
            for index in left:
                expert, x, mix = work[index]
                results[index] = self._sessions[expert].run({"x": x, "mix": mix})[0]

        helpers = [] if self._pool is None else [self._pool.submit(take) for _ in range(self._helpers)]
        take()
        for helper in helpers:
            # One that has not begun has nothing left to do.
            if not helper.cancel():
                helper.result()
        return results


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
        spec: which experts, and how they are computed.
        memory: what was estimated.
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
        spec: BankSpec,
        *,
        memory: MemoryEstimate,
        kernels: Kernels,
        taken: Callable[[str], None],
    ) -> None:
        self.shape = shape
        self.ranges = spec.ranges
        self._memory = memory
        self._max_rows = spec.max_rows
        precision = spec.precision
        runtime = Runtime.of(spec.threads, spec.device)
        # With a shared pool every operator is spread over its threads, so experts run one after another.
        spread = runtime.threads > 1 and not spinning_threads()
        self._pool = ThreadPoolExecutor(runtime.threads - 1, thread_name_prefix="expert") if spread else None
        self._calls = self._rows = self._expert_runs = self._expert_rows = 0
        self._layers: dict[int, _Experts] = {}
        by_layer = experts_by_layer(shape, spec.ranges)
        most = max(sum(hi - lo for lo, hi in held) for held in by_layer.values())
        widths = {"x": shape.n_embd, "y": shape.n_embd, "chosen": most, "mix": most}
        buffers = _Buffers(spec.max_rows, widths)
        for index, held in by_layer.items():
            layer = shape.layers[index]
            types = {suffix: source.tensors[layer.name(suffix)].type for suffix in EXPERT_WEIGHTS}
            if kernels.panels is not None and paneled(types, precision, kernels):
                self._layers[index] = _Panels(
                    source, layer, held, precision, kernels.panels, runtime, buffers
                )
            elif fusible(layer, types, precision, kernels):
                self._layers[index] = _Fused(source, layer, held, precision, runtime, buffers)
            else:
                self._layers[index] = _Single(source, layer, held, precision, runtime, kernels, self._pool)
            for name in shape.expert_tensors(index):
                taken(name)

    def memory(self) -> MemoryEstimate:
        return self._memory

    def compute(self, layer: int, x: F32, ids: I32, weights: F32) -> F32:
        self.check(self._layers, self._max_rows, layer, x, ids, weights)
        experts = self._layers[layer]
        y, runs, rows = experts.compute(np.ascontiguousarray(x), ids, weights)
        self.count(1, len(x), runs, rows)
        return y

    def node(self, g: Graph, layer: int, x: str, ids: str, mix: str) -> tuple[str, str] | None:
        """Add all experts of a layer to a graph of somebody else's.

        Args:
            g: the graph.
            layer: whose experts.
            x: [n, n_embd].
            ids: int32 [n, k], of experts.
            mix: [n, k], their weights.

        Returns:
            The weighted sum; and how many experts were computed and how many rows of all of them, int32 [1, 2], for
            :meth:`count`. None where not all of them are here as panels.
        """
        experts = self._layers[layer]
        if not isinstance(experts, _Panels) or experts.count < experts.n_expert:
            return None
        return experts.node(g, x, ids, mix)

    def count(self, calls: int, rows: int, expert_runs: int, expert_rows: int) -> None:
        """Take note of what was computed in somebody else's graph."""
        self._calls += calls
        self._rows += rows
        self._expert_runs += expert_runs
        self._expert_rows += expert_rows

    def statistics(self) -> BankStatistics:
        """Return what has been done so far."""
        return BankStatistics(self._calls, self._rows, self._expert_runs, self._expert_rows)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._layers.clear()
