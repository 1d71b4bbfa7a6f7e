"""The quantised types of GGUF: how weights are packed, and how to unpack them.

ggml packs a row of weights as blocks. Here a block is taken apart into *codes* (small unsigned integers), one
*scale* per 16 or 32 weights and, for the asymmetric types, one *offset* per 16 or 32 weights::

    weight = scale * (code - zero) + offset          (computed in float32, in this order)

which gives bit for bit what ``gguf.quants`` gives. The layouts are those of ggml's ``ggml-common.h`` and
``ggml-quants.c``.

Work is cut into pieces that stay in a core's cache and is spread over a few threads (numpy lets go of the
interpreter lock), so that 100 MB of a file take well under a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.errors import ModelFileError

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

# Values that the codes of IQ4_NL and IQ4_XS stand for (``kvalues_iq4nl``).
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the values that e2m1 floats stand for (``kvalues_mxfp4``); the scale is halved to match.
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# Weights taken apart at a time: with all intermediate arrays about 1 MiB, which fits a core's own cache.
_PIECE = 1 << 18
# More threads than this wait for memory.
_MAX_THREADS = 8


@dataclass(frozen=True)
class QuantType:
    """One type of the table.

    Attributes:
        id: ggml's number.
        name: ggml's name.
        block: weights in a block.
        block_bytes: bytes of a block.
        bits: width of the codes in an integer container, 4 or 8; 0 for floats.
        group: weights that share a scale; 0 for floats.
        zero: code that stands for zero (plus the offset).
        asymmetric: whether there are offsets.
    """

    id: int
    name: str
    block: int
    block_bytes: int
    bits: Literal[0, 4, 8] = 0
    group: int = 0
    zero: int = 0
    asymmetric: bool = False


TYPES: dict[int, QuantType] = {
    t.id: t
    for t in (
        QuantType(0, "F32", 1, 4),
        QuantType(1, "F16", 1, 2),
        QuantType(30, "BF16", 1, 2),
        QuantType(2, "Q4_0", 32, 18, 4, 32, 8),
        QuantType(3, "Q4_1", 32, 20, 4, 32, 0, True),
        QuantType(6, "Q5_0", 32, 22, 8, 32, 128),
        QuantType(7, "Q5_1", 32, 24, 8, 32, 0, True),
        QuantType(8, "Q8_0", 32, 34, 8, 32, 128),
        QuantType(10, "Q2_K", 256, 84, 4, 16, 0, True),
        QuantType(11, "Q3_K", 256, 110, 4, 16, 8),
        QuantType(12, "Q4_K", 256, 144, 4, 32, 0, True),
        QuantType(13, "Q5_K", 256, 176, 8, 32, 0, True),
        QuantType(14, "Q6_K", 256, 210, 8, 16, 128),
        QuantType(20, "IQ4_NL", 32, 18, 8, 32, 128),
        QuantType(23, "IQ4_XS", 256, 136, 8, 32, 128),
        QuantType(39, "MXFP4", 32, 17, 8, 32, 128),
    )
}

BY_NAME: dict[str, QuantType] = {t.name: t for t in TYPES.values()}


def quant_type(type_id: int, tensor: str = "") -> QuantType:
    """Return the type's entry.

    Raises:
        ModelFileError: a type that is not in the table.
    """
    found = TYPES.get(type_id)
    if found is None:
        where = f"tensor {tensor} has " if tensor else ""
        raise ModelFileError(
            f"{where}ggml type {type_id}, which is not supported; take a file quantised as one of "
            f"{', '.join(BY_NAME)}"
        )
    return found


def row_bytes(type_id: int, columns: int, tensor: str = "") -> int:
    """Return the bytes of a row of ``columns`` weights.

    Raises:
        ModelFileError: an unknown type, or a row that is no whole number of blocks.
    """
    t = quant_type(type_id, tensor)
    if columns % t.block:
        raise ModelFileError(
            f"rows of {columns} weights{f' in tensor {tensor}' if tensor else ''} are no whole number of "
            f"{t.name} blocks of {t.block}"
        )
    return columns // t.block * t.block_bytes


@dataclass(frozen=True, eq=False)
class Codes:
    """Weights taken apart.

    Attributes:
        bits: 4 or 8.
        group: weights that share a scale, 16 or 32.
        zero: code that stands for zero (plus the offset).
        packed: uint8 [rows, columns * bits / 8]; with 4 bits the lower half of byte j is code 2j.
        scales: float32 [rows, columns / group].
        offsets: float32 [rows, columns / group], or None where the type is symmetric.
    """

    bits: int
    group: int
    zero: int
    packed: U8
    scales: F32
    offsets: F32 | None

    def weights(self) -> F32:
        """Return float32 [rows, columns]: what the codes stand for."""
        codes = self.packed
        if self.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
        parts = codes.reshape(len(codes), -1, self.group).astype(np.float32) - np.float32(self.zero)
        with np.errstate(invalid="ignore", over="ignore"):
            parts *= self.scales[..., None]
            if self.offsets is not None:
                parts += self.offsets[..., None]
        return parts.reshape(len(codes), -1)


# ---------------------------------------------------------------------------------------------------------------
# One function per type: blocks as uint8 [n, block_bytes] to (codes, scales, offsets), where codes are uint8
# [n, block] in the order of the weights, and scales and offsets are float32 [n, block / group].

_Parts = tuple[U8, F32, "F32 | None"]


def _f16(blocks: U8, at: int) -> F32:
    """Return the float16 at byte ``at`` of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _words(blocks: U8, begin: int, end: int) -> NDArray[np.uint64]:
    """Return bytes [begin, end) of each block as uint64 [n, (end - begin) / 8], for work on 8 codes at once."""
    return np.ascontiguousarray(blocks[:, begin:end]).view(np.uint64)


def _every(byte: int) -> np.uint64:
    return np.uint64(byte * 0x0101010101010101)


def _shift(words: NDArray[np.uint64], right: int, mask: int) -> NDArray[np.uint64]:
    """Return ``(byte >> right) & mask`` of each byte."""
    shifted = words >> np.uint64(right) if right else words
    return shifted & _every(mask)


def _spread_bits(bits: NDArray[np.uint32], to: int) -> U8:
    """Return uint8 [n, 32]: bit j of each uint32 [n], times ``to``."""
    as_bytes = bits.reshape(-1, 1).view(np.uint8)
    return np.unpackbits(as_bytes, axis=1, bitorder="little") * np.uint8(to)


def _nibbles32(blocks: U8, at: int) -> U8:
    """Return uint8 [n, 32] of 16 bytes whose low halves are codes 0..15 and high halves codes 16..31."""
    q = _words(blocks, at, at + 16)
    out = np.empty((len(blocks), 4), np.uint64)
    out[:, :2] = _shift(q, 0, 15)
    out[:, 2:] = _shift(q, 4, 15)
    return out.view(np.uint8)


def _q4_0(b: U8) -> _Parts:
    return _nibbles32(b, 2), _f16(b, 0), None


def _q4_1(b: U8) -> _Parts:
    return _nibbles32(b, 4), _f16(b, 0), _f16(b, 2)


def _q5_0(b: U8) -> _Parts:
    codes = _nibbles32(b, 6)
    codes |= _spread_bits(np.ascontiguousarray(b[:, 2:6]).view(np.uint32), 16)
    codes += np.uint8(128 - 16)
    return codes, _f16(b, 0), None


def _q5_1(b: U8) -> _Parts:
    codes = _nibbles32(b, 8)
    codes |= _spread_bits(np.ascontiguousarray(b[:, 4:8]).view(np.uint32), 16)
    return codes, _f16(b, 0), _f16(b, 2)


def _q8_0(b: U8) -> _Parts:
    # Turning the top bit adds 128 to a signed byte.
    return (_words(b, 2, 34) ^ _every(0x80)).view(np.uint8), _f16(b, 0), None


def _q2_k(b: U8) -> _Parts:
    n = len(b)
    q = _words(b, 16, 80).reshape(n, 2, 4)  # two halves of 128 weights, 32 bytes each
    out = np.empty((n, 2, 4, 4), np.uint64)
    for i in range(4):
        out[:, :, i] = _shift(q, 2 * i, 3)
    scales = _f16(b, 80) * (b[:, :16] & 15).astype(np.float32)
    offsets = -(_f16(b, 82) * (b[:, :16] >> 4).astype(np.float32))
    return out.view(np.uint8).reshape(n, 256), scales, offsets


def _q3_k(b: U8) -> _Parts:
    n = len(b)
    high = _words(b, 0, 32)  # bit i of byte j belongs to weight 32 i + j
    low = _words(b, 32, 96).reshape(n, 2, 4)
    out = np.empty((n, 2, 4, 4), np.uint64)
    for half in range(2):
        for i in range(4):
            # A bit that is set means no offset of -4, so code = low + 4 * bit - 4 + 8.
            out[:, half, i] = (_shift(high, half * 4 + i, 1) << np.uint64(2)) + _every(4)
            out[:, half, i] += _shift(low[:, half], 2 * i, 3)
    packed = b[:, 96:108]
    s = np.empty((n, 16), np.uint8)
    s[:, :8] = packed[:, :8] & 15
    s[:, 8:] = packed[:, :8] >> 4
    for i in range(4):
        s[:, 4 * i : 4 * i + 4] |= ((packed[:, 8:] >> (2 * i)) & 3) << 4
    scales = _f16(b, 108) * (s.astype(np.float32) - np.float32(32))
    return out.view(np.uint8).reshape(n, 256), scales, None


def _k_scales(packed: U8) -> tuple[F32, F32]:
    """Return the 6-bit scales and minima, float32 [n, 8] each, of the 12 bytes of Q4_K and Q5_K."""
    n = len(packed)
    d, m, md = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.empty((n, 8), np.float32)
    minima = np.empty((n, 8), np.float32)
    scales[:, :4] = d & 63
    scales[:, 4:] = (md & 15) | ((d >> 2) & 48)
    minima[:, :4] = m & 63
    minima[:, 4:] = (md >> 4) | ((m >> 2) & 48)
    return scales, minima


def _nibbles256(b: U8, at: int) -> NDArray[np.uint64]:
    """Return uint64 [n, 4, 2, 4]: four runs of 32 bytes, each with 32 low and then 32 high halves."""
    q = _words(b, at, at + 128).reshape(len(b), 4, 4)
    out = np.empty((len(b), 4, 2, 4), np.uint64)
    out[:, :, 0] = _shift(q, 0, 15)
    out[:, :, 1] = _shift(q, 4, 15)
    return out


def _q4_k(b: U8) -> _Parts:
    scales, minima = _k_scales(b[:, 4:16])
    return _nibbles256(b, 16).view(np.uint8).reshape(len(b), 256), _f16(b, 0) * scales, -(_f16(b, 2) * minima)


def _q5_k(b: U8) -> _Parts:
    scales, minima = _k_scales(b[:, 4:16])
    codes = _nibbles256(b, 48).reshape(len(b), 8, 4)
    high = _words(b, 16, 48)  # bit i of byte j belongs to weight 32 i + j
    for i in range(8):
        codes[:, i] |= _shift(high, i, 1) << np.uint64(4)
    return codes.view(np.uint8).reshape(len(b), 256), _f16(b, 0) * scales, -(_f16(b, 2) * minima)


def _q6_k(b: U8) -> _Parts:
    n = len(b)
    low = _words(b, 0, 128).reshape(n, 2, 8)  # two halves of 128 weights, 64 bytes each
    high = _words(b, 128, 192).reshape(n, 2, 4)
    out = np.empty((n, 2, 2, 8), np.uint64)
    out[:, :, 0] = _shift(low, 0, 15)
    out[:, :, 1] = _shift(low, 4, 15)
    codes = out.reshape(n, 2, 4, 4)
    for i in range(4):
        codes[:, :, i] |= _shift(high, 2 * i, 3) << np.uint64(4)
    codes += _every(128 - 32)
    scales = _f16(b, 208) * b[:, 192:208].view(np.int8).astype(np.float32)
    return codes.view(np.uint8).reshape(n, 256), scales, None


def _value_table(values: Sequence[int]) -> U8:
    """Return uint8 [65536, 2]: for two bytes that hold four codes each, what both low halves stand for."""
    return (np.asarray(values, np.int16) + 128).astype(np.uint8)


_IQ4_TABLE = _value_table(_IQ4_VALUES)
_MXFP4_TABLE = _value_table(_MXFP4_VALUES)


def _iq4_nl(b: U8) -> _Parts:
    return _IQ4_TABLE.take(_nibbles32(b, 2)), _f16(b, 0), None


def _iq4_xs(b: U8) -> _Parts:
    n = len(b)
    q = _words(b, 8, 136).reshape(n, 8, 2)
    out = np.empty((n, 8, 2, 2), np.uint64)
    out[:, :, 0] = _shift(q, 0, 15)
    out[:, :, 1] = _shift(q, 4, 15)
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=-1).reshape(n, 8)
    high = np.ascontiguousarray(b[:, 2:4]).view(np.uint16)
    s = low | ((high >> np.arange(0, 16, 2, dtype=np.uint16)) & 3).astype(np.uint8) << 4
    scales = _f16(b, 0) * (s.astype(np.float32) - np.float32(32))
    return _IQ4_TABLE.take(out.view(np.uint8).reshape(n, 256)), scales, None


def _mxfp4(b: U8) -> _Parts:
    e = b[:, :1].astype(np.uint32)
    # 2 ** (e - 128); the two smallest are subnormal floats.
    bits = np.where(e < 2, np.uint32(0x00200000) << e, (e - np.uint32(1)) << np.uint32(23)).astype(np.uint32)
    return _MXFP4_TABLE.take(_nibbles32(b, 1)), bits.view(np.float32), None


_PARTS: dict[str, Callable[[U8], _Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


# ---------------------------------------------------------------------------------------------------------------


def _in_pieces(work: Callable[[int, int], None], n_blocks: int, block: int, threads: int) -> None:
    """Call ``work(begin, end)`` for pieces of the blocks, on a few threads where there is much to do."""
    per_piece = max(1, _PIECE // block)
    edges = [(i, min(i + per_piece, n_blocks)) for i in range(0, n_blocks, per_piece)]
    count = min(threads or os.cpu_count() or 1, _MAX_THREADS, len(edges) // 2)
    # Threads take pieces from one iterator, which is cheaper than a future for each.
    left = iter(edges)

    def take() -> None:
        # A file may hold scales that are infinite or no numbers; that shows in the results, not as warnings.
        with np.errstate(invalid="ignore", over="ignore"):
            for begin, end in left:
                work(begin, end)

    if count <= 1:
        take()
        return

    with ThreadPoolExecutor(count, thread_name_prefix="unpack") as pool:
        for done in [pool.submit(take) for _ in range(count)]:
            done.result()


def _blocks(raw: NDArray[Any], t: QuantType, shape: Sequence[int]) -> tuple[U8, int, int]:
    """Return the blocks as uint8 [n, block_bytes], and how many rows and columns there are."""
    columns = shape[-1]
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    need = rows * row_bytes(t.id, columns)
    if raw.nbytes != need:
        raise ModelFileError(f"{raw.nbytes} bytes for {t.name} weights of shape {tuple(shape)}; need {need}")
    return np.ascontiguousarray(raw).view(np.uint8).reshape(-1, t.block_bytes), rows, columns


def dequantize(raw: NDArray[Any], type_id: int, shape: Sequence[int], *, threads: int = 0) -> F32:
    """Return weights as float32, bit-equal to ``gguf.quants.dequantize``.

    Args:
        raw: uint8, the tensor's bytes (or whole rows of it).
        type_id: ggml type.
        shape: numpy order, the last is the contiguous one.
        threads: 0 takes all cores (up to 8).

    Raises:
        ModelFileError: unknown type, or bytes that do not fit the shape.
    """
    t = quant_type(type_id)
    if t.bits == 0:
        data = np.ascontiguousarray(raw).view(np.uint8).reshape(-1)
        _blocks(data, t, shape)
        if t.name == "F32":
            return data.view(np.float32).reshape(shape).copy()
        out = np.empty(data.size // 2, np.float32)
        source = data.view(np.float16 if t.name == "F16" else np.uint16)

        def widen(begin: int, end: int) -> None:
            if t.name == "F16":
                out[begin:end] = source[begin:end]
            else:
                np.left_shift(source[begin:end], np.uint32(16), out=out.view(np.uint32)[begin:end])

        _in_pieces(widen, out.size, 1, threads)
        return out.reshape(shape)
    blocks, _, _ = _blocks(raw, t, shape)
    take_apart = _PARTS[t.name]
    groups = t.block // t.group
    weights = np.empty((len(blocks), groups, t.group), np.float32)

    def work(begin: int, end: int) -> None:
        codes, scales, offsets = take_apart(blocks[begin:end])
        part = weights[begin:end]
        if t.zero:
            # Exact: both are small integers.
            codes = (codes - np.uint8(t.zero)).view(np.int8)
        np.multiply(codes.reshape(part.shape), scales[..., None], out=part)
        if offsets is not None:
            part += offsets[..., None]

    _in_pieces(work, len(blocks), t.block, threads)
    return weights.reshape(shape)


def unpack(raw: NDArray[Any], type_id: int, shape: Sequence[int], *, threads: int = 0) -> Codes:
    """Return the codes, scales and offsets of a quantised tensor.

    Args:
        raw: uint8, the tensor's bytes (or whole rows of it).
        type_id: ggml type, not F32, F16 or BF16.
        shape: numpy order; all but the last are taken together as rows.
        threads: 0 takes all cores (up to 8).

    Raises:
        ModelFileError: unknown type or one without codes, or bytes that do not fit the shape.
    """
    t = quant_type(type_id)
    if t.bits == 0:
        raise ModelFileError(f"{t.name} weights have no codes to unpack; dequantise them")
    blocks, rows, columns = _blocks(raw, t, shape)
    take_apart = _PARTS[t.name]
    groups = t.block // t.group
    packed = np.empty((len(blocks), t.block * t.bits // 8), np.uint8)
    scales = np.empty((len(blocks), groups), np.float32)
    offsets = np.empty((len(blocks), groups), np.float32) if t.asymmetric else None

    def work(begin: int, end: int) -> None:
        codes, scale, offset = take_apart(blocks[begin:end])
        if t.bits == 4:
            pairs = codes.view(np.uint16)  # little-endian: code 2j, and code 2j + 1 eight bits up
            np.copyto(packed[begin:end], pairs | (pairs >> 4), casting="unsafe")
        else:
            packed[begin:end] = codes
        scales[begin:end] = scale
        if offsets is not None and offset is not None:
            offsets[begin:end] = offset

    _in_pieces(work, len(blocks), t.block, threads)
    return Codes(
        bits=t.bits,
        group=t.group,
        zero=t.zero,
        packed=packed.reshape(rows, -1),
        scales=scales.reshape(rows, -1),
        offsets=None if offsets is None else offsets.reshape(rows, columns // t.group),
    )
