"""What a bridge tells of a real ring is what that ring did."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import httpx
import openai
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from swarm_in_process import InProcessSwarm, swarm_in_process
from swarm_processes import DATA

from kvasir_peer.ring.measurements import Measurements

REQUESTS, TOKENS = 4, 24
SLACK = 0.005  # seconds; how far clocks may be off that are the same clock, behind unequal ways


def ask(swarm: InProcessSwarm, n: int) -> int:
    """Completion tokens of one request."""
    client = openai.OpenAI(base_url=swarm.base_url, api_key="none", timeout=90, max_retries=0)
    answer = client.completions.create(
        model=swarm.model, prompt=f"Once upon a time there were {n} cats", max_tokens=TOKENS, temperature=0
    )
    return answer.usage.completion_tokens


async def pages(swarm: InProcessSwarm, *paths: str) -> list[httpx.Response]:
    """Pages of the bridge."""
    async with httpx.AsyncClient(base_url=swarm.base_url.removesuffix("/v1"), timeout=20) as client:
        return [await client.get(path) for path in paths]


@pytest.mark.timeout(240)
async def test_status_timeline_and_metrics_tell_what_the_ring_did(tmp_path: Path) -> None:
    async with swarm_in_process(tmp_path, DATA / "stories260K.gguf", stages=3) as swarm:
        counts: list[int] = []

        async def one(n: int) -> None:
            counts.append(await trio.to_thread.run_sync(ask, swarm, n))

        async with trio.open_nursery() as nursery:
            for n in range(REQUESTS):
                nursery.start_soon(one, n)
        model = f"/api/ring/{swarm.model}"
        status, timeline, metrics, health, page, join, script = await pages(
            swarm,
            *(model, f"{model}/timeline?seconds=60", "/metrics", "/health"),
            *("/", "/api/join", "/static/dashboard.js"),
        )

    ring = status.json()
    rows_computed = sum(batch["rows"] for batch in timeline.json()["batches"])
    assert ring["ring_state"]["name"] in ("starved", "saturated", "blocked")
    assert ring["window"]["tokens_per_second"] > 0
    for stage in ring["stages"]:
        window = stage["window"]
        assert window["held"] + window["starved"] + window["blocked"] == pytest.approx(1.0)
        assert window["held"] > 0
        assert (stage["totals"]["rows"], stage["figures"]["path"]) == (rows_computed, "relayed")
        assert stage["totals"]["held_seconds"] > 0

    kept = Measurements.decode((tmp_path / "bridge" / "measured.json").read_bytes(), time.time())
    peers = {stage["peer"] for stage in ring["stages"]}
    assert peers <= {peer for pair in kept.ways() for peer in pair}, "the next start begins with this"
    shown = timeline.json()
    requests = [r for r in shown["requests"] if r["tokens"] == TOKENS]
    assert len(requests) == REQUESTS and counts == [TOKENS] * REQUESTS
    assert not any(request["active"] for request in requests)
    batches = shown["batches"]
    assert all(batch["runs"] and batch["composed"] is not None for batch in batches)
    assert {run[0] for batch in batches for run in batch["runs"]} == {r["request"] for r in requests}
    for batch in batches:
        for (_, end), (start, _) in itertools.pairwise(batch["bars"]):
            assert start >= end - SLACK
        assert batch["bars"][-1][1] <= batch["returned"] + SLACK
    for stage in range(3):
        bars = [batch["bars"][stage] for batch in batches]
        assert all(end <= start + 1e-3 for (_, end), (start, _) in itertools.pairwise(bars))

    found = {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.text)
        for sample in family.samples
    }
    assert found["kvasir_requests_ended_total", ("finished",)] == REQUESTS
    assert found["kvasir_completion_tokens_total", ()] == REQUESTS * TOKENS
    rows = [found["kvasir_ring_stage_rows_total", (str(stage),)] for stage in range(3)]
    assert rows == [sum(batch["rows"] for batch in batches)] * 3
    assert found["kvasir_ring_unusable_traces_total", ()] == 0
    assert found["kvasir_net_link_bytes_total", ("received", "/kvasir/ring/1")] > 0
    assert health.json() == {"status": "ok", "ready": True}

    secret = swarm.ticket[40:80]  # part of what holds the secret
    for answer in (status, timeline, metrics, page, join, script):
        assert answer.status_code == 200
        assert "kvasir1q" not in answer.text and secret not in answer.text
