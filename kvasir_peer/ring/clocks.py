"""What the stages' clocks show, brought onto the bridge's clock.

Every machine counts seconds from a zero of its own. A batch leaves one stage before it reaches the next, so each batch
bounds the difference of their clocks: of ``arrival - departure``, each on its own machine's clock, the least that was
ever seen belongs to the batch that had the quickest way. That least is the difference of the clocks plus the way's
own time, as in NTP's clock filter (RFC 5905, section 10).

How the rest is split follows from the ring being closed through the bridge, which sees each batch twice on its own
clock: when the head says that it has composed it, and when the tail's tokens come. The sum of the ways over all hops
is thereby *measured*; only its division among the hops is an assumption: in proportion to the links' round-trip times,
or evenly where none is known yet. So no batch is ever drawn to arrive before it left, all of a batch's hops together
have the length that they had, and a single hop may be off by what its way there differs from its way back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Seconds per second by which two quartz clocks may drift apart: a least that is old may be too small by so much.
DRIFT = 50e-6


class Least:
    """The least of what was measured, which rises by :data:`DRIFT` as it grows old."""

    def __init__(self) -> None:
        self._value = math.inf
        self._at = 0.0
        self._stale = False

    def observe(self, value: float, now: float) -> None:
        """Take a measurement (seconds) up."""
        if self._stale or value < self.at(now):
            self._value, self._at, self._stale = value, now, False

    def forget(self) -> None:
        """Let the next measurement count, whatever it is."""
        self._stale = True

    def at(self, now: float) -> float:
        """The least as it counts now; infinite before the first measurement."""
        return self._value + DRIFT * (now - self._at)


class RingClocks:
    """The clocks of one epoch's stages.

    Args:
        stages: how many.
    """

    def __init__(self, stages: int) -> None:
        # Hop s leads from stage s to stage s + 1; the last one from the tail to the bridge.
        self._hops = [Least() for _ in range(stages)]
        self._word = Least()  # from the head to the bridge

    def composed(self, launched: float, heard: float) -> None:
        """The head launched a batch, on its clock, and the bridge heard of it, on its own."""
        self._word.observe(heard - launched, heard)

    def passed(self, arrived: Sequence[float], departed: Sequence[float], returned: float) -> None:
        """A batch came through: at each stage, on its clock, and to the bridge, on its own."""
        for hop, here, there in zip(self._hops, departed, (*arrived[1:], returned), strict=True):
            hop.observe(there - here, returned)

    def changed(self, hop: int) -> None:
        """The link of a hop goes another way now: what was its least says nothing any more."""
        self._hops[hop].forget()

    def least(self, hop: int, now: float) -> float:
        """Least of arrival minus departure, each on its own clock; infinite where nothing passed yet."""
        return self._hops[hop].at(now)

    def offsets(self, ways: Sequence[float], now: float) -> list[float]:
        """What to add to a time of each stage's clock to have it on the bridge's.

        Args:
            ways: seconds that each hop is believed to take one way, and at the end the way from the head to the
                bridge; of the hops' only the proportions count where the head's word was heard. If empty, nothing
                is known, and all are taken for alike.

        Returns:
            Seconds for each stage; empty where some hop has not been passed yet.
        """
        leasts = [hop.at(now) for hop in self._hops]
        if not all(map(math.isfinite, leasts)):
            return []
        count = len(leasts)
        heard = self._word.at(now)
        shares = list(ways[:count]) or [0.0] * count
        if math.isfinite(heard):
            # Around the ring by the hops, and back by the head's word: the clocks' differences cancel out.
            around = max(0.0, sum(leasts) - heard)
            total = around + ways[count] if ways else around * count / (count - 1)
            believed = sum(shares)
            shares = [total * way / believed for way in shares] if believed else [total / count] * count
        offsets = [0.0] * count
        offset = 0.0
        for stage in reversed(range(count)):
            offset += leasts[stage] - shares[stage]
            offsets[stage] = offset
        return offsets
