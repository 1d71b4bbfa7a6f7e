"""Sets of moments as sorted, disjoint half-open intervals ``(start, end)``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments that are in any of ``intervals`` (in any order; empty and reversed ones hold none)."""
    joined: list[Interval] = []
    for start, end in sorted([interval for interval in intervals if interval[0] < interval[1]]):
        if joined and start <= joined[-1][1]:
            if end > joined[-1][1]:
                joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def clip(intervals: Iterable[Interval], low: float, high: float) -> list[Interval]:
    """The part of ``intervals`` between ``low`` and ``high``."""
    return [
        (start if start > low else low, end if end < high else high)
        for start, end in intervals
        if start < high and end > low
    ]


def without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The moments of one set that are not in the other; both as :func:`union` gives them."""
    left: list[Interval] = []
    index = 0
    for start, end in intervals:
        while index < len(others) and others[index][1] <= start:
            index += 1
        place = index
        while place < len(others) and others[place][0] < end:
            if start < others[place][0]:
                left.append((start, others[place][0]))
            start = max(start, others[place][1])
            place += 1
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    """Sum of the lengths."""
    return sum(end - start for start, end in intervals)
