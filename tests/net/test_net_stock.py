"""Links over py-libp2p's multiplexer: at a stock peer, and here, in the place of ours."""

from __future__ import annotations

import contextlib
import logging
from itertools import permutations
from typing import Any

import pytest
import trio
from helpers_net import ECHO, RelayProcess, address_of, echo_link, exchange, hosts, key, nodes, pattern, until
from proxy import tcp_proxy
from test_net_interop import stock

from kvasir_peer.errors import LinkError
from kvasir_peer.net import maddr, yamux
from kvasir_peer.net.framing import Assembler, OutgoingFrame, own_piece
from kvasir_peer.net.host import Host
from kvasir_peer.net.link import LINK_ID_BYTES, LINK_VERSION, Link, Own, Priority
from kvasir_peer.net.node import Node
from kvasir_peer.net.stock import StockMux
from kvasir_peer.wire import ring

BOTH = pytest.mark.parametrize(
    "muxers",
    [("own", "stock"), ("stock", "own"), ("stock", "stock")],
    ids=["dialled", "dialling", "both"],
)


class FramesAtAStockPeer:
    """Our links' frames, written by hand on a stream of py-libp2p's host: what a peer of another project would do."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._frames: list[bytes] = []
        self.messages: list[bytes] = []
        self._assembler = Assembler(
            8_000_000, lambda cls, frame: self._frames.append(bytes(frame)), self.messages.append
        )

    async def hello(self) -> None:
        await self._stream.write(own_piece(bytes([Own.HELLO, LINK_VERSION]) + bytes(LINK_ID_BYTES) + b"\0"))

    async def send(self, frame: bytes) -> None:
        out = OutgoingFrame(1, [memoryview(frame)], len(frame))
        room = memoryview(bytearray(60_000))
        while True:
            await self._stream.write(bytes(room[: out.cut(room)]))
            if out.sent == out.size:
                return

    async def receive(self) -> bytes:
        while not self._frames:
            self._assembler.feed(memoryview(await self._stream.read(64 * 1024)))
        return self._frames.pop(0)


async def test_links_reach_a_stock_peer_and_come_from_one() -> None:
    async with stock("/ip4/127.0.0.1/tcp/0") as other, nodes(1) as (ours,):

        async def serve(stream: Any) -> None:
            frames = FramesAtAStockPeer(stream)
            while True:
                await frames.send(await frames.receive())

        other.set_stream_handler("/link/1", serve)
        ours.handle("/link/1", 8_000_000, echo_link)
        address = str(other.get_addrs()[0])
        peer = maddr.parse(address).peer
        link = await ours.open_link(peer, "/link/1", addresses=[address])
        back = await other.new_stream(_stock_id(ours.peer_id), ["/link/1"])
        frames = FramesAtAStockPeer(back)
        await frames.hello()
        with trio.fail_after(30):
            for size in (0, 1, 16 * 1024, 300_000, 4 * 1024 * 1024):
                data = pattern(size)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(link.send, data, Priority.PREFILL)
                    assert bytes(await link.receive()) == data
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(frames.send, data)
                    assert await frames.receive() == data
        assert not frames.messages, "nothing is said to a side that knows nothing of moving"


def _stock_id(peer: str) -> Any:
    from libp2p.peer.id import ID

    return ID.from_base58(peer)


def _is_stock(node: Node, peer: str) -> bool:
    return all(isinstance(connection.mux, StockMux) for connection in node.host.connections(peer))


@BOTH
async def test_links_and_a_ring_s_message_pass(muxers: tuple[Any, Any]) -> None:
    async with Node.open(key(), listen=["/ip4/127.0.0.1/tcp/0"], muxer=muxers[0]) as a:
        a.handle(ECHO, 8_000_000, echo_link)
        async with Node.open(key(), muxer=muxers[1]) as b:
            link = await b.open_link(a.peer_id, ECHO, addresses=a.addresses())
            assert (_is_stock(a, b.peer_id), _is_stock(b, a.peer_id)) == tuple(m == "stock" for m in muxers)
            with trio.fail_after(30):
                for size in (0, 1000, 16 * 1024, 300_000, 4_000_000):
                    data = pattern(size)
                    await link.send(data, Priority.PREFILL)
                    assert bytes(await link.receive()) == data
                message = ring.Hello("batches", "a plan", 3)
                await link.send(ring.OPENING.encode(message), Priority.CONTROL)
                assert ring.OPENING.decode(await link.receive())[0] == message
            await link.aclose()
            await until(lambda: not a.statistics().links and not b.statistics().links)
            for node, other in ((a, b), (b, a)):
                (connection,) = node.host.connections(other.peer_id)
                await until(lambda c=connection: not c.mux.streams, what="the closed link is forgotten")


async def test_a_link_s_urgent_frame_still_goes_before_its_bulk() -> None:
    async with nodes(2, muxer="stock") as (a, b):
        came: list[int] = []

        async def take(link: Link) -> None:
            while True:
                came.append(len(await link.receive()))

        a.handle(ECHO, 8_000_000, take)
        target = maddr.parse(a.addresses()[0])
        async with tcp_proxy((target.host, target.port), rate=20e6) as proxy:
            address = f"/ip4/127.0.0.1/tcp/{proxy.port}/p2p/{a.peer_id}"
            link = await b.open_link(a.peer_id, ECHO, addresses=[address])
            for _ in range(3):
                await link.send(bytes(3_000_000), Priority.WEIGHTS)
            await link.send(b"now", Priority.DECODE)
            await until(lambda: len(came) == 4)
        assert came.index(3) < 2, "a decode frame waited behind all of the bulk"


async def test_a_receiver_that_stalls_for_eight_seconds_loses_nothing(
    mock_clock: trio.testing.MockClock,
) -> None:
    """Y1: py-libp2p's writer resets the stream after 5 s without window."""
    mock_clock.rate = 8.0
    async with nodes(2, muxer="stock") as (a, b):

        async def slow(link: Link) -> None:
            await trio.sleep(8)
            await echo_link(link)

        a.handle(ECHO, 10_000_000, slow)
        link = await b.open_link(a.peer_id, ECHO, addresses=a.addresses())
        data = pattern(6_000_000)
        await link.send(data, Priority.PREFILL)
        assert bytes(await link.receive()) == data


async def test_cancelled_writes_and_opens_leave_the_connection_usable() -> None:
    """Y5: py-libp2p's connection is lost by either."""
    async with hosts(2, muxer="stock") as (a, b):
        target = address_of(a)
        async with tcp_proxy((target.host, target.port), delay=0.01, rate=4e6) as proxy:
            connection = await b.dial(maddr.parse(f"/ip4/127.0.0.1/tcp/{proxy.port}/p2p/{a.peer_id}"))
            stream = await connection.open_stream(ECHO)
            for number in range(10):
                with trio.move_on_after(0.001):
                    await connection.open_stream(ECHO)
                lost = await connection.open_stream(ECHO)
                with trio.move_on_after(0.002):
                    await lost.send_all(bytes([number]) * 500_000)
                lost.reset("given up")
            assert await exchange(stream, pattern(50_000)) == pattern(50_000)


async def test_peers_behind_a_relay_use_it_inside_circuits(relay: RelayProcess) -> None:
    async with (
        Node.open(key(), relays=[relay.address], direct=False, muxer="stock") as a,
        Node.open(key(), relays=[relay.address], direct=False, muxer="stock") as b,
    ):
        a.handle(ECHO, 8_000_000, echo_link)
        await a.relays_ready(20)
        await b.relays_ready(20)
        link = await b.open_link(a.peer_id, ECHO)
        assert link.path == "relayed" and _is_stock(a, b.peer_id)
        for size in (0, 16 * 1024, 1_000_000):
            data = pattern(size)
            await link.send(data, Priority.PREFILL)
            assert bytes(await link.receive()) == data


async def test_ends_are_seen_on_both_sides() -> None:
    async with hosts(2, muxer="stock") as (a, b):
        connection = await b.dial(address_of(a))
        ended: list[str] = []

        async def serve(stream: yamux.MuxedStream) -> None:
            data = await stream.receive_some()
            if data == b"reset":
                stream.reset("no thanks")
            ended.append(data.decode())
            assert await stream.receive_some() == b""
            await stream.send_all(b"the last words")

        a.handle("/ends/1", serve)
        stream = await connection.open_stream("/ends/1")
        await stream.send_all(b"reset")
        with pytest.raises(LinkError), trio.fail_after(10):
            await stream.receive_some()
        stream = await connection.open_stream("/ends/1")
        await stream.send_all(b"finish")
        stream.finish()
        with trio.fail_after(10):
            assert await stream.receive_some() == b"the last words"
            assert await stream.receive_some() == b""
        connection.abort("as if killed")
        await until(lambda: not a.connections(b.peer_id))
        with pytest.raises(LinkError):
            await connection.open_stream("/ends/1")


async def test_a_silent_peer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Y6: py-libp2p never notices."""
    monkeypatch.setattr("kvasir_peer.net.connection.HEARTBEAT_IDLE_S", 0.2)
    monkeypatch.setattr("kvasir_peer.net.connection.DEAD_IDLE_S", 0.8)
    async with hosts(2, muxer="stock") as (a, b):
        target = address_of(a)
        async with tcp_proxy((target.host, target.port)) as proxy:
            connection = await b.dial(maddr.parse(f"/ip4/127.0.0.1/tcp/{proxy.port}/p2p/{a.peer_id}"))
            await trio.sleep(1.8)  # longer than a silent one would be let live
            assert not connection.closed.is_set(), "pings are answered"
            proxy.freeze()
            with trio.fail_after(10):
                await connection.closed.wait()
            assert "nothing came" in connection.reason


async def test_bytes_that_nobody_reads_close_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Y3: py-libp2p does not enforce its window, so what it keeps is looked at."""
    monkeypatch.setattr("kvasir_peer.net.stock.MAX_BUFFERED_BYTES", 2_000_000)
    async with hosts(1, muxer="stock") as (host,), hosts(1) as (bad,):

        async def never_reads(stream: yamux.MuxedStream) -> None:
            await trio.sleep_forever()

        host.handle("/never/reads/1", never_reads)
        connection = await bad.dial(address_of(host))
        stream = await connection.open_stream("/never/reads/1")
        stream.send_window = 10**9  # as if it had been granted
        await stream.send_all(bytes(20_000_000))
        with trio.fail_after(10):
            await connection.closed.wait()
        await until(lambda: not host.connections(bad.peer_id))


@pytest.mark.parametrize("direction", ["feed", "pull"])
async def test_a_peer_with_whom_our_own_fails_is_spoken_to_by_the_stock_one(
    direction: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault of ours that nobody has thought of costs one connection; the next works, and others never notice."""
    works = getattr(yamux.Yamux, direction)
    async with hosts(3) as (host, troubled, other):

        def fails(self: yamux.Yamux, data: memoryview) -> Any:
            if type(self) is yamux.Yamux and self.remote_peer == troubled.peer_id:
                raise ZeroDivisionError("a fault that nobody has thought of")
            return works(self, data)

        monkeypatch.setattr(yamux.Yamux, direction, fails)
        with caplog.at_level(logging.CRITICAL, "kvasir_peer.net.connection"):
            with trio.fail_after(10), contextlib.suppress(LinkError):  # it may end before it was ready
                await (await troubled.dial(address_of(host))).closed.wait()
            await until(lambda: not host.connections(troubled.peer_id))
        healthy = await other.dial(address_of(host))
        again = await troubled.dial(address_of(host))
        data = pattern(300_000)
        for connection in (again, healthy):
            assert await exchange(await connection.open_stream(ECHO), data) == data
        assert [_kind(host, peer) for peer in (troubled, other)] == [StockMux, yamux.Yamux]


def _kind(host: Host, peer: Host) -> type:
    (connection,) = host.connections(peer.peer_id)
    return type(connection.mux)


async def test_fifty_streams_at_once_between_all_kinds() -> None:
    data = pattern(20_000)
    async with hosts(1) as (own,), hosts(1, muxer="stock") as (stock_host,):
        for near, far in permutations((own, stock_host)):
            connection = await near.dial(address_of(far))

            async def one(connection: Any = connection) -> None:
                stream = await connection.open_stream(ECHO)
                assert await exchange(stream, data) == data
                await stream.aclose()

            async with trio.open_nursery() as nursery:
                for _ in range(50):
                    nursery.start_soon(one)
            await until(lambda c=connection: not c.mux.streams, what="all streams are forgotten")
            connection.close()
