"""What users rely on beside the tokens: own chunks only, a bridge out of the data path, a ring that comes back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest
import trio
from swarm_in_process import InProcessSwarm, start_relay, swarm_in_process
from swarm_processes import DATA, expected_greedy
from test_swarm_exact import complete, text_of

from kvasir_peer.models.gguf import GgufFile
from kvasir_peer.models.manifest import build_manifest
from kvasir_peer.models.slices import StageSlice, chunks_of

MODEL = "stories260K.gguf"
RING = {"boundary": "f32", "context_length": 256}


def long_case() -> dict:
    """The case with the longest prompt: it is still being computed when something happens to the ring."""
    return max(expected_greedy(MODEL), key=lambda case: len(case["prompt_ids"]))


async def answers(swarm: InProcessSwarm, case: dict, count: int, texts: list[str]) -> None:
    """``count`` answers at once, appended as they are complete."""

    async def one() -> None:
        texts.append(await trio.to_thread.run_sync(complete, swarm.base_url, swarm.model, case))

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(one)


@pytest.mark.timeout(180)
async def test_each_store_holds_its_slice_and_nothing_else_and_the_bridge_stays_out_of_the_way(
    tmp_path: Path,
) -> None:
    with GgufFile.open(DATA / MODEL) as gguf:
        manifest = build_manifest(gguf)
    case = expected_greedy(MODEL)[0]
    async with swarm_in_process(
        tmp_path, DATA / MODEL, stages=3, boundary="f16", context_length=256
    ) as swarm:
        before = await swarm.status()
        places = {stage["peer"]: (stage["first"], stage["end"]) for stage in before["stages"]}
        found = {}
        for index in range(3):
            home = tmp_path / f"stage{index}"
            files = [f for f in (home / "store" / "chunks").rglob("*") if f.is_file()]
            found[index] = {(file.name, file.stat().st_size) for file in files}
        wanted = [
            {(chunk.hash.hex(), chunk.size) for chunk in chunks_of(manifest, StageSlice(first, end, 5))}
            for first, end in places.values()
        ]
        assert sorted(map(sorted, found.values())) == sorted(map(sorted, wanted))
        assert {stage["figures"]["path"] for stage in before["stages"] if stage["figures"]} <= {"", "relayed"}
        await trio.to_thread.run_sync(complete, swarm.base_url, swarm.model, case)
        after = await swarm.status()
        tokens = after["requests"]["tokens"] - before["requests"]["tokens"]
        spent = after["bridge"]["ring_bytes"] - before["bridge"]["ring_bytes"]
        assert tokens == len(case["ids"])
        assert spent / tokens < 1024


@pytest.mark.timeout(180)
async def test_as_many_requests_wait_as_the_bridge_was_told_and_no_more(tmp_path: Path) -> None:
    answers: list[httpx.Response] = []
    prompt = long_case()["prompt"]
    async with (
        swarm_in_process(tmp_path, DATA / MODEL, stages=2, max_requests=1, max_queue=6, **RING) as swarm,
        httpx.AsyncClient(base_url=swarm.base_url, timeout=120) as client,
        trio.open_nursery() as nursery,
    ):

        async def ask() -> None:
            body = {"model": swarm.model, "prompt": prompt, "max_tokens": 60}
            answers.append(await client.post("/completions", json=body))

        for _ in range(24):
            nursery.start_soon(ask)
    taken = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(taken) >= 7 and refused and len(taken) + len(refused) == 24
    for answer in refused:
        assert answer.json()["error"]["message"].startswith("6 requests wait already for one of 1 places")
        assert int(answer.headers["Retry-After"]) >= 1


@pytest.mark.timeout(240)
async def test_an_engine_that_is_killed_comes_back_and_the_answers_go_on(tmp_path: Path) -> None:
    case = long_case()
    async with swarm_in_process(tmp_path, DATA / MODEL, stages=3, **RING) as swarm:
        for round_number in range(2):
            epoch = (await swarm.status())["epoch"]
            engines = [
                child
                for child in psutil.Process().children()
                if "kvasir_peer.engines.process" in " ".join(child.cmdline())
            ]
            assert len(engines) == 3
            texts: list[str] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answers, swarm, case, 4, texts)
                while (await swarm.status())["requests"]["tokens"] < 20 + 256 * round_number:
                    await trio.sleep(0.01)
                os.kill(engines[round_number].pid, signal.SIGKILL)
            assert texts == [text_of(MODEL, case["ids"])] * 4
            status = await swarm.wait_until_serving(after_epoch=epoch)
            assert status["requests"]["failed"] == 0


@pytest.mark.timeout(240)
async def test_everything_passes_the_relay_and_the_swarm_comes_back_with_it(tmp_path: Path) -> None:
    case = long_case()
    async with swarm_in_process(tmp_path, DATA / MODEL, stages=3, **RING) as swarm:
        texts: list[str] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answers, swarm, case, 2, texts)
            while (await swarm.status())["requests"]["tokens"] < 20:
                await trio.sleep(0.01)
            swarm.relay.kill()
            with trio.fail_after(30):
                while (status := await swarm.status())["state"] == "serving":
                    await trio.sleep(0.05)
            stopped = (await swarm.status())["requests"]["tokens"]
            await trio.sleep(1.5)  # without its relay nothing may move
            status = await swarm.status()
            assert status["requests"]["tokens"] == stopped and status["state"] != "serving"
            swarm.relay, _ = await trio.to_thread.run_sync(start_relay, tmp_path, swarm.relay_port)
            await swarm.wait_until_serving(after_epoch=status["epoch"] - 1)
        assert texts == [text_of(MODEL, case["ids"])] * 2
