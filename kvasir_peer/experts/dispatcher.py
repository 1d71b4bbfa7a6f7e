"""The dispatcher of a coordinator or a ring stage: routed rows to volunteers and back, checked, never late for long.

A thin shell around the pure rules: who gets rows (:mod:`dispatch_policy`), how they are shared (:mod:`sharing`), what
is late (:mod:`worker_health`), what is checked (:mod:`verification`). Whatever a worker does, the sums of a layer are
there at most one deadline later than the local experts would have needed.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import secrets
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import trio
from numpy.typing import NDArray

from kvasir_peer.engines.base import F32
from kvasir_peer.errors import EngineError, KvasirError, LinkError, RefusedError, WireError
from kvasir_peer.experts import dispatch_policy as policy
from kvasir_peer.experts.dispatch_policy import Decision, DispatchSettings, SlotReading, Snapshot
from kvasir_peer.experts.routed_part import RoutedPart, RoutedRows
from kvasir_peer.experts.sharing import LOCAL, LocalCost, hedge_for, share_rows
from kvasir_peer.experts.verification import (
    Exposure,
    Mode,
    Verifier,
    bounds_for,
    differences,
    inspect,
)
from kvasir_peer.experts.worker_health import Frame
from kvasir_peer.experts.worker_link import WorkerLink, open_worker_link
from kvasir_peer.net.link import Priority
from kvasir_peer.wire.experts import decode_rows, encode_rows, rows_bytes
from kvasir_peer.wire.tensors import decode_tensor

if TYPE_CHECKING:
    from kvasir_peer.agent.engine import Engine, RoutedPass
    from kvasir_peer.engines.orders import Urgency
    from kvasir_peer.experts.dispatch_map import DispatchMap, MapWorker
    from kvasir_peer.net.node import Node

logger = logging.getLogger(__name__)

SHADOW_ROWS = 4  # of one shadow try: enough to see whether a worker computes, cheap to compute twice
TEND_SECONDS = 0.5  # between two looks at workers that wait for their first try
RETRY_DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # seconds before another link to a worker; the last one stays
COUNTING_PASSES = 8  # under load, one pass in so many is routed here just to count which layers are hot
FIRST_PAIR_SECONDS = 5e-4  # assumed of the local experts until one call was measured
BACKGROUND_CHECKS = 64  # checks that may wait for the engine; more are given up, and counted
# Of which the engine has so many at a time; where as many more wait, it has no time to spare, and they go with rows.
CHECKS_AT_ONCE = 8
REMEMBERED_CAUGHT = 256
EXPERT_BUFFERS = 24  # of the arena, for local parts, stand-ins and checks, beside the passes


@dataclass(frozen=True)
class DispatcherConfig:
    """What the role decides.

    Attributes:
        model: manifest id.
        layers: own layers that have routed experts.
        n_embd, experts: width of a row, experts chosen for each.
        precision: of the own engine.
        settings: rules of dispatch.
        mode: how workers are checked.
        remote: ``auto`` by the rules; ``all`` sends away whatever anybody covers, load or not (for measurements).
    """

    model: str
    layers: tuple[int, ...]
    n_embd: int
    experts: int
    precision: Literal["exact", "fast"]
    settings: DispatchSettings = policy.DEFAULT_SETTINGS
    mode: Mode = "sampled"
    remote: Literal["auto", "all"] = "auto"


@dataclass(frozen=True)
class WorkerFigures:
    """One worker as this dispatcher sees it.

    Attributes:
        rows, checked: served; computed again and found right.
        latency_ms, way_ms, pair_ms: of a frame as they have been lately; of which on the way; for each row-expert pair.
        outstanding: row-expert pairs under way.
        held_s: seconds that it has computed, as it says.
        bytes_out, bytes_in: of frames.
    """

    peer: str
    attached: bool
    proven: bool
    breaker: str
    rows: int
    checked: int
    latency_ms: float
    way_ms: float
    pair_ms: float
    outstanding: int
    held_s: float
    bytes_out: int
    bytes_in: int


@dataclass(frozen=True)
class DispatchStatistics:
    """Counters grow for ever; the others are as they stand.

    Attributes:
        mode: ``local``, ``load`` or ``cooling``.
        reading: the own slots, as last read.
        routed: layers' worth of rows that were routed here.
        local_pairs, remote_pairs: row-expert pairs whose sums came from the own experts, from workers.
        local_s, check_s: seconds that the own experts have computed rows; of which to check workers.
        fallbacks: parts that no worker answered in time. ``hedges``: parts that were sent twice.
        shadows, checks, skipped_checks: tries and checks made; checks given up because too many waited.
        refused_sums: answers that were plainly wrong. ``refused_maps``: old ones, and another model's.
        frames: sent to workers; ``late``: those that missed their deadline.
        twice: parts that two workers computed and agreed on.
        caught: workers found to lie, and why.
        heat: rows routed in each layer.
        workers: those in the map.
        work: (peer, rows used, rows found right) of all that have worked here, those that have left included.
    """

    mode: str
    reading: SlotReading | None
    routed: int
    local_pairs: int
    remote_pairs: int
    local_s: float
    check_s: float
    fallbacks: int
    hedges: int
    shadows: int
    checks: int
    skipped_checks: int
    refused_sums: int
    frames: int
    late: int
    refused_maps: int
    twice: int
    caught: tuple[tuple[str, str], ...]
    heat: Mapping[int, int]
    workers: tuple[WorkerFigures, ...]
    work: tuple[tuple[str, int, int], ...]


@dataclass
class _Known:
    """A worker in the map; ``state`` is None until a link has stood."""

    entry: MapWorker
    scope: trio.CancelScope
    link: WorkerLink | None = None
    state: policy.Worker | None = None
    trying: bool = False
    held: float = 0.0
    bytes_out: int = 0
    bytes_in: int = 0

    @property
    def attached(self) -> bool:
        return self.link is not None and self.state is not None

    @property
    def ready(self) -> bool:
        return self.attached and self.link is not None and self.link.has_room


@dataclass
class _Settling:
    """A part on its way: the first good sums count."""

    part: RoutedPart
    sums: F32 | None = None
    source: str = LOCAL
    attempts: int = 0
    news: trio.Event = field(default_factory=trio.Event)

    def offer(self, sums: F32, source: str) -> bool:
        if self.sums is not None:
            return False
        self.sums, self.source = sums, source
        self.tell()
        return True

    def tell(self) -> None:
        self.news.set()
        self.news = trio.Event()

    async def wait(self) -> None:
        """Until sums are there, or no attempt is left."""
        while self.sums is None and self.attempts:
            await self.news.wait()


@dataclass(frozen=True, eq=False)
class _Answer:
    """Sums of a worker for a frame, and seconds of computing as it says."""

    sums: F32
    frame: int
    held: float


class Dispatcher:
    """Use :meth:`run`; :meth:`layers` before each pass, :meth:`routed` for what the engine hands out.

    Args:
        node: for links to workers.
        engine: has the own experts.
        config: the role's.
        read_slots: reads the own slots through the own interface; may stall, which delays nothing.
        caught: told of a worker that lies, with the requests that used its unchecked rows and the first such
            position of each.
    """

    def __init__(
        self,
        node: Node,
        engine: Engine,
        config: DispatcherConfig,
        *,
        read_slots: Callable[[], Awaitable[SlotReading]],
        caught: Callable[[str, str, Mapping[int, int]], None] = lambda peer, why, rewinds: None,
    ) -> None:
        self.config = config
        self._node = node
        self._engine = engine
        self._read_slots = read_slots
        self._tell_caught = caught
        self._map: DispatchMap | None = None
        self._known: dict[str, _Known] = {}
        self._former: dict[str, policy.Worker] = {}
        self._reading: SlotReading | None = None
        self._verifier = Verifier(config.mode, secrets.token_bytes(32))
        self.exposure = Exposure()
        self._caught: dict[str, str] = {}
        self._largest: dict[int, float] = {}
        self._samples: dict[int, RoutedRows] = {}
        self._heat: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()
        # The own experts as a worker among others: what is under way there, and how long it takes.
        self._own = policy.Worker(LOCAL, (), 0.0, math.inf)
        self._numbers = itertools.count(1)
        self._local_seconds = self._check_seconds = 0.0
        self._passes = 0
        self._checks = trio.CapacityLimiter(CHECKS_AT_ONCE)
        self._checks_waiting = 0
        self._nursery: trio.Nursery | None = None
        self._log: deque[str] = deque(maxlen=200)

    # -- life -----------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._engine.routed = self.routed
                nursery.start_soon(self._poll_slots)
                nursery.start_soon(self._tend)
                task_status.started()
                try:
                    await trio.sleep_forever()
                finally:
                    # Before the nursery ends: the engine goes on, and would have a task started in it.
                    self._engine.routed = lambda work: None
        finally:
            self._nursery = None

    async def _poll_slots(self) -> None:
        """Layer 1's task: a stalled answer lets the last reading age, and holds up nobody."""
        settings = self.config.settings
        while True:
            began = trio.current_time()
            try:
                with trio.move_on_after(settings.poll_deadline):
                    self._reading = await self._read_slots()
            except KvasirError as error:
                logger.warning("the own slots could not be read: %s", error)
            await trio.sleep_until(began + settings.poll_period)

    # -- the map --------------------------------------------------------------------------------------------

    def follow(self, value: DispatchMap) -> None:
        """Attach to the workers of a newer map, and let go of those that are gone."""
        assert self._nursery is not None, "run() runs"
        newest = self._map.version if self._map is not None else 0
        if value.model != self.config.model or value.version <= newest:
            self._counts["refused_maps"] += 1
            logger.info(
                "a dispatch map is refused: version %d of %s, here is %d of %s",
                value.version,
                value.model,
                newest,
                self.config.model,
            )
            return
        self._map = value
        now = trio.current_time()
        for peer in [p for p in self._known if value.worker(p) is None]:
            self._forget(peer)
        for entry in value.workers:
            if entry.peer in self._caught or entry.peer == self._node.peer_id:
                continue
            known = self._known.get(entry.peer)
            if known is not None and known.entry.ranges != entry.ranges:
                self._forget(entry.peer)
                known = None
            if known is None:
                known = self._known[entry.peer] = _Known(entry, trio.CancelScope())
                self._nursery.start_soon(self._attach, known, value)
            known.entry = entry
            if known.state is not None:
                known.state = dataclasses.replace(known.state, expires_at=now + entry.expires_in)

    def _forget(self, peer: str) -> None:
        known = self._known.pop(peer)
        known.scope.cancel()
        self._former.pop(peer, None)
        self._verifier.forget(peer)

    async def _attach(self, known: _Known, value: DispatchMap) -> None:
        """Keep a link to a worker for as long as it is in the map."""
        failures = 0
        peer = known.entry.peer
        with known.scope:
            while True:
                try:
                    link = await open_worker_link(
                        self._node, peer, known.entry.addresses, value.model, value.version, value.bounds()
                    )
                    failures = 0
                    self._attached(known, link)
                    await link.run()
                except (LinkError, RefusedError, WireError) as error:
                    if isinstance(error, WireError):
                        self._counts["refused_sums"] += 1
                    logger.info("worker %s: %s", peer, error)
                finally:
                    self._detached(known)
                await trio.sleep(RETRY_DELAYS[min(failures, len(RETRY_DELAYS) - 1)])
                failures += 1

    def _attached(self, known: _Known, link: WorkerLink) -> None:
        now = trio.current_time()
        ends = now + (known.entry.expires_in or 1e9)
        if known.state is None:
            known.state = policy.Worker(known.entry.peer, known.entry.ranges, now, ends)
        elif known.state.proven:
            known.state = dataclasses.replace(known.state, frames=(), expires_at=ends)
        else:
            known.state = dataclasses.replace(
                known.state, attached_at=now, frames=(), expires_at=ends, shadows=0
            )
        known.link = link

    def _detached(self, known: _Known) -> None:
        if known.link is not None:
            figures = known.link.statistics()
            known.bytes_out += figures.bytes_out
            known.bytes_in += figures.bytes_in
        known.link = None

    # -- decisions ------------------------------------------------------------------------------------------

    def _decide(self) -> Decision:
        now = trio.current_time()
        workers = tuple(k.state for k in self._known.values() if k.attached and k.state is not None)
        settings, reading = self.config.settings, self._reading
        if self.config.remote == "all":
            reading = SlotReading(settings.saturation_threshold, settings.saturation_threshold + 1, 0, now)
        return policy.decide(Snapshot(reading, workers, settings), now)

    def layers(self) -> tuple[int, ...]:
        """At which layers the next pass should hand out its routed rows; none while all is local."""
        decision = self._decide()
        self._passes += 1
        # Who is late may have answered by the time that the pass stands at a layer.
        peers = {*decision.workers, *decision.late, *decision.shadows, *decision.trials}
        if decision.mode == "load" and self._passes % COUNTING_PASSES == 0:
            return self.config.layers
        if not peers:
            return ()
        covered = {layer for peer in peers for layer, _, _ in self._known[peer].entry.ranges}
        return tuple(layer for layer in self.config.layers if layer in covered)

    @property
    def mode(self) -> str:
        """``local``, ``load`` or ``cooling``."""
        return self._decide().mode

    # -- one layer of one pass ------------------------------------------------------------------------------

    def routed(self, work: RoutedPass) -> None:
        """Take routed rows; the pass is resumed when their sums are there."""
        if self._nursery is not None:
            self._nursery.start_soon(self._serve, work)

    async def _serve(self, work: RoutedPass) -> None:
        try:
            size = rows_bytes(work.rows, work.experts, self.config.n_embd, "f32")
            routed = decode_rows(
                self._engine.buffer(work.buffer)[:size], work.rows, work.experts, self.config.n_embd, "f32"
            )
            origins = work.context.of(work.rows) if isinstance(work.context, RowOrigins) else ()
            rows = RoutedRows(work.layer, routed.ids, routed.weights, routed.x, origins)
            sums = await self._sums(rows)
            await self._engine.resume(work, sums.tobytes())
        except EngineError as error:
            # The pass has failed with it, and says so where it is waited for.
            logger.info("routed rows of layer %d are given up: %s", work.layer, error)

    async def _sums(self, rows: RoutedRows) -> F32:
        self._counts["routed"] += 1
        self._heat[rows.layer] += len(rows.x)
        self._samples[rows.layer] = RoutedRows(
            rows.layer, rows.ids[:SHADOW_ROWS], rows.weights[:SHADOW_ROWS], rows.x[:SHADOW_ROWS]
        )
        decision = self._decide()
        for peer in (*decision.shadows, *decision.trials):
            self._try(self._known[peer], rows)
        workers = [
            known.state
            for peer in decision.workers
            if (known := self._known[peer]).ready and known.state is not None
        ]
        if not workers:
            return await self._all_local(rows)
        now = trio.current_time()
        shares = share_rows(
            rows.layer,
            rows.counts(),
            workers,
            self._own_cost(now),
            now=now,
            local_allowed=self.config.remote != "all",
        )
        parts = rows.divide(shares)
        if set(parts) == {LOCAL}:
            return await self._all_local(rows)
        loaded = decision.mode == "load"
        done: dict[str, F32] = {}
        failures: list[EngineError] = []

        async def settle(peer: str, part: RoutedPart, frame: Frame | None) -> None:
            try:
                if peer == LOCAL:
                    assert frame is not None
                    done[peer] = await self._local(part, "f32", "shared", frame)
                    self._counts["local_pairs"] += part.pairs
                else:
                    done[peer] = await self._remote(part, peer, frame, workers, loaded=loaded)
            except EngineError as error:
                failures.append(error)

        # All are noted before anybody is waited for: the next rows are shared by what is under way now.
        frames = {peer: self._note(peer, part) for peer, part in parts.items()}
        async with trio.open_nursery() as nursery:
            for peer, part in parts.items():
                nursery.start_soon(settle, peer, part, frames[peer])
        if failures:
            raise failures[0]
        sums = np.zeros_like(rows.x)
        for peer in sorted(done):  # one order of summation, whoever was first
            sums[parts[peer].rows] += done[peer]
        return sums

    def _note(self, peer: str, part: RoutedPart, *, shadow: bool = False) -> Frame | None:
        """Note that a part goes to a worker now, or to the own experts; None where the worker has gone."""
        now = trio.current_time()
        number = next(self._numbers)
        if peer == LOCAL:
            self._own = policy.sent(self._own, number, part.pairs, now)
            return self._own.frames[-1]
        known = self._known.get(peer)
        if known is None or known.state is None or not known.attached:
            return None
        known.state = policy.sent(known.state, number, part.pairs, now, shadow=shadow)
        return known.state.frames[-1]

    async def _all_local(self, rows: RoutedRows) -> F32:
        self._counts["local_pairs"] += rows.pairs
        part = rows.all()
        return await self._local(part, "f32", "ring", self._note(LOCAL, part))

    async def _local(
        self,
        part: RoutedPart,
        dtype: str,
        urgency: Urgency,
        frame: Frame | None = None,
        *,
        check: bool = False,
    ) -> F32:
        """Sums by the own experts; in another dtype than f32 rounded just as a worker's.

        Args:
            frame: as noted; None for what passes do not wait for.
        """
        engine, width = self._engine, self.config.n_embd
        done: float | None = None
        try:
            buffer = await engine.take_buffer()
            # The engine writes to the buffer in any case, so it is not given back before that.
            try:
                with trio.CancelScope(shield=True):
                    encode_rows(part.ids, part.weights, part.x, dtype, engine.buffer(buffer))
                    answer = await engine.compute_experts(
                        buffer, part.layer, len(part.rows), part.ids.shape[1], dtype, urgency
                    )
                    data = bytes(engine.buffer(buffer)[: answer.size])
                    done = answer.held_ms / 1e3
            finally:
                engine.free_buffer(buffer)
        finally:
            if frame is not None and done is not None:
                self._own = policy.answered(self._own, frame.number, done, trio.current_time())
            elif frame is not None:
                self._own = policy.dropped(self._own, frame.number)
        self._local_seconds += answer.held_ms / 1e3
        self._check_seconds += answer.held_ms / 1e3 if check else 0.0
        sums = decode_tensor(data, dtype, len(part.rows), width)
        if len(sums):
            largest = float(np.linalg.norm(sums, axis=1).max())
            self._largest[part.layer] = max(largest, self._largest.get(part.layer, 0.0))
        return sums

    async def _remote(
        self,
        part: RoutedPart,
        peer: str,
        frame: Frame | None,
        workers: Sequence[policy.Worker],
        *,
        loaded: bool,
    ) -> F32:
        """Sums of a part from a worker, from a second one that is asked when it is late, or from here."""
        assert self._nursery is not None
        settling = _Settling(part)
        known = self._known.get(peer)
        if frame is not None and known is not None:  # it may have been caught since then
            twin = self._twin(part, self._able(workers, peer)) if self.config.mode == "strict" else None
            second = self._note(twin.peer, part) if twin is not None else None
            late_at = frame.late_at
            if twin is not None and second is not None:
                late_at = max(late_at, second.late_at)
                settling.attempts += 1
                pair = ((known, frame), (self._known[twin.peer], second))
                self._nursery.start_soon(self._attempt_twice, settling, pair, loaded)
            else:
                self._start(settling, known, frame, loaded)
            with trio.move_on_at(late_at):
                await settling.wait()
            if settling.sums is None and settling.attempts:
                self._counts["hedges"] += 1
                now = trio.current_time()
                other = LOCAL
                if second is None:
                    able = self._able(workers, peer)
                    own = self._own_cost(now)
                    other = hedge_for(able, part.layer, part.experts, part.pairs, own, now=now)
                if other != LOCAL and (second := self._note(other, part)) is not None:
                    self._start(settling, self._known[other], second, loaded)
                    # A second one that fails too costs no further deadline.
                    with trio.move_on_at(frame.deadline):
                        await settling.wait()
                    self._counts["fallbacks"] += settling.sums is None
                if settling.sums is None:
                    settling.attempts += 1
                    self._nursery.start_soon(self._stand_in, settling)
                await settling.wait()
        if settling.sums is None:
            self._counts["fallbacks"] += 1
            settling.offer(await self._local(part, "f32", "ring", self._note(LOCAL, part)), LOCAL)
        assert settling.sums is not None
        self._counts["local_pairs" if settling.source == LOCAL else "remote_pairs"] += part.pairs
        return settling.sums

    def _usable(self, peer: str) -> policy.Worker | None:
        """A worker that may be asked now."""
        known = self._known.get(peer)
        if known is None or not known.ready or known.state is None:
            return None
        now = trio.current_time()
        sound = known.state.breaker.state(now) == "closed" and not known.state.overdue(now)
        return known.state if sound else None

    def _own_cost(self, now: float) -> LocalCost:
        own = self._own
        return LocalCost(own.latency.row_seconds or FIRST_PAIR_SECONDS, own.finish(now) - now)

    def _able(self, workers: Sequence[policy.Worker], late: str) -> list[policy.Worker]:
        """Who of some workers may be asked now, but for one."""
        return [state for w in workers if w.peer != late and (state := self._usable(w.peer)) is not None]

    def _start(self, settling: _Settling, known: _Known, frame: Frame, loaded: bool) -> None:
        assert self._nursery is not None
        settling.attempts += 1
        self._nursery.start_soon(self._attempt, settling, known, frame, loaded)

    async def _stand_in(self, settling: _Settling) -> None:
        try:
            part = settling.part
            settling.offer(await self._local(part, "f32", "ring", self._note(LOCAL, part)), LOCAL)
        except EngineError as error:
            logger.info("the own experts could not stand in: %s", error)
        finally:
            settling.attempts -= 1
            settling.tell()

    async def _attempt(self, settling: _Settling, known: _Known, frame: Frame, loaded: bool) -> None:
        part = settling.part
        peer = known.entry.peer
        try:
            picks = self._verifier.plan(peer, len(part.rows))
            answer = await self._ask(known, part, frame)
            if answer is None or peer in self._caught:
                return
            self._served(known, answer, loaded=loaded)
            sums = answer.sums
            if self.config.mode == "strict":
                if await self._check(known, part, sums, "ring") and settling.offer(sums, peer):
                    self._verifier.used(peer, len(part.rows))
            elif settling.offer(sums, peer):
                self._verifier.used(peer, len(part.rows))
                self._used_unchecked(known, part, sums, picks)
        except EngineError as error:
            logger.info("a check was given up: %s", error)
        finally:
            settling.attempts -= 1
            settling.tell()

    def _twin(self, part: RoutedPart, able: Sequence[policy.Worker]) -> policy.Worker | None:
        """Who computes a part a second time: drawn by lot, so that nobody can arrange to check itself."""
        found = [w for w in able if all(w.covers(part.layer, e) for e in part.experts)]
        return secrets.choice(found) if found else None

    async def _attempt_twice(
        self, settling: _Settling, pair: tuple[tuple[_Known, Frame], ...], loaded: bool
    ) -> None:
        """The same rows from two workers: what they agree on counts, else the own experts say who is right."""
        part = settling.part
        both = tuple(known for known, _ in pair)
        picks = [self._verifier.plan(known.entry.peer, len(part.rows), twice=True) for known in both]
        answers: list[_Answer | None] = [None, None]

        async def ask(place: int) -> None:
            known, frame = pair[place]
            answers[place] = await self._ask(known, part, frame)

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, 0)
                nursery.start_soon(ask, 1)
            found = [
                (known, answer, picked)
                for known, answer, picked in zip(both, answers, picks, strict=True)
                if answer is not None and known.entry.peer not in self._caught
            ]
            for known, answer, _ in found:
                self._served(known, answer, loaded=loaded)
            if settling.sums is not None:
                return  # the own experts were quicker
            if len(found) == 2 and self._agree(both, found[0][1].sums, found[1][1].sums):
                self._counts["twice"] += 1
                settling.offer(found[0][1].sums, both[0].entry.peer)
                for known, answer, picked in found:
                    self._verifier.used(known.entry.peer, len(part.rows), agreed=True)
                    self._used_unchecked(known, part, answer.sums, picked)
                return
            for known, answer, _ in found:
                if await self._check(known, part, answer.sums, "ring") and settling.offer(
                    answer.sums, known.entry.peer
                ):
                    self._verifier.used(known.entry.peer, len(part.rows))
        except EngineError as error:
            logger.info("a check was given up: %s", error)
        finally:
            settling.attempts -= 1
            settling.tell()

    def _agree(self, pair: tuple[_Known, ...], one: F32, other: F32) -> bool:
        assert self._map is not None
        exact = all(known.link is not None and known.link.precision == "exact" for known in pair)
        bounds = bounds_for(self._map.dtype, "exact" if exact else "fast")
        return bool((differences(one, other, bounds) <= bounds.soft).all())

    def _used_unchecked(self, known: _Known, part: RoutedPart, sums: F32, picks: NDArray[np.intp]) -> None:
        """Rows that count before they are checked: remember whose they are, and have some computed again."""
        if part.origins:
            self.exposure.used(known.entry.peer, part.origins)
        if len(picks):
            self._check_later(known, part.only(picks), sums[picks])

    async def _ask(self, known: _Known, part: RoutedPart, frame: Frame) -> _Answer | None:
        """A worker's sums, or None where it failed, which is noted."""
        link = known.link
        assert known.state is not None
        if link is None:
            known.state = policy.dropped(known.state, frame.number)
            return None
        limit = frame.deadline - frame.sent  # from now on: what holds up this machine is not its fault
        self._counts["frames"] += 1
        reason = f"no answer in {limit * 1e3:.0f} ms"
        found: _Answer | None = None
        try:
            with trio.move_on_after(limit) as scope:
                answer = await link.ask(part.layer, part.ids, part.weights, part.x, Priority.DECODE)
                found = _Answer(answer.sums, frame.number, answer.held)
            self._counts["late"] += scope.cancelled_caught
        except (LinkError, RefusedError, WireError) as error:
            reason = str(error)
        finally:
            if found is not None:
                wrong = inspect(
                    found.sums, len(part.rows), self.config.n_embd, self._largest.get(part.layer, 0.0)
                )
                if wrong:
                    reason, found = wrong, None
                    self._counts["refused_sums"] += 1
            now = trio.current_time()
            if found is not None:
                known.state = policy.answered(known.state, frame.number, found.held, now)
                known.held += found.held
            else:
                breaker = known.state.breaker
                if breaker.state(now) == "open" and not breaker.trial:
                    # It is out already for what went wrong: frames that were under way with that are no news.
                    known.state = policy.dropped(known.state, frame.number)
                else:
                    known.state = policy.failed(known.state, frame.number, now)
                self._log.append(f"{now:.2f} {known.entry.peer}: {reason}")
        return found

    def _served(self, known: _Known, answer: _Answer, *, loaded: bool) -> None:
        assert known.state is not None
        now = trio.current_time()
        known.state = policy.served(known.state, answer.frame, answer.held, now, loaded=loaded)

    # -- checks ---------------------------------------------------------------------------------------------

    def _check_later(self, known: _Known, part: RoutedPart, sums: F32) -> None:
        if self._checks_waiting >= BACKGROUND_CHECKS or self._nursery is None:
            self._counts["skipped_checks"] += 1
            return
        self._checks_waiting += 1
        self._nursery.start_soon(self._checked_in_turn, known, part, sums)

    async def _checked_in_turn(self, known: _Known, part: RoutedPart, sums: F32) -> None:
        try:
            async with self._checks:
                pressing = self._checks_waiting > 2 * CHECKS_AT_ONCE
                await self._check(known, part, sums, "shared" if pressing else "checks")
        except EngineError as error:
            logger.info("a check was given up: %s", error)
        finally:
            self._checks_waiting -= 1

    async def _check(self, known: _Known, part: RoutedPart, sums: F32, urgency: Urgency) -> bool:
        """Compute rows again and compare; a worker that is caught is out."""
        assert self._map is not None
        self._counts["checks"] += 1
        peer = known.entry.peer
        ours = await self._local(part, self._map.dtype, urgency, check=True)
        exact = self.config.precision == "exact" and (known.link is None or known.link.precision == "exact")
        bounds = bounds_for(self._map.dtype, "exact" if exact else "fast")
        verdict = self._verifier.checked(peer, differences(sums, ours, bounds), bounds)
        if verdict.caught:
            self._catch(peer, verdict.caught)
            return False
        return True

    def _catch(self, peer: str, why: str) -> None:
        if peer in self._caught:
            return
        logger.warning("worker %s is caught: %s", peer, why)
        self._caught[peer] = why
        if len(self._caught) > REMEMBERED_CAUGHT:
            del self._caught[next(iter(self._caught))]
        rewinds = self.exposure.caught(peer)
        if peer in self._known:
            self._forget(peer)
        self._tell_caught(peer, why, rewinds)

    # -- first tries ----------------------------------------------------------------------------------------

    async def _tend(self) -> None:
        """Workers that wait for their first try get stored rows when no live ones come."""
        while True:
            await trio.sleep(TEND_SECONDS)
            decision = self._decide()
            for peer in (*decision.shadows, *decision.trials):
                known = self._known[peer]
                for layer, lo, hi in known.entry.ranges:
                    if layer in self.config.layers and not known.trying:
                        self._try(known, self._stored(layer, lo, hi))

    def _stored(self, layer: int, lo: int, hi: int) -> RoutedRows:
        """Rows of a layer that were seen here, else made up, for experts in a range."""
        sample = self._samples.get(layer)
        if sample is not None and sample.covered([(layer, lo, hi)], SHADOW_ROWS) is not None:
            return sample
        draw = np.random.default_rng(layer)
        x = draw.standard_normal((SHADOW_ROWS, self.config.n_embd)).astype(np.float32)
        ids = draw.integers(lo, hi, (SHADOW_ROWS, 1)).astype(np.int32)
        return RoutedRows(layer, ids, np.ones((SHADOW_ROWS, 1), np.float32), x)

    def _try(self, known: _Known, rows: RoutedRows) -> None:
        """Send a worker rows that nobody waits for, one try at a time."""
        part = rows.covered(known.entry.ranges, SHADOW_ROWS)
        if part is None or known.trying or not known.ready or self._nursery is None:
            return
        known.trying = True
        self._nursery.start_soon(self._shadow, known, part)

    async def _shadow(self, known: _Known, part: RoutedPart) -> None:
        self._counts["shadows"] += 1
        try:
            frame = self._note(known.entry.peer, part, shadow=True)
            if frame is None:
                return
            self._verifier.plan(known.entry.peer, len(part.rows))
            loaded = policy.under_load(self._reading, trio.current_time(), self.config.settings)
            answer = await self._ask(known, part, frame)
            # Only a try that was found right makes a worker proven.
            if answer is not None and await self._check(known, part, answer.sums, "checks"):
                self._served(known, answer, loaded=loaded)
        except EngineError as error:
            logger.info("a try could not be checked: %s", error)
        finally:
            known.trying = False

    # -- what is shown --------------------------------------------------------------------------------------

    def statistics(self) -> DispatchStatistics:
        """A snapshot."""
        now = trio.current_time()
        figures = []
        for peer, known in self._known.items():
            record = self._verifier.record(peer)
            link = known.link.statistics() if known.link is not None else None
            state = known.state
            figures.append(
                WorkerFigures(
                    peer,
                    known.attached,
                    state is not None and state.proven,
                    state.breaker.state(now) if state is not None else "closed",
                    record.rows,
                    record.checked,
                    state.latency.mean * 1e3 if state is not None else 0.0,
                    state.latency.way * 1e3 if state is not None else 0.0,
                    state.latency.row_seconds * 1e3 if state is not None else 0.0,
                    state.outstanding if state is not None else 0,
                    known.held,
                    known.bytes_out + (link.bytes_out if link else 0),
                    known.bytes_in + (link.bytes_in if link else 0),
                )
            )
        count = self._counts
        return DispatchStatistics(
            self.mode,
            self._reading,
            count["routed"],
            count["local_pairs"],
            count["remote_pairs"],
            self._local_seconds,
            self._check_seconds,
            count["fallbacks"],
            count["hedges"],
            count["shadows"],
            count["checks"],
            count["skipped_checks"],
            count["refused_sums"],
            count["frames"],
            count["late"],
            count["refused_maps"],
            count["twice"],
            tuple(self._caught.items()),
            dict(self._heat),
            tuple(figures),
            self._verifier.work(),
        )

    @property
    def events(self) -> tuple[str, ...]:
        """The last failures of workers, for people."""
        return tuple(self._log)


@dataclass(frozen=True)
class RowOrigins:
    """Which request and position each row of a pass belongs to; the context of a batch.

    Attributes:
        rows: (request, position) of each.
        wanted: those of the rows that want an output: behind the last attention only these are computed.
    """

    rows: tuple[tuple[int, int], ...]
    wanted: tuple[tuple[int, int], ...]

    def of(self, count: int) -> tuple[tuple[int, int], ...]:
        """The origins of ``count`` routed rows."""
        if count == len(self.rows):
            return self.rows
        return self.wanted if count == len(self.wanted) else ()
