"""Products of float32 activations with panels: as right as float32 can be, and the same bits however they are made."""

from pathlib import Path

import numpy as np
import pytest
from kernel_operators import KINDS, NAMES, Experts, all_blocks, linear, same_bits
from random_blocks import random_blocks

from kvasir_peer.engines import panels, quants
from kvasir_peer.engines.base import Precision
from kvasir_peer.engines.kernels.library import Library
from kvasir_peer.engines.onnx_containers import Kernels, container, packed_bytes
from kvasir_peer.engines.onnx_graph import Session
from kvasir_peer.engines.quants import QuantType

EXACT: Precision = "exact"
# Two panels, the second one not full, of whole super-blocks.
ROWS, COLUMNS = 25, 1024
# For every number of rows that the kernel has a version for, alone and after another.
MOST = 15

each_kind = pytest.mark.parametrize("kind", KINDS, ids=NAMES)


def normal(n: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, columns)).astype(np.float32)


def blocks_of(kind: QuantType) -> np.ndarray:
    return random_blocks(kind, (ROWS, COLUMNS), np.random.default_rng(kind.id))


def product(library: Path, kind: QuantType, threads: int = 1) -> Session:
    return linear(library, kind, blocks_of(kind), ROWS, COLUMNS, threads=threads, precision=EXACT)


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)))


@each_kind
def test_products_are_those_of_float32(kernels: Library, kind: QuantType) -> None:
    raw, bias = blocks_of(kind), normal(1, ROWS, seed=9)[0]
    weights = quants.dequantize(raw, kind.id, (ROWS, COLUMNS)).astype(np.float64)
    session = linear(kernels.path, kind, raw, ROWS, COLUMNS, bias, precision=EXACT)
    for n in (1, 2, 3, 4, 8, MOST):
        x = normal(n, COLUMNS, seed=n)
        assert relative(session.run({"x": x})[0], x.astype(np.float64) @ weights.T + bias) < 1e-6


@each_kind
def test_every_weight_is_the_files(kernels: Library, kind: QuantType) -> None:
    """One column at a time, times a power of two."""
    rows, columns = 37, 512
    raw = all_blocks(kind, (rows, columns), np.random.default_rng(kind.id))
    numbers = np.exp2(np.arange(columns) % 7 - 3).astype(np.float32)
    session = linear(kernels.path, kind, raw, rows, columns, precision=EXACT)
    got = session.run({"x": np.diag(numbers)})[0]
    expected = quants.dequantize(raw, kind.id, (rows, columns)).T * numbers[:, None]
    if not kind.asymmetric:
        assert np.array_equal(got, expected)
        return
    # Scale times code and offset may each be larger than what is left of them.
    offsets = quants.unpack(raw, kind.id, (rows, columns)).offsets
    assert offsets is not None
    sizes = np.abs(expected) + 2 * np.abs(np.repeat(offsets, kind.group, axis=-1).T) * numbers[:, None]
    assert (np.abs(got.astype(np.float64) - expected) <= sizes * 2.0**-22).all()


@each_kind
def test_a_row_is_the_same_bits_alone_and_in_any_company(kernels: Library, kind: QuantType) -> None:
    x = normal(MOST, COLUMNS)
    session = product(kernels.path, kind)
    together = session.run({"x": x})[0]
    for n in (1, 2, 3, 4, 8, 11):
        assert same_bits(session.run({"x": x[:n]})[0], together[:n])
    backwards = np.ascontiguousarray(x[::-1])
    assert same_bits(product(kernels.path, kind, threads=2).run({"x": backwards})[0][::-1], together)


@each_kind
def test_a_row_that_is_no_number_spoils_itself_only(kernels: Library, kind: QuantType) -> None:
    session = product(kernels.path, kind)
    x = normal(7, COLUMNS)
    good = session.run({"x": x})[0]
    x[2, 5], x[4, 100] = np.nan, np.inf
    got = session.run({"x": x})[0]
    bad = np.isin(np.arange(7), [2, 4])
    assert same_bits(got[~bad], good[~bad])
    assert np.isnan(got[2]).all() and not np.isfinite(got[4]).any()


@each_kind
def test_large_and_tiny_activations_are_what_they_are(kernels: Library, kind: QuantType) -> None:
    x = normal(3, COLUMNS) * np.array([[1e25], [1e-20], [1e-30]], np.float32)
    weights = quants.dequantize(blocks_of(kind), kind.id, (ROWS, COLUMNS)).astype(np.float64)
    got = product(kernels.path, kind).run({"x": x})[0].astype(np.float64)
    for row, numbers in zip(got, x.astype(np.float64), strict=True):
        assert relative(row, numbers @ weights.T) < 1e-6


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
def test_experts_are_those_of_float32(kernels: Library, activation: str) -> None:
    rng = np.random.default_rng(3)
    kinds = [quants.BY_NAME[name] for name in ("Q4_K", "Q6_K", "Q8_0")]
    experts = Experts(kinds, 256, 96, 5, activation, True, rng, random_blocks)
    session = experts.session(kernels.path, threads=2, precision=EXACT)
    for n, k in ((1, 1), (3, 2), (40, 3)):
        x = 2 * normal(n, 256, seed=n)
        # Some choices are nobody here, some an expert twice.
        places = rng.integers(-1, 7, (n, k), dtype=np.int32)
        mix = rng.random((n, k)).astype(np.float32)
        got = session.run({"x": x, "places": places, "mix": mix})[0]
        expected = experts.reference(x, places, mix, EXACT)
        assert np.abs(got - expected).max() <= 2e-6 * np.abs(expected).max()


@each_kind
def test_exact_takes_what_the_file_takes(kernels: Library, kind: QuantType) -> None:
    with_panels = Kernels(panels=kernels.path)
    assert container(kind.id, EXACT, with_panels) == "panels"
    taken = packed_bytes(kind.id, 4096, 4096, EXACT, with_panels)
    assert taken == panels.panel_bytes(kind.id, 4096, 4096)
    assert taken <= 1.06 * 4096 * quants.row_bytes(kind.id, 4096)
