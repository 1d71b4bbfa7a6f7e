"""The graphs between two attentions.

Attention has no weights, and its rows fall into runs of different slots and lengths; everything between two
attentions has weights and takes all rows alike. So a stack is cut there: *parts* hold the linears, each once, and
run once per pass for all rows; attention runs once for each run of rows, on the cache. Layers with routed experts
are cut once more, at the experts, so that those may be computed by somebody else.

For layers ``a .. b-1``::

    hidden -> [norm, q/k/v of a] -> attention a -> [output of a, feed-forward of a, norm, q/k/v of a+1] -> ...

All values are two-dimensional, [n, width], n rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvasir_peer.engines import quants
from kvasir_peer.engines.architectures import LayerShape, MlaShape, ModelShape
from kvasir_peer.engines.base import Precision
from kvasir_peer.engines.onnx_containers import Kernels, container
from kvasir_peer.engines.onnx_graph import Graph
from kvasir_peer.engines.onnx_linear import Laid, Linears, Matrix
from kvasir_peer.models.sources import TensorSource

if TYPE_CHECKING:
    from kvasir_peer.models.gguf import TensorInfo

F32 = NDArray[np.float32]

# Matrices of latent attention that are used head by head, as float32: MatMulNBits takes one matrix only.
PER_HEAD_SUFFIXES = ("attn_k_b.weight", "attn_v_b.weight", "attn_kv_b.weight")


# Adds attention to a graph: from the layer's index and its queries, keys and values, to [n, attended].
Attend = Callable[[Graph, int, Sequence[str]], str]
# Adds routed experts to a graph: from the layer, x, ids and weights, to their weighted sum.
Experts = Callable[[Graph, LayerShape, str, str, str], str]


@dataclass(frozen=True)
class Port:
    """A value that crosses the border of a part.

    Attributes:
        name: in the graph.
        width: values per row.
        dtype: of a value.
    """

    name: str
    width: int
    dtype: DTypeLike = np.float32


@dataclass(eq=False)
class Part:
    """A graph with its borders.

    Attributes:
        graph: its nodes.
        inputs: what it reads.
        outputs: what it writes.
    """

    graph: Graph
    inputs: list[Port] = field(default_factory=list)
    outputs: list[Port] = field(default_factory=list)

    def read(self, name: str, width: int) -> str:
        """Declare an input [n, width]."""
        self.inputs.append(Port(name, width))
        return self.graph.input(name, ["n", width])

    def write(self, value: str, name: str, width: int, dtype: DTypeLike = np.float32) -> None:
        """Make a value an output [n, width]."""
        self.outputs.append(Port(name, width, dtype))
        self.graph.output(value, name, ["n", width], dtype)


@dataclass(frozen=True)
class Heads:
    """How a layer's queries, keys and values lie in the buffers between part and attention.

    Latent attention is computed on the compressed keys: queries are taken to their space, all heads share one key
    head, and its first ``value`` dimensions are the values (DeepSeek V2, section 2.1.2).

    Attributes:
        packed: side by side in one buffer ``qkv``; else in ``q``, ``k`` and ``v``.
        n_head: heads of queries.
        n_head_kv: heads of keys and values.
        key: dimensions of a head of queries or keys.
        value: dimensions of a head of values.
        latent: whether values are part of the keys.
    """

    packed: bool
    n_head: int
    n_head_kv: int
    key: int
    value: int
    latent: bool

    @property
    def q(self) -> int:
        """Width of all queries."""
        return self.n_head * self.key

    @property
    def k(self) -> int:
        """Width of all keys."""
        return self.n_head_kv * self.key

    @property
    def v(self) -> int:
        """Width of all values that come from a buffer."""
        return 0 if self.latent else self.n_head_kv * self.value

    @property
    def attended(self) -> int:
        """Width of what attention gives."""
        return self.n_head * self.value


def heads_of(layer: LayerShape, tensors: Mapping[str, TensorInfo]) -> Heads:
    """Say how a layer's queries, keys and values lie."""
    a = layer.attention
    if a.mla is not None:
        return Heads(False, a.n_head, 1, a.mla.kv_rank + a.mla.rope, a.mla.kv_rank, True)
    types = {tensors[layer.name(f"attn_{stem}.weight")].type for stem in ("q", "k", "v")}
    packed = len(types) == 1 and a.key_length == a.value_length and not layer.has("attn_q_norm.weight")
    return Heads(packed, a.n_head, a.n_head_kv, a.key_length, a.value_length, False)


class Parts:
    """Makes the parts of a stack, one by one, so that raw weights need not all be in memory.

    Args:
        shape: the model.
        source: its weights.
        precision: of the linears.
        kernels: what onnxruntime can do here.
        taken: called with the name of each tensor that was read.
    """

    def __init__(
        self,
        shape: ModelShape,
        source: TensorSource,
        precision: Precision,
        kernels: Kernels,
        taken: Callable[[str], None],
    ) -> None:
        self._shape = shape
        self._source = source
        self._precision = precision
        self._kernels = kernels
        self._taken = taken
        self._laid = Laid()

    # ------------------------------------------------------------------------------------------ weights

    def vector(self, name: str) -> F32:
        """Return a small tensor as float32."""
        info = self._source.tensors[name]
        self._taken(name)
        return quants.dequantize(self._source.read(name), info.type, info.shape)

    def _matrix(self, name: str) -> Matrix:
        info = self._source.tensors[name]
        rows, columns = info.shape
        self._taken(name)
        return Matrix(name, self._source.read(name), info.type, rows, columns)

    def _matrices(self, layer: LayerShape, stems: Iterable[str]) -> tuple[list[Matrix], list[F32 | None]]:
        stems = list(stems)
        matrices = [self._matrix(layer.name(f"{stem}.weight")) for stem in stems]
        biases = [
            self.vector(layer.name(f"{stem}.bias")) if layer.has(f"{stem}.bias") else None for stem in stems
        ]
        return matrices, biases

    def heads(self, layer: LayerShape) -> Heads:
        """Say how the layer's queries, keys and values lie."""
        return heads_of(layer, self._source.tensors)

    # -------------------------------------------------------------------------------------------- parts

    def _part(self) -> tuple[Part, Linears]:
        graph = Graph()
        return Part(graph), Linears(graph, self._precision, self._kernels, laid=self._laid)

    def embeds(self) -> bool:
        """Whether the matrix of tokens is kept as panels, for a graph to look tokens up in."""
        info = self._source.tensors["token_embd.weight"]
        return container(info.type, self._precision, self._kernels) == "panels"

    def embedding(self) -> Graph:
        """From ``tokens``, int32 [n, 1], to ``hidden``, where :meth:`embeds`.

        Where output and embedding are one matrix, it is held once.
        """
        part, linears = self._part()
        part.graph.output(self._embed(part.graph, linears), "hidden", ["n", self._shape.n_embd])
        return part.graph

    def _embed(self, g: Graph, linears: Linears) -> str:
        tokens = g.input("tokens", ["n", 1], np.int32)
        return linears.look_up(tokens, self._matrix("token_embd.weight"), self._shape.embedding_scale)

    def entry(self, layer: LayerShape) -> Part:
        """From the hidden state to the first attention: reads ``hidden``, writes q/k/v."""
        part, linears = self._part()
        hidden = part.read("hidden", self._shape.n_embd)
        normed = self._norm(part.graph, hidden, layer.name("attn_norm.weight"))
        self._write(part, layer, self._project(part.graph, linears, layer, normed))
        return part

    def between(self, layer: LayerShape, following: LayerShape | None, tail: bool) -> list[Part]:
        """From an attention to the next, or to the end of the stack.

        Args:
            layer: whose attention came before.
            following: whose attention comes next, None at the end of the stack.
            tail: whether the stack ends with logits.

        Returns:
            One part; two where the layer has routed experts: the first reads ``attention`` and ``hidden`` and
            writes ``next`` (the hidden state without the experts), ``x``, ``ids`` and ``weights``; the second
            reads ``hidden`` and ``routed``. The last writes ``next`` and q/k/v, or ``next`` at the end of a
            stack, or ``logits`` at the tail.
        """
        part, linears = self._part()
        hidden = part.read("hidden", self._shape.n_embd)
        attended = part.read("attention", self.heads(layer).attended)
        base, x = self._after_attention(part.graph, linears, layer, hidden, attended)
        if layer.moe is None:
            added = self._dense(part.graph, linears, layer, x)
            self._leave(part, linears, base, added, following, tail)
            return [part]
        base, ids, weights = self._route(part.graph, linears, layer, base, x)
        part.write(base, "next", self._shape.n_embd)
        part.write(x, "x", self._shape.n_embd)
        part.write(ids, "ids", layer.moe.n_used, np.int32)
        part.write(weights, "weights", layer.moe.n_used)
        second, linears = self._part()
        hidden = second.read("hidden", self._shape.n_embd)
        routed = second.read("routed", self._shape.n_embd)
        self._leave(second, linears, hidden, self._scaled(second.graph, routed), following, tail)
        return [part, second]

    def whole(
        self, layers: Sequence[LayerShape], embeds: bool, tail: bool, attend: Attend, experts: Experts
    ) -> Part:
        """All layers in one graph, for passes in which nobody else computes experts.

        Args:
            layers: of the stack.
            embeds: whether it begins with tokens, whose matrix is kept as panels.
            tail: whether the stack ends with logits.
            attend: adds the attention of a layer, counted from the first.
            experts: adds the routed experts of a layer.

        Returns:
            A part that reads ``hidden``, or ``tokens``, int32 [n, 1], and at the tail ``wanted``, int64 [m]: rows of
            which there are to be logits. It writes ``next``, or ``logits``, [m, n_vocab].
        """
        part, linears = self._part()
        g = part.graph
        hidden = self._embed(g, linears) if embeds else part.read("hidden", self._shape.n_embd)
        normed = self._norm(g, hidden, layers[0].name("attn_norm.weight"))
        for index, layer in enumerate(layers):
            attended = attend(g, index, self._project(g, linears, layer, normed))
            following = layers[index + 1] if index + 1 < len(layers) else None
            if following is None and tail:
                wanted = g.input("wanted", ["m"], np.int64)
                hidden, attended = (g.op("Gather", x, wanted, axis=0) for x in (hidden, attended))
            base, x = self._after_attention(g, linears, layer, hidden, attended)
            if layer.moe is None:
                added = self._dense(g, linears, layer, x)
            else:
                base, ids, weights = self._route(g, linears, layer, base, x)
                added = self._scaled(g, experts(g, layer, x, ids, weights))
            if following is not None:
                hidden, normed = self._add_norm(g, added, base, following.name("attn_norm.weight"))
        self._leave(part, linears, base, added, None, tail)
        return part

    # -------------------------------------------------------------------------------------------- pieces

    def _norm(self, g: Graph, x: str, name: str) -> str:
        return g.op(
            "SimplifiedLayerNormalization",
            x,
            g.weight(self.vector(name)),
            axis=-1,
            epsilon=self._shape.norm_eps,
            stash_type=1,
        )

    def _add_norm(self, g: Graph, added: str, base: str, name: str) -> tuple[str, str]:
        """Return the sum and its norm."""
        normed, total = g.fresh("normed"), g.fresh("sum")
        g.raw(
            "SkipSimplifiedLayerNormalization",
            [added, base, g.weight(self.vector(name))],
            [normed, "", "", total],
            microsoft=True,
            epsilon=self._shape.norm_eps,
        )
        return total, normed

    def _scaled(self, g: Graph, x: str) -> str:
        scale = self._shape.residual_scale
        return x if scale == 1.0 else g.op("Mul", x, g.constant(scale, np.float32))

    def _write(self, part: Part, layer: LayerShape, projected: Sequence[str]) -> None:
        """Make queries, keys and values outputs."""
        heads = self.heads(layer)
        if heads.packed:
            part.write(projected[0], "qkv", heads.q + heads.k + heads.v)
            return
        for value, name, width in zip(projected, "qkv", (heads.q, heads.k, heads.v), strict=False):
            part.write(value, name, width)

    def _project(self, g: Graph, linears: Linears, layer: LayerShape, x: str) -> list[str]:
        """Add the projections to queries, keys and values: one value if they are packed, two if they are latent."""
        heads = self.heads(layer)
        if layer.attention.mla is not None:
            return self._project_latent(g, linears, layer, layer.attention.mla, x)
        matrices, biases = self._matrices(layer, ("attn_q", "attn_k", "attn_v"))
        if heads.packed:
            return [linears.packed(x, matrices, biases)]
        q, k, v = linears.each(x, matrices, biases)
        if layer.has("attn_q_norm.weight"):
            q = self._head_norm(g, q, layer, "attn_q_norm.weight", layer.attention.n_head)
            k = self._head_norm(g, k, layer, "attn_k_norm.weight", layer.attention.n_head_kv)
        return [q, k, v]

    def _project_latent(
        self, g: Graph, linears: Linears, layer: LayerShape, mla: MlaShape, x: str
    ) -> list[str]:
        """Add the projections of latent attention: queries in the space of the compressed keys, and these."""
        heads = self.heads(layer)
        name = layer.name
        if mla.q_rank:
            compressed = linears.one(x, self._matrix(name("attn_q_a.weight")))
            compressed = self._norm(g, compressed, name("attn_q_a_norm.weight"))
            q = linears.one(compressed, self._matrix(name("attn_q_b.weight")))
        else:
            q = linears.one(x, self._matrix(name("attn_q.weight")))
        apart = g.op("Reshape", q, g.constant([0, heads.n_head, mla.nope + mla.rope], np.int64))
        nope, rope = g.ops("Split", 2, apart, g.constant([mla.nope, mla.rope], np.int64), axis=2)
        to_latent, _ = self._latent_weights(layer, mla)
        latent = self._per_head(g, nope, to_latent)
        joined = g.op("Concat", latent, rope, axis=2)
        queries = g.op("Reshape", joined, g.constant([0, heads.q], np.int64))
        both = linears.one(x, self._matrix(name("attn_kv_a_mqa.weight")))
        latent, rope = g.ops("Split", 2, both, g.constant([mla.kv_rank, mla.rope], np.int64), axis=1)
        latent = self._norm(g, latent, name("attn_kv_a_norm.weight"))
        return [queries, g.op("Concat", latent, rope, axis=1)]

    @staticmethod
    def _per_head(g: Graph, x: str, weights: F32) -> str:
        """Multiply each head by a matrix of its own: [n, heads, a] by [heads, a, b] to [n, heads, b]."""
        by_head = g.op("Transpose", x, perm=[1, 0, 2])
        return g.op("Transpose", g.op("MatMul", by_head, g.weight(weights)), perm=[1, 0, 2])

    def _latent_weights(self, layer: LayerShape, mla: MlaShape) -> tuple[F32, F32]:
        """Return the matrices from queries to latent keys [heads, nope, kv_rank], and from latent values to
        values [heads, kv_rank, value]."""
        if mla.split:
            keys = self.vector(layer.name("attn_k_b.weight"))
            values = self.vector(layer.name("attn_v_b.weight"))
            return keys.transpose(0, 2, 1), values.transpose(0, 2, 1)
        both = self.vector(layer.name("attn_kv_b.weight"))
        both = both.reshape(layer.attention.n_head, mla.nope + mla.value, mla.kv_rank)
        return both[:, : mla.nope], both[:, mla.nope :].transpose(0, 2, 1)

    def _head_norm(self, g: Graph, x: str, layer: LayerShape, suffix: str, n_head: int) -> str:
        """Norm queries or keys, over each head or over the whole projection, as the weight's length says."""
        length = layer.attention.key_length
        if self._source.tensors[layer.name(suffix)].shape[0] != length or n_head == 1:
            return self._norm(g, x, layer.name(suffix))
        apart = g.op("Reshape", x, g.constant([0, n_head, length], np.int64))
        normed = self._norm(g, apart, layer.name(suffix))
        return g.op("Reshape", normed, g.constant([0, n_head * length], np.int64))

    def _after_attention(
        self, g: Graph, linears: Linears, layer: LayerShape, hidden: str, attended: str
    ) -> tuple[str, str]:
        """Return the hidden state with attention added, and its norm for the feed-forward part."""
        heads = self.heads(layer)
        mla = layer.attention.mla
        if mla is not None:
            apart = g.op("Reshape", attended, g.constant([0, heads.n_head, mla.kv_rank], np.int64))
            _, to_values = self._latent_weights(layer, mla)
            flat = g.constant([0, heads.n_head * mla.value], np.int64)
            attended = g.op("Reshape", self._per_head(g, apart, to_values), flat)
        matrices, biases = self._matrices(layer, ("attn_output",))
        added = linears.one(attended, matrices[0], biases[0])
        if layer.attn_post_norm:
            added = self._norm(g, added, layer.name(layer.attn_post_norm))
        return self._add_norm(g, self._scaled(g, added), hidden, layer.name(layer.ffn_norm))

    def _gated(self, g: Graph, gate: str, up: str, activation: str) -> str:
        if activation == "silu":
            # With alpha 1, x * sigmoid(alpha * x) is SiLU in one operator.
            return g.op("Mul", g.op("QuickGelu", gate, microsoft=True, alpha=1.0), up)
        return g.op("Mul", g.op("Gelu", gate, approximate="tanh"), up)

    def _mlp(self, g: Graph, linears: Linears, layer: LayerShape, x: str, stems: Sequence[str]) -> str:
        """Add gate, up and down, named by their stems."""
        matrices, biases = self._matrices(layer, stems)
        whole = linears.feed_forward(x, matrices, biases, layer.activation)
        if whole is not None:
            return whole
        gate, up = linears.each(x, matrices[:2], biases[:2])
        return linears.one(self._gated(g, gate, up, layer.activation), matrices[2], biases[2])

    def _dense(self, g: Graph, linears: Linears, layer: LayerShape, x: str) -> str:
        """Return what a dense feed-forward part adds to the hidden state."""
        added = self._mlp(g, linears, layer, x, ("ffn_gate", "ffn_up", "ffn_down"))
        if layer.ffn_post_norm:
            added = self._norm(g, added, layer.name(layer.ffn_post_norm))
        return self._scaled(g, added)

    def _leave(
        self,
        part: Part,
        linears: Linears,
        base: str,
        added: str,
        following: LayerShape | None,
        tail: bool,
    ) -> None:
        """End a part: add to the hidden state and go on to the next attention, or out of the stack."""
        g = part.graph
        if following is not None:
            total, normed = self._add_norm(g, added, base, following.name("attn_norm.weight"))
            self._write(part, following, self._project(g, linears, following, normed))
            part.write(total, "next", self._shape.n_embd)
        elif tail:
            _, normed = self._add_norm(g, added, base, "output_norm.weight")
            part.write(self._logits(g, linears, normed), "logits", self._shape.n_vocab)
        else:
            part.write(g.op("Add", added, base), "next", self._shape.n_embd)

    def _logits(self, g: Graph, linears: Linears, x: str) -> str:
        shape = self._shape
        bias = self.vector("output.bias") if shape.has("output.bias") else None
        logits = linears.one(x, self._matrix(shape.output_name), bias)
        if shape.logit_scale != 1.0:
            logits = g.op("Mul", logits, g.constant(shape.logit_scale, np.float32))
        if shape.logit_softcap:
            cap = g.constant(shape.logit_softcap, np.float32)
            logits = g.op("Mul", g.op("Tanh", g.op("Div", logits, cap)), cap)
        return logits

    # -------------------------------------------------------------------------------------------- experts

    def _route(
        self, g: Graph, linears: Linears, layer: LayerShape, base: str, x: str
    ) -> tuple[str, str, str]:
        """Add router and shared expert; return what the experts are added to, their ids (int32) and weights."""
        moe = layer.moe
        assert moe is not None
        matrices, biases = self._matrices(layer, ("ffn_gate_inp",))
        ids, weights = self._choose(g, layer, linears.one(x, matrices[0], biases[0]))
        if moe.shared_width:
            base = g.op("Add", base, self._scaled(g, self._shared(g, linears, layer, x)))
        return base, g.op("Cast", ids, to=6), weights

    def _shared(self, g: Graph, linears: Linears, layer: LayerShape, x: str) -> str:
        out = self._mlp(g, linears, layer, x, ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"))
        name = layer.name("ffn_gate_inp_shexp.weight")
        if layer.has("ffn_gate_inp_shexp.weight"):
            gate = g.op("MatMul", x, g.weight(self.vector(name).reshape(-1, 1)))
            out = g.op("Mul", out, g.op("Sigmoid", gate))
        return out

    def _choose(self, g: Graph, layer: LayerShape, logits: str) -> tuple[str, str]:
        """Return the chosen experts, int64 [n, k], and their weights, [n, k]."""
        moe = layer.moe
        assert moe is not None
        scores = {"softmax": "Softmax", "sigmoid": "Sigmoid", "softmax_chosen": ""}[moe.gating]
        probabilities = g.op(scores, logits) if scores else logits
        selection = probabilities
        if layer.has("exp_probs_b.bias"):
            selection = g.op("Add", selection, g.weight(self.vector(layer.name("exp_probs_b.bias"))))
        if moe.n_group > 1 and moe.n_group_used < moe.n_group:
            selection = self._best_groups(g, selection, moe.n_expert, moe.n_group, moe.n_group_used)
        k = g.constant([moe.n_used], np.int64)
        weights, ids = g.ops("TopK", 2, selection, k, axis=-1, largest=1, sorted=1)
        if selection != probabilities:
            weights = g.op("GatherElements", probabilities, ids, axis=1)
        if moe.gating == "softmax_chosen":
            weights = g.op("Softmax", weights)
        if moe.renormalise:
            total = g.op("ReduceSum", weights, g.constant([1], np.int64), keepdims=1)
            # llama.cpp's bound: the smallest normal number of float16.
            least = g.constant(6.103515625e-5, np.float32)
            weights = g.op("Div", weights, g.op("Max", total, least))
        if moe.scale != 1.0:
            weights = g.op("Mul", weights, g.constant(moe.scale, np.float32))
        return ids, weights

    def _best_groups(self, g: Graph, selection: str, n_expert: int, n_group: int, n_used: int) -> str:
        """Put experts outside the best groups out of the running; a group counts by its two best experts."""
        size = n_expert // n_group
        grouped = g.op("Reshape", selection, g.constant([0, n_group, size], np.int64))
        best, _ = g.ops("TopK", 2, grouped, g.constant([2], np.int64), axis=-1, largest=1, sorted=1)
        sums = g.op("ReduceSum", best, g.constant([2], np.int64), keepdims=0)
        chosen, which = g.ops("TopK", 2, sums, g.constant([n_used], np.int64), axis=-1, largest=1, sorted=1)
        # 0 for the chosen groups and minus infinity for the others.
        others = g.op("Mul", sums, g.constant(0.0, np.float32))
        others = g.op("Add", others, g.constant(-np.inf, np.float32))
        zeros = g.op("Mul", chosen, g.constant(0.0, np.float32))
        mask = g.op("ScatterElements", others, which, zeros, axis=1)
        masked = g.op("Add", grouped, g.op("Unsqueeze", mask, g.constant([2], np.int64)))
        return g.op("Reshape", masked, g.constant([0, n_expert], np.int64))
