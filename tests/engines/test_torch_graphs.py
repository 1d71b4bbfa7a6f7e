"""Decode passes with fixed buffers: which passes they are, and that padding shows nowhere."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from driving import greedy_together, prefill
from oracle import GREEDY_TOKENS, Reference

from kvasir_peer.engines import torch_graphs
from kvasir_peer.engines.base import Rows, StackSpec
from kvasir_peer.engines.torch_engine import make_stack
from kvasir_peer.engines.torch_stack import TorchStack
from kvasir_peer.engines.torch_weights import TorchOptions
from kvasir_peer.models.sources import GgufSource

Get = Callable[[str], Reference]
OPTIONS = TorchOptions(
    torch.device("cpu"), torch.float32, keep_bytes=True, batched_attention=True, gather_pairs=12, graphs=True
)


@pytest.fixture
def stack(reference: Get) -> Iterator[TorchStack]:
    with GgufSource(reference("llama-moe").path) as source:
        made = make_stack(source, StackSpec(0, 3, 20, 256, 64, threads=1), options=OPTIONS)
        assert isinstance(made, TorchStack)
        yield made
        made.close()


def decode(slots: list[int], position: int, wants: list[bool] | None = None) -> Rows:
    n = len(slots)
    return Rows.of(slots, [position] * n, [7 + slot for slot in slots], wants or [True] * n)


def test_passes_of_few_single_rows_are_recorded_by_their_rounded_shape(stack: TorchStack) -> None:
    graphs = stack._graphs
    assert graphs is not None
    stack.forward(decode([0, 1, 2], 0), None)
    assert list(graphs._known) == [(4, 256)]
    stack.forward(decode([3], 0), None)
    stack.forward(decode([5, 4, 9, 1], 1), None)
    assert list(graphs._known) == [(1, 256), (4, 256)]
    # A chunk of a prompt is none of them; nor are so many rows that their experts have to be sorted.
    stack.forward(Rows.of([0, 0, 1], [0, 1, 2], [1] * 3, [True] * 3), None)
    stack.forward(decode([0, 1, 2, 3, 4], 5), None)
    assert len(graphs._known) == 2


def test_padding_shows_nowhere(stack: TorchStack, reference: Get) -> None:
    prompt = reference("llama-moe").prompt
    with GgufSource(reference("llama-moe").path) as source:
        plain = make_stack(source, StackSpec(0, 3, 20, 256, 64, threads=1))
        for made in (stack, plain):
            for slot in range(4):
                prefill([made], prompt[: 5 + 3 * slot], slot=slot)
        for step in range(3):
            slots = [0, 2, 3][: 3 - step]
            rows = Rows.of(
                slots,
                [5 + 3 * s + step for s in slots],
                [step] * len(slots),
                [True, False, True][: len(slots)],
            )
            np.testing.assert_allclose(stack.forward(rows, None), plain.forward(rows, None), atol=1e-5)


def test_the_oldest_recordings_are_dropped(stack: TorchStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_graphs, "MAX_GRAPHS", 2)
    monkeypatch.setattr(torch_graphs, "POSITIONS_STEP", 4)
    for position in (0, 5, 9, 1):
        stack.forward(decode([0], position), None)
    assert stack._graphs is not None
    assert list(stack._graphs._known) == [(1, 16), (1, 4)]


def test_the_reach_stops_at_the_context(stack: TorchStack) -> None:
    assert stack.forward(decode([0, 19], 255), None).shape == (2, 96)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gpt-oss", "deepseek-v3", "gemma3"])
def test_a_gpu_agrees_with_llama_cpp(reference: Get, name: str) -> None:
    """Exact mode on the device, with recorded decode passes."""
    case = reference(name)
    with GgufSource(case.path) as source:
        blocks = int(source.metadata[f"{source.metadata['general.architecture']}.block_count"])
        stack = make_stack(source, StackSpec(0, blocks, 3, 256, 64, precision="exact", device="cuda"))
        assert isinstance(stack, TorchStack) and stack._graphs is not None
        assert case.distance(prefill([stack], case.prompt)) < 1e-3
        together = greedy_together(
            [stack], [case.prompt, case.prompt[::-1], case.prompt[3:]], GREEDY_TOKENS, chunk=9
        )
        assert together[0] == case.greedy
        assert stack._graphs._known, "no pass was recorded"
        fast = make_stack(source, StackSpec(0, blocks, 1, 256, 64, precision="fast", device="cuda"))
        assert case.distance(prefill([fast], case.prompt)) < 0.3
