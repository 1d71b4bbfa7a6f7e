"""A bridge's word that a peer may fetch a model's chunks from other peers; the asker shows it as its first frame.

Whoever holds chunks knows neither the tickets of a swarm nor who has shown one; the bridge does.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

PERMIT_SECONDS = 3600.0  # a download takes longer only on a very slow line, and asks for nothing but chunks
CLOCK_SECONDS = 120.0  # clocks of people's machines are off
_DOMAIN = b"kvasir chunk permit 1\0"


class ChunkPermit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the bridge signs.

    Attributes:
        bridge: peer id whose signature makes it valid.
        peer: who may fetch.
        model: manifest id.
        expires: seconds since 1970.
    """

    bridge: str
    peer: str
    model: str
    expires: float


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ChunkPermit)


def sign_permit(permit: ChunkPermit, sign: Callable[[bytes], bytes]) -> tuple[bytes, bytes]:
    """The permit's bytes and the bridge's signature."""
    data = _encoder.encode(permit)
    return data, sign(_DOMAIN + data)


def permits(
    data: bytes,
    signature: bytes,
    *,
    bridge: str,
    peer: str,
    now: float,
    verify: Callable[[str, bytes, bytes], bool],
) -> bool:
    """Whether a bridge has said that this peer may fetch chunks now (seconds since 1970)."""
    try:
        permit = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if permit.bridge != bridge or permit.peer != peer or not now < permit.expires + CLOCK_SECONDS:
        return False
    return verify(bridge, signature, _DOMAIN + data)
