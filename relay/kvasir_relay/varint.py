"""Unsigned varints (multiformats ``unsigned-varint``), the length prefix of every small message here."""

from __future__ import annotations

from typing import Protocol

from kvasir_peer.errors import WireError

MAX_VARINT_BYTES = 9  # the specification's bound: 63 bits


class ByteReader(Protocol):
    """Anything that gives bytes: a raw connection, or a stream of a muxer."""

    async def read(self, n: int, /) -> bytes | bytearray | memoryview:
        """Up to ``n`` bytes; empty at the end."""


def encode_varint(value: int) -> bytes:
    """``value`` as an unsigned varint."""
    if value < 0:
        raise ValueError("a varint is not negative")
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


async def read_exactly(reader: ByteReader, n: int) -> bytes:
    """``n`` bytes.

    Raises:
        WireError: ``truncated``, the stream ended before.
    """
    parts = bytearray()
    while len(parts) < n:
        data = await reader.read(n - len(parts))
        if not data:
            raise WireError("truncated", f"the stream ended after {len(parts)} of {n} bytes")
        parts += data
    return bytes(parts)


async def read_prefixed(reader: ByteReader, limit: int) -> bytes:
    """One message with a varint length prefix.

    Raises:
        WireError: ``oversize`` (the length is checked before anything is read), ``malformed``, ``truncated``.
    """
    length = shift = 0
    while True:
        byte = (await read_exactly(reader, 1))[0]
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift >= 7 * MAX_VARINT_BYTES:
            raise WireError("malformed", "a length prefix of more than 9 bytes")
    if length > limit:
        raise WireError("oversize", f"a message of {length} bytes, where {limit} are allowed")
    return await read_exactly(reader, length)
