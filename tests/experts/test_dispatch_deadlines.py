"""Whatever happens to workers, a token comes at most one deadline later than without them: in simulated time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import trio
from helpers_experts import ALL_LAYERS, N_EMBD, N_EXPERT, N_USED, until

from kvasir_peer.agent.engine import RoutedPass
from kvasir_peer.engines.orders import ExpertsDone
from kvasir_peer.errors import LinkError, RefusedError
from kvasir_peer.experts import dispatcher as dispatching
from kvasir_peer.experts.dispatch_map import DispatchMap, MapWorker
from kvasir_peer.experts.dispatch_policy import SlotReading
from kvasir_peer.experts.dispatcher import Dispatcher, DispatcherConfig
from kvasir_peer.experts.routed_part import RoutedRows
from kvasir_peer.experts.worker_health import MAX_DEADLINE
from kvasir_peer.experts.worker_link import WorkerAnswer, WorkerLinkStatistics
from kvasir_peer.wire.experts import NO_EXPERT, rows_bytes

WAY = 0.040  # seconds, there and back
PAIR, OWN_PAIR = 0.002, 0.004  # seconds of a worker, of the own experts, for each row and expert
PASSES, ROWS, TOKENS, BEFORE = 3, 4, 10, 5


@dataclass
class OwnEngine:
    """Takes its time for experts whose sums are all zero."""

    free: float = 0.0
    memory: bytearray = field(default_factory=lambda: bytearray(rows_bytes(64, N_USED, N_EMBD, "f32")))

    async def take_buffer(self) -> int:
        await trio.lowlevel.checkpoint()
        return 0

    def free_buffer(self, index: int) -> None:
        pass

    def buffer(self, index: int) -> memoryview:
        return memoryview(self.memory)

    async def compute_experts(
        self, buffer: int, layer: int, rows: int, experts: int, dtype: str, urgency: str
    ) -> ExpertsDone:
        ids = np.frombuffer(self.memory[: 2 * rows * experts], "<u2")
        held = OWN_PAIR * int((ids != NO_EXPERT).sum())
        size = rows * N_EMBD * 4
        self.free = max(self.free, trio.current_time()) + held
        await trio.sleep_until(self.free)
        self.memory[:size] = bytes(size)
        return ExpertsDone(0, size, held * 1e3)


class FarLink:
    """A worker of which the test says what becomes of it."""

    has_room = True
    precision = "exact"

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.fault = ""
        self.free = 0.0

    async def ask(self, layer, ids, weights, x, priority) -> WorkerAnswer:
        held = PAIR * int((ids >= 0).sum()) * (10 if self.fault == "slow" else 1)
        self.free = max(self.free, trio.current_time() + WAY / 2) + held
        await trio.sleep_until(self.free + WAY / 2)
        if self.fault == "silent":
            await trio.sleep_forever()
        if self.fault == "late":
            await trio.sleep(MAX_DEADLINE + 0.5)
        if self.fault == "lost":
            raise LinkError("the link was lost", peer=self.peer)
        if self.fault == "failing":
            raise RefusedError("it can't compute this", peer=self.peer)
        return WorkerAnswer(np.full_like(x, np.nan if self.fault == "nan" else 0.0), held)

    async def run(self) -> None:
        await trio.sleep_forever()

    def statistics(self) -> WorkerLinkStatistics:
        return WorkerLinkStatistics(0, 0, 0, 0, 0, 0, 0)


class Here:
    peer_id = "here"


async def longest_token(
    monkeypatch: pytest.MonkeyPatch, peers: str, fault: str = "", to: str = ""
) -> tuple[float, float]:
    """Longest time of a token of all passes, and the longest deadline in force when the fault came, seconds."""
    links = {peer: FarLink(peer) for peer in peers}

    async def open_link(node, peer, *rest):
        await trio.lowlevel.checkpoint()
        return links[peer]

    async def slots() -> SlotReading:
        return SlotReading(PASSES, 8, 0, trio.current_time())

    monkeypatch.setattr(dispatching, "open_worker_link", open_link)
    config = DispatcherConfig("model", ALL_LAYERS, N_EMBD, N_USED, "exact")
    dispatcher = Dispatcher(Here(), OwnEngine(), config, read_slots=slots)  # type: ignore[arg-type]
    ranges = tuple((layer, 0, N_EXPERT) for layer in ALL_LAYERS)
    entries = tuple(MapWorker(peer, ranges, (), 1e6) for peer in peers)
    longest, deadline = 0.0, 0.0
    draw = np.random.default_rng(3)
    done = itertools.count(1)

    async def stream() -> None:
        nonlocal longest, deadline
        for token in range(TOKENS):
            began = trio.current_time()
            for layer in ALL_LAYERS:
                ids = np.stack([draw.permutation(N_EXPERT)[:N_USED] for _ in range(ROWS)]).astype(np.int32)
                rows = RoutedRows(
                    layer, ids, np.ones(ids.shape, np.float32), np.ones((ROWS, N_EMBD), np.float32)
                )
                sums = await dispatcher._sums(rows)
                assert not sums.any()
                if fault and token == BEFORE and next(done) == PASSES * 2:
                    states = [dispatcher._known[peer].state for peer in to]
                    frames = [frame for state in states if state is not None for frame in state.frames]
                    deadline = max(frame.deadline - frame.sent for frame in frames)
                    for peer in to:
                        links[peer].fault = fault
            if token >= BEFORE:
                longest = max(longest, trio.current_time() - began)

    async with trio.open_nursery() as nursery:
        await nursery.start(dispatcher.run)
        dispatcher.follow(
            DispatchMap("model", 1, "", 0.0, len(ALL_LAYERS), N_EMBD, N_USED, "f32", 64, entries)
        )
        await until(lambda: all(w.proven for w in dispatcher.statistics().workers))
        async with trio.open_nursery() as streams:
            for _ in range(PASSES):
                streams.start_soon(stream)
        remote = dispatcher.statistics().remote_pairs
        nursery.cancel_scope.cancel()
    assert remote > 0
    return longest, deadline


@pytest.mark.parametrize(
    ("fault", "to"),
    [(fault, "a") for fault in ("silent", "late", "lost", "failing", "slow", "nan")] + [("silent", "ab")],
)
async def test_an_event_costs_a_token_at_most_one_deadline(monkeypatch, autojump_clock, fault, to) -> None:
    left = "".join(peer for peer in "abc" if peer not in to)
    calm, _ = await longest_token(monkeypatch, left)
    disturbed, deadline = await longest_token(monkeypatch, "abc", fault, to)
    assert 0 < deadline <= MAX_DEADLINE
    # Not even one: somebody else is asked before it, and a late worker gets nothing new meanwhile.
    assert disturbed <= calm + deadline / 2


class Watching(trio.abc.Instrument):
    """Hands routed rows to a dispatcher whose tasks have ended, before its own task comes to run again."""

    def __init__(self, dispatcher: Dispatcher, engine: OwnEngine) -> None:
        self.dispatcher, self.engine = dispatcher, engine
        self.failures: list[RuntimeError] = []
        self.handed = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        nursery = self.dispatcher._nursery
        if nursery is not None and nursery._closed:
            self.handed += 1
            try:
                self.engine.routed(RoutedPass(1, 0, 0, ROWS, N_USED, None))
            except RuntimeError as error:
                self.failures.append(error)


async def test_rows_that_an_engine_routes_while_a_dispatcher_ends_do_no_harm() -> None:
    async def slots() -> SlotReading:
        return SlotReading(0, 8, 0, trio.current_time())

    engine = OwnEngine()
    config = DispatcherConfig("model", ALL_LAYERS, N_EMBD, N_USED, "exact")
    dispatcher = Dispatcher(Here(), engine, config, read_slots=slots)  # type: ignore[arg-type]
    watching = Watching(dispatcher, engine)
    async with trio.open_nursery() as nursery:
        await nursery.start(dispatcher.run)
        trio.lowlevel.add_instrument(watching)
        nursery.cancel_scope.cancel()
    trio.lowlevel.remove_instrument(watching)
    assert watching.handed and not watching.failures
