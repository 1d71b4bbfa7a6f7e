"""The bridge's side of the requests that a ring computes, from epoch to epoch.

The bridge keeps every request's tokens. When a ring is mended it submits what is still going on again, with the tokens
made so far, so that an answer outlives any stage, the head included. A token that was handed out never changes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from kvasir_peer.agent.answer import Answer
from kvasir_peer.errors import BusyError, EngineError, LinkError, NotReadyError, WireError
from kvasir_peer.net.link import Priority
from kvasir_peer.serving.tokens import PAUSE_COMMENT_SECONDS, Token
from kvasir_peer.wire import ring
from kvasir_peer.wire.sampling import Sampling

if TYPE_CHECKING:
    from kvasir_peer.net.link import Link
    from kvasir_peer.ring.plan import KvPlace, Plan
    from kvasir_peer.wire.codec import Codec

logger = logging.getLogger(__name__)

MAX_UNPAIRED_DIGESTS = (
    1024  # batches whose head's or tail's word is still missing; far over what is in flight
)
# A new request waits so long for a ring that is being mended: a standby takes over in seconds, and to load a
# neighbour's layers takes a small model no longer.
MENDING_SECONDS = 15.0
REMEMBERED_ENDED = (
    1024  # answers that ended last: a word on a worker that lied, come late, counts their tokens
)
DEADLINE_GRACE = 2.0  # seconds after a deadline until the bridge ends an answer that no head has ended
PAST_DEADLINE = "the deadline passed before the answer was complete"


@dataclass(frozen=True)
class RequestStatistics:
    """Counters grow for ever.

    Attributes:
        active: requests under way.
        submitted, finished, cancelled, failed: requests.
        tokens: handed out.
        digest_mismatches: batches in which head and tail did not name the same membership.
        resubmitted: requests that went on under another epoch.
        rewound: requests that were computed again because a worker of theirs lied.
        suspect_tokens: tokens that had been handed out before, from the first value on that may be wrong, of these and
            of the last answers that had ended by then; they stay.
    """

    active: int
    submitted: int
    finished: int
    cancelled: int
    failed: int
    tokens: int
    digest_mismatches: int
    resubmitted: int
    rewound: int
    suspect_tokens: int


@dataclass(slots=True)
class _Suspect:
    """Which places of one text were counted as suspect: one range of positions."""

    first: int = 0
    end: int = 0

    def more(self, first: int, end: int) -> int:
        """Places of ``[first, end)`` that were not counted before; they are now."""
        if first > self.end:
            self.first = self.end = first
        count = max(0, self.first - first) + max(0, end - self.end)
        self.first, self.end = min(first, self.first), max(end, self.end)
        return count


@dataclass(frozen=True, slots=True)
class _Over:
    """What stays of an answer for a while."""

    prompt: int
    end: int
    suspect: _Suspect


@dataclass
class _Active(Answer):
    slot: int = 0
    computed: int = 0  # positions that had been computed into the slot when the last token came
    sound: int = 1 << 62  # of which, in this epoch, no more than these are known to be right
    held_by: frozenset[KvPlace] = frozenset()  # who has kept them since
    suspect: _Suspect = field(default_factory=_Suspect)

    def over(self) -> _Over:
        """What is to be known of it when it ends here."""
        return _Over(len(self.prompt), len(self.prompt) + len(self.tokens), self.suspect)

    def caches(self, plan: Plan) -> tuple[int, ...]:
        """Positions that each stage of a plan holds; empty where none does."""
        held = tuple(self.computed if stage.place in self.held_by else 0 for stage in plan.stages)
        return held if any(held) else ()

    def submit_to(self, plan: Plan) -> ring.Submit:
        """For the head of a plan."""
        return self.submit(slot=self.slot, computed=self.caches(plan))


class RingRequests:
    """All requests of one model's ring at its bridge."""

    def __init__(self) -> None:
        self._active: dict[int, _Active] = {}
        self._over: dict[int, _Over] = {}  # the last that ended, oldest first
        # Ids must not repeat across restarts of a bridge while a head still knows old ones.
        self._ids = itertools.count(secrets.randbits(62))
        self._plan: Plan | None = None
        self._link: Link | None = None
        self._attaching: Link | None = None
        self._codec: Codec | None = None
        self._why_not = "no ring has been planned yet"
        self._mending = False
        self._changed = trio.Event()  # whether it serves, or is being mended
        self._places: frozenset[KvPlace] = frozenset()  # of the plan
        self._slots: dict[int, int] = {}  # slot: the request whose token came from it last
        self._gone: set[int] = set()  # cancelled requests of which the head has not been told yet
        self._somebody_went = trio.Event()
        self._digests: dict[int, tuple[str, bytes]] = {}  # of the plan's epoch, by sequence
        self._submitted = self._finished = self._cancelled = self._failed = 0
        self._tokens = self._mismatches = self._resubmitted = 0
        self._rewound = self._suspect_tokens = 0

    # -- the ring comes and goes ----------------------------------------------------------------------------

    async def attach(self, plan: Plan, link: Link) -> None:
        """A ring serves: submit what is going on, and only then let others in.

        Whoever keeps the link runs :meth:`send_cancels` beside it.

        Args:
            plan: of the epoch.
            link: a welcomed ``requests`` link to its head.

        Raises:
            LinkError: the link, or the epoch, has ended meanwhile.
        """
        self._attaching, self._codec = link, ring.codec(plan.limits())
        self._plan, self._places = plan, frozenset(stage.place for stage in plan.stages)
        self._digests.clear()  # what was under way when the last epoch broke is never answered
        for active in self._active.values():
            active.held_by &= plan.kept
        # Those whose caches are there first: they get their slots back before anybody else is given one.
        going_on = [a for a in self._active.values() if not a.done and a.error is None]
        going_on.sort(key=lambda a: (not a.caches(plan), a.id))
        for active in going_on:
            if active.id in self._active:
                self._resubmitted += 1
                active.sound = 1 << 62  # the head makes again what is not, and only then tokens come
                message = active.submit_to(plan)
                await link.send(self._codec.encode(message), Priority.CONTROL)
        await link.send(self._codec.encode(ring.Resumed()), Priority.CONTROL)
        if self._attaching is not link:
            raise LinkError("the epoch ended while requests were submitted", peer=link.remote_peer)
        # From here on whoever goes says so; those who went in between are told of here.
        self._gone = {active.id for active in going_on if active.id not in self._active}
        self._link, self._attaching = link, None
        self._mending = False
        self._tell_of_change()

    async def send_cancels(self, link: Link) -> None:
        """Tell the head of those who have gone, for as long as a link lives that was attached."""
        codec = self._codec
        assert codec is not None
        try:
            while self._link is link:
                while self._link is link and self._gone:
                    await link.send(codec.encode(ring.Cancel(self._gone.pop())), Priority.CONTROL)
                self._somebody_went = trio.Event()
                await self._somebody_went.wait()
        except LinkError as error:
            logger.info("the link to the head is lost: %s", error)

    def detach(self, why: str) -> None:
        """The ring does not serve; ``why`` names what is missing."""
        for link in (self._link, self._attaching):
            if link is not None:
                link.close()
        self._link, self._attaching, self._why_not = None, None, why
        self._gone.clear()  # the next head hears only of those that go on
        self._somebody_went.set()
        for active in self._active.values():
            active.wake()

    def waits_for(self, why: str, *, mending: bool = False) -> None:
        """Newer words for what is missing, while nothing is served; ``mending``: it will soon serve again."""
        if self._link is None and why:
            self._why_not = why
        mending = mending and self._link is None
        if mending != self._mending:
            self._mending = mending
            self._tell_of_change()

    def _tell_of_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def give_up(self, why: str) -> None:
        """End the answers that wait for a ring."""
        self._why_not = why
        for active in self._active.values():
            if active.error is None and not active.done:
                active.error = NotReadyError(f"the answer could not go on: {why}")
            active.wake()

    @property
    def attached(self) -> bool:
        """Whether requests can be submitted."""
        return self._link is not None

    @property
    def admits(self) -> bool:
        """Whether requests can be submitted, or can wait for a ring that is being mended."""
        return self._link is not None or self._mending

    def links(self) -> list[Link]:
        """The link to the head, if it stands."""
        return [] if self._link is None else [self._link]

    def active_ids(self) -> frozenset[int]:
        """Ids of the requests under way."""
        return frozenset(self._active)

    # -- what the ring says ---------------------------------------------------------------------------------

    def composed(self, message: ring.Composed) -> None:
        """The head's word on a batch.

        Raises:
            WireError: code ``epoch`` for another one than the present; ``membership`` or ``sequence`` where it does not
                fit the tail's.
        """
        self._pair("head", (message.plan, message.epoch), message.sequence, message.digest)

    def result(self, message: ring.Result) -> None:
        """The tail's tokens of a batch.

        Raises:
            WireError: code ``epoch`` for another one than the present, ``membership`` where head and tail disagree;
                none of the tokens is taken.
        """
        self._pair("tail", (message.plan, message.epoch), message.sequence, message.digest)
        for output in message.outputs:
            active = self._active.get(output.request)
            if active is None or active.done or output.void:
                continue  # it was cancelled while its token was on the way, or the token is made again
            place = output.position + 1 - len(active.prompt)
            if place != len(active.tokens):
                if place < len(active.tokens):
                    continue  # computed again after a break: what was handed out stays
                raise WireError(
                    "position", f"request {output.request}: token {place} came before {len(active.tokens)}"
                )
            self._note_cache(active, output)
            active.take(output)

    def tainted(self, message: ring.Tainted) -> tuple[int, int]:
        """A stage's worker lied: what came of its rows is computed again.

        Returns:
            Answers that go on from there again, and tokens that were handed out and may be wrong, of answers that have
            ended too.
        """
        answers = tokens = 0
        for request, _, position in message.rewinds:
            active = self._active.get(request)
            if active is not None and not active.done:
                answers += 1
                active.sound = min(active.sound, position)
                active.computed = min(active.computed, position)
            text = active.over() if active is not None else self._over.get(request)
            if text is not None:
                # The token behind the wrong position is the first that may be wrong; none is counted twice.
                tokens += text.suspect.more(max(position + 1, text.prompt), text.end)
        self._rewound += answers
        self._suspect_tokens += tokens
        return answers, tokens

    def ended(self, message: ring.Ended) -> None:
        """The head ends a request for a reason that only it knows."""
        active = self._active.get(message.request)
        if active is None or active.done:
            return
        text = message.message or message.reason
        if message.reason == "busy":
            active.error = BusyError(text, retry_after=message.retry_after or 2.0)
        elif message.reason == "deadline":
            active.error = NotReadyError(PAST_DEADLINE)
        else:
            active.error = EngineError(f"the ring ended the request: {text}")
        active.wake()

    def _note_cache(self, active: _Active, output: ring.Output) -> None:
        """All stages have the request's positions now, and nobody else's who was in that slot before."""
        active.slot, active.computed = output.slot, min(output.position + 1, active.sound)
        active.held_by = self._places
        before = self._active.get(self._slots.get(output.slot, -1))
        if before is not None and before is not active and before.slot == output.slot:
            before.held_by = frozenset()
        self._slots[output.slot] = active.id

    def _pair(self, who: str, epoch: tuple[str, int], sequence: int, digest: bytes) -> None:
        plan = self._plan
        if plan is None or epoch != (plan.id, plan.epoch):
            raise WireError("epoch", f"the {who} speaks of epoch {epoch[1]}, which is not the present one")
        other = self._digests.pop(sequence, None)
        if other is None:
            self._digests[sequence] = (who, digest)
            if len(self._digests) > MAX_UNPAIRED_DIGESTS:
                raise WireError("membership", "head and tail do not speak of the same batches")
        elif other[0] == who:
            raise WireError("sequence", f"the {who} speaks of batch {sequence} a second time")
        elif other[1] != digest:
            self._mismatches += 1
            raise WireError("membership", f"head and tail name different memberships in batch {sequence}")

    # -- what clients ask -----------------------------------------------------------------------------------

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
        """Submit a request; leaving the block cancels it.

        Args:
            deadline: on trio's clock.

        Raises:
            NotReadyError: no ring serves, nor did one that is being mended within ``MENDING_SECONDS``; from the
                iterator too, when a pause was too long.
            BusyError: from the iterator, before its first token: the queue is full.
        """
        with trio.move_on_after(MENDING_SECONDS), trio.move_on_at(deadline):
            while self._link is None and self._mending:
                await self._changed.wait()
        if self._link is None:
            raise NotReadyError(self._why_not)
        active = _Active(next(self._ids), prompt, max_tokens, sampling, stop_tokens, priority, deadline)
        self._active[active.id] = active
        self._submitted += 1
        try:
            await self._submit(active)
            yield self._tokens_of(active)
        finally:
            self._active.pop(active.id, None)
            self._over[active.id] = active.over()
            if len(self._over) > REMEMBERED_ENDED:
                del self._over[next(iter(self._over))]
            if active.done:
                self._finished += 1
            elif active.error is not None:
                self._failed += 1
            else:
                self._cancelled += 1
            if not active.done and self._link is not None:
                self._gone.add(active.id)
                self._somebody_went.set()

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
            if trio.current_time() > active.deadline + DEADLINE_GRACE:
                active.error = NotReadyError(PAST_DEADLINE)
                raise active.error
            news = active.news
            with trio.move_on_after(PAUSE_COMMENT_SECONDS):
                await news.wait()
            if self._link is not None:
                active.paused_since = None
                continue
            active.pause(self._why_not)
            if not active.ready:
                yield Token(-1, remark=self._why_not)

    async def _submit(self, active: _Active) -> None:
        assert self._link is not None and self._codec is not None and self._plan is not None
        message = self._codec.encode(active.submit_to(self._plan))
        try:
            await self._link.send(message, Priority.CONTROL)
        except LinkError as error:
            logger.info("the link to the head is lost, the request goes out with the next: %s", error)

    def statistics(self) -> RequestStatistics:
        """A snapshot."""
        return RequestStatistics(
            len(self._active),
            self._submitted,
            self._finished,
            self._cancelled,
            self._failed,
            self._tokens,
            self._mismatches,
            self._resubmitted,
            self._rewound,
            self._suspect_tokens,
        )
