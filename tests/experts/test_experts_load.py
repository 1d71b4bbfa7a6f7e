"""Layer 1 of scaling, with a real worker: shadows, load, cooling, calm, and a poll that stalls."""

from __future__ import annotations

import dataclasses

import trio
from helpers_experts import ALL_LAYERS, MapHolder, cases, coordinator, split, until, worker

from kvasir_peer.experts.dispatch_policy import DEFAULT_SETTINGS

# As by default, but quick: a reading each 50 ms, counting for 300 ms; a success counts for half a second.
QUICK = dataclasses.replace(
    DEFAULT_SETTINGS, poll_period=0.05, poll_deadline=0.2, reading_ttl=0.3, serve_ttl=0.5, attach_grace=30.0
)


async def test_calm_load_cooling_calm_and_a_second_surge_by_the_warm_worker() -> None:
    busy = 0
    swarm = MapHolder()
    case = cases()[0]
    async with (
        worker(swarm, split(1)[0], "onnx") as one,
        coordinator(swarm, settings=QUICK, load=lambda: busy, expert_floor_ms=2.0) as running,
    ):
        dispatcher = running.dispatcher

        async def text(request: int, count: int = 10) -> int:
            """Pairs that the worker computed for one text, which is the expected one."""
            before = dispatcher.statistics().remote_pairs
            running.submit(request, case, count)
            await running.texts.wait([request])
            assert running.texts.tokens[request] == case["ids"][:count]
            return dispatcher.statistics().remote_pairs - before

        await running.wire(one)
        assert dispatcher.statistics().shadows >= 1, "its first try was nobody's row"
        assert dispatcher.mode == "local" and dispatcher.layers() == ()
        assert await text(1) == 0, "calm: everything is local"
        busy = 2
        await until(lambda: dispatcher.mode == "load")
        assert dispatcher.layers() == ALL_LAYERS
        assert await text(2) > 0, "under load a proven worker shares the rows"
        busy = 0
        await until(lambda: dispatcher.mode != "load")
        await until(lambda: dispatcher.mode == "local")
        assert await text(3) == 0, "calm again: local, and the worker stays warm"
        (figures,) = dispatcher.statistics().workers
        assert figures.attached and figures.proven
        shadows = dispatcher.statistics().shadows
        busy = 2
        await until(lambda: dispatcher.mode == "load")
        assert await text(4) > 0
        assert dispatcher.statistics().shadows == shadows, "no new try was needed"


async def test_a_stalled_poll_of_the_own_slots_delays_no_token_and_ages_out() -> None:
    swarm = MapHolder()
    stall = trio.Event()
    case = cases()[0]
    async with coordinator(swarm, settings=QUICK, load=lambda: 4, stall=stall) as running:
        await until(lambda: running.dispatcher.mode == "load")
        running.submit(1, case, 30)
        await running.texts.wait_tokens(1, 3)
        stall.set()
        await running.texts.wait([1], 30)
        assert running.texts.tokens[1] == case["ids"][:30]
        await until(lambda: running.dispatcher.mode == "local", 5)
