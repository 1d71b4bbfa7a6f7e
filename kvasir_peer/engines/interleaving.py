"""Passes that wait for experts computed on other machines, and which of them may go on.

While one pass waits at a layer, others are computed. Passes that share a slot must still meet the KV cache in their
order: a pass may run up to its next stop only when every earlier one that shares a slot with it stands at that
layer or behind it, because attention of a layer reads what the earlier pass has written there.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True)
class _Begun:
    slots: frozenset[int]
    layers: tuple[int, ...]
    at: float  # layer at which it waits; -1 before its first


class Interleaving:
    """The passes under way, oldest first. Pure bookkeeping: whoever computes asks before each step."""

    def __init__(self) -> None:
        self._passes: dict[int, _Begun] = {}

    def __len__(self) -> int:
        return len(self._passes)

    def add(self, job: int, slots: Collection[int], layers: Collection[int]) -> None:
        """A pass was ordered, after all that were added before.

        Args:
            job: its number.
            slots: whose rows it has.
            layers: at which it will stop; without any it runs through.
        """
        self._passes[job] = _Begun(frozenset(slots), tuple(sorted(layers)), -1)

    def may_step(self, job: int) -> bool:
        """Whether the pass may run up to its next stop now."""
        mine = self._passes[job]
        stop = next((layer for layer in mine.layers if layer > mine.at), math.inf)
        for other, begun in self._passes.items():
            if other == job:
                return True
            if begun.at < stop and not mine.slots.isdisjoint(begun.slots):
                return False
        raise AssertionError("the pass is among the passes")

    def stopped(self, job: int, layer: int) -> None:
        """The pass waits at a layer: its attention there is written."""
        self._passes[job].at = layer

    def remove(self, job: int) -> None:
        """The pass is through, or given up."""
        del self._passes[job]
