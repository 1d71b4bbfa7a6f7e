"""Addresses of peers: the multiaddrs that this program dials, in text and in libp2p's bytes.

``/ip4/192.0.2.7/tcp/4001/p2p/R`` is a peer reached directly (``/ws``, ``/wss`` or ``/tls/ws`` may follow the port);
``/ip4/192.0.2.7/tcp/4001/p2p/R/p2p-circuit/p2p/X`` is X reached through the relay R.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from kvasir_peer import addresses
from kvasir_peer.errors import UsageError
from kvasir_peer.net import upstream

CIRCUIT = "/p2p-circuit"


@dataclass(frozen=True)
class Address:
    """One way to a peer.

    Attributes:
        host: IP address or DNS name.
        port: TCP port.
        secure: TLS below WebSocket.
        websocket: WebSocket over TCP.
        peer: peer id of who answers there: the peer itself, or the relay.
        through: peer id of the peer behind the relay, or None for a direct address.
    """

    host: str
    port: int
    secure: bool
    websocket: bool
    peer: str
    through: str | None = None

    @property
    def transport(self) -> str:
        """The part before the first peer id."""
        try:
            kind = f"ip{ipaddress.ip_address(self.host).version}"
        except ValueError:
            kind = "dns"
        tail = ("/tls/ws" if self.secure else "/ws") if self.websocket else ""
        return f"/{kind}/{self.host}/tcp/{self.port}{tail}"

    @property
    def first_hop(self) -> str:
        """The address of who answers there."""
        return f"{self.transport}/p2p/{self.peer}"

    def __str__(self) -> str:
        return self.first_hop if self.through is None else f"{self.first_hop}{CIRCUIT}/p2p/{self.through}"

    @property
    def private(self) -> bool:
        """Whether only machines of the same network, or the machine itself, can use it."""
        try:
            return not ipaddress.ip_address(self.host).is_global
        except ValueError:
            return False


def parse(text: str) -> Address:
    """Read an address. Raises UsageError, in one line."""
    direct, circuit, behind = text.partition(CIRCUIT)
    through: str | None = None
    if circuit:
        marker, _, through = behind.rpartition("/p2p/")
        if marker or not through:
            raise UsageError(f"the address {text!r} does not end in {CIRCUIT}/p2p/ and a peer id")
    try:
        transport, peer = addresses.split_peer_address(direct)
        if through is not None:
            addresses.split_peer_address(f"{transport}/p2p/{through}")
    except ValueError as error:
        raise UsageError(str(error)) from None
    return _build(transport, peer, through)


def parse_transport(text: str) -> tuple[str, int, bool]:
    """Host, port and whether it is WebSocket, of a listen address; port 0 lets the system choose. Raises UsageError."""
    parts = text.split("/")
    probe = text
    if len(parts) > 4 and parts[4] == "0":
        probe = "/".join([*parts[:4], "1", *parts[5:]])
    try:
        addresses.check_transport(probe)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if parts[1].startswith("dns"):
        raise UsageError(f"the listen address {text!r} needs an IP address in place of a name")
    return parts[2], int(parts[4]), parts[5:] == ["ws"]


def _build(transport: str, peer: str, through: str | None) -> Address:
    parts = transport.split("/")
    tail = parts[5:]
    return Address(parts[2], int(parts[4]), tail in (["wss"], ["tls", "ws"]), bool(tail), peer, through)


def of_socket(name: tuple[str, int] | tuple[str, int, int, int], *, websocket: bool = False) -> str:
    """The transport part for a socket name of IPv4 or IPv6."""
    address = ipaddress.ip_address(name[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return f"/ip{address.version}/{address}/tcp/{name[1]}" + ("/ws" if websocket else "")


def to_bytes(text: str) -> bytes:
    """libp2p's binary form."""
    return upstream.Multiaddr(text).to_bytes()


def from_bytes(raw: bytes) -> str | None:
    """The text of libp2p's binary form, or None when it makes no sense."""
    try:
        return str(upstream.Multiaddr(raw))
    except (ValueError, KeyError, LookupError, TypeError):
        return None
