"""What a ring does, seen from its bridge: shares of time by stage, the ring's state in words, and its last seconds.

Pure: batches, reports and the time come in; windows, totals and a timeline come out. All times are seconds on the
bridge's clock, except inside :class:`_Passed`, which keeps each stage's own clock; :mod:`kvasir_peer.ring.clocks` says
how these are brought together.

**When the engine had a batch.** A stage reports for each batch when it arrived, how long the engine had it, and how
long it waited besides. An engine takes batches in their order, so a batch was begun when it had arrived and the one
before it was done.

**When a link was busy.** A batch that is longer on its way than the quickest one was (and :data:`JITTER` more, for
processes that get their turn late) has waited for the link, be it in a queue or for its own bytes to pass.

From both follow, for each stage and window, three shares that add up to 1: *held* (the engine had a batch), *blocked*
(it had none, while results of the stage waited for the link) and *starved* (it had none, and nothing waited).

The ring's state:

- *saturated*: a stage has been held for :data:`SATURATED` of the window or more; the fullest one sets the pace.
- *blocked*: a link has been busy for :data:`BLOCKED` of the window or more, and longer than any stage was held.
- *starved*: neither; the ring would take more work than there is, or waits for the way of what it has.
- *stalled*: batches are under way, and none has come back for :data:`STALLED` seconds.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvasir_peer.ring import intervals
from kvasir_peer.ring.clocks import RingClocks

if TYPE_CHECKING:
    from kvasir_peer.ring.plan import Plan
    from kvasir_peer.ring.volunteering import StageFigures
    from kvasir_peer.wire import ring

WINDOW = 10.0  # seconds over which shares and rates are taken: long against a batch, short against a person's patience
SATURATED = (
    0.85  # share held: some gaps between passes stay, as engines tell of one before they take the next
)
BLOCKED = 0.85  # share in which a link was busy; the same measure, for whatever passes slowest
STALLED = (
    10.0  # seconds without a result while batches are under way; far over a slow round, short of giving up
)
JITTER = 0.003  # seconds of delay by which nothing waits but a process for its turn
MAX_BARS = (
    16384  # batches kept times stages: some seconds even of quick rings, and milliseconds to look through
)
MAX_BATCHES = 2048
MAX_UNPAIRED = 1024  # batches of which only head or tail has spoken; far over what may be in flight
MAX_REQUESTS = 512  # requests whose numbers are remembered
MAX_SECONDS = 1e6  # a longer time in a trace is not one

RingStateName = Literal["starved", "saturated", "blocked", "stalled", ""]


@dataclass(frozen=True, slots=True)
class RingState:
    """How a ring fares; stages are counted from 0, in words from 1.

    Attributes:
        name: see the module; empty where there is no ring that serves.
        stage: the one that sets the pace, of a saturated ring.
        link: the stage behind which the link is busy, of a blocked ring.
        text: in words, for people.
    """

    name: RingStateName
    stage: int | None
    link: int | None
    text: str


@dataclass(frozen=True, slots=True)
class StageWindow:
    """One stage in a window.

    Attributes:
        held, starved, blocked: shares that add up to 1; all 0 before the first batch.
        link: share in which the link behind the stage was busy, whatever the engine did.
        queue: batches that a batch found before it, on average.
        batches_per_second, rows_per_second, bytes_per_second: computed; bytes are hidden states handed on.
        pass_ms: milliseconds that the engine had a batch, on average.
        path: of the link behind the stage: ``relayed``, ``direct``, or empty where it is not known.
        round_trip_ms: milliseconds to the next stage and back; 0 where it is not known.
    """

    held: float
    starved: float
    blocked: float
    link: float
    queue: float
    batches_per_second: float
    rows_per_second: float
    bytes_per_second: float
    pass_ms: float
    path: str
    round_trip_ms: float


@dataclass(frozen=True, slots=True)
class RingWindow:
    """A ring in the last seconds.

    Attributes:
        seconds: length of the window; shorter while the epoch is young.
        batches_per_second, rows_per_second, tokens_per_second: that came back.
        in_flight: batches under way now.
        round_trip_ms: from the head's word to the tail's tokens, median; 0 before the first batch.
        silent_seconds: since the last batch came back (or the epoch began).
        stages: in the order of the ring.
    """

    seconds: float
    batches_per_second: float
    rows_per_second: float
    tokens_per_second: float
    in_flight: int
    round_trip_ms: float
    silent_seconds: float
    stages: tuple[StageWindow, ...]


@dataclass(frozen=True, slots=True)
class StageTotals:
    """What the stages with one index have done since the bridge started, from epoch to epoch; nothing ever falls.

    Attributes:
        batches, rows: computed, as the traces say.
        held_seconds, starved_seconds: of the engine, as the traces say.
        blocked_seconds: results waited for the link to take them into its queue.
        boundary_bytes: hidden states handed on.
        bytes_in, bytes_out: payload and frames, as the stages report them with their polls.
        engine_restarts: engine processes that had to be started again.
    """

    batches: int = 0
    rows: int = 0
    held_seconds: float = 0.0
    starved_seconds: float = 0.0
    blocked_seconds: float = 0.0
    boundary_bytes: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    engine_restarts: int = 0


@dataclass(frozen=True, slots=True)
class RingStatistics:
    """Counters since the bridge started.

    Attributes:
        epochs: that began to serve.
        batches, rows, tokens: that came back.
        unusable: results whose trace made no sense; they count above, and are in no window.
        in_flight: batches under way now.
        stages: by index.
    """

    epochs: int
    batches: int
    rows: int
    tokens: int
    unusable: int
    in_flight: int
    stages: tuple[StageTotals, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """The time in which one stage's engine had a batch, seconds on the bridge's clock."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class TimelineBatch:
    """One batch on its way through the ring.

    Attributes:
        number: counts all batches of the bridge's life.
        epoch, sequence: of the batch.
        runs: ``(request's number, rows, whether it is a decode row)``; empty where the head's word is missing.
        rows, tokens: in the batch, and sampled from it.
        composed: when the bridge heard of it from the head; None where it did not.
        returned: when its tokens came.
        bars: one for each stage.
    """

    number: int
    epoch: int
    sequence: int
    runs: tuple[tuple[int, int, bool], ...]
    rows: int
    tokens: int
    composed: float | None
    returned: float
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class TimelineRequest:
    """A request as the batches show it.

    Attributes:
        number: small, counts the requests that this bridge has seen computed.
        prefill_rows, tokens: computed so far.
        first, last: when it was first and last seen in a batch.
        active: whether it is still going on.
    """

    number: int
    prefill_rows: int
    tokens: int
    first: float
    last: float
    active: bool


@dataclass(frozen=True, slots=True)
class Timeline:
    """The last seconds of a ring.

    Attributes:
        now: the time of asking.
        seconds: how far back it goes.
        epoch: of the ring now; older batches are of older epochs.
        stages: of the ring now.
        batches: in the order in which they came back.
        requests: those in the batches and those that go on, by number.
    """

    now: float
    seconds: float
    epoch: int
    stages: int
    batches: tuple[TimelineBatch, ...]
    requests: tuple[TimelineRequest, ...]


@dataclass(slots=True)
class _Request:
    number: int
    first: float
    last: float
    prefill_rows: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _Passed:
    """A batch that came back; times of stages on their own clocks."""

    number: int
    sequence: int
    returned: float
    tokens: int
    composed: float | None
    runs: tuple[tuple[int, int, bool], ...]
    rows: int
    starts: tuple[float, ...] = ()
    ends: tuple[float, ...] = ()
    arrived: tuple[float, ...] = ()
    departed: tuple[float, ...] = ()
    trace: tuple[ring.StageTrace, ...] = ()


@dataclass
class _Epoch:
    """One epoch's batches."""

    number: int
    stages: int
    began: float
    first: tuple[int, ...]
    end: tuple[int, ...]
    clocks: RingClocks = field(init=False)
    batches: deque[_Passed] = field(init=False)
    announced: OrderedDict[int, tuple[float, tuple[tuple[int, int, bool], ...]]] = field(
        default_factory=OrderedDict
    )
    unannounced: OrderedDict[int, _Passed] = field(default_factory=OrderedDict)
    last_end: list[float] = field(init=False)
    last_return: float = field(init=False)

    def __post_init__(self) -> None:
        self.clocks = RingClocks(self.stages)
        self.batches = deque(maxlen=min(MAX_BATCHES, max(64, MAX_BARS // self.stages)))
        self.last_end = [-math.inf] * self.stages
        self.last_return = self.began


@dataclass
class _Reported:
    """What a stage's peer last said of itself, to grow the totals by the difference."""

    peer: str = ""
    epoch: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    engine_restarts: int = 0
    path: str = ""
    round_trip: float = 0.0


@dataclass
class _Totals:
    batches: int = 0
    rows: int = 0
    held: float = 0.0
    starved: float = 0.0
    blocked: float = 0.0
    boundary_bytes: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    engine_restarts: int = 0


class RingTelemetry:
    """Everything that one model's bridge keeps to show how its ring fares."""

    def __init__(self) -> None:
        self._epoch: _Epoch | None = None
        self._earlier: deque[TimelineBatch] = deque(maxlen=MAX_BATCHES)  # of epochs that are over
        self._requests: OrderedDict[int, _Request] = OrderedDict()
        self._reported: list[_Reported] = []
        self._totals: list[_Totals] = []
        self._bridge_ways = (0.0, 0.0)
        self._seen_requests = self._number = 0
        self._epochs = self._batches = self._rows = self._tokens = self._unusable = 0

    # -- what happens ---------------------------------------------------------------------------------------

    def began(self, plan: Plan, now: float) -> None:
        """An epoch serves; what was under way in the one before is lost."""
        self.ended(now)
        self._epochs += 1
        count = len(plan.stages)
        self._epoch = _Epoch(
            plan.epoch,
            count,
            now,
            tuple(stage.first for stage in plan.stages),
            tuple(stage.end for stage in plan.stages),
        )
        self._reported = self._reported[:count]
        while len(self._reported) < count:
            self._reported.append(_Reported())
        while len(self._totals) < count:
            self._totals.append(_Totals())

    def ended(self, now: float) -> None:
        """The epoch is over; what it has done stays in the timeline."""
        if self._epoch is not None:
            self._earlier.extend(self._drawn(self._epoch, now, now - WINDOW * 3, -1))
            self._epoch = None

    def composed(self, message: ring.Composed, now: float) -> None:
        """The head has composed a batch."""
        epoch = self._epoch
        if epoch is None or message.epoch != epoch.number:
            return
        runs = tuple(
            (self._request(request, now).number, rows, decode) for request, rows, decode in message.runs
        )
        for request, rows, decode in message.runs:
            if not decode:
                self._request(request, now).prefill_rows += rows
        passed = epoch.unannounced.pop(message.sequence, None)
        if passed is not None:
            passed.composed, passed.runs = now, runs
            passed.rows = sum(rows for _, rows, _ in runs)
        else:
            epoch.announced[message.sequence] = (now, runs)
            if len(epoch.announced) > MAX_UNPAIRED:
                epoch.announced.popitem(last=False)

    def returned(self, message: ring.Result, now: float) -> None:
        """The tail's tokens of a batch came."""
        epoch = self._epoch
        if epoch is None or message.epoch != epoch.number:
            return
        composed, runs = epoch.announced.pop(message.sequence, (None, ()))
        epoch.last_return = now
        rows = sum(count for _, count, _ in runs) if runs else max((t.rows for t in message.trace), default=0)
        self._number += 1
        self._batches += 1
        self._rows += rows
        given = [output for output in message.outputs if not output.void]
        self._tokens += len(given)
        for output in given:
            self._request(output.request, now).tokens += 1
        passed = _Passed(self._number, message.sequence, now, len(given), composed, runs, rows)
        if composed is None:
            epoch.unannounced[message.sequence] = passed
            if len(epoch.unannounced) > MAX_UNPAIRED:
                epoch.unannounced.popitem(last=False)
        if _usable(message.trace, epoch.stages):
            self._place(epoch, passed, message.trace)
        else:
            self._unusable += 1

    def _place(self, epoch: _Epoch, passed: _Passed, trace: tuple[ring.StageTrace, ...]) -> None:
        """Find out when each stage's engine had the batch, on that stage's clock."""
        starts: list[float] = []
        ends: list[float] = []
        arrived = tuple(t.arrived for t in trace)
        departed = tuple(t.arrived + (t.held_ms + max(0.0, t.waited_ms)) / 1e3 for t in trace)
        for stage, t in enumerate(trace):
            held = t.held_ms / 1e3
            start = min(max(t.arrived, epoch.last_end[stage]), departed[stage] - held)
            starts.append(start)
            ends.append(start + held)
            epoch.last_end[stage] = start + held
            totals = self._totals[stage]
            totals.batches += 1
            totals.rows += t.rows
            totals.held += held
            totals.starved += t.starved_ms / 1e3
            totals.blocked += t.blocked_ms / 1e3
            totals.boundary_bytes += t.boundary_bytes
        passed.starts, passed.ends = tuple(starts), tuple(ends)
        passed.arrived, passed.departed, passed.trace = arrived, departed, trace
        epoch.clocks.passed(arrived, departed, passed.returned)
        if passed.composed is not None:
            epoch.clocks.composed(arrived[0], passed.composed)
        epoch.batches.append(passed)

    def figures(self, stage: int, peer: str, epoch: int, figures: StageFigures) -> None:
        """A stage's peer has reported its counters, which begin anew with each epoch."""
        if not 0 <= stage < len(self._reported):
            return
        before, totals = self._reported[stage], self._totals[stage]
        if before.peer != peer:
            before = _Reported(peer, epoch)
        elif before.epoch != epoch:
            before = _Reported(peer, epoch, engine_restarts=before.engine_restarts, path=before.path)
        totals.bytes_in += max(0, figures.bytes_in - before.bytes_in)
        totals.bytes_out += max(0, figures.bytes_out - before.bytes_out)
        totals.engine_restarts += max(0, figures.engine_restarts - before.engine_restarts)
        if before.path and figures.path and figures.path != before.path and self._epoch is not None:
            self._epoch.clocks.changed(stage)
        trip = figures.round_trip_ms / 1e3
        self._reported[stage] = _Reported(
            peer,
            epoch,
            max(figures.bytes_in, before.bytes_in),
            max(figures.bytes_out, before.bytes_out),
            max(figures.engine_restarts, before.engine_restarts),
            figures.path or before.path,
            trip if 0 <= trip < MAX_SECONDS else 0.0,
        )

    def bridge_links(self, head: float, tail: float) -> None:
        """Round-trip times of the bridge's own links to head and tail, seconds; 0 where not known."""
        self._bridge_ways = (head / 2, tail / 2)

    def _request(self, request: int, now: float) -> _Request:
        known = self._requests.get(request)
        if known is None:
            self._seen_requests += 1
            known = self._requests[request] = _Request(self._seen_requests, now, now)
            if len(self._requests) > MAX_REQUESTS:
                self._requests.popitem(last=False)
        known.last = now
        self._requests.move_to_end(request)
        return known

    # -- what it comes to -----------------------------------------------------------------------------------

    def statistics(self) -> RingStatistics:
        """A snapshot of the counters."""
        return RingStatistics(
            self._epochs,
            self._batches,
            self._rows,
            self._tokens,
            self._unusable,
            len(self._epoch.announced) if self._epoch is not None else 0,
            tuple(
                StageTotals(
                    t.batches,
                    t.rows,
                    t.held,
                    t.starved,
                    t.blocked,
                    t.boundary_bytes,
                    t.bytes_in,
                    t.bytes_out,
                    t.engine_restarts,
                )
                for t in self._totals
            ),
        )

    def window(self, now: float, seconds: float = WINDOW) -> RingWindow:
        """The last seconds in figures."""
        epoch = self._epoch
        if epoch is None:
            return RingWindow(0.0, 0.0, 0.0, 0.0, 0, 0.0, 0.0, ())
        span = max(1e-3, min(seconds, now - epoch.began))
        offsets = self._offsets(epoch, now)
        recent = list(_since(epoch, now - span, -1))
        trips = sorted(p.returned - p.composed for p in recent if p.composed is not None)
        in_flight = len(epoch.announced)
        return RingWindow(
            span,
            len(recent) / span,
            sum(passed.rows for passed in recent) / span,
            sum(passed.tokens for passed in recent) / span,
            in_flight,
            max(0.0, trips[len(trips) // 2]) * 1e3 if trips else 0.0,
            max(0.0, now - epoch.last_return),
            tuple(
                self._stage_window(epoch, stage, offsets, in_flight > 0, now, seconds)
                for stage in range(epoch.stages)
            ),
        )

    def _stage_window(
        self, epoch: _Epoch, stage: int, offsets: list[float], in_flight: bool, now: float, seconds: float
    ) -> StageWindow:
        known = self._reported[stage]
        path, trip = known.path, known.round_trip * 1e3
        if not offsets:  # nothing has come through yet
            idle = 0.0 if in_flight else 1.0
            return StageWindow(0.0, idle, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, path, trip)
        # On the stage's own clock from here. What is under way now has told nothing yet, so the window ends where
        # the stage's last known batch did.
        offset = offsets[stage]
        high = epoch.last_end[stage] if in_flight else now - offset
        low = max(high - seconds, epoch.began - offset)
        if high - low < 1e-3:
            return StageWindow(0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, path, trip)
        least = epoch.clocks.least(stage, now) + JITTER
        held: list[intervals.Interval] = []
        waited: list[intervals.Interval] = []
        passes: list[ring.StageTrace] = []
        last = stage + 1 == epoch.stages
        for passed in reversed(epoch.batches):
            gone = passed.departed[stage]
            if gone < low:
                break
            end = passed.ends[stage]
            held.append((passed.starts[stage], end))
            there = (passed.returned if last else passed.arrived[stage + 1]) - least
            if there > gone:
                waited.append((gone, there))
            if low < end <= high:
                passes.append(passed.trace[stage])
        span = high - low
        busy = intervals.union(intervals.clip(held, low, high))
        held_share = intervals.length(busy) / span
        link = intervals.union(intervals.clip(waited, low, high))
        blocked = intervals.length(intervals.without(link, busy)) / span
        count = len(passes)
        return StageWindow(
            held_share,
            max(0.0, 1.0 - held_share - blocked),
            blocked,
            intervals.length(link) / span,
            sum(t.queue for t in passes) / count if count else 0.0,
            count / span,
            sum(t.rows for t in passes) / span,
            sum(t.boundary_bytes for t in passes) / span,
            sum(t.held_ms for t in passes) / count if count else 0.0,
            path,
            trip,
        )

    def state(self, window: RingWindow, requests: int) -> RingState:
        """The ring's state, in a name and in words.

        Args:
            window: as :meth:`window` gives it.
            requests: under way or waiting at the bridge now.
        """
        epoch = self._epoch
        if epoch is None or not window.stages:
            return RingState("", None, None, "no ring serves")
        if window.in_flight and window.silent_seconds >= STALLED:
            return RingState(
                "stalled",
                None,
                None,
                f"stalled: no batch has come back for {window.silent_seconds:.0f} s, "
                f"{_count(window.in_flight, 'is', 'are')} under way",
            )
        fullest = max(range(epoch.stages), key=lambda stage: window.stages[stage].held)
        busiest = max(range(epoch.stages), key=lambda stage: window.stages[stage].link)
        held, link = window.stages[fullest].held, window.stages[busiest].link
        if held >= SATURATED and held >= link:
            layers = _layers(epoch.first[fullest], epoch.end[fullest])
            return RingState(
                "saturated",
                fullest,
                None,
                f"saturated: stage {fullest + 1} ({layers}) computes {_percent(held)} of the time and sets the pace",
            )
        if link >= BLOCKED:
            there = f"stage {busiest + 2}" if busiest + 1 < epoch.stages else "the bridge"
            known = window.stages[busiest]
            how = f" ({known.path}, {known.round_trip_ms:.0f} ms there and back)" if known.path else ""
            return RingState(
                "blocked",
                None,
                busiest,
                f"blocked: on the link from stage {busiest + 1} to {there} something waits "
                f"{_percent(link)} of the time{how}",
            )
        if not requests and not window.in_flight:
            return RingState("starved", None, None, "starved: nobody asks anything")
        asked = _count(requests, "request", "requests")
        reason = (
            f"{asked} can't fill {epoch.stages} stages"
            if requests < epoch.stages
            else f"{asked}, and neither a stage nor a link is full"
        )
        return RingState(
            "starved",
            None,
            None,
            f"starved: {reason}; the fullest stage computes {_percent(held)} of the time",
        )

    def timeline(
        self, now: float, seconds: float = WINDOW, *, after: int = -1, active: Container[int] = ()
    ) -> Timeline:
        """The batches of the last seconds.

        Args:
            after: only batches with a higher number.
            active: ids of the requests that go on.
        """
        since = now - seconds
        batches = [b for b in self._earlier if b.number > after and b.returned > since]
        epoch = self._epoch
        if epoch is not None:
            batches += self._drawn(epoch, now, since, after)
        shown = {run[0] for batch in batches for run in batch.runs}
        return Timeline(
            now,
            seconds,
            epoch.number if epoch is not None else 0,
            epoch.stages if epoch is not None else 0,
            tuple(batches),
            tuple(
                sorted(
                    (
                        TimelineRequest(r.number, r.prefill_rows, r.tokens, r.first, r.last, id_ in active)
                        for id_, r in self._requests.items()
                        if r.number in shown or id_ in active
                    ),
                    key=lambda request: request.number,
                )
            ),
        )

    def _drawn(self, epoch: _Epoch, now: float, since: float, after: int) -> list[TimelineBatch]:
        offsets = self._offsets(epoch, now)
        drawn = [
            TimelineBatch(
                passed.number,
                epoch.number,
                passed.sequence,
                passed.runs,
                passed.rows,
                passed.tokens,
                passed.composed,
                passed.returned,
                tuple(
                    Bar(start + offset, end + offset)
                    for start, end, offset in zip(passed.starts, passed.ends, offsets, strict=True)
                ),
            )
            for passed in _since(epoch, since, after)
        ]
        drawn.reverse()
        return drawn

    def _offsets(self, epoch: _Epoch, now: float) -> list[float]:
        head, tail = self._bridge_ways
        # The tail's own round trip is that to the head; the timeline follows its batches to the bridge.
        between = [reported.round_trip / 2 for reported in self._reported[: epoch.stages - 1]]
        ways = [*between, tail, head]
        return epoch.clocks.offsets(ways if all(ways) else (), now)


def _since(epoch: _Epoch, since: float, after: int) -> Iterator[_Passed]:
    for passed in reversed(epoch.batches):
        if passed.returned <= since or passed.number <= after:
            return
        yield passed


def _usable(trace: tuple[ring.StageTrace, ...], stages: int) -> bool:
    """Whether a trace is one: an entry for each stage, with times that can be."""
    return len(trace) == stages and all(
        0 <= t.held_ms / 1e3 < MAX_SECONDS
        and 0 <= t.starved_ms / 1e3 < MAX_SECONDS
        and 0 <= t.blocked_ms / 1e3 < MAX_SECONDS
        and -1 <= t.waited_ms / 1e3 < MAX_SECONDS
        and 0 <= t.arrived < 1e12
        and t.queue >= 0
        and t.rows >= 0
        and t.boundary_bytes >= 0
        for t in trace
    )


def _layers(first: int, end: int) -> str:
    return f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
