"""Weights laid as the C kernels take them: panels of 16 rows (``kernels/panels.h``)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.engines import quants
from kvasir_peer.engines.kernels.library import Missing, find_library
from kvasir_peer.errors import EngineError

U8 = NDArray[np.uint8]

ROWS = 16
_COLUMNS = 32  # of a block
# Bits of a code, bytes of 16 rows' scales per block of 32 columns, and per super-block of 256.
_LAYOUT = {
    "Q4_0": (4, 32, 0),
    "Q4_1": (4, 64, 0),
    "Q5_0": (5, 32, 0),
    "Q5_1": (5, 64, 0),
    "Q8_0": (8, 32, 0),
    "Q2_K": (2, 32, 64),
    "Q3_K": (3, 32, 32),
    "Q4_K": (4, 32, 64),
    "Q5_K": (5, 32, 64),
    "Q6_K": (6, 32, 32),
    "IQ4_NL": (4, 32, 0),
    "IQ4_XS": (4, 16, 32),
    "MXFP4": (4, 16, 0),
}
TYPES = tuple(quants.BY_NAME[name].id for name in _LAYOUT)
# More threads than this wait for memory.
_MAX_THREADS = 8


def panel_bytes(type_id: int, rows: int, columns: int) -> int:
    """Return the bytes that a matrix takes in panels: those of the file, within 5 %, and whole panels.

    Args:
        type_id: ggml type, one of ``TYPES``.
        rows: outputs.
        columns: inputs, a whole number of the type's blocks.
    """
    bits, scales, super_scales = _LAYOUT[quants.quant_type(type_id).name]
    panel = columns // _COLUMNS * (ROWS * _COLUMNS * bits // 8 + scales) + columns // 256 * super_scales
    return -(-rows // ROWS) * panel


def pack(
    raw: NDArray[Any], type_id: int, rows: int, columns: int, threads: int = 1, out: U8 | None = None
) -> U8:
    """Lay a matrix as panels.

    Args:
        raw: uint8, the matrix' bytes, row by row.
        type_id: ggml type, one of ``TYPES``.
        rows: outputs.
        columns: inputs.
        threads: that share the work.
        out: where to, contiguous uint8 [panel_bytes(...)]; None makes an array.

    Returns:
        ``out``, uint8 [panel_bytes(...)].

    Raises:
        ModelFileError: an unknown type, or columns that are no whole number of its blocks.
        EngineError: a type without panels, bytes that do not fit the shape, or no library of kernels here.
    """
    need = rows * quants.row_bytes(type_id, columns)
    if type_id not in TYPES:
        raise EngineError(f"{quants.quant_type(type_id).name} has no panels; {', '.join(_LAYOUT)} have")
    library = find_library()
    if isinstance(library, Missing):
        raise EngineError(f"no kernels here: {library.reason}")
    blocks = np.ascontiguousarray(raw).view(np.uint8).reshape(-1)
    if blocks.size != need:
        raise EngineError(f"{blocks.size} bytes for a matrix of {rows} x {columns}; need {need}")
    count = -(-rows // ROWS)
    size = panel_bytes(type_id, rows, columns)
    if out is None:
        out = np.empty(size, np.uint8)
    if out.size != size or out.dtype != np.uint8 or not (out.flags.c_contiguous and out.flags.writeable):
        raise EngineError(f"{out.size} x {out.dtype} can't take panels of {size} contiguous bytes")
    shares = max(1, min(threads, _MAX_THREADS, count))

    def lay(share: int) -> None:
        first, end = count * share // shares, count * (share + 1) // shares
        library.functions.kvasir_pack(type_id, blocks.ctypes.data, rows, columns, first, end, out.ctypes.data)

    if shares == 1:
        lay(0)
        return out
    with ThreadPoolExecutor(shares, thread_name_prefix="pack") as pool:
        for _ in pool.map(lay, range(shares)):
            pass
    return out
