"""The relay itself: accepts connections, answers hop, identify and ping."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio
from libp2p.abc import IMuxedConn, IMuxedStream
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage
from libp2p.stream_muxer.exceptions import MuxedStreamEOF
from multiaddr import Multiaddr

from kvasir_peer.errors import RefusedError, SettingsError, WireError
from kvasir_peer.identity import Identity
from kvasir_relay import messages, multistream
from kvasir_relay.connection import PEER_ERRORS, Address, parse_address
from kvasir_relay.messages import HOP_PROTOCOL, STOP_PROTOCOL, Status
from kvasir_relay.upgrade import Upgrader
from kvasir_relay.varint import encode_varint

log = logging.getLogger("kvasir_relay")

IDENTIFY_PROTOCOL = "/ipfs/id/1.0.0"
PING_PROTOCOL = "/ipfs/ping/1.0.0"
PROTOCOLS = (HOP_PROTOCOL, IDENTIFY_PROTOCOL, PING_PROTOCOL)

HANDSHAKE_SECONDS = 15.0  # Noise is three small messages; a phone on a bad line needs some seconds for them
NEGOTIATE_SECONDS = 15.0
STOP_SECONDS = 15.0  # the target's answer to a circuit
PIECE = 65536  # bytes that one turn of a circuit forwards at most


@dataclass(eq=False)
class Connection:
    """An authenticated connection.

    Attributes:
        peer: peer id as bytes.
        address: where the peer comes from.
    """

    peer: bytes
    address: Address
    port: int
    muxed: IMuxedConn
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Relay:
    """A circuit-relay-v2 server on TCP. It only listens: it never dials an address that a peer names."""

    def __init__(self, identity: Identity, *, reservation_seconds: int = 3600) -> None:
        self.identity = identity
        self.peer = ID.from_base58(identity.peer_id).to_bytes()
        self.reservation_seconds = reservation_seconds
        self.addresses: list[Multiaddr] = []
        self._upgrader = Upgrader(identity)
        self._connections: set[Connection] = set()
        self._reservations: dict[bytes, Connection] = {}
        self._handlers: dict[str, Callable[[Connection, IMuxedStream], Awaitable[None]]] = {
            HOP_PROTOCOL: self._hop,
            IDENTIFY_PROTOCOL: self._identify,
            PING_PROTOCOL: self._ping,
        }

    async def serve(
        self,
        listeners: list[trio.SocketListener],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept connections until cancelled."""
        async with trio.open_nursery() as nursery:
            for listener in listeners:
                host, port = listener.socket.getsockname()[:2]
                family = "ip6" if ":" in host else "ip4"
                self.addresses.append(Multiaddr(f"/{family}/{host}/tcp/{port}/p2p/{self.identity.peer_id}"))
                nursery.start_soon(trio.serve_listeners, self._accepted, [listener])
            task_status.started()
            await trio.sleep_forever()

    async def _accepted(self, stream: trio.SocketStream) -> None:
        with trio.CancelScope() as scope:
            try:
                host, port = stream.socket.getpeername()[:2]
                address = parse_address(host)
                raw = RawConnection(stream=TrioTCPStream(stream), initiator=False)
                with trio.fail_after(HANDSHAKE_SECONDS):
                    muxed = await self._upgrader.upgrade(raw)
                connection = Connection(muxed.peer_id.to_bytes(), address, port, muxed, scope)  # type: ignore[attr-defined]
                await self._serve_connection(connection)
            except PEER_ERRORS as error:
                log.debug("connection ended: %s", error)
            finally:
                await trio.aclose_forcefully(stream)

    async def _serve_connection(self, connection: Connection) -> None:
        self._connections.add(connection)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._run_muxer, connection)
                while True:
                    stream = await connection.muxed.accept_stream()
                    nursery.start_soon(self._serve_stream, connection, stream)
        except* PEER_ERRORS as group:
            log.debug("connection ended: %s", group.exceptions[0])
        finally:
            self._connections.discard(connection)
            if self._reservations.get(connection.peer) is connection:
                del self._reservations[connection.peer]

    async def _run_muxer(self, connection: Connection) -> None:
        try:
            await connection.muxed.start()
        finally:
            connection.scope.cancel()

    async def _serve_stream(self, connection: Connection, stream: IMuxedStream) -> None:
        try:
            with trio.fail_after(NEGOTIATE_SECONDS):
                protocol = await multistream.answer(stream, PROTOCOLS)
            await self._handlers[protocol](connection, stream)
        except MuxedStreamEOF:
            await _quietly(stream.close)
        except PEER_ERRORS as error:
            log.debug("stream ended: %s", error)
            await _quietly(stream.reset)

    async def _identify(self, connection: Connection, stream: IMuxedStream) -> None:
        family = "ip6" if connection.address.version == 6 else "ip4"
        observed = Multiaddr(f"/{family}/{connection.address}/tcp/{connection.port}")
        message = Identify(
            protocol_version="ipfs/0.1.0",
            agent_version="kvasir-relay",
            public_key=b"\x08\x01\x12\x20" + self.identity.public_key,
            listen_addrs=[address.decapsulate_code(421).to_bytes() for address in self.addresses],
            observed_addr=observed.to_bytes(),
            protocols=PROTOCOLS,
        )
        body = message.SerializeToString()
        await stream.write(encode_varint(len(body)) + body)
        await stream.close()

    async def _ping(self, connection: Connection, stream: IMuxedStream) -> None:
        while data := await stream.read(32):
            await stream.write(bytes(data))

    async def _hop(self, connection: Connection, stream: IMuxedStream) -> None:
        with trio.fail_after(NEGOTIATE_SECONDS):
            try:
                message = await messages.read_hop(stream)
            except WireError:
                await stream.write(messages.status_message(Status.MALFORMED_MESSAGE))
                await stream.close()
                return
        if message.type == HopMessage.RESERVE:
            await self._reserve(connection, stream)
        elif message.type == HopMessage.CONNECT:
            await self._connect(connection, stream, message)
        else:
            await stream.write(messages.status_message(Status.UNEXPECTED_MESSAGE))
            await stream.close()

    async def _reserve(self, connection: Connection, stream: IMuxedStream) -> None:
        # The reservation belongs to the authenticated peer, whatever the message says.
        self._reservations[connection.peer] = connection
        expire = messages.unix_now() + self.reservation_seconds
        await stream.write(
            messages.reserved_message(
                expire=expire,
                addresses=[address.to_bytes() for address in self.addresses],
                voucher=messages.sign_voucher(self.identity, self.peer, connection.peer, expire),
                duration=0,
                data=0,
            )
        )
        await stream.close()

    async def _connect(self, connection: Connection, source: IMuxedStream, message: HopMessage) -> None:
        holder = self._reservations.get(message.peer.id)
        if holder is None:
            await source.write(messages.status_message(Status.NO_RESERVATION))
            await source.close()
            return
        target: IMuxedStream | None = None
        try:
            try:
                with trio.fail_after(STOP_SECONDS):
                    target = await holder.muxed.open_stream()
                    await multistream.ask(target, STOP_PROTOCOL)
                    await target.write(messages.stop_connect_message(connection.peer, duration=0, data=0))
                    status = await messages.read_stop_status(target)
                    if status != Status.OK:
                        raise RefusedError(f"the target answered with status {status}")
            except PEER_ERRORS as error:
                log.debug("circuit refused: %s", error)
                await source.write(messages.status_message(Status.CONNECTION_FAILED))
                await source.close()
                return
            await source.write(messages.status_message(Status.OK))
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_forward, source, target)
                    nursery.start_soon(_forward, target, source)
            except* PEER_ERRORS as group:
                log.debug("circuit ended: %s", group.exceptions[0])
                await _quietly(source.reset)
                await _quietly(target.reset)
            target = None
        finally:
            if target is not None:
                await _quietly(target.reset)


async def _forward(source: IMuxedStream, target: IMuxedStream) -> None:
    while True:
        try:
            data = await source.read(PIECE)
        except MuxedStreamEOF:
            data = b""
        if not data:
            await target.close()
            return
        await target.write(data)


async def _quietly(action: Callable[[], Awaitable[None]]) -> None:
    """End a stream whose connection may be gone, also while being cancelled."""
    with trio.move_on_after(1, shield=True):
        try:
            await action()
        except PEER_ERRORS as error:
            log.debug("already gone: %s", error)


async def open_listener(text: str) -> trio.SocketListener:
    """A listening socket for ``/ip4|ip6/.../tcp/...``. Raises SettingsError when it cannot be had."""
    try:
        address = Multiaddr(text)
        protocols = [protocol.name for protocol in address.protocols()]
        if len(protocols) < 2 or protocols[0] not in ("ip4", "ip6") or protocols[1:] != ["tcp"]:
            raise ValueError(text)
        host = address.value_for_protocol(protocols[0])
        port = int(address.value_for_protocol("tcp") or 0)
    except Exception as error:  # noqa: BLE001 - multiaddr raises many kinds; all mean the text is wrong
        raise SettingsError(
            f"cannot listen on {text!r}: give an address like /ip4/0.0.0.0/tcp/4001"
        ) from error
    family = socket.AF_INET6 if protocols[0] == "ip6" else socket.AF_INET
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await sock.bind((host, port))
        sock.listen(512)
    except OSError as error:
        sock.close()
        raise SettingsError(
            f"cannot listen on {text}: {error.strerror}; choose another port with --listen"
        ) from error
    return trio.SocketListener(sock)
