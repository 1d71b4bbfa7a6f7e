"""Links that move: from the relay to a direct connection, and back when that breaks. No frame is lost or repeated."""

from __future__ import annotations

import random
import secrets
import signal
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
from helpers_net import LOOPBACK, RelayProcess, key, relay_process, until

from kvasir_peer.errors import LinkError
from kvasir_peer.net import framing, upgrade
from kvasir_peer.net import node as node_module
from kvasir_peer.net.link import LINK_ID_BYTES, Link, Own, Priority
from kvasir_peer.net.node import Node, PeerEvent
from kvasir_peer.net.upgrade import interface_addresses

STREAM = "/kvasir/test/stream/1"


@asynccontextmanager
async def pair(relay: RelayProcess, *, direct: tuple[bool, bool] = (True, True)) -> AsyncIterator[list[Node]]:
    """Two nodes that know only the relay; each may listen for direct connections."""
    async with (
        Node.open(key(), relays=[relay.address], listen=[LOOPBACK], direct=direct[0]) as a,
        Node.open(key(), relays=[relay.address], listen=[LOOPBACK], direct=direct[1]) as b,
    ):
        await a.relays_ready(20)
        await b.relays_ready(20)
        yield [a, b]


class Counting:
    """Sends numbered frames of all priorities on a link and checks those that come: each once, in order."""

    def __init__(self, link: Link, seed: int) -> None:
        self.link = link
        self.random = random.Random(seed)
        self.sent = [0] * 4
        self.received = [0] * 4
        self.stop = False

    async def send(self) -> None:
        while not self.stop:
            priority = self.random.randrange(4)
            number = self.sent[priority]
            size = self.random.choice((0, 10, 1000, 20_000, 300_000))
            await self.link.send(struct.pack(">BI", priority, number) + bytes(size), Priority(priority))
            self.sent[priority] += 1
            if self.random.random() < 0.2:
                await trio.sleep(self.random.random() * 0.01)
        await self.link.send(b"end", Priority.CONTROL)

    async def receive(self) -> None:
        ended = False
        while not ended or self.received != self.expected:
            frame = await self.link.receive()
            if bytes(frame) == b"end":
                ended = True
                self.expected = self.other.sent
                continue
            priority, number = struct.unpack_from(">BI", frame)
            assert number == self.received[priority], (
                f"priority {priority}: {number} came, not {self.received[priority]}"
            )
            self.received[priority] += 1

    expected: list[int]
    other: Counting


@asynccontextmanager
async def traffic(a: Node, b: Node) -> AsyncIterator[tuple[Link, Link]]:
    """Numbered frames both ways on a link that b opened to a, checked to the last one at the end of the block."""
    ends: list[Link] = []
    done = trio.Event()

    async def serve(link: Link) -> None:
        ends.append(link)
        await done.wait()

    a.handle(STREAM, 1_000_000, serve)
    near = await b.open_link(a.peer_id, STREAM, max_frame=1_000_000)
    await until(lambda: ends)
    here, there = Counting(near, 1), Counting(ends[0], 2)
    here.other, there.other = there, here
    with trio.fail_after(40):
        async with trio.open_nursery() as nursery:
            for side in (here, there):
                nursery.start_soon(side.send)
                nursery.start_soon(side.receive)
            yield near, ends[0]
            here.stop = there.stop = True
    assert sum(here.received) > 10 and sum(there.received) > 10
    done.set()


async def test_a_live_link_moves_to_a_direct_connection_without_losing_a_frame(
    relay: RelayProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upgrade, "ATTEMPTS_S", (0.5, 0.5, 0.5))
    async with pair(relay) as (a, b):
        events: list[PeerEvent] = []
        b.on_peer(events.append)
        async with traffic(a, b) as (near, far):
            assert near.path == "relayed"
            await until(lambda: near.path == far.path == "direct", what="the link is direct on both sides")
            await trio.sleep(0.3)
        state = near.statistics()
        assert (state.path, state.path_changes) == ("direct", 1)
        assert [e.state for e in events] == ["connected", "path"]
        assert b.peers() == {a.peer_id: "direct"}


async def test_a_link_falls_back_to_the_relay_and_comes_again(
    relay: RelayProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upgrade, "ATTEMPTS_S", (0.3, 0.5))
    monkeypatch.setattr(upgrade, "AGAIN_S", 0.5)
    async with pair(relay) as (a, b), traffic(a, b) as (near, far):
        for round_ in range(4):
            await until(lambda: near.path == far.path == "direct")
            await trio.sleep(0.1)
            breaker = (a, b)[round_ % 2]
            other = (b, a)[round_ % 2]
            for connection in breaker.host.connections(other.peer_id):
                if connection.path == "direct":
                    connection.abort("the cable was pulled")
            changes = 2 * round_ + 2
            await until(lambda changes=changes: near.statistics().path_changes >= changes)
        assert near.statistics().path_changes >= 7


async def test_links_live_through_a_change_of_our_own_address(
    relay: RelayProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "ADDRESS_LOOK_S", 0.05)
    present = {"127.0.0.1"}
    monkeypatch.setattr(upgrade, "present_addresses", lambda: set(present))
    async with pair(relay) as (a, b), traffic(a, b) as (near, far):
        await trio.sleep(0.3)
        dropped = [c for node in (a, b) for c in node.host.connections()]
        # In life only one of them moves, and the other hears nothing; here the second hears of the first's reset.
        for node in (a, b):
            node._grace_until = trio.current_time() + node_module.RENUMBER_S
        present.clear()
        with trio.fail_after(15):
            await until(lambda: all(c.closed.is_set() for c in dropped))
            present.add("127.0.0.1")
            await until(lambda: a.addresses() and b.addresses() and not near.adrift and not far.adrift)
        before = near.statistics().frames_received
        await until(lambda: near.statistics().frames_received > before + 20)
        assert not near.closed and not far.closed


async def test_a_relay_that_shuts_down_is_left_before_it_closes_and_held_again_afterwards(
    tmp_path: Path,
) -> None:
    """Two relays, circuits alone: links go over to the other relay's without losing a frame."""
    async with (
        relay_process(tmp_path / "one", "--drain-time", "30s") as one,
        relay_process(tmp_path / "two") as two,
        AsyncExitStack() as stack,
    ):
        addresses = [one.address, two.address]
        a, b = [
            await stack.enter_async_context(Node.open(key(), relays=addresses, direct=False)) for _ in "ab"
        ]
        for node in (a, b):
            await node.relays_ready(20)
        relay_id = one.address.rpartition("/")[2]
        await b.connect(a.peer_id, [f"{one.address}/p2p-circuit/p2p/{a.peer_id}"])
        async with traffic(a, b) as (near, far):
            [first] = b.host.connections(a.peer_id)
            assert first.address == relay_id and near.runs_over(first)
            one.signal(signal.SIGTERM)
            with trio.fail_after(10):
                await until(lambda: len(a.addresses()) == len(b.addresses()) == 1)
                await until(lambda: not near.runs_over(first), what="the link runs through the other relay")
                await first.closed.wait()
            # Nothing held the relay up any longer, so it did not have to wait out its half minute.
            assert one.process is not None
            assert await trio.to_thread.run_sync(one.process.wait, 10) == 0
            before = far.statistics().frames_received
            await until(lambda: far.statistics().frames_received > before)
            assert not near.closed and near.path == "relayed"
        assert "shutting down" in a.relay_words() or "cannot reach" in a.relay_words()
        one.kill()
        await one.start()
        for node in (a, b):
            await node.relays_ready(10)
            assert node.relay_words() == "reachable through 2 relays"


async def test_the_only_relay_is_used_until_it_closes(tmp_path: Path) -> None:
    async with (
        relay_process(tmp_path, "--drain-time", "3s") as relay,
        pair(relay, direct=(False, False)) as (a, b),
    ):
        ends: list[Link] = []

        async def serve(link: Link) -> None:
            ends.append(link)
            await link.receive()

        a.handle(STREAM, 1000, serve)
        await b.open_link(a.peer_id, STREAM)
        relay.signal(signal.SIGTERM)
        await until(lambda: a.addresses() == [] and b.addresses() == [])
        assert a.statistics().relays[0].state == "draining"
        await b.open_link(a.peer_id, STREAM)
        await until(lambda: len(ends) == 2)
        await until(lambda: all(link.closed for link in ends), timeout=10)


async def test_nothing_moves_where_one_side_wants_circuits_alone(relay: RelayProcess) -> None:
    for direct in ((True, False), (False, True), (False, False)):
        async with pair(relay, direct=direct) as (a, b), traffic(a, b) as (near, far):
            await trio.sleep(0.5)
            assert near.path == far.path == "relayed"
            assert not far._kept and not near.movable and not far.movable


async def test_a_peer_that_dies_is_noticed_though_its_link_could_move(relay: RelayProcess) -> None:
    async with Node.open(key(), relays=[relay.address], listen=[LOOPBACK]) as a:
        await a.relays_ready(20)
        ends: list[Link] = []

        async def serve(link: Link) -> None:
            ends.append(link)
            await link.receive()

        a.handle(STREAM, 1000, serve)
        async with trio.open_nursery() as nursery:
            moved = trio.Event()

            async def brief() -> None:
                async with Node.open(key(), relays=[relay.address], listen=[LOOPBACK]) as b:
                    link = await b.open_link(a.peer_id, STREAM)
                    await until(lambda: link.path == "direct")
                    moved.set()
                    await trio.sleep_forever()

            nursery.start_soon(brief)
            await moved.wait()
            nursery.cancel_scope.cancel()
        await until(lambda: ends[0].closed, timeout=5)


async def test_the_hole_is_punched_where_plain_dials_fail(
    relay: RelayProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCUtR itself, on loopback: the other side's listen addresses are hidden from identify."""
    async with pair(relay) as (a, b):
        for node in (a, b):
            monkeypatch.setattr(node, "addresses", list)
            node._relays_changed()
        async with traffic(a, b) as (near, far):
            await until(lambda: near.path == far.path == "direct")
            await trio.sleep(0.5)


async def test_nobody_takes_over_the_link_of_another(relay: RelayProcess) -> None:
    async with pair(relay) as (a, b), Node.open(key()) as thief:
        ends: list[Link] = []
        done = trio.Event()

        async def serve(link: Link) -> None:
            ends.append(link)
            await done.wait()

        a.handle(STREAM, 1000, serve)
        link = await b.open_link(a.peer_id, STREAM)
        await until(lambda: ends)
        await thief.connect(a.peer_id, [f"{a.host.listening[0]}/p2p/{a.peer_id}"])
        (connection,) = thief.host.connections(a.peer_id)
        for link_id in (link.link_id, secrets.token_bytes(LINK_ID_BYTES)):
            stream = await connection.open_stream(STREAM)
            await stream.send_all(framing.own_piece(bytes([Own.RESUME]) + link_id + bytes(8)))
            answer = await stream.receive_some()
            assert answer[4] == Own.REFUSED
        # Nor may the owner say that it has received what was never sent.
        await link.settled.wait()
        mine = b.host.connections(a.peer_id)[0]
        stream = await mine.open_stream(STREAM)
        await stream.send_all(framing.own_piece(bytes([Own.RESUME]) + link.link_id + struct.pack(">Q", 5)))
        with pytest.raises(LinkError):
            await stream.receive_some()
        await link.send(b"still here")
        assert bytes(await ends[0].receive()) == b"still here"
        done.set()


def test_any_address_is_written_out_for_each_interface() -> None:
    assert interface_addresses("/ip4/192.0.2.1/tcp/5") == ["/ip4/192.0.2.1/tcp/5"]
    assert all(
        text.endswith("/tcp/5") and "/0.0.0.0/" not in text
        for text in interface_addresses("/ip4/0.0.0.0/tcp/5")
    )
    assert not any("/127." in text for text in interface_addresses("/ip4/0.0.0.0/tcp/5"))


def test_addresses_of_others_are_dialled_with_care() -> None:
    peer = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    claims = [
        None,
        "/ip4/127.0.0.1/tcp/22",
        "/ip4/224.0.0.1/tcp/22",
        "/ip4/0.0.0.0/tcp/22",
        "/ip4/192.0.2.1/udp/5",
        "/ip4/192.0.2.1/tcp/5/ws",
        "/dns4/inside.example/tcp/5",
        f"/ip4/192.0.2.1/tcp/5/p2p/{peer}/p2p-circuit",
        *[f"/ip4/192.0.2.{number}/tcp/5/p2p/{peer}" for number in range(1, 30)],
    ]
    dialled = upgrade._dialable(iter(claims), peer, loopback=False)
    assert len(dialled) == upgrade.MAX_ADDRESSES
    assert {a.host.rpartition(".")[0] for a in dialled} == {"192.0.2"}
    assert [a.host for a in upgrade._dialable(iter(claims[:2]), peer, loopback=True)] == ["127.0.0.1"]
