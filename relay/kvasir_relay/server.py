"""The relay: listens, authenticates, and hands each stream to who answers it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import trio

from kvasir_peer.errors import LinkError, RefusedError, WireError
from kvasir_peer.identity import Identity
from kvasir_peer.net import multistream
from kvasir_peer.net.connection import Connection, run_over_duplex, run_over_tcp
from kvasir_peer.net.duplex import Duplex, TcpDuplex, receive_exactly
from kvasir_peer.net.maddr import to_bytes
from kvasir_peer.net.noise import NoiseIdentity, Secured
from kvasir_peer.net.upstream import PeerID
from kvasir_peer.net.websocket import WebSocketDuplex
from kvasir_peer.net.yamux import MuxedStream
from kvasir_relay import invites
from kvasir_relay.access import Denial, Gatekeeper
from kvasir_relay.addresses import advertised, is_public, machine_addresses
from kvasir_relay.config import Config
from kvasir_relay.counters import Counters, CountersStatistics
from kvasir_relay.hop import HopService
from kvasir_relay.identify import IDENTIFY_PROTOCOL, IDENTIFY_PUSH_PROTOCOL, identify_message
from kvasir_relay.limits import Address, Ledger, LedgerStatistics, LimitError, parse_address
from kvasir_relay.listeners import Listener, speaks_websocket
from kvasir_relay.members import Member
from kvasir_relay.messages import HOP_PROTOCOL, prefixed
from kvasir_relay.notices import Notices
from kvasir_relay.proxies import forwarded_address, is_trusted
from kvasir_relay.shaper import Shaper, ShaperStatistics

log = logging.getLogger("kvasir_relay")

PING_PROTOCOL = "/ipfs/ping/1.0.0"
PING_BYTES = 32

NEGOTIATE_SECONDS = 10.0  # for a new stream to say what it is for
PUSH_SECONDS = 3.0  # for telling a peer that the relay drains
PUSHES_AT_ONCE = 64
TICK_SECONDS = 1.0
CLOSE_SECONDS = 2.0  # for goodbyes to get out at the end


@dataclass(frozen=True, slots=True)
class RelayStatistics:
    """A snapshot of the relay.

    Attributes:
        draining: whether it is on its way out.
        peers: different peers connected.
        ledger, counters, shaper: what is held, counted and limited.
        buffered_bytes: waiting in circuits.
        loop_lag: seconds by which the last tick came too late.
    """

    draining: bool
    peers: int
    ledger: LedgerStatistics
    counters: CountersStatistics
    shaper: ShaperStatistics
    buffered_bytes: int
    loop_lag: float


class Relay:
    """A circuit-relay-v2 server.

    Args:
        identity: its key.
        config: its settings.
        revoked: ids of revoked invites.
    """

    def __init__(self, identity: Identity, config: Config, revoked: frozenset[str] = frozenset()) -> None:
        now = trio.current_time()
        self.identity = identity
        self.peer = PeerID.from_base58(identity.peer_id).to_bytes()
        self.config = config
        self.counters = Counters()
        self.ledger = Ledger(config.limits, now)
        self.shaper = Shaper(config.bandwidth, now)
        self.gatekeeper = Gatekeeper(config.access, public=False)
        self.notices = Notices()
        self.hop = HopService(self)
        self.draining = False
        self.addresses: list[str] = []
        self.full_address_bytes: list[bytes] = []
        self._revoked = revoked
        self._noise = NoiseIdentity(identity.private_key)
        self._listeners: list[Listener] = []
        self._members: dict[bytes, list[Member]] = {}
        self._lag = 0.0
        self._pieces_at = now
        self._streams: trio.Nursery | None = None
        self._handlers: dict[str, Callable[[Member, MuxedStream], Awaitable[None]]] = {
            HOP_PROTOCOL: self.hop.handle,
            IDENTIFY_PROTOCOL: self._identify,
            PING_PROTOCOL: self._ping,
            invites.INVITE_PROTOCOL: self._invite,
        }

    # --- life --------------------------------------------------------------------------------------------------

    async def serve(
        self,
        listeners: Sequence[Listener],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until cancelled; what is open then is closed."""
        self._listeners = list(listeners)
        self.announce()
        try:
            async with trio.open_nursery() as nursery:
                self._streams = nursery
                for listener in listeners:
                    nursery.start_soon(listener.run, self._accepted)
                nursery.start_soon(self.shaper.run)
                nursery.start_soon(self._tick)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._streams = None
            for listener in listeners:
                listener.close()

    def announce(self) -> None:
        """Work out which addresses peers are told, from the configuration and what is listened on."""
        self.addresses = advertised(self.config.announce, self._listeners, machine_addresses())
        self.full_address_bytes = [to_bytes(address) for address in self.full_addresses]
        self.gatekeeper.change(self.config.access, public=is_public(self.addresses))

    @property
    def full_addresses(self) -> list[str]:
        """The addresses that peers are told, with the relay's peer id."""
        suffix = f"/p2p/{self.identity.peer_id}"
        return [address if address.endswith(suffix) else address + suffix for address in self.addresses]

    @property
    def protocols(self) -> tuple[str, ...]:
        """What the relay speaks; a relay that drains takes no hop requests any more."""
        return tuple(name for name in self._handlers if name != HOP_PROTOCOL or not self.draining)

    def members(self) -> list[Member]:
        """All connections."""
        return [member for group in self._members.values() for member in group]

    def reload(self, config: Config, revoked: frozenset[str]) -> None:
        """Take new settings and revocations; connections that they do not allow any more are closed."""
        now = trio.current_time()
        self.config = config
        self._revoked = revoked
        self.ledger.change(config.limits, now)
        self.shaper.change(config.bandwidth, now)
        self.hop.buffers.bound = config.limits.buffer_bytes
        for circuit in self.hop.circuits:
            circuit.reshape()
        self.announce()
        self.expel()

    def revoke(self, revoked: frozenset[str]) -> None:
        """A new list of revoked invites; connections on which one of them was shown are closed."""
        self._revoked = revoked
        self.expel()

    def expel(self) -> None:
        """Close the connections of those who may not use the relay (any more)."""
        now = time.time()
        for member in self.members():
            denial = self.gatekeeper.connect(member.address, member.peer_id)
            if denial is None and member.invite is not None and self._invite_over(member, now):
                denial = Denial("invite_revoked", "the invite was revoked or has ended")
            if denial is None and (member.circuits or member.peer in self.hop.reservations):
                denial = self.gatekeeper.use(member.address, member.peer_id, member.invite, now)
            if denial is not None:
                self.counters.refused("connection", denial.reason)
                self.hop.end_circuits(member, denial.reason)
                member.connection.close(denial.text)

    def _invite_over(self, member: Member, unix_time: float) -> bool:
        invite = member.invite
        return invite is not None and (invite.id in self._revoked or invite.not_after <= unix_time)

    async def drain(self, seconds: float) -> None:
        """Take nothing new, tell the peers, and give what runs some time to end.

        Peers learn it in the way of libp2p: an identify push whose protocols lack the hop protocol. Those without
        a circuit are then let go; the others when their last circuit has ended.
        """
        self.draining = True
        for listener in self._listeners:
            listener.close()
        for held in list(self.hop.reservations.values()):
            self.hop.drop_reservation(held)
        with trio.move_on_after(seconds):
            await self._push_to_all()
            while members := self.members():
                for member in members:
                    if not member.circuits:
                        member.connection.close("the relay is shutting down")
                await trio.sleep(0.05)
        for member in self.members():
            self.hop.end_circuits(member, "draining")
            member.connection.close("the relay is shutting down")
        with trio.move_on_after(CLOSE_SECONDS):
            for member in self.members():
                await member.connection.closed.wait()

    async def _push_to_all(self) -> None:
        limiter = trio.CapacityLimiter(PUSHES_AT_ONCE)

        async def push(member: Member) -> None:
            async with limiter:
                try:
                    with trio.fail_after(PUSH_SECONDS):
                        stream = await member.connection.open_stream(IDENTIFY_PUSH_PROTOCOL)
                        stream.send_nowait(self._identity_for(member))
                        stream.close()
                except (LinkError, WireError, trio.TooSlowError) as error:
                    log.debug("a peer could not be told that the relay drains: %s", error)

        async with trio.open_nursery() as nursery:
            for member in self.members():
                nursery.start_soon(push, member)

    async def _tick(self) -> None:
        due = trio.current_time() + TICK_SECONDS
        while True:
            await trio.sleep_until(due)
            now = trio.current_time()
            self._lag = now - due
            due = max(due + TICK_SECONDS, now)
            self.hop.drop_expired(now)
            self.ledger.begin_month(time.strftime("%Y-%m", time.gmtime()))
            self._bound_buffers()
            self._bound_pieces(now)
            unused = self.config.limits.unused_time
            unix_now = time.time()
            for member in self.members():
                member.connection.tick(now)
                if member.connection.closed.is_set():
                    continue
                if self._invite_over(member, unix_now):
                    self.hop.end_circuits(member, "invite_revoked")
                    member.connection.close("the invite was revoked or has ended")
                elif (
                    unused
                    and not member.circuits
                    and now - max(member.since, member.used_at) > unused
                    and not self._holds_reservation(member)
                ):
                    member.connection.close("nothing was asked for on it")

    def _bound_buffers(self) -> None:
        """What waits outside circuits (sent on a stream before it was asked for) is bounded too, once a second."""
        bound = self.config.limits.buffer_bytes
        members = self.members()
        waiting = sum(member.connection.mux.buffered_bytes for member in members)
        while bound and waiting > bound:
            largest = max(members, key=lambda member: member.connection.mux.buffered_bytes)
            members.remove(largest)
            waiting -= largest.connection.mux.buffered_bytes
            self.counters.refused("connection", "buffer_bytes")
            largest.connection.abort("too much waits unread on it")

    def _bound_pieces(self, now: float) -> None:
        """Who cuts its data to crumbs takes everybody's CPU, in few bytes: such a peer is let go."""
        seconds, self._pieces_at = now - self._pieces_at, now
        pieces: Counter[bytes] = Counter()
        for circuit in self.hop.circuits:
            for sender, flow in zip((circuit.peers[0], circuit.peers[-1]), circuit.flows, strict=True):
                pieces[sender] += flow.pieces
                flow.pieces = 0
        limit = self.config.limits.pieces_per_peer * seconds
        for sender in [sender for sender, count in pieces.items() if limit and count > limit]:
            for member in list(self._members.get(sender, [])):
                self.counters.refused("connection", "pieces_per_peer")
                self.hop.end_circuits(member, "pieces_per_peer")
                member.connection.close("too many small pieces")

    def _holds_reservation(self, member: Member) -> bool:
        held = self.hop.reservations.get(member.peer)
        return held is not None and held.member is member

    def statistics(self) -> RelayStatistics:
        """A snapshot."""
        return RelayStatistics(
            self.draining,
            len(self._members),
            self.ledger.statistics(),
            self.counters.statistics(),
            self.shaper.statistics(),
            self.hop.buffers.held,
            self._lag,
        )

    # --- connections -------------------------------------------------------------------------------------------

    async def _accepted(self, listener: Listener, raw: TcpDuplex, host: str, port: int) -> None:
        """One connection, from its first byte to its end. Whatever goes wrong in it ends it alone."""
        try:
            await self._admitted(listener, raw, parse_address(host), port)
        except LimitError as error:
            self.counters.refused("connection", error.limit)
            self.notices.warn(error.limit, "refused a connection: limits.%s is reached", error.limit)
        except RefusedError as error:
            self.counters.refused("connection", str(error))
        except (LinkError, WireError, trio.TooSlowError) as error:
            self.counters.handshakes_failed += 1
            log.debug("a connection did not prove who it is: %s", error or "too slow")
        except Exception:
            self.counters.refused("connection", "internal_error")
            log.exception("a connection failed by a fault of the relay")
        finally:
            raw.abort()

    async def _admitted(self, listener: Listener, raw: TcpDuplex, address: Address, port: int) -> None:
        config = self.config
        with ExitStack() as held:
            duplex: Duplex = raw
            with ExitStack() as handshake, trio.fail_after(config.limits.handshake_time):
                if not is_trusted(address, config.trusted_proxies):
                    self._take_place(address, held, handshake)
                    if await speaks_websocket(listener, raw):
                        duplex = await WebSocketDuplex.accept(_stream(raw))
                else:
                    # Whom a proxy stands for is known after the request; until then it counts only in all.
                    with self.ledger.take_proxied_handshake():
                        if await speaks_websocket(listener, raw):
                            duplex = ws = await WebSocketDuplex.accept(_stream(raw))
                            header = ws.headers.get(config.proxy_header.lower(), "")
                            if not header:
                                self.notices.warn(
                                    "proxy_header",
                                    "a trusted proxy sends no %s: its peers share its limits",
                                    config.proxy_header,
                                )
                            address = forwarded_address(address, header, config.trusted_proxies)
                    self._take_place(address, held, handshake)
                secured = await self._noise.secure_inbound(duplex)
            await self._serve_connection(secured, duplex, address, port)

    def _take_place(self, address: Address, held: ExitStack, handshake: ExitStack) -> None:
        """Places in the ledger for a new connection and its handshake. Raises LimitError, RefusedError."""
        if denial := self.gatekeeper.connect(address):
            raise RefusedError(denial.reason)
        handshake.enter_context(self.ledger.take_handshake(address, trio.current_time()))
        held.enter_context(self.ledger.take_connection(address))

    async def _serve_connection(self, secured: Secured, duplex: Duplex, address: Address, port: int) -> None:
        limits = self.config.limits
        if denial := self.gatekeeper.connect(address, secured.remote_peer):
            raise RefusedError(denial.reason)
        peer = PeerID.from_base58(secured.remote_peer).to_bytes()
        self._make_way(peer, limits.connections_per_peer)
        now = trio.current_time()
        connection = Connection(
            secured,
            path="direct",
            address=f"{address}:{port}",
            on_stream=lambda _, stream: self._opened(member, stream),
            on_closed=lambda _, reason: self._left(member, reason),
            max_inbound_streams=limits.streams_per_connection or 2**31,
        )
        member = Member(connection, peer, address, port, now, used_at=now)
        self._members.setdefault(peer, []).append(member)
        self.counters.connections += 1
        try:
            if isinstance(duplex, TcpDuplex):
                await run_over_tcp(connection, duplex)
            else:
                await run_over_duplex(connection, duplex)
        finally:
            connection.abort("the relay is shutting down")  # does nothing when it is closed

    def _make_way(self, peer: bytes, limit: int) -> None:
        """Room for one more connection of a peer: the oldest without a circuit goes. Raises LimitError.

        The one with the reservation goes last, since the peer would not know that it lost it.
        """
        group = self._members.get(peer, [])
        if not limit or len(group) < limit:
            return
        idle = sorted((member for member in group if not member.circuits), key=self._holds_reservation)
        if not idle:
            raise LimitError("connections_per_peer")
        idle[0].connection.close("the peer has newer connections")

    def _left(self, member: Member, reason: str) -> None:
        group = self._members.get(member.peer, [])
        if member in group:
            group.remove(member)
            if not group:
                del self._members[member.peer]
        self.hop.end_circuits(member, "peer_left")
        if self._holds_reservation(member):
            self.hop.drop_reservation(self.hop.reservations[member.peer])
        log.debug("%s left: %s", member.peer_id, reason)

    # --- streams -----------------------------------------------------------------------------------------------

    def _opened(self, member: Member, stream: MuxedStream) -> None:
        if self._streams is None:
            stream.reset("the relay is shutting down")
        else:
            self._streams.start_soon(self._serve_stream, member, stream)

    async def _serve_stream(self, member: Member, stream: MuxedStream) -> None:
        try:
            with trio.fail_after(NEGOTIATE_SECONDS):
                protocol = await multistream.answer(stream, self._handlers.__contains__)
            stream.protocol = protocol
            await self._handlers[protocol](member, stream)
        except (LinkError, WireError, trio.TooSlowError) as error:
            log.debug("a stream of %s ended: %s", member.peer_id, error or "too slow")
            stream.reset("ended here")
        except trio.Cancelled:
            stream.reset("the relay is shutting down")
            raise
        except Exception:
            self.counters.refused("request", "internal_error")
            log.exception("a request failed by a fault of the relay")
            stream.reset("ended here")

    def _identity_for(self, member: Member) -> bytes:
        return identify_message(self.identity, self.addresses, self.protocols, (member.address, member.port))

    async def _identify(self, member: Member, stream: MuxedStream) -> None:
        stream.send_nowait(self._identity_for(member))
        stream.close()

    async def _ping(self, member: Member, stream: MuxedStream) -> None:
        while not stream.ended:
            await stream.send_all(await receive_exactly(stream, PING_BYTES))
        stream.close()

    async def _invite(self, member: Member, stream: MuxedStream) -> None:
        with trio.fail_after(NEGOTIATE_SECONDS):
            length = await multistream.read_varint(stream, invites.MAX_INVITE_BYTES)
            text = (await receive_exactly(stream, length)).decode("ascii", "replace")
        try:
            self._show_invite(member, text)
        except RefusedError as error:
            self.counters.refused("invite", str(error))
            answer = str(error)
        else:
            answer = "ok"
        stream.send_nowait(prefixed(answer.encode()))
        stream.close()

    def _show_invite(self, member: Member, text: str) -> None:
        """Raises RefusedError with the reason when the invite does not hold."""
        self_id = self.identity.peer_id
        try:
            self.ledger.take_request(member.peer, member.address, trio.current_time())
        except LimitError as error:
            raise RefusedError(error.limit) from None
        invite = invites.read(text, relay=self_id, issuers=(self_id, *self.config.access.invite_issuers))
        if invite.id in self._revoked:
            raise RefusedError("invite_revoked")
        if invite.not_after <= time.time():
            raise RefusedError("invite_ended")
        if invite.peer and invite.peer != member.peer_id:
            raise RefusedError("invite_for_another_peer")
        if invite.peers:
            holders = {
                other.peer
                for other in self.members()
                if other.invite is not None and other.invite.id == invite.id and other.peer != member.peer
            }
            if len(holders) >= invite.peers:
                raise RefusedError("invite_used_up")
        member.invite = invite


def _stream(raw: TcpDuplex) -> trio.SocketStream:
    return trio.SocketStream(trio.socket.from_stdlib_socket(raw.socket))
