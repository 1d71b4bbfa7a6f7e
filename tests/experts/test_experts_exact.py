"""Tokens are the expected ones however many experts are remote, and whatever workers do."""

from __future__ import annotations

from contextlib import AsyncExitStack

from helpers_experts import (
    MapHolder,
    cases,
    coordinator,
    dispatching_stage,
    entry,
    split,
    until,
    worker,
)

from kvasir_peer.experts.dispatch_map import MapDispatcher
from kvasir_peer.wire.membership import FLAG_OUTPUT, compose
from kvasir_peer.wire.sampling import GREEDY

COUNT = 16  # tokens of each text


async def test_exact_with_none_some_and_all_experts_remote_and_both_engines_among_workers() -> None:
    chosen = cases()[:4]
    swarm = MapHolder()
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(worker(swarm, ranges, kind))
            for ranges, kind in zip(split(2), ("torch", "onnx"), strict=True)
        ]
        running = await stack.enter_async_context(coordinator(swarm, remote="all"))
        request = 0
        shares = []
        for wired in (0, 1, 2):
            if wired:
                await running.wire(*workers[:wired])
            before = running.dispatcher.statistics()
            requests = range(request, request + len(chosen))
            for number, case in zip(requests, chosen, strict=True):
                running.submit(number, case, COUNT)
            await running.texts.wait(requests)
            for number, case in zip(requests, chosen, strict=True):
                assert running.texts.tokens[number] == case["ids"][:COUNT]
            after = running.dispatcher.statistics()
            remote = after.remote_pairs - before.remote_pairs
            local = after.local_pairs - before.local_pairs
            shares.append(remote / max(1, remote + local))
            request += len(chosen)
        assert shares[0] == 0 and 0.1 < shares[1] < 0.9 and shares[2] > 0.8  # a busy machine may hedge
        assert not running.caught and after.checks >= 2


async def test_exact_from_a_ring_of_three_stages_that_dispatch() -> None:
    swarm = MapHolder()
    places = [(0, 2), (2, 4), (4, 5)]
    case = cases()[0]
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(worker(swarm, ranges, kind))
            for ranges, kind in zip(split(2), ("torch", "onnx"), strict=True)
        ]
        stages = [
            await stack.enter_async_context(dispatching_stage(index, places)) for index in range(len(places))
        ]
        value = swarm.change(
            workers=tuple(entry(one) for one in workers),
            dispatchers=tuple(MapDispatcher(stage.peer) for stage in stages),
        )
        for stage in stages:
            stage.dispatcher.follow(value)
        await until(
            lambda: (
                all(w.proven for s in stages for w in s.dispatcher.statistics().workers)
                and all(len(s.dispatcher.statistics().workers) == 2 for s in stages)
            )
        )
        tokens, computed = list(case["prompt_ids"]), 0
        for _ in range(COUNT):
            last = len(tokens) - 1
            rows = [
                (1, 0, 1, p, tokens[p], (FLAG_OUTPUT if p == last else 0), 3)
                for p in range(computed, len(tokens))
            ]
            membership, boundary = compose(rows, [GREEDY]).encode(), b""
            for stage in stages:
                buffer = await stage.engine.take_buffer()
                stage.engine.buffer(buffer)[: len(boundary)] = boundary
                layers = stage.dispatcher.layers()
                assert layers == stage.dispatcher.config.layers
                pending = await stage.engine.submit(buffer, membership, len(boundary), layers)
                done = await pending.result()
                boundary = bytes(stage.engine.buffer(buffer)[: done.boundary_bytes])
                stage.engine.free_buffer(buffer)
            computed = len(tokens)
            tokens.append(done.outputs[0].token)
        figures = [stage.dispatcher.statistics() for stage in stages]
    assert tokens[len(case["prompt_ids"]) :] == case["ids"][:COUNT]
    assert all(f.remote_pairs > 0 and not f.caught for f in figures)
