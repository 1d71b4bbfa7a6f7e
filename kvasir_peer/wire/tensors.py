"""Hidden states as bytes: f32, f16, bf16, or int8 with one scale and a few outliers per row.

A tensor is ``[rows, width]``, row after row, little endian. In int8 a value is ``scale * code``, but for the largest
values of its row, one for every :data:`OUTLIER_EVERY` begun: in many models a few values are a thousand times as large
as the others, and would leave these a code or two. They are named by their column and kept in f16 beside. The parts
follow each other: scales f32 ``[rows]``, columns u16 ``[rows, outliers]``, their values f16 ``[rows, outliers]``, codes
int8 ``[rows, width]``.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvasir_peer.errors import WireError
from kvasir_peer.wire.codec import Buffer

Dtype = Literal["f32", "f16", "bf16", "int8"]
DTYPES: tuple[Dtype, ...] = ("f32", "f16", "bf16", "int8")

_ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "int8": 1}
_F16_MAX = np.float32(65504.0)
_INT8_MAX = np.float32(127.0)
# One outlier for so many values: 3 % more bytes, and a twelfth of the error in the logits of SmolLM2.
OUTLIER_EVERY = 128
_MAX_INT8_WIDTH = 1 << 16  # columns are u16

Floats = npt.NDArray[np.float32]


def tensor_bytes(dtype: str, rows: int, width: int) -> int:
    """Exact size of ``[rows, width]`` in ``dtype``.

    Raises:
        WireError: code ``dtype``, for a dtype that is not in :data:`DTYPES`; ``shape``, for rows too wide for int8.
    """
    if dtype not in _ITEM_BYTES:
        raise WireError("dtype", f"boundary dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if dtype == "int8":
        if width > _MAX_INT8_WIDTH:
            raise WireError("shape", f"rows of {width} values; int8 takes up to {_MAX_INT8_WIDTH}")
        return rows * (width + 4 + 4 * _outliers(width))
    return rows * width * _ITEM_BYTES[dtype]


def _outliers(width: int) -> int:
    """Values of a row that int8 keeps beside."""
    return -(-width // OUTLIER_EVERY)


def _int8_parts(data: memoryview, rows: int, width: int) -> tuple[Any, Any, Any, Any]:
    """Views of scales ``[rows, 1]``, columns and values ``[rows, outliers]``, and codes ``[rows, width]``."""
    count = _outliers(width)
    ends = np.cumsum([0, 4 * rows, 2 * rows * count, 2 * rows * count, rows * width]).tolist()
    parts = [data[a:b] for a, b in itertools.pairwise(ends)]
    return (
        np.frombuffer(parts[0], "<f4").reshape(rows, 1),
        np.frombuffer(parts[1], "<u2").reshape(rows, count),
        np.frombuffer(parts[2], "<f2").reshape(rows, count),
        np.frombuffer(parts[3], np.int8).reshape(rows, width),
    )


def _encode_int8(values: Floats, target: memoryview) -> None:
    rows, width = values.shape
    scales, columns, outliers, codes = _int8_parts(target, rows, width)
    count = _outliers(width)
    # NaN counts as the largest: what makes no sense must not look as if it did.
    columns[:] = np.argpartition(np.abs(values), width - count, axis=1)[:, width - count :]
    largest = np.take_along_axis(values, columns.astype(np.intp), axis=1)
    with np.errstate(over="ignore"):
        outliers[:] = np.clip(largest, -_F16_MAX, _F16_MAX)
    rest = values.copy()
    np.put_along_axis(rest, columns.astype(np.intp), np.float32(0), axis=1)
    scales[:] = np.abs(rest).max(axis=1, initial=0.0, keepdims=True) / _INT8_MAX
    codes[:] = np.rint(rest / np.where(scales > 0, scales, np.float32(1)))


def _decode_int8(data: memoryview, rows: int, width: int) -> Floats:
    scales, columns, outliers, codes = _int8_parts(data, rows, width)
    if columns.size and int(columns.max()) >= width:
        raise WireError("shape", f"an outlier in column {int(columns.max())} of {width}")
    values: Floats = codes * scales
    np.put_along_axis(values, columns.astype(np.intp), outliers.astype(np.float32), axis=1)
    return values


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
        _encode_int8(values, target)
    return target


def decode_tensor(data: Buffer, dtype: str, rows: int, width: int) -> Floats:
    """f32 ``[rows, width]`` from bytes; the size must be exact.

    Raises:
        WireError: code ``shape`` when the size is not that of the shape, or an outlier is outside its row; ``dtype``
            for an unknown dtype.
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
    return _decode_int8(view, rows, width)
