"""How many micro-batches to keep in flight, and how many rows to put in each: functions over measured costs.

A ring with M micro-batches of r rows in flight gives, per second, ``M × r`` rows over the larger of its round trip
(each batch must come back before its decodes can go again) and the time the slowest stage needs for all M of them.
More micro-batches than round trip / slowest stage only pay the fixed cost of a pass once more; fewer leave the
slowest stage without the next one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvasir_peer.serving.costs import RingCosts
from kvasir_peer.serving.widths import Widths

# Seconds a hop may take for a batch that a decode shares, or may have to wait behind.
DECODE_HOP = 0.150
# Seconds a hop may take while no request decodes: larger chunks are more efficient, yet whoever comes next waits
# behind at most one of them at each stage.
PREFILL_HOP = 0.300
# Mixed batches: fewest micro-batches that reach this share of the best throughput. Each further one makes every
# decode wait for one more pass.
MIXED_SHARE = 0.97
# Decodes alone: with just as many micro-batches as the round trip holds, each delay anywhere leaves every later stage
# without work. Where requests allow, there are as many as a longer round trip would hold: longer by a share that is
# always there (hand-overs, links), and by what passes are seen to be off their usual time, times the deviations that a
# queue of one has to cover; at most by so much as puts one more micro-batch before every second stage.
DECODE_SPARE, DECODE_DEVIATIONS, MOST_SPARE = 0.05, 2.0, 0.5
# Prefill alone: a quarter of a batch more than the round trip holds, so that the slowest stage finds the next one
# waiting in spite of jitter. Nobody's decode waits for it.
PREFILL_SPARE = 0.25


@dataclass(frozen=True, slots=True)
class Shape:
    """What the next batches should look like.

    Attributes:
        in_flight: micro-batches to keep in the ring.
        rows: rows of a batch at most.
        decode_rows: of which decodes at most.
    """

    in_flight: int
    rows: int
    decode_rows: int


def row_cap(costs: RingCosts, seconds: float, widths: Widths) -> int:
    """Most rows of a batch whose every hop stays within ``seconds``, at least one.

    Where the fixed cost of a pass alone is over the bound, the rows may take as long again as the fixed cost:
    smaller batches would not help the decode, only waste the pass.
    """
    rows = costs.rows_within(seconds)
    if rows == 0:
        rows = costs.rows_within(max(seconds, 2.0 * max(line.base for line in costs.stages)))
    return max(1, min(rows, widths.micro_batch_rows))


def _spare(costs: RingCosts) -> float:
    return 1.0 + min(DECODE_SPARE + DECODE_DEVIATIONS * costs.jitter, MOST_SPARE)


def decode_throughput(costs: RingCosts, requests: int, in_flight: int, rows: int) -> float:
    """Rows per second when so many requests decode in batches of ``rows``, ``in_flight`` of them."""
    full, rest = divmod(requests, rows)
    if in_flight <= full:
        full, rest = in_flight, 0
    busy = full * costs.slowest(rows) + (costs.slowest(rest) if rest else 0.0)
    longest = costs.round_trip(rows if full else rest)
    cycle = max(busy, longest)
    return (full * rows + rest) / cycle if cycle > 0 else math.inf


def decode_shape(costs: RingCosts, requests: int, widths: Widths) -> Shape:
    """Best number of micro-batches and rows for so many decodes and nothing else.

    Requests may wait for their turn: nine requests in four batches of two, one of them waiting, are faster
    than batches of three, two, two and two, because all wait for the longest.
    """
    cap = min(row_cap(costs, DECODE_HOP, widths), requests)
    best = Shape(1, 1, 1)
    best_rate = 0.0
    sizes = list(range(1, min(cap, 16) + 1))
    size = 16
    while size < cap:  # beyond 16 rows a step of an eighth changes the fixed cost's share by under a percent
        size = min(cap, size + max(1, size // 8))
        sizes.append(size)
    for rows in sizes:
        fill = costs.round_trip(rows) / max(costs.slowest(rows), 1e-9)
        limit = min(widths.max_in_flight, max(1, widths.batch_rows // rows))
        counts = {math.floor(fill), math.ceil(fill), requests // rows, math.ceil(requests / rows)}
        for count in sorted(min(max(c, 1), limit) for c in counts):
            rate = decode_throughput(costs, requests, count, rows)
            if rate > best_rate * 1.001:  # ties go to the smaller batch, which each token passes sooner
                best, best_rate = Shape(count, rows, rows), rate
    rows = best.decode_rows
    fill = _spare(costs) * costs.round_trip(rows) / max(costs.slowest(rows), 1e-9)
    most = min(requests // rows, widths.max_in_flight, max(1, widths.batch_rows // rows))
    return Shape(max(best.in_flight, min(math.ceil(fill), most)), rows, rows)


def chunk_rows(costs: RingCosts, backlog: int, widths: Widths) -> int:
    """Rows of a prefill chunk that bring ``backlog`` rows through an otherwise idle ring soonest.

    Small chunks pay the fixed cost more often, large ones let the later stages wait: the time is
    ``chunks × slowest + (round trip - slowest)``. Called again for what is left, it tapers the last chunks.
    """
    cap = min(row_cap(costs, PREFILL_HOP, widths), backlog)
    best, best_time = cap, math.inf
    rows = 1
    while True:
        slowest = costs.slowest(rows)
        time = math.ceil(backlog / rows) * slowest + costs.round_trip(rows) - slowest
        if time <= best_time:
            best, best_time = rows, time
        if rows >= cap:
            return best
        rows = min(cap, max(rows + 1, rows * 9 // 8))


def mixed_shape(costs: RingCosts, decodes: int, backlog: int, widths: Widths) -> Shape:
    """Batches that carry prefill chunks, and the decodes of so many requests spread over them."""
    if decodes:
        rows = row_cap(costs, DECODE_HOP, widths)
        fill = MIXED_SHARE * costs.round_trip(rows) / max(costs.slowest(rows), 1e-9)
    else:
        rows = chunk_rows(costs, backlog, widths)
        fill = PREFILL_SPARE + costs.round_trip(rows) / max(costs.slowest(rows), 1e-9)
    limit = min(widths.max_in_flight, max(1, widths.batch_rows // rows))
    count = min(max(math.ceil(fill - 1e-9), 1), limit)
    return Shape(count, rows, math.ceil(decodes / count) if decodes else rows)
