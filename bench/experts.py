"""What sharing experts costs and gives: ``python bench/experts.py [--quick] [--volunteers 0 1 2 4 8]``.

A coordinator whose own experts are slow (a floor for each row and expert), and volunteers that are as slow; answers
come 2 x 20 ms later than they are computed. Everything runs on loopback; engines are processes of their own, and wait
more than they compute, so a small machine can hold many. Rows: volunteers, tokens a second, times the lone
coordinator's, share of linear.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from kvasir_peer.agent.engine import open_engine
from kvasir_peer.engines.orders import ArenaShape, GgufWeights, LoadBank, LoadStage
from kvasir_peer.experts.coordinator import Coordinator
from kvasir_peer.experts.dispatch_map import DispatchMap, MapDispatcher, MapWorker
from kvasir_peer.experts.dispatch_policy import SlotReading
from kvasir_peer.experts.dispatcher import Dispatcher, DispatcherConfig
from kvasir_peer.experts.expert_server import ExpertServer
from kvasir_peer.net.link import Link
from kvasir_peer.net.node import Node
from kvasir_peer.serving.widths import Widths
from kvasir_peer.wire import experts, ring
from kvasir_peer.wire.experts import rows_bytes
from kvasir_peer.wire.sampling import Sampling

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests" / "data" / "stories260K-moe8x2.gguf"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
N_LAYER, N_EMBD, VOCAB, N_EXPERT, N_USED, ROWS = 5, 64, 512, 8, 2, 32
FLOOR_MS = 3.0  # for each row and expert, at the coordinator and at every volunteer
WAY = 0.020  # seconds each way
STREAMS = 32
PROMPT = (1, 403, 407, 261, 378)


@dataclass
class Map:
    value: DispatchMap
    newer: trio.Event = field(default_factory=trio.Event)


class Distant(ExpertServer):
    """A worker 20 ms away: what it says arrives later, and does not keep it from computing."""

    async def answer(self, link: Link, message: experts.Sums, sums: bytes) -> None:
        await trio.sleep(2 * WAY)
        await super().answer(link, message, sums)


@asynccontextmanager
async def volunteer(current: Map) -> AsyncIterator[Node]:
    ranges = tuple((layer, 0, N_EXPERT) for layer in range(N_LAYER))
    async with open_engine() as engine, Node.open(secrets.token_bytes(32), listen=[LOOPBACK]) as node:
        arena = ArenaShape(16, rows_bytes(ROWS, N_USED, N_EMBD, "f32"))
        await engine.load_bank(
            LoadBank(0, GgufWeights(str(MODEL)), "onnx", ranges, ROWS, "exact", 1, "cpu", arena, 0, FLOOR_MS)
        )
        server = Distant(
            engine, current_map=lambda: current.value, newer_map=lambda: current.newer, precision="exact"
        )
        server.serve_ranges("model", ranges)
        node.handle(experts.PROTOCOL, experts.MAX_HELLO_FRAME, server.take_link)
        yield node


async def measure(count: int, seconds: float) -> tuple[float, dict[str, float]]:
    """Tokens a second with so many volunteers, and figures of the dispatch."""
    empty = DispatchMap("model", 1, "bridge", 0.0, N_LAYER, N_EMBD, N_USED, "f16", ROWS)
    current = Map(empty)
    tokens = 0

    def tell(outputs: tuple[ring.Output, ...], ended: tuple[ring.Ended, ...]) -> None:
        nonlocal tokens
        tokens += len(outputs)

    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(volunteer(current)) for _ in range(count)]
        engine = await stack.enter_async_context(open_engine())
        node = await stack.enter_async_context(Node.open(secrets.token_bytes(32), listen=[LOOPBACK]))
        nursery = await stack.enter_async_context(trio.open_nursery())
        arena = ArenaShape(48, rows_bytes(ROWS, N_USED, N_EMBD, "f32"))
        await engine.load_stage(
            LoadStage(
                job=0,
                weights=GgufWeights(str(MODEL)),
                engine="onnx",
                stage=0,
                stages=1,
                first=0,
                end=N_LAYER,
                n_layer=N_LAYER,
                n_embd=N_EMBD,
                vocab=VOCAB,
                n_slots=STREAMS,
                context_length=256,
                max_rows=ROWS,
                dtype="f32",
                top_logprobs=0,
                precision="exact",
                threads=1,
                device="cpu",
                arena=arena,
                expert_floor_ms=FLOOR_MS,
            )
        )

        async def slots() -> SlotReading:
            return SlotReading(STREAMS, STREAMS, 0, trio.current_time())

        config = DispatcherConfig("model", tuple(range(N_LAYER)), N_EMBD, N_USED, "exact")
        dispatcher = Dispatcher(node, engine, config, read_slots=slots)
        await nursery.start(dispatcher.run)
        workers = tuple(
            MapWorker(
                n.peer_id,
                tuple((layer, 0, N_EXPERT) for layer in range(N_LAYER)),
                tuple(n.addresses()),
                1e6,
            )
            for n in nodes
        )
        current.value = DispatchMap(
            "model",
            2,
            "bridge",
            0.0,
            N_LAYER,
            N_EMBD,
            N_USED,
            "f16",
            ROWS,
            workers,
            (MapDispatcher(node.peer_id),),
        )
        dispatcher.follow(current.value)
        with trio.fail_after(30):
            while not all(w.proven for w in dispatcher.statistics().workers):  # noqa: ASYNC110
                await trio.sleep(0.05)
        coordinator = Coordinator(engine, Widths(256, ROWS, 8, STREAMS, 256, 0), tell, dispatcher)
        nursery.start_soon(coordinator.run)
        for request in range(STREAMS):
            sampling = Sampling(temperature=0.0, prompt_length=len(PROMPT))
            coordinator.submit(ring.Submit(request, PROMPT, 240, sampling, ()))
        await trio.sleep(3)  # prompts, and the first measurements
        before, began = tokens, time.monotonic()
        figures_before = dispatcher.statistics()
        await trio.sleep(seconds)
        rate = (tokens - before) / (time.monotonic() - began)
        after = dispatcher.statistics()
        remote = after.remote_pairs - figures_before.remote_pairs
        local = after.local_pairs - figures_before.local_pairs
        rows = sum(w.rows for w in after.workers)
        sent = sum(w.bytes_out for w in after.workers)
        nursery.cancel_scope.cancel()
        await stack.aclose()
    return rate, {
        "remote": remote / max(1, remote + local),
        "hedges": after.hedges - figures_before.hedges,
        "fallbacks": after.fallbacks - figures_before.fallbacks,
        "bytes_row": sent / max(1, rows),
    }


async def run(counts: list[int], seconds: float) -> int:
    alone = 0.0
    print("volunteers  tokens/s  times alone  of linear  remote  hedges  fallbacks  bytes/row out")
    for count in counts:
        rate, figures = await measure(count, seconds)
        alone = alone or rate
        times = rate / alone
        print(
            f"{count:10}  {rate:8.1f}  {times:11.2f}  {times / (count + 1):9.0%}  {figures['remote']:6.0%}  "
            f"{figures['hedges']:6.0f}  {figures['fallbacks']:9.0f}  {figures['bytes_row']:13.0f}",
            flush=True,
        )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--volunteers", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--quick", action="store_true", help="4 seconds for each row in place of 10")
    given = parser.parse_args()
    return trio.run(run, given.volunteers, 4.0 if given.quick else 10.0)


if __name__ == "__main__":
    sys.exit(main())
