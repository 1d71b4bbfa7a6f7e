"""The torch engine on a real quantised model, beside llama.cpp."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from driving import prefill
from smollm2 import N_LAYER, TEXT_TOKENS, RealText

from kvasir_peer.engines.base import StackSpec
from kvasir_peer.engines.torch_engine import make_stack
from kvasir_peer.engines.torch_weights import TorchOptions
from kvasir_peer.models.sources import GgufSource


@pytest.mark.timeout(400)  # seconds; two engines over 500 tokens, on a machine that may be busy
@pytest.mark.parametrize("which", ["real_text", "real_text_k"])
def test_a_text_is_predicted_as_by_llama_cpp(which: str, request: pytest.FixtureRequest) -> None:
    """llama.cpp rounds activations to 8 bits, so logits are compared statistically."""
    text: RealText = request.getfixturevalue(which)
    # Weights as bytes for the K-quants: the path of GPUs.
    options = TorchOptions(torch.device("cpu"), torch.float32, keep_bytes=which == "real_text_k")
    with GgufSource(text.path) as source:
        stack = make_stack(source, StackSpec(0, N_LAYER, 1, TEXT_TOKENS, TEXT_TOKENS), options=options)
        logits = prefill([stack], text.tokens)
        stack.close()
    same, difference = text.compare(logits)
    assert same >= 0.95
    assert difference <= 0.06


@pytest.mark.parametrize(("first", "end", "rows"), [(0, 8, 256), (26, N_LAYER, 64)], ids=["head", "tail"])
def test_a_process_takes_what_the_estimate_says(smollm2_path: Path, first: int, end: int, rows: int) -> None:
    """Weights, cache and scratch space together, as the operating system counts them."""
    program = Path(__file__).with_name("measure_memory.py")
    run = subprocess.run(
        [sys.executable, program, smollm2_path, *map(str, (first, end, rows, 512))],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    taken, estimated = map(int, run.stdout.split())
    assert taken > 100 << 20
    assert estimated == pytest.approx(taken, rel=0.10)
