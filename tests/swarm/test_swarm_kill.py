"""Answers outlive the stages that compute them: real processes are killed and stopped while sixteen answers stream.

One swarm goes through all of it, with three stages and a standby for each. The times are printed; what is asserted of
them leaves room for a machine that is busy with other things.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
import trio
from streams import MODEL, Streamed, Streams, cases
from swarm_processes import DATA, Swarm, running_swarm

STREAMS = 16
ROOM = 10.0  # seconds on top of what is promised, for a machine on which each process waits for its turn
FLAGS = ("--boundary", "f32", "--context-length", "256", "--max-requests", str(STREAMS))


Act = Callable[[list[str]], None]
Then = Callable[[Streams], Awaitable[None]]


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

    async def play(self, name: str, act: Act, then: Then | None = None) -> float:
        """Sixteen answers, and something that happens once all are under way.

        Args:
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
            await streams.have(STREAMS * 12)
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
        self.table.append(f"{name:<28} {seconds:6.2f} s until tokens came again, epoch {status['epoch']}")
        print(self.table[-1], flush=True)
        return seconds


@pytest.mark.timeout(600)
async def test_no_answer_ends_or_changes_when_stages_are_stopped_and_killed(tmp_path: Path) -> None:
    with running_swarm(tmp_path, DATA / MODEL, stages=3, standbys=3, bridge=FLAGS) as swarm:
        rounds = Rounds(swarm)
        await trio.to_thread.run_sync(lambda: swarm.wait_for_standbys(3))
        for place, word in enumerate(("head", "middle", "tail")):
            await stopped_and_woken(rounds, place, word)
        await leaves_in_order(rounds)
        for place, word in enumerate(("head", "middle", "tail")):

            def kill(names: list[str], place: int = place) -> None:
                swarm.stages[names[place]].kill()

            assert await rounds.play(f"{word} killed", kill) < 5 + ROOM, swarm.outputs()
        await neighbours_take_over(rounds)
        await nobody_covers_the_layers(rounds)


async def stopped_and_woken(rounds: Rounds, place: int, word: str) -> None:
    """A stopped stage is silent, not gone. When it wakes, its epoch is over, and it becomes a standby."""
    swarm, stopped = rounds.swarm, ""

    def stop(names: list[str]) -> None:
        nonlocal stopped
        stopped = names[place]
        swarm.stages[stopped].send(signal.SIGSTOP)

    assert await rounds.play(f"{word} stopped", stop) < 15 + ROOM, swarm.outputs()
    assert stopped not in await trio.to_thread.run_sync(rounds.names)
    swarm.stages[stopped].send(signal.SIGCONT)
    await trio.to_thread.run_sync(lambda: swarm.wait_for_standbys(3))


async def leaves_in_order(rounds: Rounds) -> None:
    """SIGTERM: the stage's standby takes its place before it ends, by itself and without an error."""
    swarm, leaver = rounds.swarm, ""

    def leave(names: list[str]) -> None:
        nonlocal leaver
        leaver = names[0]
        swarm.stages[leaver].send(signal.SIGTERM)

    assert await rounds.play("head leaves", leave) < 5 + ROOM, swarm.outputs()
    ended = await trio.to_thread.run_sync(lambda: swarm.stages[leaver].process.wait(20 + ROOM))
    assert ended == 0 and "its place is with another peer now" in swarm.stages[leaver].output
    swarm.start_stage(leaver)
    await trio.to_thread.run_sync(lambda: swarm.wait_for_standbys(3))


async def neighbours_take_over(rounds: Rounds) -> None:
    """Without a standby the neighbours of a lost stage share its layers, and load them."""
    swarm = rounds.swarm

    def kill(names: list[str]) -> None:
        assert len(names) == 3
        swarm.stages[names[1]].kill()

    assert await rounds.play("middle killed, no standby", kill) < 15 + ROOM, swarm.outputs()
    stages = (await trio.to_thread.run_sync(swarm.status))["stages"]
    assert len(stages) == 2
    assert all(stage["end"] - stage["first"] < 5 for stage in stages), "no peer has all layers"


async def nobody_covers_the_layers(rounds: Rounds) -> None:
    """With one peer left nothing is computed, though it could hold all layers: the answers wait and say for what."""
    swarm, lost = rounds.swarm, ""

    def kill(names: list[str]) -> None:
        nonlocal lost
        lost = names[1]
        swarm.stages[lost].kill()

    async def wait_and_mend(streams: Streams) -> None:
        def named(remarks: list[str]) -> bool:
            return bool(remarks) and "nobody can take over" in remarks[-1] and "1 of 2 stages" in remarks[-1]

        def silent() -> list[Streamed]:
            """Answers that were not complete when it happened, and have not been told why they wait."""
            return [a for a in streams.answers if not a.ended and not named(a.remarks)]

        with trio.move_on_after(20 + ROOM):
            while silent():
                await trio.sleep(0.1)
        assert not silent() and not all(a.ended for a in streams.answers), streams.answers
        status = await trio.to_thread.run_sync(swarm.status)
        assert status["state"] == "mending"
        async with httpx.AsyncClient() as client:
            body = {"model": status["model"], "prompt": "Once", "max_tokens": 4}
            refused = await client.post(f"{swarm.base_url}/completions", json=body)
        assert refused.status_code == 503 and "1 of 2 stages are here" in refused.text
        swarm.start_stage(lost)

    await rounds.play("tail killed, nobody left", kill, wait_and_mend)
