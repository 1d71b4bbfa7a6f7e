"""The torch engine by itself: slots, steps, banks, quantised weights, what it refuses and what it takes."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_models
import torch
from driving import forward, greedy, greedy_together, path_of_data, prefill
from oracle import Reference

from kvasir_peer.engines.base import (
    LayerStack,
    Rows,
    StackSpec,
    create_bank,
    create_stack,
    estimate_bank,
    estimate_stack,
)
from kvasir_peer.engines.torch_engine import make_bank, make_stack
from kvasir_peer.engines.torch_experts import Experts
from kvasir_peer.engines.torch_weights import TorchOptions, Weight
from kvasir_peer.errors import EngineError, ModelFileError, UsageError
from kvasir_peer.models.sources import GgufSource

Get = Callable[[str], Reference]
CPU = torch.device("cpu")
KEEPS_BYTES = TorchOptions(CPU, torch.float32, keep_bytes=True)
GATHERS = TorchOptions(CPU, torch.float32, keep_bytes=True, gather_pairs=1000)
GROUPS = TorchOptions(CPU, torch.float32, keep_bytes=True, grouped=True)
EXPECTED = json.loads(path_of_data("expected_greedy.json").read_text())


def spec(end: int, first: int = 0, **changes: Any) -> StackSpec:
    return replace(StackSpec(first, end, 4, 256, 128, threads=1), **changes)


def rows_of(tokens: Sequence[int], slot: int = 0, first: int = 0) -> Rows:
    n = len(tokens)
    return Rows.of([slot] * n, range(first, first + n), tokens, [True] * n)


@pytest.mark.parametrize("borders", [(0, 5), (0, 2, 5), (0, 1, 3, 5), (0, 1, 2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("model", ["stories260K.gguf", "stories260K-moe8x2.gguf"])
def test_real_models_continue_as_expected(model: str, borders: tuple[int, ...]) -> None:
    cases = [case for case in EXPECTED if case["model"] == model]
    with GgufSource(path_of_data(model)) as source:
        stacks = [
            make_stack(source, spec(end, first, n_slots=len(cases), max_rows=256))
            for first, end in itertools.pairwise(borders)
        ]
        count = min(len(case["ids"]) for case in cases)
        together = greedy_together(stacks, [case["prompt_ids"] for case in cases], count, chunk=32)
    # A near tie may fall to either side; where there is none, every token is the same.
    clear = [i for i, case in enumerate(cases) if case["min_top2_logit_gap"] > 0.01]
    assert len(clear) >= 8
    for i in clear:
        assert together[i] == cases[i]["ids"][:count]


def test_the_mixture_predicts_text_as_well_as_in_llama_cpp() -> None:
    """Loss on its own sampled text; llama.cpp rounds activations to float16 beside float16 weights."""
    from llama_cpp import LlamaCpp

    path = path_of_data("stories260K-moe8x2.gguf")
    cases = [case for case in EXPECTED if case["model"] == path.name]
    text = [token for case in cases for token in (*case["prompt_ids"], *case["ids"])][:500]

    def loss(logits: np.ndarray) -> float:
        shifted = logits[:-1] - logits[:-1].max(-1, keepdims=True)
        chosen = shifted[np.arange(len(text) - 1), text[1:]]
        return float(np.mean(np.log(np.exp(shifted).sum(-1)) - chosen))

    with GgufSource(path) as source, LlamaCpp(path, 512) as llama:
        stack = make_stack(source, spec(5, context_length=512, max_rows=512))
        assert loss(prefill([stack], text)) == pytest.approx(loss(llama.logits(text)), abs=0.01)


# ----------------------------------------------------------------------------------------- slots and rows


def test_writing_again_from_an_earlier_position_rewinds_a_slot(reference: Get) -> None:
    case = reference("gpt-oss")
    with GgufSource(case.path) as source:
        stack = make_stack(source, spec(3))
        clean = prefill([stack], case.prompt, slot=1)
        prefill([stack], case.prompt[::-1], slot=2)
        np.testing.assert_allclose(
            prefill([stack], case.prompt[17:], slot=1, first=17), clean[17:], atol=1e-5
        )
        # Another request takes the slot over: nothing of the old one shows.
        other = prefill([stack], case.prompt[5:20], slot=2)
        np.testing.assert_allclose(other, prefill([stack], case.prompt[5:20], slot=3), atol=1e-5)


def test_a_row_alone_and_in_a_batch_differ_by_rounding_only(reference: Get) -> None:
    case = reference("qwen3moe")
    with GgufSource(case.path) as source:
        stack = make_stack(source, spec(3))
        for slot in range(4):
            prefill([stack], case.prompt[slot : slot + 20], slot=slot)
        alone = [stack.forward(Rows.of([slot], [20], [slot], [True]), None)[0].copy() for slot in range(4)]
        together = stack.forward(Rows.of(range(4), [20] * 4, range(4), [True] * 4), None)
    # The bound that docs/engines.md states, in standard deviations of the logits.
    assert np.abs(together - alone).max() < 2e-5 * case.logits.std()


def test_only_rows_that_want_an_output_get_logits(reference: Get) -> None:
    case = reference("qwen2moe")
    with GgufSource(case.path) as source:
        stack = make_stack(source, spec(3))
        n = len(case.prompt)
        wants = np.zeros(n, bool)
        wants[[3, 30]] = True
        logits = stack.forward(Rows.of([0] * n, range(n), case.prompt, wants), None)
        assert case.distance(np.vstack([case.logits[:3], logits[:1], case.logits[4:]])) < 1e-4
        assert logits.shape == (2, tiny_models.VOCABULARY)
        none = stack.forward(Rows.of([0] * n, range(n), case.prompt, [False] * n), None)
        assert none.shape == (0, tiny_models.VOCABULARY)


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


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (rows_of([1] * 129), "129 rows"),
        (Rows.of([4], [0], [1], [True]), "slot 4"),
        (Rows.of([0], [256], [1], [True]), "position 256"),
        (Rows.of([0, 0], [3, 5], [1, 1], [True] * 2), "ascending"),
        (Rows.of([0, 1, 0], [3, 3, 4], [1] * 3, [True] * 3), "not consecutive"),
        (Rows.of([0], [0], [96], [True]), "token 96"),
        (Rows.of([0], [-1], [1], [True]), "position -1"),
        (Rows.of([], [], [], []), "0 rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused(reference: Get, rows: Rows, says: str) -> None:
    with GgufSource(reference("llama").path) as source:
        stack = make_stack(source, spec(3))
        with pytest.raises(EngineError, match=says):
            stack.forward(rows, None)


def test_a_hidden_state_belongs_to_later_stages(reference: Get) -> None:
    with GgufSource(reference("llama").path) as source:
        first, last = make_stack(source, spec(1)), make_stack(source, spec(3, 1))
        rows = rows_of([1, 2])
        with pytest.raises(EngineError, match="embed"):
            first.forward(rows, np.zeros((2, 64), np.float32))
        for hidden in (None, np.zeros((1, 64), np.float32)):
            with pytest.raises(EngineError, match="hidden state"):
                last.forward(rows, hidden)


# ----------------------------------------------------------------------------------------- experts apart


def drive(stack: LayerStack, rows: Rows, answer: Callable[..., np.ndarray]) -> tuple[np.ndarray, list[int]]:
    """Run a stack by steps, with experts computed by ``answer``; returns the result and the layers asked for."""
    steps = stack.steps(rows, None)
    layers = []
    try:
        work = next(steps)
        while True:
            layers.append(work.layer)
            assert work.ids.dtype == np.int32 and work.weights.dtype == work.x.dtype == np.float32
            work = steps.send(answer(work.layer, work.x, work.ids, work.weights))
    except StopIteration as done:
        return done.value, layers


@pytest.mark.parametrize("options", [KEEPS_BYTES, GATHERS, GROUPS], ids=["sorted", "gathered", "grouped"])
@pytest.mark.parametrize("name", ["llama-moe", "gpt-oss", "deepseek-v3", "glm4moe"])
def test_banks_cut_anywhere_sum_to_the_whole(reference: Get, name: str, options: TorchOptions) -> None:
    case = reference(name)
    layers = [1, 2] if name in ("deepseek-v3", "glm4moe") else [0, 1, 2]
    n_expert = tiny_models.BY_NAME[name].metadata["expert_count"]
    cuts = [0, 1, 3, n_expert // 2, n_expert]
    sizes = {"max_rows": 64, "threads": 1, "device": "cpu", "precision": "exact"}
    with GgufSource(case.path) as source:
        stack = make_stack(source, spec(3), options=options)
        whole = make_bank(source, tuple((layer, 0, n_expert) for layer in layers), **sizes, options=options)
        # The second bank holds two ranges of each layer.
        held = [[(a, b)] for a, b in itertools.pairwise(cuts)]
        held[1:4] = [held[2], held[1] + held[3]]
        parts = [
            make_bank(
                source, tuple((layer, a, b) for layer in layers for a, b in ranges), **sizes, options=options
            )
            for ranges in held
        ]
        rows = rows_of(case.prompt)
        by_whole, asked = drive(stack, rows, whole.compute)
        by_parts, _ = drive(
            stack, rows, lambda *work: np.sum([part.compute(*work) for part in parts], axis=0)
        )
        assert asked == layers
        assert case.distance(by_whole) < 1e-4
        assert case.distance(by_parts) < 1e-4
        local = stack.local_bank()
        assert local is not None and local.memory().total == 0
        by_itself, _ = drive(stack, rows, local.compute)
        np.testing.assert_array_equal(by_itself, by_whole)
        assert case.distance(stack.forward(rows, None)) < 1e-4


def test_a_bank_refuses_what_it_does_not_hold(reference: Get) -> None:
    with GgufSource(reference("deepseek-v3").path) as source:
        bank = create_bank("torch", source, [(1, 0, 4)], max_rows=2, threads=1)
        x, ids, weights = (
            np.ones((1, 64), np.float32),
            np.zeros((1, 2), np.int32),
            np.ones((1, 2), np.float32),
        )
        assert bank.compute(1, x, ids, weights).shape == (1, 64)
        assert not bank.compute(1, x, ids + 9, weights).any()
        for layer, a, b, c, says in (
            (2, x, ids, weights, "layer 2"),
            (1, x[:, :5], ids, weights, "rows of shape"),
            (1, np.ones((3, 64), np.float32), ids, weights, "1 to 2"),
            (1, x, ids[:, :1], weights, "do not fit"),
            (1, x, ids + 16, weights, "expert 16"),
            (1, x, ids - 1, weights, "expert -1"),
        ):
            with pytest.raises(EngineError, match=says):
                bank.compute(layer, a, b, c)
        for ranges, error in (
            ([], EngineError),
            ([(1, 3, 17)], EngineError),
            ([(1, 3, 3)], EngineError),
            ([(0, 0, 1)], ModelFileError),
            ([(9, 0, 1)], ModelFileError),
        ):
            with pytest.raises(error):
                create_bank("torch", source, ranges, max_rows=2)
        # Ranges that overlap are one.
        joined = create_bank("torch", source, [(1, 2, 5), (1, 0, 4)], max_rows=2, threads=1)
        np.testing.assert_allclose(
            joined.compute(1, x, ids + 2, weights), bank.compute(1, x, ids + 2, weights)
        )


def test_a_dense_stack_has_no_bank(reference: Get) -> None:
    with GgufSource(reference("llama").path) as source:
        stack = make_stack(source, spec(3))
        assert stack.local_bank() is None
        result, layers = drive(stack, rows_of([1, 2]), lambda *work: work[1])
        assert layers == []
        np.testing.assert_array_equal(result, forward([stack], rows_of([1, 2])))


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


@pytest.mark.parametrize("options", [KEEPS_BYTES, GATHERS, GROUPS], ids=["sorted", "gathered", "grouped"])
@pytest.mark.parametrize(
    "name", ["llama-bias-tied", "qwen2moe", "gpt-oss", "deepseek-v3", "deepseek-v2-legacy"]
)
def test_weights_kept_as_bytes_compute_the_same_as_floats(
    quantised: Callable[[str], tuple[Path, Path]], name: str, options: TorchOptions
) -> None:
    as_bytes, as_floats = quantised(name)
    prompt = list(range(3, 40))
    with GgufSource(as_bytes) as source, GgufSource(as_floats) as plain:
        expected = prefill([make_stack(plain, spec(3))], prompt)
        for kept in (options, TorchOptions(CPU, torch.float32)):
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


# ----------------------------------------------------------------------------------------- loading


def test_loading_reports_its_progress(reference: Get) -> None:
    with GgufSource(reference("gpt-oss").path) as source:
        seen: list[tuple[int, int]] = []
        create_stack("torch", source, spec(2, 1), progress=lambda done, total: seen.append((done, total)))
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert (
            seen[-1][0]
            == seen[-1][1]
            == sum(info.n_bytes for name, info in source.tensors.items() if name.startswith("blk.1."))
        )


def test_a_stage_needs_its_own_tensors_only(reference: Get) -> None:
    case = reference("gemma3")
    with GgufSource(case.path) as source:
        whole = prefill([make_stack(source, spec(7))], case.prompt)
        parts = []
        for first, end in ((0, 3), (3, 5), (5, 7)):
            wanted = {f"blk.{i}." for i in range(first, end)}
            names = [n for n in source.tensors if any(n.startswith(w) for w in wanted)]
            names += ["token_embd.weight"] if first == 0 or end == 7 else []
            names += ["output_norm.weight"] if end == 7 else []
            parts.append(make_stack(Slice(source, names), spec(end, first)))
        np.testing.assert_allclose(prefill(parts, case.prompt), whole, atol=1e-5)
        with pytest.raises(ModelFileError, match=r"blk\.3\.attn_norm\.weight is missing"):
            make_stack(Slice(source, names), spec(4, 3))
        with pytest.raises(ModelFileError, match="7 layers"):
            make_stack(source, spec(8))


class Slice:
    """Some tensors of a source, as a stage's store has them."""

    def __init__(self, source: GgufSource, names: Sequence[str]) -> None:
        self._source = source
        self.metadata = source.metadata
        self.tensors = {name: source.tensors[name] for name in names}

    def read(self, name: str) -> np.ndarray:
        assert name in self.tensors
        return self._source.read(name)

    def read_experts(self, name: str, lo: int, hi: int) -> np.ndarray:
        assert name in self.tensors
        return self._source.read_experts(name, lo, hi)

    def release(self) -> None:
        pass


def test_an_engine_or_device_that_is_not_there_is_named(reference: Get) -> None:
    with GgufSource(reference("llama").path) as source:
        with pytest.raises(UsageError, match="abacus"):
            create_stack("abacus", source, spec(3))
        with pytest.raises(EngineError, match="cuda:77"):
            create_stack("torch", source, spec(3, device="cuda:77"))


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
            for options in (KEEPS_BYTES, TorchOptions(CPU, torch.float32), TorchOptions(CPU, torch.float16)):
                stack = make_stack(source, spec(end, first), options=options)
                estimate = stack.memory()
                assert tensor_bytes(stack) == pytest.approx(estimate.weights + estimate.kv, rel=0.01)
        assert (
            estimate_stack("torch", source.metadata, source.tensors, spec(3))
            == make_stack(source, spec(3)).memory()
        )
        if name == "gpt-oss":
            bank = create_bank("torch", source, [(0, 1, 4), (2, 0, 1)], max_rows=8)
            held = estimate_bank("torch", source.metadata, source.tensors, [(0, 1, 4), (2, 0, 1)], max_rows=8)
            assert bank.memory() == held
            assert tensor_bytes(bank) == pytest.approx(held.weights, rel=0.01)
