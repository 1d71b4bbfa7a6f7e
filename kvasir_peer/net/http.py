"""HTTP/1.1 over libp2p streams (protocol ``/http/1.1``), both sides.

The client is httpx over httpcore, whose connections are streams to one peer; one idle stream is kept. The server runs
any ASGI application over h11; the caller's peer id, proven by the connection, stands in ``scope["kvasir_peer"]``.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import unquote

import h11
import httpcore
import httpx
import trio

from kvasir_peer.errors import KvasirError, LinkError
from kvasir_peer.net.yamux import MuxedStream, Priority

logger = logging.getLogger(__name__)

PROTOCOL = "/http/1.1"

#: HTTP is small control traffic; the odd large page must not hold up heartbeats and decode steps for long.
HTTP_PRIORITY = Priority.DECODE

MAX_REQUEST_BODY_BYTES = 4 * 1024 * 1024
MAX_HEADER_BYTES = 64 * 1024
REQUEST_S = 30.0  # for a request to arrive whole
IDLE_S = 120.0  # a kept stream without a request
RESPONSE_S = 120.0  # between two steps of an application's answer (long polls take up to 50 s)
WRITE_S = 30.0  # for the other side to take what was sent
RECEIVE_BYTES = 64 * 1024
MAX_STREAMS = 8  # of one client to one peer at once; more requests wait

OpenStream = Callable[[], Awaitable[MuxedStream]]
App = Callable[..., Awaitable[None]]


# --- client ----------------------------------------------------------------------------------------------------------


class _Stream(httpcore.AsyncNetworkStream):
    """A libp2p stream as httpcore wants it."""

    def __init__(self, stream: MuxedStream) -> None:
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with trio.move_on_after(float("inf") if timeout is None else timeout):
            try:
                return await self._stream.receive_some(max_bytes)
            except KvasirError as error:
                raise httpcore.ReadError(str(error)) from error
        raise httpcore.ReadTimeout(f"{self._stream.remote_peer} sent nothing for {timeout} s")

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with trio.move_on_after(float("inf") if timeout is None else timeout):
            try:
                await self._stream.send_all(buffer)
            except KvasirError as error:
                raise httpcore.WriteError(str(error)) from error
            return
        raise httpcore.WriteTimeout(f"{self._stream.remote_peer} took nothing for {timeout} s")

    async def aclose(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":
            return self._stream.ended or self._stream.closed
        return None


class _Backend(httpcore.AsyncNetworkBackend):
    """Where httpcore gets its connections from."""

    def __init__(self, open_stream: OpenStream) -> None:
        self._open_stream = open_stream

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        with trio.move_on_after(float("inf") if timeout is None else timeout):
            try:
                stream = await self._open_stream()
            except KvasirError as error:
                raise httpcore.ConnectError(str(error)) from error
            stream.priority = HTTP_PRIORITY
            return _Stream(stream)
        raise httpcore.ConnectTimeout(f"no stream in {timeout} s")

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)


class PeerTransport(httpx.AsyncBaseTransport):
    """httpx transport whose every request goes to one peer, whatever the URL's host says.

    Args:
        open_stream: opens a ``/http/1.1`` stream to the peer.
    """

    def __init__(self, open_stream: OpenStream) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            network_backend=_Backend(open_stream),
            max_connections=MAX_STREAMS,
            max_keepalive_connections=1,
            keepalive_expiry=IDLE_S / 2,
            retries=0,
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.AsyncByteStream)
        with _translated(request):
            response = await self._pool.handle_async_request(
                httpcore.Request(
                    method=request.method,
                    url=httpcore.URL(scheme=b"http", host=b"peer", port=80, target=request.url.raw_path),
                    headers=request.headers.raw,
                    content=request.stream,
                    extensions=request.extensions,
                )
            )
        return httpx.Response(
            status_code=response.status,
            headers=response.headers,
            stream=_ResponseStream(response.stream, request),
            extensions=response.extensions,
        )

    async def aclose(self) -> None:
        await self._pool.aclose()


class _ResponseStream(httpx.AsyncByteStream):
    def __init__(self, stream: Any, request: httpx.Request) -> None:
        self._stream = stream
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _translated(self._request):
            async for part in self._stream:
                yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


class _translated:
    """httpcore's errors as httpx's of the same name."""

    def __init__(self, request: httpx.Request) -> None:
        self._request = request

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and type(error).__module__.partition(".")[0] == "httpcore":
            translated = getattr(httpx, type(error).__name__, httpx.TransportError)
            if issubclass(translated, httpx.RequestError):
                raise translated(str(error), request=self._request) from error
            raise translated(str(error)) from error


# --- server ----------------------------------------------------------------------------------------------------------


class _Refused(Exception):
    """A request that gets an error and then the end of the stream."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class HttpServer:
    """Serves one ASGI application to streams.

    Args:
        app: ASGI 3 application; the lifespan protocol is not run.
        max_body: largest request body, bytes.
    """

    def __init__(self, app: App, *, max_body: int = MAX_REQUEST_BODY_BYTES) -> None:
        self._app = app
        self._max_body = max_body

    async def serve(self, stream: MuxedStream) -> None:
        """Serve requests, one after the other, until either side has had enough."""
        stream.priority = HTTP_PRIORITY
        await _Exchange(self._app, self._max_body, stream).run()


class _Exchange:
    """The requests of one stream."""

    def __init__(self, app: App, max_body: int, stream: MuxedStream) -> None:
        self._app = app
        self._max_body = max_body
        self._stream = stream
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)

    async def run(self) -> None:
        """Serve until either side has had enough."""
        try:
            while True:
                request = None
                with trio.move_on_after(IDLE_S):
                    request = await self._next_event()
                if not isinstance(request, h11.Request):
                    return
                await self._one(request)
                if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
                    return
                self._h11.start_next_cycle()
        except _Refused as refusal:
            await self._refuse(refusal.status, str(refusal))
        except h11.RemoteProtocolError as error:
            await self._refuse(error.error_status_hint, str(error))

    async def _next_event(self) -> Any:
        while True:
            event = self._h11.next_event()
            if event is not h11.NEED_DATA:
                return event
            self._h11.receive_data(await self._stream.receive_some(RECEIVE_BYTES))

    async def _body(self) -> bytes:
        body = bytearray()
        with trio.move_on_after(REQUEST_S) as scope:
            while True:
                event = await self._next_event()
                if isinstance(event, h11.Data):
                    if len(body) + len(event.data) > self._max_body:
                        raise _Refused(413, f"the body is over {self._max_body} bytes long")
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    return bytes(body)
                else:
                    raise LinkError(
                        "the caller left in the middle of a request", peer=self._stream.remote_peer
                    )
        assert scope.cancelled_caught
        raise _Refused(408, f"the request did not arrive in {REQUEST_S:.0f} s")

    async def _refuse(self, status: int, reason: str) -> None:
        if self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            text = (reason + "\n").encode()
            headers = [
                ("content-type", "text/plain; charset=utf-8"),
                ("content-length", str(len(text))),
                ("connection", "close"),
            ]
            await self._send(h11.Response(status_code=status, headers=headers))
            await self._send(h11.Data(data=text))
            await self._send(h11.EndOfMessage())

    async def _send(self, event: Any) -> None:
        data = self._h11.send(event)
        if data:
            with trio.move_on_after(WRITE_S):
                await self._stream.send_all(data)
                return
            raise LinkError(f"nothing was taken for {WRITE_S:.0f} s", peer=self._stream.remote_peer)

    async def _one(self, request: h11.Request) -> None:
        """One request and its answer."""
        if request.http_version not in (b"1.0", b"1.1"):
            raise _Refused(505, "only HTTP/1.1 is spoken here")
        body = await self._body()
        answer = _Answer(self, body)
        lost: LinkError | None = None
        with trio.CancelScope(deadline=trio.current_time() + RESPONSE_S) as scope:
            answer.scope = scope
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, answer.gone)
                try:
                    await self._app(self._scope(request), answer.receive, answer.send)
                except LinkError as error:
                    lost = error  # the caller has left; raised from in here, the nursery would wrap it
                except Exception:
                    # A mistake in one route must not take the network down with it.
                    logger.exception("the application failed at %s", request.target.decode("latin-1")[:200])
                nursery.cancel_scope.cancel()
        if lost is not None:
            raise lost
        if scope.cancelled_caught:
            if not answer.started:
                raise _Refused(504, f"the application did not answer in {RESPONSE_S:.0f} s")
            raise LinkError(
                "the application stopped in the middle of an answer", peer=self._stream.remote_peer
            )
        if not answer.finished:
            if not answer.started:
                raise _Refused(500, "the application gave no answer")
            raise LinkError("the application left an answer unfinished", peer=self._stream.remote_peer)

    async def _watch(self, gone: trio.Event) -> None:
        """Notice when the caller leaves while the application works."""
        waiting = 0
        while waiting < RECEIVE_BYTES:
            try:
                data = await self._stream.receive_some(RECEIVE_BYTES)
            except LinkError:
                data = b""
            self._h11.receive_data(data)
            if not data:
                gone.set()
                return
            waiting += len(data)

    def _scope(self, request: h11.Request) -> dict[str, Any]:
        target = request.target.decode("latin-1")
        path, _, query = target.partition("?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version.decode("latin-1"),
            "method": request.method.decode("latin-1"),
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode("latin-1"),
            "query_string": query.encode("latin-1"),
            "root_path": "",
            "headers": [(bytes(name), bytes(value)) for name, value in request.headers],
            "client": (self._stream.remote_peer, 0),
            "server": None,
            "state": {},
            "kvasir_peer": self._stream.remote_peer,
        }

    async def respond(self, event: Any) -> None:
        """Send a part of the answer."""
        await self._send(event)


class _Answer:
    """What an application calls while it answers one request."""

    def __init__(self, exchange: _Exchange, body: bytes) -> None:
        self._exchange = exchange
        self._body: bytes | None = body
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self.gone = trio.Event()
        self.scope: trio.CancelScope | None = None
        self.started = False
        self.finished = False

    async def receive(self) -> dict[str, Any]:
        """ASGI's receive."""
        if self._body is not None:
            body, self._body = self._body, None
            await trio.lowlevel.checkpoint()
            return {"type": "http.request", "body": body, "more_body": False}
        # No checkpoint once the caller has left: frameworks poll this inside a scope that is cancelled already.
        if not self.finished and not self.gone.is_set():
            await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        """ASGI's send."""
        assert self.scope is not None
        self.scope.deadline = trio.current_time() + RESPONSE_S
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
            return
        if message["type"] != "http.response.body" or self.finished or not self._status:
            raise RuntimeError(f"an application sent {message['type']} out of turn")
        body = message.get("body", b"")
        more = message.get("more_body", False)
        if not self.started:
            self.started = True
            names = {name.lower() for name, _ in self._headers}
            if not more and not names & {b"content-length", b"transfer-encoding"}:
                self._headers.append((b"content-length", str(len(body)).encode()))
            await self._exchange.respond(h11.Response(status_code=self._status, headers=self._headers))
        if body:
            await self._exchange.respond(h11.Data(data=bytes(body)))
        if not more:
            self.finished = True
            await self._exchange.respond(h11.EndOfMessage())
