"""One answer at a bridge, whoever computes it: what was asked, the tokens so far, and how long it may pause."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import trio

from kvasir_peer.errors import NotReadyError
from kvasir_peer.serving.tokens import PAUSE_LIMIT_SECONDS, Token
from kvasir_peer.wire import ring
from kvasir_peer.wire.sampling import Sampling


@dataclass
class Answer:
    """Outlives whoever computes it: it is submitted again with the tokens made so far.

    Attributes:
        deadline: on trio's clock.
        ready: tokens that the client has not been given yet.
        news: set by :meth:`wake`.
        error: what it ends with, where it can't be completed.
        done: the last token was made.
    """

    id: int
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop_tokens: frozenset[int]
    priority: int
    deadline: float
    tokens: list[int] = field(default_factory=list)
    ready: list[Token] = field(default_factory=list)
    news: trio.Event = field(default_factory=trio.Event)
    error: Exception | None = None
    done: bool = False
    paused_since: float | None = None

    def wake(self) -> None:
        """Let whoever waits for news look again."""
        self.news.set()
        self.news = trio.Event()

    def take(self, output: ring.Output) -> None:
        """The token behind those that are known."""
        self.tokens.append(output.token)
        final = ""
        if output.token in self.stop_tokens:
            final = "stop"
        elif len(self.tokens) >= self.max_tokens:
            final = "length"
        self.done = bool(final)
        self.ready.append(Token(output.token, output.logprob, output.top, final))
        self.wake()

    def submit(self, *, slot: int = 0, computed: tuple[int, ...] = ()) -> ring.Submit:
        """What is still to be made of it, as whoever computes it is asked."""
        left = 0.0 if math.isinf(self.deadline) else max(0.001, self.deadline - trio.current_time())
        return ring.Submit(
            self.id,
            (*self.prompt, *self.tokens),
            self.max_tokens - len(self.tokens),
            self.sampling,
            tuple(self.stop_tokens),
            self.priority,
            left,
            slot,
            computed,
        )

    def pause(self, why: str) -> None:
        """It can't go on at present.

        Raises:
            NotReadyError: nor could it for a long time.
        """
        now = trio.current_time()
        self.paused_since = now if self.paused_since is None else self.paused_since
        if now - self.paused_since > PAUSE_LIMIT_SECONDS:
            self.error = NotReadyError(
                f"the answer could not go on within {PAUSE_LIMIT_SECONDS:.0f} s: {why}"
            )
            raise self.error
