"""Rounds of one swarm: in each, something happens to a stage in the middle of sixteen answers, and all stay exact."""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio
from streams import Streams, cases
from swarm_processes import Swarm

STREAMS = 16
BEFORE = 12  # tokens of each answer, on average, before it happens
FLAGS = ("--boundary", "f32", "--context-length", "256", "--max-requests", str(STREAMS))

Act = Callable[[list[str]], None]
Then = Callable[[Streams], Awaitable[None]]


@dataclass(frozen=True)
class Round:
    """How one went: seconds from what happened until tokens came again, and the epoch in which they did."""

    group: str
    name: str
    seconds: float
    epoch: int


class Rounds:
    """Rounds of one swarm."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.asked = cases(STREAMS)
        self.played: list[Round] = []

    def names(self) -> list[str]:
        """Names of the stages' processes, head first."""
        stages = self.swarm.status()["stages"]
        return [self.swarm.name_of(stage["peer"]) for stage in stages]

    async def play(self, group: str, name: str, act: Act, then: Then | None = None) -> float:
        """Sixteen answers, and something that happens once all are under way.

        Args:
            group: of rounds whose times belong together.
            act: called with the names of the stages' processes, head first.
            then: runs after it, with the streams.

        Returns:
            Seconds until tokens came again.
        """
        swarm = self.swarm
        status = await trio.to_thread.run_sync(swarm.wait_until_serving)
        epoch, failed = status["epoch"], status["requests"]["failed"]
        names = await trio.to_thread.run_sync(self.names)
        streams = Streams(swarm.base_url, status["model"], self.asked)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(streams.run)
            await streams.have(STREAMS * BEFORE)
            began = trio.current_time()
            act(names)
            if then is not None:
                await then(streams)
        seconds = streams.silence_after(began)
        wrong = [a for a in streams.answers if not a.exact]
        assert not wrong, f"{name}: {wrong[0]}\n{swarm.outputs()}"
        status = await trio.to_thread.run_sync(lambda: swarm.wait_until_serving(after_epoch=epoch))
        assert status["requests"]["failed"] == failed
        assert status["requests"]["digest_mismatches"] == 0
        self.played.append(Round(group, name, seconds, status["epoch"]))
        print(f"{name:<28} {seconds:6.2f} s until tokens came again, epoch {status['epoch']}", flush=True)
        return seconds

    def spread(self) -> list[str]:
        """A line for each group of rounds: how many, the quickest, the middle one and the slowest."""
        groups = dict.fromkeys(each.group for each in self.played)
        lines = []
        for group in groups:
            times = sorted(each.seconds for each in self.played if each.group == group)
            middle = statistics.median(times)
            lines.append(f"{group}: {len(times)} x, {times[0]:.2f} / {middle:.2f} / {times[-1]:.2f} s")
        return lines


def percentile(values: Sequence[float], share: float) -> float:
    """The least of the values that so large a share of them does not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
