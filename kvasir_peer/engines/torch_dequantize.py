"""Quantised GGUF weights to floats, in torch operations that run on any device.

On a GPU weights stay as the file's bytes and are taken apart each time they are used, a whole batch of experts
in one go. The formulas are those of :mod:`kvasir_peer.engines.quants` (which does the same on the host with
tricks that only pay there); in float32 the result is equal to it bit for bit.

Each function takes blocks, uint8 [n, block_bytes], and returns codes [n, groups, group] of a small integer type,
scales float32 [n, groups, 1], and offsets float32 [n, groups, 1] or None: ``weight = scale * code + offset``.
Nothing here waits for the device, so that it can be captured into a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kvasir_peer.engines.quants import quant_type

Parts = tuple[Tensor, Tensor, "Tensor | None"]

# What the codes of IQ4_NL/IQ4_XS and (doubled) e2m1 floats stand for; ggml's kvalues_iq4nl and kvalues_mxfp4.
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _f16(b: Tensor, at: int) -> Tensor:
    """Return the float16 at byte ``at`` of each block, as float32 [n, 1, 1]."""
    return b[:, at : at + 2].contiguous().view(torch.float16).float()[:, :, None]


def _nibbles(q: Tensor) -> Tensor:
    """Split bytes [..., m] into low and high halves [..., 2, m]."""
    return torch.stack((q & 15, q >> 4), dim=-2)


def _pairs_of_bits(q: Tensor) -> Tensor:
    """Split bytes [..., m] into their four two-bit parts [..., 4, m], lowest first."""
    return torch.stack((q & 3, (q >> 2) & 3, (q >> 4) & 3, q >> 6), dim=-2)


def _bits(q: Tensor) -> Tensor:
    """Split bytes [n, m] into their bits [n, 8, m], lowest first."""
    return torch.stack([(q >> i) & 1 for i in range(8)], dim=1)


def _signed(codes: Tensor, zero: int) -> Tensor:
    return codes.to(torch.int8) - zero


def _q4_0(b: Tensor) -> Parts:
    return _signed(_nibbles(b[:, 2:18]), 8).reshape(-1, 1, 32), _f16(b, 0), None


def _q4_1(b: Tensor) -> Parts:
    return _nibbles(b[:, 4:20]).reshape(-1, 1, 32), _f16(b, 0), _f16(b, 2)


def _fifth_bits(q: Tensor) -> Tensor:
    """Bits of four bytes [n, 4], in the order of the 32 codes [n, 32], worth 16 each."""
    return _bits(q).transpose(1, 2).reshape(-1, 32) << 4


def _q5_0(b: Tensor) -> Parts:
    codes = _nibbles(b[:, 6:22]).reshape(-1, 32) | _fifth_bits(b[:, 2:6])
    return _signed(codes, 16).reshape(-1, 1, 32), _f16(b, 0), None


def _q5_1(b: Tensor) -> Parts:
    codes = _nibbles(b[:, 8:24]).reshape(-1, 32) | _fifth_bits(b[:, 4:8])
    return codes.reshape(-1, 1, 32), _f16(b, 0), _f16(b, 2)


def _q8_0(b: Tensor) -> Parts:
    return b[:, 2:34].contiguous().view(torch.int8).reshape(-1, 1, 32), _f16(b, 0), None


def _q2_k(b: Tensor) -> Parts:
    codes = _pairs_of_bits(b[:, 16:80].reshape(-1, 2, 32)).reshape(-1, 16, 16)
    scales = _f16(b, 80) * (b[:, :16] & 15).float()[:, :, None]
    offsets = -(_f16(b, 82) * (b[:, :16] >> 4).float()[:, :, None])
    return codes, scales, offsets


def _q3_k(b: Tensor) -> Parts:
    low = _pairs_of_bits(b[:, 32:96].reshape(-1, 2, 32)).reshape(-1, 256)
    high = _bits(b[:, :32]).reshape(-1, 256) << 2
    packed, upper = b[:, 96:104], b[:, 104:108]
    s = torch.cat((packed & 15, packed >> 4), dim=1) | (_pairs_of_bits(upper).reshape(-1, 16) << 4)
    scales = _f16(b, 108) * _signed(s, 32).float()[:, :, None]
    return _signed(low | high, 4).reshape(-1, 16, 16), scales, None


def _k_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """Six-bit scales and minima, float32 [n, 8, 1] each, of the 12 bytes of Q4_K and Q5_K."""
    d, m, md = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat((d & 63, (md & 15) | ((d >> 2) & 48)), dim=1)
    minima = torch.cat((m & 63, (md >> 4) | ((m >> 2) & 48)), dim=1)
    return _f16(b, 0) * scales.float()[:, :, None], -(_f16(b, 2) * minima.float()[:, :, None])


def _q4_k(b: Tensor) -> Parts:
    scales, offsets = _k_scales(b)
    return _nibbles(b[:, 16:144].reshape(-1, 4, 32)).reshape(-1, 8, 32), scales, offsets


def _q5_k(b: Tensor) -> Parts:
    scales, offsets = _k_scales(b)
    codes = _nibbles(b[:, 48:176].reshape(-1, 4, 32)).reshape(-1, 8, 32) | (_bits(b[:, 16:48]) << 4)
    return codes, scales, offsets


def _q6_k(b: Tensor) -> Parts:
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    high = _pairs_of_bits(b[:, 128:192].reshape(-1, 2, 32)).reshape(-1, 256) << 4
    scales = _f16(b, 208) * b[:, 192:208].contiguous().view(torch.int8).float()[:, :, None]
    return _signed(low | high, 32).reshape(-1, 16, 16), scales, None


@functools.cache
def _table(values: tuple[int, ...], device: torch.device) -> Tensor:
    # Kept, because a copy from the host can't be captured into a CUDA graph.
    return torch.tensor(values, dtype=torch.int8, device=device)


def _look_up(codes: Tensor, values: tuple[int, ...]) -> Tensor:
    return _table(values, codes.device)[codes.int()]


def _iq4_nl(b: Tensor) -> Parts:
    return _look_up(_nibbles(b[:, 2:18]), _IQ4_VALUES).reshape(-1, 1, 32), _f16(b, 0), None


def _iq4_xs(b: Tensor) -> Parts:
    codes = _look_up(_nibbles(b[:, 8:136].reshape(-1, 8, 16)), _IQ4_VALUES).reshape(-1, 8, 32)
    low = torch.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), dim=-1).reshape(-1, 8)
    high = _pairs_of_bits(b[:, 2:4]).transpose(1, 2).reshape(-1, 8) << 4
    return codes, _f16(b, 0) * _signed(low | high, 32).float()[:, :, None], None


def _mxfp4(b: Tensor) -> Parts:
    # 2 ** (e - 128), exact: the bits of a float are put together (the two smallest are subnormal).
    e = b[:, :1].int()
    bits = torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1).clamp(min=0) << 23)
    scales = bits.int().view(torch.float32)[:, :, None]
    return _look_up(_nibbles(b[:, 1:17]), _MXFP4_VALUES).reshape(-1, 1, 32), scales, None


_PARTS: Mapping[str, Callable[[Tensor], Parts]] = {
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
_FLOATS: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def dequantize(raw: Tensor, type_id: int, dtype: torch.dtype) -> Tensor:
    """Turn rows of raw bytes into weights.

    Args:
        raw: uint8 [..., row_bytes], whole rows as in the file, on any device.
        type_id: ggml type.
        dtype: of the result; sums and products are float32 whatever it is.

    Returns:
        [..., columns].

    Raises:
        ModelFileError: unknown type.
    """
    t = quant_type(type_id)
    if t.bits == 0:
        return raw.contiguous().view(_FLOATS[t.name]).to(dtype)
    codes, scales, offsets = _PARTS[t.name](raw.reshape(-1, t.block_bytes))
    weights = codes.float() * scales
    if offsets is not None:
        weights = weights + offsets
    columns = raw.shape[-1] // t.block_bytes * t.block
    return weights.to(dtype).reshape(*raw.shape[:-1], columns)
