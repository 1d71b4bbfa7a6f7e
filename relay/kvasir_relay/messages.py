"""Messages of circuit relay v2 (libp2p specification ``relay/circuit-v2.md``), with the stock protobuf classes."""

from __future__ import annotations

import time
from enum import IntEnum

from google.protobuf.message import DecodeError
from libp2p.relay.circuit_v2.pb.circuit_pb2 import (
    HopMessage,
    Limit,
    PeerId,
    Reservation,
    StopMessage,
    Voucher,
)

from kvasir_peer.errors import WireError
from kvasir_peer.identity import Identity
from kvasir_relay.varint import ByteReader, encode_varint, read_prefixed

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
STOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/stop"

MAX_MESSAGE_BYTES = 4096  # as go-libp2p's maxMessageSize; a RESERVE with a signed peer record is about 500

# Field 1000 of HopMessage: a short text beside a refusing status that says which limit it was. Not in the
# specification; protobuf readers that do not know it skip it.
REASON_FIELD = 1000
_REASON_TAG = encode_varint(REASON_FIELD << 3 | 2)

# Signed envelopes (RFC 0002), reservation vouchers (circuit-v2.md, "Reservation Vouchers").
VOUCHER_DOMAIN = b"libp2p-relay-rsvp"
VOUCHER_PAYLOAD_TYPE = b"\x03\x02"  # multicodec 0x0302, the two bytes that go-libp2p puts on the wire


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


def _field(number: int, value: bytes) -> bytes:
    return encode_varint(number << 3 | 2) + encode_varint(len(value)) + value


def _prefixed(body: bytes) -> bytes:
    return encode_varint(len(body)) + body


async def read_hop(reader: ByteReader) -> HopMessage:
    """One hop message. Raises WireError (``oversize``, ``malformed``, ``truncated``)."""
    message = HopMessage()
    try:
        message.ParseFromString(await read_prefixed(reader, MAX_MESSAGE_BYTES))
    except DecodeError:
        raise WireError("malformed", "a hop message that does not parse") from None
    return message


async def read_stop_status(reader: ByteReader) -> int:
    """The status with which a target answers; 0 if it gave none. Raises WireError."""
    message = StopMessage()
    try:
        message.ParseFromString(await read_prefixed(reader, MAX_MESSAGE_BYTES))
    except DecodeError:
        raise WireError("malformed", "a stop message that does not parse") from None
    if message.type != StopMessage.STATUS:
        raise WireError("unexpected", "the target answered with something other than a status")
    return int(message.status)


def _limit(duration: int, data: int) -> Limit | None:
    # In the specification a zero, or no limit message at all, means unlimited.
    return Limit(duration=duration, data=data) if duration or data else None


def status_message(status: Status, reason: str = "", *, duration: int = 0, data: int = 0) -> bytes:
    """A hop status with its length prefix; ``duration`` (seconds) and ``data`` (bytes) are a circuit's limits."""
    message = HopMessage(type=HopMessage.STATUS, status=int(status), limit=_limit(duration, data))  # type: ignore[arg-type]
    body = message.SerializeToString()
    if reason:
        text = reason.encode()
        body += _REASON_TAG + encode_varint(len(text)) + text
    return _prefixed(body)


def reserved_message(
    *, expire: int, addresses: list[bytes], voucher: bytes, duration: int, data: int
) -> bytes:
    """The answer to a reservation that was granted; ``expire`` is Unix time in seconds."""
    message = HopMessage(
        type=HopMessage.STATUS,
        status=int(Status.OK),  # type: ignore[arg-type]
        reservation=Reservation(expire=expire, addrs=addresses, voucher=voucher),
        limit=_limit(duration, data),
    )
    return _prefixed(message.SerializeToString())


def stop_connect_message(source: bytes, *, duration: int, data: int) -> bytes:
    """What the target of a circuit is told: who asks, and the circuit's limits."""
    message = StopMessage(type=StopMessage.CONNECT, peer=PeerId(id=source), limit=_limit(duration, data))
    return _prefixed(message.SerializeToString())


def sign_voucher(identity: Identity, relay: bytes, peer: bytes, expiration: int) -> bytes:
    """A reservation voucher: a signed envelope over relay, peer and expiration (Unix seconds).

    Args:
        identity: the relay's key.
        relay: peer id of the relay, as bytes.
        peer: peer id of the holder, as bytes.
        expiration: as in the reservation.
    """
    payload = Voucher(relay=relay, peer=peer, expiration=expiration).SerializeToString()
    signed = b"".join(_prefixed(part) for part in (VOUCHER_DOMAIN, VOUCHER_PAYLOAD_TYPE, payload))
    public_key = b"\x08\x01" + _field(2, identity.public_key)  # protobuf PublicKey{Ed25519, data}
    return (
        _field(1, public_key)
        + _field(2, VOUCHER_PAYLOAD_TYPE)
        + _field(3, payload)
        + _field(5, identity.sign(signed))
    )


def unix_now() -> int:
    """Unix time in whole seconds."""
    return int(time.time())
