"""What is asked of a scheduler, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvasir_peer.wire import ring
from kvasir_peer.wire.sampling import GREEDY, Sampling

FinishReason = Literal["stop", "length", "cancelled", "deadline", "failed"]


@dataclass(frozen=True, slots=True)
class Request:
    """One text to continue.

    Attributes:
        id: unsigned, 64 bits; unique among the requests that are queued or live.
        prompt: token ids, at least one.
        max_tokens: tokens to generate at most, at least one.
        sampling: parameters that the tail applies to each of its outputs.
        stop_tokens: a generated token of this set ends the request with ``stop`` (the token is reported).
        priority: higher goes first; waiting raises it, so no priority starves another.
        deadline: seconds on the caller's clock after which the request ends with ``deadline``; None is never.
    """

    id: int
    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = GREEDY
    stop_tokens: frozenset[int] = frozenset()
    priority: int = 0
    deadline: float | None = None

    @classmethod
    def submitted(cls, message: ring.Submit, now: float) -> Request:
        """The one of a bridge's message."""
        return cls(
            message.request,
            list(message.tokens),
            message.max_tokens,
            message.sampling,
            frozenset(message.stop_tokens),
            message.priority,
            now + message.seconds_left if message.seconds_left > 0 else None,
        )


@dataclass(frozen=True, slots=True)
class Kept:
    """What the stages still hold of a request that another scheduler began.

    Attributes:
        slot: where.
        positions: for each stage, how many from the beginning on.
    """

    slot: int
    positions: Sequence[int]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is in. ``waiting`` requests stand before it in the queue (0: it has a slot already)."""

    waiting: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The request is not taken.

    Attributes:
        reason: one line for a person.
        retry_after: seconds after which asking again makes sense; None where it never will.
    """

    reason: str
    retry_after: float | None = None

    def ended(self, request: int) -> ring.Ended:
        """What the bridge is told that has submitted it."""
        how = "error" if self.retry_after is None else "busy"
        return ring.Ended(request, how, self.reason, self.retry_after or 0.0)


@dataclass(frozen=True, slots=True)
class Emitted:
    """A token of a request: final, it never changes.

    Attributes:
        request: request id.
        index: 0 for the first generated token.
        position: position of ``token`` in the text (prompt included).
        token: token id.
    """

    request: int
    index: int
    position: int
    token: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A request has ended and its slot is free; nothing about it follows.

    Attributes:
        request: request id.
        reason: ``stop`` and ``length`` follow the last :class:`Emitted`; the others may come at any moment.
        generated: tokens that were emitted.
    """

    request: int
    reason: FinishReason
    generated: int


Event = Emitted | Finished
