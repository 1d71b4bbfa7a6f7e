"""Links: whole frames between two peers, over one long-lived stream.

A frame is cut into pieces when it is sent, so that a decode step never waits for more than a piece of a prefill.
Frames of one priority arrive in the order they were sent; frames of a more urgent one may overtake.

On the wire a piece is ``head (4 bytes, big-endian) | payload``: bits 31-30 the priority, bit 29 set on the first
piece of a frame, bit 28 on its last, bit 27 on messages of the link itself, bits 23-0 the payload's length. The
payload of a first piece that is not the last begins with the whole frame's length (4 bytes), so that a frame over the
limit is refused before memory is taken for it. Messages of the link itself are in ``_Control``.
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
from kvasir_peer.net.yamux import CLASSES, Priority

if TYPE_CHECKING:
    from kvasir_peer.net.connection import Connection
    from kvasir_peer.net.yamux import MuxedStream

__all__ = ["Buffer", "Link", "LinkStatistics", "Priority"]

Buffer = bytes | bytearray | memoryview

HEAD = struct.Struct(">I")
HEAD_BYTES = 4
FIRST, LAST, OWN = 1 << 29, 1 << 28, 1 << 27
LENGTH_MASK = 0x00FFFFFF

DEFAULT_MAX_FRAME_BYTES = 16 * 1024 * 1024
MAX_OWN_BYTES = 256  # of a message of the link itself
LEAST_PIECE_BYTES = 256  # a frame is not cut into pieces smaller than this
QUEUED_BYTES = 256 * 1024  # of one priority waiting to be sent before a sender has to wait
#: Frames received and not yet taken hold back the window of the other side beyond this many bytes.
UNREAD_BYTES = 1024 * 1024


class _Control(IntEnum):
    """Messages of the link itself: the first byte of their payload."""

    HELLO = 1  # | version (1) | link id (16): first on a stream, from the side that opened it
    REFUSED = 2  # | reason (UTF-8): the only message of a side that does not want the link


LINK_VERSION = 1
LINK_ID_BYTES = 16


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


class _Outgoing:
    """One frame on its way out: its buffers, and how much has gone."""

    __slots__ = ("buffers", "sent", "size")

    def __init__(self, buffers: list[memoryview], size: int) -> None:
        self.buffers = buffers
        self.size = size
        self.sent = 0

    def copy_into(self, room: memoryview) -> None:
        """Fill ``room`` with the next bytes."""
        position, size = 0, len(room)
        buffers = self.buffers
        while position < size:
            data = buffers[0]
            step = len(data)
            if step > size - position:
                step = size - position
                room[position:size] = data[:step]
                buffers[0] = data[step:]
            else:
                room[position : position + step] = data
                del buffers[0]
            position += step
        self.sent += size


class Link:
    """A framed duplex to one peer.

    Attributes:
        remote_peer: peer id of the other side.
        protocol: protocol of the link.
        max_frame: largest frame taken, bytes; may be changed at any time.
        link_id: 16 random bytes chosen by the side that opened the link.
    """

    def __init__(self, remote_peer: str, protocol: str, *, max_frame: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        self.remote_peer = remote_peer
        self.protocol = protocol
        self.max_frame = max_frame
        self.link_id = b""
        self._stream: MuxedStream | None = None
        self._connection: Connection | None = None
        self._path = "memory"
        self._path_changed_at = trio.current_time()
        self._path_changes = 0
        self._outgoing: tuple[deque[_Outgoing], ...] = tuple(deque() for _ in range(CLASSES))
        self._own: deque[bytes] = deque()
        self._queued = [0] * CLASSES
        self._senders = tuple(trio.lowlevel.ParkingLot() for _ in range(CLASSES))
        self._incoming: tuple[deque[memoryview], ...] = tuple(deque() for _ in range(CLASSES))
        self._unread_bytes = 0
        self._unread = 0
        self._receivers = trio.lowlevel.ParkingLot()
        self._withheld = 0
        self._head = bytearray()
        self._piece = 0  # payload bytes of the current piece still to come
        self._piece_class = 0
        self._piece_last = False
        self._own_message: bytearray | None = None
        self._size_wanted: bytearray | None = None
        self._frames: list[bytearray | None] = [None] * CLASSES
        self._filled = [0] * CLASSES
        self._error: str | None = None
        self._closed = False
        self._end_sent = False
        self._end_received = False
        self._hello_wanted = False
        self._sent = [0, 0]
        self._received = [0, 0]
        self._rate = _Rate()
        self._turn = 0
        self._told = False
        self.on_closed: Callable[[Link], None] | None = None

    # --- for those who use it --------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """``relayed``, ``direct`` or ``memory``."""
        return self._path

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._closed or self._error is not None or self._end_received

    async def send(self, frame: Buffer | Sequence[Buffer], priority: Priority = Priority.CONTROL) -> None:
        """Queue one frame; several buffers become one frame.

        Waits only until the queue of its priority has room, and then takes the frame whole: cancelling it leaves the
        link as it was. ``bytes`` are kept by reference, other buffers are copied. Raises LinkError once the link is
        closed, WireError (``oversize``) for a frame that no link carries.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        cls = int(priority)
        while self._queued[cls] >= QUEUED_BYTES and not self.closed:
            await self._senders[cls].park()
        if self.closed:
            raise LinkError(self._error or "the link is closed", peer=self.remote_peer)
        buffers = [frame] if isinstance(frame, bytes | bytearray | memoryview) else frame
        views = [
            memoryview(buffer if isinstance(buffer, bytes) else bytes(buffer))
            for buffer in buffers
            if len(buffer)
        ]
        size = sum(map(len, views))
        if size > 0xFFFFFFFF:
            raise WireError("oversize", f"a frame of {size} bytes is over 4 GiB")
        self._queued[cls] += size + HEAD_BYTES
        self._outgoing[cls].append(_Outgoing(views, size))
        self._sent[0] += 1
        self._sent[1] += size
        self._notify()

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
        self._unread_bytes -= len(frame)
        if self._withheld and self._unread_bytes < UNREAD_BYTES:
            withheld, self._withheld = self._withheld, 0
            self._consumed(withheld)
        return frame

    async def aclose(self) -> None:
        """Send what is queued, then the end. What still comes is dropped."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """As :meth:`aclose`, without waiting."""
        if not self._closed:
            self._closed = True
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
            self._received[0],
            self._sent[1],
            self._received[1],
            sum(self._queued),
            self._unread,
            state.round_trip_p50 if state else None,
            state.round_trip_p95 if state else None,
            self._rate.per_second(trio.current_time(), self._sent[1] + self._received[1]),
            self._path_changed_at,
            self._path_changes,
        )

    # --- for the node ----------------------------------------------------------------------------------------

    def begin(self, connection: Connection, stream: MuxedStream, *, opened_here: bool) -> None:
        """Run over ``stream`` from now on."""
        self._connection = connection
        self._path = connection.path
        connection.busy += 1
        connection.tickers.add(self._tick)
        self.begin_in_memory(stream, opened_here=opened_here)

    def begin_in_memory(self, stream: MuxedStream, *, opened_here: bool) -> None:
        """As :meth:`begin`, where there is no connection."""
        self._stream = stream
        if opened_here:
            self.link_id = secrets.token_bytes(LINK_ID_BYTES)
            self._own.append(bytes([_Control.HELLO, LINK_VERSION]) + self.link_id)
        else:
            self._hello_wanted = True
        stream.set_source(self, classed=True)
        stream.set_sink(self._receive_bytes, self._stream_ended)
        self._notify()

    def fail(self, reason: str) -> None:
        """End the link at once, in both directions."""
        if self._error is None:
            self._error = reason
            for cls in range(CLASSES):
                self._outgoing[cls].clear()
                self._queued[cls] = 0
            self._frames = [None] * CLASSES
            if self._stream is not None:
                self._stream.reset(reason)
            self._wake_all()
            self._over()

    def _tick(self, now: float) -> None:
        self._rate.sample(now, self._sent[1] + self._received[1])

    def _over(self) -> None:
        """Nothing can be sent any more: whoever keeps account of the link is told, once."""
        if not self._told:
            self._told = True
            if self._connection is not None:
                self._connection.busy -= 1
                self._connection.tickers.discard(self._tick)
            if self.on_closed is not None:
                self.on_closed(self)

    def _wake_all(self) -> None:
        for lot in self._senders:
            lot.unpark_all()
        self._receivers.unpark_all()

    def _notify(self) -> None:
        if self._stream is not None:
            self._stream.notify()

    def _consumed(self, count: int) -> None:
        if self._stream is not None:
            self._stream.consumed(count)

    # --- sending (called by the multiplexer) -----------------------------------------------------------------

    def urgency(self) -> int | None:
        """See :class:`~kvasir_peer.net.yamux.Source`."""
        if self._own:
            return 0
        for cls in range(CLASSES):
            if self._outgoing[cls]:
                return cls
        return None

    def pull(self, room: memoryview) -> int:
        """See :class:`~kvasir_peer.net.yamux.Source`: whole pieces, the most urgent first."""
        filled, size = 0, len(room)
        while self._own:
            message = self._own[0]
            end = filled + HEAD_BYTES + len(message)
            if end > size:
                return filled
            HEAD.pack_into(room, filled, OWN | len(message))
            room[filled + HEAD_BYTES : end] = message
            self._own.popleft()
            filled = end
        for cls in range(CLASSES):
            queue = self._outgoing[cls]
            while queue:
                frame = queue[0]
                space = size - filled - HEAD_BYTES
                left = frame.size - frame.sent
                if space < left and space < LEAST_PIECE_BYTES:
                    return filled
                start = filled
                filled += HEAD_BYTES
                flags = cls << 30
                count = left
                if frame.sent == 0:
                    flags |= FIRST
                    if left > space:
                        HEAD.pack_into(room, filled, frame.size)
                        filled += 4
                        count = space - 4
                elif left > space:
                    count = space
                if count == left:
                    flags |= LAST
                    queue.popleft()
                frame.copy_into(room[filled : filled + count])
                filled += count
                HEAD.pack_into(room, start, flags | (filled - start - HEAD_BYTES))
                before = self._queued[cls]
                self._queued[cls] = before - count - (HEAD_BYTES if count == left else 0)
                if before >= QUEUED_BYTES > self._queued[cls]:
                    self._senders[cls].unpark_all()
        return filled

    # --- receiving (called by the connection's reader) -------------------------------------------------------

    def _receive_bytes(self, data: memoryview) -> None:
        """Take bytes of the stream. Raises WireError; the stream is reset then."""
        position, size = 0, len(data)
        if self._closed:
            self._consumed(size)
            return
        while position < size:
            if not self._piece:
                if self._head or size - position < HEAD_BYTES:
                    step = min(HEAD_BYTES - len(self._head), size - position)
                    self._head += data[position : position + step]
                    position += step
                    if len(self._head) < HEAD_BYTES:
                        break
                    (head,) = HEAD.unpack(self._head)
                    self._head.clear()
                else:
                    (head,) = HEAD.unpack_from(data, position)
                    position += HEAD_BYTES
                length = head & LENGTH_MASK
                if head & FIRST and head & LAST and not head & OWN and size - position >= length:
                    # The whole frame is here: hand out a view of it.
                    self._check_first(head >> 30, length)
                    self._deliver(head >> 30, data[position : position + length])
                    position += length
                    continue
                self._begin_piece(head, length)
                if length:
                    continue
                self._end_piece()
                continue
            step = min(self._piece, size - position)
            part = data[position : position + step]
            position += step
            self._piece -= step
            if self._own_message is not None:
                self._own_message += part
            else:
                self._fill_frame(part)
            if not self._piece:
                self._end_piece()
        # Let the other side send on, unless whoever takes the frames is far behind.
        if self._unread_bytes >= UNREAD_BYTES:
            self._withheld += size
        else:
            self._consumed(size)

    def _check_first(self, cls: int, size: int) -> None:
        if self._hello_wanted and not self.link_id:
            raise WireError("unexpected", "a frame came before the link's hello", peer=self.remote_peer)
        if self._frames[cls] is not None:
            raise WireError(
                "malformed", "a frame began inside another of its priority", peer=self.remote_peer
            )
        if size > self.max_frame:
            raise WireError(
                "oversize",
                f"a frame of {size} bytes on {self.protocol}, where {self.max_frame} are allowed",
                peer=self.remote_peer,
            )

    def _begin_piece(self, head: int, length: int) -> None:
        cls = head >> 30
        self._piece, self._piece_class, self._piece_last = length, cls, bool(head & LAST)
        if head & OWN:
            if not 1 <= length <= MAX_OWN_BYTES:
                raise WireError("malformed", f"a link message of {length} bytes", peer=self.remote_peer)
            self._own_message = bytearray()
        elif head & FIRST:
            if head & LAST:
                self._check_first(cls, length)
                self._frames[cls] = bytearray(length)
                self._filled[cls] = 0
            else:
                if length < 4:
                    raise WireError(
                        "malformed", "a first piece without the frame's length", peer=self.remote_peer
                    )
                self._check_first(cls, 0)
                self._size_wanted = bytearray()
        elif self._frames[cls] is None:
            raise WireError("malformed", "a piece of a frame that never began", peer=self.remote_peer)

    def _fill_frame(self, part: memoryview) -> None:
        cls = self._piece_class
        wanted = self._size_wanted
        if wanted is not None:
            step = min(4 - len(wanted), len(part))
            wanted += part[:step]
            part = part[step:]
            if len(wanted) < 4:
                return
            (size,) = HEAD.unpack(wanted)
            self._size_wanted = None
            self._check_first(cls, size)
            self._frames[cls] = bytearray(size)
            self._filled[cls] = 0
        frame = self._frames[cls]
        assert frame is not None
        start = self._filled[cls]
        end = start + len(part)
        if end > len(frame):
            raise WireError(
                "malformed", "the pieces of a frame are longer than it said", peer=self.remote_peer
            )
        memoryview(frame)[start:end] = part
        self._filled[cls] = end

    def _end_piece(self) -> None:
        message = self._own_message
        if message is not None:
            self._own_message = None
            self._own_received(bytes(message))
            return
        cls = self._piece_class
        if self._piece_last:
            frame = self._frames[cls]
            if frame is None or self._filled[cls] != len(frame):
                raise WireError("malformed", "a frame ended before its length", peer=self.remote_peer)
            self._frames[cls] = None
            self._deliver(cls, memoryview(frame))

    def _deliver(self, cls: int, frame: memoryview) -> None:
        self._incoming[cls].append(frame)
        self._unread += 1
        self._unread_bytes += len(frame)
        self._received[0] += 1
        self._received[1] += len(frame)
        self._receivers.unpark()

    def _own_received(self, message: bytes) -> None:
        kind = message[0]
        if kind == _Control.HELLO:
            if not self._hello_wanted or self.link_id or len(message) < 2 + LINK_ID_BYTES:
                raise WireError(
                    "unexpected", "a link's hello came twice or makes no sense", peer=self.remote_peer
                )
            if message[1] < LINK_VERSION:
                raise WireError("unexpected", f"link version {message[1]}", peer=self.remote_peer)
            self.link_id = message[2 : 2 + LINK_ID_BYTES]
        elif kind == _Control.REFUSED:
            reason = message[1:].decode(errors="replace")
            self.fail(f"{self.remote_peer} refuses {self.protocol}: {reason}")

    def _stream_ended(self, reason: str) -> None:
        if reason:
            self.fail(f"the link to {self.remote_peer} was lost: {reason}")
        elif not self._end_received:
            self._end_received = True
            if self._stream is not None:
                self._stream.finish()
            self._wake_all()
            self._over()


def refuse(stream: MuxedStream, reason: str) -> None:
    """Tell whoever opened ``stream`` why it gets no link, and drop what it sends."""
    message = bytes([_Control.REFUSED]) + reason.encode()[: MAX_OWN_BYTES - 1]
    stream.send_nowait(HEAD.pack(OWN | len(message)) + message)
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
