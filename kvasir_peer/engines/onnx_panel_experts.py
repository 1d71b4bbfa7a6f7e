"""All experts of a layer by one operator of the C kernels (:mod:`kvasir_peer.engines.kernels`).

It takes all block-quantised types, from panels; its node may also stand in a larger graph.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.engines import panels
from kvasir_peer.engines.architectures import EXPERT_WEIGHTS, LayerShape
from kvasir_peer.engines.base import F32, I32, Precision
from kvasir_peer.engines.onnx_experts import (
    KEPT_WIDTHS,
    LOADED_AT_ONCE,
    Buffers,
    Experts,
    expert_biases,
    expert_bytes,
)
from kvasir_peer.engines.onnx_graph import Bound, Graph, Runtime
from kvasir_peer.engines.onnx_linear import forward_node
from kvasir_peer.models.sources import TensorSource


@dataclass(frozen=True, eq=False)
class _Binding:
    """A session of the C kernels tied to buffers, for one number of rows and choices."""

    x: F32
    places: I32
    mix: F32
    y: F32
    done: I32
    run: Bound


class PanelExperts(Experts):
    """The experts of one layer as one session of the C kernels.

    Args:
        source: the weights.
        layer: the layer.
        held: ranges of its experts that are here.
        precision: ``exact`` keeps activations in float32.
        library: of C kernels.
        runtime: threads and provider.
        buffers: of the bank, with ``x`` and ``y``.
    """

    def __init__(
        self,
        source: TensorSource,
        layer: LayerShape,
        held: list[tuple[int, int]],
        precision: Precision,
        library: Path,
        runtime: Runtime,
        buffers: Buffers,
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
        y, done = self.node(g, x, places, mix, first=True)
        g.output(y, "y", ["n", self._columns])
        g.output(done, "done", [1, 2], np.int32)
        self._session = g.session(runtime)
        self._buffers = buffers
        self._bound: OrderedDict[tuple[int, int], _Binding] = OrderedDict()

    def node(self, g: Graph, x: str, places: str, mix: str, *, first: bool = False) -> tuple[str, str]:
        """Add the experts to a graph.

        Args:
            g: the graph.
            x: [n, columns].
            places: int32 [n, k], of experts here; one that is out of range adds nothing.
            mix: [n, k], their weights.
            first: whether nothing before it in the graph uses threads.

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
            first=first,
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
        out = panels.room(self.count * each)
        biases = []
        at = 0
        with ThreadPoolExecutor(threads, thread_name_prefix="pack") as pool:
            for first, end in held:
                for lo in range(first, end, LOADED_AT_ONCE):
                    hi = min(lo + LOADED_AT_ONCE, end)
                    raw = expert_bytes(source, layer, suffix, lo, hi)
                    places = [out[(at + i) * each : (at + i + 1) * each] for i in range(hi - lo)]
                    pack = functools.partial(panels.pack, type_id=info.type, rows=rows, columns=columns)
                    for _ in pool.map(lambda one, to: pack(one, out=to), raw, places):  # noqa: B023
                        pass
                    bias = expert_biases(source, layer, suffix.replace(".weight", ".bias"), lo, hi)
                    if bias is not None:
                        biases.append(bias.reshape(hi - lo, -1))
                    at += hi - lo
        return out, np.concatenate(biases) if biases else None

    def compute(self, x: F32, ids: I32, weights: F32) -> tuple[F32, int, int]:
        bound = self._bound.get(ids.shape)
        if bound is None:
            bound = self._bound[ids.shape] = self._bind(*ids.shape)
            if len(self._bound) > KEPT_WIDTHS:
                self._bound.popitem(last=False)
        self._bound.move_to_end(ids.shape)
        np.take(self._place, ids, out=bound.places)
        np.copyto(bound.mix, weights)
        np.copyto(bound.x, x)
        bound.run()
        experts, rows = bound.done[0].tolist()
        return bound.y.copy(), experts, rows

    def _bind(self, n: int, k: int) -> _Binding:
        """Tie the session to buffers for n rows of k choices."""
        x, y = (self._buffers.take(name, n, self._columns) for name in ("x", "y"))
        places, mix = np.empty((n, k), np.int32), np.empty((n, k), np.float32)
        done = np.zeros((1, 2), np.int32)
        run = self._session.bind({"x": x, "places": places, "mix": mix}, {"y": y, "done": done})
        return _Binding(x, places, mix, y, done, run)
