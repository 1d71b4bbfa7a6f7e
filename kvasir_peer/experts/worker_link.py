"""A dispatcher's link to one worker: several frames outstanding, answers in any order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from kvasir_peer.engines.base import F32, I32
from kvasir_peer.errors import KvasirError, LinkError, RefusedError, UsageError, WireError
from kvasir_peer.net.link import Priority
from kvasir_peer.wire import experts
from kvasir_peer.wire.experts import Bounds
from kvasir_peer.wire.tensors import decode_tensor

if TYPE_CHECKING:
    from kvasir_peer.net.link import Link
    from kvasir_peer.net.node import Node

OPEN_SECONDS = 20.0  # a relayed dial, and the worker's look for a newer map
MAX_LATE = 4096  # answers to frames that were given up; a worker that sends more is sent away


@dataclass(frozen=True)
class WorkerAnswer:
    """Sums f32 ``[n, n_embd]`` and the worker's own word on its computing time, seconds."""

    sums: F32
    held: float


@dataclass(frozen=True)
class WorkerLinkStatistics:
    """Counters of one link.

    Attributes:
        outstanding: frames under way.
        sent, answered, failed: frames; ``late``: answers to frames that had been given up, or second ones.
        bytes_out, bytes_in: of frames.
    """

    outstanding: int
    sent: int
    answered: int
    failed: int
    late: int
    bytes_out: int
    bytes_in: int


class _Asked:
    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.done = trio.Event()
        self.answer: WorkerAnswer | None = None
        self.error: KvasirError | None = None


class WorkerLink:
    """Made by :func:`open_worker_link`; :meth:`run` must run while it is used.

    Attributes:
        peer: the worker.
        ranges, precision: as it says.
        leaving: it takes nothing new.
    """

    def __init__(self, link: Link, bounds: Bounds, welcome: experts.Welcome) -> None:
        self.peer = link.remote_peer
        self.ranges = welcome.ranges
        self.precision = welcome.precision
        self.leaving = False
        self._link = link
        self._bounds = bounds
        self._limit = max(1, min(welcome.outstanding, experts.MAX_OUTSTANDING))
        self._asked: dict[int, _Asked] = {}
        # Frames that the worker has, given up here or not: it takes no more than its limit at once.
        self._there: set[int] = set()
        self._room = trio.Semaphore(self._limit)
        self._ids = itertools.count(1)
        self._next = 1
        self._error: KvasirError | None = None
        self._sent = self._answered = self._failed = self._late = 0

    @property
    def has_room(self) -> bool:
        """Whether another frame may go out now."""
        return not self.leaving and self._error is None and self._room.value > 0

    async def ask(self, layer: int, ids: I32, weights: F32, x: F32, priority: Priority) -> WorkerAnswer:
        """Send rows and wait for their sums; safe to cancel, a late answer is dropped.

        Raises:
            LinkError: the link was lost. RefusedError: the worker can't compute this frame now.
            WireError: what came is not the answer to it; the link is over then.
        """
        if self._error is not None:
            raise self._error
        await self._room.acquire()
        if self._error is not None:
            self._room.release()
            raise self._error
        number = next(self._ids)
        self._next = number + 1
        asked = self._asked[number] = _Asked(len(x))
        self._there.add(number)
        sent = False
        try:
            frame = experts.CODEC.encode(
                experts.Rows(number, layer, *ids.shape),
                experts.encode_rows(ids, weights, x, self._bounds.dtype),
            )
            await self._link.send(frame, priority)
            sent = True
            self._sent += 1
            await asked.done.wait()
        finally:
            self._asked.pop(number, None)
            if not sent:
                self._left(number)
        if asked.error is not None:
            raise asked.error
        assert asked.answer is not None
        return asked.answer

    async def run(self) -> None:
        """Take answers until the link ends. Raises LinkError or WireError: why it did."""
        try:
            while True:
                message, payload = experts.CODEC.decode(await self._link.receive())
                self._take(message, payload)
        except (LinkError, WireError) as error:
            self._end(error)
            raise
        finally:
            self._end(LinkError(f"the link to {self.peer} was closed", peer=self.peer))
            self._link.close()

    def _take(self, message: object, payload: memoryview) -> None:
        if isinstance(message, experts.Leaving):
            self.leaving = True
            return
        if not isinstance(message, experts.Sums | experts.Failed) or not 0 < message.id < self._next:
            raise WireError("unexpected", f"{type(message).__name__} from a worker", peer=self.peer)
        self._left(message.id)
        asked = self._asked.get(message.id)
        if asked is None or asked.done.is_set():
            self._late += 1
            if self._late > MAX_LATE:
                raise WireError("unexpected", f"{self._late} late or double answers", peer=self.peer)
            return
        if isinstance(message, experts.Failed):
            self._failed += 1
            asked.error = RefusedError(
                f"the worker {self.peer} can't compute this: {message.reason[:200]}", peer=self.peer
            )
        else:
            self._bounds.check_sums(message, asked.rows, payload)
            sums = decode_tensor(payload, self._bounds.dtype, asked.rows, self._bounds.n_embd)
            self._answered += 1
            asked.answer = WorkerAnswer(sums, min(max(message.held_ms, 0.0), 60_000.0) / 1e3)
        asked.done.set()

    def _left(self, number: int) -> None:
        """The worker does not have this frame any more."""
        if number in self._there:
            self._there.discard(number)
            self._room.release()

    def _end(self, error: KvasirError) -> None:
        if self._error is None:
            self._error = error
            for number in list(self._there):
                self._left(number)
            for asked in self._asked.values():
                asked.error = error
                asked.done.set()

    def statistics(self) -> WorkerLinkStatistics:
        """A snapshot."""
        figures = self._link.statistics()
        return WorkerLinkStatistics(
            len(self._asked),
            self._sent,
            self._answered,
            self._failed,
            self._late,
            figures.bytes_sent,
            figures.bytes_received,
        )


async def open_worker_link(
    node: Node, peer: str, addresses: tuple[str, ...], model: str, version: int, bounds: Bounds
) -> WorkerLink:
    """Dial a worker and be welcomed.

    Raises:
        LinkError: it can't be reached or does not answer. RefusedError: it does not take this dispatcher.
        WireError: what it says makes no sense.
    """
    with trio.move_on_after(OPEN_SECONDS):
        try:
            link = await node.open_link(
                peer, experts.PROTOCOL, max_frame=experts.MAX_WELCOME_FRAME, addresses=addresses
            )
        except UsageError as error:  # the worker's own address, not a person's
            raise LinkError(f"the worker {peer} gives a bad address: {error}", peer=peer) from None
        welcomed = False
        try:
            hello = experts.Hello(model, version, bounds.dtype, bounds.max_rows)
            await link.send(experts.OPENING.encode(hello))
            answer, _ = experts.OPENING.decode(await link.receive())
            if isinstance(answer, experts.Refusal):
                raise RefusedError(f"the worker {peer} refused: {answer.reason[:200]}", peer=peer)
            if not isinstance(answer, experts.Welcome):
                raise WireError("unexpected", f"{type(answer).__name__} for a welcome", peer=peer)
            link.max_frame = bounds.sums_frame
            welcomed = True
            return WorkerLink(link, bounds, answer)
        finally:
            if not welcomed:
                link.close()
    raise LinkError(f"the worker {peer} did not answer in {OPEN_SECONDS:.0f} s", peer=peer)
