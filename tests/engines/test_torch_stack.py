"""The torch engine by itself: what runs how often, quantised weights, memory."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_models
import torch
from driving import greedy, prefill
from kinds import CPU, GATHERS, GROUPS, SORTS, Kind, ids
from oracle import Reference

from kvasir_peer.engines.base import BankSpec, Rows, StackSpec, create_bank, estimate_bank, estimate_stack
from kvasir_peer.engines.torch_engine import make_stack
from kvasir_peer.engines.torch_experts import Experts
from kvasir_peer.engines.torch_weights import TorchOptions, Weight
from kvasir_peer.models.sources import GgufSource

Get = Callable[[str], Reference]
KEEP_BYTES = [SORTS, GATHERS, GROUPS]


def spec(end: int, first: int = 0, **changes: Any) -> StackSpec:
    return replace(StackSpec(first, end, 4, 256, 128, threads=1), **changes)


@pytest.mark.parametrize("name", ["qwen2moe", "gpt-oss", "deepseek-v3"])
def test_rows_of_a_mixed_pass_go_through_each_linear_and_expert_once(
    reference: Get, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    linears: Counter[int] = Counter()
    experts: Counter[tuple[int, int]] = Counter()
    pairs = 0
    linear, product = Weight.linear, Experts._product

    def count_linear(weight: Weight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert len(x) in (11, 1)  # all rows; the output only those that want one
        linears[id(weight)] += 1
        return linear(weight, x, bias)

    def count_product(self: Experts, weight: Weight, rows: Any, chosen: Any, picked: Any, sizes: Any) -> Any:
        nonlocal pairs
        pairs += len(rows)
        experts.update((id(weight), int(expert)) for expert in chosen)
        return product(self, weight, rows, chosen, picked, sizes)

    case = reference(name)
    with GgufSource(case.path) as source:
        stack = make_stack(source, spec(3))
        prefill([stack], case.prompt[:6], slot=2)
        monkeypatch.setattr(Weight, "linear", count_linear)
        monkeypatch.setattr(Experts, "_product", count_product)
        # Chunks of two prompts and a decode, in one pass.
        slots, positions = [0] * 6 + [2] + [3] * 4, [*range(6), 6, *range(4)]
        stack.forward(Rows.of(slots, positions, case.prompt[:11], [False] * 6 + [True] + [False] * 4), None)
    assert set(linears.values()) == set(experts.values()) == {1}
    mixtures = [layer.moe for layer in stack.shape.layers if layer.moe is not None]
    assert pairs == sum(3 * 11 * moe.n_used for moe in mixtures)  # gate, up and down


# ----------------------------------------------------------------------------------------- quantised weights

_QUANTISED = ("Q4_0", "Q8_0", "Q5_1", "Q4_1", "Q5_0", "F16", "BF16")


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Name of a tiny model to a file with mixed types, and a float32 file of the same weights."""
    folder = tmp_path_factory.mktemp("quantised")

    def make(name: str) -> tuple[Path, Path]:
        model = tiny_models.BY_NAME[name]
        tensors = tiny_models.tensors_of(model)
        rounded: dict[str, np.ndarray] = {}
        typed: dict[str, tuple[np.ndarray, Any]] = {}
        for i, (tensor, values) in enumerate(tensors.items()):
            kind = gguf.GGMLQuantizationType[_QUANTISED[i % len(_QUANTISED)]]
            if values.ndim < 2 or values.shape[-1] % 32 or "gate_inp" in tensor or "norm" in tensor:
                kind = gguf.GGMLQuantizationType.F32
            raw = gguf.quants.quantize(values, kind)
            typed[tensor] = (raw, kind)
            rounded[tensor] = gguf.quants.dequantize(raw, kind).reshape(values.shape)
        paths = folder / f"{name}-quantised.gguf", folder / f"{name}-float.gguf"
        tiny_models.write_gguf(paths[0], tiny_models.metadata_of(model), typed)
        tiny_models.write_gguf(paths[1], tiny_models.metadata_of(model), rounded)
        return paths

    return make


@pytest.mark.parametrize("kind", KEEP_BYTES, ids=ids(KEEP_BYTES))
@pytest.mark.parametrize(
    "name", ["llama-bias-tied", "qwen2moe", "gpt-oss", "deepseek-v3", "deepseek-v2-legacy"]
)
def test_weights_kept_as_bytes_compute_the_same_as_floats(
    quantised: Callable[[str], tuple[Path, Path]], name: str, kind: Kind
) -> None:
    as_bytes, as_floats = quantised(name)
    prompt = list(range(3, 40))
    with GgufSource(as_bytes) as source, GgufSource(as_floats) as plain:
        expected = prefill([make_stack(plain, spec(3))], prompt)
        for kept in (kind.options, TorchOptions(CPU, torch.float32)):
            stack = make_stack(source, spec(3), options=kept)
            assert np.abs(prefill([stack], prompt) - expected).max() < 2e-5 * expected.std()
            assert np.abs(prefill([stack], prompt, chunk=1) - expected).max() < 2e-5 * expected.std()


def test_half_precision_stays_near(reference: Get) -> None:
    """What ``fast`` computes in on a GPU."""
    case = reference("llama")
    with GgufSource(case.path) as source:
        for dtype, bound in ((torch.bfloat16, 0.15), (torch.float16, 0.02)):
            options = TorchOptions(CPU, dtype, keep_bytes=True, batched_attention=True)
            stack = make_stack(source, spec(3), options=options)
            assert 1e-5 < case.distance(prefill([stack], case.prompt)) < bound
            assert len(greedy([stack], case.prompt, 4)) == 4


# -------------------------------------------------------------------------------------------- memory


def tensor_bytes(stack: Any, seen: set[int] | None = None) -> int:
    """Bytes of all torch tensors that an object holds, each storage once."""
    seen = set() if seen is None else seen
    if isinstance(stack, torch.Tensor):
        storage = stack.untyped_storage()
        if storage.data_ptr() in seen:
            return 0
        seen.add(storage.data_ptr())
        return storage.nbytes()
    if id(stack) in seen or isinstance(stack, (str, bytes, int, float, type(None), np.ndarray)):
        return 0
    seen.add(id(stack))
    if isinstance(stack, dict):
        return sum(tensor_bytes(item, seen) for item in stack.values())
    if isinstance(stack, (list, tuple)):
        return sum(tensor_bytes(item, seen) for item in stack)
    return tensor_bytes(vars(stack), seen) if hasattr(stack, "__dict__") else 0


@pytest.mark.parametrize(
    "name", ["llama-bias-tied", "gpt-oss", "deepseek-v2-legacy", "deepseek-v3", "qwen2moe"]
)
def test_the_estimate_is_what_is_held(quantised: Callable[[str], tuple[Path, Path]], name: str) -> None:
    path, _ = quantised(name)
    with GgufSource(path) as source:
        for first, end in ((0, 1), (1, 2), (2, 3), (0, 3)):
            for options in (
                SORTS.options,
                TorchOptions(CPU, torch.float32),
                TorchOptions(CPU, torch.float16),
            ):
                stack = make_stack(source, spec(end, first), options=options)
                estimate = stack.memory()
                assert tensor_bytes(stack) == pytest.approx(estimate.weights + estimate.kv, rel=0.01)
        assert (
            estimate_stack("torch", source.metadata, source.tensors, spec(3))
            == make_stack(source, spec(3)).memory()
        )
        if name == "gpt-oss":
            held_here = BankSpec(((0, 1, 4), (2, 0, 1)), 8)
            bank = create_bank("torch", source, held_here)
            held = estimate_bank("torch", source.metadata, source.tensors, held_here)
            assert bank.memory() == held
            assert tensor_bytes(bank) == pytest.approx(held.weights, rel=0.01)
