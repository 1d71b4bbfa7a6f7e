"""Where a peer behind a reverse proxy comes from. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvasir_peer.errors import WireError
from kvasir_relay.config import Network
from kvasir_relay.limits import Address, parse_address


def is_trusted(address: Address, trusted: Sequence[Network]) -> bool:
    """Whether what this address says about others is believed."""
    return any(address in network for network in trusted)


def forwarded_address(address: Address, header: str, trusted: Sequence[Network]) -> Address:
    """The address that a chain of trusted proxies vouches for; ``address`` itself where none does.

    Each proxy appends to ``X-Forwarded-For`` the address that it was called from. So the header is read from the
    right, over further trusted proxies, to the first address that is none; what stands left of that is the caller's
    own invention.

    Args:
        address: who opened the connection to us.
        header: the header's value, or "".
        trusted: networks of proxies.

    Raises:
        WireError: a trusted proxy sent something that is no address.
    """
    for item in reversed(header.split(",")):
        if not is_trusted(address, trusted):
            break
        if not item.strip():
            continue
        try:
            address = parse_address(item.strip())
        except ValueError:
            raise WireError("malformed", "the header of a trusted proxy holds no address") from None
    return address
