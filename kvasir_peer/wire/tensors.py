"""Hidden states as bytes: f32, f16, bf16, or int8 with one scale per row.

A tensor is ``[rows, width]``, row after row, little endian. int8 puts the rows' f32 scales first:
``rows * 4`` bytes, then ``rows * width`` signed bytes; a value is ``scale * code``.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from kvasir_peer.errors import WireError
from kvasir_peer.wire.codec import Buffer

Dtype = Literal["f32", "f16", "bf16", "int8"]
DTYPES: tuple[Dtype, ...] = ("f32", "f16", "bf16", "int8")

_ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "int8": 1}
_F16_MAX = np.float32(65504.0)
_INT8_MAX = np.float32(127.0)

Floats = npt.NDArray[np.float32]


def tensor_bytes(dtype: str, rows: int, width: int) -> int:
    """Exact size of ``[rows, width]`` in ``dtype``.

    Raises:
        WireError: code ``dtype``, for a dtype that is not in :data:`DTYPES`.
    """
    if dtype not in _ITEM_BYTES:
        raise WireError("dtype", f"boundary dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return rows * width * _ITEM_BYTES[dtype] + (rows * 4 if dtype == "int8" else 0)


def encode_tensor(values: Floats, dtype: str, out: Buffer | None = None) -> memoryview:
    """``values`` f32 ``[rows, width]`` in ``dtype``, written to the start of ``out`` where one is given.

    f16 clips at its largest finite value: a boundary must not turn a large activation into infinity.
    """
    rows, width = values.shape
    size = tensor_bytes(dtype, rows, width)
    target = memoryview(bytearray(size)) if out is None else memoryview(out)[:size]
    if dtype == "f32":
        np.frombuffer(target, "<f4").reshape(rows, width)[:] = values
    elif dtype == "f16":
        with np.errstate(over="ignore"):
            np.frombuffer(target, "<f2").reshape(rows, width)[:] = np.clip(values, -_F16_MAX, _F16_MAX)
    elif dtype == "bf16":
        bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
        # Round to nearest, ties to even; a NaN must stay one, so its payload is not rounded away.
        rounded = (
            (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        ).astype("<u2")
        nan = np.isnan(values)
        if nan.any():
            rounded[nan] = np.uint16(0x7FC0)
        np.frombuffer(target, "<u2").reshape(rows, width)[:] = rounded
    else:
        scale = np.abs(values).max(axis=1, initial=0.0) / _INT8_MAX  # [rows]
        np.frombuffer(target[: rows * 4], "<f4")[:] = scale
        safe = np.where(scale > 0, scale, 1.0)[:, None]
        np.frombuffer(target[rows * 4 :], np.int8).reshape(rows, width)[:] = np.rint(values / safe)
    return target


def decode_tensor(data: Buffer, dtype: str, rows: int, width: int) -> Floats:
    """f32 ``[rows, width]`` from bytes; the size must be exact.

    Raises:
        WireError: code ``shape`` when the size is not that of the shape, ``dtype`` for an unknown dtype.
    """
    size = tensor_bytes(dtype, rows, width)
    view = memoryview(data)
    if view.nbytes != size:
        raise WireError("shape", f"tensor of {view.nbytes} bytes, [{rows}, {width}] in {dtype} takes {size}")
    if dtype == "f32":
        return np.frombuffer(view, "<f4").reshape(rows, width).astype(np.float32)
    if dtype == "f16":
        return np.frombuffer(view, "<f2").reshape(rows, width).astype(np.float32)
    if dtype == "bf16":
        wide = np.frombuffer(view, "<u2").astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).reshape(rows, width)
    scale = np.frombuffer(view[: rows * 4], "<f4")[:, None]
    values: Floats = np.frombuffer(view[rows * 4 :], np.int8).reshape(rows, width) * scale
    return values
