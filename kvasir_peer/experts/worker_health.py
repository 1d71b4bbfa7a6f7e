"""What a dispatcher knows of one worker's speed and reliability: latency, deadline, circuit breaker.

Pure values: each observation returns a new one. A worker that misses one deadline is out at once, since it may serve
many layers and each of them would cost another deadline; it comes back by a single trial that nobody waits for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# As TCP estimates round trips (RFC 6298): gains of the running mean and of the mean deviation, and how many deviations
# above the mean a deadline lies.
MEAN_GAIN, DEVIATION_GAIN, DEVIATIONS = 0.125, 0.25, 4.0
# A hedge goes out when an answer is later than most, though not yet late.
HEDGE_DEVIATIONS = 2.0
# Deadline of a worker without a history, and its bounds (seconds): below 30 ms the event loop's own jitter would
# count as a failure, above 2 s a token would wait longer than a person does.
FIRST_DEADLINE, MIN_DEADLINE, MAX_DEADLINE = 1.0, 0.030, 2.0
# The least that a hedge or deadline leaves over the mean (seconds).
MIN_MARGIN = 0.010
# First and longest time out of dispatch after a failure (seconds); it doubles with each failure in a row.
FIRST_OUT, LONGEST_OUT = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Latency:
    """Running estimate of the time between sending rows and having their result.

    Attributes:
        mean, deviation: seconds, for a frame as they have been lately; meaningless while ``count`` is 0.
        row_seconds: of which for each row-expert pair computed.
        way: of which neither computing nor depending on how much was asked.
        count: frames that were observed.
    """

    mean: float = 0.0
    deviation: float = 0.0
    row_seconds: float = 0.0
    way: float = 0.0
    count: int = 0

    def observe(self, seconds: float, pairs: int, compute_seconds: float) -> Latency:
        """Take up one answer: its time, row-expert pairs, and the worker's own word on its computing time."""
        per_pair = compute_seconds / pairs if pairs > 0 else 0.0
        way = max(0.0, seconds - compute_seconds)
        if self.count == 0:
            return Latency(seconds, seconds / 2, per_pair, way, 1)
        error = seconds - self.mean
        return Latency(
            self.mean + MEAN_GAIN * error,
            self.deviation + DEVIATION_GAIN * (abs(error) - self.deviation),
            self.row_seconds + MEAN_GAIN * (per_pair - self.row_seconds) if pairs > 0 else self.row_seconds,
            self.way + MEAN_GAIN * (way - self.way),
            self.count + 1,
        )

    def deadline(self, scale: float = 1.0) -> float:
        """Seconds after which an answer is late. ``scale``: how much larger than usual the frame is."""
        if self.count == 0:
            return FIRST_DEADLINE
        margin = max(DEVIATIONS * self.deviation, MIN_MARGIN)
        return min(max(self.mean * max(scale, 1.0) + margin, MIN_DEADLINE), MAX_DEADLINE)

    def hedge_after(self, scale: float = 1.0) -> float:
        """Seconds after which the same rows go to somebody else too; always before the deadline."""
        if self.count == 0:
            return FIRST_DEADLINE / 2
        margin = max(HEDGE_DEVIATIONS * self.deviation, MIN_MARGIN / 2)
        return min(self.mean * max(scale, 1.0) + margin, 0.9 * self.deadline(scale))


@dataclass(frozen=True, slots=True)
class Breaker:
    """A circuit breaker.

    Attributes:
        failures: in a row.
        open_until: no work before this (seconds); after it one trial may go out (half open).
        trial: a trial is on its way.
    """

    failures: int = 0
    open_until: float = 0.0
    trial: bool = False

    def state(self, now: float) -> Literal["closed", "open", "half-open"]:
        if self.failures == 0:
            return "closed"
        return "open" if self.trial or now < self.open_until else "half-open"

    def failed(self, now: float) -> Breaker:
        """An answer was late, wrong, or the link was lost."""
        out = min(FIRST_OUT * 2.0**self.failures, LONGEST_OUT)
        return Breaker(min(self.failures + 1, 16), now + out, False)

    def tried(self) -> Breaker:
        """The trial has gone out."""
        return replace(self, trial=True)

    def succeeded(self) -> Breaker:
        """An answer came in time and was right."""
        return Breaker()
