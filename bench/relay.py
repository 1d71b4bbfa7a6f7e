"""What the relay can do, with its goals: ``python bench/relay.py [--quick] [--json FILE]``.

Everything runs on loopback, each part in a process of its own: the relay, a peer that answers (``--part answer``) and
this one. Peers speak Noise and Yamux end to end through the relay, as they do in use. On a busy machine the rates by
CPU time, the ratios and the smallest times are what to look at.

Run it where the package is installed, or with ``PYTHONPATH=.:relay``. Rows: name, value, unit, goal (or null), holds
(or null).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import trio
from rows import Rows

from kvasir_peer.errors import LinkError
from kvasir_peer.identity import Identity
from kvasir_peer.net import circuit, maddr
from kvasir_peer.net.connection import Connection
from kvasir_peer.net.duplex import receive_exactly
from kvasir_peer.net.host import Host, new_host
from kvasir_peer.net.relays import RelaySupervisor
from kvasir_peer.net.yamux import MuxedStream, Priority

ROOT = Path(__file__).resolve().parent.parent
ECHO, SINK = "/bench/echo/1", "/bench/sink/1"
KIB, MIB, GIB = 2**10, 2**20, 2**30


# --- the peer that answers ---------------------------------------------------------------------------------------


async def answer(relay: str) -> None:
    """Listen, hold a reservation, echo frames and swallow bulk, until killed."""
    host = new_host(Identity.generate().private_key, listen=["/ip4/127.0.0.1/tcp/0"])
    host.handle(ECHO, _echo)
    host.handle(SINK, _sink)
    circuit.CircuitListener(host, lambda peer: True)
    async with host.running():
        connection = await host.dial(maddr.parse(relay))
        await circuit.reserve(connection, host.peer_id)
        print(
            json.dumps({"peer": host.peer_id, "direct": f"{host.listening[0]}/p2p/{host.peer_id}"}),
            flush=True,
        )
        await trio.sleep_forever()


async def _echo(stream: MuxedStream) -> None:
    stream.priority = Priority.DECODE
    while True:
        size = await receive_exactly(stream, 4)
        await stream.send_all(size + await receive_exactly(stream, int.from_bytes(size, "big")))


async def _sink(stream: MuxedStream) -> None:
    """Swallow as many bytes as the first eight say, then say so."""
    total = left = int.from_bytes(await receive_exactly(stream, 8), "big")
    while left:
        data = await stream.receive_view(left)
        if not data:
            return
        left -= len(data)
    await stream.send_all(total.to_bytes(8, "big"))


# --- processes ---------------------------------------------------------------------------------------------------


class Process:
    """A part of the bench in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "relay")])
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().strip()
        self.ps = psutil.Process(self.process.pid)

    def cpu(self) -> float:
        times = self.ps.cpu_times()
        return times.user + times.system

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def start_relay(home: str, *arguments: str) -> Process:
    return Process(
        "-m",
        "kvasir_relay",
        *("--home", home, "--listen", "/ip4/127.0.0.1/tcp/0", "--log.level", "warning", "--drain-time", "0"),
        *arguments,
    )


def start_answer(relay: str) -> tuple[Process, dict[str, str]]:
    process = Process(__file__, "--part", "answer", "--relay", relay)
    return process, json.loads(process.line)


@asynccontextmanager
async def client(relay: str) -> AsyncIterator[tuple[Host, Connection]]:
    """A peer of this process, connected to the relay."""
    host = new_host(Identity.generate().private_key)
    async with host.running():
        yield host, await host.dial(maddr.parse(relay))


# --- measurements ------------------------------------------------------------------------------------------------


async def round_trips(stream: MuxedStream, size: int, count: int, pause: float = 0.0) -> list[float]:
    """Seconds for a frame there and back, one after the other."""
    frame = size.to_bytes(4, "big") + os.urandom(size)
    times = []
    for _ in range(count):
        if pause:
            await trio.sleep(pause)
        start = time.perf_counter()
        await stream.send_all(frame)
        await receive_exactly(stream, 4 + size)
        times.append(time.perf_counter() - start)
    return times


async def bulk(stream: MuxedStream, total: int, piece: int = 64 * KIB) -> float:
    """Seconds for ``total`` bytes one way, until the other side has them all."""
    block = os.urandom(piece)
    start = time.perf_counter()
    await stream.send_all(total.to_bytes(8, "big"))
    left = total
    while left:
        await stream.send_all(block[: min(piece, left)])
        left -= min(piece, left)
    with trio.fail_after(30):
        assert int.from_bytes(await receive_exactly(stream, 8), "big") == total
    return time.perf_counter() - start


async def opened(connection: Connection, protocol: str, priority: Priority) -> MuxedStream:
    stream = await connection.open_stream(protocol)
    stream.priority = priority
    return stream


async def latency_and_rate(rows: Rows, relay: Process, quick: bool) -> None:
    process, place = start_answer(relay.line)
    try:
        async with client(relay.line) as (host, at_relay):
            direct = await host.dial(maddr.parse(place["direct"]))
            relayed = await circuit.connect(host, at_relay, place["peer"])
            echo_direct = await opened(direct, ECHO, Priority.DECODE)
            echo_relayed = await opened(relayed, ECHO, Priority.DECODE)
            rounds, count = (4, 60) if quick else (10, 150)
            for size in (KIB, 16 * KIB):
                near: list[list[float]] = []
                far: list[list[float]] = []
                for _ in range(rounds):  # interleaved, so that the load of the machine hits both
                    near.append(await round_trips(echo_direct, size, count))
                    far.append(await round_trips(echo_relayed, size, count))
                compare(
                    rows,
                    f"{size // KIB} KB round trip",
                    ("direct", near),
                    ("relayed", far),
                    2.8 if size == 16 * KIB else None,
                )

            total = (96 if quick else 512) * MIB
            sink = await opened(relayed, SINK, Priority.WEIGHTS)
            cpu = relay.cpu()
            seconds = await bulk(sink, total)
            cpu = relay.cpu() - cpu
            rows.add("bulk in 64 KB frames, end to end", total / seconds / 1e6, "MB/s")
            rate = total / cpu / 1e6
            rows.add("forwarding per core (relay CPU)", rate, "MB/s", ">= 150", rate >= 150)

            await beside_bulk(rows, relayed, echo_relayed, quick)
    finally:
        process.stop()


def compare(
    rows: Rows,
    name: str,
    first: tuple[str, list[list[float]]],
    second: tuple[str, list[list[float]]],
    goal: float | None,
) -> None:
    """Medians of two kinds of times over all rounds, and their ratio."""
    (first_name, first_rounds), (second_name, second_rounds) = first, second
    a = statistics.median(itertools.chain.from_iterable(first_rounds))
    b = statistics.median(itertools.chain.from_iterable(second_rounds))
    rows.add(f"{name}, {first_name}", a * 1e3, "ms")
    rows.add(f"{name}, {second_name}", b * 1e3, "ms")
    text, holds = (f"<= {goal}", b / a <= goal) if goal is not None else ("", None)
    rows.add(f"{name}, {second_name} / {first_name}", b / a, "times", text, holds)


async def beside_bulk(rows: Rows, relayed: Connection, echo: MuxedStream, quick: bool) -> None:
    """A small message while a prefill flows on another stream of the same circuit; both paced alike."""
    rounds, count = (4, 40) if quick else (8, 80)
    block = os.urandom(64 * KIB)
    quiet: list[list[float]] = []
    busy: list[list[float]] = []
    for _ in range(rounds):
        quiet.append(await round_trips(echo, KIB, count, pause=0.004))
        sink = await opened(relayed, SINK, Priority.PREFILL)
        await sink.send_all((1 << 40).to_bytes(8, "big"))

        async def pour(stream: MuxedStream) -> None:
            while True:
                await stream.send_all(block)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pour, sink)
            await trio.sleep(0.1)
            busy.append(await round_trips(echo, KIB, count, pause=0.004))
            nursery.cancel_scope.cancel()
        sink.reset("measured")
        await trio.sleep(0.05)
    compare(rows, "1 KB through the relay, paced", ("quiet", quiet), ("beside bulk", busy), 3)


async def fairness(rows: Rows, relay: Process, quick: bool) -> None:
    """Ten circuits between pairs of peers, all pushing for the same time."""
    seconds = 3.0 if quick else 10.0
    answers = [start_answer(relay.line) for _ in range(2)]
    try:
        carried = [0] * 10
        async with trio.open_nursery() as nursery:
            ready = trio.Event()
            waiting = [0]

            async def push(number: int) -> None:
                async with client(relay.line) as (host, at_relay):
                    relayed = await circuit.connect(host, at_relay, answers[number % 2][1]["peer"])
                    stream = await opened(relayed, SINK, Priority.WEIGHTS)
                    await stream.send_all((1 << 40).to_bytes(8, "big"))
                    block = os.urandom(64 * KIB)
                    waiting[0] += 1
                    if waiting[0] == 10:
                        ready.set()
                    await ready.wait()
                    with trio.move_on_after(seconds):
                        while True:
                            await stream.send_all(block)
                            carried[number] += len(block)
                    stream.reset("measured")

            for number in range(10):
                nursery.start_soon(push, number)
        mean = sum(carried) / len(carried)
        rows.add("ten circuits at once, all together", sum(carried) / seconds / 1e6, "MB/s")
        share = min(carried) / mean
        rows.add("ten circuits at once, slowest / mean", share, "share", ">= 0.7", share >= 0.7)
    finally:
        for process, _ in answers:
            process.stop()


async def opening(rows: Rows, relay: Process, quick: bool) -> None:
    """What a circuit costs the relay besides its bytes: peers check their address by one every minute."""
    count = 100 if quick else 500
    process, place = start_answer(relay.line)
    try:
        async with client(relay.line) as (host, at_relay):
            cpu, start = relay.cpu(), time.perf_counter()
            for _ in range(count):
                (await circuit.connect(host, at_relay, place["peer"])).close()
            seconds, cpu = time.perf_counter() - start, relay.cpu() - cpu
            rows.add("a circuit opened, used for a handshake, closed", seconds / count * 1e3, "ms")
            rows.add("the same, relay CPU", cpu / count * 1e3, "ms")
            listener = circuit.CircuitListener(host, lambda peer: True)
            await circuit.reserve(at_relay, host.peer_id)
            cpu = relay.cpu()
            for _ in range(count):
                await listener.check(at_relay)
            rows.add("a check of one's own address, relay CPU", (relay.cpu() - cpu) / count * 1e3, "ms")
    finally:
        process.stop()


async def killed(rows: Rows, relay: Process) -> None:
    """kill -9 of either end, seen by the other; and what the relay still holds afterwards."""
    for name, kill_target in (("target", True), ("source", False)):
        process, place = start_answer(relay.line)
        async with client(relay.line) as (host, at_relay):
            if kill_target:
                relayed = await circuit.connect(host, at_relay, place["peer"])
                await round_trips(await opened(relayed, ECHO, Priority.DECODE), KIB, 3)
                start = time.perf_counter()
                process.process.send_signal(signal.SIGKILL)
                with trio.move_on_after(20):
                    await relayed.closed.wait()
                seconds = time.perf_counter() - start
            else:
                # The other way round: the answering process opens the circuit to us and is killed.
                process.stop()
                circuit.CircuitListener(host, lambda peer: True)
                host.handle(ECHO, _echo)
                await circuit.reserve(at_relay, host.peer_id)
                send, came = trio.open_memory_channel[Connection](4)
                host.on_connection.append(send.send_nowait)
                process = await trio.to_thread.run_sync(
                    lambda: Process(
                        __file__, "--part", "source", "--relay", relay.line, "--peer", host.peer_id
                    )
                )
                with trio.fail_after(20):
                    relayed = await came.receive()
                start = time.perf_counter()
                process.process.send_signal(signal.SIGKILL)
                with trio.move_on_after(20):
                    await relayed.closed.wait()
                seconds = time.perf_counter() - start
        process.stop()
        rows.add(f"kill -9 of the {name}, seen by the other end", seconds, "s", "<= 2", seconds <= 2)


async def source(relay: str, peer: str) -> None:
    """Open a circuit to a peer, say so, and stay."""
    async with client(relay) as (host, at_relay):
        relayed = await circuit.connect(host, at_relay, peer)
        await round_trips(await opened(relayed, ECHO, Priority.DECODE), KIB, 3)
        print("connected", flush=True)
        await relayed.closed.wait()


async def crowd(relay: str, count: int) -> None:
    """Many idle peers in this process, each with a reservation that it holds and checks as peers do."""
    address = maddr.parse(relay)
    limiter = trio.CapacityLimiter(16)

    async def one(*, task_status: trio.TaskStatus[None]) -> None:
        host = new_host(Identity.generate().private_key)
        async with host.running():
            listener = circuit.CircuitListener(host, lambda peer: True)
            changed = trio.Event()

            def on_change() -> None:
                nonlocal changed
                changed.set()
                changed = trio.Event()

            supervisor = RelaySupervisor(host, listener, address, on_change)
            async with limiter:
                host.nursery.start_soon(supervisor.run)
                await supervisor.reserved.wait()
            task_status.started()
            await changed.wait()
        raise LinkError(f"an idle peer lost its place: {supervisor.statistics().last_error}")

    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as starting:
            for _ in range(count):
                starting.start_soon(nursery.start, one)
        print("reserved", flush=True)
        await trio.sleep_forever()


def idle(rows: Rows, home: str, quick: bool) -> None:
    """Memory and CPU of many reserved peers that do nothing."""
    count = 1000
    relay = start_relay(
        home,
        *("--limits.connections-per-ip", "0", "--limits.connections-per-prefix", "0"),
        *("--limits.reservations-per-ip", "0", "--limits.reservations-per-prefix", "0"),
        *("--limits.new-connections-per-ip", "0", "--limits.requests-per-ip", "0"),
        *("--limits.handshakes-per-ip", "0"),
    )
    try:
        # The relay has listened since it printed its address; nothing but imports has happened so far.
        before = relay.ps.memory_info().rss
        rows.add("memory after start", before / 1e6, "MB")
        many = Process(__file__, "--part", "crowd", "--relay", relay.line, "--count", str(count))
        try:
            grown = (relay.ps.memory_info().rss - before) / 1e6
            rows.add(f"{count} reserved idle peers, memory above start", grown, "MB", "<= 80", grown <= 80)
            seconds = 65  # in which each checks its address once
            cpu = relay.cpu()
            time.sleep(seconds)
            share = (relay.cpu() - cpu) / seconds * 100
            rows.add(
                f"{count} reserved idle peers, their checks too, CPU", share, "% of core", "<= 3", share <= 3
            )
        finally:
            many.stop()
    finally:
        relay.stop()


async def one_large_circuit(rows: Rows, relay: Process, quick: bool) -> None:
    total = 256 * MIB if quick else 10 * GIB
    process, place = start_answer(relay.line)
    try:
        async with client(relay.line) as (host, at_relay):
            relayed = await circuit.connect(host, at_relay, place["peer"])
            memory = relay.ps.memory_info().rss
            seconds = await bulk(await opened(relayed, SINK, Priority.WEIGHTS), total)
            name = (
                "one circuit carries 256 MiB (10 GiB without --quick)"
                if quick
                else "one circuit carries 10 GiB"
            )
            rows.add(name, total / GIB, "GiB", "" if quick else ">= 10", None if quick else True)
            rows.add("one large circuit, rate", total / seconds / 1e6, "MB/s")
            rows.add("one large circuit, memory grown", (relay.ps.memory_info().rss - memory) / 1e6, "MB")
    finally:
        process.stop()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two minutes; 256 MiB in place of 10 GiB")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument(
        "--only", help="a word in the name of the measurement: latency, fair, opening, kill, large, idle"
    )
    for name in ("part", "relay", "peer", "count"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "answer":
        trio.run(answer, options.relay)
    elif options.part == "source":
        trio.run(source, options.relay, options.peer)
    elif options.part == "crowd":
        trio.run(crowd, options.relay, int(options.count))
    if options.part:
        return 0

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes started here end too
    rows = Rows()
    measurements: dict[str, Callable[[Process], None]] = {
        "latency": lambda relay: trio.run(latency_and_rate, rows, relay, options.quick),
        "fair": lambda relay: trio.run(fairness, rows, relay, options.quick),
        "opening": lambda relay: trio.run(opening, rows, relay, options.quick),
        "kill": lambda relay: trio.run(killed, rows, relay),
        "large": lambda relay: trio.run(one_large_circuit, rows, relay, options.quick),
    }
    with tempfile.TemporaryDirectory() as home:
        for name, measure in measurements.items():
            if not options.only or options.only in name:
                relay = start_relay(home)
                try:
                    measure(relay)
                finally:
                    relay.stop()
        if not options.only or options.only in "idle":
            idle(rows, home, options.quick)
    rows.write(options.json)
    return 0 if not rows.missed else 1


if __name__ == "__main__":
    sys.exit(main())
