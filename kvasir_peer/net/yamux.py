"""Yamux: many streams on one encrypted connection, without a task or a lock of its own.

The multiplexer is pure: plaintext comes in through :meth:`Yamux.feed`, and the carrier takes plaintext out through
:meth:`Yamux.pull` when the socket has room. Because frames are cut at the last moment, what is sent next is always
the most urgent (control, decode, prefill, weights), and a write that is cancelled has either queued all its bytes
or none.

Wire format (https://github.com/hashicorp/yamux/blob/master/spec.md): a header of 12 bytes, big-endian:
version 0 (1), type (1), flags (2), stream id (4), length (4). Windows start at 256 KiB, as the specification has it.
They are enforced: who sends past one loses the connection. A window grows, up to ``MAX_WINDOW_BYTES``, while much of
it (``GROW_ABOVE``) arrives within a round trip: it is then what limits the rate, and about doubles every round trip.
Once the line is the limit it stays between two and three round trips' worth; more would only lengthen queues on the
way.
On a round trip under a millisecond it stops at ``SHORT_WINDOW_BYTES``: more would only make small messages wait behind
large ones.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import trio

from kvasir_peer.errors import LinkError, WireError
from kvasir_peer.net.duplex import Waiter

PROTOCOL = "/yamux/1.0.0"

HEADER = struct.Struct(">BBHII")
HEADER_BYTES = 12

DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8

GO_AWAY_NORMAL, GO_AWAY_PROTOCOL_ERROR, GO_AWAY_INTERNAL_ERROR = range(3)

INITIAL_WINDOW_BYTES = 256 * 1024  # fixed by the specification
MAX_WINDOW_BYTES = 16 * 1024 * 1024  # what one stream may have in flight: 400 MB/s at 40 ms
GRANT_PART = 4  # of the window is taken before the other side is told: 12 bytes for every 64 KiB at least
#: Part of a window that arrives within a round trip where it is what limits the rate. Not more than half: bulk leaves a
#: quarter of a new window free, and what has come since the last grant (up to a quarter) is not granted yet.
GROW_ABOVE = 0.4
SETTLED_ROUND_TRIPS = 3  # measured before a window grows
SHORT_ROUND_TRIP = 0.001  # s: loopback, a fast local network
SHORT_WINDOW_BYTES = (
    512 * 1024
)  # there; 256 KiB makes both ends wait for each other, and more lengthens waits

#: Send window that bulk leaves free on a classed stream, so that a decode message need not wait for a grant.
RESERVE_BYTES = 64 * 1024
#: Bulk on its way on a stream while decode messages use the connection too, and for a while after the last one: on a
#: short line a message waits behind it not on the wire but at the other side, which decrypts in order.
BESIDE_URGENT_BYTES = 128 * 1024
URGENT_S = 0.25  # longer than the time between two tokens
STALE_S = 1.0  # without a grant, after which bulk is held back by nothing but the window

MAX_INBOUND_STREAMS = 1024  # opened by the other side and not yet closed, per connection
#: Streams that the other side may open in one go, and in a second after that. Opening and resetting at once passes any
#: bound of open streams, and each costs a task here.
STREAMS_AT_ONCE = 2048
STREAMS_PER_SECOND = 1000.0
MAX_BUFFERED_BYTES = 64 * 1024 * 1024  # received and not yet taken, over all streams of a connection
MAX_CONTROL_BYTES = 256 * 1024  # pongs, resets and acknowledgements waiting for a peer that does not read
SEND_QUEUE_BYTES = 256 * 1024  # bytes a stream holds for sending before a writer has to wait
USEFUL_ROOM_BYTES = 512  # a data frame is not begun in less room than this, unless it is all there is to send
#: Received pieces under this size are put together while nobody takes them: each by itself would cost a list's entry
#: and keep the whole encrypted message that it came in.
SMALL_PIECE_BYTES = 512
LINGER_S = 60.0  # how long a closed stream waits for the other side's end before it is reset


class Priority(IntEnum):
    """What goes first on a connection."""

    CONTROL = 0
    DECODE = 1
    PREFILL = 2
    WEIGHTS = 3


CLASSES = len(Priority)
_URGENT, _BULK = int(Priority.DECODE), int(Priority.PREFILL)


class Source(Protocol):
    """Where a stream gets its bytes from at the moment they can be sent."""

    def urgency(self) -> int | None:
        """The class of the most urgent bytes ready, or None when there are none."""

    def pull(self, room: memoryview) -> int:
        """Write bytes into ``room`` and say how many; 0 when it is too small to be of use."""


@dataclass(frozen=True)
class StreamStatistics:
    """What passed one stream.

    Attributes:
        bytes_sent, bytes_received: payload.
        bytes_queued: waiting to be sent.
        bytes_buffered: received and not yet taken.
        send_window: bytes that may be sent before the next grant.
        receive_window: bytes that the other side may have in flight at most.
    """

    bytes_sent: int
    bytes_received: int
    bytes_queued: int
    bytes_buffered: int
    send_window: int
    receive_window: int


class MuxedStream:
    """One stream of a connection: bytes in order, both ways (the methods of ``trio.abc.Stream``).

    Attributes:
        id: the stream's number on its connection.
        mux: the multiplexer it belongs to.
        protocol: what was agreed on for it.
        priority: class of what is written with :meth:`send_all`.
        inbound: whether the other side opened it.
        connection: the connection it belongs to, for inbound streams.
        handed_over: set by a handler whose stream lives on after it returns.
    """

    def __init__(self, mux: Yamux, stream_id: int, inbound: bool) -> None:
        self.mux = mux
        self.id = stream_id
        self.inbound = inbound
        self.protocol = ""
        self.priority = Priority.CONTROL
        self.connection: object = None
        self.handed_over = False
        self.send_window = INITIAL_WINDOW_BYTES
        self.receive_window = INITIAL_WINDOW_BYTES  # what the other side may still send
        self.target_window = INITIAL_WINDOW_BYTES
        self._outstanding = 0  # sent, and not granted again
        self._last_grant = 0
        self._granted_at = 0.0
        self._ungranted = 0
        self._epoch_bytes = 0
        self._epoch_start: float | None = None
        self._chunks: deque[memoryview] = deque()
        self._small = bytearray()  # what came after the chunks, in small pieces
        self._buffered = 0
        self._out: deque[memoryview] = deque()
        self._out_bytes = 0
        self._readers = Waiter()
        self._writers = Waiter()
        self._sink: Callable[[memoryview], None] | None = None
        self._on_end: Callable[[str], None] | None = None
        self._source: Source | None = None
        self._classed = False
        self._queued_class: int | None = None
        self._queues = 0  # bit c is set while the stream has an entry in the queue of class c
        self._fin_wanted = False
        self._fin_sent = False
        self._fin_received = False
        self._abandoned = False  # closed here: what still comes is dropped
        self.abandoned_at = 0.0
        self._error: str | None = None
        self._bytes_sent = 0
        self._bytes_received = 0

    # --- reading ---------------------------------------------------------------------------------------------

    @property
    def remote_peer(self) -> str:
        """Peer id of the other side of the connection."""
        return self.mux.remote_peer

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._error is not None or self._fin_wanted or self._abandoned

    @property
    def ended(self) -> bool:
        """Whether nothing will come any more (what came before may still wait to be read)."""
        return self._error is not None or self._fin_received

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """The next bytes, at most ``max_bytes``; empty at the end. Raises LinkError when the stream was lost."""
        data = await self.receive_view(max_bytes)
        return bytes(data)

    async def receive_view(self, max_bytes: int | None = None) -> memoryview:
        """As :meth:`receive_some`, without a copy."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._chunks and not self._join_small():
            if self._error is not None:
                raise LinkError(self._error, peer=self.remote_peer)
            if self._fin_received:
                return memoryview(b"")
            if self._abandoned:
                raise LinkError("the stream is closed", peer=self.remote_peer)
            await self._readers.park()
        chunk = self._chunks[0]
        if max_bytes is not None and len(chunk) > max_bytes:
            self._chunks[0] = chunk[max_bytes:]
            chunk = chunk[:max_bytes]
        else:
            self._chunks.popleft()
        self._taken(len(chunk))
        return chunk

    def _join_small(self) -> bool:
        """Make a chunk of the small pieces; whether there were any."""
        if not self._small:
            return False
        self._chunks.append(memoryview(bytes(self._small)))
        self._small.clear()
        return True

    def _taken(self, count: int) -> None:
        self._buffered -= count
        self.mux.buffered_bytes -= count
        self.consumed(count)

    def set_sink(self, sink: Callable[[memoryview], None], on_end: Callable[[str], None]) -> None:
        """Hand bytes to ``sink`` as they arrive, in the reader's own task; it must call :meth:`consumed`.

        ``on_end`` gets "" at a proper end of what comes, and the reason when the stream is lost, also after that (what
        we still send goes nowhere then). What has come already is handed over at once. A KvasirError from ``sink``
        resets the stream.
        """
        self._sink, self._on_end = sink, on_end
        while self._chunks or self._join_small():
            chunk = self._chunks.popleft()
            self._buffered -= len(chunk)
            self.mux.buffered_bytes -= len(chunk)
            if self._error is None:
                self._to_sink(chunk)
        if self._error is not None:
            self._on_end = None
            on_end(self._error)
        elif self._fin_received:
            on_end("")

    def pause(self) -> None:
        """Keep what comes, within the window, and how it ends, until :meth:`set_sink` is called again."""
        self._sink = self._on_end = None

    def abandon(self) -> None:
        """Close without another word to sink and source."""
        self._sink = self._on_end = self._source = None
        self.close()

    def _to_sink(self, data: memoryview) -> None:
        assert self._sink is not None
        try:
            self._sink(data)
        except (WireError, LinkError) as error:
            self.mux.violation(error)
            self.reset(str(error))

    def consumed(self, count: int) -> None:
        """``count`` bytes were taken: the other side may send as many again, and is told in large steps."""
        self._ungranted += count
        if (
            self._ungranted * GRANT_PART >= self.target_window
            and not self._fin_received
            and self._error is None
        ):
            self.grant()

    def grant(self) -> None:
        """Tell the other side about all room there is."""
        grant = self._ungranted + self._grow()
        if grant > 0:
            self._ungranted = 0
            self.receive_window += grant
            self.mux.queue_control(WINDOW_UPDATE, 0, self.id, grant)

    def _grow(self) -> int:
        """Bytes by which the window grows now."""
        now = trio.current_time()
        start = self._epoch_start
        round_trip = self.mux.min_round_trip
        if start is None or round_trip is None:
            self._epoch_start, self._epoch_bytes = now, 0
            return 0
        elapsed = now - start
        limit = self.mux.max_window
        if round_trip < SHORT_ROUND_TRIP:
            round_trip, limit = SHORT_ROUND_TRIP, SHORT_WINDOW_BYTES
        if elapsed < round_trip:
            return 0  # a rate over less than a round trip is that of a burst
        in_a_round_trip = self._epoch_bytes / elapsed * round_trip
        self._epoch_start, self._epoch_bytes = now, 0
        if in_a_round_trip <= GROW_ABOVE * self.target_window:
            return 0
        if self.mux.round_trips_seen < SETTLED_ROUND_TRIPS:
            self.mux.ping(now)  # one slow ping of a busy machine must not pass for a long line
            return 0
        wanted = min(2 * self.target_window, int(3 * in_a_round_trip), limit)
        more = max(min(wanted - self.target_window, self.mux.window_budget), 0)
        self.mux.window_budget -= more
        self.target_window += more
        return more

    # --- writing ---------------------------------------------------------------------------------------------

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Queue ``data`` (kept by reference: it must not change) once there is room in the queue.

        Cancelling it queues nothing. Raises LinkError when the stream is closed.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._out_bytes >= SEND_QUEUE_BYTES and not self.closed:
            await self._writers.park()
        self.send_nowait(data)

    def send_nowait(self, data: bytes | bytearray | memoryview) -> None:
        """Queue ``data`` whatever the queue holds. Raises LinkError when the stream is closed."""
        if self._error is not None:
            raise LinkError(self._error, peer=self.remote_peer)
        if self._fin_wanted or self._abandoned:
            raise LinkError("the stream is closed", peer=self.remote_peer)
        if len(data):
            self._out.append(memoryview(data).cast("B"))
            self._out_bytes += len(self._out[-1])
            self.mux.ready(self)

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until the queue has room."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._out_bytes >= SEND_QUEUE_BYTES and not self.closed:
            await self._writers.park()

    def set_source(self, source: Source, *, classed: bool) -> None:
        """Take what is to be sent from ``source``; call :meth:`notify` when it has something.

        Args:
            classed: leave ``RESERVE_BYTES`` of the window free when only bulk is ready.
        """
        self._source, self._classed = source, classed

    def notify(self) -> None:
        """The source has something to send."""
        self.mux.ready(self)

    def urgency(self) -> int | None:
        """Class of what can be sent now within the window, or None."""
        if self._error is not None:
            return None
        if self._out_bytes:
            return int(self.priority) if self.send_window > 0 else None
        if self._source is None:
            return None
        urgency = self._source.urgency()
        if urgency is None:
            return None
        allowed = self._bulk_window() if self._classed and urgency >= _BULK else self.send_window
        return urgency if allowed > 0 else None

    def _bulk_window(self) -> int:
        """What bulk may take of the window."""
        allowed = self.send_window - RESERVE_BYTES
        if self._last_grant and self.mux.beside_urgent:
            # More than the other side's step between grants, or it would wait for bytes and we for a grant.
            most = max(BESIDE_URGENT_BYTES, self._last_grant * 3 // 2)
            allowed = min(allowed, most - self._outstanding)
        return allowed

    def granted(self, count: int) -> None:
        """The other side may take ``count`` bytes more."""
        self.send_window += count
        self._last_grant = count
        self._granted_at = trio.current_time()
        # Without what its window has grown by, which is not known: so it is a little less than what is on its way.
        self._outstanding = max(self._outstanding - count, 0)

    def look_anew(self, now: float) -> None:
        """Forget what is on its way where no grant has come for long: another muxer may grant in a way of its own."""
        if self._outstanding and now - self._granted_at > STALE_S:
            self._outstanding = 0
            self.mux.ready(self)

    def pull(self, room: memoryview, urgency: int) -> int:
        """Write payload into ``room``; returns its size, 0 when the room is of no use."""
        bulk = self._classed and urgency >= _BULK and not self._out_bytes
        limit = min(len(room), self._bulk_window() if bulk else self.send_window)
        if self._out_bytes:
            if limit < USEFUL_ROOM_BYTES and limit < self._out_bytes:
                return 0
            count = 0
            while self._out and count < limit:
                data = self._out[0]
                step = min(len(data), limit - count)
                room[count : count + step] = data[:step]
                count += step
                if step == len(data):
                    self._out.popleft()
                else:
                    self._out[0] = data[step:]
            before = self._out_bytes
            self._out_bytes -= count
            if before >= SEND_QUEUE_BYTES > self._out_bytes:
                self._writers.unpark_all()
        else:
            assert self._source is not None
            count = self._source.pull(room[:limit]) if limit > 0 else 0
        self.send_window -= count
        self._outstanding += count
        self._bytes_sent += count
        return count

    def finish(self) -> None:
        """Send no more after what is queued: the other side sees the end."""
        if not self._fin_wanted and self._error is None:
            self._fin_wanted = True
            self._writers.unpark_all()
            self.finish_if_drained()

    def finish_if_drained(self) -> None:
        """Send the end once nothing is left in the queue or the source."""
        if not self._fin_wanted or self._fin_sent or self._out_bytes:
            return
        if self._source is not None and self._source.urgency() is not None:
            return
        self._fin_sent = True
        self.mux.queue_control(WINDOW_UPDATE, FIN, self.id, 0)
        self.mux.forget_if_done(self)

    async def send_eof(self) -> None:
        """As :meth:`finish`, with trio's name."""
        self.finish()
        await trio.lowlevel.checkpoint()

    # --- ends ------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Send what is queued and the end, and drop what still comes."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """As :meth:`aclose`, at once."""
        self.finish()
        if not self._abandoned:
            self._abandoned = True
            self.abandoned_at = trio.current_time()
            self._drop_received()
            self._readers.unpark_all()
            self.mux.forget_if_done(self)

    def _drop_received(self) -> None:
        self.mux.buffered_bytes -= self._buffered
        self._buffered = 0
        self._chunks.clear()
        self._small.clear()

    def reset(self, reason: str = "reset here") -> None:
        """End both directions at once; what is queued is dropped."""
        if self._error is None:
            if not (self._fin_sent and self._fin_received):
                self.mux.queue_control(WINDOW_UPDATE, RST, self.id, 0)
            self.mux.forget(self)
            self.lost(reason)

    def lost(self, reason: str) -> None:
        """The other side reset the stream, or the connection is gone."""
        if self._error is not None:
            return
        self._error = reason
        self._out.clear()
        self._out_bytes = 0
        if self._abandoned:
            self._drop_received()
        self._readers.unpark_all()
        self._writers.unpark_all()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(reason)

    # --- called by the multiplexer ---------------------------------------------------------------------------

    def data_received(self, data: memoryview) -> None:
        """Payload came; its frame was already checked against the window."""
        count = len(data)
        self._bytes_received += count
        self._epoch_bytes += count
        if self._error is not None:
            return
        if self._sink is not None:
            self._to_sink(data)
        elif self._abandoned:
            self.reset("closed here")
        else:
            if count < SMALL_PIECE_BYTES or 2 * count < len(data.obj):  # type: ignore[arg-type]
                self._small += data
            else:
                self._join_small()
                self._chunks.append(data)
            self._buffered += count
            self.mux.buffered_bytes += count
            self._readers.unpark()

    def fin_received(self) -> None:
        """The other side sends no more."""
        if self._fin_received or self._error is not None:
            return
        self._fin_received = True
        self._readers.unpark_all()
        self.mux.forget_if_done(self)
        if self._on_end is not None:
            self._on_end("")

    @property
    def done(self) -> bool:
        """Whether both sides have ended and the number can be forgotten."""
        return self._fin_sent and self._fin_received

    @property
    def lingering(self) -> bool:
        """Whether it was closed here and the other side's end has not come."""
        return self._abandoned and not self._fin_received

    def statistics(self) -> StreamStatistics:
        """A snapshot."""
        return StreamStatistics(
            self._bytes_sent,
            self._bytes_received,
            self._out_bytes,
            self._buffered,
            self.send_window,
            self.target_window,
        )


class Yamux:
    """The streams of one connection.

    Args:
        remote_peer: peer id of the other side, for messages.
        initiator: whether we dialled (odd stream numbers).
        on_stream: called for each stream the other side opens.
        on_writable: called when there is something to pull.
        max_inbound_streams: streams the other side may have open; more are reset.
        max_window: bytes a receive window may grow to.

    Attributes:
        min_round_trip: smallest round trip seen, seconds, or None.
        round_trips_seen: how many were measured.
        buffered_bytes: received and not yet taken, over all streams.
        window_budget: bytes by which windows may still grow, over all streams.
        violations: count of protocol breaks by reason code.
        exhausted: whether the last pull took all there was to send.
    """

    def __init__(
        self,
        *,
        remote_peer: str,
        initiator: bool,
        on_stream: Callable[[MuxedStream], None],
        on_writable: Callable[[], None],
        max_inbound_streams: int = MAX_INBOUND_STREAMS,
        max_window: int = MAX_WINDOW_BYTES,
    ) -> None:
        self.remote_peer = remote_peer
        self.streams: dict[int, MuxedStream] = {}
        self.max_window = max_window
        self.window_budget = 2 * MAX_WINDOW_BYTES
        self.min_round_trip: float | None = None
        self.round_trips_seen = 0
        self.buffered_bytes = 0
        self.violations: dict[str, int] = {}
        self._on_stream = on_stream
        self._on_writable = on_writable
        self._max_inbound = max_inbound_streams
        self._inbound = 0
        self._may_open = float(STREAMS_AT_ONCE)
        self._may_open_at = 0.0
        self._next_id = 1 if initiator else 2
        self._remote_parity = 0 if initiator else 1
        self._last_remote_id = 0
        self._control: deque[bytes] = deque()
        self._control_bytes = 0
        self._ready: tuple[deque[MuxedStream], ...] = tuple(deque() for _ in range(CLASSES))
        self._head = bytearray()
        self._body = 0  # bytes of the current data frame still to come
        self._body_stream: MuxedStream | None = None
        self._body_flags = 0
        self._ping_value = 0
        self._ping_sent: float | None = None
        self._going_away = False
        self._urgent_at = float("-inf")  # when a decode message was last sent
        self.exhausted = False
        self._lost: str | None = None
        self.on_round_trip: Callable[[float], None] | None = None
        self.on_broken: Callable[[str], None] | None = None  # a muxer with tasks of its own has failed

    # --- streams ---------------------------------------------------------------------------------------------

    def open(self) -> MuxedStream:
        """A new stream; nothing is waited for. Raises LinkError when the connection takes no more."""
        if self._lost is not None or self._going_away:
            raise LinkError(self._lost or "the other side is closing the connection", peer=self.remote_peer)
        stream = MuxedStream(self, self._next_id, inbound=False)
        self._next_id += 2
        self.streams[stream.id] = stream
        self.queue_control(WINDOW_UPDATE, SYN, stream.id, 0)
        return stream

    def forget(self, stream: MuxedStream) -> None:
        """Free the number of a stream that has ended."""
        if self.streams.pop(stream.id, None) is not None:
            self.window_budget += stream.target_window - INITIAL_WINDOW_BYTES
            if stream.inbound:
                self._inbound -= 1

    def forget_if_done(self, stream: MuxedStream) -> None:
        """Free the number once both sides have ended."""
        if stream.done:
            self.forget(stream)

    def sweep(self, now: float) -> None:
        """Reset streams that were closed here long ago and whose other end never came."""
        for stream in [s for s in self.streams.values() if s.lingering and now - s.abandoned_at > LINGER_S]:
            stream.reset("closed here")
        for stream in list(self.streams.values()):
            stream.look_anew(now)

    def lose(self, reason: str) -> None:
        """The connection is gone: every stream ends with ``reason``."""
        if self._lost is None:
            self._lost = reason
            streams = list(self.streams.values())
            self.streams.clear()
            for stream in streams:
                stream.lost(reason)

    @property
    def going_away(self) -> bool:
        """Whether the other side takes no more streams, because it is about to close."""
        return self._going_away

    @property
    def lost(self) -> bool:
        """Whether the connection is gone."""
        return self._lost is not None

    def violation(self, error: Exception) -> None:
        """Count a break of the protocol by the other side."""
        code = error.code if isinstance(error, WireError) else type(error).__name__
        self.violations[code] = self.violations.get(code, 0) + 1

    # --- sending ---------------------------------------------------------------------------------------------

    def queue_control(self, kind: int, flags: int, stream_id: int, value: int) -> None:
        """Queue a frame without payload; it goes out before any data."""
        if self._lost is not None:
            return
        self._control.append(HEADER.pack(0, kind, flags, stream_id, value))
        self._control_bytes += HEADER_BYTES
        self.exhausted = False
        self._on_writable()

    def ready(self, stream: MuxedStream) -> None:
        """``stream`` may have something to send."""
        urgency = stream.urgency()
        if urgency is None:
            return
        queued = stream._queued_class
        if queued is None or urgency < queued:
            stream._queued_class = urgency
            self._enqueue(stream, urgency)
            self.exhausted = False
            self._on_writable()

    def _enqueue(self, stream: MuxedStream, urgency: int) -> None:
        # At most one entry for each class, else a stream that changes class often would get more turns.
        if not stream._queues >> urgency & 1:
            stream._queues |= 1 << urgency
            self._ready[urgency].append(stream)

    def urgency(self) -> int | None:
        """Class of what would be sent next, or None when there is nothing."""
        if self._control:
            return int(Priority.CONTROL)
        for urgency in range(CLASSES):
            queue = self._ready[urgency]
            while queue:
                if queue[0]._queued_class == urgency and queue[0].urgency() is not None:
                    return urgency
                stream = queue.popleft()
                stream._queues &= ~(1 << urgency)
                if stream._queued_class == urgency:
                    stream._queued_class = None
        return None

    def pull(self, room: memoryview) -> int:
        """Write whole frames into ``room``, the most urgent first; returns the bytes written."""
        filled = 0
        size = len(room)
        self.exhausted = False
        while self._control and size - filled >= HEADER_BYTES:
            room[filled : filled + HEADER_BYTES] = self._control.popleft()
            filled += HEADER_BYTES
            self._control_bytes -= HEADER_BYTES
        if self._control:
            return filled
        while size - filled > HEADER_BYTES:
            stream = self._next_stream()
            if stream is None:
                self.exhausted = not self._control
                break
            urgency = stream._queued_class
            assert urgency is not None
            count = stream.pull(room[filled + HEADER_BYTES :], urgency)
            if count == 0:
                if filled == 0:
                    # The window, not the message, is what is too small: wait for a grant.
                    stream._queued_class = None
                    continue
                # Not enough room left in this message: the stream keeps its place for the next one.
                stream._queues |= 1 << urgency
                self._ready[urgency].appendleft(stream)
                break
            if urgency == _URGENT:
                self._urgent_at = trio.current_time()
            HEADER.pack_into(room, filled, 0, DATA, 0, stream.id, count)
            filled += HEADER_BYTES + count
            stream._queued_class = None
            self.ready(stream)
            if stream._queued_class is None:
                stream.finish_if_drained()
        return filled

    def _next_stream(self) -> MuxedStream | None:
        """Take the next stream that can send off its queue; its ``_queued_class`` is its true class."""
        for urgency in range(CLASSES):
            queue = self._ready[urgency]
            while queue:
                stream = queue.popleft()
                stream._queues &= ~(1 << urgency)
                if stream._queued_class != urgency:
                    continue  # moved to another class, or sent from there already
                now = stream.urgency()
                if now is None:
                    stream._queued_class = None
                elif now > urgency:
                    stream._queued_class = now
                    self._enqueue(stream, now)
                else:
                    return stream
        return None

    @property
    def beside_urgent(self) -> bool:
        """Whether bulk shares a short line with decode messages, which it must not keep waiting at the other side."""
        return (
            self.min_round_trip is not None
            and self.min_round_trip < SHORT_ROUND_TRIP
            and trio.current_time() - self._urgent_at < URGENT_S
        )

    def ping(self, now: float) -> None:
        """Measure the round trip, unless a measurement is under way."""
        if self._ping_sent is None:
            self._ping_value = (self._ping_value + 1) & 0xFFFFFFFF
            self._ping_sent = now
            self.queue_control(PING, SYN, 0, self._ping_value)

    @property
    def ping_since(self) -> float | None:
        """When the ping was sent whose answer is still missing."""
        return self._ping_sent

    def go_away(self, code: int = GO_AWAY_NORMAL) -> None:
        """Tell the other side that no more streams are taken."""
        self.queue_control(GO_AWAY, 0, 0, code)

    # --- receiving -------------------------------------------------------------------------------------------

    def feed(self, data: memoryview) -> None:
        """Take plaintext as it comes. Raises WireError when the connection has to be closed."""
        position, size = 0, len(data)
        while position < size:
            if self._body:
                step = min(self._body, size - position)
                self._body -= step
                stream = self._body_stream
                if stream is not None:
                    stream.data_received(data[position : position + step])
                    if not self._body:
                        self._body_stream = None
                        if self._body_flags:
                            self._flags(stream, self._body_flags)
                position += step
                continue
            if self._head or size - position < HEADER_BYTES:
                step = min(HEADER_BYTES - len(self._head), size - position)
                self._head += data[position : position + step]
                position += step
                if len(self._head) < HEADER_BYTES:
                    return
                version, kind, flags, stream_id, length = HEADER.unpack(self._head)
                self._head.clear()
            else:
                version, kind, flags, stream_id, length = HEADER.unpack_from(data, position)
                position += HEADER_BYTES
            if version != 0:
                raise WireError("malformed", f"a Yamux frame has version {version} instead of 0")
            if kind == DATA:
                self._data_frame(flags, stream_id, length)
            elif kind == WINDOW_UPDATE:
                self._window_frame(flags, stream_id, length)
            elif kind == PING:
                self._ping_frame(flags, length)
            elif kind == GO_AWAY:
                self._going_away = True
                if length != GO_AWAY_NORMAL:
                    raise WireError("closed", f"the other side closed the connection with code {length}")
            else:
                raise WireError("malformed", f"a Yamux frame has the unknown type {kind}")
            if self.buffered_bytes > MAX_BUFFERED_BYTES:
                raise WireError("oversize", f"over {MAX_BUFFERED_BYTES} bytes wait unread on one connection")
            if self._control_bytes > MAX_CONTROL_BYTES:
                raise WireError("flood", "the other side asks for answers and does not read them")

    def _data_frame(self, flags: int, stream_id: int, length: int) -> None:
        stream = self._stream_of(flags, stream_id)
        if stream is not None:
            if length > stream.receive_window:
                raise WireError(
                    "window",
                    f"{length} bytes were sent on a stream with {stream.receive_window} bytes of window left",
                )
            stream.receive_window -= length
        elif length > MAX_WINDOW_BYTES:
            raise WireError("oversize", f"a Yamux frame of {length} bytes belongs to no stream")
        flags &= FIN | RST
        if length:
            self._body, self._body_stream, self._body_flags = length, stream, flags
        elif stream is not None and flags:
            self._flags(stream, flags)

    def _window_frame(self, flags: int, stream_id: int, length: int) -> None:
        stream = self._stream_of(flags, stream_id)
        if stream is None:
            return
        if length:
            stream.granted(length)
            if stream.send_window > 0xFFFFFFFF:
                raise WireError("window", "a send window passed 4 GiB")
            self.ready(stream)
        if flags & (FIN | RST):
            self._flags(stream, flags)

    def _flags(self, stream: MuxedStream, flags: int) -> None:
        if flags & RST:
            self.forget(stream)
            stream.lost("the other side reset the stream")
        elif flags & FIN:
            stream.fin_received()

    def _stream_of(self, flags: int, stream_id: int) -> MuxedStream | None:
        """The stream of a frame, made if the frame opens one; None when it is to be ignored."""
        stream = self.streams.get(stream_id)
        if not flags & SYN:
            if stream is None and (
                stream_id == 0
                or (stream_id & 1 == self._remote_parity and stream_id > self._last_remote_id)
                or (stream_id & 1 != self._remote_parity and stream_id >= self._next_id)
            ):
                raise WireError(
                    "unexpected", f"a frame belongs to stream {stream_id}, which was never opened"
                )
            return stream
        if stream_id == 0 or stream_id & 1 != self._remote_parity or stream_id <= self._last_remote_id:
            raise WireError("unexpected", f"the other side opened stream {stream_id} out of turn")
        self._last_remote_id = stream_id
        if self._inbound >= self._max_inbound:
            self.violations["streams"] = self.violations.get("streams", 0) + 1
            self.queue_control(WINDOW_UPDATE, RST, stream_id, 0)
            return None
        self._count_opened()
        stream = MuxedStream(self, stream_id, inbound=True)
        self.streams[stream_id] = stream
        self._inbound += 1
        self.queue_control(WINDOW_UPDATE, ACK, stream_id, 0)
        self._on_stream(stream)
        return stream

    def _count_opened(self) -> None:
        """Count a stream that the other side opens. Raises WireError when it opens them without end."""
        now = trio.current_time()
        gained = (now - self._may_open_at) * STREAMS_PER_SECOND
        self._may_open_at = now
        self._may_open = min(self._may_open + gained, float(STREAMS_AT_ONCE)) - 1
        if self._may_open < 0:
            raise WireError("flood", f"over {STREAMS_PER_SECOND:.0f} streams a second were opened")

    def _ping_frame(self, flags: int, value: int) -> None:
        if flags & SYN:
            self.queue_control(PING, ACK, 0, value)
        elif flags & ACK and self._ping_sent is not None and value == self._ping_value:
            round_trip = trio.current_time() - self._ping_sent
            self._ping_sent = None
            self.round_trips_seen += 1
            if self.min_round_trip is None or round_trip < self.min_round_trip:
                self.min_round_trip = round_trip
            if self.on_round_trip is not None:
                self.on_round_trip(round_trip)
