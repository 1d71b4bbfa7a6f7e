"""The parts of a ring for benches: a relay, stages in processes of their own, and the bench as their bridge.

All that a ring does between a plan and its tokens is real: relay, circuits, links, agents, engine processes, head,
stages, the bridge's requests. Only the market is left out, since a bench says itself which plan is to be.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import trio

from kvasir_peer import identity
from kvasir_peer.agent.engine import Engine, open_engine
from kvasir_peer.engines import orders
from kvasir_peer.engines.synthetic import parse_cost
from kvasir_peer.errors import LinkError, WireError
from kvasir_peer.net.link import Link
from kvasir_peer.net.node import Node
from kvasir_peer.ring import link_probe
from kvasir_peer.ring.head import HeadEpoch, HeadState
from kvasir_peer.ring.plan import Plan, PlanStage, decode_plan, sign_plan
from kvasir_peer.ring.requests import RingRequests
from kvasir_peer.ring.stage import RingBroken, StageEpoch
from kvasir_peer.serving.scheduler import Policy
from kvasir_peer.serving.widths import Widths
from kvasir_peer.wire import ring
from kvasir_peer.wire.sampling import GREEDY

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
READY_SECONDS = 60.0  # imports of several processes on a busy machine
OPEN_SECONDS = 30.0  # for the links of an epoch


# --- a stage, in a process of its own --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice:
    """What a stage loads.

    Attributes:
        engine: name of the engine.
        device: of the engine; for the synthetic one, what a pass costs.
        model: GGUF file, or empty for the synthetic engine.
    """

    engine: str = "synthetic"
    device: str = "30ms+10ms"
    model: str = ""


class Stage:
    """Does what its bench says, line by line."""

    def __init__(self, key: identity.Identity, node: Node, engine: Engine, nursery: trio.Nursery) -> None:
        self._key, self._node, self._engine, self._nursery = key, node, engine, nursery
        self._epoch: StageEpoch | None = None
        self._scope = trio.CancelScope()
        self._head: HeadState | None = None
        self._loaded: object = None
        self._changed = trio.Event()
        node.handle(ring.PROTOCOL, ring.MAX_OPENING_FRAME, self._take)

    async def do(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry an order out."""
        if order["do"] == "begin":
            plan = decode_plan(base64.b64decode(order["plan"]), order["bridge"], identity.verify)
            await self._begin(plan, Slice(**order["slice"]), order["hand_set"])
        elif order["do"] == "end":
            self._scope.cancel()
        elif order["do"] == "measure":
            assert self._epoch is not None
            stages = self._epoch.plan.stages
            after = stages[(self._epoch.index + 1) % len(stages)]
            return {"seconds": (await link_probe.measure(self._node, after.peer, after.addresses)).seconds}
        return self._figures()

    async def _begin(self, plan: Plan, part: Slice, hand_set: Sequence[int] | None) -> None:
        index = plan.index_of(self._node.peer_id)
        assert index is not None
        stage, widths = plan.stages[index], plan.widths
        wanted = (part, stage.first, stage.end, widths, plan.dtype)
        if self._loaded != wanted:
            weights: Any = orders.GgufWeights(part.model) if part.model else orders.NoWeights()
            await self._engine.load_stage(
                orders.LoadStage(
                    *(0, weights, part.engine, index, len(plan.stages), stage.first, stage.end),
                    *(plan.n_layer, plan.n_embd, plan.vocab, widths.max_requests, widths.context_length),
                    *(widths.micro_batch_rows, plan.dtype, widths.top_logprobs, "exact", 1, part.device),
                    orders.ArenaShape(widths.max_in_flight + 1, plan.boundary_bytes),
                )
            )
            self._loaded = wanted
        else:
            await self._engine.retarget(index, len(plan.stages))
        arguments = (plan, index, self._node, self._engine, identity.verify)
        if index == 0:
            policy = Policy(hand_set=(hand_set[0], hand_set[1]) if hand_set else None)
            self._head = HeadState(plan, policy)
            self._epoch = HeadEpoch(*arguments, state=self._head, sign=self._key.sign)
        else:
            self._head, self._epoch = None, StageEpoch(*arguments, sign=self._key.sign)
        self._changed.set()
        self._changed = trio.Event()
        self._nursery.start_soon(self._run, self._epoch)

    async def _run(self, epoch: StageEpoch) -> None:
        with trio.CancelScope() as self._scope:
            try:
                await epoch.run()
            except RingBroken as error:
                if not error.peer:  # else the bench has ended the ring, and a neighbour was the first to hear
                    print(error, file=sys.stderr, flush=True)

    async def _take(self, link: Link) -> None:
        hello, _ = ring.OPENING.decode(await link.receive())
        if hello.purpose == "probe":
            await link_probe.answer(link)
            return
        while self._epoch is None or self._epoch.plan.id != hello.plan:
            await self._changed.wait()  # the neighbour was quicker
        await self._epoch.admit(link, hello)

    def _figures(self) -> dict[str, Any]:
        process, engine = psutil.Process(), self._engine.statistics()
        epoch = self._epoch.statistics() if self._epoch is not None else None
        scheduler = self._head.scheduler.statistics() if self._head is not None else None
        found: dict[str, Any] = {
            "now": trio.current_time(),
            "agent_bytes": process.memory_info().rss,
            "engine_bytes": psutil.Process(engine.pid).memory_info().rss if engine.pid else 0,
            "arena_bytes": os.fstat(self._engine._arena_file).st_size,
            "free_buffers": len(self._engine._free),
            "files": process.num_fds(),
            "threads": process.num_threads(),
            "tasks": trio.lowlevel.current_statistics().tasks_living,
            "links": len(self._node.statistics().links),
            "streams": sum(c.streams for c in self._node.statistics().connections),
            "epoch": asdict(epoch) if epoch else None,
        }
        if scheduler is not None:
            costs = scheduler.costs
            found["costs"] = {
                "stages": [asdict(line) for line in costs.stages],
                "transit": asdict(costs.transit),
                "jitter": costs.jitter,
            }
            found["scheduler"] = {
                name: getattr(scheduler, name)
                for name in ("live", "queued", "in_flight", "rows_in_flight", "slots", "target_in_flight")
            }
        return found


async def run_stage(relay: str) -> None:
    """A stage that says where it is, and then answers each order on standard input with its figures."""
    key = identity.Identity.generate()
    async with Node.open(key.private_key, relays=[relay], direct=False) as node:
        await node.relays_ready(READY_SECONDS)
        async with open_engine() as engine, trio.open_nursery() as nursery:
            stage = Stage(key, node, engine, nursery)
            print(json.dumps({"peer": node.peer_id, "addresses": node.addresses()}), flush=True)
            while line := await trio.to_thread.run_sync(sys.stdin.readline):
                print(json.dumps(await stage.do(json.loads(line))), flush=True)
            nursery.cancel_scope.cancel()


# --- the bench's side ------------------------------------------------------------------------------------------------


class Process:
    """A part in a process of its own, which ends with its standard input."""

    def __init__(self, *arguments: str) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "relay")])
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a part of the bench ended with {self.process.wait()}: {self.process.args}")
        return line.strip()

    def ask(self, text: str) -> str:
        """Write a line, and read the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self.line()

    def end(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Ring:
    """A bridge with stages, over one relay. Made by :func:`open_ring`."""

    def __init__(
        self, key: identity.Identity, node: Node, nursery: trio.Nursery, delay: Process | None
    ) -> None:
        self.requests = RingRequests()
        self.stages: list[Process] = []
        self.places: list[dict[str, Any]] = []
        self._key, self._node, self._nursery, self._delay = key, node, nursery, delay
        self._plan: Plan | None = None
        self._tokens: dict[str, Link] = {}
        self._changed = trio.Event()
        self._epochs = 0
        node.handle(ring.PROTOCOL, ring.MAX_OPENING_FRAME, self._take_tokens)

    async def set_delay(self, seconds: float) -> None:
        """One-way delay between any two peers; half of it lies on either side of the relay."""
        assert self._delay is not None
        await trio.to_thread.run_sync(self._delay.ask, str(seconds / 2))

    async def begin(
        self,
        widths: Widths,
        part: Slice,
        *,
        n_embd: int = 4096,
        vocab: int = 1024,
        cuts: Sequence[int] | None = None,
        dtype: str = "f16",
        hand_set: tuple[int, int] | None = None,
        hop_seconds: float = 0.002,
    ) -> None:
        """Start a ring of a plan of its own; the last one is ended."""
        await self.end()
        cuts = cuts or list(range(len(self.stages) + 1))
        base, row = parse_cost(part.device) if part.engine == "synthetic" else (0.01, 0.001)
        self._epochs += 1
        plan = Plan(
            id=f"bench-{self._epochs}",
            epoch=1,
            bridge=self._node.peer_id,
            model="bench",
            n_layer=cuts[-1],
            n_embd=n_embd,
            vocab=vocab,
            stages=tuple(
                PlanStage(place["peer"], cuts[i], cuts[i + 1], tuple(place["addresses"]), base, row)
                for i, place in enumerate(self.places)
            ),
            widths=widths,
            dtype=dtype,
            bridge_addresses=tuple(self._node.addresses())[:16],
            hop_seconds=hop_seconds,
        )
        self._plan, self._tokens = plan, {}
        signed = base64.b64encode(sign_plan(plan, self._key.sign)).decode()
        order = {
            "do": "begin",
            "plan": signed,
            "bridge": plan.bridge,
            "slice": asdict(part),
            "hand_set": hand_set,
        }
        await self._ask_all(json.dumps(order))
        with trio.fail_after(OPEN_SECONDS):
            link = await self._node.open_link(
                plan.stages[0].peer,
                ring.PROTOCOL,
                max_frame=ring.MAX_OPENING_FRAME,
                addresses=plan.stages[0].addresses,
            )
            await link.send(ring.OPENING.encode(ring.Hello("requests", plan.id, plan.epoch)))
            answer, _ = ring.OPENING.decode(await link.receive())
            assert isinstance(answer, ring.Welcome), answer
            while len(self._tokens) < 2:
                await self._changed.wait()
        link.max_frame = ring.max_request_frame(plan.limits())
        await self.requests.attach(plan, link)
        self._nursery.start_soon(self._keep, plan, link)
        self._nursery.start_soon(self.requests.send_cancels, link)

    async def end(self) -> None:
        """End the ring that there is."""
        if self._plan is not None:
            self.requests.detach("the bench begins another ring")
            self._plan = None
            await self._ask_all('{"do": "end"}')
            for link in self._tokens.values():
                link.close()

    async def figures(self) -> list[dict[str, Any]]:
        """What each stage says of itself."""
        return await self._ask_all('{"do": "figures"}')

    async def hops(self) -> list[float]:
        """Seconds one way from each stage to the next, and from the tail to the head, as measured now."""
        return [answer["seconds"] for answer in await self._ask_all('{"do": "measure"}')]

    async def _ask_all(self, text: str) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = [{} for _ in self.stages]

        async def ask(index: int) -> None:
            answers[index] = json.loads(await trio.to_thread.run_sync(self.stages[index].ask, text))

        async with trio.open_nursery() as nursery:
            for index in range(len(self.stages)):
                nursery.start_soon(ask, index)
        return answers

    async def _keep(self, plan: Plan, link: Link) -> None:
        """Ping the head, or it would take the bridge for silent."""
        codec = ring.codec(plan.limits())
        with contextlib.suppress(LinkError):
            while not link.closed:
                await link.send(codec.encode(ring.Ping(0)))
                await trio.sleep(1.5)

    async def _take_tokens(self, link: Link) -> None:
        hello, _ = ring.OPENING.decode(await link.receive())
        plan = self._plan
        if plan is None or hello.plan != plan.id:
            raise WireError("epoch", "a ring that is over", peer=link.remote_peer)
        link.max_frame = ring.max_result_frame(plan.limits())
        await link.send(ring.OPENING.encode(ring.Welcome(plan.epoch)))
        self._tokens[link.remote_peer] = link
        self._changed.set()
        self._changed = trio.Event()
        codec = ring.codec(plan.limits())
        with contextlib.suppress(LinkError):
            while True:
                message, _ = codec.decode(await link.receive())
                if isinstance(message, ring.Ping):
                    await link.send(codec.encode(ring.Pong(message.nonce)))
                elif isinstance(message, ring.Result):
                    self.requests.result(message)
                elif isinstance(message, ring.Composed):
                    self.requests.composed(message)
                else:
                    self.requests.ended(message)

    # -- load -----------------------------------------------------------------------------------------------

    async def ask(
        self, prompt: Sequence[int], max_tokens: int, seen: Any, *, hang_up: int | None = None
    ) -> None:
        """One request; ``seen(token, now)`` for each of its tokens. With ``hang_up`` the client goes after so many."""
        sampling = msgspec.structs.replace(GREEDY, prompt_length=len(prompt))
        count = 0
        async with self.requests.generate(list(prompt), max_tokens, sampling, frozenset()) as answer:
            if hang_up == 0:
                return
            async for token in answer:
                if token.token >= 0:
                    seen(token.token, trio.current_time())
                    count += 1
                if count == hang_up:
                    return


@contextlib.asynccontextmanager
async def open_ring(stages: int, *, delayed: bool = False) -> AsyncIterator[Ring]:
    """A relay, so many stages, and this process as their bridge.

    Args:
        delayed: every peer reaches the relay through a delaying proxy (at first without delay).
    """
    parts: list[Process] = []
    with tempfile.TemporaryDirectory() as home:
        try:
            relay = Process(
                "-m",
                "kvasir_relay",
                *("--home", home, "--listen", "/ip4/127.0.0.1/tcp/0", "--log.level", "warning"),
                *("--drain-time", "0"),
            )
            parts.append(relay)
            address = await trio.to_thread.run_sync(relay.line)
            addresses, delay = [address] * (stages + 1), None
            if delayed:
                port = address.split("/tcp/")[1].split("/")[0]
                delay = Process(str(HERE / "delay.py"), "127.0.0.1", port, str(stages + 1))
                parts.append(delay)
                ports = [await trio.to_thread.run_sync(delay.line) for _ in range(stages + 1)]
                addresses = [address.replace(f"/tcp/{port}", f"/tcp/{own}") for own in ports]
            made = [Process(str(HERE / "ring.py"), "--part", "stage", "--relay", a) for a in addresses[1:]]
            parts += made
            key = identity.Identity.generate()
            async with (
                Node.open(key.private_key, relays=[addresses[0]], direct=False) as node,
                trio.open_nursery() as nursery,
            ):
                await node.relays_ready(READY_SECONDS)
                opened = Ring(key, node, nursery, delay)
                opened.stages = made
                opened.places = [json.loads(await trio.to_thread.run_sync(p.line)) for p in made]
                try:
                    yield opened
                finally:
                    nursery.cancel_scope.cancel()
        finally:
            for part in reversed(parts):
                if part is parts[0]:
                    part.process.terminate()
                part.end()
