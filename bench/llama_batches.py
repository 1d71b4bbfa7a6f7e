"""llama.cpp with several sequences, by its C interface inside the ``xllamacpp`` wheel: what engines are timed against.

The interface is called as the tests' oracle calls it (``tests/engines/llama_cpp.py``); here with its own choices
for the cache and for attention, which are its fastest.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "engines"))

import llama_cpp


class LlamaBatches:
    """A model in llama.cpp.

    Args:
        path: a GGUF file.
        threads: of computation.
        sequences: most requests at once.
        context: positions of all of them together.
    """

    def __init__(self, path: Path, threads: int, sequences: int, context: int) -> None:
        self._lib = lib = llama_cpp.library()
        self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp refused {path}")
        params = lib.llama_context_default_params()
        words = params.words()
        minus_one = struct.unpack("<i", struct.pack("<f", -1.0))[0]
        for index, value in enumerate((context, context, 512, sequences)):
            params.set(4 * index, value)
        yarn = next(i for i in range(4, 64) if words[i : i + 4] == (minus_one,) * 4)
        at = next(i for i in range(4, yarn) if words[i] == words[i + 1] and words[i] > 1)
        params.set(4 * at, threads)
        params.set(4 * (at + 1), threads)
        self._context = lib.llama_init_from_model(self._model, params)
        self._batch = lib.llama_batch_init(context, 0, 1)

    def __enter__(self) -> LlamaBatches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def clear(self) -> None:
        """Forget all positions."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def forward(
        self, slots: Sequence[int], positions: Sequence[int], tokens: Sequence[int], wants: Sequence[bool]
    ) -> None:
        """Run rows until the last logits are there."""
        batch = self._batch
        batch.n_tokens = len(slots)
        for i, (slot, position, token, want) in enumerate(zip(slots, positions, tokens, wants, strict=True)):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = slot
            batch.logits[i] = int(want)
        status = self._lib.llama_decode(self._context, batch)
        if status:
            raise ValueError(f"llama_decode gave {status}")
        if wants[-1]:
            self._lib.llama_get_logits_ith(self._context, len(slots) - 1)
