"""The sockets that the relay listens on."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from kvasir_peer.errors import LinkError, SettingsError
from kvasir_peer.net.duplex import TcpDuplex

log = logging.getLogger("kvasir_relay")

BACKLOG = 1024  # a whole swarm comes back at once after a restart
PAUSE_WITHOUT_DESCRIPTORS = 0.1  # seconds; the kernel keeps those who wait


@dataclass(eq=False)
class Listener:
    """A listening socket.

    Attributes:
        host, port: what it is bound to.
        kinds: what it speaks: plain TCP (False), WebSocket (True), or both.
    """

    socket: socket.socket
    host: str
    port: int
    kinds: frozenset[bool]

    async def run(self, accepted: Callable[[Listener, TcpDuplex, str, int], Awaitable[None]]) -> None:
        """Accept for ever, each connection in a task of its own."""
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    await trio.lowlevel.wait_readable(self.socket)
                    accepted_socket, place = self.socket.accept()
                except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                    continue
                except (trio.ClosedResourceError, ValueError):
                    return  # closed: the relay drains
                except OSError as error:
                    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                        log.error(
                            "cannot accept connections: %s; raise the limit of open files", error.strerror
                        )
                        await trio.sleep(PAUSE_WITHOUT_DESCRIPTORS)
                        continue
                    if self.socket.fileno() < 0:
                        return
                    log.warning("a connection was lost while it was accepted: %s", error)
                    continue
                accepted_socket.setblocking(False)
                nursery.start_soon(accepted, self, TcpDuplex(accepted_socket), place[0], place[1])

    def close(self) -> None:
        """Accept no more; a second time does nothing."""
        if self.socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self.socket)
            self.socket.close()


async def speaks_websocket(listener: Listener, duplex: TcpDuplex) -> bool:
    """Whether this connection is WebSocket; where both are spoken, the first byte tells (a GET, or a length)."""
    if len(listener.kinds) == 1:
        return next(iter(listener.kinds))
    await trio.lowlevel.checkpoint_if_cancelled()
    while True:
        try:
            return duplex.socket.recv(1, socket.MSG_PEEK) == b"G"
        except (BlockingIOError, InterruptedError):
            await trio.lowlevel.wait_readable(duplex.socket)
        except OSError as error:
            raise LinkError(f"the connection broke: {error}") from error


def open_listeners(configured: Sequence[str]) -> list[Listener]:
    """Listen on the addresses of the configuration; one that stands there plain and as WebSocket shares its port.

    Raises:
        SettingsError: one of them cannot be had; then none is kept.
    """
    places: dict[tuple[str, str], list[str]] = {}
    for text in configured:
        base = text.removesuffix("/ws")
        # Port 0 is a port of its own each time.
        places.setdefault((base, text if base.endswith("/tcp/0") else ""), []).append(text)
    opened: list[Listener] = []
    try:
        for (base, _), texts in places.items():
            opened.append(_open(base, frozenset(text.endswith("/ws") for text in texts)))
    except SettingsError:
        for listener in opened:
            listener.close()
        raise
    return opened


def _open(base: str, kinds: frozenset[bool]) -> Listener:
    _, version, host, _, port = base.split("/")
    sock = socket.socket(socket.AF_INET6 if version == "ip6" else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if version == "ip6":
            # /ip6/::/ means IPv6 alone: IPv4 has an address of its own in the configuration.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, int(port)))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        advice = "choose another port or stop what uses it"
        if error.errno == errno.EACCES:
            advice = "ports below 1024 need a privilege (systemd: AmbientCapabilities=CAP_NET_BIND_SERVICE)"
        elif error.errno == errno.EADDRNOTAVAIL:
            advice = "this machine has no such address; 0.0.0.0 means all it has"
        raise SettingsError(f"cannot listen on {base}: {error.strerror}; {advice}") from error
    bound = sock.getsockname()
    return Listener(sock, bound[0], bound[1], kinds)


def open_http_socket(place: tuple[str, int]) -> socket.socket:
    """A listening socket for metrics and status. Raises SettingsError when it cannot be had."""
    host, port = place
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(64)
    except OSError as error:
        sock.close()
        raise SettingsError(
            f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another port with --http"
        ) from error
    return sock
