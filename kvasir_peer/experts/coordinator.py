"""A coordinator: the whole model behind a set of slots, with continuous batching, and experts by volunteers under load.

It composes batches with the same scheduler as a ring's head, a ring of one stage. Several passes are under way at once,
so that one is computed while another waits for volunteers.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import trio

from kvasir_peer.errors import EngineError, WireError
from kvasir_peer.experts.dispatch_policy import SlotReading
from kvasir_peer.experts.dispatcher import Dispatcher, RowOrigins
from kvasir_peer.serving.costs import CostModel, Line, StageTrace
from kvasir_peer.serving.requests import Emitted, Event, Finished, Refused, Request
from kvasir_peer.serving.scheduler import Policy, Scheduler, SchedulerStatistics
from kvasir_peer.wire import ring

if TYPE_CHECKING:
    from kvasir_peer.agent.engine import Engine, PendingPass
    from kvasir_peer.serving.batches import Batch
    from kvasir_peer.serving.widths import Widths

logger = logging.getLogger(__name__)

IDLE_TICK = 1.0  # seconds between two looks at deadlines when nothing else happens
FIRST_PASS = Line(0.01, 0.002)  # expected seconds of a pass, until some were measured

Told = Callable[[tuple[ring.Output, ...], tuple[ring.Ended, ...]], None]


@dataclass(eq=False)
class _UnderWay:
    batch: Batch
    buffer: int
    pending: PendingPass


@dataclass
class Coordinator:
    """Slots over a loaded engine. Use :meth:`run`.

    Args:
        engine: has the whole model loaded.
        widths: slots, rows, batches in flight.
        tell: gets tokens and ends of requests; must not block.
        dispatcher: of the model's experts; None computes everything here.
    """

    engine: Engine
    widths: Widths
    tell: Told
    dispatcher: Dispatcher | None = None
    scheduler: Scheduler = field(init=False)
    rewound_tokens: int = field(init=False, default=0)
    rewound_requests: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.widths, CostModel([FIRST_PASS]), Policy(ordered=False))
        self._wake = trio.Event()
        self._passes: set[_UnderWay] = set()

    # -- what is asked --------------------------------------------------------------------------------------

    def submit(self, message: ring.Submit) -> None:
        """Take a request, or tell why not."""
        now = trio.current_time()
        answer = self.scheduler.submit(Request.submitted(message, now), now)
        if isinstance(answer, Refused):
            self.tell((), (answer.ended(message.request),))
        else:
            self._notify()

    def cancel(self, request: int) -> None:
        """End a request without a word."""
        self.scheduler.cancel(request, trio.current_time())
        self._forget(request)
        self._notify()

    def slots(self) -> SlotReading:
        """How busy it is: the interface that its own dispatcher and the bridge read."""
        state = self.scheduler.statistics()
        return SlotReading(state.live, state.slots, state.queued, trio.current_time())

    def caught(self, peer: str, why: str, rewinds: Mapping[int, int]) -> None:
        """A worker was found to lie: what used its unchecked rows is computed again.

        Tokens that were given out stay; those are counted. What is on its way is dropped.
        """
        now = trio.current_time()
        for request, position in rewinds.items():
            try:
                tokens = len(self.scheduler.tokens_of(request))
            except KeyError:
                continue
            if not self.scheduler.rewind(request, min(position, tokens - 1), now):
                continue
            self.rewound_requests += 1
            self.rewound_tokens += max(0, tokens - 1 - position)
            if self.dispatcher is not None:
                self.dispatcher.exposure.rewound(request, position)
        if rewinds:
            logger.warning("%d requests are computed again since %s lied: %s", len(rewinds), peer, why)
        self._notify()

    # -- computing ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            EngineError: the engine died; what was loaded is gone, and all requests with it. :meth:`recover` goes on.
        """
        failure: EngineError | None = None
        async with trio.open_nursery() as nursery:

            async def guard(task: Callable[[], Awaitable[None]]) -> None:
                nonlocal failure
                try:
                    await task()
                except EngineError as error:
                    failure = error
                    nursery.cancel_scope.cancel()

            # Passes that wait for volunteers may overtake each other, so each is waited for by itself; the scheduler
            # bounds how many there are.
            nursery.start_soon(
                guard,
                partial(self._compose, lambda one: nursery.start_soon(guard, partial(self._collect, one))),
            )
        if failure is not None:
            raise failure

    def recover(self) -> None:
        """The engine has loaded the model again: all requests go on from their tokens."""
        self._passes.clear()
        self.scheduler.on_lost(trio.current_time())

    def _notify(self) -> None:
        self._wake.set()

    async def _compose(self, launched: Callable[[_UnderWay], None]) -> None:
        while True:
            self._wake = trio.Event()
            now = trio.current_time()
            self._ended(self.scheduler.tick(now))
            while (batch := self.scheduler.next_batch(trio.current_time(), self._backlog())) is not None:
                if batch.rows:
                    launched(await self._launch(batch))
                else:
                    self.scheduler.on_result(batch.seq, [], trio.current_time())
            due = self.scheduler.next_deadline
            wait = IDLE_TICK if due is None else min(IDLE_TICK, max(0.0, due - trio.current_time()))
            with trio.move_on_after(wait):
                await self._wake.wait()

    def _backlog(self) -> int:
        """Passes that the engine has before it; of those that have begun, volunteers do the most."""
        return sum(not one.pending.begun for one in self._passes)

    async def _launch(self, batch: Batch) -> _UnderWay:
        layers = self.dispatcher.layers() if self.dispatcher is not None else ()
        origins = None
        if layers:
            places = tuple((row.request, row.position) for row in batch.rows)
            wanted = tuple((row.request, row.position) for row in batch.rows if row.wants_output)
            origins = RowOrigins(places, wanted)
        buffer = await self.engine.take_buffer()
        one = _UnderWay(
            batch, buffer, await self.engine.submit(buffer, batch.membership().encode(), 0, layers, origins)
        )
        self._passes.add(one)
        return one

    async def _collect(self, one: _UnderWay) -> None:
        try:
            done = await one.pending.result()
        except WireError as error:
            raise EngineError(f"the engine refused a batch: {error}") from error
        finally:
            self._passes.discard(one)
            self.engine.free_buffer(one.buffer)
        outputs = [(o.request, o.token) for o in done.outputs]
        trace = [StageTrace(done.held_ms / 1e3)]
        now = trio.current_time()
        events = self.scheduler.on_result(one.batch.seq, outputs, now, trace)
        # Only what the scheduler has taken up: tokens of rewound or ended requests are dropped.
        taken = {event.request for event in events if isinstance(event, Emitted)}
        given = tuple(output for output in done.outputs if output.request in taken)
        if given:
            self.tell(given, ())
        self._ended(events)
        self._notify()

    def _ended(self, events: list[Event]) -> None:
        ended = []
        for event in events:
            if isinstance(event, Finished):
                self._forget(event.request)
                ended.append(ring.Ended(event.request, event.reason))
        if ended:
            self.tell((), tuple(ended))

    def _forget(self, request: int) -> None:
        if self.dispatcher is not None:
            self.dispatcher.exposure.finished(request)

    def statistics(self) -> SchedulerStatistics:
        """The scheduler's."""
        return self.scheduler.statistics()
