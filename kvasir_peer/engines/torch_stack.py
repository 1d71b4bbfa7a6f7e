"""Layers in torch: the reference on a CPU in float32, and the engine of GPUs, by one code path.

The hidden state stays float32 from layer to layer; linears, experts and the KV cache use the dtype of the options.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvasir_peer.engines.architectures import LayerShape, ModelShape, RopeShape
from kvasir_peer.engines.base import (
    F32,
    ExpertBank,
    ExpertWork,
    LayerStack,
    MemoryEstimate,
    Rows,
    StackSpec,
    Steps,
)
from kvasir_peer.engines.rope import RopeTable
from kvasir_peer.engines.torch_attention import POSITIONS_STEP, Pass, Run, SlotCache, rotate
from kvasir_peer.engines.torch_experts import Experts, TorchExpertBank, activate, route
from kvasir_peer.engines.torch_graphs import DecodeGraphs
from kvasir_peer.engines.torch_weights import Loader, TorchOptions, Weight


@dataclass(frozen=True, eq=False)
class _Routed:
    """Rows of a layer that wait for their routed experts: x [n, n_embd], ids and weights [n, k], on the device."""

    layer: int
    x: Tensor
    ids: Tensor
    weights: Tensor


# Yields rows that wait for experts, is sent their sum [n, n_embd], returns its result.
_Work = Generator[_Routed, Tensor, Tensor]


class _Norm:
    """RMS norm over the last dimension, in float32."""

    def __init__(self, loader: Loader, name: str, eps: float) -> None:
        self._weight = loader.vector(name)
        self._eps = eps
        self.width = self._weight.numel()

    def __call__(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps) * self._weight


class _Linears:
    """Several linears of the same input: one product where they can be stacked, else one each.

    Args:
        loader: of the weights.
        layer: the layer.
        suffixes: of the weights (``attn_q.weight``); a bias beside one is used too.
    """

    def __init__(self, loader: Loader, layer: LayerShape, suffixes: Sequence[str]) -> None:
        names = [layer.name(suffix) for suffix in suffixes]
        stacked = loader.stacked(names)
        self._weights = [loader.matrix(name) for name in names] if stacked is None else [stacked]
        self._sizes = [loader.rows(name) for name in names]
        biases = []
        for suffix, size in zip(suffixes, self._sizes, strict=True):
            bias = suffix.removesuffix(".weight") + ".bias"
            biases.append(loader.vector(layer.name(bias)) if layer.has(bias) else loader.zeros(size))
        has_bias = any(layer.has(suffix.removesuffix(".weight") + ".bias") for suffix in suffixes)
        self._bias = torch.cat(biases).to(loader.options.dtype) if has_bias else None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """[n, in] to one [n, out] for each linear."""
        if len(self._weights) == 1:
            y = self._weights[0].linear(x, self._bias)
        else:
            y = torch.cat([weight.linear(x) for weight in self._weights], dim=1)
            if self._bias is not None:
                y = y + self._bias
        return torch.split(y, self._sizes, dim=1)


class _Attention:
    """Attention with heads of keys and values."""

    def __init__(self, loader: Loader, layer: LayerShape, eps: float, cache: SlotCache) -> None:
        self._shape = layer.attention
        self._cache = cache
        self._qkv = _Linears(loader, layer, ("attn_q.weight", "attn_k.weight", "attn_v.weight"))
        self._output = _Linears(loader, layer, ("attn_output.weight",))
        self._norms = [
            _Norm(loader, layer.name(suffix), eps) if layer.has(suffix) else None
            for suffix in ("attn_q_norm.weight", "attn_k_norm.weight")
        ]
        sinks = "attn_sinks.weight"
        self._sinks = loader.vector(layer.name(sinks)) if layer.has(sinks) else None

    def __call__(self, h: Tensor, batch: Pass) -> Tensor:
        """[n, n_embd] to [n, n_embd]."""
        shape = self._shape
        q, k, v = self._qkv(h)
        cos, sin = batch.ropes[shape.rope]
        queries = rotate(self._heads(q, self._norms[0], shape.n_head), cos, sin, shape.rope)
        keys = rotate(self._heads(k, self._norms[1], shape.n_head_kv), cos, sin, shape.rope)
        self._cache.write(batch, keys, v.view(len(v), shape.n_head_kv, shape.value_length))
        attended = self._cache.attend(batch, queries.to(self._cache.keys.dtype), self._sinks)
        return self._output(attended.flatten(1))[0]

    def _heads(self, x: Tensor, norm: _Norm | None, count: int) -> Tensor:
        """Norm and split into heads: [n, count * length] to [n, count, length]."""
        length = self._shape.key_length
        if norm is not None and norm.width != length:  # over the whole projection
            return norm(x).view(len(x), count, length)
        heads = x.view(len(x), count, length)
        return heads if norm is None else norm(heads)


class _LatentAttention:
    """Multi-head latent attention, with the key and value projections absorbed into query and output.

    Scores and values are taken from the compressed row itself, so the cache holds one row per position whatever
    the number of heads.
    """

    def __init__(self, loader: Loader, layer: LayerShape, eps: float, cache: SlotCache) -> None:
        shape = layer.attention
        assert shape.mla is not None
        self._shape, self._mla, self._cache = shape, shape.mla, cache
        if shape.mla.q_rank:
            self._compress = _Linears(loader, layer, ("attn_q_a.weight", "attn_kv_a_mqa.weight"))
            self._q_norm = _Norm(loader, layer.name("attn_q_a_norm.weight"), eps)
            self._expand = _Linears(loader, layer, ("attn_q_b.weight",))
        else:
            self._compress = _Linears(loader, layer, ("attn_q.weight", "attn_kv_a_mqa.weight"))
        self._kv_norm = _Norm(loader, layer.name("attn_kv_a_norm.weight"), eps)
        self._output = _Linears(loader, layer, ("attn_output.weight",))
        if shape.mla.split:
            self._key = loader.matrix(layer.name("attn_k_b.weight"))  # [head, kv_rank, nope]
            self._value = loader.matrix(layer.name("attn_v_b.weight"))  # [head, value, kv_rank]
        else:
            self._key, self._value = loader.latent_pair(
                layer.name("attn_kv_b.weight"), shape.n_head, shape.mla.nope
            )

    def __call__(self, h: Tensor, batch: Pass) -> Tensor:
        """[n, n_embd] to [n, n_embd]."""
        mla, n = self._mla, len(h)
        q, kv = self._compress(h)
        if mla.q_rank:
            q = self._expand(self._q_norm(q))[0]
        q = q.view(n, self._shape.n_head, mla.nope + mla.rope)
        cos, sin = batch.ropes[self._shape.rope]
        q_rope = rotate(q[..., mla.nope :], cos, sin, self._shape.rope)  # [n, head, rope]
        k_rope = rotate(kv[:, None, mla.kv_rank :], cos, sin, self._shape.rope)  # [n, 1, rope]
        latent = self._kv_norm(kv[:, None, : mla.kv_rank]).to(k_rope.dtype)  # [n, 1, kv_rank]
        self._cache.write(batch, torch.cat((latent, k_rope), dim=-1), None)
        # [head, n, nope] @ [head, nope, kv_rank]
        absorbed = q[..., : mla.nope].transpose(0, 1) @ self._key.at(slice(None)).transpose(1, 2)
        queries = torch.cat((absorbed.transpose(0, 1), q_rope), dim=-1).to(self._cache.keys.dtype)
        attended = self._cache.attend(batch, queries, None)  # [n, head, kv_rank]
        # [head, n, kv_rank] @ [head, kv_rank, value]
        values = attended.transpose(0, 1) @ self._value.at(slice(None)).transpose(1, 2)
        return self._output(values.transpose(0, 1).flatten(1))[0]


class _FeedForward:
    """Gated feed-forward: the dense part of a layer, or its shared expert."""

    def __init__(self, loader: Loader, layer: LayerShape, kind: str) -> None:
        self._activation = layer.activation
        self._in = _Linears(loader, layer, (f"ffn_gate{kind}.weight", f"ffn_up{kind}.weight"))
        self._out = _Linears(loader, layer, (f"ffn_down{kind}.weight",))

    def __call__(self, h: Tensor) -> Tensor:
        """[n, n_embd] to [n, n_embd]."""
        gate, up = self._in(h)
        return self._out(activate(self._activation, gate, up))[0]


class _Mixture:
    """The part of a layer that has experts, but for the routed experts themselves."""

    def __init__(self, loader: Loader, layer: LayerShape) -> None:
        assert layer.moe is not None
        self._index = layer.index
        self._moe = layer.moe
        # In float32 whatever the options say: a rounded logit may choose another expert.
        self._router = loader.vector(layer.name("ffn_gate_inp.weight"))  # [n_expert, n_embd]
        self._bias, self._selection_bias, self._shared_gate = (
            loader.vector(layer.name(suffix)) if layer.has(suffix) else None
            for suffix in ("ffn_gate_inp.bias", "exp_probs_b.bias", "ffn_gate_inp_shexp.weight")
        )
        self._shared = _FeedForward(loader, layer, "_shexp") if layer.moe.shared_width else None

    def __call__(self, h: Tensor) -> _Work:
        """[n, n_embd] to [n, n_embd]."""
        logits = F.linear(h, self._router, self._bias)
        ids, weights = route(logits, self._moe, self._selection_bias)
        shared = None
        if self._shared is not None:
            shared = self._shared(h).float()
            if self._shared_gate is not None:
                shared = shared * torch.sigmoid(h @ self._shared_gate)[:, None]
        routed = yield _Routed(self._index, h, ids, weights)
        return routed if shared is None else routed + shared


class _Layer:
    def __init__(self, loader: Loader, shape: ModelShape, layer: LayerShape, cache: SlotCache) -> None:
        eps = shape.norm_eps
        self._residual_scale = shape.residual_scale
        self._attn_norm = _Norm(loader, layer.name("attn_norm.weight"), eps)
        self._ffn_norm = _Norm(loader, layer.name(layer.ffn_norm), eps)
        self._attn_post_norm, self._ffn_post_norm = (
            _Norm(loader, layer.name(suffix), eps) if suffix else None
            for suffix in (layer.attn_post_norm, layer.ffn_post_norm)
        )
        attention = _Attention if layer.attention.mla is None else _LatentAttention
        self._attention = attention(loader, layer, eps, cache)
        self._dense = _FeedForward(loader, layer, "") if layer.moe is None else None
        self._mixture = _Mixture(loader, layer) if layer.moe is not None else None

    def __call__(self, x: Tensor, batch: Pass) -> _Work:
        """Float32 [n, n_embd] to float32 [n, n_embd]."""
        x = self._add(x, self._attention(self._attn_norm(x), batch), self._attn_post_norm)
        h = self._ffn_norm(x)
        if self._mixture is not None:
            y = yield from self._mixture(h)
        else:
            assert self._dense is not None
            y = self._dense(h)
        return self._add(x, y, self._ffn_post_norm)

    def _add(self, x: Tensor, y: Tensor, norm: _Norm | None) -> Tensor:
        y = y.float() if norm is None else norm(y)
        return x + y if self._residual_scale == 1.0 else x + y * self._residual_scale


class TorchStack(LayerStack):
    """Layers [first, end) of a model in torch.

    Args:
        shape: the whole model's.
        spec: which layers, how many slots.
        options: how the device is used.
        loader: of the weights.
        estimate: what it takes.
    """

    def __init__(
        self,
        shape: ModelShape,
        spec: StackSpec,
        options: TorchOptions,
        loader: Loader,
        estimate: MemoryEstimate,
    ) -> None:
        self.shape = shape
        self.spec = spec
        self.options = options
        self._estimate = estimate
        self.head = spec.first == 0
        self.tail = spec.end == shape.n_layer
        factors = None
        if shape.has("rope_freqs.weight"):
            factors = loader.vector("rope_freqs.weight").cpu().numpy()
        layers = shape.layers[spec.first : spec.end]
        self._ropes = {rope: RopeTable(rope, factors) for rope in {layer.attention.rope for layer in layers}}
        self._output: Weight | None = None
        if self.tail:
            self._output_norm = _Norm(loader, "output_norm.weight", shape.norm_eps)
            self._output = loader.matrix(shape.output_name)
            self._output_bias = loader.vector("output.bias") if shape.has("output.bias") else None
        if self.head:
            shared = shape.tied and self._output is not None
            self._embedding = self._output if shared else loader.table("token_embd.weight")
        self._layers: list[_Layer] = []
        self._experts: dict[int, Experts] = {}
        self._caches: list[SlotCache] = []
        for layer in layers:
            cache = SlotCache(
                layer.attention, spec.n_slots, spec.context_length, options.dtype, options.device
            )
            self._caches.append(cache)
            self._layers.append(_Layer(loader, shape, layer, cache))
            if layer.moe is not None:
                self._experts[layer.index] = Experts(layer, [(0, layer.moe.n_expert)], loader, options)
        self._graphs = DecodeGraphs(self) if options.graphs else None

    def memory(self) -> MemoryEstimate:
        return self._estimate

    def forward(self, rows: Rows, hidden: F32 | None) -> F32:
        with torch.inference_mode():
            self.check(rows, hidden)
            if self._graphs is not None and self._graphs.takes(rows):
                played = self._graphs.run(rows, hidden)
                if played is not None:
                    everything = played.cpu().numpy()
                    return everything[rows.wants_output] if self.tail else everything
            result = self._drive(self._run(rows, hidden))
        return result.cpu().numpy()

    def steps(self, rows: Rows, hidden: F32 | None) -> Steps:
        self.check(rows, hidden)
        work = self._run(rows, hidden)
        answer: F32 | None = None
        while True:
            # Not around the yield: whoever drives this may use torch in between.
            with torch.inference_mode():
                try:
                    if answer is None:
                        routed = next(work)
                    else:
                        routed = work.send(torch.tensor(answer, device=self.options.device))
                except StopIteration as done:
                    result: Tensor = done.value
                    return result.cpu().numpy()
                order = ExpertWork(
                    routed.layer,
                    routed.x.cpu().numpy(),
                    routed.ids.int().cpu().numpy(),
                    routed.weights.cpu().numpy(),
                )
            answer = yield order

    def local_bank(self) -> ExpertBank | None:
        if not self._experts:
            return None
        ranges = tuple((layer, 0, experts.n_expert) for layer, experts in self._experts.items())
        nothing = MemoryEstimate(0, 0, 0)  # its weights are the stack's
        return TorchExpertBank(self.shape, ranges, self._experts, nothing, self.options, self.spec.max_rows)

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()
        self._layers.clear()
        self._experts.clear()
        self._caches.clear()
        self._embedding = self._output = None

    def compute_fixed(self, tokens: Tensor, hidden: Tensor, batch: Pass) -> Tensor:
        """A whole pass from buffers on the device, without waiting for it; logits of all rows at the tail.

        Args:
            tokens: int64 [n]; read at the head.
            hidden: float32 [n, n_embd]; read elsewhere.
            batch: of single rows.
        """
        x = self._drive(self._through(self._embed(tokens) if self.head else hidden, batch))
        return self._logits(x) if self.tail else x

    def singles_pass(self, rows: Rows, reach: int) -> Pass:
        """A pass of rows that are attended together, each in its own slot, over ``reach`` positions."""
        slots, positions, ropes = self._places(rows)
        return Pass((), None, len(rows), reach, slots, positions, ropes)

    def _drive(self, work: _Work) -> Tensor:
        """Run with the stack's own experts."""
        try:
            routed = next(work)
            while True:
                experts = self._experts[routed.layer]
                routed = work.send(experts.compute(routed.x, routed.ids, routed.weights))
        except StopIteration as done:
            result: Tensor = done.value
            return result

    def _run(self, rows: Rows, hidden: F32 | None) -> _Work:
        """All layers; returns hidden state or logits, float32 on the device."""
        device = self.options.device
        if hidden is None:
            x = self._embed(torch.from_numpy(rows.tokens.astype(np.int64)).to(device))
        else:
            x = torch.tensor(hidden, dtype=torch.float32, device=device)
        x = yield from self._through(x, self._pass(rows))
        if not self.tail:
            return x
        return self._logits(x[torch.from_numpy(np.flatnonzero(rows.wants_output)).to(device)])

    def _through(self, x: Tensor, batch: Pass) -> _Work:
        for layer in self._layers:
            x = yield from layer(x, batch)
        return x

    def _embed(self, tokens: Tensor) -> Tensor:
        """Int64 [n] to float32 [n, n_embd]."""
        assert self._embedding is not None
        return self._embedding.at(tokens).float() * self.shape.embedding_scale

    def _logits(self, x: Tensor) -> Tensor:
        """[m, n_embd] to [m, n_vocab]."""
        assert self._output is not None
        if not len(x):
            return x.new_zeros((0, self.shape.n_vocab))
        logits = self._output.linear(self._output_norm(x)).float()
        if self._output_bias is not None:
            logits = logits + self._output_bias
        if self.shape.logit_scale != 1.0:
            logits = logits * self.shape.logit_scale
        cap = self.shape.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    def _pass(self, rows: Rows) -> Pass:
        runs = [Run(a, b, int(rows.slots[a]), int(rows.positions[a])) for a, b in rows.runs()]
        singles: list[int] = []
        if self.options.batched_attention:
            singles = [run.begin for run in runs if run.end - run.begin == 1]
            runs = [run for run in runs if run.end - run.begin > 1]
        reach = 0
        if singles:
            reach = int(rows.positions[singles].max()) + 1
            reach = min(-(-reach // POSITIONS_STEP) * POSITIONS_STEP, self.spec.context_length)
        slots, positions, ropes = self._places(rows)
        picked = torch.tensor(singles, device=self.options.device) if singles and runs else None
        return Pass(tuple(runs), picked, len(singles), reach, slots, positions, ropes)

    def _places(self, rows: Rows) -> tuple[Tensor, Tensor, dict[RopeShape, tuple[Tensor, Tensor]]]:
        """Slots and positions, int64 [n], and cosines and sines, float32 [n, 1, d/2], on the device."""
        device = self.options.device
        ropes: dict[RopeShape, tuple[Tensor, Tensor]] = {}
        for rope, table in self._ropes.items():
            cos, sin = table(rows.positions)
            ropes[rope] = (
                torch.from_numpy(cos).to(device)[:, None],
                torch.from_numpy(sin).to(device)[:, None],
            )
        slots = torch.from_numpy(rows.slots.astype(np.int64)).to(device)
        return slots, torch.from_numpy(rows.positions.astype(np.int64)).to(device), ropes
