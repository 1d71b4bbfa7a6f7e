"""Who may use the relay: allow and deny lists, invites, private addresses. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvasir_relay.config import Access, Network
from kvasir_relay.invites import Invite
from kvasir_relay.limits import Address


@dataclass(frozen=True, slots=True)
class Denial:
    """Why somebody may not.

    Attributes:
        reason: a short stable word, counted in the metrics and told to the peer.
        text: for the log: what the operator would change.
    """

    reason: str
    text: str


DENIED_NETWORK = Denial("denied_network", "the address is in access.deny_networks")
DENIED_PEER = Denial("denied_peer", "the peer is in access.deny_peers")
NOT_LISTED = Denial("not_listed", "access.mode is listed, and neither the peer nor its network is allowed")
NO_INVITE = Denial("no_invite", "access.mode is invited, and the peer has shown no invite that holds")
PRIVATE_ADDRESS = Denial(
    "private_address",
    "the peer comes from a private or loopback address and this relay is public: if it stands behind a proxy set "
    'trusted_proxies, if it serves its own network too set access.private_peers to "allow"',
)


def _inside(address: Address, networks: tuple[Network, ...]) -> bool:
    return any(address in network for network in networks)


class Gatekeeper:
    """Decides from the configuration in force.

    Args:
        access: the rules.
        public: whether an address of the relay can be reached from the Internet.
    """

    def __init__(self, access: Access, *, public: bool) -> None:
        self.change(access, public=public)

    def change(self, access: Access, *, public: bool) -> None:
        """New rules from now on."""
        self._access = access
        self._allow = frozenset(access.allow_peers)
        self._deny = frozenset(access.deny_peers)
        self._refuse_private = access.private_peers == "refuse" or (access.private_peers == "auto" and public)

    def connect(self, address: Address, peer: str | None = None) -> Denial | None:
        """Whether a connection may stay: by its address at first, by its peer too when that is known."""
        if _inside(address, self._access.deny_networks):
            return DENIED_NETWORK
        if peer is not None and peer in self._deny:
            return DENIED_PEER
        return None

    def use(self, address: Address, peer: str, invite: Invite | None, unix_time: float) -> Denial | None:
        """Whether a peer may reserve, and open or take circuits.

        Args:
            address: where it comes from.
            peer: its peer id, authenticated.
            invite: the one it has shown on this connection.
            unix_time: seconds, for the invite's end.
        """
        if denial := self.connect(address, peer):
            return denial
        if peer in self._allow or _inside(address, self._access.allow_networks):
            return None
        if self._refuse_private and not address.is_global:
            return PRIVATE_ADDRESS
        if self._access.mode == "listed":
            return NOT_LISTED
        if self._access.mode == "invited" and (invite is None or invite.not_after <= unix_time):
            return NO_INVITE
        return None
