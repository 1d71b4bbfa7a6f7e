"""Answers outlive the stages that compute them: real processes are killed and stopped while sixteen answers stream.

One swarm goes through all of it, with three stages and a standby for each. The times and their spread are printed;
what is asserted of them leaves room for a machine that is busy with other things. Many kills, for a percentile:
``python bench/ring.py --only recovery``.
"""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest
import trio
from rounds import FLAGS, Rounds
from streams import MODEL, Streamed, Streams
from swarm_processes import DATA, running_swarm

ROOM = 10.0  # seconds on top of what is promised, for a machine on which each process waits for its turn
PLACES = ("head", "middle", "tail")
# What belongs together when the spread is told.
KILLED = "kill -9, its standby loaded"
STOPPED = "SIGSTOP, its standby loaded"
LEFT = "SIGTERM, its standby loaded"
COLD = "kill -9, nobody has its layers loaded"


@pytest.mark.timeout(600)
async def test_no_answer_ends_or_changes_when_stages_are_stopped_and_killed(tmp_path: Path) -> None:
    with running_swarm(tmp_path, DATA / MODEL, stages=3, standbys=3, bridge=FLAGS) as swarm:
        rounds = Rounds(swarm)
        await trio.to_thread.run_sync(lambda: swarm.wait_for_standbys(3))
        for place, word in enumerate(PLACES):
            await stopped_and_woken(rounds, place, word)
        await leaves_in_order(rounds)
        for place, word in enumerate(PLACES):

            def kill(names: list[str], place: int = place) -> None:
                swarm.stages[names[place]].kill()

            assert await rounds.play(KILLED, f"{word} killed", kill) < 5 + ROOM, swarm.outputs()
        await neighbours_take_over(rounds)
        await nobody_covers_the_layers(rounds)
        print("spread, least / median / most:", *rounds.spread(), sep="\n  ", flush=True)


async def stopped_and_woken(rounds: Rounds, place: int, word: str) -> None:
    """A stopped stage is silent, not gone. When it wakes, its epoch is over, and it becomes a standby."""
    swarm, stopped = rounds.swarm, ""

    def stop(names: list[str]) -> None:
        nonlocal stopped
        stopped = names[place]
        swarm.stages[stopped].send(signal.SIGSTOP)

    assert await rounds.play(STOPPED, f"{word} stopped", stop) < 15 + ROOM, swarm.outputs()
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

    assert await rounds.play(LEFT, "head leaves", leave) < 5 + ROOM, swarm.outputs()
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

    assert await rounds.play(COLD, "middle killed, no standby", kill) < 15 + ROOM, swarm.outputs()
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

    await rounds.play("until somebody comes", "tail killed, nobody left", kill, wait_and_mend)
