"""One authenticated connection to a peer: Noise below, Yamux above, and a carrier under both.

:class:`Connection` is pure as :class:`~kvasir_peer.net.yamux.Yamux` is: ciphertext is fed in and pulled out. What
carries it is either a TCP socket (:class:`TcpCarrier`: one reader task that takes up to 256 KiB at a time and decrypts
and parses all of it, one writer task that encrypts when the socket has room) or a stream of another connection
(:class:`StreamCarrier`: a circuit through a relay, without any task: what the outer connection reads is parsed in its
reader, and what it sends next is chosen through both layers at once).
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import trio

from kvasir_peer.errors import LinkError, WireError
from kvasir_peer.net import multistream, yamux
from kvasir_peer.net.duplex import Duplex, TcpDuplex
from kvasir_peer.net.noise import MAX_PLAINTEXT_BYTES, OVERHEAD, Secured
from kvasir_peer.net.yamux import HEADER_BYTES, MuxedStream, Yamux

logger = logging.getLogger(__name__)

RECEIVE_BYTES = 256 * 1024  # of ciphertext taken from a socket at once: four messages of the largest size
SEND_BATCH_BYTES = 2 * 65537  # of ciphertext made at once; what comes after it may still be overtaken
BESIDE_URGENT_BATCH_BYTES = 65537  # the same while decode messages use the connection: one message
UNSENT_BYTES = 128 * 1024  # kept unsent in the kernel at most, where nothing can be overtaken any more
LEAST_ROOM_BYTES = OVERHEAD + HEADER_BYTES + yamux.USEFUL_ROOM_BYTES  # a message is not begun in less

HEARTBEAT_BUSY_S = 5.0  # between pings while the connection carries links
HEARTBEAT_IDLE_S = 14.0  # between signs of life otherwise
DEAD_BUSY_S = 15.0  # of silence with a ping unanswered
DEAD_IDLE_S = 28.0  # with the second between two looks, a silent peer is gone within 30
AGREE_S = 10.0  # for the other side to agree on a multiplexer
DEAD_DOUBTED_S = 3.0  # of silence after a newer connection of the same peer came

ROUND_TRIPS_KEPT = 64  # samples behind the percentiles: five minutes of heartbeats

# One buffer of each kind serves all connections of a thread: nothing is awaited between filling and using it.
_receive_buffer = memoryview(bytearray(RECEIVE_BYTES + 65537))
_send_buffer = memoryview(bytearray(SEND_BATCH_BYTES + 65537))
_plain_buffers = [memoryview(bytearray(MAX_PLAINTEXT_BYTES)) for _ in range(3)]
_depth = 0
_filling = False  # whether the send buffer is being filled: nobody else may


class Carrier(Protocol):
    """What moves the ciphertext of a connection."""

    def wake(self) -> None:
        """There is something to pull."""

    def flush(self) -> None:
        """Send what can be sent without waiting, if anything."""

    def abort(self) -> None:
        """Close at once."""


@dataclass(frozen=True)
class ConnectionStatistics:
    """State of one connection.

    Attributes:
        peer: peer id of the other side.
        path: ``direct`` or ``relayed``.
        address: where the other side is (for a circuit: the relay's peer id).
        round_trip_p50, round_trip_p95: seconds over the last samples, None before the first.
        bytes_sent, bytes_received: ciphertext.
        streams: open ones.
        opened_at, heard_at: on trio's clock.
        violations: protocol breaks of the other side by reason code.
    """

    peer: str
    path: str
    address: str
    round_trip_p50: float | None
    round_trip_p95: float | None
    bytes_sent: int
    bytes_received: int
    streams: int
    opened_at: float
    heard_at: float
    violations: dict[str, int]


class Connection:
    """An authenticated, multiplexed connection.

    Args:
        secured: outcome of the handshake.
        path: ``direct`` or ``relayed``.
        address: for people: where the other side is, or the relay's peer id.
        on_stream: called with each stream the other side opens.
        on_closed: called once, with the reason.
        on_ready: called once the multiplexer was agreed on.
        max_inbound_streams: see :class:`Yamux`.
        muxer: makes the multiplexer.

    Attributes:
        remote_peer: authenticated peer id of the other side.
        initiator: whether we dialled.
        local_address: our own IP address on it, or "" for a circuit.
        busy: number of links that carry work; makes the heartbeat quicker.
        tickers: called with the time about once a second.
        ready: set once the multiplexer was agreed on.
        closed: set once the connection is gone; :attr:`reason` says why.
        circuit_at: when a circuit last came over it, if the other side is a relay of ours; trio's clock.
        carried_by: the connection to the relay, for a circuit.
        faulty: whether it ended by a mistake of our own code.
    """

    def __init__(
        self,
        secured: Secured,
        *,
        path: str,
        address: str,
        on_stream: Callable[[Connection, MuxedStream], None],
        on_closed: Callable[[Connection, str], None],
        on_ready: Callable[[Connection], None] | None = None,
        max_inbound_streams: int = yamux.MAX_INBOUND_STREAMS,
        muxer: Callable[..., Yamux] = Yamux,
    ) -> None:
        self.remote_peer = secured.remote_peer
        self.initiator = secured.initiator
        self.path = path
        self.address = address
        self.local_address = ""
        self.busy = 0
        self.tickers: set[Callable[[float], None]] = set()
        self.ready = trio.Event()
        self.closed = trio.Event()
        self._over = False  # as closed, for the code that asks for each message
        self._agreed = False  # as ready, until the end
        self.reason = ""
        self.circuit_at = float("-inf")
        self.faulty = False
        self.carried_by: Connection | None = None
        self.opened_at = self.heard_at = trio.current_time()
        self.round_trips: deque[float] = deque(maxlen=ROUND_TRIPS_KEPT)
        self._secured = secured
        self._on_ready = on_ready
        self._on_closed = on_closed
        self._carrier: Carrier | None = None
        self._last_ping = self.opened_at
        self._doubted_at: float | None = None
        self._negotiation: multistream.LineBuffer | None = multistream.LineBuffer()
        self._lines_seen = 0
        self._bytes_sent = 0
        self._bytes_received = 0
        self._pending = bytearray()
        self._draining = False
        self.mux = muxer(
            remote_peer=secured.remote_peer,
            initiator=secured.initiator,
            on_stream=lambda stream: on_stream(self, stream),
            on_writable=self._wake,
            max_inbound_streams=max_inbound_streams,
        )
        self.mux.on_round_trip = self.round_trips.append
        self.mux.on_broken = self.abort

    # --- for those who use it --------------------------------------------------------------------------------

    def start(self, carrier: Carrier) -> None:
        """Begin; the carrier is ready to be woken."""
        self._carrier = carrier
        lines = (multistream.HEADER, yamux.PROTOCOL) if self.initiator else (multistream.HEADER,)
        self._pending += multistream.encode(*lines)
        self._wake()

    async def open_stream(self, protocol: str) -> MuxedStream:
        """A stream on which the other side has agreed to speak ``protocol``. Raises LinkError.

        The caller sets the deadline; leaving early resets the stream.
        """
        stream = self.mux.open()
        try:
            await multistream.propose(stream, protocol)
        except BaseException:
            stream.reset("given up")
            raise
        stream.protocol = protocol
        return stream

    def close(self, reason: str = "closed here") -> None:
        """Say goodbye and close, without waiting."""
        if not self.closed.is_set():
            self.reason = reason
            if self._carrier is None or not self.ready.is_set():
                self._end(reason)
            else:
                self._draining = True
                self.mux.go_away()

    def abort(self, reason: str) -> None:
        """Close at once."""
        self._end(reason)

    def doubt(self) -> None:
        """The other side may be elsewhere by now: it has to answer soon."""
        if self._doubted_at is None and not self.closed.is_set():
            self._doubted_at = trio.current_time()
            self.mux.ping(self._doubted_at)

    def tick(self, now: float) -> None:
        """Heartbeat, dead-peer detection, and clearing of old streams; called about once a second."""
        if self.closed.is_set():
            return
        if self._draining:
            self._end(self.reason or "closed here")
            return
        beat, dead = (HEARTBEAT_BUSY_S, DEAD_BUSY_S) if self.busy else (HEARTBEAT_IDLE_S, DEAD_IDLE_S)
        silent = now - self.heard_at
        if self._doubted_at is not None:
            if self.heard_at > self._doubted_at:
                self._doubted_at = None
            elif now - self._doubted_at > DEAD_DOUBTED_S:
                self._end("the other side came again from elsewhere, and is silent here")
                return
        if self.mux.ping_since is not None and silent > dead:
            self._end(f"nothing came for {silent:.0f} s: the other side, or the network, is gone")
            return
        if not self.ready.is_set():
            if now - self.opened_at > AGREE_S:
                self._end("the other side did not agree on a multiplexer in time")
            return
        if silent > beat or (self.busy and now - self._last_ping > beat):
            self._last_ping = now
            self.mux.ping(now)
        self.mux.sweep(now)
        for ticker in list(self.tickers):
            ticker(now)

    def statistics(self) -> ConnectionStatistics:
        """A snapshot."""
        ordered = sorted(self.round_trips)
        return ConnectionStatistics(
            self.remote_peer,
            self.path,
            self.address,
            ordered[len(ordered) // 2] if ordered else None,
            ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)] if ordered else None,
            self._bytes_sent,
            self._bytes_received,
            len(self.mux.streams),
            self.opened_at,
            self.heard_at,
            dict(self.mux.violations),
        )

    # --- for the carrier -------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._carrier is not None and not self._over:
            self._carrier.wake()

    def urgency(self) -> int | None:
        """Class of what would be sent next, or None when there is nothing."""
        if self._over:
            return None
        if self._pending:
            return 0
        return self.mux.urgency() if self._agreed else None

    def pull(self, room: memoryview) -> int:
        """Write one encrypted message into ``room``; returns its size, 0 when there is nothing or no room."""
        global _depth
        if len(room) < LEAST_ROOM_BYTES or self._over:
            return 0
        limit = min(len(room) - OVERHEAD, MAX_PLAINTEXT_BYTES)
        if self._pending:
            self.mux.exhausted = False
            plain = memoryview(bytes(self._pending[:limit]))
            del self._pending[: len(plain)]
        elif self._agreed:
            # A circuit inside a connection pulls inside the outer pull: each depth has a buffer of its own.
            buffer = _plain_buffers[_depth]
            _depth += 1
            try:
                count = self.mux.pull(buffer[:limit])
            except Exception:
                logger.exception("what goes to %s could not be put together", self.remote_peer)
                self._broke()
                return 0
            finally:
                _depth -= 1
            if not count:
                return 0
            plain = buffer[:count]
        else:
            return 0
        size = self._secured.send.seal(plain, room)
        self._bytes_sent += size
        return size

    def feed(self, data: memoryview) -> int:
        """Decrypt and parse all whole messages at the start of ``data``; returns the bytes used.

        Never raises for what the other side did: it closes the connection.
        """
        self.heard_at = trio.current_time()
        position, size = 0, len(data)
        try:
            while size - position >= 2 and not self._over:
                end = position + 2 + (data[position] << 8 | data[position + 1])
                if end > size:
                    break
                plain = self._secured.receive.open(data[position + 2 : end])
                position = end
                if self._negotiation is None:
                    self.mux.feed(memoryview(plain))
                else:
                    self._negotiate(plain)
        except (WireError, LinkError) as error:
            self.mux.violation(error)
            logger.warning("connection to %s closed: %s", self.remote_peer, error)
            self.mux.go_away(yamux.GO_AWAY_PROTOCOL_ERROR)
            if self._carrier is not None:
                self._carrier.flush()
            self._end(str(error))
        except Exception:
            logger.exception("what came from %s could not be handled", self.remote_peer)
            self._broke()
        self._bytes_received += position
        return position

    def _broke(self) -> None:
        """A mistake of ours that one peer has found: it must not cost all others their connections."""
        self.faulty = True
        self._end("internal error")

    def ended(self, reason: str) -> None:
        """The carrier saw the end."""
        self._end(reason or "the other side closed the connection")

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be sent, not even the connection's end; right only after a pull."""
        return self.mux.exhausted and not self._draining and not self._pending

    def drained(self) -> None:
        """The carrier has sent all there was."""
        if self._draining and self.urgency() is None and not self.closed.is_set():
            self._end(self.reason or "closed here")

    def _end(self, reason: str) -> None:
        if self.closed.is_set():
            return
        self.reason = reason
        self._over = True
        self.closed.set()
        self.ready.set()
        carrier, self._carrier = self._carrier, None
        self.mux.lose(f"the connection is gone: {reason}")
        if carrier is not None:
            carrier.abort()
        self._on_closed(self, reason)

    def _negotiate(self, plain: bytes) -> None:
        """Agree on Yamux; nothing else is spoken."""
        lines = self._negotiation
        assert lines is not None
        lines.feed(plain)
        while (line := lines.next_line()) is not None:
            self._lines_seen += 1
            if self._lines_seen == 1:
                if line != multistream.HEADER:
                    raise WireError("malformed", f"the other side begins with {line[:40]!r}")
                continue
            if self.initiator:
                if line != yamux.PROTOCOL:
                    raise LinkError(f"the other side does not speak {yamux.PROTOCOL}")
            elif line != yamux.PROTOCOL:
                if self._lines_seen > multistream.MAX_PROPOSALS:
                    raise WireError(
                        "unexpected", "too many multiplexers were proposed and none is spoken here"
                    )
                self._pending += multistream.encode(multistream.NOT_AVAILABLE)
                self._wake()
                continue
            else:
                self._pending += multistream.encode(yamux.PROTOCOL)
            self._negotiation = None
            self._agreed = True
            self.ready.set()
            self.mux.ping(trio.current_time())
            if self._on_ready is not None:
                self._on_ready(self)
            self._wake()
            if rest := lines.rest():
                self.mux.feed(memoryview(rest))
            return


class TcpCarrier:
    """Moves a connection over a TCP socket with one reader and one writer task.

    The first thing that is to be sent after something came is sent at once, by whoever queued it: an answer saves the
    change to the writer's task. All else is left to the writer, which takes many small frames into one message.
    """

    def __init__(self, connection: Connection, duplex: TcpDuplex) -> None:
        self._connection = connection
        self._duplex = duplex
        self._socket = duplex.socket
        self._parked: trio.lowlevel.Task | None = None
        self._rest = b""  # encrypted, and not yet taken by the socket
        self._eager = False
        self._feeding = False
        tune(self._socket)

    def wake(self) -> None:
        if self._parked is None:
            return
        if self._eager and not self._feeding and not _filling and not self._connection.closed.is_set():
            self._eager = False
            if self._send_now():
                return
        task, self._parked = self._parked, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def abort(self) -> None:
        self._duplex.abort()
        self.wake()

    def flush(self) -> None:
        """Send what fits into the socket right now."""
        if not self._rest and not _filling:
            self._send_now()

    def _send_now(self) -> bool:
        """Send one batch; True when that was all there is. The rest is left to the writer."""
        size = self._fill()
        if size:
            try:
                sent = self._socket.send(_send_buffer[:size])
            except OSError:  # it is full, or broken: the writer will see which
                sent = 0
            if sent < size:
                self._rest = bytes(_send_buffer[sent:size])
                return False
        return self._connection.idle

    async def run(self) -> None:
        """Run until the connection is closed."""
        connection = self._connection
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write)
            try:
                await self._read()
            finally:
                connection.ended("")
                nursery.cancel_scope.cancel()

    async def _read(self) -> None:
        connection, sock = self._connection, self._socket
        rest = b""
        full = False
        while not connection.closed.is_set():
            try:
                if full:
                    await trio.lowlevel.checkpoint()
                else:
                    await trio.lowlevel.wait_readable(sock)
            except (trio.ClosedResourceError, OSError):
                return
            if connection.closed.is_set():
                return
            kept = len(rest)
            _receive_buffer[:kept] = rest
            try:
                got = sock.recv_into(_receive_buffer[kept:])
            except (BlockingIOError, InterruptedError):
                full = False
                continue
            except OSError as error:
                connection.ended(f"the connection broke: {error.strerror or error}")
                return
            if not got:
                return
            full = kept + got == len(_receive_buffer)
            self._feeding = True
            used = connection.feed(_receive_buffer[: kept + got])
            self._feeding = False
            self._eager = True
            rest = bytes(_receive_buffer[used : kept + got])

    def _fill(self) -> int:
        """Encrypt up to a batch into the shared buffer; returns its size."""
        global _filling
        filled = 0
        _filling = True
        pull, mux = self._connection.pull, self._connection.mux
        most = BESIDE_URGENT_BATCH_BYTES if mux.beside_urgent else SEND_BATCH_BYTES
        while filled < most:
            count = pull(_send_buffer[filled:])
            filled += count
            if not count or mux.exhausted:
                break
        _filling = False
        return filled

    async def _write(self) -> None:
        connection, sock = self._connection, self._socket
        while not connection.closed.is_set():
            if self._rest and not await self._send_rest():
                return
            size = self._fill()
            if size:
                try:
                    sent = sock.send(_send_buffer[:size])
                except (BlockingIOError, InterruptedError):
                    sent = 0
                except OSError as error:
                    connection.ended(f"the connection broke: {error.strerror or error}")
                    return
                if sent < size:
                    self._rest = bytes(_send_buffer[sent:size])
                    continue
                if not connection.idle:
                    await trio.lowlevel.checkpoint()
                    continue
            connection.drained()
            if connection.closed.is_set():
                return
            self._parked = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._give_up_parking)

    async def _send_rest(self) -> bool:
        rest = memoryview(self._rest)
        try:
            while rest:
                try:
                    await trio.lowlevel.wait_writable(self._socket)
                    rest = rest[self._socket.send(rest) :]
                except (BlockingIOError, InterruptedError):
                    continue
                except (trio.ClosedResourceError, OSError) as error:
                    self._connection.ended(f"the connection broke: {error}")
                    return False
        finally:
            self._rest = b""
        return True

    def _give_up_parking(self, _: object) -> trio.lowlevel.Abort:
        self._parked = None
        return trio.lowlevel.Abort.SUCCEEDED


class StreamCarrier:
    """Moves a connection inside a stream of another one: a circuit through a relay."""

    def __init__(self, connection: Connection, stream: MuxedStream) -> None:
        self._connection = connection
        self._stream = stream
        self._rest = bytearray()

    def begin(self) -> None:
        """Take over the stream; call it after the connection was started with this carrier."""
        self._stream.set_source(self, classed=True)
        self._stream.set_sink(self._receive, self._connection.ended)
        self._stream.notify()

    def wake(self) -> None:
        self._stream.notify()

    def flush(self) -> None:
        self.wake()

    def abort(self) -> None:
        self._stream.close()

    def urgency(self) -> int | None:
        """See :class:`~kvasir_peer.net.yamux.Source`."""
        return self._connection.urgency()

    def pull(self, room: memoryview) -> int:
        """See :class:`~kvasir_peer.net.yamux.Source`."""
        count = self._connection.pull(room)
        if self._connection.urgency() is None:
            self._connection.drained()
        return count

    def _receive(self, data: memoryview) -> None:
        size = len(data)
        if self._rest:
            self._rest += data
            used = self._connection.feed(memoryview(bytes(self._rest)))
            del self._rest[:used]
        else:
            used = self._connection.feed(data)
            if used < size:
                self._rest += data[used:]
        if len(self._rest) > 65537 and not self._connection.closed.is_set():
            raise WireError("malformed", "an encrypted message is longer than its length says")
        self._stream.consumed(size)


def tune(sock: socket.socket) -> None:
    """Options of a socket that carries a connection."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    lowat = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if lowat is not None:
        sock.setsockopt(socket.IPPROTO_TCP, lowat, UNSENT_BYTES)


async def run_over_tcp(connection: Connection, duplex: TcpDuplex) -> None:
    """Carry ``connection`` over a socket until it is closed."""
    carrier = TcpCarrier(connection, duplex)
    connection.start(carrier)
    await carrier.run()


def begin_over_stream(connection: Connection, stream: MuxedStream) -> None:
    """Carry ``connection`` inside ``stream`` from now on."""
    carrier = StreamCarrier(connection, stream)
    connection.start(carrier)
    carrier.begin()


async def run_over_duplex(connection: Connection, duplex: Duplex) -> None:
    """Carry ``connection`` over any byte stream (WebSocket) until it is closed."""
    carrier = DuplexCarrier(connection, duplex)
    connection.start(carrier)
    await carrier.run()


class DuplexCarrier:
    """Moves a connection over any byte stream with one reader and one writer task."""

    def __init__(self, connection: Connection, duplex: Duplex) -> None:
        self._connection = connection
        self._duplex = duplex
        self._wanted = trio.Event()
        self._scope = trio.CancelScope()

    def wake(self) -> None:
        self._wanted.set()

    def flush(self) -> None:
        self.wake()

    def abort(self) -> None:
        self._scope.cancel()

    async def run(self) -> None:
        """Run until the connection is closed."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    await self._read()
                    nursery.cancel_scope.cancel()
        finally:
            self._connection.ended("")
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                await self._duplex.aclose()

    async def _read(self) -> None:
        connection = self._connection
        rest = b""
        while not connection.closed.is_set():
            try:
                data = await self._duplex.receive_some(RECEIVE_BYTES)
            except (LinkError, WireError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                connection.ended(f"the connection broke: {error}")
                return
            if not data:
                return
            if rest:
                data = rest + data
            used = connection.feed(memoryview(data))
            rest = bytes(data[used:])

    async def _write(self) -> None:
        connection = self._connection
        room = memoryview(bytearray(65537))
        while not connection.closed.is_set():
            size = connection.pull(room)
            if not size:
                connection.drained()
                await self._wanted.wait()
                self._wanted = trio.Event()
                continue
            try:
                await self._duplex.send_all(bytes(room[:size]))
            except (LinkError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                connection.ended(f"the connection broke: {error}")
                return
