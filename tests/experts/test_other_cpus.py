"""An honest worker on another kind of CPU never falls: what an emulated Arm core computed, against both engines here.

``tests/data/record_sums.py`` has recorded ``tests/data/arm_sums_*.npz`` on emulated aarch64 cores, as it says there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))
sys.path.insert(0, str(Path(__file__).parent.parent / "data"))

import gguf
from random_blocks import random_blocks
from record_sums import sums_of
from tiny_models import write_gguf

from kvasir_peer.engines import quants
from kvasir_peer.experts.verification import Verifier, bounds_for, differences
from kvasir_peer.wire.tensors import decode_tensor, encode_tensor

DATA = Path(__file__).parent.parent / "data"
CORES = ("cortex-a72", "neoverse-n1")  # without and with the instruction for products of bytes
KINDS = ("F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
WIDTH, HIDDEN, EXPERTS = 256, 256, 4


def write_banks(folder: Path) -> None:
    """One file for each kind of weights, the same on every machine: a layer's experts and nothing else."""
    for kind in KINDS:
        rng = np.random.default_rng(7)
        metadata = {
            "general.architecture": "qwen3moe",
            "qwen3moe.block_count": 1,
            "qwen3moe.context_length": 64,
            "qwen3moe.embedding_length": WIDTH,
            "qwen3moe.feed_forward_length": HIDDEN,
            "qwen3moe.expert_feed_forward_length": HIDDEN,
            "qwen3moe.expert_count": EXPERTS,
            "qwen3moe.expert_used_count": 2,
            "qwen3moe.attention.head_count": 4,
            "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
            "qwen3moe.vocab_size": 32,
        }
        t = quants.BY_NAME[kind]
        tensors = {
            f"blk.0.ffn_{part}_exps.weight": (
                random_blocks(t, (EXPERTS, *shape), rng),
                gguf.GGMLQuantizationType(t.id),
            )
            for part, shape in {
                "gate": (HIDDEN, WIDTH),
                "up": (HIDDEN, WIDTH),
                "down": (WIDTH, HIDDEN),
            }.items()
        }
        write_gguf(folder / f"{kind}.gguf", metadata, tensors)


@pytest.fixture(scope="module")
def banks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("banks")
    write_banks(folder)
    return folder


def sent(sums: np.ndarray, wire: str) -> np.ndarray:
    """As it arrives."""
    return decode_tensor(encode_tensor(sums, wire), wire, *sums.shape)


@pytest.mark.parametrize("engine", ["onnx", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_an_arm_core_computed_passes_every_check(banks: Path, kind: str, engine: str) -> None:
    recorded = {core: np.load(DATA / f"arm_sums_{core}.npz") for core in CORES}
    for ours_at in ("exact", "fast"):
        ours = sums_of(banks / f"{kind}.gguf", ours_at, engine)
        for core, theirs_at in ((c, p) for c in CORES for p in ("exact", "fast")):
            theirs = recorded[core][f"{kind} {theirs_at}"]
            precision = "exact" if ours_at == theirs_at == "exact" else "fast"
            for wire in ("f32", "f16", "bf16"):
                bounds = bounds_for(wire, precision)
                verifier = Verifier("strict", b"secret")
                apart = differences(sent(theirs, wire), sent(ours, wire), bounds)
                verdict = verifier.checked("w", apart, bounds)
                assert not verdict.caught, f"{core} {theirs_at} against {engine} {ours_at} over {wire}"
                assert verdict.worst < bounds.hard / 3
                # Another row's sums are as large, and are caught.
                assert differences(sent(np.roll(theirs, 1, axis=0), wire), ours, bounds).min() > bounds.hard
