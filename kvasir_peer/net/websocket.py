"""A byte stream inside WebSocket, for relays behind a web proxy and for browsers.

Every binary message's bytes follow each other; its borders mean nothing. Text messages break the protocol.
"""

from __future__ import annotations

from collections import deque

import trio
import wsproto
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Ping,
    RejectConnection,
    Request,
    TextMessage,
)

from kvasir_peer.errors import LinkError, WireError

RECEIVE_BYTES = 64 * 1024
MAX_REQUEST_BYTES = 16 * 1024  # of the opening request, headers and all


class WebSocketDuplex:
    """The methods of a duplex over a WebSocket on ``stream``.

    Use :meth:`connect` or :meth:`accept`.

    Attributes:
        headers: of the opening request (names in lower case), for the side that accepts.
    """

    def __init__(self, stream: trio.abc.Stream, socket: wsproto.WSConnection) -> None:
        self._stream = stream
        self._socket = socket
        self._received: deque[bytes] = deque()
        self._pending: deque[wsproto.events.Event] = deque()  # what came with the answer to ours
        self._sending = trio.Lock()
        self._ended = False
        self._bytes_read = 0
        self.headers: dict[str, str] = {}

    @classmethod
    async def connect(cls, stream: trio.abc.Stream, host: str, target: str = "/") -> WebSocketDuplex:
        """Open a WebSocket; the caller sets the deadline. Raises LinkError."""
        self = cls(stream, wsproto.WSConnection(wsproto.ConnectionType.CLIENT))
        await self._send(Request(host=host, target=target))
        while True:
            self._pending.extend(await self._events())
            while self._pending:
                event = self._pending.popleft()
                if isinstance(event, AcceptConnection):
                    return self
                if isinstance(event, RejectConnection):
                    raise LinkError(f"{host} refuses WebSocket with status {event.status_code}")
            if self._ended:
                raise LinkError(f"{host} closed the connection instead of opening a WebSocket")

    @classmethod
    async def accept(cls, stream: trio.abc.Stream) -> WebSocketDuplex:
        """Answer the opening request; the caller sets the deadline. Raises LinkError."""
        self = cls(stream, wsproto.WSConnection(wsproto.ConnectionType.SERVER))
        while True:
            for event in await self._events():
                if isinstance(event, Request):
                    self.headers = {
                        name.decode("latin-1").lower(): value.decode("latin-1")
                        for name, value in event.extra_headers
                    }
                    await self._send(AcceptConnection())
                    return self
            if self._ended or self._bytes_read > MAX_REQUEST_BYTES:
                raise LinkError("no WebSocket was opened")

    async def _events(self) -> list[wsproto.events.Event]:
        try:
            data = await self._stream.receive_some(RECEIVE_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise LinkError(f"the connection broke: {error}") from error
        self._bytes_read += len(data)
        try:
            if not data:
                self._ended = True
                return []
            self._socket.receive_data(bytes(data))
            return list(self._socket.events())
        except wsproto.utilities.ProtocolError as error:
            raise WireError("malformed", f"not a WebSocket: {error}") from None

    async def _send(self, event: wsproto.events.Event) -> None:
        try:
            async with self._sending:
                await self._stream.send_all(self._socket.send(event))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise LinkError(f"the connection broke: {error}") from error
        except wsproto.utilities.LocalProtocolError as error:
            raise LinkError(f"the WebSocket is closed: {error}") from error

    async def receive_some(self, max_bytes: int) -> bytes:
        """See :class:`~kvasir_peer.net.duplex.Duplex`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._received:
            if self._ended:
                return b""
            if not self._pending:
                self._pending.extend(await self._events())
            while self._pending:
                event = self._pending.popleft()
                if isinstance(event, BytesMessage):
                    if event.data:
                        self._received.append(bytes(event.data))
                elif isinstance(event, Ping):
                    await self._send(event.response())
                elif isinstance(event, CloseConnection):
                    self._ended = True
                elif isinstance(event, TextMessage):
                    raise WireError("unexpected", "a text message came on a WebSocket that carries bytes")
        data = self._received[0]
        if len(data) > max_bytes:
            self._received[0] = data[max_bytes:]
            return data[:max_bytes]
        return self._received.popleft()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See :class:`~kvasir_peer.net.duplex.Duplex`."""
        await self._send(BytesMessage(bytes(data)))

    async def aclose(self) -> None:
        """Close the connection below, after a goodbye where that is possible."""
        try:
            await self._send(CloseConnection(1000))
        except LinkError:
            pass
        finally:
            await self._stream.aclose()
