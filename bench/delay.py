"""A TCP proxy that delays: every byte leaves it so many seconds after it came, in both directions.

    python bench/delay.py HOST PORT COUNT      prints COUNT ports; reads a delay in seconds per line of standard input

One process forwards for all peers of a bench, each through a port of its own, so that the delay lies on the way of
each. Rate is not limited: what is measured is distance.

Threads, not an event loop: a loop's timers count whole milliseconds, which would make 2.5 ms into 3, while a thread
sleeps to within a tenth of one.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import sys
import threading
import time

CHUNK_BYTES = 256 * 1024
MAX_HELD_CHUNKS = 4096  # of one direction on its way


class DelayingProxy:
    """Forwards connections to one target.

    Attributes:
        delay: seconds, each way; may be changed while it runs, and counts for what comes from then on.
        port: at which it listens.
    """

    def __init__(self, target: tuple[str, int], delay: float = 0.0) -> None:
        self.target = target
        self.delay = delay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            near, _ = self._listener.accept()
            try:
                far = socket.create_connection(self.target)
            except OSError:
                near.close()
                continue
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pump(near, far)
            self._pump(far, near)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        flying: queue.Queue[tuple[float, bytes]] = queue.Queue(MAX_HELD_CHUNKS)

        def read() -> None:
            data = b"-"
            while data:
                try:
                    data = source.recv(CHUNK_BYTES)
                except OSError:
                    data = b""
                flying.put((time.perf_counter() + self.delay, data))

        def write() -> None:
            while True:
                due, data = flying.get()
                left = due - time.perf_counter()
                if left > 0:
                    time.sleep(left)
                try:
                    if not data:
                        target.shutdown(socket.SHUT_WR)
                        return
                    target.sendall(data)
                except OSError:  # that end has gone: tell the other one, and let the reader run dry
                    with contextlib.suppress(OSError):
                        source.shutdown(socket.SHUT_RDWR)
                    while data:
                        _, data = flying.get()
                    return

        for task in (read, write):
            threading.Thread(target=task, daemon=True).start()


def run(host: str, port: int, count: int) -> None:
    """Serve until standard input ends."""
    proxies = [DelayingProxy((host, port)) for _ in range(count)]
    for proxy in proxies:
        print(proxy.port, flush=True)
    for line in sys.stdin:
        for proxy in proxies:
            proxy.delay = float(line)
        print("changed", flush=True)


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
