"""What a bank of experts really takes, beside what it says before it is loaded."""

import json
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
import gc, json, sys
import numpy as np
from kvasir_peer.engines.base import BankSpec, create_bank, estimate_bank
from kvasir_peer.models.sources import GgufSource

def anonymous():
    gc.collect()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

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
before = anonymous()
bank = create_bank(engine, source, spec)
run(bank, n_expert, width)
print(json.dumps([said.total, bank.memory().total, anonymous() - before]))
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
    ("engine", "kind"),
    [("onnx", "Q4_0"), ("onnx", "Q4_K"), ("onnx", "Q8_0"), ("torch", "Q4_0")],
)
def test_the_estimate_is_what_is_taken(tmp_path: Path, engine: str, kind: str) -> None:
    """All at once (Q4_0, Q8_0), one by one (Q4_K), and dequantised in torch's float32."""
    path = _write(tmp_path / "model.gguf", kind)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, engine, *map(str, (path, HELD, N_EXPERT, WIDTH))],
        capture_output=True,
        text=True,
        check=True,
        timeout=110,
        cwd=Path(__file__).resolve().parents[2],
    )
    estimate, own, taken = json.loads(done.stdout)
    assert estimate == own
    assert taken == pytest.approx(estimate, rel=0.1)
