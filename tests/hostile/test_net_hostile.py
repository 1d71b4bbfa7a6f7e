"""Peers that break the protocols, and strangers on the port: each hurts only itself."""

from __future__ import annotations

import contextlib
import random
import struct
import sys
from pathlib import Path

import pytest
import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "net"))

from helpers_net import (
    ECHO,
    address_of,
    echo_link,
    exchange,
    hosts,
    key,
    nodes,
    only,
    pattern,
    raw_connection,
    until,
)
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.security.insecure.transport import InsecureTransport

from kvasir_peer.errors import LinkError
from kvasir_peer.net import maddr, multistream, yamux
from kvasir_peer.net.connection import Connection
from kvasir_peer.net.host import HostLimits
from kvasir_peer.net.noise import _RawConnection

PLAINTEXT = "/plaintext/2.0.0"


async def test_an_impersonator_that_offers_plaintext_is_refused() -> None:
    """Knowing only a victim's public id, an attacker must not be taken for it: neither as caller nor as callee."""
    victim = create_new_key_pair(key())
    victim_id = ID.from_pubkey(victim.public_key).to_base58()
    async with hosts(1) as (host,):
        # As caller: plaintext is not among what the host speaks.
        stream = await raw_connection(host)
        await stream.send_all(multistream.encode(multistream.HEADER, PLAINTEXT))
        assert await multistream.read_line(stream) == multistream.HEADER
        assert await multistream.read_line(stream) == multistream.NOT_AVAILABLE
        await stream.aclose()

        # As callee: a man in the middle who answers /noise with na and talks plaintext.
        async def impersonate(stream: trio.SocketStream) -> None:
            async with stream:
                try:
                    await multistream.answer(stream, lambda protocol: protocol == PLAINTEXT)
                    await InsecureTransport(victim).secure_inbound(_RawConnection(stream, False))
                except (LinkError, trio.BrokenResourceError):
                    return

        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(trio.serve_tcp, impersonate, 0)
            port = listeners[0].socket.getsockname()[1]
            with pytest.raises(LinkError, match="does not speak /noise"):
                await host.dial(maddr.parse(f"/ip4/127.0.0.1/tcp/{port}/p2p/{victim_id}"))
            nursery.cancel_scope.cancel()
        assert not host.connections(victim_id)


async def _attack(attacker: Connection, frame: bytes) -> None:
    """Put raw bytes where the multiplexer's frames go."""
    attacker.mux._control.append(frame)
    attacker.mux._on_writable()


async def test_a_window_violation_closes_that_connection_and_no_other() -> None:
    async with hosts(3) as (host, bad, good):
        bad_connection = await bad.dial(address_of(host))
        good_connection = await good.dial(address_of(host))

        async def never_reads(stream: yamux.MuxedStream) -> None:
            await trio.sleep_forever()

        host.handle("/never/reads/1", never_reads)
        stream = await bad_connection.open_stream("/never/reads/1")
        stream.send_window = 10**9  # as if the other side had granted it
        await stream.send_all(bytes(300 * 1024 * 1024))
        with trio.fail_after(20):
            await bad_connection.closed.wait()
        assert not host.connections(bad.peer_id)
        other = await good_connection.open_stream(ECHO)
        assert await exchange(other, pattern(100_000)) == pattern(100_000)


@pytest.mark.parametrize("seed", range(4))
async def test_random_frames_inside_the_encryption_close_the_connection_at_worst(seed: int) -> None:
    rng = random.Random(seed)
    async with hosts(2) as (host, bad):
        for _ in range(15):
            connection = await bad.dial(address_of(host))
            for _ in range(rng.randrange(1, 30)):
                kind = rng.choice((0, 0, 1, 1, 2, 3, 4))
                header = yamux.HEADER.pack(
                    rng.choice((0, 0, 0, 0, 1)),
                    kind,
                    rng.randrange(16),
                    rng.choice((0, 1, 2, 3, 5, 7, 2**31)),
                    rng.choice((0, 1, 20, 1000, 2**18, 2**32 - 1)),
                )
                await _attack(connection, (header + rng.randbytes(1000))[:12])
            await trio.lowlevel.checkpoint()
            connection.abort("done")
        await until(lambda: not host.connections(bad.peer_id))
        fresh = await bad.dial(address_of(host))
        stream = await fresh.open_stream(ECHO)
        assert await exchange(stream, b"alive") == b"alive"


async def test_garbage_on_the_port_is_counted_and_forgotten() -> None:
    rng = random.Random(5)
    async with hosts(2) as (host, good):
        for data in (
            b"",
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x13/multistream/9.9.9\n",
            b"\xff\xff\xff\xff\xff",
            b"\xff" * 100,
            rng.randbytes(5000),
            multistream.encode(multistream.HEADER, "/noise")
            + struct.pack(">H", 60000)
            + rng.randbytes(60000),
            multistream.encode(multistream.HEADER, "/noise") + struct.pack(">H", 0),
            multistream.encode(multistream.HEADER, *["/x"] * 40),
        ):
            stream = await raw_connection(host)
            try:
                await stream.send_all(data)
                await stream.send_eof()
                while await stream.receive_some():
                    pass
            except trio.BrokenResourceError:
                pass
            await stream.aclose()
        await until(lambda: host.statistics().handshakes == 0)
        assert host.statistics().failed_handshakes == 9
        connection = await good.dial(address_of(host))
        assert await exchange(await connection.open_stream(ECHO), b"ok") == b"ok"


async def test_a_tampered_message_closes_the_connection() -> None:
    async with hosts(2) as (host, bad):
        connection = await bad.dial(address_of(host))
        connection._secured.send._nonce += 1
        connection.mux.open()
        with trio.fail_after(10):
            await connection.closed.wait()
        assert not host.connections(bad.peer_id)


async def test_silent_callers_are_few_for_each_address_and_leave_after_the_deadline(
    mock_clock: trio.testing.MockClock,
) -> None:
    mock_clock.rate = 20.0
    limits = HostLimits(max_handshakes_per_address=4)
    async with hosts(1, limits=limits) as (host,):
        silent = [await raw_connection(host) for _ in range(4)]
        await until(lambda: host.statistics().handshakes == 4)
        fifth = await raw_connection(host)
        with contextlib.suppress(trio.BrokenResourceError):
            assert await fifth.receive_some() == b""
        assert host.statistics().refused == {"handshakes_per_address": 1}
        await until(lambda: host.statistics().handshakes == 0, timeout=60)
        for stream in [*silent, fifth]:
            await stream.aclose()


async def test_a_place_comes_back_when_a_connection_closes() -> None:
    """py-libp2p keeps the place until the host stops: after 250 callers it takes no more."""
    async with hosts(2, limits=HostLimits(max_connections=2)) as (host, other):
        for _ in range(8):
            connection = await other.dial(address_of(host))
            connection.close()
            await connection.closed.wait()
            await until(lambda: not host.connections(other.peer_id))
            await until(lambda: host._inbound_open == 0)


async def test_streams_without_a_protocol_are_bounded_and_cost_others_nothing() -> None:
    async with hosts(2, limits=HostLimits(max_inbound_streams=50)) as (host, bad):
        connection = await bad.dial(address_of(host))
        for _ in range(500):
            connection.mux.open()
        await until(lambda: only(host, bad.peer_id).mux.violations.get("streams", 0) == 450)
        assert len(only(host, bad.peer_id).mux.streams) == 50


async def test_a_link_flooded_with_nonsense_hurts_only_itself() -> None:
    rng = random.Random(11)
    async with nodes(2) as (a, b):
        a.handle(ECHO, 1000, echo_link)
        good = await b.open_link(a.peer_id, ECHO, addresses=a.addresses())
        for _ in range(20):
            stream = await b.host.connections(a.peer_id)[0].open_stream(ECHO)
            try:
                for _ in range(10):
                    await stream.send_all(rng.randbytes(rng.randrange(1, 3000)))
                while await stream.receive_some():
                    pass
            except LinkError:
                pass
        await good.send(b"fine")
        assert bytes(await good.receive()) == b"fine"
