"""What dispatchers count, as growth since they said it last.

A dispatcher counts from its start on; ``run`` tells one start from another. Of each dispatcher only its present run
is remembered, and of that only what its last word named, so that none can fill a bridge's memory by naming new ones.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

import msgspec

logger = logging.getLogger(__name__)

# Dispatchers that are remembered; one that was forgotten and comes back in the same run is counted anew.
MAX_DISPATCHERS = 1_024

Key = TypeVar("Key", bound=Hashable)
_kept = msgspec.msgpack.Decoder(list[tuple[str, int, list[tuple[tuple[str, str], int]]]])


class Tallies(Generic[Key]):
    """Use :meth:`more` with each word of a dispatcher."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, tuple[int, Mapping[Key, int]]] = OrderedDict()

    def more(self, dispatcher: str, run: int, counts: Mapping[Key, int]) -> dict[Key, int]:
        """What has grown since the last word of the same run, and by how much.

        Args:
            dispatcher: who says it.
            run: of its start.
            counts: since that start.
        """
        known_run, before = self._told.pop(dispatcher, (run, {}))
        if known_run != run:
            before = {}
        found = {}
        for key, count in counts.items():
            last = before.get(key, 0)
            # Fewer than before: the dispatcher had forgotten what it counts, and has begun anew.
            grown = count - last if count >= last else count
            if grown > 0:
                found[key] = grown
        self._told[dispatcher] = (run, dict(counts))
        while len(self._told) > MAX_DISPATCHERS:
            self._told.popitem(last=False)
        return found

    def __len__(self) -> int:
        """Counts that are remembered."""
        return sum(len(counts) for _, counts in self._told.values())


def encode_tallies(tallies: Tallies[tuple[str, str]]) -> bytes:
    """For the ledger, so that a bridge that is started again counts nothing twice."""
    told = tallies._told.items()
    return msgspec.msgpack.encode([(peer, run, list(counts.items())) for peer, (run, counts) in told])


def decode_tallies(data: bytes | None) -> Tallies[tuple[str, str]]:
    """What was kept; where that is nothing, or can't be read, all is counted from now on."""
    found: Tallies[tuple[str, str]] = Tallies()
    try:
        kept = _kept.decode(data) if data else []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        logger.warning("what dispatchers had said of workers can't be read: %s", error)
        return found
    for dispatcher, run, counts in kept:
        found.more(dispatcher, run, dict(counts))
    return found
