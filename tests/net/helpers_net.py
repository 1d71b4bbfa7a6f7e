"""Peers, hosts and relays for the tests of the network room."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import trio

from kvasir_peer.net import maddr
from kvasir_peer.net.connection import Connection
from kvasir_peer.net.host import Host, HostLimits, Muxer, new_host
from kvasir_peer.net.link import Link
from kvasir_peer.net.node import Node
from kvasir_peer.net.yamux import MuxedStream

ROOT = Path(__file__).resolve().parents[2]
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
ECHO = "/kvasir/test/echo/1"


def key() -> bytes:
    """A fresh private key."""
    return secrets.token_bytes(32)


def pattern(count: int) -> bytes:
    """Bytes that differ at every position of a window, and are quick to make."""
    return random_block[: count % len(random_block)] + random_block * (count // len(random_block))


random_block = os.urandom(99_991)


async def echo(stream: MuxedStream) -> None:
    """Send back what comes until the end."""
    while data := await stream.receive_some():
        await stream.send_all(data)


async def echo_link(link: Link) -> None:
    """Send back every frame until the end."""
    while True:
        await link.send(await link.receive())


@asynccontextmanager
async def hosts(
    count: int = 2,
    *,
    limits: HostLimits | None = None,
    listen: tuple[str, ...] = (LOOPBACK,),
    muxer: Muxer = "own",
) -> AsyncIterator[list[Host]]:
    """Running hosts that answer echo streams."""
    async with AsyncExitStack() as stack:
        running = []
        for _ in range(count):
            host = new_host(key(), listen=listen, limits=limits, muxer=muxer)
            host.handle(ECHO, echo)
            running.append(await stack.enter_async_context(host.running()))
        yield running


def address_of(host: Host, listening: str | None = None) -> maddr.Address:
    """Where ``host`` listens."""
    return maddr.parse(f"{listening or host.listening[0]}/p2p/{host.peer_id}")


@asynccontextmanager
async def nodes(count: int = 2, **options: object) -> AsyncIterator[list[Node]]:
    """Running nodes; the first ones' addresses are known to nobody yet."""
    options.setdefault("listen", [LOOPBACK])
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Node.open(key(), **options)) for _ in range(count)]  # type: ignore[arg-type]


async def exchange(stream: MuxedStream, data: bytes) -> bytes:
    """Send ``data`` and read as many bytes back."""
    received = bytearray()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.send_all, data)
        while len(received) < len(data):
            part = await stream.receive_some()
            assert part, f"the stream ended after {len(received)} of {len(data)} bytes"
            received += part
    return bytes(received)


async def until(condition: Callable[[], object], timeout: float = 20.0, what: str = "") -> None:
    """Wait for ``condition``; a failure says what was waited for."""
    with trio.move_on_after(timeout):
        while not condition():
            await trio.sleep(0.01)
        return
    raise AssertionError(f"not in {timeout} s: {what or condition}")


async def raw_connection(host: Host) -> trio.SocketStream:
    """A bare TCP connection to where ``host`` listens."""
    address = address_of(host)
    return await trio.open_tcp_stream(address.host, address.port)


def only(host: Host, peer: str) -> Connection:
    """The one connection of ``host`` to ``peer``."""
    (connection,) = host.connections(peer)
    return connection


class RelayProcess:
    """A ``kvasir-relay`` in a process of its own, on loopback, with a key that survives restarts.

    Attributes:
        address: with peer id, once it runs.
    """

    def __init__(self, home: Path, *options: str) -> None:
        self.home = home
        self.options = options
        self.address = ""
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    def _spawn(self) -> subprocess.Popen[bytes]:
        self.home.mkdir(exist_ok=True)
        listen = f"/ip4/127.0.0.1/tcp/{self.port}"
        with (self.home / "relay.log").open("ab") as log:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "kvasir_relay",
                    "--home",
                    str(self.home),
                    "--listen",
                    listen,
                    *self.options,
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "relay")])},
                cwd=self.home,
            )

    def _log(self) -> str:
        return (self.home / "relay.log").read_text()

    def start_blocking(self) -> RelayProcess:
        """Start it and wait until it is ready, outside of trio."""
        self.process = self._spawn()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(b"/ip4/"), self._log()
        self.address = line.decode().strip()
        self.port = maddr.parse(self.address).port
        return self

    async def start(self) -> RelayProcess:
        """Start it and wait until it is ready."""
        with trio.fail_after(60):
            return await trio.to_thread.run_sync(self.start_blocking, abandon_on_cancel=True)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it as a crash does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    def freeze(self) -> None:
        """Stop it without closing its sockets."""
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self.signal(signal.SIGCONT)


@asynccontextmanager
async def relay_process(home: Path, *options: str) -> AsyncIterator[RelayProcess]:
    """A relay that runs until the end of the block."""
    relay = RelayProcess(home, *options)
    try:
        yield await relay.start()
    finally:
        relay.kill()
