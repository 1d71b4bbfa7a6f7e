"""Rows to workers and sums back: round trips, bounds, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_peer.errors import WireError
from kvasir_peer.wire import experts
from kvasir_peer.wire.codec import PREFIX_BYTES
from kvasir_peer.wire.experts import Bounds, Rows, Sums

BOUNDS = Bounds(n_embd=64, dtype="f16", max_rows=8, max_experts=2)
# Relative error of one rounding, for each dtype.
ROUNDING = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8}


def routed(n: int, k: int, width: int = 64, seed: int = 0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, 8, (n, k)).astype(np.int32)
    return ids, rng.random((n, k), np.float32), rng.standard_normal((n, width)).astype(np.float32)


@given(
    n=st.integers(1, 9), k=st.integers(1, 4), dtype=st.sampled_from(experts.DTYPES), seed=st.integers(0, 99)
)
@settings(max_examples=60, deadline=None)
def test_rows_come_back_as_they_went(n, k, dtype, seed):
    ids, weights, x = routed(n, k, seed=seed)
    data = experts.encode_rows(ids, weights, x, dtype)
    assert len(data) == experts.rows_bytes(n, k, 64, dtype)
    back = experts.decode_rows(data, n, k, 64, dtype)
    np.testing.assert_array_equal(back.ids, ids)
    np.testing.assert_array_equal(back.weights, weights)
    np.testing.assert_allclose(back.x, x, rtol=ROUNDING[dtype], atol=1e-7)


def test_rows_can_be_written_in_place():
    ids, weights, x = routed(3, 2)
    room = bytearray(4096)
    experts.encode_rows(ids, weights, x, "f32", room)
    back = experts.decode_rows(memoryview(room)[: experts.rows_bytes(3, 2, 64, "f32")], 3, 2, 64, "f32")
    np.testing.assert_array_equal(back.x, x)


def test_a_full_frame_fits_its_bound_and_costs_little_over_the_rows():
    bounds = Bounds(n_embd=576, dtype="f16", max_rows=64, max_experts=8)
    ids, weights, x = routed(64, 8, 576)
    frame = b"".join(
        bytes(p)
        for p in experts.CODEC.encode(
            Rows(1 << 40, 29, 64, 8), experts.encode_rows(np.abs(ids), weights, x, "f16")
        )
    )
    assert len(frame) <= bounds.rows_frame
    assert len(frame) / 64 <= 1.1 * 2 * 576
    sums = b"".join(bytes(p) for p in experts.CODEC.encode(Sums(1 << 40, 64, 1.25), bytes(64 * 2 * 576)))
    assert len(sums) <= bounds.sums_frame
    assert len(sums) / 64 <= 1.01 * 2 * 576


@pytest.mark.parametrize(
    ("message", "size", "code"),
    [
        (Rows(1, 0, 0, 2), 0, "oversize"),
        (Rows(1, 0, 9, 2), 9 * (12 + 128), "oversize"),
        (Rows(1, 0, 4, 3), 4 * (18 + 128), "oversize"),
        (Rows(1, 0, 4, 0), 4 * 128, "oversize"),
        (Rows(1, -1, 4, 2), 4 * (12 + 128), "malformed"),
        (Rows(1, 0, 4, 2), 4 * (12 + 128) - 1, "shape"),
        (Rows(1, 0, 4, 2), 4 * (12 + 128) + 1, "shape"),
    ],
)
def test_rows_outside_the_bounds_are_refused(message, size, code):
    with pytest.raises(WireError) as caught:
        BOUNDS.check_rows(message, bytes(size))
    assert caught.value.code == code


@pytest.mark.parametrize(("rows", "size"), [(3, 3 * 128), (4, 3 * 128), (4, 4 * 128 + 2)])
def test_sums_of_another_shape_are_refused(rows, size):
    with pytest.raises(WireError) as caught:
        BOUNDS.check_sums(Sums(1, rows), 4, bytes(size))
    assert caught.value.code == "shape"


@pytest.mark.parametrize(
    ("bounds", "code"),
    [
        (Bounds(64, "int8", 8, 2), "dtype"),
        (Bounds(64, "f16", 0, 2), "oversize"),
        (Bounds(64, "f16", experts.MAX_ROWS + 1, 2), "oversize"),
        (Bounds(64, "f16", 8, experts.MAX_CHOSEN + 1), "oversize"),
    ],
)
def test_bounds_that_cannot_be_are_refused(bounds, code):
    with pytest.raises(WireError) as caught:
        bounds.check()
    assert caught.value.code == code


def test_a_header_over_the_limit_is_refused_before_it_is_decoded():
    frame = bytes([4]) + (5000).to_bytes(4, "little") + bytes(5000)
    with pytest.raises(WireError) as caught:
        experts.CODEC.decode(frame)
    assert caught.value.code == "oversize"
    assert len(frame) > PREFIX_BYTES


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_no_bytes_do_more_than_a_wire_error(data):
    try:
        experts.CODEC.decode(data)
    except WireError:
        return
