"""Waiting longer after each failure, with jitter, up to a cap: an outage must not become a storm."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass
class Backoff:
    """Delays between attempts.

    Attributes:
        first: seconds before the second attempt.
        factor: growth after each failure.
        cap: longest delay, seconds.
        random: source of jitter; each delay is drawn from the upper half of its span.
    """

    first: float = 0.5
    factor: float = 2.0
    cap: float = 60.0
    random: random.Random = field(default_factory=random.Random)
    failures: int = 0

    def failed(self) -> float:
        """Note a failure; the seconds to wait before the next attempt."""
        span = min(self.cap, self.first * self.factor ** min(self.failures, 32))
        self.failures += 1
        return span * self.random.uniform(0.5, 1.0)

    def succeeded(self) -> None:
        """Start over."""
        self.failures = 0
