"""Angles of rotary position embeddings, with linear, YaRN and llama-3 scaling.

The angles do not depend on weights or on an engine, so they are computed here once per pass, in float64: at
position 100,000 float32 would be off by thousandths of a turn.

Sources: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071), as in ggml's ``rope_yarn``; the llama-3 factors
stand ready in the file's ``rope_freqs.weight``.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.engines.architectures import RopeShape
from kvasir_peer.errors import ModelFileError


def frequencies(rope: RopeShape, factors: NDArray[np.float32] | None = None) -> NDArray[np.float64]:
    """Return the angle that each pair of dimensions turns per position.

    Args:
        rope: the layer's embedding.
        factors: ``rope_freqs.weight`` [dimensions/2], where ``rope.factors`` says that the file has it.

    Returns:
        float64 [dimensions/2], radians.

    Raises:
        ModelFileError: the factors are missing, or one of them is zero or not a number.
    """
    half = rope.dimensions // 2
    index = np.arange(half, dtype=np.float64)
    extrapolated = rope.base ** (-2.0 * index / rope.dimensions)
    if rope.factors:
        if factors is None or factors.shape != (half,):
            raise ModelFileError(f"rope_freqs.weight does not have {half} factors")
        if not np.all(np.isfinite(factors) & (factors != 0)):
            raise ModelFileError("rope_freqs.weight has a factor that is zero or not a number")
        extrapolated = extrapolated / factors.astype(np.float64)
    interpolated = extrapolated * rope.scale
    if not rope.extrapolation:
        return interpolated
    low, high = _corrections(rope)
    # 1 where a dimension turns often enough within the original context to be left as it is, 0 where it has to
    # be interpolated.
    ramp = 1.0 - np.clip((index - low) / max(0.001, high - low), 0.0, 1.0)
    mix = ramp * rope.extrapolation
    return interpolated * (1.0 - mix) + extrapolated * mix


def _corrections(rope: RopeShape) -> tuple[float, float]:
    """First and last pair between which YaRN goes over from extrapolation to interpolation."""

    def pair(rotations: float) -> float:
        turns = rope.original_context / (rotations * 2.0 * math.pi)
        return rope.dimensions * math.log(turns) / (2.0 * math.log(rope.base))

    low = math.floor(pair(rope.beta_fast))
    high = math.ceil(pair(rope.beta_slow))
    return max(0.0, low), min(rope.dimensions - 1.0, high)


class RopeTable:
    """Cosines and sines of one :class:`RopeShape`, for any positions.

    Args:
        rope: the layer's embedding.
        factors: as for :func:`frequencies`.
    """

    def __init__(self, rope: RopeShape, factors: NDArray[np.float32] | None = None) -> None:
        self.rope = rope
        self._frequencies = frequencies(rope, factors)

    def __call__(self, positions: NDArray[np.int32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return cosines and sines, float32 [n, dimensions/2] each, the magnitude already in them."""
        angles = positions.astype(np.float64)[:, None] * self._frequencies
        magnitude = self.rope.magnitude
        return (np.cos(angles) * magnitude).astype(np.float32), (np.sin(angles) * magnitude).astype(
            np.float32
        )


def rotate(
    x: NDArray[np.float32], cos: NDArray[np.float32], sin: NDArray[np.float32], style: str
) -> NDArray[np.float32]:
    """Rotate the first dimensions of each head; the plain definition that engines are tested against.

    Args:
        x: float32 [n, heads, length].
        cos: float32 [n, dimensions/2].
        sin: float32 [n, dimensions/2].
        style: ``adjacent`` or ``halves``.

    Returns:
        float32 [n, heads, length].
    """
    half = cos.shape[1]
    out = x.copy()
    even = slice(0, 2 * half, 2) if style == "adjacent" else slice(0, half)
    odd = slice(1, 2 * half, 2) if style == "adjacent" else slice(half, 2 * half)
    a, b = x[..., even], x[..., odd]
    out[..., even] = a * cos[:, None, :] - b * sin[:, None, :]
    out[..., odd] = b * cos[:, None, :] + a * sin[:, None, :]
    return out
