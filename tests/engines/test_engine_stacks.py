"""What every engine keeps to: slots and rows, experts computed elsewhere, and what is refused."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from driving import forward, prefill
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kinds import GATHERS, GROUPS, ONNX, SORTS, TORCH, Kind, ids, stages
from oracle import Reference
from quantised import WIDE, relative, wide, write_quantised

from kvasir_peer.engines.base import (
    BankSpec,
    ExpertBank,
    LayerStack,
    Precision,
    Rows,
    StackSpec,
    create_stack,
)
from kvasir_peer.errors import EngineError, ModelFileError, UsageError
from kvasir_peer.models.sources import GgufSource

Get = Callable[[str], Reference]
KINDS = [ONNX, TORCH]
BANK_KINDS = [ONNX, SORTS, GATHERS, GROUPS]
both = pytest.mark.parametrize("kind", KINDS, ids=ids(KINDS))


def rows_of(tokens: Sequence[int], slot: int = 0, first: int = 0) -> Rows:
    n = len(tokens)
    return Rows.of([slot] * n, range(first, first + n), tokens, [True] * n)


# ------------------------------------------------------------------------------------------ slots and rows


@both
def test_writing_again_from_an_earlier_position_rewinds_a_slot(reference: Get, kind: Kind) -> None:
    case = reference("gpt-oss")
    with stages(kind, case.path, [0, -1]) as stacks:
        clean = prefill(stacks, case.prompt, slot=1)
        prefill(stacks, case.prompt[::-1], slot=2)
        again = prefill(stacks, case.prompt[17:], slot=1, first=17)
        np.testing.assert_allclose(again, clean[17:], atol=1e-5)
        # Another request takes the slot over: nothing of the old one shows.
        other = prefill(stacks, case.prompt[5:20], slot=2)
        np.testing.assert_allclose(other, prefill(stacks, case.prompt[5:20], slot=3), atol=1e-5)


def alone_and_together(
    kind: Kind, path: Path, prompt: Sequence[int], precision: Precision
) -> tuple[np.ndarray, np.ndarray]:
    """Return logits of three decodes and a chunk, each as a pass of its own and all in one pass."""
    with stages(kind, path, [0, -1], precision=precision) as stacks:
        for slot in range(4):
            prefill(stacks, prompt[slot : slot + 20], slot=slot)
        alone = [forward(stacks, Rows.of([slot], [20], [slot], [True])).copy() for slot in range(3)]
        alone.append(prefill(stacks, prompt[:9], slot=3, first=20))
        slots = [0, 1, 2, *[3] * 9]
        positions = [20, 20, 20, *range(20, 29)]
        together = forward(stacks, Rows.of(slots, positions, [0, 1, 2, *prompt[:9]], [True] * 12))
    return np.concatenate(alone), together


@pytest.mark.parametrize("kind", [TORCH, SORTS], ids=ids([TORCH, SORTS]))
def test_a_row_alone_and_in_a_batch_differ_by_rounding_only(
    tmp_path: Path, reference: Get, kind: Kind
) -> None:
    """The bound that docs/engines.md states, in standard deviations of the logits."""
    path, _ = write_quantised(tmp_path, "batch", wide("qwen3moe"), {"": "Q4_0"})
    alone, together = alone_and_together(kind, path, reference("qwen3moe").prompt, "exact")
    assert np.abs(together - alone).max() < 2e-5 * together.std()


@pytest.mark.parametrize(("precision", "bound"), [("exact", 2e-5), ("fast", 5e-2)])
@pytest.mark.parametrize(("name", "quantisation"), [("llama", "Q4_K"), ("qwen3moe", "Q4_0")])
def test_a_row_alone_and_in_a_batch_get_the_same_from_our_own_kernels(
    tmp_path: Path,
    reference: Get,
    products: str,
    name: str,
    quantisation: str,
    precision: Precision,
    bound: float,
) -> None:
    """To the bit; from onnxruntime's within the bounds that docs/engines.md states."""
    path, _ = write_quantised(tmp_path, "batch", wide(name), {"": quantisation})
    alone, together = alone_and_together(ONNX, path, reference(name).prompt, precision)
    if products == "own":
        np.testing.assert_array_equal(together, alone)
    assert np.abs(together - alone).max() < bound * together.std()


@both
def test_only_rows_that_want_an_output_get_logits(reference: Get, kind: Kind) -> None:
    case = reference("qwen2moe")
    n = len(case.prompt)
    wants = np.zeros(n, bool)
    wants[[3, 30]] = True
    with stages(kind, case.path, [0, -1]) as stacks:
        logits = forward(stacks, Rows.of([0] * n, range(n), case.prompt, wants))
        assert logits.shape == (2, tiny_models.VOCABULARY)
        assert case.distance(np.vstack([case.logits[:3], logits[:1], case.logits[4:]])) < 1e-4
        assert case.distance(np.vstack([case.logits[:30], logits[1:], case.logits[31:]])) < 1e-4
        none = forward(stacks, Rows.of([0] * n, range(n), case.prompt, [False] * n))
        assert none.shape == (0, tiny_models.VOCABULARY)


@both
def test_rows_that_do_not_fit_are_refused(reference: Get, kind: Kind) -> None:
    with stages(kind, reference("llama").path, [0, -1]) as [stack]:
        for rows, says in (
            (rows_of([1] * 129), "129 rows"),
            (Rows.of([4], [0], [1], [True]), "slot 4"),
            (Rows.of([0], [256], [1], [True]), "position 256"),
            (Rows.of([0, 0], [3, 5], [1, 1], [True] * 2), "ascending"),
            (Rows.of([0, 1, 0], [3, 3, 4], [1] * 3, [True] * 3), "not consecutive"),
            (Rows.of([0], [0], [96], [True]), "token 96"),
            (Rows.of([0], [-1], [1], [True]), "position -1"),
            (Rows.of([], [], [], []), "0 rows"),
        ):
            with pytest.raises(EngineError, match=says):
                stack.forward(rows, None)


@both
def test_a_hidden_state_belongs_to_later_stages(reference: Get, kind: Kind) -> None:
    with stages(kind, reference("llama").path, [0, 1, -1]) as [first, last]:
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


Ranges = Sequence[tuple[int, int]]


def bank_of(
    kind: Kind, source: GgufSource, layers: Sequence[int], ranges: Ranges, precision: Precision = "exact"
) -> ExpertBank:
    """A bank of the same ranges of some layers."""
    held = tuple((layer, a, b) for layer in layers for a, b in ranges)
    return kind.bank(source, BankSpec(held, 64, precision, threads=1))


def cut(n_expert: int) -> list[Ranges]:
    """Ranges for three banks that hold all experts together, one of them in two pieces."""
    pieces = list(itertools.pairwise([0, 1, 3, n_expert // 2, n_expert]))
    return [[pieces[0]], [pieces[2]], [pieces[1], pieces[3]]]


@pytest.mark.parametrize("kind", BANK_KINDS, ids=ids(BANK_KINDS))
@pytest.mark.parametrize("name", ["llama-moe", "gpt-oss", "deepseek-v3", "glm4moe"])
def test_banks_cut_anywhere_sum_to_the_whole(reference: Get, name: str, kind: Kind) -> None:
    case = reference(name)
    layers = [1, 2] if name in ("deepseek-v3", "glm4moe") else [0, 1, 2]
    n_expert = tiny_models.BY_NAME[name].metadata["expert_count"]
    rows = rows_of(case.prompt)
    with GgufSource(case.path) as source, stages(kind, case.path, [0, -1], threads=2) as [stack]:
        banks = [bank_of(kind, source, layers, ranges) for ranges in cut(n_expert)]
        by_parts, asked = drive(stack, rows, lambda *work: np.sum([b.compute(*work) for b in banks], axis=0))
        assert asked == layers
        assert case.distance(by_parts) < 1e-4
        local = stack.local_bank()
        assert local is not None and local.memory().total == 0
        by_itself, _ = drive(stack, rows, local.compute)
        np.testing.assert_array_equal(by_itself, stack.forward(rows, None))
        assert case.distance(by_itself) < 1e-4


@pytest.mark.parametrize("kind", [ONNX, SORTS], ids=ids([ONNX, SORTS]))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_banks_of_any_ranges_sum_to_the_whole(reference: Get, kind: Kind, data: st.DataObject) -> None:
    n_expert = tiny_models.BY_NAME["llama-moe"].metadata["expert_count"]
    borders = sorted(data.draw(st.sets(st.integers(1, n_expert - 1))))
    pieces = list(itertools.pairwise([0, *borders, n_expert]))
    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(pieces), max_size=len(pieces)))
    rng = np.random.default_rng(1)
    x = rng.standard_normal((6, 64)).astype(np.float32)
    chosen = np.array([rng.permutation(n_expert)[:3] for _ in range(6)], np.int32)
    weights = rng.random((6, 3)).astype(np.float32)
    work = (1, x, chosen, weights)
    with GgufSource(reference("llama-moe").path) as source:
        whole = bank_of(kind, source, [1], [(0, n_expert)]).compute(*work)
        total = np.zeros_like(whole)
        for owner in set(owners):
            ranges = [piece for piece, at in zip(pieces, owners, strict=True) if at == owner]
            total += bank_of(kind, source, [1], ranges).compute(*work)
    assert relative(total, whole) < 1e-6


@pytest.mark.parametrize("quantisation", ["Q4_0", "Q4_K", "MXFP4"])
@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_quantised_banks_sum_to_the_whole(
    tmp_path: Path, products: str, name: str, quantisation: str
) -> None:
    path, _ = write_quantised(tmp_path, "experts", wide(name), {"": "F32", "_exps": quantisation})
    rng = np.random.default_rng(3)
    x = rng.standard_normal((40, WIDE["embedding_length"])).astype(np.float32)
    chosen = np.array([rng.permutation(8)[:3] for _ in range(40)], np.int32)
    weights = rng.random((40, 3)).astype(np.float32)
    with GgufSource(path) as source:
        expected = bank_of(ONNX, source, [1], [(0, 8)], "fast").compute(1, x, chosen, weights)
        parts = [bank_of(ONNX, source, [1], ranges, "fast") for ranges in cut(8)]
        assert relative(np.sum([p.compute(1, x, chosen, weights) for p in parts], axis=0), expected) < 1e-6
        # Rows whose experts are all elsewhere get nothing.
        assert not parts[0].compute(1, x[:1], np.array([[1, 2, 3]], np.int32), weights[:1]).any()


@both
def test_a_bank_refuses_what_it_does_not_hold(reference: Get, kind: Kind) -> None:
    with GgufSource(reference("deepseek-v3").path) as source:
        bank = kind.bank(source, BankSpec(((1, 0, 4),), 2, threads=1))
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
        many = np.zeros((1, used + 1), np.int32)
        for layer, a, b, c, says in (
            (2, x, ids, weights, "layer 2"),
            (-1, x, ids, weights, "layer -1"),
            (1, x[:, :5], ids, weights, "rows of shape"),
            (1, x.astype(np.float64), ids, weights, "float64"),
            (1, np.ones((3, 64), np.float32), ids, weights, "1 to 2"),
            (1, x, ids[:, :1], weights, "do not fit"),
            (1, x, many, many.astype(np.float32), f"model uses {used}"),
            (1, x, ids + 16, weights, "expert 16"),
            (1, x, ids - 1, weights, "expert -1"),
        ):
            with pytest.raises(EngineError, match=says):
                bank.compute(layer, a, b, c)
        for ranges, error in (
            ((), EngineError),
            (((1, 3, 17),), EngineError),
            (((1, 3, 3),), EngineError),
            (((1, -1, 3),), EngineError),
            (((0, 0, 1),), ModelFileError),
            (((9, 0, 1),), ModelFileError),
        ):
            with pytest.raises(error):
                kind.bank(source, BankSpec(ranges, 2))
        # Ranges that overlap are one.
        joined = kind.bank(source, BankSpec(((1, 2, 5), (1, 0, 4)), 2, threads=1))
        np.testing.assert_allclose(
            joined.compute(1, x, ids + 2, weights), bank.compute(1, x, ids + 2, weights), rtol=1e-6
        )


@both
def test_a_dense_stack_has_no_bank(reference: Get, kind: Kind) -> None:
    with stages(kind, reference("llama").path, [0, -1]) as [stack]:
        assert stack.local_bank() is None
        result, layers = drive(stack, rows_of([1, 2]), lambda *work: work[1])
        assert layers == []
        np.testing.assert_array_equal(result, stack.forward(rows_of([1, 2]), None))


# ------------------------------------------------------------------------------------------------- loading


@both
def test_loading_reports_its_progress(reference: Get, kind: Kind) -> None:
    with GgufSource(reference("gpt-oss").path) as source:
        seen: list[tuple[int, int]] = []
        create_stack(
            kind.engine,
            source,
            StackSpec(1, 2, 1, 64, 16, threads=1),
            progress=lambda done, total: seen.append((done, total)),
        )
        total = sum(info.n_bytes for name, info in source.tensors.items() if name.startswith("blk.1."))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)


@both
def test_loading_a_whole_model_reports_all_of_it(reference: Get, kind: Kind) -> None:
    """The embedding too, which is a matrix of its own where the output is another one."""
    with GgufSource(reference("qwen3").path) as source:
        seen: list[tuple[int, int]] = []
        spec = StackSpec(0, 3, 1, 64, 16, threads=1)
        create_stack(kind.engine, source, spec, progress=lambda done, total: seen.append((done, total)))
        total = sum(info.n_bytes for info in source.tensors.values())
    assert seen[-1] == (total, total)


class Slice:
    """Some tensors of a source, as a stage's store has them."""

    def __init__(self, source: GgufSource, names: Sequence[str]) -> None:
        self._source = source
        self.metadata = source.metadata
        self.tensors = {name: source.tensors[name] for name in names}

    def read(self, name: str) -> np.ndarray:
        assert name in self.tensors
        return self._source.read(name)

    def read_experts(self, name: str, lo: int, hi: int) -> np.ndarray:
        assert name in self.tensors
        return self._source.read_experts(name, lo, hi)

    def release(self) -> None:
        pass


@both
def test_a_stage_needs_its_own_tensors_only(reference: Get, kind: Kind) -> None:
    case = reference("gemma3")
    with GgufSource(case.path) as source, stages(kind, case.path, [0, -1]) as whole:
        expected = prefill(whole, case.prompt)
        spec = StackSpec(0, 7, 1, 64, 64, precision="exact", threads=1)
        parts = []
        for first, end in ((0, 3), (3, 5), (5, 7)):
            wanted = {f"blk.{i}." for i in range(first, end)}
            names = [n for n in source.tensors if any(n.startswith(w) for w in wanted)]
            names += ["token_embd.weight"] if first == 0 or end == 7 else []
            names += ["output_norm.weight"] if end == 7 else []
            parts.append(kind.stack(Slice(source, names), replaced(spec, first, end)))
        np.testing.assert_allclose(prefill(parts, case.prompt), expected, atol=1e-5)
        with pytest.raises(ModelFileError, match=r"blk\.3\.attn_norm\.weight is missing"):
            kind.stack(Slice(source, names), replaced(spec, 3, 4))
        with pytest.raises(ModelFileError, match="7 layers"):
            kind.stack(source, replaced(spec, 0, 8))


def replaced(spec: StackSpec, first: int, end: int) -> StackSpec:
    return StackSpec(
        first, end, spec.n_slots, spec.context_length, spec.max_rows, spec.precision, spec.threads
    )


def test_an_engine_or_device_that_is_not_there_is_named(reference: Get) -> None:
    with GgufSource(reference("llama").path) as source:
        for engine, device, error, says in (
            ("abacus", "cpu", UsageError, "abacus"),
            ("onnx", "abacus", EngineError, r"abacus.*CPUExecutionProvider"),
            ("torch", "cuda:77", EngineError, "cuda:77"),
        ):
            with pytest.raises(error, match=says):
                create_stack(engine, source, StackSpec(0, 3, 1, 64, 16, device=device))
