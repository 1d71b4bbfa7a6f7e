"""Plans from offers: they fit, they are quick, and everybody is told why."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
from helpers_plan import MB, WIDTHS, needs, offer
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_peer.engines.footprint import Floats
from kvasir_peer.errors import PlanError
from kvasir_peer.ring.offers import (
    Ground,
    Links,
    LinkTime,
    ModelNeeds,
    Planned,
    StageOffer,
    Wishes,
    memory_needed,
)
from kvasir_peer.ring.planner import describe, plan_ring
from kvasir_peer.serving.widths import Widths

NEAR = Links(LinkTime(0.001))


def make(offers: list[StageOffer], links: Links = NEAR, stages: int | None = None, **model: int) -> Planned:
    ground = Ground(offers, needs(**model), links, Wishes(WIDTHS, stages))
    return plan_ring(ground, bridge="bridge", plan_id="p")


def layers(planned: Planned) -> dict[str, int]:
    assert planned.plan is not None
    return {stage.peer: stage.layers for stage in planned.plan.stages}


def test_equal_peers_get_equal_time() -> None:
    planned = make([offer(p) for p in "abcd"], stages=4)
    assert planned.plan is not None
    planned.plan.check()
    seconds = [s.pass_base + s.pass_row for s in planned.plan.stages]
    assert max(seconds) <= 1.25 * min(seconds)
    # the tail has the output matrix to read too
    assert planned.plan.stages[-1].layers <= min(s.layers for s in planned.plan.stages[:-1])
    assert planned.plan.addresses("a") == ("/p2p/a",)


def test_a_peer_twice_as_quick_gets_twice_the_layers() -> None:
    got = layers(make([offer("quick", rate=10e9), offer("slow"), offer("other")], stages=3))
    assert got["quick"] >= 1.6 * got["slow"]
    assert got["quick"] >= 1.6 * got["other"]


def test_memory_binds_before_speed_does() -> None:
    planned = make([offer("big"), offer("small", 700, rate=50e9)], stages=2)
    assert planned.plan is not None
    stage = next(s for s in planned.plan.stages if s.peer == "small")
    small = offer("small", 700)
    assert memory_needed(needs(), WIDTHS, small, stage.first, stage.end) <= small.memory
    assert memory_needed(needs(), WIDTHS, small, stage.first - 1, stage.end) > small.memory
    words = {p.peer: p.why for p in planned.places}
    assert "memory holds no more" in words["small"]


def test_a_peer_whose_engine_keeps_weights_as_in_the_file_gets_more_layers_for_its_memory() -> None:
    big = offer("big", rate=1e9)

    def got(expansion: float) -> int:
        return layers(make([big, offer("small", 1200, rate=50e9, expansion=expansion)], stages=2))["small"]

    assert got(1.2) / got(2.0) == pytest.approx(2.0 / 1.2, abs=0.15)


def test_floats_take_what_float32_takes_whatever_the_engine_makes_of_blocks() -> None:
    halves = replace(needs(4), layer_floats=(Floats(50 * MB, 100 * MB),) * 4)
    singles = replace(needs(4), layer_floats=(Floats(50 * MB, 50 * MB),) * 4)

    def weights(model: ModelNeeds, expansion: float) -> float:
        return model.loaded_bytes(1, 3, expansion) / MB

    for expansion in (1.2, 8.0):
        assert weights(halves, expansion) == pytest.approx(220)
        assert weights(singles, expansion) == pytest.approx(110)
    assert weights(needs(4), 1.2) == pytest.approx(120)
    ends = replace(needs(4), head_floats=Floats(60 * MB, 120 * MB), tail_floats=Floats(1 * MB, 1 * MB))
    assert weights(ends, 1.2) == pytest.approx(120)
    assert ends.loaded_bytes(0, 4, 1.2) / MB == pytest.approx(1.2 * 259 + 1.1 * 121)


def test_slow_links_make_fewer_and_fatter_stages() -> None:
    offers = [offer(p) for p in "abcdefgh"]
    near = make(offers, Links(LinkTime(0.0005)))
    far = make(offers, Links(LinkTime(0.150)))
    assert near.plan is not None and far.plan is not None
    assert len(near.plan.stages) > len(far.plan.stages) >= 2


def test_a_peer_that_makes_the_ring_slower_is_told_so_and_stands_by() -> None:
    slow = offer("slow", rate=0.05e9)
    planned = make([offer("a"), offer("b"), offer("c"), slow])
    assert "slow" not in layers(planned)
    place = next(p for p in planned.places if p.peer == "slow")
    assert place.role == "standby" and place.slice is not None
    assert "with it the ring would do" in place.why and "without it" in place.why


def test_a_far_peer_is_left_out_for_its_link() -> None:
    pairs = {(a, "far"): LinkTime(0.400) for a in ("a", "b", "c", "bridge")}
    planned = make([offer(p) for p in ("a", "b", "c", "far")], Links(LinkTime(0.001), pairs))
    assert "far" not in layers(planned)


def test_the_bridges_own_machine_is_the_head() -> None:
    planned = make([offer("a", rate=20e9), offer("own", bridge=True), offer("b")], stages=3)
    assert planned.plan is not None and planned.plan.stages[0].peer == "own"
    assert "bridge's own machine" in next(p.why for p in planned.places if p.peer == "own")


def test_without_it_the_nearest_peer_is_the_head() -> None:
    pairs = {("bridge", "b"): LinkTime(0.001)}
    planned = make([offer(p) for p in "abc"], Links(LinkTime(0.030), pairs), stages=3)
    assert planned.plan is not None and planned.plan.stages[0].peer == "b"


def test_neighbours_in_the_ring_are_neighbours_in_the_net() -> None:
    spot = {"a": 0, "c": 1, "e": 2, "b": 3, "d": 4}
    pairs = {
        (x, y): LinkTime(0.001 + 0.02 * abs(spot[x] - spot[y])) for x, y in itertools.combinations(spot, 2)
    }
    pairs["bridge", "a"] = LinkTime(0.0)
    planned = make([offer(p) for p in "abcde"], Links(LinkTime(0.05), pairs), stages=5)
    assert planned.plan is not None
    order = [s.peer for s in planned.plan.stages]

    def length(peers: list[str]) -> float:
        links = Links(LinkTime(0.05), pairs)
        return sum(links.between(x, y).seconds for x, y in zip(peers, [*peers[1:], peers[0]], strict=True))

    assert length(order) <= min(length(["a", *p]) for p in itertools.permutations("bcde")) + 1e-9


def test_one_stage_is_refused_with_the_reason() -> None:
    with pytest.raises(PlanError, match="two stages or more"):
        make([offer("a")], stages=1)
    with pytest.raises(PlanError, match="24 layers"):
        make([offer("a")], stages=25)
    with pytest.raises(PlanError, match="single layer"):
        make([offer("a"), offer("b")], n_layer=1)


def test_it_waits_for_as_many_as_were_asked_for() -> None:
    planned = make([offer("a"), offer("b")], stages=3)
    assert planned.plan is None
    assert "2 of 3 stages" in planned.missing
    assert all("waits" in place.why for place in planned.places)
    assert len(layers(make([offer(p) for p in "abcde"], stages=3))) == 3


def test_never_one_peer_with_all_layers_even_if_it_could() -> None:
    planned = make([offer("huge", 100_000, rate=100e9), offer("tiny", 1200, rate=1e9)])
    assert len(layers(planned)) == 2
    assert make([offer("huge", 100_000)]).plan is None


def test_too_little_memory_is_said_with_the_numbers() -> None:
    planned = make([offer("a", 100), offer("b"), offer("c")])
    place = next(p for p in planned.places if p.peer == "a")
    assert place.role == "none" and "105 MB" in place.why and "a single layer takes" in place.why
    small = make([offer(p, 500) for p in "ab"])
    assert small.plan is None and "does not hold" in small.missing
    assert "of disk" not in small.missing
    narrow = make([offer("a", disk=300 * MB), offer("b", disk=300 * MB)])
    assert narrow.plan is None and "of memory and 629 MB of disk together" in narrow.missing
    disk = make([offer("a", disk=1 * MB), offer("b"), offer("c")])
    assert "of disk" in next(p.why for p in disk.places if p.peer == "a")


def test_more_peers_are_taken_when_memory_needs_them() -> None:
    planned = make([offer(p, 700) for p in "abcdefgh"], Links(LinkTime(0.5)))
    assert planned.plan is not None, planned.missing
    assert len(planned.plan.stages) >= 6


def test_standbys_are_spread_over_the_stages() -> None:
    planned = make([offer(p) for p in "abcdef"], stages=3)
    standbys = [p for p in planned.places if p.role == "standby"]
    assert len(standbys) == 3
    assert len({p.slice for p in standbys}) == 3


def test_a_standby_keeps_what_it_already_has() -> None:
    first = make([offer("a"), offer("b"), offer("c")], stages=2)
    assert first.plan is not None
    part = (first.plan.stages[1].first, first.plan.stages[1].end)
    again = make([offer("a"), offer("b"), offer("c", on_disk=frozenset([part]))], stages=2)
    assert next(p.slice for p in again.places if p.role == "standby") == part


def test_an_engines_own_estimate_is_used() -> None:
    ground = Ground(
        [offer("a"), offer("b")],
        needs(),
        NEAR,
        Wishes(WIDTHS),
        lambda o, first, end: (end - first) * 500 * MB,
    )
    planned = plan_ring(ground, bridge="bridge", plan_id="p")
    assert planned.plan is not None
    assert max(s.layers for s in planned.plan.stages) <= 16


def test_the_description_shows_rows_bytes_memory_and_forecast() -> None:
    planned = make([offer(p) for p in "abc"] + [offer("d", 100)], stages=3)
    assert planned.plan is not None and planned.forecast is not None
    text = "\n".join(describe(planned.plan, needs(), planned.forecast, planned.places))
    for words in (
        "16 rows a pass",
        "8 requests of 512 tokens",
        "4096 bytes per token and hop",
        "8192 bytes per token over the ring",
        "tokens/s alone",
        "of caches",
        "none: d",
    ):
        assert words in text
    assert planned.forecast.together > planned.forecast.alone > 0
    assert planned.forecast.first_token > 0


def test_the_forecast_is_what_the_simulated_ring_does() -> None:
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parent.parent / "serving"))
    try:
        from simulate import Ring
    finally:
        sys.path.pop(0)
    from kvasir_peer.serving.costs import Line
    from kvasir_peer.serving.requests import Request

    planned = make([offer(p) for p in "abc"], Links(LinkTime(0.010)), stages=3)
    assert planned.plan is not None and planned.forecast is not None
    lines = [Line(s.pass_base, s.pass_row) for s in planned.plan.stages]
    for requests, rate in ((1, planned.forecast.alone), (8, planned.forecast.together)):
        ring = Ring(WIDTHS, lines, delay=planned.plan.hop_seconds)
        for i in range(requests):
            ring.submit(Request(i, [1, 2], 500))
        assert ring.throughput(2.0, 6.0) == pytest.approx(rate, rel=0.1)


offers_strategy = st.lists(
    st.tuples(st.integers(100, 6000), st.floats(0.2e9, 50e9), st.booleans()), min_size=1, max_size=7
)


@given(offers_strategy, st.floats(0.0, 0.3), st.integers(2, 30), st.one_of(st.none(), st.integers(2, 5)))
@settings(max_examples=60, deadline=None)
def test_every_plan_is_valid_and_fits(
    raw: list[tuple[int, float, bool]], hop: float, n_layer: int, stages: int | None
) -> None:
    offers = [offer(f"peer{i}", m, r, bridge=b and i == 0) for i, (m, r, b) in enumerate(raw)]
    model = needs(n_layer)
    if stages is not None and stages > n_layer:
        return
    ground = Ground(offers, model, Links(LinkTime(hop)), Wishes(WIDTHS, stages))
    planned = plan_ring(ground, bridge="x", plan_id="p")
    assert {p.peer for p in planned.places} == {o.peer for o in offers}
    assert all(p.why for p in planned.places)
    if planned.plan is None:
        assert planned.missing
        return
    planned.plan.check()
    assert stages is None or len(planned.plan.stages) == stages
    by_peer = {o.peer: o for o in offers}
    for stage in planned.plan.stages:
        one = by_peer[stage.peer]
        assert memory_needed(model, WIDTHS, one, stage.first, stage.end) <= one.memory


def test_a_large_crowd_is_planned_in_little_time() -> None:
    offers = [offer(f"peer{i}", 2000 + 97 * (i % 13), 1e9 * (1 + i % 7)) for i in range(200)]
    began = time.process_time()
    planned = make(offers, Links(LinkTime(0.02)), n_layer=48)
    assert planned.plan is not None
    assert time.process_time() - began < 8.0


def test_the_same_offers_give_the_same_plan() -> None:
    offers = [offer(f"peer{i}", 3000 + 500 * i, 1e9 * (i + 1)) for i in range(5)]
    assert make(offers) == make(offers)
    wide = Widths(batch_rows=8, micro_batch_rows=9, max_in_flight=1, max_requests=1, context_length=8)
    with pytest.raises(PlanError, match="batch_rows"):
        plan_ring(Ground(offers, needs(), NEAR, Wishes(wide)), bridge="x", plan_id="p")
