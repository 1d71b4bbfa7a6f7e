"""How the routed rows of one layer are shared between the local experts and workers.

Under load what counts is rows per second: everybody should finish together, and nobody should be asked who would
finish later than the local experts alone. Two or more micro-batches are interleaved, so the way to a worker and back
overlaps with computing another micro-batch; only what such overlap does not hide counts as the worker's latency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvasir_peer.experts.dispatch_policy import Worker

LOCAL = ""  # peer id of the dispatcher's own experts
# Rows of one expert are cut into pieces of this share of an even part, so that everybody can finish together.
PIECE_SHARE = 0.25
# Speed assumed of a worker without a history, relative to the local experts.
UNKNOWN_SPEED = 0.5


@dataclass(frozen=True, slots=True)
class LocalCost:
    """Seconds of the local experts: ``per_pair`` for each row-expert pair, ``backlog`` before this work begins.

    A negative ``per_pair`` is not possible; 0 means that local experts cost nothing, so that nobody else is asked.
    """

    per_pair: float
    backlog: float = 0.0


@dataclass(frozen=True, slots=True)
class Share:
    """Rows of one expert for one peer: the ``count`` rows from index ``first`` of that expert's list."""

    peer: str
    expert: int
    first: int
    count: int


def share_rows(
    layer: int,
    rows: Mapping[int, int],
    workers: Sequence[Worker],
    local: LocalCost,
    *,
    hidden: float = 0.0,
    local_allowed: bool = True,
) -> list[Share]:
    """Share the rows of a layer.

    Args:
        layer: which.
        rows: expert to the number of rows routed to it.
        workers: who may be asked (:func:`kvasir_peer.experts.dispatch_policy.decide`).
        local: cost of the dispatcher's own experts.
        hidden: seconds of waiting that another micro-batch covers.
        local_allowed: False sends everything away that anybody covers (tests, and dispatchers without experts).

    Returns:
        Shares that cover each row of each expert once; experts that no worker covers are local.
    """
    total = sum(rows.values())
    if total == 0:
        return []
    spans = [(w, [(lo, hi) for at, lo, hi in w.ranges if at == layer]) for w in workers]
    able: dict[int, list[Worker]] = {
        expert: [w for w, held in spans if any(lo <= expert < hi for lo, hi in held)] for expert in rows
    }
    slots: dict[str, float] = {LOCAL: local.backlog}
    per_pair: dict[str, float] = {LOCAL: local.per_pair}
    for worker in workers:
        latency = worker.latency
        speed = latency.row_seconds or local.per_pair * (1 / UNKNOWN_SPEED)
        slots[worker.peer] = max(0.0, latency.way - hidden) + worker.outstanding * speed
        per_pair[worker.peer] = speed
    piece = max(1, int(PIECE_SHARE * total / (len(workers) + 1)))
    out: list[Share] = []
    # Experts with few possible places first, then many rows first: the flexible ones even things out.
    for expert in sorted(rows, key=lambda e: (len(able[e]), -rows[e], e)):
        queue = [(slots[w.peer], w.peer) for w in able[expert]]
        if local_allowed or not queue:
            queue.append((slots[LOCAL], LOCAL))
        first = 0
        taken: dict[str, int] = {}
        while first < rows[expert]:
            count = min(piece, rows[expert] - first)
            peer = min(
                (place for _, place in queue),
                key=lambda p: (slots[p] + count * per_pair[p], p != LOCAL, p),
            )
            slots[peer] += count * per_pair[peer]
            taken[peer] = taken.get(peer, 0) + count
            first += count
        first = 0
        for peer, count in taken.items():
            out.append(Share(peer, expert, first, count))
            first += count
    return out


def throughput(workers: Sequence[Worker], local: LocalCost) -> float:
    """Row-expert pairs per second of everybody together."""
    rate = 1 / local.per_pair if local.per_pair > 0 else 0.0
    for worker in workers:
        speed = worker.latency.row_seconds or local.per_pair / UNKNOWN_SPEED
        rate += 1 / speed if speed > 0 else 0.0
    return rate


def hedge_for(worker: Worker, others: Sequence[Worker], layer: int, experts: Sequence[int]) -> str:
    """Who gets the rows of a late worker: the least burdened other that covers all of them, else the local experts."""
    able = [
        (w.outstanding * w.latency.row_seconds + w.latency.mean, w.peer)
        for w in others
        if w.peer != worker.peer and w.latency.count and all(w.covers(layer, e) for e in experts)
    ]
    return min(able)[1] if able else LOCAL
