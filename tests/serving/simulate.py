"""A ring in virtual time: stages with an engine of integers, links with delay, and a scheduler at the head.

The engine keeps a KV cache per stage as real ones do, addressed by (slot, position) and guarded by the
incarnation, and every output depends on every earlier position through every stage, so a row that is lost, doubled,
out of order, or computed on another request's cache changes the tokens that follow.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvasir_peer.serving.batches import Batch
from kvasir_peer.serving.costs import CostModel, Line, StageTrace
from kvasir_peer.serving.requests import Accepted, Emitted, Event, Finished, Request
from kvasir_peer.serving.scheduler import DEFAULT_POLICY, Policy, Scheduler
from kvasir_peer.serving.widths import Widths

VOCABULARY = 97
_MASK = (1 << 61) - 1


def _mix(a: int, b: int, salt: int) -> int:
    x = (a * 0x9E3779B97F4A7C15 + b * 0xC2B2AE3D27D4EB4F + salt * 0x165667B19E3779F9 + 1) & _MASK
    return ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9) & _MASK


def solo(
    prompt: Sequence[int], max_tokens: int, stages: int, stop: frozenset[int] = frozenset()
) -> list[int]:
    """The continuation of a prompt that has the ring for itself, computed without any scheduler."""
    memory = [0] * stages
    tokens = list(prompt)
    out: list[int] = []
    position = 0
    while True:
        hidden = tokens[position]
        for stage in range(stages):
            memory[stage] = _mix(memory[stage], hidden, stage)
            hidden = _mix(memory[stage], position, 1000 + stage)
        position += 1
        if position == len(tokens):
            token = hidden % VOCABULARY
            tokens.append(token)
            out.append(token)
            if token in stop or len(out) == max_tokens:
                return out


class IntegerStage:
    """One stage's cache and arithmetic. Breaking a rule of the membership is an AssertionError."""

    def __init__(self, index: int, widths: Widths) -> None:
        self.index = index
        self.widths = widths
        self.cache: dict[int, list[int]] = {}
        self.incarnation: dict[int, int] = {}
        self.holder: dict[tuple[int, int], int] = {}

    def compute(self, batch: Batch, hidden: list[int]) -> list[int]:
        for slot, incarnation in batch.released:
            if self.incarnation.get(slot, 0) <= incarnation:
                self.cache.pop(slot, None)
        out: list[int] = []
        for row, x in zip(batch.rows, hidden, strict=True):
            assert 0 <= row.slot < self.widths.max_requests
            assert 0 <= row.position < self.widths.context_length
            assert self.holder.setdefault((row.slot, row.incarnation), row.request) == row.request
            if row.through <= self.index:
                out.append(0)
                continue
            seen = self.incarnation.get(row.slot, 0)
            assert row.incarnation >= seen, "an older incarnation after a newer one"
            cache = self.cache.setdefault(row.slot, [])
            if row.incarnation > seen:
                self.incarnation[row.slot] = row.incarnation
                assert row.position <= len(cache), "a hole in the cache"
                del cache[row.position :]
            assert row.position == len(cache), "positions of an incarnation are contiguous"
            before = cache[-1] if cache else 0
            cache.append(_mix(before, x, self.index))
            out.append(_mix(cache[-1], row.position, 1000 + self.index))
        return out


@dataclass
class _Passing:
    batch: Batch
    hidden: list[int]
    epoch: int
    trace: list[StageTrace] = field(default_factory=list)
    arrived: float = 0.0


@dataclass
class Stream:
    """What was seen of one request."""

    request: Request
    submitted: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finished: Finished | None = None


class Ring:
    """Discrete-event simulation of head, stages and links around one scheduler.

    Args:
        costs: line of each stage's pass; what the scheduler expects at first is ``expected`` (same if None).
        delay: seconds one way on each link, tail to head included.
        row_seconds: seconds that a row occupies a link (its bytes / the link's rate).
    """

    def __init__(
        self,
        widths: Widths,
        costs: Sequence[Line],
        *,
        delay: float = 0.0,
        row_seconds: float = 0.0,
        policy: Policy = DEFAULT_POLICY,
        expected: Sequence[Line] | None = None,
        jitter: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.widths = widths
        self.costs = list(costs)
        self.delay = delay
        self.row_seconds = row_seconds
        self.jitter = jitter
        self.scheduler = Scheduler(
            widths,
            CostModel(
                expected or costs,
                hop_per_row=row_seconds,
                transit=Line(delay * len(costs), row_seconds * len(costs)),
            ),
            policy,
        )
        self.now = 0.0
        self.epoch = 0
        self.streams: dict[int, Stream] = {}
        self.batches: list[tuple[float, Batch]] = []
        self.refused = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._build()

    def _build(self) -> None:
        n = len(self.costs)
        self.stages = [IntegerStage(i, self.widths) for i in range(n)]
        self._queues: list[list[_Passing]] = [[] for _ in range(n)]
        self._running = [False] * n
        self._link_free = [0.0] * n
        self.busy = [0.0] * n
        self.busy_since = 0.0

    # --- driving ---------------------------------------------------------------------------------------

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (time, self._order, action))

    def run(self, until: float = 1e12) -> None:
        """Let time pass until nothing happens any more, or ``until``."""
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
        if until < 1e12:
            self.now = until

    def submit(self, request: Request) -> None:
        self.streams[request.id] = Stream(request, self.now)
        if not isinstance(self.scheduler.submit(request, self.now), Accepted):
            self.refused += 1
        self.pump()

    def cancel(self, request_id: int) -> None:
        self._take(self.scheduler.cancel(request_id, self.now))
        self.pump()

    def tick(self) -> None:
        self._take(self.scheduler.tick(self.now))
        self.pump()

    def rewind(self, request_id: int, position: int, keep: int | None = None) -> bool:
        if keep is not None:
            del self.streams[request_id].tokens[keep:]
            del self.streams[request_id].times[keep:]
        done = self.scheduler.rewind(request_id, position, self.now, keep)
        self.pump()
        return done

    def lose(self, stage: int) -> None:
        """The stage dies; an empty one takes its place at once. All frames under way are lost."""
        self.epoch += 1
        self.stages[stage] = IntegerStage(stage, self.widths)
        self._queues = [[] for _ in self.costs]
        self._running = [False] * len(self.costs)
        kept = [None if i == stage else i for i in range(len(self.costs))]
        self.scheduler.on_lost(self.now, kept)
        self.pump()

    def pump(self) -> None:
        while True:
            backlog = len(self._queues[0]) + self._running[0]
            batch = self.scheduler.next_batch(self.now, backlog)
            if batch is None:
                return
            self._check(batch)
            self.batches.append((self.now, batch))
            self._arrive(0, _Passing(batch, [row.token for row in batch.rows], self.epoch))

    def _check(self, batch: Batch) -> None:
        statistics = self.scheduler.statistics()
        assert len(batch.rows) <= self.widths.micro_batch_rows
        assert statistics.rows_in_flight <= self.widths.batch_rows
        assert statistics.in_flight <= self.widths.max_in_flight
        assert statistics.live <= self.widths.max_requests
        closed: set[int] = set()
        for before, row in itertools.pairwise(batch.rows):
            if row.request == before.request:
                assert row.position == before.position + 1 and row.slot == before.slot
            else:
                closed.add(before.request)
                assert row.request not in closed, "rows of one request are consecutive"

    # --- stages and links --------------------------------------------------------------------------------

    def _arrive(self, stage: int, passing: _Passing) -> None:
        passing.arrived = self.now
        self._queues[stage].append(passing)
        self._start(stage)

    def _start(self, stage: int) -> None:
        if self._running[stage] or not self._queues[stage]:
            return
        passing = self._queues[stage].pop(0)
        self._running[stage] = True
        rows = passing.batch.rows_at(stage)
        took = self.costs[stage].seconds(rows) * self.jitter() if rows else 0.0
        passing.trace.append(StageTrace(held=took, waited=self.now - passing.arrived))
        self.busy[stage] += took
        self.at(self.now + took, lambda: self._done(stage, passing))

    def _done(self, stage: int, passing: _Passing) -> None:
        if passing.epoch != self.epoch:
            return
        passing.hidden = self.stages[stage].compute(passing.batch, passing.hidden)
        self._running[stage] = False
        last = stage == len(self.costs) - 1
        # The tail sends tokens, which take no time on the link.
        begin = max(self.now, self._link_free[stage])
        self._link_free[stage] = begin + (0.0 if last else self.row_seconds * len(passing.batch.rows))
        arrival = self._link_free[stage] + self.delay
        if last:
            self.at(arrival, lambda: self._result(passing))
        else:
            self.at(arrival, lambda: self._next(stage + 1, passing))
        self._start(stage)
        if stage == 0:
            self.pump()

    def _next(self, stage: int, passing: _Passing) -> None:
        if passing.epoch == self.epoch:
            self._arrive(stage, passing)

    def _result(self, passing: _Passing) -> None:
        if passing.epoch != self.epoch:
            return
        outputs = [
            (row.request, hidden % VOCABULARY)
            for row, hidden in zip(passing.batch.rows, passing.hidden, strict=True)
            if row.wants_output
        ]
        self._take(self.scheduler.on_result(passing.batch.seq, outputs, self.now, passing.trace))
        self.pump()

    def _take(self, events: list[Event]) -> None:
        for event in events:
            stream = self.streams[event.request]
            if isinstance(event, Emitted):
                assert stream.finished is None, "nothing follows the end"
                assert event.index == len(stream.tokens)
                assert event.position == len(stream.request.prompt) + event.index
                stream.tokens.append(event.token)
                stream.times.append(self.now)
            else:
                assert stream.finished is None, "a request ends once"
                stream.finished = event
                assert event.generated == len(stream.tokens)

    # --- measuring ---------------------------------------------------------------------------------------

    def throughput(self, warm_up: float, seconds: float) -> float:
        """Tokens per second over ``seconds`` that follow ``warm_up``; ``busy`` then covers the same time."""
        self.run(self.now + warm_up)
        self.busy = [0.0] * len(self.costs)
        start = self.now
        self.run(start + seconds)
        seen = sum(sum(start < t <= start + seconds for t in s.times) for s in self.streams.values())
        return seen / seconds
