"""Circuits, as the specification has them; and the faults of py-libp2p's relay that must not come back."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from helpers_relay import (
    PATIENCE,
    HopMessage,
    Refused,
    joined,
    joined_circuit,
    receive,
    running_peers,
    running_relay,
    until,
)

from kvasir_peer.errors import LinkError
from kvasir_peer.identity import Identity
from kvasir_peer.net import circuit, upstream
from kvasir_peer.net.node import Node
from kvasir_peer.net.yamux import MuxedStream
from kvasir_relay.server import Relay


def nothing_held(relay: Relay) -> bool:
    held = relay.statistics().ledger
    return not held.circuits and not relay.hop.circuits


async def test_bytes_go_both_ways_and_half_closes_are_kept() -> None:
    async with running_relay() as relay, joined(relay, 2) as (source, target):
        near, far = await joined_circuit(source, target)
        up, down = bytes(range(256)) * 4096, b"answer" * 100_000
        async with trio.open_nursery() as nursery:
            nursery.start_soon(near.send_all, up)
            assert await receive(far, len(up)) == up
        near.finish()
        assert await far.receive_some() == b""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(far.send_all, down)
            assert await receive(near, len(down)) == down
        far.finish()
        assert await near.receive_some() == b""
        await until(lambda: nothing_held(relay))
        counted = relay.statistics().counters
        assert (counted.bytes_to_target, counted.bytes_to_source) == (len(up), len(down))
        assert counted.circuits_ended == {"closed": 1}


async def test_the_end_of_a_circuit_leaves_the_other_circuits_of_its_peers_alone() -> None:
    """R1: the stock relay closes whatever else the peer has, also in the middle of a pipeline a -> b -> c."""
    async with running_relay() as relay, joined(relay, 3) as (a, b, c):
        pairs = {
            name: await joined_circuit(source, target)
            for name, source, target in (
                ("ab", a, b),
                ("ab2", a, b),
                ("ac", a, c),
                ("bc", b, c),
                ("ba", b, a),
            )
        }
        for ended in ("ab", "ac"):
            near, far = pairs.pop(ended)
            near.reset()
            with pytest.raises(LinkError), trio.fail_after(5):
                await far.receive_some()
            for near, far in pairs.values():
                await near.send_all(b"still here")
                assert await receive(far, 10) == b"still here"
                await far.send_all(b"yes")
                assert await receive(near, 3) == b"yes"
        await until(lambda: relay.statistics().ledger.circuits == len(pairs))


async def test_twenty_circuits_of_one_peer_are_independent() -> None:
    async with running_relay() as relay, joined(relay, 4) as (a, b, c, d):
        pairs = [await joined_circuit(a, (b, c, d)[number % 3]) for number in range(20)]

        async def talk(number: int, near: MuxedStream, far: MuxedStream) -> None:
            message = bytes([number]) * 50_000
            await near.send_all(message)
            assert await receive(far, len(message)) == message
            if number % 2:
                far.reset()

        async with trio.open_nursery() as nursery:
            for number, (near, far) in enumerate(pairs):
                nursery.start_soon(talk, number, near, far)
        for near, far in pairs[::2]:
            await far.send_all(b"and back")
            assert await receive(near, 8) == b"and back"
        await until(lambda: relay.statistics().ledger.circuits == 10)


async def test_a_lost_end_is_told_to_the_other_and_gives_its_place_back() -> None:
    """R2: the stock relay never tells the target that the source was killed, and leaks the slot."""
    async with running_relay() as relay, joined(relay, 2) as (source, target):
        for lost, other in ((source, target), (target, source)):
            if lost.connection is None or lost.connection.closed.is_set():
                await lost.join(relay)
            await lost.reserve()
            near, far = await joined_circuit(source, target)
            assert lost.connection is not None
            lost.connection.abort("as if killed")
            stream = far if other is target else near
            with pytest.raises(LinkError), trio.fail_after(2):
                await stream.receive_some()
            await until(lambda: nothing_held(relay))
            await lost.join(relay)
        assert relay.statistics().shaper.peers == 0


async def test_a_reset_after_a_half_close_ends_the_circuit() -> None:
    """The other side is told though it neither reads nor sends: it would keep the circuit's place otherwise."""
    async with running_relay() as relay, joined(relay, 2) as (source, target):
        near, far = await joined_circuit(source, target)
        near.finish()
        assert await far.receive_some() == b""
        near.reset()
        await until(lambda: nothing_held(relay))
        await until(lambda: far.closed)
        with pytest.raises(LinkError):
            await far.send_all(b"is anybody there")


async def test_a_receiver_that_stands_still_costs_one_window_and_no_more() -> None:
    async with running_relay() as relay, joined(relay, 2) as (source, target):
        near, far = await joined_circuit(source, target)
        with trio.move_on_after(0.3) as scope:
            for _ in range(64):
                await near.send_all(bytes(65536))
        assert scope.cancelled_caught, "4 MiB went into a circuit whose receiver does not read"
        [circuit] = relay.hop.circuits
        assert circuit.flows[0].queued <= 256 * 1024
        assert circuit.flows[0].carried <= 2 * 256 * 1024
        assert await receive(far, 1000) == bytes(1000)


async def test_the_holder_of_a_reservation_is_the_authenticated_peer() -> None:
    """R4: the stock relay believes the id in the message, so that one peer takes all reservations."""
    async with running_relay(limits__reservations=2) as relay, running_peers(2) as (attacker, victim):
        await attacker.join(relay)
        await victim.join(relay)
        for _ in range(4):
            message = HopMessage(type=HopMessage.RESERVE)
            message.peer.id = upstream.PeerID.from_base58(Identity.generate().peer_id).to_bytes()
            await attacker.reserve(message=message)
        await victim.reserve()
        assert relay.statistics().ledger.reservations == 2


async def test_a_circuit_without_limits_says_so() -> None:
    """R3: for the stock relay a limit of 0 means that nothing may be carried."""
    async with running_relay() as relay, running_peers(2) as (source, target):
        for peer in (source, target):
            await peer.join(relay)
            answer = await peer.reserve()
            assert not answer.HasField("limit")
        near, far = await joined_circuit(source, target)
        assert target.limits == [None]
        await near.send_all(b"x")
        assert await receive(far, 1) == b"x"


async def test_limits_are_told_to_both_ends() -> None:
    limits: dict[str, Any] = {"limits__circuit_time": "90s", "limits__circuit_bytes": "1 MiB"}
    async with running_relay(**limits) as relay, running_peers(2) as (source, target):
        await source.join(relay)
        await target.join(relay)
        answer = await target.reserve()
        assert (answer.limit.duration, answer.limit.data) == (90, 2**20)
        await source.connect(target.peer_id)
        await target.incoming()
        [told] = target.limits
        assert (told.duration, told.data) == (90, 2**20)


async def test_the_voucher_is_the_one_of_the_specification() -> None:
    from libp2p.peer.envelope import unmarshal_envelope
    from libp2p.peer.id import ID

    async with running_relay() as relay, running_peers(1) as (peer,):
        await peer.join(relay)
        answer = await peer.reserve()
        envelope = unmarshal_envelope(answer.reservation.voucher)
        envelope.validate("libp2p-relay-rsvp")
        assert bytes(envelope.payload_type) == b"\x03\x02"
        assert ID.from_pubkey(envelope.public_key).to_base58() == relay.identity.peer_id
        voucher = upstream.circuit_pb2.Voucher()
        voucher.ParseFromString(envelope.raw_payload)
        assert ID(voucher.relay).to_base58() == relay.identity.peer_id
        assert ID(voucher.peer).to_base58() == peer.peer_id
        assert voucher.expiration == answer.reservation.expire


async def test_who_has_no_reservation_cannot_be_reached() -> None:
    async with running_relay() as relay, running_peers(2) as (source, target):
        await source.join(relay)
        await target.join(relay)
        for peer_id in (target.peer_id, Identity.generate().peer_id, relay.identity.peer_id):
            with pytest.raises(Refused) as refused:
                await source.connect(peer_id)
            assert (refused.value.status, refused.value.reason) == (204, "no_reservation")


async def test_a_target_that_refuses_or_is_silent_costs_the_source_one_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvasir_relay.hop.STOP_SECONDS", 0.2)
    async with running_relay() as relay, joined(relay, 2) as (source, target):
        for status, reason in ((202, "target_refused"), (0, "target_silent")):
            target.stop_status = status
            with pytest.raises(Refused) as refused:
                await source.connect(target.peer_id)
            assert (refused.value.status, refused.value.reason) == (203, reason)
        await until(lambda: nothing_held(relay))


async def test_a_peer_reaches_itself_so_that_it_can_check_its_address() -> None:
    async with running_relay() as relay, joined(relay, 1) as (peer,):
        near, far = await joined_circuit(peer, peer)
        await near.send_all(b"me")
        assert await receive(far, 2) == b"me"
        near.reset()
        await until(lambda: nothing_held(relay))


async def test_a_reservation_ends_with_its_time_and_with_its_connection() -> None:
    async with running_relay(limits__reservation_time="2s") as relay, joined(relay, 2) as (source, target):
        await source.connect(target.peer_id)
        await until(lambda: not relay.statistics().ledger.reservations)
        with pytest.raises(Refused) as refused:
            await source.connect(target.peer_id)
        assert refused.value.status == 204
        await target.reserve()
        assert target.connection is not None
        target.connection.close()
        await until(lambda: relay.statistics().ledger.reservations == 0)


async def test_a_peer_that_came_back_is_reached_over_its_new_connection() -> None:
    async with running_relay() as relay, joined(relay, 2) as (source, target):
        old = target.connection
        new = await target.join(relay)
        await target.reserve()
        _, far = await joined_circuit(source, target)
        assert far.mux is new.mux
        assert old is not None
        old.close()
        await until(lambda: len(relay.members()) == 2)
        _, far = await joined_circuit(source, target)
        assert far.mux is new.mux


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"\x05nonsense", 400),
        (b"\xff\xff\x7f", 400),  # a message of 2 MB is announced
        (b"\x02\x08\x02", 401),  # a status in place of a request
    ],
)
async def test_malformed_requests_are_refused_before_memory_is_taken(raw: bytes, status: int) -> None:
    from kvasir_peer.net import circuit, delimited

    async with running_relay() as relay, joined(relay, 1) as (peer,):
        assert peer.connection is not None
        stream = await peer.connection.open_stream(circuit.HOP)
        await stream.send_all(raw)
        with trio.fail_after(5):
            answer = await delimited.read_message(stream, HopMessage)
        assert answer.status == status
        await peer.reserve()


async def test_the_relay_dials_nobody_and_takes_no_circuits_itself() -> None:
    """No reaching into the relay's network by an address in a request, and no relaying over a second relay."""
    from kvasir_peer.net import circuit

    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    port = listener.socket.getsockname()[1]
    knocked = trio.Event()

    async def knock() -> None:
        await listener.accept()
        knocked.set()

    async with running_relay() as relay, joined(relay, 1) as (peer,), trio.open_nursery() as nursery:
        nursery.start_soon(knock)
        assert peer.connection is not None
        inner = Identity.generate().peer_id
        request = HopMessage(type=HopMessage.CONNECT)
        request.peer.id = upstream.PeerID.from_base58(inner).to_bytes()
        request.peer.addrs.append(upstream.Multiaddr(f"/ip4/127.0.0.1/tcp/{port}").to_bytes())
        with pytest.raises(Refused) as refused:
            await peer._ask(peer.connection, request)
        assert refused.value.status == 204
        with pytest.raises(LinkError):
            await peer.connection.open_stream(circuit.STOP)
        assert not knocked.is_set()
        nursery.cancel_scope.cancel()
    await listener.aclose()


async def test_end_to_end_encryption_hides_what_is_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvasir_peer.net.node import Node
    from kvasir_relay.circuits import Flow

    seen = bytearray()
    receive_there = Flow.receive

    def spy(self: Flow, data: memoryview) -> None:
        seen.extend(data)
        receive_there(self, data)

    monkeypatch.setattr(Flow, "receive", spy)
    marker = b"a marker that nobody else may read" * 10
    async with running_relay() as relay:
        address = relay.full_addresses[0]
        async with (
            Node.open(Identity.generate().private_key, relays=[address], direct=False) as a,
            Node.open(Identity.generate().private_key, relays=[address], direct=False) as b,
        ):
            got: list[bytes] = []
            done = trio.Event()

            async def take(link) -> None:  # type: ignore[no-untyped-def]
                got.append(bytes(await link.receive()))
                done.set()

            b.handle("/test/1", 4096, take)
            await a.relays_ready(10)
            await b.relays_ready(10)
            link = await a.open_link(b.peer_id, "/test/1", max_frame=4096, addresses=b.addresses())
            assert link.path == "relayed"
            await link.send(marker)
            with trio.fail_after(5):
                await done.wait()
    assert got == [marker]
    assert len(seen) > len(marker)
    assert marker not in seen
    assert b"a marker" not in seen


async def test_streams_of_one_peer_are_bounded() -> None:
    async with running_relay(limits__streams_per_connection=20) as relay, joined(relay, 1) as (peer,):
        assert peer.connection is not None
        for _ in range(100):
            peer.connection.mux.open()
        [member] = relay.members()
        await until(lambda: member.connection.mux.violations.get("streams", 0) == 80)
        assert len(member.connection.mux.streams) <= 20


async def test_our_peers_check_their_address_cheaply_and_only_when_nobody_else_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvasir_peer.net.relays.CHECK_S", 0.2)
    async with running_relay() as relay:
        address = relay.full_addresses[0]
        async with Node.open(Identity.generate().private_key, relays=[address], direct=False) as node:
            await node.relays_ready(PATIENCE)
            await until(lambda: relay.counters.circuits >= 3)
            assert node.statistics().relays[0].checked is True
            carried = relay.statistics().counters.bytes_to_target / relay.counters.circuits
            assert carried <= circuit.CHECK_BYTES, "a check is not a handshake"
            monkeypatch.setattr("kvasir_peer.net.relays.CHECK_S", 30.0)
            async with Node.open(Identity.generate().private_key) as other:
                await other.connect(node.peer_id, node.addresses())
                # Somebody has come that way within CHECK_S: no dial of our own is needed.
                before = relay.counters.circuits
                supervisor = node._supervisors[relay.identity.peer_id]
                checks = []
                monkeypatch.setattr(supervisor._listener, "check", checks.append)
                await supervisor._check(only(node.host, relay.identity.peer_id))
                assert not checks and relay.counters.circuits == before
                assert supervisor.statistics().checked is True


async def test_an_address_at_a_relay_that_forwards_nothing_is_not_advertised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvasir_relay.circuits import Flow

    monkeypatch.setattr("kvasir_peer.net.circuit.CHECK_S", 0.3)
    receive_there = Flow.receive
    monkeypatch.setattr(Flow, "receive", lambda self, data: None)
    async with running_relay() as relay:
        address = relay.full_addresses[0]
        async with Node.open(Identity.generate().private_key, relays=[address], direct=False) as node:
            await until(lambda: "does not answer" in node.statistics().relays[0].last_error)
            assert node.addresses() == []
            assert node.relay_words().endswith("does not answer")
            # Nor by other bytes than those that were sent.
            monkeypatch.setattr(
                Flow, "receive", lambda self, data: receive_there(self, memoryview(bytes(len(data))))
            )
            await until(lambda: node.statistics().relays[0].failures >= 2)
            assert node.addresses() == []
            monkeypatch.setattr(Flow, "receive", receive_there)
            await node.relays_ready(PATIENCE)
            assert node.addresses()


def only(host: Any, peer: str) -> Any:
    """The one connection to a peer."""
    [connection] = host.connections(peer)
    return connection
