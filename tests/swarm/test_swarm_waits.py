"""What does not end by itself: an engine that hangs, and a ring that nobody completes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest
import trio
from streams import MODEL, Streams, cases
from swarm_in_process import InProcessSwarm, swarm_in_process
from swarm_processes import DATA

from kvasir_peer.ring import stage, stage_market


def engines() -> list[psutil.Process]:
    """The engine processes of this process's stages."""
    return [
        child
        for child in psutil.Process().children()
        if "kvasir_peer.engines.process" in " ".join(child.cmdline())
    ]


@pytest.mark.timeout(240)
async def test_a_hanging_engine_is_started_anew_and_a_ring_that_nobody_completes_ends_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "HANG_SECONDS", 2.0)
    monkeypatch.setattr(stage_market, "GIVE_UP_SECONDS", 3.0)
    async with swarm_in_process(
        tmp_path, DATA / MODEL, stages=2, boundary="f32", context_length=256
    ) as swarm:
        await a_hanging_engine_is_started_anew(swarm)
        await a_ring_that_nobody_completes_ends_its_answers(swarm)


async def a_hanging_engine_is_started_anew(swarm: InProcessSwarm) -> None:
    """Its agent answers every ping all the while, so nobody else can notice."""
    epoch = (await swarm.status())["epoch"]
    streams = Streams(swarm.base_url, swarm.model, cases(8))
    hanging = engines()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(streams.run)
        await streams.have(80)
        os.kill(hanging.pid, signal.SIGSTOP)
    assert all(answer.exact for answer in streams.answers)
    assert not hanging.is_running() or hanging.status() == psutil.STATUS_ZOMBIE
    status = await swarm.wait_until_serving(after_epoch=epoch)
    assert {stage["peer"] for stage in status["stages"]} and len(status["stages"]) == 2
    assert status["requests"]["failed"] == 0


async def a_ring_that_nobody_completes_ends_its_answers(swarm: InProcessSwarm) -> None:
    """The answers wait, say for what, and end with that as their error; who asks later hears it at once."""
    streams = Streams(swarm.base_url, swarm.model, cases(2))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(streams.run)
        await streams.have(10)
        swarm.scopes["stage1"].cancel()
    for answer in streams.answers:
        assert answer.error is not None and "nobody can take over" in answer.error["message"]
        assert answer.expected.startswith(answer.text) and answer.text
        assert any("nobody can take over" in remark for remark in answer.remarks)
    async with httpx.AsyncClient(timeout=20) as client:
        asked = {"model": swarm.model, "prompt": "Once", "max_tokens": 4}
        refused = await client.post(f"{swarm.base_url}/completions", json=asked)
    assert refused.status_code == 503 and "1 of 2 stages are here" in refused.text
    assert "retry-after" in refused.headers
