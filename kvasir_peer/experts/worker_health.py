"""What a dispatcher knows of one worker's speed and reliability: latency, deadline, circuit breaker.

Pure values: each observation returns a new one. A worker that misses one deadline is out at once, since it may serve
many layers and each of them would cost another deadline; it comes back by a single trial that nobody waits for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

# As TCP estimates round trips (RFC 6298): gains of the running mean and of the mean deviation, and how many deviations
# above the mean a deadline lies.
MEAN_GAIN, DEVIATION_GAIN, DEVIATIONS = 0.125, 0.25, 4.0
# A worker is out when it takes so many times as long as forecast, and some. Somebody else is asked before this, so
# patience costs no token; a hiccup of this machine would put all workers out at once.
PATIENCE = 2.0
# That happens when an answer is later than nearly all are, and by this share of the forecast: under load a hedge takes
# from all others what it computes twice.
HEDGE_DEVIATIONS, HEDGE_SHARE = 4.0, 0.25
# The way can only seem too long (an answer waits behind others), so it falls fast; where a frame may have waited for
# its turn it rises slowly.
WAY_FALL, WAY_RISE = 0.5, 0.02
# Deadline of a worker without a history, and its bounds (seconds): no token waits for one while somebody else can be
# asked, and below 250 ms a hiccup of a busy machine would put workers out; above 2 s a token would wait longer than a
# person does.
FIRST_DEADLINE, MIN_DEADLINE, MAX_DEADLINE = 1.0, 0.250, 2.0
# The least that a hedge or deadline leaves over the mean (seconds).
MIN_MARGIN = 0.020
# First and longest time out of dispatch after a failure (seconds); it doubles with each failure in a row.
FIRST_OUT, LONGEST_OUT = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Frame:
    """Rows under way to a worker.

    Attributes:
        number: names it; a worker answers in this order.
        sent: when it went out (seconds).
        pairs: row-expert pairs.
        alone: nothing else was under way when it went out.
        expected: seconds until its answer, as forecast when it went out.
        late_at: from when on its worker is late, and somebody else is asked (seconds).
        deadline: until when it is waited for (seconds).
    """

    number: int
    sent: float
    pairs: int
    alone: bool = True
    expected: float = 0.0
    late_at: float = math.inf
    deadline: float = math.inf


@dataclass(frozen=True, slots=True)
class Latency:
    """Running estimate of what it takes to send rows and have their result.

    A worker computes one frame after the other. How long it needs for a pair shows in the time between two answers
    when the second frame was there before the first was done; the way shows in frames that found it idle.

    Attributes:
        mean: seconds, for a frame as they have been lately; meaningless while ``count`` is 0.
        deviation: of answers from what was forecast, seconds.
        row_seconds: of computing, for each row-expert pair.
        way: neither computing nor waiting for its turn.
        count: frames that were observed.
        weight: pairs of a frame, as they have been lately.
    """

    mean: float = 0.0
    deviation: float = 0.0
    row_seconds: float = 0.0
    way: float = 0.0
    count: int = 0
    weight: float = 1.0

    def observe(
        self,
        seconds: float,
        pairs: int,
        compute_seconds: float,
        *,
        expected: float | None = None,
        since_answer: float | None = None,
        alone: bool = True,
    ) -> Latency:
        """Take up one answer.

        Args:
            seconds: between sending and having it.
            pairs: row-expert pairs.
            compute_seconds: the worker's own word on its computing time.
            expected: what ``seconds`` were forecast to be.
            since_answer: seconds since the worker's answer before this one; None if there was none.
            alone: nothing else was under way when the frame went out.
        """
        way = max(0.0, seconds - compute_seconds)
        if self.count == 0:
            per_pair = compute_seconds / pairs if pairs > 0 else 0.0
            return Latency(seconds, seconds / 2, per_pair, way, 1, float(max(pairs, 1)))
        error = seconds - (self.mean if expected is None else expected)
        # It was there before the worker had done the frame before: what lies between is the work.
        queued = since_answer is not None and not alone and seconds - since_answer >= self.way
        per_pair, weight = self.row_seconds, self.weight
        if pairs > 0:
            spent = (
                max(since_answer, compute_seconds) if queued and since_answer is not None else compute_seconds
            )
            # Weighted by pairs, so that what counts is seconds over pairs, not their mean.
            weight += MEAN_GAIN * (pairs - weight)
            per_pair += MEAN_GAIN * pairs / weight * (spent / pairs - per_pair)
        if way < self.way:
            gain = WAY_FALL
        elif alone:
            gain = MEAN_GAIN
        else:
            gain = 0.0 if queued else WAY_RISE
        return Latency(
            self.mean + MEAN_GAIN * (seconds - self.mean),
            self.deviation + DEVIATION_GAIN * (abs(error) - self.deviation),
            per_pair,
            self.way + gain * (way - self.way),
            self.count + 1,
            weight,
        )

    def finish(self, frames: Iterable[Frame], answered_at: float, now: float) -> float:
        """When the last of some frames should be answered (seconds); ``answered_at``: when the newest answer came."""
        at = answered_at
        for frame in frames:
            at = max(at, frame.sent + self.way) + frame.pairs * self.row_seconds
            at = max(at, now)  # it has not been answered yet
        return at

    def deadline(self, expected: float | None = None) -> float:
        """Seconds after which an answer is late.

        Args:
            expected: seconds that the frame should take; None for one as usual.
        """
        if self.count == 0:
            return FIRST_DEADLINE
        usual = self.mean if expected is None else expected
        margin = max(DEVIATIONS * self.deviation, MIN_MARGIN)
        return min(max(PATIENCE * usual + margin, MIN_DEADLINE), MAX_DEADLINE)

    def hedge_after(self, expected: float | None = None) -> float:
        """Seconds after which the same rows go to somebody else too; always before the deadline."""
        if self.count == 0:
            return FIRST_DEADLINE / 2
        usual = self.mean if expected is None else expected
        margin = max(HEDGE_DEVIATIONS * self.deviation, HEDGE_SHARE * usual, MIN_MARGIN)
        return min(usual + margin, 0.9 * self.deadline(expected))


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
