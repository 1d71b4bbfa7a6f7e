"""Memory that was freed, back to the system."""

from __future__ import annotations

import ctypes
import os


def trim_heap() -> None:
    """Give memory that was freed back to the system, where the C library keeps it (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
