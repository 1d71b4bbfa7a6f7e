"""The key of a peer, and the name that follows from it.

A peer is an Ed25519 key; its name is the libp2p peer id of the public half. The id is computed here by hand
(libp2p specification, "Peer Ids": protobuf ``PublicKey``, identity multihash, base58btc), because importing
libp2p takes over a second and ``kvasir-peer id`` must not.

The key file holds the specification's protobuf ``PrivateKey`` message (4 bytes of header, 32 of seed, 32 of
public key), as go-libp2p and js-libp2p write it.
"""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kvasir_peer.errors import SettingsError

KEY_FILE = "identity.key"

KEY_BYTES = 32
SIGNATURE_BYTES = 64
PEER_ID_CHARACTERS = 52  # of an Ed25519 peer id: 38 bytes in base58, all of them begin with 12D3KooW

# protobuf: field 1 (key type) = 1 (Ed25519), field 2 (data), its length.
_PUBLIC_HEADER = b"\x08\x01\x12\x20"
_PRIVATE_HEADER = b"\x08\x01\x12\x40"
# multihash: function 0 (identity), 36 bytes follow.
_MULTIHASH_HEADER = b"\x00\x24"

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BASE58_VALUES = {character: value for value, character in enumerate(_BASE58)}


def _base58_encode(raw: bytes) -> str:
    number = int.from_bytes(raw, "big")
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_BASE58[digit])
    zeros = len(raw) - len(raw.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(digits))


def _base58_decode(text: str) -> bytes:
    number = 0
    for character in text:
        number = number * 58 + _BASE58_VALUES[character]
    zeros = len(text) - len(text.lstrip("1"))
    return bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")


def peer_id_of(public_key: bytes) -> str:
    """The libp2p peer id of an Ed25519 public key (32 bytes)."""
    if len(public_key) != KEY_BYTES:
        raise ValueError(f"an Ed25519 public key has {KEY_BYTES} bytes, not {len(public_key)}")
    return _base58_encode(_MULTIHASH_HEADER + _PUBLIC_HEADER + public_key)


@lru_cache(maxsize=4096)
def public_key_of(peer_id: str) -> bytes:
    """The Ed25519 public key (32 bytes) inside a peer id.

    Raises:
        ValueError: the text is not the peer id of an Ed25519 key.
    """
    if len(peer_id) != PEER_ID_CHARACTERS or not all(character in _BASE58_VALUES for character in peer_id):
        raise ValueError(f"not the peer id of an Ed25519 key: {peer_id[:80]!r}")
    raw = _base58_decode(peer_id)
    header = _MULTIHASH_HEADER + _PUBLIC_HEADER
    if len(raw) != len(header) + KEY_BYTES or not raw.startswith(header):
        raise ValueError(f"not the peer id of an Ed25519 key: {peer_id!r}")
    return raw[len(header) :]


@lru_cache(maxsize=256)
def _key_of(peer_id: str) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public_key_of(peer_id))


def verify(peer_id: str, signature: bytes, message: bytes) -> bool:
    """Whether ``signature`` (64 bytes) is that peer's over ``message``; False for a bad peer id."""
    try:
        _key_of(peer_id).verify(signature, message)
    except (ValueError, InvalidSignature):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Identity:
    """An Ed25519 key pair and its peer id.

    Attributes:
        private_key: the seed, 32 bytes; never printed.
        public_key: 32 bytes.
        peer_id: libp2p peer id, ``12D3KooW…``.
    """

    private_key: bytes = field(repr=False)
    public_key: bytes
    peer_id: str
    _signer: Ed25519PrivateKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Made once: making it takes three times as long as signing.
        object.__setattr__(self, "_signer", Ed25519PrivateKey.from_private_bytes(self.private_key))

    @classmethod
    def from_private_key(cls, private_key: bytes) -> Identity:
        """The identity of a seed of 32 bytes."""
        public_key = Ed25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()
        return cls(bytes(private_key), public_key, peer_id_of(public_key))

    @classmethod
    def generate(cls) -> Identity:
        """A new random identity, not stored anywhere."""
        return cls.from_private_key(secrets.token_bytes(KEY_BYTES))

    def sign(self, message: bytes) -> bytes:
        """Ed25519 signature (64 bytes) over ``message``."""
        return self._signer.sign(message)

    def libp2p_private_key(self) -> bytes:
        """libp2p's protobuf ``PrivateKey`` message (68 bytes)."""
        return _PRIVATE_HEADER + self.private_key + self.public_key


def load(path: Path) -> Identity:
    """Read a key file.

    Raises:
        FileNotFoundError: there is none.
        SettingsError: others may read it, or it is damaged.
    """
    if os.name == "posix":
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise SettingsError(
                f"the key {path} may be read by others (mode {mode:04o}): run chmod 600 {path}"
            )
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SettingsError(f"cannot read the key {path}: {error.strerror}") from error
    identity = None
    if len(raw) == len(_PRIVATE_HEADER) + 2 * KEY_BYTES and raw.startswith(_PRIVATE_HEADER):
        identity = Identity.from_private_key(raw[len(_PRIVATE_HEADER) :][:KEY_BYTES])
    if identity is None or identity.libp2p_private_key() != raw:
        raise SettingsError(
            f"the key {path} is damaged: restore it from a copy, or remove it to get a new identity"
        )
    return identity


def load_or_create(path: Path) -> Identity:
    """The identity stored at ``path``; a new one is made, mode 0600, if there is none.

    The file appears whole or not at all; several processes that create it at once all get the same key.

    Raises:
        SettingsError: the file or its folder cannot be used.
    """
    try:
        return load(path)
    except FileNotFoundError:
        pass
    except NotADirectoryError as error:
        raise SettingsError(f"cannot create the key {path}: a part of the path is a file") from error
    identity = Identity.generate()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(identity.libp2p_private_key())
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(
                    temporary, path
                )  # unlike a rename it never replaces a key that another process just made
            except (
                PermissionError,
                NotImplementedError,
            ):  # a file system without hard links (FAT, some phones)
                if path.exists():
                    raise FileExistsError(path) from None
                temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError:
        return load(path)
    except OSError as error:
        raise SettingsError(f"cannot create the key {path}: {error.strerror or error}") from error
    return identity
