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
from kvasir_peer.net import connection as connections
from kvasir_peer.net import delimited, host, maddr, multistream, noise, upgrade, upstream, yamux
from kvasir_peer.net.connection import Connection
from kvasir_peer.net.host import Host, HostLimits
from kvasir_peer.net.noise import NoiseIdentity, Secured, _RawConnection

PLAINTEXT = "/plaintext/2.0.0"


class Raw:
    """A stranger who has done the handshake and then says what he likes, byte for byte."""

    def __init__(self, stream: trio.SocketStream, secured: Secured) -> None:
        self.stream = stream
        self.secured = secured

    @classmethod
    async def shake_hands(cls, host: Host) -> Raw:
        """On a connection of its own, with a fresh key."""
        stream = await raw_connection(host)
        return cls(stream, await NoiseIdentity(key()).secure_outbound(stream, host.peer_id))

    async def say(self, *plain: bytes) -> None:
        """Each as an encrypted message."""
        for data in plain:
            out = memoryview(bytearray(len(data) + noise.OVERHEAD))
            self.secured.send.seal(memoryview(data), out)
            await self.stream.send_all(out)

    async def wait_for_the_end(self) -> None:
        """Until the other side has closed the connection."""
        with trio.fail_after(20), contextlib.suppress(trio.BrokenResourceError):
            while await self.stream.receive_some():
                pass
        await self.stream.aclose()


AGREED = multistream.encode(multistream.HEADER, yamux.PROTOCOL)


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


@pytest.mark.parametrize(
    "said",
    [
        [b"\xff" * 100],
        [b"\x00"],
        [b"\x13/multistream/9.9.9\n"],
        [multistream.encode(multistream.HEADER) + b"\xff\xff\x7f"],
        [multistream.encode(multistream.HEADER), *[multistream.encode(f"/mplex/{n}") for n in range(20)]],
        [AGREED, b"\xff" * 5000],
        [AGREED, yamux.HEADER.pack(0, yamux.DATA, yamux.SYN, 1, 0xFFFFFFFF)],
        [AGREED, yamux.HEADER.pack(0, yamux.WINDOW_UPDATE, yamux.SYN, 1, 0xFFFFFFFF) * 2],
        [AGREED, yamux.HEADER.pack(0, yamux.DATA, 0, 99, 10)],
    ],
    ids=range(9),
)
async def test_garbage_after_the_handshake_costs_that_connection_alone(said: list[bytes]) -> None:
    async with hosts(2) as (host, good):
        connection = await good.dial(address_of(host))
        stream = await connection.open_stream(ECHO)
        raw = await Raw.shake_hands(host)
        with contextlib.suppress(trio.BrokenResourceError):
            await raw.say(*said)
        await raw.wait_for_the_end()
        await until(lambda: host._inbound_open == 1 and not host._beginning)
        assert await exchange(stream, b"fine") == b"fine"


@pytest.mark.parametrize("size", [0, 1, 15])
async def test_messages_too_short_to_be_sealed_close_the_connection(size: int) -> None:
    async with hosts(1) as (host,):
        raw = await Raw.shake_hands(host)
        await raw.stream.send_all(struct.pack(">H", size) + bytes(size))
        await raw.wait_for_the_end()
        await until(lambda: host._inbound_open == 0)


async def test_who_only_proves_a_key_is_let_go_and_keeps_his_place_in_the_queue_until_then(
    mock_clock: trio.testing.MockClock,
) -> None:
    """Otherwise 1,024 fresh keys would keep everybody out for ever."""
    mock_clock.rate = 1.0  # it stands still otherwise
    async with hosts(1, limits=HostLimits(max_handshakes_per_address=3)) as (host,):
        silent = [await Raw.shake_hands(host) for _ in range(3)]
        await until(lambda: len(host._beginning) == 3)
        assert host.statistics().handshakes == 3
        refused = await raw_connection(host)
        with contextlib.suppress(trio.BrokenResourceError):
            assert await refused.receive_some() == b""
        mock_clock.rate = 20.0
        for raw in silent:
            await raw.wait_for_the_end()
        await until(lambda: host.statistics().handshakes == 0 and host._inbound_open == 0)
        assert not host._beginning
        await refused.aclose()


async def test_a_callee_that_only_proves_its_key_is_given_up(mock_clock: trio.testing.MockClock) -> None:
    mock_clock.rate = 8.0
    identity = NoiseIdentity(key())

    async def silent(stream: trio.SocketStream) -> None:
        await identity.secure_inbound(stream)
        await trio.sleep_forever()

    async with hosts(1) as (host,), trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, silent, 0)
        port = listeners[0].socket.getsockname()[1]
        with (
            trio.fail_after(10 * connections.AGREE_S),
            pytest.raises(LinkError, match="agree on a multiplexer"),
        ):
            await host.dial(maddr.parse(f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer_id}"))
        nursery.cancel_scope.cancel()


async def test_streams_opened_and_reset_without_end_close_that_connection_and_no_other() -> None:
    """The flood of CVE-2023-44487, in Yamux."""
    async with hosts(2) as (host, good):
        connection = await good.dial(address_of(host))
        stream = await connection.open_stream(ECHO)
        raw = await Raw.shake_hands(host)
        pairs = b"".join(
            yamux.HEADER.pack(0, yamux.WINDOW_UPDATE, flag, number, 0)
            for number in range(1, 8000, 2)
            for flag in (yamux.SYN, yamux.RST)
        )
        with contextlib.suppress(trio.BrokenResourceError):
            await raw.say(AGREED, *[pairs[at : at + 60_000] for at in range(0, len(pairs), 60_000)])
        await raw.wait_for_the_end()
        await until(lambda: not host._serving or set(host._serving) <= set(host.connections(good.peer_id)))
        assert await exchange(stream, b"fine") == b"fine"


async def test_handlers_that_go_on_after_a_reset_count_until_they_are_over() -> None:
    async with hosts(2, limits=HostLimits(max_inbound_streams=10)) as (host, bad):
        running = 0
        over = trio.Event()

        async def slow(stream: yamux.MuxedStream) -> None:
            nonlocal running
            running += 1
            await over.wait()
            running -= 1

        host.handle("/slow/1", slow)
        connection = await bad.dial(address_of(host))
        refused = 0
        for _ in range(30):
            try:
                (await connection.open_stream("/slow/1")).reset("never mind")
            except LinkError:
                refused += 1
        assert running == 10 and refused == 20
        over.set()
        await until(lambda: running == 0)
        (await connection.open_stream("/slow/1")).close()


async def test_a_slow_proposal_ends_its_stream_alone(mock_clock: trio.testing.MockClock) -> None:
    mock_clock.rate = 1.0
    async with hosts(2) as (target, slow):
        connection = await slow.dial(address_of(target))
        stream = connection.mux.open()
        other = await connection.open_stream(ECHO)
        mock_clock.rate = 20.0
        with trio.fail_after(10 * host.NEGOTIATE_S), contextlib.suppress(LinkError):
            for byte in multistream.encode(multistream.HEADER, ECHO):
                await stream.send_all(bytes([byte]))
                await trio.sleep(1)
            pytest.fail("a byte a second was waited for to the end")
        assert await exchange(other, b"fine") == b"fine"


@pytest.mark.parametrize(
    "pushed",
    [b"\x05nonsense", b"\xff\xff\xff\xff\x7f", b"\x80" * 40, b""],
    ids=["wrong", "huge", "long", "nothing"],
)
async def test_a_push_of_identify_that_makes_no_sense_ends_its_stream_alone(pushed: bytes) -> None:
    async with nodes(2) as (a, b):
        a.handle(ECHO, 1000, echo_link)
        link = await b.open_link(a.peer_id, ECHO, addresses=a.addresses())
        a._supervise(maddr.parse(f"/ip4/127.0.0.1/tcp/1/p2p/{b.peer_id}"))  # as if b were a relay of a's
        stream = await b.host.connections(a.peer_id)[0].open_stream("/ipfs/id/push/1.0.0")
        await stream.send_all(pushed)
        stream.finish()
        with contextlib.suppress(LinkError), trio.fail_after(10):
            assert await stream.receive_some() == b""
        await link.send(b"fine")
        assert bytes(await link.receive()) == b"fine"


async def test_hole_punching_is_answered_one_at_a_time_and_only_in_turn() -> None:
    async with nodes(2) as (a, b):
        await b.connect(a.peer_id, a.addresses())
        (connection,) = b.host.connections(a.peer_id)
        first = await connection.open_stream(upgrade.PROTOCOL)
        await until(lambda: a._upgrader is not None and a._upgrader._awaited)
        with pytest.raises(LinkError), trio.fail_after(10):
            await (await connection.open_stream(upgrade.PROTOCOL)).receive_some()
        await delimited.write_message(
            first, upstream.dcutr_pb2.HolePunch(type=upstream.dcutr_pb2.HolePunch.SYNC)
        )
        with pytest.raises(LinkError), trio.fail_after(10):
            await first.receive_some()
        await until(lambda: a._upgrader is not None and not a._upgrader._awaited)
        (there,) = a.host.connections(b.peer_id)
        assert there.mux.violations == {"unexpected": 2}
