"""The real coordinator, dispatcher, checks and expert servers over links in memory and in virtual time.

Only arithmetic and network are replaced: engines multiply small matrices, links are joined in memory. So hundreds of
workers' lives pass in seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import trio
import trio.testing

from kvasir_peer.agent.engine import EngineStatistics, RoutedPass
from kvasir_peer.engines.orders import ExpertsDone, PassDone
from kvasir_peer.errors import LinkError
from kvasir_peer.experts.coordinator import Coordinator
from kvasir_peer.experts.dispatch_map import DispatchMap, MapDispatcher, MapWorker
from kvasir_peer.experts.dispatch_policy import SlotReading
from kvasir_peer.experts.dispatcher import Dispatcher, DispatcherConfig
from kvasir_peer.experts.expert_server import ExpertServer
from kvasir_peer.net.link import Link
from kvasir_peer.net.memory import memory_link_pair
from kvasir_peer.serving.widths import Widths
from kvasir_peer.wire import experts, ring
from kvasir_peer.wire.experts import decode_rows, encode_rows, rows_bytes
from kvasir_peer.wire.membership import FLAG_OUTPUT, Limits, decode_membership
from kvasir_peer.wire.sampling import GREEDY
from kvasir_peer.wire.tensors import encode_tensor

WIDTH, VOCAB, MAX_ROWS, CONTEXT, SLOTS = 8, 97, 384, 4096, 8
LAYERS = 2  # the second one's weights are there for those who take the wrong ones
LIMITS = Limits(MAX_ROWS, SLOTS, CONTEXT, VOCAB, 0, 1)
_rng = np.random.default_rng(1)
EXPERTS = 20
WEIGHTS = _rng.standard_normal((LAYERS, EXPERTS, WIDTH, WIDTH)).astype(np.float32) / 4
EMBEDDING = _rng.standard_normal((VOCAB, WIDTH)).astype(np.float32)


def sums_of(layer: int, ids: np.ndarray, weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Weighted sums over the experts of each row; negative ids are none."""
    # In float64, so that the number of rows changes nothing.
    each = np.einsum("nw,nkwv->nkv", x.astype(np.float64), WEIGHTS[layer][np.maximum(ids, 0)])
    return np.einsum("nk,nkv->nv", weights * (ids >= 0), each).astype(np.float32)


def expert_of(token: int, position: int, request: int) -> int:
    """Which expert a row is routed to."""
    return (token + position + request) % EXPERTS


def token_of(sums: np.ndarray) -> int:
    """The token that follows from a row's sums."""
    return int(np.abs(sums).sum() * 10) % VOCAB


class SmallEngine:
    """What agents use of :class:`kvasir_peer.agent.engine.Engine`."""

    def __init__(self, buffers: int = 48) -> None:
        size = rows_bytes(MAX_ROWS, 1, WIDTH, "f32")
        self._buffers = [bytearray(size) for _ in range(buffers)]
        self._free = list(range(buffers))
        self._freed = trio.Event()
        self._jobs = itertools.count(1)
        self._passes = 0
        self._resumed: dict[int, tuple[trio.Event, list[bytes]]] = {}
        self.routed: Callable[[RoutedPass], None] = lambda work: None

    async def take_buffer(self) -> int:
        while not self._free:
            self._freed = trio.Event()
            await self._freed.wait()
        return self._free.pop()

    def free_buffer(self, index: int) -> None:
        self._free.append(index)
        self._freed.set()

    def buffer(self, index: int) -> memoryview:
        return memoryview(self._buffers[index])

    def sums(self, layer: int, ids: np.ndarray, weights: np.ndarray, x: np.ndarray) -> np.ndarray:
        return sums_of(layer, ids, weights, x)

    async def compute_experts(
        self, buffer: int, layer: int, rows: int, count: int, dtype: str, urgency: str
    ) -> ExpertsDone:
        room = self.buffer(buffer)
        routed = decode_rows(room[: rows_bytes(rows, count, WIDTH, dtype)], rows, count, WIDTH, dtype)
        await trio.sleep(1e-4 * rows)
        sums = encode_tensor(self.sums(layer, *routed), dtype)
        room[: len(sums)] = sums
        return ExpertsDone(0, len(sums), 0.1 * rows)

    async def submit(
        self,
        buffer: int,
        membership: bytes,
        boundary: int,
        layers: Sequence[int] = (),
        context: object = None,
    ) -> _Pass:
        return _Pass(self, buffer, membership, tuple(layers), context)

    async def resume(self, work: RoutedPass, sums: bytes) -> None:
        event, answers = self._resumed[work.job]
        answers.append(sums)
        event.set()

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(True, 1, 0, self._passes, float(self._passes), 0.0, 0)


@dataclass
class _Pass:
    engine: SmallEngine
    buffer: int
    membership: bytes
    layers: tuple[int, ...]
    context: object
    begun: bool = False  # whether it has handed out rows, or is done

    async def result(self) -> PassDone:
        """One layer of experts; the token follows from the sums of the row and nothing else."""
        engine = self.engine
        batch = decode_membership(self.membership, LIMITS)
        rows = batch.rows
        await trio.sleep(1e-3)
        x = EMBEDDING[rows["token"]]
        ids = expert_of(rows["token"], rows["position"], rows["request"]).astype(np.int32)[:, None]
        weights = np.ones(ids.shape, np.float32)
        if self.layers:
            job = next(engine._jobs)
            waiting = engine._resumed[job] = (trio.Event(), list[bytes]())
            encode_rows(ids, weights, x, "f32", engine.buffer(self.buffer))
            self.begun = True
            engine.routed(RoutedPass(job, self.buffer, 0, len(rows), 1, self.context))
            await waiting[0].wait()
            del engine._resumed[job]
            sums = np.frombuffer(waiting[1][0], np.float32).reshape(len(rows), WIDTH)
        else:
            sums = engine.sums(0, ids, weights, x)
        self.begun = True
        engine._passes += 1
        wanted = np.flatnonzero(rows["flags"] & FLAG_OUTPUT)
        outputs = tuple(
            ring.Output(
                int(rows["request"][at]),
                int(rows["incarnation"][at]),
                int(rows["position"][at]),
                token_of(sums[at]),
                slot=int(rows["slot"][at]),
            )
            for at in wanted
        )
        return PassDone(0, 0, outputs, 1.0, 0.0)


@dataclass
class SmallNet:
    """Links in memory between peers by name."""

    nursery: trio.Nursery
    servers: dict[str, ExpertServer] = field(default_factory=dict)

    async def serve(self, peer: str, link: Link) -> None:
        try:
            await self.servers[peer].take_link(link)
        except LinkError:
            pass  # the dispatcher has let go of it
        finally:
            link.close()


@dataclass
class SmallNode:
    """What a dispatcher uses of :class:`kvasir_peer.net.node.Node`."""

    net: SmallNet
    peer_id: str

    async def open_link(
        self, peer: str, protocol: str, *, max_frame: int, addresses: Sequence[str] = ()
    ) -> Link:
        await trio.lowlevel.checkpoint()
        here, there = memory_link_pair(
            protocol, max_frame=experts.MAX_HELLO_FRAME, peers=(self.peer_id, peer)
        )
        here.max_frame = max_frame
        self.net.nursery.start_soon(self.net.serve, peer, there)
        return here


def prompt_of(number: int, length: int) -> tuple[int, ...]:
    """The prompt of a request."""
    return tuple((number * 7 + i) % VOCAB for i in range(length))


def wrong_places(request: int, prompt_length: int, answer: Sequence[int]) -> list[int]:
    """Places of an answer whose token is not what honest experts make of the token before it."""
    text = [*prompt_of(request, prompt_length), *answer]
    wrong = []
    for position in range(prompt_length - 1, len(text) - 1):
        token = text[position]
        ids = np.array([[expert_of(token, position, request)]], np.int32)
        sums = sums_of(0, ids, np.ones((1, 1), np.float32), EMBEDDING[[token]])
        if token_of(sums[0]) != text[position + 1]:
            wrong.append(position + 1 - prompt_length)
    return wrong


@dataclass
class Shell:
    """A coordinator that sends all rows away, and its workers by name."""

    coordinator: Coordinator
    dispatcher: Dispatcher
    tokens: dict[int, list[int]]
    _next: itertools.count[int] = field(default_factory=itertools.count)

    def ask(self, count: int, max_tokens: int, prompt_length: int) -> None:
        """So many requests."""
        for _ in range(count):
            number = next(self._next)
            prompt = prompt_of(number, prompt_length)
            self.coordinator.submit(ring.Submit(number, prompt, max_tokens, GREEDY, ()))


@asynccontextmanager
async def shell(
    workers: Mapping[str, tuple[SmallEngine, tuple[int, int]]],
    caught: Callable[[str], None],
    *,
    mode: Any = "sampled",
    asked: tuple[int, int] = (200, 3),
    in_flight: int = 1,
    dtype: str = "f16",
) -> AsyncIterator[Shell]:
    """A running coordinator.

    Args:
        workers: engine and range of experts of each.
        caught: told the name of one that is.
        asked: tokens and prompt's length of each request.
    """
    async with trio.open_nursery() as nursery:
        net = SmallNet(nursery)
        value = DispatchMap(
            "model",
            1,
            "bridge",
            0.0,
            LAYERS,
            WIDTH,
            1,
            dtype,
            MAX_ROWS,
            tuple(MapWorker(name, ((0, *span),), (), 1e6) for name, (_, span) in workers.items()),
            (MapDispatcher("me"),),
        )
        for name, (engine, span) in workers.items():
            server = net.servers[name] = ExpertServer(
                engine,  # type: ignore[arg-type]
                current_map=lambda: value,
                newer_map=trio.Event,
                precision="exact",
            )
            server.serve_ranges("model", ((0, *span),))
        own = SmallEngine()
        tokens: dict[int, list[int]] = {}

        def tell(outputs: tuple[ring.Output, ...], ended: tuple[ring.Ended, ...]) -> None:
            for output in outputs:
                tokens.setdefault(output.request, []).append(output.token)
            for end in ended:
                assert end.reason == "length", end
                found.ask(1, *asked)  # there is always something to do

        async def read_slots() -> SlotReading:
            return core.slots()

        def on_caught(peer: str, why: str, rewinds: Mapping[int, int]) -> None:
            core.caught(peer, why, rewinds)
            caught(peer)

        dispatcher = Dispatcher(
            SmallNode(net, "me"),  # type: ignore[arg-type]
            own,  # type: ignore[arg-type]
            DispatcherConfig("model", (0,), WIDTH, 1, "exact", mode=mode, remote="all"),
            read_slots=read_slots,
            caught=on_caught,
        )
        core = Coordinator(
            own,  # type: ignore[arg-type]
            Widths(MAX_ROWS, MAX_ROWS, in_flight, SLOTS, CONTEXT, 0),
            tell,
            dispatcher,
        )
        found = Shell(core, dispatcher, tokens)
        await nursery.start(dispatcher.run)
        dispatcher.follow(value)
        nursery.start_soon(core.run)
        found.ask(SLOTS, *asked)
        yield found
        nursery.cancel_scope.cancel()


def in_virtual_time(main: Callable[[], Any]) -> None:
    """Run it with a clock that jumps; far more time than any of it takes."""

    async def bounded() -> None:
        with trio.fail_after(10_000):
            await main()

    trio.run(bounded, clock=trio.testing.MockClock(autojump_threshold=0))
