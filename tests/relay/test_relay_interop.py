"""Unmodified py-libp2p peers at our relay."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio
from helpers_relay import PATIENCE, joined, running_relay

from kvasir_peer.net import delimited
from kvasir_peer.net.upstream import circuit_pb2


async def test_stock_peers_reserve_connect_and_talk(caplog: pytest.LogCaptureFixture) -> None:
    from libp2p import new_host
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key
    from libp2p.network.config import ConnectionConfig
    from libp2p.peer.peerinfo import info_from_p2p_addr
    from libp2p.relay.circuit_v2.config import RelayConfig
    from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol
    from libp2p.relay.circuit_v2.transport import CircuitV2Transport
    from libp2p.security.noise.transport import Transport as Noise
    from libp2p.stream_muxer.yamux.yamux import Yamux
    from libp2p.tools.anyio_service import background_trio_service
    from multiaddr import Multiaddr

    caplog.set_level(logging.CRITICAL, logger="libp2p")

    def stock() -> Any:
        keys = create_new_key_pair()
        noise_alone: Any = {"/noise": Noise(keys, noise_privkey=create_noise_key().private_key)}
        yamux_alone: Any = {"/yamux/1.0.0": Yamux}
        return new_host(
            key_pair=keys,
            sec_opt=noise_alone,
            muxer_opt=yamux_alone,
            connection_config=ConnectionConfig(auto_connect_interval=1e9, min_connections=0, low_watermark=0),
        )

    a, b = stock(), stock()
    async with running_relay() as relay, a.run(listen_addrs=[]), b.run(listen_addrs=[]):
        address = relay.full_addresses[0]
        info = info_from_p2p_addr(Multiaddr(address))
        protocols: list[Any] = [CircuitV2Protocol(host, allow_hop=False) for host in (a, b)]
        async with background_trio_service(protocols[0]), background_trio_service(protocols[1]):
            with trio.fail_after(2 * PATIENCE):
                await a.connect(info)
                await b.connect(info)
                hop = await b.new_stream(info.peer_id, ["/libp2p/circuit/relay/0.2.0/hop"])
                nobody: Any = _Services()
                assert await CircuitV2Transport(b, protocols[1], RelayConfig()).reserve(
                    hop, info.peer_id, nobody
                )

                async def echo(stream: Any) -> None:
                    while True:
                        await stream.write(await stream.read(65536))

                b.set_stream_handler("/echo", echo)
                transport = CircuitV2Transport(a, protocols[0], RelayConfig())
                await transport.dial(Multiaddr(f"{address}/p2p-circuit/p2p/{b.get_id().to_base58()}"))
                stream = await a.new_stream(b.get_id(), ["/echo"])
                sent, got = bytes(range(256)) * 100, b""
                await stream.write(sent)
                while len(got) < len(sent):
                    got += await stream.read(len(sent) - len(got))
                assert got == sent
        assert relay.statistics().counters.circuits == 1
        await a.close()
        await b.close()


class _Services:
    """A nursery that starts nothing: the stock client's refresh task is not under test."""

    def start_soon(self, *_: object) -> None:
        return


async def test_a_reader_that_knows_only_the_specification_reads_our_refusals() -> None:
    async with running_relay(limits__reservations=1) as relay, joined(relay, 1) as (peer,):
        assert peer.connection is not None
        stream = await peer.connection.open_stream("/libp2p/circuit/relay/0.2.0/hop")
        request = circuit_pb2.HopMessage(type=circuit_pb2.HopMessage.CONNECT)
        request.peer.id = b"nobody"
        await delimited.write_message(stream, request)
        answer = await delimited.read_message(stream, circuit_pb2.HopMessage)
        assert (answer.type, answer.status) == (circuit_pb2.HopMessage.STATUS, 204)
