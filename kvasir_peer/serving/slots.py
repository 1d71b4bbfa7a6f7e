"""KV slots: who holds which, and which incarnation of it."""

from __future__ import annotations

from collections import deque


class SlotTable:
    """A fixed number of slots, each with a counter of incarnations.

    The counter never goes back, so an answer about an older incarnation can always be told from a current one.
    """

    def __init__(self, count: int) -> None:
        self._free: deque[int] = deque(range(count))
        self._incarnations = [0] * count
        self._void = (
            0  # the newest incarnation that another counter may have given, and that no longer counts
        )
        self._holders: dict[int, int] = {}
        self._last: list[int | None] = [None] * count

    @property
    def count(self) -> int:
        return len(self._incarnations)

    @property
    def free(self) -> int:
        return len(self._free)

    def can_acquire(self) -> bool:
        return bool(self._free)

    def acquire(self, request: int, wanted: int | None = None) -> tuple[int, int]:
        """Give the request a slot, ``wanted`` if it is free; returns ``(slot, incarnation)``.

        Only when :meth:`can_acquire`.
        """
        assert self._free, "no slot is free"
        if wanted is not None and wanted in self._free:
            self._free.remove(wanted)
            slot = wanted
        else:
            slot = self._free.popleft()
        assert slot not in self._holders, "a free slot has no holder"
        self._holders[slot] = self._last[slot] = request
        return slot, self.renew(slot)

    def renew(self, slot: int) -> int:
        """Start another incarnation: everything computed under the former ones no longer counts."""
        self._incarnations[slot] = max(self._incarnations[slot], self._void) + 1
        return self._incarnations[slot]

    def count_on_from(self, incarnation: int) -> None:
        """Incarnations begun from now on are newer than this one, in all slots."""
        self._void = max(self._void, incarnation)

    def release(self, slot: int, request: int) -> tuple[int, int]:
        """Take the slot back; returns ``(slot, last incarnation)``."""
        holder = self._holders.pop(slot)
        assert holder == request, "only its holder gives a slot back"
        self._free.append(slot)
        return slot, self._incarnations[slot]

    def last(self, slot: int) -> int | None:
        """Request id that was given the slot last, whether it still holds it or not; None before the first."""
        return self._last[slot]

    def holder(self, slot: int) -> int | None:
        """Request id that holds the slot."""
        return self._holders.get(slot)

    def incarnation(self, slot: int) -> int:
        return self._incarnations[slot]
