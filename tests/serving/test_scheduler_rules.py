"""Admission, order, refusals, deadlines: what the scheduler promises one call at a time."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate import Ring

from kvasir_peer.errors import PlanError, WireError
from kvasir_peer.serving.costs import CostModel, Line, StageTrace
from kvasir_peer.serving.requests import Accepted, Emitted, Finished, Kept, Refused, Request
from kvasir_peer.serving.scheduler import Policy, Scheduler
from kvasir_peer.serving.widths import Widths

WIDTHS = Widths(batch_rows=32, micro_batch_rows=8, max_in_flight=4, max_requests=2, context_length=32)


def scheduler(widths: Widths = WIDTHS, stages: int = 2, **policy: object) -> Scheduler:
    return Scheduler(widths, CostModel([Line(0.01, 0.001)] * stages), Policy(**policy))  # type: ignore[arg-type]


def test_admission_by_slots_then_a_bounded_queue_then_refusal_with_a_time() -> None:
    s = scheduler(queue_limit=1)
    assert s.submit(Request(1, [1], 4), 0.0) == Accepted(0)
    assert s.submit(Request(2, [1], 4), 0.0) == Accepted(0)
    assert s.submit(Request(3, [1], 4), 0.0) == Accepted(0)
    assert s.statistics().queued == 1
    refused = s.submit(Request(4, [1], 4), 0.0)
    assert isinstance(refused, Refused)
    assert refused.retry_after is not None and refused.retry_after >= 1.0
    assert s.cancel(1, 0.0) == [Finished(1, "cancelled", 0)]
    assert s.submit(Request(4, [1], 4), 0.0) == Accepted(0)


def test_who_has_begun_elsewhere_is_never_turned_away_and_goes_first() -> None:
    """A stream that a client reads already must not end because others wait; there are no more of them than slots."""
    s = scheduler(queue_limit=1)
    for number in range(3):
        s.submit(Request(number, [1], 4), 0.0)
    assert isinstance(s.submit(Request(10, [1], 4, priority=9), 0.0), Refused)
    for number in range(20, 24):
        assert isinstance(s.submit(Request(number, [1, 2], 3), 0.0, begun=True), Accepted)
    assert s.statistics().live + s.statistics().queued == s.capacity == 7
    refused = s.submit(Request(30, [1, 2], 3), 0.0, begun=True)
    assert isinstance(refused, Refused) and refused.retry_after is not None
    for number in (0, 1):
        s.cancel(number, 1.0)
    assert s.tokens_of(20) == s.tokens_of(21) == [1, 2] and s.is_queued(2)


def test_what_is_kept_in_a_slot_counts_only_until_somebody_else_was_there() -> None:
    def first_position(s: Scheduler, request: int) -> int:
        """Of the request's next row, after everything else has been sent."""
        while (batch := s.next_batch(0.0)) is not None:
            for row in batch.rows:
                if row.request == request:
                    return row.position
        raise AssertionError("it has no row to send")

    text, kept = list(range(10)), Kept(1, [8, 6])
    untouched = scheduler()
    untouched.submit(Request(7, text, 4), 0.0, kept)
    assert first_position(untouched, 7) == 6
    used = scheduler()
    for number in (1, 2):  # the second gets slot 1, and leaves it again
        used.submit(Request(number, [1], 4), 0.0)
    used.cancel(2, 0.0)
    used.submit(Request(7, text, 4), 0.0, kept)
    assert first_position(used, 7) == 0
    waiting = scheduler()
    for number in (1, 2):
        waiting.submit(Request(number, [1], 4), 0.0)
    waiting.submit(Request(7, text, 4), 0.0, kept)
    waiting.cancel(2, 0.0)
    assert first_position(waiting, 7) == 0
    lost = scheduler(msgspec.structs.replace(WIDTHS, max_requests=1))
    lost.submit(Request(1, [1], 4), 0.0)
    lost.submit(Request(7, text, 4), 0.0, Kept(0, [8, 6]))
    lost.on_lost(0.0, [None, 0])  # the first stage of two is new, the second was the first
    assert lost._queue[0].kept == Kept(0, [0, 8])
    assert not lost.rewind(7, 5, 0.0)
    assert lost._queue[0].kept == Kept(0, [0, 5])


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (Request(1, [], 4), "empty"),
        (Request(1, [1], 0), "max_tokens"),
        (Request(1, [1] * 30, 3), "context"),
        (Request(1, [1], 3, deadline=-1.0), "deadline"),
    ],
)
def test_what_can_never_be_served_is_refused_for_good(request_: Request, word: str) -> None:
    s = scheduler()
    refused = s.submit(request_, 0.0)
    assert isinstance(refused, Refused)
    assert word in refused.reason and refused.retry_after is None
    assert s.idle


def test_an_id_may_not_be_used_twice_at_once() -> None:
    s = scheduler()
    s.submit(Request(1, [1], 3), 0.0)
    assert isinstance(s.submit(Request(1, [2], 3), 0.0), Refused)


def test_widths_that_cannot_be_are_named() -> None:
    with pytest.raises(PlanError, match="batch_rows"):
        scheduler(Widths(batch_rows=4, micro_batch_rows=8, max_in_flight=1, max_requests=1, context_length=8))
    with pytest.raises(PlanError, match="max_requests"):
        scheduler(Widths(batch_rows=8, micro_batch_rows=8, max_in_flight=1, max_requests=0, context_length=8))


def test_prompt_chunks_follow_each_other_and_one_decode_is_outstanding() -> None:
    s = scheduler(hand_set=(4, 8))
    s.submit(Request(1, list(range(20)), 5), 0.0)
    batches = [s.next_batch(0.0) for _ in range(4)]
    assert [len(b.rows) if b else None for b in batches] == [8, 8, 4, None]
    assert [b.rows[-1].wants_output for b in batches[:3] if b] == [False, False, True]
    assert s.on_result(0, [], 0.1) == []
    assert s.on_result(1, [], 0.2) == []
    assert s.next_batch(0.2) is None
    assert s.on_result(2, [(1, 42)], 0.3) == [Emitted(1, 0, 20, 42)]
    decode = s.next_batch(0.3)
    assert decode is not None
    assert [(r.position, r.token, r.phase, r.wants_output) for r in decode.rows] == [(20, 42, "decode", True)]
    assert s.next_batch(0.3) is None


def test_a_batch_at_the_head_is_running_and_one_waits() -> None:
    s = scheduler(hand_set=(4, 8))
    s.submit(Request(1, list(range(20)), 5), 0.0)
    assert s.next_batch(0.0, head_backlog=1) is not None
    assert s.next_batch(0.0, head_backlog=2) is None


def test_results_that_were_not_asked_for_are_refused_and_change_nothing() -> None:
    s = scheduler()
    s.submit(Request(1, [1, 2], 5), 0.0)
    with pytest.raises(WireError, match="batch 0"):
        s.on_result(0, [], 0.0)
    batch = s.next_batch(0.0)
    assert batch is not None
    before = s.statistics()
    for seq, outputs in (
        (1, []),
        (7, []),
        (-1, []),
        (0, []),
        (0, [(2, 5)]),
        (0, [(1, 5), (1, 5)]),
        (0, [(1, -5)]),
    ):
        with pytest.raises(WireError):
            s.on_result(seq, outputs, 0.1)
    assert s.statistics() == before
    assert s.on_result(0, [(1, 5)], 0.1) == [Emitted(1, 0, 2, 5)]


def test_results_of_a_lost_plan_are_ignored_and_counted() -> None:
    s = scheduler()
    s.submit(Request(1, [1, 2], 5), 0.0)
    assert s.next_batch(0.0) is not None
    s.on_lost(0.1)
    assert s.on_result(0, [(1, 5)], 0.2) == []
    assert s.statistics().stale_results == 1
    again = s.next_batch(0.2)
    assert again is not None and again.seq == 1
    assert [(r.position, r.incarnation) for r in again.rows] == [(0, 2), (1, 2)]


def test_a_token_of_an_older_incarnation_is_ignored() -> None:
    s = scheduler()
    s.submit(Request(1, [1, 2], 5), 0.0)
    s.next_batch(0.0)
    assert s.rewind(1, 1, 0.1)
    assert s.on_result(0, [(1, 5)], 0.2) == []
    assert s.statistics().stale_outputs == 1
    assert s.tokens_of(1) == [1, 2]


def test_cancel_frees_the_slot_at_once_and_the_stages_hear_of_it_with_the_next_batch() -> None:
    s = scheduler(hand_set=(4, 8))
    for i in (1, 2, 3):
        s.submit(Request(i, [1, 2], 5), 0.0)
    assert s.next_batch(0.0) is not None
    assert s.cancel(1, 0.1) == [Finished(1, "cancelled", 0)]
    assert s.cancel(1, 0.1) == []
    batch = s.next_batch(0.1)
    assert batch is not None
    assert {r.request for r in batch.rows} == {3}
    assert batch.released == ((0, 1),)
    assert (batch.rows[0].slot, batch.rows[0].incarnation) == (0, 2)


def test_released_slots_go_round_even_when_no_row_does() -> None:
    s = scheduler()
    s.submit(Request(1, [1, 2], 5), 0.0)
    s.next_batch(0.0)
    s.cancel(1, 0.1)
    assert s.next_batch(0.1) is None, "what is in flight is waited for"
    s.on_result(0, [(1, 3)], 0.2)
    batch = s.next_batch(0.2)
    assert batch is not None and batch.rows == () and batch.released == ((0, 1),)
    assert s.on_result(1, [], 0.3) == []
    assert s.next_batch(0.3) is None and s.idle


def test_deadlines_end_queued_and_live_requests() -> None:
    s = scheduler()
    for i, deadline in ((1, 5.0), (2, None), (3, 4.0)):
        s.submit(Request(i, [1, 2], 5, deadline=deadline), 0.0)
    assert s.next_deadline == 4.0
    assert s.tick(3.9) == []
    assert s.tick(4.0) == [Finished(3, "deadline", 0)]
    assert s.tick(6.0) == [Finished(1, "deadline", 0)]
    assert s.next_deadline is None


def test_priority_goes_first_and_waiting_raises_it() -> None:
    s = scheduler(
        Widths(batch_rows=8, micro_batch_rows=8, max_in_flight=1, max_requests=1, context_length=32)
    )
    s.submit(Request(0, [1], 5), 0.0)
    s.submit(Request(1, [1], 5, priority=0), 0.0)
    s.submit(Request(2, [1], 5, priority=1), 5.0)
    s.cancel(0, 6.0)
    assert s.tokens_of(2) == [1]
    s.submit(Request(3, [1], 5, priority=2), 25.0)
    s.cancel(2, 31.0)
    assert s.tokens_of(1) == [1], "it has waited three levels"


def test_rewind_refuses_what_is_not_there() -> None:
    s = scheduler()
    s.submit(Request(1, [1, 2], 5), 0.0)
    with pytest.raises(ValueError, match="positions"):
        s.rewind(1, 3, 0.0)
    with pytest.raises(ValueError, match="tokens"):
        s.rewind(1, 1, 0.0, keep_tokens=1)
    assert not s.rewind(9, 0, 0.0)


def test_a_trace_of_other_stages_or_with_nonsense_changes_no_cost() -> None:
    model = CostModel([Line(0.01, 0.001)] * 2)
    for trace in (
        [StageTrace(1.0)],
        [StageTrace(-1.0), StageTrace(1.0)],
        [StageTrace(float("nan")), StageTrace(1.0)],
        [StageTrace(1.0, float("inf")), StageTrace(1.0)],
    ):
        model.observe([4, 4], trace, 2.0, 0.0)
    assert model.refresh(10.0).stages == (Line(0.01, 0.001),) * 2


@given(st.integers(0, 30), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_the_queue_is_bounded_and_everybody_is_served(limit: int, requests: int) -> None:
    widths = Widths(batch_rows=16, micro_batch_rows=4, max_in_flight=4, max_requests=2, context_length=32)
    ring = Ring(widths, [Line(0.01, 0.001)] * 2, policy=Policy(queue_limit=limit))
    for i in range(requests):
        ring.submit(Request(i, [1, 2, 3], max_tokens=3))
        assert ring.scheduler.statistics().queued <= limit
    ring.run()
    taken = min(requests, 2 + limit)
    assert sum(s.finished is not None for s in ring.streams.values()) == taken
    assert ring.refused == requests - taken
