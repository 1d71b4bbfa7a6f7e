"""One inbound connection of a peer: its streams, and what it holds at the relay."""

from __future__ import annotations

import ipaddress

import trio
from libp2p.exceptions import BaseLibp2pError

from kvasir_peer.errors import KvasirError

# Whatever a stream or a connection of another peer may do to us; each ends that stream, or that connection, alone.
PEER_ERRORS = (
    BaseLibp2pError,
    KvasirError,
    OSError,
    EOFError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.TooSlowError,
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_address(host: str) -> Address:
    """The address without IPv6 zone, IPv4 for an IPv4-mapped one. Raises ValueError."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
