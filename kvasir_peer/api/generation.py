"""Computes the answers of one request at once, and brings their tokens together."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import trio

from kvasir_peer.api.service import CompletionService, GenerationRequest, TokenEvent
from kvasir_peer.errors import KvasirError

# Events between the service and a client that reads slowly. When it is full the answer waits for the client.
BUFFERED_EVENTS = 256
# Seconds that a full buffer may last; a client that takes nothing for so long gives its place to others.
STALLED_SECONDS = 60.0

Tagged = tuple[int, TokenEvent | KvasirError | None]  # index of the answer; None: it ended without a reason


class _Entry:
    """Whether the service has taken all answers, or has refused one, or has begun with one while others wait."""

    def __init__(self, n: int) -> None:
        self._missing = n
        self._decided = trio.Event()
        self.refusal: KvasirError | None = None

    def taken(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._decided.set()

    def refused(self, error: KvasirError) -> None:
        self.refusal = error
        self._decided.set()

    def begun(self) -> None:
        self._decided.set()

    @property
    def decided(self) -> bool:
        return self._decided.is_set()

    async def wait(self) -> None:
        await self._decided.wait()


class Generations:
    """Answers that are being computed.

    Attributes:
        events: each one's tokens, in the order in which they come.
    """

    def __init__(self, events: trio.MemoryReceiveChannel[Tagged], n: int) -> None:
        self.events = events
        self._scopes = [trio.CancelScope() for _ in range(n)]

    def scope(self, index: int) -> trio.CancelScope:
        """What an answer runs in."""
        return self._scopes[index]

    def cancel(self, index: int) -> None:
        """Compute no more of one answer (a stop string was found); what is under way may still come."""
        self._scopes[index].cancel()


@contextlib.asynccontextmanager
async def generating(
    service: CompletionService, requests: list[GenerationRequest]
) -> AsyncIterator[Generations]:
    """Compute all requests; their channel ends when all are through.

    Leaving the context cancels what still runs. An error within an answer comes through the channel, also one at the
    entry of an answer that had to wait while others already ran.

    Raises:
        KvasirError: at entry, what the service refuses one of them with; then none runs.
    """
    send, receive = trio.open_memory_channel[Tagged](BUFFERED_EVENTS)
    entry = _Entry(len(requests))
    generations = Generations(receive, len(requests))
    async with receive, trio.open_nursery() as nursery:
        async with send:
            for index, request in enumerate(requests):
                nursery.start_soon(
                    _feed, service, request, index, send.clone(), entry, generations.scope(index)
                )
        await entry.wait()
        if entry.refusal is None:
            yield generations
        nursery.cancel_scope.cancel()
    if entry.refusal is not None:
        raise entry.refusal


async def _feed(
    service: CompletionService,
    request: GenerationRequest,
    index: int,
    send: trio.MemorySendChannel[Tagged],
    entry: _Entry,
    scope: trio.CancelScope,
) -> None:
    async with send:
        try:
            with scope:
                async with service.generate(request) as events:
                    entry.taken()
                    async for event in events:
                        if not await _put(send, (index, event)):
                            return  # the client takes nothing; its connection ends by its own time limits
                        entry.begun()
                        if event.final:
                            return
                await _put(send, (index, None))
        except KvasirError as error:
            if entry.decided:
                await _put(send, (index, error))
            else:
                entry.refused(error)


async def _put(send: trio.MemorySendChannel[Tagged], item: Tagged) -> bool:
    with trio.move_on_after(STALLED_SECONDS) as scope:
        await send.send(item)
    return not scope.cancelled_caught
