"""What a pass costs: a line (seconds, seconds per row) per stage and for the way between them, as measured.

The scheduler bounds batches in time by it, and chooses how many of them are in flight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Weight of a new measurement in the running mean of its bucket once it has settled: a change of speed (the owner
# starts a game) is followed within some tens of batches, one hiccup is not.
SMOOTHING = 0.1
# A measurement counts at most this many times the expectation: one pass that was swapped out must not halve
# every batch that follows, while a lasting change still gets through in a few steps.
OUTLIER = 3.0
SETTLED = 3  # measurements of a bucket after which there is something that they can be off from
# Transit times can only be too long (frames queue behind others), so the estimate falls fast and rises slowly:
# otherwise more batches in flight would look like a longer way, which would ask for still more batches.
TRANSIT_FALL = 0.5
TRANSIT_RISE = 0.02
# Seconds after which a bucket that got no measurement weighs a third of a fresh one.
BUCKET_AGE = 30.0
# The fitted lines change at most this often (seconds), so that decisions derived from them can be kept.
REFIT_PERIOD = 0.25


@dataclass(frozen=True, slots=True)
class Line:
    """``seconds(rows) = base + per_row × rows`` (seconds)."""

    base: float
    per_row: float

    def seconds(self, rows: int) -> float:
        return self.base + self.per_row * rows


@dataclass(frozen=True, slots=True)
class StageTrace:
    """What one stage says about one batch, in seconds on its own clock.

    Attributes:
        held: from taking the batch up until its result was ready.
        waited: between the batch's arrival and its being taken up, plus the time its result then waited for
            the next stage to take it.
    """

    held: float
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class RingCosts:
    """A frozen view of the measured costs.

    Attributes:
        stages: line of each stage's pass.
        hop_per_row: seconds that one row takes on one link between neighbours (bytes of a row / link rate).
        transit: line of everything that is neither computing nor waiting, over all hops, tail to head included.
        jitter: what passes are off their usual time by, on average, as a share of it.
    """

    stages: tuple[Line, ...]
    hop_per_row: float
    transit: Line
    jitter: float = 0.0

    def slowest(self, rows: int) -> float:
        """Seconds between two batches of so many rows where they pass slowest, be it a stage or a link."""
        stage = max(line.base + line.per_row * rows for line in self.stages)
        return max(stage, self.hop_per_row * rows)

    def hop(self, rows: int) -> float:
        """Seconds that a row spends at the slowest stage and on the link behind it, nothing else waiting."""
        return max(line.base + line.per_row * rows for line in self.stages) + self.hop_per_row * rows

    def round_trip(self, rows: int) -> float:
        """Seconds from the head's start to the tokens' arrival at the head, nothing else in the ring."""
        return sum(line.base + line.per_row * rows for line in self.stages) + self.transit.seconds(rows)

    def rows_within(self, seconds: float) -> int:
        """Most rows with which every hop takes at most ``seconds``; 0 where not even one row does."""
        best = math.inf
        for line in self.stages:
            room = seconds - line.base
            if room < 0:
                return 0
            slope = line.per_row + self.hop_per_row
            if slope > 0:
                best = min(best, room / slope)
        return 1 << 30 if best > 1 << 30 else int(best + 1e-9)


class _Fit:
    """A line through running means, one per power of two of rows."""

    def __init__(
        self, prior: Line, *, fall: float = SMOOTHING, rise: float = SMOOTHING, clip: bool = True
    ) -> None:
        self._prior = prior
        self._fall = fall
        self._rise = rise
        self._clip = clip
        self._buckets: dict[int, list[float]] = {}  # [count, mean rows, mean seconds, time of the last]
        self.line = prior

    def observe(self, rows: int, seconds: float, now: float) -> float | None:
        """Take a measurement up; its distance from what was usual, as a share, where enough is known for one."""
        bucket = self._buckets.get(rows.bit_length())
        if bucket is None:
            self._buckets[rows.bit_length()] = [1.0, float(rows), seconds, now]
            return None
        count, mean_rows, mean_seconds, _ = bucket
        expected = mean_seconds + self.line.per_row * (rows - mean_rows)
        off = None
        if self._clip and count >= SETTLED and expected > 0:
            seconds = min(seconds, OUTLIER * expected)
            off = abs(seconds - expected) / expected
        weight = self._fall if seconds < expected else self._rise
        if self._clip:
            weight = max(weight, 1.0 / (count + 1.0))  # a plain mean until there are enough
        bucket[0] = min(count + 1.0, 1e6)
        bucket[1] = mean_rows + weight * (rows - mean_rows)
        bucket[2] = mean_seconds + weight * (seconds - mean_seconds)
        bucket[3] = now
        return off

    def refit(self, now: float) -> Line:
        if not self._buckets:
            return self.line
        points = [
            (min(c, 10.0) * (0.02 + math.exp(-max(0.0, now - at) / BUCKET_AGE)), r, s)
            for c, r, s, at in self._buckets.values()
        ]
        total = sum(w for w, _, _ in points)
        rows = sum(w * r for w, r, _ in points) / total
        seconds = sum(w * s for w, _, s in points) / total
        spread = sum(w * (r - rows) ** 2 for w, r, _ in points) / total
        if len(points) < 2 or spread < 1e-9:
            # One size was seen: keep the prior's shape, scaled to pass through it.
            guess = self._prior.seconds(round(rows))
            scale = seconds / guess if guess > 0 else 0.0
            self.line = (
                Line(self._prior.base * scale, self._prior.per_row * scale)
                if guess > 0
                else Line(seconds, 0.0)
            )
            return self.line
        slope = sum(w * (r - rows) * (s - seconds) for w, r, s in points) / total / spread
        slope = max(0.0, slope)
        base = seconds - slope * rows
        if base < 0:
            base, slope = 0.0, seconds / rows if rows > 0 else 0.0
        self.line = Line(base, slope)
        return self.line


class CostModel:
    """Measured costs of a ring, started from what the plan forecasts.

    Args:
        stages: expected line of each stage's pass, head first.
        hop_per_row: seconds a row takes on the slowest link (bytes per row / bytes per second).
        transit: expected line of the way of a batch over all hops, without computing.
    """

    def __init__(
        self, stages: Sequence[Line], *, hop_per_row: float = 0.0, transit: Line = Line(0.0, 0.0)
    ) -> None:
        assert stages, "a ring has stages"
        self._stages = [_Fit(line) for line in stages]
        self._transit = _Fit(transit, fall=TRANSIT_FALL, rise=TRANSIT_RISE, clip=False)
        self._hop_per_row = hop_per_row
        self._jitter = 0.0
        self._refitted = -math.inf
        self._fresh = False
        self.version = 0
        self.costs = RingCosts(tuple(stages), hop_per_row, transit)

    @property
    def n_stages(self) -> int:
        return len(self._stages)

    def observe(
        self, rows: Sequence[int], traces: Sequence[StageTrace], round_trip: float, now: float
    ) -> None:
        """Take up what one batch has shown.

        Args:
            rows: rows that each stage computed.
            traces: one per stage; a different number (an older plan's) is ignored.
            round_trip: seconds between sending the batch and its result's arrival.
            now: seconds.
        """
        if len(traces) != len(self._stages) or len(rows) != len(traces):
            return
        spent = 0.0
        for fit, count, trace in zip(self._stages, rows, traces, strict=True):
            if not (0.0 <= trace.held < math.inf and 0.0 <= trace.waited < math.inf):
                return
            spent += trace.held + trace.waited
            off = fit.observe(count, trace.held, now) if count > 0 else None
            if off is not None:
                self._jitter += SMOOTHING / len(traces) * (off - self._jitter)
        if rows[-1] == rows[0] > 0:
            self._transit.observe(rows[0], max(0.0, round_trip - spent), now)
        self._fresh = True

    def refresh(self, now: float) -> RingCosts:
        """The costs as they stand, fitted again when there is news and the last fit is old enough."""
        if self._fresh and now - self._refitted >= REFIT_PERIOD:
            self._fresh = False
            self._refitted = now
            self.version += 1
            self.costs = RingCosts(
                tuple(fit.refit(now) for fit in self._stages),
                self._hop_per_row,
                self._transit.refit(now),
                self._jitter,
            )
        return self.costs

    def expect(self, stages: Sequence[Line], *, hop_per_row: float | None = None) -> None:
        """Start again from another plan's forecast (its stages are others)."""
        self._stages = [_Fit(line) for line in stages]
        if hop_per_row is not None:
            self._hop_per_row = hop_per_row
        self.version += 1
        self.costs = RingCosts(tuple(stages), self._hop_per_row, self.costs.transit)
