"""What a ring stage knows of requests: only what passes through it.

Rows name slot, request, incarnation and position. From that follows which slots are busy, which requests have ended
(their slot is another's), and which were rewound (another incarnation, from an earlier position on). It is needed for
rows of workers that lied: what is to be made again is remembered until it has been.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class _Holder:
    request: int
    incarnation: int
    seen: float


@dataclass(frozen=True, slots=True)
class Passed:
    """What a batch has shown: requests that are over, and ``(request, first position)`` of those begun anew there."""

    ended: tuple[int, ...]
    rewound: tuple[tuple[int, int], ...]


class PassingRequests:
    """One loaded slice's; the time is passed in."""

    def __init__(self) -> None:
        self._slots: dict[int, _Holder] = {}
        self._slot_of: dict[int, int] = {}
        self._tainted: dict[int, tuple[int, int]] = {}  # request: number of the news, position
        self._news = 0

    def passes(self, rows: npt.NDArray[np.void], now: float) -> Passed:
        """Rows (:data:`kvasir_peer.wire.membership.ROW`) that the stage is about to compute."""
        ended: list[int] = []
        rewound: list[tuple[int, int]] = []
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
            if holder is not None and holder.request != request and self._slot_of.get(holder.request) == slot:
                del self._slot_of[holder.request]
                self._tainted.pop(holder.request, None)
                ended.append(holder.request)
            known = self._slot_of.get(request)
            self._slot_of[request] = slot
            if known is not None:
                rewound.append((request, position))
                taint = self._tainted.get(request)
                if taint is not None and position <= taint[1]:
                    del self._tainted[request]
                elif (
                    taint is not None
                ):  # whoever began it anew had not heard: it must be said of this incarnation too
                    self._news += 1
                    self._tainted[request] = (self._news, taint[1])
        return Passed(tuple(ended), tuple(rewound))

    def busy(self, now: float, within: float) -> int:
        """Slots that had rows within so many seconds."""
        return sum(now - holder.seen <= within for holder in self._slots.values())

    def taint(self, rewinds: Mapping[int, int]) -> bool:
        """Requests must be made again from these positions on; whether any of them is still known here."""
        more = False
        for request, position in rewinds.items():
            if request in self._slot_of:
                self._news += 1
                before = self._tainted.get(request)
                self._tainted[request] = (self._news, min(position, before[1] if before else position))
                more = True
        return more

    def taints(self) -> list[tuple[int, tuple[int, int, int]]]:
        """Number of the news and ``(request, incarnation, position)``, of all that has not been made again."""
        return [
            (number, (request, self._slots[self._slot_of[request]].incarnation, position))
            for request, (number, position) in self._tainted.items()
        ]
