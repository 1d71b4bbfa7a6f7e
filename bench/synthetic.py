"""Model files with the real layer shape of a large model, few layers and random weights, for timing only."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kvasir_peer.engines import quants

# What tests of the engines make their files with.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "engines"))

from random_blocks import random_blocks
from tiny_models import write_gguf

# A layer of Qwen3-30B-A3B: width 2048, 32 heads and 4 key/value heads of 128, 128 experts of 768, 8 of them used.
WIDTH, HEADS, KV_HEADS, HEAD = 2048, 32, 4, 128
EXPERTS, USED, EXPERT_WIDTH = 128, 8, 768
VOCABULARY = 4096
DISTINCT = 4099  # blocks of each tensor


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
    metadata: dict[str, Any] = {
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
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
    }
    tensors: dict[str, Any] = {}
    types = mixtures(kind)

    def add(name: str, shape: tuple[int, ...], key: str) -> None:
        type_id = types.get(key, types[""])
        raw = random_blocks(quants.quant_type(type_id), shape, rng, DISTINCT)
        tensors[name] = (raw, gguf.GGMLQuantizationType(type_id))

    def add_norm(name: str, width: int) -> None:
        tensors[name] = np.ones(width, np.float32)

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
        tensors[f"blk.{i}.ffn_gate_inp.weight"] = router
        add(f"blk.{i}.ffn_gate_exps.weight", (EXPERTS, EXPERT_WIDTH, WIDTH), "")
        add(f"blk.{i}.ffn_up_exps.weight", (EXPERTS, EXPERT_WIDTH, WIDTH), "")
        add(f"blk.{i}.ffn_down_exps.weight", (EXPERTS, WIDTH, EXPERT_WIDTH), "down_odd" if i % 2 else "")
    named = {f"qwen3moe.{key}": value for key, value in metadata.items()}
    write_gguf(path, {"general.architecture": "qwen3moe"} | named, tensors)
