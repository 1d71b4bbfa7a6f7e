"""The torch engine on a GPU: tokens a second, and useful bytes a second against the card's copy bandwidth."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvasir_peer.engines.base import LayerStack, Rows, StackSpec
from kvasir_peer.models.sources import GgufSource

BEFORE = 64  # tokens in the cache of each request when decoding begins
SLOTS = 16


@dataclass(frozen=True)
class DeviceTimes:
    """What was measured.

    Attributes:
        decode: tokens a second by batch.
        prefill: tokens a second.
        useful: bytes of the file that a step of batch 1 needs, a second.
    """

    decode: dict[int, float]
    prefill: float
    useful: float


def missing() -> str:
    """Why nothing can be run on a GPU here, or ""."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "no GPU at hand: torch finds no CUDA device"


def copy_bandwidth(device: str, n_bytes: int = 1 << 30) -> float:
    """Bytes a second that the device copies within its memory, read and written counted."""
    import torch

    source = torch.ones(n_bytes // 4, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        target[:1].cpu()  # waits for the device
        begin = time.perf_counter()
        target.copy_(source)
        target[-1:].cpu()
        best = max(best, 2 * n_bytes / (time.perf_counter() - begin))
    return best


def _step_bytes(source: GgufSource) -> float:
    """Bytes of the file that one row needs: all matrices once, of experts those that are used."""
    prefix = str(source.metadata["general.architecture"])
    used = int(str(source.metadata[f"{prefix}.expert_used_count"]))
    experts = int(str(source.metadata[f"{prefix}.expert_count"]))
    return sum(
        info.n_bytes * (used / experts if "_exps." in name else 1.0)
        for name, info in source.tensors.items()
        if name != "token_embd.weight"
    )


def _seconds(stack: LayerStack, rows: list[Rows]) -> float:
    """Median seconds of passes, after some that warm up and are recorded."""
    samples = []
    for one in rows:
        begin = time.perf_counter()
        stack.forward(one, None)
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples[len(samples) // 3 :])


def measure(path: Path, device: str, prefill: int, *, fused: bool, steps: int) -> DeviceTimes:
    """Time one model.

    Args:
        path: GGUF file of a mixture of experts.
        device: torch's name of it.
        prefill: tokens of a prompt.
        fused: whether few rows go through the fused kernel, else matrices are taken apart first.
        steps: passes of each kind.
    """
    from kvasir_peer.engines.torch_engine import make_stack
    from kvasir_peer.engines.torch_weights import options_for

    rng = np.random.default_rng(0)
    options = replace(options_for(device, "fast"), fused=fused)
    with GgufSource(path) as source:
        n_layer = next(int(str(v)) for k, v in source.metadata.items() if k.endswith(".block_count"))
        spec = StackSpec(0, n_layer, SLOTS, prefill + BEFORE, prefill, device=device)
        stack = make_stack(source, spec, options=options)
        step_bytes = _step_bytes(source)
    vocabulary = stack.shape.n_vocab

    def tokens(n: int) -> list[int]:
        return rng.integers(0, vocabulary, n).tolist()

    decode = {}
    for batch in (1, 4, 16):
        for slot in range(batch):
            before = [False] * BEFORE
            stack.forward(Rows.of([slot] * BEFORE, range(BEFORE), tokens(BEFORE), before), None)
        passes = [
            Rows.of(range(batch), [BEFORE + step] * batch, tokens(batch), [True] * batch)
            for step in range(steps)
        ]
        decode[batch] = batch / _seconds(stack, passes)
    last = [False] * (prefill - 1) + [True]
    prompts = [
        Rows.of([0] * prefill, range(prefill), tokens(prefill), last) for _ in range(max(3, steps // 6))
    ]
    found = DeviceTimes(decode, prefill / _seconds(stack, prompts), step_bytes * decode[1])
    stack.close()
    return found
