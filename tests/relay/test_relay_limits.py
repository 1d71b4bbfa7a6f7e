"""Each limit is kept, is told to whoever meets it, and gives back what was taken."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from helpers_relay import (
    PATIENCE,
    HopMessage,
    Peer,
    Refused,
    joined,
    joined_circuit,
    receive,
    running_peers,
    running_relay,
    until,
)

from kvasir_peer.errors import LinkError
from kvasir_peer.net import circuit, delimited, upstream
from kvasir_peer.net.yamux import MuxedStream
from kvasir_relay.config import Limits
from kvasir_relay.limits import Ledger, LimitError, parse_address
from kvasir_relay.server import Relay

V4, V4_NEAR, V4_FAR = (parse_address(text) for text in ("203.0.113.5", "203.0.113.77", "198.51.100.9"))
V6, V6_NEAR, V6_FAR = (parse_address(text) for text in ("2001:db8::5", "2001:db8:0:ff::9", "2001:db8:1::5"))
A, B, C, D = (bytes([number]) * 38 for number in range(4))


def ledger(**limits: Any) -> Ledger:
    return Ledger(Limits(**limits), now=0.0)


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(LimitError) as error:
        action()
    return error.value.limit


# --- the books ---------------------------------------------------------------------------------------------------


def test_connections_are_limited_in_all_by_address_and_by_network() -> None:
    books = ledger(connections=4, connections_per_ip=2, connections_per_prefix=3)
    first = books.take_connection(V4)
    books.take_connection(V4)
    assert refused(lambda: books.take_connection(V4)) == "connections_per_ip"
    books.take_connection(V4_NEAR)
    assert refused(lambda: books.take_connection(V4_NEAR)) == "connections_per_prefix"
    books.take_connection(V4_FAR)
    assert refused(lambda: books.take_connection(V6)) == "connections"
    first.give_back()
    first.give_back()
    books.take_connection(V4_NEAR)
    assert refused(lambda: books.take_connection(V6)) == "connections"
    assert books.statistics().connections == 4


def test_a_network_of_ipv6_is_a_prefix_of_its_own() -> None:
    books = ledger(connections_per_prefix=1, prefix_v6=48)
    books.take_connection(V6)
    assert refused(lambda: books.take_connection(V6_NEAR)) == "connections_per_prefix"
    books.take_connection(V6_FAR)
    books.take_connection(parse_address("0.0.0.5"))
    assert parse_address("::ffff:203.0.113.5") == V4
    assert parse_address("fe80::1%eth0") == parse_address("fe80::1")


def test_reservations_are_limited_in_all_by_address_and_by_network() -> None:
    books = ledger(reservations=4, reservations_per_ip=2, reservations_per_prefix=3)
    taken = [books.take_reservation(V4), books.take_reservation(V4)]
    assert refused(lambda: books.take_reservation(V4)) == "reservations_per_ip"
    taken.append(books.take_reservation(V4_NEAR))
    assert refused(lambda: books.take_reservation(V4_NEAR)) == "reservations_per_prefix"
    taken.append(books.take_reservation(V4_FAR))
    assert refused(lambda: books.take_reservation(V6)) == "reservations"
    for place in taken:
        place.give_back()
    assert books.statistics().reservations == 0
    books.take_reservation(V4)


def test_circuits_are_limited_at_both_ends() -> None:
    books = ledger(circuits=9, circuits_per_peer=2, circuits_per_ip=4, circuits_per_prefix=6)
    books.take_circuit((A, B), (V4, V4_NEAR), 0)
    books.take_circuit((A, C), (V4, V4_NEAR), 0)
    assert refused(lambda: books.take_circuit((A, D), (V6, V6_FAR), 0)) == "circuits_per_peer"
    assert refused(lambda: books.take_circuit((D, A), (V6, V6_FAR), 0)) == "circuits_per_peer"
    books.take_circuit((B, C), (V4, V4), 0)
    books.take_circuit((D,), (V4, V4_FAR), 0)
    assert refused(lambda: books.take_circuit((D,), (V4, V6), 0)) == "circuits_per_ip"
    both_near = (parse_address("203.0.113.8"), parse_address("203.0.113.9"))
    with books.take_circuit((D,), both_near, 0):
        # Both ends in one network count once in it: five so far.
        assert refused(lambda: books.take_circuit((D,), (V6, V6), 0)) == "circuits_per_peer"
    assert books.statistics().circuits == 4
    for number in range(2):
        books.take_circuit((bytes([40 + number]),), both_near, 0)
    assert refused(lambda: books.take_circuit((b"x",), both_near, 0)) == "circuits_per_prefix"
    for number in range(3):
        books.take_circuit((bytes([60 + number]),), (V6,), 0)
    assert refused(lambda: books.take_circuit((b"y",), (V6_FAR,), 0)) == "circuits"


def test_new_connections_and_requests_are_limited_in_time() -> None:
    books = ledger(new_connections_per_ip=60, requests_per_peer=60, requests_per_ip=120)
    for _ in range(60):
        books.take_handshake(V4, 0.0).give_back()
        books.take_request(A, V4, 0.0)
    assert refused(lambda: books.take_handshake(V4, 0.5)) == "new_connections_per_ip"
    assert books.statistics().handshakes == 0
    books.take_handshake(V4_NEAR, 0.5)
    books.take_handshake(V4, 1.1)
    assert refused(lambda: books.take_request(A, V4, 0.5)) == "requests_per_peer"
    for _ in range(59):
        books.take_request(B, V4, 0.0)
    books.take_request(C, V4, 0.0)
    assert refused(lambda: books.take_request(D, V4, 0.0)) == "requests_per_ip"


def test_unproven_connections_are_limited_in_all_and_by_address() -> None:
    books = ledger(handshakes=3, handshakes_per_ip=2)
    books.take_handshake(V4, 0)
    with books.take_handshake(V4, 0):
        assert refused(lambda: books.take_handshake(V4, 0)) == "handshakes_per_ip"
    books.take_proxied_handshake()
    books.take_handshake(V4_FAR, 0)
    assert refused(books.take_proxied_handshake) == "handshakes"


def test_bytes_of_a_peer_are_limited_for_a_time_and_count_for_both_ends() -> None:
    books = ledger(peer_bytes=1000, peer_bytes_time=60)
    books.carry((A, B), 600, 0.0)
    books.carry((A,), 400, 1.0)
    assert refused(lambda: books.take_circuit((A, C), (V4, V4), 30.0)) == "peer_bytes"
    assert refused(lambda: books.carry((A, C), 1, 30.0)) == "peer_bytes"
    books.carry((B, C), 399, 30.0)
    assert books.peer_bytes_left(A, 61.0) == 1000
    books.carry((A, C), 500, 61.0)


def test_the_month_ends_what_the_operator_pays_for() -> None:
    books = ledger(month_bytes=1000)
    books.begin_month("2031-05", 900)
    books.carry((A, B), 100, 0.0)
    assert refused(lambda: books.take_circuit((A, B), (V4, V4), 0)) == "month_bytes"
    assert refused(lambda: books.carry((A, B), 1, 0.0)) == "month_bytes"
    books.begin_month("2031-05", 5)
    assert books.month_bytes == 1001
    books.begin_month("2031-06")
    books.carry((A, B), 100, 0.0)


def test_zero_means_no_limit() -> None:
    names = [
        name for name in Limits.__slots__ if not name.endswith("_time") and not name.startswith("prefix")
    ]
    books = ledger(**dict.fromkeys(names, 0))
    for _ in range(5000):
        books.take_connection(V4)
        books.take_handshake(V4, 0)
        books.take_reservation(V4)
        books.take_request(A, V4, 0)
        books.take_circuit((A, B), (V4, V4), 0)
    books.carry((A, B), 1 << 60, 0)
    assert books.statistics().circuits == 5000


# --- the relay keeps them ----------------------------------------------------------------------------------------


async def refused_by(relay: Relay, what: str, reason: str, action: Callable[[], Awaitable[object]]) -> None:
    """The relay answers with the reason, and counts it."""
    before = relay.counters.refusals[what, reason]
    with pytest.raises(Refused) as error:
        await action()
    assert error.value.reason == reason
    assert relay.counters.refusals[what, reason] == before + 1


async def turned_away(relay: Relay, peer: Peer, reason: str) -> None:
    """A new connection is closed by the relay, which counts it."""
    before = relay.counters.refusals["connection", reason]
    try:
        connection = await peer.join(relay)
    except LinkError:
        pass
    else:
        with trio.fail_after(PATIENCE):
            await connection.closed.wait()
    await until(lambda: relay.counters.refusals["connection", reason] > before)


@pytest.mark.parametrize("limit", ["connections", "connections_per_ip", "connections_per_prefix"])
async def test_connections(limit: str) -> None:
    limits = {f"limits__{limit}": 2}
    async with (
        running_relay(**limits) as relay,
        joined(relay, 2) as (first, second),
        running_peers(1) as (late,),
    ):
        await turned_away(relay, late, limit)
        assert second.connection is not None
        second.connection.close()
        await until(lambda: len(relay.members()) == 1)
        await late.join(relay)
        await late.reserve()
        await first.reserve()


async def test_connections_per_peer_make_way_for_new_ones_but_never_for_a_circuit() -> None:
    async with running_relay(limits__connections_per_peer=2) as relay, joined(relay, 2) as (a, b):
        first = a.connection  # holds the reservation
        spare = await a.join(relay)
        second = await a.join(relay)
        with trio.fail_after(PATIENCE):
            await spare.closed.wait()
        assert first is not None
        assert not first.closed.is_set()
        await a.reserve(second)
        await joined_circuit(b, a)  # over the second
        third = await a.join(relay)
        with trio.fail_after(PATIENCE):
            await first.closed.wait()
        assert not second.closed.is_set()
        await a.reserve(third)
        await joined_circuit(b, a)  # over the third: now each has a circuit
        await turned_away(relay, a, "connections_per_peer")
        assert not second.closed.is_set()
        assert not third.closed.is_set()


@pytest.mark.parametrize("limit", ["handshakes", "handshakes_per_ip"])
async def test_silent_connections_keep_no_newcomer_out_for_long(limit: str) -> None:
    limits = {f"limits__{limit}": 3, "limits__handshake_time": "0.5s"}
    async with running_relay(**limits) as relay, running_peers(1) as (peer,):
        port = int(relay.addresses[0].split("/")[4])
        silent = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(3)]
        await until(lambda: relay.statistics().ledger.handshakes == 3)
        await turned_away(relay, peer, limit)
        await until(lambda: relay.statistics().ledger.handshakes == 0)
        await peer.join(relay)
        await peer.reserve()
        for stream in silent:
            with trio.fail_after(PATIENCE):
                while await stream.receive_some(1024):
                    pass
            await stream.aclose()


async def test_new_connections_per_ip() -> None:
    async with running_relay(limits__new_connections_per_ip=2) as relay, running_peers(1) as (peer,):
        await peer.join(relay)
        await peer.join(relay)
        await turned_away(relay, peer, "new_connections_per_ip")


@pytest.mark.parametrize("limit", ["reservations", "reservations_per_ip", "reservations_per_prefix"])
async def test_reservations(limit: str) -> None:
    limits = {f"limits__{limit}": 2}
    async with (
        running_relay(**limits) as relay,
        joined(relay, 2) as (first, second),
        running_peers(1) as (late,),
    ):
        await late.join(relay)
        await refused_by(relay, "reservation", limit, late.reserve)
        await first.reserve()  # a renewal takes no second place
        assert second.connection is not None
        second.connection.close()
        await until(lambda: relay.statistics().ledger.reservations == 1)
        await late.reserve()


@pytest.mark.parametrize("limit", ["circuits", "circuits_per_peer", "circuits_per_ip", "circuits_per_prefix"])
async def test_circuits(limit: str) -> None:
    async with running_relay(**{f"limits__{limit}": 2}) as relay, joined(relay, 3) as (a, b, c):
        near, _ = await joined_circuit(a, b)
        await joined_circuit(a, c)
        await refused_by(relay, "circuit", limit, lambda: a.connect(b.peer_id))
        if limit == "circuits_per_peer":
            await refused_by(relay, "circuit", limit, lambda: b.connect(a.peer_id))
        near.reset()
        await until(lambda: len(relay.hop.circuits) == 1)
        await joined_circuit(a, b)


@pytest.mark.parametrize("limit", ["requests_per_peer", "requests_per_ip"])
async def test_requests(limit: str) -> None:
    async with running_relay(**{f"limits__{limit}": 3}) as relay, joined(relay, 1) as (peer,):
        await peer.reserve()
        await peer.reserve()
        await refused_by(relay, "reservation", limit, peer.reserve)


async def ended(stream: MuxedStream) -> None:
    """The circuit was reset; nothing of the relay's stands in it."""
    with pytest.raises(LinkError), trio.fail_after(PATIENCE):
        while True:
            data = await stream.receive_some()
            assert not data.strip(b"\0"), "the relay wrote into a circuit"
            assert data, "the circuit ended as if all had been carried"


async def test_circuit_bytes_count_both_directions() -> None:
    async with running_relay(limits__circuit_bytes=10_000) as relay, joined(relay, 2) as (a, b):
        near, far = await joined_circuit(a, b)
        await near.send_all(bytes(6000))
        await receive(far, 6000)
        await far.send_all(bytes(4000))
        await receive(near, 4000)
        await near.send_all(bytes(1))
        await ended(near)
        await ended(far)
        assert relay.counters.circuits_ended == {"circuit_bytes": 1}
        near, far = await joined_circuit(a, b)  # each circuit anew
        await near.send_all(bytes(6000))
        await receive(far, 6000)


async def test_peer_bytes_count_over_all_circuits_of_a_peer() -> None:
    async with running_relay(limits__peer_bytes=10_000) as relay, joined(relay, 3) as (a, b, c):
        first, first_far = await joined_circuit(a, b)
        second, second_far = await joined_circuit(c, a)
        await first.send_all(bytes(6000))
        await receive(first_far, 6000)
        await second.send_all(bytes(5000))
        await ended(second)
        await ended(second_far)
        await refused_by(relay, "circuit", "peer_bytes", lambda: b.connect(a.peer_id))
        near, far = await joined_circuit(b, c)  # others have bytes left
        await near.send_all(bytes(3000))
        await receive(far, 3000)


async def test_month_bytes_end_what_runs() -> None:
    async with running_relay(limits__month_bytes=10_000) as relay, joined(relay, 2) as (a, b):
        near, far = await joined_circuit(a, b)
        await near.send_all(bytes(10_001))
        await ended(far)
        await refused_by(relay, "circuit", "month_bytes", lambda: a.connect(b.peer_id))


async def test_buffer_bytes_end_the_circuit_with_the_most_waiting() -> None:
    async def pour(stream: MuxedStream) -> None:
        with contextlib.suppress(LinkError):
            while True:
                await stream.send_all(bytes(64 * 1024))

    async with running_relay(limits__buffer_bytes="200 KiB") as relay, joined(relay, 3) as (a, b, c):
        small, small_far = await joined_circuit(a, b)
        await small.send_all(bytes(100_000))
        await until(lambda: relay.statistics().counters.bytes_to_target == 100_000)
        async with trio.open_nursery() as nursery:
            for source, target in ((a, c), (b, c)):  # nobody reads at the targets
                near, _ = await joined_circuit(source, target)
                nursery.start_soon(pour, near)
            await until(lambda: relay.counters.circuits_ended["buffer_bytes"])
            nursery.cancel_scope.cancel()
        assert relay.statistics().buffered_bytes <= 200 * 1024
        assert relay.counters.circuits_ended == {"buffer_bytes": 1}
        assert await receive(small_far, 100_000) == bytes(100_000)
        await small_far.send_all(b"x")
        assert await receive(small, 1) == b"x"


async def test_what_is_sent_before_it_was_asked_for_is_bounded() -> None:
    async with running_relay(limits__buffer_bytes=400_000) as relay, joined(relay, 2) as (a, b):
        b.stop_status = 0  # never answers
        assert a.connection is not None
        for _ in range(3):
            stream = await a.connection.open_stream(circuit.HOP)
            request: Any = HopMessage(type=HopMessage.CONNECT)
            request.peer.id = upstream.PeerID.from_base58(b.peer_id).to_bytes()
            await delimited.write_message(stream, request)
            await stream.send_all(bytes(200_000))
        with trio.fail_after(PATIENCE):
            await a.connection.closed.wait()
        assert relay.counters.refusals["connection", "buffer_bytes"] == 1
        with trio.fail_after(5):  # at once, and not when the target's time to answer is over
            await until(lambda: relay.statistics().ledger.circuits == 0)
        await b.reserve()


async def test_a_peer_that_sends_crumbs_is_let_go_and_the_others_stay() -> None:
    async with running_relay(limits__pieces_per_peer=50) as relay, joined(relay, 3) as (crumbs, b, c):
        near, far = await joined_circuit(crumbs, b)
        kept, kept_far = await joined_circuit(c, b)
        with pytest.raises(LinkError), trio.fail_after(PATIENCE):
            while True:
                await near.send_all(b"x")
                await far.receive_some()
        await until(lambda: crumbs.connection is not None and crumbs.connection.closed.is_set())
        await kept.send_all(b"x")
        assert await receive(kept_far, 1) == b"x"
        assert relay.counters.circuits_ended == {"pieces_per_peer": 1}


async def test_a_small_part_of_a_large_message_does_not_keep_it_in_memory() -> None:
    async with running_relay() as relay, joined(relay, 2) as (a, b):
        near, _ = await joined_circuit(a, b)
        await near.send_all(bytes(300_000))  # more than the receiver's window: what follows waits
        [live] = relay.hop.circuits
        flow = live.flows[0]
        await until(lambda: flow.queued > 10_000)
        for size in (1, 100, 30_000, 40_000) * 10:
            flow.receive(memoryview(bytes(65_000))[:size])
        kept = sum(memoryview(piece.obj).nbytes for piece in flow._queue)
        assert flow.queued <= kept <= 2 * flow.queued


async def test_circuit_time() -> None:
    async with running_relay(limits__circuit_time="0.3s") as relay, joined(relay, 2) as (a, b):
        near, far = await joined_circuit(a, b)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ended, near)
            nursery.start_soon(ended, far)
        assert relay.counters.circuits_ended == {"circuit_time": 1}


async def test_circuit_idle_time_starts_anew_with_each_byte() -> None:
    async with running_relay(limits__circuit_idle_time="1s") as relay, joined(relay, 2) as (a, b):
        near, far = await joined_circuit(a, b)
        [circuit] = relay.hop.circuits
        start = trio.current_time()
        while trio.current_time() < start + 1.2:
            await near.send_all(b"\0")
            await receive(far, 1)
            await trio.sleep(0.1)
        assert not circuit.reason, "a circuit in use was ended as idle"
        await ended(near)
        assert relay.counters.circuits_ended == {"circuit_idle_time": 1}


async def test_unused_connections_are_closed_and_used_ones_stay() -> None:
    async with running_relay(limits__unused_time="1s") as relay, joined(relay, 2) as (a, b):
        near, far = await joined_circuit(a, b)
        async with running_peers(1) as (idle,):
            connection = await idle.join(relay)
            with trio.fail_after(PATIENCE):
                await connection.closed.wait()
        await near.send_all(b"x")
        assert await receive(far, 1) == b"x"
        await b.reserve()
