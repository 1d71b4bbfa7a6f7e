"""What ``kvasir-peer bench`` prints: kernels, bandwidth and times of experts, measured here and now."""

import re

import pytest

from kvasir_peer.cli import run
from kvasir_peer.engines import measure
from kvasir_peer.engines.kernels.library import Library


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take no time: what is tested is that all is measured, not how fast the machine is."""
    monkeypatch.setattr(measure, "_READ_BYTES", 4 << 20)
    monkeypatch.setattr(measure, "EXPERTS", 3)
    monkeypatch.setattr(measure, "EXPERT_WIDTH", 256)
    monkeypatch.setattr(measure, "EXPERT_HIDDEN", 128)


def test_every_engine_is_measured(capsys: pytest.CaptureFixture[str], kernels: Library) -> None:
    assert run(["bench", "--device", "cpu", "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^memory +[\d.]+ GB/s read by 1 threads$", printed, re.MULTILINE)
    assert len(re.findall(r"^onnx kernel +.*: works, error ", printed, re.MULTILINE)) == 16
    assert f"kernels of our own ({kernels.instructions})" in printed
    for engine in ("onnx", "torch"):
        rows = re.findall(rf"^{engine}, cpu +an expert with +(\d+) rows: [\d.]+ ms", printed, re.MULTILINE)
        assert rows == ["1", "4", "16"]


def test_an_experts_bytes_are_the_files() -> None:
    (one, _, _) = measure.expert_times("onnx", threads=1)
    assert one.file_bytes == 3 * 256 * 128 // 32 * 18
    assert one.seconds > 0


def test_a_device_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--engine", "onnx", "--device", "abacus"]) == 1
    assert "abacus" in capsys.readouterr().out
