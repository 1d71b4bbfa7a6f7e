"""What coordinators say that workers have computed, as growth since they said it last.

A coordinator counts from its start on; ``run`` tells one start from another. Of each coordinator only its present run
is remembered, and of that only what its last answer named, so that none can fill a bridge's memory by naming new ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

# Coordinators that are remembered; one that was forgotten and comes back in the same run is counted anew.
MAX_COORDINATORS = 1_024


@dataclass
class _Run:
    run: int
    counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class Tallies:
    """Use :meth:`more` with each answer."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, _Run] = OrderedDict()

    def more(
        self, coordinator: str, run: int, workers: Iterable[tuple[str, int, int]]
    ) -> list[tuple[str, int, int]]:
        """What is new in an answer.

        Args:
            coordinator: who says it.
            run: of its start.
            workers: (peer, rows, checked) since that start.

        Returns:
            (peer, rows, checked) of those that have done something since the last answer of the same run.
        """
        known = self._runs.pop(coordinator, None)
        if known is None or known.run != run:
            known = _Run(run)
        told = {peer: (rows, checked) for peer, rows, checked in workers}
        found = []
        for peer, (rows, checked) in told.items():
            before = known.counts.get(peer, (0, 0))
            # Fewer than before: the coordinator had forgotten the worker, and has begun to count it anew.
            if rows < before[0] or checked < before[1]:
                before = (0, 0)
            more = (max(0, rows - before[0]), max(0, checked - before[1]))
            if any(more):
                found.append((peer, *more))
        known.counts = told
        self._runs[coordinator] = known
        while len(self._runs) > MAX_COORDINATORS:
            self._runs.popitem(last=False)
        return found

    def __len__(self) -> int:
        """Counts that are remembered."""
        return sum(len(known.counts) for known in self._runs.values())
