"""Attention over the KV cache, one run of rows at a time.

``GroupQueryAttention`` takes one sequence when there is a past and more than one new row, and any contiguous run
of slots when each has one new row. So the rows of a pass are cut into such runs (:func:`plan`); each is one call on
a view of the cache, which is read and written in place. There are no weights here, so layers that are alike share
one session.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.engines.architectures import AttentionShape
from kvasir_peer.engines.base import Rows
from kvasir_peer.engines.onnx_graph import Bound, Graph, Runtime, Session
from kvasir_peer.engines.onnx_parts import Heads
from kvasir_peer.engines.rope import RopeTable

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Array = NDArray[Any]

# Most rows of one slot in one call: bounds the scratch memory, which grows with it.
CHUNK_ROWS = 256
# Heads are as wide as a multiple of this in the operator.
_HEAD_STEP = 16
# Runs whose bindings are kept; each costs a few kilobytes per layer, making one anew some 10 us per layer.
_KEPT_RUNS = 128


@dataclass(frozen=True)
class Run:
    """Rows that are one call.

    Attributes:
        begin: first row.
        n_slots: slots, from ``slot`` on.
        n_rows: rows of each slot; more than one only where ``n_slots`` is 1.
        slot: first slot.
    """

    begin: int
    n_slots: int
    n_rows: int
    slot: int

    @property
    def end(self) -> int:
        """One past the last row."""
        return self.begin + self.n_slots * self.n_rows


def plan(rows: Rows) -> list[Run]:
    """Cut the rows of a pass into runs: neighbouring slots with one row each, or (a chunk of) one slot."""
    runs: list[Run] = []
    for begin, end in rows.runs():
        slot = int(rows.slots[begin])
        if end - begin == 1:
            last = runs[-1] if runs else None
            if (
                last is not None
                and last.n_rows == 1
                and last.slot + last.n_slots == slot
                and last.end == begin
            ):
                runs[-1] = Run(last.begin, last.n_slots + 1, 1, last.slot)
            else:
                runs.append(Run(begin, 1, 1, slot))
            continue
        for at in range(begin, end, CHUNK_ROWS):
            runs.append(Run(at, 1, min(CHUNK_ROWS, end - at), slot))
    return runs


def head_width(heads: Heads) -> int:
    """Return the width of a head in the cache: the operator takes one for keys and values, a multiple of 16."""
    return -(-max(heads.key, heads.value) // _HEAD_STEP) * _HEAD_STEP


def attention_graph(shape: AttentionShape, heads: Heads, cos: F32, sin: F32, sinks: bool) -> Graph:
    """Return the graph of one attention.

    Args:
        shape: of the layer.
        heads: how queries, keys and values lie.
        cos: float32 [context, dimensions/2].
        sin: as ``cos``.
        sinks: whether each head has a logit that takes part in the softmax and adds nothing.
    """
    g = Graph()
    wide = head_width(heads)
    q, k, v = _queries_keys_values(g, shape, heads, cos, sin)
    cache: list[str | int] = ["slots", heads.n_head_kv, "context", wide]
    g.input("past_k", cache)
    g.input("past_v", cache)
    g.input("last", ["slots"], np.int32)
    g.input("total", [], np.int32)
    inputs = [q, k, v, "past_k", "past_v", "last", "total"]
    fused = rotates_inside(shape)
    inputs += [g.weight(cos), g.weight(sin)] if fused else ["", ""]
    if sinks:
        inputs += ["", "", g.input("sinks", [heads.n_head])]
    attended = g.fresh("attended")
    g.raw(
        "GroupQueryAttention",
        inputs,
        [attended, "present_k", "present_v"],
        microsoft=True,
        num_heads=heads.n_head,
        kv_num_heads=heads.n_head_kv,
        scale=shape.scale,
        softcap=shape.softcap,
        local_window_size=shape.window or -1,
        do_rotary=int(fused),
        rotary_interleaved=int(fused and shape.rope.style == "adjacent"),
    )
    attended = _narrow(g, attended, heads.n_head, wide, heads.value)
    g.output(attended, "attention", ["slots", "rows", heads.attended])
    g.output("present_k", "present_k", cache)
    g.output("present_v", "present_v", cache)
    return g


def rotates_inside(shape: AttentionShape) -> bool:
    """Whether the operator can apply RoPE itself.

    It takes a number of dimensions that is a multiple of 16, the first of each head.
    """
    return shape.rope.dimensions % _HEAD_STEP == 0 and shape.mla is None


def _queries_keys_values(g: Graph, shape: AttentionShape, heads: Heads, cos: F32, sin: F32) -> list[str]:
    """Declare the inputs; rotate them where the operator does not, and widen heads with zeros where it asks."""
    wide = head_width(heads)
    if heads.packed:
        packed = g.input("qkv", ["slots", "rows", heads.q + heads.k + heads.v])
        if wide == heads.key and rotates_inside(shape):
            return [packed, "", ""]
        sizes = g.constant([heads.q, heads.k, heads.v], np.int64)
        q, k, v = g.ops("Split", 3, packed, sizes, axis=2)
    else:
        q = g.input("q", ["slots", "rows", heads.q])
        k = g.input("k", ["slots", "rows", heads.k])
        v = g.input("v", ["slots", "rows", heads.v]) if shape.mla is None else ""
    if not rotates_inside(shape):
        positions = g.input("positions", ["slots", "rows"], np.int64)
        tables = (positions, g.weight(cos), g.weight(sin))
        q = _rotate(g, q, heads.n_head, heads.key, shape, tables)
        k = _rotate(g, k, heads.n_head_kv, heads.key, shape, tables)
    q = _widen(g, q, heads.n_head, heads.key, wide)
    k = _widen(g, k, heads.n_head_kv, heads.key, wide)
    if shape.mla is not None:
        # Values are the first part of the keys; what comes after it is cut off the result.
        return [q, k, k]
    return [q, k, _widen(g, v, heads.n_head_kv, heads.value, wide)]


def _rotate(
    g: Graph, x: str, count: int, length: int, shape: AttentionShape, tables: tuple[str, str, str]
) -> str:
    """Apply RoPE to the first dimensions of each head, or to the last ones in latent attention."""

    def rotated(part: str) -> str:
        return g.op(
            "RotaryEmbedding",
            part,
            *tables,
            microsoft=True,
            num_heads=count,
            rotary_embedding_dim=shape.rope.dimensions,
            interleaved=int(shape.rope.style == "adjacent"),
        )

    if shape.mla is None:
        return rotated(x)
    sizes = [length - shape.rope.dimensions, shape.rope.dimensions]
    apart = g.op("Reshape", x, g.constant([0, 0, count, length], np.int64))
    latent, position = g.ops("Split", 2, apart, g.constant(sizes, np.int64), axis=3)
    flat = g.op("Reshape", position, g.constant([0, 0, count * sizes[1]], np.int64))
    position = g.op("Reshape", rotated(flat), g.constant([0, 0, count, sizes[1]], np.int64))
    joined = g.op("Concat", latent, position, axis=3)
    return g.op("Reshape", joined, g.constant([0, 0, count * length], np.int64))


def _widen(g: Graph, x: str, count: int, length: int, wide: int) -> str:
    if length == wide:
        return x
    apart = g.op("Reshape", x, g.constant([0, 0, count, length], np.int64))
    padded = g.op("Pad", apart, g.constant([0, 0, 0, 0, 0, 0, 0, wide - length], np.int64))
    return g.op("Reshape", padded, g.constant([0, 0, count * wide], np.int64))


def _narrow(g: Graph, x: str, count: int, wide: int, length: int) -> str:
    if length == wide:
        return x
    apart = g.op("Reshape", x, g.constant([0, 0, count, wide], np.int64))
    begin, end, axis = (g.constant([value], np.int64) for value in (0, length, 3))
    return g.op(
        "Reshape", g.op("Slice", apart, begin, end, axis), g.constant([0, 0, count * length], np.int64)
    )


@dataclass(eq=False)
class _Kept:
    """Bindings of one run, for all layers."""

    last: I32
    total: I32
    positions: NDArray[np.int64]
    bound: list[Bound]


@dataclass(eq=False)
class _Layer:
    session: Session
    heads: Heads
    keys: F32
    values: F32
    sinks: F32 | None
    positions: bool


class Attentions:
    """The attention of each layer of a stack, and its cache.

    Args:
        n_slots: slots of the cache.
        context: positions of a slot.
        max_rows: most rows of a pass.
        runtime: threads and provider.
    """

    def __init__(self, n_slots: int, context: int, max_rows: int, runtime: Runtime) -> None:
        self._n_slots = n_slots
        self._context = context
        self._max_rows = max_rows
        self._runtime = runtime
        self._sessions: dict[tuple[AttentionShape, Heads, bool], Session] = {}
        self._layers: list[_Layer] = []
        self._kept: OrderedDict[Run, _Kept] = OrderedDict()
        self._buffers: dict[str, F32] = {}
        self.calls = 0

    def add(self, shape: AttentionShape, heads: Heads, table: RopeTable, sinks: F32 | None) -> None:
        """Add the next layer."""
        key = (shape, heads, sinks is not None)
        if key not in self._sessions:
            cos, sin = table(np.arange(self._context, dtype=np.int32))
            self._sessions[key] = attention_graph(shape, heads, cos, sin, sinks is not None).session(
                self._runtime
            )
        cache = (self._n_slots, heads.n_head_kv, self._context, head_width(heads))
        keys = np.zeros(cache, np.float32)
        self._layers.append(
            _Layer(
                self._sessions[key],
                heads,
                keys,
                # Latent attention writes the same to both, so one cache does.
                keys if shape.mla is not None else np.zeros(cache, np.float32),
                sinks,
                not rotates_inside(shape),
            )
        )

    def use(self, buffers: dict[str, F32]) -> None:
        """Take queries, keys and values from these flat arrays, and write to ``attention``."""
        self._buffers = buffers

    def prepare(self, rows: Rows) -> list[_Kept]:
        """Return what :meth:`layer` runs for these rows."""
        prepared = []
        for run in plan(rows):
            kept = self._kept.get(run)
            if kept is None:
                kept = self._kept[run] = self._bind(run)
                if len(self._kept) > _KEPT_RUNS:
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end(run)
            positions = rows.positions[run.begin : run.end]
            kept.positions[...] = positions.reshape(kept.positions.shape)
            if run.n_rows == 1:
                kept.last[:] = positions
            else:
                kept.last[0] = positions[-1]
            kept.total[...] = positions.max() + 1
            prepared.append(kept)
        return prepared

    def layer(self, index: int, prepared: list[_Kept]) -> None:
        """Run attention of a layer (counted from the stack's first) over the prepared rows."""
        for kept in prepared:
            kept.bound[index]()
        self.calls += len(prepared)

    def _bind(self, run: Run) -> _Kept:
        last = np.zeros(run.n_slots, np.int32)
        total = np.zeros((), np.int32)
        positions = np.zeros((run.n_slots, run.n_rows), np.int64)

        def view(name: str, width: int) -> F32:
            flat = self._buffers[name][run.begin * width : run.end * width]
            return flat.reshape(run.n_slots, run.n_rows, width)

        bound = []
        for layer in self._layers:
            heads = layer.heads
            inputs: dict[str, Array]
            if heads.packed:
                inputs = {"qkv": view("qkv", heads.q + heads.k + heads.v)}
            else:
                inputs = {"q": view("q", heads.q), "k": view("k", heads.k)}
                if heads.v:
                    inputs["v"] = view("v", heads.v)
            keys = layer.keys[run.slot : run.slot + run.n_slots]
            values = layer.values[run.slot : run.slot + run.n_slots]
            inputs.update(past_k=keys, past_v=values)
            if layer.sinks is not None:
                inputs["sinks"] = layer.sinks
            outputs = {
                "attention": view("attention", heads.attended),
                "present_k": keys,
                "present_v": values,
            }
            if layer.positions:
                inputs["positions"] = positions
            bound.append(layer.session.bind({**inputs, "last": last, "total": total}, outputs))
        return _Kept(last, total, positions, bound)

    def close(self) -> None:
        """Give the cache back."""
        self._kept.clear()
        self._layers.clear()
        self._sessions.clear()
        self._buffers = {}
