"""One stage of one epoch of a ring: batches come in, are computed, and go on, in the order of their sequence.

A :class:`StageEpoch` lives as long as its plan's epoch. It never mends anything itself: whatever breaks (a link, the
engine, a batch that is not what the head signed) ends it with :class:`RingBroken`, and the bridge makes the
next epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Protocol

import trio

from kvasir_peer.agent.engine import Engine, PendingPass
from kvasir_peer.engines.orders import PassDone
from kvasir_peer.errors import CacheError, EngineError, KvasirError, LinkError, UsageError, WireError
from kvasir_peer.net.link import Priority
from kvasir_peer.ring.heartbeat import beat
from kvasir_peer.ring.taints import TaintLog, TaintSource, TaintSpeaker, Voids
from kvasir_peer.wire import ring
from kvasir_peer.wire.membership import GENESIS, Limits, Membership, chain_digest, decode_membership
from kvasir_peer.wire.tensors import tensor_bytes

if TYPE_CHECKING:
    from kvasir_peer.engines.orders import ArenaShape
    from kvasir_peer.models.manifest import Manifest
    from kvasir_peer.net.link import Link
    from kvasir_peer.net.node import Node
    from kvasir_peer.ring.plan import Plan

logger = logging.getLogger(__name__)

OPEN_SECONDS = (
    20.0  # to open a link to a neighbour: a relayed dial, tried again while the neighbour loads its plan
)
RETRY_SECONDS = 0.3  # between two tries to open a link
WELCOME_SECONDS = 10.0  # the other side answers a Hello at once, unless its plan is still on its way
# A pass that takes longer than this (seconds), than so many times what the plan expects, and than so many times the
# longest of this epoch never ends: the engine hangs. Slow ones are no reason, a machine may be busy.
HANG_SECONDS, HANG_EXPECTED, HANG_LONGEST = 10.0, 20.0, 4.0
HANG_TURNS = 5
MAX_KEPT_BACK = 1024  # words on taints before the links are open; each stage says a few at most

Verify = Callable[[str, bytes, bytes], bool]
"""(peer id, signature, data) -> whether the peer signed the data."""


class RingBroken(KvasirError):
    """This epoch is over at this stage; ``peer`` names the neighbour where one was lost.

    ``cache_lost`` says that the KV cache is not what the head believes.
    """

    def __init__(
        self, message: str, *, peer: str | None = None, plan: str | None = None, cache_lost: bool = False
    ) -> None:
        super().__init__(message, peer=peer, plan=plan)
        self.cache_lost = cache_lost


@dataclass(frozen=True)
class StageStatistics:
    """Counters of one stage since its epoch began; times in milliseconds.

    Attributes:
        held_ms: the engine had a batch.
        starved_ms: the engine had nothing to do.
        blocked_ms: results waited for the next stage's link to take them.
        queue: batches that wait for the engine now.
    """

    stage: int
    batches: int
    rows: int
    held_ms: float
    starved_ms: float
    blocked_ms: float
    queue: int
    bytes_in: int
    bytes_out: int


@dataclass
class Counters:
    """The mutable side of :class:`StageStatistics`."""

    batches: int = 0
    rows: int = 0
    held_ms: float = 0.0
    starved_ms: float = 0.0
    blocked_ms: float = 0.0
    queue: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    last_blocked_ms: float = 0.0


@dataclass
class InEngine:
    """A batch between its arrival and its departure."""

    sequence: int
    membership: bytes
    rows: Membership
    digest: bytes
    signature: bytes
    trace: tuple[ring.StageTrace, ...]
    buffer: int
    pending: PendingPass
    arrived: float
    queue: int


class StageExperts(TaintSource, Protocol):
    """Routed experts of a stage's own layers, computed by volunteers when the stage is busy."""

    def pass_of(self, membership: Membership, stage: int) -> tuple[tuple[int, ...], object]:
        """At which layers the next pass hands out its routed rows, and its context for the engine."""
        ...

    def arena(self, shape: ArenaShape, manifest: Manifest, first: int, end: int, rows: int) -> ArenaShape:
        """An arena in which routed rows fit too."""
        ...

    def loaded(self, manifest: Manifest, first: int, end: int, slots: int) -> None:
        """The engine has these layers from now on."""
        ...

    def unloaded(self) -> None:
        """The engine has nothing any more."""
        ...


async def refuse(link: Link, code: str, reason: str) -> NoReturn:
    """Say why a link is refused.

    Raises:
        WireError: always; whoever called takes nothing more from the link.
    """
    with trio.move_on_after(1):
        await link.send(ring.OPENING.encode(ring.Refusal(code, reason)))
    raise WireError(code, reason, peer=link.remote_peer)


@dataclass
class StageEpoch:
    """What a stage does for one epoch.

    Args:
        plan: signed by the bridge, checked by the caller.
        index: of this stage in the plan.
        node: for links to the neighbours.
        engine: holds the stage's layers.
        verify: checks the head's signature.
        sign: signs with this peer's key.
        experts: sends routed rows to volunteers; None computes them here.
        opened: called once, when the links to the neighbours stand.
    """

    plan: Plan
    index: int
    node: Node
    engine: Engine
    verify: Verify
    counters: Counters = field(default_factory=Counters)
    sign: Callable[[bytes], bytes] = field(kw_only=True)
    experts: StageExperts | None = field(default=None, kw_only=True)
    opened: Callable[[], None] = field(default=lambda: None, kw_only=True)

    def __post_init__(self) -> None:
        self.limits: Limits = self.plan.limits()
        self.codec = ring.codec(self.limits)
        self.head = self.index == 0
        self.tail = self.index == len(self.plan.stages) - 1
        # One in the engine, the others waiting for it: the head never has more in flight.
        depth = self.plan.widths.max_in_flight
        self._departures_in: trio.MemorySendChannel[InEngine]
        self._departures_in, self._departures = trio.open_memory_channel[InEngine](depth)
        self._broken = trio.Event()
        self._reason: RingBroken | None = None
        self._accepted: dict[str, Link] = {}
        self._incoming: list[trio.CancelScope] = []
        self._over = False
        self._longest_pass = 0.0
        # Only stages before this one send their taints through it; the head hears of all of them from the tail.
        self._taints = TaintLog(self.plan, self.verify, None if self.head else self.index)
        self._speaker = TaintSpeaker(self.plan, self.index, self.sign)
        self._speaking = trio.Lock()
        self._kept_back: list[ring.Tainted] | None = []  # until the links are open on which it goes on
        self._voids = Voids()
        self._telling = trio.Lock()  # head and bridge hear everything from the tail in the same order

    # -- life -----------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Open the links to the neighbours and pass batches on, until the epoch breaks or is cancelled.

        ``task_status`` is told when the links are open.

        Raises:
            RingBroken: why the epoch is over.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._begin, nursery, task_status)
                await self._broken.wait()
                nursery.cancel_scope.cancel()
        finally:
            self._over = True
            for scope in self._incoming:
                scope.cancel()
            with trio.move_on_after(1, shield=True):
                for link in [*self._outgoing(), *self._accepted.values()]:
                    await link.aclose()
        if self._reason is not None:
            raise self._reason

    async def _begin(self, nursery: trio.Nursery, task_status: trio.TaskStatus[None]) -> None:
        try:
            await self._open_links()
        except RingBroken as error:
            self.break_off(str(error), error.peer)
            return
        for task in self._tasks():
            nursery.start_soon(self._guard, task)
        task_status.started()
        self.opened()

    def _tasks(self) -> Sequence[Callable[[], Awaitable[None]]]:
        tasks: list[Callable[[], Awaitable[None]]] = [self._depart, self._pass_on_early]
        for link in self._outgoing():
            tasks += [self._watcher(link), partial(beat, link, self.codec, pings=True)]
        if self.experts is not None:
            tasks.append(partial(self._tell_taints, self.experts))
        return tasks

    async def _guard(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run a task; whatever ends it breaks the epoch, with its reason."""
        try:
            await task()
        except WireError as error:
            self.break_off(f"stage {self.index} refused a batch ({error.code}): {error}", error.peer)
        except LinkError as error:
            self.break_off(f"stage {self.index} lost a link: {error}", error.peer)
        except EngineError as error:
            self.break_off(f"stage {self.index}: {error}", cache_lost=isinstance(error, CacheError))

    def break_off(self, reason: str, peer: str | None = None, *, cache_lost: bool = False) -> None:
        """End this epoch; the first reason stays."""
        if self._reason is None:
            self._reason = RingBroken(reason, peer=peer, plan=self.plan.id, cache_lost=cache_lost)
            self._broken.set()

    def statistics(self) -> StageStatistics:
        """A snapshot of the counters."""
        c = self.counters
        return StageStatistics(
            self.index,
            c.batches,
            c.rows,
            c.held_ms,
            c.starved_ms,
            c.blocked_ms,
            c.queue,
            c.bytes_in,
            c.bytes_out,
        )

    def outgoing_statistics(self) -> tuple[str, float]:
        """Path (relayed, direct) and round-trip time in milliseconds of the link to the next stage."""
        links = self._outgoing()
        if not links:
            return "", 0.0
        figures = links[0].statistics()
        return links[0].path, (figures.round_trip_p50 or 0.0) * 1e3

    # -- links ----------------------------------------------------------------------------------------------

    async def _open_links(self) -> None:
        stages = self.plan.stages
        if self.tail:
            self._results = await self.open(stages[0].peer, "results", ring.max_result_frame(self.limits))
            self._tokens = await self.open(self.plan.bridge, "tokens", ring.max_result_frame(self.limits))
        else:
            frame = ring.max_batch_frame(self.limits, self.plan.dtype, self.plan.n_embd)
            self._next = await self.open(stages[self.index + 1].peer, "batches", frame)

    def _outgoing(self) -> list[Link]:
        names = ("_results", "_tokens") if self.tail else ("_next",)
        return [getattr(self, name) for name in names if hasattr(self, name)]

    async def open(self, peer: str, purpose: ring.Purpose, max_frame: int) -> Link:
        """A link to another member of the ring, welcomed by it.

        Raises:
            RingBroken: it could not be reached in time, or refused.
        """
        reason = "no answer"
        with trio.move_on_after(OPEN_SECONDS):
            while True:
                try:
                    return await self._open_once(peer, purpose, max_frame)
                except (LinkError, WireError, UsageError) as error:
                    reason = str(error)
                await trio.sleep(RETRY_SECONDS)
        raise RingBroken(f"no {purpose} link to {peer}: {reason}", peer=peer, plan=self.plan.id)

    async def _open_once(self, peer: str, purpose: ring.Purpose, max_frame: int) -> Link:
        link = await self.node.open_link(
            peer, ring.PROTOCOL, max_frame=ring.MAX_OPENING_FRAME, addresses=self.plan.addresses(peer)
        )
        try:
            await link.send(ring.OPENING.encode(ring.Hello(purpose, self.plan.id, self.plan.epoch)))
            with trio.move_on_after(WELCOME_SECONDS) as scope:
                answer, _ = ring.OPENING.decode(await link.receive())
            if scope.cancelled_caught:
                raise LinkError(f"{peer} did not answer", peer=peer)
            if not isinstance(answer, ring.Welcome):
                raise LinkError(f"{peer} refused: {getattr(answer, 'reason', answer)}", peer=peer)
        except BaseException:
            with trio.move_on_after(1, shield=True):
                await link.aclose()
            raise
        link.max_frame = max_frame
        return link

    def expected(self, purpose: str) -> str | None:
        """Peer id that may open a link of this purpose to this stage, or None."""
        if purpose == "batches" and not self.head:
            return self.plan.stages[self.index - 1].peer
        return None

    async def admit(self, link: Link, hello: ring.Hello) -> None:
        """Take a link that another member opens, until it ends.

        Raises:
            WireError: it is of another epoch, or nobody expects it; the other side has been told.
        """
        if (hello.plan, hello.epoch) != (self.plan.id, self.plan.epoch):
            await refuse(link, "epoch", f"epoch {hello.epoch} is not served here, {self.plan.epoch} is")
        if self._over:
            await refuse(link, "epoch", f"epoch {hello.epoch} is over here")
        if self.expected(hello.purpose) != link.remote_peer:
            await refuse(
                link, "stranger", f"{link.remote_peer} may not open a {hello.purpose} link to this stage"
            )
        if hello.purpose in self._accepted:
            await refuse(link, "unexpected", f"a second {hello.purpose} link from {link.remote_peer}")
        self._accepted[hello.purpose] = link
        await self.serve(link, hello.purpose)

    async def serve(self, link: Link, purpose: str) -> None:
        """Receive on an admitted link until it ends."""
        link.max_frame = ring.max_batch_frame(self.limits, self.plan.dtype, self.plan.n_embd)
        await self._take(link, self._receive_batches)

    async def _take(self, link: Link, task: Callable[[Link], Awaitable[None]]) -> None:
        """Welcome a link and receive on it until it or the epoch ends."""
        with trio.CancelScope() as scope:
            self._incoming.append(scope)
            await link.send(ring.OPENING.encode(ring.Welcome(self.plan.epoch)))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._guard, partial(beat, link, self.codec, pings=False))
                await self._guard(partial(task, link))
                nursery.cancel_scope.cancel()

    def _watcher(self, link: Link) -> Callable[[], Awaitable[None]]:
        """Nothing but an answer to a ping comes back on an outgoing link: its end is the news."""

        async def watch() -> None:
            while True:
                message, _ = self.codec.decode(await link.receive())
                if isinstance(message, ring.Refusal):
                    raise WireError(message.code, message.reason, peer=link.remote_peer)
                if not isinstance(message, ring.Pong):
                    raise WireError(
                        "unexpected", f"{type(message).__name__} on an outgoing link", peer=link.remote_peer
                    )

        return watch

    # -- the way of a batch ---------------------------------------------------------------------------------

    async def _receive_batches(self, link: Link) -> None:
        previous, sequence = GENESIS, 0
        head = self.plan.stages[0].peer
        while True:
            message, boundary = self.codec.decode(await link.receive())
            arrived = trio.current_time()
            if isinstance(message, ring.Ping):
                await link.send(self.codec.encode(ring.Pong(message.nonce)))
                continue
            if isinstance(message, ring.Tainted):
                self._taints.take(message, link.remote_peer)
                await self._pass_on(message)
                continue
            if not isinstance(message, ring.Batch):
                raise WireError(
                    "unexpected", f"{type(message).__name__} on a batches link", peer=link.remote_peer
                )
            try:
                rows = self._check(message, sequence, previous, head, boundary.nbytes)
            except WireError as error:
                with trio.move_on_after(1):
                    await link.send(self.codec.encode(ring.Refusal(error.code, str(error))))
                raise
            previous, sequence = message.digest, sequence + 1
            self.counters.bytes_in += boundary.nbytes
            buffer = await self.engine.take_buffer()
            self.engine.buffer(buffer)[: boundary.nbytes] = boundary
            await self.dispatch(
                message.sequence,
                message.membership,
                rows,
                message.digest,
                partial(getattr, message, "signature"),
                message.trace,
                buffer,
                boundary.nbytes,
                arrived,
            )

    def _check(
        self, batch: ring.Batch, sequence: int, previous: bytes, head: str, boundary_bytes: int
    ) -> Membership:
        """The batch is the next one of this epoch, as the head signed it, or a WireError says what is wrong."""
        if (batch.plan, batch.epoch) != (self.plan.id, self.plan.epoch):
            raise WireError(
                "epoch", f"batch of plan {batch.plan} epoch {batch.epoch}, here is {self.plan.epoch}"
            )
        if batch.sequence != sequence:
            raise WireError("sequence", f"batch {batch.sequence} where {sequence} was expected")
        plan = self.plan.id.encode()
        if chain_digest(plan, batch.epoch, sequence, previous, batch.membership) != batch.digest:
            raise WireError(
                "membership", f"the membership of batch {sequence} is not the one that was announced"
            )
        if not self.verify(head, batch.signature, batch.digest):
            raise WireError("signature", f"the membership of batch {sequence} is not signed by the head")
        if len(batch.trace) != self.index:
            raise WireError("trace", f"{len(batch.trace)} trace entries at stage {self.index}")
        rows = decode_membership(batch.membership, self.limits)
        expected = tensor_bytes(self.plan.dtype, rows.rows_at(self.index), self.plan.n_embd)
        if boundary_bytes != expected:
            raise WireError("shape", f"boundary of {boundary_bytes} bytes, {expected} were expected")
        return rows

    async def dispatch(
        self,
        sequence: int,
        membership: bytes,
        rows: Membership,
        digest: bytes,
        signature: Callable[[], bytes],
        trace: tuple[ring.StageTrace, ...],
        buffer: int,
        boundary_bytes: int,
        arrived: float,
    ) -> None:
        """Hand a batch to the engine and queue it for departure; ``signature`` is made while the engine computes."""
        queue = self.counters.queue
        self.counters.queue += 1
        layers: tuple[int, ...] = ()
        context: object = None
        if self.experts is not None:
            # Before the pass shows whether it makes void values again: what came of them is counted too.
            await self._say_taints(self.experts)
            layers, context = self.experts.pass_of(rows, self.index)
            # A batch that builds on void values is not to overtake the word on them.
            await self._say_taints(self.experts)
        pending = await self.engine.submit(buffer, membership, boundary_bytes, layers, context)
        await self._departures_in.send(
            InEngine(sequence, membership, rows, digest, signature(), trace, buffer, pending, arrived, queue)
        )

    async def _depart(self) -> None:
        async for batch in self._departures:
            try:
                done = await self._result(batch)
                self.counters.queue -= 1
                self.computed()
                await self._send_on(batch, done.boundary_bytes, done.outputs, done.held_ms, done.starved_ms)
            finally:
                self.engine.free_buffer(batch.buffer)

    async def _result(self, batch: InEngine) -> PassDone:
        """What the engine made of a batch, which is the next one that it ends.

        Raises:
            EngineError: the engine failed, or hangs; a hanging one is ended, and comes back empty.
        """
        stage = self.plan.stages[self.index]
        expected = stage.pass_base + stage.pass_row * batch.rows.rows_at(self.index)
        limit = max(HANG_SECONDS, HANG_EXPECTED * expected, HANG_LONGEST * self._longest_pass)
        # In turns of this loop, not by the clock: a peer that slept itself must not blame its engine when it wakes.
        for _ in range(HANG_TURNS):
            with trio.move_on_after(limit / HANG_TURNS):
                done = await batch.pending.result()
                self._longest_pass = max(self._longest_pass, done.held_ms / 1e3)
                return done
        self.engine.kill()
        raise EngineError(f"the engine did not answer for {limit:.0f} s, and is started anew")

    # -- what must be made again ------------------------------------------------------------------------------

    async def _tell_taints(self, experts: TaintSource) -> None:
        """Say which requests used rows of workers that lied; in each epoch anew until they have been made again."""
        while True:
            news = experts.taint_news()
            await self._say_taints(experts)
            await news.wait()

    async def _say_taints(self, experts: TaintSource) -> None:
        async with self._speaking:  # messages are numbered
            while messages := self._speaker.fresh(experts.taints()):
                for message in messages:
                    await self._pass_on(message)

    async def _pass_on_early(self) -> None:
        """What came before the links to the next ones were open."""
        while self._kept_back:
            await self._send_taint(self._kept_back.pop(0))
        self._kept_back = None

    async def _pass_on(self, message: ring.Tainted) -> None:
        if self._kept_back is None:
            await self._send_taint(message)
        elif len(self._kept_back) < MAX_KEPT_BACK:
            self._kept_back.append(message)
        else:
            raise WireError("oversize", f"more than {MAX_KEPT_BACK} words on taints before any batch")

    async def _send_taint(self, message: ring.Tainted) -> None:
        """Towards the tail, which keeps back what comes of these rows from now on, and tells head and bridge."""
        pieces = self.codec.encode(message)
        if not self.tail:
            await self._next.send(pieces, Priority.DECODE)
            return
        async with self._telling:
            self._voids.taint(message.rewinds)
            await self._results.send(pieces, Priority.DECODE)
            await self._tokens.send(pieces, Priority.DECODE)

    def computed(self) -> None:
        """The engine has finished a batch; the head composes the next one here."""

    async def _send_on(
        self,
        batch: InEngine,
        boundary_bytes: int,
        outputs: tuple[ring.Output, ...],
        held_ms: float,
        starved_ms: float,
    ) -> None:
        counters = self.counters
        entry = ring.StageTrace(
            self.index,
            round(held_ms, 3),
            round(starved_ms, 3),
            round(counters.last_blocked_ms, 3),
            batch.queue,
            round(batch.arrived, 4),
            round((trio.current_time() - batch.arrived) * 1e3 - held_ms, 3),
            batch.rows.rows_at(self.index),
            boundary_bytes,
        )
        trace = (*batch.trace, entry)
        began = trio.current_time()
        if self.tail:
            async with self._telling:
                outputs = self._voids.mark(outputs)
                result = self.codec.encode(
                    ring.Result(self.plan.id, self.plan.epoch, batch.sequence, batch.digest, outputs, trace)
                )
                # The head first: the next round waits for it.
                await self._results.send(result, Priority.DECODE)
                await self._tokens.send(result, Priority.DECODE)
            sent = 2 * sum(len(piece) for piece in result)
        else:
            # The buffer is used again as soon as this returns, while the link may still hold the frame.
            boundary = bytes(self.engine.buffer(batch.buffer)[:boundary_bytes])
            message = ring.Batch(
                self.plan.id,
                self.plan.epoch,
                batch.sequence,
                batch.membership,
                batch.digest,
                batch.signature,
                trace,
            )
            pieces = self.codec.encode(message, boundary)
            # One priority for all batches: they are chained, so none may overtake another on its link.
            await self._next.send(pieces, Priority.DECODE)
            sent = sum(len(piece) for piece in pieces)
        counters.last_blocked_ms = (trio.current_time() - began) * 1e3
        counters.blocked_ms += counters.last_blocked_ms
        counters.batches += 1
        counters.rows += entry.rows
        counters.held_ms += held_ms
        counters.starved_ms += starved_ms
        counters.bytes_out += sent
