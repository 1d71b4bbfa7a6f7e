"""Where an engine gets the bytes of its weights from, and where a peer gets the chunks that it serves.

A :class:`TensorSource` hands out raw GGUF bytes of tensors, as they are in the file; what they mean is the engines'
business. Two kinds: :class:`GgufSource` reads a GGUF on this machine, :class:`StoreSource` puts tensors together from
the chunks that a peer has fetched. :class:`ChunkSource` is the other direction: the chunks of a GGUF, by hash.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from kvasir_peer.errors import ModelFileError, ResourceError
from kvasir_peer.models.gguf import GgufFile, TensorInfo
from kvasir_peer.models.manifest import Chunk, Manifest, weight_metadata
from kvasir_peer.models.slices import Slice, chunks_of, tensors_of
from kvasir_peer.models.store import ChunkReader

RawBytes = npt.NDArray[np.uint8]

_PAGE = 4096  # bytes; the smallest page of memory there is, so that a step of it touches every page
_RELEASE_EVERY = 64 << 20  # bytes served before their mapped pages are given back


class TensorSource(Protocol):
    """Raw weights by tensor name.

    Attributes:
        metadata: the model's keys and values without the tokenizer (``weight_metadata`` in ``manifest.py``).
        tensors: those that can be read. Of a stacked tensor some experts may be absent; its shape is the whole one.
    """

    @property
    def metadata(self) -> Mapping[str, object]: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> RawBytes:
        """All bytes of a tensor, uint8 ``[n_bytes]``, read-only or not; a view where no copy is needed.

        Raises:
            KeyError: there is no such tensor here.
            ResourceError: some of its chunks are absent or damaged.
        """

    def read_experts(self, name: str, lo: int, hi: int) -> RawBytes:
        """The bytes of experts ``[lo, hi)`` of a stacked tensor, uint8 ``[(hi - lo) * n_bytes / E]``."""

    def release(self) -> None:
        """Give back what reading has left in this process's memory; to be called once weights are loaded."""


def expert_bytes(info: TensorInfo, lo: int, hi: int) -> tuple[int, int]:
    """First and past-the-last byte of experts ``[lo, hi)`` in a stacked tensor (outermost dimension: experts).

    Raises:
        ValueError: the tensor has no such experts.
    """
    count = info.shape[0]
    if not 0 <= lo < hi <= count or info.n_bytes % count:
        raise ValueError(f"{info.name} has {count} experts, no range [{lo}, {hi})")
    each = info.n_bytes // count
    return lo * each, hi * each


class GgufSource:
    """A whole model from a GGUF on this machine; all reads are views of its memory map.

    Args:
        path: its file, or any file of a split model.

    Raises:
        ModelFileError: it can't be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = GgufFile.open(path)
        self.metadata: Mapping[str, object] = MappingProxyType(weight_metadata(self._file.metadata))
        self.tensors: Mapping[str, TensorInfo] = self._file.tensors

    def read(self, name: str) -> RawBytes:
        return np.frombuffer(self._file.tensor_view(name), np.uint8)

    def read_experts(self, name: str, lo: int, hi: int) -> RawBytes:
        start, end = expert_bytes(self.tensors[name], lo, hi)
        return self.read(name)[start:end]

    def release(self) -> None:
        self._file.release()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StoreSource:
    """A slice of a model from the chunks in a peer's store.

    Args:
        store: where the chunks are; a :class:`~kvasir_peer.models.store.ChunkReader` is enough.
        manifest: of the model, with the slice's pages.
        part: the slice.
        verify: check each chunk's hash again as it is read.

    Raises:
        ResourceError: chunks of the slice are absent; says how many, and of what.
    """

    def __init__(self, store: ChunkReader, manifest: Manifest, part: Slice, *, verify: bool = False) -> None:
        self._store = store
        self._verify = verify
        chunks = chunks_of(manifest, part)
        if missing := store.missing(chunks):
            raise ResourceError(
                f"{store.root}: {len(missing)} of {len(chunks)} chunks of {part} are absent, "
                f"the first is of {missing[0].tensor}; they must be fetched first"
            )
        self._chunks: dict[str, list[Chunk]] = {}
        for chunk in chunks:
            self._chunks.setdefault(chunk.tensor, []).append(chunk)
        self.metadata: Mapping[str, object] = MappingProxyType(manifest.root.metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {
                tensor.name: TensorInfo(tensor.name, tensor.shape, tensor.type, tensor.n_bytes, 0)
                for tensor in tensors_of(manifest, part)
                if tensor.name in self._chunks
            }
        )

    def read(self, name: str) -> RawBytes:
        return self._read(name, 0, self.tensors[name].n_bytes)

    def read_experts(self, name: str, lo: int, hi: int) -> RawBytes:
        return self._read(name, *expert_bytes(self.tensors[name], lo, hi))

    def _read(self, name: str, start: int, end: int) -> RawBytes:
        """Bytes ``[start, end)`` of a tensor into one array, each chunk read to its place."""
        array = np.empty(end - start, np.uint8)
        buffer = array.data
        at = start
        for chunk in self._chunks[name]:
            if chunk.offset + chunk.size <= start or chunk.offset >= end:
                continue
            if chunk.offset > at:
                break
            if chunk.offset >= start and chunk.offset + chunk.size <= end:
                self._read_chunk(chunk, buffer[chunk.offset - start : chunk.offset - start + chunk.size])
            else:  # a small tensor that is cut at no expert
                whole = memoryview(bytearray(chunk.size))
                self._read_chunk(chunk, whole)
                low, high = max(start, chunk.offset), min(end, chunk.offset + chunk.size)
                buffer[low - start : high - start] = whole[low - chunk.offset : high - chunk.offset]
            at = chunk.offset + chunk.size
        if at < end:
            raise ResourceError(
                f"{self._store.root}: byte {at:,} of {name} and more is not a part of this slice"
            )
        return array

    def _read_chunk(self, chunk: Chunk, buffer: memoryview) -> None:
        try:
            self._store.read_into(chunk.hash, buffer, verify=self._verify)
        except KeyError:
            raise ResourceError(
                f"{self._store.root}: a chunk of {chunk.tensor} has been removed; it must be fetched again"
            ) from None

    def release(self) -> None:
        """Nothing is kept: every read was a copy."""


class ChunkSource:
    """The chunks of a model file on this machine by their hashes, for other peers.

    The file must not shrink while it is open, as for everything that maps files.

    Args:
        gguf: the open model; stays the caller's.
        manifest: made from it.

    Raises:
        ModelFileError: the manifest is of another file.
    """

    def __init__(self, gguf: GgufFile, manifest: Manifest) -> None:
        self._gguf = gguf
        self._chunks: dict[bytes, Chunk] = {}
        self._served = 0  # bytes since pages were given back
        self._mutex = threading.Lock()
        described = [tensor for page in manifest.pages.values() for tensor in page.tensors]
        if len(described) != len(gguf.tensors):
            raise ModelFileError(f"{gguf.path}: the manifest of {manifest.root.name} is of another file")
        for tensor in described:
            info = gguf.tensors.get(tensor.name)
            if info is None or (info.shape, info.type) != (tensor.shape, tensor.type):
                raise ModelFileError(f"{gguf.path}: the manifest of {manifest.root.name} is of another file")
            for chunk in tensor.chunks():
                self._chunks.setdefault(chunk.hash, chunk)

    def has(self, digest: bytes) -> bool:
        """Whether the model has such a chunk."""
        return digest in self._chunks

    def chunk_bytes(self, digest: bytes) -> memoryview:
        """The bytes of a chunk, read-only, straight from the map.

        They are read from disk here, so that whoever sends them doesn't wait for it: call it from a thread.

        Raises:
            KeyError: the model has no such chunk.
        """
        chunk = self._chunks[digest]
        with self._mutex:
            self._served += chunk.size
            release = self._served >= _RELEASE_EVERY
            if release:
                self._served = 0
        if release:
            self._gguf.release()  # views that are out there still hold; their pages come back when touched
        view = self._gguf.tensor_view(chunk.tensor)[chunk.offset : chunk.offset + chunk.size]
        np.frombuffer(view, np.uint8)[::_PAGE].max()
        return view
