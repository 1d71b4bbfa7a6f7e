"""Sharing over many passes, in simulated time: how near it comes to the sum of everybody's speed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvasir_peer.experts.dispatch_policy import Worker, sent, served
from kvasir_peer.experts.sharing import LOCAL, LocalCost, share_rows

LAYERS, EXPERTS, USED = 5, 8, 2
PAIR = 0.003  # seconds of the own experts
STEP = 0.002  # seconds of the own engine between two layers


@dataclass
class Line:
    """Somebody who does one thing after the other."""

    free: float = 0.0
    busy: float = 0.0

    def take(self, now: float, seconds: float) -> float:
        self.free = max(self.free, now) + seconds
        self.busy += seconds
        return self.free


@dataclass
class Simulation:
    """Passes that go through all layers again and again; workers are ``way`` seconds away, there and back."""

    pairs: dict[str, float]
    passes: int
    rows: int
    way: float = 0.040
    now: float = 0.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    done: int = 0
    sent_pairs: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.numbers = itertools.count()
        self.draw = random.Random(7)
        self.own = Line()
        self.lines = {peer: Line() for peer in self.pairs}
        ranges = tuple((layer, 0, EXPERTS) for layer in range(LAYERS))
        self.workers = {peer: Worker(peer, ranges, 0.0, 1e9) for peer in [*self.pairs, LOCAL]}

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), what))

    def begin(self) -> None:
        for _ in range(self.passes):
            self.step(0)

    def run(self, until: float) -> None:
        while self.now < until:
            self.now, _, what = heapq.heappop(self.events)
            what()

    def step(self, layer: int) -> None:
        if layer == LAYERS:
            self.done += self.rows
            layer = 0
        # A pass goes before the own part of others' rows (the engine's order), which is done so much later.
        self.own.take(self.now, STEP)
        self.at(self.now + STEP, lambda: self.share(layer))

    def share(self, layer: int) -> None:
        rows = Counter(e for _ in range(self.rows) for e in self.draw.sample(range(EXPERTS), USED))
        own = self.workers[LOCAL]
        local = LocalCost(own.latency.row_seconds or PAIR, own.finish(self.now) - self.now)
        shares = share_rows(layer, rows, [self.workers[p] for p in self.pairs], local, now=self.now)
        parts: Counter[str] = Counter()
        for share in shares:
            parts[share.peer] += share.count
        left = len(parts)

        def answer(peer: str, number: int, held: float) -> None:
            nonlocal left
            self.workers[peer] = served(self.workers[peer], number, held, self.now, loaded=True)
            left -= 1
            if not left:
                self.step(layer + 1)

        for peer, count in parts.items():
            number = next(self.numbers)
            self.sent_pairs[peer] += count
            self.workers[peer] = sent(self.workers[peer], number, count, self.now)
            if peer == LOCAL:
                held = count * PAIR
                when = self.own.take(self.now, held)
            else:
                held = count * self.pairs[peer]
                when = self.lines[peer].take(self.now + self.way / 2, held) + self.way / 2
            self.at(when, lambda peer=peer, number=number, held=held: answer(peer, number, held))


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_as_many_workers_as_fast_give_as_many_times_the_rows(count: int) -> None:
    simulation = Simulation({f"w{i}": PAIR for i in range(count)}, passes=8, rows=16)
    simulation.begin()
    simulation.run(10.0)
    before, began = simulation.done, simulation.now
    simulation.run(began + 20.0)
    alone = 1 / (LAYERS * (USED * PAIR + STEP / 16))
    assert (simulation.done - before) / 20.0 > 0.9 * (count + 1) * alone


def test_everybody_gets_rows_by_what_they_have_shown() -> None:
    simulation = Simulation({"quick": PAIR / 2, "slow": PAIR * 2}, passes=8, rows=16)
    simulation.begin()
    simulation.run(5.0)
    simulation.sent_pairs.clear()
    before = simulation.done
    simulation.run(25.0)
    pairs = simulation.sent_pairs
    assert pairs["quick"] / pairs["slow"] == pytest.approx(4, rel=0.1)
    assert pairs["quick"] / pairs[LOCAL] == pytest.approx(2, rel=0.2)
    alone = 1 / (LAYERS * (USED * PAIR + STEP / 16))
    assert (simulation.done - before) / 20.0 > 0.9 * (1 + 2 + 0.5) * alone
