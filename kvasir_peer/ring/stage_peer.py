"""A stage peer: offers itself to the bridge, fetches and loads the slice it is given, and serves epoch after epoch."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from kvasir_peer.agent.chunk_transfer import Download, TransferProgress
from kvasir_peer.agent.engine import Engine
from kvasir_peer.agent.loop_lag import LoopLag
from kvasir_peer.agent.manifest_fetch import fetch_manifest
from kvasir_peer.agent.membership import Membership
from kvasir_peer.engines import orders as engine_orders
from kvasir_peer.engines.footprint import MAX_EXPANSION, REFUSED_GROWTH
from kvasir_peer.errors import (
    KvasirError,
    LinkError,
    PlanError,
    RefusedError,
    ResourceError,
    UsageError,
    WireError,
)
from kvasir_peer.models.manifest import Manifest
from kvasir_peer.models.slices import StageSlice, chunks_of
from kvasir_peer.progress import Progress, Step, silent
from kvasir_peer.ring import link_probe, volunteering
from kvasir_peer.ring.head import HeadEpoch, HeadState
from kvasir_peer.ring.offers import layers_text
from kvasir_peer.ring.plan import Plan, decode_plan
from kvasir_peer.ring.stage import WELCOME_SECONDS, RingBroken, StageEpoch, StageExperts, refuse
from kvasir_peer.ring.volunteering import (
    LinkReport,
    Measured,
    Orders,
    Report,
    StageFigures,
    StageState,
    Transfer,
)
from kvasir_peer.serving.widths import Widths
from kvasir_peer.wire import ring
from kvasir_peer.wire.tensors import tensor_bytes

if TYPE_CHECKING:
    import httpx

    from kvasir_peer.models.store import ChunkStore
    from kvasir_peer.net.link import Link
    from kvasir_peer.net.node import Node

logger = logging.getLogger(__name__)

POLL_SECONDS = 10.0  # a poll is held this long while nothing changes; also the heartbeat
BUSY_POLL_SECONDS = 0.5  # between two reports of progress
ANSWER_SECONDS = 20.0  # on top of a poll's wait: a relayed path with weights under way
RETRY_DELAYS = (
    0.5,
    1.0,
    2.0,
    4.0,
    8.0,
)  # seconds before another poll after one that failed; the last one stays
HELLO_SECONDS = 10.0  # for the first frame of a link
STANDBY_RETRY_SECONDS = 10.0  # before a standby that could not get its slice ready tries again
PROBE_RETRIES = (0.5, 2.0, 0.0)  # seconds after each try to measure the way to a peer that failed
MAX_PROBES = 4  # of others, answered at once

Sign = Callable[[bytes], bytes]
Verify = Callable[[str, bytes, bytes], bool]

_STEPS: dict[StageState, Step] = {
    "idle": "plan",
    "fetching": "fetch",
    "loading": "load",
    "loaded": "load",
    "serving": "ready",
    "broken": "problem",
}


@dataclass(frozen=True)
class _Prepared:
    """What an engine can hold: a plan of another epoch with the same values needs no new load."""

    model: str
    first: int
    end: int
    widths: Widths
    dtype: str


class StagePeer:
    """The life of a stage, from its first poll to its last.

    Args:
        node: up, with its relays.
        engine: a running engine process.
        store: for chunks.
        membership: what to offer, and to whom.
        sign, verify: with this peer's key; by peer id.
        report: told what happens.
        experts: sends routed rows to volunteers; None computes them here.
    """

    def __init__(
        self,
        node: Node,
        engine: Engine,
        store: ChunkStore,
        membership: Membership,
        *,
        sign: Sign,
        verify: Verify,
        report: Callable[[Progress], None] = silent,
        experts: StageExperts | None = None,
    ) -> None:
        self._experts = experts
        self._node = node
        self._engine = engine
        self._store = store
        self._membership = membership
        self._sign = sign
        self._verify = verify
        self._tell = report
        self._lag = LoopLag()
        self._state: StageState = "idle"
        self._plan: Plan | None = None
        self._loaded: _Prepared | None = None
        self._kept = False
        self._preparing: _Prepared | None = None
        self._standby: tuple[int, int] | None = None
        self._standing: tuple[_Prepared, Plan, tuple[volunteering.Source, ...]] | None = None
        self._preload = False
        self._on_disk: set[tuple[int, int]] = set()
        self._measured: Measured | None = None
        self._expansion = membership.expansion
        self._refused: _Prepared | None = None  # what the engine had no memory for last
        self._neighbours: frozenset[str] = frozenset()
        self._links: dict[str, LinkReport] = {}  # not reported yet
        self._reason = ""
        self._lost = ""
        self._transfer: Transfer | None = None
        self._epoch: StageEpoch | None = None
        self._epoch_changed = trio.Event()
        self._head_state: HeadState | None = None
        self._probes = 0
        self._leaving = False
        self._over = trio.Event()
        self._moved = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._preparation: trio.CancelScope | None = None
        self._work: trio.CancelScope | None = None
        engine.crashed = self._engine_crashed

    # -- life -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled, or until the place is handed over after :meth:`leave`.

        Raises:
            RefusedError: the bridge does not let this peer in.
        """
        self._node.handle(ring.PROTOCOL, ring.MAX_OPENING_FRAME, self._take_link)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._lag.run)
            nursery.start_soon(self._poll)
            await self._over.wait()
            nursery.cancel_scope.cancel()

    def leave(self) -> None:
        """Ask the bridge to give this place to somebody else; :meth:`run` ends when that has happened.

        It ends at once where there is no place to give, or no bridge to ask.
        """
        self._leaving = True
        if self._plan is None or self._nursery is None:
            self._over.set()
            return
        self._tell(Progress("stop", "the bridge looks for somebody to take this place"))
        self._urgent()

    def statistics(self) -> StageFigures:
        """Counters for the bridge and for the owner."""
        import psutil

        epoch = self._epoch.statistics() if self._epoch is not None else None
        engine = self._engine.statistics()
        lag = self._lag.statistics()
        link = self._epoch.outgoing_statistics() if self._epoch is not None else ("", 0.0)
        return StageFigures(
            batches=epoch.batches if epoch else 0,
            rows=epoch.rows if epoch else 0,
            held_ms=epoch.held_ms if epoch else 0.0,
            starved_ms=epoch.starved_ms if epoch else 0.0,
            blocked_ms=epoch.blocked_ms if epoch else 0.0,
            queue=epoch.queue if epoch else 0,
            bytes_in=epoch.bytes_in if epoch else 0,
            bytes_out=epoch.bytes_out if epoch else 0,
            lag_p99_ms=lag.p99_ms,
            agent_bytes=psutil.Process().memory_info().rss,
            engine_bytes=engine.resident_bytes,
            engine_restarts=engine.restarts,
            path=link[0],
            round_trip_ms=link[1],
        )

    # -- talking to the bridge ------------------------------------------------------------------------------

    async def _poll(self) -> None:
        failures = 0
        mine = self._membership
        async with self._node.http_client(mine.bridge, mine.bridge_addresses) as client:
            self._client = client
            while True:
                busy = self._state in ("fetching", "loading")
                began = trio.current_time()
                try:
                    orders = await self._post(client, 0.0 if busy else POLL_SECONDS)
                except LinkError as error:
                    if self._leaving:
                        self._over.set()
                        return
                    logger.warning("%s", error)
                    self._tell(Progress("problem", f"the bridge does not answer; trying again ({error})"))
                    await trio.sleep(RETRY_DELAYS[min(failures, len(RETRY_DELAYS) - 1)])
                    failures += 1
                    continue
                if failures:
                    self._tell(Progress(_STEPS[self._state], "the bridge answers again"))
                    failures = 0
                await self._follow(orders)
                if busy:
                    # Ready meanwhile: the next poll is the one that is held until everybody is.
                    with trio.move_on_at(began + BUSY_POLL_SECONDS):
                        while self._state in ("fetching", "loading"):
                            await self._moved.wait()

    async def _post(self, client: httpx.AsyncClient, wait: float) -> Orders:
        import httpx

        plan, mine = self._plan, self._membership
        body = Report(
            offer=volunteering.Offer(
                memory=mine.memory,
                disk=mine.disk,
                engine=mine.engine,
                device=mine.device,
                precision=mine.precision,
                threads=mine.threads,
                addresses=tuple(self._node.addresses()),
                on_disk=tuple(sorted(self._on_disk)),
                loaded=(self._loaded.first, self._loaded.end) if self._loaded else None,
                measured=self._measured,
                expansion=self._expansion,
            ),
            secret=mine.secret,
            state=self._state,
            plan=plan.id if plan else "",
            epoch=plan.epoch if plan else 0,
            running=self._epoch is not None,
            reason=self._reason,
            lost=self._lost,
            kept=self._kept,
            leaving=self._leaving,
            standby=self._standby,
            preload=self._preload,
            transfer=self._transfer,
            figures=self.statistics() if self._epoch is not None else None,
            links=tuple(self._links.values()),
            wait=wait,
        )
        said = dict(self._links)
        try:
            with trio.fail_after(wait + ANSWER_SECONDS):
                answer = await client.post("/api/stage-volunteer", content=msgspec.json.encode(body))
        except (httpx.HTTPError, trio.TooSlowError, LinkError) as error:
            raise LinkError(f"the bridge could not be asked: {str(error) or type(error).__name__}") from error
        if answer.status_code in (401, 403):
            raise RefusedError(f"the bridge refuses this peer: {answer.text[:200]}")
        if answer.status_code != 200:
            raise LinkError(f"the bridge answered {answer.status_code}: {answer.text[:200]}")
        self._links = {peer: link for peer, link in self._links.items() if said.get(peer) is not link}
        try:
            return msgspec.json.decode(answer.content, type=Orders)
        except msgspec.DecodeError as error:
            raise LinkError(f"the bridge's answer does not parse: {error}") from error

    def _urgent(self) -> None:
        """Say at once what has changed, beside the poll that the bridge may be holding."""
        assert self._nursery is not None, "only a running peer has something to say"
        self._nursery.start_soon(self._say)

    async def _say(self) -> None:
        try:
            orders = await self._post(self._client, 0.0)
        except LinkError as error:
            logger.info("an urgent report did not arrive, the next poll carries it: %s", error)
            if self._leaving:
                self._over.set()
            return
        await self._follow(orders)

    # -- following orders -----------------------------------------------------------------------------------

    async def _follow(self, orders: Orders) -> None:
        """Do what the bridge says."""
        if orders.neighbours:
            self._neighbours = frozenset(orders.neighbours)
        if orders.measure:
            assert self._nursery is not None
            self._nursery.start_soon(self._measure_links, orders.measure)
        if orders.assigned == "retire":
            self._stop_serving()
            self._stop_preparing()
            self._plan = self._standby = None
            self._set("idle", orders.why or "the bridge needs this peer no longer")
            if self._leaving:
                self._over.set()
            return
        if orders.plan:
            plan = decode_plan(base64.b64decode(orders.plan), self._membership.bridge, self._verify)
            if orders.assigned == "stage":
                self._take_place(plan, orders.sources)
            elif orders.slice is not None:
                self._stand_by(plan, orders.slice, orders)
        plan_now = self._plan
        if plan_now is not None and orders.go and orders.epoch == plan_now.epoch:
            self._start_epoch(plan_now)
        if orders.assigned == "wait" and self._plan is None and self._state == "idle":
            self._tell(Progress("plan", orders.why or "waiting for a place in the ring"))

    async def _measure_links(self, others: tuple[volunteering.Source, ...]) -> None:
        for other in others:
            for pause in PROBE_RETRIES:
                try:
                    time = await link_probe.measure(self._node, other.peer, other.addresses)
                except (LinkError, UsageError) as error:
                    logger.info("the way to %s was not measured: %s", other.peer, error)
                    await trio.sleep(pause)  # it may not have heard yet that it is to be measured
                else:
                    self._links[other.peer] = LinkReport(other.peer, time.seconds, time.rate)
                    break
        if self._links:
            self._urgent()

    def _take_place(self, plan: Plan, sources: tuple[volunteering.Source, ...]) -> None:
        known = self._plan
        if known is not None and known.id == plan.id and plan.epoch <= known.epoch:
            return  # an answer that was overtaken by a newer one
        index = plan.index_of(self._node.peer_id)
        if index is None:
            raise PlanError("the bridge sent a plan in which this peer has no place", plan=plan.id)
        self._stop_serving()
        # Not what was said of the epoch before: a report may go out before the preparation has begun.
        self._state = "loading"
        self._plan, self._reason, self._lost, self._standby = plan, "", "", None
        stage = plan.stages[index]
        self._prepare(_Prepared(plan.model, stage.first, stage.end, plan.widths, plan.dtype), plan, sources)

    def _stand_by(self, plan: Plan, part: tuple[int, int], orders: Orders) -> None:
        """Keep a slice ready, for when somebody falls out."""
        self._stop_serving()
        self._plan, self._reason, self._standby, self._preload = None, "", part, orders.preload
        wanted = _Prepared(plan.model, part[0], part[1], plan.widths, plan.dtype)
        self._standing = (wanted, plan, orders.sources)
        self._prepare(*self._standing)

    def _prepare(self, wanted: _Prepared, plan: Plan, sources: tuple[volunteering.Source, ...]) -> None:
        if self._preparing == wanted:
            return  # it is under way already, and looks at the plan when it is done
        self._stop_preparing()
        self._preparing = wanted
        if self._loaded != wanted:
            self._kept = False
        assert self._nursery is not None
        self._preparation = trio.CancelScope()
        self._nursery.start_soon(self._get_ready, self._preparation, wanted, plan, sources)

    def _stop_serving(self) -> None:
        if self._work is not None:
            self._work.cancel()
            self._work = None

    def _stop_preparing(self) -> None:
        if self._preparation is not None:
            self._preparation.cancel()
            self._preparation = self._preparing = None

    def _set(self, state: StageState, text: str, transfer: Transfer | None = None) -> None:
        self._state, self._transfer = state, transfer
        self._moved.set()
        self._moved = trio.Event()
        moved = transfer or Transfer(0, 0)
        index = self._plan.index_of(self._node.peer_id) if self._plan is not None else None
        stage = 0 if index is None else index + 1
        unit = "bytes" if moved.total else ""
        self._tell(Progress(_STEPS[state], text, moved.done, moved.total, unit, stage))

    # -- getting a slice ready ------------------------------------------------------------------------------

    async def _get_ready(
        self,
        scope: trio.CancelScope,
        wanted: _Prepared,
        plan: Plan,
        sources: tuple[volunteering.Source, ...],
    ) -> None:
        label = layers_text((wanted.first, wanted.end))
        with scope:
            try:
                text = f"{label}, loaded already"
                if self._loaded != wanted:
                    text = await self._fetch(plan, wanted, label, sources)
                    if self._plan is not None or self._preload:
                        text = await self._load(plan, wanted, label)
                await self._take_index(text)
            except (KvasirError, trio.TooSlowError) as error:
                self._reason = str(error) or "the engine does not come up"
                self._set("broken", f"{label} can't be made ready: {self._reason}")
                if self._plan is None:  # nobody waits for a standby, and nobody gives it another order
                    self._urgent()
                    await trio.sleep(STANDBY_RETRY_SECONDS)
                    self._stand_again()
                    return
            self._preparation = self._preparing = None
            self._urgent()

    async def _take_index(self, text: str) -> None:
        """Tell the engine its place in the plan; a newer plan may come meanwhile that leaves the slice as it is."""
        while (plan := self._plan) is not None:
            place = plan.index_of(self._node.peer_id)
            assert place is not None, "a plan without a place here is not taken"
            await self._engine.retarget(place, len(plan.stages))
            if self._plan is plan:
                self._set("loaded", text)
                return
        self._set("idle", f"standing by: {text}")

    async def _fetch(
        self, plan: Plan, wanted: _Prepared, label: str, sources: tuple[volunteering.Source, ...]
    ) -> str:
        self._set("fetching", f"fetching {label}", Transfer(0, 0))
        part = StageSlice(wanted.first, wanted.end, plan.n_layer)
        self._manifest_file = self._membership.manifest(plan.model)
        manifest = await fetch_manifest(self._client, plan.model, part, self._manifest_file)
        chunks = chunks_of(manifest, part)

        def progress(p: TransferProgress) -> None:
            self._set(
                "fetching", f"fetching {label}", Transfer(p.done_bytes, p.total_bytes, p.bytes_per_second)
            )

        await trio.to_thread.run_sync(self._store.ensure_room, chunks)
        await trio.to_thread.run_sync(self._store.pin, plan.model, [chunk.hash for chunk in chunks])
        peers = [(source.peer, source.addresses) for source in sources if source.peer != self._node.peer_id]
        await Download(self._node, self._store, chunks, progress).run(peers)
        self._on_disk.add((wanted.first, wanted.end))
        return f"{label} on disk, {sum(chunk.size for chunk in chunks) / 1e6:.1f} MB"

    async def _load(self, plan: Plan, wanted: _Prepared, label: str) -> str:
        self._set("loading", f"loading {label}", Transfer(0, 0))
        mine = self._membership
        boundary = tensor_bytes(plan.dtype, plan.widths.micro_batch_rows, plan.n_embd)
        order = engine_orders.LoadStage(
            job=0,
            weights=engine_orders.StoreWeights(str(self._store.root), str(self._manifest_file)),
            engine=mine.engine,
            stage=next(i for i, s in enumerate(plan.stages) if s.first == wanted.first),
            stages=len(plan.stages),
            first=wanted.first,
            end=wanted.end,
            n_layer=plan.n_layer,
            n_embd=plan.n_embd,
            vocab=plan.vocab,
            n_slots=plan.widths.max_requests,
            context_length=plan.widths.context_length,
            max_rows=plan.widths.micro_batch_rows,
            dtype=plan.dtype,
            top_logprobs=plan.widths.top_logprobs,
            precision=mine.precision,
            threads=mine.threads,
            device=mine.device,
            # One in the engine, the rest waiting for it or for the link.
            arena=engine_orders.ArenaShape(plan.widths.max_in_flight + 1, boundary),
            memory_limit=mine.memory,
            # Who takes over in the middle of answers has no time for it.
            measure=self._plan is None or plan.epoch == 1,
        )
        manifest = None
        if self._experts is not None:
            manifest = await trio.to_thread.run_sync(
                lambda: Manifest.decode(self._manifest_file.read_bytes(), wanted.model)
            )
            rows = plan.widths.micro_batch_rows
            arena = self._experts.arena(order.arena, manifest, wanted.first, wanted.end, rows)
            order = msgspec.structs.replace(order, arena=arena)
            self._experts.unloaded()
        self._loaded, self._kept = None, False

        def progress(done: int, total: int) -> None:
            self._set("loading", f"loading {label}", Transfer(done, total))

        try:
            answer = await self._engine.load_stage(order, progress)
        except ResourceError:
            # The bridge has planned by it, and plans again by this. Somebody who stands by tries the same slice again
            # and again, which says nothing new.
            if self._plan is not None or self._refused != wanted:
                self._refused = wanted
                self._expansion = min(MAX_EXPANSION, self._expansion * REFUSED_GROWTH)
            raise
        for note in answer.notes:
            logger.warning("%s", note)
        self._loaded = wanted
        self._note_passes(plan, wanted, answer.passes)
        if self._experts is not None and manifest is not None:
            self._experts.loaded(manifest, wanted.first, wanted.end, plan.widths.max_requests)
        return f"{label} loaded in {answer.seconds:.1f} s, {answer.resident_bytes / 1e6:.0f} MB"

    def _note_passes(self, plan: Plan, loaded: _Prepared, passes: tuple[tuple[int, float], ...]) -> None:
        """Make a line of what passes took: it is reported, and the bridge cuts layers by it."""
        if not passes:
            return
        (few, least), (many, most) = passes[0], passes[-1]
        row = max(0.0, most - least) / (many - few) if many > few else 0.0
        self._measured = Measured(plan.model, loaded.first, loaded.end, max(0.0, least - row * few), row)

    def _engine_crashed(self) -> None:
        self._loaded, self._kept = None, False
        if self._experts is not None:
            self._experts.unloaded()
        if self._epoch is not None:
            self._epoch.break_off("the engine process died and is being restarted")
        elif self._state in ("loaded", "serving"):
            self._reason = "the engine process died and is being restarted"
            self._set("broken", self._reason)
            self._urgent()
        elif self._standby is not None and self._preparing is None:
            self._stand_again()

    def _stand_again(self) -> None:
        """Get the slice ready once more that this peer stands by with."""
        self._preparation = self._preparing = None
        if self._standby is not None and self._standing is not None:
            self._prepare(*self._standing)

    # -- serving an epoch -----------------------------------------------------------------------------------

    def _start_epoch(self, plan: Plan) -> None:
        if self._state != "loaded":
            return
        index = plan.index_of(self._node.peer_id)
        assert index is not None, "a plan without a place here is not taken"
        self._kept = True
        parts = (plan, index, self._node, self._engine, self._verify)
        # The path and figures of a ring that has just begun are worth more than a poll's wait.
        more: dict[str, Any] = {"sign": self._sign, "experts": self._experts, "opened": self._urgent}
        epoch = (
            HeadEpoch(*parts, state=self._head_of(plan), **more) if index == 0 else StageEpoch(*parts, **more)
        )
        self._epoch = epoch
        self._epoch_changed.set()
        self._epoch_changed = trio.Event()
        self._set("serving", f"serving stage {index + 1} of {len(plan.stages)}, epoch {plan.epoch}")
        assert self._nursery is not None
        # Here, not in the task: orders that come before it runs must find something to cancel.
        self._work = trio.CancelScope()
        self._nursery.start_soon(self._serve_epoch, epoch, self._work)

    def _head_of(self, plan: Plan) -> HeadState:
        state = self._head_state
        if state is None or not state.follows(plan):
            state = HeadState(plan)
        elif state.plan.epoch != plan.epoch:
            state.adopt(plan, trio.current_time())
        self._head_state = state
        return state

    async def _serve_epoch(self, epoch: StageEpoch, scope: trio.CancelScope) -> None:
        broken: RingBroken | None = None
        with scope:
            try:
                await epoch.run()
            except RingBroken as error:
                broken = error
        if self._epoch is epoch:
            self._epoch = None
        if broken is not None and broken.cache_lost:
            self._kept = False
        if self._plan is epoch.plan and self._state == "serving":
            if broken is not None:
                self._reason, self._lost = str(broken), broken.peer or ""
            self._kept = self._kept and self._loaded is not None
            self._set("broken", self._reason or "the epoch was stopped")
            self._urgent()

    async def _take_link(self, link: Link) -> None:
        """A member of the ring opens a link: check who it is and for which epoch, then hand it over."""
        with trio.move_on_after(HELLO_SECONDS) as scope:
            hello, _ = ring.OPENING.decode(await link.receive())
        if scope.cancelled_caught or not isinstance(hello, ring.Hello):
            raise WireError("unexpected", "a ring link must begin with a hello", peer=link.remote_peer)
        if hello.purpose == "probe":
            await self._take_probe(link)
            return
        epoch = await self._epoch_for(hello)
        if epoch is None:
            current = self._plan.epoch if self._plan else 0
            await refuse(
                link,
                "epoch",
                f"epoch {hello.epoch} of plan {hello.plan[:12]} is not served here, {current} is",
            )
        else:
            await epoch.admit(link, hello)

    async def _take_probe(self, link: Link) -> None:
        if link.remote_peer not in self._neighbours:
            await refuse(link, "stranger", "the bridge has not named this peer as one that measures here")
        if self._probes >= MAX_PROBES:
            await refuse(link, "busy", "others are measuring")
        self._probes += 1
        try:
            await link_probe.answer(link)
        finally:
            self._probes -= 1

    async def _epoch_for(self, hello: ring.Hello) -> StageEpoch | None:
        """The running epoch that a hello names; one that is about to start here is waited for."""
        with trio.move_on_after(WELCOME_SECONDS / 2):
            while True:
                plan = self._plan
                epoch = self._epoch
                if epoch is not None and (epoch.plan.id, epoch.plan.epoch) == (hello.plan, hello.epoch):
                    return epoch
                if plan is not None and plan.id == hello.plan and plan.epoch > hello.epoch:
                    return None
                await self._epoch_changed.wait()
        return None
