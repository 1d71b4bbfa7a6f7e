"""Identify: what the relay tells about itself and about where it sees the other side.

Peers behind NAT learn their own public address from it, which hole punching needs; so the observed address is the
real one, also behind a proxy. The relay asks nobody to identify themselves: it has no use for their addresses.
"""

from __future__ import annotations

from kvasir_peer import __version__
from kvasir_peer.identity import Identity
from kvasir_peer.net.maddr import of_socket, to_bytes
from kvasir_peer.net.upstream import Identify
from kvasir_relay.limits import Address
from kvasir_relay.messages import prefixed, public_key_message

IDENTIFY_PROTOCOL = "/ipfs/id/1.0.0"
IDENTIFY_PUSH_PROTOCOL = "/ipfs/id/push/1.0.0"


def identify_message(
    identity: Identity,
    addresses: list[str],
    protocols: tuple[str, ...],
    observed: tuple[Address, int] | None,
) -> bytes:
    """The message with its length.

    Args:
        addresses: multiaddresses without the relay's peer id.
        protocols: what the relay speaks; without the hop protocol while it drains.
        observed: address and port of the other side.
    """
    message = Identify(
        protocol_version="ipfs/0.1.0",
        agent_version=f"kvasir-relay/{__version__}",
        public_key=public_key_message(identity.public_key),
        listen_addrs=[to_bytes(address) for address in addresses],
        protocols=protocols,
    )
    if observed is not None:
        address, port = observed
        message.observed_addr = to_bytes(of_socket((str(address), port)))
    return prefixed(message.SerializeToString())
