"""Unmodified py-libp2p peers and our peers at our relay, each calling the other."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key
from libp2p.network.config import ConnectionConfig
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.relay.circuit_v2.config import RelayConfig
from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol
from libp2p.relay.circuit_v2.transport import CircuitV2Transport
from libp2p.security.noise.transport import Transport as Noise
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from kvasir_peer.net.node import Node
from kvasir_peer.net.yamux import MuxedStream

ECHO = "/echo"
DATA = secrets.token_bytes(200_000)

pytestmark = pytest.mark.timeout(120)


class _NoNursery:
    """The stock client starts a refreshing task in this nursery; the test is over before it is due."""

    def start_soon(self, *arguments: object) -> None:
        """Start nothing."""


class Stock:
    """A stock host that is connected to a relay.

    Attributes:
        peer_id: its name.
    """

    def __init__(self, host: Any, protocol: CircuitV2Protocol, relay: str) -> None:
        self.host = host
        self.peer_id = host.get_id().to_base58()
        self._relay = relay
        self._transport = CircuitV2Transport(host, protocol, RelayConfig())

    async def reserve(self) -> None:
        """Take a place at the relay."""
        relay = info_from_p2p_addr(Multiaddr(self._relay)).peer_id
        hop = await self.host.new_stream(relay, ["/libp2p/circuit/relay/0.2.0/hop"])
        nursery: Any = _NoNursery()
        assert await self._transport.reserve(hop, relay, nursery)

    async def call(self, peer_id: str) -> Any:
        """A stream of the echo to a peer, through the relay."""
        target = Multiaddr(f"{self._relay}/p2p-circuit/p2p/{peer_id}")
        await self._transport.dial(target)
        return await self.host.new_stream(info_from_p2p_addr(target).peer_id, [ECHO])


@asynccontextmanager
async def stock_peer(relay: str) -> AsyncIterator[Stock]:
    """A stock host that answers echoes."""
    keys = create_new_key_pair()
    sec_opt: Any = {"/noise": Noise(keys, noise_privkey=create_noise_key().private_key)}
    muxer_opt: Any = {"/yamux/1.0.0": Yamux}
    host: Any = new_host(
        key_pair=keys,
        sec_opt=sec_opt,
        muxer_opt=muxer_opt,
        connection_config=ConnectionConfig(auto_connect_interval=1e9, min_connections=0, low_watermark=0),
    )

    async def echo(stream: Any) -> None:
        try:
            while data := await stream.read(65_536):
                await stream.write(data)
        except StreamEOF:
            await stream.close()

    host.set_stream_handler(ECHO, echo)
    async with host.run(listen_addrs=[]):
        protocol = CircuitV2Protocol(host, allow_hop=False)
        async with background_trio_service(protocol):
            await host.connect(info_from_p2p_addr(Multiaddr(relay)))
            yield Stock(host, protocol, relay)
        await host.close()


async def echo_here(stream: MuxedStream) -> None:
    """Send back what comes until the end."""
    while data := await stream.receive_some():
        await stream.send_all(data)


async def test_our_peer_calls_a_stock_peer_through_our_relay(
    kvasir_relay: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="libp2p")
    relay = kvasir_relay["tcp"]
    with trio.fail_after(60):
        async with stock_peer(relay) as stock, Node.open(secrets.token_bytes(32), direct=False) as node:
            await stock.reserve()
            await node.connect(stock.peer_id, [f"{relay}/p2p-circuit/p2p/{stock.peer_id}"])
            (connection,) = node.host.connections(stock.peer_id)
            assert connection.path == "relayed"
            stream = await connection.open_stream(ECHO)
            got = b""
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.send_all, DATA)
                while len(got) < len(DATA):
                    got += await stream.receive_some()
            assert got == DATA
            stream.close()


async def test_a_stock_peer_calls_our_peer_through_our_relay(
    kvasir_relay: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="libp2p")
    relay = kvasir_relay["tcp"]
    with trio.fail_after(60):
        async with (
            Node.open(secrets.token_bytes(32), relays=[relay], direct=False) as node,
            stock_peer(relay) as stock,
        ):
            node.host.handle(ECHO, echo_here)
            await node.relays_ready(30)
            stream = await stock.call(node.peer_id)
            got = b""
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.write, DATA)
                while len(got) < len(DATA):
                    got += await stream.read(65_536)
            assert got == DATA
            await stream.close()
