"""A TCP proxy that delays, limits, freezes and cuts: the network as it is, for tests on loopback."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import trio

CHUNK_BYTES = 64 * 1024
BURST_S = 0.005  # how much of the rate may pass at once


class TcpProxy:
    """Forwards connections to ``target``.

    Attributes:
        host, port: where it listens.
        delay: seconds each way.
        rate: bytes a second each way and connection, or None.
        connections: forwarded since the start.
    """

    def __init__(self, target: tuple[str, int], delay: float, rate: float | None) -> None:
        self.target = target
        self.delay = delay
        self.rate = rate
        self.host = "127.0.0.1"
        self.port = 0
        self.connections = 0
        self._open: set[trio.SocketStream] = set()
        self._flowing = trio.Event()
        self._flowing.set()
        self._refusing = False

    def cut(self) -> None:
        """Reset all connections that are open."""
        for stream in list(self._open):
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stream.socket.close()
        self._open.clear()

    def freeze(self) -> None:
        """Forward nothing from now on; connections stay open and go silent."""
        self._flowing = trio.Event()

    def thaw(self) -> None:
        """Forward again."""
        self._flowing.set()

    def refuse(self, refusing: bool = True) -> None:
        """Close new connections at once."""
        self._refusing = refusing

    async def _serve(self, near: trio.SocketStream) -> None:
        if self._refusing:
            await trio.aclose_forcefully(near)
            return
        try:
            far = await trio.open_tcp_stream(*self.target)
        except OSError:
            await trio.aclose_forcefully(near)
            return
        self.connections += 1
        self._open |= {near, far}
        try:
            async with near, far, trio.open_nursery() as nursery:
                nursery.start_soon(self._pump, near, far)
                nursery.start_soon(self._pump, far, near)
        except* (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass
        finally:
            self._open -= {near, far}

    async def _pump(self, source: trio.SocketStream, target: trio.SocketStream) -> None:
        queue: deque[tuple[float, bytes]] = deque()
        arrived, ended = trio.Event(), False
        room = trio.Event()

        async def read() -> None:
            nonlocal arrived, ended, room
            while not ended:
                # As much as the line holds, and some more for the buffers of its routers.
                while sum(len(data) for _, data in queue) > max(
                    CHUNK_BYTES, 2 * self.delay * (self.rate or 1e9)
                ):
                    room = trio.Event()
                    await room.wait()
                data = await source.receive_some(CHUNK_BYTES)
                ended = not data
                queue.append((trio.current_time() + self.delay, bytes(data)))
                arrived.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            free_at = trio.current_time()
            while True:
                while not queue:
                    arrived = trio.Event()
                    await arrived.wait()
                due, data = queue.popleft()
                room.set()
                await self._flowing.wait()
                await trio.sleep_until(due)
                if not data:
                    await target.send_eof()
                    return
                if self.rate:
                    free_at = max(free_at, trio.current_time() - BURST_S) + len(data) / self.rate
                    await trio.sleep_until(free_at)
                await target.send_all(data)


@asynccontextmanager
async def tcp_proxy(
    target: tuple[str, int], *, delay: float = 0.0, rate: float | None = None
) -> AsyncIterator[TcpProxy]:
    """A proxy to ``target`` that runs until the end of the block."""
    proxy = TcpProxy(target, delay, rate)
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, proxy._serve, 0, host=proxy.host))
        proxy.port = listeners[0].socket.getsockname()[1]
        try:
            yield proxy
        finally:
            nursery.cancel_scope.cancel()
