"""Volunteers are not believed: which of their rows are computed again, and what a difference means.

Pure arithmetic over arrays; the shell computes the checks (locally, or by a second replica) and asks here what to check
and what to think of it. Two modes:

*sampled*: a worker's first frame is checked whole, then one row in 16 until it has computed 1,000 rows, then one row in
64. The row is drawn anew in each block of 16 (64) from a secret, so a worker cannot know which of its rows is looked
at, and one that lies in every row is caught within two blocks.

*strict*: every row is checked before it is used, or computed by two workers that agree. Rows of such a pair are
sampled like those of the first mode, since two workers may be one liar's.

A difference over the *hard* bound is a lie at once. Differences that honest engines show too often are caught by their
mean: a worker whose last checks differ by more than the *soft* bound on average is out as well.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Mode = Literal["sampled", "strict"]

EARLY_BLOCK, EARLY_ROWS = 16, 1000  # one row in 16 for the first thousand rows
LATE_BLOCK = 64  # then one in 64
SOFT_CHECKS = 8  # checks over whose mean the soft bound holds
REMEMBERED = 1024  # workers whose work is counted; those that have been silent longest are forgotten first

# A row whose norm is so many times the largest one seen locally in its layer is refused without computing anything.
NORM_FACTOR = 64.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Relative differences ``|theirs - ours| / |ours|`` of one row.

    Attributes:
        hard: above it a single row is a lie.
        soft: above it the mean of the last :data:`SOFT_CHECKS` rows is one.
        smallest: root mean square of a row under which the format has no more relative precision.
    """

    hard: float
    soft: float
    smallest: float = 0.0


# What rounding on the way costs, relative to a row's norm (half a unit in the last place of the format, over rows of
# random signs): f32 nothing, f16 2**-11, bf16 2**-8.
_WIRE = {"f32": 0.0, "f16": 4.9e-4, "bf16": 3.9e-3}
# Smallest normal number of the format; below it f16 has fewer and fewer digits.
_SMALLEST = {"f32": 0.0, "f16": 6.2e-5, "bf16": 0.0}
# What engines differ by at the precision they check at. ``exact`` (fp32 activations: MatMulNBits level 0, torch fp32)
# agrees between engines and CPUs to 1.3e-6 of an expert's output; ``fast`` (level 4, int8 activations) has 1.2 % noise
# of its own, and differs by about 1 % between CPU kinds.
_ENGINE = {"exact": 2e-6, "fast": 1.7e-2}


def bounds_for(wire: str, precision: str) -> Bounds:
    """Bounds for a wire dtype (``f32``, ``f16``, ``bf16``) and the less exact of the two engines' precisions.

    Honest differences stay under a third of ``soft`` and a tenth of ``hard`` (f32 and exact engines: under a hundredth
    of it, since summation order may differ by more on long rows).

    Raises:
        KeyError: an unknown dtype or precision.
    """
    expected = math.hypot(_WIRE[wire], _ENGINE[precision])
    return Bounds(hard=max(10.0 * expected, 2e-4), soft=max(3.0 * expected, 6e-5), smallest=_SMALLEST[wire])


def differences(theirs: Floats, ours: Floats, bounds: Bounds) -> npt.NDArray[np.float64]:
    """Relative difference of each row: ``[n, width]`` twice gives ``[n]``.

    Rows under ``bounds.smallest`` are measured against that: a tiny row loses its digits on the wire, which is no lie.
    """
    apart = np.linalg.norm(theirs.astype(np.float64) - ours.astype(np.float64), axis=1)
    size = np.linalg.norm(ours.astype(np.float64), axis=1)
    floor = max(bounds.smallest * math.sqrt(ours.shape[1]), 1e-30)
    return apart / np.maximum(size, floor)


def inspect(rows: npt.NDArray[np.generic], count: int, width: int, largest: float) -> str:
    """What is plainly wrong with what came back; an empty string when nothing is.

    Args:
        rows: as decoded from the frame.
        count, width: what was asked for.
        largest: largest norm of a local row of this layer that has been seen; 0 if none has.
    """
    if rows.shape != (count, width):
        return f"shape {list(rows.shape)} came back, {[count, width]} was asked for"
    values = rows.astype(np.float32, copy=False)
    norms = np.sqrt(np.einsum("ij,ij->i", values, values, dtype=np.float64))
    if not np.isfinite(norms).all():
        return f"row {int(np.flatnonzero(~np.isfinite(norms))[0])} is not finite"
    if largest > 0 and float(norms.max(initial=0.0)) > NORM_FACTOR * largest:
        return f"a row of norm {float(norms.max()):.3g}, where {largest:.3g} was the largest"
    return ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``caught`` is empty for a worker that may go on, else says why not."""

    caught: str = ""
    worst: float = 0.0


@dataclass(slots=True)
class _Record:
    rows: int = 0
    frames: int = 0
    block_end: int = 0
    pick: int = -1
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=SOFT_CHECKS))


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What has been verified of one worker since the start (for the ledger), however often it left in between.

    Attributes:
        rows: that were used.
        checked: rows computed again, here or by another worker, and found right.
        mean_difference: of its last checks.
    """

    rows: int
    checked: int
    mean_difference: float


class Verifier:
    """Keeps, for each worker, which rows to check and what the checks have shown.

    Args:
        mode: see the module.
        secret: unknown to workers; draws the rows.
    """

    def __init__(self, mode: Mode, secret: bytes) -> None:
        self.mode = mode
        self._secret = secret
        self._records: dict[str, _Record] = {}
        self._work: dict[str, tuple[int, int]] = {}  # rows used, rows found right; the latest last

    def plan(self, peer: str, count: int, *, twice: bool = False) -> npt.NDArray[np.intp]:
        """Indices of the rows to check in the next frame of ``count`` rows from this worker.

        Call it once for each frame, in the order in which the frames were sent: rows are counted here.

        Args:
            twice: another worker computes the same rows.
        """
        record = self._records.setdefault(peer, _Record())
        first = record.rows
        record.rows += count
        record.frames += 1
        if (self.mode == "strict" and not twice) or record.frames == 1:
            record.block_end = max(record.block_end, record.rows)
            return np.arange(count)
        out: list[int] = []
        for row in range(first, record.rows):
            if row >= record.block_end:
                size = EARLY_BLOCK if row < EARLY_ROWS else LATE_BLOCK
                record.pick = row + self._draw(peer, row, size)
                record.block_end = row + size
            if row == record.pick:
                out.append(row - first)
        return np.array(out, dtype=np.intp)

    def _draw(self, peer: str, row: int, size: int) -> int:
        digest = hashlib.blake2b(f"{peer}/{row}".encode(), key=self._secret[:64], digest_size=8).digest()
        return int.from_bytes(digest, "little") % size

    def checked(self, peer: str, apart: Sequence[float] | npt.NDArray[np.float64], bounds: Bounds) -> Verdict:
        """Take up the differences of rows that were checked."""
        record = self._records.setdefault(peer, _Record())
        worst = 0.0
        for difference in apart:
            value = float(difference)
            worst = max(worst, value) if math.isfinite(value) else math.inf
            if not value <= bounds.hard:  # NaN too
                return Verdict(f"a row differs by {value:.3g} from what it should be", worst)
            self._add(peer, 0, 1)
            record.recent.append(value)
            if len(record.recent) == SOFT_CHECKS:
                mean = sum(record.recent) / SOFT_CHECKS
                if mean > bounds.soft:
                    return Verdict(
                        f"its last {SOFT_CHECKS} checked rows differ by {mean:.3g} on average", worst
                    )
        return Verdict("", worst)

    def used(self, peer: str, rows: int, *, agreed: bool = False) -> None:
        """So many of its rows were used; ``agreed``: another worker has computed the same."""
        self._add(peer, rows, rows if agreed else 0)

    def _add(self, peer: str, rows: int, checked: int) -> None:
        before = self._work.pop(peer, (0, 0))
        self._work[peer] = (before[0] + rows, before[1] + checked)
        if len(self._work) > REMEMBERED:
            del self._work[next(iter(self._work))]

    def record(self, peer: str) -> WorkerRecord:
        """What is known of a worker."""
        known = self._records.get(peer, _Record())
        mean = sum(known.recent) / len(known.recent) if known.recent else 0.0
        return WorkerRecord(*self._work.get(peer, (0, 0)), mean)

    def work(self) -> tuple[tuple[str, int, int], ...]:
        """``(worker, rows used, rows found right)`` of all that have worked here."""
        return tuple((peer, *counts) for peer, counts in self._work.items())

    def forget(self, peer: str) -> None:
        """Its coverage has ended: when it comes back, its first frame is checked whole again."""
        self._records.pop(peer, None)

    def workers(self) -> list[str]:
        """Peers with a record."""
        return list(self._records)


class Exposure:
    """Which live requests have used rows of which worker that nobody has checked.

    When a worker is caught, each of these requests is rewound to the first such position. A worker that leaves, or
    comes back with other experts, is remembered until these requests have ended: a check of its rows may still wait.
    """

    def __init__(self) -> None:
        self._first: dict[str, dict[int, int]] = {}

    def used(self, peer: str, rows: Iterable[tuple[int, int]], checked: Iterable[int] = ()) -> None:
        """``rows``: (request, position) in the frame's order; ``checked``: indices that were found right."""
        right = set(checked)
        mine = self._first.setdefault(peer, {})
        for i, (request, position) in enumerate(rows):
            if i not in right:
                mine[request] = min(position, mine.get(request, position))

    def finished(self, request: int) -> None:
        """The request has ended: nothing of it can be made again."""
        for peer, mine in list(self._first.items()):
            mine.pop(request, None)
            if not mine:
                del self._first[peer]

    def rewound(self, request: int, position: int) -> None:
        """Everything from ``position`` on is computed again: what was used there before no longer counts."""
        for mine in self._first.values():
            if mine.get(request, -1) >= position:
                del mine[request]

    def caught(self, peer: str) -> Mapping[int, int]:
        """Request to the position that it must be rewound to; the worker's exposure ends with that."""
        return self._first.pop(peer, {})
