"""Noise for libp2p: the handshake of py-libp2p, and a transport phase of our own on the same wire format.

On the wire a message is ``length (2 bytes, big-endian) | ciphertext | tag (16)``; the nonce is a counter. The
handshake is Noise XX with 25519, ChaCha20-Poly1305 and SHA-256, whose payload binds the libp2p identity
(https://github.com/libp2p/specs/tree/master/noise). Nothing else is ever offered or accepted: libp2p's plaintext
is believed by whoever offers it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from kvasir_peer.errors import LinkError, WireError
from kvasir_peer.net import multistream, upstream
from kvasir_peer.net.duplex import Duplex, receive_exactly

PROTOCOL = "/noise"

LENGTH_BYTES = 2
TAG_BYTES = 16
OVERHEAD = LENGTH_BYTES + TAG_BYTES
MAX_MESSAGE_BYTES = 65535
MAX_PLAINTEXT_BYTES = MAX_MESSAGE_BYTES - TAG_BYTES

#: Nonces may not come back; the specification stops at 2**64 - 1, far out of reach, and so do we.
_MAX_NONCE = 2**64 - 1


class SendCipher:
    """Encrypts messages, one nonce after the other."""

    def __init__(self, key: bytes, nonce: int = 0) -> None:
        self._aead: Any = ChaCha20Poly1305(key)
        self._nonce = nonce
        self._into: Callable[..., int] | None = getattr(self._aead, "encrypt_into", None)

    def seal(self, plaintext: memoryview, out: memoryview) -> int:
        """Write one message, with its length, to ``out``; returns its size (plaintext + 18 bytes)."""
        nonce = self._nonce
        if nonce >= _MAX_NONCE:
            raise LinkError("the connection has used up its nonces")
        self._nonce = nonce + 1
        body = len(plaintext) + TAG_BYTES
        out[0] = body >> 8
        out[1] = body & 0xFF
        raw = b"\0\0\0\0" + nonce.to_bytes(8, "little")
        if self._into is not None:
            self._into(raw, plaintext, None, out[2 : 2 + body])
        else:
            out[2 : 2 + body] = self._aead.encrypt(raw, plaintext, None)
        return body + LENGTH_BYTES


class ReceiveCipher:
    """Decrypts messages in the order they were sent."""

    def __init__(self, key: bytes, nonce: int = 0) -> None:
        self._aead: Any = ChaCha20Poly1305(key)
        self._nonce = nonce

    def open(self, message: memoryview) -> bytes:
        """The plaintext of one message (without its length). Raises WireError when it was tampered with."""
        nonce = self._nonce
        self._nonce = nonce + 1
        try:
            return self._aead.decrypt(b"\0\0\0\0" + nonce.to_bytes(8, "little"), message, None)  # type: ignore[no-any-return]
        except InvalidTag:
            raise WireError(
                "tampered", "an encrypted message does not authenticate: the connection is not safe any more"
            ) from None


@dataclass(frozen=True)
class Secured:
    """What a handshake leaves behind.

    Attributes:
        remote_peer: the authenticated peer id of the other side.
        initiator: whether we began.
    """

    remote_peer: str
    initiator: bool
    send: SendCipher
    receive: ReceiveCipher


class NoiseIdentity:
    """The keys of this peer as the handshake wants them.

    Args:
        private_key: Ed25519 seed, 32 bytes.
    """

    def __init__(self, private_key: bytes) -> None:
        self._keys = upstream.ed25519_key_pair(private_key)
        self._static = upstream.x25519_key_pair().private_key
        self._local = upstream.PeerID.from_pubkey(self._keys.public_key)
        self.peer_id = self._local.to_base58()
        self.public_key_message: bytes = self._keys.public_key.serialize()

    def sign(self, data: bytes) -> bytes:
        """An Ed25519 signature."""
        return self._keys.private_key.sign(data)

    async def secure_outbound(self, duplex: Duplex, peer: str) -> Secured:
        """Agree on Noise and prove who we are to ``peer``, which must prove that it is.

        The caller sets the deadline and closes ``duplex`` on failure. Raises LinkError.
        """
        await multistream.propose(duplex, PROTOCOL)
        expected = upstream.PeerID.from_base58(peer)
        return await self._handshake(
            duplex, True, lambda raw: self._pattern().handshake_outbound(raw, expected)
        )

    async def secure_inbound(self, duplex: Duplex) -> Secured:
        """The answering side of :meth:`secure_outbound`: whoever comes, proven."""
        await multistream.answer(duplex, lambda protocol: protocol == PROTOCOL)
        return await self._handshake(duplex, False, lambda raw: self._pattern().handshake_inbound(raw))

    def _pattern(self) -> Any:
        return upstream.PatternXX(self._local, self._keys.private_key, self._static)

    async def _handshake(self, duplex: Duplex, initiator: bool, run: Callable[[Any], Any]) -> Secured:
        raw = _RawConnection(duplex, initiator)
        try:
            session = await run(raw)
        except upstream.HANDSHAKE_ERRORS as error:
            reason = f"{type(error).__name__} {error}".rstrip()
            raise LinkError(f"the encryption handshake failed: {reason}") from error
        protocol = session.conn.noise_state.noise_protocol
        send, receive = protocol.cipher_state_encrypt, protocol.cipher_state_decrypt
        return Secured(
            session.remote_peer.to_base58(),
            initiator,
            SendCipher(send.k, send.n),
            ReceiveCipher(receive.k, receive.n),
        )


class _RawConnection(upstream.IRawConnection):  # type: ignore[misc]
    """A duplex as py-libp2p's handshake reads it: exactly, never ahead."""

    def __init__(self, duplex: Duplex, initiator: bool) -> None:
        self._duplex = duplex
        self.is_initiator = initiator

    async def read(self, n: int | None = None) -> bytes:
        return await receive_exactly(self._duplex, n or 0)

    async def write(self, data: bytes) -> None:
        await self._duplex.send_all(data)

    async def close(self) -> None:
        await self._duplex.aclose()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None

    def get_transport_addresses(self) -> list[Any]:
        return []

    def get_connection_type(self) -> Any:
        return None
