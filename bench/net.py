"""The transport of ``kvasir_peer.net`` on loopback, two processes, against trio's TLS in the same run.

    python bench/net.py [--quick] [--json FILE]

Round trips are of one frame there and back, by turns between the two transports, medians over all rounds; bulk is one
way until the receiver has acknowledged the last byte. CPU adds both processes. A proxy in the measuring process
delays by 20 ms each way and passes 40 MB/s. Each row says whether its goal holds.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import json
import os
import secrets
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "net"))

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from proxy import tcp_proxy
from rows import Rows

from kvasir_peer.net import maddr
from kvasir_peer.net.link import Link, Priority
from kvasir_peer.net.node import Node

ECHO, SINK = "/kvasir/bench/echo/1", "/kvasir/bench/sink/1"
MAX_FRAME = 8 * 1024 * 1024
LENGTH = struct.Struct(">I")
CPU = b"cpu?"

Echo = Callable[[bytes], Awaitable[int]]


# --- TLS, as one would write it with trio ------------------------------------------------------------------


class TlsFrames:
    """Frames behind a length of four bytes on a TLS stream."""

    def __init__(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def send(self, frame: bytes) -> None:
        await self._stream.send_all(LENGTH.pack(len(frame)) + frame)

    async def _fill(self, count: int) -> None:
        while len(self._buffer) < count:
            part = await self._stream.receive_some(256 * 1024)
            if not part:
                raise EOFError
            self._buffer += part

    async def receive(self) -> bytes:
        await self._fill(4)
        (size,) = LENGTH.unpack_from(self._buffer)
        await self._fill(4 + size)
        frame = bytes(self._buffer[4 : 4 + size])
        del self._buffer[: 4 + size]
        return frame


def certificate() -> bytes:
    """A key and a certificate for 127.0.0.1, PEM."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bench")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(private, hashes.SHA256())
    )
    return private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + signed.public_bytes(serialization.Encoding.PEM)


# --- the answering process ---------------------------------------------------------------------------------


def cpu() -> float:
    """CPU seconds of this process, all threads, user and system."""
    return time.process_time()


async def answer(receive: Callable[[], Awaitable[bytes]], send: Callable[[bytes], Awaitable[None]]) -> None:
    """Echo frames; a frame that begins with ``sink`` is counted and only its last one acknowledged."""
    while True:
        frame = await receive()
        head = bytes(frame[:4])
        if head == CPU:
            await send(struct.pack(">d", cpu()))
        elif head == b"sink":
            if frame[4]:
                await send(b"done")
        else:
            await send(frame)


async def serve(pem: str) -> None:
    """Serve both transports until standard input ends; print where."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem)

    async def tls(raw: trio.SocketStream) -> None:
        raw.setsockopt(6, 1, 1)  # TCP_NODELAY, as on ours
        frames = TlsFrames(trio.SSLStream(raw, context, server_side=True))
        try:
            await answer(frames.receive, frames.send)
        except (EOFError, trio.BrokenResourceError):
            return

    async def link(link: Link) -> None:
        await answer(link.receive, lambda frame: link.send(frame, Priority.DECODE))

    async with (
        Node.open(secrets.token_bytes(32), listen=["/ip4/127.0.0.1/tcp/0"]) as node,
        trio.open_nursery() as nursery,
    ):
        node.handle(ECHO, MAX_FRAME, link)
        node.handle(SINK, MAX_FRAME, link)
        listeners = await nursery.start(trio.serve_tcp, tls, 0)
        print(
            json.dumps(
                {
                    "peer": node.peer_id,
                    "addresses": node.addresses(),
                    "tls": listeners[0].socket.getsockname()[1],
                }
            ),
            flush=True,
        )
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


# --- the measuring process ---------------------------------------------------------------------------------


class Side:
    """One transport as seen from the measuring process."""

    def __init__(
        self,
        send: Callable[[bytes, Priority], Awaitable[None]],
        receive: Callable[[], Awaitable[bytes]],
    ) -> None:
        self.send, self.receive = send, receive

    async def round_trip(self, frame: bytes) -> float:
        """Seconds."""
        begun = time.perf_counter()
        await self.send(frame, Priority.DECODE)
        await self.receive()
        return time.perf_counter() - begun

    async def remote_cpu(self) -> float:
        """CPU seconds of the other process."""
        await self.send(CPU, Priority.DECODE)
        (seconds,) = struct.unpack(">d", bytes(await self.receive()))
        return seconds

    async def bulk(self, size: int, count: int) -> float:
        """Bytes a second, one way."""
        frame = b"sink\0" + os.urandom(size - 5)
        last = b"sink\1" + frame[5:]
        begun = time.perf_counter()
        for number in range(count):
            await self.send(last if number == count - 1 else frame, Priority.PREFILL)
        await self.receive()
        return size * count / (time.perf_counter() - begun)

    async def cpu_per_echo(self, size: int, count: int) -> float:
        """CPU seconds of both processes for one frame there and back."""
        frame = os.urandom(size)
        remote, local = await self.remote_cpu(), cpu()
        for _ in range(count):
            await self.send(frame, Priority.DECODE)
            await self.receive()
        local = cpu() - local
        return (local + await self.remote_cpu() - remote) / count


def median_ms(samples: list[float]) -> float:
    return statistics.median(samples) * 1000


async def against_tls(rows: Rows, ours: Side, tls: Side, quick: bool) -> None:
    rounds, echoes, bulks = (3, 60, 12) if quick else (8, 150, 25)
    sides = {"kvasir": ours, "tls": tls}
    for size in (1024, 16 * 1024, 256 * 1024):
        frame = os.urandom(size)
        samples: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                for _ in range(10):
                    await side.round_trip(frame)
                samples[name] += [
                    await side.round_trip(frame) for _ in range(echoes if size < 10**5 else echoes // 6)
                ]
        for name in sides:
            rows.add(f"round trip, {size // 1024} KB, {name}, median", median_ms(samples[name]), "ms")
        ratio = statistics.median(samples["kvasir"]) / statistics.median(samples["tls"])
        if size == 16 * 1024:
            rows.add("round trip, 16 KB, against TLS", ratio, "x", "<= 1.2", ratio <= 1.2)
        else:
            rows.add(f"round trip, {size // 1024} KB, against TLS", ratio, "x")
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            rates[name].append(await side.bulk(4 * 1024 * 1024, bulks))
    for name in sides:
        rows.add(f"bulk, 4 MB frames, {name}, median", statistics.median(rates[name]) / 1e6, "MB/s")
    ratio = statistics.median(rates["kvasir"]) / statistics.median(rates["tls"])
    rows.add("bulk, 4 MB frames, against TLS", ratio, "x", ">= 1.2", ratio >= 1.2)
    costs: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            costs[name].append(await side.cpu_per_echo(1024, 4 * echoes))
    for name in sides:
        rows.add(
            f"CPU for a 1 KB echo, both ends, {name}, median", statistics.median(costs[name]) * 1e6, "us"
        )
    ratio = statistics.median(costs["kvasir"]) / statistics.median(costs["tls"])
    rows.add("CPU for a 1 KB echo, against TLS", ratio, "x", "<= 1.0", ratio <= 1.0)


async def beside_bulk(rows: Rows, ours: Side, bulk: Side, quick: bool) -> None:
    """A small frame every 4 ms, alone and beside bulk on another stream of the same connection, by turns."""
    frame = os.urandom(1024)
    quiet: list[float] = []
    busy: list[float] = []

    async def paced(samples: list[float]) -> None:
        for _ in range(60):
            await trio.sleep(0.004)
            samples.append(await ours.round_trip(frame))

    async def endless() -> None:
        while True:
            await bulk.bulk(4 * 1024 * 1024, 4)

    for _ in range(2 if quick else 5):
        await paced(quiet)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(endless)
            await trio.sleep(0.1)
            await paced(busy)
            nursery.cancel_scope.cancel()
        with trio.move_on_after(0.5):
            while True:
                await bulk.receive()
    rows.add("round trip, 1 KB, paced, quiet, median", median_ms(quiet), "ms")
    rows.add("round trip, 1 KB, paced, beside bulk, median", median_ms(busy), "ms")
    ratio = statistics.median(busy) / statistics.median(quiet)
    rows.add("round trip, 1 KB, beside bulk against quiet", ratio, "x", "<= 2.0", ratio <= 2.0)


async def over_a_line(rows: Rows, where: dict[str, object]) -> None:
    """20 ms each way and 40 MB/s: how fast is the second second of a transfer, and the first."""
    target = maddr.parse(where["addresses"][0])  # type: ignore[index]
    async with (
        tcp_proxy((target.host, target.port), delay=0.020, rate=40e6) as proxy,
        Node.open(secrets.token_bytes(32)) as fresh,
    ):
        address = f"/ip4/127.0.0.1/tcp/{proxy.port}/p2p/{target.peer}"
        link = await fresh.open_link(target.peer, SINK, addresses=[address])
        small = await fresh.open_link(target.peer, ECHO)
        other = Side(small.send, small.receive)
        quiet = [await other.round_trip(b"x" * 1024) for _ in range(7)]
        begun = trio.current_time()
        rates: list[tuple[float, float]] = []
        beside: list[float] = []

        async def probe() -> None:
            while True:
                beside.append(await other.round_trip(b"x" * 1024))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(probe)
            before = 0
            frame = b"sink\0" + os.urandom(1024 * 1024 - 5)
            sent = 0
            while trio.current_time() < begun + 2.2:
                await link.send(frame, Priority.PREFILL)
                sent += len(frame)
                rates.append((trio.current_time() - begun, sent - before))
            nursery.cancel_scope.cancel()
        second = [(at, total) for at, total in rates if 1.0 <= at <= 2.0]
        rate = (second[-1][1] - second[0][1]) / (second[-1][0] - second[0][0])
        rows.add(
            "line of 20 ms and 40 MB/s: rate in the second second",
            rate / 1e6,
            "MB/s",
            ">= 36",
            rate >= 36e6,
        )
        rows.add("line of 20 ms and 40 MB/s: round trip, 1 KB, quiet", median_ms(quiet), "ms")
        rows.add("line of 20 ms and 40 MB/s: round trip, 1 KB, beside bulk", median_ms(beside), "ms")


async def measure(quick: bool, pem: str, where: dict[str, object]) -> Rows:
    rows = Rows()
    context = ssl.create_default_context(cafile=pem)
    async with Node.open(secrets.token_bytes(32)) as node:
        peer = str(where["peer"])
        link = await node.open_link(peer, ECHO, max_frame=MAX_FRAME, addresses=where["addresses"])  # type: ignore[arg-type]
        bulk = await node.open_link(peer, SINK, max_frame=MAX_FRAME)
        raw = await trio.open_tcp_stream("127.0.0.1", int(str(where["tls"])))
        raw.setsockopt(6, 1, 1)
        frames = TlsFrames(trio.SSLStream(raw, context, server_hostname="127.0.0.1"))
        ours = Side(link.send, link.receive)
        tls = Side(lambda frame, priority: frames.send(frame), frames.receive)
        await against_tls(rows, ours, tls, quick)
        await beside_bulk(rows, ours, Side(bulk.send, bulk.receive), quick)
        await over_a_line(rows, where)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few rounds only")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        trio.run(serve, arguments.serve)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        pem = str(Path(folder) / "tls.pem")
        Path(pem).write_bytes(certificate())
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve", pem],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            where = json.loads(server.stdout.readline())
            rows = trio.run(measure, arguments.quick, pem, where)
        finally:
            server.kill()
            server.wait()
    rows.write(arguments.json)
    return 0 if not rows.missed else 1


if __name__ == "__main__":
    sys.exit(main())
