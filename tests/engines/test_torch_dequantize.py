"""Taking weights apart in torch: bit-equal to what the host does, for every type."""

import warnings

import gguf
import numpy as np
import pytest
import torch

from kvasir_peer.engines import quants
from kvasir_peer.engines.torch_dequantize import dequantize
from kvasir_peer.engines.torch_weights import TorchOptions, Weight, stays_bytes
from kvasir_peer.errors import ModelFileError
from kvasir_peer.models.gguf import TensorInfo

COLUMNS = 512


def random_rows(kind: quants.QuantType, rows: int) -> np.ndarray:
    """Random blocks; all bit patterns occur, infinite and missing numbers among the scales too."""
    n_bytes = COLUMNS // kind.block * kind.block_bytes
    return np.random.default_rng(kind.id).integers(0, 256, (rows, n_bytes), dtype=np.uint8)


@pytest.mark.parametrize("kind", quants.TYPES.values(), ids=lambda kind: kind.name)
def test_every_type_is_taken_apart_bit_for_bit(kind: quants.QuantType) -> None:
    raw = random_rows(kind, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numbers that are none, from random scales
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind.id)).astype(np.float32)
    got = dequantize(torch.from_numpy(raw), kind.id, torch.float32).numpy()
    number = ~np.isnan(expected)
    assert number.mean() > 0.5
    np.testing.assert_array_equal(np.isnan(got), ~number)
    np.testing.assert_array_equal(got[number].view(np.uint32), expected[number].view(np.uint32))


@pytest.mark.parametrize("kind", quants.TYPES.values(), ids=lambda kind: kind.name)
def test_stacks_keep_their_shape_and_take_the_dtype(kind: quants.QuantType) -> None:
    raw = torch.from_numpy(random_rows(kind, 6)).reshape(2, 3, -1)
    weights = dequantize(raw, kind.id, torch.bfloat16)
    assert weights.shape == (2, 3, COLUMNS) and weights.dtype == torch.bfloat16
    alone = dequantize(raw[1, 2], kind.id, torch.bfloat16)
    assert torch.equal(weights[1, 2].view(torch.int16), alone.view(torch.int16))


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ModelFileError, match="type 99"):
        dequantize(torch.zeros((1, 32), dtype=torch.uint8), 99, torch.float32)


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "F32"])
def test_large_matrices_are_multiplied_in_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvasir_peer.engines.torch_weights.PIECE_WEIGHTS", 3 * COLUMNS)
    entry = quants.BY_NAME[kind]
    rng = np.random.default_rng(0)
    info = TensorInfo(name="w", shape=(10, COLUMNS), type=entry.id, n_bytes=0, offset=0)
    values = rng.standard_normal((10, COLUMNS)).astype(np.float32)
    if kind == "Q4_K":  # the gguf package writes no K-quants: blocks with a scale of 1/64
        raw = rng.integers(0, 256, (10, COLUMNS // 256, 144), dtype=np.uint8)
        raw[..., :4] = np.array([1 / 64, 1 / 64], np.float16).view(np.uint8)
        raw = raw.reshape(10, -1)
    else:
        raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType(entry.id)).view(np.uint8)
    keeps = TorchOptions(torch.device("cpu"), torch.float32, keep_bytes=True)
    assert stays_bytes(info, keeps) == (kind != "F32")
    weight = Weight(torch.from_numpy(raw), entry.id, COLUMNS, torch.float32)
    x = torch.from_numpy(rng.standard_normal((4, COLUMNS)).astype(np.float32))
    bias = torch.from_numpy(rng.standard_normal(10).astype(np.float32))
    expected = x @ torch.from_numpy(quants.dequantize(raw, entry.id, (10, COLUMNS))).T + bias
    torch.testing.assert_close(weight.linear(x, bias), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(weight.linear(x), expected - bias, rtol=1e-4, atol=1e-3)
