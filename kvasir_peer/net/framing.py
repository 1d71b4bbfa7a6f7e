"""Frames in pieces: how a link's frames are cut when they are sent, and put together again.

A piece is ``head (4 bytes, big-endian) | payload``: bits 31-30 the priority, bit 29 set on the first piece of a frame,
bit 28 on its last, bit 27 on messages of the link itself, bits 23-0 the payload's length. The payload of a first piece
that is not the last begins with the whole frame's length (4 bytes), so that a frame over the limit is refused before
memory is taken for it. Pieces of frames of different priority may mix; those of one priority follow each other.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from kvasir_peer.errors import WireError
from kvasir_peer.net.yamux import CLASSES

HEAD = struct.Struct(">I")
HEAD_BYTES = 4
FIRST, LAST, OWN = 1 << 29, 1 << 28, 1 << 27
LENGTH_MASK = 0x00FFFFFF

MAX_OWN_BYTES = 256  # of a message of the link itself
LEAST_PIECE_BYTES = 256  # a frame is not cut into pieces smaller than this
MAX_FRAME_BYTES = 0xFFFFFFFF
#: A frame under this size is copied where it is the smaller part of the encrypted message that it came in (up to
#: 65,519 bytes): as a view it would keep all of that in memory. So what waits holds eight times its size at most.
SMALL_FRAME_BYTES = 8192


class OutgoingFrame:
    """One frame on its way out.

    Attributes:
        cls: its priority.
        size: bytes.
        sent: bytes cut so far.
    """

    __slots__ = ("_buffers", "_index", "_offset", "cls", "sent", "size")

    def __init__(self, cls: int, buffers: Sequence[memoryview], size: int) -> None:
        self.cls = cls
        self.size = size
        self.sent = 0
        self._buffers = buffers
        self._index = 0
        self._offset = 0

    def rewind(self) -> None:
        """Begin again."""
        self.sent = self._index = self._offset = 0

    def cut(self, room: memoryview) -> int:
        """Write the next piece into ``room``; returns its size with head, 0 when the room is too small to be of use.

        The frame is done when ``sent`` has reached ``size`` (an empty frame is one empty piece).
        """
        left = self.size - self.sent
        space = len(room) - HEAD_BYTES
        if space < left and space < LEAST_PIECE_BYTES:
            return 0
        flags = self.cls << 30
        start = HEAD_BYTES
        if self.sent == 0:
            flags |= FIRST
            if left > space:
                HEAD.pack_into(room, HEAD_BYTES, self.size)
                start += 4
                space -= 4
        if left <= space:
            flags |= LAST
            count = left
        else:
            count = space
        end = start + count
        HEAD.pack_into(room, 0, flags | (end - HEAD_BYTES))
        position = start
        while position < end:
            data = self._buffers[self._index]
            offset = self._offset
            step = len(data) - offset
            if step > end - position:
                step = end - position
                self._offset = offset + step
            else:
                self._index += 1
                self._offset = 0
            room[position : position + step] = data[offset : offset + step]
            position += step
        self.sent += count
        return end


def own_piece(message: bytes) -> bytes:
    """A message of the link itself as it goes on the wire."""
    return HEAD.pack(OWN | len(message)) + message


class Assembler:
    """Takes a stream's bytes as they come and gives frames and messages out.

    Args:
        deliver: called with priority and content of each frame.
        own: called with each message of the link itself.

    Attributes:
        max_frame: largest frame taken, bytes.
    """

    def __init__(
        self, max_frame: int, deliver: Callable[[int, memoryview], None], own: Callable[[bytes], None]
    ) -> None:
        self.max_frame = max_frame
        self._deliver = deliver
        self._own = own
        self._head = bytearray()
        self._piece = 0  # payload bytes of the current piece still to come
        self._class = 0
        self._last = False
        self._message: bytearray | None = None  # of the link itself, while one comes
        self._size: bytearray | None = None  # the frame's length, while it comes
        self._frames: list[bytearray | None] = [None] * CLASSES
        self._filled = [0] * CLASSES

    def feed(self, data: memoryview) -> None:
        """Take bytes. Raises WireError, after which nothing more may be fed."""
        position, size = 0, len(data)
        while position < size:
            if self._piece:
                step = min(self._piece, size - position)
                self._piece -= step
                self._fill(data[position : position + step])
                position += step
                if not self._piece:
                    self._end_piece()
                continue
            if self._head or size - position < HEAD_BYTES:
                step = min(HEAD_BYTES - len(self._head), size - position)
                self._head += data[position : position + step]
                position += step
                if len(self._head) < HEAD_BYTES:
                    return
                (head,) = HEAD.unpack(self._head)
                self._head.clear()
            else:
                (head,) = HEAD.unpack_from(data, position)
                position += HEAD_BYTES
            length = head & LENGTH_MASK
            if head & FIRST and head & LAST and not head & OWN and size - position >= length:
                # The whole frame is here: give out a view of it, unless that would keep much else in memory.
                cls = head >> 30
                self._check(cls, length)
                frame = data[position : position + length]
                if length < SMALL_FRAME_BYTES and 2 * length < len(data.obj):  # type: ignore[arg-type]
                    frame = memoryview(bytes(frame))
                self._deliver(cls, frame)
                position += length
                continue
            self._begin_piece(head, length)
            if not length:
                self._end_piece()

    def _check(self, cls: int, size: int) -> None:
        if self._frames[cls] is not None:
            raise WireError("malformed", "a frame began inside another of its priority")
        if size > self.max_frame:
            raise WireError("oversize", f"a frame of {size} bytes, where {self.max_frame} are allowed")

    def _begin_piece(self, head: int, length: int) -> None:
        cls = head >> 30
        self._piece, self._class, self._last = length, cls, bool(head & LAST)
        if head & OWN:
            if not 1 <= length <= MAX_OWN_BYTES:
                raise WireError("malformed", f"a link message of {length} bytes")
            self._message = bytearray()
        elif not head & FIRST:
            if self._frames[cls] is None:
                raise WireError("malformed", "a piece of a frame that never began")
        elif head & LAST:
            self._begin_frame(cls, length)
        elif length < 4:
            raise WireError("malformed", "a first piece without the frame's length")
        else:
            self._check(cls, 0)
            self._size = bytearray()

    def _begin_frame(self, cls: int, size: int) -> None:
        self._check(cls, size)
        self._frames[cls] = bytearray(size)
        self._filled[cls] = 0

    def _fill(self, part: memoryview) -> None:
        if self._message is not None:
            self._message += part
            return
        cls = self._class
        wanted = self._size
        if wanted is not None:
            step = min(4 - len(wanted), len(part))
            wanted += part[:step]
            part = part[step:]
            if len(wanted) < 4:
                return
            self._size = None
            self._begin_frame(cls, HEAD.unpack(wanted)[0])
        frame = self._frames[cls]
        assert frame is not None
        start = self._filled[cls]
        end = start + len(part)
        if end > len(frame):
            raise WireError("malformed", "the pieces of a frame are longer than it said")
        memoryview(frame)[start:end] = part
        self._filled[cls] = end

    def _end_piece(self) -> None:
        message = self._message
        if message is not None:
            self._message = None
            self._own(bytes(message))
        elif self._last:
            cls = self._class
            frame = self._frames[cls]
            if frame is None or self._filled[cls] != len(frame):
                raise WireError("malformed", "a frame ended before its length")
            self._frames[cls] = None
            self._deliver(cls, memoryview(frame))
