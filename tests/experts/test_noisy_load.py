"""A load that hovers around the threshold, in virtual time, over the real market, recruitment and dispatch policy.

By its rules a target stands for ``calm_after`` at least, so in ten minutes of the worst possible load it could change
about forty times. What is held here is that noise does not make it: however near to the threshold its mean is, the
target changes a few times in ten minutes, and the dispatch not more often than workers can bear.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from helpers_market import Swarm, model

from kvasir_peer.experts.dispatch_policy import SlotReading, Snapshot, Worker, decide, served
from kvasir_peer.experts.market_messages import Granted, Retire, SaturationChanged
from kvasir_peer.experts.recruitment import RecruitmentSettings

MINUTES = 10
TARGET_CHANGES = 10  # at most in ten minutes, of any of the loads below
DISPATCH_CHANGES = 4  # a minute at most between using workers and not


def hovering(mean: float, spread: float, seed: int) -> Callable[[float], int]:
    """Busy slots that wander around a mean, a step each half second."""
    draw = random.Random(seed)
    walk = [mean]
    for _ in range(MINUTES * 120 + 1):
        walk.append(walk[-1] + 0.3 * (mean - walk[-1]) + draw.gauss(0, spread))
    return lambda now: min(8, max(0, round(walk[int(now * 2)])))


@pytest.mark.parametrize("mean", [0.8, 1.2, 1.6, 2.0, 2.4])
@pytest.mark.parametrize("spread", [0.3, 0.6, 1.0])
def test_targets_and_dispatch_do_not_flap(mean: float, spread: float) -> None:
    for seed in range(4):
        busy = hovering(mean, spread, seed)
        swarm = Swarm(RecruitmentSettings(base=1, boost=1))
        swarm.offer(model())
        swarm.coordinator("c", "moe", lambda now, busy=busy: (busy(now), 8, 0))
        for i in range(8):
            swarm.volunteer(f"v{i}", rate=100.0 + i)
        modes = []
        workers: dict[str, Worker] = {}
        reading: SlotReading | None = None
        for second in range(MINUTES * 60):
            swarm.run(1.0)
            now = swarm.now
            if second % 3 == 0:
                reading = SlotReading(busy(now), 8, 0, now)
            workers = {
                peer: workers.get(peer)
                or served(Worker(peer, ((0, 0, 4),), now, 1e9), 1, 0.1, now, loaded=False)
                for peer in swarm.serving()
            }
            found = decide(Snapshot(reading, tuple(workers.values())), now)
            modes.append(bool(found.workers))
            for peer in found.workers:
                workers[peer] = served(workers[peer], 1, 0.1, now, loaded=found.mode == "load")
        targets = sum(isinstance(d, SaturationChanged) for _, d in swarm.log)
        assert targets <= TARGET_CHANGES, (mean, spread, seed, targets)
        flips = sum(a != b for a, b in itertools.pairwise(modes))
        assert flips <= DISPATCH_CHANGES * MINUTES, (mean, spread, seed, flips)
        # Whoever is let go or called is so by a change of the target, not by noise.
        retired = sum(isinstance(d, Retire) for _, d in swarm.log)
        granted = sum(isinstance(d, Granted) for _, d in swarm.log)
        assert retired <= 4 * targets and granted <= 8 + 4 * targets
        swarm.check()
