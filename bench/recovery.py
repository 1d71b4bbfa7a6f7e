"""How long answers pause when a stage is lost: a real swarm, sixteen answers under way, kill after kill.

The rounds are those of ``tests/swarm/test_swarm_kill.py``: every peer is a process, each text must be the unbroken one,
and the time runs from the kill until the first token after the longest pause, so what is computed again is in it.
"""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import trio
from rows import Rows

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "swarm"))

from rounds import FLAGS, STREAMS, Rounds, percentile  # noqa: E402
from swarm_processes import Swarm, running_swarm  # noqa: E402

STORIES = ROOT / "tests" / "data" / "stories260K.gguf"
PLACES = ("head", "middle", "tail")
MANY = 9  # of fewer pauses a percentile says nothing beside the worst
GOAL, STOPPED_GOAL = 5.0, 15.0  # seconds, on top of what is computed again


async def recovery(rows: Rows, quick: bool) -> None:
    """Kills with a loaded standby in turn at each place, stops, and kills where nobody has the layers loaded."""
    with tempfile.TemporaryDirectory() as folder, _swarm(folder, 3, 3) as swarm:
        rounds = Rounds(swarm)
        for number in range(9 if quick else 20):
            await _lose(rounds, "kill -9", PLACES[number % 3])
        for place in PLACES[:1] if quick else PLACES:
            await _lose(rounds, "SIGSTOP", place)
    _add(rows, "kill -9, standby loaded", _times(rounds, "kill -9"), GOAL)
    for place in PLACES:
        times = [each.seconds for each in rounds.played if each.name == f"{place}: kill -9"]
        rows.add(f"kill -9, standby loaded: {place}, worst", max(times), "s")
    _add(rows, "SIGSTOP, standby loaded", _times(rounds, "SIGSTOP"), STOPPED_GOAL)
    with tempfile.TemporaryDirectory() as folder, _swarm(folder, 5, 0) as swarm:
        rounds = Rounds(swarm)
        for place in (2, 0, 2):  # of five, four and three stages; two are left
            await rounds.play(
                "cold", f"stage {place + 1} killed, cold", lambda names, p=place: _kill(swarm, names[p])
            )
    _add(rows, "kill -9, nobody has its layers loaded", _times(rounds, "cold"))


def _swarm(folder: str, stages: int, standbys: int):  # type: ignore[no-untyped-def]
    return running_swarm(Path(folder), STORIES, stages=stages, standbys=standbys, bridge=FLAGS)


def _kill(swarm: Swarm, name: str) -> None:
    swarm.stages[name].kill()


async def _lose(rounds: Rounds, how: str, place: str) -> None:
    """Lose the stage at a place in the middle of the answers; afterwards its process stands by."""
    swarm, lost = rounds.swarm, ""
    await trio.to_thread.run_sync(lambda: swarm.wait_for_standbys(3))

    def act(names: list[str]) -> None:
        nonlocal lost
        lost = names[PLACES.index(place)]
        if how == "SIGSTOP":
            swarm.stages[lost].send(signal.SIGSTOP)
        else:
            _kill(swarm, lost)

    await rounds.play(how, f"{place}: {how}", act)
    if how == "SIGSTOP":
        swarm.stages[lost].send(signal.SIGCONT)
    else:
        swarm.start_stage(lost)


def _times(rounds: Rounds, group: str) -> list[float]:
    return [each.seconds for each in rounds.played if each.group == group]


def _add(rows: Rows, name: str, times: Sequence[float], goal: float | None = None) -> None:
    """Median and worst of some pauses, and the 95th percentile of many; the goal counts for it, replay included."""
    name = f"{name}, {len(times)} x"
    rows.add(f"{name}: median until {STREAMS} streams go on", statistics.median(times), "s")
    held = [("worst", max(times))]
    if len(times) >= MANY:
        held.insert(0, ("95th percentile", percentile(times, 0.95)))
    for place, (word, value) in enumerate(held):
        if goal is not None and place == 0:
            rows.add(f"{name}: {word}", value, "s", f"<= {goal:g} + replay", value <= goal)
        else:
            rows.add(f"{name}: {word}", value, "s")
