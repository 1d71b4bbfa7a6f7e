"""How soon a liar falls, with everything that stands between it and the verdict; a hundred lives for each promise."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest
import trio
from helpers_shell import EXPERTS, SmallEngine, in_virtual_time, shell, sums_of, wrong_places

RUNS = 100
AT_ONCE = 20  # workers of one coordinator, each with an expert of its own
PROMPTS = (4, 1500)  # tokens made for each request, positions of its prompt: passes of many rows
LIES = ("noise", "zeros", "other layer")


class Liar(SmallEngine):
    """A worker that computes what it should up to a row of its life, and lies from there on."""

    def __init__(self, lie: str, turns_at: int, seed: int) -> None:
        super().__init__()
        self.lie, self.turns_at = lie, turns_at
        self.rows = self.frames = 0
        self.rng = np.random.default_rng(seed)
        self.caught_at: tuple[int, int] | None = None  # rows, frames

    def sums(self, layer: int, ids: np.ndarray, weights: np.ndarray, x: np.ndarray) -> np.ndarray:
        true = sums_of(layer, ids, weights, x)
        first, self.rows = self.rows, self.rows + len(x)
        self.frames += 1
        lying = np.arange(first, self.rows) >= self.turns_at
        if self.lie == "zeros":
            false = np.zeros_like(true)
        elif self.lie == "noise":
            false = (true * (1 + 0.03 * self.rng.standard_normal(true.shape))).astype(np.float32)
        else:
            false = sums_of(1, ids, weights, x)
        return np.where(lying[:, None], false, true)


def lives(turns: Iterable[int], limit: int) -> list[Liar]:
    """Let liars live until they are caught, or have lied for more rows than ``limit``."""
    liars = [Liar(LIES[seed % 3], turn, seed) for seed, turn in enumerate(turns)]

    async def main(group: list[Liar]) -> None:
        by_name = {f"w{i}": liar for i, liar in enumerate(group)}
        over = trio.Event()

        def done(liar: Liar) -> bool:
            return liar.caught_at is not None or liar.rows > liar.turns_at + limit

        def caught(name: str) -> None:
            liar = by_name[name]
            assert liar.rows > liar.turns_at, "it had not lied yet"
            liar.caught_at = (liar.rows, liar.frames)
            over.set()

        workers = {name: (liar, (i, i + 1)) for i, (name, liar) in enumerate(by_name.items())}
        async with shell(workers, caught, asked=PROMPTS):
            while not all(map(done, group)):
                over = trio.Event()
                with trio.move_on_after(0.2):
                    await over.wait()

    for first in range(0, len(liars), AT_ONCE):
        group = liars[first : first + AT_ONCE]
        in_virtual_time(lambda group=group: main(group))
    return liars


def fell_within(liars: list[Liar], rows: int) -> int:
    """How many had lied in at most so many rows, all that they had answered counted, when they were out."""
    return sum(one.caught_at is not None and one.caught_at[0] - one.turns_at <= rows for one in liars)


def test_one_that_lies_from_the_start_falls_in_its_first_frame() -> None:
    liars = lives([0] * RUNS, 64)
    assert sum(one.caught_at is not None and one.caught_at[1] == 1 for one in liars) >= 98


def test_one_that_turns_between_its_rows_100_and_900_falls_within_64_rows() -> None:
    turns = [random.Random(seed).randrange(100, 900) for seed in range(RUNS)]
    assert fell_within(lives(turns, 64), 64) >= 98


def test_one_that_turns_later_falls_within_250_rows() -> None:
    turns = [random.Random(seed).randrange(1000, 1200) for seed in range(RUNS)]
    assert fell_within(lives(turns, 250), 250) >= 98


@pytest.mark.parametrize("lie", LIES)
def test_what_came_of_a_liars_rows_is_made_again(lie: str) -> None:
    """Its unchecked rows were used; what is handed out after the catch is what an honest worker would have made."""
    liar = Liar(lie, 200, 3)
    handed_out: dict[int, int] = {}

    async def main() -> None:
        fallen = trio.Event()

        def caught(name: str) -> None:
            handed_out.update({request: len(tokens) for request, tokens in running.tokens.items()})
            fallen.set()

        async with shell({"w": (liar, (0, EXPERTS))}, caught, dtype="f32") as running:
            await fallen.wait()
            core = running.coordinator
            assert core.rewound_requests > 0 and core.rewound_tokens > 0
            while min(len(running.tokens[request]) for request in handed_out) < 150:
                await trio.sleep(0.05)
            for request, before in handed_out.items():
                wrong = wrong_places(request, 3, running.tokens[request][:150])
                assert all(place < before for place in wrong)

    in_virtual_time(main)


@pytest.mark.parametrize("lie", LIES)
def test_in_strict_mode_two_workers_do_each_row_and_a_lie_changes_no_token(lie: str) -> None:
    liar, honest = Liar(lie, 300, 3), SmallEngine()
    fallen: list[str] = []

    async def main() -> None:
        workers = {"liar": (liar, (0, EXPERTS)), "honest": (honest, (0, EXPERTS))}
        async with shell(workers, fallen.append, mode="strict", dtype="f32") as running:
            while not fallen or running.dispatcher.statistics().remote_pairs < 2000:
                await trio.sleep(0.05)
            figures = running.dispatcher.statistics()
            assert fallen == ["liar"] and liar.rows > 300
            assert figures.twice > 10
            for request, tokens in running.tokens.items():
                assert wrong_places(request, 3, tokens) == []
            given = {peer: (rows, checked) for peer, rows, checked in figures.work}
            assert min(given["liar"]) > 200 and min(given["honest"]) > 1500
            assert given["honest"][0] <= given["honest"][1], "every row that was used was computed twice"

    in_virtual_time(main)


def test_two_workers_of_one_liar_are_caught_by_samples_though_they_agree() -> None:
    fallen: list[str] = []

    async def main() -> None:
        workers = {name: (Liar("zeros", 300, 3), (0, EXPERTS)) for name in ("one", "other")}
        async with shell(workers, fallen.append, mode="strict", dtype="f32") as running:
            while len(fallen) < 2:
                await trio.sleep(0.05)
            assert running.coordinator.rewound_requests > 0
            assert all(liar.rows < 300 + 128 for liar, _ in workers.values())

    in_virtual_time(main)
