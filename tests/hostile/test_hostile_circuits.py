"""Peers at a relay that misuse its protocols: what each can take of the relay, and of a peer behind it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "relay"))

from helpers_relay import (
    PATIENCE,
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
from kvasir_peer.identity import Identity
from kvasir_peer.net import circuit, delimited, multistream
from kvasir_peer.net.node import Node
from kvasir_peer.net.yamux import MuxedStream


async def test_one_caller_cannot_take_all_handshakes_of_a_peer_behind_a_relay() -> None:
    """Circuits that are opened and say nothing: each takes a stream of the target's for ten seconds."""
    async with running_relay() as relay, running_peers(1) as (attacker,):
        await attacker.join(relay)
        address = relay.full_addresses[0]
        async with (
            Node.open(Identity.generate().private_key, relays=[address], direct=False) as victim,
            Node.open(Identity.generate().private_key, direct=False) as honest,
        ):
            await victim.relays_ready(PATIENCE)
            held = [await attacker.connect(victim.peer_id) for _ in range(circuit.MAX_HANDSHAKES_PER_PEER)]
            for _ in range(20):
                with pytest.raises(Refused) as refused:
                    await attacker.connect(victim.peer_id)
                assert refused.value.reason == "target_refused"
            assert victim._circuits.refused == {"handshakes": 20}
            await honest.connect(victim.peer_id, victim.addresses())
            for stream in held:
                stream.reset()
            await until(lambda: not victim._circuits._handshakes)


async def test_handshakes_through_circuits_are_given_up(mock_clock: trio.testing.MockClock) -> None:
    mock_clock.rate = 1.0
    async with running_relay() as relay, running_peers(1) as (attacker,):
        await attacker.join(relay)
        address = relay.full_addresses[0]
        async with Node.open(Identity.generate().private_key, relays=[address], direct=False) as victim:
            await victim.relays_ready(PATIENCE)
            silent = await attacker.connect(victim.peer_id)
            # And one that proves its key, and then agrees on no multiplexer.
            proven = await attacker.connect(victim.peer_id)
            await attacker.host.identity.secure_outbound(proven, victim.peer_id)
            mock_clock.rate = 20.0
            for stream in (silent, proven):
                with trio.fail_after(60):
                    try:
                        while await stream.receive_some():
                            pass
                    except LinkError:
                        pass
            await until(lambda: not victim._circuits._handshakes and not victim.host._beginning)
            assert not victim.peers()


@pytest.mark.parametrize(
    "request_bytes",
    [b"", b"\x40", b"\x40" + bytes(20), multistream.encode_varint(4097) + bytes(100)],
    ids=["nothing", "length", "part", "huge"],
)
async def test_a_request_that_never_comes_whole_ends_its_stream_alone(
    request_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvasir_relay.hop.REQUEST_SECONDS", 0.3)
    async with running_relay() as relay, joined(relay, 2) as (slow, other):
        near, far = await joined_circuit(slow, other)
        assert slow.connection is not None
        stream = await slow.connection.open_stream(circuit.HOP)
        await stream.send_all(request_bytes)
        with trio.fail_after(PATIENCE):
            try:
                while await stream.receive_some():
                    pass
            except LinkError:
                pass
        await near.send_all(b"fine")
        assert await receive(far, 4) == b"fine"
        stream.close()
        await until(lambda: len(slow.connection.mux.streams) == 1)


@pytest.mark.parametrize(
    "answer", [b"\x05nonsense", b"\xff\xff\xff\x7f", b"\x02\x08\x00", b"\x04\x08\x01\x10\x64" + bytes(70_000)]
)
async def test_a_target_that_answers_nonsense_costs_the_caller_one_answer(answer: bytes) -> None:
    """Nothing of it reaches the caller as if it came from the relay."""
    async with running_relay() as relay, joined(relay, 2) as (source, target):

        async def nonsense(stream: MuxedStream) -> None:
            await delimited.read_message(stream, circuit._StopMessage)
            await stream.send_all(answer)
            stream.handed_over = True

        target.host.handle(circuit.STOP, nonsense)
        with pytest.raises(Refused) as refused:
            await source.connect(target.peer_id)
        assert refused.value.reason == "target_refused"
        await until(lambda: not relay.statistics().ledger.circuits)


async def test_a_relay_that_names_somebody_else_is_not_believed() -> None:
    """The relay says who comes; the handshake proves it."""
    async with running_relay() as relay, joined(relay, 1) as (attacker,):
        address = relay.full_addresses[0]
        async with Node.open(Identity.generate().private_key, relays=[address], direct=False) as victim:
            await victim.relays_ready(PATIENCE)
            [member] = [m for m in relay.members() if m.peer_id == victim.peer_id]
            [reservation] = [r for p, r in relay.hop.reservations.items() if p == member.peer]
            assert reservation.member is member
            stop: Any = await member.connection.open_stream(circuit.STOP)
            claimed = Identity.generate().peer_id
            message = circuit._StopMessage(type=circuit._StopMessage.CONNECT)
            message.peer.id = circuit.upstream.PeerID.from_base58(claimed).to_bytes()
            await delimited.write_message(stop, message)
            answer = await delimited.read_message(stop, circuit._StopMessage)
            assert answer.status == circuit.OK
            await attacker.host.identity.secure_outbound(stop, victim.peer_id)
            with trio.fail_after(PATIENCE), pytest.raises(LinkError):
                while await stop.receive_some():
                    pass
            assert not victim.peers()
            (connection,) = victim.host.connections(relay.identity.peer_id)
            assert connection.mux.violations == {"unexpected": 1}


async def test_stop_requests_from_somebody_who_is_no_relay_of_ours_are_refused() -> None:
    async with (
        running_peers(1) as (stranger,),
        Node.open(Identity.generate().private_key, listen=["/ip4/127.0.0.1/tcp/0"]) as node,
    ):
        await _connect(stranger, node)
        assert stranger.connection is not None
        stream = await stranger.connection.open_stream(circuit.STOP)
        message = circuit._StopMessage(type=circuit._StopMessage.CONNECT)
        message.peer.id = circuit.upstream.PeerID.from_base58(Identity.generate().peer_id).to_bytes()
        await delimited.write_message(stream, message)
        answer = await delimited.read_message(stream, circuit._StopMessage)
        assert answer.status == 202


async def _connect(peer: Peer, node: Node) -> None:
    peer.connection = await peer.host.dial(circuit.maddr.parse(node.addresses()[0]))
