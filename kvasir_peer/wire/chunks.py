"""Messages of ``/kvasir/chunks/1``: a peer asks for chunks of weights by hash and gets their bytes.

The asker may have several wants outstanding; answers come in any order, each with its chunk as payload.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvasir_peer.wire.codec import PREFIX_BYTES, Codec

PROTOCOL = "/kvasir/chunks/1"

MAX_CHUNK_BYTES = 4 << 20  # the manifest cuts larger tensors
MAX_WANTS = 64  # hashes in one request, and chunks one peer may have outstanding on a link
MAX_PERMIT, MAX_SIGNATURE = 1024, 128  # bytes of a permit and of its signature
_MAX_HEADER = 4096
MAX_CHUNK_FRAME = PREFIX_BYTES + _MAX_HEADER + MAX_CHUNK_BYTES
MAX_WANT_FRAME = PREFIX_BYTES + _MAX_HEADER

# A store makes a file's name of a hash, so nothing else may pass for one.
Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]


class Want(msgspec.Struct, frozen=True, array_like=True):
    """Send me these chunks (SHA-256, 32 bytes each)."""

    hashes: Annotated[tuple[Hash, ...], Meta(max_length=MAX_WANTS)]


class Have(msgspec.Struct, frozen=True, array_like=True):
    """A chunk; the payload is its bytes, to be checked against the hash."""

    hash: Hash


class Lack(msgspec.Struct, frozen=True, array_like=True):
    """This peer does not have, or will not give, the chunk."""

    hash: Hash
    reason: str


class Permit(msgspec.Struct, frozen=True, array_like=True):
    """The bridge's word that the asker may fetch chunks: the first frame to a peer that is not the bridge.

    Attributes:
        data: what was signed, see :mod:`kvasir_peer.experts.permits`.
        signature: of the bridge.
    """

    data: Annotated[bytes, Meta(max_length=MAX_PERMIT)]
    signature: Annotated[bytes, Meta(max_length=MAX_SIGNATURE)]


CODEC = Codec({1: Want, 2: Have, 3: Lack, 4: Permit}, max_header=_MAX_HEADER)
