"""Nothing that a worker does changes a token, or holds one up for longer than a deadline."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack

import msgspec
import numpy as np
import pytest
import trio
from helpers_experts import (
    N_EMBD,
    N_LAYER,
    MapHolder,
    Running,
    Worker,
    cases,
    coordinator,
    entry,
    split,
    until,
    worker,
)

from kvasir_peer.errors import RefusedError
from kvasir_peer.experts.dispatch_map import MapDispatcher
from kvasir_peer.experts.expert_server import ExpertServer
from kvasir_peer.experts.worker_health import MAX_DEADLINE
from kvasir_peer.experts.worker_link import open_worker_link
from kvasir_peer.wire import experts

STREAMS, COUNT = 8, 12
ROOM = 2.0  # seconds on top of a deadline, on a machine that other tests keep busy


class Faulty(ExpertServer):
    """A worker whose answers go wrong when the test says how."""

    fault = ""
    answers = 0

    async def _compute(self, link, bounds, message, buffer):
        if self.fault == "another layer's weights":
            message = msgspec.structs.replace(message, layer=(message.layer + 1) % N_LAYER)
        await super()._compute(link, bounds, message, buffer)

    async def answer(self, link, message, sums):
        self.answers += 1
        rows = np.frombuffer(sums, "<f4").reshape(message.rows, N_EMBD).copy()
        if self.fault == "nan":
            rows[0, 3] = np.nan
        elif self.fault == "shape":
            rows = rows[:, :-1]
        elif self.fault == "rows":
            message = experts.Sums(message.id, message.rows + 1, message.held_ms)
        elif self.fault == "zeros":
            rows[:] = 0
        elif self.fault == "noise":
            rows *= 1 + 0.02 * np.random.default_rng(self.answers).standard_normal(rows.shape)
        elif self.fault == "huge":
            rows *= 1e6
        elif self.fault == "slow":
            await trio.sleep(0.3)
        elif self.fault == "late":
            await trio.sleep(MAX_DEADLINE + 0.5)
        elif self.fault == "lost":
            link.close()
            return
        data = rows.astype("<f4").tobytes()
        await super().answer(link, message, data)
        if self.fault == "twice":
            await super().answer(link, message, data)


Event = Callable[[Worker], Awaitable[None]]


def fault(name: str) -> Event:
    async def cause(one: Worker) -> None:
        assert isinstance(one.server, Faulty)
        one.server.fault = name

    return cause


async def stop(one: Worker) -> None:
    os.kill(one.engine.statistics().pid, signal.SIGSTOP)


async def kill(one: Worker) -> None:
    os.kill(one.engine.statistics().pid, signal.SIGKILL)


def usable(running: Running, one: Worker) -> bool:
    figures = next((w for w in running.dispatcher.statistics().workers if w.peer == one.peer), None)
    return figures is not None and figures.attached and figures.breaker == "closed"


async def mended(running: Running, one: Worker, numbers: Iterator[int]) -> None:
    """Until a worker takes part again. Its breaker closes with a good answer only, so it is given something to do."""
    with trio.fail_after(90):
        while not usable(running, one):
            number = next(numbers)
            running.submit(number, cases()[0], 8)
            await running.texts.wait([number])
            await trio.sleep(0.1)


@pytest.mark.timeout(400)
async def test_eight_texts_stay_the_same_whatever_workers_do() -> None:
    events: list[tuple[str, Event]] = [
        ("twice", fault("twice")),
        ("slow", fault("slow")),
        ("nan", fault("nan")),
        ("shape", fault("shape")),
        ("late", fault("late")),
        ("lost", fault("lost")),
        ("stopped", stop),
        ("killed", kill),
    ]
    chosen = (cases() * STREAMS)[:STREAMS]
    swarm = MapHolder()
    async with AsyncExitStack() as stack:
        halves = split(2)
        # One of each half and kind would do; the second of each is there so that hedges have somewhere to go.
        workers = [
            await stack.enter_async_context(worker(swarm, halves[i % 2], "onnx", Faulty)) for i in range(4)
        ]
        running = await stack.enter_async_context(coordinator(swarm, remote="all"))
        await running.wire(*workers)
        first, more = 0, itertools.count(1_000_000)
        gone: list[Worker] = []
        for turn, (name, cause) in enumerate(events):
            one = workers[turn % 3]
            for each in workers:
                if each not in gone:
                    await mended(running, each, more)  # it may still be out for what was done to it before
            if cause in (stop, kill):
                gone.append(one)
            before = running.dispatcher.statistics().remote_pairs
            requests = range(first, first + STREAMS)
            first += STREAMS
            for number, case in zip(requests, chosen, strict=True):
                running.submit(number, case, COUNT)
            await running.texts.wait_tokens(requests[0], 3)
            await cause(one)
            await running.texts.wait(requests)
            for number, case in zip(requests, chosen, strict=True):
                assert running.texts.tokens[number] == case["ids"][:COUNT], name
                gaps = np.diff(running.texts.times[number])
                assert gaps.max() < MAX_DEADLINE + ROOM, f"{name} held a token up for {gaps.max():.2f} s"
            assert running.dispatcher.statistics().remote_pairs > before, f"{name}: nothing was remote"
            one.server.fault = ""
            if name == "stopped":
                os.kill(one.engine.statistics().pid, signal.SIGCONT)
        figures = running.dispatcher.statistics()
    assert figures.refused_sums >= 2, "an answer with NaN and one of the wrong shape were sent"
    assert figures.hedges + figures.fallbacks > 0


@pytest.mark.parametrize("name", ["zeros", "noise"])
async def test_a_liar_falls_in_its_first_frame_and_honest_workers_of_both_engines_do_not(name) -> None:
    swarm = MapHolder("f16")
    async with AsyncExitStack() as stack:
        halves = split(2)
        honest = await stack.enter_async_context(worker(swarm, halves[0], "torch"))
        running = await stack.enter_async_context(coordinator(swarm, remote="all"))
        liar = await stack.enter_async_context(worker(swarm, halves[1], "onnx", F16Liar))
        liar.server.fault = name
        await running.wire(honest, liar, proven=False)
        running.submit(1, cases()[0], COUNT)
        await running.texts.wait([1])
        await until(lambda: running.caught)
        (caught,) = running.caught
        assert caught[0] == liar.peer
        figures = running.dispatcher.statistics()
        assert [w.peer for w in figures.workers] == [honest.peer] and figures.workers[0].proven
        assert liar.server.answers <= 3


class F16Liar(ExpertServer):
    fault = ""
    answers = 0

    async def answer(self, link, message, sums):
        self.answers += 1
        rows = np.frombuffer(sums, "<f2").reshape(message.rows, N_EMBD).astype(np.float32)
        if self.fault == "zeros":
            rows[:] = 0
        elif self.fault == "noise":
            rows *= 1 + 0.02 * np.random.default_rng(self.answers).standard_normal(rows.shape)
        await super().answer(link, message, rows.astype("<f2").tobytes())


@pytest.mark.parametrize("mode", ["strict", "sampled"])
async def test_a_worker_that_turns_is_caught_and_in_strict_mode_nothing_it_says_counts(mode) -> None:
    chosen = (cases() * STREAMS)[:STREAMS]
    swarm = MapHolder()
    async with AsyncExitStack() as stack:
        halves = split(2)
        workers = [
            await stack.enter_async_context(worker(swarm, halves[i], "onnx", Faulty)) for i in range(2)
        ]
        running = await stack.enter_async_context(coordinator(swarm, remote="all", mode=mode))
        await running.wire(*workers)
        for number, case in enumerate(chosen):
            running.submit(number, case, 30)
        await running.texts.wait_tokens(0, 4)
        workers[1].server.fault = "another layer's weights"
        await running.texts.wait(range(STREAMS))
        number = STREAMS
        while not running.caught and number < 10 * STREAMS:  # it may have been out for being slow
            running.submit(number, chosen[0], 30)
            await running.texts.wait([number])
            number += 1
        assert [peer for peer, _ in running.caught] == [workers[1].peer]
        if mode == "strict":
            for number, case in enumerate(chosen):
                assert running.texts.tokens[number] == case["ids"][:30]
        else:
            assert running.coordinator.rewound_requests > 0 or number > STREAMS
            for number in range(STREAMS):
                assert len(running.texts.tokens[number]) == 30


async def test_rows_of_strangers_are_refused() -> None:
    swarm = MapHolder()
    async with worker(swarm, split(2)[0]) as one, coordinator(swarm) as running:
        value = swarm.change(workers=(entry(one),), dispatchers=(MapDispatcher("12D3KooWSomebodyElse"),))
        with pytest.raises(RefusedError, match="not in the dispatch map"):
            await open_worker_link(
                running.node, one.peer, tuple(one.node.addresses()), "model", value.version, value.bounds()
            )
        assert one.server.statistics().refused == 1
