"""What the engines are compared with: llama.cpp's answers, asked once per test session."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import smollm2
import tiny_models
from oracle import Reference, ask_llama_cpp

from kvasir_peer.engines import onnx_engine, onnx_probe
from kvasir_peer.engines.kernels.library import Library, Missing, find_library


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Name of a tiny model to its file and llama.cpp's answers."""
    folder = tmp_path_factory.mktemp("tiny")
    known: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in known:
            known[name] = ask_llama_cpp(tiny_models.write_model(tiny_models.BY_NAME[name], folder))
        return known[name]

    return get


@pytest.fixture(scope="session")
def real_text(smollm2_path: Path) -> smollm2.RealText:
    """SmolLM2 as it is published (Q4_1), and llama.cpp's logits on a text."""
    return smollm2.ask_llama_cpp(smollm2_path)


@pytest.fixture(scope="session")
def real_text_k(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> smollm2.RealText:
    """SmolLM2 with K-quants where its widths allow them, and llama.cpp's logits on a text."""
    return smollm2.ask_llama_cpp(smollm2.write_k_quants(smollm2_path, tmp_path_factory.mktemp("k")))


@pytest.fixture(scope="session")
def kernels() -> Library:
    """The C kernels, compiled for this machine; they must be there in CI."""
    found = find_library()
    if isinstance(found, Missing):
        if os.environ.get("CI"):
            pytest.fail(f"no kernels of our own: {found.reason}")
        pytest.skip(f"no kernels of our own: {found.reason}")
    return found


@pytest.fixture(params=["own", "onnxruntime's"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose kernels the onnx engine multiplies by: a test that takes this runs with both, as machines have them."""
    if request.param == "own":
        request.getfixturevalue("kernels")
    else:
        report = onnx_probe.probe()
        without = replace(report, kernels=replace(report.kernels, panels=None))
        monkeypatch.setattr(onnx_engine, "probe", lambda device: without)
        monkeypatch.setattr(onnx_engine, "usable_kernels", lambda device: without.kernels)
    return str(request.param)
