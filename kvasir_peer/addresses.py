"""Addresses of peers as text, checked without libp2p.

An address is a multiaddr such as ``/ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…``. Only the forms that the transports of
this program dial are taken: an IP address or a DNS name, TCP, and WebSocket over it, in the clear or with TLS.
"""

from __future__ import annotations

import ipaddress
import re

from kvasir_peer import identity

MAX_ADDRESS_CHARACTERS = 400  # a DNS name has at most 253, a peer id 52; the rest is protocol names

_DNS_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_-]{1,63})*\.?\Z")
_TRANSPORTS = ("", "/ws", "/wss", "/tls/ws")


def split_peer_address(text: str) -> tuple[str, str]:
    """Take an address with a peer id at its end apart: the transport part, and the peer id.

    Raises:
        ValueError: says in one line what is wrong with which part.
    """
    if len(text) > MAX_ADDRESS_CHARACTERS:
        raise ValueError(f"the address {text[:60]}… is over {MAX_ADDRESS_CHARACTERS} characters long")
    transport, separator, peer_id = text.rpartition("/p2p/")
    if not separator:
        raise ValueError(f"the address {text!r} does not end in /p2p/ and a peer id")
    try:
        identity.public_key_of(peer_id)
    except ValueError:
        raise ValueError(f"the address {text!r} ends in {peer_id!r}, which is no peer id") from None
    check_transport(transport)
    return transport, peer_id


def check_listen(text: str) -> None:
    """Check an address to listen on, such as ``/ip4/0.0.0.0/tcp/4001``; port 0 lets the system choose.

    Raises:
        ValueError: says in one line what is wrong with it.
    """
    parts = text.split("/")
    if len(parts) > 4 and parts[4] == "0":
        parts[4] = "1"
    check_transport("/".join(parts))
    if parts[1].startswith("dns") or parts[5:] not in ([], ["ws"]):
        raise ValueError(
            f"{text!r} is not to be listened on: use /ip4/ADDRESS/tcp/PORT, /ws at its end for WebSocket"
        )


def check_transport(text: str) -> None:
    """Check the part of an address before the peer id, such as ``/dns/relay.example.org/tcp/443/wss``.

    Raises:
        ValueError: says in one line what is wrong with which part.
    """
    parts = text.split("/")
    if len(parts) < 5 or parts[0] or parts[3] != "tcp":
        raise ValueError(f"the address {text!r} does not have the form /ip4/HOST/tcp/PORT")
    kind, host, port, rest = parts[1], parts[2], parts[4], parts[5:]
    if kind in ("ip4", "ip6"):
        try:
            valid = ipaddress.ip_address(host).version == int(kind[2])
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(f"the address {text!r} names {host!r}, which is no {kind} address")
    elif kind in ("dns", "dns4", "dns6"):
        if not _DNS_NAME.match(host):
            raise ValueError(f"the address {text!r} names {host!r}, which is no host name")
    else:
        raise ValueError(f"the address {text!r} begins with {kind!r}: use ip4, ip6, dns, dns4 or dns6")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"the address {text!r} has the port {port!r}: use a number from 1 to 65535")
    if "".join(f"/{part}" for part in rest) not in _TRANSPORTS:
        raise ValueError(
            f"the address {text!r} ends in {'/'.join(rest)!r}: only ws, wss and tls/ws may follow"
        )
