"""What the relay counts. Plain numbers; nothing in them names a peer or an address."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

# Seconds that bytes waited at the relay: upper bounds of the histogram's buckets.
WAIT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class CountersStatistics:
    """Counts since the start.

    Attributes:
        bytes_to_target, bytes_to_source: carried, by direction.
        circuits: opened.
        circuits_ended: by reason.
        reservations: granted, renewals included.
        refusals: by (what was asked for, reason).
        connections: accepted.
        handshakes_failed: connections that never proved who they are.
        wait_counts: how many waits were in each of ``WAIT_BUCKETS``, and longer ones.
        wait_sum: seconds waited, all of them.
    """

    bytes_to_target: int
    bytes_to_source: int
    circuits: int
    circuits_ended: dict[str, int]
    reservations: int
    refusals: dict[tuple[str, str], int]
    connections: int
    handshakes_failed: int
    wait_counts: tuple[int, ...]
    wait_sum: float


class Counters:
    """Counts since the start of the relay."""

    def __init__(self) -> None:
        self.bytes = [0, 0]
        self.circuits = 0
        self.circuits_ended: Counter[str] = Counter()
        self.reservations = 0
        self.refusals: Counter[tuple[str, str]] = Counter()
        self.connections = 0
        self.handshakes_failed = 0
        self._waits = [0] * (len(WAIT_BUCKETS) + 1)
        self._wait_sum = 0.0

    def carried(self, direction: int, n: int) -> None:
        """``n`` bytes arrived on a circuit; direction 0 is to the target, 1 to the source."""
        self.bytes[direction] += n

    def waited(self, seconds: float) -> None:
        """Bytes were sent on ``seconds`` after they arrived."""
        self._waits[bisect_left(WAIT_BUCKETS, seconds)] += 1
        self._wait_sum += seconds

    def refused(self, what: str, reason: str) -> None:
        """Somebody was refused: ``what`` is connection, reservation, circuit or invite."""
        self.refusals[what, reason] += 1

    def statistics(self) -> CountersStatistics:
        """A snapshot."""
        return CountersStatistics(
            self.bytes[0],
            self.bytes[1],
            self.circuits,
            dict(self.circuits_ended),
            self.reservations,
            dict(self.refusals),
            self.connections,
            self.handshakes_failed,
            tuple(self._waits),
            self._wait_sum,
        )
