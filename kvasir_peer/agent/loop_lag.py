"""How late the event loop is: the promise is that it never computes, and this shows whether that holds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import trio

PERIOD = 0.01  # seconds; fine enough to see a lag of 20 ms, cheap enough to run always
WINDOW = 3000  # samples kept: half a minute


@dataclass(frozen=True)
class LagStatistics:
    """Lateness of the loop over the last half minute, milliseconds."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    samples: int


class LoopLag:
    """Wakes up on a beat and notes how late it woke."""

    def __init__(self) -> None:
        self._late: deque[float] = deque(maxlen=WINDOW)

    async def run(self) -> None:
        """Measure until cancelled."""
        due = trio.current_time() + PERIOD
        while True:
            await trio.sleep_until(due)
            now = trio.current_time()
            self._late.append(max(0.0, now - due))
            due = max(due + PERIOD, now + PERIOD / 2)

    def statistics(self) -> LagStatistics:
        """A snapshot; zeros before the first beat."""
        late = sorted(self._late)
        if not late:
            return LagStatistics(0.0, 0.0, 0.0, 0)
        pick = lambda q: late[min(len(late) - 1, int(q * len(late)))] * 1e3  # noqa: E731
        return LagStatistics(pick(0.5), pick(0.99), late[-1] * 1e3, len(late))
