"""Quantised matrix times vector in one kernel, for decoding on a GPU.

A decode step reads every weight it uses once and does next to nothing with it, so the card's memory decides how
fast it is. Taking weights apart into floats first moves several times the bytes; this kernel (Triton, which comes
with torch's CUDA build) reads the file's bytes, takes them apart in registers and adds up, as llama.cpp's
``mul_mat_vec`` kernels do.

A program of the kernel computes a few outputs of one (row, matrix) pair. It walks over the matrix rows in *units* of
32, 64 or 128 weights, whatever the type packs together. The formulas are those of
:mod:`kvasir_peer.engines.torch_dequantize`.
"""

# Kernels are compiled by Triton; what Python's types would say of their arguments is not what they are.
# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from kvasir_peer.engines.quants import BY_NAME

# Outputs of a program, and units that it takes at a time: 4 warps with some 16 bytes for each thread.
_BLOCK_OUT = 8
_UNITS = 8

# Weights of a unit, by ggml type.
_UNIT: Mapping[int, int] = {
    BY_NAME[name].id: weights
    for name, weights in {
        "Q4_0": 32,
        "Q4_1": 32,
        "Q8_0": 32,
        "MXFP4": 32,
        "Q4_K": 64,
        "Q5_K": 64,
        "Q6_K": 128,
    }.items()
}
TYPES = frozenset(_UNIT)
# What compiling or starting a kernel can raise on a device that it does not suit, or on a machine that lacks what
# Triton builds its launcher with (a C compiler, Python's headers).
FAILURES = (RuntimeError, TritonError, OSError, subprocess.SubprocessError, AssertionError, ImportError)

_Q4_0: tl.constexpr = tl.constexpr(2)
_Q4_1: tl.constexpr = tl.constexpr(3)
_Q8_0: tl.constexpr = tl.constexpr(8)
_Q4_K: tl.constexpr = tl.constexpr(12)
_Q5_K: tl.constexpr = tl.constexpr(13)
_Q6_K: tl.constexpr = tl.constexpr(14)
_MXFP4: tl.constexpr = tl.constexpr(39)


@triton.jit
def _f16(at, mask):
    """The float16 at pointers to its first byte."""
    low = tl.load(at, mask=mask, other=0).to(tl.uint16)
    high = tl.load(at + 1, mask=mask, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _inputs(xs, unit, here, SIZE: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Inputs [FIRST, FIRST + COUNT) of each unit, float32 [1, units, COUNT]."""
    at = xs + unit[:, None] * SIZE + FIRST + tl.arange(0, COUNT)[None, :]
    return tl.load(at, mask=here[:, None], other=0).to(tl.float32)[None, :, :]


@triton.jit
def _bytes(block, mask, FIRST: tl.constexpr, COUNT: tl.constexpr, WORD: tl.constexpr):
    """Bytes [FIRST, FIRST + COUNT) after each pointer, uint8 [outputs, units, COUNT].

    They are loaded as words of WORD bytes, as far as the type's block size keeps words aligned: a load of single
    bytes takes as long as one of four.
    """
    if WORD == 1:
        at = block[:, :, None] + FIRST + tl.arange(0, COUNT)[None, None, :]
        found = tl.load(at, mask=mask[:, :, None], other=0)
    else:
        if WORD == 2:
            at = (block + FIRST).to(tl.pointer_type(tl.uint16))[:, :, None]
            halves = tl.load(at + tl.arange(0, COUNT // 2)[None, None, :], mask=mask[:, :, None], other=0)
        else:
            at = (block + FIRST).to(tl.pointer_type(tl.uint32))[:, :, None]
            words = tl.load(at + tl.arange(0, COUNT // 4)[None, None, :], mask=mask[:, :, None], other=0)
            pairs = tl.join(words & 0xFFFF, words >> 16)
            halves = pairs.reshape(block.shape[0], block.shape[1], COUNT // 2)
        parts = tl.join(halves & 0xFF, halves >> 8)
        found = parts.reshape(block.shape[0], block.shape[1], COUNT).to(tl.uint8)
    return found


@triton.jit
def _q4_0(base, xs, unit, here, mask):
    block = base[:, None] + unit[None, :] * 18
    q = _bytes(block, mask, 2, 16, 2)
    low = ((q & 15).to(tl.float32) - 8.0) * _inputs(xs, unit, here, 32, 0, 16)
    high = ((q >> 4).to(tl.float32) - 8.0) * _inputs(xs, unit, here, 32, 16, 16)
    return tl.sum(low + high, 2) * _f16(block, mask)


@triton.jit
def _q4_1(base, xs, unit, here, mask):
    block = base[:, None] + unit[None, :] * 20
    q = _bytes(block, mask, 4, 16, 4)
    x0 = _inputs(xs, unit, here, 32, 0, 16)
    x1 = _inputs(xs, unit, here, 32, 16, 16)
    dot = tl.sum((q & 15).to(tl.float32) * x0 + (q >> 4).to(tl.float32) * x1, 2)
    return dot * _f16(block, mask) + tl.sum(x0 + x1, 2) * _f16(block + 2, mask)


@triton.jit
def _q8_0(base, xs, unit, here, mask):
    block = base[:, None] + unit[None, :] * 34
    q = _bytes(block, mask, 2, 32, 2).to(tl.int8, bitcast=True).to(tl.float32)
    return tl.sum(q * _inputs(xs, unit, here, 32, 0, 32), 2) * _f16(block, mask)


@triton.jit
def _e2m1(code):
    """Twice the value of a 4-bit float, float32."""
    low = code & 7
    large = ((low & 1) | 2).to(tl.int32) << (tl.maximum((low >> 1).to(tl.int32), 1) - 1)
    value = tl.where(low < 4, low.to(tl.int32), large).to(tl.float32)
    return tl.where(code > 7, -value, value)


@triton.jit
def _mxfp4(base, xs, unit, here, mask):
    block = base[:, None] + unit[None, :] * 17
    e = tl.load(block, mask=mask, other=0).to(tl.int32)
    # 2 ** (e - 128), put together from bits; the two smallest are subnormal.
    bits = tl.where(e < 2, (tl.minimum(e, 1) + 1) * 0x00200000, (tl.maximum(e, 1) - 1) << 23)
    q = _bytes(block, mask, 1, 16, 1)
    low = _e2m1(q & 15) * _inputs(xs, unit, here, 32, 0, 16)
    high = _e2m1(q >> 4) * _inputs(xs, unit, here, 32, 16, 16)
    return tl.sum(low + high, 2) * bits.to(tl.float32, bitcast=True)


@triton.jit
def _k_scale(block, mask, sub):
    """Six-bit scale and minimum of sub-block ``sub`` (int32 [1, units]) in Q4_K and Q5_K, float32."""
    first = sub < 4
    k = sub & 3
    d = tl.load(block + 4 + k, mask=mask, other=0)
    m = tl.load(block + 8 + k, mask=mask, other=0)
    md = tl.load(block + 12 + k, mask=mask, other=0)
    scale = tl.where(first, d & 63, (md & 15) | ((d >> 2) & 48))
    minimum = tl.where(first, m & 63, (md >> 4) | ((m >> 2) & 48))
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def _k_dot(block, mask, pair, low, high, x0, x1):
    """Two sub-blocks of Q4_K or Q5_K: codes as float32 [outputs, units, 32], and their inputs."""
    d = _f16(block, mask)
    dmin = _f16(block + 2, mask)
    scale0, minimum0 = _k_scale(block, mask, pair * 2)
    scale1, minimum1 = _k_scale(block, mask, pair * 2 + 1)
    dot = tl.sum(low * x0, 2) * scale0 + tl.sum(high * x1, 2) * scale1
    return d * dot - dmin * (tl.sum(x0, 2) * minimum0 + tl.sum(x1, 2) * minimum1)


@triton.jit
def _q4_k(base, xs, unit, here, mask):
    block = base[:, None] + (unit // 4)[None, :] * 144
    pair = (unit % 4)[None, :]
    q = _bytes(block + pair * 32, mask, 16, 32, 4)
    x0 = _inputs(xs, unit, here, 64, 0, 32)
    x1 = _inputs(xs, unit, here, 64, 32, 32)
    return _k_dot(block, mask, pair, (q & 15).to(tl.float32), (q >> 4).to(tl.float32), x0, x1)


@triton.jit
def _q5_k(base, xs, unit, here, mask):
    block = base[:, None] + (unit // 4)[None, :] * 176
    pair = (unit % 4)[None, :]
    q = _bytes(block + pair * 32, mask, 48, 32, 4)
    # Bit 2 i of byte j is the fifth bit of code j of sub-block 2 i.
    fifth = _bytes(block, mask, 16, 32, 4).to(tl.int32) >> (pair * 2)[:, :, None]
    low = (q & 15).to(tl.int32) | ((fifth & 1) << 4)
    high = (q >> 4).to(tl.int32) | ((fifth & 2) << 3)
    x0 = _inputs(xs, unit, here, 64, 0, 32)
    x1 = _inputs(xs, unit, here, 64, 32, 32)
    return _k_dot(block, mask, pair, low.to(tl.float32), high.to(tl.float32), x0, x1)


@triton.jit
def _q6_part(block, mask, half, codes, x, PART: tl.constexpr):
    """A quarter of a unit of Q6_K: codes int32 [outputs, units, 32] with two scales."""
    sub = tl.arange(0, 32) // 16
    at = block[:, :, None] + 192 + (half * 8)[:, :, None] + PART * 2 + sub[None, None, :]
    scale = tl.load(at, mask=mask[:, :, None], other=0).to(tl.int8, bitcast=True).to(tl.float32)
    return tl.sum((codes - 32).to(tl.float32) * scale * x, 2)


@triton.jit
def _q6_k(base, xs, unit, here, mask):
    block = base[:, None] + (unit // 2)[None, :] * 210
    half = (unit % 2)[None, :]
    low = block + half * 64
    q0 = _bytes(low, mask, 0, 32, 2).to(tl.int32)
    q1 = _bytes(low, mask, 32, 32, 2).to(tl.int32)
    top = _bytes(block + half * 32, mask, 128, 32, 2).to(tl.int32)
    x0 = _inputs(xs, unit, here, 128, 0, 32)
    x1 = _inputs(xs, unit, here, 128, 32, 32)
    x2 = _inputs(xs, unit, here, 128, 64, 32)
    x3 = _inputs(xs, unit, here, 128, 96, 32)
    dot = _q6_part(block, mask, half, (q0 & 15) | ((top & 3) << 4), x0, 0)
    dot += _q6_part(block, mask, half, (q1 & 15) | (((top >> 2) & 3) << 4), x1, 1)
    dot += _q6_part(block, mask, half, (q0 >> 4) | (((top >> 4) & 3) << 4), x2, 2)
    dot += _q6_part(block, mask, half, (q1 >> 4) | (((top >> 6) & 3) << 4), x3, 3)
    return dot * _f16(block + 208, mask)


@triton.jit
def _kernel(
    raw,
    x,
    y,
    matrices,
    n_out,
    n_units,
    row_bytes,
    matrix_bytes,
    x_stride,
    per_row,
    KIND: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    UNITS: tl.constexpr,
):
    pair = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    matrix = tl.load(matrices + pair)
    base = raw + matrix * matrix_bytes + rows.to(tl.int64) * row_bytes
    xs = x + (pair // per_row).to(tl.int64) * x_stride
    total = tl.zeros([BLOCK_OUT, UNITS], dtype=tl.float32)
    for start in range(0, n_units, UNITS):
        unit = start + tl.arange(0, UNITS)
        here = unit < n_units
        mask = (rows < n_out)[:, None] & here[None, :]
        if KIND == _Q4_0:
            total += _q4_0(base, xs, unit, here, mask)
        elif KIND == _Q4_1:
            total += _q4_1(base, xs, unit, here, mask)
        elif KIND == _Q8_0:
            total += _q8_0(base, xs, unit, here, mask)
        elif KIND == _Q4_K:
            total += _q4_k(base, xs, unit, here, mask)
        elif KIND == _Q5_K:
            total += _q5_k(base, xs, unit, here, mask)
        elif KIND == _Q6_K:
            total += _q6_k(base, xs, unit, here, mask)
        elif KIND == _MXFP4:
            total += _mxfp4(base, xs, unit, here, mask)
    tl.store(y + pair.to(tl.int64) * n_out + rows, tl.sum(total, 1), mask=rows < n_out)


def matvec(raw: Tensor, type_id: int, x: Tensor, matrices: Tensor, per_row: int = 1) -> Tensor:
    """Multiply matrices by vectors.

    Args:
        raw: uint8 [matrices, out, row_bytes], the file's bytes.
        type_id: ggml type, one of :data:`TYPES`.
        x: [rows, in], of any float type.
        matrices: int64 [p], which matrix each result is of.
        per_row: results of one row of ``x``: result i takes row ``i // per_row``.

    Returns:
        Float32 [p, out].
    """
    p, out = len(matrices), raw.shape[1]
    x = x.contiguous()  # rows may be far apart, but not the values of a row
    y = torch.empty((p, out), dtype=torch.float32, device=x.device)
    grid: Any = (triton.cdiv(out, _BLOCK_OUT), p)
    _kernel[grid](
        raw,
        x,
        y,
        matrices,
        out,
        x.shape[1] // _UNIT[type_id],
        raw.shape[2],
        raw.shape[1] * raw.shape[2],
        x.stride(0),
        per_row,
        KIND=type_id,
        BLOCK_OUT=_BLOCK_OUT,
        UNITS=_UNITS,
    )
    return y
