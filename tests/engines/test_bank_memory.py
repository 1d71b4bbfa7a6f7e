"""What a bank of experts really takes, beside what it says before it is loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_models
from random_blocks import random_blocks

from kvasir_peer.engines import quants

N_EXPERT, WIDTH, HIDDEN = 64, 1024, 512
HELD = 48

_MEASURE = """
import gc, json, sys, threading
import numpy as np
from kvasir_peer.engines.base import BankSpec, create_bank, estimate_bank
from kvasir_peer.models.sources import GgufSource

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def watch():
    global highest
    while not ended.wait(0.001):  # seconds
        highest = max(highest, anonymous())

def run(bank, n_expert, width):
    x = np.ones((64, width), np.float32)
    ids = np.arange(64 * 8, dtype=np.int32).reshape(64, 8) % n_expert
    bank.compute(0, x, ids, np.full((64, 8), 0.125, np.float32))

engine, path, held, n_expert, width = *sys.argv[1:3], *map(int, sys.argv[3:])
if engine == "onnx":  # what the libraries take by themselves
    from kvasir_peer.engines.onnx_probe import probe

    probe()
else:
    import torch

    torch.randn(64, 64) @ torch.randn(64, 64)
source = GgufSource(path)
spec = BankSpec(((0, 0, held),), 64, threads=2)
said = estimate_bank(engine, source.metadata, source.tensors, spec)
before = highest = anonymous()
ended = threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
bank = create_bank(engine, source, spec)
ended.set()
watcher.join()
run(bank, n_expert, width)
gc.collect()
print(json.dumps([said.total, bank.memory().total, anonymous() - before, highest - before]))
"""


def _write(path: Path, kind: str) -> Path:
    """A file of nothing but one layer's experts."""
    t = quants.BY_NAME[kind]
    rng = np.random.default_rng(0)
    metadata = {
        "general.architecture": "qwen3moe",
        "qwen3moe.block_count": 1,
        "qwen3moe.context_length": 64,
        "qwen3moe.embedding_length": WIDTH,
        "qwen3moe.feed_forward_length": HIDDEN,
        "qwen3moe.expert_feed_forward_length": HIDDEN,
        "qwen3moe.expert_count": N_EXPERT,
        "qwen3moe.expert_used_count": 8,
        "qwen3moe.attention.head_count": 4,
        "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3moe.vocab_size": 32,
    }
    shapes = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    tensors = {
        f"blk.0.ffn_{part}_exps.weight": (
            random_blocks(t, (N_EXPERT, *shape), rng, 4099),
            gguf.GGMLQuantizationType(t.id),
        )
        for part, shape in shapes.items()
    }
    tiny_models.write_gguf(path, metadata, tensors)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(
    ("engine", "kind", "own"),
    [
        *(("onnx", kind, own) for kind in ("Q4_0", "Q4_K", "Q8_0") for own in ("1", "0")),
        ("torch", "Q4_0", "1"),
    ],
)
def test_the_estimate_is_what_is_taken(tmp_path: Path, engine: str, kind: str, own: str) -> None:
    """In place by the kernels of our own; else all at once (Q4_0, Q8_0) or one by one (Q4_K); torch in float32."""
    path = _write(tmp_path / "model.gguf", kind)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, engine, *map(str, (path, HELD, N_EXPERT, WIDTH))],
        capture_output=True,
        text=True,
        check=True,
        timeout=110,
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"KVASIR_ENGINE_KERNELS": own},
    )
    estimate, stated, taken, highest = json.loads(done.stdout)
    assert estimate == stated
    assert taken == pytest.approx(estimate, rel=0.1)
    if engine == "onnx" and own == "1":
        # Weights go straight from the file to where they stay.
        assert highest < taken + 4_000_000
