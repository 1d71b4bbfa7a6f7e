"""What the ring can do, with its goals: ``python bench/ring.py [--quick] [--json FILE] [--only WORD]``.

Relay, stages and their engines are processes; all that passes between peers goes through circuits of the relay. The
engine is synthetic where costs must be known (30 ms a pass and 10 ms a row, boundaries 4,096 wide); it sleeps, so the
machine's processor carries the agents alone. Rows: name, value, unit, goal (or null), holds (or null); the exit status
is 1 where a goal was missed.

Run it where the package is installed, or with ``PYTHONPATH=.:relay``.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import statistics
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import trio
from boundaries import boundaries
from llama_rpc import beside_llama_cpp
from ring_parts import ROOT, Ring, Slice, open_ring, run_stage
from rows import Rows

from kvasir_peer.serving.widths import Widths

STAGES = 4
FLOOR, ROW = 0.030, 0.010  # seconds of a pass, and of each row of it
IN_FLIGHTS, ROW_COUNTS = (1, 2, 4, 6), (1, 2, 4, 8)
STORIES = ROOT / "tests" / "data" / "stories260K.gguf"


def cost(scale: float = 1.0) -> Slice:
    """The synthetic engine, with all times scaled."""
    return Slice(device=f"{1e3 * FLOOR * scale:g}ms+{1e3 * ROW * scale:g}ms")


def widths(
    *, rows: int = 64, in_flight: int = 16, requests: int = 64, context: int = 4096, batch_rows: int = 1024
) -> Widths:
    """Wide ones, but for what is given."""
    return Widths(max(batch_rows, rows), rows, in_flight, requests, context)


async def rate_of(ring: Ring, requests: int, seconds: float, warm_up: float) -> tuple[float, float]:
    """Tokens per second of so many endless requests together, and the busiest stage's share of the time."""
    times: list[float] = []
    begun: set[int] = set()
    all_begun = trio.Event()

    def seen(number: int, token: int, now: float) -> None:
        times.append(now)
        begun.add(number)
        if len(begun) == requests:
            all_begun.set()

    async with trio.open_nursery() as nursery:
        for number in range(requests):
            nursery.start_soon(ring.ask, [number], 4000, partial(seen, number))
        await all_begun.wait()  # no prompt is left to be computed
        await trio.sleep(warm_up)
        before = await ring.figures()
        began = trio.current_time()
        await trio.sleep(seconds)
        ended = trio.current_time()
        after = await ring.figures()
        nursery.cancel_scope.cancel()
    busy = [
        (b["epoch"]["held_ms"] - a["epoch"]["held_ms"]) / 1e3 / (b["now"] - a["now"])
        for a, b in zip(before, after, strict=True)
    ]
    counted = [when for when in times if began <= when <= ended]
    # From token to token: a window that cuts a slow ring's last one off would count it as slower than it is.
    return (len(counted) - 1) / (counted[-1] - counted[0]), max(busy)


async def one_row_micro_batches(rows: Rows, ring: Ring, quick: bool) -> None:
    """Utilisation (a): batches of one row, as many in flight as the ring likes against one at a time."""
    seconds = 3.0 if quick else 8.0
    for requests in (8,) if quick else (8, 16):
        rates = {}
        for in_flight in (1, 16):
            await ring.begin(widths(rows=1, in_flight=in_flight, batch_rows=16), cost())
            rates[in_flight], busy = await rate_of(ring, requests, seconds, warm_up=1.5)
        name = f"one-row micro-batches, {requests} requests"
        rows.add(f"{name}: one in flight", rates[1], "tokens/s")
        rows.add(f"{name}: free", rates[16], "tokens/s")
        times = rates[16] / rates[1]
        rows.add(f"{name}: free / one in flight", times, "times", ">= 3.8", times >= 3.8)
        rows.add(f"{name}: slowest stage busy", 100 * busy, "%", ">= 95", busy >= 0.95)


async def against_hand_set(rows: Rows, ring: Ring, quick: bool, only: list[int]) -> None:
    """Utilisation (b): the scheduler left free against the best of sixteen pairs set by hand."""
    seconds, warm_up = (1.6, 0.8) if quick else (3.0, 1.5)
    for requests in only or ((8,) if quick else range(1, 17)):
        # A pair that asks for more than there are requests does what a smaller one does.
        pairs = {
            (min(in_flight, math.ceil(requests / each)), min(each, requests))
            for in_flight in IN_FLIGHTS
            for each in ROW_COUNTS
        }
        best, best_pair = 0.0, (0, 0)
        for pair in sorted(pairs):
            await ring.begin(widths(), cost(), hand_set=pair)
            rate, _ = await rate_of(ring, requests, seconds, warm_up)
            best, best_pair = max((best, best_pair), (rate, pair))
        await ring.begin(widths(), cost())
        # Twice as long: costs are learned in the first second, where hand-set rings need none.
        rate, _ = await rate_of(ring, requests, 2 * seconds, 2 * warm_up)
        name = f"{requests} requests: free / best pair (in flight {best_pair[0]}, rows {best_pair[1]})"
        rows.add(name, rate / best, "times", ">= 0.95", rate >= 0.95 * best)


async def long_prompt(rows: Rows, ring: Ring, scale: float) -> None:
    """Utilisation (c): time to the first token of 2,048 alone, against one chunk in flight."""
    took = {}
    for name, hand_set in (("free", None), ("one chunk in flight", (1, 64))):
        await ring.begin(widths(), cost(scale), hand_set=hand_set)
        first: list[float] = []
        began = trio.current_time()
        await ring.ask([7] * 2048, 1, lambda token, now, first=first: first.append(now))
        took[name] = first[0] - began
        rows.add(f"prompt of 2,048, costs x {scale:g}: first token, {name}", took[name], "s")
    share = took["free"] / took["one chunk in flight"]
    rows.add("prompt of 2,048: free / one chunk in flight", share, "times", "<= 0.35", share <= 0.35)


async def distance(rows: Rows, quick: bool) -> None:
    """The same ring with its peers apart: a stream alone, and requests enough.

    The proxies and the relay add some milliseconds to each hop, so the ceiling is that of the hops as they are: half of
    what a ping takes there and back.
    """
    seconds = 4.0 if quick else 10.0
    requests = 96
    wide = widths(requests=requests)
    async with open_ring(STAGES, delayed=True) as ring:
        await ring.begin(wide, cost())
        near, _ = await rate_of(ring, requests, seconds, warm_up=2.0)
        rows.add(f"{requests} requests, no delay", near, "tokens/s")
        for delay in (0.020,) if quick else (0.005, 0.020, 0.050):
            await ring.set_delay(delay)
            name = f"{1e3 * delay:.0f} ms between peers"
            await ring.begin(wide, cost(), hop_seconds=delay)
            alone, _ = await rate_of(ring, 1, max(seconds, 6.0), warm_up=1.0)
            hops = await ring.hops()
            rows.add(f"{name}: a hop as measured, mean", 1e3 * statistics.mean(hops), "ms")
            ceiling = 1.0 / (sum(hops) + STAGES * (FLOOR + ROW))
            share = alone * (STAGES * delay + STAGES * (FLOOR + ROW))
            rows.add(f"{name}: one request", alone, "tokens/s")
            rows.add(f"{name}: one request, of the ceiling of {1e3 * delay:.0f} ms hops", 100 * share, "%")
            share = alone / ceiling
            rows.add(f"{name}: one request, of the ceiling", 100 * share, "%", ">= 90", share >= 0.9)
            await ring.begin(wide, cost(), hop_seconds=delay)
            far, _ = await rate_of(ring, requests, seconds, warm_up=2.0)
            rows.add(f"{name}: {requests} requests", far, "tokens/s")
            share = far / near
            rows.add(f"{name}: {requests} requests, of no delay", 100 * share, "%", ">= 95", share >= 0.95)


async def leaks(rows: Rows, count: int) -> None:
    """Many requests, of which most are cancelled at some moment; then everything must be as it was."""
    luck = random.Random(7)
    async with open_ring(3) as ring:
        made = Widths(256, 64, 9, 16, 256)
        part = Slice("onnx", "cpu", str(STORIES))
        await ring.begin(made, part, n_embd=64, vocab=512, cuts=[0, 2, 4, 5], dtype="f32")

        async def some(total: int) -> None:
            limit = trio.CapacityLimiter(24)  # more than there are slots: some are cancelled in the queue

            async def one() -> None:
                async with limit:
                    prompt = [luck.randrange(3, 500) for _ in range(luck.randrange(1, 60))]
                    hang_up = luck.choice([None, 0, 1, 3, 8])
                    with trio.move_on_after(luck.uniform(0.0, 1.0) if luck.random() < 0.3 else math.inf):
                        await ring.ask(prompt, 12, lambda token, now: None, hang_up=hang_up)

            for wave in range(0, total, 200):  # tasks that wait are memory of the bench, not of the ring
                async with trio.open_nursery() as nursery:
                    for _ in range(wave, min(total, wave + 200)):
                        nursery.start_soon(one)

        await some(max(100, count // 8))  # pools, caches and buffers reach their size
        before, before_here = await settled(ring), here()
        began = trio.current_time()
        await some(count)
        after, after_here = await settled(ring), here()
    rows.add(f"{count} requests with random cancels", trio.current_time() - began, "s")
    head = after[0]["scheduler"]
    left = head["live"] + head["queued"] + head["in_flight"] + head["rows_in_flight"]
    rows.add("slots, queue and batches in use afterwards", left, "", "= 0", left == 0)
    active = ring.requests.statistics().active
    rows.add("requests that the bridge still knows", active, "", "= 0", active == 0)
    taken = sum(made.max_in_flight + 1 - f["free_buffers"] for f in after)
    rows.add("buffers of the arenas in use afterwards", taken, "", "= 0", taken == 0)
    for name, unit in (("tasks", ""), ("links", ""), ("streams", ""), ("files", ""), ("threads", "")):
        more = max(b[name] - a[name] for a, b in zip(before, after, strict=True))
        more = max(more, after_here.get(name, 0) - before_here.get(name, 0))
        # Worker threads of an event loop come and go with its files.
        allowed = 2 if name in ("threads", "files") else 0
        rows.add(f"{name} more than before, worst process", more, unit, f"<= {allowed}", more <= allowed)
    for name in ("arena_bytes", "agent_bytes", "engine_bytes"):
        more = max(b[name] - a[name] for a, b in zip(before, after, strict=True)) / 1e6
        allowed = 0 if name == "arena_bytes" else 8
        name = {"arena_bytes": "shared memory", "agent_bytes": "memory of an agent"}.get(
            name, "memory of an engine"
        )
        rows.add(f"{name} more than before, worst process", more, "MB", f"<= {allowed}", more <= allowed)
    more = (after_here["memory"] - before_here["memory"]) / 1e6
    rows.add("memory of the bridge more than before", more, "MB", "<= 8", more <= 8)


def here() -> dict[str, int]:
    """The same figures of this process."""
    process = psutil.Process()
    return {
        "memory": process.memory_info().rss,
        "files": process.num_fds(),
        "tasks": trio.lowlevel.current_statistics().tasks_living,
    }


async def settled(ring: Ring) -> list[dict[str, Any]]:
    """Figures once the last cancel has gone round."""
    with trio.move_on_after(10):
        while True:
            figures = await ring.figures()
            head = figures[0]["scheduler"]
            if not (head["live"] or head["queued"] or head["in_flight"]):
                break
            await trio.sleep(0.1)
    await trio.sleep(0.5)
    return await ring.figures()


async def measure(rows: Rows, options: argparse.Namespace) -> None:
    """Everything, or what was asked for."""

    def wanted(*words: str) -> bool:
        return not options.only or any(options.only in word for word in words)

    requests = [int(number) for number in options.requests.split(",") if number]
    in_one_ring: list[Callable[[Ring], Awaitable[None]]] = []
    if wanted("utilisation-a"):
        in_one_ring.append(lambda ring: one_row_micro_batches(rows, ring, options.quick))
    if wanted("utilisation-b"):
        in_one_ring.append(lambda ring: against_hand_set(rows, ring, options.quick, requests))
    if wanted("utilisation-c"):
        in_one_ring.append(partial(long_prompt, rows, scale=0.1 if options.quick else options.scale))
    if in_one_ring:
        async with open_ring(STAGES) as ring:
            for part in in_one_ring:
                await part(ring)
            await ring.end()
    if wanted("distance"):
        await distance(rows, options.quick)
    if wanted("llama"):
        await beside_llama_cpp(rows, options)
    if wanted("boundaries"):
        boundaries(rows, STORIES, options.model)
    if wanted("leaks"):
        await leaks(rows, options.count or (200 if options.quick else 2000))
    if wanted("recovery"):
        from recovery import recovery  # here: stages are started from this file too, and need none of it

        await recovery(rows, options.quick)


def main() -> int:
    """Measure; 1 where a goal was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="some minutes: fewer cases, shorter windows")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument(
        "--only",
        default="",
        help="utilisation-a, -b or -c, distance, llama, boundaries, leaks, recovery (or a part of it)",
    )
    parser.add_argument("--requests", default="", help="of utilisation-b: numbers with commas")
    parser.add_argument("--scale", type=float, default=1.0, help="of the costs in utilisation-c")
    parser.add_argument("--count", type=int, default=0, help="requests of leaks")
    parser.add_argument("--model", type=Path, help="GGUF file for boundaries and llama, beside the small one")
    parser.add_argument("--llama-rpc-server", type=Path, help="llama.cpp's rpc-server, built with RPC on")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's llama-server of the same build")
    for name in ("part", "relay"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "stage":
        trio.run(run_stage, options.relay)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes started here end too
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load average {load:.1f}, Python {sys.version.split()[0]}", flush=True)
    rows = Rows()
    trio.run(measure, rows, options)
    rows.write(options.json)
    return 1 if rows.missed else 0


if __name__ == "__main__":
    sys.exit(main())
