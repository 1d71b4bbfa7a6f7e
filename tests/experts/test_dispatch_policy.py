"""The dispatcher's rules, one test for each sentence of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvasir_peer.experts.dispatch_policy import (
    SHADOW_TRIES,
    DispatchSettings,
    SlotReading,
    Snapshot,
    Worker,
    decide,
    failed,
    forget_expired,
    poll_due,
    sent,
    served,
    under_load,
)
from kvasir_peer.experts.worker_health import (
    FIRST_DEADLINE,
    LONGEST_OUT,
    MAX_DEADLINE,
    MIN_DEADLINE,
    Breaker,
    Latency,
)

NOW = 1000.0
BUSY = SlotReading(busy=2, total=8, queue=0, at=NOW)
CALM = SlotReading(busy=1, total=8, queue=0, at=NOW)


def worker(
    peer: str = "w", *, attached: float = NOW - 100, last: float | None = None, loaded: float | None = None
) -> Worker:
    return Worker(peer, ((0, 0, 8),), attached, NOW + 60, last_serve=last, last_loaded_serve=loaded)


def test_the_own_slots_are_read_every_three_seconds() -> None:
    assert poll_due(None, NOW)
    assert not poll_due(NOW, NOW + 2.9)
    assert poll_due(NOW, NOW + 3.0)


def test_two_busy_slots_are_load_one_is_not() -> None:
    assert under_load(BUSY, NOW)
    assert not under_load(CALM, NOW)
    assert under_load(replace(CALM, busy=5), NOW, DispatchSettings(saturation_threshold=5))
    assert not under_load(replace(CALM, busy=4), NOW, DispatchSettings(saturation_threshold=5))


def test_a_coordinator_with_one_slot_counts_its_queue_too() -> None:
    assert under_load(SlotReading(busy=1, total=1, queue=1, at=NOW), NOW)
    assert not under_load(SlotReading(busy=1, total=2, queue=5, at=NOW), NOW)


def test_a_stalled_answer_lets_the_last_decision_age_out() -> None:
    assert under_load(BUSY, NOW + 8.9)
    assert not under_load(BUSY, NOW + 9.1)
    assert not under_load(None, NOW)
    proven = worker(last=NOW - 1, loaded=NOW - 1)
    assert decide(Snapshot(BUSY, (proven,)), NOW + 60 - 0.1).mode == "local"


def test_a_worker_is_fresh_for_the_grace_after_it_attaches() -> None:
    new = worker(attached=NOW)
    assert new.fresh(NOW + 14.9) and not new.fresh(NOW + 15.0)


def test_a_fresh_worker_gets_a_shadow_first_so_that_no_token_waits_for_it() -> None:
    for reading in (BUSY, CALM):
        decision = decide(Snapshot(reading, (worker(attached=NOW - 1),)), NOW)
        assert decision.shadows == ("w",) and decision.workers == ()


def test_shadow_tries_are_few_and_end_with_the_grace() -> None:
    new = worker(attached=NOW - 1)
    for _ in range(SHADOW_TRIES):
        assert decide(Snapshot(BUSY, (new,)), NOW).shadows == ("w",)
        new = sent(new, 1, 4, NOW, shadow=True)
    assert decide(Snapshot(BUSY, (new,)), NOW).shadows == ()
    assert decide(Snapshot(BUSY, (worker(attached=NOW - 16),)), NOW).shadows == ()


def test_a_success_makes_it_proven_and_under_load_it_shares_the_rows() -> None:
    new = served(sent(worker(attached=NOW - 1), 1, 4, NOW - 0.02, shadow=True), 1, 0.01, NOW, loaded=True)
    assert new.proven and new.outstanding == 0
    decision = decide(Snapshot(BUSY, (new,)), NOW)
    assert decision.mode == "load" and decision.workers == ("w",) and decision.shadows == ()


def test_it_is_serving_for_twenty_seconds_after_a_success() -> None:
    w = worker(last=NOW, loaded=NOW)
    assert w.serving(NOW + 19.9) and not w.serving(NOW + 20.0)


def test_under_load_a_proven_worker_stays_in_dispatch_past_the_serve_ttl() -> None:
    old = worker(last=NOW - 3600, loaded=NOW - 3600)
    assert not old.serving(NOW)
    assert decide(Snapshot(BUSY, (old,)), NOW).workers == ("w",)


def test_a_worker_that_attached_but_never_served_is_not_recruited_under_load() -> None:
    decision = decide(Snapshot(BUSY, (worker(attached=NOW - 60),)), NOW)
    assert decision.workers == () and decision.shadows == ()


def test_with_no_load_and_nobody_serving_everything_is_local() -> None:
    proven = worker(last=NOW - 30, loaded=NOW - 30)
    decision = decide(Snapshot(CALM, (proven,)), NOW)
    assert decision.mode == "local" and decision.workers == () and decision.trials == ()


def test_when_the_load_ends_who_is_serving_goes_on_for_the_ttl_and_then_all_is_local() -> None:
    w = worker(last=NOW, loaded=NOW)
    assert decide(Snapshot(CALM, (w,)), NOW + 5).mode == "cooling"
    # answers in the calm do not prolong it
    for second in range(1, 20):
        w = served(sent(w, second, 1, NOW + second - 0.01), second, 0.001, NOW + second, loaded=False)
        assert decide(Snapshot(replace(CALM, at=NOW + second), (w,)), NOW + second).workers == ("w",)
    assert decide(Snapshot(replace(CALM, at=NOW + 21), (w,)), NOW + 21).mode == "local"


def test_a_second_surge_is_served_by_warm_proven_workers_at_once() -> None:
    warm = tuple(worker(p, last=NOW - 50, loaded=NOW - 50) for p in "abcd")
    assert decide(Snapshot(CALM, warm), NOW).mode == "local"
    assert decide(Snapshot(BUSY, warm), NOW).workers == ("a", "b", "c", "d")


def test_proven_is_kept_for_each_worker() -> None:
    decision = decide(Snapshot(BUSY, (worker("a", last=NOW - 5), worker("b"))), NOW)
    assert decision.workers == ("a",)


def test_expired_coverage_ends_dispatch_and_all_that_was_known() -> None:
    w = replace(worker(last=NOW), expires_at=NOW - 1)
    assert decide(Snapshot(BUSY, (w,)), NOW) == decide(Snapshot(BUSY, ()), NOW)
    assert forget_expired((w, worker("x")), NOW) == (worker("x"),)


def test_one_failure_takes_a_worker_out_and_a_trial_that_nobody_waits_for_brings_it_back() -> None:
    w = worker(last=NOW - 1)
    w = failed(sent(w, 1, 8, NOW - 1), 1, NOW)
    assert w.outstanding == 0
    assert decide(Snapshot(BUSY, (w,)), NOW).workers == ()
    assert decide(Snapshot(BUSY, (w,)), NOW + 0.9).trials == ()
    decision = decide(Snapshot(BUSY, (w,)), NOW + 1.0)
    assert decision.workers == () and decision.trials == ("w",)
    trying = sent(w, 2, 2, NOW + 1.0, shadow=True)
    assert decide(Snapshot(BUSY, (trying,)), NOW + 1.1).trials == (), "one trial at a time"
    back = served(trying, 2, 0.01, NOW + 1.2, loaded=True)
    assert decide(Snapshot(BUSY, (back,)), NOW + 1.2).workers == ("w",)


def test_failures_in_a_row_keep_it_out_for_longer_up_to_a_bound() -> None:
    breaker = Breaker()
    outs = []
    now = NOW
    for _ in range(10):
        breaker = breaker.failed(now)
        outs.append(breaker.open_until - now)
        now = breaker.open_until
    assert outs[:4] == [1.0, 2.0, 4.0, 8.0]
    assert max(outs) == LONGEST_OUT


def test_a_fresh_worker_whose_shadow_failed_may_try_again_within_its_grace() -> None:
    w = failed(sent(worker(attached=NOW), 1, 2, NOW, shadow=True), 1, NOW + 0.5)
    assert decide(Snapshot(BUSY, (w,)), NOW + 1.0).shadows == ()
    assert decide(Snapshot(BUSY, (w,)), NOW + 1.5).shadows == ("w",)


def test_the_deadline_comes_from_the_workers_own_history() -> None:
    latency = Latency()
    assert latency.deadline() == FIRST_DEADLINE
    for _ in range(60):
        latency = latency.observe(0.100, 8, 0.02)
    assert latency.deadline() == MIN_DEADLINE > 0.220
    assert 0.100 < latency.hedge_after() < 0.130
    assert latency.deadline(0.3) > 0.6
    for i in range(60):
        latency = latency.observe(0.05 if i % 2 else 0.15, 8, 0.02)
    assert latency.deadline() > 0.4, "an unsteady one is given more time"


def test_a_worker_that_is_late_gets_nothing_new_until_it_has_answered() -> None:
    w = worker(last=NOW)
    for number in range(20):
        at = NOW + number
        w = served(sent(w, number, 8, at), number, 0.02, at + 0.05, loaded=True)
    w = sent(w, 99, 8, NOW + 20)
    assert decide(Snapshot(replace(BUSY, at=NOW + 20), (w,)), NOW + 20.05).workers == ("w",)
    assert decide(Snapshot(replace(BUSY, at=NOW + 20), (w,)), NOW + 20.2).workers == ()
    back = served(w, 99, 0.02, NOW + 20.3, loaded=True)
    assert decide(Snapshot(replace(BUSY, at=NOW + 20), (back,)), NOW + 20.3).workers == ("w",)


def test_the_way_and_the_time_of_a_pair_are_told_apart_though_frames_wait_for_each_other() -> None:
    """40 ms away, 3 ms a pair; frames of 4 and 8 pairs, three of them under way at any time."""
    w, free, sent_at, answers = worker(last=NOW), NOW, NOW, list[tuple[float, int, float]]()
    for number in range(60):
        pairs = 4 + 4 * (number % 2)
        if len(answers) == 3:
            at, first, held = answers.pop(0)
            w, sent_at = served(w, first, held, at, loaded=True), at
        w = sent(w, number, pairs, sent_at)
        free = max(free, sent_at + 0.020) + 0.003 * pairs
        answers.append((free + 0.020, number, 0.003 * pairs))
        if number > 20:
            assert w.finish(sent_at) == pytest.approx(free + 0.020, abs=0.004)
    assert w.latency.row_seconds == pytest.approx(0.003, rel=0.1)
    assert w.latency.way == pytest.approx(0.040, rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.5, 30.0])
def test_deadlines_are_bounded(seconds: float) -> None:
    latency = Latency()
    for _ in range(30):
        latency = latency.observe(seconds, 1, 0.0)
        assert MIN_DEADLINE <= latency.deadline() <= MAX_DEADLINE
        assert latency.hedge_after() < latency.deadline()


def test_a_stalled_poll_changes_nothing_but_the_age_of_the_reading() -> None:
    """The decision needs no answer: it is a function of what is there."""
    w = worker(last=NOW, loaded=NOW)
    modes = [decide(Snapshot(BUSY, (w,)), NOW + second).mode for second in range(0, 40, 2)]
    assert modes == ["load"] * 5 + ["cooling"] * 5 + ["local"] * 10
