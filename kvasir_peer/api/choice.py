"""The text of one answer as its tokens come: characters, stop strings, log-probabilities. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvasir_peer.api.service import TokenEvent
from kvasir_peer.models.tokenizer import IncrementalDecoder, Tokenizer


@dataclass(frozen=True)
class Chosen:
    """A token of the answer, for log-probabilities.

    Attributes:
        event: the token and its chances.
        start, end: where its text begins and ends in the answer, in characters.
    """

    event: TokenEvent
    start: int
    end: int


@dataclass(frozen=True)
class Piece:
    """What is new in an answer.

    Attributes:
        text: more text; none of it belongs to a stop string.
        tokens: the tokens whose text is out with it.
        finish: why the answer ends here, or empty.
    """

    text: str
    tokens: tuple[Chosen, ...]
    finish: str


@dataclass
class Choice:
    """One answer: tokens go in, pieces come out.

    Text that may be the beginning of a stop string is held back until it is known whether it is one.

    Args:
        tokenizer: the model's.
        stops: texts that end the answer and are not part of it.
        stop_tokens: tokens that end it; they have no text.
    """

    tokenizer: Tokenizer
    stops: tuple[str, ...]
    stop_tokens: frozenset[int]
    n_tokens: int = 0
    finish: str = ""
    _held: str = ""
    _decoded: int = 0  # characters so far, held ones too
    _out: int = 0  # characters that are out
    _waiting: list[Chosen] = field(default_factory=list)
    _decoder: IncrementalDecoder = field(init=False)

    def __post_init__(self) -> None:
        self._decoder = self.tokenizer.decoder()

    def push(self, event: TokenEvent) -> Piece:
        """Take a token (no remarks); after a piece with ``finish`` there are no more."""
        self.n_tokens += 1
        if not (event.final == "stop" and event.token in self.stop_tokens):
            text = self._decoder.push(event.token)
            # A token that ends within a character belongs to the character that later ones complete.
            end = self._decoded + len(text) + self._decoder.incomplete
            self._waiting.append(Chosen(event, self._decoded, end))
            self._take(text)
        if event.final:
            self._take(self._decoder.finish())
        cut = min((at for stop in self.stops if (at := self._held.find(stop)) >= 0), default=-1)
        if cut >= 0:
            return self._release(cut, "stop", self._out + cut)
        if event.final:
            return self._release(len(self._held), event.final, self._decoded + 1)
        return self._release(len(self._held) - self._possible_stop(), "", -1)

    def end(self) -> Piece:
        """What is left where tokens stopped coming without a reason given."""
        self._take(self._decoder.finish())
        return self._release(len(self._held), "stop", self._decoded + 1)

    def _take(self, text: str) -> None:
        self._held += text
        self._decoded += len(text)

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        longest = 0
        for stop in self.stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _release(self, length: int, finish: str, end: int) -> Piece:
        """Let go of held text, and of the tokens that end within it or, at the end, begin before ``end``."""
        text, self._held = self._held[:length], self._held[length:]
        self._out += length
        self.finish = finish
        n = 0
        for chosen in self._waiting:
            if chosen.start >= end if finish else chosen.end > self._out:
                break
            n += 1
        tokens = tuple(self._waiting[:n])
        del self._waiting[:n]
        return Piece(text, tokens, finish)
