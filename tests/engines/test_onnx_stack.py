"""The onnxruntime engine by itself: what runs how often, quantised weights, loading, memory."""

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from driving import prefill
from kinds import ONNX, stages
from oracle import Reference
from quantised import relative, wide, write_quantised

from kvasir_peer.engines import quants
from kvasir_peer.engines.base import BankSpec, Rows, StackSpec, create_bank, create_stack, estimate_stack
from kvasir_peer.engines.onnx_attention import CHUNK_ROWS, Run, plan
from kvasir_peer.engines.onnx_bank import OnnxBank
from kvasir_peer.engines.onnx_containers import Kernels
from kvasir_peer.models.sources import GgufSource

Get = Callable[[str], Reference]


def rows_of(tokens: Sequence[int], slot: int = 0, first: int = 0) -> Rows:
    n = len(tokens)
    return Rows.of([slot] * n, range(first, first + n), tokens, [True] * n)


def mixed_rows() -> Rows:
    """Decodes of slots 0 and 1, a chunk of slot 3, a decode of slot 2."""
    slots = [0, 1, 3, 3, 3, 3, 3, 2]
    return Rows.of(slots, [9, 5, 0, 1, 2, 3, 4, 7], range(8), [True, True, *[False] * 5, True])


# ------------------------------------------------------------------------------------ what runs how often


def test_rows_are_cut_into_the_runs_that_attention_takes() -> None:
    assert plan(mixed_rows()) == [Run(0, 2, 1, 0), Run(2, 1, 5, 3), Run(7, 1, 1, 2)]
    # Slots that are no neighbours, or come in another order, are runs of their own.
    assert plan(Rows.of([0, 2, 1], [4, 4, 4], [1] * 3, [True] * 3)) == [
        Run(0, 1, 1, 0),
        Run(1, 1, 1, 2),
        Run(2, 1, 1, 1),
    ]
    long = rows_of([1] * (CHUNK_ROWS + 3), slot=2)
    assert plan(long) == [Run(0, 1, CHUNK_ROWS, 2), Run(CHUNK_ROWS, 1, 3, 2)]


@pytest.mark.parametrize(("name", "parts_per_layer"), [("qwen3", 1), ("qwen3moe", 2)])
def test_a_mixed_pass_goes_through_each_linear_once(
    reference: Get, products: str, name: str, parts_per_layer: int
) -> None:
    own_kernels = products == "own"
    with stages(ONNX, reference(name).path, [0, -1]) as [stack]:
        before = stack.statistics()
        stack.forward(mixed_rows(), None)
        after = stack.statistics()
    n_layer = 3
    assert after.rows - before.rows == 8
    if own_kernels and name == "qwen3":
        assert after.part_runs - before.part_runs == 1  # all layers in one graph
    else:
        # One part before the first attention, and one after each (two where experts stand between).
        assert after.part_runs - before.part_runs == 1 + parts_per_layer * n_layer
    # Our own kernel takes all rows at once; onnxruntime's takes the two decodes of neighbours, the chunk, the last.
    calls = 1 if own_kernels else 3
    assert after.attention_calls - before.attention_calls == calls * n_layer


@pytest.mark.parametrize("kinds", [{"": "F32"}, {"": "Q4_0"}, {"": "Q4_1"}], ids=["F32", "Q4_0", "Q4_1"])
def test_a_mixed_pass_computes_each_chosen_expert_once(
    tmp_path: Path, products: str, kinds: dict[str, str]
) -> None:
    path, _ = write_quantised(tmp_path, "moe", wide("llama-moe"), kinds)
    chosen: list[int] = []
    with stages(ONNX, path, [0, -1], precision="fast") as [stack]:
        bank = stack.local_bank()
        assert isinstance(bank, OnnxBank)
        steps = stack.steps(mixed_rows(), None)
        work = next(steps)
        with pytest.raises(StopIteration):
            while True:
                chosen.append(len(np.unique(work.ids)))
                assert len(work.x) == (
                    8 if work.layer == 0 else 3
                )  # at the end only rows that want an output
                work = steps.send(bank.compute(work.layer, work.x, work.ids, work.weights))
        statistics = bank.statistics()
    assert len(chosen) == 2
    assert statistics.calls == 2 and statistics.expert_runs == sum(chosen)
    assert statistics.expert_rows == 3 * (8 + 3)


# -------------------------------------------------------------------------------------- quantised weights


@pytest.mark.parametrize("kind", quants.BY_NAME)
def test_a_layer_of_every_type_stays_within_its_error(tmp_path: Path, products: str, kind: str) -> None:
    """A layer with router and experts, against the same weights as float32; the bounds that docs/engines.md states.

    Exact differs by the order of sums; fast rounds activations to int8.
    """
    path, plain = write_quantised(tmp_path, kind, wide("qwen3moe"), {"": kind})
    x = np.random.default_rng(0).standard_normal((9, 256)).astype(np.float32)
    rows = rows_of(range(9))
    with stages(ONNX, plain, [1, 2]) as [stack]:
        expected = stack.forward(rows, x) - x if stack.spec.end < 2 else stack.forward(rows, x)
        routes = next(stack.steps(rows, x)).ids
    with stages(ONNX, path, [1, 2]) as [stack]:
        assert relative(stack.forward(rows, x), expected) < 2e-6
    with stages(ONNX, path, [1, 2], precision="fast") as [stack]:
        # A row whose experts are chosen otherwise for the rounding says nothing about the products.
        same = (np.sort(next(stack.steps(rows, x)).ids) == np.sort(routes)).all(1)
        assert same.sum() >= 6
        error = relative(stack.forward(rows, x)[same], expected[same])
        assert error < 0.02
        if quants.BY_NAME[kind].bits:
            assert error > 1e-4, "activations were not rounded; is this the fast path?"


@pytest.mark.parametrize("kind", [k for k, t in quants.BY_NAME.items() if t.bits])
def test_an_expert_of_every_type_stays_within_its_error(tmp_path: Path, products: str, kind: str) -> None:
    """The bounds that docs/engines.md states."""
    path, plain = write_quantised(tmp_path, kind, wide("qwen3moe"), {"": "F32", "_exps": kind})
    x = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    ids, weights = np.full((16, 1), 5, np.int32), np.ones((16, 1), np.float32)
    results = {}
    for file, precision in ((plain, "exact"), (path, "exact"), (path, "fast")):
        with GgufSource(file) as source:
            bank = create_bank("onnx", source, BankSpec(((0, 5, 6),), 16, precision, 1))
            results[file, precision] = bank.compute(0, x, ids, weights)
    assert relative(results[path, "exact"], results[plain, "exact"]) < 2e-6
    assert 5e-3 < relative(results[path, "fast"], results[plain, "exact"]) < 0.015


def test_types_may_be_mixed_in_a_layer(tmp_path: Path, products: str) -> None:
    """As in Q4_K_M: values and some down projections have more bits, so q, k and v are apart."""
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "attn_q": "Q8_0", "": "Q4_K"}
    path, plain = write_quantised(tmp_path, "mixed", wide("llama"), kinds)
    prompt = list(range(3, 40))
    with stages(ONNX, plain, [0, -1]) as stacks:
        expected = prefill(stacks, prompt)
    with stages(ONNX, path, [0, 1, -1]) as stacks:
        assert np.abs(prefill(stacks, prompt, chunk=10) - expected).max() < 2e-5 * expected.std()
    with stages(ONNX, path, [0, -1], precision="fast", threads=2) as stacks:
        assert relative(prefill(stacks, prompt), expected) < 0.03


@pytest.mark.parametrize("missing", ["codes4", "codes8", "experts"])
def test_kernels_that_fail_are_gone_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    kinds = {"attn": "Q8_0", "": "Q4_0"}
    path, plain = write_quantised(tmp_path, "kernels", wide("qwen3moe"), kinds)
    prompt = list(range(3, 20))
    with stages(ONNX, plain, [0, -1]) as stacks:
        expected = prefill(stacks, prompt)
    kernels = replace(Kernels(), **{missing: False})
    monkeypatch.setattr("kvasir_peer.engines.onnx_engine.usable_kernels", lambda device: kernels)
    with stages(ONNX, path, [0, -1], precision="fast") as stacks:
        assert relative(prefill(stacks, prompt), expected) < 0.2


# ----------------------------------------------------------------------------------------------- loading


def test_loading_reports_its_progress_and_what_is_dequantised(
    tmp_path: Path, products: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = write_quantised(tmp_path, "progress", wide("qwen3moe"), {"attn_q": "F16", "": "Q4_0"})
    seen: list[tuple[int, int]] = []
    with GgufSource(path) as source, caplog.at_level(logging.INFO, "kvasir_peer.engines"):
        spec = StackSpec(1, 2, 1, 64, 16, threads=1)
        create_stack("onnx", source, spec, progress=lambda done, total: seen.append((done, total)))
        tail = ("blk.1.", "output")
        total = sum(info.n_bytes for name, info in source.tensors.items() if name.startswith(tail))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)
    # 4 heads of 64, 256 wide: half a megabyte as float16.
    assert "1 tensors of type F16 are dequantised to float32: 0.3 MB instead of 0.1 MB" in caplog.text


_MEASURE = """
import gc, json, sys
import numpy as np
from kvasir_peer.engines.base import Rows, StackSpec, create_stack
from kvasir_peer.engines.onnx_probe import probe
from kvasir_peer.models.sources import GgufSource

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

path, first, end, precision = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
growing = sys.argv[5:] == ["growing"]
probe()
source = GgufSource(path)
before = anonymous()
spec = StackSpec(first, end, 2, 512, 128, precision=precision, threads=2)
stack = create_stack("onnx", source, spec)
hidden = np.zeros((128, stack.shape.n_embd), np.float32) if first else None
if growing:
    passes = [(0, 0, n) for n in range(2, 129, 2)]
else:
    passes = [(slot, at, 128) for slot in range(2) for at in range(0, 512, 128)]
for slot, at, n in passes:
    rows = Rows.of([slot] * n, range(at, at + n), [5] * n, [False] * (n - 1) + [True])
    stack.forward(rows, None if hidden is None else hidden[:n])
gc.collect()
print(json.dumps([stack.memory().total, anonymous() - before]))
"""


def _measure(path: Path, first: int, end: int, precision: str, own: str, *more: str) -> tuple[int, int]:
    """Return what a stack says that it takes, and what it takes, in bytes, in a process of its own.

    ``own`` is "1" with the kernels of our own, and "0" without.
    """
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(path), str(first), str(end), precision, *more],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"KVASIR_ENGINE_KERNELS": own},
    )
    estimate, taken = json.loads(done.stdout)
    return estimate, taken


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("own", ["1", "0"])
@pytest.mark.parametrize(
    ("first", "end", "precision"), [(0, 30, "fast"), (0, 10, "exact"), (10, 20, "fast")], ids=str
)
def test_the_estimate_is_what_is_taken(
    smollm2_path: Path, first: int, end: int, precision: str, own: str
) -> None:
    estimate, taken = _measure(smollm2_path, first, end, precision, own)
    assert taken == pytest.approx(estimate, rel=0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("own", ["1", "0"])
def test_passes_that_grow_take_no_more_than_the_longest(smollm2_path: Path, own: str) -> None:
    """Each longer pass uses again what the shorter ones had."""
    estimate, taken = _measure(smollm2_path, 10, 20, "fast", own, "growing")
    assert taken < 1.1 * estimate


def test_the_estimate_needs_the_header_only(smollm2_path: Path) -> None:
    with GgufSource(smollm2_path) as source:
        spec = StackSpec(0, 30, 4, 1024, 64)
        estimate = estimate_stack("onnx", source.metadata, source.tensors, spec)
        wider = estimate_stack("onnx", source.metadata, source.tensors, replace(spec, n_slots=8))
    assert estimate.kv == 2 * 30 * 4 * 1024 * 3 * 64 * 4 and wider.kv == 2 * estimate.kv
    assert math.isclose(estimate.total, estimate.weights + estimate.kv + estimate.workspace)
