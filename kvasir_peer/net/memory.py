"""A pair of links without a network, with the framing, limits and priorities of real ones."""

from __future__ import annotations

from kvasir_peer.net.framing import HEAD_BYTES
from kvasir_peer.net.link import DEFAULT_MAX_FRAME_BYTES, LINK_ID_BYTES, Hello, Link
from kvasir_peer.net.yamux import MuxedStream, Yamux


def memory_link_pair(
    protocol: str = "/memory/1",
    *,
    max_frame: int = DEFAULT_MAX_FRAME_BYTES,
    peers: tuple[str, str] = ("memory-a", "memory-b"),
) -> tuple[Link, Link]:
    """Two links joined in memory: what one sends the other receives, within the same windows as on a network.

    The first believes to speak to ``peers[1]`` and the second to ``peers[0]``. Each side moves its bytes while the
    other is called, so no task is needed. Must be called inside trio.
    """
    return _Wire(protocol, max_frame, peers).links


class _Wire:
    """Two multiplexers that feed each other."""

    def __init__(self, protocol: str, max_frame: int, peers: tuple[str, str]) -> None:
        self._room = memoryview(bytearray(65519))
        self._moving = False
        self._wanted = False
        self._muxes = (
            Yamux(remote_peer=peers[1], initiator=True, on_stream=_refuse, on_writable=self._move),
            Yamux(remote_peer=peers[0], initiator=False, on_stream=self._accept, on_writable=self._move),
        )
        here = Link(peers[1], protocol, max_frame=max_frame)
        there = Link(peers[0], protocol, max_frame=max_frame)
        self.links = (here, there)
        here.begin(None, self._muxes[0].open())

    def _accept(self, stream: MuxedStream) -> None:
        stream.set_sink(lambda data: self._first(stream, data), lambda reason: None)

    def _first(self, stream: MuxedStream, data: memoryview) -> None:
        """Take the hello, which on a network is read before there is a link."""
        size = HEAD_BYTES + 2 + LINK_ID_BYTES + 1
        stream.consumed(size)
        there = self.links[1]
        there.begin(None, stream, hello=Hello(bytes(data[HEAD_BYTES + 2 : size - 1])))
        if len(data) > size:
            there._receive_bytes(data[size:])

    def _move(self) -> None:
        self._wanted = True
        if self._moving or not hasattr(self, "links"):
            return
        self._moving = True
        try:
            while self._wanted:
                self._wanted = False
                for mux, other in (self._muxes, self._muxes[::-1]):
                    while count := mux.pull(self._room):
                        other.feed(memoryview(bytes(self._room[:count])))
        finally:
            self._moving = False


def _refuse(stream: MuxedStream) -> None:
    stream.reset("not expected")
