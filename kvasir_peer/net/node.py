"""One peer's place on the network: links and HTTP to other peers, through relays or directly.

This is the narrow interface above which nothing knows libp2p.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import trio

from kvasir_peer.errors import KvasirError, LinkError, RefusedError, UsageError, WireError
from kvasir_peer.net import circuit, delimited, http, maddr, upgrade, upstream
from kvasir_peer.net import link as link_module
from kvasir_peer.net.backoff import Backoff
from kvasir_peer.net.connection import Connection, ConnectionStatistics
from kvasir_peer.net.host import Host, HostLimits, HostStatistics, Muxer, new_host
from kvasir_peer.net.link import DEFAULT_MAX_FRAME_BYTES, Link, LinkStatistics
from kvasir_peer.net.relays import RelayStatistics, RelaySupervisor
from kvasir_peer.net.upgrade import Upgrader, interface_addresses
from kvasir_peer.net.yamux import MuxedStream

logger = logging.getLogger(__name__)

CONNECT_S = 25.0  # to reach a peer over all its addresses
OPEN_S = 15.0  # to open a stream
DOUBT_S = 4.0  # on a connection that exists, before another way is looked for
RENUMBER_S = 15.0  # for links to find their way after the machine changed its network
ADDRESS_LOOK_S = 2.0  # between looks at the machine's own IP addresses
HELLO_S = 10.0  # for a link's first message
WELCOME_S = 2.0  # for the answer to it
RESCUE_S = 3.0  # for a link whose connection was lost while another one to the same peer lives
ATTEMPT_DELAY_S = 0.3  # head start of an address over the next one
# For the streams of links that have moved to end, so that a relay that shuts down need not wait for their circuit.
OLD_WAY_LOOKS, OLD_WAY_LOOK_S = 100, 0.05
PUSH_S = 10.0  # for an identify push to come after its stream was opened

IDENTIFY_PUSH = "/ipfs/id/push/1.0.0"

Accept = Callable[[str], bool | str]
LinkHandler = Callable[[Link], Awaitable[None]]


@dataclass(frozen=True)
class PeerEvent:
    """Something happened to a peer.

    Attributes:
        peer: its peer id.
        state: ``connected`` (the first connection), ``path`` (a better or worse one), ``gone`` (the last one ended).
        path: ``direct`` or ``relayed``; the last one when it is gone.
        reason: why it is gone.
    """

    peer: str
    state: str
    path: str
    reason: str = ""


@dataclass(frozen=True)
class LinkTraffic:
    """All links of one protocol since the node began, closed ones included; whole frames and their payload."""

    links: int
    frames_sent: int
    frames_received: int
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True)
class NodeStatistics:
    """State of a node.

    Attributes:
        peer: our peer id.
        addresses: where others reach us.
        host: connections and handshakes.
        relays: by supervisor.
        connections: open ones.
        links: open ones.
        refused: links turned away, by protocol.
        traffic: by protocol.
    """

    peer: str
    addresses: tuple[str, ...]
    host: HostStatistics
    relays: tuple[RelayStatistics, ...]
    connections: tuple[ConnectionStatistics, ...]
    links: tuple[LinkStatistics, ...]
    refused: dict[str, int]
    traffic: dict[str, LinkTraffic]


class Node:
    """Use :meth:`open`.

    Attributes:
        peer_id: ours.
        direct: whether direct connections between peers are used where they work.
    """

    def __init__(
        self, host: Host, relays: Sequence[maddr.Address], direct: bool, invites: Sequence[str] = ()
    ) -> None:
        self.host = host
        self._invites = tuple(invites)
        self.peer_id = host.peer_id
        self.direct = direct
        self._links: dict[tuple[str, bytes], Link] = {}
        self._refused: dict[str, int] = {}
        self._closed_traffic: dict[str, LinkTraffic] = {}
        self._known: dict[str, tuple[maddr.Address, ...]] = {}
        self._dialling: dict[str, trio.Event] = {}
        self._callbacks: list[Callable[[PeerEvent], None]] = []
        self._changed = trio.Event()
        self._grace_until = 0.0
        self._relay_callbacks: list[Callable[[str], None]] = []
        self._relay_words = ""
        self._circuits = circuit.CircuitListener(host, self._is_relay)
        self._supervisors: dict[str, RelaySupervisor] = {}
        for address in relays:
            self._supervise(address)
        self._seen_as: dict[str, str] = {}
        host.handle(IDENTIFY_PUSH, self._pushed)
        self._upgrader = Upgrader(host, self._candidates) if direct else None
        host.on_connection.append(self._connected)
        host.on_gone.append(self._gone)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        private_key: bytes,
        *,
        relays: Iterable[str] = (),
        invites: Iterable[str] = (),
        listen: Iterable[str] = (),
        direct: bool = True,
        limits: HostLimits | None = None,
        muxer: Muxer = "own",
    ) -> AsyncIterator[Node]:
        """A node that runs until the end of the block.

        Args:
            private_key: Ed25519 seed, 32 bytes.
            relays: addresses with peer id; each is held by a supervisor.
            invites: to relays that do not serve everyone.
            listen: transport addresses for direct connections (``/ip4/0.0.0.0/tcp/0``).
            direct: False: nothing is listened on and every peer is reached through circuits alone.
            limits: what strangers may take.
            muxer: which multiplexer runs the connections.

        Raises:
            UsageError: an address makes no sense.
            OSError: a port is taken.
        """
        parsed = [maddr.parse(text) for text in relays]
        for address in parsed:
            if address.through is not None:
                raise UsageError(f"{address} is an address behind a relay; name the relay itself")
        host = new_host(private_key, listen=tuple(listen) if direct else (), limits=limits, muxer=muxer)
        node = cls(host, parsed, direct, tuple(invites))
        async with host.running():
            for supervisor in node._supervisors.values():
                host.nursery.start_soon(supervisor.run)
            host.nursery.start_soon(node._watch_addresses)
            try:
                yield node
            finally:
                for link in list(node._links.values()):
                    link.close()

    # --- relays and addresses --------------------------------------------------------------------------------

    def add_relay(self, address: str) -> None:
        """Hold a place at one more relay, unless we do already. Raises UsageError."""
        parsed = maddr.parse(address)
        if parsed.through is not None:
            raise UsageError(f"{address} is an address behind a relay; name the relay itself")
        if parsed.peer not in self._supervisors:
            self.host.nursery.start_soon(self._supervise(parsed).run)

    def _supervise(self, address: maddr.Address) -> RelaySupervisor:
        supervisor = self._supervisors.get(address.peer)
        if supervisor is None:
            supervisor = self._supervisors[address.peer] = RelaySupervisor(
                self.host, self._circuits, address, self._relays_changed, self._invites
            )
        return supervisor

    async def _pushed(self, stream: MuxedStream) -> None:
        """A peer says anew what it speaks: a relay that does not name the hop protocol any more is shutting down."""
        supervisor = self._supervisors.get(stream.remote_peer)
        connection = stream.connection
        if supervisor is None or not isinstance(connection, Connection) or connection.path != "direct":
            return
        with trio.fail_after(PUSH_S):
            message = await delimited.read_message(stream, upstream.Identify)
        # An empty list says nothing about protocols: a push may name only what has changed.
        if message.protocols and supervisor.told(connection, serves=circuit.HOP in message.protocols):
            self.host.nursery.start_soon(self._leave_relay, supervisor.relay)

    async def _leave_relay(self, relay: str) -> None:
        """Move the links that we opened through a relay that is shutting down; it waits some seconds for that."""
        circuits = [c for c in self.host.connections() if c.path == "relayed" and c.address == relay]
        async with trio.open_nursery() as nursery:
            for connection in circuits:
                nursery.start_soon(self._leave_circuit, connection)

    async def _leave_circuit(self, old: Connection) -> None:
        links = [link for link in self._links.values() if link.opened_here and link.runs_over(old)]
        if not links:
            return
        peer = old.remote_peer
        backoff = Backoff(first=0.25, cap=2.0)
        while not old.closed.is_set():
            try:
                others = [c for c in self.host.connections(peer) if self._lasts(c)]
                new = others[0] if others else await self._reach(peer, ())
            except LinkError as error:
                # The peer may not have heard yet, or holds no place at our other relays.
                logger.debug("no other way to %s yet: %s", peer, error)
                await trio.sleep(backoff.failed())
                continue
            for link in links:
                if link.runs_over(old):
                    await self._move(link, new)
            # A link that has moved ends its stream when the other side has taken the last frame of the old way.
            for _ in range(OLD_WAY_LOOKS):
                if not old.mux.streams:
                    break
                await trio.sleep(OLD_WAY_LOOK_S)
            if not old.mux.streams:
                old.close("it went through a relay that is shutting down")
            return

    def _lasts(self, connection: Connection) -> bool:
        """Whether a connection is good for something new: nobody has said that it will be closed."""
        if connection.mux.going_away:
            return False
        supervisor = self._supervisors.get(connection.address) if connection.path == "relayed" else None
        return supervisor is None or not supervisor.draining

    def addresses(self) -> list[str]:
        """Where others reach us: directly, and through relays at which a dial to ourselves worked."""
        through = [text for supervisor in self._supervisors.values() for text in supervisor.addresses]
        return through + [f"{text}/p2p/{self.peer_id}" for text in self._listening()]

    def _listening(self) -> list[str]:
        """Transport addresses we listen on; those of every interface in place of "any"."""
        return [text for listening in self.host.listening for text in interface_addresses(listening)]

    def _candidates(self) -> list[str]:
        """Transport addresses at which a direct connection might work: interfaces, and our NAT's address."""
        listening = [text for text in self._listening() if not text.endswith("/ws")]
        ports = dict.fromkeys((text.split("/")[1], text.split("/")[4]) for text in listening)
        outside = [
            f"/{kind}/{address}/tcp/{port}"
            for address in dict.fromkeys(self._seen_as.values())
            for kind, port in ports
            if (kind == "ip6") == (":" in address)
        ]
        return list(dict.fromkeys([*outside, *listening]))

    async def _watch_addresses(self) -> None:
        """Notice when the machine changes its network, and start over at once with what hung on the old one."""
        before = upgrade.present_addresses()
        while True:
            await trio.sleep(ADDRESS_LOOK_S)
            now = upgrade.present_addresses()
            if now == before:
                continue
            logger.info(
                "our IP addresses changed: %d are new, %d are gone", len(now - before), len(before - now)
            )
            gone, before = before - now, now
            peers = self.host.peers if gone else []
            self._grace_until = trio.current_time() + RENUMBER_S
            self.host.addresses_are(now)
            for supervisor in self._supervisors.values():
                supervisor.hurry()
            self._relays_changed()
            if peers:
                self.host.nursery.start_soon(self._come_back_to, peers)

    async def _come_back_to(self, peers: list[str]) -> None:
        """Reach again those who still believe us to be at our old address, and cannot know better."""
        missing = [peer for peer in peers if peer not in self._supervisors]
        backoff = Backoff(first=0.5, cap=3.0)
        with trio.move_on_after(RENUMBER_S):
            while missing:
                for peer in missing:
                    if self._usable(peer) is None:
                        try:
                            await self.connect(peer)
                        except KvasirError as error:
                            logger.debug("%s was not reached from our new address: %s", peer, error)
                missing = [peer for peer in missing if self._usable(peer) is None]
                await trio.sleep(backoff.failed())

    async def _ask_how_seen(self, relay: Connection) -> None:
        """Let a relay tell our address as it is from outside."""
        try:
            answer = await self.host.identify(relay)
        except KvasirError as error:
            logger.debug("the relay %s does not say how it sees us: %s", relay.remote_peer, error)
            return
        text = maddr.from_bytes(answer.observed_addr)
        if text is not None and text.split("/")[1] in ("ip4", "ip6"):
            self._seen_as[relay.remote_peer] = text.split("/")[2]

    async def relays_ready(self, timeout: float = 30.0, *, count: int | None = None) -> None:
        """Wait until ``count`` relays (default: all) hold a place for us. Raises LinkError with the reason.

        Args:
            timeout: seconds.
        """
        wanted = len(self._supervisors) if count is None else min(count, len(self._supervisors))
        with trio.move_on_after(timeout):
            while sum(s.reserved.is_set() for s in self._supervisors.values()) < wanted:
                await self._changed.wait()
            return
        missing = [s.statistics() for s in self._supervisors.values() if not s.reserved.is_set()]
        reasons = "; ".join(f"{s.relay} at {s.address}: {s.last_error or s.state}" for s in missing)
        raise LinkError(
            f"no place at {len(missing)} of {len(self._supervisors)} relays after {timeout:.0f} s: {reasons}"
        )

    def _relays_changed(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
        self.host.advertised = self.addresses()
        words = self.relay_words()
        if words != self._relay_words:
            self._relay_words = words
            for callback in self._relay_callbacks:
                callback(words)

    def on_relays(self, callback: Callable[[str], None]) -> None:
        """Be told in one line, for the owner, how it stands with our relays whenever that changes."""
        self._relay_callbacks.append(callback)

    def relay_words(self) -> str:
        """How it stands with our relays, in one line: how many hold a place for us, and why the others don't."""
        held = sum(s.reserved.is_set() for s in self._supervisors.values())
        trouble = "; ".join(s.trouble for s in self._supervisors.values() if s.trouble)
        if not held:
            return f"not reachable: {trouble}" if trouble else ""
        words = "reachable through a relay" if held == 1 else f"reachable through {held} relays"
        return f"{words}, not through another: {trouble}" if trouble else words

    def _is_relay(self, peer: str) -> bool:
        supervisor = self._supervisors.get(peer)
        return supervisor is not None and supervisor.asking

    # --- peers -----------------------------------------------------------------------------------------------

    def on_peer(self, callback: Callable[[PeerEvent], None]) -> None:
        """Be told about peers that come, go, or change their path."""
        self._callbacks.append(callback)

    def peers(self) -> dict[str, str]:
        """Connected peers (relays left out) and the path to each: ``direct`` or ``relayed``."""
        return {
            peer: self.host.connections(peer)[0].path
            for peer in self.host.peers
            if peer not in self._supervisors
        }

    def _connected(self, connection: Connection) -> None:
        peer = connection.remote_peer
        if self._upgrader is not None:
            if peer in self._supervisors:
                self.host.nursery.start_soon(self._ask_how_seen, connection)
            elif connection.path == "relayed":
                self._upgrader.consider(connection)
            else:
                self._improve(peer)
        if peer not in self._supervisors:
            others = [c for c in self.host.connections(peer) if c is not connection]
            if not others:
                self._tell(PeerEvent(peer, "connected", connection.path))
            elif others[0].path != connection.path:
                self._tell(PeerEvent(peer, "path", self.host.connections(peer)[0].path))

    def _gone(self, connection: Connection, reason: str) -> None:
        peer = connection.remote_peer
        if peer not in self._supervisors:
            left = self.host.connections(peer)
            if not left:
                self._tell(PeerEvent(peer, "gone", connection.path, reason))
            elif left[0].path != connection.path:
                self._tell(PeerEvent(peer, "path", left[0].path, reason))

    def _tell(self, event: PeerEvent) -> None:
        for callback in self._callbacks:
            callback(event)

    async def connect(self, peer_id: str, addresses: Iterable[str] = ()) -> None:
        """Make sure that there is a connection to a peer. Raises LinkError with what was tried.

        Args:
            addresses: where it may be; addresses used before and our own relays are tried as well.
        """
        await self._connection(peer_id, addresses)

    def _usable(self, peer: str) -> Connection | None:
        usable = [
            connection
            for connection in self.host.connections(peer)
            if self.direct or connection.path == "relayed" or peer in self._supervisors
        ]
        return next(filter(self._lasts, usable), None)

    async def _connection(self, peer: str, addresses: Iterable[str]) -> Connection:
        if peer == self.peer_id:
            raise LinkError("that is this peer itself", peer=peer)
        given, bad = _leading_to(peer, addresses)
        if bad and not given:
            raise LinkError(f"no address of {peer} is of use: {bad}", peer=peer)
        while True:
            connection = self._usable(peer)
            if connection is not None:
                return connection
            under_way = self._dialling.get(peer)
            if under_way is None:
                break
            await under_way.wait()
        done = self._dialling[peer] = trio.Event()
        try:
            return await self._reach(peer, given)
        except LinkError:
            # One that will be closed soon is better than none.
            for connection in self.host.connections(peer):
                if not connection.mux.going_away and (self.direct or connection.path == "relayed"):
                    return connection
            raise
        finally:
            del self._dialling[peer]
            done.set()

    async def _reach(self, peer: str, given: tuple[maddr.Address, ...]) -> Connection:
        candidates = dict.fromkeys((*given, *self._known.get(peer, ())))
        for supervisor in self._supervisors.values():
            if supervisor.draining:
                continue
            first = supervisor.address
            candidates[
                maddr.Address(first.host, first.port, first.secure, first.websocket, first.peer, peer)
            ] = None
        # One way to each relay is enough.
        ways: dict[tuple[str, bool], maddr.Address] = {}
        for address in candidates:
            if address.through is not None:
                relay = self._supervisors.get(address.peer)
                if relay is None or not relay.draining:
                    ways.setdefault((address.peer, True), address)
            elif self.direct or peer in self._supervisors:
                ways.setdefault((str(address), False), address)
        ordered = sorted(
            ways.values(), key=lambda a: (a.through is not None, a.peer not in self._supervisors)
        )
        if not ordered:
            raise LinkError(f"no address of {peer} is known, and no relay is held", peer=peer)
        failures: list[str] = []
        winners: list[Connection] = []
        with trio.move_on_after(CONNECT_S):
            async with trio.open_nursery() as nursery:
                for address in ordered:
                    failed = trio.Event()
                    nursery.start_soon(
                        self._attempt, address, peer, winners, failures, failed, nursery.cancel_scope
                    )
                    with trio.move_on_after(ATTEMPT_DELAY_S):
                        await failed.wait()
        if not winners:
            tried = "; ".join(failures) or f"no answer in {CONNECT_S:.0f} s"
            raise LinkError(f"cannot reach {peer}: {tried}", peer=peer)
        if given:
            self._known[peer] = given
        return winners[0]

    async def _attempt(
        self,
        address: maddr.Address,
        peer: str,
        winners: list[Connection],
        failures: list[str],
        failed: trio.Event,
        scope: trio.CancelScope,
    ) -> None:
        try:
            if address.through is None:
                connection = await self.host.dial(address)
            else:
                relay = await self._relay_connection(address)
                connection = await circuit.connect(self.host, relay, peer)
        except (KvasirError, OSError) as error:
            failures.append(str(error))
            failed.set()
        else:
            winners.append(connection)
            scope.cancel()

    async def _relay_connection(self, address: maddr.Address) -> Connection:
        for connection in self.host.connections(address.peer):
            if connection.path == "direct":
                return connection
        key = f"relay {address.peer}"
        under_way = self._dialling.get(key)
        if under_way is not None:
            await under_way.wait()
            return await self._relay_connection(address)
        done = self._dialling[key] = trio.Event()
        try:
            return await self.host.dial(address)
        finally:
            del self._dialling[key]
            done.set()

    # --- links -----------------------------------------------------------------------------------------------

    async def open_link(
        self,
        peer_id: str,
        protocol: str,
        *,
        max_frame: int = DEFAULT_MAX_FRAME_BYTES,
        addresses: Iterable[str] = (),
    ) -> Link:
        """A link to a peer, which is connected first if need be. Raises LinkError.

        A stranger's refusal shows as LinkError at the first :meth:`Link.receive`.

        Args:
            max_frame: largest frame taken on it, bytes.
        """
        connection, stream = await self._open_stream(peer_id, protocol, addresses)
        link = Link(peer_id, protocol, max_frame=max_frame, can_move=self._links_move)
        link.begin(connection, stream)
        self._add(link)
        return link

    async def _open_stream(
        self, peer_id: str, protocol: str, addresses: Iterable[str]
    ) -> tuple[Connection, MuxedStream]:
        connection = await self._connection(peer_id, addresses)
        with trio.move_on_after(OPEN_S):
            with trio.move_on_after(DOUBT_S):
                return connection, await connection.open_stream(protocol)
            # The peer may be somewhere else by now, and nobody has told us yet.
            connection.doubt()
            connection = await self._reach(peer_id, ())
            return connection, await connection.open_stream(protocol)
        raise LinkError(f"{peer_id} did not answer to {protocol} in {OPEN_S:.0f} s", peer=peer_id)

    @property
    def _links_move(self) -> bool:
        """Whether there can be another connection to the same peer: a direct one, or through another relay."""
        return self.direct or len(self._supervisors) > 1

    def _add(self, link: Link) -> None:
        if not link.closed:
            self._links[link.remote_peer, link.link_id] = link
            link.on_closed = self._drop
            link.on_adrift = self._link_adrift
            if link.opened_here and link.path == "relayed":
                self._improve(link.remote_peer)

    def _drop(self, link: Link) -> None:
        if self._links.pop((link.remote_peer, link.link_id), None) is not None:
            _count_in(self._closed_traffic, link.statistics())

    def handle(
        self,
        protocol: str,
        max_frame: int,
        handler: LinkHandler,
        accept: Accept = lambda peer: True,
    ) -> None:
        """Serve links of ``protocol``; ``handler(link)`` runs for each, and the link is closed when it returns.

        Args:
            max_frame: largest frame taken, bytes; ``link.max_frame`` may be changed later.
            accept: called with the caller's peer id; False or a text refuses it before anything it sends is kept.
        """

        async def serve(stream: MuxedStream) -> None:
            verdict = accept(stream.remote_peer)
            if verdict is not True and verdict != "":
                self._refused[protocol] = self._refused.get(protocol, 0) + 1
                reason = verdict if isinstance(verdict, str) else "not expected here"
                logger.warning("%s was refused on %s: %s", stream.remote_peer, protocol, reason)
                link_module.refuse(stream, reason)
                return
            connection = stream.connection
            assert isinstance(connection, Connection)
            with trio.fail_after(HELLO_S):
                hello = await link_module.read_hello(stream)
            known = self._links.get((stream.remote_peer, hello.link_id))
            if hello.resumes is not None:
                if known is None or known.protocol != protocol:
                    link_module.refuse(stream, "there is no such link")
                    return
                known.resumed(connection, stream, hello.resumes)
                stream.handed_over = True
                return
            if known is not None:
                raise WireError("unexpected", "a link was opened twice", peer=stream.remote_peer)
            link = Link(stream.remote_peer, protocol, max_frame=max_frame, can_move=self._links_move)
            link.begin(connection, stream, hello=hello)
            self._add(link)
            stream.handed_over = True
            try:
                await handler(link)
            except LinkError as error:
                logger.debug("a link of %s (%s) ended: %s", link.remote_peer, protocol, error)
            except KvasirError as error:
                if isinstance(error, WireError | RefusedError):
                    connection.mux.violation(error)
                logger.warning("a link of %s (%s) was closed: %s", link.remote_peer, protocol, error)
                link.fail(str(error))
            finally:
                link.close()

        self.host.handle(protocol, serve)

    # --- better paths ----------------------------------------------------------------------------------------

    def _improve(self, peer: str) -> None:
        """Move the links we opened to a peer to a direct connection, if there is one."""
        if not self.direct:
            return
        direct = [c for c in self.host.connections(peer) if c.path == "direct"]
        for link in list(self._links.values()):
            if direct and link.remote_peer == peer and link.opened_here and link.path == "relayed":
                self.host.nursery.start_soon(self._move, link, direct[0])

    async def _move(self, link: Link, connection: Connection) -> bool:
        """Move one link; it stays where it is when that does not work."""
        try:
            with trio.move_on_after(OPEN_S):
                # The WELCOME that says whether the other side can move may still be on its way.
                with trio.move_on_after(WELCOME_S):
                    await link.settled.wait()
                if not link.movable or connection.closed.is_set():
                    return False
                stream = await connection.open_stream(link.protocol)
                await link.move_to(connection, stream)
                logger.info("the link to %s (%s) is %s now", link.remote_peer, link.protocol, link.path)
                return True
        except KvasirError as error:
            logger.debug("the link to %s (%s) stays: %s", link.remote_peer, link.protocol, error)
        return False

    def _link_adrift(self, link: Link, reason: str) -> bool:
        """The connection of a link that can move was lost."""
        if not self.host.running_now:
            return False
        self.host.nursery.start_soon(self._rescue, link, reason)
        return True

    async def _rescue(self, link: Link, reason: str) -> None:
        """Find another connection for a link, as long as one is there; give it up otherwise."""
        with trio.move_on_at(max(trio.current_time() + RESCUE_S, self._grace_until)):
            while link.adrift:
                others = self.host.connections(link.remote_peer)
                if not others and trio.current_time() >= self._grace_until:
                    break
                # The side that opened the link moves it.
                if not others or not link.opened_here or not await self._move(link, others[0]):
                    await trio.sleep(0.02)
        if link.adrift:
            link.fail(f"the link to {link.remote_peer} was lost: {reason}")

    # --- http ------------------------------------------------------------------------------------------------

    def http_client(
        self, peer_id: str, addresses: Iterable[str] = (), *, timeout: float = 60.0
    ) -> httpx.AsyncClient:
        """An HTTP client to one peer, base URL ``http://PEERID``; close it after use.

        Args:
            timeout: seconds for each step of a request; long polls need their wait on top.
        """
        kept = tuple(addresses)

        async def open_stream() -> MuxedStream:
            return (await self._open_stream(peer_id, http.PROTOCOL, kept))[1]

        return httpx.AsyncClient(
            transport=http.PeerTransport(open_stream),
            base_url=f"http://{peer_id}",
            timeout=timeout,
            trust_env=False,
        )

    def serve_http(self, app: http.App, *, max_body: int = http.MAX_REQUEST_BODY_BYTES) -> None:
        """Serve an ASGI application to peers; the caller's peer id stands in ``scope["kvasir_peer"]``."""
        self.host.handle(http.PROTOCOL, http.HttpServer(app, max_body=max_body).serve)

    def statistics(self) -> NodeStatistics:
        """A snapshot."""
        links = tuple(link.statistics() for link in self._links.values())
        traffic = dict(self._closed_traffic)
        for link in links:
            _count_in(traffic, link)
        return NodeStatistics(
            self.peer_id,
            tuple(self.addresses()),
            self.host.statistics(),
            tuple(supervisor.statistics() for supervisor in self._supervisors.values()),
            tuple(connection.statistics() for connection in self.host.connections()),
            links,
            dict(self._refused),
            traffic,
        )


def _leading_to(peer: str, texts: Iterable[str]) -> tuple[tuple[maddr.Address, ...], str]:
    """Those of the addresses that lead to ``peer``, and what is wrong with the last of the others, or "".

    They come from other peers, mostly: one that makes no sense must not hide those that do.
    """
    found: list[maddr.Address] = []
    bad = ""
    for text in texts:
        try:
            address = maddr.parse(text)
        except UsageError as error:
            bad = str(error)
            continue
        if (address.through or address.peer) == peer:
            found.append(address)
        else:
            bad = f"the address {address} does not lead to {peer}"
    return tuple(found), bad


def _count_in(traffic: dict[str, LinkTraffic], link: LinkStatistics) -> None:
    so_far = traffic.get(link.protocol, LinkTraffic(0, 0, 0, 0, 0))
    traffic[link.protocol] = LinkTraffic(
        so_far.links + 1,
        so_far.frames_sent + link.frames_sent,
        so_far.frames_received + link.frames_received,
        so_far.bytes_sent + link.bytes_sent,
        so_far.bytes_received + link.bytes_received,
    )
