"""What a bridge derives from the traces is what really happened in the ring."""

import itertools
import math

import pytest
from helpers_telemetry import TrueRing, plan
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_peer.ring import intervals, telemetry
from kvasir_peer.ring.clocks import RingClocks
from kvasir_peer.ring.telemetry import RingTelemetry
from kvasir_peer.ring.volunteering import StageFigures
from kvasir_peer.wire import ring

# --- intervals ------------------------------------------------------------------------------------------------------

pieces = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def moments(found):
    return {moment for start, end in found for moment in range(start, end)}


@given(pieces, pieces)
def test_intervals_are_sets_of_moments(first, second):
    one, other = intervals.union(first), intervals.union(second)
    assert moments(one) == moments(first)
    assert intervals.length(one) == len(moments(first))
    assert all(earlier[1] < later[0] for earlier, later in itertools.pairwise(one))
    assert moments(intervals.without(one, other)) == moments(first) - moments(second)
    assert moments(intervals.clip(one, 5, 20)) == moments(first) & set(range(5, 20))


# --- clocks ---------------------------------------------------------------------------------------------------------


def drawn(true, now):
    return true.telemetry.timeline(now, 1e6).batches


def worst(true, now):
    """Seconds by which a bar is off at most."""
    found = drawn(true, now)
    assert len(found) == len(true.truth)
    errors = [
        [bar.start - start for bar, (start, _) in zip(batch.bars, bars, strict=True)]
        for batch, bars in zip(found, true.truth, strict=True)
    ]
    return max(abs(error) for row in errors for error in row)


def test_bars_stand_where_the_engines_had_the_batches_whatever_the_clocks_show():
    true = TrueRing([0.02, 0.05, 0.01], [0.02, 0.02, 0.02], clocks=[5e5, 12.5, 7.25], word=0.02)
    for number in range(20):
        end = true.batch(0.06 * number)
    assert worst(true, end) < 1e-4  # traces give times of arrival to a tenth of a millisecond


def test_known_round_trips_divide_the_way_among_unequal_hops():
    true = TrueRing([0.02, 0.05, 0.01], [0.09, 0.01, 0.03], word=0.004)
    for stage, trip in enumerate([0.18, 0.02, 0.5]):  # the last one leads to the head, not to the bridge
        true.telemetry.figures(
            stage, f"peer{stage}", 1, StageFigures(path="relayed", round_trip_ms=trip * 1e3)
        )
    true.telemetry.bridge_links(0.008, 0.06)
    for number in range(20):
        end = true.batch(0.06 * number)
    assert worst(true, end) < 1e-3


def test_without_round_trips_the_sum_of_the_ways_is_still_the_measured_one():
    true = TrueRing([0.02, 0.05], [0.09, 0.01], word=0.05)
    end = max(true.batch(0.1 * number) for number in range(10))
    head, tail = drawn(true, end)[0].bars
    (head_start, _), (tail_start, _) = true.truth[0]
    assert head.start == pytest.approx(head_start, abs=1e-3)
    assert tail.start - head.end == pytest.approx(0.05, abs=1e-3)  # half of the 0.1 s of both hops
    assert tail.start == pytest.approx(tail_start - 0.04, abs=1e-3)


@given(
    st.lists(st.floats(0.001, 0.05), min_size=2, max_size=5),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_no_batch_is_drawn_to_arrive_before_it_left(passes, data):
    some = st.lists(st.floats(0, 0.1), min_size=len(passes), max_size=len(passes))
    clocks = data.draw(st.lists(st.floats(1, 1e6), min_size=len(passes), max_size=len(passes)))
    true = TrueRing(passes, data.draw(some), data.draw(some), clocks, word=data.draw(st.floats(0, 0.1)))
    for stage, way in enumerate(data.draw(some)):
        true.telemetry.figures(stage, f"peer{stage}", 1, StageFigures(path="direct", round_trip_ms=way * 2e3))
    end = max(true.batch(0.03 * number) for number in range(8))
    for batch in drawn(true, end):
        assert batch.bars[-1].end <= batch.returned + 1e-3
        for earlier, later in itertools.pairwise(batch.bars):
            assert later.start >= earlier.end - 1e-3


def test_a_changed_way_makes_the_old_least_void():
    clocks = RingClocks(2)
    clocks.passed([0.0, 10.0], [0.0, 10.0], 20.0)
    clocks.changed(0)
    assert clocks.least(0, 20.0) == pytest.approx(10.0)  # until the next batch the old one stays
    clocks.passed([1.0, 11.5], [1.0, 11.5], 22.0)
    assert clocks.least(0, 22.0) == pytest.approx(10.5)
    assert clocks.least(1, 22.0) == pytest.approx(10.0, abs=1e-3)


# --- shares and state -----------------------------------------------------------------------------------------------


def closed_loop(true, requests, seconds, launch=0.0):
    """Keep ``requests`` batches in flight; the time after the last result."""
    due = [launch] * requests
    while min(due) < seconds:
        at = due.index(min(due))
        due[at] = true.batch(due[at] + 1e-4, [(at + 1, 1, True)])
    return max(due)


def test_a_ring_with_one_request_is_starved():
    true = TrueRing([0.02, 0.02, 0.02], [0.01] * 3)
    now = closed_loop(true, 1, 12)
    window = true.telemetry.window(now)
    assert [stage.held for stage in window.stages] == pytest.approx([0.02 / 0.09] * 3, abs=0.01)
    assert [stage.blocked for stage in window.stages] == pytest.approx([0.0] * 3, abs=0.01)
    assert window.tokens_per_second == pytest.approx(1 / 0.09, rel=0.03)
    state = true.telemetry.state(window, 1)
    assert state.name == "starved"
    assert state.text.startswith("starved: 1 request can't fill 3 stages")


def test_the_slowest_stage_saturates_a_full_ring():
    true = TrueRing([0.02, 0.03, 0.01], [0.01] * 3)
    now = closed_loop(true, 8, 12)
    window = true.telemetry.window(now)
    assert window.stages[1].held == pytest.approx(1.0, abs=0.02)
    assert window.stages[0].held == pytest.approx(2 / 3, abs=0.02)
    assert window.stages[1].rows_per_second == pytest.approx(1 / 0.03, rel=0.03)
    assert window.stages[1].bytes_per_second == pytest.approx(128 / 0.03, rel=0.03)
    state = true.telemetry.state(window, 8)
    assert (state.name, state.stage, state.link) == ("saturated", 1, None)
    assert "stage 2 (layers 2 to 3) computes 100 % of the time" in state.text


def test_a_slow_link_blocks_the_ring_even_when_it_is_full_all_the_time():
    true = TrueRing([0.01, 0.01, 0.01], [0.02] * 3, rates=[0.0, 0.04, 0.0])
    now = closed_loop(true, 8, 60)  # long after the one batch that found the link empty
    window = true.telemetry.window(now)
    assert window.stages[1].link > 0.9
    assert window.stages[1].blocked == pytest.approx(0.75, abs=0.05)
    true.telemetry.figures(1, "peer1", 1, StageFigures(path="relayed", round_trip_ms=41))
    state = true.telemetry.state(true.telemetry.window(now), 8)
    assert (state.name, state.stage, state.link) == ("blocked", None, 1)
    assert "from stage 2 to stage 3" in state.text and "relayed, 41 ms" in state.text


def test_the_tails_link_is_named_by_where_it_leads():
    true = TrueRing([0.01, 0.01], [0.02] * 2, rates=[0.0, 0.05])
    now = closed_loop(true, 8, 30)
    state = true.telemetry.state(true.telemetry.window(now), 8)
    assert (state.name, state.link) == ("blocked", 1)
    assert "from stage 2 to the bridge" in state.text


def test_a_ring_that_nobody_asks_is_starved_and_its_shares_fall():
    true = TrueRing([0.02, 0.03], [0.01] * 2)
    now = closed_loop(true, 8, 12)
    later = true.telemetry.window(now + 5)
    assert later.stages[1].held == pytest.approx(0.5, abs=0.02)
    idle = true.telemetry.window(now + 60)
    assert [stage.starved for stage in idle.stages] == [1.0, 1.0]
    assert true.telemetry.state(idle, 0).text == "starved: nobody asks anything"


def test_a_batch_that_does_not_come_back_stalls_the_ring():
    true = TrueRing([0.02, 0.03], [0.01] * 2)
    now = closed_loop(true, 2, 3)
    true.launch_without_end(now)
    assert true.telemetry.state(true.telemetry.window(now + 5), 1).name == "saturated"  # as far as is known
    state = true.telemetry.state(true.telemetry.window(now + telemetry.STALLED + 0.1), 1)
    assert state.name == "stalled"
    assert "for 10 s, 1 is under way" in state.text
    true.telemetry.ended(now + 20)
    assert true.telemetry.state(true.telemetry.window(now + 20), 1).name == ""


def test_before_anything_came_back_nothing_is_made_up():
    true = TrueRing([0.02, 0.03], [0.01] * 2)
    fresh = true.telemetry.window(1.0)
    assert [stage.starved for stage in fresh.stages] == [1.0, 1.0]
    true.launch_without_end(1.0)
    first = true.telemetry.window(2.0)
    assert (first.in_flight, first.tokens_per_second) == (1, 0.0)
    assert true.telemetry.timeline(2.0).batches == ()


# --- timeline -------------------------------------------------------------------------------------------------------


def test_requests_get_small_numbers_and_keep_them():
    true = TrueRing([0.01, 0.01], [0.01] * 2)
    big = 1 << 63
    true.batch(0.0, [(big, 12, False)])
    true.batch(0.1, [(big, 1, True), (big + 1, 9, False)])
    true.batch(0.2, [(big + 1, 1, True), (big, 1, True)])
    found = true.telemetry.timeline(1.0, 10, active={big + 1})
    assert [batch.runs for batch in found.batches] == [
        ((1, 12, False),),
        ((1, 1, True), (2, 9, False)),
        ((2, 1, True), (1, 1, True)),
    ]
    assert [batch.rows for batch in found.batches] == [12, 10, 2]
    first, second = found.requests
    assert (first.number, first.prefill_rows, first.tokens, first.active) == (1, 12, 2, False)
    assert (second.number, second.prefill_rows, second.tokens, second.active) == (2, 9, 1, True)


def test_only_what_is_new_can_be_asked_for():
    true = TrueRing([0.01, 0.01], [0.01] * 2)
    for number in range(5):
        true.batch(number / 10)
    assert [b.number for b in true.telemetry.timeline(1.0, 10, after=3).batches] == [4, 5]
    assert [b.sequence for b in true.telemetry.timeline(1.0, 0.75).batches] == [3, 4]


def test_a_result_that_overtakes_the_heads_word_is_completed_by_it():
    true = TrueRing([0.01, 0.01], [0.01] * 2)
    true.batch(0.0, [(3, 4, False)], late_word=True)
    (batch,) = true.telemetry.timeline(1.0).batches
    assert batch.runs == ((1, 4, False),)
    assert batch.composed is not None and batch.rows == 4
    assert true.telemetry.window(1.0).in_flight == 0


def test_an_older_epoch_stays_in_the_timeline_and_its_late_words_are_left_out():
    true = TrueRing([0.01, 0.01], [0.01] * 2)
    true.batch(0.0)
    true.launch_without_end(0.1)
    true.epoch = 2
    true.begin(1.0)
    assert true.telemetry.window(1.5).in_flight == 0
    true.telemetry.returned(ring.Result("plan", 1, 1, b"", (), ()), 1.1)
    true.telemetry.composed(ring.Composed("plan", 1, 2, b"", ((7, 1, True),)), 1.1)
    true.batch(1.2)
    found = true.telemetry.timeline(2.0)
    assert [(batch.epoch, batch.sequence) for batch in found.batches] == [(1, 0), (2, 0)]
    statistics = true.telemetry.statistics()
    assert (statistics.epochs, statistics.batches, statistics.in_flight) == (2, 2, 0)


# --- totals and bad words -------------------------------------------------------------------------------------------


def test_totals_never_fall_when_stages_begin_anew():
    true = TrueRing([0.01, 0.02], [0.01] * 2)
    true.batch(0.0, [(1, 3, False)])
    told = true.telemetry.figures
    told(1, "peer1", 1, StageFigures(bytes_in=100, bytes_out=50, engine_restarts=2))
    told(1, "peer1", 1, StageFigures(bytes_in=150, bytes_out=60, engine_restarts=2))
    told(1, "peer1", 1, StageFigures(bytes_in=140, bytes_out=60, engine_restarts=2))  # overtaken on its way
    told(1, "peer1", 2, StageFigures(bytes_in=10, bytes_out=5, engine_restarts=3))
    told(1, "other", 2, StageFigures(bytes_in=7, bytes_out=1, engine_restarts=0))
    told(5, "nobody", 2, StageFigures(bytes_in=7))
    head, tail = true.telemetry.statistics().stages
    assert (tail.bytes_in, tail.bytes_out, tail.engine_restarts) == (167, 66, 3)
    assert (head.rows, head.batches, head.boundary_bytes) == (3, 1, 384)
    assert tail.held_seconds == pytest.approx(0.02)
    true.epoch = 2
    true.begin(1.0)
    true.batch(1.0)
    assert [stage.batches for stage in true.telemetry.statistics().stages] == [2, 2]


odd = st.floats(allow_nan=True, allow_infinity=True)
entries = st.builds(
    ring.StageTrace,
    st.integers(0, 3),
    odd,
    odd,
    odd,
    st.integers(-5, 5),
    odd,
    odd,
    st.integers(-5, 5),
    st.integers(-5, 5),
)


@given(
    st.lists(st.lists(entries, max_size=3), max_size=6), st.lists(st.floats(0, 30), min_size=6, max_size=6)
)
def test_whatever_a_trace_claims_shares_stay_shares(traces, times):
    told = RingTelemetry()
    told.began(plan(2), 0.0)
    for sequence, (trace, now) in enumerate(zip(traces, sorted(times), strict=False)):
        told.composed(ring.Composed("plan", 1, sequence, b"", ()), now)
        told.returned(ring.Result("plan", 1, sequence, b"", (), tuple(trace)), now)
    window = told.window(31.0)
    for stage in window.stages:
        assert stage.held + stage.starved + stage.blocked == pytest.approx(1.0)
        assert all(0 <= share <= 1.000001 for share in (stage.held, stage.starved, stage.blocked, stage.link))
    assert told.state(window, 1).name in ("starved", "saturated", "blocked")
    assert all(math.isfinite(bar.end) for batch in told.timeline(31.0).batches for bar in batch.bars)
    statistics = told.statistics()
    assert statistics.batches == min(len(traces), 6)
    assert statistics.unusable + statistics.stages[0].batches == statistics.batches


def test_memory_is_bounded():
    told = RingTelemetry()
    told.began(plan(2), 0.0)
    for sequence in range(telemetry.MAX_UNPAIRED + 50):
        told.composed(ring.Composed("plan", 1, sequence, b"", ((sequence, 1, True),)), 1.0)
    for sequence in range(10_000, 10_000 + telemetry.MAX_BATCHES + telemetry.MAX_UNPAIRED):
        trace = tuple(ring.StageTrace(stage, 1.0, 0.0, 0.0, 0, sequence / 1e3, 0.0) for stage in range(2))
        told.returned(ring.Result("plan", 1, sequence, b"", (), trace), sequence / 1e3)
    assert told.window(14.0).in_flight == telemetry.MAX_UNPAIRED
    assert len(told.timeline(14.0, 1e6).batches) == telemetry.MAX_BATCHES
    assert len(told.timeline(14.0, 1e6, active=range(10**6)).requests) == telemetry.MAX_REQUESTS
