"""Which bytes of a model file to ask a web server for. Pure; the client is ``net/https_model.py``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvasir_peer.errors import ModelFileError
from kvasir_peer.models.gguf import TensorInfo
from kvasir_peer.models.manifest import Chunk, chunk_borders

MAX_GAP = 64 << 10  # bytes that nobody wants between two chunks; fewer cost less than one more request


class ByteRange(NamedTuple):
    """Bytes ``[start, end)`` of one file of a model, and the chunks in them.

    Attributes:
        shard: which file.
        start: first byte in it.
        end: past the last byte.
        chunks: those that lie there, in order.
        offsets: of each chunk, its first byte in the file.
    """

    shard: int
    start: int
    end: int
    chunks: tuple[Chunk, ...]
    offsets: tuple[int, ...]

    def cut(self, data: bytes) -> list[tuple[Chunk, memoryview]]:
        """The chunks' bytes out of the range's bytes, as they are: whether they are right is another question."""
        view = memoryview(data)
        return [
            (chunk, view[offset - self.start : offset - self.start + chunk.size])
            for chunk, offset in zip(self.chunks, self.offsets, strict=True)
        ]


def plan_ranges(
    tensors: Mapping[str, TensorInfo], chunks: Iterable[Chunk], *, max_bytes: int, max_gap: int = MAX_GAP
) -> list[ByteRange]:
    """The fewest ranges that bring these chunks, in the files' order; each hash once.

    Args:
        tensors: where each tensor lies.
        chunks: what is wanted.
        max_bytes: the most bytes of one range; a larger chunk is a range of its own.
        max_gap: the most bytes between two chunks of a range.
    """
    wanted = {chunk.hash: chunk for chunk in chunks}
    placed = sorted(
        (tensors[chunk.tensor].shard, tensors[chunk.tensor].offset + chunk.offset, chunk.hash)
        for chunk in wanted.values()
    )
    ranges: list[ByteRange] = []
    group: list[tuple[int, Chunk]] = []
    shard = -1

    def finish() -> None:
        if group:
            last, chunk = group[-1]
            offsets = tuple(offset for offset, _ in group)
            ranges.append(
                ByteRange(shard, offsets[0], last + chunk.size, tuple(c for _, c in group), offsets)
            )
            group.clear()

    for on_shard, offset, digest in placed:
        chunk = wanted[digest]
        if group:
            end = group[-1][0] + group[-1][1].size
            too_far = on_shard != shard or offset - end > max_gap
            if too_far or offset + chunk.size - group[0][0] > max_bytes:
                finish()
        shard = on_shard
        group.append((offset, chunk))
    finish()
    return ranges


class StreamHasher:
    """Hashes the chunks of one file as its bytes come by, once and in order.

    Args:
        tensors: those of the file.

    Attributes:
        start: where in the file the bytes must begin.
        end: past the last byte that is needed.
        position: the next byte that is expected.
    """

    def __init__(self, tensors: Iterable[TensorInfo]) -> None:
        self._segments: list[
            tuple[int, int, str]
        ] = []  # (first byte in the file, past the last, tensor), in order
        for info in sorted(tensors, key=lambda info: info.offset):
            for offset, size in chunk_borders(info.name, info.shape, info.n_bytes):
                self._segments.append((info.offset + offset, info.offset + offset + size, info.name))
        self.start = self._segments[0][0] if self._segments else 0
        self.end = self._segments[-1][1] if self._segments else 0
        self.position = self.start
        self._index = 0
        self._sha = hashlib.sha256()
        self._hashes: dict[str, bytearray] = {}

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take in the next bytes; what lies between tensors is passed over."""
        view = memoryview(data)
        while view and self._index < len(self._segments):
            start, end, tensor = self._segments[self._index]
            if self.position < start:
                skip = min(start - self.position, len(view))
                view = view[skip:]
                self.position += skip
                continue
            piece = view[: end - self.position]
            self._sha.update(piece)
            self.position += len(piece)
            view = view[len(piece) :]
            if self.position == end:
                self._hashes.setdefault(tensor, bytearray()).extend(self._sha.digest())
                self._sha = hashlib.sha256()
                self._index += 1

    def finish(self) -> dict[str, bytes]:
        """The hashes of each tensor's chunks, one after the other.

        Raises:
            ModelFileError: bytes are missing.
        """
        if self.position < self.end:
            raise ModelFileError(f"the model ended at byte {self.position:,}, {self.end:,} were expected")
        return {tensor: bytes(hashes) for tensor, hashes in self._hashes.items()}
