"""The ticket that invites a machine into a swarm.

A ticket is one word of text, ``kvasir1…``, made to be sent by chat or mail and pasted into
``kvasir-peer join``. It carries the relays to dial, the bridge's peer id, the swarm's name, the roles that it
allows, an end of validity, and a secret of 128 bits that the bridge knows again. Who holds it may join: treat it
like a password.

The secret is made of the bridge's own one, the roles and the end (:func:`secret_for`), and a peer shows all three
(:meth:`Ticket.credential`). So a bridge that keeps nothing but its own secret knows what each ticket allows, and a
ticket whose roles or end somebody has changed is no good.

The text is Bech32m (BIP 350) without its limit of 90 characters. Its checksum is a BCH code over GF(32) with
distance 4 up to 1,023 symbols (BIP 173), so up to three wrong characters, and so each single typo and each
transposition, are refused for certain, and longer damage with a probability of 1 - 2^-30. The position of a
single wrong character can be computed, and is named in the error.

Binary form (big endian): version u8 = 1, roles u8 (a bit each), expiry u40 (Unix seconds), secret [16], bridge key
[32], name length u8 and UTF-8, relay count u8, and for each relay: key [32], length u8 and transport text.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kvasir_peer import addresses, identity
from kvasir_peer.errors import TicketError

ROLES: Final = ("volunteer", "stage", "coordinator")  # in the order of their bits

SECRET_BYTES = 16
MAX_RELAYS = 4
MAX_NAME_BYTES = 40
# The distance of the checksum holds up to 1,023 symbols, of which "kvasir" costs 13 by its expansion.
MAX_CHARACTERS = 1000

_PREFIX = "kvasir"
_ALPHABET = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
_VALUES = {character: value for value, character in enumerate(_ALPHABET)}
_BECH32M = 0x2BC830A3
_GENERATORS = (0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)
_CHECKSUM_SYMBOLS = 6
_VERSION = 1
_EXPIRY_BYTES = 5
_DOMAIN = b"kvasir ticket 1\0"


def _reduction(top: int) -> int:
    remainder = 0
    for bit, generator in enumerate(_GENERATORS):
        if top >> bit & 1:
            remainder ^= generator
    return remainder


_REDUCTIONS = [_reduction(top) for top in range(32)]


def _step(state: int) -> int:
    """Multiply the checksum's state by x, modulo the generator polynomial (BIP 173)."""
    return (state & 0x1FFFFFF) << 5 ^ _REDUCTIONS[state >> 25]


def _polymod(symbols: Iterable[int]) -> int:
    state = 1
    for symbol in symbols:
        state = _step(state) ^ symbol
    return state


_EXPANDED_PREFIX = [ord(c) >> 5 for c in _PREFIX] + [0] + [ord(c) & 31 for c in _PREFIX]


def _encode_text(raw: bytes) -> str:
    bits = len(raw) * 8
    symbol_count = (bits + 4) // 5
    number = int.from_bytes(raw, "big") << (symbol_count * 5 - bits)
    symbols = [number >> 5 * place & 31 for place in reversed(range(symbol_count))]
    checksum = _polymod(_EXPANDED_PREFIX + symbols + [0] * _CHECKSUM_SYMBOLS) ^ _BECH32M
    symbols += [checksum >> 5 * place & 31 for place in reversed(range(_CHECKSUM_SYMBOLS))]
    return _PREFIX + "1" + "".join(_ALPHABET[symbol] for symbol in symbols)


def _wrong_symbol(residue: int, count: int) -> int | None:
    """Index of the one symbol whose change would explain a residue that is not zero, or None."""
    for error in range(1, 32):
        state = error
        for index in reversed(range(count)):
            if state == residue:
                return index
            state = _step(state)
    return None


def _decode_text(text: str) -> bytes:
    text = "".join(text.split())  # mail and terminals wrap long words
    if not text:
        raise TicketError("the ticket is empty: paste the whole text that begins with kvasir1")
    if text.isupper():
        text = text.lower()
    start = _PREFIX + "1"
    if not text.startswith(start):
        raise TicketError(f"{text[:12]!r} does not begin a ticket: a ticket begins with {start}")
    if len(text) > MAX_CHARACTERS:
        raise TicketError(f"the ticket has {len(text)} characters, at most {MAX_CHARACTERS}: paste it once")
    body = text[len(start) :]
    for index, character in enumerate(body):
        if character not in _VALUES:
            place = len(start) + index + 1
            raise TicketError(f"the ticket has a typo: character {place}, {character!r}, occurs in no ticket")
    symbols = [_VALUES[character] for character in body]
    residue = _polymod(_EXPANDED_PREFIX + symbols) ^ _BECH32M
    if residue:
        wrong = _wrong_symbol(residue, len(symbols))
        if wrong is None:
            raise TicketError(
                f"the ticket is damaged (checksum wrong, {len(text)} characters): copy it again, whole"
            )
        place = len(start) + wrong + 1
        raise TicketError(f"the ticket has a typo: character {place}, {body[wrong]!r}, is wrong")
    symbols = symbols[:-_CHECKSUM_SYMBOLS]
    padding = len(symbols) * 5 % 8
    number = 0
    for symbol in symbols:
        number = number << 5 | symbol
    if padding > 4 or number & ((1 << padding) - 1):
        raise TicketError("the ticket is damaged (padding): copy it again, whole")
    return (number >> padding).to_bytes(len(symbols) * 5 // 8, "big")


class _Reader:
    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.at = 0

    def take(self, count: int) -> bytes:
        part = self.raw[self.at : self.at + count]
        if len(part) != count:
            raise TicketError("the ticket ends too early: ask for a new one")
        self.at += count
        return part

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "big")

    def text(self) -> str:
        try:
            return self.take(self.number(1)).decode()
        except UnicodeDecodeError:
            raise TicketError("the ticket holds text that is not UTF-8: ask for a new one") from None


@dataclass(frozen=True, slots=True)
class Ticket:
    """An invitation into a swarm.

    Attributes:
        relays: addresses of relays, each ending in ``/p2p/`` and the relay's peer id; 1 to 4.
        bridge: peer id of the bridge.
        swarm: name of the swarm, at most 40 bytes of UTF-8; printable.
        roles: what its holder may be, out of :data:`ROLES`.
        expires: Unix time in whole seconds after which the bridge no longer takes it.
        secret: 16 bytes that nobody can guess.

    Raises:
        TicketError: a field is outside its range.
    """

    relays: tuple[str, ...]
    bridge: str
    swarm: str
    roles: frozenset[str]
    expires: int
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not 1 <= len(self.relays) <= MAX_RELAYS:
            raise TicketError(f"a ticket names 1 to {MAX_RELAYS} relays, not {len(self.relays)}")
        try:
            for relay in self.relays:
                addresses.split_peer_address(relay)
            identity.public_key_of(self.bridge)
        except ValueError as error:
            raise TicketError(f"the ticket's addresses are wrong: {error}") from None
        if not self.swarm.isprintable() or not 1 <= len(self.swarm.encode()) <= MAX_NAME_BYTES:
            raise TicketError(
                f"the swarm's name {self.swarm[:80]!r} is not 1 to {MAX_NAME_BYTES} bytes of printable text"
            )
        unknown = sorted(self.roles.difference(ROLES))
        if unknown or not self.roles:
            raise TicketError(
                f"a ticket allows some of the roles {', '.join(ROLES)}, not {unknown or 'none'}"
            )
        if not 0 <= self.expires < 1 << 8 * _EXPIRY_BYTES:
            raise TicketError(f"the ticket's end of validity {self.expires} is no Unix time")
        if len(self.secret) != SECRET_BYTES:
            raise TicketError(f"a ticket's secret has {SECRET_BYTES} bytes, not {len(self.secret)}")

    @classmethod
    def issue(
        cls,
        *,
        relays: Iterable[str],
        bridge: str,
        swarm: str,
        roles: Iterable[str] = ROLES,
        lifetime: float,
        now: float | None = None,
    ) -> Ticket:
        """A new ticket with a fresh secret, valid for ``lifetime`` seconds from ``now`` (Unix time)."""
        expires = int((time.time() if now is None else now) + lifetime)
        secret = secrets.token_bytes(SECRET_BYTES)
        return cls(tuple(relays), bridge, swarm, frozenset(roles), expires, secret)

    def encode(self) -> str:
        """The ticket as one word of lower-case text.

        Raises:
            TicketError: the addresses are so long that the text would pass 1,000 characters.
        """
        name = self.swarm.encode()
        raw = bytearray([_VERSION]) + _allowed(self.roles, self.expires) + self.secret
        raw += identity.public_key_of(self.bridge)
        raw += bytes([len(name)]) + name + bytes([len(self.relays)])
        for relay in self.relays:
            transport, peer_id = addresses.split_peer_address(relay)
            encoded = transport.encode()
            if len(encoded) > 255:
                raise TicketError(f"the relay address {relay!r} is too long for a ticket")
            raw += identity.public_key_of(peer_id) + bytes([len(encoded)]) + encoded
        text = _encode_text(bytes(raw))
        if len(text) > MAX_CHARACTERS:
            raise TicketError(
                f"{len(self.relays)} relays of this length make the ticket too long: name fewer"
            )
        return text

    def check(self, *, now: float, role: str | None = None) -> None:
        """Refuse a ticket that is over at ``now`` (Unix time), or that does not allow ``role``.

        Raises:
            TicketError: in one line, with what to do.
        """
        if now >= self.expires:
            end = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.expires))
            raise TicketError(f"the ticket for {self.swarm!r} expired on {end}: ask the bridge for a new one")
        if role is not None and role not in self.roles:
            raise TicketError(
                f"the ticket for {self.swarm!r} is for {' or '.join(self.ordered_roles())}, not for {role}"
            )

    def credential(self) -> str:
        """What a peer shows to the bridge, hexadecimal: roles, end and secret."""
        return (_allowed(self.roles, self.expires) + self.secret).hex()

    def ordered_roles(self) -> list[str]:
        """The roles that the ticket allows, in the order of :data:`ROLES`."""
        return [role for role in ROLES if role in self.roles]


def _allowed(roles: Iterable[str], expires: int) -> bytes:
    given = frozenset(roles)
    bits = sum(1 << bit for bit, role in enumerate(ROLES) if role in given)
    return bytes([bits]) + expires.to_bytes(_EXPIRY_BYTES, "big")


def secret_for(own: bytes, roles: Iterable[str], expires: int) -> bytes:
    """The secret of a ticket for these roles until this end, of a bridge whose own secret is ``own``."""
    return hmac.digest(own, _DOMAIN + _allowed(roles, expires), hashlib.sha256)[:SECRET_BYTES]


def admits(own: bytes, credential: str, *, role: str, now: float) -> bool:
    """Whether a credential lets its holder be ``role`` at ``now`` (Unix time), at the bridge whose secret is ``own``.

    The bridge's own secret is one for every role and without end; it is in no ticket.
    """
    try:
        shown = bytes.fromhex(credential)
    except ValueError:
        return False
    allowed, secret = shown[:-SECRET_BYTES], shown[-SECRET_BYTES:]
    if hmac.compare_digest(secret, own):
        return True
    if len(allowed) != 1 + _EXPIRY_BYTES:
        return False
    good = hmac.digest(own, _DOMAIN + allowed, hashlib.sha256)[:SECRET_BYTES]
    known = hmac.compare_digest(secret, good)
    return known and bool(allowed[0] >> ROLES.index(role) & 1) and now < int.from_bytes(allowed[1:], "big")


def parse(text: str) -> Ticket:
    """Read a ticket from text; white space inside it is ignored.

    Raises:
        TicketError: names what is wrong: not a ticket, the typo's place, damage, an unknown version, a field.
    """
    reader = _Reader(_decode_text(text))
    version = reader.number(1)
    if version != _VERSION:
        raise TicketError(
            f"the ticket is of version {version}, this program reads {_VERSION}: update kvasir-peer"
        )
    bits = reader.number(1)
    if bits >> len(ROLES):
        raise TicketError("the ticket names a role that this program does not know: update kvasir-peer")
    expires = reader.number(_EXPIRY_BYTES)
    secret = reader.take(SECRET_BYTES)
    bridge = identity.peer_id_of(reader.take(identity.KEY_BYTES))
    swarm = reader.text()
    relays = []
    for _ in range(reader.number(1)):
        peer_id = identity.peer_id_of(reader.take(identity.KEY_BYTES))
        relays.append(f"{reader.text()}/p2p/{peer_id}")
    if reader.at != len(reader.raw):
        raise TicketError("the ticket has bytes left over: ask for a new one")
    roles = frozenset(role for bit, role in enumerate(ROLES) if bits >> bit & 1)
    return Ticket(tuple(relays), bridge, swarm, roles, expires, secret)
