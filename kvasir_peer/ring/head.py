"""The head of a ring: it alone composes batches.

:class:`HeadState` outlives epochs: the scheduler with its requests, and the tokens known so far. :class:`HeadEpoch` is
the first stage of one epoch; it turns what the scheduler wants into signed batches, and what the tail answers
into the scheduler's next decisions.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import trio

from kvasir_peer.errors import LinkError, WireError
from kvasir_peer.net.link import Priority
from kvasir_peer.ring.stage import MAX_KEPT_BACK, StageEpoch
from kvasir_peer.ring.taints import Rewind
from kvasir_peer.serving.costs import CostModel, StageTrace
from kvasir_peer.serving.requests import Event, Finished, Kept, Refused, Request
from kvasir_peer.serving.scheduler import DEFAULT_POLICY, Policy, Scheduler
from kvasir_peer.wire import ring
from kvasir_peer.wire.membership import GENESIS, chain_digest

if TYPE_CHECKING:
    from kvasir_peer.net.link import Link
    from kvasir_peer.ring.plan import Plan
    from kvasir_peer.serving.batches import Batch

logger = logging.getLogger(__name__)

# Incarnations have 32 bits on the wire. At a thousand requests and rewinds in a second a slot needs 24 days for these.
MAX_VOID_INCARNATION = 1 << 31
IDLE_TICK = 1.0  # seconds between two looks at deadlines and costs when nothing else happens


@dataclass
class HeadState:
    """What the head knows of its requests, from epoch to epoch.

    What it believes of the stages' KV caches is true only as long as no other head has composed batches since: it
    must not be used again by a peer that was the head, lost that place, and got it back (:meth:`follows`).

    Args:
        plan: the first plan; later ones of the same id come by :meth:`adopt`.
        policy: what is set by hand.
    """

    plan: Plan
    policy: Policy = DEFAULT_POLICY
    scheduler: Scheduler = field(init=False)
    costs: CostModel = field(init=False)
    wake: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self.costs = self.plan.cost_model()
        self.scheduler = Scheduler(self.plan.widths, self.costs, self.policy)

    def follows(self, plan: Plan) -> bool:
        """Whether the plan is the present one, or the next: with one in between, another may have been the head."""
        present = self.plan
        return (plan.id, plan.widths, plan.stages[0].peer) == (
            present.id,
            present.widths,
            present.stages[0].peer,
        ) and present.epoch <= plan.epoch <= present.epoch + 1

    def adopt(self, plan: Plan, now: float) -> None:
        """Go on under a new epoch, with what its stages have kept of their KV caches."""
        lines = plan.cost_model()
        self.costs.expect(lines.costs.stages, hop_per_row=lines.costs.hop_per_row)
        kept = plan.kept_from(self.plan)
        self.plan = plan
        replay = self.scheduler.on_lost(now, kept)
        rows = sum(end - first for first, end in replay.values())
        if rows:
            logger.info("epoch %d: %d rows of %d requests are computed again", plan.epoch, rows, len(replay))

    def submit(self, message: ring.Submit, now: float) -> list[ring.Ended]:
        """Take a request, or take it up again where the bridge knows another state of it than the head."""
        if self.scheduler.is_queued(message.request):
            return []
        known = self._known(message.request)
        if known is not None:
            tokens = list(message.tokens)
            generated = len(tokens) - message.sampling.prompt_length
            if tokens[: len(known)] == known and len(tokens) > len(known):
                self.scheduler.extend(message.request, tokens, now)
                return []
            if known[: len(tokens)] == tokens:
                # The head may know tokens that never reached the bridge: they are sampled again.
                if len(known) > len(tokens):
                    done = len(known) - len(tokens)
                    self.scheduler.rewind(
                        message.request,
                        len(tokens) - 1,
                        now,
                        keep_tokens=max(0, self._generated(message.request) - done),
                    )
                return []
            logger.info("request %d: the bridge knows %d tokens, the head others", message.request, generated)
            self.scheduler.cancel(message.request, now)
        kept = Kept(message.slot, message.computed) if message.computed else None
        answer = self.scheduler.submit(Request.submitted(message, now), now, kept, begun=message.begun)
        return [answer.ended(message.request)] if isinstance(answer, Refused) else []

    def resume(self, messages: Sequence[ring.Submit], now: float) -> list[ring.Ended]:
        """The bridge has named all that is under way, those that have begun first: the rest is over."""
        ended = [news for message in messages if message.begun for news in self.submit(message, now)]
        named = {message.request for message in messages}
        for request in self.scheduler.request_ids():
            if request not in named:
                self.scheduler.cancel(request, now)
        # Only now: what is over must not take places in the queue from what waits.
        waiting = [news for message in messages if not message.begun for news in self.submit(message, now)]
        return ended + waiting

    def rewind(self, rewinds: Iterable[Rewind], now: float) -> None:
        """Compute these requests again from the positions on; tokens that were handed out stay.

        Raises:
            WireError: code ``incarnation`` for one that no head has given, and after which none would be left.
        """
        for request, incarnation, position in rewinds:
            if incarnation > MAX_VOID_INCARNATION:
                raise WireError("incarnation", f"request {request} has had no incarnation {incarnation}")
            # A new head begins to count anew, and the tail keeps back whatever is not newer than this.
            self.scheduler.count_on_from(incarnation)
            known = self._known(request)
            self.scheduler.rewind(request, position if known is None else min(position, len(known) - 1), now)

    def _known(self, request: int) -> list[int] | None:
        try:
            return self.scheduler.tokens_of(request)
        except KeyError:
            return None

    def _generated(self, request: int) -> int:
        return self.scheduler.generated_of(request)


@dataclass
class _Sent:
    """A batch on its way: the wire's sequence begins anew with each epoch, the scheduler's does not."""

    sequence: int
    scheduled: int
    digest: bytes


@dataclass
class HeadEpoch(StageEpoch):
    """Stage 0 of one epoch.

    Args:
        state: what outlives the epoch.
    """

    state: HeadState = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sent: deque[_Sent] = deque()
        self._sequence = 0
        self._previous = GENESIS
        self._under_way: list[ring.Submit] = []  # until the bridge has named all
        self._early: list[ring.Tainted] = []  # until then
        self._resumed = trio.Event()

    def _tasks(self) -> Sequence[Callable[[], Awaitable[None]]]:
        return [*super()._tasks(), self._compose]

    async def _open_links(self) -> None:
        await super()._open_links()
        self._news = await self.open(self.plan.bridge, "tokens", ring.max_result_frame(self.limits))

    def _outgoing(self) -> list[Link]:
        links = super()._outgoing()
        return [*links, self._news] if hasattr(self, "_news") else links

    # -- links that others open -----------------------------------------------------------------------------

    def expected(self, purpose: str) -> str | None:
        if purpose == "results":
            return self.plan.stages[-1].peer
        if purpose == "requests":
            return self.plan.bridge
        return None

    async def serve(self, link: Link, purpose: str) -> None:
        if purpose == "results":
            link.max_frame = ring.max_result_frame(self.limits)
            task = self._take_results
        else:
            link.max_frame = ring.max_request_frame(self.limits)
            task = self._take_requests
        await self._take(link, task)

    async def _take_requests(self, link: Link) -> None:
        while True:
            message, _ = self.codec.decode(await link.receive())
            now = trio.current_time()
            if isinstance(message, ring.Submit):
                message.sampling.check(top_logprobs=self.limits.top_logprobs)
                if any(token >= self.limits.vocab for token in message.tokens):
                    raise WireError(
                        "token", "a prompt has a token outside the vocabulary", peer=link.remote_peer
                    )
                if not 0 <= message.slot < self.limits.slots:
                    raise WireError("slot", f"slot {message.slot} is not in the plan", peer=link.remote_peer)
                if self._resumed.is_set():
                    await self._tell(self.state.submit(message, now))
                elif len(self._under_way) < self.state.scheduler.capacity:
                    self._under_way.append(message)
                else:
                    retry = self.state.scheduler.retry_after()
                    await self._tell([ring.Ended(message.request, "busy", "too many requests wait", retry)])
            elif isinstance(message, ring.Resumed):
                await self._tell(self._resume(now))
            elif isinstance(message, ring.Cancel):
                self.state.scheduler.cancel(message.request, now)
            elif isinstance(message, ring.Ping):
                await link.send(self.codec.encode(ring.Pong(message.nonce)))
            else:
                raise WireError(
                    "unexpected", f"{type(message).__name__} on a requests link", peer=link.remote_peer
                )
            self._wake()

    async def _take_results(self, link: Link) -> None:
        while True:
            message, _ = self.codec.decode(await link.receive())
            if isinstance(message, ring.Ping):
                await link.send(self.codec.encode(ring.Pong(message.nonce)))
                continue
            if isinstance(message, ring.Tainted):
                self._taints.take(message, link.remote_peer)
                self._rewind(message)
                self._wake()
                continue
            if not isinstance(message, ring.Result):
                raise WireError(
                    "unexpected", f"{type(message).__name__} on a results link", peer=link.remote_peer
                )
            if (
                not self._sent
                or message.sequence != self._sent[0].sequence
                or message.epoch != self.plan.epoch
            ):
                raise WireError("sequence", f"result of batch {message.sequence}, which is not the next one")
            sent = self._sent.popleft()
            if message.digest != sent.digest:
                raise WireError("membership", f"the tail saw another membership in batch {sent.sequence}")
            trace = [StageTrace(t.held_ms / 1e3, max(0.0, t.waited_ms) / 1e3) for t in message.trace]
            outputs = [(o.request, o.token) for o in message.outputs]
            void = [o.request for o in message.outputs if o.void]
            now = trio.current_time()
            events = self.state.scheduler.on_result(sent.scheduled, outputs, now, trace, void)
            self._wake()
            await self._tell_events(events)

    def _resume(self, now: float) -> list[ring.Ended]:
        """The bridge has named all that goes on."""
        under_way, self._under_way = self._under_way, []
        ended = self.state.resume(under_way, now)
        early, self._early = self._early, []
        for tainted in early:
            self.state.rewind(tainted.rewinds, now)
        self._resumed.set()
        return ended

    def _rewind(self, message: ring.Tainted) -> None:
        """Make again what came of rows that were wrong, also of requests that the bridge has yet to name."""
        if not self._resumed.is_set():
            if len(self._early) >= MAX_KEPT_BACK:
                raise WireError("oversize", f"more than {MAX_KEPT_BACK} words on taints before any batch")
            self._early.append(message)
        self.state.rewind(message.rewinds, trio.current_time())

    # -- composing ------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self.state.wake.set()

    async def _compose(self) -> None:
        scheduler = self.state.scheduler
        await self._resumed.wait()
        while True:
            self.state.wake = trio.Event()
            now = trio.current_time()
            await self._tell_events(scheduler.tick(now))
            while (batch := scheduler.next_batch(trio.current_time(), self.counters.queue)) is not None:
                if batch.rows:
                    await self._launch(batch)
                else:
                    scheduler.on_result(batch.seq, [], trio.current_time())
            due = scheduler.next_deadline
            wait = IDLE_TICK if due is None else min(IDLE_TICK, max(0.0, due - trio.current_time()))
            with trio.move_on_after(wait):
                await self.state.wake.wait()

    async def _launch(self, batch: Batch) -> None:
        membership = batch.membership()
        data = membership.encode()
        sequence = self._sequence
        digest = chain_digest(self.plan.id.encode(), self.plan.epoch, sequence, self._previous, data)
        self._previous, self._sequence = digest, sequence + 1
        self._sent.append(_Sent(sequence, batch.seq, digest))
        buffer = await self.engine.take_buffer()
        now = trio.current_time()
        await self.dispatch(
            sequence, data, membership, digest, partial(self.sign, digest), (), buffer, 0, now
        )
        composed = ring.Composed(self.plan.id, self.plan.epoch, sequence, digest, runs_of(batch))
        await self._news.send(self.codec.encode(composed), Priority.DECODE)

    def computed(self) -> None:
        """The engine is free for the next batch: compose it."""
        self._wake()

    # -- news for the bridge --------------------------------------------------------------------------------

    async def _tell_events(self, events: Sequence[Event]) -> None:
        # Tokens, and so stop and length, reach the bridge from the tail; what only the head knows goes from here.
        await self._tell(
            [
                ring.Ended(event.request, event.reason)
                for event in events
                if isinstance(event, Finished) and event.reason not in ("stop", "length", "cancelled")
            ]
        )

    async def _tell(self, news: Sequence[ring.Ended]) -> None:
        for ended in news:
            if not hasattr(self, "_news"):
                raise LinkError("the link to the bridge is not open yet")
            await self._news.send(self.codec.encode(ended), Priority.CONTROL)


def runs_of(batch: Batch) -> tuple[tuple[int, int, bool], ...]:
    """``(request, rows, whether it is a decode row)`` of each run of a batch, in order."""
    runs: list[tuple[int, int, bool]] = []
    for row in batch.rows:
        if runs and runs[-1][0] == row.request:
            runs[-1] = (row.request, runs[-1][1] + 1, runs[-1][2])
        else:
            runs.append((row.request, 1, row.phase == "decode"))
    return tuple(runs)
