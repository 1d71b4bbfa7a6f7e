"""What tests of expert sharding share: the small model with experts, and orders for it."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import trio

from kvasir_peer.agent.engine import Engine, open_engine
from kvasir_peer.engines.orders import ArenaShape, GgufWeights, LoadBank, LoadStage
from kvasir_peer.experts.coordinator import Coordinator
from kvasir_peer.experts.dispatch_map import DispatchMap, MapDispatcher, MapWorker
from kvasir_peer.experts.dispatch_policy import DEFAULT_SETTINGS, DispatchSettings, SlotReading
from kvasir_peer.experts.dispatcher import Dispatcher, DispatcherConfig
from kvasir_peer.experts.expert_server import ExpertServer
from kvasir_peer.net.node import Node
from kvasir_peer.serving.widths import Widths
from kvasir_peer.wire import experts, ring
from kvasir_peer.wire.experts import rows_bytes
from kvasir_peer.wire.sampling import Sampling

DATA = Path(__file__).parent.parent / "data"
MODEL = DATA / "stories260K-moe8x2.gguf"
N_LAYER, N_EMBD, VOCAB, N_EXPERT, N_USED = 5, 64, 512, 8, 2
ROWS = 16
ALL_LAYERS = tuple(range(N_LAYER))


def buffer_bytes(rows: int = ROWS) -> int:
    """Bytes of an arena's buffer that holds routed rows as well as a boundary."""
    return rows_bytes(rows, N_USED, N_EMBD, "f32")


def stage_order(**changes: object) -> LoadStage:
    """Load the whole model, as a coordinator does."""
    values: dict[str, object] = {
        "job": 0,
        "weights": GgufWeights(str(MODEL)),
        "engine": "onnx",
        "stage": 0,
        "stages": 1,
        "first": 0,
        "end": N_LAYER,
        "n_layer": N_LAYER,
        "n_embd": N_EMBD,
        "vocab": VOCAB,
        "n_slots": 4,
        "context_length": 256,
        "max_rows": ROWS,
        "dtype": "f32",
        "top_logprobs": 2,
        "precision": "exact",
        "threads": 1,
        "device": "cpu",
        "arena": ArenaShape(8, buffer_bytes()),
    }
    return LoadStage(**{**values, **changes})  # type: ignore[arg-type]


def bank_order(ranges: tuple[tuple[int, int, int], ...], engine: str = "torch") -> LoadBank:
    """Load some experts, as a volunteer does."""
    return LoadBank(
        0,
        GgufWeights(str(MODEL)),
        engine,
        ranges,
        ROWS,
        "exact",
        1,
        "cpu",
        ArenaShape(4, buffer_bytes()),
    )


def cases(min_gap: float = 0.02) -> list[dict]:
    """Greedy continuations that two implementations agree on, far from a tie, with short prompts."""
    found = json.loads((DATA / "expected_greedy.json").read_text())
    return [
        case
        for case in found
        if case["model"] == MODEL.name
        and case["min_top2_logit_gap"] > min_gap
        and len(case["prompt_ids"]) < 16
    ]


LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@dataclass
class Worker:
    """A volunteer without a market: its engine, its server, and a map that the test changes."""

    node: Node
    engine: Engine
    server: ExpertServer
    ranges: tuple[tuple[int, int, int], ...]
    swarm: MapHolder

    @property
    def peer(self) -> str:
        return self.node.peer_id


@dataclass
class MapHolder:
    """The dispatch map that all see."""

    dtype: str = "f32"
    value: DispatchMap | None = None
    newer: trio.Event = field(default_factory=trio.Event)

    def change(self, **fields: object) -> DispatchMap:
        """A newer map."""
        old = self.value or DispatchMap("model", 0, "bridge", 0.0, N_LAYER, N_EMBD, N_USED, self.dtype, ROWS)
        self.value = msgspec.structs.replace(old, version=old.version + 1, **fields)
        self.newer.set()
        self.newer = trio.Event()
        return self.value


def split(workers: int) -> list[tuple[tuple[int, int, int], ...]]:
    """All experts of all layers, divided evenly."""
    each = N_EXPERT // workers
    return [tuple((layer, w * each, (w + 1) * each) for layer in ALL_LAYERS) for w in range(workers)]


@asynccontextmanager
async def worker(
    swarm: MapHolder,
    ranges: tuple[tuple[int, int, int], ...],
    engine: str = "torch",
    kind: type[ExpertServer] = ExpertServer,
) -> AsyncIterator[Worker]:
    """A running worker, listening on loopback."""
    async with (
        open_engine() as process,
        Node.open(secrets.token_bytes(32), listen=[LOOPBACK]) as node,
    ):
        await process.load_bank(bank_order(ranges, engine))
        server = kind(
            process,
            current_map=lambda: swarm.value,
            newer_map=lambda: swarm.newer,
            precision="exact",
        )
        server.serve_ranges("model", ranges)
        node.handle(experts.PROTOCOL, experts.MAX_HELLO_FRAME, server.take_link)
        yield Worker(node, process, server, ranges, swarm)


def entry(one: Worker, *, expires_in: float = 1e6) -> MapWorker:
    """Its line in the map."""
    return MapWorker(one.peer, one.ranges, tuple(one.node.addresses()), expires_in)


@dataclass
class Texts:
    """What a coordinator tells of its requests."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    times: dict[int, list[float]] = field(default_factory=dict)
    news: trio.Event = field(default_factory=trio.Event)

    def tell(self, outputs: tuple[ring.Output, ...], ended: tuple[ring.Ended, ...]) -> None:
        for output in outputs:
            self.tokens.setdefault(output.request, []).append(output.token)
            self.times.setdefault(output.request, []).append(trio.current_time())
        for end in ended:
            self.ended[end.request] = end.reason
        self.news.set()
        self.news = trio.Event()

    async def wait(self, requests: Iterable[int], seconds: float = 60.0) -> None:
        """Until all of them have ended."""
        with trio.fail_after(seconds):
            while not set(requests) <= set(self.ended):
                await self.news.wait()

    async def wait_tokens(self, request: int, count: int, seconds: float = 60.0) -> None:
        """Until a request has so many tokens."""
        with trio.fail_after(seconds):
            while len(self.tokens.get(request, ())) < count:
                await self.news.wait()


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Until a condition holds that nothing announces."""
    with trio.fail_after(seconds):
        while not condition():
            await trio.sleep(0.02)


@dataclass
class Running:
    """A coordinator under test."""

    node: Node
    engine: Engine
    dispatcher: Dispatcher
    coordinator: Coordinator
    texts: Texts
    swarm: MapHolder
    caught: list[tuple[str, str]] = field(default_factory=list)

    def submit(self, request: int, case: dict, count: int | None = None) -> None:
        """A greedy request."""
        count = len(case["ids"]) if count is None else count
        sampling = Sampling(temperature=0.0, prompt_length=len(case["prompt_ids"]))
        self.coordinator.submit(ring.Submit(request, tuple(case["prompt_ids"]), count, sampling, ()))

    async def wire(self, *workers: Worker, proven: bool = True, seconds: float = 20.0) -> None:
        """Put workers into the map, and wait until they have had their first try."""
        value = self.swarm.change(
            workers=tuple(entry(one) for one in workers), dispatchers=(MapDispatcher(self.node.peer_id),)
        )
        self.dispatcher.follow(value)
        if proven:
            await until(lambda: all(w.proven for w in self.dispatcher.statistics().workers), seconds)


@asynccontextmanager
async def coordinator(
    swarm: MapHolder,
    *,
    engine: str = "onnx",
    remote: str = "auto",
    mode: str = "sampled",
    settings: DispatchSettings = DEFAULT_SETTINGS,
    slots: int = 8,
    load: Callable[[], int] | None = None,
    stall: trio.Event | None = None,
    **order: object,
) -> AsyncIterator[Running]:
    """A running coordinator with the small model; ``load`` replaces the busy slots that its dispatcher reads."""
    async with (
        open_engine() as process,
        Node.open(secrets.token_bytes(32), listen=[LOOPBACK]) as node,
        trio.open_nursery() as nursery,
    ):
        arena = ArenaShape(32, buffer_bytes())
        await process.load_stage(stage_order(engine=engine, n_slots=slots, arena=arena, **order))
        texts = Texts()
        config = DispatcherConfig(
            "model",
            ALL_LAYERS,
            N_EMBD,
            N_USED,
            "exact",
            settings,
            mode,  # type: ignore[arg-type]
            remote,  # type: ignore[arg-type]
        )

        async def read_slots() -> SlotReading:
            if stall is not None and stall.is_set():
                await trio.sleep_forever()
            reading = found.coordinator.slots()
            if load is None:
                return reading
            return SlotReading(load(), reading.total, 0, trio.current_time())

        caught: list[tuple[str, str]] = []

        def on_caught(peer: str, why: str, rewinds: Mapping[int, int]) -> None:
            caught.append((peer, why))
            found.coordinator.caught(peer, why, rewinds)

        dispatcher = Dispatcher(node, process, config, read_slots=read_slots, caught=on_caught)
        widths = Widths(64, ROWS, 8, slots, 256, 2)
        found = Running(
            node,
            process,
            dispatcher,
            Coordinator(process, widths, texts.tell, dispatcher),
            texts,
            swarm,
            caught,
        )
        await nursery.start(dispatcher.run)
        nursery.start_soon(found.coordinator.run)
        try:
            yield found
        finally:
            nursery.cancel_scope.cancel()


@dataclass
class DispatchingStage:
    """A stage's engine and dispatcher, without the ring around it."""

    peer: str
    engine: Engine
    dispatcher: Dispatcher


@asynccontextmanager
async def dispatching_stage(index: int, places: list[tuple[int, int]]) -> AsyncIterator[DispatchingStage]:
    """One stage of the small model that sends all its routed rows away."""
    first, end = places[index]
    async with (
        open_engine() as process,
        Node.open(secrets.token_bytes(32), listen=[LOOPBACK]) as node,
        trio.open_nursery() as nursery,
    ):
        arena = ArenaShape(16, buffer_bytes())
        await process.load_stage(
            stage_order(first=first, end=end, stage=index, stages=len(places), arena=arena)
        )

        async def read_slots() -> SlotReading:
            return SlotReading(1, 8, 0, trio.current_time())

        config = DispatcherConfig("model", tuple(range(first, end)), N_EMBD, N_USED, "exact", remote="all")
        dispatcher = Dispatcher(node, process, config, read_slots=read_slots)
        await nursery.start(dispatcher.run)
        yield DispatchingStage(node.peer_id, process, dispatcher)
        nursery.cancel_scope.cancel()
