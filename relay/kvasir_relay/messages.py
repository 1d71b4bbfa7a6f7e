"""Messages of circuit relay v2 (libp2p specification ``relay/circuit-v2.md``), with the stock protobuf classes."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from kvasir_peer.errors import LinkError, WireError
from kvasir_peer.identity import Identity
from kvasir_peer.net.delimited import read_message
from kvasir_peer.net.duplex import Duplex
from kvasir_peer.net.multistream import encode_varint
from kvasir_peer.net.upstream import circuit_pb2

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
STOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/stop"

RESERVE, CONNECT = circuit_pb2.HopMessage.RESERVE, circuit_pb2.HopMessage.CONNECT

MAX_MESSAGE_BYTES = 4096  # as in go-libp2p; a RESERVE with a signed peer record has about 500

# Field 1000 of HopMessage: a short word beside a refusing status that says which limit or rule it was. Not in the
# specification; readers of protobuf skip what they do not know.
REASON_FIELD = 1000

# Signed envelopes (libp2p RFC 0002) and reservation vouchers (circuit-v2.md, "Reservation Vouchers").
VOUCHER_DOMAIN = b"libp2p-relay-rsvp"
VOUCHER_PAYLOAD_TYPE = b"\x03\x02"  # multicodec 0x0302 as the two bytes that go-libp2p sends


class Status(IntEnum):
    """Status codes of the specification."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


def _wire(status: Status) -> Any:
    # The generated stubs want a type of their own, which is an int at run time.
    return int(status)


def _field(number: int, value: bytes) -> bytes:
    return encode_varint(number << 3 | 2) + encode_varint(len(value)) + value


def prefixed(body: bytes) -> bytes:
    """``body`` with a varint length before it."""
    return encode_varint(len(body)) + body


async def read_hop(stream: Duplex) -> Any:
    """One HopMessage. Raises WireError (``oversize``, ``malformed``), LinkError."""
    return await read_message(stream, circuit_pb2.HopMessage, MAX_MESSAGE_BYTES)


async def read_stop_status(stream: Duplex) -> None:
    """The target's answer to a circuit. Raises LinkError when it is not OK, WireError."""
    message: Any = await read_message(stream, circuit_pb2.StopMessage, MAX_MESSAGE_BYTES)
    if message.type != circuit_pb2.StopMessage.STATUS:
        raise WireError("unexpected", "the target of a circuit answered with something other than a status")
    if message.status != Status.OK:
        raise LinkError(f"the target refused the circuit with status {message.status}")


def _limit(seconds: float, data: int) -> Any:
    # In the specification no limit message, and a zero in one, mean unlimited.
    return circuit_pb2.Limit(duration=round(seconds), data=data) if seconds or data else None


def status_message(status: Status, reason: str = "", *, seconds: float = 0, data: int = 0) -> bytes:
    """A hop status; ``seconds`` and ``data`` (bytes) are the circuit's limits, 0 for none."""
    message = circuit_pb2.HopMessage(
        type=circuit_pb2.HopMessage.STATUS, status=_wire(status), limit=_limit(seconds, data)
    )
    body = message.SerializeToString()
    return prefixed(body + _field(REASON_FIELD, reason.encode()) if reason else body)


def reserved_message(
    *, expire: int, addresses: list[bytes], voucher: bytes, seconds: float, data: int
) -> bytes:
    """A reservation that was granted until ``expire`` (Unix seconds); the limits are those of its circuits."""
    message = circuit_pb2.HopMessage(
        type=circuit_pb2.HopMessage.STATUS,
        status=_wire(Status.OK),
        reservation=circuit_pb2.Reservation(expire=expire, addrs=addresses, voucher=voucher),
        limit=_limit(seconds, data),
    )
    return prefixed(message.SerializeToString())


def stop_connect_message(source: bytes, *, seconds: float, data: int) -> bytes:
    """What the target of a circuit is told: who asks, and the circuit's limits."""
    message = circuit_pb2.StopMessage(
        type=circuit_pb2.StopMessage.CONNECT,
        peer=circuit_pb2.PeerId(id=source),
        limit=_limit(seconds, data),
    )
    return prefixed(message.SerializeToString())


def public_key_message(public_key: bytes) -> bytes:
    """libp2p's protobuf PublicKey of an Ed25519 key."""
    return b"\x08\x01" + _field(2, public_key)


def sign_voucher(identity: Identity, relay: bytes, peer: bytes, expire: int) -> bytes:
    """A reservation voucher: the relay's signed word that ``peer`` has a reservation until ``expire``.

    Args:
        identity: the relay's key.
        relay, peer: peer ids as bytes.
        expire: Unix seconds.
    """
    payload = circuit_pb2.Voucher(relay=relay, peer=peer, expiration=expire).SerializeToString()
    signed = b"".join(prefixed(part) for part in (VOUCHER_DOMAIN, VOUCHER_PAYLOAD_TYPE, payload))
    return (
        _field(1, public_key_message(identity.public_key))
        + _field(2, VOUCHER_PAYLOAD_TYPE)
        + _field(3, payload)
        + _field(5, identity.sign(signed))
    )
