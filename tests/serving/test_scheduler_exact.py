"""Whatever comes in between, every token of every request equals its solo run (property tests)."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulate import VOCABULARY, Ring, solo

from kvasir_peer.serving.costs import Line
from kvasir_peer.serving.requests import Request
from kvasir_peer.serving.scheduler import Policy
from kvasir_peer.serving.widths import Widths

FAST = settings(
    max_examples=int(os.environ.get("KVASIR_TEST_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

CONTEXT = 64
lines = st.builds(Line, st.floats(0.0, 0.2), st.floats(0.0001, 0.05))
all_widths = st.builds(
    lambda micro, extra, in_flight, requests: Widths(
        batch_rows=micro + extra,
        micro_batch_rows=micro,
        max_in_flight=in_flight,
        max_requests=requests,
        context_length=CONTEXT,
    ),
    st.integers(1, 12),
    st.integers(0, 40),
    st.integers(1, 8),
    st.integers(1, 6),
)
prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[float, Request]]:
    out = []
    for i in range(draw(st.integers(1, 8))):
        prompt = draw(prompts)
        out.append(
            (
                draw(st.floats(0.0, 3.0)),
                Request(
                    id=i,
                    prompt=prompt,
                    max_tokens=draw(st.integers(1, CONTEXT - len(prompt))),
                    stop_tokens=frozenset(draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=2))),
                    priority=draw(st.integers(-1, 2)),
                ),
            )
        )
    return out


@st.composite
def rings(draw: st.DrawFn) -> Ring:
    return Ring(
        draw(all_widths),
        draw(st.lists(lines, min_size=1, max_size=5)),
        delay=draw(st.sampled_from([0.0, 0.001, 0.05])),
        row_seconds=draw(st.sampled_from([0.0, 0.002])),
        policy=Policy(queue_limit=16),
    )


def check(ring: Ring, *, cancelled: bool = False) -> None:
    for stream in ring.streams.values():
        expected = solo(
            stream.request.prompt, stream.request.max_tokens, len(ring.costs), stream.request.stop_tokens
        )
        if cancelled and stream.finished is not None and stream.finished.reason in ("cancelled", "deadline"):
            assert stream.tokens == expected[: len(stream.tokens)]
            continue
        assert stream.tokens == expected
        assert stream.finished is not None
        assert stream.finished.reason == ("stop" if expected[-1] in stream.request.stop_tokens else "length")
    statistics = ring.scheduler.statistics()
    assert ring.scheduler.idle
    assert statistics.live == statistics.queued == statistics.in_flight == statistics.rows_in_flight == 0
    assert all(not stage.cache for stage in ring.stages), "every stage was told of every ended request"


@FAST
@given(rings(), arrivals())
def test_every_token_equals_the_solo_run(ring: Ring, requests: list[tuple[float, Request]]) -> None:
    for time, request in requests:
        ring.at(time, lambda r=request: ring.submit(r))
    ring.run()
    check(ring)
    assert ring.refused == 0
    assert ring.scheduler.statistics().stale_outputs == 0


@FAST
@given(
    rings(),
    arrivals(),
    st.lists(st.tuples(st.floats(0.0, 6.0), st.integers(0, 7)), max_size=6),
    st.lists(st.tuples(st.floats(0.0, 6.0), st.integers(0, 7), st.floats(0.0, 1.0)), max_size=6),
    st.lists(st.tuples(st.floats(0.0, 6.0), st.integers(0, 4)), max_size=4),
)
def test_cancels_rewinds_and_lost_stages_change_no_token(
    ring: Ring,
    requests: list[tuple[float, Request]],
    cancels: list[tuple[float, int]],
    rewinds: list[tuple[float, int, float]],
    losses: list[tuple[float, int]],
) -> None:
    for time, request in requests:
        ring.at(time, lambda r=request: ring.submit(r))
    for time, request_id in cancels:
        ring.at(time, lambda i=request_id: ring.cancel(i) if i in ring.streams else None)

    def rewind(request_id: int, share: float) -> None:
        stream = ring.streams.get(request_id)
        if stream is not None and stream.finished is None:
            length = len(stream.request.prompt) + len(stream.tokens)
            ring.rewind(request_id, int(share * length))

    for time, request_id, share in rewinds:
        ring.at(time, lambda i=request_id, s=share: rewind(i, s))
    for time, stage in losses:
        ring.at(time, lambda s=stage: ring.lose(s % len(ring.costs)))
    ring.run()
    check(ring, cancelled=True)


@FAST
@given(rings(), arrivals(), st.lists(st.tuples(st.floats(0.0, 6.0), st.floats(0.0, 1.0)), max_size=6))
def test_tokens_that_were_not_sent_yet_are_made_again(
    ring: Ring, requests: list[tuple[float, Request]], rewinds: list[tuple[float, float]]
) -> None:
    for time, request in requests:
        ring.at(time, lambda r=request: ring.submit(r))

    def rewind_all(share: float) -> None:
        for stream in list(ring.streams.values()):
            if stream.finished is None:
                keep = int(share * len(stream.tokens))
                ring.rewind(stream.request.id, len(stream.request.prompt) + keep - 1, keep=keep)

    for time, share in rewinds:
        ring.at(time, lambda s=share: rewind_all(s))
    ring.run()
    check(ring)


def test_after_a_loss_later_stages_keep_their_cache() -> None:
    widths = Widths(batch_rows=64, micro_batch_rows=8, max_in_flight=4, max_requests=4, context_length=128)
    ring = Ring(widths, [Line(0.01, 0.001)] * 4)
    for i in range(4):
        ring.submit(Request(i, list(range(20 + i)), max_tokens=40))
    ring.run(0.8)
    before = len(ring.batches)
    known = [len(ring.streams[i].tokens) for i in range(4)]
    assert min(known) > 3
    ring.lose(1)
    ring.run()
    check(ring)
    again = [row for _, batch in ring.batches[before:] for row in batch.rows]
    for i in range(4):
        computed = 20 + i + known[i] - 1
        replayed = [r for r in again if r.request == i and r.position < computed]
        assert [r.position for r in replayed] == list(range(computed))
        assert all(r.through == 2 for r in replayed), "stages after the replaced one are spared"
        assert not any(r.wants_output for r in replayed), "no token that was sent is sampled again"


def test_a_kept_stage_may_move_to_another_place_of_the_plan() -> None:
    widths = Widths(batch_rows=64, micro_batch_rows=8, max_in_flight=4, max_requests=4, context_length=128)
    ring = Ring(widths, [Line(0.01, 0.001)] * 3)
    ring.submit(Request(1, list(range(30)), max_tokens=40))
    ring.run(1.0)
    known = 30 + len(ring.streams[1].tokens) - 1
    assert len(ring.streams[1].tokens) > 3
    # of stages 0, 1, 2 the second is lost and its layers are split: 0 stays 0, 2 becomes 3
    replay = ring.scheduler.on_lost(ring.now, [0, None, None, 2], [Line(0.01, 0.001)] * 4)
    assert replay == {1: (0, known)}
    batch = ring.scheduler.next_batch(ring.now)
    assert batch is not None
    assert {row.through for row in batch.rows} == {3}
    assert {row.incarnation for row in batch.rows} == {2}
