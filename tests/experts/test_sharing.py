"""Rows of a layer are shared so that everybody finishes together."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_peer.experts.dispatch_policy import Worker
from kvasir_peer.experts.sharing import LOCAL, LocalCost, Share, hedge_for, share_rows, throughput
from kvasir_peer.experts.worker_health import Frame, Latency


def worker(
    peer: str, lo: int = 0, hi: int = 8, *, way: float = 0.0, pair: float = 0.001, outstanding: int = 0
) -> Worker:
    frames = (Frame(1, 0.0, outstanding),) if outstanding else ()
    return Worker(
        peer, ((3, lo, hi),), 0.0, 1e9, frames=frames, latency=Latency(way, way / 10, pair, way, 50)
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


def test_a_way_is_waited_for_while_other_rows_have_their_turn() -> None:
    """What lies at a far worker already hides the way of what comes after it."""
    idle, loaded = worker("far", way=0.040), worker("far", way=0.040, outstanding=10)
    assert idle.finish(0.0, 20) == pytest.approx(0.060)
    assert loaded.finish(0.0, 20) == pytest.approx(0.070), "not 0.110"
    alone = share_rows(3, {0: 20}, [idle], LocalCost(0.001))
    assert all(share.peer == LOCAL for share in alone), "nobody waits longer than for the own experts"
    behind = share_rows(3, {0: 20}, [idle], LocalCost(0.001, backlog=0.045))
    assert sum(share.count for share in behind if share.peer == "far") >= 8


def test_parts_that_are_quicker_than_a_frame_is_sent_are_not_divided_further() -> None:
    workers = [worker(name, pair=1e-5) for name in "abcd"]
    shares = share_rows(3, dict.fromkeys(range(8), 2), workers, LocalCost(1e-5, backlog=1.0))
    assert len({share.peer for share in shares}) == 1


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


def test_a_hedge_goes_to_whoever_should_be_done_first() -> None:
    near, busy = worker("near", way=0.01), worker("busy", way=0.01, outstanding=100)
    far = LocalCost(0.001, backlog=1.0)
    assert hedge_for([busy, near], 3, [1, 2], 4, far) == "near"
    assert hedge_for([busy, near], 3, [1, 2], 4, LocalCost(0.001)) == LOCAL
    assert hedge_for([worker("part", 0, 2)], 3, [1, 2], 4, far) == LOCAL
    assert hedge_for([], 3, [1], 4, far) == LOCAL


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
