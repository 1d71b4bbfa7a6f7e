"""Both engines against llama.cpp: every architecture, one stage and many, alone and together."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import tiny_models
import torch
import torch.nn.functional as F
from driving import greedy, greedy_together, path_of_data, prefill
from kinds import LIKE_GPU, ONNX, TORCH, Kind, ids, stages
from llama_cpp import LlamaCpp
from oracle import GREEDY_TOKENS, Reference

from kvasir_peer.engines import torch_stack

# Largest difference from llama.cpp, in standard deviations of the logits: float32 sums in another order.
TOLERANCE = 1e-4
# llama.cpp looks GELU up in a table of float16 (`ggml_vec_gelu_f32`), so models whose feed-forward part counts
# differ by that; test_gelu_is_the_tanh_form takes the table's rounding out.
GELU_TOLERANCE = 5e-3
# Requests in the same passes; the first is followed as far as llama.cpp was, the others so far.
ALONE_TOKENS = 8
NAMES = [model.name for model in tiny_models.MODELS]
EXPECTED = json.loads(path_of_data("expected_greedy.json").read_text())
KINDS = [ONNX, TORCH]
EACH = [0, 1, 2, 3, 4, 5]  # a stage for each layer
Get = Callable[[str], Reference]


def tolerance(name: str) -> float:
    return GELU_TOLERANCE if name == "gemma3-softcap" else TOLERANCE


@pytest.mark.parametrize("kind", KINDS, ids=ids(KINDS))
@pytest.mark.parametrize("name", NAMES)
def test_one_stage_agrees_with_llama_cpp(reference: Get, name: str, kind: Kind) -> None:
    expected = reference(name)
    with stages(kind, expected.path, [0, -1]) as stacks:
        assert expected.distance(prefill(stacks, expected.prompt)) < tolerance(name)
        assert greedy(stacks, expected.prompt, GREEDY_TOKENS, slot=2) == expected.greedy


@pytest.mark.parametrize("kind", KINDS, ids=ids(KINDS))
@pytest.mark.parametrize("name", NAMES)
def test_a_stage_per_layer_with_chunked_prompts_agrees_with_llama_cpp(
    reference: Get, name: str, kind: Kind
) -> None:
    expected = reference(name)
    borders = list(range(1 + tiny_models.BY_NAME[name].metadata.get("block_count", 3)))
    with stages(kind, expected.path, borders) as stacks:
        assert expected.distance(prefill(stacks, expected.prompt, chunk=7)) < tolerance(name)
        assert greedy(stacks, expected.prompt, GREEDY_TOKENS, chunk=3) == expected.greedy


@pytest.mark.parametrize("kind", [*KINDS, LIKE_GPU], ids=ids([*KINDS, LIKE_GPU]))
@pytest.mark.parametrize("name", NAMES)
def test_requests_together_give_the_tokens_they_give_alone(reference: Get, name: str, kind: Kind) -> None:
    expected = reference(name)
    prompts = [expected.prompt, expected.prompt[:9], expected.prompt[5:], [3], expected.prompt[::-1]]
    with stages(kind, expected.path, [0, 1, -1], n_slots=len(prompts)) as stacks:
        together = greedy_together(stacks, prompts, GREEDY_TOKENS, chunk=6)
        assert together[0] == expected.greedy
        for slot, prompt in enumerate(prompts[1:], 1):
            assert greedy(stacks, prompt, ALONE_TOKENS, slot=slot) == together[slot][:ALONE_TOKENS]


@pytest.mark.parametrize("name", NAMES)
def test_the_path_of_gpus_agrees_with_llama_cpp(reference: Get, name: str) -> None:
    expected = reference(name)
    with stages(LIKE_GPU, expected.path, [0, -1]) as stacks:
        assert expected.distance(prefill(stacks, expected.prompt)) < tolerance(name)
        assert expected.distance(prefill(stacks, expected.prompt, chunk=1)) < tolerance(name)


def test_gelu_is_the_tanh_form(reference: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    """With llama.cpp's table of float16 in place of the function, nothing else differs."""

    def by_table(kind: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        assert kind == "gelu_tanh"
        entry = F.gelu(gate.half().float(), approximate="tanh").half().float()
        return torch.where(gate.abs() < 10, entry, gate.clamp(min=0)) * up

    monkeypatch.setattr(torch_stack, "activate", by_table)
    expected = reference("gemma3-softcap")
    with stages(TORCH, expected.path, [0, -1]) as stacks:
        # A rounding of float16 may still fall to the other side.
        assert expected.distance(prefill(stacks, expected.prompt)) < 2e-4
    assert np.abs(expected.logits).max() < 3.0  # the cap of the case


@pytest.mark.parametrize(
    ("kind", "precision", "borders"),
    [
        *((ONNX, how, cut) for how in ("exact", "fast") for cut in ([0, 5], [0, 2, 5], [0, 1, 3, 5], EACH)),
        *((TORCH, "exact", cut) for cut in ([0, 5], EACH)),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["stories260K.gguf", "stories260K-moe8x2.gguf"])
def test_real_models_continue_as_expected(model: str, kind: Kind, precision: str, borders: list[int]) -> None:
    """All cases at once: chunks of prompts and decodes share passes. F32 and F16 are exact at both levels."""
    cases = [case for case in EXPECTED if case["model"] == model]
    count = min(len(case["ids"]) for case in cases)
    with stages(
        kind, path_of_data(model), borders, n_slots=len(cases), max_rows=256, precision=precision
    ) as stacks:
        together = greedy_together(stacks, [case["prompt_ids"] for case in cases], count, chunk=32)
    # A near tie may fall to either side; where there is none, every token is the same.
    clear = [i for i, case in enumerate(cases) if case["min_top2_logit_gap"] > 0.01]
    assert len(clear) >= 8
    for i in clear:
        assert together[i] == cases[i]["ids"][:count]


@pytest.mark.parametrize("kind", KINDS, ids=ids(KINDS))
def test_prompts_in_chunks_of_four_rows_continue_as_expected(kind: Kind) -> None:
    cases = [case for case in EXPECTED if case["model"] == "stories260K.gguf"][:8]
    with stages(kind, path_of_data("stories260K.gguf"), [0, 3, 5], n_slots=8, max_rows=32) as stacks:
        together = greedy_together(stacks, [case["prompt_ids"] for case in cases], 20, chunk=4)
    for case, tokens in zip(cases, together, strict=True):
        if case["min_top2_logit_gap"] > 0.01:
            assert tokens == case["ids"][:20]


@pytest.mark.parametrize(("kind", "precision"), [(ONNX, "fast"), (TORCH, "exact")], ids=["onnx", "torch"])
def test_the_mixture_predicts_text_as_well_as_in_llama_cpp(kind: Kind, precision: str) -> None:
    """Loss on its own sampled text; llama.cpp rounds activations to float16 beside float16 weights."""
    path = path_of_data("stories260K-moe8x2.gguf")
    cases = [case for case in EXPECTED if case["model"] == path.name]
    text = [token for case in cases for token in (*case["prompt_ids"], *case["ids"])][:500]

    def loss(logits: np.ndarray) -> float:
        shifted = logits[:-1] - logits[:-1].max(-1, keepdims=True)
        chosen = shifted[np.arange(len(text) - 1), text[1:]]
        return float(np.mean(np.log(np.exp(shifted).sum(-1)) - chosen))

    with (
        stages(kind, path, [0, 5], context_length=512, max_rows=512, precision=precision) as stacks,
        LlamaCpp(path, 512) as llama,
    ):
        assert loss(prefill(stacks, text)) == pytest.approx(loss(llama.logits(text)), abs=0.01)
