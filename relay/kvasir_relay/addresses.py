"""Which addresses the relay tells peers.

What the operator announces, if anything; else what is listened on. A wildcard stands for the machine's own addresses.
As soon as one of them can be reached from the Internet, private and loopback ones are left out: they would send a
stranger to a machine of his own network, and tell him about ours.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterable, Sequence

from kvasir_peer.net.maddr import of_socket
from kvasir_relay.limits import parse_address
from kvasir_relay.listeners import Listener

log = logging.getLogger("kvasir_relay")


def machine_addresses() -> list[str]:
    """The addresses of this machine's interfaces, without link-local ones."""
    import socket

    import psutil

    found = []
    try:
        interfaces = psutil.net_if_addrs()
    except OSError as error:
        log.warning("this machine's addresses cannot be asked for (%s): set announce", error.strerror)
        return []
    for interface in interfaces.values():
        for item in interface:
            if item.family in (socket.AF_INET, socket.AF_INET6):
                address = ipaddress.ip_address(item.address.partition("%")[0])
                if not address.is_link_local:
                    found.append(str(address))
    return found


def advertised(announce: Sequence[str], listeners: Iterable[Listener], machine: Sequence[str]) -> list[str]:
    """Multiaddresses, without peer id, the best first.

    Args:
        announce: from the configuration.
        listeners: what is listened on.
        machine: addresses that a wildcard stands for.
    """
    if announce:
        return list(announce)
    candidates: list[tuple[str, int, bool]] = []
    for listener in listeners:
        bound = parse_address(listener.host)
        hosts = (
            [host for host in machine if parse_address(host).version == bound.version]
            if bound.is_unspecified
            else [listener.host]
        )
        candidates += [(host, listener.port, ws) for ws in sorted(listener.kinds) for host in hosts]
    for accept in (_is_global, _is_private, _is_loopback):
        chosen = [entry for entry in candidates if accept(entry[0])]
        if chosen:
            return [of_socket((host, port), websocket=ws) for host, port, ws in chosen]
    return []


def _is_global(host: str) -> bool:
    return parse_address(host).is_global


def _is_loopback(host: str) -> bool:
    return parse_address(host).is_loopback


def _is_private(host: str) -> bool:
    return not _is_global(host) and not _is_loopback(host)


def is_public(addresses: Iterable[str]) -> bool:
    """Whether one of these multiaddresses can be reached from the Internet; names are taken to be."""
    for address in addresses:
        _, protocol, value, *_ = address.split("/")
        if protocol.startswith("dns") or (protocol in ("ip4", "ip6") and _is_global(value)):
            return True
    return False
