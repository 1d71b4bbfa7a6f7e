"""Links: whole frames between two peers, over one long-lived stream at a time.

Frames are cut into pieces when they are sent (``framing.py``), so that a decode step never waits for more than a piece
of a prefill. Frames of one priority arrive in the order they were sent; those of a more urgent one may overtake.

A link can move from one stream to another, of another connection (a circuit, a direct connection, a circuit again),
without losing or repeating a frame. Both sides count the frames that arrived whole. The side that opened the link opens
the new stream, takes no more from the old one, and says ``RESUME`` with its count; the other does the same and answers
``RESUMED`` with its own; each begins again with the first frame that the other has not counted. For that, frames are
kept until they are acknowledged. A link moves only if both sides said that they can.
"""

from __future__ import annotations

import secrets
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import trio

from kvasir_peer.errors import LinkError, WireError
from kvasir_peer.net.duplex import Waiter, receive_exactly
from kvasir_peer.net.framing import (
    HEAD,
    HEAD_BYTES,
    LENGTH_MASK,
    MAX_FRAME_BYTES,
    MAX_OWN_BYTES,
    OWN,
    Assembler,
    OutgoingFrame,
    own_piece,
)
from kvasir_peer.net.yamux import CLASSES, Priority

if TYPE_CHECKING:
    from kvasir_peer.net.connection import Connection
    from kvasir_peer.net.yamux import MuxedStream

__all__ = ["Buffer", "Link", "LinkStatistics", "Priority"]

Buffer = bytes | bytearray | memoryview

DEFAULT_MAX_FRAME_BYTES = 16 * 1024 * 1024
QUEUED_BYTES = 256 * 1024  # of one priority waiting to be sent before a sender has to wait
#: Frames received and not yet taken hold back the window of the other side beyond this many bytes.
UNREAD_BYTES = 1024 * 1024
#: What a frame costs beside its bytes where it waits; small and empty ones count by it.
FRAME_COST_BYTES = 256
#: Frames received and not yet taken at most: what comes within a window may still be many small ones.
UNREAD_FRAMES = 65536

ACKNOWLEDGE_BYTES = 128 * 1024  # received before they are acknowledged; the rest within a second
ACKNOWLEDGE_FRAMES = 64
#: Sent and not yet acknowledged at most: what a line of 400 MB/s and 40 ms holds. A larger frame goes alone.
KEPT_BYTES = 16 * 1024 * 1024


class Own(IntEnum):
    """Messages of the link itself: the first byte of their payload. Counts are of frames, 8 bytes, big-endian."""

    HELLO = 1  # | version (1) | link id (16) | flags (1): first on a stream, from the side that opened it
    REFUSED = 2  # | reason (UTF-8): the only message of a side that does not want the link
    WELCOME = 3  # | flags (1): the answer to a HELLO with flags
    RESUME = 4  # | link id (16) | count: in place of HELLO, on a stream that the link moves to
    RESUMED = 5  # | count: the answer
    ACKNOWLEDGE = 6  # | count


LINK_VERSION = 1
LINK_ID_BYTES = 16
MOVES = 1  # flag: this side can move the link

_COUNT = struct.Struct(">Q")


@dataclass(frozen=True)
class LinkStatistics:
    """State of one link.

    Attributes:
        peer: peer id of the other side.
        protocol: protocol of the link.
        path: ``relayed``, ``direct`` or ``memory``.
        frames_sent, frames_received, bytes_sent, bytes_received: whole frames and their payload.
        bytes_queued: waiting to be sent.
        frames_unread: received and not yet taken.
        round_trip_p50, round_trip_p95: seconds, of the connection's heartbeats; None before the first.
        goodput: bytes a second, both ways, over the last ten seconds or less.
        path_changed_at: when the path last changed, on trio's clock.
        path_changes: how often it has.
    """

    peer: str
    protocol: str
    path: str
    frames_sent: int
    frames_received: int
    bytes_sent: int
    bytes_received: int
    bytes_queued: int
    frames_unread: int
    round_trip_p50: float | None
    round_trip_p95: float | None
    goodput: float
    path_changed_at: float
    path_changes: int


class Link:
    """A framed duplex to one peer.

    Attributes:
        remote_peer: peer id of the other side.
        protocol: protocol of the link.
        link_id: 16 random bytes chosen by the side that opened the link.
        opened_here: whether that was us.
        settled: set once it is known whether both sides can move the link.
        on_closed: called once, when nothing can be sent any more.
        on_adrift: called with the reason when the connection below is lost and the link could move; who takes it on
            calls :meth:`move_to` or :meth:`fail`, and returns True.
    """

    def __init__(
        self,
        remote_peer: str,
        protocol: str,
        *,
        max_frame: int = DEFAULT_MAX_FRAME_BYTES,
        can_move: bool = False,
    ) -> None:
        self.remote_peer = remote_peer
        self.protocol = protocol
        self.link_id = b""
        self.opened_here = False
        self.settled = trio.Event()
        self.on_closed: Callable[[Link], None] | None = None
        self.on_adrift: Callable[[Link, str], bool] | None = None
        self._max_frame = max_frame
        self._stream: MuxedStream | None = None
        self._connection: Connection | None = None
        self._assembler = Assembler(max_frame, self._deliver, self._own_received)
        self._path = "memory"
        self._path_changed_at = trio.current_time()
        self._path_changes = 0
        self._moving = False
        self._adrift = False
        # Sending.
        self._can_move = can_move
        self._agreed = False  # both sides can move
        self._outgoing: tuple[deque[OutgoingFrame], ...] = tuple(deque() for _ in range(CLASSES))
        self._own: deque[bytes] = deque()
        self._queued = [0] * CLASSES
        self._senders = tuple(Waiter() for _ in range(CLASSES))
        self._kept: deque[OutgoingFrame] = deque()
        self._kept_bytes = 0
        self._frames_out = 0  # whole on the wire
        self._frames_acknowledged = 0
        # Receiving.
        self._incoming: tuple[deque[memoryview], ...] = tuple(deque() for _ in range(CLASSES))
        self._receivers = Waiter()
        self._unread = 0
        self._unread_bytes = 0
        self._withheld = 0
        self._frames_in = 0
        self._unacknowledged_frames = 0
        self._unacknowledged_bytes = 0
        self._acknowledge = False
        self._turn = 0
        # Ends.
        self._error: str | None = None
        self._closed = False
        self._end_received = False
        self._shut = False  # any of the three
        self._told = False
        self._sent = [0, 0]
        self._received_bytes = 0
        self._rate = _Rate()

    # --- for those who use it --------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """``relayed``, ``direct`` or ``memory``."""
        return self._path

    @property
    def max_frame(self) -> int:
        """Largest frame taken, bytes; may be changed at any time."""
        return self._max_frame

    @max_frame.setter
    def max_frame(self, size: int) -> None:
        self._max_frame = self._assembler.max_frame = size

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._shut

    async def send(self, frame: Buffer | Sequence[Buffer], priority: Priority = Priority.CONTROL) -> None:
        """Queue one frame; several buffers become one frame.

        Waits only until the queue of its priority has room, and then takes the frame whole: cancelling it leaves the
        link as it was. ``bytes`` are kept by reference, other buffers are copied. Raises LinkError once the link is
        closed, WireError (``oversize``) for a frame that no link carries.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        cls = int(priority)
        while self._queued[cls] >= QUEUED_BYTES and not self._shut:
            await self._senders[cls].park()
        if self._shut:
            raise LinkError(self._error or "the link is closed", peer=self.remote_peer)
        if isinstance(frame, bytes):
            views = [memoryview(frame)]
            size = len(frame)
        else:
            buffers = [frame] if isinstance(frame, bytearray | memoryview) else frame
            views = [memoryview(b if isinstance(b, bytes) else bytes(b)) for b in buffers if len(b)]
            size = sum(map(len, views))
        if size > MAX_FRAME_BYTES:
            raise WireError("oversize", f"a frame of {size} bytes is over 4 GiB")
        self._queued[cls] += size + HEAD_BYTES
        self._outgoing[cls].append(OutgoingFrame(cls, views, size))
        self._sent[0] += 1
        self._sent[1] += size
        if self._stream is not None:
            self._stream.notify()

    async def receive(self) -> memoryview:
        """The next frame, the most urgent first.

        Raises LinkError at the end of the link; frames that came before it are still given out.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._unread:
            if self._error is not None:
                raise LinkError(self._error, peer=self.remote_peer)
            if self._end_received or self._closed:
                raise LinkError("the link is closed", peer=self.remote_peer)
            await self._receivers.park()
        self._turn += 1
        if self._turn & 15 == 0:
            # Frames may come as fast as they are taken: other tasks must get their turn.
            await trio.lowlevel.cancel_shielded_checkpoint()
        for queue in self._incoming:
            if queue:
                frame = queue.popleft()
                break
        self._unread -= 1
        self._unread_bytes -= len(frame) + FRAME_COST_BYTES
        if self._withheld and self._unread_bytes < UNREAD_BYTES:
            withheld, self._withheld = self._withheld, 0
            if self._stream is not None:
                self._stream.consumed(withheld)
        return frame

    async def aclose(self) -> None:
        """Send what is queued, then the end. What still comes is dropped."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """As :meth:`aclose`, without waiting."""
        if not self._closed:
            self._closed = self._shut = True
            if self._stream is not None:
                self._stream.close()
            self._wake_all()
            self._over()

    def statistics(self) -> LinkStatistics:
        """A snapshot."""
        state = self._connection.statistics() if self._connection is not None else None
        return LinkStatistics(
            self.remote_peer,
            self.protocol,
            self._path,
            self._sent[0],
            self._frames_in,
            self._sent[1],
            self._received_bytes,
            sum(self._queued),
            self._unread,
            state.round_trip_p50 if state else None,
            state.round_trip_p95 if state else None,
            self._rate.per_second(trio.current_time(), self._sent[1] + self._received_bytes),
            self._path_changed_at,
            self._path_changes,
        )

    # --- for the node ----------------------------------------------------------------------------------------

    def begin(
        self, connection: Connection | None, stream: MuxedStream, *, hello: Hello | None = None
    ) -> None:
        """Run over ``stream`` from now on.

        Args:
            connection: that the stream belongs to; None in memory.
            hello: what the other side said; None when the link is opened here.
        """
        if hello is None:
            self.opened_here = True
            self.link_id = secrets.token_bytes(LINK_ID_BYTES)
            flags = MOVES if self._can_move else 0
            self._own.append(bytes([Own.HELLO, LINK_VERSION]) + self.link_id + bytes([flags]))
        else:
            self.link_id = hello.link_id
            self._agreed = self._can_move = self._can_move and bool(hello.flags & MOVES)
            if hello.flags:
                self._own.append(bytes([Own.WELCOME, MOVES if self._agreed else 0]))
            self.settled.set()
        self._run_over(connection, stream)

    def _run_over(self, connection: Connection | None, stream: MuxedStream) -> None:
        self._connection, self._stream = connection, stream
        if connection is not None:
            if self._path not in ("memory", connection.path):
                self._path_changes += 1
                self._path_changed_at = trio.current_time()
            self._path = connection.path
            connection.busy += 1
            connection.tickers.add(self._tick)
        stream.set_source(self, classed=True)
        stream.set_sink(self._receive_bytes, self._stream_ended)
        stream.notify()

    def fail(self, reason: str) -> None:
        """End the link at once, in both directions."""
        if self._error is None:
            self._error = reason
            self._shut = True
            for cls in range(CLASSES):
                self._outgoing[cls].clear()
                self._queued[cls] = 0
            self._kept.clear()
            self._kept_bytes = 0
            if self._stream is not None:
                self._stream.reset(reason)
            self._wake_all()
            self._over()

    def _over(self) -> None:
        """Nothing can be sent any more: whoever keeps account of the link is told, once."""
        if not self._told:
            self._told = True
            self.settled.set()
            self._leave_connection()
            if self.on_closed is not None:
                self.on_closed(self)

    def _leave_connection(self) -> None:
        connection = self._connection
        if connection is not None and self._tick in connection.tickers:
            connection.tickers.discard(self._tick)
            connection.busy -= 1

    def _wake_all(self) -> None:
        for lot in self._senders:
            lot.unpark_all()
        self._receivers.unpark_all()

    def _tick(self, now: float) -> None:
        self._rate.sample(now, self._sent[1] + self._received_bytes)
        if self._unacknowledged_frames and self._agreed:
            self._want_acknowledge()

    # --- moving ----------------------------------------------------------------------------------------------

    @property
    def movable(self) -> bool:
        """Whether the link lives, both sides can move it, and no move is under way."""
        return self._agreed and not self._moving and not self.closed

    def runs_over(self, connection: Connection) -> bool:
        """Whether that is the connection below, and the link lives."""
        return self._connection is connection and not self.closed

    @property
    def adrift(self) -> bool:
        """Whether the connection below was lost and the link waits for another."""
        return self._adrift and not self.closed

    async def move_to(self, connection: Connection, stream: MuxedStream) -> None:
        """Go on over ``stream``, which was opened for it here. The caller sets the deadline.

        Raises LinkError, WireError when that did not work; the link is as it was then.
        """
        if not self.movable:
            raise LinkError("the link cannot move now", peer=self.remote_peer)
        self._moving = True
        old = self._stream
        try:
            # From here on nothing is counted that comes on the old stream: it waits there, within its window.
            if old is not None:
                old.pause()
            await stream.send_all(
                own_piece(bytes([Own.RESUME]) + self.link_id + _COUNT.pack(self._frames_in))
            )
            message = await read_own(stream)
            if message[0] == Own.REFUSED:
                raise LinkError(message[1:].decode(errors="replace"), peer=self.remote_peer)
            if message[0] != Own.RESUMED or len(message) < 1 + _COUNT.size:
                raise WireError("unexpected", "a link was not resumed", peer=self.remote_peer)
            if self.closed:
                raise LinkError("the link ended while it moved", peer=self.remote_peer)
            self._switch(connection, stream, _COUNT.unpack_from(message, 1)[0])
        except BaseException:
            stream.reset("the link stays where it is")
            if old is not None and old is self._stream:
                old.set_sink(self._receive_bytes, self._stream_ended)
            raise
        finally:
            self._moving = False

    def resumed(self, connection: Connection, stream: MuxedStream, count: int) -> None:
        """The other side moves the link to ``stream`` and has received ``count`` frames. Raises WireError."""
        if not self._agreed or self.opened_here or self.closed:
            raise WireError("unexpected", "a link that cannot move was to be moved", peer=self.remote_peer)
        answer = bytes([Own.RESUMED]) + _COUNT.pack(self._frames_in)
        self._switch(connection, stream, count, answer)

    def _switch(self, connection: Connection, stream: MuxedStream, count: int, answer: bytes = b"") -> None:
        self._rewind(count)
        old = self._stream
        self._leave_connection()
        self._adrift = False
        self._stream = None
        if old is not None:
            old.abandon()
        self._assembler = Assembler(self._max_frame, self._deliver, self._own_received)
        self._withheld = 0
        self._own.clear()
        self._acknowledge = False
        if answer:
            self._own.append(answer)
        self._run_over(connection, stream)

    def _rewind(self, count: int) -> None:
        """Begin again after the first ``count`` frames. Raises WireError."""
        self._acknowledged(count)
        for queue in self._outgoing:
            if queue and queue[0].sent:
                self._queued[queue[0].cls] += queue[0].sent
                queue[0].rewind()
        while self._kept:
            frame = self._kept.pop()
            frame.rewind()
            self._outgoing[frame.cls].appendleft(frame)
            self._queued[frame.cls] += frame.size + HEAD_BYTES
        self._kept_bytes = 0
        self._frames_out = count

    def _acknowledged(self, count: int) -> None:
        if not self._frames_acknowledged <= count <= self._frames_out:
            raise WireError(
                "unexpected",
                f"{count} frames were acknowledged, of {self._frames_out} that were sent",
                peer=self.remote_peer,
            )
        for _ in range(count - self._frames_acknowledged):
            self._kept_bytes -= self._kept.popleft().size + FRAME_COST_BYTES
        self._frames_acknowledged = count

    # --- sending (called by the multiplexer) -----------------------------------------------------------------

    def urgency(self) -> int | None:
        """See :class:`~kvasir_peer.net.yamux.Source`."""
        if self._own or self._acknowledge:
            return 0
        if self._kept_bytes < KEPT_BYTES:
            for cls in range(CLASSES):
                if self._outgoing[cls]:
                    return cls
        return None

    def pull(self, room: memoryview) -> int:
        """See :class:`~kvasir_peer.net.yamux.Source`: whole pieces, the most urgent first."""
        filled, size = 0, len(room)
        if self._acknowledge:
            self._acknowledge = False
            self._unacknowledged_frames = self._unacknowledged_bytes = 0
            self._own.append(bytes([Own.ACKNOWLEDGE]) + _COUNT.pack(self._frames_in))
        while self._own:
            piece = own_piece(self._own[0])
            if len(piece) > size - filled:
                return filled
            room[filled : filled + len(piece)] = piece
            filled += len(piece)
            self._own.popleft()
        for cls in range(CLASSES):
            queue = self._outgoing[cls]
            while queue and self._kept_bytes < KEPT_BYTES:
                frame = queue[0]
                before_sent = frame.sent
                count = frame.cut(room[filled:])
                if not count:
                    return filled
                filled += count
                gone = frame.sent - before_sent
                if frame.sent == frame.size:
                    queue.popleft()
                    gone += HEAD_BYTES
                    self._frames_out += 1
                    if self._can_move:
                        self._kept.append(frame)
                        self._kept_bytes += frame.size + FRAME_COST_BYTES
                before = self._queued[cls]
                self._queued[cls] = before - gone
                if before >= QUEUED_BYTES > before - gone:
                    self._senders[cls].unpark_all()
        return filled

    # --- receiving (called by the connection's reader) -------------------------------------------------------

    def _receive_bytes(self, data: memoryview) -> None:
        """Take bytes of the stream. Raises WireError; the stream is reset then."""
        stream = self._stream
        if not self._closed:
            try:
                self._assembler.feed(data)
            except WireError as error:
                raise WireError(error.code, f"{self.protocol}: {error}", peer=self.remote_peer) from None
        if stream is not self._stream or stream is None:
            return
        # Let the other side send on, unless whoever takes the frames is far behind.
        if self._unread_bytes >= UNREAD_BYTES and not self._closed:
            self._withheld += len(data)
        else:
            stream.consumed(len(data))

    def _deliver(self, cls: int, frame: memoryview) -> None:
        size = len(frame)
        if self._unread >= UNREAD_FRAMES:
            raise WireError("flood", f"over {UNREAD_FRAMES} frames wait to be taken")
        self._incoming[cls].append(frame)
        self._unread += 1
        self._unread_bytes += size + FRAME_COST_BYTES
        self._frames_in += 1
        self._received_bytes += size
        self._receivers.unpark()
        if self._can_move:
            if not self._agreed:
                # A frame without a WELCOME before it: the other side knows nothing of moving.
                self._stay()
                return
            self._unacknowledged_frames += 1
            self._unacknowledged_bytes += size
            if (
                self._unacknowledged_frames >= ACKNOWLEDGE_FRAMES
                or self._unacknowledged_bytes >= ACKNOWLEDGE_BYTES
            ):
                self._want_acknowledge()

    def _want_acknowledge(self) -> None:
        self._acknowledge = True
        if self._stream is not None:
            self._stream.notify()

    def _stay(self) -> None:
        """The link will never move: keep nothing for that."""
        self._can_move = self._agreed = False
        self._kept.clear()
        self._kept_bytes = 0
        self.settled.set()

    def _own_received(self, message: bytes) -> None:
        kind = message[0]
        if kind == Own.ACKNOWLEDGE and len(message) >= 1 + _COUNT.size and self._agreed:
            self._acknowledged(_COUNT.unpack_from(message, 1)[0])
            if self._stream is not None:
                self._stream.notify()
        elif kind == Own.REFUSED and self.opened_here and not self._frames_in:
            reason = message[1:].decode(errors="replace")
            self.fail(f"{self.remote_peer} refuses {self.protocol}: {reason}")
        elif kind == Own.WELCOME and self.opened_here and len(message) >= 2:
            if message[1] & MOVES and self._can_move:
                self._agreed = True
                self.settled.set()
            else:
                self._stay()
        else:
            raise WireError("unexpected", f"a link message of kind {kind} out of turn")

    def _stream_ended(self, reason: str) -> None:
        stream = self._stream
        if self._end_received:
            return  # what is lost after a proper end was asked for by nobody
        if reason:
            if (
                self._agreed
                and not self.closed
                and stream is not None
                and stream.mux.lost
                and self.on_adrift is not None
            ):
                self._leave_connection()
                self._stream = None
                self._adrift = True
                if self.on_adrift(self, reason):
                    return
            self.fail(f"the link to {self.remote_peer} was lost: {reason}")
        else:
            self._end_received = self._shut = True
            if stream is not None:
                stream.finish()
            self._wake_all()
            self._over()


@dataclass(frozen=True)
class Hello:
    """The first message on a stream that somebody opened for a link.

    Attributes:
        link_id: of the link.
        flags: see ``MOVES``.
        resumes: frames that the other side has received, when it moves a link; None for a new one.
    """

    link_id: bytes
    flags: int = 0
    resumes: int | None = None


async def read_own(stream: MuxedStream) -> bytes:
    """The link's own message that has to come next. Raises WireError, LinkError; the caller sets the deadline."""
    (head,) = HEAD.unpack(await receive_exactly(stream, HEAD_BYTES))
    length = head & LENGTH_MASK
    if not head & OWN or not 1 <= length <= MAX_OWN_BYTES:
        raise WireError("unexpected", "a link does not begin with its own message", peer=stream.remote_peer)
    return await receive_exactly(stream, length)


async def read_hello(stream: MuxedStream) -> Hello:
    """What somebody opened ``stream`` for. Raises WireError, LinkError; the caller sets the deadline."""
    message = await read_own(stream)
    if message[0] == Own.HELLO and len(message) >= 2 + LINK_ID_BYTES and message[1] >= LINK_VERSION:
        flags = message[2 + LINK_ID_BYTES] if len(message) > 2 + LINK_ID_BYTES else 0
        return Hello(message[2 : 2 + LINK_ID_BYTES], flags)
    if message[0] == Own.RESUME and len(message) >= 1 + LINK_ID_BYTES + _COUNT.size:
        return Hello(
            message[1 : 1 + LINK_ID_BYTES], resumes=_COUNT.unpack_from(message, 1 + LINK_ID_BYTES)[0]
        )
    raise WireError("unexpected", "a link's first message makes no sense", peer=stream.remote_peer)


def refuse(stream: MuxedStream, reason: str) -> None:
    """Tell whoever opened ``stream`` why it gets no link, and drop what it sends."""
    stream.send_nowait(own_piece(bytes([Own.REFUSED]) + reason.encode()[: MAX_OWN_BYTES - 1]))
    stream.close()


class _Rate:
    """Bytes a second over the last ten seconds, from totals noted about once a second."""

    SECONDS = 10.0

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque([(trio.current_time(), 0)])

    def sample(self, now: float, total: int) -> None:
        """Note the total."""
        self._samples.append((now, total))
        while len(self._samples) > 2 and self._samples[1][0] < now - self.SECONDS:
            self._samples.popleft()

    def per_second(self, now: float, total: int) -> float:
        """The rate up to now."""
        then, before = self._samples[0]
        return (total - before) / max(now - then, 1.0)
