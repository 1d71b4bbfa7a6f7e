"""What the type of the boundaries costs and does: bytes per token and hop, and the effect on logits.

The model runs as three stages in this process, teacher-forced over a text, with float32 arithmetic; all that differs is
how hidden states are encoded between the stages.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from rows import Rows

from kvasir_peer.engines.base import F32, LayerStack, StackSpec, create_stack
from kvasir_peer.engines.base import Rows as StackRows
from kvasir_peer.models.sources import GgufSource
from kvasir_peer.models.tokenizer import Tokenizer
from kvasir_peer.wire.tensors import DTYPES, decode_tensor, encode_tensor, tensor_bytes

TEXT = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her friend Tom. "
    "One day, they saw a big red ball under a tree, and they wanted to know whose ball it was. They asked the old man "
    "who sat on a bench, but he did not know. So they took the ball home and wrote a note for whoever had lost it."
)


def boundaries(rows: Rows, small: Path, model: Path | None) -> None:
    """Each type with each model."""
    for path in [small, *([model] if model else [])]:
        _one(rows, path)


def _one(rows: Rows, path: Path) -> None:
    source = GgufSource(path)
    n_layer = int(source.metadata[f"{source.metadata['general.architecture']}.block_count"])  # type: ignore[call-overload]
    tokens = _tokens(path)[:96]
    cuts = [0, n_layer // 3, 2 * n_layer // 3, n_layer]
    logits = {}
    for dtype in DTYPES:
        stacks = [
            create_stack("onnx", source, StackSpec(a, b, 1, 128, len(tokens), "exact", 1))
            for a, b in itertools.pairwise(cuts)
        ]
        logits[dtype] = _run(stacks, tokens, dtype)
        for stack in stacks:
            stack.close()
    exact = logits["f32"]
    spread = exact.std()
    width = int(source.metadata[f"{source.metadata['general.architecture']}.embedding_length"])  # type: ignore[call-overload]
    for dtype in DTYPES:
        name = f"{path.name}, {dtype} boundaries"
        rows.add(f"{name}: bytes per token and hop", tensor_bytes(dtype, 1, width), "bytes")
        if dtype != "f32":
            off = logits[dtype] - exact
            same = (logits[dtype].argmax(axis=1) == exact.argmax(axis=1)).mean()
            rows.add(f"{name}: error of a logit, rms / std", float(np.sqrt((off**2).mean()) / spread), "")
            rows.add(f"{name}: error of a logit, worst / std", float(np.abs(off).max() / spread), "")
            rows.add(f"{name}: the same best token", 100 * float(same), "%")


def _tokens(path: Path) -> np.ndarray:
    from kvasir_peer.models.gguf import GgufFile

    with GgufFile.open(path) as gguf:
        return np.array(Tokenizer.from_gguf(gguf.metadata).encode(TEXT, add_special=True), np.int32)


def _run(stacks: list[LayerStack], tokens: np.ndarray, dtype: str) -> F32:
    """Logits ``[tokens, vocab]``."""
    count = len(tokens)
    table = StackRows(
        np.zeros(count, np.int32), np.arange(count, dtype=np.int32), tokens, np.ones(count, np.bool_)
    )
    hidden: F32 | None = None
    for stack in stacks:
        out = stack.forward(table, hidden)
        if stack is not stacks[-1]:
            hidden = decode_tensor(encode_tensor(out, dtype), dtype, count, out.shape[1])
    return out
