"""The membership of a batch: which rows of which requests are computed together.

It is composed once, by the head, and travels with the boundary to every stage, byte for byte the same. Bytes::

    u32  number of rows
    ...  rows, 24 bytes each (:data:`ROW`)
    ...  msgpack array: one :class:`~kvasir_peer.wire.sampling.Sampling` for each row that wants an output, in order

Rows of one slot stand together, with ascending positions: a *run* (one decode row, or a prefill chunk).
``through`` says how many stages, from the head on, compute a row: all of them, except for rows that are computed
again for a replaced stage, whose later stages still hold their KV entries. A boundary holds only the rows that the
next stage computes; the membership always holds all.

Each membership is bound into a chain: ``digest = SHA-256(domain, plan, epoch, sequence, previous digest, bytes)``,
which the head signs. A stage that sees another membership than the head composed, or one out of order, finds
another digest and refuses the batch.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvasir_peer.errors import WireError
from kvasir_peer.wire.codec import Buffer
from kvasir_peer.wire.sampling import MAX_LOGIT_BIAS, Sampling

ROW = np.dtype(
    [
        ("request", "<u8"),
        ("slot", "<u2"),
        ("incarnation", "<u4"),
        ("position", "<u4"),
        ("token", "<u4"),
        ("flags", "u1"),
        ("through", "u1"),
    ]
)
FLAG_DECODE = 1  # the row carries a token that the tail gave; otherwise it belongs to a prefill chunk
FLAG_OUTPUT = 2  # the tail samples a token from this row
_FLAGS = FLAG_DECODE | FLAG_OUTPUT

# A msgpack map entry of a logit bias takes at most 14 bytes; the other twelve parameters at most 9 each.
MAX_SAMPLING_BYTES = 14 * MAX_LOGIT_BIAS + 160
# Up to so many rows are looked at one by one: two microseconds each, where looking at all at once takes two hundred.
FEW_ROWS = 64
# Most bytes of any membership. It crosses every hop and every agent's socket to its engine as one message, so widths
# that would make a larger one are refused with the plan: some 1,900 requests with 300 biases each in one micro-batch.
MAX_MEMBERSHIP_BYTES = 8 << 20
GENESIS = bytes(32)  # the digest before the first batch of an epoch

_COUNT = struct.Struct("<I")
_CHAIN = struct.Struct("<IQ")
_DOMAIN = b"kvasir membership 1\0"
_samplings = msgspec.msgpack.Decoder(list[Sampling])
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Limits:
    """What a plan allows a membership to hold."""

    rows: int
    slots: int
    context_length: int
    vocab: int
    top_logprobs: int
    stages: int

    @property
    def outputs(self) -> int:
        """Most rows of a batch that want an output: one of each request that it holds rows of."""
        return min(self.rows, self.slots)

    @property
    def bytes(self) -> int:
        """Most bytes of an encoded membership."""
        return membership_bytes(self.rows, self.slots)


def membership_bytes(rows: int, slots: int) -> int:
    """Most bytes of the membership of so many rows of so many requests: each row is counted once, and the largest
    sampling parameters for each row that wants an output."""
    return _COUNT.size + rows * ROW.itemsize + min(rows, slots) * MAX_SAMPLING_BYTES + 5


@dataclass(frozen=True)
class Membership:
    """Rows ``[n]`` of :data:`ROW` and the sampling parameters of the rows that want an output."""

    rows: npt.NDArray[np.void]
    samplings: tuple[Sampling, ...]

    @property
    def wants_output(self) -> npt.NDArray[np.bool_]:
        """bool ``[n]``."""
        return (self.rows["flags"] & FLAG_OUTPUT).astype(bool)

    def rows_at(self, stage: int) -> int:
        """Rows that the stage with this index computes."""
        return int(np.count_nonzero(self.rows["through"] > stage))

    def encode(self) -> bytes:
        """The canonical bytes."""
        return _COUNT.pack(len(self.rows)) + self.rows.tobytes() + _encoder.encode(self.samplings)


def compose(
    rows: Sequence[tuple[int, int, int, int, int, int, int]], samplings: Sequence[Sampling]
) -> Membership:
    """A membership from ``(request, slot, incarnation, position, token, flags, through)`` tuples."""
    return Membership(np.array(rows, dtype=ROW), tuple(samplings))


def decode_membership(data: Buffer, limits: Limits) -> Membership:
    """Parse and check a membership.

    Raises:
        WireError: code ``oversize`` over the plan's widths, ``malformed`` for bytes that do not parse,
            ``membership`` for rows that cannot be (a slot twice, positions that jump, a token outside the
            vocabulary), ``sampling`` for parameters out of range.
    """
    view = memoryview(data)
    if view.nbytes > limits.bytes:
        raise WireError("oversize", f"membership of {view.nbytes} bytes, the plan allows {limits.bytes}")
    if view.nbytes < _COUNT.size:
        raise WireError("malformed", "membership without a row count")
    (count,) = _COUNT.unpack_from(view)
    if not 1 <= count <= limits.rows:
        raise WireError("oversize", f"{count} rows in a batch, the plan allows 1 to {limits.rows}")
    end = _COUNT.size + count * ROW.itemsize
    if end > view.nbytes:
        raise WireError("malformed", f"{count} rows do not fit in {view.nbytes} bytes")
    rows = np.frombuffer(view[_COUNT.size : end], dtype=ROW)
    try:
        samplings = tuple(_samplings.decode(view[end:]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError("malformed", f"sampling parameters: {error}") from None
    wanted = _check_few(rows.tolist(), limits) if count <= FEW_ROWS else _check_rows(rows, limits)
    if wanted > limits.outputs:
        raise WireError("membership", f"{wanted} rows want an output, the plan allows {limits.outputs}")
    if len(samplings) != wanted:
        raise WireError(
            "membership", f"{len(samplings)} sampling parameters for {wanted} rows that want an output"
        )
    for sampling in samplings:
        sampling.check(top_logprobs=limits.top_logprobs)
    return Membership(rows, samplings)


_Row = tuple[int, int, int, int, int, int, int]


def _check_few(rows: list[_Row], limits: Limits) -> int:
    """As :func:`_check_rows`, row by row."""
    wanted, seen = 0, set[int]()
    before: _Row | None = None
    for row in rows:
        request, slot, incarnation, position, token, flags, through = row
        if slot >= limits.slots or position >= limits.context_length or token >= limits.vocab:
            raise WireError(
                "membership",
                f"slot {slot}, position {position} or token {token} is outside the plan's {limits.slots}, "
                f"{limits.context_length} and {limits.vocab}",
            )
        if flags > _FLAGS:
            raise WireError("membership", f"flags {flags} are not known")
        if not 1 <= through <= limits.stages:
            raise WireError("membership", f"a row passes {through} of {limits.stages} stages")
        if flags & FLAG_OUTPUT:
            wanted += 1
            if through != limits.stages:
                raise WireError("membership", "a row that wants an output does not pass all stages")
        if before is None or before[1] != slot:
            if slot in seen:
                raise WireError("membership", "a slot appears in two runs of one batch")
            seen.add(slot)
        elif (before[0], before[2], before[3] + 1) != (request, incarnation, position):
            raise WireError("membership", "request, incarnation or position jumps inside a run")
        elif before[6] > through:
            raise WireError("membership", "later rows of a run pass fewer stages than earlier ones")
        before = row
    return wanted


def _check_rows(rows: npt.NDArray[np.void], limits: Limits) -> int:
    """Refuse rows that cannot be; returns how many want an output.

    Raises:
        WireError: code ``membership``.
    """
    for field, bound in (
        ("slot", limits.slots),
        ("position", limits.context_length),
        ("token", limits.vocab),
    ):
        worst = int(rows[field].max())
        if worst >= bound:
            raise WireError("membership", f"{field} {worst} is outside the plan's {bound}")
    if int(rows["flags"].max()) > _FLAGS:
        raise WireError("membership", f"flags {int(rows['flags'].max())} are not known")
    through = rows["through"]
    if not 1 <= int(through.min()) <= int(through.max()) <= limits.stages:
        raise WireError(
            "membership", f"rows pass {through.min()} to {through.max()} of {limits.stages} stages"
        )
    if (through[(rows["flags"] & FLAG_OUTPUT) != 0] != limits.stages).any():
        raise WireError("membership", "a row that wants an output does not pass all stages")
    slots = rows["slot"].astype(np.int64)
    same = slots[1:] == slots[:-1]
    starts = np.concatenate(([0], np.flatnonzero(~same) + 1))
    if len(np.unique(slots[starts])) != len(starts):
        raise WireError("membership", "a slot appears in two runs of one batch")
    for field, step in (("position", 1), ("request", 0), ("incarnation", 0)):
        if (np.diff(rows[field].astype(np.uint64))[same] != step).any():
            raise WireError("membership", f"{field} jumps inside a run")
    # Each stage must find a run without gaps: what it still holds is always the beginning of a text.
    if (np.diff(through.astype(np.int64))[same] < 0).any():
        raise WireError("membership", "later rows of a run pass fewer stages than earlier ones")
    return int(((rows["flags"] & FLAG_OUTPUT) != 0).sum())


def chain_digest(plan: bytes, epoch: int, sequence: int, previous: bytes, membership: Buffer) -> bytes:
    """The 32-byte digest that binds a membership to its plan, epoch, sequence and predecessor."""
    digest = hashlib.sha256(_DOMAIN)
    digest.update(len(plan).to_bytes(2, "little") + plan)
    digest.update(_CHAIN.pack(epoch, sequence))
    digest.update(previous)
    digest.update(membership)
    return digest.digest()
