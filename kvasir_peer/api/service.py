"""What the OpenAI routes ask of whoever computes: a service of models that turns prompts into tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from kvasir_peer.models.chat_template import ChatTemplate
    from kvasir_peer.models.tokenizer import Tokenizer
    from kvasir_peer.wire.sampling import Sampling


@dataclass(frozen=True)
class ServedModel:
    """A model that clients may name.

    Attributes:
        id: its name.
        tokenizer: its tokenizer.
        chat_template: its chat template, or None where it has no chat.
        context_length: tokens of a prompt and its answer together, at most.
        created: when it was put up, in seconds since 1970.
        ready: whether it can be served now, or as soon as a ring is mended that just broke.
        missing: what is missing where it is not ready, in a few words for the client.
    """

    id: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    context_length: int
    created: int
    ready: bool
    missing: str


@dataclass(frozen=True)
class GenerationRequest:
    """One answer to compute.

    Attributes:
        model: id of a served model.
        prompt: token ids, at least one.
        max_tokens: tokens to compute at most; with the prompt within the context length.
        sampling: how tokens are chosen.
        stop_tokens: tokens that end the answer.
        deadline: time (of the event loop's clock) after which the answer is of no use, None for none.
        priority: a higher one goes first where requests wait.
    """

    model: str
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop_tokens: frozenset[int]
    deadline: float | None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token of an answer, or a remark that it pauses.

    Attributes:
        token: the id, or -1 for a remark.
        logprob: natural logarithm of its probability.
        top: the best tokens with theirs, where asked for.
        final: why the answer ends with this token; empty if it goes on.
        comment: the remark.
    """

    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    final: Literal["", "stop", "length"] = ""
    comment: str = ""


class CompletionService(Protocol):
    """A bridge, as the OpenAI routes see it."""

    def models(self) -> list[ServedModel]:
        """The models, ready or not."""
        ...

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[AsyncIterator[TokenEvent]]:
        """Compute an answer; leaving the context cancels what is left of it.

        Raises:
            NotReadyError: at entry, the model cannot be served yet.
            BusyError: at entry, too many requests wait.
            UsageError: at entry, the request cannot be served as it is.
        """
        ...
