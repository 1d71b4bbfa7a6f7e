"""Volunteers for ``bench/experts.py``, several in one process, each with an engine process of its own.

    python bench/expert_volunteers.py ORDER     (JSON: see :class:`Order`)

Prints a line of JSON for each volunteer, then takes dispatch maps, one a line, until standard input ends. Answers leave
later than they are computed, by the way there and back, and hold up neither computing nor other answers.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import trio

from kvasir_peer.agent.engine import open_engine
from kvasir_peer.engines.orders import ArenaShape, GgufWeights, LoadBank
from kvasir_peer.experts.dispatch_map import DispatchMap, MapWorker
from kvasir_peer.experts.expert_server import ExpertServer
from kvasir_peer.net.link import Link
from kvasir_peer.net.node import Node
from kvasir_peer.wire import experts
from kvasir_peer.wire.experts import rows_bytes

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
BUFFERS = 20  # frames that an engine holds at once


class Order(msgspec.Struct):
    """What to serve.

    Attributes:
        count: volunteers in this process.
        model: a GGUF file.
        ranges: of each of them.
        n_embd, used, rows: width of a row, experts of one, rows of a frame.
        floor_ms: least time for each row and expert; the engine sleeps it out.
        way: seconds each way.
    """

    count: int
    model: str
    ranges: tuple[tuple[int, int, int], ...]
    n_embd: int
    used: int
    rows: int
    floor_ms: float
    way: float


@dataclass
class Map:
    """The newest dispatch map, shared by the volunteers of a process."""

    value: DispatchMap | None = None
    newer: trio.Event = field(default_factory=trio.Event)


class Distant(ExpertServer):
    """A worker that is far away."""

    way = 0.0

    async def answer(self, link: Link, message: experts.Sums, sums: bytes) -> None:
        await trio.sleep(2 * self.way)
        await super().answer(link, message, sums)


@asynccontextmanager
async def volunteer(order: Order, current: Map) -> AsyncIterator[Node]:
    """One volunteer."""
    async with open_engine() as engine, Node.open(secrets.token_bytes(32), listen=[LOOPBACK]) as node:
        arena = ArenaShape(BUFFERS, rows_bytes(order.rows, order.used, order.n_embd, "f32"))
        weights = GgufWeights(order.model)
        await engine.load_bank(
            LoadBank(
                0, weights, "onnx", order.ranges, order.rows, "exact", 1, "cpu", arena, 0, order.floor_ms
            )
        )
        server = Distant(
            engine, current_map=lambda: current.value, newer_map=lambda: current.newer, precision="exact"
        )
        server.way = order.way
        server.serve_ranges("model", order.ranges)
        node.handle(experts.PROTOCOL, experts.MAX_HELLO_FRAME, server.take_link)
        yield node


async def serve(order: Order) -> None:
    """Serve until standard input ends."""
    current = Map()
    async with AsyncExitStack() as stack:
        for _ in range(order.count):
            node = await stack.enter_async_context(volunteer(order, current))
            entry = MapWorker(node.peer_id, order.ranges, tuple(node.addresses()), 1e6)
            print(msgspec.json.encode(entry).decode(), flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            current.value = msgspec.json.decode(line, type=DispatchMap)
            current.newer.set()
            current.newer = trio.Event()


if __name__ == "__main__":
    trio.run(serve, msgspec.json.decode(sys.argv[1], type=Order))
