"""Demand, leases, coverage and retirement, in virtual time."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import pytest
from helpers_market import MB, Swarm, model
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_peer.experts.allotment import choose_ranges
from kvasir_peer.experts.dispatch_policy import SlotReading
from kvasir_peer.experts.market import MarketState, apply
from kvasir_peer.experts.market_messages import (
    Budget,
    Caught,
    CoordinatorDown,
    CoordinatorUp,
    CoverageReported,
    Granted,
    LeaseProgress,
    LeaseReturned,
    MapChanged,
    ModelOffered,
    NotNeeded,
    NotWired,
    Pardoned,
    Poll,
    Retire,
    SaturationChanged,
    SlotsRead,
    Tick,
    VolunteerAsked,
    Wired,
    WorkerLeft,
)
from kvasir_peer.experts.market_views import demand, dispatch_map, recruitment
from kvasir_peer.experts.recruitment import RecruitmentSettings

CALM, BUSY = (0, 8, 0), (6, 8, 3)
ONE = RecruitmentSettings(base=1, boost=1)


def elastic(
    surges: list[tuple[float, float]], volunteers: int = 8, settings: RecruitmentSettings = ONE
) -> Swarm:
    """Four ranges (a volunteer holds a quarter of the experts), load in the given spans."""
    swarm = Swarm(settings)
    swarm.offer(model())
    swarm.coordinator("c", "moe", lambda now: BUSY if any(a <= now < b for a, b in surges) else CALM)
    for i in range(volunteers):
        swarm.volunteer(f"v{i}", 160, rate=100.0 + i)
    return swarm


def test_calm_without_workers_is_no_demand() -> None:
    swarm = elastic([])
    swarm.run(120.0)
    assert swarm.serving() == [] and swarm.state.granted == 0
    (shown,) = demand(swarm.state)
    assert shown["layers"] == [] and shown["recruiting"] is False and shown["effective_target"] == 0


def test_load_seeds_demand_over_all_expert_layers_from_zero() -> None:
    swarm = elastic([(0.0, 1e9)], volunteers=0)
    swarm.run(10.0)
    (shown,) = demand(swarm.state, "moe")
    assert shown["recruiting"] is True and shown["effective_target"] == 2
    assert shown["layers"] == [
        {"layer": i, "segments": [{"experts": [0, 16], "replicas": 0, "target": 2, "scarcity": 1.0}]}
        for i in range(4)
    ]


def test_the_elastic_loop_grows_shrinks_and_grows_again_without_a_recruit() -> None:
    swarm = elastic([(10.0, 80.0), (200.0, 260.0)])
    swarm.run(10.0)
    assert swarm.serving() == []
    swarm.run(20.0)  # polls at most 5 s apart, two readings, three seconds of fetching
    assert len(swarm.serving()) == 8
    first = next(t for t, d in swarm.log if isinstance(d, MapChanged))
    assert first - 10.0 <= 15.0
    assert all(count == 2 for row in swarm.replicas() for count in row)
    early = [d.lease.ranges for _, d in swarm.log if isinstance(d, Granted)][:4]
    assert len(set(early)) == 4, "N volunteers get N different things"
    swarm.run(100.0)
    # the four slowest have gone, four stay warm and cover everything once
    assert swarm.serving() == ["v4", "v5", "v6", "v7"] or len(swarm.serving()) == 4
    retired = [d.peer for _, d in swarm.log if isinstance(d, Retire)]
    assert len(retired) == 4 and "v0" in retired
    assert all(count == 1 for row in swarm.replicas() for count in row)
    assert recruitment(swarm.state, swarm.now)[0]["workers"] == 4
    swarm.run(80.0)
    swarm.check()


def test_the_slowest_of_equals_retire_first() -> None:
    swarm = elastic([(0.0, 40.0)])
    swarm.run(200.0)
    for peer in swarm.serving():
        ranges = swarm.state.workers[peer].ranges
        twin = [
            v
            for v in swarm.volunteers.values()
            if v.name != peer and v.ranges == ranges and v.retired_at is not None
        ]
        assert twin and all(v.budget.rate < swarm.volunteers[peer].budget.rate for v in twin)


def test_up_takes_two_readings_and_the_second_follows_after_a_second() -> None:
    swarm = elastic([(10.1, 1e9)], volunteers=0)
    swarm.run(30.0)
    up = [t for t, d in swarm.log if isinstance(d, SaturationChanged)]
    assert len(up) == 1
    assert 11.0 <= up[0] <= 17.0


def test_one_reading_over_the_threshold_is_nothing() -> None:
    swarm = Swarm(ONE)
    swarm.offer(model())
    hits = iter([True])
    swarm.coordinator("c", "moe", lambda now: BUSY if now > 9 and next(hits, False) else CALM)
    swarm.run(60.0)
    assert not any(isinstance(d, SaturationChanged) for _, d in swarm.log)


def test_down_takes_thirty_seconds_without_a_reading_over_the_threshold() -> None:
    swarm = elastic([(0.0, 40.0)], volunteers=0)
    swarm.run(120.0)
    changes = [(t, d.saturated) for t, d in swarm.log if isinstance(d, SaturationChanged)]
    assert [s for _, s in changes] == [True, False]
    assert 67.0 <= changes[1][0] <= 76.0


def test_a_noisy_load_does_not_flap() -> None:
    rng = random.Random(3)
    swarm = Swarm(ONE)
    swarm.offer(model())
    swarm.coordinator("c", "moe", lambda now: (rng.choice([0, 1, 3, 5]), 8, 0))
    for i in range(8):
        swarm.volunteer(f"v{i}")
    swarm.run(1800.0)
    assert sum(isinstance(d, SaturationChanged) for _, d in swarm.log) == 1
    assert not any(isinstance(d, Retire) for _, d in swarm.log)
    assert all(v.served_times == 1 for v in swarm.volunteers.values())


def test_a_reading_that_is_old_does_not_count() -> None:
    swarm = Swarm(ONE)
    swarm.offer(model())
    swarm.coordinator("c", "moe", lambda now: BUSY if now < 20 else None)
    swarm.run(40.0)
    assert recruitment(swarm.state, swarm.now)[0]["busy"] == 6
    swarm.run(60.0)
    shown = recruitment(swarm.state, swarm.now)[0]
    assert shown["busy"] == 0 and shown["saturated"] is False and shown["reading_age"] is None


def test_a_coordinator_that_does_not_answer_holds_up_no_other() -> None:
    swarm = Swarm(ONE)
    swarm.offer(model())
    swarm.coordinator("dead", "moe", lambda now: None)
    swarm.coordinator("busy", "moe", lambda now: BUSY)
    swarm.run(8.0)
    assert swarm.state.models["moe"].saturation.saturated


def test_waiting_volunteers_are_released_to_just_as_many_as_there_are_ranges() -> None:
    swarm = elastic([(10.0, 1e9)], volunteers=30)
    swarm.run(60.0)
    assert swarm.state.granted == 8 and len(swarm.serving()) == 8
    assert len(swarm.state.waiting) + sum(v.state == "idle" for v in swarm.volunteers.values()) == 22


def test_a_wait_has_an_end() -> None:
    swarm = elastic([])
    swarm.run(55.0)
    answers = [d for t, d in swarm.log if isinstance(d, NotNeeded)]
    assert len(answers) == 8 and all("calm" in d.why for d in answers)


def test_the_hottest_layer_is_filled_before_the_next_is_opened() -> None:
    board = [[0] * 16 for _ in range(4)]
    got = choose_ranges(model(), board, 2, {2: 500, 0: 100}, Budget(200 * MB, 1000 * MB, expansion=1.0))
    assert got == ((0, 0, 4), (2, 0, 16))


def test_the_emptiest_cells_come_first() -> None:
    board = [[1] * 16, [1] * 16, [1, 1, 0, 0] * 4, [1] * 16]
    got = choose_ranges(model(), board, 2, {0: 1000}, Budget(160 * MB, 1000 * MB, expansion=1.0))
    assert got == tuple((2, i, i + 2) for i in (2, 6, 10, 14))


def test_what_a_volunteer_has_on_disk_comes_first() -> None:
    board = [[0] * 16 for _ in range(4)]
    budget = Budget(40 * MB, 1000 * MB, expansion=1.0, held=((3, 4, 8),))
    assert choose_ranges(model(), board, 2, {0: 1000}, budget) == ((3, 4, 8),)


def test_ranges_follow_the_budget_of_memory_and_of_disk() -> None:
    board = [[0] * 16 for _ in range(4)]

    def size(memory: int, disk: int, expansion: float = 1.0) -> int:
        ranges = choose_ranges(model(), board, 1, {}, Budget(memory * MB, disk * MB, expansion=expansion))
        return sum(hi - lo for _, lo, hi in ranges)

    assert size(55, 1000) == 5
    assert size(1000, 55) == 5
    assert size(110, 1000, expansion=2.0) == 5
    assert size(111, 1000, expansion=1.1) == 10
    assert size(9, 1000) == 0
    assert size(10_000, 10_000) == 64


def test_experts_that_are_floats_take_their_float32_from_the_budget() -> None:
    board = [[0] * 16 for _ in range(4)]
    halves = replace(model(), least_expansion=2.2)
    for expansion, count in ((1.2, 5), (8.0, 1)):
        budget = Budget(111 * MB, 1000 * MB, expansion=expansion)
        assert choose_ranges(halves, board, 1, {}, budget) == ((0, 0, count),)


def lease_of(swarm: Swarm, peer: str = "a", megabytes: int = 160) -> Granted:
    (granted,) = [
        d
        for d in swarm.tell(VolunteerAsked(peer, Budget(megabytes * MB, 1000 * MB, expansion=1.0)))
        if isinstance(d, Granted)
    ]
    return granted


def busy_swarm() -> Swarm:
    swarm = Swarm(ONE)
    swarm._carry_out = lambda decision: None  # type: ignore[method-assign]
    swarm.offer(model())
    swarm.tell(CoordinatorUp("c", "moe"))
    for _ in range(2):
        swarm.now += 1.0
        swarm.tell(SlotsRead("c", SlotReading(*BUSY, at=swarm.now)))
    assert swarm.state.models["moe"].saturation.saturated
    return swarm


def keep_busy(swarm: Swarm, seconds: float) -> None:
    for _ in range(int(seconds)):
        swarm.now += 1.0
        swarm.tell(SlotsRead("c", SlotReading(*BUSY, at=swarm.now)))
        swarm.tell(Tick())


def test_a_lease_lives_by_progress_and_ends_without() -> None:
    swarm = busy_swarm()
    lease = lease_of(swarm).lease
    for step in range(1, 4):
        keep_busy(swarm, 50)
        swarm.tell(LeaseProgress("a", lease.id, step))
    assert lease.id in swarm.state.leases
    swarm.tell(LeaseProgress("stranger", lease.id, 99))
    swarm.tell(LeaseProgress("a", lease.id, 3))  # the same number is no progress
    keep_busy(swarm, 62)
    assert swarm.state.leases == {}
    swarm.check()


def test_asking_again_gives_the_same_lease_not_a_second_one() -> None:
    swarm = busy_swarm()
    assert lease_of(swarm).lease == lease_of(swarm).lease
    assert swarm.state.granted == 1


def test_leases_are_given_back() -> None:
    swarm = busy_swarm()
    lease = lease_of(swarm).lease
    swarm.tell(LeaseReturned("stranger", lease.id))
    assert lease.id in swarm.state.leases
    swarm.tell(LeaseReturned("a", lease.id))
    assert swarm.state.leases == {}
    swarm.check()


def test_coverage_is_wired_when_it_is_what_was_leased() -> None:
    swarm = busy_swarm()
    lease = lease_of(swarm).lease
    decisions = swarm.tell(CoverageReported("a", "moe", lease.id, lease.ranges, 50.0, ("/p2p/a",)))
    assert [type(d) for d in decisions] == [MapChanged, Wired]
    version, workers = dispatch_map(swarm.state, "moe")
    assert version == 1 and [(w.peer, w.ranges) for w in workers] == [("a", lease.ranges)]
    assert swarm.state.leases == {}
    swarm.check()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peer": "b"}, "another peer's"),
        ({"ranges": ((0, 0, 16), (1, 0, 16), (2, 0, 16))}, "those of its lease"),
        ({"ranges": ((0, 0, 17),)}, "not ranges of the model"),
        ({"ranges": ((9, 0, 4),)}, "not ranges of the model"),
        ({"ranges": ((0, 4, 4),)}, "not ranges of the model"),
        ({"ranges": ((0, 4, 8), (0, 0, 2))}, "not ranges of the model"),
        ({"ranges": ()}, "not ranges of the model"),
        ({"ranges": ((0, 0, 8), (0, 4, 16))}, "not ranges of the model"),
        ({"model": "other"}, "not served here"),
    ],
)
def test_other_coverage_is_refused(change: dict[str, object], words: str) -> None:
    swarm = busy_swarm()
    lease = lease_of(swarm).lease
    values: dict[str, object] = {
        "peer": "a",
        "model": "moe",
        "lease": lease.id,
        "ranges": lease.ranges,
    } | change
    decisions = swarm.tell(CoverageReported(**values))  # type: ignore[arg-type]
    assert isinstance(decisions[-1], NotWired) and words in decisions[-1].why
    assert dispatch_map(swarm.state, "moe")[1] == []
    swarm.check()


def test_a_closed_connection_ends_coverage_at_once() -> None:
    swarm = busy_swarm()
    lease = lease_of(swarm).lease
    swarm.tell(CoverageReported("a", "moe", lease.id, lease.ranges))
    decisions = swarm.tell(WorkerLeft("a"))
    assert [type(d) for d in decisions] == [MapChanged]
    assert dispatch_map(swarm.state, "moe")[1] == []
    swarm.check()


@pytest.mark.parametrize(("connected", "seconds"), [(True, 30.0), (False, 120.0)])
def test_a_silent_worker_is_out_after_thirty_seconds_others_with_their_coverage(
    connected: bool, seconds: float
) -> None:
    swarm = busy_swarm()
    lease = lease_of(swarm).lease
    swarm.tell(CoverageReported("a", "moe", lease.id, lease.ranges, connected=connected))
    keep_busy(swarm, seconds - 1)
    assert "a" in swarm.state.workers
    keep_busy(swarm, 3)
    assert "a" not in swarm.state.workers
    swarm.check()


def test_workers_come_back_after_the_bridge_was_restarted() -> None:
    before = busy_swarm()
    lease = lease_of(before).lease
    swarm = Swarm(ONE)
    swarm._carry_out = lambda decision: None  # type: ignore[method-assign]
    swarm.offer(model())
    decisions = swarm.tell(CoverageReported("a", "moe", lease.id, lease.ranges))
    assert isinstance(decisions[-1], Wired)
    # one whose experts are all covered already may go
    decisions = swarm.tell(CoverageReported("b", "moe", 0, lease.ranges))
    assert isinstance(decisions[-1], Retire)
    swarm.check()


def test_a_caught_worker_is_quarantined_and_its_experts_are_offered_again() -> None:
    swarm = busy_swarm()
    lease = lease_of(swarm, megabytes=10_000).lease
    swarm.tell(CoverageReported("liar", "moe", 0, lease.ranges))
    swarm.tell(Caught("a", "its rows differ by 40 %"))
    assert "a" not in swarm.state.lease_of
    decisions = swarm.tell(VolunteerAsked("a", Budget(MB, MB)))
    assert isinstance(decisions[0], NotNeeded) and "quarantined" in decisions[0].why
    decisions = swarm.tell(CoverageReported("a", "moe", lease.id, lease.ranges))
    assert isinstance(decisions[0], NotWired) and "quarantined" in decisions[0].why
    swarm.tell(Pardoned("a"))
    assert lease_of(swarm, "a")
    swarm.check()


def test_a_dead_workers_range_goes_to_the_next_who_waits() -> None:
    swarm = elastic([(0.0, 1e9)], volunteers=9)
    swarm.run(30.0)
    assert len(swarm.serving()) == 8
    victim = swarm.serving()[0]
    swarm.kill(victim)
    swarm.run(10.0)
    assert len([v for v in swarm.serving() if v != victim]) == 8
    assert all(count == 2 for row in swarm.replicas() for count in row)


def test_the_model_with_the_longest_queue_is_served_first() -> None:
    swarm = Swarm(ONE)
    for name, load in (("small", (4, 4, 1)), ("large", (4, 4, 9))):
        swarm.offer(model(name=name))
        swarm.coordinator("c-" + name, name, lambda now, load=load: load)
    swarm.run(10.0)
    swarm.volunteer("v", 160)
    swarm.run(1.0)
    assert swarm.volunteers["v"].model == "large"


def test_a_volunteer_may_name_its_model() -> None:
    swarm = busy_swarm()
    decisions = swarm.tell(VolunteerAsked("a", Budget(1000 * MB, 1000 * MB, model="other")))
    assert [type(d) for d in decisions] == [NotNeeded]


def test_a_retired_worker_that_offers_itself_again_is_taken() -> None:
    swarm = elastic([(0.0, 40.0), (120.0, 400.0)])
    swarm.run(115.0)
    assert len(swarm.serving()) == 4
    swarm.run(40.0)
    assert len(swarm.serving()) == 8
    swarm.check()


def test_a_coordinator_that_goes_takes_its_load_with_it() -> None:
    swarm = busy_swarm()
    swarm.tell(CoordinatorDown("c"))
    swarm.now += 31.0
    swarm.tell(Tick())
    assert not swarm.state.models["moe"].saturation.saturated


def test_polls_are_every_five_seconds_and_every_second_after_one_over_the_threshold() -> None:
    state, _ = apply(MarketState(ONE), ModelOffered(model()), 0.0)
    state, _ = apply(state, CoordinatorUp("c", "moe"), 0.0)
    times = []
    load = CALM
    for step in range(400):
        now = step / 10
        state, decisions = apply(state, Tick(), now)
        for decision in decisions:
            if isinstance(decision, Poll):
                times.append(now)
                load = BUSY if now > 14 else CALM
                state, _ = apply(state, SlotsRead("c", SlotReading(*load, at=now)), now)
    gaps = [round(b - a, 1) for a, b in itertools.pairwise(times)]
    assert set(gaps) == {5.0, 1.0} and gaps[:3] == [5.0, 5.0, 5.0] and gaps[-1] == 1.0


@given(
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.integers(0, 3),
)
@settings(max_examples=20, deadline=None)
def test_whatever_happens_the_counts_are_right_and_the_target_is_reached(
    seed: int, base: int, boost: int
) -> None:
    rng = random.Random(seed)
    swarm = Swarm(RecruitmentSettings(base=base, boost=boost))
    swarm.offer(model(3, 8))
    loads = [rng.choice([CALM, BUSY]) for _ in range(30)]
    swarm.coordinator("c", "moe", lambda now: loads[min(29, int(now / 20))])
    for i in range(30):
        swarm.volunteer(
            f"v{i}",
            rng.randrange(5, 300),
            fetch=rng.uniform(0.5, 80.0),
            rate=rng.uniform(1, 9),
            start=rng.uniform(0, 300),
        )
    for _ in range(30):
        swarm.run(20.0)
        victim = rng.choice(sorted(swarm.volunteers))
        match rng.randrange(5):
            case 0:
                swarm.kill(victim, closed=rng.random() < 0.5)
            case 1:
                swarm.tell(Caught(victim, "test"))
                swarm.volunteers[victim].state = "idle"
            case 2:
                swarm.tell(WorkerLeft(victim))
                swarm.volunteers[victim].state = "idle"
        swarm.check()
    loads[29] = BUSY
    for i in range(60):
        swarm.volunteer(f"late{i}", 100, fetch=1.0)
    swarm.run(300.0)
    swarm.check()
    target = base + boost
    assert all(count >= target for row in swarm.replicas() for count in row)


def test_ten_thousand_peers() -> None:
    swarm = Swarm(RecruitmentSettings(base=2, boost=1))
    swarm.offer(model(48, 128, 2 * MB))
    swarm.coordinator("c", "moe", lambda now: BUSY if 20 <= now < 120 else CALM)
    rng = random.Random(1)
    for i in range(10_000):
        swarm.volunteer(
            f"v{i}",
            rng.randrange(8, 40),
            fetch=rng.uniform(2, 20),
            rate=rng.uniform(1, 9),
            start=rng.uniform(0, 19),
        )
    began = time.process_time()
    swarm.run(100.0)
    assert all(count >= 3 for row in swarm.replicas() for count in row)
    mean = 3 * 48 * 128 / (24 / 2)
    assert swarm.state.granted <= 1.3 * mean, "no more than are needed"
    waiting = len(swarm.state.waiting)
    assert waiting > 5_000
    swarm.run(120.0)
    # the load has gone: one replica in three may go, and nobody is called back
    assert all(count >= 2 for row in swarm.replicas() for count in row)
    assert 0.2 * mean < swarm.state.retired < 0.5 * mean
    assert max(v.served_times for v in swarm.volunteers.values()) == 1
    swarm.check()
    assert time.process_time() - began < 30.0
