"""A libp2p host: listens, dials, keeps the connections of each peer, and hands streams to their handlers.

It speaks TCP and WebSocket, Noise and Yamux, identify and ping, and nothing else; circuits through relays are in
``circuit.py``. Why py-libp2p's own host is not used stands in ``upstream.py``.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import trio

from kvasir_peer.errors import KvasirError, LinkError, RefusedError, WireError
from kvasir_peer.net import connection as connections
from kvasir_peer.net import delimited, maddr, multistream, upstream
from kvasir_peer.net.connection import Connection
from kvasir_peer.net.duplex import Duplex, TcpDuplex
from kvasir_peer.net.noise import NoiseIdentity
from kvasir_peer.net.stock import StockMux
from kvasir_peer.net.websocket import WebSocketDuplex
from kvasir_peer.net.yamux import MuxedStream, Yamux

logger = logging.getLogger(__name__)

IDENTIFY = "/ipfs/id/1.0.0"
PING = "/ipfs/ping/1.0.0"
PROTOCOL_VERSION = "ipfs/0.1.0"

HANDSHAKE_S = 10.0  # for encryption and multiplexer, from the first byte
DIAL_S = 10.0  # for the TCP connection
NEGOTIATE_S = 10.0  # for agreeing on a stream's protocol
TICK_S = 1.0
PING_BYTES = 32

MAX_FALLEN_BACK = 256  # peers that are remembered; each had to find a mistake of ours

StreamHandler = Callable[[MuxedStream], Awaitable[None]]

#: The multiplexer: our own, or py-libp2p's (``stock.py``), which is also taken for peers with whom ours has failed.
Muxer = Literal["own", "stock"]


@dataclass(frozen=True)
class HostLimits:
    """What strangers may take.

    Attributes:
        max_connections: inbound and not yet closed.
        max_handshakes: inbound connections before the end of the handshake.
        max_handshakes_per_address: the same from one IP address.
        max_connections_per_peer: of one peer id; the oldest inbound one of the same path goes.
        max_inbound_streams: that a peer may have open on one connection.
    """

    max_connections: int = 1024
    max_handshakes: int = 128
    max_handshakes_per_address: int = 16
    max_connections_per_peer: int = 4
    max_inbound_streams: int = 256


@dataclass(frozen=True)
class HostStatistics:
    """State of a host.

    Attributes:
        peers: with at least one connection.
        connections: open ones.
        handshakes: under way.
        inbound, outbound: connections made since the start.
        refused: inbound connections turned away, by reason.
        failed_handshakes: since the start.
    """

    peers: int
    connections: int
    handshakes: int
    inbound: int
    outbound: int
    refused: dict[str, int] = field(default_factory=dict)
    failed_handshakes: int = 0


def new_host(
    private_key: bytes,
    *,
    listen: Iterable[str] = (),
    limits: HostLimits | None = None,
    admit: Callable[[str], str] | None = None,
    admit_peer: Callable[[Connection], str] | None = None,
    trusted_proxies: Iterable[str] = (),
    agent: str = "kvasir-peer",
    muxer: Muxer = "own",
) -> Host:
    """A host that runs inside ``async with host.running():``.

    Args:
        private_key: Ed25519 seed, 32 bytes.
        listen: ``/ip4/0.0.0.0/tcp/4001``; with ``/ws`` for WebSocket alone (a plain one takes both). Port 0: any.
        limits: what strangers may take.
        admit: called with the IP address of whoever connects, before a byte is read; a text is a refusal.
        admit_peer: called with an inbound connection after the handshake; a text is a refusal.
        trusted_proxies: networks (``10.0.0.0/8``) whose ``X-Forwarded-For`` on WebSocket is believed.
        agent: name told to others by identify.
        muxer: which multiplexer runs the connections.
    """
    return Host(
        private_key,
        tuple(listen),
        limits or HostLimits(),
        admit or (lambda address: ""),
        admit_peer or (lambda connection: ""),
        tuple(ipaddress.ip_network(network) for network in trusted_proxies),
        agent,
        muxer,
    )


class Host:
    """See :func:`new_host`.

    Attributes:
        peer_id: ours.
        limits: see :class:`HostLimits`.
        advertised: addresses told by identify; the owner of the host keeps them true.
        punching: addresses and ports that dial us at this moment as we dial them (hole punching), and the peer there:
            whichever of the two connections comes about, we begin the handshake on it.
        on_connection: called with each new connection that is ready.
        on_gone: called with each closed connection and the reason.
    """

    def __init__(
        self,
        private_key: bytes,
        listen: tuple[str, ...],
        limits: HostLimits,
        admit: Callable[[str], str],
        admit_peer: Callable[[Connection], str],
        trusted_proxies: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...],
        agent: str,
        muxer: Muxer,
    ) -> None:
        self.identity = NoiseIdentity(private_key)
        self.peer_id = self.identity.peer_id
        self.limits = limits
        self.advertised: list[str] = []
        self.on_connection: list[Callable[[Connection], None]] = []
        self.on_gone: list[Callable[[Connection, str], None]] = []
        self._listen = [(text, *maddr.parse_transport(text)) for text in listen]
        self._admit = admit
        self._admit_peer = admit_peer
        self._trusted_proxies = trusted_proxies
        self._agent = agent
        self._muxer = muxer
        self._fallen_back: dict[str, None] = {}  # peers with whom our multiplexer has failed
        self._listening: list[str] = []
        self._handlers: dict[str, StreamHandler] = {}
        self._connections: dict[str, list[Connection]] = {}
        self._handshakes: Counter[str] = Counter()
        # Without a multiplexer so far, and what is to be done once there is one.
        self._beginning: dict[Connection, Callable[[], None]] = {}
        self._serving: Counter[Connection] = Counter()  # handlers that run
        self._inbound_open = 0
        self._closing = False
        self.punching: dict[tuple[str, int], str] = {}
        self._nursery: trio.Nursery | None = None
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self.handle(IDENTIFY, self._identify)
        self.handle(PING, _ping)

    # --- life ------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Host]:
        """Listen and serve until the end of the block; then close every connection. Raises LinkError, OSError.

        A port that is taken is an OSError here, before anything runs.
        """
        listeners = await self._open_listeners()
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for sock, websocket in listeners:
                    nursery.start_soon(self._accept, sock, websocket)
                nursery.start_soon(self._tick)
                try:
                    yield self
                finally:
                    await self._close_all()
                    nursery.cancel_scope.cancel()
        finally:
            self._nursery = None
            self._listening = []
            for sock, _ in listeners:
                sock.close()

    @property
    def running_now(self) -> bool:
        """Whether tasks can be started and connections made."""
        return self._nursery is not None and not self._closing

    @property
    def nursery(self) -> trio.Nursery:
        """Where the host's tasks live. Raises LinkError when the host does not run."""
        if self._nursery is None:
            raise LinkError("the network is not running")
        return self._nursery

    async def _close_all(self) -> None:
        """Say goodbye to everyone, for a moment."""
        self._closing = True
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
            # Circuits before the connections that carry them.
            for path in ("relayed", "direct"):
                open_now = [c for c in self.connections() if c.path == path]
                for connection in open_now:
                    connection.close("closed here")
                for connection in open_now:
                    await connection.closed.wait()
        for connection in self.connections():
            connection.abort("closed here")

    async def _tick(self) -> None:
        while True:
            await trio.sleep(TICK_S)
            now = trio.current_time()
            for connection in [*self.connections(), *self._beginning]:
                connection.tick(now)

    # --- listening -------------------------------------------------------------------------------------------

    @property
    def listening(self) -> list[str]:
        """Transport addresses we listen on, with true ports."""
        return list(self._listening)

    async def _open_listeners(self) -> list[tuple[trio.socket.SocketType, bool]]:
        opened: list[tuple[trio.socket.SocketType, bool]] = []
        try:
            for text, host, port, websocket in self._listen:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                sock = trio.socket.socket(family, socket.SOCK_STREAM)
                opened.append((sock, websocket))
                # Connections inherit it, so that a peer that is started again gets its port while they time out.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if hasattr(socket, "SO_REUSEPORT"):
                    # Hole punching dials from the port that listens.
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if socket.has_ipv6 and family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                try:
                    self._refuse_taken_port(family, host, port)
                    await sock.bind((host, port))
                    sock.listen(1024)
                except OSError as error:
                    raise OSError(
                        error.errno,
                        f"cannot listen on {text}: {error.strerror or error}; choose another port",
                    ) from error
                self._listening.append(maddr.of_socket(sock.getsockname(), websocket=websocket))
        except BaseException:
            for sock, _ in opened:
                sock.close()
            self._listening = []
            raise
        return opened

    @staticmethod
    def _refuse_taken_port(family: int, host: str, port: int) -> None:
        """SO_REUSEPORT would let two programs share a port without a word: try without it first."""
        if port:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))

    async def _accept(self, listener: trio.socket.SocketType, websocket: bool) -> None:
        while True:
            try:
                sock, name = await listener.accept()
            except OSError as error:
                # Out of descriptors, or the caller left between arrival and accept.
                logger.warning("a connection could not be accepted: %s", error)
                await trio.sleep(0.1)
                continue
            address = name[0].partition("%")[0]
            reason = self._turn_away(address)
            if reason:
                self._refused[reason] += 1
                sock.close()
                continue
            self.nursery.start_soon(self._inbound, sock, address, name[1], websocket)

    def _turn_away(self, address: str) -> str:
        if self._inbound_open >= self.limits.max_connections:
            return "connections"
        if self._handshakes.total() >= self.limits.max_handshakes:
            return "handshakes"
        if self._handshakes[address] >= self.limits.max_handshakes_per_address:
            return "handshakes_per_address"
        return self._admit(address)

    async def _inbound(self, sock: trio.socket.SocketType, address: str, port: int, websocket: bool) -> None:
        counted = address
        self._handshakes[counted] += 1
        self._inbound_open += 1
        counts = True

        def handshake_over() -> None:
            nonlocal counts
            if counts:
                counts = False
                self._handshakes[counted] -= 1
                if not self._handshakes[counted]:
                    del self._handshakes[counted]

        duplex = TcpDuplex(socket.socket(fileno=sock.detach()))
        duplex.socket.setblocking(False)
        carried: Duplex = duplex
        try:
            local = duplex.socket.getsockname()[0]
            with trio.move_on_after(HANDSHAKE_S) as scope:
                if websocket or ((address, port) not in self.punching and await _is_http(duplex)):
                    carried = await WebSocketDuplex.accept(trio.SocketStream(_as_trio(duplex)))
                    address = self._behind_proxy(address, carried.headers)
                    if address != counted and (reason := self._admit(address)):
                        self._refused[reason] += 1
                        return
                punching = self.punching.get((address, port))
                if punching is None:
                    secured = await self.identity.secure_inbound(carried)
                else:
                    secured = await self.identity.secure_outbound(carried, punching)
            if scope.cancelled_caught:
                raise LinkError("the handshake took too long")
            connection = self._new(secured, "direct", maddr.of_socket((address, port)), local)
            if reason := self._admit_peer(connection):
                self._refused[reason] += 1
                connection.abort(reason)
                return
            # The handshake is over when a multiplexer was agreed on: whoever only proves his key keeps his place in it.
            self._beginning[connection] = handshake_over
            await self._carry(connection, carried)
        except (LinkError, WireError, RefusedError, OSError) as error:
            self._counts["failed"] += 1
            logger.debug("an inbound connection from %s failed: %s", address, error)
        finally:
            self._inbound_open -= 1
            handshake_over()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                await carried.aclose()

    def _behind_proxy(self, address: str, headers: dict[str, str]) -> str:
        """The address that a trusted proxy names, else the one that the connection comes from."""
        claimed = headers.get("x-forwarded-for", "").rpartition(",")[2].strip()
        try:
            own = ipaddress.ip_address(address)
            if claimed and any(own in network for network in self._trusted_proxies):
                return str(ipaddress.ip_address(claimed))
        except ValueError:
            logger.debug("a proxy at %s names no IP address", address)
        return address

    # --- dialling --------------------------------------------------------------------------------------------

    async def dial(self, address: maddr.Address, *, source: tuple[str, int] | None = None) -> Connection:
        """A new connection to the first hop of ``address``. Raises LinkError.

        Args:
            source: local IP address and port to dial from (hole punching).
        """
        return await self._dial(address, source, responder=False)

    async def dial_as_responder(self, address: maddr.Address, source: tuple[str, int]) -> Connection:
        """As :meth:`dial`, taking the answering part of the handshake (hole punching, where both sides dial)."""
        return await self._dial(address, source, responder=True)

    async def _dial(
        self, address: maddr.Address, source: tuple[str, int] | None, *, responder: bool
    ) -> Connection:
        started: list[Connection] = []
        done = trio.Event()
        failure: list[Exception] = []
        scope = trio.CancelScope()

        async def run() -> None:
            # The connection outlives whoever asked for it, so it runs in the host's nursery from the start.
            with scope:
                try:
                    await self._dial_and_carry(address, source, responder, started, done)
                except (LinkError, WireError, OSError) as error:
                    failure.append(error)
                finally:
                    done.set()

        self.nursery.start_soon(run)
        try:
            await done.wait()
            if not failure and started:
                await started[0].ready.wait()
        except BaseException:
            scope.cancel()
            raise
        if failure or not started:
            error = failure[0] if failure else LinkError("cancelled")
            # A socket's own error names the address once more, as Python writes it; getaddrinfo's and TLS's do not.
            why = str(error)
            if (
                isinstance(error, OSError)
                and not isinstance(error, socket.gaierror | ssl.SSLError)
                and error.errno
            ):
                why = os.strerror(error.errno)
            raise LinkError(f"cannot reach {address.first_hop}: {why}", peer=address.peer) from error
        if started[0].closed.is_set():
            raise LinkError(f"cannot reach {address.first_hop}: {started[0].reason}", peer=address.peer)
        return started[0]

    async def _dial_and_carry(
        self,
        address: maddr.Address,
        source: tuple[str, int] | None,
        responder: bool,
        started: list[Connection],
        done: trio.Event,
    ) -> None:
        carried: Duplex | None = None
        try:
            with trio.move_on_after(DIAL_S + HANDSHAKE_S) as deadline:
                carried, local = await _connect(address, source)
                if responder:
                    secured = await self.identity.secure_inbound(carried)
                    if secured.remote_peer != address.peer:
                        raise LinkError(f"{secured.remote_peer} answered instead of {address.peer}")
                else:
                    secured = await self.identity.secure_outbound(carried, address.peer)
            if deadline.cancelled_caught or carried is None:
                raise LinkError("no answer in time")
            connection = self._new(secured, "direct", address.transport, local)
            started.append(connection)
            self._counts["outbound"] += 1
            done.set()
            await self._carry(connection, carried)
        finally:
            if carried is not None:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                    await carried.aclose()

    # --- connections -----------------------------------------------------------------------------------------

    def _new(self, secured: connections.Secured, path: str, address: str, local: str = "") -> Connection:
        if secured.remote_peer == self.peer_id:
            raise LinkError("that is this peer itself")
        connection = Connection(
            secured,
            path=path,
            address=address,
            on_stream=self._on_stream,
            on_ready=self._register,
            on_closed=self._on_closed,
            max_inbound_streams=self.limits.max_inbound_streams,
            muxer=partial(StockMux, nursery=self.nursery) if self._is_stock(secured.remote_peer) else Yamux,
        )
        connection.local_address = local.partition("%")[0]
        self._beginning[connection] = _nothing
        return connection

    def _is_stock(self, peer: str) -> bool:
        return self._muxer == "stock" or peer in self._fallen_back

    def _fall_back(self, peer: str) -> None:
        """Our multiplexer has failed with a peer: its next connections run on py-libp2p's."""
        if not self._is_stock(peer):
            logger.warning("from now on connections with %s run on py-libp2p's multiplexer", peer)
            self._fallen_back[peer] = None
            if len(self._fallen_back) > MAX_FALLEN_BACK:
                del self._fallen_back[next(iter(self._fallen_back))]

    def addresses_are(self, present: set[str]) -> int:
        """Close connections from IP addresses of ours that are gone; returns how many there were.

        Their sockets would not notice before the heartbeat does.
        """
        stranded = [c for c in self.connections() if c.local_address and c.local_address not in present]
        for connection in stranded:
            connection.abort(f"our address {connection.local_address} is gone")
        return len(stranded)

    async def _carry(self, connection: Connection, carried: Duplex) -> None:
        """Run a connection to its end."""
        if not connection.initiator:
            self._counts["inbound"] += 1
        if isinstance(carried, TcpDuplex):
            await connections.run_over_tcp(connection, carried)
        else:
            await connections.run_over_duplex(connection, carried)

    def carry_over_stream(
        self, secured: connections.Secured, stream: MuxedStream, relay: Connection
    ) -> Connection:
        """Begin a connection inside a circuit of ``relay``; it lives as long as the stream.

        A relay that only keeps a place for us is an idle peer; one whose circuits we use has to answer quickly.
        """
        connection = self._new(secured, "relayed", relay.remote_peer)
        connection.carried_by = relay
        relay.busy += 1
        connections.begin_over_stream(connection, stream)
        return connection

    def _register(self, connection: Connection) -> None:
        self._beginning.pop(connection, _nothing)()
        known = self._connections.setdefault(connection.remote_peer, [])
        known.append(connection)
        same = [c for c in known if c.path == connection.path]
        if len(same) > self.limits.max_connections_per_peer:
            idle = [c for c in same[:-1] if not c.busy] or same[:-1]
            idle[0].close("too many connections of one peer")
        for other in same[:-1]:
            other.doubt()
        logger.debug("connected to %s, %s", connection.remote_peer, connection.path)
        for callback in self.on_connection:
            callback(connection)

    def _on_closed(self, connection: Connection, reason: str) -> None:
        self._beginning.pop(connection, None)
        if connection.carried_by is not None:
            connection.carried_by.busy -= 1
        if connection.faulty:
            self._fall_back(connection.remote_peer)
        known = self._connections.get(connection.remote_peer, [])
        if connection in known:
            known.remove(connection)
            if not known:
                del self._connections[connection.remote_peer]
            logger.debug("connection to %s ended: %s", connection.remote_peer, reason)
            for callback in self.on_gone:
                callback(connection, reason)

    def connections(self, peer: str | None = None) -> list[Connection]:
        """Open connections of one peer, direct ones first, or of all."""
        if peer is None:
            return [connection for known in self._connections.values() for connection in known]
        return sorted(self._connections.get(peer, ()), key=lambda c: (c.path != "direct", -c.opened_at))

    @property
    def peers(self) -> list[str]:
        """Peers with at least one connection."""
        return list(self._connections)

    # --- streams ---------------------------------------------------------------------------------------------

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        """Serve ``protocol``: ``handler(stream)`` runs for each stream; when it returns, the stream is closed."""
        self._handlers[protocol] = handler

    def unhandle(self, protocol: str) -> None:
        """Serve ``protocol`` no more."""
        self._handlers.pop(protocol, None)

    def _on_stream(self, connection: Connection, stream: MuxedStream) -> None:
        stream.connection = connection
        if self._serving[connection] >= self.limits.max_inbound_streams:
            # Handlers may go on for a while after their streams were reset; they count until they are over.
            connection.mux.violations["streams"] = connection.mux.violations.get("streams", 0) + 1
            stream.reset("too many streams are being served")
            return
        self._serving[connection] += 1
        self.nursery.start_soon(self._serve_counted, connection, stream)

    async def _serve_counted(self, connection: Connection, stream: MuxedStream) -> None:
        try:
            await self._serve(connection, stream)
        finally:
            self._serving[connection] -= 1
            if not self._serving[connection]:
                del self._serving[connection]

    async def _serve(self, connection: Connection, stream: MuxedStream) -> None:
        try:
            with trio.move_on_after(NEGOTIATE_S) as scope:
                stream.protocol = await multistream.answer(stream, self._handlers.__contains__)
            if scope.cancelled_caught:
                stream.reset("no protocol was proposed in time")
                return
            handler = self._handlers.get(stream.protocol)
            if handler is not None:
                await handler(stream)
        except (KvasirError, trio.TooSlowError) as error:
            if isinstance(error, WireError | RefusedError):
                connection.mux.violation(error)
            logger.debug("a stream of %s (%s) ended: %s", connection.remote_peer, stream.protocol, error)
            stream.reset(str(error))
        except Exception:
            # A mistake of ours that one peer has found must not cost all others their connections.
            logger.exception(
                "the handler of %s failed on a stream of %s", stream.protocol, connection.remote_peer
            )
            stream.reset("internal error")
        except BaseException:
            stream.reset("closed here")
            raise
        else:
            if not stream.handed_over:
                stream.close()

    async def _identify(self, stream: MuxedStream) -> None:
        connection = stream.connection
        assert isinstance(connection, Connection)
        message = upstream.Identify(
            protocol_version=PROTOCOL_VERSION,
            agent_version=self._agent,
            public_key=self.identity.public_key_message,
            protocols=sorted(self._handlers),
            listen_addrs=[maddr.to_bytes(address) for address in self.advertised],
        )
        if connection.path == "direct":
            message.observed_addr = maddr.to_bytes(connection.address)
        with trio.fail_after(NEGOTIATE_S):
            await delimited.write_message(stream, message)

    async def identify(self, connection: Connection) -> upstream.Identify:
        """Ask who is there, and as what we are seen. Raises LinkError, WireError."""
        with trio.move_on_after(NEGOTIATE_S):
            stream = await connection.open_stream(IDENTIFY)
            try:
                return await delimited.read_message(stream, upstream.Identify)
            finally:
                stream.close()
        raise LinkError("no answer to identify in time", peer=connection.remote_peer)

    def statistics(self) -> HostStatistics:
        """A snapshot."""
        return HostStatistics(
            len(self._connections),
            len(self.connections()),
            self._handshakes.total(),
            self._counts["inbound"],
            self._counts["outbound"],
            dict(self._refused),
            self._counts["failed"],
        )


def _nothing() -> None:
    """What is to be done where nothing is."""


async def _ping(stream: MuxedStream) -> None:
    """Send back every 32 bytes, until the other side has had enough."""
    while True:
        data = b""
        while len(data) < PING_BYTES:
            part = await stream.receive_some(PING_BYTES - len(data))
            if not part:
                return
            data += part
        await stream.send_all(data)


async def _is_http(duplex: TcpDuplex) -> bool:
    """Whether the other side begins with an HTTP request in place of multistream's length byte."""
    await trio.lowlevel.checkpoint_if_cancelled()
    while True:
        try:
            first = duplex.socket.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            await trio.lowlevel.wait_readable(duplex.socket)
        else:
            return first == b"G"


def _as_trio(duplex: TcpDuplex) -> trio.socket.SocketType:
    return trio.socket.from_stdlib_socket(duplex.socket)


async def _connect(address: maddr.Address, source: tuple[str, int] | None) -> tuple[Duplex, str]:
    """The byte stream of an address, and our own IP address on it. Raises OSError, LinkError.

    The caller sets the deadline.
    """
    if source is not None:
        sock = await _connect_from(address, source)
    else:
        try:
            with trio.fail_after(DIAL_S):
                stream = await trio.open_tcp_stream(address.host, address.port)
        except trio.TooSlowError:
            raise LinkError(f"no answer from {address.host} port {address.port} in {DIAL_S:.0f} s") from None
        except OSError as error:
            cause = error.__cause__
            first = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause
            raise LinkError(str(first or error)) from error
        sock = socket.socket(fileno=stream.socket.detach())
    sock.setblocking(False)
    duplex = TcpDuplex(sock)
    local = sock.getsockname()[0]
    if not address.websocket:
        return duplex, local
    below: trio.abc.Stream = trio.SocketStream(_as_trio(duplex))
    try:
        if address.secure:
            below = trio.SSLStream(
                below, ssl.create_default_context(), server_hostname=address.host, https_compatible=True
            )
            await below.do_handshake()
        name = f"[{address.host}]" if ":" in address.host else address.host
        return await WebSocketDuplex.connect(below, f"{name}:{address.port}"), local
    except (ssl.SSLError, trio.BrokenResourceError) as error:
        await trio.aclose_forcefully(below)
        raise LinkError(f"TLS with {address.host} failed: {error.__cause__ or error}") from error
    except BaseException:
        await trio.aclose_forcefully(below)
        raise


async def _connect_from(address: maddr.Address, source: tuple[str, int]) -> socket.socket:
    """Connect from a chosen local port, which may be the one that listens."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        await sock.bind(source)
        await sock.connect((address.host, address.port))
    except BaseException:
        sock.close()
        raise
    return socket.socket(fileno=sock.detach())
