"""Who holds how much of the relay. Pure: the time is passed in, nothing here waits.

Everything that is limited is *taken* from the ledger and *given back*: a connection, a handshake, a reservation, a
circuit. What is taken is counted in all, by address, by network (prefix) and by peer. A refusal names the limit, in
the words of the configuration, so that the peer, the log and the metrics can say which one it was.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from kvasir_relay.buckets import RateTable
from kvasir_relay.config import Limits

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Peers whose carried bytes are remembered. Each costs about 200 bytes of memory; when there are more, the one that
# carried something longest ago is forgotten.
MAX_COUNTED_PEERS = 65536


def parse_address(host: str) -> Address:
    """The address without an IPv6 zone; IPv4 for an IPv4-mapped one. Raises ValueError."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


class LimitError(Exception):
    """A limit is reached.

    Attributes:
        limit: its name in the configuration, without the table: ``circuits_per_peer``.
    """

    def __init__(self, limit: str) -> None:
        super().__init__(limit)
        self.limit = limit


class Taken:
    """Something taken from the ledger; give it back once, by :meth:`give_back` or ``with``."""

    __slots__ = ("_counts", "_keys")

    def __init__(self, counts: dict[Hashable, int], keys: tuple[Hashable, ...]) -> None:
        self._counts = counts
        self._keys = keys
        for key in keys:
            counts[key] = counts.get(key, 0) + 1

    def give_back(self) -> None:
        """Give it back; a second time does nothing."""
        keys, self._keys = self._keys, ()
        for key in keys:
            left = self._counts[key] - 1
            if left:
                self._counts[key] = left
            else:
                del self._counts[key]

    def __enter__(self) -> Taken:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()


@dataclass(slots=True)
class _Carried:
    since: float
    total: int


@dataclass(frozen=True, slots=True)
class LedgerStatistics:
    """What is held now.

    Attributes:
        handshakes, connections, reservations, circuits: held now.
        month_bytes: carried in this calendar month.
        counted_peers: peers whose carried bytes are remembered.
    """

    handshakes: int
    connections: int
    reservations: int
    circuits: int
    month_bytes: int
    counted_peers: int


class Ledger:
    """The books of a relay.

    Args:
        limits: what may be held.
        now: seconds, a clock that never goes back.
    """

    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self._counts: dict[Hashable, int] = {}
        self._new_connections = RateTable(limits.new_connections_per_ip, limits.new_connections_per_ip)
        self._requests_by_peer = RateTable(limits.requests_per_peer, limits.requests_per_peer)
        self._requests_by_ip = RateTable(limits.requests_per_ip, limits.requests_per_ip)
        self._carried: dict[bytes, _Carried] = {}
        self.month = ""
        self.month_bytes = 0

    def change(self, limits: Limits, now: float) -> None:
        """New limits. What is held already stays held."""
        self.limits = limits
        self._new_connections.change(limits.new_connections_per_ip, limits.new_connections_per_ip, now)
        self._requests_by_peer.change(limits.requests_per_peer, limits.requests_per_peer, now)
        self._requests_by_ip.change(limits.requests_per_ip, limits.requests_per_ip, now)

    def prefix(self, address: Address) -> int:
        """The network of an address, as a number that no other network shares."""
        if address.version == 4:
            return int(address) >> (32 - self.limits.prefix_v4)
        return 1 << 129 | int(address) >> (128 - self.limits.prefix_v6)

    def _take(self, *wanted: tuple[str, Hashable, int]) -> Taken:
        """Take one of each (limit's name, key, limit), or raise LimitError for the first that is full."""
        for name, key, limit in wanted:
            if limit and self._counts.get((name, key), 0) >= limit:
                raise LimitError(name)
        return Taken(self._counts, tuple((name, key) for name, key, _ in wanted))

    def take_handshake(self, address: Address, now: float) -> Taken:
        """A connection was accepted; it has not proved who it is. Raises LimitError."""
        limits = self.limits
        taken = self._take(
            ("handshakes", None, limits.handshakes),
            ("handshakes_per_ip", address, limits.handshakes_per_ip),
        )
        if not self._new_connections.take(address, now):
            taken.give_back()
            raise LimitError("new_connections_per_ip")
        return taken

    def take_proxied_handshake(self) -> Taken:
        """A connection from a trusted proxy, which has not said whom it is for. Raises LimitError."""
        return self._take(("handshakes", None, self.limits.handshakes))

    def take_connection(self, address: Address) -> Taken:
        """A connection counts from its first byte to its end. Raises LimitError."""
        limits = self.limits
        return self._take(
            ("connections", None, limits.connections),
            ("connections_per_ip", address, limits.connections_per_ip),
            ("connections_per_prefix", self.prefix(address), limits.connections_per_prefix),
        )

    def take_request(self, peer: bytes, address: Address, now: float) -> None:
        """A peer asks for something. Raises LimitError."""
        if not self._requests_by_peer.take(peer, now):
            raise LimitError("requests_per_peer")
        if not self._requests_by_ip.take(address, now):
            raise LimitError("requests_per_ip")

    def take_reservation(self, address: Address) -> Taken:
        """A peer that holds none gets a reservation. Raises LimitError."""
        limits = self.limits
        return self._take(
            ("reservations", None, limits.reservations),
            ("reservations_per_ip", address, limits.reservations_per_ip),
            ("reservations_per_prefix", self.prefix(address), limits.reservations_per_prefix),
        )

    def take_circuit(self, peers: Iterable[bytes], addresses: Iterable[Address], now: float) -> Taken:
        """A circuit between two peers (or one with itself). Raises LimitError."""
        limits = self.limits
        ends, places = set(peers), set(addresses)
        for peer in ends:
            if self.peer_bytes_left(peer, now) <= 0:
                raise LimitError("peer_bytes")
        if limits.month_bytes and self.month_bytes >= limits.month_bytes:
            raise LimitError("month_bytes")
        return self._take(
            ("circuits", None, limits.circuits),
            *(("circuits_per_peer", peer, limits.circuits_per_peer) for peer in ends),
            *(("circuits_per_ip", address, limits.circuits_per_ip) for address in places),
            *(
                ("circuits_per_prefix", prefix, limits.circuits_per_prefix)
                for prefix in {self.prefix(address) for address in places}
            ),
        )

    def peer_bytes_left(self, peer: bytes, now: float) -> float:
        """Bytes that the peer's circuits may still carry in its time; infinite without a limit."""
        if not self.limits.peer_bytes:
            return float("inf")
        carried = self._carried.get(peer)
        if carried is None or now - carried.since >= self.limits.peer_bytes_time:
            return self.limits.peer_bytes
        return self.limits.peer_bytes - carried.total

    def carry(self, peers: tuple[bytes, ...], n: int, now: float) -> None:
        """``n`` bytes went over a circuit of these peers (each named once).

        Raises:
            LimitError: ``peer_bytes`` or ``month_bytes`` is used up; these bytes are counted all the same.
        """
        limits = self.limits
        self.month_bytes += n
        over = "month_bytes" if limits.month_bytes and self.month_bytes > limits.month_bytes else ""
        if limits.peer_bytes:
            for peer in peers:
                carried = self._carried.pop(peer, None)
                if carried is None or now - carried.since >= limits.peer_bytes_time:
                    carried = _Carried(now, 0)
                    if len(self._carried) >= MAX_COUNTED_PEERS:
                        del self._carried[next(iter(self._carried))]
                carried.total += n
                self._carried[peer] = carried
                if carried.total > limits.peer_bytes:
                    over = "peer_bytes"
        if over:
            raise LimitError(over)

    def begin_month(self, month: str, carried: int = 0) -> None:
        """A calendar month begins (``2031-05``), or its count is read back after a restart."""
        if month != self.month:
            self.month, self.month_bytes = month, carried

    def statistics(self) -> LedgerStatistics:
        """What is held now."""

        def held(name: str) -> int:
            return self._counts.get((name, None), 0)

        return LedgerStatistics(
            held("handshakes"),
            held("connections"),
            held("reservations"),
            held("circuits"),
            self.month_bytes,
            len(self._carried),
        )
