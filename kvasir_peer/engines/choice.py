"""Which engine and device a peer computes with, where its owner leaves that open.

Looking must not import an engine: the agent never computes, and the libraries take hundreds of megabytes.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess

from kvasir_peer.errors import UsageError

_GPU_QUESTION_SECONDS = 10.0  # nvidia-smi on a machine whose driver is still waking up


def installed(engine: str) -> bool:
    """Whether the packages of an engine are there."""
    modules = {"onnx": ("onnxruntime", "onnx"), "torch": ("torch",)}[engine]
    return all(importlib.util.find_spec(module) is not None for module in modules)


def has_nvidia_gpu() -> bool:
    """Whether the driver sees an NVIDIA GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        answer = subprocess.run(
            [tool, "-L"], capture_output=True, text=True, timeout=_GPU_QUESTION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and "GPU 0" in answer.stdout


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
