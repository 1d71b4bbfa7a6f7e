"""How weights are kept in onnxruntime: which container each quant type takes, and the codes of ``MatMulNBits``.

``MatMulNBits`` multiplies by 4-bit or 8-bit codes with a scale per 16 or 32 weights. That is every GGUF type but
the floats, if the asymmetric types' offsets are added apart::

    y = x @ (scale * (code - zero) + offset)^T = MatMulNBits(x, codes) + blocksum(x) @ offset^T

where ``blocksum`` adds up the input over each group of weights that shares an offset. Codes are centred first, by a
zero point for each group, so that the second term stays small beside the first (see :func:`centred`). In ``exact`` it
is a product of its own; in ``fast`` the sums and the offsets become further columns of the same product (see
:func:`widened`).

At accuracy level 4 activations are rounded to int8 per group, which costs about one per cent of the result, as in
llama.cpp. At level 0 they stay float32; 8-bit codes have no quick kernel there, so they are dequantised then.

Where the C kernels are at hand (:mod:`kvasir_peer.engines.kernels`), they do all that instead, in either precision,
from panels, which take as much memory as the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.engines import panels, quants
from kvasir_peer.engines.base import F32, Precision

Container = Literal["panels", "codes4", "codes8", "float"]

# Columns that the sum of a group takes in a widened input.
SUM_COLUMNS = {4: 2, 8: 1}


@dataclass(frozen=True)
class Kernels:
    """What onnxruntime can do here; found by trying (see :mod:`kvasir_peer.engines.onnx_probe`).

    Attributes:
        codes4: ``MatMulNBits`` with 4-bit codes works.
        codes8: ``MatMulNBits`` with 8-bit codes works.
        experts: ``QMoE`` with given router weights works.
        panels: library of C kernels, which are used for all block-quantised types then; None where there is none.
    """

    codes4: bool = True
    codes8: bool = True
    experts: bool = True
    panels: Path | None = None


def container(type_id: int, precision: Precision, kernels: Kernels) -> Container:
    """Say how weights of a type are kept."""
    bits = quants.quant_type(type_id).bits
    if bits and kernels.panels is not None:
        return "panels"
    if bits == 4 and kernels.codes4:
        return "codes4"
    if bits == 8 and kernels.codes8 and precision == "fast":
        return "codes8"
    return "float"


def packed_bytes(type_id: int, rows: int, columns: int, precision: Precision, kernels: Kernels) -> int:
    """Return the bytes that a matrix takes once loaded."""
    kind = container(type_id, precision, kernels)
    if kind == "panels":
        return panels.panel_bytes(type_id, rows, columns)
    n = rows * columns
    if kind == "float":
        return 4 * n
    t = quants.quant_type(type_id)
    # A scale of float32 per group; at level 4 the kernel keeps the scales as given too, and its sums over groups.
    per_group = 12.0 if precision == "fast" else 4.0
    if t.asymmetric and t.bits == 4:
        per_group += 0.5  # a zero point
    if t.asymmetric and precision == "fast":
        n += rows * extra_columns(type_id, columns)
    elif t.asymmetric:
        per_group += 4  # an offset
    return n * t.bits // 8 + int(n // t.group * per_group)


@dataclass(frozen=True, eq=False)
class Centred:
    """Codes as ``MatMulNBits`` takes them: ``weight = scale * (code - zero) + offset``.

    Attributes:
        packed: uint8 [rows, columns * bits / 8].
        scales: float32 [rows, groups].
        zeros: uint8 [rows, ceil(groups / 2)], two 4-bit zero points a byte; None for the operator's own, which is
            8 for 4 bits and 128 for 8 bits.
        offsets: float32 [rows, groups], at most half a scale where the codes can be centred so; None for none.
    """

    packed: NDArray[np.uint8]
    scales: F32
    zeros: NDArray[np.uint8] | None
    offsets: F32 | None


def centred(codes: quants.Codes) -> Centred:
    """Take from each offset the whole number of scales that makes it smallest.

    Rounding activations to int8 is multiplied by ``scale * (code - zero)``, while offsets see them unrounded; so
    the error is least when ``code - zero`` stands for nearly the whole weight.
    """
    if codes.offsets is None:
        return Centred(codes.packed, codes.scales, None, None)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        zeros = np.rint(-codes.offsets / codes.scales)
    largest = 15 if codes.bits == 4 else 31
    zeros = np.clip(np.nan_to_num(zeros), 0, largest).astype(np.uint8)
    offsets = codes.offsets + zeros * codes.scales
    if codes.bits == 4:
        rows, groups = zeros.shape
        pairs = np.zeros((rows, groups + groups % 2), np.uint8)
        pairs[:, :groups] = zeros
        return Centred(codes.packed, codes.scales, pairs[:, 0::2] | (pairs[:, 1::2] << 4), offsets)
    # Five bits leave room in a byte: the zero point goes into the codes.
    grouped = codes.packed.reshape(*zeros.shape, codes.group) + (np.uint8(128) - zeros)[..., None]
    return Centred(grouped.reshape(codes.packed.shape), codes.scales, None, offsets)


def widened(codes: quants.Codes) -> Centred:
    """Turn what offsets are left after centring into further columns of codes, for an input that :func:`widen` made.

    One operator does then what else takes a product, a sum and a second product. Each group's offset is multiplied by
    the group's sum, which stands in the input as a column of its own; with 4 bits in two, the second of which holds
    what the first has rounded away. What is left after that is at most 1/240 of half a scale (1/254 with 8 bits),
    far below the int8 rounding of ``fast``, and so is the rounding of the sums.

    Args:
        codes: of an asymmetric type.

    Returns:
        Codes of ``columns + extra_columns(...)`` columns, without offsets.
    """
    c = centred(codes)
    assert c.offsets is not None
    rows, groups = c.offsets.shape
    padded = -(-groups // codes.group) * codes.group
    left = np.zeros((rows, padded), np.float32)
    left[:, :groups] = c.offsets
    half = 7 if codes.bits == 4 else 127
    more_codes, more_scales = [], []
    for _ in range(SUM_COLUMNS[codes.bits]):
        parts = left.reshape(rows, -1, codes.group)
        scales = np.abs(parts).max(-1) / np.float32(half)
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.nan_to_num(np.rint(parts / scales[..., None])).clip(-half, half)
        left = (parts - steps * scales[..., None]).reshape(rows, padded)
        middle = 8 if codes.bits == 4 else 128
        more_codes.append((steps + middle).astype(np.uint8).reshape(rows, padded))
        more_scales.append(scales)
    extra = np.concatenate(more_codes, axis=1)
    if codes.bits == 4:
        extra = extra[:, 0::2] | (extra[:, 1::2] << 4)
    zeros = None
    if c.zeros is not None:
        nibbles = np.stack([c.zeros & 15, c.zeros >> 4], axis=-1).reshape(rows, -1)[:, :groups]
        n_extra = sum(scales.shape[1] for scales in more_scales)
        total = groups + n_extra
        all_zeros = np.full((rows, total + total % 2), 8, np.uint8)
        all_zeros[:, :groups] = nibbles
        zeros = all_zeros[:, 0::2] | (all_zeros[:, 1::2] << 4)
    return Centred(
        np.concatenate([c.packed, extra], axis=1),
        np.concatenate([c.scales, *more_scales], axis=1).astype(np.float32),
        zeros,
        None,
    )


def extra_columns(type_id: int, columns: int) -> int:
    """Return how many columns :func:`widen` adds; 0 for symmetric types."""
    t = quants.quant_type(type_id)
    if not t.asymmetric:
        return 0
    groups = columns // t.group
    return SUM_COLUMNS[t.bits] * (-(-groups // t.group) * t.group)


def widen(x: F32, type_id: int) -> F32:
    """Add the sums of groups to an input: float32 [n, columns] to [n, columns + extra_columns(...)]."""
    t = quants.quant_type(type_id)
    n, columns = x.shape
    groups = columns // t.group
    wide = np.zeros((n, columns + extra_columns(type_id, columns)), np.float32)
    wide[:, :columns] = x
    sums = x.reshape(n, groups, t.group).sum(-1)
    padded = (wide.shape[1] - columns) // SUM_COLUMNS[t.bits]
    for copy in range(SUM_COLUMNS[t.bits]):
        begin = columns + copy * padded
        wide[:, begin : begin + groups] = sums
    return wide
