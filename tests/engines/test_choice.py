"""What an agent finds out about the machine's devices without importing an engine."""

import os
from pathlib import Path

import psutil
import pytest

from kvasir_peer.engines.choice import choose_engine, free_memory, has_nvidia_gpu

_TOOL = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  -L) echo "GPU 0: NVIDIA GeForce RTX 3060 (UUID: GPU-1)"; echo "GPU 1: the same (UUID: GPU-2)";;
  *"-i 1 "*) echo 11264;;
  *"-i 0 "*) echo 5120;;
  *) echo "No devices were found"; exit 6;;
esac
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ``nvidia-smi`` that knows two GPUs; what it is asked stands in the returned file."""
    log = tmp_path / "asked"
    program = tmp_path / "nvidia-smi"
    program.write_text(_TOOL.format(log=log))
    program.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return log


def test_a_gpus_own_memory_is_what_counts(tool: Path) -> None:
    assert has_nvidia_gpu()
    assert free_memory("cuda") == free_memory("cuda:0") == 5120 << 20
    assert free_memory("cuda:1") == 11264 << 20
    assert choose_engine("torch", "") == ("torch", "cuda")
    assert choose_engine("onnx", "") == ("onnx", "cpu")


def test_gpus_are_counted_as_the_environment_shows_them(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, 0")
    assert free_memory("cuda") == 11264 << 20
    assert free_memory("cuda:1") == 5120 << 20
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2")
    free_memory("cuda")
    assert "-i GPU-2 " in tool.read_text().splitlines()[-1]


def test_a_gpu_that_does_not_answer_counts_as_the_machine(tool: Path) -> None:
    near = psutil.virtual_memory().total
    assert 0 < free_memory("cuda:7") <= near
    asked = len(tool.read_text().splitlines())
    assert 0 < free_memory("cpu") <= near
    assert len(tool.read_text().splitlines()) == asked  # nobody asks for a GPU's memory to use the processor


def test_without_a_driver_the_processor_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not has_nvidia_gpu()
    assert choose_engine("auto", "") == ("onnx", "cpu")
    assert free_memory("cuda") > 0
