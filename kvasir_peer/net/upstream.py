"""The only door to py-libp2p: what is taken from it, and what is not, with the reason.

Everything in ``net`` (and the relay) imports libp2p's parts from here, so that a new version is looked at in
one place. Nothing of py-libp2p is patched at run time: where one of its parts does not hold, a part of our own
stands in its place, on the same wire format.

Taken from py-libp2p 0.8.1
    the Noise XX handshake with libp2p's signed payload, keys and peer ids, and the protobuf messages of
    identify, circuit relay v2 and DCUtR.

Not taken, and why (the letters are those of ``docs/network.md``)
    * ``Swarm``, ``BasicHost``: an inbound connection keeps its slot in ``Swarm._inbound_limiter`` until the whole
      swarm stops, not until the connection closes, so that after 250 inbound connections in its life a host takes
      no more; every close sleeps 0.1 s; a failed dial blocks the peer for 60 s; an auto-connector dials whoever
      is in the peer store; leaving ``run`` by cancellation closes nothing (H1, H2). Ours: ``host.py``.
    * ``new_host``'s security options: plaintext is offered unless forbidden, and whoever offers it is believed.
      Ours offers ``/noise`` and nothing else.
    * ``SecureSession``, ``Yamux``, ``NetStream``: eight locks and checkpoints for each frame; a write that is
      cancelled leaves half a frame and kills the connection (Y5); 5 s without window resets the stream (Y1);
      windows are polled (Y2) and not enforced (Y3). Ours: ``noise.py``, ``yamux.py``, ``connection.py``. ``Yamux``
      is kept as a spare: ``stock.py``.
    * the relay client: spins when a reservation runs out while the relay is away (C1), and never comes back after
      a restart of the relay (C2). Ours: ``circuit.py``, ``relays.py``.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re

from cryptography.exceptions import InvalidTag
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from libp2p.abc import IRawConnection
from libp2p.crypto.ed25519 import create_new_key_pair as ed25519_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.serialization import deserialize_public_key
from libp2p.crypto.x25519 import create_new_key_pair as x25519_key_pair
from libp2p.exceptions import BaseLibp2pError
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.peer.id import ID as PeerID
from libp2p.relay.circuit_v2.pb import circuit_pb2, dcutr_pb2
from libp2p.security.noise.patterns import PatternXX
from libp2p.security.secure_session import SecureSession
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamReset
from libp2p.stream_muxer.yamux.yamux import Yamux as StockYamux
from multiaddr import Multiaddr
from nacl.exceptions import CryptoError
from noise.exceptions import (
    NoiseHandshakeError,
    NoiseInvalidMessage,
    NoiseMaxNonceError,
    NoisePSKError,
    NoiseValueError,
)

__all__ = [
    "HANDSHAKE_ERRORS",
    "BaseLibp2pError",
    "IRawConnection",
    "Identify",
    "KeyPair",
    "Multiaddr",
    "MuxedStreamEOF",
    "MuxedStreamReset",
    "PatternXX",
    "PeerID",
    "SecureSession",
    "StockYamux",
    "UnknownFieldSet",
    "circuit_pb2",
    "dcutr_pb2",
    "deserialize_public_key",
    "ed25519_key_pair",
    "x25519_key_pair",
]

#: What py-libp2p's handshake raises on bytes that make no sense or prove the wrong peer.
HANDSHAKE_ERRORS = (
    BaseLibp2pError,
    InvalidTag,
    DecodeError,
    CryptoError,
    NoiseHandshakeError,
    NoiseInvalidMessage,
    NoiseMaxNonceError,
    NoisePSKError,
    NoiseValueError,
    ValueError,
    AssertionError,
)

#: Versions of libp2p whose internals were read for the parts above (first, and first not).
KNOWN_VERSIONS = ((0, 8, 1), (0, 9))


def check_version(version: str | None = None) -> str:
    """The version of libp2p that is installed.

    Raises:
        ImportError: it is one whose handshake internals nobody has looked at.
    """
    version = version or importlib.metadata.version("libp2p")
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    numbers = tuple(int(part or 0) for part in found.groups()) if found else ()
    if not KNOWN_VERSIONS[0] <= numbers < KNOWN_VERSIONS[1]:
        raise ImportError(
            f"libp2p {version} is installed, but the transport is built on 0.8.1 or later 0.8: install that"
        )
    return version


VERSION = check_version()

# Both write several lines for each address or handshake at DEBUG, and build the text of each even when nobody reads it.
for _name in ("libp2p", "multiaddr"):
    logging.getLogger(_name).setLevel(logging.WARNING)
