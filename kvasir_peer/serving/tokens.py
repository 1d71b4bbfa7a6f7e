"""What a client's answer is made of, whichever way its model is computed, and how long it may pause."""

from __future__ import annotations

from dataclasses import dataclass

PAUSE_COMMENT_SECONDS = 3.0  # a client hears something this often while its answer pauses
PAUSE_LIMIT_SECONDS = 180.0  # an answer that could not go on for so long ends with an error


@dataclass(frozen=True)
class Token:
    """One token of an answer.

    Attributes:
        token: its id, or -1 for a remark without a token.
        logprob: of the token; 0 where none was asked for.
        top: best tokens with their log-probabilities.
        final: ``stop`` or ``length`` with the last token.
        remark: why the answer pauses.
    """

    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    final: str = ""
    remark: str = ""
