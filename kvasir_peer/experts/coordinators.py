"""The bridge's side of its coordinators: links, requests on them, and what they say of their slots."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from kvasir_peer.agent.answer import Answer
from kvasir_peer.errors import (
    BusyError,
    EngineError,
    LinkError,
    NotReadyError,
    RefusedError,
    UsageError,
    WireError,
)
from kvasir_peer.experts.patience import Patience
from kvasir_peer.net.link import Priority
from kvasir_peer.serving.tokens import PAUSE_COMMENT_SECONDS, Token
from kvasir_peer.wire import coordinator as wire
from kvasir_peer.wire import ring
from kvasir_peer.wire.sampling import Sampling

if TYPE_CHECKING:
    from kvasir_peer.net.link import Link
    from kvasir_peer.net.node import Node
    from kvasir_peer.wire.codec import Codec

logger = logging.getLogger(__name__)

OPEN_SECONDS = 20.0
# Polls of its slots in a row that a coordinator leaves unanswered, without any other word, until its requests go
# elsewhere: with 4 s for each, a process that was stopped is noticed in 12 to 15 s. One that died is noticed at once.
SILENT_POLLS = 3
NOBODY = "no coordinator serves this model"


@dataclass(frozen=True)
class CoordinatorStatistics:
    """Counters grow for ever; ``refused``: frames that no coordinator can mean, each of which ended a link."""

    coordinators: int
    active: int
    submitted: int
    finished: int
    failed: int
    cancelled: int
    resubmitted: int
    tokens: int
    refused: int = 0


@dataclass
class _Active(Answer):
    on: str = ""  # the coordinator that has it; empty while it waits for one
    not_before: float = 0.0  # a full queue has named this time for the next try


@dataclass
class _Attached:
    peer: str
    link: Link
    codec: Codec
    welcome: wire.Welcome
    unanswered: int = 0
    answers: dict[int, tuple[trio.Event, list[wire.Slots]]] = field(default_factory=dict)


class Coordinators:
    """All coordinators of one model at its bridge.

    Args:
        node: the bridge's.
        model: manifest id.
        changed: told when one is attached or lost.
    """

    def __init__(self, node: Node, model: str, changed: Callable[[], None] = lambda: None) -> None:
        self._node = node
        self._model = model
        self._changed = changed
        self._attached: dict[str, _Attached] = {}
        self._wanted: dict[str, trio.CancelScope] = {}
        self._kicks: dict[str, trio.Event] = {}
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._active: dict[int, _Active] = {}
        self._ids = itertools.count(secrets.randbits(62))
        self._nonces = itertools.count(1)
        self._submitted = self._finished = self._failed = self._cancelled = self._resubmitted = 0
        self._tokens = self._refused = 0

    @property
    def attached(self) -> bool:
        """Whether any coordinator takes requests."""
        return bool(self._attached)

    @property
    def peers(self) -> tuple[str, ...]:
        """Those that take requests."""
        return tuple(sorted(self._attached))

    # -- links ----------------------------------------------------------------------------------------------

    async def keep(self, peer: str, addresses: tuple[str, ...]) -> None:
        """Hold a link to a coordinator until :meth:`drop`."""
        self._addresses[peer] = addresses
        if peer in self._wanted:
            self._kicks.pop(peer, trio.Event()).set()  # it is there now, whatever the last tries came to
            return
        patience = Patience()
        with trio.CancelScope() as self._wanted[peer]:
            while True:
                try:
                    attached = await self._open(peer)
                    patience.succeeded()
                    await self._serve(attached)
                except (LinkError, WireError, RefusedError) as error:
                    self._refused += isinstance(error, WireError)
                    logger.info("coordinator %s: %s", peer, error)
                kick = self._kicks[peer] = trio.Event()
                await patience.pause(kick)

    def drop(self, peer: str) -> None:
        """Let go of a coordinator that is gone."""
        scope = self._wanted.pop(peer, None)
        self._kicks.pop(peer, None)
        if scope is not None:
            scope.cancel()

    async def _open(self, peer: str) -> _Attached:
        with trio.move_on_after(OPEN_SECONDS):
            try:
                link = await self._node.open_link(
                    peer,
                    wire.PROTOCOL,
                    max_frame=wire.MAX_OPENING_FRAME,
                    addresses=self._addresses.get(peer, ()),
                )
            except UsageError as error:  # the coordinator's own address, not a person's
                raise LinkError(f"the coordinator {peer} gives a bad address: {error}", peer=peer) from None
            welcomed = False
            try:
                await link.send(wire.OPENING.encode(wire.Hello(self._model)))
                welcome, _ = wire.OPENING.decode(await link.receive())
                if isinstance(welcome, ring.Refusal):
                    raise RefusedError(f"{peer} refused: {welcome.reason[:200]}", peer=peer)
                if not isinstance(welcome, wire.Welcome):
                    raise WireError("unexpected", f"{type(welcome).__name__} for a welcome", peer=peer)
                welcome.check()
                link.max_frame = welcome.submit_frame
                welcomed = True
                return _Attached(peer, link, welcome.codec(), welcome)
            finally:
                if not welcomed:
                    link.close()
        raise LinkError(f"the coordinator {peer} did not answer in {OPEN_SECONDS:.0f} s", peer=peer)

    async def _serve(self, attached: _Attached) -> None:
        self._attached[attached.peer] = attached
        self._changed()
        self._wake_waiting()
        try:
            while True:
                message, _ = attached.codec.decode(await attached.link.receive())
                attached.unanswered = 0
                self._take(attached, message)
        finally:
            attached.link.close()
            if self._attached.get(attached.peer) is attached:
                del self._attached[attached.peer]
            for event, _ in attached.answers.values():
                event.set()
            for active in self._active.values():
                if active.on == attached.peer:
                    active.on = ""
            self._changed()
            self._wake_waiting()

    def _wake_waiting(self) -> None:
        """Requests without a coordinator look for one, each in the task that waits for its tokens."""
        for active in self._active.values():
            if not active.on:
                active.wake()

    def _take(self, attached: _Attached, message: object) -> None:
        if isinstance(message, wire.Tokens):
            for output in message.outputs:
                self._token(attached.peer, output)
        elif isinstance(message, ring.Ended):
            self._ended(attached.peer, message)
        elif isinstance(message, wire.Slots):
            waiting = attached.answers.get(message.nonce)
            if waiting is not None:
                waiting[1].append(message)
                waiting[0].set()
        else:
            raise WireError("unexpected", f"{type(message).__name__} from a coordinator", peer=attached.peer)

    def _token(self, peer: str, output: ring.Output) -> None:
        active = self._active.get(output.request)
        if active is None or active.on != peer or active.done:
            return
        # The token belongs behind what is known; anything else is of a former submission.
        if output.position != len(active.prompt) + len(active.tokens) - 1:
            return
        active.take(output)

    def _ended(self, peer: str, ended: ring.Ended) -> None:
        active = self._active.get(ended.request)
        if active is None or active.on != peer or active.done or ended.reason in ("stop", "length"):
            return
        text = ended.message or f"the answer ended: {ended.reason}"
        if ended.reason == "busy" and active.tokens:
            # An answer that has begun is not refused where it wants to go on: it waits, and tries again.
            active.on = ""
            active.not_before = trio.current_time() + (ended.retry_after or 2.0)
        elif ended.reason == "busy":
            active.error = BusyError(text, retry_after=ended.retry_after or 2.0)
        else:
            active.error = EngineError(text)
        active.wake()

    async def slots(self, peer: str, timeout: float) -> wire.Slots | None:
        """What a coordinator says of its slots, or None when it does not in time."""
        attached = self._attached.get(peer)
        if attached is None:
            return None
        nonce = next(self._nonces)
        event, answers = attached.answers[nonce] = (trio.Event(), list[wire.Slots]())
        try:
            with trio.move_on_after(timeout):
                await attached.link.send(attached.codec.encode(wire.SlotsWanted(nonce)))
                await event.wait()
        except LinkError as error:
            logger.info("the slots of %s could not be read: %s", peer, error)
        finally:
            attached.answers.pop(nonce, None)
        if not answers and self._attached.get(peer) is attached:
            attached.unanswered += 1
            if attached.unanswered >= SILENT_POLLS:
                logger.warning("coordinator %s is silent: its link is closed", peer)
                attached.link.close()
        return answers[0] if answers else None

    # -- requests -------------------------------------------------------------------------------------------

    async def _submit(self, active: _Active) -> None:
        """Give a request to the least busy coordinator that can hold it; there must be one that is attached."""
        load = {peer: 0 for peer in self._attached}
        for other in self._active.values():
            if other.on in load:
                load[other.on] += 1
        whole = len(active.prompt) + active.max_tokens
        fit = [p for p in load if self._attached[p].welcome.context_length >= whole] or list(load)
        peer = min(fit, key=lambda p: (load[p] / self._attached[p].welcome.slots, p))
        attached = self._attached[peer]
        active.on = peer
        try:
            await attached.link.send(attached.codec.encode(active.submit()), Priority.CONTROL)
        except LinkError as error:
            logger.info("a request waits for the next link: %s", error)

    @contextlib.asynccontextmanager
    async def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling,
        stop_tokens: frozenset[int],
        *,
        priority: int = 0,
        deadline: float = math.inf,
    ) -> AsyncIterator[AsyncIterator[Token]]:
        """Submit a request; leaving the block cancels it. As a ring's requests do.

        Raises:
            NotReadyError: no coordinator serves. BusyError: from the iterator, before its first token.
        """
        if not self._attached:
            raise NotReadyError(NOBODY)
        active = _Active(next(self._ids), prompt, max_tokens, sampling, stop_tokens, priority, deadline)
        self._active[active.id] = active
        self._submitted += 1
        try:
            await self._submit(active)
            yield self._tokens_of(active)
        finally:
            self._active.pop(active.id, None)
            if active.done:
                self._finished += 1
            elif active.error is not None:
                self._failed += 1
            else:
                self._cancelled += 1
                with trio.move_on_after(1, shield=True):
                    await self._cancel(active)

    async def _cancel(self, active: _Active) -> None:
        attached = self._attached.get(active.on)
        if attached is None:
            return
        try:
            await attached.link.send(attached.codec.encode(ring.Cancel(active.id)))
        except LinkError as error:
            logger.info("a cancel was not heard: %s", error)

    async def _tokens_of(self, active: _Active) -> AsyncIterator[Token]:
        while True:
            while active.ready:
                token = active.ready.pop(0)
                self._tokens += 1
                yield token
                if token.final:
                    return
            if active.error is not None:
                raise active.error
            news = active.news
            now = trio.current_time()
            if not active.on and self._attached and now >= active.not_before:
                self._resubmitted += 1
                await self._submit(active)
            wait = PAUSE_COMMENT_SECONDS
            if not active.on and self._attached:
                wait = max(0.0, min(wait, active.not_before - now))
            with trio.move_on_after(wait):
                await news.wait()
            if active.on:
                active.paused_since = None
                continue
            if self._attached and trio.current_time() >= active.not_before:
                continue
            active.pause(self._why_not())
            if not active.ready:
                yield Token(-1, remark=self._why_not())

    def _why_not(self) -> str:
        return "every coordinator's queue is full" if self._attached else NOBODY

    @property
    def total_slots(self) -> int:
        """Requests that all of them together compute at once."""
        return sum(attached.welcome.slots for attached in self._attached.values())

    def statistics(self) -> CoordinatorStatistics:
        """A snapshot."""
        return CoordinatorStatistics(
            len(self._attached),
            len(self._active),
            self._submitted,
            self._finished,
            self._failed,
            self._cancelled,
            self._resubmitted,
            self._tokens,
            self._refused,
        )
