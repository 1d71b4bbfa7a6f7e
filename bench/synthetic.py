"""Model files with the real layer shape of a large model, few layers and random weights, for timing only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from kvasir_peer.engines import quants

# A layer of Qwen3-30B-A3B: width 2048, 32 heads and 4 key/value heads of 128, 128 experts of 768, 8 of them used.
WIDTH, HEADS, KV_HEADS, HEAD = 2048, 32, 4, 128
EXPERTS, USED, EXPERT_WIDTH = 128, 8, 768
VOCABULARY = 4096


def random_blocks(rng: np.random.Generator, type_id: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return random weights of a type: uint8 [..., row bytes], about as large as real ones."""
    t = quants.quant_type(type_id)
    if t.bits == 0:
        weights = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        return weights if t.name == "F32" else weights.astype(np.float16)
    n = int(np.prod(shape)) // t.block
    # One megabyte of random blocks, repeated: making gigabytes of random bytes would take longer than the test.
    some = rng.integers(0, 256, (min(n, 4099), t.block_bytes), dtype=np.uint8)
    for begin in _FLOAT16_FIELDS.get(t.name, ()):
        values = (rng.random(len(some)) * 0.5 + 0.5) * _scale(t, shape[-1])
        some[:, begin : begin + 2] = values.astype(np.float16).view(np.uint8).reshape(-1, 2)
    if t.name == "MXFP4":
        some[:, 0] = 120
    whole = np.resize(some, (n, t.block_bytes))
    return whole.reshape(*shape[:-1], -1)


# Where the float16 scales of a block stand.
_FLOAT16_FIELDS: Mapping[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def _scale(t: quants.QuantType, columns: int) -> float:
    """Return a block scale that makes weights of about 1 / sqrt(columns)."""
    largest_code = {"Q8_0": 128, "Q6_K": 32 * 64, "IQ4_NL": 127, "IQ4_XS": 127 * 32}.get(t.name, 8)
    steps = 32 if t.block == 256 and t.name not in ("Q6_K", "IQ4_XS") else 1
    return 1.5 / (largest_code * steps * np.sqrt(columns))


def mixtures(name: str) -> Mapping[str, int]:
    """Return the ggml type of each kind of tensor, as the file type of that name has them."""
    of = {name: t.id for name, t in quants.BY_NAME.items()}
    if name == "Q4_K_M":
        # llama.cpp gives attn_v and half of the down projections more bits.
        return {"": of["Q4_K"], "attn_v": of["Q6_K"], "down_odd": of["Q6_K"], "output": of["Q6_K"]}
    return {"": of[name], "output": of["Q8_0" if name == "Q8_0" else "Q6_K"]}


def write_qwen3moe(path: Path, kind: str, layers: int) -> None:
    """Write a qwen3moe model of some layers and a small vocabulary."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for key, value in {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": WIDTH,
        "feed_forward_length": 6144,
        "expert_feed_forward_length": EXPERT_WIDTH,
        "expert_count": EXPERTS,
        "expert_used_count": USED,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "vocab_size": VOCABULARY,
    }.items():
        writer.add_uint32(f"qwen3moe.{key}", value)
    writer.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen3moe.rope.freq_base", 1e6)
    writer.add_string("tokenizer.ggml.model", "none")
    types = mixtures(kind)

    def add(name: str, shape: tuple[int, ...], key: str) -> None:
        type_id = types.get(key, types[""])
        writer.add_tensor(
            name, random_blocks(rng, type_id, shape), raw_dtype=gguf.GGMLQuantizationType(type_id)
        )

    def add_norm(name: str, width: int) -> None:
        writer.add_tensor(name, np.ones(width, np.float32))

    add("token_embd.weight", (VOCABULARY, WIDTH), "")
    add("output.weight", (VOCABULARY, WIDTH), "output")
    add_norm("output_norm.weight", WIDTH)
    for i in range(layers):
        add_norm(f"blk.{i}.attn_norm.weight", WIDTH)
        add_norm(f"blk.{i}.ffn_norm.weight", WIDTH)
        add_norm(f"blk.{i}.attn_q_norm.weight", HEAD)
        add_norm(f"blk.{i}.attn_k_norm.weight", HEAD)
        add(f"blk.{i}.attn_q.weight", (HEADS * HEAD, WIDTH), "")
        add(f"blk.{i}.attn_k.weight", (KV_HEADS * HEAD, WIDTH), "")
        add(f"blk.{i}.attn_v.weight", (KV_HEADS * HEAD, WIDTH), "attn_v")
        add(f"blk.{i}.attn_output.weight", (WIDTH, HEADS * HEAD), "")
        # Far apart logits, so that rounding does not change which experts are chosen.
        router = rng.standard_normal((EXPERTS, WIDTH)).astype(np.float32) * np.float32(2 / np.sqrt(WIDTH))
        writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", router)
        add(f"blk.{i}.ffn_gate_exps.weight", (EXPERTS, EXPERT_WIDTH, WIDTH), "")
        add(f"blk.{i}.ffn_up_exps.weight", (EXPERTS, EXPERT_WIDTH, WIDTH), "")
        add(f"blk.{i}.ffn_down_exps.weight", (EXPERTS, WIDTH, EXPERT_WIDTH), "down_odd" if i % 2 else "")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
