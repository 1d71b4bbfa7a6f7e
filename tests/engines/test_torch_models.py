"""The torch engine against llama.cpp: every architecture, one stage and many, alone and together."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
import torch.nn.functional as F
from driving import greedy, greedy_together, prefill
from oracle import GREEDY_TOKENS, Reference

from kvasir_peer.engines import torch_stack
from kvasir_peer.engines.base import LayerStack, StackSpec
from kvasir_peer.engines.torch_engine import make_stack
from kvasir_peer.engines.torch_weights import TorchOptions
from kvasir_peer.models.sources import GgufSource

# Largest difference from llama.cpp, in standard deviations of the logits: float32 sums in another order.
TOLERANCE = 1e-4
# llama.cpp looks GELU up in a table of float16 (`ggml_vec_gelu_f32`), so models whose feed-forward part counts
# differ by that; test_gelu_is_the_tanh_form takes the table's rounding out.
GELU_TOLERANCE = 5e-3
TOGETHER_TOKENS = 12
REFERENCE = TorchOptions(torch.device("cpu"), torch.float32)
# What a GPU uses, on the CPU and in float32: batched attention, experts gathered without asking for their ids,
# decode passes with fixed buffers.
LIKE_GPU = TorchOptions(
    torch.device("cpu"),
    torch.float32,
    keep_bytes=True,
    batched_attention=True,
    gather_pairs=64,
    grouped=True,
    graphs=True,
)
NAMES = [model.name for model in tiny_models.MODELS]
Get = Callable[[str], Reference]


@contextmanager
def stages(
    path: Path, borders: list[int], options: TorchOptions, n_slots: int = 1
) -> Iterator[list[LayerStack]]:
    """Stacks between the given layer borders; the last border may be -1 for the model's end."""
    with GgufSource(path) as source, ExitStack() as closing:
        blocks = int(source.metadata[f"{source.metadata['general.architecture']}.block_count"])
        borders = [blocks if border < 0 else border for border in borders]
        stacks = []
        for first, end in itertools.pairwise(borders):
            stack = make_stack(
                source, StackSpec(first, end, n_slots, tiny_models.CONTEXT, 128, threads=1), options=options
            )
            closing.callback(stack.close)
            stacks.append(stack)
        yield stacks


def tolerance(name: str) -> float:
    return GELU_TOLERANCE if name == "gemma3-softcap" else TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_one_stage_agrees_with_llama_cpp(reference: Get, name: str) -> None:
    expected = reference(name)
    with stages(expected.path, [0, -1], REFERENCE) as stacks:
        assert expected.distance(prefill(stacks, expected.prompt)) < tolerance(name)
        assert greedy(stacks, expected.prompt, GREEDY_TOKENS) == expected.greedy


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_per_layer_with_chunked_prompts_agrees_with_llama_cpp(reference: Get, name: str) -> None:
    expected = reference(name)
    borders = list(range(1 + tiny_models.BY_NAME[name].metadata.get("block_count", 3)))
    with stages(expected.path, borders, REFERENCE) as stacks:
        assert expected.distance(prefill(stacks, expected.prompt, chunk=7)) < tolerance(name)
        assert greedy(stacks, expected.prompt, GREEDY_TOKENS, chunk=3) == expected.greedy


@pytest.mark.parametrize("options", [REFERENCE, LIKE_GPU], ids=["reference", "like-gpu"])
@pytest.mark.parametrize("name", NAMES)
def test_requests_together_give_the_tokens_they_give_alone(
    reference: Get, name: str, options: TorchOptions
) -> None:
    expected = reference(name)
    prompts = [expected.prompt, expected.prompt[:9], expected.prompt[5:], [3], expected.prompt[::-1]]
    with stages(expected.path, [0, 1, -1], options, n_slots=len(prompts)) as stacks:
        together = greedy_together(stacks, prompts, TOGETHER_TOKENS, chunk=6)
        assert together[0] == expected.greedy[:TOGETHER_TOKENS]
        for slot, prompt in enumerate(prompts):
            assert greedy(stacks, prompt, TOGETHER_TOKENS, slot=slot) == together[slot]


@pytest.mark.parametrize("name", NAMES)
def test_the_path_of_gpus_agrees_with_llama_cpp(reference: Get, name: str) -> None:
    expected = reference(name)
    with stages(expected.path, [0, -1], LIKE_GPU) as stacks:
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
    with stages(expected.path, [0, -1], REFERENCE) as stacks:
        # A rounding of float16 may still fall to the other side.
        assert expected.distance(prefill(stacks, expected.prompt)) < 2e-4
    assert np.abs(expected.logits).max() < 3.0  # the cap of the case
