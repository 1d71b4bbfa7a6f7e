"""Random quantised weights of any type, for tests and timings."""

import gguf
import numpy as np

from kvasir_peer.engines import quants
from kvasir_peer.models.split_experts import FLOAT16_SCALES


def random_blocks(
    kind: quants.QuantType, shape: tuple[int, ...], rng: np.random.Generator, distinct: int = 0
) -> np.ndarray:
    """Random bytes of a type whose weights have a root mean square of about 1 / sqrt(columns).

    Args:
        kind: the type.
        shape: of the weights.
        rng: where they come from.
        distinct: so many blocks are made and then repeated; 0 makes all. Making gigabytes takes longer than a timing.

    Returns:
        uint8 [..., row bytes].
    """
    if kind.bits == 0:
        return gguf.quants.quantize(
            (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32),
            gguf.GGMLQuantizationType(kind.id),
        )
    whole = int(np.prod(shape)) // kind.block
    n = min(whole, distinct or whole)
    blocks = rng.integers(0, 256, (n, kind.block_bytes), dtype=np.uint8)
    if kind.name == "MXFP4":
        blocks[:, 0] = rng.integers(118, 124, n)
    for begin in FLOAT16_SCALES.get(kind.name, ()):
        sizes = (rng.random(n) * 0.5 + 0.75).astype(np.float16)
        # The offset of Q4_1 and Q5_1 is added, that of K-quants taken away: both about the middle of the codes.
        if kind.name in ("Q4_1", "Q5_1") and begin:
            sizes *= np.float16(-7.5 if kind.name == "Q4_1" else -15.5)
        elif begin == 82:
            sizes *= np.float16(1.5)
        elif kind.name in ("Q4_K", "Q5_K") and begin:
            sizes *= np.float16(7.5 if kind.name == "Q4_K" else 15.5)
        blocks[:, begin : begin + 2] = sizes.view(np.uint8).reshape(-1, 2)
    values = quants.dequantize(blocks, kind.id, (n, kind.block))
    size = float(np.sqrt(np.mean(values.astype(np.float64) ** 2)))
    for begin in FLOAT16_SCALES.get(kind.name, ()):
        field = np.ascontiguousarray(blocks[:, begin : begin + 2]).view(np.float16)
        field = (field.astype(np.float64) / (size * np.sqrt(shape[-1]))).astype(np.float16)
        blocks[:, begin : begin + 2] = field.view(np.uint8)
    return np.resize(blocks, (whole, kind.block_bytes)).reshape(*shape[:-1], -1)
