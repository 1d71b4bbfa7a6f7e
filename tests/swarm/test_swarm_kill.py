"""Answers outlive the stages that compute them: real processes are killed and stopped while sixteen answers stream."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import trio
from streams import MODEL, Streams, cases
from swarm_processes import DATA, Swarm, running_swarm

STREAMS = 16
FLAGS = ("--boundary", "f32", "--context-length", "256", "--max-requests", str(STREAMS))


class Rounds:
    """Rounds of one swarm: in each, something happens to a stage in the middle of sixteen answers."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.asked = cases(STREAMS)
        self.table: list[str] = []
        self.peers: dict[str, str] = {}

    def names(self) -> list[str]:
        """Names of the stages' processes, head first."""
        stages = self.swarm.status()["stages"]
        return [self.swarm.name_of(stage["peer"]) for stage in stages]

    async def play(self, name: str, act, *, loaded: bool = True) -> float:
        """Sixteen answers; ``act(names)`` once all are under way. Seconds until tokens come again."""
        swarm = self.swarm
        status = await trio.to_thread.run_sync(swarm.wait_until_serving)
        epoch, failed = status["epoch"], status["requests"]["failed"]
        names = await trio.to_thread.run_sync(self.names)
        streams = Streams(swarm.base_url, status["model"], self.asked)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(streams.run)
            await streams.have(STREAMS * 12)
            began = trio.current_time()
            act(names)
        seconds = streams.silence_after(began)
        wrong = [a for a in streams.answers if not a.exact]
        assert not wrong, f"{name}: {wrong[0]}\n{swarm.outputs()}"
        status = await trio.to_thread.run_sync(lambda: swarm.wait_until_serving(after_epoch=epoch))
        assert status["requests"]["failed"] == failed
        assert status["requests"]["digest_mismatches"] == 0
        self.table.append(f"{name:<28} {seconds:6.2f} s until tokens came again, epoch {status['epoch']}")
        print(self.table[-1], flush=True)
        return seconds


@pytest.mark.timeout(600)
async def test_no_answer_ends_or_changes_when_stages_are_stopped_and_killed(tmp_path: Path) -> None:
    with running_swarm(tmp_path, DATA / MODEL, stages=3, standbys=3, bridge=FLAGS) as swarm:
        rounds = Rounds(swarm)
        await trio.to_thread.run_sync(lambda: swarm.wait_for_standbys(3))
        for place, word in enumerate(("head", "middle", "tail")):
            stopped = ""

            def stop(names, place=place):
                nonlocal stopped
                stopped = names[place]
                swarm.stages[stopped].send(signal.SIGSTOP)

            seconds = await rounds.play(f"{word} stopped", stop)
            assert seconds < 15 + 5, swarm.outputs()
            swarm.stages[stopped].send(signal.SIGCONT)
            await trio.to_thread.run_sync(lambda: swarm.wait_for_standbys(3))
        for place, word in enumerate(("head", "middle", "tail")):
            seconds = await rounds.play(
                f"{word} killed", lambda names, place=place: swarm.stages[names[place]].kill()
            )
            assert seconds < 5 + 5, swarm.outputs()
