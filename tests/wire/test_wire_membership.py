"""The membership: what the head composed is what every stage sees, or the batch is refused."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_peer.engines import orders
from kvasir_peer.errors import PlanError, WireError
from kvasir_peer.serving.widths import MAX_MICRO_BATCH_ROWS, Widths
from kvasir_peer.wire import membership, ring
from kvasir_peer.wire.membership import (
    FLAG_DECODE,
    FLAG_OUTPUT,
    GENESIS,
    MAX_MEMBERSHIP_BYTES,
    MAX_SAMPLING_BYTES,
    Limits,
    chain_digest,
    compose,
    decode_membership,
    membership_bytes,
)
from kvasir_peer.wire.sampling import MAX_LOGIT_BIAS, Sampling

LIMITS = Limits(rows=8, slots=4, context_length=64, vocab=512, top_logprobs=2, stages=3)


def example() -> bytes:
    rows = [
        (7, 0, 1, 5, 300, FLAG_DECODE | FLAG_OUTPUT, 3),
        (9, 2, 1, 0, 1, 0, 3),
        (9, 2, 1, 1, 403, FLAG_OUTPUT, 3),
    ]
    return compose(rows, [Sampling(temperature=0.0), Sampling(seed=3)]).encode()


def test_it_round_trips_and_its_bytes_are_canonical() -> None:
    data = example()
    back = decode_membership(data, LIMITS)
    assert back.encode() == data
    assert back.wants_output.tolist() == [True, False, True]
    assert back.rows_at(2) == 3
    assert len(data) <= LIMITS.bytes


@pytest.mark.parametrize(
    ("rows", "samplings", "code"),
    [
        ([(1, 4, 0, 0, 1, 0, 3)], [], "membership"),
        ([(1, 0, 0, 64, 1, 0, 3)], [], "membership"),
        ([(1, 0, 0, 0, 512, 0, 3)], [], "membership"),
        ([(1, 0, 0, 0, 1, 8, 3)], [], "membership"),
        ([(1, 0, 0, 0, 1, 0, 3), (1, 0, 0, 2, 1, 0, 3)], [], "membership"),
        ([(1, 0, 0, 0, 1, 0, 3), (2, 0, 0, 1, 1, 0, 3)], [], "membership"),
        ([(1, 0, 0, 0, 1, 0, 3), (1, 0, 1, 1, 1, 0, 3)], [], "membership"),
        ([(1, 0, 0, 0, 1, 0, 3), (2, 1, 0, 0, 1, 0, 3), (1, 0, 0, 1, 1, 0, 3)], [], "membership"),
        ([(1, 0, 0, 0, 1, FLAG_OUTPUT, 3)], [], "membership"),
        ([(1, 0, 0, 0, 1, FLAG_OUTPUT, 3)], [Sampling(temperature=float("nan"))], "sampling"),
        ([(1, 0, 0, 0, 1, FLAG_OUTPUT, 3)], [Sampling(top_logprobs=3)], "sampling"),
        ([(1, 0, 0, 0, 1, 0, 0)], [], "membership"),
        ([(1, 0, 0, 0, 1, 0, 4)], [], "membership"),
        ([(1, 0, 0, 0, 1, FLAG_OUTPUT, 2)], [Sampling()], "membership"),
        ([(1, 0, 0, 0, 1, 0, 3), (1, 0, 0, 1, 1, 0, 2)], [], "membership"),
        ([(1, 0, 0, p, 1, 0, 3) for p in range(9)], [], "oversize"),
    ],
)
def test_memberships_that_cannot_be_are_refused_by_name(rows: list, samplings: list, code: str) -> None:
    with pytest.raises(WireError) as caught:
        decode_membership(compose(rows, samplings).encode(), LIMITS)
    assert caught.value.code == code


ROWS = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.integers(0, 4),
        st.integers(0, 2),
        st.sampled_from([0, 1, 2, 3, 63, 64]),
        st.sampled_from([0, 511, 512]),
        st.integers(0, 4),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=6,
)
RUN = st.builds(
    lambda request, slot, first, count, through: [
        (request, slot, 1, first + i, 5, FLAG_OUTPUT if i + 1 == count else 0, through) for i in range(count)
    ],
    st.integers(1, 9),
    st.integers(0, 3),
    st.integers(0, 60),
    st.integers(1, 4),
    st.sampled_from([3, 3, 3, 2]),
)


@given(
    st.one_of(
        ROWS,
        st.lists(RUN, min_size=1, max_size=3).map(lambda runs: [row for run in runs for row in run]),
    )
)
@settings(deadline=None)
def test_rows_one_by_one_and_all_at_once_are_taken_and_refused_alike(rows: list) -> None:
    array = compose(rows, []).rows
    verdicts = []
    for check, seen in ((membership._check_few, array.tolist()), (membership._check_rows, array)):
        try:
            verdicts.append(check(seen, LIMITS))
        except WireError as error:
            verdicts.append(error.code)
    assert verdicts[0] == verdicts[1]


@given(st.binary(max_size=400))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    try:
        decode_membership(data, LIMITS)
    except WireError:
        return


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_changed_byte_changes_the_digest(index: int, value: int) -> None:
    data = bytearray(example())
    index %= len(data)
    before = chain_digest(b"plan", 1, 4, GENESIS, bytes(data))
    changed = data[index] != value
    data[index] = value
    assert (chain_digest(b"plan", 1, 4, GENESIS, bytes(data)) != before) == changed


def test_the_digest_binds_plan_epoch_sequence_and_predecessor() -> None:
    data = example()
    digests = {
        chain_digest(plan, epoch, sequence, previous, data)
        for plan in (b"a", b"b")
        for epoch in (1, 2)
        for sequence in (1, 2)
        for previous in (GENESIS, b"\1" * 32)
    }
    assert len(digests) == 16


def test_the_widest_batch_that_any_plan_allows_fits_its_bounds_up_to_the_engine() -> None:
    """Every row is of another request and has the largest sampling parameters, and the widths only just pass."""
    rows = next(n for n in itertools.count(1) if membership_bytes(n + 1, n + 1) > MAX_MEMBERSHIP_BYTES)
    Widths(rows, rows, 1, rows, 64).check()
    with pytest.raises(PlanError, match=f"micro_batch_rows {rows + 1} and max_requests {rows + 1} allow"):
        Widths(rows + 1, rows + 1, 1, rows + 1, 64).check()
    Widths(MAX_MICRO_BATCH_ROWS, MAX_MICRO_BATCH_ROWS, 1, 1024, 64).check()
    bias = {2**32 - 1 - i: -99.123456789 for i in range(MAX_LOGIT_BIAS)}
    worst = Sampling(0.123, 2**31, 0.123, 0.1, 0.9, 1.1, 1.5, 1.5, bias, 2**64 - 1, True, 20, 2**31)
    limits = Limits(rows, rows, context_length=64, vocab=512, top_logprobs=20, stages=3)
    data = compose([(2**64 - 1, n, 1, 63, 511, FLAG_OUTPUT, 3) for n in range(rows)], [worst] * rows).encode()
    assert 0.95 * limits.bytes < len(data) <= limits.bytes
    assert len(decode_membership(data, limits).samplings) == rows
    order = orders.pack(orders.Pass(2**62, 2**62, 256, data, 2**40, tuple(range(1024))))
    message, _ = orders.CODEC.decode(order[orders.LENGTH.size :])
    assert message.membership == data
    ring.codec(limits).encode(ring.Batch("p" * 128, 2**32 - 1, 2**64 - 1, data, bytes(32), bytes(64), ()))


def test_more_rows_want_an_output_than_there_are_requests() -> None:
    rows = [(1, 0, 1, position, 1, FLAG_OUTPUT, 3) for position in range(5)]
    with pytest.raises(WireError, match="5 rows want an output, the plan allows 4"):
        decode_membership(compose(rows, [Sampling()] * 5).encode(), LIMITS)


@pytest.mark.parametrize("token", [-1, 1 << 32, 1 << 62])
def test_a_bias_for_a_token_that_no_vocabulary_has_is_refused(token: int) -> None:
    with pytest.raises(WireError, match="no vocabulary"):
        Sampling(logit_bias={token: 1.0}).check()


def test_the_largest_sampling_fits_the_bound_of_a_row() -> None:
    bias = {2**31 - i: -99.123456789 for i in range(MAX_LOGIT_BIAS)}
    worst = Sampling(0.123, 2**31 - 1, 0.123, 0.1, 0.9, 1.1, 1.5, 1.5, bias, 2**64 - 1, True, 20, 2**31 - 1)
    worst.check()
    assert len(msgspec.msgpack.encode(worst)) <= MAX_SAMPLING_BYTES
