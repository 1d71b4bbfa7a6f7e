"""What the market asks is answered by values alone, and has an answer where planning does not come to its end."""

from __future__ import annotations

from helpers_plan import WIDTHS, needs, offer

from kvasir_peer.ring.offers import Ground, Links, LinkTime, StageOffer, Wishes
from kvasir_peer.ring.plan import Plan
from kvasir_peer.ring.questions import (
    BetterRing,
    BetterStage,
    FirstRing,
    NextEpoch,
    Standbys,
    unanswered,
)
from kvasir_peer.ring.replanning import best_swap

FAR, NEAR = LinkTime(0.200), LinkTime(0.001)


def ground(*offers: StageOffer, stages: int | None = 2) -> Ground:
    return Ground(offers, needs(), Links(NEAR), Wishes(WIDTHS, stages))


def first(*offers: StageOffer, stages: int | None = 2) -> FirstRing:
    return FirstRing(ground(*offers, stages=stages), "bridge", "ring", 1, ())


def plan_of(*offers: StageOffer) -> Plan:
    planned = first(*offers, stages=len(offers)).answer().planned
    assert planned is not None and planned.plan is not None, planned
    return planned.plan


def test_wishes_that_cannot_be_are_what_is_missing() -> None:
    planned = first(offer("a"), offer("b"), stages=1).answer().planned
    assert planned is not None and planned.plan is None and "two stages or more" in planned.missing


def test_the_same_question_is_equal_and_another_is_not() -> None:
    assert first(offer("a"), offer("b")) == first(offer("a"), offer("b"))
    assert first(offer("a"), offer("b")) != first(offer("a"), offer("b", 7000))


def test_one_that_was_barred_gets_a_place_only_where_nobody_else_can() -> None:
    a, b, c = offer("a"), offer("b"), offer("c")
    plan = plan_of(a, b)
    lost = plan.stages[1].peer
    kept = plan.stages[0].peer

    def peers(*offers: StageOffer) -> set[str]:
        planned = NextEpoch(ground(*offers), plan, frozenset({lost}), frozenset({"c"})).answer().planned
        assert planned is not None and planned.plan is not None
        return {stage.peer for stage in planned.plan.stages}

    here = a if kept == "a" else b
    assert peers(here, c) == {kept, "c"}
    assert peers(here, c, offer("d")) == {kept, "d"}


def test_planning_that_takes_too_long_is_said_or_passed_over() -> None:
    plan = plan_of(offer("a"), offer("b"))
    asked = first(offer("a"), offer("b"))
    planned = unanswered(asked, 10.0).planned
    assert planned is not None and planned.plan is None
    assert planned.missing == "planning with 2 peers took over 10 s, and is tried again"
    following = NextEpoch(asked.ground, plan, frozenset())
    better = BetterRing(asked.ground, plan, 1.1)
    assert unanswered(Standbys(following, better), 10.0).planned == planned
    assert unanswered(better, 10.0) == unanswered(BetterStage(asked.ground, plan, 1.2), 10.0)
    assert unanswered(better, 10.0).better is None


def test_only_what_was_measured_fills_a_place_better_and_the_bridges_own_machine_keeps_its() -> None:
    slow = [offer(name, pass_base=0.030) for name in ("a", "b")]
    quick = offer("x", pass_base=0.003)
    plan = plan_of(*slow)
    measured = Links(NEAR, {("a", "x"): NEAR, ("b", "x"): NEAR, ("a", "b"): NEAR})

    def swapped(*offers: StageOffer, links: Links = measured) -> str:
        found = best_swap(plan, Ground(offers, needs(), links, Wishes(WIDTHS, 2)), 1.2)
        return "" if found is None else found.stage

    assert swapped(*slow, quick) in ("a", "b")
    assert not swapped(*slow, offer("x", rate=1e12)), "it has only said that it is quick"
    assert not swapped(*slow, quick, links=Links(NEAR)), "nobody knows how far it is"
    far = Links(NEAR, {("a", "x"): FAR, ("b", "x"): FAR, ("a", "b"): NEAR})
    assert not swapped(*slow, quick, links=far)
    assert not swapped(*slow, offer("x", 400, pass_base=0.003)), "it cannot hold the layers"
    for own in ("a", "b"):
        here = [offer(name, pass_base=0.030, bridge=name == own) for name in ("a", "b")]
        assert swapped(*here, quick) == ("b" if own == "a" else "a")
