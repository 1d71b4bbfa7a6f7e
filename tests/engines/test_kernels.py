"""The C kernels: what they compute, for every quant type, against numpy."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_operators import KINDS, NAMES, Experts, all_blocks, linear, rounded, same_bits
from random_blocks import random_blocks

from kvasir_peer.engines import panels, quants
from kvasir_peer.engines.kernels.library import Library
from kvasir_peer.engines.onnx_graph import Graph, Runtime
from kvasir_peer.engines.quants import QuantType
from kvasir_peer.errors import EngineError, ModelFileError

# Numbers of rows for all versions of the kernels, alone and one after another.
ROWS = (1, 2, 3, 4, 5, 7, 8, 13, 15, 70)
Q8 = quants.BY_NAME["Q8_0"]

each_kind = pytest.mark.parametrize("kind", KINDS, ids=NAMES)


def normal(n: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, columns)).astype(np.float32)


def tolerance(kind: QuantType, raw: np.ndarray, x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """How far sums of floats may be off, [n, rows]: some units in the last place of the sum of all sizes."""
    codes = quants.unpack(raw, kind.id, (rows, columns))
    sizes = np.abs(quants.dequantize(raw, kind.id, (rows, columns)).astype(np.float64))
    if codes.offsets is not None:
        # Scale times code and offset may be far larger than what is left of them.
        sizes += 2 * np.repeat(np.abs(codes.offsets.astype(np.float64)), codes.group, axis=-1)
    return np.abs(x).astype(np.float64) @ sizes.T * 2.0**-21 + 1e-38


# ------------------------------------------------------------------------------------------------ one matrix


@each_kind
def test_panels_hold_exactly_what_the_file_says(kernels: Library, kind: QuantType) -> None:
    rows, columns = 37, (512 if kind.block == 256 else 7 * 32)
    raw = all_blocks(kind, (rows, columns), np.random.default_rng(kind.id))
    weights = quants.dequantize(raw, kind.id, (rows, columns))
    # One column at a time, by a number that is rounded to 127 steps of a power of two.
    numbers = np.float32(127) * np.exp2(np.arange(columns) % 7 - 3).astype(np.float32)
    got = linear(kernels.path, kind, raw, rows, columns).run({"x": np.diag(numbers)})[0]
    with np.errstate(over="ignore"):
        expected = weights.T * numbers[:, None]
    assert np.isfinite(expected).all()
    if not kind.asymmetric:
        assert np.array_equal(got, expected)
    else:
        error = np.abs(got.astype(np.float64) - expected)
        assert (error <= tolerance(kind, raw, np.diag(numbers), rows, columns)).all()


@each_kind
def test_products_are_those_of_rounded_activations(kernels: Library, kind: QuantType) -> None:
    rows, columns = 50, (768 if kind.block == 256 else 5 * 32)
    raw = random_blocks(kind, (rows, columns), np.random.default_rng(kind.id))
    weights = quants.dequantize(raw, kind.id, (rows, columns)).astype(np.float64)
    bias = normal(1, rows, seed=9)[0]
    session = linear(kernels.path, kind, raw, rows, columns, bias)
    for n in ROWS:
        x = normal(n, columns, seed=n) * np.exp2(np.arange(n) - 9.0).astype(np.float32)[:, None]
        got = session.run({"x": x})[0].astype(np.float64)
        near = np.abs(got - (rounded(x) @ weights.T + bias))
        assert (near <= tolerance(kind, raw, x, rows, columns) + np.abs(got) * 2.0**-22).all()
        # And what rounding costs is no more than half a step for each activation.
        most = np.repeat(np.abs(x.reshape(n, -1, 32)).max(-1), 32, axis=-1).astype(np.float64)
        bound = most / 127 * 0.501 @ np.abs(weights).T + 1e-5 * (1 + np.abs(got))
        assert (np.abs(got - (x.astype(np.float64) @ weights.T + bias)) <= bound).all()


@each_kind
def test_rows_that_are_looked_up_are_the_files(kernels: Library, kind: QuantType) -> None:
    rows, columns = 37, 512
    raw = all_blocks(kind, (rows, columns), np.random.default_rng(kind.id))
    g = Graph()
    tokens = g.input("tokens", ["n", 1], np.int32)
    laid = g.resident(panels.pack(raw, kind.id, rows, columns))
    shape = {"type": kind.id, "rows": rows, "columns": columns}
    g.output(g.own(kernels.path, "Embedding", tokens, laid, **shape, scale=0.5), "y", ["n", columns])
    which = np.array([[36], [0], [17], [17], *[[i] for i in range(37)]], np.int32)
    got = g.session(Runtime(2)).run({"tokens": which})[0]
    expected = quants.dequantize(raw, kind.id, (rows, columns))[which[:, 0]]
    assert same_bits(got, expected * np.float32(0.5))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 70),
    blocks=st.integers(1, 5),
    n=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
    biased=st.booleans(),
)
def test_any_shape(
    kernels: Library, kind: QuantType, rows: int, blocks: int, n: int, seed: int, biased: bool
) -> None:
    columns = blocks * kind.block
    rng = np.random.default_rng(seed)
    raw = random_blocks(kind, (rows, columns), rng)
    x = normal(n, columns, seed=seed)
    x[rng.random((n, columns // 32)).repeat(32, axis=-1) < 0.2] = 0
    bias = normal(1, rows, seed=seed + 1)[0] if biased else None
    got = linear(kernels.path, kind, raw, rows, columns, bias).run({"x": x})[0]
    expected = rounded(x) @ quants.dequantize(raw, kind.id, (rows, columns)).astype(np.float64).T
    expected += 0 if bias is None else bias
    limit = tolerance(kind, raw, x, rows, columns) + np.abs(expected) * 2.0**-22
    assert (np.abs(got - expected) <= limit).all()


@each_kind
def test_a_row_is_the_same_bits_in_any_batch_and_on_any_threads(kernels: Library, kind: QuantType) -> None:
    rows, columns = 530, 512
    raw = random_blocks(kind, (rows, columns), np.random.default_rng(kind.id))
    x = normal(70, columns)
    session = linear(kernels.path, kind, raw, rows, columns)
    all_at_once = session.run({"x": x})[0]
    for n in ROWS:
        first = 70 - n
        assert same_bits(session.run({"x": x[first:]})[0], all_at_once[first:])
    for threads in (2, 4):
        spread = linear(kernels.path, kind, raw, rows, columns, threads=threads)
        assert same_bits(spread.run({"x": x})[0], all_at_once)
        assert same_bits(spread.run({"x": x[3:4]})[0], all_at_once[3:4])


@each_kind
def test_packing_is_the_same_on_any_threads(kernels: Library, kind: QuantType) -> None:
    rows, columns = 100, 512
    raw = all_blocks(kind, (rows, columns), np.random.default_rng(kind.id))
    one = panels.pack(raw, kind.id, rows, columns)
    assert one.size == panels.panel_bytes(kind.id, rows, columns)
    assert one.size == kernels.functions.kvasir_panel_bytes(kind.id, rows, columns)
    assert one.size <= 112 * columns // kind.block * kind.block_bytes * 1.05
    assert np.array_equal(panels.pack(raw, kind.id, rows, columns, threads=3), one)
    # Nothing is left of what was there before.
    used = np.full(one.size, 0xFF, np.uint8)
    assert panels.pack(raw, kind.id, rows, columns, threads=8, out=used) is used
    assert np.array_equal(used, one)


# ------------------------------------------------------------------------------------------------ odd numbers


@each_kind
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_no_number_spoils_itself_only(kernels: Library, kind: QuantType, bad: float) -> None:
    rows, columns = 20, 512
    raw = random_blocks(kind, (rows, columns), np.random.default_rng(1))
    session = linear(kernels.path, kind, raw, rows, columns, normal(1, rows)[0])
    x = normal(15, columns)
    good = session.run({"x": x})[0]
    # A payload and a sign that are not the usual ones, too.
    x[6, 77] = bad
    x[9, 300] = np.uint32(0xFFC12345 if math.isnan(bad) else 0x7F800000).view(np.float32)
    got = session.run({"x": x})[0]
    assert np.isnan(got[[6, 9]]).all()
    others = np.setdiff1d(np.arange(15), [6, 9])
    assert same_bits(got[others], good[others])


@each_kind
def test_zeros_give_the_bias(kernels: Library, kind: QuantType) -> None:
    raw = random_blocks(kind, (20, 512), np.random.default_rng(1))
    x, bias = np.zeros((3, 512), np.float32), normal(1, 20)[0]
    x[1] = -0.0
    assert np.array_equal(linear(kernels.path, kind, raw, 20, 512).run({"x": x})[0], np.zeros((3, 20)))
    assert np.array_equal(linear(kernels.path, kind, raw, 20, 512, bias).run({"x": x})[0], [bias] * 3)


@each_kind
def test_huge_and_tiny_activations_are_what_they_are(kernels: Library, kind: QuantType) -> None:
    rows, columns = 20, 512
    raw = random_blocks(kind, (rows, columns), np.random.default_rng(1))
    weights = quants.dequantize(raw, kind.id, (rows, columns)).astype(np.float64)
    sizes = np.array([1e30, 1e-20, 1e-34, 4e-37, 1.5e-36, 3e-38, 1e-39, 1e-42, 1e-45])
    x = (normal(len(sizes), columns) * sizes[:, None]).astype(np.float32)
    # Whole steps of the smallest that there are, and less than that.
    x[-1, :] = np.float32(1e-45)
    session = linear(kernels.path, kind, raw, rows, columns)
    got = session.run({"x": x})[0]
    assert np.isfinite(got).all()
    limit = tolerance(kind, raw, x, rows, columns) + np.abs(got) * 1e-5
    assert (np.abs(got - rounded(x) @ weights.T) <= limit).all()
    # Where 127 steps are no longer to be had, each is at most the smallest normal number.
    off = np.abs(got - x.astype(np.float64) @ weights.T)
    most = np.maximum(np.abs(x).max(-1, keepdims=True).astype(np.float64) / 127, 2.0**-126)
    assert (off <= most @ np.abs(weights).sum(-1)[None, :] * 0.51 + limit).all()
    # Sums that no float holds are infinite, or no number, and nobody else's business.
    x[0], x[1] = 3e38, normal(1, columns)[0]
    assert not np.isfinite(session.run({"x": x})[0][0]).all()
    assert same_bits(session.run({"x": x})[0][1:], session.run({"x": x[1:]})[0])


# ------------------------------------------------------------------------------------------------ experts


@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
def test_experts_are_their_definition(kernels: Library, activation: str, biased: bool) -> None:
    rng = np.random.default_rng(3)
    kinds = [quants.BY_NAME[name] for name in ("Q4_K", "Q6_K", "Q8_0")]
    experts = Experts(kinds, 256, 96, 5, activation, biased, rng, random_blocks)
    session = experts.session(kernels.path)
    for n, k in ((1, 1), (3, 2), (40, 3)):
        x = 2 * normal(n, 256, seed=n)
        # Some choices are nobody here, some an expert twice, some without weight.
        places = rng.integers(-1, 7, (n, k), dtype=np.int32)
        mix = rng.random((n, k)).astype(np.float32) * (rng.random((n, k)) < 0.9)
        mix = mix.astype(np.float32)
        got, done = session.run({"x": x, "places": places, "mix": mix})
        expected = experts.reference(x, places, mix)
        # One activation more or less may be rounded up.
        assert np.sqrt(np.mean((got - expected) ** 2)) <= 2e-3 * np.sqrt(np.mean(expected**2)) + 1e-6
        here = places[(places >= 0) & (places < 5)]
        assert done.tolist() == [[len(np.unique(here)), len(here)]]


def test_without_a_choice_every_row_goes_through_the_first(kernels: Library) -> None:
    experts = Experts([Q8] * 3, 64, 96, 1, "silu", True, np.random.default_rng(3), random_blocks)
    x = normal(20, 64)
    routed = experts.session(kernels.path).run(
        {"x": x, "places": np.zeros((20, 1), np.int32), "mix": np.ones((20, 1), np.float32)}
    )[0]
    assert same_bits(experts.session(kernels.path, routed=False).run({"x": x})[0], routed)


def test_whether_other_threads_are_woken_changes_no_bit(kernels: Library) -> None:
    """Calls that try it both ways, and those that go by what was found, over sizes on both sides of the limit."""
    experts = Experts([Q8] * 3, 1024, 1536, 3, "silu", False, np.random.default_rng(5), random_blocks)
    session = experts.session(kernels.path, threads=2, first=True)
    plain = experts.session(kernels.path, threads=1)
    x, mix = normal(3, 1024), np.ones((3, 1), np.float32)
    for call in range(150):
        n = 1 + call % 3
        some = {"x": x[:n], "places": np.arange(n, dtype=np.int32)[:, None], "mix": mix[:n]}
        got, done = session.run(some)
        assert done.tolist() == [[n, n]]
        if call < 3:
            expected = plain.run({"x": x, "places": np.arange(3, dtype=np.int32)[:, None], "mix": mix})[0]
        assert same_bits(got, expected[:n])


@each_kind
def test_an_experts_row_is_the_same_bits_in_any_batch_and_on_any_threads(
    kernels: Library, kind: QuantType
) -> None:
    rng = np.random.default_rng(4)
    experts = Experts([kind] * 3, 512, 256, 6, "silu", False, rng, random_blocks)
    n, k = 40, 3
    whole = {
        "x": normal(n, 512),
        "places": np.array([rng.permutation(7)[:k] - 1 for _ in range(n)], np.int32),
        "mix": rng.random((n, k)).astype(np.float32),
    }
    session = experts.session(kernels.path)
    all_at_once = session.run(whole)[0]
    for rows in (slice(0, 1), slice(5, 7), slice(30, 40), slice(1, 40, 3)):
        assert same_bits(
            session.run({name: part[rows] for name, part in whole.items()})[0], all_at_once[rows]
        )
    for threads in (2, 4):
        assert same_bits(experts.session(kernels.path, threads).run(whole)[0], all_at_once)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
def test_an_experts_row_that_is_no_number_spoils_itself_only(kernels: Library, activation: str) -> None:
    experts = Experts([Q8] * 3, 64, 96, 2, activation, False, np.random.default_rng(3), random_blocks)
    session = experts.session(kernels.path)
    x = normal(9, 64)
    places, mix = np.tile(np.array([[0, 1]], np.int32), (9, 1)), np.ones((9, 2), np.float32)
    good = session.run({"x": x, "places": places, "mix": mix})[0]
    x[2, 5], x[4, 63], x[8, 0] = np.nan, np.inf, -np.inf
    # A weight of a choice that is no number is that row's own too.
    mix[6, 1] = np.nan
    got = session.run({"x": x, "places": places, "mix": mix})[0]
    bad = np.isin(np.arange(9), [2, 4, 6, 8])
    assert np.isnan(got[bad]).all()
    assert same_bits(got[~bad], good[~bad])
    x = np.zeros((1, 64), np.float32)
    assert not session.run({"x": x, "places": places[:1], "mix": mix[:1]})[0].any()


# ------------------------------------------------------------------------------------------------ refusals


def broken(library: Library, kind: str, x: np.ndarray, inputs: dict[str, np.ndarray], **attributes) -> None:
    """Run an operator with these inputs in this order, after x; None is left out."""
    g = Graph()
    names = [g.input("x", [None] * x.ndim, x.dtype)]
    feeds = {"x": x}
    for name, array in inputs.items():
        if array is None:
            names.append("")
            continue
        names.append(g.input(name, [None] * array.ndim, array.dtype))
        feeds[name] = array
    g.output(g.own(library.path, kind, *names, **attributes), "y", [None, None])
    g.session(Runtime(1)).run(feeds)


def bytes_of(rows: int, columns: int, kind: QuantType = Q8) -> np.ndarray:
    return np.zeros(panels.panel_bytes(kind.id, rows, columns), np.uint8)


ONE = np.zeros((2, 64), np.float32)
LINEAR = {"type": 8, "rows": 20, "columns": 64, "exact": 0}
WRONG_LINEARS = {
    "an unknown type": (ONE, {"panels": bytes_of(20, 64)}, {"type": 99}),
    "a float type": (ONE, {"panels": bytes_of(20, 64)}, {"type": 0}),
    "no whole number of blocks": (
        np.zeros((2, 60), np.float32),
        {"panels": bytes_of(20, 64)},
        {"columns": 60},
    ),
    "no whole number of large blocks": (ONE, {"panels": bytes_of(20, 64)}, {"type": 12}),
    "no rows": (ONE, {"panels": bytes_of(20, 64)}, {"rows": 0}),
    "fewer than no rows": (ONE, {"panels": bytes_of(20, 64)}, {"rows": -16}),
    "rows whose size overflows": (ONE, {"panels": bytes_of(20, 64)}, {"rows": 1 << 62}),
    "columns whose size overflows": (ONE, {"panels": bytes_of(20, 64)}, {"columns": 1 << 62}),
    "a narrow x": (ONE[:, :32].copy(), {"panels": bytes_of(20, 64)}, {}),
    "an x of one dimension": (ONE[0], {"panels": bytes_of(20, 64)}, {}),
    "an x of three dimensions": (ONE[None], {"panels": bytes_of(20, 64)}, {}),
    "an x of integers": (ONE.astype(np.int32), {"panels": bytes_of(20, 64)}, {}),
    "no panels": (ONE, {"panels": None}, {}),
    "panels of floats": (ONE, {"panels": bytes_of(20, 64).view(np.float32)}, {}),
    "panels cut off": (ONE, {"panels": bytes_of(20, 64)[:-1]}, {}),
    "a panel too few": (ONE, {"panels": bytes_of(16, 64)}, {}),
    "a panel too many": (ONE, {"panels": bytes_of(36, 64)}, {}),
    "empty panels": (ONE, {"panels": bytes_of(20, 64)[:0]}, {}),
    "a short bias": (ONE, {"panels": bytes_of(20, 64), "bias": np.zeros(19, np.float32)}, {}),
    "a long bias": (ONE, {"panels": bytes_of(20, 64), "bias": np.zeros(32, np.float32)}, {}),
}


@pytest.mark.parametrize("wrong", WRONG_LINEARS)
def test_a_product_that_cannot_be_is_refused(kernels: Library, wrong: str) -> None:
    x, inputs, changes = WRONG_LINEARS[wrong]
    with pytest.raises(EngineError, match=r"Linear|weights or biases|two dimensions|type"):
        broken(kernels, "Linear", x, inputs, **LINEAR | changes)


@pytest.mark.parametrize("token", [-1, 20, 2**31 - 1, -(2**31)])
def test_tokens_outside_of_the_vocabulary_are_refused(kernels: Library, token: int) -> None:
    tokens = np.array([[3], [token]], np.int32)
    with pytest.raises(EngineError, match="Embedding: a token is outside of the vocabulary"):
        broken(kernels, "Embedding", tokens, {"panels": bytes_of(20, 64)}, **LINEAR, scale=1.0)


def test_lookups_that_cannot_be_are_refused(kernels: Library) -> None:
    tokens = np.zeros((2, 1), np.int32)
    broken(kernels, "Embedding", tokens, {"panels": bytes_of(20, 64)}, **LINEAR, scale=1.0)
    for x, inputs, changes in (
        (tokens, {"panels": bytes_of(20, 64)[:-1]}, {}),
        (tokens, {"panels": bytes_of(20, 64)}, {"rows": 33}),
        (tokens, {"panels": bytes_of(20, 64)}, {"type": 12}),
        (tokens.reshape(1, 2), {"panels": bytes_of(20, 64)}, {}),
        (tokens.astype(np.int64), {"panels": bytes_of(20, 64)}, {}),
    ):
        with pytest.raises(EngineError, match=r"Embedding|Linear|weights or biases|type"):
            broken(kernels, "Embedding", x, inputs, **LINEAR | changes, scale=1.0)


def test_attributes_that_are_missing_are_named(kernels: Library) -> None:
    with pytest.raises(EngineError, match="columns"):
        broken(kernels, "Linear", ONE, {"panels": bytes_of(20, 64)}, type=8, rows=20)
    with pytest.raises(EngineError, match="activation"):
        broken(
            kernels,
            "FeedForward",
            ONE,
            EXPERTS_INPUTS,
            **{k: v for k, v in EXPERTS.items() if k != "activation"},
        )


EXPERTS = {
    "gate_type": 8,
    "up_type": 8,
    "down_type": 8,
    "columns": 64,
    "width": 32,
    "experts": 2,
    "activation": 0,
    "exact": 0,
    "first": 0,
}
UP, DOWN = np.tile(bytes_of(32, 64), 2), np.tile(bytes_of(64, 32), 2)
CHOICES, MIX = np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32)
EXPERTS_INPUTS = {"gate": UP, "up": UP, "down": DOWN, "places": CHOICES, "mix": MIX}
WRONG_EXPERTS = {
    "an unknown type": ({}, {"up_type": 99}),
    "a width of no blocks": ({}, {"width": 48}),
    "no experts": ({}, {"experts": 0}),
    "experts whose size overflows": ({}, {"experts": 1 << 62}),
    "an expert too few": ({}, {"experts": 3}),
    "an expert too many": ({}, {"experts": 1}),
    "an unknown activation": ({}, {"activation": 3}),
    "a negative activation": ({}, {"activation": -1}),
    "no gate": ({"gate": None}, {}),
    "down cut off": ({"down": DOWN[:-1]}, {}),
    "places alone": ({"mix": None}, {}),
    "mix alone": ({"places": None}, {}),
    "too few places": ({"places": CHOICES[:1]}, {}),
    "too few weights": ({"mix": MIX[:1]}, {}),
    "more weights than places": ({"mix": np.ones((2, 2), np.float32)}, {}),
    "places of one dimension": ({"places": CHOICES[:, 0]}, {}),
    "places of 64 bits": ({"places": CHOICES.astype(np.int64)}, {}),
    "a bias for one expert": ({"gate_bias": np.zeros(32, np.float32)}, {}),
    "a bias of another width": ({"a": None, "b": None, "down_bias": np.zeros((2, 32), np.float32)}, {}),
}


@pytest.mark.parametrize("wrong", WRONG_EXPERTS)
def test_experts_that_cannot_be_are_refused(kernels: Library, wrong: str) -> None:
    inputs, changes = WRONG_EXPERTS[wrong]
    with pytest.raises(EngineError, match=r"FeedForward|weights or biases|two dimensions|type"):
        broken(kernels, "FeedForward", ONE, EXPERTS_INPUTS | inputs, **EXPERTS | changes)


def test_the_same_experts_without_a_fault_are_taken(kernels: Library) -> None:
    broken(kernels, "Linear", ONE, {"panels": bytes_of(20, 64)}, **LINEAR)
    broken(kernels, "FeedForward", ONE, EXPERTS_INPUTS, **EXPERTS)
    broken(
        kernels, "FeedForward", ONE[:0], EXPERTS_INPUTS | {"places": CHOICES[:0], "mix": MIX[:0]}, **EXPERTS
    )
    broken(
        kernels, "FeedForward", ONE, EXPERTS_INPUTS | {"places": CHOICES[:, :0], "mix": MIX[:, :0]}, **EXPERTS
    )


def test_packing_refuses_what_does_not_fit(kernels: Library) -> None:
    raw = np.zeros(20 * 68, np.uint8)
    assert panels.pack(raw, 8, 20, 64).size == panels.panel_bytes(8, 20, 64)
    for error, match, arguments in (
        (EngineError, "1359 bytes for a matrix of 20 x 64; need 1360", (raw[:-1], 8, 20, 64)),
        (EngineError, "F32 has no panels; Q4_0, ", (np.zeros(20 * 64, np.float32), 0, 20, 64)),
        (ModelFileError, "no whole number", (raw, 8, 20, 60)),
        (ModelFileError, "ggml type 99", (raw, 99, 20, 64)),
        (EngineError, "can't take panels", (raw, 8, 20, 64, 1, np.zeros(64, np.uint8))),
        (EngineError, "can't take panels", (raw, 8, 20, 64, 1, np.zeros(2 * 2176, np.uint8)[::2])),
    ):
        with pytest.raises(error, match=match):
            panels.pack(*arguments)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("n_bytes", [(4 << 20) + 400_000, (6 << 20) + 4096, 17_000_001])
def test_memory_in_large_pages_takes_what_is_in_it(n_bytes: int) -> None:
    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    before, kept = anonymous(), []
    for _ in range(8):
        kept.append(panels.room(n_bytes))
        kept[-1][:] = 1
    assert anonymous() - before == pytest.approx(8 * n_bytes, rel=0.03)


def test_no_rows_are_no_panels(kernels: Library) -> None:
    assert panels.pack(np.zeros(0, np.uint8), 8, 0, 64, threads=0).size == 0
