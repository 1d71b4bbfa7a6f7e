"""Frames and boundaries: exact sizes, limits before memory, garbage refused by name."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_peer.errors import WireError
from kvasir_peer.wire import chunks, ring
from kvasir_peer.wire.membership import Limits
from kvasir_peer.wire.tensors import DTYPES, decode_tensor, encode_tensor, tensor_bytes

LIMITS = Limits(rows=8, slots=4, context_length=64, vocab=512, top_logprobs=2, stages=3)


def test_a_frame_comes_back_with_its_payload_uncopied() -> None:
    message = chunks.Have(b"h" * 32)
    frame = b"".join(bytes(piece) for piece in chunks.CODEC.encode(message, b"payload"))
    back, payload = chunks.CODEC.decode(frame)
    assert back == message and bytes(payload) == b"payload" and payload.obj is frame


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"", "malformed"),
        (b"\x02\xff\xff\xff\xff", "oversize"),
        (b"\x02\x10\x00\x00\x00abc", "malformed"),
        (b"\xc8\x00\x00\x00\x00", "unexpected"),
        (b"\x02\x01\x00\x00\x00\xc1", "malformed"),
    ],
)
def test_bad_frames_are_refused_by_name(frame: bytes, code: str) -> None:
    with pytest.raises(WireError) as caught:
        chunks.CODEC.decode(frame)
    assert caught.value.code == code


@given(st.binary(max_size=300))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    try:
        ring.codec(LIMITS).decode(data)
    except WireError:
        return


@pytest.mark.parametrize("dtype", DTYPES)
def test_boundaries_round_trip_within_their_precision(dtype: str) -> None:
    values = np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32)
    values[2] = 0
    data = encode_tensor(values, dtype)
    assert data.nbytes == tensor_bytes(dtype, 5, 64)
    back = decode_tensor(data, dtype, 5, 64)
    step = np.abs(values).max(axis=1, keepdims=True) / 127
    bound = {"f32": 0.0, "f16": 2e-3, "bf16": 2e-2, "int8": step * 0.51}[dtype]
    assert (np.abs(back - values) <= bound).all()
    assert (back[2] == 0).all()


@given(
    st.integers(1, 5),
    st.integers(1, 300),
    st.integers(0, 2**32 - 1),
    st.floats(1e-6, 6e4),
    st.integers(0, 6),
)
@settings(deadline=None)
def test_int8_keeps_small_values_beside_large_ones(
    rows: int, width: int, seed: int, large: float, many: int
) -> None:
    """Whatever is too large for the others' codes stands beside, up to one in 128; the rest is off by half a step."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(rows, width)).astype(np.float32)
    kept = -(-width // 128)
    for row in values:
        row[rng.integers(0, width, min(many, kept))] = large
    data = encode_tensor(values, "int8")
    assert data.nbytes == tensor_bytes("int8", rows, width) == rows * (width + 4 + 4 * kept)
    back = decode_tensor(bytes(data), "int8", rows, width)
    magnitudes = np.sort(np.abs(values), axis=1)
    step = magnitudes[:, [-kept - 1]] / 127 if kept < width else np.zeros((rows, 1), np.float32)
    assert (np.abs(back - values) <= 0.51 * step + 5e-4 * np.abs(values) + 1e-7).all()
    assert encode_tensor(values, "int8") == data, "the same bytes each time"


@given(st.binary(min_size=2 * (200 + 4 + 8), max_size=2 * (200 + 4 + 8)))
@settings(deadline=None)
def test_any_bytes_of_the_right_size_are_an_int8_tensor_or_refused(data: bytes) -> None:
    with np.errstate(all="ignore"):
        try:
            assert decode_tensor(data, "int8", 2, 200).shape == (2, 200)
        except WireError as error:
            assert error.code == "shape" and "outlier in column" in str(error)


def test_int8_keeps_what_is_no_number_and_refuses_rows_too_wide_for_its_columns() -> None:
    values = np.ones((1, 200), np.float32)
    values[0, 7] = np.nan
    values[0, 9] = 1e6
    back = decode_tensor(encode_tensor(values, "int8"), "int8", 1, 200)
    assert np.isnan(back[0, 7]) and back[0, 9] == 65504
    assert np.abs(np.delete(back, [7, 9]) - 1).max() < 0.01
    with pytest.raises(WireError) as caught:
        tensor_bytes("int8", 1, (1 << 16) + 1)
    assert caught.value.code == "shape"


def test_f16_clips_and_bf16_keeps_range_and_nan() -> None:
    values = np.array([[1e6, -1e6, 3e38, np.nan]], np.float32)
    half = decode_tensor(encode_tensor(values, "f16"), "f16", 1, 4)
    assert half[0, 0] == 65504 and half[0, 1] == -65504 and np.isnan(half[0, 3])
    brain = decode_tensor(encode_tensor(values, "bf16"), "bf16", 1, 4)
    assert abs(brain[0, 0] - 1e6) < 4e3 and np.isnan(brain[0, 3])


def test_a_tensor_of_another_size_or_dtype_is_refused() -> None:
    with pytest.raises(WireError, match="takes 32"):
        decode_tensor(bytes(31), "f16", 2, 8)
    with pytest.raises(WireError) as caught:
        tensor_bytes("f8", 1, 1)
    assert caught.value.code == "dtype"


def test_every_message_within_the_widths_fits_the_bounds_both_ends_derive() -> None:
    codec = ring.codec(LIMITS)
    outputs = tuple(
        ring.Output(2**64 - 1, 2**32 - 1, 63, 511, -12345.678, ((511, -1.5),) * 2) for _ in range(LIMITS.rows)
    )
    trace = tuple(
        ring.StageTrace(i, 1e9, 1e9, 1e9, 2**31, 1e12, 1e9, 4096, 2**32 - 1) for i in range(ring.MAX_STAGES)
    )
    result = ring.Result("p" * 64, 2**32 - 1, 2**63, b"d" * 32, outputs, trace)
    assert sum(len(piece) for piece in codec.encode(result)) <= ring.max_result_frame(LIMITS)
    runs = tuple((2**64 - 1, 1, False) for _ in range(LIMITS.rows))
    composed = ring.Composed("p" * 64, 2**32 - 1, 2**63, b"d" * 32, runs)
    assert sum(len(piece) for piece in codec.encode(composed)) <= ring.max_result_frame(LIMITS)
    batch = ring.Batch("p" * 64, 1, 2**63, bytes(LIMITS.bytes), b"d" * 32, b"s" * 64, trace)
    payload = bytes(tensor_bytes("f32", LIMITS.rows, 16))
    assert sum(len(piece) for piece in codec.encode(batch, payload)) <= ring.max_batch_frame(
        LIMITS, "f32", 16
    )
    assert len(msgspec.msgpack.encode(ring.Hello("requests", "p" * 64, 2**32 - 1))) < 1024
