"""A relay and its peers on loopback, in the test's own trio loop unless a test needs processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import trio

from kvasir_peer.identity import Identity
from kvasir_peer.net import circuit, delimited, maddr, upstream
from kvasir_peer.net.connection import Connection
from kvasir_peer.net.host import Host, new_host
from kvasir_peer.net.yamux import MuxedStream
from kvasir_relay import config as settings
from kvasir_relay.listeners import open_listeners
from kvasir_relay.messages import REASON_FIELD
from kvasir_relay.server import Relay

ROOT = Path(__file__).resolve().parents[2]
HopMessage, StopMessage = upstream.circuit_pb2.HopMessage, upstream.circuit_pb2.StopMessage

PATIENCE = 15.0  # seconds until a wait in a test has failed; a loaded machine needs a few


@asynccontextmanager
async def running_relay(
    **values: Any,
) -> AsyncIterator[Relay]:
    """A relay with settings by dotted name, ``limits__circuits=3`` for ``limits.circuits``."""
    config = make_config(**{"listen": ["/ip4/127.0.0.1/tcp/0"], **values})
    relay = Relay(Identity.generate(), config)
    listeners = open_listeners(config.listen)
    async with trio.open_nursery() as nursery:
        await nursery.start(relay.serve, listeners)
        yield relay
        nursery.cancel_scope.cancel()


def make_config(**values: Any) -> settings.Config:
    """Settings as if given by flags."""
    return settings.load({name.replace("__", "."): value for name, value in values.items()}, {})


class Refused(Exception):
    """The relay answered a request with a status other than OK."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status} {reason}")
        self.status = status
        self.reason = reason


def reason_of(message: Any) -> str:
    """The word beside a refusing status."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    unknown: Any = UnknownFieldSet(message)
    for item in unknown:
        if item.field_number == REASON_FIELD:
            return bytes(item.data).decode()
    return ""


class Peer:
    """A peer that speaks hop and stop by hand, so that tests see each byte; circuits carry plain bytes.

    Attributes:
        circuits: streams of circuits that came, in order.
        stop: called with the stop request and its stream; by default it accepts and keeps the stream.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.peer_id = host.peer_id
        send, self._came = trio.open_memory_channel[MuxedStream](1000)
        self._send = send
        self.limits: list[Any] = []
        self.stop_status = 100
        self.connection: Connection | None = None
        host.handle(circuit.STOP, self._stop)

    async def join(self, relay: Relay, address: str | None = None) -> Connection:
        """A new connection to the relay."""
        target = maddr.parse(address or relay.full_addresses[0])
        with trio.fail_after(PATIENCE):
            self.connection = await self.host.dial(target)
        return self.connection

    async def reserve(self, connection: Connection | None = None, message: Any = None) -> Any:
        """Reserve; the relay's answer. Raises Refused."""
        request = message or HopMessage(type=HopMessage.RESERVE)
        stream, answer = await self._ask(connection or self.connection, request)
        stream.close()
        return answer

    async def connect(self, peer_id: str, connection: Connection | None = None) -> MuxedStream:
        """A circuit to a peer; its stream. Raises Refused."""
        request = HopMessage(type=HopMessage.CONNECT)
        request.peer.id = upstream.PeerID.from_base58(peer_id).to_bytes()
        return (await self._ask(connection or self.connection, request))[0]

    async def _ask(self, connection: Connection | None, request: Any) -> tuple[MuxedStream, Any]:
        assert connection is not None
        with trio.fail_after(PATIENCE):
            stream = await connection.open_stream(circuit.HOP)
            await delimited.write_message(stream, request)
            answer = await delimited.read_message(stream, HopMessage)
        assert answer.type == HopMessage.STATUS
        if answer.status != circuit.OK:
            with trio.fail_after(PATIENCE):
                assert await stream.receive_some() == b"", "something follows a refusal"
            stream.close()
            raise Refused(answer.status, reason_of(answer))
        return stream, answer

    async def _stop(self, stream: MuxedStream) -> None:
        request = await delimited.read_message(stream, StopMessage)
        self.limits.append(request.limit if request.HasField("limit") else None)
        if self.stop_status:
            answer: Any = StopMessage(type=StopMessage.STATUS)
            answer.status = self.stop_status
            await delimited.write_message(stream, answer)
        if self.stop_status == circuit.OK:
            stream.handed_over = True
            await self._send.send(stream)
        else:
            await trio.sleep(PATIENCE)

    async def incoming(self) -> MuxedStream:
        """The next circuit that came."""
        with trio.fail_after(PATIENCE):
            return await self._came.receive()


@asynccontextmanager
async def running_peers(count: int) -> AsyncIterator[list[Peer]]:
    """Peers that are not connected to anything."""
    async with trio.open_nursery() as nursery:
        peers: list[Peer] = []
        stop = trio.Event()

        async def run(*, task_status: trio.TaskStatus[Peer]) -> None:
            host = new_host(Identity.generate().private_key)
            async with host.running():
                task_status.started(Peer(host))
                await stop.wait()

        for _ in range(count):
            peers.append(await nursery.start(run))
        try:
            yield peers
        finally:
            stop.set()


@asynccontextmanager
async def joined(relay: Relay, count: int) -> AsyncIterator[list[Peer]]:
    """Peers with a reservation each."""
    async with running_peers(count) as peers:
        for peer in peers:
            await peer.join(relay)
            await peer.reserve()
        yield peers


async def joined_circuit(source: Peer, target: Peer) -> tuple[MuxedStream, MuxedStream]:
    """Both ends of a new circuit."""
    near = await source.connect(target.peer_id)
    return near, await target.incoming()


async def receive(stream: MuxedStream, count: int) -> bytes:
    """Exactly ``count`` bytes, in time."""
    parts = bytearray()
    with trio.fail_after(PATIENCE):
        while len(parts) < count:
            data = await stream.receive_some(count - len(parts))
            assert data, f"the stream ended after {len(parts)} of {count} bytes"
            parts += data
    return bytes(parts)


async def until(condition: Callable[[], object]) -> None:
    """Wait until something has happened; fails in the end."""
    with trio.fail_after(PATIENCE):
        while not condition():
            await trio.sleep(0.005)


class RelayProcess:
    """``kvasir-relay`` as a process.

    Attributes:
        address: the first that it printed.
        lines: what it wrote to standard error so far is in the file ``log``.
    """

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log
        assert process.stdout is not None
        self.address = process.stdout.readline().strip()
        assert self.address, f"the relay did not start: {self.log}"

    @property
    def log(self) -> str:
        """Standard error so far."""
        return self._log.read_text()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def wait(self) -> int:
        """Exit status, in time."""
        with trio.fail_after(PATIENCE):
            return await trio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvasir_relay", *arguments]


def environment(**values: str) -> dict[str, str]:
    """The environment of a process that finds the packages of this checkout."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVASIR_")}
    return {**clean, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'relay'}", **values}


@contextmanager
def relay_process(home: Path, *arguments: str, **environ: str) -> Iterator[RelayProcess]:
    """A relay in a process of its own; killed at the end if it is still there."""
    log = home / "relay.log"
    home.mkdir(parents=True, exist_ok=True)
    with log.open("w") as errors:
        process = subprocess.Popen(
            command("--home", str(home), "--listen", "/ip4/127.0.0.1/tcp/0", *arguments),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(**environ),
        )
        try:
            yield RelayProcess(process, log)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
