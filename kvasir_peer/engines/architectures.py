"""What the engines know about model architectures: one table, and the reading of a file's metadata by it.

A GGUF file names its architecture and gives its sizes as metadata (``llama.block_count`` and so on); what the
file does not say (where norms stand, how RoPE pairs its dimensions, how the router turns logits into weights)
is in :data:`ARCHITECTURES`. :func:`parse` joins the two into a :class:`ModelShape`, which engines follow without
asking for the architecture's name again.

An architecture that is not in the table, a tensor that its row does not name, a tensor of the wrong shape, and
a metadata value out of bounds are refused by name: nothing is guessed.

The semantics are those of llama.cpp's ``src/models/*.cpp``, against which the tests compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from kvasir_peer.errors import ModelFileError

if TYPE_CHECKING:
    from kvasir_peer.models.gguf import TensorInfo

RopeStyle = Literal["adjacent", "halves"]
Gating = Literal["softmax", "sigmoid", "softmax_chosen"]
Activation = Literal["silu", "gelu_tanh", "swiglu_oai"]

# Bounds of what a file may claim. A header may come from another peer, so nothing is allocated by it before
# these hold; they are several times what the largest published models have.
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_HEADS = 4096
MAX_EXPERTS = 4096
MAX_CONTEXT = 1 << 27


# ------------------------------------------------------------------------------------------------- shapes


@dataclass(frozen=True)
class RopeShape:
    """Rotary position embedding of a layer; :mod:`kvasir_peer.engines.rope` turns it into angles.

    Attributes:
        style: ``adjacent`` rotates dimensions (2i, 2i+1), ``halves`` rotates (i, i + dimensions/2).
        dimensions: how many of the head's dimensions are rotated; the first ones, except in MLA, where they
            stand last and are a tensor of their own here.
        base: frequency base.
        scale: positions are multiplied by it (1/factor of linear or YaRN scaling).
        extrapolation: YaRN's mix of extrapolation, 0 without YaRN.
        original_context: context that the model was trained on before YaRN.
        magnitude: factor on the rotated dimensions.
        beta_fast: YaRN, rotations over the original context above which a dimension is not interpolated.
        beta_slow: YaRN, rotations below which it is wholly interpolated.
        factors: whether the tensor ``rope_freqs.weight`` [dimensions/2] divides the frequencies (llama 3).
    """

    style: RopeStyle
    dimensions: int
    base: float
    scale: float = 1.0
    extrapolation: float = 0.0
    original_context: int = 0
    magnitude: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    factors: bool = False


@dataclass(frozen=True)
class MlaShape:
    """Multi-head latent attention (DeepSeek V2, section 2.1).

    Attributes:
        q_rank: width of the compressed query, 0 when queries are projected at once.
        kv_rank: width of the compressed keys and values.
        nope: dimensions of a head without position.
        rope: dimensions of a head with position; shared by all heads on the key side.
        value: dimensions of a head's value.
        split: whether the file has ``attn_k_b`` and ``attn_v_b`` apart; else one ``attn_kv_b``.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    split: bool


@dataclass(frozen=True)
class AttentionShape:
    """Attention of a layer.

    Attributes:
        n_head: query heads.
        n_head_kv: key and value heads.
        key_length: dimensions of a query or key head.
        value_length: dimensions of a value head.
        scale: factor on the scores.
        window: how many positions a row sees, itself included; 0 is all.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 is off.
        rope: position embedding.
        mla: set for latent attention; then ``n_head_kv``, ``key_length`` and ``value_length`` describe the
            decompressed heads, and the cache holds ``kv_rank + rope`` values per position.
    """

    n_head: int
    n_head_kv: int
    key_length: int
    value_length: int
    scale: float
    window: int
    softcap: float
    rope: RopeShape
    mla: MlaShape | None = None

    @property
    def cache_widths(self) -> tuple[int, int]:
        """Values per position in the key cache and in the value cache.

        Latent attention has no value cache: values are the first ``kv_rank`` of the keys.
        """
        if self.mla is not None:
            return self.mla.kv_rank + self.mla.rope, 0
        return self.n_head_kv * self.key_length, self.n_head_kv * self.value_length


@dataclass(frozen=True)
class MoeShape:
    """Routed (and shared) experts of a layer.

    Attributes:
        n_expert: routed experts.
        n_used: experts chosen for each row.
        width: hidden width of an expert.
        gating: ``softmax`` over all experts, ``sigmoid``, or ``softmax_chosen`` (over the chosen logits).
        renormalise: whether the chosen weights are divided by their sum.
        scale: factor on the weights.
        n_group: groups of experts, 1 or 0 for none; only the best groups are chosen from.
        n_group_used: how many groups.
        shared_width: hidden width of the shared expert, 0 for none.
    """

    n_expert: int
    n_used: int
    width: int
    gating: Gating
    renormalise: bool
    scale: float
    n_group: int
    n_group_used: int
    shared_width: int


@dataclass(frozen=True)
class LayerShape:
    """One layer.

    Attributes:
        index: its number.
        attention: its attention.
        ffn_norm: suffix of the norm before the feed-forward part.
        attn_post_norm: suffix of a norm on attention's result, or "".
        ffn_post_norm: suffix of a norm on the feed-forward result, or "".
        activation: of the feed-forward part.
        n_ff: hidden width of the dense feed-forward part, 0 in a layer of experts.
        moe: its experts, or None.
        present: suffixes of the layer's tensors that the source has (``attn_q.bias``, ...).
    """

    index: int
    attention: AttentionShape
    ffn_norm: str
    attn_post_norm: str
    ffn_post_norm: str
    activation: Activation
    n_ff: int
    moe: MoeShape | None
    present: frozenset[str] = field(repr=False)

    def has(self, suffix: str) -> bool:
        """Whether the source has this tensor of the layer."""
        return suffix in self.present

    def name(self, suffix: str) -> str:
        """Full name of a tensor of the layer."""
        return f"blk.{self.index}.{suffix}"


@dataclass(frozen=True)
class ModelShape:
    """A model, as the engines need to know it.

    Attributes:
        architecture: name in the table.
        n_layer: layers that are computed (a file's extra next-token-prediction layers are not among them).
        n_embd: width of the hidden state.
        n_vocab: tokens; 0 when the source has neither embedding nor output and the metadata does not say.
        context_length: positions that the model was made for.
        norm_eps: of all RMS norms.
        embedding_scale: factor on the embedding.
        residual_scale: factor on what attention and feed-forward add to the hidden state.
        logit_scale: factor on the logits.
        logit_softcap: logits become ``softcap * tanh(logit / softcap)``; 0 is off.
        tied: whether the output matrix is ``token_embd.weight``.
        layers: one per layer.
        present: names of tensors outside layers that the source has.
    """

    architecture: str
    n_layer: int
    n_embd: int
    n_vocab: int
    context_length: int
    norm_eps: float
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    logit_softcap: float
    tied: bool
    layers: tuple[LayerShape, ...] = field(repr=False)
    present: frozenset[str] = field(repr=False)

    @property
    def output_name(self) -> str:
        """Name of the output matrix [n_vocab, n_embd]."""
        return "token_embd.weight" if self.tied else "output.weight"

    def has(self, name: str) -> bool:
        """Whether the source has this tensor that belongs to no layer."""
        return name in self.present

    def stage_tensors(self, first: int, end: int) -> list[str]:
        """Names of all tensors that layers [first, end) load, head and tail included where they are reached.

        Raises:
            ModelFileError: the layers are not in the model, or the source lacks a tensor that is needed.
        """
        if not 0 <= first < end <= self.n_layer:
            raise ModelFileError(
                f"layers [{first}, {end}) are not in a {self.architecture} model of {self.n_layer} layers"
            )
        row = ARCHITECTURES[self.architecture]
        names: list[str] = []
        if first == 0:
            names.append(self._needed("token_embd.weight", self.present, "token_embd.weight"))
        if self.has("rope_freqs.weight"):
            names.append("rope_freqs.weight")
        for layer in self.layers[first:end]:
            for suffix in row.required(layer):
                self._needed(suffix, layer.present, layer.name(suffix))
            names.extend(layer.name(suffix) for suffix in sorted(layer.present))
        if end == self.n_layer:
            names.append(self._needed("output_norm.weight", self.present, "output_norm.weight"))
            names.append(self._needed(self.output_name, self.present, self.output_name))
            if self.has("output.bias"):
                names.append("output.bias")
        return list(dict.fromkeys(names))

    def expert_tensors(self, layer: int) -> list[str]:
        """Names of the stacked expert tensors of a layer: gate, up and down, with biases where there are.

        Raises:
            ModelFileError: the layer has no experts, or the source lacks one of its tensors.
        """
        if not 0 <= layer < self.n_layer or self.layers[layer].moe is None:
            raise ModelFileError(f"layer {layer} of this {self.architecture} model has no routed experts")
        shape = self.layers[layer]
        for suffix in EXPERT_WEIGHTS:
            self._needed(suffix, shape.present, shape.name(suffix))
        return [shape.name(suffix) for suffix in EXPERT_WEIGHTS + EXPERT_BIASES if shape.has(suffix)]

    def _needed(self, key: str, present: frozenset[str], name: str) -> str:
        if key not in present:
            raise ModelFileError(f"tensor {name} is missing; a {self.architecture} model needs it")
        return name


# ------------------------------------------------------------------------------------------------ tensors

# Dimensions of each tensor, outermost first as numpy sees them, in the symbols that `dimensions` resolves for
# each layer. A tensor that stands in neither table is unknown.
MODEL_TENSORS: Mapping[str, tuple[str, ...]] = {
    "token_embd.weight": ("vocab", "embd"),
    "output_norm.weight": ("embd",),
    "output.weight": ("vocab", "embd"),
    "output.bias": ("vocab",),
    "rope_freqs.weight": ("rope/2",),
}
LAYER_TENSORS: Mapping[str, tuple[str, ...]] = {
    "attn_norm.weight": ("embd",),
    "attn_q.weight": ("q", "embd"),
    "attn_k.weight": ("k", "embd"),
    "attn_v.weight": ("v", "embd"),
    "attn_output.weight": ("embd", "o"),
    "attn_q.bias": ("q",),
    "attn_k.bias": ("k",),
    "attn_v.bias": ("v",),
    "attn_output.bias": ("embd",),
    "attn_q_norm.weight": ("q_norm",),
    "attn_k_norm.weight": ("k_norm",),
    "attn_sinks.weight": ("head",),
    "attn_q_a.weight": ("q_rank", "embd"),
    "attn_q_a_norm.weight": ("q_rank",),
    "attn_q_b.weight": ("q", "q_rank"),
    "attn_kv_a_mqa.weight": ("kv_rank+rope", "embd"),
    "attn_kv_a_norm.weight": ("kv_rank",),
    "attn_k_b.weight": ("head", "kv_rank", "nope"),
    "attn_v_b.weight": ("head", "value", "kv_rank"),
    "attn_kv_b.weight": ("head*(nope+value)", "kv_rank"),
    "post_attention_norm.weight": ("embd",),
    "ffn_norm.weight": ("embd",),
    "post_ffw_norm.weight": ("embd",),
    "ffn_gate.weight": ("ff", "embd"),
    "ffn_up.weight": ("ff", "embd"),
    "ffn_down.weight": ("embd", "ff"),
    "ffn_gate.bias": ("ff",),
    "ffn_up.bias": ("ff",),
    "ffn_down.bias": ("embd",),
    "ffn_gate_inp.weight": ("expert", "embd"),
    "ffn_gate_inp.bias": ("expert",),
    "exp_probs_b.bias": ("expert",),
    "ffn_gate_exps.weight": ("expert", "expert_ff", "embd"),
    "ffn_up_exps.weight": ("expert", "expert_ff", "embd"),
    "ffn_down_exps.weight": ("expert", "embd", "expert_ff"),
    "ffn_gate_exps.bias": ("expert", "expert_ff"),
    "ffn_up_exps.bias": ("expert", "expert_ff"),
    "ffn_down_exps.bias": ("expert", "embd"),
    "ffn_gate_inp_shexp.weight": ("embd",),
    "ffn_gate_shexp.weight": ("shared_ff", "embd"),
    "ffn_up_shexp.weight": ("shared_ff", "embd"),
    "ffn_down_shexp.weight": ("embd", "shared_ff"),
}
EXPERT_WEIGHTS = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
EXPERT_BIASES = ("ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias")

_QKVO = ("attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight")
_QKV_BIAS = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
_QK_NORM = ("attn_q_norm.weight", "attn_k_norm.weight")
_DENSE = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
_DENSE_BIAS = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
_ROUTED = ("ffn_gate_inp.weight", *EXPERT_WEIGHTS)
_SHARED = ("ffn_gate_shexp.weight", "ffn_up_shexp.weight", "ffn_down_shexp.weight")


# ------------------------------------------------------------------------------------------------ the table


@dataclass(frozen=True)
class Architecture:
    """A row of the table: what a file of this architecture does not say itself.

    Attributes:
        rope: how RoPE pairs dimensions.
        attention: tensors that attention always has.
        attention_optional: tensors that it may have.
        qk_norm: whether query and key norms cover a ``head`` or the whole ``projection``.
        ffn_norm: suffix of the norm before the feed-forward part.
        attn_post_norm: suffix of the norm on attention's result, or "".
        ffn_post_norm: suffix of the norm on the feed-forward result, or "".
        activation: of dense part and experts.
        dense: tensors of a dense layer; empty where all layers have experts.
        dense_optional: tensors that a dense layer may have.
        experts: tensors of a layer of experts; empty where there are none.
        experts_optional: tensors that a layer of experts may have.
        shared: tensors of a shared expert, where the layer has one.
        gating: how router logits become weights, where the file does not say.
        renormalise: whether the chosen weights are divided by their sum; None: the file says.
        scale_weights: whether the file's factor on the weights is heeded.
        expert_width_keys: where the hidden width of an expert stands, the first that is there.
        shared_width: where the shared expert's width stands: ``key`` (0 without it), ``key_or_dense`` (the dense
            width without it), ``count`` (a multiple of the experts' width), or "" for no shared expert.
        window_pattern: with sliding windows, every how many layers one sees everything.
        local_rope: RoPE of layers with a window: ``same`` as that of the others, or ``plain`` (base 10000 where
            the file does not say, no scaling).
        softcaps: whether the caps on scores and logits are read.
        scale_by_width: layer count of the one model whose attention is scaled by the width per query head in
            place of the head's dimensions (the file does not say it; llama.cpp tells by the layer count too).
        embedding_scale: ``sqrt`` multiplies the embedding by sqrt(n_embd), ``key`` by the file's factor.
        scales: whether residual, attention and logit scales are read (Granite).
        output_required: whether the output matrix may not be tied to the embedding.
        mla: whether attention is latent.
    """

    rope: RopeStyle
    attention: tuple[str, ...] = _QKVO
    attention_optional: tuple[str, ...] = ()
    qk_norm: Literal["head", "projection"] = "head"
    ffn_norm: str = "ffn_norm.weight"
    attn_post_norm: str = ""
    ffn_post_norm: str = ""
    activation: Activation = "silu"
    dense: tuple[str, ...] = ()
    dense_optional: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    experts_optional: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    gating: Gating = "softmax"
    renormalise: bool | None = True
    scale_weights: bool = True
    expert_width_keys: tuple[str, ...] = ("expert_feed_forward_length", "feed_forward_length")
    shared_width: Literal["", "key", "key_or_dense", "count"] = ""
    window_pattern: int = 0
    local_rope: Literal["same", "plain"] = "same"
    softcaps: bool = False
    scale_by_width: int = 0
    embedding_scale: Literal["", "sqrt", "key"] = ""
    scales: bool = False
    output_required: bool = False
    mla: bool = False

    def required(self, layer: LayerShape) -> list[str]:
        """Suffixes of the tensors that the layer must have."""
        names = [*self.attention, layer.ffn_norm]
        names += [suffix for suffix in (layer.attn_post_norm, layer.ffn_post_norm) if suffix]
        mla = layer.attention.mla
        if mla is not None:
            names += _MLA_QUERY if mla.q_rank else ("attn_q.weight",)
            names += ("attn_k_b.weight", "attn_v_b.weight") if mla.split else ("attn_kv_b.weight",)
        if layer.moe is None:
            return names + list(self.dense)
        return names + list(self.experts) + list(self.shared if layer.moe.shared_width else ())

    def known(self, layer: LayerShape) -> set[str]:
        """Suffixes of the tensors that the layer may have."""
        optional = self.dense_optional if layer.moe is None else self.experts_optional
        return {*self.required(layer), *self.attention_optional, *optional}


_MLA_QUERY = ("attn_q_a.weight", "attn_q_a_norm.weight", "attn_q_b.weight")

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        rope="adjacent",
        attention_optional=(*_QKV_BIAS, "attn_output.bias"),
        dense=_DENSE,
        dense_optional=_DENSE_BIAS,
        experts=_ROUTED,
        expert_width_keys=("feed_forward_length",),
        scale_weights=False,
    ),
    "qwen2": Architecture(
        rope="halves",
        attention_optional=(*_QKV_BIAS, "attn_output.bias"),
        dense=_DENSE,
    ),
    "qwen3": Architecture(
        rope="halves",
        attention=(*_QKVO, *_QK_NORM),
        attention_optional=(*_QKV_BIAS, "attn_output.bias"),
        dense=_DENSE,
    ),
    "qwen2moe": Architecture(
        rope="halves",
        attention_optional=(*_QKV_BIAS, "attn_output.bias"),
        experts=_ROUTED,
        shared=("ffn_gate_inp_shexp.weight", *_SHARED),
        renormalise=False,
        shared_width="key_or_dense",
        output_required=True,
    ),
    "qwen3moe": Architecture(
        rope="halves",
        attention=(*_QKVO, *_QK_NORM),
        attention_optional=(*_QKV_BIAS, "attn_output.bias"),
        experts=_ROUTED,
    ),
    "olmoe": Architecture(
        rope="halves",
        attention=(*_QKVO, *_QK_NORM),
        qk_norm="projection",
        experts=_ROUTED,
        renormalise=False,
        scale_weights=False,
        expert_width_keys=("feed_forward_length",),
        output_required=True,
    ),
    "gemma3": Architecture(
        rope="halves",
        attention=(*_QKVO, *_QK_NORM),
        attn_post_norm="post_attention_norm.weight",
        ffn_post_norm="post_ffw_norm.weight",
        activation="gelu_tanh",
        dense=_DENSE,
        window_pattern=6,
        local_rope="plain",
        softcaps=True,
        scale_by_width=62,
        embedding_scale="sqrt",
    ),
    "gpt-oss": Architecture(
        rope="halves",
        attention=(*_QKVO, "attn_sinks.weight", "attn_output.bias"),
        attention_optional=_QKV_BIAS,
        ffn_norm="post_attention_norm.weight",
        activation="swiglu_oai",
        experts=(*_ROUTED, "ffn_gate_inp.bias", *EXPERT_BIASES),
        gating="softmax_chosen",
        renormalise=False,
        expert_width_keys=("expert_feed_forward_length",),
        window_pattern=2,
        output_required=True,
    ),
    "deepseek2": Architecture(
        rope="adjacent",
        attention=(
            "attn_norm.weight",
            "attn_kv_a_mqa.weight",
            "attn_kv_a_norm.weight",
            "attn_output.weight",
        ),
        dense=_DENSE,
        experts=_ROUTED,
        experts_optional=("exp_probs_b.bias",),
        shared=_SHARED,
        renormalise=None,
        expert_width_keys=("expert_feed_forward_length",),
        shared_width="count",
        mla=True,
    ),
    "glm4moe": Architecture(
        rope="halves",
        attention_optional=(*_QKV_BIAS, *_QK_NORM),
        ffn_norm="post_attention_norm.weight",
        dense=_DENSE,
        experts=(*_ROUTED, "exp_probs_b.bias"),
        shared=_SHARED,
        gating="sigmoid",
        renormalise=None,
        expert_width_keys=("expert_feed_forward_length",),
        shared_width="count",
    ),
    "granitemoe": Architecture(
        rope="adjacent",
        attention_optional=(*_QKV_BIAS, "attn_output.bias"),
        dense=_DENSE,
        dense_optional=_DENSE_BIAS,
        experts=_ROUTED,
        shared=_SHARED,
        scale_weights=False,
        expert_width_keys=("feed_forward_length",),
        shared_width="key",
        embedding_scale="key",
        scales=True,
    ),
}

_GATING_IDS: Mapping[int, Gating] = {1: "softmax", 2: "sigmoid", 3: "softmax_chosen"}


# ------------------------------------------------------------------------------------------------ parsing


class _Metadata:
    """Typed, bounded reading of one architecture's keys."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._architecture = architecture

    def get(self, key: str) -> Any:
        return self._metadata.get(f"{self._architecture}.{key}")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        return self._integer(key, self.get(key), low, high, default)

    def integers(self, key: str, count: int, low: int, high: int, default: int | None = None) -> list[int]:
        """One value for each layer: the file has one for all, or a list."""
        value = self.get(key)
        if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
            return [self._integer(key, value, low, high, default)] * count
        values = list(value)
        if len(values) < count:
            raise ModelFileError(
                f"metadata {self._architecture}.{key} has {len(values)} values for {count} layers"
            )
        return [self._integer(key, item, low, high, default) for item in values[:count]]

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None:
            if default is None:
                raise ModelFileError(f"metadata {self._architecture}.{key} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ModelFileError(f"metadata {self._architecture}.{key} is {value!r}, no finite number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ModelFileError(f"metadata {self._architecture}.{key} is {value!r}, no text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        return default if value is None else bool(value)

    def _integer(self, key: str, value: Any, low: int, high: int, default: int | None) -> int:
        if value is None:
            if default is None:
                raise ModelFileError(f"metadata {self._architecture}.{key} is missing")
            return default
        try:
            number = int(value)
        except (TypeError, ValueError, OverflowError):  # the last for what is infinite
            raise ModelFileError(f"metadata {self._architecture}.{key} is {value!r}, no integer") from None
        if not low <= number <= high:
            raise ModelFileError(f"metadata {self._architecture}.{key} is {number}, outside {low} to {high}")
        return number


def parse(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelShape:
    """Join the table and a file's header into the model's shape.

    Args:
        metadata: of the whole model; tokenizer arrays are not needed.
        tensors: of the whole model or of a slice.

    Raises:
        ModelFileError: unknown architecture, unknown tensor, a tensor's shape or a metadata value that does
            not fit.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ModelFileError(
            f"architecture {architecture!r} is not known; known are {', '.join(sorted(ARCHITECTURES))}"
        )
    row = ARCHITECTURES[architecture]
    meta = _Metadata(metadata, architecture)
    n_block = meta.integer("block_count", 1, MAX_LAYERS)
    n_layer = n_block - meta.integer("nextn_predict_layers", 0, n_block - 1, 0)
    n_embd = meta.integer("embedding_length", 1, MAX_WIDTH)
    context = meta.integer("context_length", 1, MAX_CONTEXT)
    present_by_layer, present = _sort_tensors(architecture, tensors, n_layer, n_block)
    layers = _layers(architecture, row, meta, n_layer, n_embd, context, present_by_layer, present)
    shape = ModelShape(
        architecture=architecture,
        n_layer=n_layer,
        n_embd=n_embd,
        n_vocab=_vocabulary(meta, tensors),
        context_length=context,
        norm_eps=meta.real("attention.layer_norm_rms_epsilon"),
        embedding_scale=_embedding_scale(row, meta, n_embd),
        residual_scale=(meta.real("residual_scale", 0.0) or 1.0) if row.scales else 1.0,
        logit_scale=1.0 / _non_zero(architecture, "logit_scale", meta.real("logit_scale"))
        if row.scales
        else 1.0,
        logit_softcap=meta.real("final_logit_softcapping", 0.0) if row.softcaps else 0.0,
        tied="output.weight" not in present and not row.output_required,
        layers=layers,
        present=frozenset(present),
    )
    _check_tensors(shape, row, tensors)
    return shape


def _sort_tensors(
    architecture: str, tensors: Iterable[str], n_layer: int, n_block: int
) -> tuple[dict[int, set[str]], set[str]]:
    """Sort tensor names into those of each layer (as suffixes) and the others."""
    by_layer: dict[int, set[str]] = {}
    others: set[str] = set()
    for name in tensors:
        head, _, rest = name.partition(".")
        number, _, suffix = rest.partition(".")
        if head == "blk" and number.isdecimal() and int(number) < n_block:
            # The layers after n_layer predict the token after the next one; they are not computed.
            if int(number) < n_layer:
                by_layer.setdefault(int(number), set()).add(suffix)
        elif name in MODEL_TENSORS:
            others.add(name)
        else:
            raise ModelFileError(f"tensor {name} is not known in a {architecture} model of {n_block} layers")
    return by_layer, others


def _vocabulary(meta: _Metadata, tensors: Mapping[str, TensorInfo]) -> int:
    for name in ("token_embd.weight", "output.weight"):
        if name in tensors:
            return int(tensors[name].shape[0])
    return meta.integer("vocab_size", 0, MAX_WIDTH * 16, 0)


def _embedding_scale(row: Architecture, meta: _Metadata, n_embd: int) -> float:
    if row.embedding_scale == "sqrt":
        return math.sqrt(n_embd)
    if row.embedding_scale == "key":
        return meta.real("embedding_scale", 0.0) or 1.0
    return 1.0


def _non_zero(architecture: str, key: str, value: float) -> float:
    if value == 0.0:
        raise ModelFileError(f"metadata {architecture}.{key} is 0")
    return value


def _layers(
    architecture: str,
    row: Architecture,
    meta: _Metadata,
    n_layer: int,
    n_embd: int,
    context: int,
    present_by_layer: Mapping[int, set[str]],
    present: set[str],
) -> tuple[LayerShape, ...]:
    n_head = meta.integers("attention.head_count", n_layer, 1, MAX_HEADS)
    kv = meta.get("attention.head_count_kv")
    n_head_kv = n_head if kv is None else meta.integers("attention.head_count_kv", n_layer, 1, MAX_HEADS)
    n_expert = meta.integer("expert_count", 0, MAX_EXPERTS, 0)
    n_dense = meta.integer("leading_dense_block_count", 0, n_layer, 0) if row.dense else 0
    n_ff = meta.integers("feed_forward_length", n_layer, 0, MAX_WIDTH, 0)
    windows = _windows(row, meta, n_layer)
    layers = []
    for index in range(n_layer):
        has_experts = bool(row.experts) and n_expert > 0 and index >= n_dense
        if not has_experts and not row.dense:
            raise ModelFileError(
                f"metadata {architecture}.expert_count is missing; all its layers have experts"
            )
        if not has_experts and n_ff[index] < 1:
            raise ModelFileError(f"metadata {architecture}.feed_forward_length is missing")
        layers.append(
            LayerShape(
                index=index,
                attention=_attention(
                    architecture,
                    row,
                    meta,
                    n_layer=n_layer,
                    n_embd=n_embd,
                    n_head=n_head[index],
                    n_head_kv=n_head_kv[index],
                    window=windows[index],
                    context=context,
                    present=present_by_layer.get(index, set()),
                    factors="rope_freqs.weight" in present,
                ),
                ffn_norm=row.ffn_norm,
                attn_post_norm=row.attn_post_norm,
                ffn_post_norm=row.ffn_post_norm,
                activation=row.activation,
                n_ff=0 if has_experts else n_ff[index],
                moe=_moe(architecture, row, meta, n_layer, index, n_expert) if has_experts else None,
                present=frozenset(present_by_layer.get(index, set())),
            )
        )
    return tuple(layers)


def _windows(row: Architecture, meta: _Metadata, n_layer: int) -> list[int]:
    """Sliding window of each layer, 0 where a layer sees everything."""
    if not row.window_pattern:
        return [0] * n_layer
    window = meta.integer("attention.sliding_window", 0, MAX_CONTEXT, 0)
    pattern = meta.get("attention.sliding_window_pattern")
    if pattern is not None and hasattr(pattern, "__len__"):
        slides = [bool(flag) for flag in pattern][:n_layer]
        slides += [False] * (n_layer - len(slides))
    else:
        every = meta.integer("attention.sliding_window_pattern", 0, MAX_LAYERS, row.window_pattern)
        slides = [every == 0 or index % every < every - 1 for index in range(n_layer)]
    return [window if slide else 0 for slide in slides]


def _attention(
    architecture: str,
    row: Architecture,
    meta: _Metadata,
    *,
    n_layer: int,
    n_embd: int,
    n_head: int,
    n_head_kv: int,
    window: int,
    context: int,
    present: set[str],
    factors: bool,
) -> AttentionShape:
    if n_head % n_head_kv:
        raise ModelFileError(
            f"metadata {architecture}.attention.head_count {n_head} is no multiple of head_count_kv {n_head_kv}"
        )
    key_length = meta.integer("attention.key_length", 1, MAX_WIDTH, max(n_embd // n_head, 1))
    value_length = meta.integer("attention.value_length", 1, MAX_WIDTH, max(n_embd // n_head, 1))
    rope_dimensions = meta.integer("rope.dimension_count", 2, MAX_WIDTH, key_length)
    mla = None
    if row.mla:
        # Newer files give the widths of the latent cache as key_length and value_length, and those of the
        # heads apart; older ones give those of the heads.
        split = meta.get("attention.key_length_mla") is not None
        key_length = meta.integer("attention.key_length_mla", 1, MAX_WIDTH, key_length)
        value_length = meta.integer("attention.value_length_mla", 1, MAX_WIDTH, value_length)
        n_head_kv = n_head
        mla = MlaShape(
            q_rank=0
            if "attn_q.weight" in present
            else meta.integer("attention.q_lora_rank", 0, MAX_WIDTH, 0),
            kv_rank=meta.integer("attention.kv_lora_rank", 1, MAX_WIDTH),
            nope=key_length - rope_dimensions,
            rope=rope_dimensions,
            value=value_length,
            split=split,
        )
    if rope_dimensions % 2 or rope_dimensions > key_length or (mla is not None and mla.nope < 1):
        raise ModelFileError(
            f"metadata {architecture}.rope.dimension_count is {rope_dimensions}, with heads of {key_length}"
        )
    rope = _rope(architecture, row, meta, rope_dimensions, context, window > 0, factors)
    return AttentionShape(
        n_head=n_head,
        n_head_kv=n_head_kv,
        key_length=key_length,
        value_length=value_length,
        scale=_attention_scale(row, meta, n_layer, n_embd, n_head, key_length),
        window=window,
        softcap=meta.real("attn_logit_softcapping", 0.0) if row.softcaps else 0.0,
        rope=rope,
        mla=mla,
    )


def _attention_scale(
    row: Architecture,
    meta: _Metadata,
    n_layer: int,
    n_embd: int,
    n_head: int,
    key_length: int,
) -> float:
    if row.scales:
        scale = meta.real("attention.scale", 0.0)
        if scale:
            return scale
    if n_layer == row.scale_by_width:
        return 1.0 / math.sqrt(n_embd // n_head)
    if row.mla:
        # YaRN's magnitude belongs to the scores here, not to the rotated dimensions alone
        # (DeepSeek's `mscale_all_dim`): the rope part gets it by `_rope`, the whole score by this.
        return _deepseek_mscale(meta) ** 2 / math.sqrt(key_length)
    return 1.0 / math.sqrt(key_length)


def _deepseek_mscale(meta: _Metadata) -> float:
    factor = _scaling_factor(meta)
    if _scaling_type(meta) != "yarn" or factor <= 1.0:
        return 1.0
    # The file holds 0.1 * mscale_all_dim.
    return meta.real("rope.scaling.attn_factor", 1.0) * (
        1.0 + meta.real("rope.scaling.yarn_log_multiplier", 0.0) * math.log(factor)
    )


def _scaling_type(meta: _Metadata) -> str:
    kind = meta.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ModelFileError(f"RoPE scaling {kind!r} is not known; known are none, linear, yarn")
    return kind


def _scaling_factor(meta: _Metadata) -> float:
    """How much longer the context is than the one trained on; 1 when the file gives 0 or nothing."""
    if _scaling_type(meta) == "none":
        return 1.0
    value = meta.real("rope.scaling.factor", 0.0) or meta.real("rope.scale_linear", 0.0) or 1.0
    if value < 0:
        raise ModelFileError(f"metadata rope.scaling.factor is {value}, under 0")
    return value


def _rope(
    architecture: str,
    row: Architecture,
    meta: _Metadata,
    dimensions: int,
    context: int,
    slides: bool,
    factors: bool,
) -> RopeShape:
    base = meta.real("rope.freq_base", 10000.0)
    factor = _scaling_factor(meta)
    yarn = _scaling_type(meta) == "yarn"
    scale = 1.0 / factor
    if slides:
        plain = row.local_rope == "plain"
        base = meta.real("rope.freq_base_swa", 10000.0 if plain else base)
        scale = 1.0 if plain else scale
    if base <= 1.0:
        raise ModelFileError(f"metadata {architecture}.rope.freq_base is {base}; it must be over 1")
    magnitude = meta.real("rope.scaling.attn_factor", 1.0)
    if yarn:
        magnitude *= _yarn_magnitude(row, meta, factor)
    return RopeShape(
        style=row.rope,
        dimensions=dimensions,
        base=base,
        scale=scale,
        extrapolation=1.0 if yarn else 0.0,
        original_context=meta.integer("rope.scaling.original_context_length", 1, MAX_CONTEXT, context),
        magnitude=magnitude,
        beta_fast=meta.real("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=meta.real("rope.scaling.yarn_beta_slow", 1.0),
        factors=factors,
    )


def _yarn_magnitude(row: Architecture, meta: _Metadata, factor: float) -> float:
    """YaRN's attention temperature as a factor on the rotated dimensions (YaRN paper, section 3.4)."""

    def mscale(multiplier: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * multiplier * math.log(factor) + 1.0

    all_dimensions = meta.real("rope.scaling.yarn_log_multiplier", 0.0) / 0.1 if row.mla else 0.0
    if not all_dimensions:
        return mscale(1.0)
    # DeepSeek's config gives mscale and mscale_all_dim; the file keeps only the second. They are equal, but
    # where the second is 1 they would be anyway.
    return mscale(all_dimensions if all_dimensions != 1.0 else 1.0) / mscale(all_dimensions)


def _moe(
    architecture: str, row: Architecture, meta: _Metadata, n_layer: int, index: int, n_expert: int
) -> MoeShape:
    n_used = meta.integers("expert_used_count", n_layer, 1, n_expert)[index]
    width = 0
    for key in row.expert_width_keys:
        width = meta.integers(key, n_layer, 0, MAX_WIDTH, 0)[index]
        if width:
            break
    if not width:
        raise ModelFileError(f"metadata {architecture}.{row.expert_width_keys[0]} is missing")
    shared = 0
    if row.shared_width in ("key", "key_or_dense"):
        shared = meta.integer("expert_shared_feed_forward_length", 0, MAX_WIDTH, 0)
        if not shared and row.shared_width == "key_or_dense":
            shared = meta.integers("feed_forward_length", n_layer, 1, MAX_WIDTH)[index]
    elif row.shared_width == "count":
        shared = width * meta.integer("expert_shared_count", 0, MAX_EXPERTS)
    gating = row.gating
    if row.renormalise is None:
        number = meta.integer("expert_gating_func", 0, 255, 0)
        if number and number not in _GATING_IDS:
            raise ModelFileError(f"metadata {architecture}.expert_gating_func {number} is not known")
        gating = _GATING_IDS.get(number, row.gating)
    n_group = meta.integer("expert_group_count", 0, n_expert, 0)
    n_group_used = meta.integer("expert_group_used_count", 0, n_expert, 0)
    if n_group > 1 and (n_expert % n_group or not 0 < n_group_used <= n_group or n_expert // n_group < 2):
        raise ModelFileError(
            f"metadata {architecture}: {n_expert} experts in {n_group} groups of which {n_group_used} are used"
        )
    if n_group > 1 and n_group_used * (n_expert // n_group) < n_used:
        raise ModelFileError(f"metadata {architecture}: the groups used hold fewer than {n_used} experts")
    return MoeShape(
        n_expert=n_expert,
        n_used=n_used,
        width=width,
        gating=gating,
        renormalise=meta.flag("expert_weights_norm", False) if row.renormalise is None else row.renormalise,
        scale=(meta.real("expert_weights_scale", 0.0) or 1.0) if row.scale_weights else 1.0,
        n_group=n_group,
        n_group_used=n_group_used,
        shared_width=shared,
    )


def _check_tensors(shape: ModelShape, row: Architecture, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse tensors that the table's row does not name, and shapes that do not fit."""
    for layer in shape.layers:
        unknown = layer.present - row.known(layer)
        if unknown:
            raise ModelFileError(
                f"tensor {layer.name(min(unknown))} is not known in a {shape.architecture} model"
            )
        sizes = dimensions(shape, layer)
        for suffix in layer.present:
            _check_shape(tensors[layer.name(suffix)], layer.name(suffix), LAYER_TENSORS[suffix], sizes)
    sizes = dimensions(shape, shape.layers[0])
    for name in shape.present:
        _check_shape(tensors[name], name, MODEL_TENSORS[name], sizes)


def _check_shape(info: TensorInfo, name: str, symbols: tuple[str, ...], sizes: Mapping[str, int]) -> None:
    expected = tuple(sizes[symbol] for symbol in symbols)
    if tuple(info.shape) != expected:
        raise ModelFileError(f"tensor {name} has shape {tuple(info.shape)}, expected {expected}")


def dimensions(shape: ModelShape, layer: LayerShape) -> dict[str, int]:
    """Resolve the symbols of :data:`MODEL_TENSORS` and :data:`LAYER_TENSORS` for a layer."""
    row = ARCHITECTURES[shape.architecture]
    attention = layer.attention
    mla = attention.mla
    moe = layer.moe
    q = attention.n_head * attention.key_length
    k = attention.n_head_kv * attention.key_length
    return {
        "vocab": shape.n_vocab,
        "embd": shape.n_embd,
        "rope/2": attention.rope.dimensions // 2,
        "head": attention.n_head,
        "q": q,
        "k": k,
        "v": attention.n_head_kv * attention.value_length,
        "o": attention.n_head * attention.value_length,
        "q_norm": attention.key_length if row.qk_norm == "head" else q,
        "k_norm": attention.key_length if row.qk_norm == "head" else k,
        "q_rank": mla.q_rank if mla else 0,
        "kv_rank": mla.kv_rank if mla else 0,
        "kv_rank+rope": mla.kv_rank + mla.rope if mla else 0,
        "nope": mla.nope if mla else 0,
        "value": mla.value if mla else 0,
        "head*(nope+value)": attention.n_head * (mla.nope + mla.value) if mla else 0,
        "ff": layer.n_ff,
        "expert": moe.n_expert if moe else 0,
        "expert_ff": moe.width if moe else 0,
        "shared_ff": moe.shared_width if moe else 0,
    }
