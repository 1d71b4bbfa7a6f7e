"""llama.cpp as an oracle: logits of every position, from the library inside the ``xllamacpp`` wheel.

The wheel offers a server and its parameters, but its shared object exports llama.cpp's C interface too, which is
called here by ctypes. Two structures are passed by value; their defaults are asked from the library and the few
fields that we set are found by their neighbours (the layout moves between versions), so that a version in which
they can't be found fails with a clear message instead of computing something else.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

_STRUCT_BYTES = 512  # more than both parameter structures have
_POINTER = ctypes.c_void_p
_TYPE_F32 = 0


class _Params(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * _STRUCT_BYTES)]

    def set(self, offset: int, value: int) -> None:
        self.data[offset : offset + 4] = list(struct.pack("<i", value))

    def words(self) -> tuple[int, ...]:
        return struct.unpack(f"<{_STRUCT_BYTES // 4}i", bytes(self.data))


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", _POINTER),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, _POINTER)
_messages: list[str] = []
_log = _LOG(lambda level, text, data: _messages.append(text.decode("utf-8", "replace")) if text else None)


def _library() -> Any:
    import xllamacpp

    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    for name, result, arguments in (
        ("llama_log_set", None, [_LOG, _POINTER]),
        ("llama_backend_init", None, []),
        ("llama_model_default_params", _Params, []),
        ("llama_context_default_params", _Params, []),
        ("llama_model_load_from_file", _POINTER, [ctypes.c_char_p, _Params]),
        ("llama_init_from_model", _POINTER, [_POINTER, _Params]),
        ("llama_model_free", None, [_POINTER]),
        ("llama_free", None, [_POINTER]),
        ("llama_model_get_vocab", _POINTER, [_POINTER]),
        ("llama_vocab_n_tokens", ctypes.c_int32, [_POINTER]),
        ("llama_batch_init", _Batch, [ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]),
        ("llama_batch_free", None, [_Batch]),
        ("llama_decode", ctypes.c_int32, [_POINTER, _Batch]),
        ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), [_POINTER, ctypes.c_int32]),
        ("llama_get_memory", _POINTER, [_POINTER]),
        ("llama_memory_clear", None, [_POINTER, ctypes.c_bool]),
        (
            "ggml_quantize_chunk",
            ctypes.c_size_t,
            [ctypes.c_int, _POINTER, _POINTER, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, _POINTER],
        ),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    library.llama_log_set(_log, None)
    library.llama_backend_init()
    return library


def _exact_context(params: _Params, context: int, threads: int) -> None:
    """Set sizes, threads, no flash attention, and a float32 KV cache."""
    words = params.words()
    minus_one = struct.unpack("<i", struct.pack("<f", -1.0))[0]
    assert words[:4] == (512, 2048, 512, 1), f"n_ctx, n_batch, n_ubatch, n_seq_max have moved: {words[:4]}"
    for index, value in enumerate((context, context, context, 1)):
        params.set(4 * index, value)
    # yarn_ext_factor, attn_factor, beta_fast, beta_slow; before them rope_freq_base and scale, and before those
    # the flash attention switch.
    yarn = next(i for i in range(4, 64) if words[i : i + 4] == (minus_one,) * 4)
    assert words[yarn - 2 : yarn] == (0, 0) and words[yarn - 3] == -1, "flash_attn_type has moved"
    params.set(4 * (yarn - 3), 0)
    thread = next(i for i in range(4, yarn) if words[i] == words[i + 1] and words[i] > 1)
    params.set(4 * thread, threads)
    params.set(4 * (thread + 1), threads)
    # yarn_orig_ctx, defrag_thold, two pointers, then type_k and type_v, which are F16 (1) by default.
    types = yarn + 10
    assert words[types : types + 2] == (1, 1), "type_k and type_v have moved"
    params.set(4 * types, _TYPE_F32)
    params.set(4 * (types + 1), _TYPE_F32)


@functools.cache
def library() -> Any:
    """The library, initialised once."""
    return _library()


def quantize(values: np.ndarray, type_id: int, row_bytes: int) -> np.ndarray:
    """Quantise as ``llama-quantize`` does, K-quants too (which the gguf package can't write).

    Args:
        values: float32 [..., columns].
        type_id: ggml type that needs no importance matrix.
        row_bytes: bytes of a row in that type.

    Returns:
        uint8 [..., row_bytes].
    """
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
    out = np.empty((len(rows), row_bytes), np.uint8)
    written = library().ggml_quantize_chunk(
        type_id, rows.ctypes.data, out.ctypes.data, 0, len(rows), rows.shape[1], None
    )
    assert written == out.nbytes
    return out.reshape(*values.shape[:-1], row_bytes)


class LlamaCpp:
    """A model in llama.cpp.

    Args:
        path: a GGUF file.
        context: positions.
        threads: of computation.
    """

    def __init__(self, path: Path, context: int = 256, threads: int = 1) -> None:
        lib = self._lib = library()
        _messages.clear()
        self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if not self._model:
            raise ValueError("llama.cpp refused the file: " + "".join(_messages[-5:]))
        params = lib.llama_context_default_params()
        _exact_context(params, context, threads)
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError("llama.cpp made no context: " + "".join(_messages[-5:]))
        self.n_vocab: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(context, 0, 1)
        self._length = 0

    def __enter__(self) -> LlamaCpp:
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
        self._length = 0

    def feed(self, tokens: Sequence[int]) -> np.ndarray:
        """Append tokens in one pass; return float32 logits [n, n_vocab] after each of them."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = self._length + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = 1
        status = self._lib.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode gave {status}: {''.join(_messages[-5:])}"
        self._length += len(tokens)
        rows = [
            np.ctypeslib.as_array(self._lib.llama_get_logits_ith(self._context, i), (self.n_vocab,)).copy()
            for i in range(len(tokens))
        ]
        return np.stack(rows)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Return float32 logits [n, n_vocab] after each token, from the start of a sequence."""
        self.clear()
        return self.feed(tokens)

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[list[int], float]:
        """Continue a prompt greedily; return the tokens and the smallest gap between the two best logits."""
        row = self.logits(prompt)[-1]
        tokens: list[int] = []
        gap = float("inf")
        while True:
            best, second = np.argsort(row)[::-1][:2]
            gap = min(gap, float(row[best] - row[second]))
            tokens.append(int(best))
            if len(tokens) == count:
                return tokens, gap
            row = self.feed([int(best)])[-1]
