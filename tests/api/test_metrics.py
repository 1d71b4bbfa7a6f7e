"""``/metrics``, ``/health``, and the ring's timeline, over HTTP."""

import math
import re

import pytest
import trio
from helpers_api import MODEL
from helpers_bridge import NAME, PEERS, PlayedBridge, played
from prometheus_client.parser import text_string_to_metric_families

KEY = "a-key-of-the-owner"


def samples(text):
    """Value by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scrape(server):
    answer = await server.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return samples(answer.text)


async def test_metrics_show_what_the_parts_count():
    async with played(PlayedBridge()) as server:
        await server.complete("Hi", max_tokens=3)
        await server.post("/v1/completions", json={"model": "another", "prompt": "Hi"})
        found = await scrape(server)
    stage = (("stage", "1"),)
    assert found["kvasir_ring_serving", ()] == 1
    assert found["kvasir_http_requests_total", (("outcome", "answered"),)] == 1
    assert found["kvasir_http_requests_total", (("outcome", "refused"),)] == 1
    assert found["kvasir_completion_tokens_total", ()] == 3
    assert found["kvasir_requests_ended_total", (("how", "finished"),)] == 5
    assert found["kvasir_ring_stage_rows_total", stage] >= 48
    assert found["kvasir_ring_stage_received_bytes_total", stage] == 1000
    assert found["kvasir_ring_stage_engine_resident_bytes", stage] == 123
    assert ("kvasir_ring_stage_engine_resident_bytes", (("stage", "2"),)) not in found  # not yet reported
    shares = [found[f"kvasir_ring_stage_{name}_ratio", stage] for name in ("held", "starved", "blocked")]
    assert sum(shares) == pytest.approx(1.0)
    assert (
        found["kvasir_net_link_bytes_total", (("direction", "received"), ("protocol", "/kvasir/ring/1"))]
        == 4000
    )
    assert found["kvasir_net_relays", (("state", "reserved"),)] == 1
    assert found["kvasir_loop_lag_seconds", (("quantile", "0.99"),)] == pytest.approx(0.009)
    assert found["kvasir_resident_bytes", ()] > 1e7
    assert sum(value for (name, _), value in found.items() if name == "kvasir_ring_state") == 1
    assert all(math.isfinite(value) for value in found.values())


async def test_counters_never_fall():
    async with played(PlayedBridge()) as server:
        first = await scrape(server)
        await server.complete("Hi", max_tokens=3)
        await trio.sleep(0.2)
        second = await scrape(server)
    counters = [key for key in first if key[0].endswith("_total")]
    assert len(counters) > 30
    assert all(second[key] >= first[key] for key in counters)
    assert second["kvasir_ring_batches_total", ()] > first["kvasir_ring_batches_total", ()]


async def test_no_label_holds_a_peer_or_an_address():
    async with played(PlayedBridge()) as server:
        text = (await server.get("/metrics")).text
    assert "12D3" not in text
    assert not re.search(r"\d+\.\d+\.\d+\.\d+", text)
    labels = {name for line in text.splitlines() for name in re.findall(r'[{,](\w+)="', line)}
    assert labels == {
        *("version", "model", "quantile", "mode", "outcome", "how", "state", "stage", "path"),
        *("direction", "protocol"),
    }


async def test_openmetrics_is_given_to_those_who_ask_for_it():
    async with played(PlayedBridge()) as server:
        answer = await server.get(
            "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
        )
    assert "openmetrics" in answer.headers["content-type"]
    assert answer.text.endswith("# EOF\n")


async def test_keys_guard_all_but_health_and_the_pages_own_files():
    async with played(PlayedBridge(state="gathering"), keys=[KEY]) as server:
        for path in ("/metrics", "/api/ring", f"/api/ring/{NAME}/timeline", "/api/join"):
            assert (await server.get(path)).status_code == 401
            answer = await server.get(path, headers={"authorization": f"Bearer {KEY}"})
            assert answer.status_code == 200
        health = await server.get("/health")
        assert (health.status_code, health.json()) == (200, {"status": "ok", "ready": False})
        assert (await server.get("/")).status_code == 200
        assert (await server.get("/static/dashboard.js")).status_code == 200
        assert (await server.get("/metrics", headers={"host": "evil.example"})).status_code == 421


async def test_the_timeline_comes_in_pieces():
    async with played(PlayedBridge()) as server:
        first = (await server.get(f"/api/ring/{NAME}/timeline?seconds=30")).json()
        await trio.sleep(0.2)
        more = (await server.get(f"/api/ring/{NAME}/timeline?after={first['batches'][-1]['number']}")).json()
    assert first["stages"] == 3
    assert [run for batch in first["batches"][:3] for run in batch["runs"]] == [
        [1, 16, False],
        [2, 16, False],
        [3, 16, False],
    ]
    for batch in first["batches"]:
        ends = [start for bar in batch["bars"] for start in bar]
        assert ends == sorted(ends)
    assert more["batches"][0]["number"] == first["batches"][-1]["number"] + 1
    assert [request["request"] for request in more["requests"]] == [1, 2, 3]
    assert all(request["active"] for request in more["requests"])


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        (f"/api/ring/{NAME}/timeline?seconds=0", 400, "seconds is '0'"),
        (f"/api/ring/{NAME}/timeline?seconds=61", 400, "at most 60"),
        (f"/api/ring/{NAME}/timeline?seconds=nan", 400, "seconds is 'nan'"),
        (f"/api/ring/{NAME}/timeline?seconds=x", 400, "seconds is 'x'"),
        (f"/api/ring/{NAME}/timeline?after=-1", 400, "after is '-1'"),
        (f"/api/ring/{NAME}/timeline?after={'9' * 30}", 400, "after is"),
        ("/api/ring/another/timeline", 404, "no model 'another'"),
    ],
)
async def test_what_the_timeline_refuses(path, status, words):
    async with played(PlayedBridge()) as server:
        answer = await server.get(path)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


async def test_the_status_names_state_and_shares():
    assert NAME == MODEL  # the page asks the ring and the model by one name
    async with played(PlayedBridge()) as server:
        await trio.sleep(0.3)
        status = (await server.get(f"/api/ring/{NAME}")).json()
    assert status["ring_state"]["name"] in ("starved", "saturated")
    assert [stage["peer"] for stage in status["stages"]] == list(PEERS)
    window = status["stages"][1]["window"]
    assert window["held"] + window["starved"] + window["blocked"] == pytest.approx(1.0)
    assert (window["path"], window["round_trip_ms"]) == ("relayed", 21.0)
