"""What sharing experts costs and gives: ``python bench/experts.py [--quick] [--volunteers 0 1 2 4 8]``.

*Throughput*: a coordinator whose own experts are slow (a floor for each row and expert, which the engine sleeps out),
and volunteers that are as slow and 20 ms away, each way. *Price*: one request alone, and what a layer costs it whose
experts are all at a volunteer 13 ms away, there and back. *Bytes*: of a row and layer, with rows of a real model's
width.

The coordinator is this process and its engine; volunteers share processes, four in each, and have engines of their own.
Engines wait more than they compute, so a small machine can hold many. What the coordinator's own process and engine
were busy with is said beside the rates.
"""

from __future__ import annotations

import argparse
import itertools
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import psutil
import trio
from expert_volunteers import LOOPBACK, Order
from rows import Rows

from kvasir_peer.agent.engine import open_engine
from kvasir_peer.engines.architectures import ModelShape, MoeShape, parse
from kvasir_peer.engines.orders import GgufWeights
from kvasir_peer.experts.coordinator import Coordinator
from kvasir_peer.experts.coordinator_peer import whole_model
from kvasir_peer.experts.dispatch_map import DispatchMap, MapDispatcher, MapWorker
from kvasir_peer.experts.dispatch_policy import SlotReading
from kvasir_peer.experts.dispatcher import Dispatcher, DispatcherConfig, DispatchStatistics
from kvasir_peer.experts.verification import EARLY_ROWS
from kvasir_peer.models.gguf import GgufFile
from kvasir_peer.models.split_experts import split_experts
from kvasir_peer.net.node import Node
from kvasir_peer.serving.widths import Widths
from kvasir_peer.wire import ring
from kvasir_peer.wire.sampling import Sampling

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests" / "data" / "stories260K-moe8x2.gguf"
REAL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = (1, 403)  # short: rates are those of decodes
TOGETHER = 4  # volunteers of one process
WARM_TOKENS, WARM_SECONDS, MOST_WARM_SECONDS = 3, 3.0, 40.0


@dataclass(frozen=True)
class Setup:
    """What is measured.

    Attributes:
        model: a GGUF file.
        streams: requests under way at once.
        floor_ms: for each row and expert, at the coordinator and at each volunteer.
        way: seconds each way.
        layers: that volunteers have; None for all.
        remote: as :class:`DispatcherConfig`.
        rows, in_flight: of a pass at most; passes.
    """

    model: Path = MODEL
    streams: int = 128
    floor_ms: float = 3.0
    way: float = 0.020
    layers: tuple[int, ...] | None = None
    remote: Literal["auto", "all"] = "auto"
    rows: int = 32
    in_flight: int = 8


def shape_of(model: Path) -> tuple[ModelShape, MoeShape]:
    """Of a model, and of the experts of its layers, which are all alike."""
    gguf = GgufFile.open(model)
    shape = parse(gguf.metadata, gguf.tensors)
    return shape, next(layer.moe for layer in shape.layers if layer.moe is not None)


@dataclass(frozen=True)
class Measured:
    """A span of time.

    Attributes:
        seconds, tokens: of the span.
        before, after: the dispatcher at its ends.
        agent, engine_cpu: processor time of the coordinator's own process and engine, seconds.
        passes: seconds that its engine spent with passes, own experts apart.
        volunteers_cpu: processor time of the volunteers' processes, engines included, seconds.
        batches: passes that ended.
        step: seconds between two of them, median.
    """

    seconds: float
    tokens: int
    before: DispatchStatistics
    after: DispatchStatistics
    agent: float
    engine_cpu: float
    passes: float
    volunteers_cpu: float
    batches: int
    step: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def counted(self, name: str) -> float:
        """What a counter of the dispatcher has grown by."""
        return float(getattr(self.after, name) - getattr(self.before, name))

    @property
    def remote(self) -> float:
        """Share of pairs whose sums came from volunteers."""
        remote, local = self.counted("remote_pairs"), self.counted("local_pairs")
        return remote / max(1.0, remote + local)

    def of_workers(self, name: str) -> float:
        """The same for the sum over workers."""
        return float(sum(getattr(w, name) for w in self.after.workers)) - float(
            sum(getattr(w, name) for w in self.before.workers)
        )


@asynccontextmanager
async def volunteers(
    count: int, setup: Setup, shape: ModelShape, moe: MoeShape
) -> AsyncIterator[tuple[list[MapWorker], list[trio.Process]]]:
    """So many volunteers, in processes of their own."""
    layers = range(shape.n_layer) if setup.layers is None else setup.layers
    ranges = tuple((layer, 0, moe.n_expert) for layer in layers)
    workers: list[MapWorker] = []
    processes: list[trio.Process] = []
    try:
        for first in range(0, count, TOGETHER):
            order = Order(
                min(TOGETHER, count - first),
                str(setup.model),
                ranges,
                shape.n_embd,
                moe.n_used,
                setup.rows,
                setup.floor_ms,
                setup.way,
            )
            command = [
                sys.executable,
                str(Path(__file__).with_name("expert_volunteers.py")),
                msgspec.json.encode(order).decode(),
            ]
            processes.append(
                await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            data = b""
            while data.count(b"\n") < order.count:
                assert processes[-1].stdout is not None
                piece = await processes[-1].stdout.receive_some(65536)
                assert piece, "the volunteers' process has ended"
                data += piece
            workers += [msgspec.json.decode(line, type=MapWorker) for line in data.splitlines()]
        yield workers, processes
    finally:
        for process in processes:
            assert process.stdin is not None
            with trio.CancelScope(shield=True), trio.move_on_after(5):
                await process.stdin.aclose()
                await process.wait()
            if process.returncode is None:
                process.kill()


def cpu_seconds(processes: list[trio.Process]) -> float:
    """Processor time of processes and their engines so far."""
    total = 0.0
    for process in processes:
        root = psutil.Process(process.pid)
        for one in (root, *root.children()):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def early(dispatcher: Dispatcher) -> bool:
    """Whether any worker is still checked as often as a new one."""
    return any(worker.rows < EARLY_ROWS for worker in dispatcher.statistics().workers)


async def measure(count: int, setup: Setup, seconds: float) -> Measured:
    """With so many volunteers."""
    shape, moe = shape_of(setup.model)
    tokens = batches = 0
    times_told: list[float] = []

    def tell(outputs: tuple[ring.Output, ...], ended: tuple[ring.Ended, ...]) -> None:
        nonlocal tokens, batches
        tokens += len(outputs)
        batches += 1
        times_told.append(time.monotonic())
        for _ in ended:
            nursery.start_soon(ask)

    async with AsyncExitStack() as stack:
        workers, processes = await stack.enter_async_context(volunteers(count, setup, shape, moe))
        engine = await stack.enter_async_context(open_engine())
        node = await stack.enter_async_context(Node.open(secrets.token_bytes(32), listen=[LOOPBACK]))
        nursery = await stack.enter_async_context(trio.open_nursery())
        widths = Widths(
            max(256, setup.streams, setup.rows * setup.in_flight),
            setup.rows,
            setup.in_flight,
            setup.streams,
            256,
        )
        weights = GgufWeights(str(setup.model))
        order = whole_model(
            shape,
            widths,
            weights,
            engine="onnx",
            device="cpu",
            precision="exact",
            threads=1,
            expert_floor_ms=setup.floor_ms,
        )
        await engine.load_stage(order)

        async def slots() -> SlotReading:
            return SlotReading(setup.streams, setup.streams + 1, 0, trio.current_time())

        layers = tuple(range(shape.n_layer))
        config = DispatcherConfig("model", layers, shape.n_embd, moe.n_used, "exact", remote=setup.remote)
        dispatcher = Dispatcher(node, engine, config, read_slots=slots)
        await nursery.start(dispatcher.run)
        value = DispatchMap(
            "model",
            2,
            "bridge",
            0.0,
            shape.n_layer,
            shape.n_embd,
            moe.n_used,
            "f16",
            setup.rows,
            tuple(workers),
            (MapDispatcher(node.peer_id),),
        )
        for process in processes:
            assert process.stdin is not None
            await process.stdin.send_all(msgspec.json.encode(value) + b"\n")
        dispatcher.follow(value)
        with trio.fail_after(30):
            while not all(w.proven for w in dispatcher.statistics().workers):  # noqa: ASYNC110
                await trio.sleep(0.05)
        coordinator = Coordinator(engine, widths, tell, dispatcher)
        nursery.start_soon(coordinator.run)
        numbers = itertools.count()
        sampling = Sampling(temperature=0.0, prompt_length=len(PROMPT))

        async def ask() -> None:
            coordinator.submit(ring.Submit(next(numbers), PROMPT, 240, sampling, ()))

        for _ in range(setup.streams):
            await ask()
        await trio.sleep(WARM_SECONDS)
        with trio.move_on_after(MOST_WARM_SECONDS):
            # Until no prompt is left, and workers are checked as seldom as they will be for the rest of their time.
            while tokens < WARM_TOKENS * setup.streams or early(dispatcher):  # noqa: ASYNC110
                await trio.sleep(0.1)
        held = engine.statistics().held_ms
        own, theirs = psutil.Process(), psutil.Process(engine.statistics().pid)

        def times(process: psutil.Process) -> float:
            spent = process.cpu_times()
            return spent.user + spent.system

        before = (times(own), times(theirs), cpu_seconds(processes))
        figures, tokens, batches, began = dispatcher.statistics(), 0, 0, time.monotonic()
        await trio.sleep(seconds)
        done = tokens, batches
        found = Measured(
            time.monotonic() - began,
            done[0],
            figures,
            dispatcher.statistics(),
            times(own) - before[0],
            times(theirs) - before[1],
            (engine.statistics().held_ms - held) / 1e3,
            cpu_seconds(processes) - before[2],
            done[1],
            statistics.median(b - a for a, b in itertools.pairwise([began, *times_told[-done[1] :]])),
        )
        nursery.cancel_scope.cancel()
        await stack.aclose()
    return found


async def throughput(rows: Rows, counts: list[int], setup: Setup, seconds: float) -> None:
    """Rates with so many volunteers, against the lone coordinator's, and against all floors added up."""
    shape, moe = shape_of(setup.model)
    floor = 1e3 / (setup.floor_ms * shape.n_layer * moe.n_used)
    print(
        f"{setup.streams} requests, {setup.floor_ms:g} ms for each row and expert ({floor:.1f} tokens/s each at best), "
        f"{setup.way * 1e3:g} ms each way, {setup.in_flight} passes in flight\n"
        "volunteers  tokens/s  of linear  of floors  remote  rows/pass  frames/s  hedged  fallen back  checks/s"
        "  own engine: passes, rows, checks  cpu: own process, engine, volunteers"
    )
    alone = 0.0
    for count in counts:
        m = await measure(count, setup, seconds)
        alone = alone or m.rate / (count + 1)
        share = m.rate / alone / (count + 1)
        local, checks = m.counted("local_s") / m.seconds, m.counted("check_s") / m.seconds
        passes = m.passes / m.seconds
        if not count:  # the own experts are computed within the passes, but for those that are counted
            local, passes = local + passes, 0.0
        print(
            f"{count:10}  {m.rate:8.1f}  {share:9.0%}  {m.rate / floor / (count + 1):9.0%}  {m.remote:6.0%}  "
            f"{m.tokens / max(1, m.batches):9.1f}  {m.counted('frames') / m.seconds:8.0f}  {m.counted('hedges'):6.0f}  "
            f"{m.counted('fallbacks'):11.0f}  {m.counted('checks') / m.seconds:8.1f}  {passes:19.0%}, "
            f"{local - checks:4.0%}, {checks:6.0%}  {m.agent / m.seconds:16.0%}, {m.engine_cpu / m.seconds:6.0%}, "
            f"{m.volunteers_cpu / m.seconds:10.0%}",
            flush=True,
        )
        if count:
            worker = m.after.workers[0]
            print(
                f"{'':10}  volunteers busy {m.of_workers('held_s') / m.seconds / count:.0%}; the first one: "
                f"{worker.latency_ms:.0f} ms a frame, {worker.way_ms:.0f} on the way, {worker.pair_ms:.2f} a pair"
            )
            rows.add(f"{count} volunteers, of linear", share, "times", ">= 0.8", share >= 0.8)


async def price(rows: Rows, seconds: float) -> None:
    """What layers at a volunteer cost a single request, 13 ms away there and back."""
    setup = Setup(streams=1, floor_ms=0.0, way=0.0065, remote="all")
    layers = shape_of(setup.model)[0].n_layer
    alone = (await measure(0, setup, seconds)).step * 1e3
    rows.add("one request alone, all experts here, a token", alone, "ms")
    for remote in (1, layers):
        far = Setup(streams=1, floor_ms=0.0, way=0.0065, remote="all", layers=tuple(range(remote)))
        each = ((await measure(1, far, seconds)).step * 1e3 - alone) / remote
        rows.add(f"each of {remote} remote layers costs it, 13 ms there and back", each, "ms")


async def bytes_of_rows(rows: Rows, seconds: float) -> None:
    """Bytes each way with rows of a real model's width."""
    if not REAL.exists():
        rows.not_run("bytes of a row each way", f"needs {REAL.relative_to(ROOT)} (make demo)")
        return
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "experts.gguf"
        await trio.to_thread.run_sync(lambda: split_experts(REAL, model, experts=16))
        setup = Setup(model, 16, 0.0, 0.0, tuple(range(4)), "all", 16, 2)
        plain = 2 * shape_of(model)[0].n_embd
        m = await measure(1, setup, seconds)
    for way, counter in (("out", "bytes_out"), ("back", "bytes_in")):
        each = m.of_workers(counter) / m.of_workers("rows")
        name = f"bytes of a row and layer, {way}, of 2 x n_embd ({plain})"
        rows.add(name, each / plain, "times", "<= 1.1", each / plain <= 1.1)


async def run(given: argparse.Namespace) -> int:
    seconds = 4.0 if given.quick else 10.0
    rows = Rows()
    setup = Setup(streams=given.streams, floor_ms=given.floor_ms, in_flight=given.in_flight)
    if "throughput" in given.parts:
        await throughput(rows, given.volunteers, setup, seconds)
    if "price" in given.parts:
        await price(rows, seconds)
    if "bytes" in given.parts:
        await bytes_of_rows(rows, seconds)
    rows.write(given.json)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--volunteers", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--parts", nargs="+", default=["throughput", "price", "bytes"])
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--floor-ms", type=float, default=3.0)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="4 seconds for each row in place of 10")
    parser.add_argument("--json", type=Path)
    return trio.run(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
