"""The next epoch: survivors keep their places, somebody takes the lost ones, nobody gets all layers."""

from __future__ import annotations

import itertools

from helpers_plan import WIDTHS, needs, offer
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_peer.ring.offers import Ground, Links, LinkTime, Planned, StageOffer, Wishes, memory_needed
from kvasir_peer.ring.plan import Plan, PlanStage
from kvasir_peer.ring.replanning import replan

NEAR = Links(LinkTime(0.001))


def plan_of(*cuts: int) -> Plan:
    stages = tuple(
        PlanStage(f"s{i}", a, b, (f"/p2p/s{i}",)) for i, (a, b) in enumerate(itertools.pairwise(cuts))
    )
    return Plan("ring", 4, "bridge", "m" * 64, cuts[-1], 2048, 32_000, stages, WIDTHS)


def again(plan: Plan, lost: set[str], offers: list[StageOffer]) -> Planned:
    return replan(plan, lost, Ground(offers, needs(plan.n_layer), NEAR, Wishes(WIDTHS)))


def places(planned: Planned) -> list[tuple[str, int, int]]:
    assert planned.plan is not None, planned.missing
    planned.plan.check()
    return [(s.peer, s.first, s.end) for s in planned.plan.stages]


SURVIVORS = [offer(f"s{i}") for i in range(3)]


def test_a_standby_with_the_slice_loaded_takes_the_place() -> None:
    plan = plan_of(0, 8, 16, 24)
    spare = [
        offer("empty", rate=50e9),
        offer("disk", on_disk=frozenset([(8, 16)])),
        offer("warm", rate=1e9, loaded=(8, 16)),
        offer("other", loaded=(0, 8)),
    ]
    planned = again(plan, {"s1"}, [*SURVIVORS, *spare])
    assert places(planned) == [("s0", 0, 8), ("warm", 8, 16), ("s2", 16, 24)]
    assert planned.plan is not None and planned.plan.epoch == 5 and planned.plan.id == plan.id
    assert planned.plan.kept_from(plan) == [0, None, 2]
    words = {p.peer: p.why for p in planned.places}
    assert "in place of s1: it has them loaded" in words["warm"]
    assert "keeps its place" in words["s0"]


def test_then_one_with_the_chunks_on_disk_then_any_that_fits() -> None:
    plan = plan_of(0, 8, 16, 24)
    spare = [offer("empty", rate=50e9), offer("disk", on_disk=frozenset([(8, 16)]))]
    assert places(again(plan, {"s1"}, [*SURVIVORS, *spare]))[1] == ("disk", 8, 16)
    assert places(again(plan, {"s1"}, [*SURVIVORS, spare[0]]))[1] == ("empty", 8, 16)


def test_without_a_standby_the_neighbours_share_its_layers() -> None:
    plan = plan_of(0, 8, 16, 24)
    planned = again(plan, {"s1"}, SURVIVORS)
    got = places(planned)
    assert [p for p, _, _ in got] == ["s0", "s2"]
    assert planned.plan is not None
    assert any("takes over from its neighbour" in p.why for p in planned.places)


def test_survivors_that_need_not_change_do_not() -> None:
    plan = plan_of(0, 6, 12, 18, 24)
    offers = [offer("s0"), offer("s2", 960), offer("s3")]
    got = places(again(plan, {"s1"}, offers))
    assert ("s3", 18, 24) in got and ("s0", 0, 12) in got and ("s2", 12, 18) in got


def test_head_and_tail_can_be_replaced_too() -> None:
    plan = plan_of(0, 8, 16, 24)
    assert places(again(plan, {"s0"}, [*SURVIVORS, offer("x")]))[0] == ("x", 0, 8)
    assert places(again(plan, {"s2"}, [*SURVIVORS, offer("x")]))[2] == ("x", 16, 24)
    assert places(again(plan, {"s2"}, SURVIVORS))[-1][2] == 24


def test_two_at_once() -> None:
    plan = plan_of(0, 6, 12, 18, 24)
    offers = [offer("s0"), offer("s3"), offer("x"), offer("y", loaded=(12, 18))]
    assert places(again(plan, {"s1", "s2"}, offers)) == [
        ("s0", 0, 6),
        ("x", 6, 12),
        ("y", 12, 18),
        ("s3", 18, 24),
    ]


def test_of_two_stages_none_takes_all_layers() -> None:
    plan = plan_of(0, 12, 24)
    planned = again(plan, {"s1"}, [offer("s0", 100_000)])
    assert planned.plan is None
    assert "layers 12 to 23" in planned.missing and "1 of 2 stages" in planned.missing


def test_what_nobody_can_hold_is_named() -> None:
    plan = plan_of(0, 8, 16, 24)
    planned = again(plan, {"s1"}, [offer("s0", 1300), offer("s2", 1300)])
    assert planned.plan is None
    assert "layers 8 to 15" in planned.missing


def test_when_nothing_else_helps_the_ring_is_planned_anew() -> None:
    plan = plan_of(0, 8, 16, 24)
    # no newcomer holds eight layers, and the survivors hold no more than they have
    offers = [offer("s0", 1100), offer("s2", 1100), offer("x", 700), offer("y", 700), offer("z", 700)]
    planned = again(plan, {"s1"}, offers)
    assert planned.plan is not None, planned.missing
    assert planned.plan.epoch == 5
    assert len(planned.plan.stages) >= 4


@given(
    st.integers(2, 5),
    st.sets(st.integers(0, 4), max_size=3),
    st.lists(st.tuples(st.integers(300, 6000), st.booleans()), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_lost_the_next_plan_is_valid_or_says_why(
    stages: int, lost: set[int], spare: list[tuple[int, bool]]
) -> None:
    cuts = [round(i * 20 / stages) for i in range(stages + 1)]
    plan = plan_of(*cuts)
    gone = {f"s{i}" for i in lost if i < stages}
    offers = [offer(f"s{i}", 2500) for i in range(stages)]
    offers += [
        offer(f"x{i}", m, loaded=(cuts[0], cuts[1]) if warm else None) for i, (m, warm) in enumerate(spare)
    ]
    planned = again(plan, gone, offers)
    if planned.plan is None:
        assert planned.missing
        return
    planned.plan.check()
    by_peer = {o.peer: o for o in offers}
    for stage in planned.plan.stages:
        assert stage.peer not in gone
        held = by_peer[stage.peer]
        assert memory_needed(needs(20), WIDTHS, held, stage.first, stage.end) <= held.memory
    if not gone:
        assert None not in planned.plan.kept_from(plan)
