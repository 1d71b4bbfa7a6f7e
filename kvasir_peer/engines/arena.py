"""Memory that the agent and its engine process both map, cut into equal buffers."""

from __future__ import annotations

import mmap
import os
import tempfile

from kvasir_peer.engines.orders import ArenaShape


def create_arena_file() -> int:
    """File descriptor of an empty anonymous file; it vanishes with the last process that holds it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("kvasir-arena", os.MFD_CLOEXEC)
    descriptor, path = tempfile.mkstemp(prefix="kvasir-arena-")
    os.unlink(path)  # noqa: PTH108 - no Path is ever kept for it
    return descriptor


class Arena:
    """The mapping of one side.

    Args:
        descriptor: of the file from :func:`create_arena_file`; not closed here.
        shape: buffers and bytes of each; the file is grown to hold them.
    """

    def __init__(self, descriptor: int, shape: ArenaShape) -> None:
        self.shape = shape
        if os.fstat(descriptor).st_size < shape.total:
            os.ftruncate(descriptor, shape.total)
        self._view = memoryview(mmap.mmap(descriptor, max(shape.total, mmap.PAGESIZE)))

    def buffer(self, index: int) -> memoryview:
        """Buffer ``index``, writable.

        Raises:
            IndexError: there are fewer buffers.
        """
        if not 0 <= index < self.shape.buffers:
            raise IndexError(f"buffer {index} of {self.shape.buffers}")
        start = index * self.shape.buffer_bytes
        return self._view[start : start + self.shape.buffer_bytes]

    def close(self) -> None:
        """Let go of the mapping; it is unmapped when the last buffer handed out is gone too."""
        self._view = memoryview(b"")
