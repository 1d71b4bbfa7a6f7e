"""Taking GGUF blocks apart on the host: bit-equal to the gguf package, quick, and refusing what does not fit."""

import time
import warnings

import gguf
import numpy as np
import pytest

from kvasir_peer.engines import quants
from kvasir_peer.errors import ModelFileError

COLUMNS = 1024
CODED = [kind for kind in quants.TYPES.values() if kind.bits]


def random_rows(kind: quants.QuantType, rows: int, columns: int = COLUMNS) -> np.ndarray:
    """Random blocks; all bit patterns occur, infinite and missing numbers among the scales too."""
    n_bytes = quants.row_bytes(kind.id, columns)
    return np.random.default_rng(kind.id).integers(0, 256, (rows, n_bytes), dtype=np.uint8)


def expected(raw: np.ndarray, kind: quants.QuantType) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numbers that are none, from random scales
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind.id)).astype(np.float32)


def assert_same_bits(got: np.ndarray, wanted: np.ndarray) -> None:
    assert got.shape == wanted.shape and got.dtype == np.float32
    number = ~np.isnan(wanted)
    assert number.mean() > 0.5
    np.testing.assert_array_equal(np.isnan(got), ~number)
    np.testing.assert_array_equal(got[number].view(np.uint32), wanted[number].view(np.uint32))


@pytest.mark.parametrize("kind", quants.TYPES.values(), ids=lambda kind: kind.name)
def test_weights_are_bit_equal(kind: quants.QuantType) -> None:
    raw = random_rows(kind, 70)
    assert_same_bits(quants.dequantize(raw, kind.id, (70, COLUMNS)), expected(raw, kind))


@pytest.mark.parametrize("kind", quants.TYPES.values(), ids=lambda kind: kind.name)
def test_work_in_pieces_on_threads_is_bit_equal(
    kind: quants.QuantType, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = random_rows(kind, 70)
    monkeypatch.setattr(quants, "_PIECE", 3 * COLUMNS)
    assert_same_bits(
        quants.dequantize(raw.reshape(-1), kind.id, (2, 35, COLUMNS), threads=3),
        expected(raw, kind).reshape(2, 35, COLUMNS),
    )


@pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.name)
def test_codes_scales_and_offsets_stand_for_the_same_weights(kind: quants.QuantType) -> None:
    raw = random_rows(kind, 70)
    codes = quants.unpack(raw, kind.id, (70, COLUMNS))
    assert codes.packed.shape == (70, COLUMNS * kind.bits // 8)
    assert codes.scales.shape == (70, COLUMNS // kind.group)
    assert (codes.offsets is not None) == kind.asymmetric
    assert_same_bits(codes.weights(), expected(raw, kind))


@pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.name)
def test_codes_fit_their_container(kind: quants.QuantType) -> None:
    """Symmetric codes lie about the zero that MatMulNBits assumes, asymmetric ones start at zero."""
    codes = quants.unpack(random_rows(kind, 70), kind.id, (70, COLUMNS))
    flat = codes.packed if kind.bits == 8 else np.concatenate([codes.packed & 15, codes.packed >> 4])
    if kind.asymmetric:
        assert codes.zero == 0 and flat.min() == 0 and flat.max() < 32
    else:
        assert codes.zero == 1 << (kind.bits - 1)
        assert flat.min() < codes.zero < flat.max()


def test_rows_of_an_embedding_can_be_taken_alone() -> None:
    kind = quants.BY_NAME["Q6_K"]
    raw = random_rows(kind, 9)
    whole = quants.dequantize(raw, kind.id, (9, COLUMNS))
    some = quants.dequantize(raw[[7, 2]], kind.id, (2, COLUMNS))
    np.testing.assert_array_equal(some, whole[[7, 2]])


def test_float_weights_are_copied() -> None:
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    raw = values.copy().view(np.uint8)
    weights = quants.dequantize(raw, 0, (2, 4))
    raw[:] = 0
    np.testing.assert_array_equal(weights, values)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K", "Q8_0"])
def test_a_slice_of_100_mb_would_load_in_a_second(name: str) -> None:
    """Measured on a tenth of it, the best of some tries, with room for a machine that does other things too."""
    kind = quants.BY_NAME[name]
    rows = 10_000_000 // quants.row_bytes(kind.id, 4096)
    raw = random_rows(kind, rows, 4096)
    best = 60.0
    for _ in range(5):
        begin = time.perf_counter()
        quants.unpack(raw, kind.id, (rows, 4096))
        best = min(best, time.perf_counter() - begin)
    assert best < 0.2


def test_what_is_not_in_the_table_is_refused_by_name() -> None:
    with pytest.raises(ModelFileError, match=r"tensor blk\.0\.x has ggml type 16"):
        quants.quant_type(16, "blk.0.x")
    with pytest.raises(ModelFileError, match="type 99"):
        quants.dequantize(np.zeros(32, np.uint8), 99, (1, 32))


def test_bytes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelFileError, match="need 36"):
        quants.dequantize(np.zeros(35, np.uint8), quants.BY_NAME["Q4_0"].id, (2, 32))
    with pytest.raises(ModelFileError, match="no whole number of Q4_K blocks"):
        quants.unpack(np.zeros(144, np.uint8), quants.BY_NAME["Q4_K"].id, (1, 100))
    with pytest.raises(ModelFileError, match="no codes"):
        quants.unpack(np.zeros(64, np.uint8), quants.BY_NAME["F16"].id, (1, 32))
