"""All experts of a layer by one ``QMoE``, for symmetric types.

The caller's routing goes in as router weights; an expert whose weight is zero is skipped by the operator, so any
subset costs what it needs.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from kvasir_peer.engines import quants
from kvasir_peer.engines.architectures import EXPERT_WEIGHTS, LayerShape
from kvasir_peer.engines.base import F32, I32, Precision
from kvasir_peer.engines.onnx_containers import centred
from kvasir_peer.engines.onnx_experts import (
    KEPT_WIDTHS,
    LOADED_AT_ONCE,
    OAI_ALPHA,
    OAI_LIMIT,
    Buffers,
    Experts,
    expert_biases,
    expert_bytes,
)
from kvasir_peer.engines.onnx_graph import Bound, Graph, Runtime
from kvasir_peer.models.sources import TensorSource


@dataclass(frozen=True, eq=False)
class _Binding:
    """A session of all experts tied to buffers, for one number of rows."""

    x: F32
    chosen: F32
    mix: F32
    y: F32
    run: Bound


class FusedExperts(Experts):
    """The experts of one layer as one session of ``QMoE``.

    Args:
        source: the weights.
        layer: the layer.
        held: ranges of its experts that are here.
        precision: ``exact`` keeps activations in float32.
        runtime: threads and provider.
        buffers: of the bank, with ``x``, ``y``, ``chosen`` and ``mix``.
    """

    def __init__(
        self,
        source: TensorSource,
        layer: LayerShape,
        held: list[tuple[int, int]],
        precision: Precision,
        runtime: Runtime,
        buffers: Buffers,
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
        limit = {"swiglu_limit": OAI_LIMIT} if oai else {}
        y = g.op(
            "QMoE",
            *inputs,
            microsoft=True,
            k=min(moe.n_used, self.count),
            activation_type="swiglu",
            activation_alpha=OAI_ALPHA if oai else 1.0,
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
        self._bound: OrderedDict[int, _Binding] = OrderedDict()

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
            for lo in range(first, end, LOADED_AT_ONCE):
                hi = min(lo + LOADED_AT_ONCE, end)
                parts = [expert_bytes(source, layer, suffix, lo, hi) for suffix in suffixes]
                raw = parts[0] if len(parts) == 1 else np.stack(parts, axis=2)
                c = centred(quants.unpack(raw, info.type, (hi - lo, rows, columns)))
                packed[at : at + hi - lo] = c.packed.reshape(hi - lo, rows, -1)
                scales[at : at + hi - lo] = c.scales.reshape(hi - lo, rows, -1)
                found = [
                    expert_biases(source, layer, s.replace(".weight", ".bias"), lo, hi) for s in suffixes
                ]
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
            if len(self._bound) > KEPT_WIDTHS:
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

    def _bind(self, n: int) -> _Binding:
        """Tie the session to buffers for n rows."""
        x, y = (self._buffers.take(name, n, self._width) for name in ("x", "y"))
        chosen, mix = (self._buffers.take(name, n, self.count) for name in ("chosen", "mix"))
        run = self._session.bind({"x": x, "chosen": chosen, "mix": mix}, {"y": y})
        return _Binding(x, chosen, mix, y, run)
