"""The table of architectures: what a file's header becomes, and what is refused by name."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny_models
from driving import path_of_data

from kvasir_peer.engines.architectures import ARCHITECTURES, LAYER_TENSORS, MODEL_TENSORS, ModelShape, parse
from kvasir_peer.engines.rope import RopeTable, frequencies, rotate
from kvasir_peer.errors import ModelFileError
from kvasir_peer.models.gguf import GgufFile, TensorInfo

NEEDED = {
    "llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "olmoe", "gemma3", "gpt-oss", "deepseek2", "glm4moe",
    "granitemoe",
}  # fmt: skip


def header(name: str) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    model = tiny_models.BY_NAME[name]
    return tiny_models.metadata_of(model), tiny_models.infos_of(tiny_models.tensors_of(model))


def info(name: str, *shape: int) -> TensorInfo:
    return TensorInfo(name=name, shape=shape, type=0, n_bytes=4 * int(np.prod(shape)), offset=0)


def test_the_table_has_every_architecture_and_a_tiny_model_of_each() -> None:
    assert set(ARCHITECTURES) == NEEDED
    assert {model.architecture for model in tiny_models.MODELS} == NEEDED


@pytest.mark.parametrize("name", [model.name for model in tiny_models.MODELS])
def test_a_stage_asks_for_its_layers_and_no_others(name: str) -> None:
    shape = parse(*header(name))
    tensors = header(name)[1]
    whole = shape.stage_tensors(0, shape.n_layer)
    assert sorted(whole) == sorted(tensors)
    ends = {"token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"}
    for index in range(shape.n_layer):
        names = set(shape.stage_tensors(index, index + 1))
        assert names - ends == {t for t in tensors if t.startswith(f"blk.{index}.")}
        assert ("token_embd.weight" in names) == (index == 0 or (shape.tied and index == shape.n_layer - 1))
        assert ("output_norm.weight" in names) == (index == shape.n_layer - 1)


def test_real_files_are_understood() -> None:
    for name, experts in (("stories260K.gguf", 0), ("stories260K-moe8x2.gguf", 8)):
        with GgufFile.open(path_of_data(name)) as file:
            shape = parse(file.metadata, file.tensors)
        assert (shape.n_layer, shape.n_embd, shape.n_vocab, shape.context_length) == (5, 64, 512, 2048)
        layer = shape.layers[4]
        assert layer.attention.cache_widths == (32, 32)
        assert (layer.moe.n_expert if layer.moe else 0) == experts
        assert layer.n_ff == (0 if experts else 172)


def test_every_required_tensor_is_missed_by_name() -> None:
    for name in ("gpt-oss", "deepseek-v3", "qwen2moe", "gemma3", "olmoe"):
        metadata, tensors = header(name)
        optional = set(tiny_models.BY_NAME[name].optional)
        for missing in tensors:
            if (
                missing == "output.weight"
                and not ARCHITECTURES[metadata["general.architecture"]].output_required
            ):
                continue
            if missing.split(".", 2)[-1] in optional:
                continue
            shape = parse(metadata, {k: v for k, v in tensors.items() if k != missing})
            with pytest.raises(ModelFileError, match=missing.replace(".", r"\.") + " is missing"):
                shape.stage_tensors(0, shape.n_layer)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("llama", "blk.0.attn_sinks.weight"),
        ("llama", "blk.0.attn_q_norm.weight"),
        ("llama", "blk.1.ffn_gate_exps.weight"),
        ("llama", "blk.3.attn_q.weight"),
        ("llama", "blk.0.attn_rot_embd.weight"),
        ("llama", "rope_factors_long.weight"),
        ("llama", "blk.x.attn_q.weight"),
        ("llama-moe", "blk.0.ffn_gate.weight"),
        ("qwen3moe", "blk.0.ffn_gate_shexp.weight"),
        ("gemma3", "output.bias.extra"),
    ],
)
def test_an_unknown_tensor_is_refused_by_name(name: str, tensor: str) -> None:
    metadata, tensors = header(name)
    with pytest.raises(ModelFileError, match=f"tensor {tensor.replace('.', chr(92) + '.')} is not known"):
        parse(metadata, {**tensors, tensor: info(tensor, 64)})


def test_layers_that_predict_further_tokens_are_left_out() -> None:
    metadata, tensors = header("glm4moe")
    metadata |= {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    tensors["blk.3.nextn.eh_proj.weight"] = info("blk.3.nextn.eh_proj.weight", 64, 128)
    shape = parse(metadata, tensors)
    assert shape.n_layer == 3
    assert not any(name.startswith("blk.3.") for name in shape.stage_tensors(0, 3))


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("llama", {"general.architecture": "mamba"}, "'mamba' is not known"),
        ("llama", {"general.architecture": None}, "None is not known"),
        ("llama", {"llama.block_count": None}, "block_count is missing"),
        ("llama", {"llama.block_count": 0}, "block_count is 0"),
        ("llama", {"llama.block_count": 1 << 30}, "block_count is 1073741824"),
        ("llama", {"llama.block_count": "many"}, "no integer"),
        ("llama", {"llama.embedding_length": -64}, "embedding_length is -64"),
        ("llama", {"llama.attention.head_count": 3}, "no multiple"),
        ("llama", {"llama.attention.head_count": [4, 4]}, "2 values for 3 layers"),
        ("llama", {"llama.attention.layer_norm_rms_epsilon": None}, "epsilon is missing"),
        ("llama", {"llama.attention.layer_norm_rms_epsilon": float("nan")}, "no finite number"),
        ("llama", {"llama.feed_forward_length": None}, "feed_forward_length is missing"),
        ("llama", {"llama.feed_forward_length": 95}, "shape"),
        ("llama", {"llama.rope.dimension_count": 17}, "dimension_count is 17"),
        ("llama", {"llama.rope.dimension_count": 18}, "dimension_count is 18"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "'longrope' is not known"),
        ("llama", {"llama.rope.scaling.type": 7}, "no text"),
        ("llama", {"llama.rope.scaling.factor": -2.0}, "under 0"),
        ("llama", {"llama.rope.freq_base": 0.5}, "freq_base is 0.5"),
        ("llama-moe", {"llama.expert_used_count": 9}, "expert_used_count is 9"),
        ("llama-moe", {"llama.expert_used_count": None}, "expert_used_count is missing"),
        ("llama-moe", {"llama.expert_count": 1 << 20}, "expert_count is 1048576"),
        ("qwen3moe", {"qwen3moe.expert_count": None}, "expert_count is missing"),
        ("gpt-oss", {"gpt-oss.expert_feed_forward_length": None}, "expert_feed_forward_length is missing"),
        ("deepseek-v3", {"deepseek2.expert_gating_func": 9}, "expert_gating_func 9"),
        ("deepseek-v3", {"deepseek2.expert_group_count": 5}, "5 groups"),
        ("deepseek-v3", {"deepseek2.expert_group_used_count": 0}, "0 are used"),
        ("deepseek-v3", {"deepseek2.expert_used_count": 9}, "fewer than 9"),
        ("deepseek-v3", {"deepseek2.attention.kv_lora_rank": None}, "kv_lora_rank is missing"),
        ("deepseek-v3", {"deepseek2.rope.dimension_count": 24}, "dimension_count is 24"),
        ("granitemoe", {"granitemoe.logit_scale": None}, "logit_scale is missing"),
        ("granitemoe", {"granitemoe.logit_scale": 0.0}, "logit_scale is 0"),
    ],
)  # fmt: skip
def test_a_bad_header_is_refused_with_the_place(name: str, change: dict[str, Any], says: str) -> None:
    metadata, tensors = header(name)
    changed = {key: value for key, value in (metadata | change).items() if value is not None}
    with pytest.raises(ModelFileError, match=says) as caught:
        parse(changed, tensors)
    assert "\n" not in str(caught.value)


def test_a_tensor_of_another_shape_is_refused() -> None:
    for name in ("gpt-oss", "deepseek-v3"):
        metadata, tensors = header(name)
        for tensor, was in tensors.items():
            for shape in ((*was.shape, 1), (*was.shape[:-1], was.shape[-1] + 1)):
                if tensor in ("token_embd.weight", "output.weight") and shape[1:] == was.shape[1:]:
                    continue
                with pytest.raises(ModelFileError, match=tensor.replace(".", r"\.")):
                    parse(metadata, {**tensors, tensor: replace_shape(was, shape)})


def replace_shape(was: TensorInfo, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(name=was.name, shape=shape, type=0, n_bytes=was.n_bytes, offset=0)


def test_windows_follow_the_file_or_the_table() -> None:
    def windows(metadata: dict[str, Any]) -> list[int]:
        return [layer.attention.window for layer in parse(metadata, {}).layers]

    metadata, _ = header("gemma3")
    assert windows(metadata) == [8, 8, 8, 8, 8, 0, 8]
    assert windows(metadata | {"gemma3.attention.sliding_window_pattern": 3}) == [8, 8, 0, 8, 8, 0, 8]
    listed = [True, False, False, True, False, False, False]
    assert windows(metadata | {"gemma3.attention.sliding_window_pattern": listed}) == [8, 0, 0, 8, 0, 0, 0]
    assert windows(metadata | {"gemma3.attention.sliding_window": 0}) == [0] * 7
    assert windows(header("gpt-oss")[0]) == [8, 0, 8]
    bases = {layer.attention.rope.base for layer in parse(metadata, {}).layers if layer.attention.window}
    assert bases == {10000.0}


def test_layers_may_differ_in_heads_and_widths() -> None:
    metadata, _ = header("llama")
    metadata |= {
        "llama.attention.head_count": [4, 8, 4],
        "llama.attention.head_count_kv": [2, 1, 4],
        "llama.attention.key_length": 16,
        "llama.attention.value_length": 16,
        "llama.feed_forward_length": [96, 32, 64],
    }
    layers = parse(metadata, {}).layers
    assert [layer.attention.n_head for layer in layers] == [4, 8, 4]
    assert [layer.attention.n_head_kv for layer in layers] == [2, 1, 4]
    assert [layer.n_ff for layer in layers] == [96, 32, 64]


def test_gemma3_27b_scales_attention_by_its_width() -> None:
    metadata, _ = header("gemma3")
    small = parse(metadata, {}).layers[0].attention.scale
    assert small == pytest.approx(24**-0.5)
    large = parse(metadata | {"gemma3.block_count": 62}, {}).layers[0].attention.scale
    assert large == pytest.approx(16**-0.5)


def test_no_tensor_of_a_row_is_without_dimensions() -> None:
    for row in ARCHITECTURES.values():
        named = {
            *row.attention, *row.attention_optional, *row.dense, *row.dense_optional, *row.experts,
            *row.experts_optional, *row.shared, row.ffn_norm, *filter(None, [row.attn_post_norm, row.ffn_post_norm]),
        }  # fmt: skip
        assert named <= set(LAYER_TENSORS)
    assert not set(LAYER_TENSORS) & set(MODEL_TENSORS)


# ------------------------------------------------------------------------------------------------- rope


def rope_of(name: str, layer: int = 0) -> Any:
    return parse(*header(name)).layers[layer].attention.rope


def test_plain_rope_is_the_papers() -> None:
    rope = rope_of("llama")
    np.testing.assert_allclose(frequencies(rope), 10000.0 ** (-np.arange(0, 16, 2) / 16))
    x = np.random.default_rng(0).standard_normal((3, 2, 16)).astype(np.float32)
    cos, sin = RopeTable(rope)(np.array([0, 5, 100_000], np.int32))
    for style in ("adjacent", "halves"):
        turned = rotate(x, cos, sin, style)
        np.testing.assert_array_equal(turned[0], x[0])
        np.testing.assert_allclose((turned**2).sum(-1), (x**2).sum(-1), rtol=1e-5)
        # Scores depend on the distance of positions only.
        a, b = RopeTable(rope)(np.array([7, 105], np.int32)), RopeTable(rope)(np.array([0, 98], np.int32))
        scores = [
            (rotate(x[:2, :1], c, s, style)[0] * rotate(x[:2, :1], c, s, style)[1]).sum() for c, s in (a, b)
        ]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_dimensions_beyond_the_rotated_ones_stay() -> None:
    rope = rope_of("glm4moe")
    assert rope.dimensions == 8
    x = np.random.default_rng(0).standard_normal((1, 2, 16)).astype(np.float32)
    turned = rotate(x, *RopeTable(rope)(np.array([9], np.int32)), "halves")
    np.testing.assert_array_equal(turned[..., 8:], x[..., 8:])
    assert not np.array_equal(turned[..., :8], x[..., :8])


def test_scaling() -> None:
    plain = frequencies(rope_of("llama"))
    np.testing.assert_allclose(frequencies(rope_of("llama-linear")), plain / 4)
    yarn = frequencies(rope_of("llama-yarn"))
    # Between what is left as it is and what is wholly interpolated, never rising.
    assert np.all(yarn <= plain * (1 + 1e-12)) and np.all(yarn >= plain / 8 * (1 - 1e-12))
    assert yarn[-1] == pytest.approx(plain[-1] / 8)
    assert rope_of("llama-yarn").magnitude == pytest.approx(0.1 * np.log(8) + 1)
    factors = rope_of("llama-factors")
    given = np.linspace(1, 8, 8).astype(np.float32)
    np.testing.assert_allclose(frequencies(factors, given), plain / np.linspace(1, 8, 8))
    for bad in (None, given[:3], np.zeros(8, np.float32), np.full(8, np.nan, np.float32)):
        with pytest.raises(ModelFileError, match="rope_freqs"):
            frequencies(factors, bad)
    # DeepSeek V3: mscale equals mscale_all_dim, so the rotated dimensions keep their size.
    assert rope_of("deepseek-v3").magnitude == pytest.approx(1.0)
    assert replace(rope_of("llama-yarn"), extrapolation=0.0).scale == 1 / 8


def test_shapes_are_values() -> None:
    """Two peers that read the same header have the same shape, whichever tensors they hold."""
    metadata, tensors = header("deepseek-v3")
    whole, part = parse(metadata, tensors), parse(metadata, {})
    assert isinstance(whole, ModelShape)
    assert [layer.attention for layer in whole.layers] == [layer.attention for layer in part.layers]
    assert [layer.moe for layer in whole.layers] == [layer.moe for layer in part.layers]
    assert part.n_vocab == tiny_models.VOCABULARY
