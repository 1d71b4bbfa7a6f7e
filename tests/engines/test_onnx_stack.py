"""The onnxruntime engine by itself: what runs how often, slots, steps, banks, quantised weights, memory."""

import itertools
import json
import logging
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from driving import forward, prefill
from helpers_onnx import relative, stages, write_quantised
from oracle import Reference

from kvasir_peer.engines import quants
from kvasir_peer.engines.base import (
    LayerStack,
    Rows,
    StackSpec,
    create_bank,
    create_stack,
    estimate_stack,
)
from kvasir_peer.engines.onnx_attention import CHUNK_ROWS, Run, plan
from kvasir_peer.engines.onnx_bank import OnnxBank
from kvasir_peer.engines.onnx_linear import Kernels
from kvasir_peer.errors import EngineError, ModelFileError
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
def test_a_mixed_pass_goes_through_each_linear_once(reference: Get, name: str, parts_per_layer: int) -> None:
    with stages(reference(name).path, [0, -1]) as [stack]:
        before = stack.statistics()
        stack.forward(mixed_rows(), None)
        after = stack.statistics()
    n_layer = 3
    assert after.rows - before.rows == 8
    # One part before the first attention, and one after each (two where experts stand between).
    assert after.part_runs - before.part_runs == 1 + parts_per_layer * n_layer
    assert after.attention_calls - before.attention_calls == 3 * n_layer


@pytest.mark.parametrize("kinds", [{"": "F32"}, {"": "Q4_0"}, {"": "Q4_1"}], ids=["F32", "Q4_0", "Q4_1"])
def test_a_mixed_pass_computes_each_chosen_expert_once(tmp_path: Path, kinds: dict[str, str]) -> None:
    path, _ = write_quantised(tmp_path, "moe", _wide("llama-moe"), kinds)
    chosen: list[int] = []
    with stages(path, [0, -1], precision="fast") as [stack]:
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


# ------------------------------------------------------------------------------------------ slots and rows


def test_writing_again_from_an_earlier_position_rewinds_a_slot(reference: Get) -> None:
    case = reference("gpt-oss")
    with stages(case.path, [0, -1]) as stacks:
        clean = prefill(stacks, case.prompt, slot=1)
        prefill(stacks, case.prompt[::-1], slot=2)
        again = prefill(stacks, case.prompt[17:], slot=1, first=17)
        np.testing.assert_allclose(again, clean[17:], atol=1e-5)
        # Another request takes the slot over: nothing of the old one shows.
        other = prefill(stacks, case.prompt[5:20], slot=2)
        np.testing.assert_allclose(other, prefill(stacks, case.prompt[5:20], slot=3), atol=1e-5)


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_a_row_alone_and_in_a_batch_differ_by_rounding_only(
    tmp_path: Path, reference: Get, precision: str
) -> None:
    path, _ = write_quantised(tmp_path, "batch", _wide("qwen3moe"), {"": "Q4_0"})
    prompt = reference("qwen3moe").prompt
    with stages(path, [0, -1], precision=precision) as stacks:
        for slot in range(4):
            prefill(stacks, prompt[slot : slot + 20], slot=slot)
        alone = np.concatenate(
            [forward(stacks, Rows.of([slot], [20], [slot], [True])).copy() for slot in range(4)]
        )
        together = forward(stacks, Rows.of(range(4), [20] * 4, range(4), [True] * 4))
    # The bounds that docs/engines.md states, in standard deviations of the logits.
    assert np.abs(together - alone).max() < (2e-5 if precision == "exact" else 5e-2) * alone.std()


def test_only_rows_that_want_an_output_get_logits(reference: Get) -> None:
    case = reference("qwen2moe")
    n = len(case.prompt)
    wants = np.zeros(n, bool)
    wants[[3, 30]] = True
    with stages(case.path, [0, -1]) as stacks:
        logits = forward(stacks, Rows.of([0] * n, range(n), case.prompt, wants))
        assert case.distance(np.vstack([case.logits[:3], logits[:1], case.logits[4:]])) < 1e-4
        assert case.distance(np.vstack([case.logits[:30], logits[1:], case.logits[31:]])) < 1e-4
        none = forward(stacks, Rows.of([0] * n, range(n), case.prompt, [False] * n))
        assert none.shape == (0, tiny_models.VOCABULARY)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (rows_of([1] * 129), "129 rows"),
        (Rows.of([4], [0], [1], [True]), "slot 4"),
        (Rows.of([0], [256], [1], [True]), "position 256"),
        (Rows.of([0, 0], [3, 5], [1, 1], [True] * 2), "ascending"),
        (Rows.of([0, 1, 0], [3, 3, 4], [1] * 3, [True] * 3), "not consecutive"),
        (Rows.of([0], [0], [96], [True]), "token 96"),
    ],
)
def test_rows_that_do_not_fit_are_refused(reference: Get, rows: Rows, says: str) -> None:
    with (
        stages(reference("llama").path, [0, -1]) as [stack],
        pytest.raises(EngineError, match=says),
    ):
        stack.forward(rows, None)


def test_a_hidden_state_belongs_to_later_stages(reference: Get) -> None:
    with stages(reference("llama").path, [0, 1, -1]) as [first, last]:
        rows = rows_of([1, 2])
        with pytest.raises(EngineError, match="embed"):
            first.forward(rows, np.zeros((2, 64), np.float32))
        for hidden in (None, np.zeros((1, 64), np.float32), np.zeros((2, 64))):
            with pytest.raises(EngineError, match="hidden state"):
                last.forward(rows, hidden)


# ----------------------------------------------------------------------------------------- experts apart


def drive(stack: LayerStack, rows: Rows, answer: Callable[..., np.ndarray]) -> tuple[np.ndarray, list[int]]:
    """Run a stack by steps, with experts computed by ``answer``; returns the result and the layers asked for."""
    steps = stack.steps(rows, None)
    layers = []
    try:
        work = next(steps)
        while True:
            layers.append(work.layer)
            assert work.ids.dtype == np.int32 and work.weights.dtype == work.x.dtype == np.float32
            work = steps.send(answer(work.layer, work.x, work.ids, work.weights))
    except StopIteration as done:
        return done.value, layers


def banks_of(source: GgufSource, layers: Sequence[int], n_expert: int, precision: str) -> list[OnnxBank]:
    """Banks that hold all experts of some layers together, one of them in two pieces."""
    cuts = [0, 1, 3, n_expert // 2, n_expert]
    pieces = list(itertools.pairwise(cuts))
    return [
        create_bank(
            "onnx",
            source,
            [(layer, a, b) for layer in layers for a, b in held],
            max_rows=64,
            threads=1,
            precision=precision,
        )
        for held in ([pieces[0]], [pieces[2]], [pieces[1], pieces[3]])
    ]


@pytest.mark.parametrize("name", ["llama-moe", "gpt-oss", "deepseek-v3", "glm4moe"])
def test_banks_cut_anywhere_sum_to_the_whole(reference: Get, name: str) -> None:
    case = reference(name)
    layers = [1, 2] if name in ("deepseek-v3", "glm4moe") else [0, 1, 2]
    n_expert = tiny_models.BY_NAME[name].metadata["expert_count"]
    rows = rows_of(case.prompt)
    with GgufSource(case.path) as source, stages(case.path, [0, -1], threads=2) as [stack]:
        banks = banks_of(source, layers, n_expert, "exact")
        by_parts, asked = drive(stack, rows, lambda *work: np.sum([b.compute(*work) for b in banks], axis=0))
        assert asked == layers
        assert case.distance(by_parts) < 1e-4
        local = stack.local_bank()
        assert local is not None and local.memory().total == 0
        by_itself, _ = drive(stack, rows, local.compute)
        np.testing.assert_array_equal(by_itself, stack.forward(rows, None))
        assert case.distance(by_itself) < 1e-4


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "MXFP4"])
@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_quantised_banks_sum_to_the_whole(tmp_path: Path, name: str, kind: str) -> None:
    path, _ = write_quantised(tmp_path, "experts", _wide(name), {"": "F32", "_exps": kind})
    rng = np.random.default_rng(3)
    width = _WIDE["embedding_length"]
    x = rng.standard_normal((40, width)).astype(np.float32)
    ids = np.array([rng.permutation(8)[:3] for _ in range(40)], np.int32)
    weights = rng.random((40, 3)).astype(np.float32)
    with GgufSource(path) as source:
        whole = create_bank("onnx", source, [(1, 0, 8)], max_rows=64, threads=2)
        expected = whole.compute(1, x, ids, weights)
        parts = banks_of(source, [1], 8, "fast")
        assert relative(np.sum([p.compute(1, x, ids, weights) for p in parts], axis=0), expected) < 1e-5
        # Rows whose experts are all elsewhere get nothing.
        assert not parts[0].compute(1, x[:1], np.array([[1, 2, 3]], np.int32), weights[:1]).any()


def test_a_bank_refuses_what_it_does_not_hold(reference: Get) -> None:
    with GgufSource(reference("deepseek-v3").path) as source:
        bank = create_bank("onnx", source, [(1, 0, 4)], max_rows=2, threads=1)
        moe = bank.shape.layers[1].moe
        assert moe is not None
        used = moe.n_used
        x, ids, weights = (
            np.ones((1, 64), np.float32),
            np.zeros((1, 2), np.int32),
            np.ones((1, 2), np.float32),
        )
        assert bank.compute(1, x, ids, weights).shape == (1, 64)
        assert not bank.compute(1, x, ids + 9, weights).any()
        for layer, a, b, c, says in (
            (2, x, ids, weights, "layer 2"),
            (1, x[:, :5], ids, weights, "rows of shape"),
            (1, np.ones((3, 64), np.float32), ids, weights, "1 to 2"),
            (1, x, ids[:, :1], weights, "do not fit"),
            (
                1,
                x,
                np.zeros((1, used + 1), np.int32),
                np.ones((1, used + 1), np.float32),
                f"model uses {used}",
            ),
            (1, x, ids + 16, weights, "expert 16"),
            (1, x, ids - 1, weights, "expert -1"),
        ):
            with pytest.raises(EngineError, match=says):
                bank.compute(layer, a, b, c)
        for ranges, error in (
            ([], EngineError),
            ([(1, 3, 17)], EngineError),
            ([(1, 3, 3)], EngineError),
            ([(0, 0, 1)], ModelFileError),
            ([(9, 0, 1)], ModelFileError),
        ):
            with pytest.raises(error):
                create_bank("onnx", source, ranges, max_rows=2)
        # Ranges that overlap are one.
        joined = create_bank("onnx", source, [(1, 2, 5), (1, 0, 4)], max_rows=2, threads=1)
        np.testing.assert_allclose(
            joined.compute(1, x, ids + 2, weights), bank.compute(1, x, ids + 2, weights), rtol=1e-6
        )


def test_a_dense_stack_has_no_bank(reference: Get) -> None:
    with stages(reference("llama").path, [0, -1]) as [stack]:
        assert stack.local_bank() is None
        result, layers = drive(stack, rows_of([1, 2]), lambda *work: work[1])
        assert layers == []
        np.testing.assert_array_equal(result, stack.forward(rows_of([1, 2]), None))


# -------------------------------------------------------------------------------------- quantised weights

# Wide enough for the K-quants' blocks of 256.
_WIDE = {
    "embedding_length": 256,
    "feed_forward_length": 512,
    "expert_feed_forward_length": 256,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "rope.dimension_count": 64,
    "block_count": 2,
}


def _wide(name: str) -> tiny_models.TinyModel:
    model = tiny_models.BY_NAME[name]
    return replace(model, metadata=model.metadata | _WIDE)


@pytest.mark.parametrize("kind", quants.BY_NAME)
def test_a_layer_of_every_type_stays_within_its_error(tmp_path: Path, kind: str) -> None:
    """Two layers with router and experts, against the same weights as float32.

    Exact differs by the order of sums; fast rounds activations to int8, about 1 % in each product.
    """
    path, plain = write_quantised(tmp_path, kind, _wide("qwen3moe"), {"": kind})
    x = np.random.default_rng(0).standard_normal((9, 256)).astype(np.float32)
    rows = rows_of(range(9))
    with stages(plain, [1, 2]) as [stack]:
        expected = stack.forward(rows, x) - x if stack.spec.end < 2 else stack.forward(rows, x)
        routes = next(stack.steps(rows, x)).ids
    with stages(path, [1, 2]) as [stack]:
        assert relative(stack.forward(rows, x), expected) < 2e-5
    with stages(path, [1, 2], precision="fast") as [stack]:
        # A row whose experts are chosen otherwise for the rounding says nothing about the products.
        same = (np.sort(next(stack.steps(rows, x)).ids) == np.sort(routes)).all(1)
        assert same.sum() >= 6
        error = relative(stack.forward(rows, x)[same], expected[same])
        assert error < 0.03
        if quants.BY_NAME[kind].bits:
            assert error > 1e-4, "activations were not rounded; is this the fast path?"


@pytest.mark.parametrize("kind", [k for k, t in quants.BY_NAME.items() if t.bits])
def test_an_expert_of_every_type_stays_within_its_error(tmp_path: Path, kind: str) -> None:
    path, plain = write_quantised(tmp_path, kind, _wide("qwen3moe"), {"": "F32", "_exps": kind})
    x = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    ids, weights = np.full((16, 1), 5, np.int32), np.ones((16, 1), np.float32)
    results = {}
    for file, precision in ((plain, "exact"), (path, "exact"), (path, "fast")):
        with GgufSource(file) as source:
            bank = create_bank("onnx", source, [(0, 5, 6)], max_rows=16, threads=1, precision=precision)
            results[file, precision] = bank.compute(0, x, ids, weights)
    assert relative(results[path, "exact"], results[plain, "exact"]) < 5e-6
    assert 1e-3 < relative(results[path, "fast"], results[plain, "exact"]) < 0.02


def test_types_may_be_mixed_in_a_layer(tmp_path: Path) -> None:
    """As in Q4_K_M: values and some down projections have more bits, so q, k and v are apart."""
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "attn_q": "Q8_0", "": "Q4_K"}
    path, plain = write_quantised(tmp_path, "mixed", _wide("llama"), kinds)
    prompt = list(range(3, 40))
    with stages(plain, [0, -1]) as stacks:
        expected = prefill(stacks, prompt)
    with stages(path, [0, 1, -1]) as stacks:
        assert np.abs(prefill(stacks, prompt, chunk=10) - expected).max() < 5e-5 * expected.std()
    with stages(path, [0, -1], precision="fast", threads=2) as stacks:
        assert relative(prefill(stacks, prompt), expected) < 0.08


@pytest.mark.parametrize("missing", ["codes4", "codes8", "experts"])
def test_kernels_that_fail_are_gone_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    kinds = {"attn": "Q8_0", "": "Q4_0"}
    path, plain = write_quantised(tmp_path, "kernels", _wide("qwen3moe"), kinds)
    prompt = list(range(3, 20))
    with stages(plain, [0, -1]) as stacks:
        expected = prefill(stacks, prompt)
    kernels = replace(Kernels(), **{missing: False})
    monkeypatch.setattr("kvasir_peer.engines.onnx_engine.usable_kernels", lambda device: kernels)
    with stages(path, [0, -1], precision="fast") as stacks:
        assert relative(prefill(stacks, prompt), expected) < 0.2


# ----------------------------------------------------------------------------------------------- loading


def test_loading_reports_its_progress_and_what_is_dequantised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = write_quantised(tmp_path, "progress", _wide("qwen3moe"), {"attn_q": "F16", "": "Q4_0"})
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


def test_a_device_that_is_not_there_is_named(reference: Get) -> None:
    with (
        GgufSource(reference("llama").path) as source,
        pytest.raises(EngineError, match=r"abacus.*CPUExecutionProvider"),
    ):
        create_stack("onnx", source, StackSpec(0, 3, 1, 64, 16, device="abacus"))


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
probe()
source = GgufSource(path)
before = anonymous()
spec = StackSpec(first, end, 2, 512, 128, precision=precision, threads=2)
stack = create_stack("onnx", source, spec)
hidden = np.zeros((128, stack.shape.n_embd), np.float32) if first else None
for slot in range(2):
    for at in range(0, 512, 128):
        rows = Rows.of([slot] * 128, range(at, at + 128), [5] * 128, [False] * 127 + [True])
        stack.forward(rows, hidden)
gc.collect()
print(json.dumps([stack.memory().total, anonymous() - before]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(
    ("first", "end", "precision"), [(0, 30, "fast"), (0, 10, "exact"), (10, 20, "fast")], ids=str
)
def test_the_estimate_is_what_is_taken(smollm2_path: Path, first: int, end: int, precision: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(smollm2_path), str(first), str(end), precision],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    estimate, taken = json.loads(done.stdout)
    assert taken == pytest.approx(estimate, rel=0.1)


def test_the_estimate_needs_the_header_only(smollm2_path: Path) -> None:
    with GgufSource(smollm2_path) as source:
        spec = StackSpec(0, 30, 4, 1024, 64)
        estimate = estimate_stack("onnx", source.metadata, source.tensors, spec)
        wider = estimate_stack("onnx", source.metadata, source.tensors, replace(spec, n_slots=8))
    assert estimate.kv == 2 * 30 * 4 * 1024 * 3 * 64 * 4 and wider.kv == 2 * estimate.kv
    assert math.isclose(estimate.total, estimate.weights + estimate.kv + estimate.workspace)
