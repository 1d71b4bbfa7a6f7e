"""Which engine and device a peer computes with, where its owner leaves that open, and how much memory that has.

Looking must not import an engine: the agent never computes, and the libraries take hundreds of megabytes.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess

import psutil

from kvasir_peer.errors import UsageError

_GPU_QUESTION_SECONDS = 10.0  # nvidia-smi on a machine whose driver is still waking up


def installed(engine: str) -> bool:
    """Whether the packages of an engine are there."""
    modules = {"onnx": ("onnxruntime", "onnx"), "torch": ("torch",)}[engine]
    return all(importlib.util.find_spec(module) is not None for module in modules)


def _ask_nvidia(*arguments: str) -> str:
    """What ``nvidia-smi`` answers, or "" where it is missing or has nothing to say."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        answer = subprocess.run(
            [tool, *arguments], capture_output=True, text=True, timeout=_GPU_QUESTION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def has_nvidia_gpu() -> bool:
    """Whether the driver sees an NVIDIA GPU."""
    return "GPU 0" in _ask_nvidia("-L")


def _nvidia_id(device: str) -> str:
    """What ``nvidia-smi`` calls a device of torch, which counts only those that it is shown."""
    index = device.partition(":")[2] or "0"
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    chosen = shown[int(index)].strip() if index.isdecimal() and int(index) < len(shown) else ""
    return chosen or index


def free_memory(device: str) -> int:
    """Bytes that are free where a device keeps weights: the GPU's own memory, else the machine's.

    The machine's is answered for a GPU that does not say what it has.
    """
    if device.startswith("cuda"):
        query = ("-i", _nvidia_id(device), "--query-gpu=memory.free", "--format=csv,noheader,nounits")
        answer = _ask_nvidia(*query).strip()
        if answer.isdecimal():
            return int(answer) << 20  # it counts in MiB
    return int(psutil.virtual_memory().available)


def choose_engine(engine: str, device: str) -> tuple[str, str]:
    """(engine, device): as asked for, else torch on an NVIDIA GPU, else onnxruntime on the CPU, else torch there.

    Args:
        engine: ``auto``, ``onnx`` or ``torch``.
        device: a device, or empty.

    Raises:
        UsageError: the engine that was asked for, or any at all, is not installed.
    """
    if engine == "auto":
        if installed("torch") and (device.startswith("cuda") or (not device and has_nvidia_gpu())):
            return "torch", device or "cuda"
        for name in ("onnx", "torch"):
            if installed(name):
                return name, device or "cpu"
        raise UsageError("no engine is installed: pip install 'kvasir-peer[onnx]' or 'kvasir-peer[torch]'")
    if not installed(engine):
        raise UsageError(f"the {engine} engine is not installed: pip install 'kvasir-peer[{engine}]'")
    if not device:
        device = "cuda" if engine == "torch" and has_nvidia_gpu() else "cpu"
    return engine, device
