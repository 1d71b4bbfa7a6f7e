"""The answers on the wire: whole ones as JSON, streamed ones as server-sent events, as OpenAI's API has them."""

from __future__ import annotations

import secrets
import time
from typing import Protocol

import msgspec

from kvasir_peer.api.asked import Asked
from kvasir_peer.api.choice import Chosen, Piece
from kvasir_peer.api.errors import ApiError
from kvasir_peer.api.schema import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    FinishReason,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from kvasir_peer.models.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say; OpenAI writes the same
DONE = b"data: [DONE]\n\n"
PING = b":\n\n"  # a comment without text, so that nothing between takes a silent connection for a dead one

_encoder = msgspec.json.Encoder()


class Answer(Protocol):
    """How one kind of request is answered."""

    def whole(self, pieces: list[Piece], usage: Usage) -> bytes:
        """The JSON of an answer whose choices came as one piece each."""
        ...

    def first(self, index: int) -> bytes:
        """Events that begin a streamed choice."""
        ...

    def more(self, index: int, piece: Piece) -> bytes:
        """Events for a new piece of a choice; empty where there is nothing to say."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """The event that ends a stream with the usage."""
        ...


def event(data: msgspec.Struct) -> bytes:
    """A server-sent event."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


def comment(text: str) -> bytes:
    """A comment in a stream, which clients skip."""
    return f": {' '.join(text.split())}\n\n".encode()


def error_event(error: ApiError) -> bytes:
    """An error within a stream; nothing comes after it."""
    return b"data: " + error.body() + b"\n\n"


class ChatAnswer:
    """``chat.completion`` and ``chat.completion.chunk``."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def whole(self, pieces: list[Piece], usage: Usage) -> bytes:
        choices = [
            ChatChoice(index, ChatMessage(piece.text), self._logprobs(piece), _reason(piece))
            for index, piece in enumerate(pieces)
        ]
        return _encoder.encode(ChatCompletion(self._id, self._created, self._asked.model.id, choices, usage))

    def first(self, index: int) -> bytes:
        return self._chunk(ChatChunkChoice(index, Delta(role="assistant", content="")))

    def more(self, index: int, piece: Piece) -> bytes:
        events = b""
        logprobs = self._logprobs(piece)
        if piece.text or (logprobs is not None and logprobs.content):
            events = self._chunk(ChatChunkChoice(index, Delta(content=piece.text), logprobs))
        if piece.finish:
            events += self._chunk(ChatChunkChoice(index, Delta(), None, _reason(piece)))
        return events

    def usage(self, usage: Usage) -> bytes:
        return event(ChatChunk(self._id, self._created, self._asked.model.id, [], usage))

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        usage = None if self._asked.include_usage else msgspec.UNSET
        return event(ChatChunk(self._id, self._created, self._asked.model.id, [choice], usage))

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self._asked.logprobs:
            return None
        tokenizer = self._asked.model.tokenizer
        content: list[TokenLogprob] = []
        for chosen in piece.tokens:
            text, octets = _shown(tokenizer, chosen.event.token)
            top = [TopLogprob(*_named(tokenizer, token, logprob)) for token, logprob in chosen.event.top]
            content.append(TokenLogprob(text, _finite(chosen.event.logprob), octets, top))
        return ChatLogprobs(content)


class CompletionAnswer:
    """``text_completion``, whole or in parts."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._id = f"cmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def whole(self, pieces: list[Piece], usage: Usage) -> bytes:
        choices = [
            CompletionChoice(index, piece.text, self._logprobs(piece), _reason(piece))
            for index, piece in enumerate(pieces)
        ]
        return _encoder.encode(Completion(self._id, self._created, self._asked.model.id, choices, usage))

    def first(self, index: int) -> bytes:
        return b""

    def more(self, index: int, piece: Piece) -> bytes:
        logprobs = self._logprobs(piece)
        if not piece.text and not piece.finish and not (logprobs is not None and logprobs.tokens):
            return b""
        reason = _reason(piece) if piece.finish else None
        return self._event([CompletionChoice(index, piece.text, logprobs, reason)])

    def usage(self, usage: Usage) -> bytes:
        return event(Completion(self._id, self._created, self._asked.model.id, [], usage))

    def _event(self, choices: list[CompletionChoice]) -> bytes:
        usage = None if self._asked.include_usage else msgspec.UNSET
        return event(Completion(self._id, self._created, self._asked.model.id, choices, usage))

    def _logprobs(self, piece: Piece) -> CompletionLogprobs | None:
        if not self._asked.logprobs:
            return None
        tokenizer = self._asked.model.tokenizer
        wanted = any(request.sampling.top_logprobs for request in self._asked.generations)
        return CompletionLogprobs(
            tokens=[_shown(tokenizer, chosen.event.token)[0] for chosen in piece.tokens],
            token_logprobs=[_finite(chosen.event.logprob) for chosen in piece.tokens],
            top_logprobs=[_best(tokenizer, chosen) for chosen in piece.tokens] if wanted else None,
            text_offset=[chosen.start for chosen in piece.tokens],
        )


def _reason(piece: Piece) -> FinishReason:
    return "length" if piece.finish == "length" else "stop"


def _shown(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    octets = tokenizer.token_bytes(token, special=True)
    return octets.decode("utf-8", "replace"), list(octets)


def _named(tokenizer: Tokenizer, token: int, logprob: float) -> tuple[str, float, list[int]]:
    text, octets = _shown(tokenizer, token)
    return text, _finite(logprob), octets


def _best(tokenizer: Tokenizer, chosen: Chosen) -> dict[str, float]:
    best = {_shown(tokenizer, token)[0]: _finite(logprob) for token, logprob in reversed(chosen.event.top)}
    best = dict(reversed(best.items()))  # of tokens that look alike the better one stays
    return best


def _finite(logprob: float) -> float:
    return logprob if logprob >= LEAST_LOGPROB else LEAST_LOGPROB  # also for NaN
