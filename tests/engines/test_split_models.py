"""Dense models re-laid as experts: the same logits, in torch and in llama.cpp, for every kind of model."""

from pathlib import Path

import numpy as np
import pytest
import tiny_models
from driving import prefill
from llama_cpp import LlamaCpp

from kvasir_peer.engines.architectures import parse
from kvasir_peer.engines.base import Rows, StackSpec
from kvasir_peer.engines.torch_engine import make_stack
from kvasir_peer.errors import UsageError
from kvasir_peer.models.sources import GgufSource
from kvasir_peer.models.split_experts import split_experts

PROMPT = np.random.default_rng(4).integers(0, tiny_models.VOCABULARY, 48).tolist()
WIDE = {"feed_forward_length": 256}
DENSE = {
    "llama": tiny_models.TinyModel("dense-llama", "llama", tiny_models.BY_NAME["llama"].metadata | WIDE),
    "qwen2": tiny_models.TinyModel(
        "dense-qwen2",
        "qwen2",
        tiny_models.BY_NAME["qwen2"].metadata | WIDE,
        tiny_models.BY_NAME["qwen2"].optional,
        tied=True,
    ),
    "qwen3": tiny_models.TinyModel(
        "dense-qwen3", "qwen3", tiny_models.BY_NAME["qwen3"].metadata | WIDE, tied=True
    ),
}
BECOMES = {"llama": "llama", "qwen2": "qwen2moe", "qwen3": "qwen3moe"}


def in_torch(path: Path) -> np.ndarray:
    with GgufSource(path) as source:
        return prefill([make_stack(source, StackSpec(0, 3, 1, 64, 64, threads=1))], PROMPT)


def in_llama_cpp(path: Path) -> np.ndarray:
    with LlamaCpp(path, 64) as model:
        return model.logits(PROMPT)


@pytest.mark.parametrize("routed", [False, True], ids=["all", "routed"])
@pytest.mark.parametrize("name", DENSE)
def test_it_computes_what_the_dense_model_computes(tmp_path: Path, name: str, routed: bool) -> None:
    dense = tiny_models.write_model(DENSE[name], tmp_path)
    target = tmp_path / "experts.gguf"
    split_experts(dense, target, experts=8, routed=routed)
    expected = in_torch(dense)
    with GgufSource(target) as source:
        shape = parse(source.metadata, source.tensors)
    assert shape.architecture == BECOMES[name]
    moe = shape.layers[1].moe
    assert moe is not None and (moe.n_expert, moe.n_used) == (8, 4 if routed else 8)
    # All experts: the order of summation. Routed: epsilon, and a token that it sends elsewhere.
    bound = 5e-3 if routed else 2e-5
    for logits in (in_torch(target), in_llama_cpp(target)):
        assert np.abs(logits - expected).max() < bound * expected.std()
        np.testing.assert_array_equal(logits.argmax(1), expected.argmax(1))


def test_routing_depends_on_the_row(tmp_path: Path) -> None:
    dense = tiny_models.write_model(DENSE["llama"], tmp_path)
    split_experts(dense, tmp_path / "experts.gguf", experts=16, seed=5)
    with GgufSource(tmp_path / "experts.gguf") as source:
        stack = make_stack(source, StackSpec(0, 3, 1, 64, 64, threads=1))
        n = len(PROMPT)
        steps = stack.steps(Rows.of([0] * n, range(n), PROMPT, [True] * n), None)
        work = next(steps)
        sets = {tuple(sorted(row)) for row in work.ids.tolist()}
        # Exactly one copy of each of the eight slices.
        assert all(sorted(expert % 8 for expert in chosen) == list(range(8)) for chosen in sets)
        assert len(sets) > n // 2
        np.testing.assert_allclose(work.weights, 1 / 8, rtol=1e-3)


def test_a_shared_expert_takes_what_does_not_divide(tmp_path: Path) -> None:
    """qwen2 with 304 neurons: 4 slices of 64, and 48 neurons beside."""
    model = tiny_models.TinyModel(
        "odd", "qwen2", DENSE["qwen2"].metadata | {"feed_forward_length": 304}, tied=True
    )
    dense = tiny_models.write_model(model, tmp_path)
    split_experts(dense, tmp_path / "experts.gguf", experts=8)
    with GgufSource(tmp_path / "experts.gguf") as source:
        moe = parse(source.metadata, source.tensors).layers[0].moe
    assert moe is not None and (moe.width, moe.shared_width) == (64, 48)
    expected, found = in_torch(dense), in_torch(tmp_path / "experts.gguf")
    assert np.abs(found - expected).max() < 5e-3 * expected.std()


@pytest.mark.parametrize(
    ("name", "experts", "routed", "says"),
    [
        ("gemma3", 8, True, "'gemma3' cannot be split"),
        ("llama", 3, False, "give 2, 4, 8"),
        ("llama", 1, False, "give 2, 4, 8"),
        ("llama", 6, True, "two for each slice"),
        ("llama", 512, False, "give fewer experts"),
        ("qwen2", 512, False, "give fewer experts"),
    ],
)
def test_what_cannot_be_split_is_refused(
    tmp_path: Path, name: str, experts: int, routed: bool, says: str
) -> None:
    dense = tiny_models.write_model(DENSE.get(name) or tiny_models.BY_NAME[name], tmp_path)
    with pytest.raises(UsageError, match=says):
        split_experts(dense, tmp_path / "experts.gguf", experts=experts, routed=routed)
    assert not (tmp_path / "experts.gguf").exists()
