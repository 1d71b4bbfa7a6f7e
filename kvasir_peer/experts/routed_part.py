"""A part of a layer's routed rows: the pairs that one peer computes, packed as they travel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.engines.base import F32, I32
from kvasir_peer.experts.sharing import Share


@dataclass(frozen=True, eq=False)
class RoutedRows:
    """What a layer's router has chosen.

    Attributes:
        layer: in the model.
        ids: int32 [n, k].
        weights: f32 [n, k].
        x: f32 [n, n_embd].
        origins: (request, position) of each row; empty where nobody keeps count.
    """

    layer: int
    ids: I32
    weights: F32
    x: F32
    origins: tuple[tuple[int, int], ...] = ()

    @property
    def pairs(self) -> int:
        """Row-expert pairs."""
        return int(self.ids.size)

    def counts(self) -> dict[int, int]:
        """Rows of each chosen expert."""
        experts, counts = np.unique(self.ids, return_counts=True)
        return dict(zip(experts.tolist(), counts.tolist(), strict=True))

    def all(self) -> RoutedPart:
        """All pairs as one part."""
        return self.part(np.ones(self.ids.shape, np.bool_))

    def part(self, mask: NDArray[np.bool_]) -> RoutedPart:
        """The pairs of a mask [n, k], each row once, its experts to the left."""
        rows = np.flatnonzero(mask.any(axis=1))
        chosen = mask[rows]
        width = int(chosen.sum(axis=1).max(initial=1))
        # Stable: the experts of a row stay in the router's order.
        order = np.argsort(~chosen, axis=1, kind="stable")[:, :width]
        present = np.take_along_axis(chosen, order, axis=1)
        ids = np.where(present, np.take_along_axis(self.ids[rows], order, axis=1), -1).astype(np.int32)
        weights = np.where(present, np.take_along_axis(self.weights[rows], order, axis=1), 0.0)
        origins = tuple(self.origins[row] for row in rows) if self.origins else ()
        return RoutedPart(
            self.layer, rows, ids, weights.astype(np.float32), np.ascontiguousarray(self.x[rows]), origins
        )

    def divide(self, shares: Iterable[Share]) -> dict[str, RoutedPart]:
        """The part of each peer, from shares that cover each pair once."""
        masks: dict[str, NDArray[np.bool_]] = {}
        places: dict[int, NDArray[np.intp]] = {}
        flat = self.ids.reshape(-1)
        for share in shares:
            if share.expert not in places:
                places[share.expert] = np.flatnonzero(flat == share.expert)
            mask = masks.setdefault(share.peer, np.zeros(flat.shape, np.bool_))
            mask[places[share.expert][share.first : share.first + share.count]] = True
        return {peer: self.part(mask.reshape(self.ids.shape)) for peer, mask in masks.items()}

    def covered(self, ranges: Iterable[tuple[int, int, int]], most_rows: int) -> RoutedPart | None:
        """The pairs that lie in ``ranges``, of the first rows that have any; None where none do."""
        mask = np.zeros(self.ids.shape, np.bool_)
        for layer, lo, hi in ranges:
            if layer == self.layer:
                mask |= (self.ids >= lo) & (self.ids < hi)
        rows = np.flatnonzero(mask.any(axis=1))
        if not len(rows):
            return None
        mask[rows[most_rows:]] = False
        return self.part(mask)


@dataclass(frozen=True, eq=False)
class RoutedPart:
    """Some pairs.

    Attributes:
        layer: in the model.
        rows: indices [m] into the rows that they are a part of.
        ids: int32 [m, k']; -1 where a row has fewer experts here.
        weights: f32 [m, k'].
        x: f32 [m, n_embd].
        origins: (request, position) of each row, or empty.
    """

    layer: int
    rows: NDArray[np.intp]
    ids: I32
    weights: F32
    x: F32
    origins: tuple[tuple[int, int], ...] = ()

    @property
    def pairs(self) -> int:
        """Row-expert pairs."""
        return int((self.ids >= 0).sum())

    @property
    def experts(self) -> list[int]:
        """Each expert that it needs."""
        return np.unique(self.ids[self.ids >= 0]).tolist()

    def only(self, picked: NDArray[np.intp]) -> RoutedPart:
        """Some of its rows."""
        return RoutedPart(
            self.layer, self.rows[picked], self.ids[picked], self.weights[picked], self.x[picked]
        )
