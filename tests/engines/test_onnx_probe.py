"""What onnxruntime can do here: tried and compared with numpy, and said in words."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvasir_peer.engines import onnx_probe, onnx_trials
from kvasir_peer.engines.base import Precision
from kvasir_peer.engines.kernels.library import Library, Missing
from kvasir_peer.engines.onnx_containers import Kernels
from kvasir_peer.engines.onnx_graph import Graph, Runtime
from kvasir_peer.errors import EngineError


@pytest.fixture(autouse=True)
def fresh_probe() -> None:
    onnx_probe._probe.cache_clear()


@pytest.fixture
def everything(kernels: Library) -> Kernels:
    """All kernels that there are."""
    return Kernels(codes4=True, codes8=True, experts=True, panels=kernels.path)


def test_all_kernels_work_with_this_onnxruntime(everything: Kernels) -> None:
    report = onnx_probe.probe()
    assert all(trial.works for trial in report.trials), report.lines()
    assert report.kernels == everything
    for name in ("QMoE, 4 bits", "13 types", "of our own"):
        assert any(name in line and "works" in line for line in report.lines())
    # Rounding to int8 shows where it should, and only there.
    for trial in report.trials:
        rounds = any(name in trial.name for name in ("level 4", "QMoE", ", fast"))
        assert (trial.deviation > 1e-3) == rounds, trial


def test_a_kernel_with_wrong_results_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, everything: Kernels
) -> None:
    right = onnx_trials.try_product

    def wrong(runtime: Runtime, bits: int, block: int, level: int) -> tuple[np.ndarray, np.ndarray]:
        got, expected = right(runtime, bits, block, level)
        return (got * np.float32(1.1) if bits == 8 else got), expected

    monkeypatch.setattr(onnx_trials, "try_product", wrong)
    report = onnx_probe.probe()
    assert report.kernels == replace(everything, codes8=False)
    line = next(line for line in report.lines() if "8 bits, blocks of 32" in line)
    assert "does not work" in line and "dequantised" in line


@pytest.mark.parametrize(
    ("wrong_case", "factor"),
    [(("fast", 2), 1.1), (("fast", 39), 1.1), (("exact", 14), 1.00001)],
    ids=["fast, Q4_0", "fast, MXFP4", "exact, Q6_K"],
)
def test_one_wrong_type_of_our_own_kernels_is_enough_to_do_without_them(
    monkeypatch: pytest.MonkeyPatch, everything: Kernels, wrong_case: tuple[str, int], factor: float
) -> None:
    right = onnx_trials.try_linear

    def wrong(
        runtime: Runtime, library: Path, precision: Precision, type_id: int
    ) -> tuple[np.ndarray, np.ndarray]:
        got, expected = right(runtime, library, precision, type_id)
        return (got * np.float32(factor) if (precision, type_id) == wrong_case else got), expected

    monkeypatch.setattr(onnx_trials, "try_linear", wrong)
    report = onnx_probe.probe()
    assert report.kernels == replace(everything, panels=None)
    line = next(line for line in report.lines() if f"13 types, {wrong_case[0]}" in line)
    assert "does not work" in line and "onnxruntime's own operators" in line


def test_without_our_own_kernels_the_others_are_used_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(onnx_probe, "find_library", lambda: Missing("no C compiler is installed"))
    report = onnx_probe.probe()
    assert report.kernels == Kernels(codes4=True, codes8=True, experts=True, panels=None)
    line = next(line for line in report.lines() if "of our own" in line)
    assert "does not work (no C compiler is installed; onnxruntime's own operators" in line


def test_a_kernel_that_is_missing_is_gone_round(monkeypatch: pytest.MonkeyPatch, everything: Kernels) -> None:
    def missing(runtime: Runtime, bits: int) -> tuple[np.ndarray, np.ndarray]:
        raise EngineError("onnxruntime refuses a graph: QMoE(-1) is not a registered operator")

    monkeypatch.setattr(onnx_trials, "try_experts", missing)
    assert onnx_probe.usable_kernels("cpu") == replace(everything, experts=False)
    assert any("not a registered operator" in line for line in onnx_probe.probe().lines())


def test_without_attention_nothing_can_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        onnx_trials, "try_attention", lambda *_: (np.zeros(3, np.float32), np.ones(3, np.float32))
    )
    with pytest.raises(EngineError, match=r"GroupQueryAttention.*torch engine"):
        onnx_probe.usable_kernels("cpu")


def test_graphs_that_onnxruntime_refuses_are_errors_of_the_engine() -> None:
    g = Graph()
    g.output(g.op("NoSuchOperator", g.input("x", ["n", 2])), "y", ["n", 2])
    with pytest.raises(EngineError, match="NoSuchOperator"):
        g.session(Runtime(1))


def test_failures_while_running_are_errors_of_the_engine() -> None:
    g = Graph()
    g.output(g.op("Reshape", g.input("x", ["n", 2]), g.constant([3, 5], np.int64)), "y", [3, 5])
    session = g.session(Runtime(1))
    bound = session.bind({"x": np.zeros((2, 2), np.float32)}, {"y": np.zeros((3, 5), np.float32)})
    with pytest.raises(EngineError, match="Reshape"):
        bound()
