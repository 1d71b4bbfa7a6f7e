"""Small GGUF files of any shape, written by gguf-py: an independent writer for the reader under test."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np

DATA = Path(__file__).parent.parent / "data"
DENSE = DATA / "stories260K.gguf"
MOE = DATA / "stories260K-moe8x2.gguf"


def write_model(
    path: Path,
    *,
    n_layer: int = 3,
    n_expert: int = 0,
    tied: bool = False,
    rope_factors: bool = False,
    extra: dict[str, np.ndarray] | None = None,
    n_vocab: int = 40,
    block_count: int | None = None,
    shard_tensors: int = 0,
) -> Path:
    """A tiny ``llama`` with random weights; ``shard_tensors`` splits it, so many tensors a file.

    Returns the path of its (first) file.
    """
    random = np.random.default_rng(n_layer * 100 + n_expert)
    width, hidden = 32, 64
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=shard_tensors)
    writer.add_name("tiny")
    writer.add_block_count(n_layer if block_count is None else block_count)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_array("llama.attention.head_count_kv", [2] * n_layer)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"token{i}" for i in range(n_vocab)])
    writer.add_token_scores([float(-i) for i in range(n_vocab)])
    writer.add_token_types([1] * n_vocab)
    writer.add_bos_token_id(1)
    writer.add_chat_template("{{ messages }}")

    def add(name: str, *shape: int, dtype: type = np.float32) -> None:
        writer.add_tensor(name, random.standard_normal(shape).astype(dtype))

    add("token_embd.weight", n_vocab, width)
    if rope_factors:
        add("rope_freqs.weight", 4)
    for layer in range(n_layer):
        add(f"blk.{layer}.attn_norm.weight", width)
        add(f"blk.{layer}.attn_q.weight", width, width)
        if n_expert:
            add(f"blk.{layer}.ffn_gate_inp.weight", n_expert, width)
            for kind, shape in (
                ("gate", (hidden, width)),
                ("up", (hidden, width)),
                ("down", (width, hidden)),
            ):
                add(f"blk.{layer}.ffn_{kind}_exps.weight", n_expert, *shape, dtype=np.float16)
        else:
            raw = gguf.quantize(
                random.standard_normal((hidden, width)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0
            )
            writer.add_tensor(f"blk.{layer}.ffn_up.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    add("output_norm.weight", width)
    if not tied:
        add("output.weight", n_vocab, width)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    """A GGUF key and value."""
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    """A GGUF tensor description, dims in the file's order."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def raw_gguf(
    keys: list[bytes],
    tensors: list[bytes],
    data: int = 0,
    *,
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    endian: str = "<",
) -> bytes:
    """A GGUF from its parts, right or wrong; ``data`` bytes of zeros follow the padding to 32."""
    head = b"GGUF" + struct.pack(
        f"{endian}IQQ",
        version,
        len(tensors) if n_tensors is None else n_tensors,
        len(keys) if n_keys is None else n_keys,
    )
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)
