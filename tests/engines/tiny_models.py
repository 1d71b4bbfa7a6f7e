"""Tiny random models of every architecture, written as GGUF files, for comparing engines with llama.cpp.

The tensors of a model come from the table in ``architectures.py``: what its row requires plus the optional ones
that a case names. llama.cpp loads the same file, so a tensor that the table names wrongly makes llama.cpp refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kvasir_peer.engines import architectures
from kvasir_peer.models.gguf import TensorInfo

VOCABULARY = 96
WIDTH = 64
CONTEXT = 256


@dataclass(frozen=True)
class TinyModel:
    """A model to write.

    Attributes:
        name: of the case.
        architecture: GGUF name.
        metadata: keys of the architecture beyond, or in place of, the common ones (without prefix).
        optional: suffixes of optional tensors that every layer has (where its row allows them).
        model_tensors: further tensors that belong to no layer.
        tied: whether the file has no ``output.weight``.
        factors: suffixes of tensors to what their random values are multiplied by.
    """

    name: str
    architecture: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    model_tensors: tuple[str, ...] = ()
    tied: bool = False
    factors: Mapping[str, float] = field(default_factory=dict)


_HEADS = {"attention.head_count": 4, "attention.head_count_kv": 2}
_MOE = {"expert_count": 8, "expert_used_count": 3}
_QKV_BIAS = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
_QK_NORM = ("attn_q_norm.weight", "attn_k_norm.weight")
_WIDE_HEADS = {"attention.key_length": 24, "attention.value_length": 24, "rope.dimension_count": 24}
_MLA = {
    "attention.head_count": 4,
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 32,
    "attention.kv_lora_rank": 24,
    "attention.key_length": 32,
    "attention.value_length": 24,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 16,
    "rope.dimension_count": 8,
    "leading_dense_block_count": 1,
    "expert_feed_forward_length": 32,
    "expert_shared_count": 2,
}

MODELS: tuple[TinyModel, ...] = (
    TinyModel("llama", "llama", _HEADS),
    TinyModel("llama-bias-tied", "llama", _HEADS, (*_QKV_BIAS, "attn_output.bias"), tied=True),
    TinyModel("llama-moe", "llama", _HEADS | _MOE),
    TinyModel("llama-linear", "llama", _HEADS | {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    TinyModel(
        "llama-yarn",
        "llama",
        _HEADS
        | {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    TinyModel("llama-factors", "llama", _HEADS, model_tensors=("rope_freqs.weight",)),
    TinyModel("qwen2", "qwen2", _HEADS, _QKV_BIAS, tied=True),
    TinyModel("qwen3", "qwen3", _HEADS | _WIDE_HEADS),
    TinyModel(
        "qwen2moe",
        "qwen2moe",
        _HEADS | _MOE | {"expert_feed_forward_length": 48, "expert_shared_feed_forward_length": 80},
        _QKV_BIAS,
    ),
    TinyModel("qwen3moe", "qwen3moe", _HEADS | _MOE | _WIDE_HEADS | {"expert_feed_forward_length": 48}),
    TinyModel("olmoe", "olmoe", {"attention.head_count": 4, "attention.head_count_kv": 4} | _MOE),
    TinyModel(
        "gemma3",
        "gemma3",
        _HEADS
        | _WIDE_HEADS
        | {
            "block_count": 7,
            "attention.sliding_window": 8,
            "rope.freq_base": 1000000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        tied=True,
        # llama.cpp's GELU is a table of float16; a small feed-forward part keeps that out of the comparison.
        factors={"post_ffw_norm.weight": 0.01},
    ),
    TinyModel(
        "gemma3-softcap",
        "gemma3",
        _HEADS | {"attention.sliding_window": 8, "final_logit_softcapping": 3.0, "block_count": 2},
        tied=True,
    ),
    TinyModel(
        "gpt-oss",
        "gpt-oss",
        _HEADS
        | _MOE
        | _WIDE_HEADS
        | {
            "expert_feed_forward_length": 48,
            "attention.sliding_window": 8,
            "rope.freq_base": 150000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 64,
        },
        _QKV_BIAS,
    ),
    TinyModel("deepseek-v2-lite", "deepseek2", _MLA | _MOE | {"attention.q_lora_rank": 0}),
    TinyModel(
        "deepseek-v2-legacy",
        "deepseek2",
        {key: value for key, value in _MLA.items() if "mla" not in key}
        | {"attention.key_length": 24, "attention.value_length": 16, "attention.head_count_kv": 4}
        | _MOE,
    ),
    TinyModel(
        "deepseek-v3",
        "deepseek2",
        _MLA
        | {
            "expert_count": 16,
            "expert_used_count": 4,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 40.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_log_multiplier": 0.1,
        },
        ("exp_probs_b.bias",),
    ),
    TinyModel(
        "deepseek-v2-yarn",
        "deepseek2",
        _MLA
        | _MOE
        | {
            "expert_weights_scale": 4.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 40.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_log_multiplier": 0.0707,
        },
    ),
    TinyModel(
        "glm4moe",
        "glm4moe",
        _HEADS
        | _MOE
        | {
            "rope.dimension_count": 8,
            "leading_dense_block_count": 1,
            "expert_feed_forward_length": 32,
            "expert_shared_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
        },
        (*_QKV_BIAS, *_QK_NORM),
    ),
    TinyModel(
        "granitemoe",
        "granitemoe",
        _HEADS
        | _MOE
        | {
            "expert_shared_feed_forward_length": 48,
            "embedding_scale": 3.0,
            "residual_scale": 0.6,
            "attention.scale": 0.2,
            "logit_scale": 6.0,
        },
        tied=True,
    ),
)
BY_NAME: Mapping[str, TinyModel] = {model.name: model for model in MODELS}


def metadata_of(model: TinyModel) -> dict[str, Any]:
    """All keys of the model's file that are not about the vocabulary."""
    keys: dict[str, Any] = {
        "block_count": 3,
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "feed_forward_length": 96,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": VOCABULARY,
    } | dict(model.metadata)
    named = {f"{model.architecture}.{key}": value for key, value in keys.items()}
    return {"general.architecture": model.architecture} | named


def tensors_of(model: TinyModel, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights by name, in numpy order, of the sizes that the table gives."""
    row = architectures.ARCHITECTURES[model.architecture]
    output = () if model.tied else ("output.weight",)
    others = {"token_embd.weight", "output_norm.weight", *output, *model.model_tensors}

    shape = architectures.parse(metadata_of(model), {})
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    sizes = architectures.dimensions(shape, shape.layers[0]) | {"vocab": VOCABULARY}
    for name in sorted(others):
        tensors[name] = _random(name, [sizes[s] for s in architectures.MODEL_TENSORS[name]], rng)
    for layer in shape.layers:
        sizes = architectures.dimensions(shape, layer)
        known = row.known(layer)
        for suffix in sorted({*row.required(layer), *(set(model.optional) & known)}):
            dims = [sizes[s] for s in architectures.LAYER_TENSORS[suffix]]
            factor = np.float32(model.factors.get(suffix, 1.0))
            tensors[layer.name(suffix)] = _random(suffix, dims, rng) * factor
    return tensors


def _random(name: str, shape: list[int], rng: np.random.Generator) -> np.ndarray:
    values = rng.standard_normal(shape).astype(np.float32)
    if name == "rope_freqs.weight":
        return (1.0 + 7.0 * rng.random(shape)).astype(np.float32)
    if "norm" in name:
        return 1.0 + 0.2 * values
    if name.endswith(".bias"):
        return 0.1 * values
    if "gate_inp" in name:
        # Router logits far enough apart that rounding does not change the choice.
        return values * np.float32(2.0 / np.sqrt(shape[-1]))
    if name.startswith("attn_sinks"):
        return values
    return values / np.float32(np.sqrt(shape[-1]))


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]],
) -> None:
    """Write a file with a vocabulary that has no text, which llama.cpp accepts for models used by token id.

    Args:
        path: of the file.
        metadata: keys and values.
        tensors: float32 arrays, or bytes [..., out, row bytes] with their type.
    """
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.add_string("tokenizer.ggml.model", "none")
    for name, tensor in tensors.items():
        array, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(model: TinyModel, folder: Path, seed: int = 0) -> Path:
    """Write the model's file into a folder and return its path."""
    path = folder / f"{model.name}.gguf"
    write_gguf(path, metadata_of(model), tensors_of(model, seed))
    return path


def infos_of(tensors: Mapping[str, np.ndarray]) -> dict[str, TensorInfo]:
    """Headers of float32 tensors, as a file of them would give."""
    return {
        name: TensorInfo(name=name, shape=array.shape, type=0, n_bytes=array.nbytes, offset=0)
        for name, array in tensors.items()
    }
