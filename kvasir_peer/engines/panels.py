"""Weights laid as the C kernels take them: panels of 16 rows (``kernels/panels.h``)."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
# From this size on memory is asked for in large pages; and the size of these on the processors that there are.
_LARGE, _LARGE_PAGE = 4 << 20, 2 << 20
# Bytes that small matrices share, and of a line of a processor's cache.
_SHELF, _LINE = 16 << 20, 64
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


def room(n_bytes: int) -> U8:
    """Return memory for panels, uint8 [n_bytes], which large pages fill where it is large and the system has them.

    Each page of 4 KiB has to be found anew when weights stream, which costs up to half of the memory's rate.
    """
    if n_bytes < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(n_bytes, np.uint8)
    memory = mmap.mmap(-1, n_bytes + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    everything = np.frombuffer(memory, np.uint8)
    begin = -everything.ctypes.data % _LARGE_PAGE
    filled = n_bytes // _LARGE_PAGE * _LARGE_PAGE
    with suppress(OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE, begin, filled)
        # A large page that is not full would be taken whole.
        memory.madvise(mmap.MADV_NOHUGEPAGE, begin + filled)
    return everything[begin : begin + n_bytes]


class Shelf:
    """Memory for the panels of many matrices that go together: small ones share large pages."""

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)
        self._taken = 0

    def take(self, n_bytes: int) -> U8:
        """Return uint8 [n_bytes]."""
        self._taken += n_bytes
        # A model that is small altogether takes no large pages, of which the last is never full.
        if n_bytes >= _SHELF or self._taken < _LARGE:
            return room(n_bytes)
        if n_bytes > self._left.size:
            self._left = room(_SHELF)
        begin = self._left[:n_bytes]
        self._left = self._left[-(-n_bytes // _LINE) * _LINE :]
        return begin


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
        out = room(size)
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
