"""Each expert of a layer as a small graph, for asymmetric types (whose offsets ``QMoE`` can't add) and for floats.

Each graph computes on one thread and the experts of a pass are spread over threads, which saves handing every
operator from thread to thread.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from kvasir_peer.engines import quants
from kvasir_peer.engines.architectures import EXPERT_WEIGHTS, LayerShape
from kvasir_peer.engines.base import F32, I32, Precision
from kvasir_peer.engines.onnx_containers import Kernels, container, extra_columns, widen
from kvasir_peer.engines.onnx_experts import (
    LOADED_AT_ONCE,
    OAI_ALPHA,
    OAI_LIMIT,
    Experts,
    expert_biases,
)
from kvasir_peer.engines.onnx_graph import Graph, Runtime, Session
from kvasir_peer.engines.onnx_linear import Linears, Matrix
from kvasir_peer.models.sources import TensorSource


class SingleExperts(Experts):
    """The experts of one layer as a session each.

    Args:
        source: the weights.
        layer: the layer.
        held: ranges of its experts that are here.
        precision: ``exact`` keeps activations in float32.
        runtime: threads and provider.
        kernels: what onnxruntime can do here.
        pool: of threads that compute beside the one that asks, or None.
    """

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
                    expert_biases(source, layer, suffix.replace(".weight", ".bias"), expert, expert + 1)
                    for suffix in EXPERT_WEIGHTS
                )
            ]
            graph = _expert_graph(
                matrices, biases, layer.activation, precision, kernels, self._wide is not None
            )
            return graph.session(one_thread)

        # Experts are loaded side by side, each taken apart by one thread.
        with ThreadPoolExecutor(min(runtime.threads, LOADED_AT_ONCE)) as loaders:
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
        limit = g.constant(OAI_LIMIT, np.float32)
        gate = g.op("QuickGelu", g.op("Min", gate, limit), microsoft=True, alpha=OAI_ALPHA)
        up = g.op("Clip", up, g.constant(-OAI_LIMIT, np.float32), limit)
        up = g.op("Add", up, g.constant(1.0, np.float32))
    elif activation == "silu":
        gate = g.op("QuickGelu", gate, microsoft=True, alpha=1.0)
    else:
        gate = g.op("Gelu", gate, approximate="tanh")
    y = linears.one(g.op("Mul", gate, up), matrices[2], biases[2])
    g.output(g.op("Mul", y, mix), "y", ["n", width])
    return g
