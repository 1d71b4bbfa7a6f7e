"""The experts of one layer in onnxruntime: what all ways to compute them share."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.engines import quants
from kvasir_peer.engines.architectures import LayerShape
from kvasir_peer.engines.base import F32, I32
from kvasir_peer.models.sources import TensorSource

# Experts that are taken apart at once: bounds what loading takes beside the container.
LOADED_AT_ONCE = 8
# Numbers of rows whose bindings are kept; each costs a few kilobytes per layer.
KEPT_WIDTHS = 32

# gpt-oss: gate * sigmoid(1.702 * gate) * (up + 1), both limited to 7.
OAI_ALPHA = 1.702
OAI_LIMIT = 7.0


class Experts(abc.ABC):
    """The experts of one layer.

    Args:
        n_expert: how many the layer has.
        held: ranges of those that are here.
    """

    def __init__(self, n_expert: int, held: list[tuple[int, int]]) -> None:
        # Place of each expert of the model here, -1 for those that are not held.
        self.n_expert = n_expert
        self._place = np.full(n_expert, -1, np.int32)
        for lo, hi in held:
            first = int(np.count_nonzero(self._place >= 0))
            self._place[lo:hi] = np.arange(first, first + hi - lo)
        self.count = int(np.count_nonzero(self._place >= 0))

    @abc.abstractmethod
    def compute(self, x: F32, ids: I32, weights: F32) -> tuple[F32, int, int]:
        """Return the weighted sum, and how many experts and rows of experts were computed."""


class Buffers:
    """Flat arrays that all layers of a bank share, each as large as the bank's largest pass needs it.

    Args:
        max_rows: most rows of a pass.
        widths: of a row, by name.
    """

    def __init__(self, max_rows: int, widths: Mapping[str, int]) -> None:
        self._flat = {name: np.zeros(max_rows * width, np.float32) for name, width in widths.items()}

    def take(self, name: str, rows: int, width: int) -> F32:
        """Return the begin of a buffer as [rows, width]."""
        return self._flat[name][: rows * width].reshape(rows, width)


def expert_bytes(source: TensorSource, layer: LayerShape, suffix: str, lo: int, hi: int) -> NDArray[Any]:
    """Return the bytes of experts [lo, hi) of a stacked tensor, uint8 [hi - lo, rows, row bytes]."""
    info = source.tensors[layer.name(suffix)]
    return source.read_experts(info.name, lo, hi).reshape(hi - lo, info.shape[1], -1)


def expert_biases(source: TensorSource, layer: LayerShape, suffix: str, lo: int, hi: int) -> F32 | None:
    """Return the experts' biases, float32 [hi - lo, rows], or None."""
    if not layer.has(suffix):
        return None
    info = source.tensors[layer.name(suffix)]
    rows = (hi - lo, *info.shape[1:])
    return quants.dequantize(source.read_experts(info.name, lo, hi), info.type, rows)
