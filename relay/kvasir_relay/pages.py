"""``/metrics``, ``/health``, ``/ready`` and the status page, for the operator's own machine.

A few GET requests on a loopback port: h11 parses, this shell does the rest. Each connection has a deadline and their
number a bound, and what is sent never names a peer or an address of one.
"""

from __future__ import annotations

import html
import ipaddress
import logging
import socket
import time
from collections.abc import Callable

import h11
import trio

from kvasir_peer import __version__
from kvasir_relay.config import describe
from kvasir_relay.metrics import CONTENT_TYPE, Exporter
from kvasir_relay.server import Relay

log = logging.getLogger("kvasir_relay")

MAX_REQUEST_BYTES = 8 * 1024
MAX_CONNECTIONS = 32
REQUEST_SECONDS = 10.0
LOCAL_NAMES = frozenset({"localhost", "ip6-localhost"})

Answer = tuple[int, str, bytes]
_HTML, _TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"


class Pages:
    """The pages of one relay."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._exporter = Exporter(relay.statistics)
        self._started = time.monotonic()
        self._limit = trio.CapacityLimiter(MAX_CONNECTIONS)
        self._routes: dict[str, Callable[[], Answer]] = {
            "/metrics": lambda: (200, CONTENT_TYPE, self._exporter.render()),
            "/health": lambda: (200, _TEXT, b"ok\n"),
            "/ready": self._ready,
            "/": self._status,
        }

    async def serve(self, listening: socket.socket) -> None:
        """Answer on a listening socket until cancelled."""
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
        await trio.serve_listeners(self._connection, [listener])

    async def _connection(self, stream: trio.SocketStream) -> None:
        try:
            self._limit.acquire_nowait()
        except trio.WouldBlock:
            await trio.aclose_forcefully(stream)
            return
        try:
            async with stream:
                connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_REQUEST_BYTES)
                while True:
                    with trio.move_on_after(REQUEST_SECONDS) as scope:
                        if not await self._exchange(stream, connection):
                            return
                    if scope.cancelled_caught:
                        return
                    connection.start_next_cycle()
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError) as error:
            log.debug("a page was not served: %s", error)
        finally:
            self._limit.release()

    async def _exchange(self, stream: trio.SocketStream, connection: h11.Connection) -> bool:
        """One request and its answer; False when the connection is done."""
        request: h11.Request | None = None
        while True:
            try:
                event = connection.next_event()
            except h11.RemoteProtocolError as error:
                if connection.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
                    await self._send(
                        stream, connection, (error.error_status_hint, _TEXT, b"bad request\n"), b"GET"
                    )
                return False
            if event is h11.NEED_DATA:
                connection.receive_data(await stream.receive_some(MAX_REQUEST_BYTES))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.EndOfMessage):
                break
            elif isinstance(event, h11.ConnectionClosed):
                return False
        assert request is not None
        await self._send(stream, connection, self._answer(request), request.method)
        return connection.our_state is h11.DONE and connection.their_state is h11.DONE

    def _answer(self, request: h11.Request) -> Answer:
        host = dict(request.headers).get(b"host", b"").decode("latin-1")
        if not _is_local(host):
            # A page from elsewhere whose name was pointed at 127.0.0.1 (DNS rebinding).
            return 403, _TEXT, b"ask by a loopback address\n"
        if request.method not in (b"GET", b"HEAD"):
            return 405, _TEXT, b"only GET is known here\n"
        route = self._routes.get(request.target.decode("latin-1").partition("?")[0])
        return route() if route is not None else (404, _TEXT, b"there is no such page\n")

    async def _send(
        self, stream: trio.SocketStream, connection: h11.Connection, answer: Answer, method: bytes
    ) -> None:
        status, kind, body = answer
        headers = [
            ("content-type", kind),
            ("content-length", str(len(body))),
            ("cache-control", "no-store"),
            ("x-content-type-options", "nosniff"),
            ("content-security-policy", "default-src 'none'; style-src 'unsafe-inline'"),
        ]
        data = connection.send(h11.Response(status_code=status, headers=headers)) or b""
        if method != b"HEAD":
            data += connection.send(h11.Data(data=body)) or b""
        data += connection.send(h11.EndOfMessage()) or b""
        await stream.send_all(data)

    def _ready(self) -> Answer:
        if self._relay.draining:
            return 503, _TEXT, b"draining\n"
        return 200, _TEXT, b"ready\n"

    def _status(self) -> Answer:
        relay = self._relay
        s = relay.statistics()
        carried = s.counters.bytes_to_target + s.counters.bytes_to_source
        limits = relay.config.limits
        rows: list[tuple[str, str]] = [
            ("state", "draining" if s.draining else "ready"),
            ("version", __version__),
            ("peer id", relay.identity.peer_id),
            ("up for", _duration(time.monotonic() - self._started)),
            (
                "peers, connections",
                f"{s.peers}, {s.ledger.connections} of {limits.connections or 'any number'}",
            ),
            ("reservations", f"{s.ledger.reservations} of {limits.reservations or 'any number'}"),
            ("circuits", f"{s.ledger.circuits} of {limits.circuits or 'any number'}"),
            ("carried", _size(carried)),
            ("carried this month", _size(s.ledger.month_bytes)),
            ("refusals", str(sum(s.counters.refusals.values()))),
        ]
        table = "".join(f"<tr><th>{html.escape(n)}</th><td>{html.escape(v)}</td></tr>" for n, v in rows)
        refusals = "".join(
            f"<tr><td>{html.escape(what)}</td><td>{html.escape(reason)}</td><td>{count}</td></tr>"
            for (what, reason), count in sorted(s.counters.refusals.items(), key=lambda item: -item[1])
        )
        addresses = "".join(f"<li><code>{html.escape(a)}</code></li>" for a in relay.full_addresses)
        settings = html.escape("\n".join(describe(relay.config)))
        page = f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>kvasir-relay</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem }}
th {{ text-align: left; font-weight: normal; padding-right: 2rem; color: #555 }}
code, pre {{ overflow-wrap: anywhere; white-space: pre-wrap }}
</style>
<h1>kvasir-relay</h1>
<table>{table}</table>
<h2>Addresses</h2>
<ul>{addresses}</ul>
<h2>Refusals</h2>
<table>{refusals or "<tr><td>none</td></tr>"}</table>
<h2>Settings in force</h2>
<pre>{settings}</pre>
</html>
"""
        return 200, _HTML, page.encode()


def _is_local(host: str) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.removeprefix("[").removesuffix("]").lower()
    if name in LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60) % 60, int(seconds // 3600) % 24
    return f"{int(seconds // 86400)} d {hours} h {minutes} min"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
