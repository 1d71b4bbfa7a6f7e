"""Longer and longer pauses while something goes on failing."""

from __future__ import annotations

from collections.abc import Sequence

import trio

RETRY_DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds; the last one stays


class Patience:
    """Pauses after failures in a row.

    Args:
        delays: seconds of each; the last one stays.
    """

    def __init__(self, delays: Sequence[float] = RETRY_DELAYS) -> None:
        self._delays = delays
        self.failures = 0

    def succeeded(self) -> None:
        """Begin anew with the shortest pause."""
        self.failures = 0

    @property
    def delay(self) -> float:
        """Seconds of the next pause."""
        return self._delays[min(self.failures, len(self._delays) - 1)]

    async def pause(self, sooner: trio.Event | None = None) -> None:
        """Wait after a failure, at most until an event."""
        delay = self.delay
        self.failures += 1
        if sooner is None:
            await trio.sleep(delay)
            return
        with trio.move_on_after(delay):
            await sooner.wait()
