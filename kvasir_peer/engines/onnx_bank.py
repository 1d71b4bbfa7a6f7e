"""Banks of experts in onnxruntime.

Three ways, chosen for each layer by its quant types and by what is at hand:

* *panels*, for all block-quantised types, where the C kernels are (:mod:`kvasir_peer.engines.onnx_panel_experts`);
* *fused*, else for symmetric types (:mod:`kvasir_peer.engines.onnx_fused_experts`);
* *single*, for what is left (:mod:`kvasir_peer.engines.onnx_single_experts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kvasir_peer.engines import quants
from kvasir_peer.engines.architectures import EXPERT_WEIGHTS, LayerShape, ModelShape
from kvasir_peer.engines.base import (
    F32,
    I32,
    BankSpec,
    ExpertBank,
    MemoryEstimate,
    Precision,
    experts_by_layer,
)
from kvasir_peer.engines.onnx_containers import Kernels, container
from kvasir_peer.engines.onnx_experts import Buffers, Experts
from kvasir_peer.engines.onnx_fused_experts import FusedExperts
from kvasir_peer.engines.onnx_graph import Graph, Runtime, spinning_threads
from kvasir_peer.engines.onnx_panel_experts import PanelExperts
from kvasir_peer.engines.onnx_single_experts import SingleExperts
from kvasir_peer.models.sources import TensorSource


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
        self._layers: dict[int, Experts] = {}
        by_layer = experts_by_layer(shape, spec.ranges)
        most = max(sum(hi - lo for lo, hi in held) for held in by_layer.values())
        widths = {"x": shape.n_embd, "y": shape.n_embd, "chosen": most, "mix": most}
        buffers = Buffers(spec.max_rows, widths)
        for index, held in by_layer.items():
            layer = shape.layers[index]
            types = {suffix: source.tensors[layer.name(suffix)].type for suffix in EXPERT_WEIGHTS}
            if kernels.panels is not None and paneled(types, precision, kernels):
                self._layers[index] = PanelExperts(
                    source, layer, held, precision, kernels.panels, runtime, buffers
                )
            elif fusible(layer, types, precision, kernels):
                self._layers[index] = FusedExperts(source, layer, held, precision, runtime, buffers)
            else:
                self._layers[index] = SingleExperts(
                    source, layer, held, precision, runtime, kernels, self._pool
                )
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
        if not isinstance(experts, PanelExperts) or experts.count < experts.n_expert:
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
