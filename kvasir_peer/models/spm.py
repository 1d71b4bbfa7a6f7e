"""SentencePiece's BPE: merge the neighbours whose union is the best-scored token, again and again.

The order of merges is llama.cpp's: highest score first, leftmost first among equals; so ids agree with it also where
scores tie, which a list of ranked merges cannot express.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

SPACE = "▁"  # U+2581, what SentencePiece writes for a space

CACHED_CHUNKS = 16384  # chunks whose pieces are kept; words repeat, and one is some hundred bytes
CACHED_CHARACTERS = 64  # a longer chunk is rarely seen twice


class SentencePieceBpe:
    """Pieces of a text under a scored vocabulary. Safe for use from several threads.

    Args:
        ids: token text to token id, all tokens.
        scores: score of each token id.
    """

    def __init__(self, ids: Mapping[str, int], scores: Sequence[float]) -> None:
        self._ids = ids
        self._scores = scores
        # No merge crosses the border before a ▁ unless some token has that pair of characters inside. Most
        # vocabularies have none but ▁▁, so that a text falls apart into its words, which then are cached.
        inner = {match[0] for match in re.findall(rf"[^{SPACE}]{SPACE}", "\n".join(ids), re.DOTALL)} - {"\n"}
        inner |= {
            text[at] for text in ids if "\n" in text for at in range(len(text) - 1) if text[at + 1] == SPACE
        }
        joined = "".join(re.escape(character) for character in sorted(inner | {SPACE}))
        self._border = re.compile(rf"(?<=[^{joined}])(?={SPACE})", re.DOTALL)
        self._merged = lru_cache(CACHED_CHUNKS)(self._merge)

    def pieces(self, text: str) -> list[str]:
        """Cut a text (spaces already written as ``▁``) into tokens' texts and single characters that are none."""
        pieces: list[str] = []
        for chunk in self._border.split(text):
            if len(chunk) <= CACHED_CHARACTERS:
                pieces += self._merged(chunk)
            else:
                pieces += self._merge(chunk)
        return pieces

    def _merge(self, text: str) -> tuple[str, ...]:
        pieces = list(text)  # an absorbed piece becomes ""
        before = list(range(-1, len(pieces) - 1))
        after = list(range(1, len(pieces) + 1))
        end = len(pieces)
        heap: list[tuple[float, int, int, int]] = []

        def propose(left: int, right: int) -> None:
            token = self._ids.get(pieces[left] + pieces[right])
            if token is not None:
                size = len(pieces[left]) + len(pieces[right])
                heapq.heappush(heap, (-self._scores[token], left, right, size))

        for right in range(1, end):
            propose(right - 1, right)
        while heap:
            _, left, right, size = heapq.heappop(heap)
            if not pieces[left] or not pieces[right] or len(pieces[left]) + len(pieces[right]) != size:
                continue  # one of the two has been merged since
            pieces[left] += pieces[right]
            pieces[right] = ""
            following = after[left] = after[right]
            if following < end:
                before[following] = left
                propose(left, following)
            if before[left] >= 0:
                propose(before[left], left)
        return tuple(piece for piece in pieces if piece)
