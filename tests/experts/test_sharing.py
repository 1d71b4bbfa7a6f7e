"""Rows of a layer are shared so that everybody finishes together."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_peer.experts.dispatch_policy import Worker
from kvasir_peer.experts.sharing import LOCAL, LocalCost, Share, hedge_for, share_rows, throughput
from kvasir_peer.experts.worker_health import Latency


def worker(
    peer: str, lo: int = 0, hi: int = 8, *, way: float = 0.0, pair: float = 0.001, outstanding: int = 0
) -> Worker:
    return Worker(
        peer, ((3, lo, hi),), 0.0, 1e9, outstanding=outstanding, latency=Latency(way, way / 10, pair, way, 50)
    )


def finish(shares: list[Share], workers: list[Worker], local: LocalCost) -> dict[str, float]:
    out = {LOCAL: local.backlog} | {
        w.peer: w.latency.mean + w.outstanding * w.latency.row_seconds for w in workers
    }
    cost = {LOCAL: local.per_pair} | {w.peer: w.latency.row_seconds for w in workers}
    for share in shares:
        out[share.peer] += share.count * cost[share.peer]
    return out


def test_equal_peers_get_equal_parts() -> None:
    shares = share_rows(
        3, dict.fromkeys(range(8), 16), [worker("a"), worker("b"), worker("c")], LocalCost(0.001)
    )
    parts = Counter[str]()
    for share in shares:
        parts[share.peer] += share.count
    assert sum(parts.values()) == 128
    assert max(parts.values()) - min(parts.values()) <= 16


def test_a_slower_one_gets_less_and_a_far_one_too() -> None:
    workers = [worker("near"), worker("slow", pair=0.004), worker("far", way=0.040)]
    parts = Counter[str]()
    for share in share_rows(3, dict.fromkeys(range(8), 16), workers, LocalCost(0.001)):
        parts[share.peer] += share.count
    assert parts["near"] > parts["slow"] and parts["near"] > parts["far"]


def test_a_way_that_other_work_covers_costs_nothing() -> None:
    far = worker("far", way=0.040)
    open_way = share_rows(3, {0: 20}, [far], LocalCost(0.001))
    covered = share_rows(3, {0: 20}, [far], LocalCost(0.001), hidden=0.1)
    assert all(share.peer == LOCAL for share in open_way)
    assert sum(share.count for share in covered if share.peer == "far") >= 8


def test_work_that_is_outstanding_counts() -> None:
    workers = [worker("free"), worker("full", outstanding=1000)]
    assert {s.peer for s in share_rows(3, {0: 8}, workers, LocalCost(0.001))} <= {"free", LOCAL}


def test_nobody_who_does_not_cover_an_expert_gets_its_rows() -> None:
    workers = [worker("a", 0, 4), worker("b", 4, 6)]
    for share in share_rows(3, dict.fromkeys(range(8), 4), workers, LocalCost(0.001)):
        if share.peer == "a":
            assert share.expert < 4
        elif share.peer == "b":
            assert 4 <= share.expert < 6
    assert all(s.peer == LOCAL for s in share_rows(2, {0: 4}, workers, LocalCost(0.001)))


def test_all_remote_where_it_is_asked_for() -> None:
    shares = share_rows(
        3, dict.fromkeys(range(8), 1), [worker("a", way=1.0)], LocalCost(0.0), local_allowed=False
    )
    assert {s.peer for s in shares} == {"a"}


def test_throughput_adds_up() -> None:
    assert throughput([worker("a"), worker("b", pair=0.002)], LocalCost(0.001)) == pytest.approx(2500)


def test_a_hedge_goes_to_the_least_burdened_replica_else_to_the_local_experts() -> None:
    late, near, busy = worker("late"), worker("near", way=0.01), worker("busy", way=0.01, outstanding=100)
    assert hedge_for(late, [late, busy, near], 3, [1, 2]) == "near"
    assert hedge_for(late, [late, worker("part", 0, 2)], 3, [1, 2]) == LOCAL
    assert hedge_for(late, [late], 3, [1]) == LOCAL


@given(
    st.dictionaries(st.integers(0, 15), st.integers(1, 40), min_size=1, max_size=16),
    st.lists(
        st.tuples(
            st.integers(0, 15),
            st.integers(1, 16),
            st.floats(0.0, 0.05),
            st.floats(0.0001, 0.01),
            st.integers(0, 50),
        ),
        max_size=6,
    ),
    st.floats(0.0001, 0.01),
)
@settings(max_examples=100, deadline=None)
def test_each_row_goes_to_exactly_one_place_and_no_worker_makes_it_worse(
    rows: dict[int, int], raw: list[tuple[int, int, float, float, int]], local: float
) -> None:
    workers = [
        worker(f"w{i}", lo, min(16, lo + n), way=way, pair=pair, outstanding=out)
        for i, (lo, n, way, pair, out) in enumerate(raw)
    ]
    cost = LocalCost(local)
    shares = share_rows(3, rows, workers, cost)
    seen: dict[int, list[bool]] = {expert: [False] * n for expert, n in rows.items()}
    for share in shares:
        for i in range(share.first, share.first + share.count):
            assert not seen[share.expert][i]
            seen[share.expert][i] = True
        assert share.peer == LOCAL or next(w for w in workers if w.peer == share.peer).covers(3, share.expert)
    assert all(all(s) for s in seen.values())
    times = finish(shares, workers, cost)
    used = {share.peer for share in shares}
    alone = sum(rows.values()) * local
    assert max(times[p] for p in used) <= alone + max(
        [w.latency.row_seconds * max(rows.values()) for w in workers] + [local * max(rows.values())]
    )
