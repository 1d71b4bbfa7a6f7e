"""From a circuit to a direct connection (DCUtR: direct connection upgrade through relay).

The side that accepted the circuit drives. It asks for the other side's addresses through the circuit, tries them as
they are (same network, or no NAT), and then lets both sides dial at the same moment from the ports they listen on, so
that each side's packets open its own NAT for the other's. Specification:
https://github.com/libp2p/specs/blob/master/relay/DCUtR.md
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable, Sequence

import psutil
import trio

from kvasir_peer.errors import KvasirError, LinkError, UsageError, WireError
from kvasir_peer.net import delimited, maddr, upstream
from kvasir_peer.net.connection import Connection
from kvasir_peer.net.host import Host
from kvasir_peer.net.yamux import MuxedStream

logger = logging.getLogger(__name__)

PROTOCOL = "/libp2p/dcutr"

MAX_MESSAGE_BYTES = 4096  # by the specification
MAX_ADDRESSES = 8  # of the other side that are dialled
STEP_S = 10.0  # for each message of the other side
PLAIN_DIAL_S = 2.0  # for addresses that need no hole
PUNCH_S = 5.0  # for one round of dialling at once
#: Delays before each attempt for a circuit; afterwards, and for as long as it lives, every ten minutes.
ATTEMPTS_S = (0.0, 5.0, 30.0)
AGAIN_S = 600.0
MAX_UNDER_WAY = 8  # upgrades at once
MAX_ANSWERED = 64  # peers whose hole punching is answered at once; one each

_HolePunch = upstream.dcutr_pb2.HolePunch

_WILD = ("0.0.0.0", "::")


def interface_addresses(listening: str) -> list[str]:
    """A listen address with "any" written out: one for each interface that others can use."""
    parts = listening.split("/")
    if parts[2] not in _WILD:
        return [listening]
    found = []
    for addresses in psutil.net_if_addrs().values():
        for entry in addresses:
            try:
                address = ipaddress.ip_address(entry.address.partition("%")[0])
            except ValueError:
                continue  # a hardware address
            if f"ip{address.version}" == parts[1] and not address.is_loopback and not address.is_link_local:
                found.append("/".join([*parts[:2], str(address), *parts[3:]]))
    return found


def present_addresses() -> set[str]:
    """IP addresses that this machine has now."""
    return {
        entry.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for entry in addresses
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


class Upgrader:
    """Finds direct connections for circuits, in the background.

    Args:
        host: ours.
        candidates: gives the transport addresses at which we might be reached directly.
    """

    def __init__(self, host: Host, candidates: Callable[[], list[str]]) -> None:
        self._host = host
        self._candidates = candidates
        self._limiter = trio.CapacityLimiter(MAX_UNDER_WAY)
        self._driven: set[str] = set()
        self._awaited: dict[str, trio.Event] = {}
        host.handle(PROTOCOL, self._answer)
        host.on_connection.append(self._arrived)

    def consider(self, circuit: Connection) -> None:
        """A circuit began; drive its upgrade if that is ours to do."""
        if not circuit.initiator and circuit.remote_peer not in self._driven:
            self._driven.add(circuit.remote_peer)
            self._host.nursery.start_soon(self._drive, circuit.remote_peer)

    def _arrived(self, connection: Connection) -> None:
        awaited = self._awaited.get(connection.remote_peer)
        if awaited is not None and connection.path == "direct":
            awaited.set()

    def _direct(self, peer: str) -> bool:
        return any(c.path == "direct" for c in self._host.connections(peer))

    async def _drive(self, peer: str) -> None:
        """Try now and then, as long as there is a circuit."""
        attempt = 0
        try:
            while True:
                await trio.sleep(ATTEMPTS_S[attempt] if attempt < len(ATTEMPTS_S) else AGAIN_S)
                circuits = [c for c in self._host.connections(peer) if c.path == "relayed"]
                if not circuits:
                    return
                if self._direct(peer):
                    attempt = 1
                    continue
                attempt += 1
                async with self._limiter:
                    try:
                        await self._upgrade(circuits[0])
                    except (KvasirError, trio.TooSlowError) as error:
                        logger.debug("no direct connection to %s yet: %s", peer, error)
        finally:
            self._driven.discard(peer)

    async def _upgrade(self, circuit: Connection) -> None:
        """One attempt, as the driving side. Raises LinkError, WireError, TooSlowError."""
        peer = circuit.remote_peer
        answer = await self._host.identify(circuit)
        plain = _dialable((maddr.from_bytes(raw) for raw in answer.listen_addrs), peer, self._loopback)
        if plain and await self._dial_any(plain, PLAIN_DIAL_S):
            return
        with trio.fail_after(3 * STEP_S):
            stream = await circuit.open_stream(PROTOCOL)
            try:
                asked = trio.current_time()
                await delimited.write_message(stream, self._message(_HolePunch.CONNECT))
                theirs = await self._read(stream, _HolePunch.CONNECT)
                round_trip = trio.current_time() - asked
                addresses = _dialable(map(maddr.from_bytes, theirs.ObsAddrs), peer, self._loopback)
                await delimited.write_message(stream, self._message(_HolePunch.SYNC))
            finally:
                stream.close()
        # The other side dials when SYNC arrives, half a round trip from now.
        await trio.sleep(round_trip / 2)
        if await self._dial_any(addresses, PUNCH_S, punch=True, responder=True):
            return
        raise LinkError(f"none of {len(addresses)} addresses of {peer} answered", peer=peer)

    async def _answer(self, stream: MuxedStream) -> None:
        """The other side drives."""
        peer = stream.remote_peer
        if peer in self._awaited or len(self._awaited) >= MAX_ANSWERED:
            raise WireError("unexpected", "hole punching was asked for while it is under way", peer=peer)
        self._awaited[peer] = trio.Event()
        try:
            await self._answer_one(stream)
        finally:
            del self._awaited[peer]

    async def _answer_one(self, stream: MuxedStream) -> None:
        peer = stream.remote_peer
        with trio.fail_after(3 * STEP_S):
            theirs = await self._read(stream, _HolePunch.CONNECT)
            await delimited.write_message(stream, self._message(_HolePunch.CONNECT))
            await self._read(stream, _HolePunch.SYNC)
        if not self._direct(peer):
            addresses = _dialable(map(maddr.from_bytes, theirs.ObsAddrs), peer, self._loopback)
            expected = {(address.host, address.port): peer for address in addresses}
            self._host.punching |= expected
            arrived = self._awaited[peer]
            try:
                async with self._limiter:
                    if not await self._dial_any(addresses, PUNCH_S, punch=True):
                        # A connection of theirs may have been quicker, and is in its handshake.
                        with trio.move_on_after(PUNCH_S):
                            await arrived.wait()
            finally:
                for place in expected:
                    self._host.punching.pop(place, None)

    @property
    def _loopback(self) -> bool:
        """Whether loopback addresses of others mean anything to us: only if we listen on it ourselves."""
        return any("/127." in text or "/::1/" in text for text in self._host.listening)

    def _message(self, kind: int) -> upstream.dcutr_pb2.HolePunch:
        message = _HolePunch(type=kind)  # type: ignore[arg-type]
        if kind == _HolePunch.CONNECT:
            message.ObsAddrs.extend(map(maddr.to_bytes, self._candidates()[:MAX_ADDRESSES]))
        return message

    @staticmethod
    async def _read(stream: MuxedStream, kind: int) -> upstream.dcutr_pb2.HolePunch:
        message = await delimited.read_message(stream, _HolePunch, MAX_MESSAGE_BYTES)
        if message.type != kind:
            raise WireError("unexpected", "a DCUtR message came out of turn", peer=stream.remote_peer)
        return message

    async def _dial_any(
        self,
        addresses: Sequence[maddr.Address],
        seconds: float,
        *,
        punch: bool = False,
        responder: bool = False,
    ) -> bool:
        """Dial all at once; whether one worked."""
        if not addresses:
            return False
        peer = addresses[0].peer
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    nursery.start_soon(self._dial, address, punch, responder, nursery.cancel_scope)
        return self._direct(peer)

    async def _dial(
        self, address: maddr.Address, punch: bool, responder: bool, scope: trio.CancelScope
    ) -> None:
        source = self._source(address) if punch else None
        try:
            if responder and source is not None:
                await self._host.dial_as_responder(address, source)
            else:
                await self._host.dial(address, source=source)
        except (KvasirError, OSError) as error:
            logger.debug("direct dial to %s: %s", address, error)
        else:
            scope.cancel()

    def _source(self, address: maddr.Address) -> tuple[str, int] | None:
        """The local address whose NAT mapping the other side dials: the one we listen on."""
        kind = "ip6" if ":" in address.host else "ip4"
        for text in self._host.listening:
            parts = text.split("/")
            if parts[1] == kind and parts[-1] != "ws":
                return parts[2], int(parts[4])
        return None


def _dialable(texts: object, peer: str, loopback: bool) -> list[maddr.Address]:
    """What of the other side's claims is worth a dial: TCP on an IP address, not many."""
    found: list[maddr.Address] = []
    for text in texts:  # type: ignore[attr-defined]
        if text is None or maddr.CIRCUIT in text:
            continue
        try:
            address = maddr.parse(f"{text.partition('/p2p/')[0]}/p2p/{peer}")
            ip = ipaddress.ip_address(address.host)
        except (UsageError, ValueError):
            continue
        if address.websocket or ip.is_multicast or ip.is_unspecified or ip.is_link_local:
            continue
        if ip.is_loopback and not loopback:
            continue
        if address not in found:
            found.append(address)
    return found[:MAX_ADDRESSES]
