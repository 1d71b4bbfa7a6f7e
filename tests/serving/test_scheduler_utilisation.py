"""The ring never drains: throughput, latency and time to first token of the simulated ring, in virtual time."""

from __future__ import annotations

import random

import pytest
from simulate import Ring

from kvasir_peer.serving.costs import Line
from kvasir_peer.serving.requests import Request
from kvasir_peer.serving.scheduler import DEFAULT_POLICY, Policy
from kvasir_peer.serving.widths import Widths

STAGE = Line(0.030, 0.010)
HOP = 0.002  # one relayed hop on loopback, seconds


def widths(rows: int = 64, in_flight: int = 16, requests: int = 64, context: int = 8192) -> Widths:
    return Widths(
        batch_rows=rows * in_flight,
        micro_batch_rows=rows,
        max_in_flight=in_flight,
        max_requests=requests,
        context_length=context,
    )


def decode_rate(
    requests: int,
    *,
    policy: Policy = DEFAULT_POLICY,
    w: Widths | None = None,
    delay: float = HOP,
    seconds: float = 20.0,
    **kwargs: object,
) -> tuple[float, Ring]:
    ring = Ring(w or widths(), [STAGE] * 4, delay=delay, policy=policy, **kwargs)  # type: ignore[arg-type]
    for i in range(requests):
        ring.submit(Request(i, [1, 2, 3], max_tokens=4000))
    rate = ring.throughput(warm_up=10.0, seconds=seconds)
    return rate, ring


@pytest.mark.parametrize("requests", [8, 16])
def test_one_row_micro_batches_keep_four_stages_busy(requests: int) -> None:
    free, ring = decode_rate(requests, w=widths(rows=1))
    alone, _ = decode_rate(requests, w=widths(rows=1, in_flight=1))
    assert free >= 3.8 * alone
    assert max(ring.busy) / 20.0 >= 0.95


@pytest.mark.parametrize("requests", range(1, 17))
def test_free_scheduler_is_as_good_as_the_best_hand_set_pair(requests: int) -> None:
    best = max(
        decode_rate(requests, policy=Policy(hand_set=(in_flight, rows)), seconds=8.0)[0]
        for in_flight in (1, 2, 4, 6)
        for rows in (1, 2, 4, 8)
    )
    free, _ = decode_rate(requests, seconds=8.0)
    assert free >= 0.95 * best


def test_a_long_prompt_alone_fills_the_ring() -> None:
    def first_token(policy: Policy) -> float:
        ring = Ring(widths(), [STAGE] * 4, delay=HOP, policy=policy)
        ring.submit(Request(1, [7] * 2048, max_tokens=1))
        ring.run()
        return ring.streams[1].times[0]

    free = first_token(DEFAULT_POLICY)
    # the best that any chunk size does with one chunk in flight, and the same chunks one after another
    assert free <= 0.35 * min(first_token(Policy(hand_set=(1, rows))) for rows in (32, 48, 64))


@pytest.mark.parametrize("delay", [0.005, 0.020, 0.050])
def test_distance_costs_a_single_stream_only_the_way(delay: float) -> None:
    rate, _ = decode_rate(1, delay=delay)
    assert rate >= 0.9 / (4 * delay + 4 * STAGE.seconds(1))


@pytest.mark.parametrize("delay", [0.005, 0.020, 0.050])
def test_distance_does_not_cost_throughput_when_there_are_requests_enough(delay: float) -> None:
    near, _ = decode_rate(64, delay=0.0)
    far, ring = decode_rate(64, delay=delay)
    assert far >= 0.95 * near
    assert max(ring.busy) / 20.0 >= 0.95


@pytest.mark.parametrize("delay", [0.0, 0.020])
def test_costs_are_learned_when_the_forecast_was_wrong(delay: float) -> None:
    right, _ = decode_rate(12, delay=delay)
    learned, ring = decode_rate(12, delay=delay, expected=[Line(0.2, 0.0001)] * 4)
    assert learned >= 0.95 * right
    costs = ring.scheduler.statistics().costs
    assert costs.stages[0].seconds(3) == pytest.approx(STAGE.seconds(3), rel=0.1)
    assert costs.transit.base == pytest.approx(4 * delay, abs=0.002)


def test_jitter_does_not_let_in_flight_run_away() -> None:
    rng = random.Random(5)
    rate, ring = decode_rate(16, jitter=lambda: rng.uniform(0.8, 1.3))
    steady, _ = decode_rate(16)
    assert rate >= 0.85 * steady
    assert ring.scheduler.statistics().target_in_flight <= 6


def test_a_slow_stage_gets_the_next_batch_and_no_more() -> None:
    ring = Ring(widths(), [Line(0.005, 0.002), Line(0.05, 0.01), Line(0.005, 0.002)], delay=0.001)
    for i in range(16):
        ring.submit(Request(i, [1, 2], max_tokens=4000))
    ring.throughput(warm_up=5.0, seconds=10.0)
    assert ring.busy[1] / 10.0 >= 0.95
    assert ring.scheduler.statistics().in_flight <= 2


def test_decodes_that_share_the_ring_with_prompts_wait_at_most_150_ms_a_hop() -> None:
    ring = Ring(widths(), [STAGE] * 4, delay=HOP)
    for i in range(6):
        ring.submit(Request(i, [1, 2, 3], max_tokens=400))
    ring.run(3.0)
    seen = len(ring.batches)
    ring.submit(Request(100, [7] * 1024, max_tokens=4))
    ring.run(25.0)
    mixed = [b for _, b in ring.batches[seen:] if any(r.phase == "prefill" for r in b.rows)]
    assert mixed
    assert all(STAGE.seconds(len(b.rows)) <= 0.1501 for b in mixed)
    assert any({r.phase for r in b.rows} == {"prefill", "decode"} for b in mixed)
    # a decode waits for what is in its own pass and for the pass before it at each stage
    gaps = [
        b - a
        for i in range(6)
        for a, b in zip(ring.streams[i].times, ring.streams[i].times[1:], strict=False)
    ]
    assert max(gaps) <= 4 * (2 * 0.150 + HOP)
    first = ring.streams[100].times[0] - 3.0
    assert first <= 1024 * 0.010 * 2  # the prompt got most of each pass


def test_a_prompt_is_not_starved_by_many_decodes() -> None:
    ring = Ring(widths(requests=128), [STAGE] * 4, delay=HOP)
    for i in range(100):
        ring.submit(Request(i, [1, 2, 3], max_tokens=4000))
    ring.run(20.0)
    ring.submit(Request(200, [7] * 120, max_tokens=2))
    ring.run(35.0)
    # a quarter of 12 rows each 150 ms: 120 rows in 40 passes, six seconds
    assert ring.streams[200].times and ring.streams[200].times[0] - 20.0 <= 9.0


def test_a_short_prompt_overtakes_a_long_one_and_the_long_one_still_ends() -> None:
    ring = Ring(widths(), [STAGE] * 4, delay=HOP)
    ring.submit(Request(1, [7] * 2000, max_tokens=1))
    ring.run(1.0)
    for i in range(2, 10):
        ring.submit(Request(i, [8] * 20, max_tokens=1))
    ring.run()
    assert all(ring.streams[i].times[0] < 8.0 for i in range(2, 10))
    alone = Ring(widths(), [STAGE] * 4, delay=HOP)
    alone.submit(Request(1, [7] * 2000, max_tokens=1))
    alone.run()
    assert ring.streams[1].times[0] <= 1.3 * alone.streams[1].times[0] + 160 * 0.010


def test_decodes_are_spread_over_the_stages() -> None:
    _, ring = decode_rate(4, delay=0.0)
    sizes = [len(b.rows) for t, b in ring.batches if t > 10.0]
    assert set(sizes) == {1}
    assert min(ring.busy) / 20.0 >= 0.95


def test_slow_links_are_a_bottleneck_like_slow_stages() -> None:
    ring = Ring(widths(), [Line(0.005, 0.0005)] * 3, delay=0.010, row_seconds=0.020)
    for i in range(12):
        ring.submit(Request(i, [1, 2], max_tokens=4000))
    rate = ring.throughput(warm_up=5.0, seconds=10.0)
    assert rate >= 0.95 / 0.020  # the link's own rate


def test_a_coordinator_is_a_ring_of_one_stage() -> None:
    ring = Ring(widths(), [STAGE])
    for i in range(8):
        ring.submit(Request(i, [1, 2], max_tokens=4000))
    rate = ring.throughput(warm_up=5.0, seconds=10.0)
    assert rate >= 0.95 * 8 / STAGE.seconds(8)
