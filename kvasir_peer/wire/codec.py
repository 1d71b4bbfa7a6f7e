"""Frames of the data plane: a kind, a small header, a payload.

Layout of one frame (a link puts its length in front)::

    u8   kind            which message this is, in the table of its protocol
    u32  header length   little endian, bounded before anything is decoded
    ...  header          msgpack of the message's struct
    ...  payload         raw bytes (a tensor, a chunk), never copied here
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvasir_peer.errors import WireError

_PREFIX = struct.Struct("<BI")
PREFIX_BYTES = _PREFIX.size

Buffer = bytes | bytearray | memoryview


class Codec:
    """Turns the messages of one protocol into frames and back.

    Args:
        kinds: kind byte to message struct.
        max_header: most bytes of a header; a larger one is refused before it is decoded.
        check: looks at each decoded message; raises WireError for values that cannot be.
    """

    def __init__(
        self,
        kinds: Mapping[int, type[msgspec.Struct]],
        *,
        max_header: int,
        check: Callable[[Any], None] | None = None,
    ) -> None:
        self.max_header = max_header
        self._check = check
        self._decoders = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in kinds.items()}
        self._kinds = {cls: kind for kind, cls in kinds.items()}
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: msgspec.Struct, *payload: Buffer) -> list[Buffer]:
        """The pieces of one frame, to be sent back to back.

        Raises:
            WireError: code ``oversize``, when the header is over the protocol's bound.
        """
        header = self._encoder.encode(message)
        if len(header) > self.max_header:
            raise WireError("oversize", f"header of {len(header)} bytes, at most {self.max_header}")
        return [_PREFIX.pack(self._kinds[type(message)], len(header)) + header, *payload]

    def decode(self, frame: Buffer) -> tuple[Any, memoryview]:
        """The message and its payload (a view into ``frame``).

        Raises:
            WireError: codes ``malformed``, ``oversize`` or ``unexpected``, or those of the protocol's check.
        """
        view = memoryview(frame)
        if len(view) < PREFIX_BYTES:
            raise WireError("malformed", f"frame of {len(view)} bytes is shorter than its prefix")
        kind, size = _PREFIX.unpack_from(view)
        if size > self.max_header:
            raise WireError("oversize", f"header of {size} bytes, at most {self.max_header}")
        if PREFIX_BYTES + size > len(view):
            raise WireError("malformed", f"header of {size} bytes in a frame of {len(view)}")
        decoder = self._decoders.get(kind)
        if decoder is None:
            raise WireError("unexpected", f"message kind {kind} is not known")
        try:
            message = decoder.decode(view[PREFIX_BYTES : PREFIX_BYTES + size])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError("malformed", f"message kind {kind}: {error}") from None
        if self._check is not None:
            self._check(message)
        return message, view[PREFIX_BYTES + size :]
