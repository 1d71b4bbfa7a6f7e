"""What a bridge counts of its experts: the market as it stands, and what its dispatchers have done altogether."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvasir_peer.experts.dispatcher import DispatchStatistics
from kvasir_peer.experts.market import MarketState
from kvasir_peer.experts.recruitment import load_of
from kvasir_peer.experts.tallies import MAX_DISPATCHERS, Tallies
from kvasir_peer.wire.dispatching import COUNTERS, GAUGES, DispatchFigures


@dataclass(frozen=True)
class ExpertsStatistics:
    """A snapshot of one model's market and dispatch.

    Attributes:
        coordinators, busy, slots, queue: sums over the dispatchers whose readings count.
        saturated, base_target, target: replicas of each expert that are wanted, at least and now.
        wired, retiring, waiting: volunteers that serve, that are told to go, that wait to be needed.
        leases, granted, retired, refused: leases now; leases, retirements and refusals since the start.
        quarantined: peers that are kept out.
        counts: of all dispatchers since the bridge's start: ``local_pairs``, ``remote_pairs``, and the counters of
            :class:`~kvasir_peer.wire.dispatching.DispatchFigures`; they never fall.
        workers: links of dispatchers to workers, by how they stand.
        rows, checked: rows of workers that were used, that were computed again and found right.
    """

    coordinators: int
    busy: int
    slots: int
    queue: int
    saturated: bool
    base_target: int
    target: int
    wired: int
    retiring: int
    waiting: int
    leases: int
    granted: int
    retired: int
    refused: int
    quarantined: int
    counts: Mapping[str, int]
    workers: Mapping[str, int]
    rows: int
    checked: int


def figures_of(statistics: DispatchStatistics) -> DispatchFigures:
    """A dispatcher's own figures, as it sends them to the bridge."""
    breakers = Counter(worker.breaker for worker in statistics.workers if worker.attached)
    return DispatchFigures(
        frames=statistics.frames,
        hedges=statistics.hedges,
        late=statistics.late,
        fallbacks=statistics.fallbacks,
        shadows=statistics.shadows,
        checks=statistics.checks,
        skipped=statistics.skipped_checks,
        refused=statistics.refused_sums,
        caught=len(statistics.caught),
        attached=sum(worker.attached for worker in statistics.workers),
        proven=sum(worker.attached and worker.proven for worker in statistics.workers),
        closed=breakers["closed"],
        half_open=breakers["half-open"],
        open=breakers["open"],
    )


class DispatchTotals:
    """Adds up what dispatchers say of themselves."""

    def __init__(self) -> None:
        self._tallies: Tallies[str] = Tallies()
        self._counts: Counter[str] = Counter()
        self._last: dict[str, DispatchFigures] = {}

    def told(
        self, dispatcher: str, run: int, local_pairs: int, remote_pairs: int, figures: DispatchFigures
    ) -> None:
        """A dispatcher's word."""
        counts = {name: getattr(figures, name) for name in COUNTERS}
        counts |= {"local_pairs": max(0, local_pairs), "remote_pairs": max(0, remote_pairs)}
        self._counts.update(self._tallies.more(dispatcher, run, counts))
        if dispatcher in self._last or len(self._last) < MAX_DISPATCHERS:
            self._last[dispatcher] = figures

    def gone(self, dispatcher: str) -> None:
        """It has no workers any more; what it did stays counted."""
        self._last.pop(dispatcher, None)

    def counts(self) -> Mapping[str, int]:
        """Since the start."""
        return {name: self._counts[name] for name in ("local_pairs", "remote_pairs", *COUNTERS)}

    def workers(self) -> Mapping[str, int]:
        """As they stand at all dispatchers together."""
        return {name: sum(getattr(f, name) for f in self._last.values()) for name in GAUGES}


def experts_statistics(
    state: MarketState, model: str, now: float, totals: DispatchTotals, rows: int, checked: int
) -> ExpertsStatistics | None:
    """A snapshot, or None where the model has no experts."""
    known = state.models.get(model)
    if known is None:
        return None
    load = load_of([state.coordinators[p] for p in known.coordinators], now, state.settings)
    return ExpertsStatistics(
        coordinators=load.coordinators,
        busy=load.busy,
        slots=load.slots,
        queue=load.queue,
        saturated=known.saturation.saturated,
        base_target=state.settings.base,
        target=state.effective_target(model),
        wired=len(known.workers),
        retiring=len(known.retiring),
        waiting=len(state.waiting),
        leases=sum(lease.model == model for lease in state.leases.values()),
        granted=state.granted,
        retired=state.retired,
        refused=state.refused,
        quarantined=len(state.quarantine),
        counts=totals.counts(),
        workers=totals.workers(),
        rows=rows,
        checked=checked,
    )
