"""Routed rows on the engine side: sums over the experts of a bank, for a volunteer and for a dispatcher's own part."""

from __future__ import annotations

import time
from collections.abc import Generator

import numpy as np

from kvasir_peer.engines.base import F32, I32, ExpertBank, MemoryEstimate
from kvasir_peer.errors import EngineError
from kvasir_peer.wire.codec import Buffer
from kvasir_peer.wire.experts import decode_rows
from kvasir_peer.wire.tensors import encode_tensor


class ExpertRunner:
    """One bank, and how rows reach it.

    Args:
        bank: stays the caller's, who closes it.
        max_rows: most rows of one call of the bank.
    """

    def __init__(self, bank: ExpertBank, max_rows: int) -> None:
        self._bank = bank
        self._max_rows = max_rows
        self._absent: dict[int, int] = {}

    def run(
        self,
        data: Buffer,
        layer: int,
        rows: int,
        experts: int,
        dtype: str,
        out: memoryview,
        *,
        slices_of: int = 0,
    ) -> Generator[int, None, int]:
        """Compute a frame of routed rows (layout: :mod:`kvasir_peer.wire.experts`), whole or in slices.

        Args:
            out: where the sums ``[rows, n_embd]`` are written at last; may be the memory of ``data``.
            slices_of: row-expert pairs of a slice; 0 computes all at once.

        Yields:
            The pairs of each slice that is computed, but the last one.

        Returns:
            Bytes written.

        Raises:
            WireError: ``data`` has another size than its shape.
            EngineError: a layer of which the bank holds nothing, or experts that the model does not have.
        """
        width = self._bank.shape.n_embd
        routed = decode_rows(data, rows, experts, width, dtype)
        pairs = np.argwhere(routed.ids >= 0)
        if not slices_of or len(pairs) <= slices_of:
            sums = self.sums(layer, routed.x, routed.ids, routed.weights)
        else:
            # Rows of one expert stay together: its weights are read once. Sums are added in the order of the experts.
            pairs = pairs[np.argsort(routed.ids[pairs[:, 0], pairs[:, 1]], kind="stable")]
            sums = np.zeros((rows, width), np.float32)
            for begin in range(0, len(pairs), slices_of):
                at, column = pairs[begin : begin + slices_of].T
                part = self.sums(
                    layer, routed.x[at], routed.ids[at, column][:, None], routed.weights[at, column][:, None]
                )
                np.add.at(sums, at, part)
                if begin + slices_of < len(pairs):
                    yield len(at)
        return encode_tensor(sums, dtype, out).nbytes

    def sums(self, layer: int, x: F32, ids: I32, weights: F32) -> F32:
        """Weighted sums ``[n, n_embd]`` over the pairs whose id is not negative."""
        absent = ids < 0
        if not absent.any():
            return self._whole(layer, x, ids, weights)
        other = self._not_held(layer)
        if other is not None:
            return self._whole(layer, x, np.where(absent, other, ids), weights)
        # The bank holds every expert, so it would compute whatever stood there: each pair is a row of its own.
        rows, columns = np.nonzero(~absent)
        sums = np.zeros_like(x)
        for begin in range(0, len(rows), self._max_rows):
            part = rows[begin : begin + self._max_rows], columns[begin : begin + self._max_rows]
            y = self._bank.compute(
                layer,
                np.ascontiguousarray(x[part[0]]),
                np.ascontiguousarray(ids[part][:, None]),
                np.ascontiguousarray(weights[part][:, None]),
            )
            np.add.at(sums, part[0], y)
        return sums

    def _whole(self, layer: int, x: F32, ids: I32, weights: F32) -> F32:
        if len(x) <= self._max_rows:
            return self._bank.compute(layer, x, ids, weights)
        step = self._max_rows
        parts = [
            self._bank.compute(layer, x[i : i + step], ids[i : i + step], weights[i : i + step])
            for i in range(0, len(x), step)
        ]
        return np.concatenate(parts)

    def _not_held(self, layer: int) -> int | None:
        """An expert of the layer that the bank does not hold, or None where it holds all."""
        if layer not in self._absent:
            if not 0 <= layer < self._bank.shape.n_layer:
                raise EngineError(f"layer {layer} of a model with {self._bank.shape.n_layer} layers")
            moe = self._bank.shape.layers[layer].moe
            if moe is None:
                raise EngineError(f"layer {layer} has no routed experts")
            held = {e for at, lo, hi in self._bank.ranges if at == layer for e in range(lo, hi)}
            self._absent[layer] = next((e for e in range(moe.n_expert) if e not in held), -1)
        found = self._absent[layer]
        return None if found < 0 else found


class FlooredBank(ExpertBank):
    """A bank that takes its time: what a slow machine would need, so that one can be measured on a fast one.

    Args:
        bank: that computes.
        floor: least seconds for each row-expert pair.
    """

    def __init__(self, bank: ExpertBank, floor: float) -> None:
        self._bank = bank
        self._floor = floor
        self.ranges, self.shape = bank.ranges, bank.shape

    def memory(self) -> MemoryEstimate:
        return self._bank.memory()

    def compute(self, layer: int, x: F32, ids: I32, weights: F32) -> F32:
        until = time.perf_counter() + self._floor * ids.size
        sums = self._bank.compute(layer, x, ids, weights)
        time.sleep(max(0.0, until - time.perf_counter()))
        return sums

    def close(self) -> None:
        self._bank.close()
