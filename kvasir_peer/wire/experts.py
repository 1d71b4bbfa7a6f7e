"""Messages of ``/kvasir/experts/1``: a dispatcher sends routed rows to a worker and gets weighted sums back.

The dispatcher (a coordinator, or a ring stage) opens the link with :class:`Hello`; the worker answers
:class:`Welcome` or :class:`Refusal`. Then :class:`Rows` go one way and :class:`Sums` or :class:`Failed` the other,
several outstanding, answered in any order. A row goes to a worker once per layer, with all of its chosen experts
that this worker shall compute and their router weights; back comes one row, the weighted sum over them.

Payload of :class:`Rows`, with ``n`` rows and ``k`` experts a row::

    u16  [n, k]       expert numbers; 0xFFFF is no expert (a row may have fewer than k here)
    f32  [n, k]       router weights
    ...  [n, n_embd]  rows in the link's dtype

Payload of :class:`Sums`: ``[n, n_embd]`` in the link's dtype. Both ends know n_embd from the model, the dtype and the
most rows from the dispatch map, so each derives the same bound of a frame before it takes any memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvasir_peer.errors import WireError
from kvasir_peer.wire.codec import PREFIX_BYTES, Buffer, Codec
from kvasir_peer.wire.tensors import Floats, decode_tensor, encode_tensor, tensor_bytes

PROTOCOL = "/kvasir/experts/1"

DTYPES = ("f16", "f32", "bf16")
NO_EXPERT = 0xFFFF
MAX_EXPERTS = NO_EXPERT  # numbers 0 to 0xFFFE
MAX_ROWS = 4096  # of one frame, whatever a map says
MAX_CHOSEN = 64  # experts of one row; models of today choose up to 10
MAX_OUTSTANDING = 16  # frames that a dispatcher may have at one worker

_MAX_HEADER = 1024

Ints = npt.NDArray[np.int32]


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """First frame of a link.

    Attributes:
        model: manifest id.
        version: of the dispatch map that the dispatcher acts on; a worker that has an older one looks for it.
        dtype: of rows and sums.
        max_rows: most rows that the dispatcher will put in a frame.
    """

    model: str
    version: int
    dtype: str = "f16"
    max_rows: int = 64


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """The worker takes the link.

    Attributes:
        ranges: (layer, lo, hi) that it holds.
        outstanding: frames that it takes at once.
        precision: ``exact`` where its engine computes with float32 activations, else ``fast``.
    """

    ranges: tuple[tuple[int, int, int], ...]
    outstanding: int = MAX_OUTSTANDING
    precision: Literal["exact", "fast"] = "exact"


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """Why a link or a frame is refused; the link is closed after it."""

    code: str
    reason: str


class Rows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one layer; ``id`` names the frame in its answer."""

    id: int
    layer: int
    rows: int
    experts: int


class Sums(msgspec.Struct, frozen=True, array_like=True):
    """The answer: weighted sums, in the order of the rows. ``held_ms``: the engine computed for so long."""

    id: int
    rows: int
    held_ms: float = 0.0


class Failed(msgspec.Struct, frozen=True, array_like=True):
    """This frame can't be computed now; the link stays."""

    id: int
    reason: str


class Leaving(msgspec.Struct, frozen=True, array_like=True):
    """The worker's owner wants the machine back: what is outstanding is answered, nothing new is taken."""

    reason: str = ""


# A welcome names the ranges: up to 4,096 of them, each three integers.
MAX_RANGES = 4096
_MAX_HELD = 1e12  # milliseconds: more than any worker has been there
_U64 = (1 << 64) - 1


def _check(message: Any) -> None:
    """Refuse what no dispatcher or worker means; sizes are checked where the bounds are known.

    Raises:
        WireError: codes ``value`` or ``oversize``.
    """
    match message:
        case Hello():
            _number("version", message.version, 0, _U64)
        case Welcome():
            if len(message.ranges) > MAX_RANGES:
                raise WireError("oversize", f"{len(message.ranges)} ranges, at most {MAX_RANGES}")
            for layer, lo, hi in message.ranges:
                _number("layer", layer, 0, 1 << 16)
                _number("first expert", lo, 0, hi - 1)
                _number("end of experts", hi, 1, MAX_EXPERTS)
            _number("outstanding", message.outstanding, 1, 1 << 16)
        case Rows() | Failed():
            _number("id", message.id, 0, _U64)
        case Sums():
            _number("id", message.id, 0, _U64)
            _number("held_ms", message.held_ms, 0, _MAX_HELD)


def _number(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also false for NaN
        raise WireError("value", f"{name} is {value}, outside {low} to {high}")


CODEC = Codec(
    {1: Hello, 2: Welcome, 3: Refusal, 4: Rows, 5: Sums, 6: Failed, 7: Leaving},
    max_header=_MAX_HEADER,
    check=_check,
)
OPENING = Codec({1: Hello, 2: Welcome, 3: Refusal}, max_header=_MAX_HEADER + MAX_RANGES * 16, check=_check)
MAX_HELLO_FRAME = PREFIX_BYTES + _MAX_HEADER
MAX_WELCOME_FRAME = PREFIX_BYTES + _MAX_HEADER + MAX_RANGES * 16


@dataclass(frozen=True)
class Bounds:
    """What a link may carry.

    Attributes:
        n_embd: width of a row.
        dtype: of rows and sums.
        max_rows: of a frame.
        max_experts: most experts chosen for one row.
    """

    n_embd: int
    dtype: str
    max_rows: int
    max_experts: int

    def check(self) -> None:
        """Refuse bounds that cannot be. Raises WireError: codes ``dtype``, ``oversize``."""
        if self.dtype not in DTYPES:
            raise WireError("dtype", f"rows in {self.dtype!r}; {', '.join(DTYPES)} are known")
        if not 1 <= self.max_rows <= MAX_ROWS:
            raise WireError("oversize", f"frames of {self.max_rows} rows; 1 to {MAX_ROWS} are allowed")
        if not 1 <= self.max_experts <= MAX_CHOSEN:
            raise WireError("oversize", f"{self.max_experts} experts a row; 1 to {MAX_CHOSEN} are allowed")

    @property
    def rows_frame(self) -> int:
        """Most bytes of a frame from the dispatcher."""
        return PREFIX_BYTES + _MAX_HEADER + self.rows_payload(self.max_rows, self.max_experts)

    @property
    def sums_frame(self) -> int:
        """Most bytes of a frame from the worker."""
        return PREFIX_BYTES + _MAX_HEADER + tensor_bytes(self.dtype, self.max_rows, self.n_embd)

    def rows_payload(self, rows: int, experts: int) -> int:
        """Exact bytes of the payload of :class:`Rows`."""
        return rows_bytes(rows, experts, self.n_embd, self.dtype)

    def check_rows(self, message: Rows, payload: Buffer) -> None:
        """Refuse a frame whose header does not fit the bounds, or its payload. Raises WireError."""
        if not 1 <= message.rows <= self.max_rows:
            raise WireError("oversize", f"{message.rows} rows in a frame, 1 to {self.max_rows} are allowed")
        if not 1 <= message.experts <= self.max_experts:
            raise WireError("oversize", f"{message.experts} experts a row, at most {self.max_experts}")
        if message.layer < 0:
            raise WireError("malformed", f"rows of layer {message.layer}")
        size, expected = memoryview(payload).nbytes, self.rows_payload(message.rows, message.experts)
        if size != expected:
            raise WireError("shape", f"rows take {expected} bytes, {size} came")

    def check_sums(self, message: Sums, rows: int, payload: Buffer) -> None:
        """Refuse an answer of another shape than what was asked. Raises WireError: code ``shape``."""
        size, expected = memoryview(payload).nbytes, tensor_bytes(self.dtype, rows, self.n_embd)
        if message.rows != rows or size != expected:
            raise WireError(
                "shape",
                f"{message.rows} sums in {size} bytes for {rows} rows, which take {expected}",
            )


def rows_bytes(rows: int, experts: int, n_embd: int, dtype: str) -> int:
    """Bytes of routed rows in the layout above."""
    return rows * experts * 6 + tensor_bytes(dtype, rows, n_embd)


class Routed(NamedTuple):
    """Decoded rows.

    Attributes:
        ids: int32 [n, k]; -1 where a row has no expert.
        weights: f32 [n, k].
        x: f32 [n, n_embd].
    """

    ids: Ints
    weights: Floats
    x: Floats


def encode_rows(
    ids: Ints, weights: Floats, x: Floats, dtype: str, out: Buffer | None = None
) -> memoryview[Any]:
    """Routed rows in the layout above, written to the start of ``out`` where one is given.

    Args:
        ids: [n, k]; negative is no expert.
        weights: [n, k].
        x: [n, n_embd].
    """
    n, k = ids.shape
    size = rows_bytes(n, k, x.shape[1], dtype)
    target = memoryview(bytearray(size)) if out is None else memoryview(out)[:size]
    pairs = n * k
    np.frombuffer(target[: 2 * pairs], "<u2").reshape(n, k)[:] = np.where(ids < 0, NO_EXPERT, ids)
    np.frombuffer(target[2 * pairs : 6 * pairs], "<f4").reshape(n, k)[:] = weights
    encode_tensor(x, dtype, target[6 * pairs :])
    return target


def decode_rows(data: Buffer, rows: int, experts: int, n_embd: int, dtype: str) -> Routed:
    """The arrays of routed rows, all copies; the size must be exact. Raises WireError: code ``shape``."""
    view = memoryview(data)
    if view.nbytes != rows_bytes(rows, experts, n_embd, dtype):
        raise WireError("shape", f"{view.nbytes} bytes are not {rows} rows of {experts} experts in {dtype}")
    pairs = rows * experts
    ids = np.frombuffer(view[: 2 * pairs], "<u2").astype(np.int32).reshape(rows, experts)
    ids[ids == NO_EXPERT] = -1
    weights = np.frombuffer(view[2 * pairs : 6 * pairs], "<f4").astype(np.float32).reshape(rows, experts)
    return Routed(ids, weights, decode_tensor(view[6 * pairs :], dtype, rows, n_embd))
