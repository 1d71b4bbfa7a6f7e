"""A ring of which everything is known: stages with clocks of their own, links with delay and rate, a bridge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvasir_peer.ring.plan import Plan, PlanStage
from kvasir_peer.ring.telemetry import RingTelemetry
from kvasir_peer.serving.widths import Widths
from kvasir_peer.wire import ring

WIDTHS = Widths(batch_rows=64, micro_batch_rows=16, max_in_flight=16, max_requests=8, context_length=512)


def plan(stages: int, epoch: int = 1) -> Plan:
    places = tuple(PlanStage(f"peer{index}", 2 * index, 2 * index + 2) for index in range(stages))
    return Plan("plan", epoch, "bridge", "model", 2 * stages, 64, 1000, places, WIDTHS)


@dataclass
class TrueRing:
    """Batches go through in order; what really happened is kept beside what the telemetry is told.

    Attributes:
        passes: seconds that each stage needs for a batch.
        delays: one-way seconds of each hop, the last one from the tail to the bridge.
        rates: seconds that a batch occupies the link of each hop.
        clocks: what each stage's clock shows when the bridge's shows 0.
        word: one-way seconds from the head to the bridge.
        start: when the epoch begins.
        truth: for each batch its (start, end) at each stage, on the bridge's clock.
    """

    passes: Sequence[float]
    delays: Sequence[float]
    rates: Sequence[float] = ()
    clocks: Sequence[float] = ()
    word: float = 0.01
    epoch: int = 1
    start: float = 0.0
    telemetry: RingTelemetry = field(default_factory=RingTelemetry)
    truth: list[list[tuple[float, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.passes)
        self.rates = self.rates or [0.0] * count
        self.clocks = self.clocks or [1000.0 * (index + 1) for index in range(count)]
        self._free = [0.0] * count
        self._link_free = [0.0] * count
        self.begin(self.start)

    def begin(self, now: float) -> None:
        self.telemetry.began(plan(len(self.passes), self.epoch), now)
        self._sequence = 0

    def batch(
        self, at: float, runs: Sequence[tuple[int, int, bool]] = ((7, 1, True),), *, late_word: bool = False
    ) -> float:
        """Launch a batch at the head at ``at``; the time at which its tokens are at the bridge."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        trace: list[ring.StageTrace] = []
        bars: list[tuple[float, float]] = []
        arrived, rows = at, sum(count for _, count, _ in runs)
        for stage, seconds in enumerate(self.passes):
            start = max(arrived, self._free[stage])
            end = self._free[stage] = start + seconds
            bars.append((start, end))
            trace.append(
                ring.StageTrace(
                    stage,
                    seconds * 1e3,
                    0.0,
                    0.0,
                    0,
                    arrived + self.clocks[stage],
                    (start - arrived) * 1e3,
                    rows,
                    128 * rows,
                )
            )
            taken = max(end, self._link_free[stage])
            self._link_free[stage] = taken + self.rates[stage]
            arrived = self._link_free[stage] + self.delays[stage]
        self.truth.append(bars)
        composed = ring.Composed("plan", self.epoch, sequence, b"", tuple(runs))
        outputs = tuple(ring.Output(request, 0, 0, 5) for request, _, decode in runs if decode)
        result = ring.Result("plan", self.epoch, sequence, b"", outputs, tuple(trace))
        if late_word:
            self.telemetry.returned(result, arrived)
            self.telemetry.composed(composed, arrived + 0.001)
        else:
            self.telemetry.composed(composed, at + self.word)
            self.telemetry.returned(result, arrived)
        return arrived

    def launch_without_end(self, at: float) -> None:
        """A batch of which nothing is heard again."""
        composed = ring.Composed("plan", self.epoch, self._sequence, b"", ((7, 1, True),))
        self.telemetry.composed(composed, at + self.word)
