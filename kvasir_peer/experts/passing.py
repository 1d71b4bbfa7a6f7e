"""What a ring stage knows of requests: only what passes through it.

Rows name slot, request, incarnation and position. From that follows which slots are busy, which requests have ended
(their slot is another's), and which were begun anew (another incarnation). It is needed for rows of workers that lied:
what is to be made again is remembered until it has been, and said once more in an epoch that begins soon after, since
nobody tells a stage whether its word has reached the bridge. Requests that have ended are remembered for a while: when
it shows late that a worker lied, the bridge counts their tokens too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

REMEMBERED_ENDED = 256  # requests whose slot is another's: at most 4 messages, and a few numbers by worker
# A word reaches the bridge within one pass of the ring, which takes far less; what is said a second time is computed a
# second time, and counted up to then.
SAID_AGAIN_SECONDS = 3.0
MAX_DONE = 1024  # words that may be said once more; far over the slots of any ring


@dataclass(slots=True)
class _Holder:
    request: int
    incarnation: int
    seen: float


@dataclass(frozen=True, slots=True)
class _Known:
    slot: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class _Done:
    """A word on a request that was made again since, or has ended."""

    number: int
    incarnation: int
    position: int
    at: float


class PassingRequests:
    """One loaded slice's; the time is passed in."""

    def __init__(self) -> None:
        self._slots: dict[int, _Holder] = {}
        self._known: dict[int, _Known] = {}
        self._ended: dict[int, int] = {}  # request: its last incarnation; whose slot was taken first, first
        self._tainted: dict[int, tuple[int, int]] = {}  # request: number of the news, position
        self._done: dict[int, _Done] = {}  # by request, oldest first
        self._news = 0
        self._now = 0.0  # when rows passed last

    def passes(self, rows: npt.NDArray[np.void], now: float) -> tuple[int, ...]:
        """Rows (:data:`kvasir_peer.wire.membership.ROW`) that the stage is about to compute.

        Whoever calls this has said before, in this epoch, what :meth:`taints` names: rows that begin at or before what
        it names make that again.

        Returns:
            Requests that have ended, and are remembered no longer.
        """
        self._now = now
        self._forget_words()
        starts = np.flatnonzero(np.diff(rows["slot"].astype(np.int64), prepend=-1))
        runs = rows[starts]
        for slot, request, incarnation, position in zip(
            runs["slot"].tolist(),
            runs["request"].tolist(),
            runs["incarnation"].tolist(),
            runs["position"].tolist(),
            strict=True,
        ):
            holder = self._slots.get(slot)
            if holder is not None and (holder.request, holder.incarnation) == (request, incarnation):
                holder.seen = now
                continue
            self._slots[slot] = _Holder(request, incarnation, now)
            if holder is not None and holder.request != request:
                self._loses(holder.request, slot)
            self._begins(request, _Known(slot, incarnation), position)
        forgotten = []
        while len(self._ended) > REMEMBERED_ENDED:
            forgotten.append(request := next(iter(self._ended)))
            del self._ended[request]
        return tuple(forgotten)

    def _loses(self, request: int, slot: int) -> None:
        """The slot is another's; a request may have gone on in another one before, under another head."""
        known = self._known.get(request)
        if known is None or known.slot != slot:
            return
        del self._known[request]
        self._ended[request] = known.incarnation
        taint = self._tainted.pop(request, None)
        if taint is not None:
            self._note_done(request, taint[0], known.incarnation, taint[1])

    def _begins(self, request: int, known: _Known, position: int) -> None:
        before = self._known.get(request)
        self._known[request] = known
        self._ended.pop(request, None)  # it waited for a slot
        taint = self._tainted.get(request)
        if taint is None or before is None:
            return
        if position <= taint[1]:
            del self._tainted[request]
            self._note_done(request, taint[0], before.incarnation, taint[1])
        else:  # whoever began it anew had not heard: it must be said of this incarnation too
            self._news += 1
            self._tainted[request] = (self._news, taint[1])

    def _note_done(self, request: int, number: int, incarnation: int, position: int) -> None:
        before = self._done.pop(request, None)
        if before is not None:
            position = min(position, before.position)
        self._done[request] = _Done(number, incarnation, position, self._now)
        if len(self._done) > MAX_DONE:
            del self._done[next(iter(self._done))]

    def _forget_words(self) -> None:
        while self._done:
            request, oldest = next(iter(self._done.items()))
            if oldest.at + SAID_AGAIN_SECONDS >= self._now:
                return
            del self._done[request]

    def busy(self, now: float, within: float) -> int:
        """Slots that had rows within so many seconds."""
        return sum(now - holder.seen <= within for holder in self._slots.values())

    def taint(self, rewinds: Mapping[int, int]) -> bool:
        """Requests must be made again from these positions on; whether any of them is still known here."""
        more = False
        for request, position in rewinds.items():
            if request in self._known:
                self._news += 1
                before = self._tainted.get(request)
                self._tainted[request] = (self._news, min(position, before[1] if before else position))
                more = True
            elif request in self._ended:
                self._news += 1
                self._note_done(request, self._news, self._ended[request], position)
                more = True
        return more

    def taints(self) -> list[tuple[int, tuple[int, int, int]]]:
        """Number of the news and ``(request, incarnation, position)``.

        Of all that has not been made again, and of what was made again, or had ended, within ``SAID_AGAIN_SECONDS``.
        """
        open_ = [
            (number, (request, self._known[request].incarnation, position))
            for request, (number, position) in self._tainted.items()
        ]
        done = [
            (word.number, (request, word.incarnation, word.position)) for request, word in self._done.items()
        ]
        return open_ + done
