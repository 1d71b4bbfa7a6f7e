"""Peers that reach each other only through circuits of a relay that runs as a process of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from helpers_net import ECHO, RelayProcess, echo_link, key, pattern, relay_process, until
from proxy import tcp_proxy

from kvasir_peer.errors import LinkError, UsageError
from kvasir_peer.identity import Identity
from kvasir_peer.net import circuit, connection, relays
from kvasir_peer.net.backoff import Backoff
from kvasir_peer.net.link import Link, Priority
from kvasir_peer.net.node import Node, PeerEvent


@asynccontextmanager
async def behind(*addresses: str, count: int = 2) -> AsyncIterator[list[Node]]:
    """Nodes that have nothing but their relays."""
    async with trio.open_nursery() as nursery:
        running: list[Node] = []
        done = trio.Event()

        async def one(task_status: trio.TaskStatus[None]) -> None:
            async with Node.open(key(), relays=addresses, direct=False) as node:
                node.handle(ECHO, 8_000_000, echo_link)
                running.append(node)
                await node.relays_ready(20)
                task_status.started()
                await done.wait()

        for _ in range(count):
            await nursery.start(one)
        try:
            yield running
        finally:
            done.set()


async def _echo(node: Node, peer: str, size: int = 1000, addresses: tuple[str, ...] = ()) -> None:
    link = await node.open_link(peer, ECHO, addresses=addresses)
    data = pattern(size)
    await link.send(data, Priority.PREFILL)
    assert bytes(await link.receive()) == data
    await link.aclose()


async def test_peers_behind_a_relay_reach_each_other_and_nothing_else(relay: RelayProcess) -> None:
    async with behind(relay.address) as (a, b):
        assert a.addresses() == [f"{relay.address}/p2p-circuit/p2p/{a.peer_id}"]
        link = await b.open_link(a.peer_id, ECHO, addresses=a.addresses())
        assert link.path == "relayed"
        for size in (0, 1000, 16 * 1024, 4_000_000):
            data = pattern(size)
            await link.send(data, Priority.PREFILL)
            assert bytes(await link.receive()) == data
        assert a.peers() == {b.peer_id: "relayed"} and b.peers() == {a.peer_id: "relayed"}
        state = a.statistics()
        assert state.relays[0].state == "reserved" and state.relays[0].checked
        assert {c.path for c in state.connections} == {"direct", "relayed"}
        with pytest.raises(LinkError, match="no reservation"):
            await b.connect(some_peer_id())


async def test_both_ways_at_once_and_a_decode_frame_beside_bulk(relay: RelayProcess) -> None:
    async with behind(relay.address) as (a, b):
        link = await b.open_link(a.peer_id, ECHO)
        data = pattern(3_000_000)

        async def bulk() -> None:
            for _ in range(3):
                await link.send(data, Priority.WEIGHTS)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(bulk)
            whole = small = 0
            await link.send(b"now", Priority.DECODE)
            while whole < 3:
                frame = bytes(await link.receive())
                if frame == data:
                    whole += 1
                else:
                    assert frame == b"now"
                    small += 1
                    assert whole < 3
        assert small == 1


async def test_a_relay_that_is_killed_and_started_again_is_back_within_ten_seconds(tmp_path: Path) -> None:
    async with relay_process(tmp_path) as relay, behind(relay.address) as (a, b):
        link = await b.open_link(a.peer_id, ECHO)
        gone: list[PeerEvent] = []
        b.on_peer(gone.append)
        relay.kill()
        with trio.fail_after(5), pytest.raises(LinkError):
            await link.receive()
        assert gone[0].state == "gone" and not b.peers()
        await until(lambda: a.addresses() == [], timeout=5)
        with pytest.raises(LinkError):
            await b.open_link(a.peer_id, ECHO)
        await trio.sleep(1)
        await relay.start()
        started = trio.current_time()
        await a.relays_ready(10)
        await b.relays_ready(10)
        await _echo(b, a.peer_id)
        assert trio.current_time() - started < 10
        assert a.statistics().relays[0].failures < 15


async def test_two_relays_are_held_and_either_is_enough(tmp_path: Path) -> None:
    async with (
        relay_process(tmp_path / "one") as one,
        relay_process(tmp_path / "two") as two,
        behind(one.address, two.address) as (a, b),
    ):
        assert len(a.addresses()) == 2
        await _echo(b, a.peer_id)
        one.kill()
        await until(lambda: len(a.addresses()) == 1)
        await until(lambda: not b.peers() or all(c.address != one for c in b.host.connections(a.peer_id)))
        await _echo(b, a.peer_id)


async def test_an_address_of_a_relay_that_is_not_ours_works(relay: RelayProcess, tmp_path: Path) -> None:
    one = relay
    async with (
        relay_process(tmp_path / "two") as two,
        behind(one.address, count=1) as (a,),
        behind(two.address, count=1) as (b,),
    ):
        await _echo(b, a.peer_id, addresses=tuple(a.addresses()))


async def test_a_relay_that_goes_silent_is_noticed_and_another_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same, ten times as fast.
    monkeypatch.setattr(connection, "HEARTBEAT_BUSY_S", 0.5)
    monkeypatch.setattr(connection, "DEAD_BUSY_S", 1.5)
    monkeypatch.setattr(connection, "HEARTBEAT_IDLE_S", 1.5)
    monkeypatch.setattr(connection, "DEAD_IDLE_S", 3.0)
    async with relay_process(tmp_path) as relay, behind(relay.address) as (a, b):
        link = await b.open_link(a.peer_id, ECHO)
        relay.freeze()
        try:
            with trio.fail_after(10), pytest.raises(LinkError, match=r"nothing came|gone|ended"):
                await link.receive()
            assert not b.peers()
        finally:
            relay.thaw()
        for node in (a, b):
            await until(lambda node=node: node.statistics().relays[0].reservations >= 2)
            await node.relays_ready(10)
        await _echo(b, a.peer_id)


async def test_a_peer_that_goes_silent_behind_a_live_relay_is_noticed(
    relay: RelayProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEARTBEAT_BUSY_S", 0.5)
    monkeypatch.setattr(connection, "DEAD_BUSY_S", 1.5)
    host, _, port = relay.address.split("/p2p/")[0].removeprefix("/ip4/").partition("/tcp/")
    relay_id = relay.address.rpartition("/")[2]
    async with (
        tcp_proxy((host, int(port))) as proxy,
        behind(f"/ip4/127.0.0.1/tcp/{proxy.port}/p2p/{relay_id}", count=1) as (a,),
        behind(relay.address, count=1) as (b,),
    ):
        link = await b.open_link(a.peer_id, ECHO)
        proxy.freeze()
        with trio.fail_after(10), pytest.raises(LinkError):
            await link.receive()
        # An address change looks the same: the connections of the old address are dead.
        proxy.cut()
        proxy.thaw()
        await until(lambda: a.statistics().relays[0].reservations >= 2, timeout=15)
        await a.relays_ready(5)
        await _echo(b, a.peer_id)


async def test_an_outage_never_becomes_a_storm() -> None:
    async with tcp_proxy(("127.0.0.1", 1)) as proxy:
        proxy.refuse()
        address = f"/ip4/127.0.0.1/tcp/{proxy.port}/p2p/{some_peer_id()}"
        async with Node.open(key(), relays=[address], direct=False) as node:
            with pytest.raises(LinkError, match="no place at 1 of 1 relays"):
                await node.relays_ready(2)
            failures = node.statistics().relays[0].failures
            assert 2 <= failures <= 7, "retries must back off"


def test_delays_grow_with_jitter_to_a_cap() -> None:
    backoff = Backoff(first=relays.FIRST_RETRY_S, cap=relays.RETRY_CAP_S)
    delays = [backoff.failed() for _ in range(40)]
    assert all(0.5 * relays.FIRST_RETRY_S <= delay <= relays.RETRY_CAP_S for delay in delays)
    assert delays[0] < delays[3] < delays[8]
    assert len(set(delays[10:])) == 30, "all peers of a relay must not knock at the same moment"
    backoff.succeeded()
    assert backoff.failed() <= relays.FIRST_RETRY_S


async def test_only_an_address_that_worked_is_advertised(
    relay: RelayProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = False
    checked = 0

    async def check(*arguments: object) -> None:
        nonlocal checked
        checked += 1
        if not works:
            raise LinkError("our own address does not answer")

    monkeypatch.setattr(circuit.CircuitListener, "check", check)
    async with Node.open(key(), relays=[relay.address], direct=False) as node:
        await until(lambda: checked >= 2)
        assert node.addresses() == [] and node.statistics().relays[0].last_error
        works = True
        await node.relays_ready(10)
        assert node.addresses()


async def test_a_dead_end_of_a_circuit_is_seen_by_the_other(relay: RelayProcess) -> None:
    async with behind(relay.address, count=1) as (a,):
        seen: list[Link] = []

        async def keep(link: Link) -> None:
            seen.append(link)
            await link.receive()

        a.handle("/keep/1", 1000, keep)
        async with trio.open_nursery() as nursery:
            ready = trio.Event()

            async def brief() -> None:
                async with Node.open(key(), relays=[relay.address], direct=False) as b:
                    await b.open_link(a.peer_id, "/keep/1")
                    ready.set()
                    await trio.sleep_forever()

            nursery.start_soon(brief)
            await ready.wait()
            await until(lambda: seen)
            nursery.cancel_scope.cancel()
        await until(lambda: seen[0].closed and not a.peers(), timeout=5)


async def test_a_relay_s_address_behind_a_relay_is_refused() -> None:
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{some_peer_id()}/p2p-circuit/p2p/{some_peer_id()}"
    with pytest.raises(UsageError, match="name the relay itself"):
        async with Node.open(key(), relays=[address]):
            pytest.fail("it ran")


def some_peer_id() -> str:
    return Identity.generate().peer_id
