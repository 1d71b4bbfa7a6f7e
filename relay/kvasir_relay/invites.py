"""Invites: a signed text that lets its holder use a relay whose operator does not serve everyone.

An invite is signed by the relay's own key, or by a key that the operator names in ``access.invite_issuers``, and
says for which relay it is, until when, and if wanted for which peer alone. A holder shows it once on each
connection, on the protocol ``/kvasir/relay/invite/1``: a varint length and the text; the relay answers with a varint
length and ``ok`` or the reason. Revoking an invite closes the connections on which it was shown.

The text is ``kvr1-`` and base64url (no padding) of ``signature (64 bytes) | payload``, the payload a JSON object with
the fields below; JSON because people look into such texts, signed as the bytes that are sent, so that its form does
not matter.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from kvasir_peer.errors import RefusedError, SettingsError
from kvasir_peer.identity import SIGNATURE_BYTES, Identity, public_key_of, verify

INVITE_PROTOCOL = "/kvasir/relay/invite/1"
PREFIX = "kvr1-"
DOMAIN = (
    b"kvasir-relay-invite-1:"  # what is signed begins with this, so that no other signature passes for one
)
MAX_INVITE_BYTES = 1024
REVOKED_FILE = "revoked-invites"
_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Invite:
    """What an invite says.

    Attributes:
        id: 16 hexadecimal digits; what is revoked.
        relay: peer id of the relay that it is for.
        issuer: peer id of the key that signed it.
        not_after: Unix time in seconds at which it ends.
        peer: peer id that it is for, or empty: whoever has it.
        peers: how many different peers may be connected by it at once; 0 for no limit.
    """

    id: str
    relay: str
    issuer: str
    not_after: int
    peer: str = ""
    peers: int = 0


def create(
    issuer: Identity, relay: str, *, not_after: int, peer: str = "", peers: int = 0
) -> tuple[Invite, str]:
    """A new invite and its text."""
    invite = Invite(secrets.token_hex(8), relay, issuer.peer_id, not_after, peer, peers)
    payload = json.dumps(
        {name: getattr(invite, name) for name in Invite.__slots__}, separators=(",", ":")
    ).encode()
    raw = issuer.sign(DOMAIN + payload) + payload
    return invite, PREFIX + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def read(text: str, *, relay: str, issuers: Collection[str]) -> Invite:
    """The invite in ``text``, its signature checked. Whether it has ended or is revoked is for the caller.

    Raises:
        RefusedError: it is no invite, not for this relay, or not from one of ``issuers``; the text is the reason.
    """
    if len(text) > MAX_INVITE_BYTES or not text.startswith(PREFIX):
        raise RefusedError("not_an_invite")
    body = text.removeprefix(PREFIX)
    try:
        raw = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
        signature, payload = raw[:SIGNATURE_BYTES], raw[SIGNATURE_BYTES:]
        fields = json.loads(payload)
        invite = Invite(**fields)
        public_key_of(invite.issuer)
        well_formed = (
            bool(_ID.fullmatch(invite.id))
            and isinstance(invite.relay, str)
            and isinstance(invite.peer, str)
            and type(invite.not_after) is int
            and type(invite.peers) is int
        )
    except (binascii.Error, ValueError, TypeError, RecursionError):
        raise RefusedError("not_an_invite") from None
    if not well_formed:
        raise RefusedError("not_an_invite")
    if invite.relay != relay:
        raise RefusedError("invite_for_another_relay")
    if invite.issuer not in issuers:
        raise RefusedError("invite_from_unknown_issuer")
    if not verify(invite.issuer, signature, DOMAIN + payload):
        raise RefusedError("invite_signature_wrong")
    return invite


def revoke(home: Path, invite_id: str) -> bool:
    """Add an invite's id to the list that the running relay reads; False if it was there already.

    Raises:
        SettingsError: the list cannot be written, or this is no id.
    """
    invite_id = invite_id.strip().lower()
    if not _ID.fullmatch(invite_id):
        raise SettingsError(f"{invite_id!r} is not an invite's id: it has 16 hexadecimal digits")
    path = home / REVOKED_FILE
    if invite_id in read_revoked(home):
        return False
    try:
        with path.open("a", encoding="ascii") as file:
            file.write(invite_id + "\n")
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}") from error
    return True


def read_revoked(home: Path) -> frozenset[str]:
    """Ids of the revoked invites. Raises SettingsError when the list cannot be read or is damaged."""
    path = home / REVOKED_FILE
    try:
        lines = path.read_text(encoding="ascii").split()
    except FileNotFoundError:
        return frozenset()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the revoked invites in {path}: {error}") from error
    for line in lines:
        if not _ID.fullmatch(line):
            raise SettingsError(f"{path}: {line[:40]!r} is not an invite's id (16 hexadecimal digits)")
    return frozenset(lines)
