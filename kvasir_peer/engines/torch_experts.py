"""Routed experts in torch: choosing them, and computing those that are held here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvasir_peer.engines.architectures import (
    EXPERT_BIASES,
    EXPERT_WEIGHTS,
    Activation,
    LayerShape,
    ModelShape,
    MoeShape,
)
from kvasir_peer.engines.base import F32, I32, ExpertBank, ExpertRange, MemoryEstimate
from kvasir_peer.engines.torch_weights import PIECE_WEIGHTS, Loader, TorchOptions, Weight

# A sum of router weights is kept from zero by the smallest normal float16, as llama.cpp does.
_SMALLEST_SUM = 6.103515625e-5
# gpt-oss: steepness of the sigmoid, and where gate and up are cut off.
_OAI_ALPHA = 1.702
_OAI_LIMIT = 7.0


def activate(kind: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """Join the two halves of a gated feed-forward layer."""
    if kind == "silu":
        return F.silu(gate) * up
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    gate = gate.clamp(max=_OAI_LIMIT)
    up = up.clamp(min=-_OAI_LIMIT, max=_OAI_LIMIT)
    return gate * torch.sigmoid(_OAI_ALPHA * gate) * (up + 1.0)


def route(logits: Tensor, moe: MoeShape, selection_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose experts and weigh them.

    Args:
        logits: float32 [n, n_expert].
        moe: the rule.
        selection_bias: float32 [n_expert], added for choosing but not for weighing; or None.

    Returns:
        int64 [n, n_used] and float32 [n, n_used], best first.
    """
    if moe.gating == "softmax":
        scores = torch.softmax(logits, dim=-1)
    elif moe.gating == "sigmoid":
        scores = torch.sigmoid(logits)
    else:
        scores = logits
    choice = scores if selection_bias is None else scores + selection_bias
    if moe.n_group > 1:
        # A group is as good as its two best experts together; the others' experts are out (DeepSeek V3).
        groups = choice.view(len(choice), moe.n_group, -1)  # [n, groups, experts of a group]
        best = groups.topk(2, dim=-1).values.sum(-1)
        kept = best.topk(moe.n_group_used, dim=-1).indices
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
        choice = groups.masked_fill(~allowed[:, :, None], float("-inf")).flatten(1)
    # Stable, so that equal scores are resolved alike everywhere: the lower expert first.
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, : moe.n_used]
    weights = scores.gather(1, ids)
    if moe.gating == "softmax_chosen":
        weights = torch.softmax(weights, dim=-1)
    if moe.renormalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=_SMALLEST_SUM)
    return ids, weights * moe.scale


class Experts:
    """Some or all experts of a layer, stacked in one index space.

    Args:
        layer: the layer's shape.
        ranges: (lo, hi) of the experts held, ascending and apart.
        loader: where their weights come from.
        options: how the device is used.
    """

    def __init__(
        self,
        layer: LayerShape,
        ranges: Sequence[tuple[int, int]],
        loader: Loader,
        options: TorchOptions,
    ) -> None:
        assert layer.moe is not None
        self._activation = layer.activation
        self._options = options
        self.layer = layer.index
        self.n_expert = layer.moe.n_expert
        # Position of each expert in the stacks, -1 for those that are not held.
        held = np.concatenate([np.arange(lo, hi) for lo, hi in ranges])
        self._index = np.full(self.n_expert, -1, np.int64)
        self._index[held] = np.arange(len(held))
        self._complete = len(held) == self.n_expert
        self._gate, self._up, self._down = (
            loader.experts(layer.name(suffix), ranges) for suffix in EXPERT_WEIGHTS
        )
        picked = torch.from_numpy(held).to(options.device)
        self._biases = tuple(
            loader.vector(layer.name(suffix))[picked] if layer.has(suffix) else None
            for suffix in EXPERT_BIASES
        )

    @property
    def n_bytes(self) -> int:
        """Bytes that the weights take."""
        biases = sum(b.numel() * b.element_size() for b in self._biases if b is not None)
        return self._gate.n_bytes + self._up.n_bytes + self._down.n_bytes + biases

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum over the chosen experts that are held.

        Args:
            x: [n, n_embd].
            ids: int64 [n, k], experts by their number in the model; on the device, or on the host where the
                caller has them there anyway.
            weights: float32 [n, k].

        Returns:
            float32 [n, n_embd].
        """
        n, k = ids.shape
        x = x.to(self._options.dtype)
        if self._complete and n * k <= self._options.gather_pairs:
            parts = self._gathered(x, ids.flatten().to(x.device), k)
        else:
            parts = self._sorted(x, ids)
        # One sum over k in the router's order, whatever else is in the batch.
        return (parts.view(n, k, -1) * weights[:, :, None]).sum(1)

    def _gathered(self, x: Tensor, ids: Tensor, k: int) -> Tensor:
        """Each pair with its expert's weights, whichever they are: float32 [n * k, n_embd]."""
        if self._gate.fused and self._up.fused and self._down.fused:
            gate_bias, up_bias, down_bias = (b if b is None else b[ids] for b in self._biases)
            gate = self._biased(self._gate.products(x, ids, k), gate_bias)
            up = self._biased(self._up.products(x, ids, k), up_bias)
            inner = activate(self._activation, gate, up)  # [n * k, width]
            return self._biased(self._down.products(inner, ids), down_bias)
        parts = []
        step = max(1, PIECE_WEIGHTS // (self._gate.matrix_size))
        for a in range(0, len(ids), step):
            chosen = ids[a : a + step]  # [p]
            rows = torch.arange(a, a + len(chosen), device=x.device) // k
            column = x[rows][:, :, None]  # [p, n_embd, 1]
            gate_bias, up_bias, down_bias = (b if b is None else b[chosen] for b in self._biases)
            gate = self._biased(torch.bmm(self._gate.at(chosen), column)[:, :, 0], gate_bias)
            up = self._biased(torch.bmm(self._up.at(chosen), column)[:, :, 0], up_bias)
            inner = activate(self._activation, gate, up).to(x.dtype)[:, :, None]  # [p, width, 1]
            parts.append(self._biased(torch.bmm(self._down.at(chosen), inner)[:, :, 0], down_bias))
        return torch.cat(parts)

    def _sorted(self, x: Tensor, ids: Tensor) -> Tensor:
        """Each expert once for all its rows: float32 [n * k, n_embd], zeros for experts that are not held."""
        n, k = ids.shape
        index = self._index[ids.cpu().numpy()].ravel()  # [n * k]
        order = np.argsort(index, kind="stable")
        order = order[np.searchsorted(index[order], 0) :]
        out = torch.zeros((n * k, x.shape[1]), dtype=torch.float32, device=x.device)
        if not len(order):
            return out
        chosen, starts = np.unique(index[order], return_index=True)
        ends = np.append(starts[1:], len(order))
        pairs = torch.from_numpy(order).to(x.device)
        rows = x[pairs // k]  # [p, n_embd]
        step = max(1, PIECE_WEIGHTS // (self._gate.matrix_size))
        for i in range(0, len(chosen), step):
            begin, end = starts[i], ends[min(i + step, len(chosen)) - 1]
            sizes = (ends - starts)[i : i + step].tolist()
            out[pairs[begin:end]] = self._several(rows[begin:end], chosen[i : i + step], sizes)
        return out

    def _several(self, rows: Tensor, chosen: np.ndarray, sizes: list[int]) -> Tensor:
        """Some experts, with their rows one after another: [p, n_embd] to float32 [p, n_embd]."""
        picked = torch.from_numpy(chosen).to(rows.device)
        # Which of the chosen experts each row belongs to.
        owner = picked.repeat_interleave(torch.tensor(sizes, device=rows.device), output_size=len(rows))
        gate_bias, up_bias, down_bias = (b if b is None else b[owner] for b in self._biases)
        gate = self._biased(self._product(self._gate, rows, chosen, picked, sizes), gate_bias)
        up = self._biased(self._product(self._up, rows, chosen, picked, sizes), up_bias)
        inner = activate(self._activation, gate, up).to(rows.dtype)  # [p, width]
        return self._biased(self._product(self._down, inner, chosen, picked, sizes), down_bias)

    def _product(
        self, weight: Weight, rows: Tensor, chosen: np.ndarray, picked: Tensor, sizes: list[int]
    ) -> Tensor:
        """Rows times the matrix of their expert: [p, in] to [p, out]."""
        if self._options.grouped:
            ends = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device=rows.device)
            return F.grouped_mm(rows, weight.at(picked).transpose(1, 2), offs=ends)
        # Floats are views of the stack; bytes are taken apart for all the chosen experts at once.
        matrices = [weight.at(int(e)) for e in chosen] if weight.is_float else weight.at(picked)
        return torch.cat(
            [F.linear(part, w) for part, w in zip(torch.split(rows, sizes), matrices, strict=True)]
        )

    @staticmethod
    def _biased(y: Tensor, bias: Tensor | None) -> Tensor:
        y = y.float()
        return y if bias is None else y + bias


class TorchExpertBank(ExpertBank):
    """A set of experts in torch.

    Args:
        shape: the whole model's.
        ranges: (layer, lo, hi) held.
        experts: by layer.
        estimate: what it takes.
        options: how the device is used.
        max_rows: most rows of one call.
    """

    def __init__(
        self,
        shape: ModelShape,
        ranges: tuple[ExpertRange, ...],
        experts: Mapping[int, Experts],
        estimate: MemoryEstimate,
        options: TorchOptions,
        max_rows: int,
    ) -> None:
        self.shape = shape
        self.ranges = ranges
        self._experts = dict(experts)
        self._estimate = estimate
        self._options = options
        self._max_rows = max_rows

    def memory(self) -> MemoryEstimate:
        return self._estimate

    @torch.inference_mode()
    def compute(self, layer: int, x: F32, ids: I32, weights: F32) -> F32:
        self.check(self._experts, self._max_rows, layer, x, ids, weights)
        experts = self._experts[layer]
        device = self._options.device
        result = experts.compute(
            torch.from_numpy(np.array(x, np.float32)).to(device),
            torch.from_numpy(ids.astype(np.int64)),
            torch.from_numpy(np.array(weights, np.float32)).to(device),
        )
        return result.cpu().numpy()

    def close(self) -> None:
        self._experts.clear()
