"""How the routed rows of one layer are shared between the local experts and workers.

Under load what counts is rows per second: everybody should finish together, and nobody should be asked who would
finish later than the local experts alone. When somebody would finish follows from what is under way there already
(:meth:`kvasir_peer.experts.dispatch_policy.Worker.finish`): a row that waits for its turn waits for its way at the same
time. Several micro-batches are interleaved, so a worker has its next rows while its last sums are on their way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvasir_peer.experts.dispatch_policy import Worker

LOCAL = ""  # peer id of the dispatcher's own experts
# Rows of one expert are cut into pieces of this share of an even part, so that everybody can finish together.
PIECE_SHARE = 0.25
# What one more frame costs everybody, for packing, sending and taking it (seconds): nobody is asked too for what would
# save less.
FRAME_SECONDS = 1e-3
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
    now: float = 0.0,
    local_allowed: bool = True,
) -> list[Share]:
    """Share the rows of a layer.

    Args:
        layer: which.
        rows: expert to the number of rows routed to it.
        workers: who may be asked (:func:`kvasir_peer.experts.dispatch_policy.decide`).
        local: cost of the dispatcher's own experts.
        now: seconds, on the clock of the workers' frames.
        local_allowed: False sends everything away that anybody covers (tests, and dispatchers without experts).

    Returns:
        Shares that cover each row of each expert once; experts that no worker covers are local.
    """
    total = sum(rows.values())
    if total == 0:
        return []
    spans = [(w.peer, [(lo, hi) for at, lo, hi in w.ranges if at == layer]) for w in workers]
    able: dict[int, list[str]] = {
        expert: [peer for peer, held in spans if any(lo <= expert < hi for lo, hi in held)] for expert in rows
    }
    ends: dict[str, float] = {LOCAL: local.backlog}
    per_pair: dict[str, float] = {LOCAL: local.per_pair}
    for worker in workers:
        latency = worker.latency
        per_pair[worker.peer] = latency.row_seconds or local.per_pair / UNKNOWN_SPEED
        ends[worker.peer] = max(latency.way, worker.finish(now) - now)
    piece = max(1, int(PIECE_SHARE * total / (len(workers) + 1)))
    out: list[Share] = []
    used = {LOCAL}
    # Experts with few possible places first, then many rows first: the flexible ones even things out.
    for expert in sorted(rows, key=lambda e: (len(able[e]), -rows[e], e)):
        places = able[expert]
        if local_allowed or not places:
            places = [*places, LOCAL]
        left = rows[expert]
        taken: dict[str, int] = {}
        while left:
            count = min(piece, left)
            peer = min(
                places,
                key=lambda p: (
                    ends[p] + count * per_pair[p] + (0.0 if p in used else FRAME_SECONDS),
                    p != LOCAL,
                    p,
                ),
            )
            used.add(peer)
            ends[peer] += count * per_pair[peer]
            taken[peer] = taken.get(peer, 0) + count
            left -= count
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


def hedge_for(
    others: Sequence[Worker],
    layer: int,
    experts: Sequence[int],
    pairs: int,
    local: LocalCost,
    *,
    now: float = 0.0,
) -> str:
    """Who gets the rows of a late worker, too: whoever covers all of them and should be done first."""
    able = [
        (w.finish(now, pairs) - now, w.peer)
        for w in others
        if w.latency.count and all(w.covers(layer, e) for e in experts)
    ]
    return min([(local.backlog + pairs * local.per_pair, LOCAL), *able])[1]
