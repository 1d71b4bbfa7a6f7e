"""Token buckets. Pure: the time is passed in.

A bucket fills at ``rate`` tokens a second up to ``burst``, and starts full. Tokens are bytes or requests.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


class TokenBucket:
    """One bucket. A rate of 0 means no limit.

    Args:
        rate: tokens per second; 0 for no limit.
        burst: tokens that a full bucket holds; at least 1.
        now: seconds, any clock that never goes back.
    """

    __slots__ = ("_level", "_time", "burst", "rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self.burst = max(burst, 1.0)
        self._level = self.burst
        self._time = now

    def level(self, now: float) -> float:
        """Tokens in the bucket; negative while a debt is paid off."""
        if now > self._time:
            self._level = min(self.burst, self._level + (now - self._time) * self.rate)
            self._time = now
        return self._level

    def take(self, n: float, now: float) -> bool:
        """Take ``n`` tokens if they are there (or if the bucket is full and could never hold ``n``)."""
        if not self.rate:
            return True
        if self.level(now) < min(n, self.burst):
            return False
        self._level -= n
        return True

    def wait(self, n: float, now: float) -> float:
        """Seconds until :meth:`take` of ``n`` would succeed; 0 if it would now."""
        if not self.rate:
            return 0.0
        return max(0.0, (min(n, self.burst) - self.level(now)) / self.rate)

    def change(self, rate: float, burst: float, now: float) -> None:
        """New rate and burst from now on; what is in the bucket stays, up to the new burst."""
        self.level(now)
        self.rate, self.burst = rate, max(burst, 1.0)
        self._level = min(self._level, self.burst)


@dataclass(frozen=True, slots=True)
class RateTableStatistics:
    """What a rate table holds.

    Attributes:
        keys: buckets in memory.
        capacity: the most there may be.
    """

    keys: int
    capacity: int


class RateTable:
    """A bucket for each key, in bounded memory.

    Full buckets are forgotten, since a new one would be full too. When even so there are too many, the key that
    was used least recently is forgotten: an attacker who can present that many keys (addresses, identities) gains
    one burst for each, which is what new keys are granted anyway.

    Args:
        per_minute: tokens per minute and key; 0 for no limit.
        burst: tokens at once.
        capacity: keys held at most.
    """

    def __init__(self, per_minute: float, burst: float, capacity: int = 16384) -> None:
        self._rate = per_minute / 60.0
        self._burst = burst
        self._capacity = capacity
        self._buckets: dict[Hashable, TokenBucket] = {}

    def take(self, key: Hashable, now: float) -> bool:
        """Take one token of ``key``'s bucket, if there is one."""
        if not self._rate:
            return True
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            if len(self._buckets) >= self._capacity:
                self._forget(now)
            bucket = TokenBucket(self._rate, self._burst, now)
        self._buckets[key] = bucket  # last in the dict: most recently used
        return bucket.take(1, now)

    def _forget(self, now: float) -> None:
        full = [key for key, bucket in self._buckets.items() if bucket.level(now) >= bucket.burst]
        for key in full:
            del self._buckets[key]
        while len(self._buckets) >= self._capacity:
            del self._buckets[next(iter(self._buckets))]

    def change(self, per_minute: float, burst: float, now: float) -> None:
        """New rate and burst for all keys."""
        self._rate, self._burst = per_minute / 60.0, burst
        for bucket in self._buckets.values():
            bucket.change(self._rate, burst, now)

    def statistics(self) -> RateTableStatistics:
        """Size now."""
        return RateTableStatistics(len(self._buckets), self._capacity)
