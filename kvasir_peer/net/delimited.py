"""Protobuf messages on a stream, each behind its length as a varint."""

from __future__ import annotations

from typing import Any, TypeVar

from kvasir_peer.errors import WireError
from kvasir_peer.net import multistream, upstream
from kvasir_peer.net.duplex import Duplex, receive_exactly

#: Bound of one message; reservations with vouchers and many addresses stay well below.
MAX_MESSAGE_BYTES = 8 * 1024

M = TypeVar("M")


async def read_message(duplex: Duplex, kind: type[M], limit: int = MAX_MESSAGE_BYTES) -> M:
    """One message of the protobuf class ``kind``. Raises WireError, LinkError; the caller sets the deadline."""
    raw = await receive_exactly(duplex, await multistream.read_varint(duplex, limit))
    message: Any = kind()
    try:
        message.ParseFromString(raw)
    except upstream.DecodeError as error:
        raise WireError("malformed", f"a {kind.__name__} message does not parse: {error}") from None
    return message  # type: ignore[no-any-return]


async def write_message(duplex: Duplex, message: Any) -> None:
    """Send one message."""
    raw = message.SerializeToString()
    await duplex.send_all(multistream.encode_varint(len(raw)) + raw)
