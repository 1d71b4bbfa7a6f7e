"""A TCP proxy that delays: every byte leaves it so many seconds after it came, in both directions.

    python bench/delay.py HOST PORT COUNT      prints COUNT ports; reads a delay in seconds per line of standard input

One process forwards for all peers of a bench, each through a port of its own, so that the delay lies on the way of
each. Rate is not limited: what is measured is distance.
"""

from __future__ import annotations

import sys
from collections import deque
from functools import partial

import trio

CHUNK_BYTES = 256 * 1024
MAX_HELD_BYTES = 64 << 20  # of one direction on its way: a second of half a gigabit


class DelayingProxy:
    """Forwards connections to one target.

    Attributes:
        delay: seconds, each way; may be changed while it runs, and counts for what comes from then on.
    """

    def __init__(self, target: tuple[str, int], delay: float = 0.0) -> None:
        self.target = target
        self.delay = delay

    async def serve(self, near: trio.SocketStream) -> None:
        """One connection, until both directions have ended."""
        try:
            far = await trio.open_tcp_stream(*self.target)
        except OSError:
            await trio.aclose_forcefully(near)
            return
        try:
            async with near, far, trio.open_nursery() as nursery:
                nursery.start_soon(self._pump, near, far)
                nursery.start_soon(self._pump, far, near)
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # an end has gone; the other one has been told by now

    async def _pump(self, source: trio.SocketStream, target: trio.SocketStream) -> None:
        flying: deque[tuple[float, bytes]] = deque()
        held = 0
        came, went = trio.Event(), trio.Event()

        async def read() -> None:
            nonlocal held, came
            data = b"-"
            while data:
                while held > MAX_HELD_BYTES:
                    await went.wait()
                data = bytes(await source.receive_some(CHUNK_BYTES))
                flying.append((trio.current_time() + self.delay, data))
                held += len(data)
                came.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            while True:
                while not flying:
                    came = trio.Event()
                    await came.wait()
                due, data = flying.popleft()
                await trio.sleep_until(due)
                if not data:
                    await target.send_eof()
                    return
                await target.send_all(data)
                held -= len(data)
                went.set()
                went = trio.Event()


async def run(host: str, port: int, count: int) -> None:
    """Serve until standard input ends."""
    proxies = [DelayingProxy((host, port)) for _ in range(count)]
    async with trio.open_nursery() as nursery:
        for proxy in proxies:
            (listener,) = await nursery.start(partial(trio.serve_tcp, proxy.serve, 0, host="127.0.0.1"))
            print(listener.socket.getsockname()[1], flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            for proxy in proxies:
                proxy.delay = float(line)
            print("changed", flush=True)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(run, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
