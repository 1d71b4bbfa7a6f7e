"""A stack's whole pass as one graph, for passes in which nobody else computes experts.

Cut into parts (:mod:`kvasir_peer.engines.onnx_parts`), a layer takes two to five calls from Python, and at each of
them threads that computed go to sleep. With the C kernels attention takes all rows at once and weights are read where
they lie, so the same layers can be one more graph, which costs no memory for weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.engines.architectures import LayerShape, ModelShape
from kvasir_peer.engines.base import Rows, StackSpec
from kvasir_peer.engines.onnx_bank import OnnxBank
from kvasir_peer.engines.onnx_graph import Bound, Graph, Runtime
from kvasir_peer.engines.onnx_parts import Parts
from kvasir_peer.engines.onnx_row_attention import RowAttentions
from kvasir_peer.errors import EngineError

F32 = NDArray[np.float32]

# Numbers of rows whose bindings are kept; each costs a few kilobytes per layer.
_KEPT_WIDTHS = 32


@dataclass(eq=False)
class _Binding:
    """The session tied to buffers, for one number of rows and of rows that want an output."""

    wanted: NDArray[np.int64]
    run: Bound


class WholePass:
    """The graph of all layers of a stack.

    Args:
        maker: of the stack's parts; its weights are shared.
        shape: the model.
        spec: of the stack.
        attentions: of its layers.
        bank: its experts, or None where it has none. All of them must be panels.
        runtime: threads and provider.
        embeds: whether it looks tokens up itself.
    """

    def __init__(
        self,
        maker: Parts,
        shape: ModelShape,
        spec: StackSpec,
        attentions: RowAttentions,
        bank: OnnxBank | None,
        runtime: Runtime,
        *,
        embeds: bool,
    ) -> None:
        self.embeds = embeds
        self._attentions = attentions
        self._bank = bank
        layers = shape.layers[spec.first : spec.end]
        self._tail = spec.end == shape.n_layer
        self._width = shape.n_vocab if self._tail else shape.n_embd
        self._output = "logits" if self._tail else "next"
        self._routed = [layer for layer in layers if layer.moe is not None]
        counts: list[str] = []

        def attend(g: Graph, index: int, projected: Sequence[str]) -> str:
            return attentions.node(g, index, projected, "slots", "positions")

        def experts(g: Graph, layer: LayerShape, x: str, ids: str, weights: str) -> str:
            found = None if bank is None else bank.node(g, layer.index, x, ids, weights)
            if found is None:
                raise EngineError(f"the experts of layer {layer.index} can't be part of a larger graph")
            counts.append(found[1])
            return found[0]

        part = maker.whole(layers, embeds, self._tail, attend, experts)
        g = part.graph
        for name in ("slots", "positions"):
            g.input(name, ["n", 1], np.int32)
        for layer, count in zip(self._routed, counts, strict=True):
            g.output(count, f"done{layer.index}", [1, 2], np.int32)
        self._session = g.session(runtime)
        self._counts = np.zeros((len(counts), 1, 2), np.int32)
        self._hidden = np.zeros((0 if embeds else spec.max_rows, shape.n_embd), np.float32)
        self._tokens = np.zeros((spec.max_rows, 1), np.int32)
        self._wanted = np.zeros(spec.max_rows, np.int64)
        self._bound: OrderedDict[tuple[int, int], _Binding] = OrderedDict()

    def hidden(self, n: int) -> F32:
        """Return where the hidden states of a pass of n rows go, [n, n_embd], unless it looks tokens up itself."""
        return self._hidden[:n]

    def run(self, rows: Rows) -> F32:
        """Run all layers on what stands in :meth:`hidden`.

        Returns:
            Hidden states of all rows, or logits of those that want an output.
        """
        n = len(rows)
        wanted = np.flatnonzero(rows.wants_output) if self._tail else None
        m = n if wanted is None else len(wanted)
        result = np.empty((m, self._width), np.float32)
        # The graph has no way to end earlier: where nobody wants an output, one is computed and dropped.
        into = result if m else np.empty((1, self._width), np.float32)
        bound = self._bind(n, len(into))
        if wanted is not None:
            bound.wanted[: max(m, 1)] = wanted if m else 0
        self._attentions.fill(rows)
        self._tokens[:n, 0] = rows.tokens
        bound.run.output(self._output, into)
        bound.run()
        self._attentions.calls += self._attentions.count
        if self._bank is not None and self._routed:
            runs, expert_rows = self._counts.sum(axis=(0, 1)).tolist()
            self._bank.count(len(self._routed), self._bank_rows(n, len(into)), runs, expert_rows)
        return result

    def _bank_rows(self, n: int, last: int) -> int:
        """Return the rows that all layers with experts have computed: the last one only those that are wanted."""
        return n * (len(self._routed) - 1) + last if self._tail else n * len(self._routed)

    def _bind(self, n: int, m: int) -> _Binding:
        found = self._bound.get((n, m))
        if found is None:
            wanted = self._wanted[:m]
            inputs: dict[str, NDArray[Any]] = {
                "slots": self._attentions.slots[:n],
                "positions": self._attentions.positions[:n],
            }
            if self.embeds:
                inputs["tokens"] = self._tokens[:n]
            else:
                inputs["hidden"] = self._hidden[:n]
            if self._tail:
                inputs["wanted"] = wanted
            outputs = {f"done{layer.index}": self._counts[i] for i, layer in enumerate(self._routed)}
            found = self._bound[n, m] = _Binding(wanted, self._session.bind(inputs, outputs))
            if len(self._bound) > _KEPT_WIDTHS:
                self._bound.popitem(last=False)
        self._bound.move_to_end((n, m))
        return found

    def close(self) -> None:
        """Let go of the session."""
        self._bound.clear()
