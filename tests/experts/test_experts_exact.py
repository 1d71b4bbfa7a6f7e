"""Tokens are the expected ones however many experts are remote, and whatever workers do."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from helpers_experts import MapHolder, cases, coordinator, split, worker

COUNT = 16  # tokens of each text


@pytest.mark.parametrize("engine", ["onnx", "torch"])
async def test_exact_with_none_some_and_all_experts_remote_and_both_engines_among_workers(engine) -> None:
    chosen = cases()[:4]
    swarm = MapHolder()
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(worker(swarm, ranges, kind))
            for ranges, kind in zip(split(2), ("torch", "onnx"), strict=True)
        ]
        running = await stack.enter_async_context(coordinator(swarm, engine=engine, remote="all"))
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
