"""Where an engine gets the bytes of its weights from, and where a peer gets the chunks that it serves.

A :class:`TensorSource` hands out raw GGUF bytes of tensors, as they are in the file; what they mean is the engines'
business. Two kinds: :class:`GgufSource` reads a GGUF on this machine, :class:`StoreSource` puts tensors together from
the chunks that a peer has fetched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from kvasir_peer.models.gguf import GgufFile, TensorInfo

RawBytes = npt.NDArray[np.uint8]


class TensorSource(Protocol):
    """Raw weights by tensor name.

    Attributes:
        metadata: the model's keys and values without the tokenizer (see :func:`weight_metadata`).
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


def weight_metadata(metadata: Mapping[str, object]) -> dict[str, object]:
    """The metadata that computing layers needs: all but vocabulary, chat templates and how a file was split.

    Those are megabytes, and only the peer that turns text into tokens needs them.
    """
    return {
        key: value
        for key, value in metadata.items()
        if not (
            key.startswith(("split.", "tokenizer.chat_template"))
            or (key.startswith("tokenizer.") and not isinstance(value, str | int | float))
        )
    }


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
