"""Attention over slots: one cache for all requests of a stack, and rows of many of them in one pass.

A row attends to the positions of its own slot up to its own. Rows come as *runs* (see
:class:`kvasir_peer.engines.base.Rows`); each run attends by itself over a view of the cache, or, where the
options ask for it, all runs of one row attend together, padded to the longest.

Query heads that share a key head are laid out as further query rows of it, so keys are never repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvasir_peer.engines.architectures import AttentionShape, RopeShape

# Scores held at once, in elements (256 MiB of float32); longer chunks attend piece by piece.
SCORES_LIMIT = 1 << 26
# Batched single rows see this many positions or a multiple: few different shapes, so few CUDA graphs.
POSITIONS_STEP = 256


@dataclass(frozen=True)
class Run:
    """Rows [begin, end) of a pass, at positions from ``position`` on in one slot."""

    begin: int
    end: int
    slot: int
    position: int


@dataclass(frozen=True, eq=False)
class Pass:
    """What all layers need to know about the rows of a pass.

    Attributes:
        runs: attended one by one.
        singles: runs of one row that are attended together, as int64 indices of rows [m]; None when there are
            none, or when they are all the rows there are (then no row has to be picked).
        n_singles: how many; 0 when all runs are attended one by one.
        reach: positions that batched single rows look at.
        slots: int64 [n], on the device.
        positions: int64 [n], on the device.
        ropes: cosines and sines, float32 [n, 1, dimensions/2] each, on the device.
    """

    runs: tuple[Run, ...]
    singles: Tensor | None
    n_singles: int
    reach: int
    slots: Tensor
    positions: Tensor
    ropes: Mapping[RopeShape, tuple[Tensor, Tensor]]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rope: RopeShape) -> Tensor:
    """Rotate the first dimensions of each head.

    Args:
        x: [n, heads, length].
        cos: float32 [n, 1, dimensions/2].
        sin: float32 [n, 1, dimensions/2].
        rope: its style and dimensions.
    """
    d = rope.dimensions
    part = x[..., :d].float()
    if rope.style == "adjacent":
        a, b = part[..., 0::2], part[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = part[..., : d // 2], part[..., d // 2 :]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    turned = turned.to(x.dtype)
    return turned if d == x.shape[-1] else torch.cat((turned, x[..., d:]), dim=-1)


class SlotCache:
    """Keys and values of one layer for all slots.

    Latent attention keeps one row [kv_rank + rope] per position in place of heads, and its values are the first
    ``kv_rank`` of it.
    """

    def __init__(
        self,
        shape: AttentionShape,
        n_slots: int,
        context_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape = shape
        heads, key = (1, shape.cache_widths[0]) if shape.mla else (shape.n_head_kv, shape.key_length)
        self._value_length = shape.mla.kv_rank if shape.mla else shape.value_length
        # Zeros, not garbage: padded positions are masked out, but NaN times zero would still be NaN.
        self.keys = torch.zeros((n_slots, context_length, heads, key), dtype=dtype, device=device)
        self.values: Tensor | None = None
        if shape.mla is None:
            self.values = torch.zeros(
                (n_slots, context_length, heads, shape.value_length), dtype=dtype, device=device
            )

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes."""
        values = 0 if self.values is None else self.values.numel() * self.values.element_size()
        return self.keys.numel() * self.keys.element_size() + values

    def write(self, batch: Pass, keys: Tensor, values: Tensor | None) -> None:
        """Store the rows' keys [n, heads, length] and values, over whatever was there."""
        self.keys[batch.slots, batch.positions] = keys.to(self.keys.dtype)
        if self.values is not None and values is not None:
            self.values[batch.slots, batch.positions] = values.to(self.values.dtype)

    def attend(self, batch: Pass, queries: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend; the rows' own keys must have been written.

        Args:
            batch: the pass.
            queries: [n, n_head, key length].
            sinks: float32 [n_head], further logits of the softmax that stand for no position; or None.

        Returns:
            [n, n_head, value length].
        """
        if batch.n_singles and batch.singles is None:
            return self._attend_singles(batch, queries, batch.slots, batch.positions, sinks)
        out = queries.new_empty(*queries.shape[:2], self._value_length)
        if batch.singles is not None:
            picked = batch.singles
            out[picked] = self._attend_singles(
                batch, queries[picked], batch.slots[picked], batch.positions[picked], sinks
            )
        for run in batch.runs:
            out[run.begin : run.end] = self._attend_run(run, queries[run.begin : run.end], sinks)
        return out

    def _attend_run(self, run: Run, queries: Tensor, sinks: Tensor | None) -> Tensor:
        """Rows of one slot at consecutive positions: [m, n_head, key length] to [m, n_head, value length]."""
        m, n_head = queries.shape[:2]
        window = self.shape.window
        pieces = []
        step = max(1, SCORES_LIMIT // (n_head * (run.position + m)))
        for a in range(0, m, step):
            b = min(a + step, m)
            first, end = run.position + a, run.position + b
            low = max(0, first - window + 1) if window else 0
            keys = self.keys[run.slot, low:end].transpose(0, 1)[None]  # [1, heads, t, length]
            mask = None
            if b - a > 1:
                seen = torch.arange(low, end, device=queries.device)[None]  # [1, t]
                own = torch.arange(first, end, device=queries.device)[:, None]  # [m, 1]
                mask = seen <= own
                if window:
                    mask &= seen > own - window
                mask = mask[None]  # [1, m, t]
            values = keys if self.values is None else self.values[run.slot, low:end].transpose(0, 1)[None]
            pieces.append(self._scores(queries[None, a:b], keys, values, mask, sinks)[0])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _attend_singles(
        self, batch: Pass, queries: Tensor, slots: Tensor, positions: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """One row of each of m slots: [m, n_head, key length] to [m, n_head, value length]."""
        seen = torch.arange(batch.reach, device=queries.device)[None]  # [1, t]
        own = positions[:, None]  # [m, 1]
        mask = seen <= own
        if self.shape.window:
            mask = mask & (seen > own - self.shape.window)
        keys = self.keys[:, : batch.reach].index_select(0, slots).transpose(1, 2)  # [m, heads, t, length]
        values = keys
        if self.values is not None:
            values = self.values[:, : batch.reach].index_select(0, slots).transpose(1, 2)
        return self._scores(queries[:, None], keys, values, mask[:, None], sinks)[:, 0]

    def _scores(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        """Softmax attention.

        Args:
            queries: [b, m, n_head, key length].
            keys: [b, heads, t, key length].
            values: [b, heads, t, value length or more].
            mask: bool [b, m, t] of what may be seen, or None for everything.
            sinks: float32 [n_head] or None.

        Returns:
            [b, m, n_head, value length].
        """
        b, m, n_head, length = queries.shape
        heads = keys.shape[1]
        group = n_head // heads
        values = values[..., : self._value_length]
        # Rows of a key head: row by row, and within a row its query heads. [b, heads, m * group, length]
        q = queries.reshape(b, m, heads, group, length).transpose(1, 2).reshape(b, heads, m * group, length)
        if mask is not None:
            mask = mask.repeat_interleave(group, dim=1)[:, None]  # [b, 1, m * group, t]
        if sinks is None and not self.shape.softcap:
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=self.shape.scale)
        else:
            scores = (q.float() @ keys.float().transpose(-1, -2)) * self.shape.scale
            if self.shape.softcap:
                scores = torch.tanh(scores / self.shape.softcap) * self.shape.softcap
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf"))
            if sinks is None:
                weights = torch.softmax(scores, dim=-1)
            else:
                extra = sinks.view(1, heads, 1, group).expand(b, heads, m, group).reshape(b, heads, -1, 1)
                weights = torch.softmax(torch.cat((scores, extra), dim=-1), dim=-1)[..., :-1]
            out = weights.to(values.dtype) @ values
        out = out.reshape(b, heads, m, group, self._value_length).transpose(1, 2)
        return out.reshape(b, m, n_head, self._value_length)
