"""multistream-select 1.0: agreeing on a protocol, one text line at a time.

Each message is ``varint(length) | text | newline``; both sides begin with ``/multistream/1.0.0``. Only one protocol
is ever proposed, so header and proposal go out together and the answer costs one round trip.
Specification: https://github.com/multiformats/multistream-select
"""

from __future__ import annotations

from collections.abc import Callable

from kvasir_peer.errors import LinkError, WireError
from kvasir_peer.net.duplex import Duplex, receive_exactly

HEADER = "/multistream/1.0.0"
NOT_AVAILABLE = "na"
LIST = "ls"

MAX_LINE_BYTES = 1024  # the longest protocol names in use have under 100 characters
MAX_PROPOSALS = 16  # lines a caller may try on one stream before it is shut


def encode(*lines: str) -> bytes:
    """The lines as they go on the wire."""
    out = bytearray()
    for line in lines:
        raw = line.encode() + b"\n"
        out += encode_varint(len(raw)) + raw
    return bytes(out)


def encode_varint(value: int) -> bytes:
    """Unsigned LEB128."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_line(raw: bytes) -> str:
    """The text of one message body. Raises WireError."""
    if not raw.endswith(b"\n"):
        raise WireError("malformed", "a multistream line does not end in a newline")
    try:
        return raw[:-1].decode()
    except UnicodeDecodeError:
        raise WireError("malformed", "a multistream line is not UTF-8") from None


class LineBuffer:
    """Takes lines out of bytes as they come, without reading past the last line wanted."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes | memoryview) -> None:
        self._bytes += data

    def next_line(self) -> str | None:
        """The next whole line, or None when more bytes are needed. Raises WireError."""
        length = shift = used = 0
        while True:
            if used >= 3:
                raise WireError("oversize", f"a multistream line is over {MAX_LINE_BYTES} bytes long")
            if used >= len(self._bytes):
                return None
            byte = self._bytes[used]
            length |= (byte & 0x7F) << shift
            shift += 7
            used += 1
            if byte < 0x80:
                break
        if length > MAX_LINE_BYTES:
            raise WireError("oversize", f"a multistream line is over {MAX_LINE_BYTES} bytes long")
        end = used + length
        if len(self._bytes) < end:
            return None
        line = decode_line(bytes(self._bytes[used:end]))
        del self._bytes[:end]
        return line

    def rest(self) -> bytes:
        """What follows the lines taken."""
        return bytes(self._bytes)


async def read_varint(duplex: Duplex, limit: int) -> int:
    """An unsigned varint that must not be over ``limit``. Raises WireError, LinkError."""
    value = shift = 0
    while True:
        byte = (await receive_exactly(duplex, 1))[0]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 63:
            raise WireError("malformed", "a varint is over 64 bits long")
    if value > limit:
        raise WireError("oversize", f"a message of {value} bytes was announced, and {limit} are allowed")
    return value


async def read_line(duplex: Duplex) -> str:
    """One line. Raises WireError, LinkError."""
    return decode_line(await receive_exactly(duplex, await read_varint(duplex, MAX_LINE_BYTES)))


async def propose(duplex: Duplex, protocol: str) -> None:
    """Ask for ``protocol``. Raises LinkError when the other side does not speak it. The caller sets the deadline."""
    await duplex.send_all(encode(HEADER, protocol))
    header = await read_line(duplex)
    if header != HEADER:
        raise WireError("malformed", f"the other side begins with {header[:40]!r} instead of {HEADER}")
    answer = await read_line(duplex)
    if answer == NOT_AVAILABLE:
        raise LinkError(f"the other side does not speak {protocol}")
    if answer != protocol:
        raise WireError("unexpected", f"the other side answered {answer[:40]!r} to {protocol}")


async def answer(duplex: Duplex, speaks: Callable[[str], bool]) -> str:
    """Answer proposals until one is taken, and return it. The caller sets the deadline."""
    await duplex.send_all(encode(HEADER))
    header = await read_line(duplex)
    if header != HEADER:
        raise WireError("malformed", f"the other side begins with {header[:40]!r} instead of {HEADER}")
    for _ in range(MAX_PROPOSALS):
        protocol = await read_line(duplex)
        if protocol != LIST and speaks(protocol):
            await duplex.send_all(encode(protocol))
            return protocol
        await duplex.send_all(encode(NOT_AVAILABLE))
    raise WireError("unexpected", f"{MAX_PROPOSALS} protocols were proposed and none is spoken here")
