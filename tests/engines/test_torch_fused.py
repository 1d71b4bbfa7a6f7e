"""The fused kernel of decode steps, run by Triton's interpreter on the CPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
HAS_GPU = torch.cuda.is_available()
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton comes with torch's CUDA build; pip install triton to run this",
)


def run(part: str, device: str, **environment: str) -> None:
    """Run in a process of its own, because Triton decides at import whether it interprets."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("run_fused.py"), part, device],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | environment | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == "same"


@needs_triton
@pytest.mark.parametrize("part", ["kernel", "stack"])
def test_the_kernel_computes_what_unpacking_first_computes(part: str) -> None:
    run(part, "cpu", TRITON_INTERPRET="1")


@needs_triton
def test_the_kernel_compiles_without_a_gpu() -> None:
    run("compile", "cpu", TRITON_INTERPRET="0")


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("part", ["kernel", "stack"])
def test_on_a_gpu_it_computes_what_unpacking_first_computes(part: str) -> None:
    run(part, "cuda")


def test_without_triton_weights_are_taken_apart_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvasir_peer.engines.torch_weights import _fused_works

    _fused_works.cache_clear()
    monkeypatch.setitem(sys.modules, "kvasir_peer.engines.torch_fused", None)
    assert not _fused_works(2, torch.device("cpu"))
    _fused_works.cache_clear()
