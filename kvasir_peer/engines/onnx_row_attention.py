"""Attention by the C kernels: all rows of a pass at once, whatever slots and positions they are of.

The cache is theirs too (``kernels/attention.h``): keys in blocks of 16 positions, values position by position, both
float32. There are no weights here, so layers that are alike share one session.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.engines.architectures import AttentionShape, RopeShape
from kvasir_peer.engines.base import Rows
from kvasir_peer.engines.onnx_graph import Bound, Graph, Runtime, Session
from kvasir_peer.engines.onnx_parts import Heads
from kvasir_peer.engines.rope import RopeTable

F32 = NDArray[np.float32]

# Positions of a block of keys, and floats of a vector of values.
_BLOCK = 16
# As in kernels/attention.c: queries that are computed together, most shares of a pass, least of them, and floats of all
# shares' scores.
_QUERIES, _MOST_SHARES, _LEAST_SHARES, _SCORES = 8, 64, 8, 1 << 20
# Numbers of rows whose bindings are kept; each costs a few kilobytes per layer.
_KEPT_WIDTHS = 32


def cache_floats(heads: Heads, context: int) -> tuple[int, int]:
    """Return the floats of a slot in the caches of keys and of values."""
    padded = -(-context // _BLOCK) * _BLOCK * heads.n_head_kv
    values = 0 if heads.latent else -(-heads.value // _BLOCK) * _BLOCK
    return padded * heads.key, padded * values


def scores_bytes(heads: Heads, rows: int, context: int) -> int:
    """Return the most bytes that scores take while a layer attends."""
    pieces = heads.n_head_kv * -(-rows * heads.n_head // heads.n_head_kv // _QUERIES)
    shares = min(pieces, _MOST_SHARES, max(_LEAST_SHARES, _SCORES // (_QUERIES * context)))
    return 4 * _QUERIES * context * shares


@dataclass(eq=False)
class _Layer:
    shape: AttentionShape
    heads: Heads
    keys: F32
    values: F32
    cos: F32
    sin: F32
    sinks: F32 | None


class RowAttentions:
    """The attention of each layer of a stack, and its cache.

    Args:
        library: of C kernels.
        n_slots: slots of the cache.
        context: positions of a slot.
        max_rows: most rows of a pass.
        runtime: threads and provider.
    """

    def __init__(self, library: Path, n_slots: int, context: int, max_rows: int, runtime: Runtime) -> None:
        self._library = library
        self._n_slots = n_slots
        self._context = -(-context // _BLOCK) * _BLOCK
        self._runtime = runtime
        self._layers: list[_Layer] = []
        self._rotations: dict[RopeShape, tuple[F32, F32]] = {}
        self._sessions: dict[tuple[AttentionShape, Heads, bool], Session] = {}
        self._buffers: dict[str, F32] = {}
        self._bound: OrderedDict[int, list[Bound]] = OrderedDict()
        self.slots = np.zeros((max_rows, 1), np.int32)
        self.positions = np.zeros((max_rows, 1), np.int32)
        self.calls = 0

    def add(self, shape: AttentionShape, heads: Heads, table: RopeTable, sinks: F32 | None) -> None:
        """Add the next layer."""
        if shape.rope not in self._rotations:
            tables = table(np.arange(self._context, dtype=np.int32))
            self._rotations[shape.rope] = (np.ascontiguousarray(tables[0]), np.ascontiguousarray(tables[1]))
        keys, values = cache_floats(heads, self._context)
        self._layers.append(
            _Layer(
                shape,
                heads,
                np.zeros(self._n_slots * keys, np.float32),
                np.zeros(self._n_slots * values, np.float32),
                *self._rotations[shape.rope],
                sinks,
            )
        )

    @property
    def count(self) -> int:
        """Layers."""
        return len(self._layers)

    def node(self, g: Graph, index: int, projected: Sequence[str], slots: str, positions: str) -> str:
        """Add attention of a layer (counted from the stack's first): [n, heads * value].

        Args:
            g: the graph.
            index: of the layer.
            projected: ``qkv`` side by side; or ``q`` and ``k``, and ``v`` unless attention is latent.
            slots: int32 [n, 1].
            positions: int32 [n, 1].
        """
        layer = self._layers[index]
        heads = layer.heads
        inputs = [*projected, *[""] * (3 - len(projected)), slots, positions, g.resident(layer.keys)]
        inputs.append("" if heads.latent else g.resident(layer.values))
        inputs += [g.resident(layer.cos), g.resident(layer.sin)]
        if layer.sinks is not None:
            inputs.append(g.resident(layer.sinks))
        return self._node(g, layer.shape, heads, inputs)

    def _node(self, g: Graph, shape: AttentionShape, heads: Heads, inputs: Sequence[str]) -> str:
        rotated = shape.rope.dimensions
        return g.own(
            self._library,
            "Attention",
            *inputs,
            heads=heads.n_head,
            kv_heads=heads.n_head_kv,
            key=heads.key,
            value=heads.value,
            slots=self._n_slots,
            context=self._context,
            rotated=rotated,
            # In latent attention what is rotated stands last.
            **{"from": heads.key - rotated if heads.latent else 0},
            adjacent=int(shape.rope.style == "adjacent"),
            latent=int(heads.latent),
            window=shape.window,
            scale=float(shape.scale),
            cap=float(shape.softcap),
        )

    # ------------------------------------------------------------------------------------- one layer at a time

    def use(self, buffers: dict[str, F32]) -> None:
        """Take queries, keys and values from these flat arrays, and write to ``attention``."""
        self._buffers = buffers

    def fill(self, rows: Rows) -> None:
        """Note slots and positions of the rows of a pass."""
        n = len(rows)
        self.slots[:n, 0] = rows.slots
        self.positions[:n, 0] = rows.positions

    def prepare(self, rows: Rows) -> list[Bound]:
        """Return what :meth:`layer` runs for these rows."""
        self.fill(rows)
        n = len(rows)
        bound = self._bound.get(n)
        if bound is None:
            bound = self._bound[n] = [self._bind(layer, n) for layer in self._layers]
            if len(self._bound) > _KEPT_WIDTHS:
                self._bound.popitem(last=False)
        self._bound.move_to_end(n)
        return bound

    def layer(self, index: int, prepared: list[Bound]) -> None:
        """Run attention of a layer (counted from the stack's first) over the prepared rows."""
        prepared[index]()
        self.calls += 1

    def _session(self, layer: _Layer) -> Session:
        """Return the session of layers that are like this one, which takes their caches as inputs."""
        key = (layer.shape, layer.heads, layer.sinks is not None)
        if key not in self._sessions:
            heads = layer.heads
            g = Graph()
            widths = {"qkv": heads.q + heads.k + heads.v} if heads.packed else {"q": heads.q, "k": heads.k}
            if not heads.packed and not heads.latent:
                widths["v"] = heads.v
            inputs = [g.input(name, ["n", width]) for name, width in widths.items()]
            inputs += [""] * (3 - len(inputs))
            inputs += [g.input(name, ["n", 1], np.int32) for name in ("slots", "positions")]
            inputs.append(g.input("keys", [layer.keys.size]))
            inputs.append("" if heads.latent else g.input("values", [layer.values.size]))
            inputs += [g.resident(layer.cos), g.resident(layer.sin)]
            if layer.sinks is not None:
                inputs.append(g.input("sinks", [layer.sinks.size]))
            g.output(self._node(g, layer.shape, heads, inputs), "attention", ["n", heads.attended])
            self._sessions[key] = g.session(self._runtime)
        return self._sessions[key]

    def _bind(self, layer: _Layer, n: int) -> Bound:
        heads = layer.heads

        def view(name: str, width: int) -> F32:
            return self._buffers[name][: n * width].reshape(n, width)

        inputs = {"slots": self.slots[:n], "positions": self.positions[:n], "keys": layer.keys}
        if heads.packed:
            inputs["qkv"] = view("qkv", heads.q + heads.k + heads.v)
        else:
            inputs |= {"q": view("q", heads.q), "k": view("k", heads.k)}
        if not heads.latent:
            inputs["values"] = layer.values
            if not heads.packed:
                inputs["v"] = view("v", heads.v)
        if layer.sinks is not None:
            inputs["sinks"] = layer.sinks
        return self._session(layer).bind(inputs, {"attention": view("attention", heads.attended)})

    def close(self) -> None:
        """Give the cache back."""
        self._bound.clear()
        self._sessions.clear()
        self._layers.clear()
        self._rotations.clear()
        self._buffers = {}
