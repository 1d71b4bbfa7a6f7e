"""Rows of a worker that lied, in a ring: a stage says so, the tail keeps back what was made of them, the head rewinds.

A stage has sent on what it computed before a check shows that a worker lied. Its word of that, a
:class:`~kvasir_peer.wire.ring.Tainted`, goes the way of the batches: through the stages after it to the tail, and from
there to head and bridge, between the results. So all three see it at the same place among the tokens, and agree
on which count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import msgspec
import trio

from kvasir_peer.errors import WireError
from kvasir_peer.wire import ring

if TYPE_CHECKING:
    from kvasir_peer.ring.plan import Plan

Rewind = tuple[int, int, int]
"""(request, newest incarnation that the stage has seen, first position whose values are void)"""

REMEMBERED_VOIDS = 4096  # requests whose tokens are kept back; far over the slots of any ring


class TaintSource(Protocol):
    """What a stage knows of rows that were wrong."""

    def taints(self) -> Iterable[tuple[int, Rewind]]:
        """What the head is to make again and the bridge to count, with a number that grows with each piece of news."""
        ...

    def taint_news(self) -> trio.Event:
        """Set as soon as there is more of it than now."""
        ...


class TaintLog:
    """The words of one epoch as one peer of the ring hears them: each signed by its stage, in order, once.

    Args:
        plan: of the epoch.
        verify: (peer id, signature, data) -> whether the peer signed the data.
        stages: only the first so many may have spoken; all of them if None.
    """

    def __init__(
        self, plan: Plan, verify: Callable[[str, bytes, bytes], bool], stages: int | None = None
    ) -> None:
        self._plan = plan
        self._verify = verify
        self._next = [0] * (len(plan.stages) if stages is None else stages)

    def take(self, message: ring.Tainted, peer: str) -> None:
        """Check a message that ``peer`` has sent or passed on.

        Raises:
            WireError: codes ``epoch``, ``stranger`` for a stage that cannot have spoken here, ``sequence`` or
                ``signature``.
        """
        plan = self._plan
        if (message.plan, message.epoch) != (plan.id, plan.epoch):
            raise WireError("epoch", f"taints of epoch {message.epoch}, here is {plan.epoch}", peer=peer)
        if message.stage >= len(self._next):
            raise WireError("stranger", f"taints of stage {message.stage} do not come this way", peer=peer)
        if message.number != self._next[message.stage]:
            raise WireError(
                "sequence", f"taints {message.number} where {self._next[message.stage]} were next", peer=peer
            )
        signer = plan.stages[message.stage].peer
        if not self._verify(signer, message.signature, ring.taint_digest(message)):
            raise WireError("signature", f"taints that stage {message.stage} has not signed", peer=peer)
        self._next[message.stage] += 1


class TaintSpeaker:
    """What one stage says in one epoch.

    Args:
        plan, stage: whose.
        sign: with the stage's key.
    """

    def __init__(self, plan: Plan, stage: int, sign: Callable[[bytes], bytes]) -> None:
        self._plan = plan
        self._stage = stage
        self._sign = sign
        self._number = 0
        self._said = -1

    def fresh(self, taints: Iterable[tuple[int, Rewind]]) -> list[ring.Tainted]:
        """Signed messages for all that was not said yet; none where nothing is new."""
        news = sorted((number, rewind) for number, rewind in taints if number > self._said)
        messages = []
        for first in range(0, len(news), ring.MAX_REWINDS):
            part = news[first : first + ring.MAX_REWINDS]
            message = ring.Tainted(
                self._plan.id,
                self._plan.epoch,
                self._stage,
                self._number,
                tuple(rewind for _, rewind in part),
                b"",
            )
            messages.append(
                msgspec.structs.replace(message, signature=self._sign(ring.taint_digest(message)))
            )
            self._number += 1
            self._said = part[-1][0]
        return messages


class Voids:
    """At the tail: tokens that were computed from void values are marked, and count for nobody."""

    def __init__(self) -> None:
        self._through: dict[int, int] = {}  # request: the newest incarnation that is void

    def taint(self, rewinds: Iterable[Rewind]) -> None:
        """Tokens of these incarnations and older ones are void from now on."""
        for request, incarnation, _ in rewinds:
            before = self._through.pop(request, 0)
            self._through[request] = max(before, incarnation)
            if len(self._through) > REMEMBERED_VOIDS:
                del self._through[next(iter(self._through))]

    def mark(self, outputs: tuple[ring.Output, ...]) -> tuple[ring.Output, ...]:
        """The tokens of a batch, with those that are void marked."""
        if not self._through:
            return outputs
        return tuple(
            msgspec.structs.replace(output, void=True)
            if output.incarnation <= self._through.get(output.request, -1)
            else output
            for output in outputs
        )
