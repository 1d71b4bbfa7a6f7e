"""A whole ring in one event loop: the real head, stages and bridge's requests, over links in memory.

Only the network and the arithmetic are replaced. The engine's stack computes with integers, so that equality is
equality: every hidden value depends on every earlier position of its request through every layer, and a row that is
lost, doubled, out of order, or computed on another request's cache changes the tokens that follow. Everything around
the stack (the membership, boundaries, the check of the cache, sampling) is what an engine process runs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import trio
import trio.testing

from kvasir_peer import identity
from kvasir_peer.engines.base import F32, LayerStack, MemoryEstimate, Rows, StackSpec
from kvasir_peer.engines.orders import PassDone
from kvasir_peer.engines.stage_runner import StageRunner
from kvasir_peer.errors import BusyError, EngineError, LinkError, NotReadyError, WireError
from kvasir_peer.net.link import Link
from kvasir_peer.net.memory import memory_link_pair
from kvasir_peer.ring.head import HeadEpoch, HeadState
from kvasir_peer.ring.plan import Plan, PlanStage
from kvasir_peer.ring.requests import RingRequests
from kvasir_peer.ring.stage import RingBroken, StageEpoch
from kvasir_peer.serving.widths import Widths
from kvasir_peer.wire import ring
from kvasir_peer.wire.sampling import GREEDY, Sampling

VOCAB, N_EMBD = 97, 4
PIECE = 1 << 16  # a hidden value is four of them, each exact as a float32
_MASK = (1 << 61) - 1
BRIDGE = identity.Identity.generate()


# --- arithmetic ------------------------------------------------------------------------------------------------------


def mix(a: int, b: int, salt: int) -> int:
    """A number of 61 bits that depends on all of its arguments."""
    x = (a * 0x9E3779B97F4A7C15 + b * 0xC2B2AE3D27D4EB4F + salt * 0x165667B19E3779F9 + 1) & _MASK
    return ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9) & _MASK


def solo(
    prompt: Sequence[int], max_tokens: int, layers: int, stop: frozenset[int] = frozenset()
) -> list[int]:
    """What follows a prompt that has the model for itself, without slots, batches or stages."""
    memory = [0] * layers
    tokens, out = list(prompt), []
    for position, _ in enumerate(iter(lambda: len(out) < max_tokens, False)):
        hidden = tokens[position]
        for layer in range(layers):
            memory[layer] = mix(memory[layer], hidden, layer)
            hidden = mix(memory[layer], position, 1000 + layer)
        if position + 1 == len(tokens):
            out.append(hidden % VOCAB)
            tokens.append(out[-1])
            if out[-1] in stop:
                break
    return out


class IntegerStack(LayerStack):
    """Layers that mix integers, with a cache as real ones have it."""

    def __init__(self, spec: StackSpec, n_layer: int) -> None:
        self.spec = spec
        self.shape: Any = SimpleNamespace(n_layer=n_layer, n_embd=N_EMBD, n_vocab=VOCAB)
        self.cache: dict[tuple[int, int], list[int]] = {}  # layer, slot: a number for each position
        self.rows = 0
        self.lie = 0  # 1 while hidden values are wrong

    def memory(self) -> MemoryEstimate:
        return MemoryEstimate(0, 0, 0)

    def forward(self, rows: Rows, hidden: F32 | None) -> F32:
        self.rows += len(rows)
        values = rows.tokens.tolist() if hidden is None else [_joined(row) for row in hidden]
        out = [
            self._row(slot, position, value)
            for slot, position, value in zip(
                rows.slots.tolist(), rows.positions.tolist(), values, strict=True
            )
        ]
        if self.spec.end < self.shape.n_layer:
            return np.array([_split(value) for value in out], np.float32)
        logits = np.zeros((len(out), VOCAB), np.float32)
        logits[np.arange(len(out)), [value % VOCAB for value in out]] = 1.0
        return logits[rows.wants_output]

    def _row(self, slot: int, position: int, value: int) -> int:
        for layer in range(self.spec.first, self.spec.end):
            cache = self.cache.setdefault((layer, slot), [])
            assert position <= len(cache), "a hole in the cache, which the runner did not see"
            del cache[position:]
            cache.append(mix(cache[-1] if cache else 0, value, layer))
            value = mix(cache[-1], position, 1000 + layer) ^ self.lie
        return value

    def steps(self, rows: Rows, hidden: F32 | None) -> Any:
        raise AssertionError("it has no routed experts")

    def local_bank(self) -> None:
        return None

    def close(self) -> None:
        self.cache.clear()


def _split(value: int) -> list[int]:
    return [(value >> shift) % PIECE for shift in (0, 16, 32, 48)]


def _joined(row: Any) -> int:
    return sum(int(piece) << shift for piece, shift in zip(row, (0, 16, 32, 48), strict=True))


class IntegerEngine:
    """What a stage's agent uses of :class:`kvasir_peer.agent.engine.Engine`."""

    def __init__(self, seconds: tuple[float, float] = (0.0, 0.0)) -> None:
        self.seconds = seconds
        self.stack: IntegerStack | None = None
        self.runner: StageRunner | None = None
        self.free: list[int] = []
        self.killed = 0
        self._freed = trio.Event()
        self._busy = trio.Lock()
        self._generation = 0

    def load(self, plan: Plan, index: int) -> None:
        """Load the slice of a plan's stage, with an empty cache."""
        stage, widths = plan.stages[index], plan.widths
        spec = StackSpec(
            stage.first, stage.end, widths.max_requests, widths.context_length, widths.micro_batch_rows
        )
        self.stack = IntegerStack(spec, plan.n_layer)
        self.runner = StageRunner(self.stack, plan.limits(), index, plan.dtype)
        self._buffers = [bytearray(plan.boundary_bytes) for _ in range(widths.max_in_flight + 1)]
        self.retarget(index, len(plan.stages))

    def retarget(self, index: int, stages: int) -> None:
        """Another place, and another epoch: batches of the last one are not computed any more."""
        assert self.runner is not None
        self.runner.retarget(index, stages)
        self.free = list(range(len(self._buffers)))
        self._freed.set()
        self._generation += 1

    async def take_buffer(self) -> int:
        while not self.free:
            self._freed = trio.Event()
            await self._freed.wait()
        return self.free.pop()

    def free_buffer(self, index: int) -> None:
        assert index not in self.free, "a buffer is given back once"
        self.free.append(index)
        self._freed.set()

    def buffer(self, index: int) -> memoryview:
        return memoryview(self._buffers[index])

    async def submit(
        self,
        buffer: int,
        membership: bytes,
        boundary_bytes: int,
        layers: tuple[int, ...] = (),
        context: object = None,
    ) -> _Pending:
        return _Pending(self, buffer, membership, boundary_bytes, self._generation)

    async def compute(self, buffer: int, membership: bytes, boundary_bytes: int, generation: int) -> PassDone:
        async with self._busy:  # first come, first served
            count = int.from_bytes(membership[:4], "little")
            await trio.sleep(self.seconds[0] + self.seconds[1] * count)
            if generation != self._generation or self.runner is None:
                raise EngineError("a batch of an epoch that is over")
            room = self.buffer(buffer)
            size, outputs = self.runner.run(membership, room[:boundary_bytes], room)
            return PassDone(0, size, outputs, 1e3 * (self.seconds[0] + self.seconds[1] * count), 0.0)

    def kill(self) -> None:
        self.killed += 1


@dataclass
class _Pending:
    engine: IntegerEngine
    buffer: int
    membership: bytes
    boundary_bytes: int
    generation: int

    async def result(self) -> PassDone:
        return await self.engine.compute(self.buffer, self.membership, self.boundary_bytes, self.generation)


# --- network ---------------------------------------------------------------------------------------------------------


class Net:
    """Who can be reached, and what becomes of links."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.handlers: dict[str, Callable[[Link], Awaitable[None]]] = {}
        self.refused: list[WireError] = []
        self.serving = 0

    def node(self, peer: str) -> Node:
        return Node(self, peer)

    async def serve(self, peer: str, link: Link) -> None:
        self.serving += 1
        try:
            await self.handlers[peer](link)
        except WireError as error:
            self.refused.append(error)
        except LinkError:
            pass  # whoever opened it has gone again
        finally:
            self.serving -= 1
            link.close()


@dataclass
class Node:
    """What a stage uses of :class:`kvasir_peer.net.node.Node`."""

    net: Net
    peer_id: str

    async def open_link(
        self, peer: str, protocol: str, *, max_frame: int, addresses: Sequence[str] = ()
    ) -> Link:
        await trio.lowlevel.checkpoint()
        if peer not in self.net.handlers:
            raise LinkError(f"{peer} cannot be reached", peer=peer)
        here, there = memory_link_pair(protocol, max_frame=ring.MAX_OPENING_FRAME, peers=(self.peer_id, peer))
        here.max_frame = max_frame
        self.net.nursery.start_soon(self.net.serve, peer, there)
        return here


# --- a ring ----------------------------------------------------------------------------------------------------------


@dataclass
class Member:
    """A stage peer: its key, its engine, what its head would know, and the epoch that it serves."""

    key: identity.Identity = field(default_factory=identity.Identity.generate)
    engine: IntegerEngine = field(default_factory=IntegerEngine)
    head: HeadState | None = None
    epoch: StageEpoch | None = None
    scope: trio.CancelScope | None = None
    broken: RingBroken | None = None

    @property
    def peer(self) -> str:
        return self.key.peer_id


def plan_of(members: Sequence[Member], cuts: Sequence[int], widths: Widths, **more: Any) -> Plan:
    """A plan of these members, with borders ``[0, ..., n_layer]``."""
    stages = tuple(
        PlanStage(member.peer, first, end, (), *member.engine.seconds)
        for member, (first, end) in zip(members, itertools.pairwise(cuts), strict=True)
    )
    values = {
        "id": "ring",
        "epoch": 1,
        "bridge": BRIDGE.peer_id,
        "model": "integers",
        "n_layer": cuts[-1],
        "n_embd": N_EMBD,
        "vocab": VOCAB,
        "stages": stages,
        "widths": widths,
        "dtype": "f32",
    }
    plan = Plan(**{**values, **more})
    plan.check()
    return plan


class MemoryRing:
    """A bridge and its ring. Use within a nursery; :meth:`begin` each epoch."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.net = Net(nursery)
        self.requests = RingRequests()
        self.plan: Plan | None = None
        self.members: dict[str, Member] = {}
        self.broke: list[RingBroken] = []
        self.broken = trio.Event()  # of the present epoch
        self._tokens: dict[str, Link] = {}
        self._changed = trio.Event()
        self.net.handlers[BRIDGE.peer_id] = self._take_tokens

    async def begin(self, members: Sequence[Member], plan: Plan, *, resume: bool = True) -> None:
        """Start an epoch: what a bridge's manager and stage peers do between a plan and a ring that serves."""
        before = self.plan
        self.plan, self._tokens = plan, {}
        over, self.broken = self.broken, trio.Event()
        over.set()
        self.members = {member.peer: member for member in members}
        for index, member in enumerate(members):
            stack = member.engine.stack
            wanted = (plan.stages[index].first, plan.stages[index].end)
            if stack is None or (stack.spec.first, stack.spec.end) != wanted or before is None:
                member.engine.load(plan, index)
            else:
                member.engine.retarget(index, len(plan.stages))
            self._start(member, index, plan)
        if resume:
            await self.attach(plan)

    def _start(self, member: Member, index: int, plan: Plan) -> None:
        arguments = (plan, index, self.net.node(member.peer), member.engine, identity.verify)
        more = {"sign": member.key.sign, "experts": getattr(member.engine, "experts", None)}
        if index == 0:
            state = member.head
            if state is None or not state.follows(plan):
                state = HeadState(plan)
            elif state.plan.epoch != plan.epoch:
                state.adopt(plan, trio.current_time())
            member.head = state
            epoch: StageEpoch = HeadEpoch(*arguments, state=state, **more)  # type: ignore[arg-type]
        else:
            epoch = StageEpoch(*arguments, **more)  # type: ignore[arg-type]
        member.epoch, member.broken = epoch, None

        async def handle(link: Link) -> None:
            hello, _ = ring.OPENING.decode(await link.receive())
            await epoch.admit(link, hello)

        async def run() -> None:
            with trio.CancelScope() as member.scope:
                try:
                    await epoch.run()
                except RingBroken as error:
                    member.broken = error
                    self.broke.append(error)
                    self.broken.set()

        self.net.handlers[member.peer] = handle
        self.nursery.start_soon(run)

    async def attach(self, plan: Plan) -> None:
        """Open the requests link and submit what is under way, as soon as head and tail have opened theirs."""
        node, head = self.net.node(BRIDGE.peer_id), plan.stages[0].peer
        link = await node.open_link(head, ring.PROTOCOL, max_frame=ring.MAX_OPENING_FRAME)
        await link.send(ring.OPENING.encode(ring.Hello("requests", plan.id, plan.epoch)))
        answer, _ = ring.OPENING.decode(await link.receive())
        assert isinstance(answer, ring.Welcome)
        link.max_frame = ring.max_request_frame(plan.limits())
        while len(self._tokens) < 2:
            await self._changed.wait()
        await self.requests.attach(plan, link)
        self.nursery.start_soon(self._keep, plan, link)
        self.nursery.start_soon(self.requests.send_cancels, link)

    async def _keep(self, plan: Plan, link: Link) -> None:
        """Ping the head, or it would take the bridge for silent."""
        codec = ring.codec(plan.limits())
        with contextlib.suppress(LinkError):
            while not link.closed:
                await link.send(codec.encode(ring.Ping(0)))
                await trio.sleep(1.5)

    async def end(self, why: str = "the test ends the epoch") -> None:
        """Stop the epoch everywhere, as when it broke."""
        self.requests.detach(why)
        for member in self.members.values():
            if member.scope is not None:
                member.scope.cancel()
        for link in self._tokens.values():
            link.close()
        await trio.testing.wait_all_tasks_blocked()

    async def _take_tokens(self, link: Link) -> None:
        hello, _ = ring.OPENING.decode(await link.receive())
        plan = self.plan
        assert plan is not None and (hello.plan, hello.epoch) == (plan.id, plan.epoch)
        link.max_frame = ring.max_result_frame(plan.limits())
        await link.send(ring.OPENING.encode(ring.Welcome(plan.epoch)))
        self._tokens[link.remote_peer] = link
        self._changed.set()
        self._changed = trio.Event()
        codec = ring.codec(plan.limits())
        while True:
            message, _ = codec.decode(await link.receive())
            if isinstance(message, ring.Ping):
                await link.send(codec.encode(ring.Pong(message.nonce)))
            elif isinstance(message, ring.Result):
                self.requests.result(message)
            elif isinstance(message, ring.Tainted):
                self.requests.tainted(message)
            elif isinstance(message, ring.Composed):
                self.requests.composed(message)
            else:
                self.requests.ended(message)

    async def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        stop: frozenset[int] = frozenset(),
        hang_up: int | None = None,
    ) -> list[int]:
        """The answer to a prompt; with ``hang_up`` the client goes after so many tokens."""
        sampling = msgspec.structs.replace(GREEDY, prompt_length=len(prompt))
        tokens: list[int] = []
        while True:
            while not self.requests.attached:
                await trio.sleep(0.01)
            try:
                return await self._ask(list(prompt), max_tokens, sampling, stop, hang_up, tokens)
            except BusyError:
                assert not tokens, "who has begun is never turned away"
                await trio.sleep(0.1)

    async def _ask(
        self,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling,
        stop: frozenset[int],
        hang_up: int | None,
        tokens: list[int],
    ) -> list[int]:
        try:
            async with self.requests.generate(prompt, max_tokens, sampling, stop) as answer:
                if hang_up == 0:
                    return tokens
                async for token in answer:
                    if token.token >= 0:
                        tokens.append(token.token)
                    if len(tokens) == hang_up:
                        return tokens
        except NotReadyError as error:
            raise AssertionError(f"{error} ({self.broke})") from error
        return tokens


def moved(plan: Plan, members: Sequence[Member], cuts: Sequence[int], fresh: Sequence[Member]) -> Plan:
    """The next epoch of a plan, with other members or borders."""
    again = plan_of(members, cuts, plan.widths)
    return msgspec.structs.replace(again, epoch=plan.epoch + 1, fresh=tuple(m.peer for m in fresh))


@contextlib.asynccontextmanager
async def memory_ring() -> AsyncIterator[MemoryRing]:
    """A bridge without a ring yet; whatever still runs at the end is cancelled."""
    async with trio.open_nursery() as nursery:
        made = MemoryRing(nursery)
        try:
            yield made
        finally:
            nursery.cancel_scope.cancel()
