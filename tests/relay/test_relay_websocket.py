"""WebSocket listeners, alone, on the port of TCP, and behind a proxy."""

from __future__ import annotations

import pytest
import trio
import wsproto
from helpers_relay import (
    PATIENCE,
    Peer,
    Refused,
    joined_circuit,
    receive,
    running_peers,
    running_relay,
)
from wsproto.events import AcceptConnection, Request

from kvasir_peer.errors import LinkError
from kvasir_peer.identity import Identity
from kvasir_peer.net import circuit
from kvasir_peer.net.connection import Connection, run_over_duplex
from kvasir_peer.net.noise import NoiseIdentity
from kvasir_peer.net.websocket import WebSocketDuplex
from kvasir_relay.server import Relay


def by_kind(relay: Relay) -> tuple[str, str]:
    """The relay's address for TCP and for WebSocket."""
    [tcp] = [address for address in relay.full_addresses if "/ws" not in address]
    [ws] = [address for address in relay.full_addresses if "/ws/" in address]
    return tcp, ws


async def test_tcp_and_websocket_peers_meet() -> None:
    listen = ["/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/tcp/0/ws"]
    async with running_relay(listen=listen) as relay, running_peers(2) as (a, b):
        tcp, ws = by_kind(relay)
        await a.join(relay, tcp)
        await b.join(relay, ws)
        await a.reserve()
        await b.reserve()
        for source, target in ((a, b), (b, a)):
            near, far = await joined_circuit(source, target)
            up = bytes(range(256)) * 2000
            async with trio.open_nursery() as nursery:
                nursery.start_soon(near.send_all, up)
                assert await receive(far, len(up)) == up


async def test_one_port_speaks_both() -> None:
    probe = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    port = probe.socket.getsockname()[1]
    await probe.aclose()
    listen = [f"/ip4/127.0.0.1/tcp/{port}", f"/ip4/127.0.0.1/tcp/{port}/ws"]
    async with running_relay(listen=listen) as relay, running_peers(2) as (a, b):
        tcp, ws = by_kind(relay)
        assert f"/tcp/{port}/" in tcp
        assert f"/tcp/{port}/ws/" in ws
        await a.join(relay, tcp)
        await b.join(relay, ws)
        await b.reserve()
        near, far = await joined_circuit(a, b)
        await near.send_all(b"x")
        assert await receive(far, 1) == b"x"


async def test_what_is_no_websocket_is_turned_away() -> None:
    async with running_relay(listen=["/ip4/127.0.0.1/tcp/0/ws"]) as relay:
        port = relay._listeners[0].port
        for raw in (b"\x13/multistream/1.0.0\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"A" * 100_000):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            with trio.fail_after(PATIENCE):
                try:
                    await stream.send_all(raw)
                    while await stream.receive_some(65536):
                        pass
                except trio.BrokenResourceError:
                    pass  # closed with our bytes unread
            await stream.aclose()
        assert relay.counters.handshakes_failed == 3
        assert relay.statistics().ledger.connections == 0


class ProxiedPeer:
    """A WebSocket peer whose request carries the headers that a proxy would add."""

    def __init__(self, forwarded: str | None) -> None:
        self.forwarded = forwarded
        self.identity = Identity.generate()

    async def run(self, relay: Relay, *, task_status: trio.TaskStatus[Connection]) -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", relay._listeners[0].port)
        ws = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        headers = [] if self.forwarded is None else [(b"X-Forwarded-For", self.forwarded.encode())]
        await stream.send_all(ws.send(Request(host="relay.example.org", target="/", extra_headers=headers)))
        accepted = False
        while not accepted:
            data = await stream.receive_some(4096)
            if not data:
                raise LinkError("turned away")
            ws.receive_data(data)
            accepted = any(isinstance(event, AcceptConnection) for event in ws.events())
        duplex = WebSocketDuplex(stream, ws)
        secured = await NoiseIdentity(self.identity.private_key).secure_outbound(
            duplex, relay.identity.peer_id
        )
        connection = Connection(
            secured,
            path="direct",
            address="relay",
            on_stream=lambda _, other: other.reset("not here"),
            on_closed=lambda _, reason: None,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_over_duplex, connection, duplex)
            await connection.ready.wait()
            task_status.started(connection)
            await connection.closed.wait()


async def test_limits_behind_a_proxy_are_by_the_address_that_it_names() -> None:
    limits = {
        "limits__reservations_per_ip": 1,
        "trusted_proxies": ["127.0.0.0/8"],
        "announce": ["/dns4/r.example/tcp/443/wss"],
    }
    async with (
        running_relay(listen=["/ip4/127.0.0.1/tcp/0/ws"], **limits) as relay,
        trio.open_nursery() as nursery,
    ):

        async def reserve(forwarded: str | None) -> str:
            peer = ProxiedPeer(forwarded)
            connection: Connection = await nursery.start(peer.run, relay)
            asking = object.__new__(Peer)
            try:
                await Peer.reserve(asking, connection)
            except Refused as refused:
                return refused.reason
            return "ok"

        assert await reserve("8.8.8.8") == "ok"
        assert await reserve("1.1.1.1, 8.8.8.8") == "reservations_per_ip"
        assert await reserve("1.1.1.1") == "ok"
        assert await reserve("192.168.1.1") == "private_address"
        assert await reserve(None) == "private_address"  # the proxy itself
        observed = {str(member.address) for member in relay.members()}
        assert observed == {"8.8.8.8", "1.1.1.1", "192.168.1.1", "127.0.0.1"}
        nursery.cancel_scope.cancel()


async def test_a_header_from_somebody_who_is_no_trusted_proxy_is_not_believed() -> None:
    async with running_relay(listen=["/ip4/127.0.0.1/tcp/0/ws"]) as relay, trio.open_nursery() as nursery:
        connection: Connection = await nursery.start(ProxiedPeer("8.8.8.8").run, relay)
        await circuit.reserve(connection, Identity.generate().peer_id)
        assert {str(member.address) for member in relay.members()} == {"127.0.0.1"}
        nursery.cancel_scope.cancel()


async def test_a_text_message_ends_the_connection_alone() -> None:
    async with running_relay(listen=["/ip4/127.0.0.1/tcp/0/ws"]) as relay, running_peers(1) as (peer,):
        stream = await trio.open_tcp_stream("127.0.0.1", relay._listeners[0].port)
        ws = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        await stream.send_all(ws.send(Request(host="x", target="/")))
        ws.receive_data(await stream.receive_some(4096))
        list(ws.events())
        await stream.send_all(ws.send(wsproto.events.TextMessage(data="hello")))
        with trio.fail_after(PATIENCE):
            while await stream.receive_some(4096):
                pass
        await stream.aclose()
        await peer.join(relay)
        await peer.reserve()


async def test_a_huge_message_takes_no_memory() -> None:
    """A frame of 1 TiB is announced; what comes of it is handed on, and nothing waits for the rest."""
    async with running_relay(listen=["/ip4/127.0.0.1/tcp/0/ws"]) as relay:
        stream = await trio.open_tcp_stream("127.0.0.1", relay._listeners[0].port)
        ws = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        await stream.send_all(ws.send(Request(host="x", target="/")))
        ws.receive_data(await stream.receive_some(4096))
        list(ws.events())
        await stream.send_all(
            b"\x82\xff" + (1 << 40).to_bytes(8, "big") + b"\0\0\0\0" + b"\x13/multistream/1.0.0\n"
        )
        answer = b""
        with trio.fail_after(PATIENCE):
            while b"/multistream/1.0.0\n" not in answer:
                answer += await stream.receive_some(4096)
        await stream.aclose()


@pytest.mark.parametrize("size", [1, 65_535, 300_000])
async def test_messages_of_any_size_are_one_byte_stream(size: int) -> None:
    async with running_relay(listen=["/ip4/127.0.0.1/tcp/0/ws"]) as relay, running_peers(2) as (a, b):
        for peer in (a, b):
            await peer.join(relay)
            await peer.reserve()
        near, far = await joined_circuit(a, b)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(near.send_all, bytes(size))
            assert await receive(far, size) == bytes(size)
