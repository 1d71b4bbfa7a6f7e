"""The batch scheduler: which rows of which requests go into the ring next.

A pure state machine: it does no I/O and reads no clock, so the same code runs in the head's agent, in a
coordinator (a ring of one stage) and, for thousands of simulated seconds, in a test. Its owner calls

* :meth:`Scheduler.submit`, :meth:`Scheduler.cancel`, :meth:`Scheduler.rewind` when somebody asks,
* :meth:`Scheduler.next_batch` until it gives None, whenever one of the calls here has changed something or the
  head's engine has finished a batch,
* :meth:`Scheduler.on_result` when the tail's answer arrives (in the order of ``seq``),
* :meth:`Scheduler.on_lost` when a stage was lost and another plan has taken over,
* :meth:`Scheduler.tick` when :attr:`Scheduler.next_deadline` has passed.

Continuous batching: a request has at most one row outstanding whose token is not yet known; its prompt goes in
chunks that follow each other without waiting for answers. One operation, the rewind, serves recovery, cancel,
rows that turned out wrong, and drafts: the slot gets another incarnation, and whatever is still in flight for an
older one no longer counts.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kvasir_peer.errors import WireError
from kvasir_peer.serving.batches import Batch, Row
from kvasir_peer.serving.costs import CostModel, Line, RingCosts, StageTrace
from kvasir_peer.serving.pacing import Shape, decode_shape, mixed_shape
from kvasir_peer.serving.requests import (
    Accepted,
    Emitted,
    Event,
    Finished,
    FinishReason,
    Kept,
    Refused,
    Request,
)
from kvasir_peer.serving.slots import SlotTable
from kvasir_peer.serving.widths import Widths

# Waiting this long (seconds) raises a request by one priority level, so that nobody starves.
AGING = 10.0
# Prompts get at least this share of the rows over time, however many requests decode.
PREFILL_SHARE = 0.25
# Batches that may stand at the head's own engine, the running one included: the next one must be there when it
# ends, and any further one would be composed too early to take up rows that become ready meanwhile.
HEAD_BACKLOG = 2
# Requests that may wait: a bound of memory. How long clients may have to wait is the bridge's to say (--max-queue),
# whose setting goes no further than this.
QUEUE_LIMIT = 4096
# Bounds of retry_after, seconds.
MIN_RETRY, MAX_RETRY = 1.0, 60.0
# First guess of how long a request holds its slot, seconds, until some have been seen.
FIRST_HOLD_GUESS = 10.0


@dataclass(frozen=True, slots=True)
class Policy:
    """What may be set by hand.

    Attributes:
        queue_limit: requests that may wait for a slot.
        hand_set: ``(in flight, rows)`` in place of what the costs suggest, for measurements.
        ordered: results come in the order of the batches, as in a ring; where they may overtake each other, those
            with rows of the same request must not.
    """

    queue_limit: int = QUEUE_LIMIT
    hand_set: tuple[int, int] | None = None
    ordered: bool = True


DEFAULT_POLICY = Policy()


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Counters grow for ever; the others are as they stand.

    Attributes:
        queued: requests waiting for a slot.
        live: requests that hold a slot.
        decoding: of those, with the prompt computed.
        slots: slots in all.
        backlog_rows: known rows of live requests that were not sent yet.
        in_flight: batches sent whose result is not back.
        rows_in_flight: rows of these batches.
        target_in_flight: batches that the measured costs ask for at present.
        target_rows: rows of a batch at most, at present.
        accepted, refused: requests.
        finished: requests by reason.
        tokens: generated tokens.
        batches, rows, prefill_rows: sent; ``prefill_rows`` counts all but decodes.
        recomputed_rows: rows sent that had been computed before (recovery, rewinds).
        rewinds: rewinds, cancels of requests with a slot included.
        losses: calls of ``on_lost``.
        stale_results: results of batches that were given up before.
        stale_outputs: tokens that were ignored because their request had been rewound or had ended.
    """

    queued: int
    live: int
    decoding: int
    slots: int
    backlog_rows: int
    in_flight: int
    rows_in_flight: int
    target_in_flight: int
    target_rows: int
    accepted: int
    refused: int
    finished: dict[str, int]
    tokens: int
    batches: int
    rows: int
    prefill_rows: int
    recomputed_rows: int
    rewinds: int
    losses: int
    stale_results: int
    stale_outputs: int
    costs: RingCosts


@dataclass(slots=True)
class _Queued:
    request: Request
    arrived: float
    begun: bool = False
    kept: Kept | None = None


@dataclass(slots=True)
class _Live:
    """A request with a slot.

    ``tokens`` are known (prompt and answer); positions below ``sent`` are computed or on their way; ``valid[s]``
    positions are known to be in the KV cache of stage ``s`` under the present incarnation.
    """

    request: Request
    arrived: float
    admitted: float
    slot: int
    incarnation: int
    tokens: list[int]
    valid: list[int]
    sent: int = 0
    ever_sent: int = 0
    ready_since: float = 0.0

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def unsent(self) -> int:
        return len(self.tokens) - self.sent

    @property
    def decodes(self) -> bool:
        """Whether nothing but the newest token's row is left to compute."""
        return self.generated > 0 and self.unsent <= 1

    def through(self, position: int) -> int:
        """Stages that must compute the row: up to the last one that has no KV entry for it."""
        for stage in range(len(self.valid) - 1, -1, -1):
            if self.valid[stage] <= position:
                return stage + 1
        raise AssertionError("a row is computed somewhere")

    def level(self, now: float, since: float) -> int:
        return self.request.priority + int((now - since) / AGING)


@dataclass(frozen=True, slots=True)
class _Run:
    request: int
    incarnation: int
    first: int
    end: int
    through: int
    wants_output: bool


@dataclass(slots=True)
class _InFlight:
    seq: int
    sent_at: float
    runs: list[_Run]
    rows: int
    rows_at: tuple[int, ...]
    released: tuple[tuple[int, int], ...]


def _moved(held: Sequence[int], kept: Sequence[int | None]) -> list[int]:
    """Positions that each stage of a plan holds, of those that the stages of the former one have held."""
    return [0 if index is None or index >= len(held) else held[index] for index in kept]


class Scheduler:
    """Continuous batching over the slots of a ring.

    Args:
        widths: the plan's declared widths; checked.
        costs: expected costs of the stages; what results show is taken up.
        policy: what is set by hand.
    """

    def __init__(self, widths: Widths, costs: CostModel, policy: Policy = DEFAULT_POLICY) -> None:
        widths.check()
        self.widths = widths
        self._costs = costs
        self._policy = policy
        self._slots = SlotTable(widths.max_requests)
        self._queue: list[_Queued] = []
        self._queue_limit = policy.queue_limit
        self._live: dict[int, _Live] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._rows_in_flight = 0
        self._released: list[tuple[int, int]] = []
        self._next_seq = 0
        self._prefill_credit = 0.0
        self._hold_time = FIRST_HOLD_GUESS
        self._shape_key: tuple[int, int, int, int] | None = None
        self._shape = Shape(1, 1, 1)
        self._finished: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    # --- what is asked ------------------------------------------------------------------------------------

    def submit(
        self, request: Request, now: float, kept: Kept | None = None, *, begun: bool = False
    ) -> Accepted | Refused:
        """Take a request, or say why not.

        Args:
            kept: what the stages hold of its prompt already; it is used where the request gets that slot, and nobody
                else has had it meanwhile.
            begun: its reader has tokens already, made elsewhere. It goes before all that have not begun, and is not
                turned away because many wait.
        """
        refusal = self._refusal(request, now, begun)
        if refusal is not None:
            self._counts["refused"] += 1
            return refusal
        self._counts["accepted"] += 1
        self._queue.append(_Queued(request, now, begun, kept))
        self._admit(now)
        return Accepted(waiting=0 if request.id in self._live else len(self._queue) - 1)

    def cancel(self, request_id: int, now: float, reason: FinishReason = "cancelled") -> list[Event]:
        """End a request at once, wherever it stands. Unknown ids (it may just have ended) give no event."""
        for place, queued in enumerate(self._queue):
            if queued.request.id == request_id:
                del self._queue[place]
                self._finished[reason] += 1
                return [Finished(request_id, reason, 0)]
        live = self._live.get(request_id)
        if live is None:
            return []
        self._counts["rewinds"] += 1
        event = self._finish(live, reason, now)
        self._admit(now)
        return [event]

    def rewind(self, request_id: int, position: int, now: float, keep_tokens: int | None = None) -> bool:
        """Compute a request again from ``position`` on, under another incarnation of its slot.

        Args:
            position: KV entries at it and later are void at all stages.
            keep_tokens: generated tokens that stay; later ones are sampled again. None keeps all of them: the
                text is only computed again, and no token is emitted twice.

        Returns:
            False when the request holds no slot (it has ended, or has not begun); what stages have kept of one that
            waits is void from ``position`` on, too.
        """
        live = self._live.get(request_id)
        if live is None:
            for queued in self._queue:
                if queued.request.id == request_id and queued.kept is not None:
                    held = [min(position, count) for count in queued.kept.positions]
                    queued.kept = Kept(queued.kept.slot, held)
            return False
        if not 0 <= position <= len(live.tokens):
            raise ValueError(
                f"request {request_id} has {len(live.tokens)} positions, cannot rewind to {position}"
            )
        if keep_tokens is not None and not 0 <= keep_tokens <= live.generated:
            raise ValueError(f"request {request_id} has {live.generated} tokens, cannot keep {keep_tokens}")
        if keep_tokens is not None:
            del live.tokens[live.prompt_length + keep_tokens :]
        # The newest known token has no output yet, so its row must always go again.
        self._restart(live, [min(v, position, len(live.tokens) - 1) for v in live.valid], now)
        return True

    def count_on_from(self, incarnation: int) -> None:
        """Incarnations begun from now on are newer than this one, which another scheduler may have given."""
        self._slots.count_on_from(incarnation)

    def extend(self, request_id: int, tokens: Sequence[int], now: float) -> None:
        """Take over tokens of a live request that were made, and never came back here; nothing is emitted.

        Args:
            tokens: all of the text; begins with what is known.
        """
        live = self._live[request_id]
        assert list(tokens[: len(live.tokens)]) == live.tokens, "a known token never changes"
        live.tokens = list(tokens)
        live.ready_since = now

    def on_lost(
        self,
        now: float,
        kept: Sequence[int | None] | None = None,
        stages: Sequence[Line] | None = None,
    ) -> dict[int, tuple[int, int]]:
        """Everything in flight is lost, and stages may have lost their KV caches with it.

        Args:
            kept: for each stage of the plan that holds from now on, the index that the same peer with the same layers
                has had in the former plan, if it still has its cache; else None. None: no cache is left.
            stages: expected costs of the stages of that plan; may be left out when their number is the same,
                or when the cost model has been told already.

        Returns:
            Per live request the positions ``(first, end)`` that were known to be computed and now will be
            again. Streams continue: tokens that were emitted stay, and are not emitted again.
        """
        if stages is not None:
            self._costs.expect(stages)
        if kept is None:
            kept = [None] * self._costs.n_stages
        if len(kept) != self._costs.n_stages:
            raise ValueError(f"{len(kept)} stages, but costs are expected for {self._costs.n_stages}")
        self._counts["losses"] += 1
        # Stages may not have heard of what ended, so they are told again: an older incarnation harms nobody.
        self._released = [slot for flight in self._in_flight for slot in flight.released] + self._released
        self._in_flight.clear()
        self._rows_in_flight = 0
        replay: dict[int, tuple[int, int]] = {}
        for live in self._live.values():
            computed = max(live.valid)
            newest = len(live.tokens) - 1  # its output is not known, so its row always goes again
            self._restart(live, [min(held, newest) for held in _moved(live.valid, kept)], now)
            if live.sent < min(computed, newest):
                replay[live.request.id] = (live.sent, min(computed, newest))
        for queued in self._queue:
            if queued.kept is not None:
                queued.kept = Kept(queued.kept.slot, _moved(queued.kept.positions, kept))
        return replay

    def tick(self, now: float) -> list[Event]:
        """End the requests whose deadline has passed."""
        due = [
            q.request.id for q in self._queue if q.request.deadline is not None and q.request.deadline <= now
        ]
        due += [i for i, live in self._live.items() if (d := live.request.deadline) is not None and d <= now]
        return [event for request_id in due for event in self.cancel(request_id, now, "deadline")]

    @property
    def next_deadline(self) -> float | None:
        """When :meth:`tick` has something to do; None while nothing has a deadline."""
        deadlines = [q.request.deadline for q in self._queue if q.request.deadline is not None]
        deadlines += [d for live in self._live.values() if (d := live.request.deadline) is not None]
        return min(deadlines, default=None)

    @property
    def capacity(self) -> int:
        """Requests that are taken at most, in slots and in the queue.

        Those that have begun had slots, and some may have ended without their last token being heard, so beside the
        usual queue there is room for twice as many of them as there are slots.
        """
        return 3 * self._slots.count + self._queue_limit

    @property
    def idle(self) -> bool:
        """Nothing is queued, live, in flight or to be released."""
        return not (self._queue or self._live or self._in_flight or self._released)

    def tokens_of(self, request_id: int) -> list[int]:
        """Known tokens of a request with a slot, prompt and answer; KeyError for any other."""
        return list(self._live[request_id].tokens)

    def request_ids(self) -> list[int]:
        """Ids of all requests that are queued or live."""
        return [*(queued.request.id for queued in self._queue), *self._live]

    def is_queued(self, request_id: int) -> bool:
        """Whether the request waits for a slot."""
        return any(queued.request.id == request_id for queued in self._queue)

    def generated_of(self, request_id: int) -> int:
        """Tokens of a live request that were generated here."""
        return self._live[request_id].generated

    # --- what goes out ------------------------------------------------------------------------------------

    def next_batch(self, now: float, head_backlog: int = 0) -> Batch | None:
        """Compose the next batch, or None when nothing is ready or enough is in flight.

        Args:
            head_backlog: batches waiting or running at the head's own engine.
        """
        self._admit(now)
        if head_backlog >= HEAD_BACKLOG:
            return None
        decodes = [live for live in self._live.values() if live.decodes and live.unsent]
        prefills = [live for live in self._live.values() if live.unsent and not live.decodes]
        if not decodes and not prefills:
            if self._released and not self._in_flight:
                return self._send([], now)  # the ring goes idle: let the stages forget what has ended
            return None
        shape = self._choose_shape(prefills, now)
        if len(self._in_flight) >= min(shape.in_flight, self.widths.max_in_flight):
            return None
        room = min(shape.rows, self.widths.batch_rows - self._rows_in_flight)
        if room <= 0:
            return None
        decode_room = min(room, shape.decode_rows)
        if prefills:
            self._prefill_credit = min(self._prefill_credit + PREFILL_SHARE * room, float(shape.rows))
            decode_room = min(decode_room, room - min(int(self._prefill_credit), room))
        decodes.sort(key=lambda live: (-live.level(now, live.ready_since), live.ready_since, live.request.id))
        picked = [(live, 1) for live in decodes[:decode_room]]
        room -= len(picked)
        chunks = self._share(prefills, room, now)
        if prefills:
            taken = sum(rows for _, rows in chunks)
            self._prefill_credit = max(0.0, self._prefill_credit - taken)
        if not picked and not chunks:
            return None
        return self._send(picked + chunks, now)

    def _choose_shape(self, prefills: list[_Live], now: float) -> Shape:
        if self._policy.hand_set is not None:
            in_flight, rows = self._policy.hand_set
            return Shape(in_flight, min(rows, self.widths.micro_batch_rows), rows)
        costs = self._costs.refresh(now)
        decoding = sum(live.decodes for live in self._live.values())
        backlog = sum(live.unsent for live in prefills)
        if not prefills:
            key = (self._costs.version, decoding, 0, 0)
            if key != self._shape_key:
                self._shape_key, self._shape = key, decode_shape(costs, decoding, self.widths)
        else:
            key = (self._costs.version, decoding, backlog if not decoding else 0, 1)
            if key != self._shape_key:
                self._shape_key, self._shape = key, mixed_shape(costs, decoding, backlog, self.widths)
        return self._shape

    def _share(self, prefills: list[_Live], room: int, now: float) -> list[tuple[_Live, int]]:
        """Divide rows among the prompts: half to the first in line, the rest to the shortest of its level.

        The first half gives every prompt its end in bounded time; the second lets short ones overtake long ones.
        A text that is computed again goes before prompts: somebody has already begun to read it.
        """
        if not prefills or room <= 0:
            return []

        def level(live: _Live) -> tuple[int, int]:
            return (-int(live.generated > 0), -live.level(now, live.arrived))

        line = sorted(prefills, key=lambda live: (*level(live), live.arrived, live.request.id))
        shortest = sorted(
            line[1:], key=lambda live: (*level(live), live.unsent, live.arrived, live.request.id)
        )
        first = line[0]
        rows: dict[int, tuple[_Live, int]] = {}
        first_rows = min(first.unsent, room if not shortest else math.ceil(room / 2))
        rows[first.request.id] = (first, first_rows)
        room -= first_rows
        for live in shortest:
            if room <= 0:
                break
            count = min(live.unsent, room)
            rows[live.request.id] = (live, count)
            room -= count
        if room > 0:
            rows[first.request.id] = (first, min(first.unsent, first_rows + room))
        return list(rows.values())

    def _send(self, picked: list[tuple[_Live, int]], now: float) -> Batch:
        rows: list[Row] = []
        runs: list[_Run] = []
        n_stages = self._costs.n_stages
        for live, count in picked:
            decode = live.decodes
            first, last = live.sent, len(live.tokens) - 1
            run_start, run_through = first, live.through(first)
            for position in range(first, first + count):
                through = live.through(position)
                wants = position == last
                if through != run_through:
                    runs.append(
                        _Run(live.request.id, live.incarnation, run_start, position, run_through, False)
                    )
                    run_start, run_through = position, through
                rows.append(
                    Row(
                        request=live.request.id,
                        slot=live.slot,
                        incarnation=live.incarnation,
                        position=position,
                        token=live.tokens[position],
                        phase="decode" if decode else "prefill",
                        wants_output=wants,
                        through=through,
                        sampling=live.request.sampling if wants else None,
                    )
                )
            end = first + count
            runs.append(
                _Run(live.request.id, live.incarnation, run_start, end, run_through, end == len(live.tokens))
            )
            self._counts["recomputed_rows"] += max(0, min(end, live.ever_sent) - first)
            self._counts["prefill_rows"] += 0 if decode else count
            live.sent = end
            live.ever_sent = max(live.ever_sent, end)
        seq = self._next_seq
        self._next_seq += 1
        released, self._released = tuple(self._released), []
        batch = Batch(seq, tuple(rows), released)
        rows_at = tuple(sum(r.end - r.first for r in runs if r.through > s) for s in range(n_stages))
        self._in_flight.append(_InFlight(seq, now, runs, len(rows), rows_at, released))
        self._rows_in_flight += len(rows)
        self._counts["batches"] += 1
        self._counts["rows"] += len(rows)
        return batch

    # --- what comes back ----------------------------------------------------------------------------------

    def on_result(
        self,
        seq: int,
        outputs: Iterable[tuple[int, int]],
        now: float,
        trace: Sequence[StageTrace] = (),
        void: Collection[int] | None = None,
    ) -> list[Event]:
        """Take the tail's answer to a batch.

        Args:
            seq: of the batch. One that was given up by :meth:`on_lost` is ignored.
            outputs: ``(request id, token)`` for each row that wanted an output, in the order of the rows.
            trace: what each stage says about the batch; may be empty.
            void: where the tail hands tokens out by itself, the requests whose token it has kept back. Every other
                token has been read by somebody, so it counts, even if its request was rewound meanwhile. None: the
                caller hands tokens out, and those of rewound requests are dropped.

        Raises:
            WireError: ``unexpected`` for a batch that was never sent or is out of order, ``outputs`` where the
                tokens are not those that were asked for, or one is kept back of a request that was not rewound.
                The state is unchanged.
        """
        oldest = self._in_flight[0].seq if self._in_flight else self._next_seq
        flight = next((f for f in self._in_flight if f.seq == seq), None)
        if 0 <= seq < oldest or (flight is None and 0 <= seq < self._next_seq):
            self._counts["stale_results"] += 1
            return []
        if flight is None or (self._policy.ordered and seq != oldest):
            raise WireError(
                "unexpected", f"result of batch {seq} while batch {oldest} is the next to come back"
            )
        tokens = list(outputs)
        wanted = [run.request for run in flight.runs if run.wants_output]
        if [request for request, _ in tokens] != wanted or any(token < 0 for _, token in tokens):
            raise WireError(
                "outputs", f"batch {seq} asked for {len(wanted)} tokens and its result does not answer them"
            )
        if void:
            self._check_void(flight, void)
        self._in_flight.remove(flight)
        self._rows_in_flight -= flight.rows
        if trace and flight.rows:
            self._costs.observe(flight.rows_at, trace, now - flight.sent_at, now)
        events: list[Event] = []
        answers = iter(tokens)
        for run in flight.runs:
            token = next(answers)[1] if run.wants_output else None
            live = self._live.get(run.request)
            current = live is not None and live.incarnation == run.incarnation
            if live is not None and current:
                for stage in range(min(run.through, len(live.valid))):
                    live.valid[stage] = max(live.valid[stage], run.end)
            if token is None:
                continue
            counts = current if void is None else run.request not in void
            # A second token for a place, of a row that was computed again, changes nothing.
            if live is not None and counts and run.end == len(live.tokens):
                events += self._emit(live, token, now)
            else:
                self._counts["stale_outputs"] += 1
        self._admit(now)
        return events

    def _check_void(self, flight: _InFlight, void: Collection[int]) -> None:
        """A token that is kept back, and not made again, would be the end of its answer."""
        for run in flight.runs:
            live = self._live.get(run.request)
            if live is not None and live.incarnation == run.incarnation and run.request in void:
                raise WireError("outputs", f"the tail keeps a token of request {run.request} back")

    def _emit(self, live: _Live, token: int, now: float) -> list[Event]:
        live.tokens.append(token)
        live.ready_since = now
        self._counts["tokens"] += 1
        request = live.request
        events: list[Event] = [Emitted(request.id, live.generated - 1, len(live.tokens) - 1, token)]
        if token in request.stop_tokens:
            events.append(self._finish(live, "stop", now))
        elif live.generated >= request.max_tokens:
            events.append(self._finish(live, "length", now))
        return events

    # --- shared -------------------------------------------------------------------------------------------

    def _refusal(self, request: Request, now: float, begun: bool) -> Refused | None:
        if request.id in self._live or any(q.request.id == request.id for q in self._queue):
            return Refused(f"request {request.id} is already here")
        if not request.prompt:
            return Refused("the prompt is empty")
        if request.max_tokens < 1:
            return Refused("max_tokens must be at least 1")
        length = len(request.prompt) + request.max_tokens
        if length > self.widths.context_length:
            return Refused(
                f"prompt of {len(request.prompt)} and max_tokens of {request.max_tokens} make {length} tokens, "
                f"the context holds {self.widths.context_length}"
            )
        if request.deadline is not None and request.deadline <= now:
            return Refused("the deadline has passed")
        limit = self.capacity - self._slots.count if begun else self._queue_limit
        if not self._slots.can_acquire() and len(self._queue) >= limit:
            return Refused(
                f"all {self._slots.count} slots are taken and {len(self._queue)} requests wait",
                self.retry_after(),
            )
        return None

    def retry_after(self) -> float:
        """Seconds until a place in the queue should be free."""
        return min(max(self._hold_time / self._slots.count, MIN_RETRY), MAX_RETRY)

    def _admit(self, now: float) -> None:
        while self._queue and self._slots.can_acquire():
            place = min(
                range(len(self._queue)),
                key=lambda i: (
                    not self._queue[i].begun,
                    -(self._queue[i].request.priority + int((now - self._queue[i].arrived) / AGING)),
                    self._queue[i].arrived,
                    i,
                ),
            )
            queued = self._queue.pop(place)
            kept = queued.kept
            if kept is not None and self._slots.last(kept.slot) not in (None, queued.request.id):
                kept = None  # another text has been computed there since
            slot, incarnation = self._slots.acquire(queued.request.id, kept.slot if kept else None)
            valid = [0] * self._costs.n_stages
            if kept is not None and kept.slot == slot and len(kept.positions) == len(valid):
                valid = [min(held, len(queued.request.prompt) - 1) for held in kept.positions]
            self._live[queued.request.id] = _Live(
                request=queued.request,
                arrived=queued.arrived,
                admitted=now,
                slot=slot,
                incarnation=incarnation,
                tokens=list(queued.request.prompt),
                valid=valid,
                sent=min(valid),
                ready_since=now,
            )

    def _restart(self, live: _Live, valid: list[int], now: float) -> None:
        live.incarnation = self._slots.renew(live.slot)
        live.valid = valid
        live.sent = min(valid)
        live.ready_since = now
        self._counts["rewinds"] += 1

    def _finish(self, live: _Live, reason: FinishReason, now: float) -> Finished:
        del self._live[live.request.id]
        self._released.append(self._slots.release(live.slot, live.request.id))
        self._finished[reason] += 1
        self._hold_time += 0.1 * (now - live.admitted - self._hold_time)
        return Finished(live.request.id, reason, live.generated)

    def statistics(self) -> SchedulerStatistics:
        """A snapshot."""
        count = self._counts
        return SchedulerStatistics(
            queued=len(self._queue),
            live=len(self._live),
            decoding=sum(live.decodes for live in self._live.values()),
            slots=self._slots.count,
            backlog_rows=sum(live.unsent for live in self._live.values()),
            in_flight=len(self._in_flight),
            rows_in_flight=self._rows_in_flight,
            target_in_flight=self._shape.in_flight,
            target_rows=self._shape.rows,
            accepted=count["accepted"],
            refused=count["refused"],
            finished=dict(self._finished),
            tokens=count["tokens"],
            batches=count["batches"],
            rows=count["rows"],
            prefill_rows=count["prefill_rows"],
            recomputed_rows=count["recomputed_rows"],
            rewinds=count["rewinds"],
            losses=count["losses"],
            stale_results=count["stale_results"],
            stale_outputs=count["stale_outputs"],
            costs=self._costs.costs,
        )
