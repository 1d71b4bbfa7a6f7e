"""Metrics, health, readiness and the status page; none of them names a peer or an address of one."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import trio
from helpers_relay import (
    PATIENCE,
    Refused,
    joined,
    joined_circuit,
    receive,
    running_peers,
    running_relay,
    until,
)
from prometheus_client.parser import text_string_to_metric_families

from kvasir_peer.errors import SettingsError
from kvasir_relay.listeners import open_http_socket
from kvasir_relay.pages import Pages
from kvasir_relay.server import Relay


@asynccontextmanager
async def pages_of(relay: Relay) -> AsyncIterator[httpx.AsyncClient]:
    listening = open_http_socket(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Pages(relay).serve, listening)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE
        ) as client:
            yield client
        nursery.cancel_scope.cancel()


async def samples(client: httpx.AsyncClient) -> dict[str, dict[tuple[str, ...], float]]:
    """Name, label values (in the order of the labels' names): value."""
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(value for _, value in sorted(sample.labels.items()))] = (
                sample.value
            )
    return found


async def test_metrics_say_what_is_held_carried_and_refused() -> None:
    async with (
        running_relay(limits__circuits_per_peer=1) as relay,
        joined(relay, 2) as (a, b),
        pages_of(relay) as client,
    ):
        near, far = await joined_circuit(a, b)
        await near.send_all(bytes(1000))
        await receive(far, 1000)
        await far.send_all(bytes(50))
        await receive(near, 50)
        with pytest.raises(Refused):
            await b.connect(a.peer_id)
        found = await samples(client)
        for name, value in (
            ("peers", 2),
            ("connections", 2),
            ("reservations", 2),
            ("circuits", 1),
            ("draining", 0),
        ):
            assert found[f"kvasir_relay_{name}"] == {(): value}
        assert found["kvasir_relay_carried_bytes_total"] == {("to_target",): 1000, ("to_source",): 50}
        assert found["kvasir_relay_refusals_total"] == {("circuits_per_peer", "circuit"): 1}
        assert found["kvasir_relay_queue_seconds_count"][()] >= 2
        assert found["kvasir_relay_cpu_seconds_total"].keys() == {("user",), ("system",)}
        assert found["kvasir_relay_resident_bytes"][()] > 1e6
        near.reset()
        await until(lambda: not relay.hop.circuits)
        assert (await samples(client))["kvasir_relay_circuits_ended_total"] == {("peer_left",): 1}


async def test_nothing_in_the_pages_names_a_peer() -> None:
    async with running_relay() as relay, joined(relay, 3) as peers, pages_of(relay) as client:
        await joined_circuit(peers[0], peers[1])
        with pytest.raises(Refused):
            await peers[0].connect("12D3KooW" + "A" * 44)
        for page in ("/", "/metrics"):
            text = (await client.get(page)).text
            for peer in peers:
                assert peer.peer_id not in text
                assert peer.connection is not None
            ports = [str(member.port) for member in relay.members()]
            assert not [port for port in ports if f":{port}" in text or f"/tcp/{port}" in text]
        labels = {values for family in (await samples(client)).values() for values in family}
        assert not [value for values in labels for value in values if value.startswith("12D3")]


async def test_the_number_of_series_does_not_grow_with_the_number_of_peers() -> None:
    """Labels by user are what made other relays' metrics leak memory."""
    async with running_relay() as relay, pages_of(relay) as client:
        counts = []
        for _ in range(2):
            async with running_peers(5) as peers:
                for peer in peers:
                    await peer.join(relay)
                    await peer.reserve()
                    near, _ = await joined_circuit(peer, peers[0])
                    near.reset()
                await until(lambda: not relay.hop.circuits)
                counts.append(sum(len(family) for family in (await samples(client)).values()))
        assert counts[0] == counts[1]


async def test_health_and_readiness() -> None:
    async with running_relay() as relay, pages_of(relay) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        await relay.drain(0.1)
        assert (await client.get("/health")).status_code == 200
        answer = await client.get("/ready")
        assert (answer.status_code, answer.text) == (503, "draining\n")


async def test_the_status_page() -> None:
    async with (
        running_relay(announce=["/dns4/relay.example.org/tcp/443/wss"]) as relay,
        pages_of(relay) as client,
    ):
        answer = await client.get("/")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert relay.identity.peer_id in answer.text
        assert "relay.example.org" in answer.text
        assert "limits.circuits_per_peer = " in answer.text
        assert "default-src 'none'" in answer.headers["content-security-policy"]


async def test_what_is_asked_wrongly_is_refused() -> None:
    async with running_relay() as relay, pages_of(relay) as client:
        assert (await client.get("/nothing")).status_code == 404
        assert (await client.post("/metrics", content=b"x")).status_code == 405
        assert (await client.head("/metrics")).content == b""
        rebound = await client.get("/metrics", headers={"host": "evil.example:80"})
        assert rebound.status_code == 403
        for host in ("localhost:1", "[::1]:9641", "127.0.0.1"):
            assert (await client.get("/health", headers={"host": host})).status_code == 200
        port = client.base_url.port
        assert port is not None
        for raw in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await stream.send_all(raw)
            with trio.fail_after(PATIENCE):
                assert (await stream.receive_some()).startswith(b"HTTP/1.1 4")
            await stream.aclose()


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"{port}.*--http"):
            open_http_socket(("127.0.0.1", port))
