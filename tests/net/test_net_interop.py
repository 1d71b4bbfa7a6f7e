"""Our transport and the one of py-libp2p understand each other, both ways."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from helpers_net import ECHO, address_of, exchange, hosts, key, only, pattern, until
from libp2p import new_host as stock_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as noise_key_pair
from libp2p.network.config import ConnectionConfig
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as Noise
from multiaddr import Multiaddr

from kvasir_peer.net import maddr

SIZES = (1, 1000, 16 * 1024, 300_000, 4 * 1024 * 1024)


@asynccontextmanager
async def stock(*listen: str) -> AsyncIterator[object]:
    """An unmodified py-libp2p host that answers echo streams; Noise only, as ours."""
    keys = create_new_key_pair(key())
    host = stock_host(
        key_pair=keys,
        sec_opt={NOISE: Noise(keys, noise_privkey=noise_key_pair().private_key)},
        listen_addrs=[Multiaddr(text) for text in listen] or None,
        connection_config=ConnectionConfig(auto_connect_interval=1e9, min_connections=0, low_watermark=0),
    )

    async def echo(stream: object) -> None:
        # An exception here would end the stock peer's connection, for it cancels the writes of all other streams.
        try:
            while data := await stream.read(64 * 1024):
                await stream.write(data)
        except StreamEOF:
            await stream.close()

    host.set_stream_handler(ECHO, echo)
    async with host.run([Multiaddr(text) for text in listen]):
        try:
            yield host
        finally:
            await host.close()


@pytest.mark.parametrize(
    "listen", ["/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/tcp/0/ws"], ids=["tcp", "websocket"]
)
async def test_stock_peer_answers_us(listen: str) -> None:
    async with stock(listen) as other, hosts(1, listen=()) as (ours,):
        address = maddr.parse(str(other.get_addrs()[0]))
        connection = await ours.dial(address)
        stream = await connection.open_stream(ECHO)
        for size in SIZES[: 3 if listen.endswith("ws") else None]:
            data = pattern(size)
            assert await exchange(stream, data) == data
        stream.close()
        other_id = address.peer
        await until(lambda: not only(ours, other_id).mux.streams, what="the closed stream is forgotten")


@pytest.mark.parametrize("websocket", [False, True], ids=["tcp", "websocket"])
async def test_stock_peer_calls_us(websocket: bool) -> None:
    listen = "/ip4/127.0.0.1/tcp/0" + ("/ws" if websocket else "")
    # The transports of a stock host follow from what it listens on.
    async with stock(listen) as other, hosts(1, listen=(listen,)) as (ours,):
        text = f"{ours.listening[0]}/p2p/{ours.peer_id}"
        await other.connect(info_from_p2p_addr(Multiaddr(text)))
        stream = await other.new_stream(info_from_p2p_addr(Multiaddr(text)).peer_id, [ECHO])
        for size in SIZES[: 3 if websocket else None]:
            data = pattern(size)
            received = bytearray()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.write, data)
                while len(received) < len(data):
                    received += await stream.read(64 * 1024)
            assert received == data
        await stream.close()


async def test_fifty_streams_at_once_to_a_stock_peer() -> None:
    async with stock("/ip4/127.0.0.1/tcp/0") as other, hosts(1, listen=()) as (ours,):
        connection = await ours.dial(maddr.parse(str(other.get_addrs()[0])))
        data = pattern(20_000)

        async def one() -> None:
            stream = await connection.open_stream(ECHO)
            assert await exchange(stream, data) == data
            await stream.aclose()

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(one)
        await until(lambda: not connection.mux.streams, what="all streams are forgotten")


async def test_identify_and_ping_from_a_stock_peer() -> None:
    async with stock("/ip4/127.0.0.1/tcp/0") as other, hosts(1) as (ours,):
        answer = await ours.identify(await ours.dial(maddr.parse(str(other.get_addrs()[0]))))
        assert ECHO in answer.protocols
        assert maddr.from_bytes(answer.observed_addr).startswith("/ip4/127.0.0.1/tcp/")
        back = await other.new_stream(
            info_from_p2p_addr(Multiaddr(str(address_of(ours)))).peer_id, ["/ipfs/ping/1.0.0"]
        )
        await back.write(b"p" * 32)
        assert await back.read(32) == b"p" * 32
