"""multistream-select 1.0, the side that answers.

Specification: libp2p ``connections`` ("multistream-select"). Each message is a varint length, a text, a newline.
The relay answers on raw connections (security), on secured ones (muxer) and on streams (protocols); on streams that
it opens itself it asks for one protocol.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from kvasir_peer.errors import RefusedError, WireError
from kvasir_relay.varint import ByteReader, encode_varint, read_prefixed

MULTISTREAM = "/multistream/1.0.0"
MAX_MESSAGE_BYTES = 1024  # the specification's bound for one message
MAX_OFFERS = 16  # protocols that one negotiation may try before we hang up


class ByteStream(ByteReader, Protocol):
    """Reads and writes bytes."""

    async def write(self, data: bytes, /) -> None:
        """Write all of ``data``."""


def _message(text: str) -> bytes:
    body = text.encode() + b"\n"
    return encode_varint(len(body)) + body


async def _read(stream: ByteReader) -> str:
    body = await read_prefixed(stream, MAX_MESSAGE_BYTES)
    if not body.endswith(b"\n"):
        raise WireError("malformed", "a multistream message without its newline")
    try:
        return body[:-1].decode()
    except UnicodeDecodeError:
        raise WireError("malformed", "a multistream message that is not text") from None


async def answer(stream: ByteStream, protocols: Collection[str]) -> str:
    """Let the other end choose one of ``protocols``; returns it.

    Raises:
        WireError: the other end does not speak multistream-select, or tried too many protocols.
    """
    if await _read(stream) != MULTISTREAM:
        raise WireError("malformed", "the other end does not speak multistream-select 1.0")
    reply = _message(MULTISTREAM)
    for _ in range(MAX_OFFERS):
        await stream.write(reply)
        offered = await _read(stream)
        if offered in protocols:
            await stream.write(_message(offered))
            return offered
        if offered == "ls":
            listing = b"".join(_message(protocol) for protocol in protocols)
            reply = encode_varint(len(listing) + 1) + listing + b"\n"
        else:
            reply = _message("na")
    raise WireError("unexpected", f"no common protocol after {MAX_OFFERS} offers")


async def ask(stream: ByteStream, protocol: str) -> None:
    """Ask the other end for ``protocol`` on a stream that we opened; one round trip.

    Raises:
        RefusedError: the other end does not speak it.
        WireError: the other end does not speak multistream-select.
    """
    await stream.write(_message(MULTISTREAM) + _message(protocol))
    if await _read(stream) != MULTISTREAM:
        raise WireError("malformed", "the other end does not speak multistream-select 1.0")
    if await _read(stream) != protocol:
        raise RefusedError(f"the other end does not speak {protocol}")
