"""What a handshake runs over: something that receives some bytes, sends some, and can be closed.

``trio.abc.Stream`` has these methods, and so have ``MuxedStream`` (a circuit) and ``TcpDuplex``.
"""

from __future__ import annotations

import socket
from typing import Protocol

import trio

from kvasir_peer.errors import LinkError


class Duplex(Protocol):
    """A byte stream in both directions."""

    async def receive_some(self, max_bytes: int) -> bytes: ...

    async def send_all(self, data: bytes | bytearray | memoryview) -> None: ...

    async def aclose(self) -> None: ...


async def receive_exactly(duplex: Duplex, count: int) -> bytes:
    """``count`` bytes. Raises LinkError when the stream ends before."""
    parts = bytearray()
    while len(parts) < count:
        part = await duplex.receive_some(count - len(parts))
        if not part:
            raise LinkError("the other side closed the connection in the middle of a message")
        parts += part
    return bytes(parts)


class TcpDuplex:
    """A connected non-blocking TCP socket, used without read-ahead so that the carrier can take it over."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._closed = False

    async def receive_some(self, max_bytes: int) -> bytes:
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            if self._closed:
                raise LinkError("the connection is closed")
            try:
                data = self.socket.recv(max_bytes)
            except (BlockingIOError, InterruptedError):
                await _wait(trio.lowlevel.wait_readable, self.socket)
            except OSError as error:
                raise LinkError(f"the connection broke: {error.strerror or error}") from error
            else:
                return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        rest = memoryview(data)
        while rest:
            if self._closed:
                raise LinkError("the connection is closed")
            try:
                rest = rest[self.socket.send(rest) :]
            except (BlockingIOError, InterruptedError):
                await _wait(trio.lowlevel.wait_writable, self.socket)
            except OSError as error:
                raise LinkError(f"the connection broke: {error.strerror or error}") from error

    def abort(self) -> None:
        """Close at once; safe to call twice."""
        if not self._closed:
            self._closed = True
            trio.lowlevel.notify_closing(self.socket)
            self.socket.close()

    async def aclose(self) -> None:
        self.abort()
        await trio.lowlevel.checkpoint()


async def _wait(wait: object, sock: socket.socket) -> None:
    try:
        await wait(sock)  # type: ignore[operator]
    except (trio.ClosedResourceError, OSError) as error:
        raise LinkError("the connection was closed") from error


class Waiter:
    """Where tasks wait to be woken; quick where it is one task, as it nearly always is."""

    __slots__ = ("_others", "_task")

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None
        self._others: trio.lowlevel.ParkingLot | None = None

    async def park(self) -> None:
        """Wait to be woken."""
        if self._task is None:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._cancelled)
        else:
            if self._others is None:
                self._others = trio.lowlevel.ParkingLot()
            await self._others.park()

    def _cancelled(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def unpark(self) -> None:
        """Wake one task."""
        task = self._task
        if task is not None:
            self._task = None
            trio.lowlevel.reschedule(task)
        elif self._others is not None:
            self._others.unpark()

    def unpark_all(self) -> None:
        """Wake all tasks."""
        self.unpark()
        if self._others is not None:
            self._others.unpark_all()
