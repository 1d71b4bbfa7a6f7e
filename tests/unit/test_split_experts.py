"""A dense model that is re-laid as experts computes what it computed before."""

from pathlib import Path

import numpy as np
import pytest

from kvasir_peer.engines import quants
from kvasir_peer.engines.base import Rows, StackSpec, create_stack
from kvasir_peer.errors import ModelFileError, UsageError
from kvasir_peer.models import split_experts
from kvasir_peer.models.gguf import GGML_TYPES, GgufFile, tensor_bytes
from kvasir_peer.models.sources import GgufSource

DENSE = Path(__file__).parents[1] / "data" / "stories260K.gguf"
TOKENS = [1, 403, 407, 261, 378, 322, 374, 282, 269, 297, 265, 280]


def logits(path, engine):
    with GgufSource(path) as source:
        n_layer = int(source.metadata["llama.block_count"])
        stack = create_stack(engine, source, StackSpec(0, n_layer, 1, 64, 16, "exact", threads=1))
        try:
            count = len(TOKENS)
            rows = Rows.of([0] * count, range(count), TOKENS, [True] * count)
            return np.asarray(stack.forward(rows, None))
        finally:
            stack.close()


@pytest.mark.parametrize("engine", ["torch", "onnx"])
@pytest.mark.parametrize("experts", [2, 8])
def test_it_computes_the_same(tmp_path, engine, experts):
    target = tmp_path / "experts.gguf"
    split_experts.split_experts(DENSE, target, experts=experts, epsilon=1e-4)
    expected, found = logits(DENSE, engine), logits(target, engine)
    assert np.abs(found - expected).max() < 5e-3 * expected.std()
    assert (found.argmax(1) == expected.argmax(1)).all()


def test_what_is_not_split_is_the_same_and_slices_are_copies(tmp_path):
    target = tmp_path / "experts.gguf"
    seen = []
    split_experts.split_experts(
        DENSE, target, experts=4, progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1][0] == seen[-1][1] and seen == sorted(seen)
    with GgufFile.open(DENSE) as dense, GgufFile.open(target) as split:
        for key, value in dense.metadata.items():
            if key != "llama.feed_forward_length":
                assert repr(split.metadata[key]) == repr(value), key
        assert (split.metadata["llama.expert_count"], split.metadata["llama.expert_used_count"]) == (4, 2)
        hidden = dense.metadata["llama.feed_forward_length"] // 2
        for name, info in dense.tensors.items():
            before = np.frombuffer(dense.tensor_view(name), np.float32).reshape(info.shape)
            if ".ffn_" not in name or "norm" in name:
                assert split.tensors[name].shape == info.shape
                assert bytes(split.tensor_view(name)) == bytes(dense.tensor_view(name))
                continue
            stacked = name.replace(".weight", "_exps.weight")
            after = np.frombuffer(split.tensor_view(stacked), np.float32).reshape(
                split.tensors[stacked].shape
            )
            for expert in range(4):
                part = slice(expert % 2 * hidden, (expert % 2 + 1) * hidden)
                wanted = before[:, part] * 2 if "down" in name else before[part]
                assert np.array_equal(after[expert], wanted)
        router = np.frombuffer(split.tensor_view("blk.3.ffn_gate_inp.weight"), np.float32).reshape(4, -1)
        assert np.array_equal(router[:2], -router[2:]) and np.abs(router).min(axis=1).min() > 0


@pytest.mark.parametrize("name", [*sorted(split_experts.FLOAT16_SCALES), "F32", "F16", "BF16", "MXFP4"])
def test_scaling_by_a_power_of_two_is_exact_in_every_type(name):
    kind = quants.BY_NAME[name]
    layout = GGML_TYPES[kind.id]
    assert tensor_bytes((layout.elements,), kind.id) == layout.n_bytes
    generator = np.random.default_rng(3)
    blocks = generator.integers(0, 256, (64, layout.n_bytes), np.uint8)
    scales = (generator.uniform(-1, 1, (64, layout.n_bytes)) * 0.01).astype(np.float16).view(np.uint8)
    for offset in split_experts.FLOAT16_SCALES.get(name, ()):
        blocks[:, offset : offset + 2] = scales[:, offset : offset + 2]
    if name == "MXFP4":
        blocks[:, 0] = generator.integers(100, 140, 64)
    elif name in ("F32", "F16", "BF16"):
        values = generator.standard_normal(64).astype(np.float32)
        blocks = {
            "F32": values.view(np.uint8).reshape(-1, 4),
            "F16": values.astype(np.float16).view(np.uint8).reshape(-1, 2),
            "BF16": (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1, 2),
        }[name]
    shape = (64, layout.elements)
    before = quants.dequantize(blocks.reshape(-1), kind.id, shape)
    after = quants.dequantize(split_experts._scaled(blocks, name, 8).reshape(-1), kind.id, shape)
    assert np.array_equal(after, before * 8)
    assert np.abs(before).max() > 0


def test_overflow_and_unknown_types_are_refused():
    with pytest.raises(ModelFileError, match="overflow"):
        split_experts._scaled(np.full((1, 18), 0x7B, np.uint8), "Q4_0", 8)
    with pytest.raises(ModelFileError, match="overflow"):
        split_experts._scaled(np.full((1, 17), 254, np.uint8), "MXFP4", 8)
    with pytest.raises(ModelFileError, match="IQ1_S weights cannot be split"):
        split_experts._scaled(np.zeros((1, 50), np.uint8), "IQ1_S", 2)


@pytest.mark.parametrize(
    ("experts", "says"),
    [(3, "give 2, 4, 8"), (0, "give 2, 4, 8"), (12, "give 2, 4, 8"), (2048, "fewer experts")],
)
def test_what_cannot_be_cut_is_refused_and_leaves_nothing(tmp_path, experts, says):
    with pytest.raises(UsageError, match=says):
        split_experts.split_experts(DENSE, tmp_path / "x.gguf", experts=experts)
    assert list(tmp_path.iterdir()) == []


def test_other_models_and_places_are_refused(tmp_path):
    with pytest.raises(UsageError, match="has experts already"):
        split_experts.split_experts(DENSE.with_name("stories260K-moe8x2.gguf"), tmp_path / "x.gguf")
    with pytest.raises(UsageError, match="cannot be written"):
        split_experts.split_experts(DENSE, tmp_path / "nowhere" / "x.gguf", experts=2)
    assert list(tmp_path.iterdir()) == []
