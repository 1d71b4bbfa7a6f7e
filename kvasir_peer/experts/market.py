"""Layer 2 of scaling with the load, second half: the market of experts at the bridge.

``apply(state, event, now) -> (state, decisions)``: demand, leases, coverage, the dispatch map, and retirement. Pure in
that it does no I/O and reads no clock; for ten thousand peers it works on the state it is given, so use the one that
it returns.

*Cells* are single experts of single layers. Each has a number of live replicas (coverage that was registered) and of
leased ones (somebody is fetching it). Demand is every cell whose replicas and leases are under the effective target.
A volunteer gets the emptiest cells first and, among them, the hottest layer first, so that many volunteers get
different things and the rows of a token touch few layers remotely.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvasir_peer.experts.allotment import MAX_RANGES, choose_ranges
from kvasir_peer.experts.dispatch_policy import SlotReading
from kvasir_peer.experts.market_messages import (
    COVERAGE_TTL,
    Budget,
    Caught,
    CoordinatorDown,
    CoordinatorUp,
    Coverage,
    CoverageKept,
    CoverageReported,
    Decision,
    Event,
    ExpertModel,
    Granted,
    Lease,
    LeaseEnded,
    LeaseProgress,
    LeaseReturned,
    MapChanged,
    ModelOffered,
    NotNeeded,
    NotWired,
    Pardoned,
    Poll,
    Range,
    Retire,
    SaturationChanged,
    SlotsRead,
    SlotsUnread,
    Tick,
    VolunteerAsked,
    VolunteerWent,
    Wired,
    WorkerLeft,
)
from kvasir_peer.experts.recruitment import (
    DEFAULT_RECRUITMENT,
    CoordinatorState,
    RecruitmentSettings,
    Saturation,
    load_of,
    poll_due,
    saturation_of,
    take_reading,
)

# A lease without progress ends after this (seconds), and its cells are offered again.
LEASE_SECONDS = 60.0
# Whoever is connected and silent for so long (seconds) is out before its coverage expires.
SILENT_SECONDS = 30.0
# After a restart of the bridge, workers that come back are taken as if there was load for so long (seconds): whether
# there is can't be known before, and who is sent away has to load all its experts anew. Longer than SILENT_SECONDS, so
# that nobody is sent away for one that has not come back.
RETURN_SECONDS = 45.0
# A long poll is held at most so long (seconds): under the minute after which proxies give up.
MAX_WAIT = 50.0
# Bounds of what is kept, so that strangers cannot fill the memory of a bridge.
MAX_WORKERS, MAX_WAITING, MAX_COORDINATORS = 20_000, 20_000, 1_024


# --- state --------------------------------------------------------------------------------------------------------


class _Board:
    """The cells of one model: live replicas and leases per expert."""

    def __init__(self, model: ExpertModel) -> None:
        self.model = model
        self.index = {layer: i for i, layer in enumerate(model.layers)}
        self.live = [[0] * model.n_expert for _ in model.layers]
        self.leased = [[0] * model.n_expert for _ in model.layers]
        self.total = [[0] * model.n_expert for _ in model.layers]  # both together
        # How many cells have so many replicas and leases: tells at once whether anything is wanted.
        self._cells = Counter({0: model.n_expert * len(model.layers)})

    def valid(self, ranges: Sequence[Range]) -> bool:
        """Sorted, apart, not empty, and of this model."""
        if not 1 <= len(ranges) <= MAX_RANGES:
            return False
        last = (-1, 0)
        for layer, lo, hi in ranges:
            if layer not in self.index or not 0 <= lo < hi <= self.model.n_expert or (layer, lo) < last:
                return False
            last = (layer, hi)
        return True

    def add(self, counts: list[list[int]], ranges: Iterable[Range], change: int) -> None:
        for layer, lo, hi in ranges:
            i = self.index[layer]
            row, total = counts[i], self.total[i]
            for expert in range(lo, hi):
                before = total[expert]
                row[expert] += change
                total[expert] += change
                assert row[expert] >= 0, "a replica is taken away once"
                self._cells[before] -= 1
                self._cells[before + change] += 1

    def wants(self, target: int) -> bool:
        """Whether any cell has fewer replicas and leases than this."""
        return any(cells > 0 and count < target for count, cells in self._cells.items())

    def least(self, part: Range) -> int:
        """Fewest replicas and leases of any expert of a range."""
        layer, lo, hi = part
        return min(self.total[self.index[layer]][lo:hi])


@dataclass
class _Model:
    offered: ExpertModel
    board: _Board
    saturation: Saturation = field(default_factory=Saturation)
    version: int = 0
    workers: set[str] = field(default_factory=set)
    retiring: set[str] = field(default_factory=set)
    coordinators: set[str] = field(default_factory=set)


@dataclass
class MarketState:
    """Everything that the market knows; see :func:`apply`."""

    settings: RecruitmentSettings = DEFAULT_RECRUITMENT
    models: dict[str, _Model] = field(default_factory=dict)
    coordinators: dict[str, CoordinatorState] = field(default_factory=dict)
    workers: dict[str, Coverage] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    lease_of: dict[str, int] = field(default_factory=dict)
    waiting: OrderedDict[str, tuple[Budget, float]] = field(default_factory=OrderedDict)
    ends: list[tuple[float, str]] = field(default_factory=list)  # heap: when each wait is over
    quarantine: dict[str, str] = field(default_factory=dict)
    next_lease: int = 1
    settles_at: float = float("-inf")  # until then workers come back that a bridge has had before its restart
    granted: int = 0
    retired: int = 0
    refused: int = 0
    swept_at: float = float("-inf")

    def effective_target(self, model: str) -> int:
        """Replicas wanted of each expert of the model; 0 while nobody serves it remotely and there is no load."""
        known = self.models[model]
        if not known.workers and not known.saturation.saturated:
            return 0
        return known.saturation.target(self.settings)


def scarcity(replicas: int, target: int) -> float:
    """``max(0, target - replicas) / target``."""
    return max(0, target - replicas) / target if target > 0 else 0.0


def apply(state: MarketState, event: Event, now: float) -> tuple[MarketState, list[Decision]]:
    """Take an event in; returns the state and what is to be done."""
    market = _Market(state, now)
    market.take(event)
    return state, market.decisions


class _Market:
    def __init__(self, state: MarketState, now: float) -> None:
        self.state = state
        self.now = now
        self.decisions: list[Decision] = []

    def take(self, event: Event) -> None:
        state = self.state
        match event:
            case Tick():
                self._tick()
            case ModelOffered(model):
                if model.model not in state.models:
                    state.models[model.model] = _Model(model, _Board(model))
            case CoordinatorUp(peer, name):
                self._coordinator_up(peer, name)
            case CoordinatorDown(peer):
                gone = state.coordinators.pop(peer, None)
                if gone is not None:
                    state.models[gone.model].coordinators.discard(peer)
            case SlotsRead(peer, reading, heat):
                self._slots_read(peer, reading, heat)
            case SlotsUnread(peer):
                known = state.coordinators.get(peer)
                if known is not None:
                    state.coordinators[peer] = replace(known, polling=False, failures=known.failures + 1)
            case VolunteerAsked(peer, budget, wait):
                self._volunteer(peer, budget, wait)
            case VolunteerWent(peer):
                state.waiting.pop(peer, None)
            case LeaseProgress(peer, lease, progress):
                self._progress(peer, lease, progress)
            case LeaseReturned(peer, lease):
                held = state.leases.get(lease)
                if held is not None and held.peer == peer:
                    self._end_lease(held, "the volunteer gave it back")
                    self._serve_waiting()
            case CoverageReported():
                self._coverage(event)
            case CoverageKept():
                self._kept(event)
            case WorkerLeft(peer):
                self._remove(peer)
                self._serve_waiting()
            case Caught(peer, reason):
                state.quarantine[peer] = reason
                self._remove(peer)
                if state.waiting.pop(peer, None) is not None:
                    self.decisions.append(NotNeeded(peer, f"quarantined: {reason}"))
                self._serve_waiting()
            case Pardoned(peer):
                state.quarantine.pop(peer, None)

    # --- load ------------------------------------------------------------------------------------------------

    def _coordinator_up(self, peer: str, name: str) -> None:
        state = self.state
        if name not in state.models or (
            peer not in state.coordinators and len(state.coordinators) >= MAX_COORDINATORS
        ):
            state.refused += 1
            return
        known = state.coordinators.get(peer)
        if known is not None and known.model == name:
            return
        if known is not None:
            state.models[known.model].coordinators.discard(peer)
        state.coordinators[peer] = CoordinatorState(name)
        state.models[name].coordinators.add(peer)

    def _slots_read(self, peer: str, reading: SlotReading, heat: Mapping[int, int] | None) -> None:
        state = self.state
        known = state.coordinators.get(peer)
        if known is None:
            return
        state.coordinators[peer] = take_reading(known, reading, state.settings, heat)
        self._saturate(known.model)

    def _saturate(self, name: str) -> None:
        state = self.state
        model = state.models[name]
        before = model.saturation
        model.saturation = saturation_of(
            before, [state.coordinators[p] for p in model.coordinators], self.now, state.settings
        )
        if model.saturation.saturated == before.saturated:
            return
        target = model.saturation.target(state.settings)
        self.decisions.append(SaturationChanged(name, model.saturation.saturated, target))
        if model.saturation.saturated:
            self._serve_waiting()
        else:
            self._drain(name)

    def _tick(self) -> None:
        state = self.state
        for peer, known in state.coordinators.items():
            if poll_due(known, self.now, state.settings):
                state.coordinators[peer] = replace(known, polled_at=self.now, polling=True)
                self.decisions.append(Poll(peer, state.settings.poll_timeout))
        for name in state.models:
            self._saturate(name)
        if state.settles_at <= self.now and math.isfinite(state.settles_at):
            state.settles_at = float("-inf")
            for name, model in state.models.items():
                if not model.saturation.saturated:
                    self._drain(name)  # more have come back than there is load for
        if self.now - state.swept_at >= 1.0:  # nothing here needs to be noticed sooner
            state.swept_at = self.now
            self._sweep()

    def _sweep(self) -> None:
        state = self.state
        freed = False
        for lease in [held for held in state.leases.values() if held.expires_at <= self.now]:
            self._end_lease(lease, f"no progress for {LEASE_SECONDS:.0f} s")
            freed = True
        for worker in list(state.workers.values()):
            quiet = self.now - worker.seen
            if quiet > COVERAGE_TTL or (worker.connected and quiet > SILENT_SECONDS):
                self._remove(worker.peer)
                freed = True
        while state.ends and state.ends[0][0] <= self.now:
            until, peer = heapq.heappop(state.ends)
            if peer in state.waiting and state.waiting[peer][1] == until:
                del state.waiting[peer]
                self.decisions.append(NotNeeded(peer, self._why_not()))
        if freed:
            self._serve_waiting()

    # --- volunteers --------------------------------------------------------------------------------------

    def _volunteer(self, peer: str, budget: Budget, wait: float) -> None:
        state = self.state
        if peer in state.quarantine:
            self.decisions.append(NotNeeded(peer, f"quarantined: {state.quarantine[peer]}"))
            return
        held = state.leases.get(state.lease_of.get(peer, 0))
        if held is not None:
            # It asks again, so the answer was lost or it was restarted: the same lease, not a second one.
            model = state.models[held.model]
            self.decisions.append(Granted(held, model.offered.manifest, (0.0,) * len(held.ranges)))
            return
        if peer in state.workers and state.workers[peer].retiring:
            self._remove(peer)  # it has freed its memory, and offers it again
        if peer in state.workers:
            self.decisions.append(NotNeeded(peer, "it serves already"))
            return
        state.waiting.pop(peer, None)
        if self._grant(peer, budget):
            return
        if wait > 0 and len(state.waiting) < MAX_WAITING:
            until = self.now + min(wait, MAX_WAIT)
            state.waiting[peer] = (budget, until)
            heapq.heappush(state.ends, (until, peer))
        else:
            state.refused += wait > 0
            self.decisions.append(NotNeeded(peer, self._why_not()))

    def _why_not(self) -> str:
        if not self.state.models:
            return "no model with experts is served here"
        if all(self.state.effective_target(name) == 0 for name in self.state.models):
            return "all is calm: nobody is needed at present"
        return "every expert has as many replicas as are wanted"

    def _serve_waiting(self) -> None:
        """Release waiting volunteers, first come first served, to just as many as there is demand for."""
        state = self.state
        if not state.waiting or not any(self._wanted(name) for name in state.models):
            return
        for peer in list(state.waiting):
            budget, _ = state.waiting[peer]
            if self._grant(peer, budget):
                del state.waiting[peer]
                if not any(self._wanted(name) for name in state.models):
                    return

    def _wanted(self, name: str) -> bool:
        """Whether any cell is under the target."""
        return self.state.models[name].board.wants(self.state.effective_target(name))

    def _grant(self, peer: str, budget: Budget) -> bool:
        state = self.state
        names = [n for n in state.models if budget.model in ("", n) and self._wanted(n)]
        # Where people wait longest for their turn first: the model with the longest queue, then the busiest.
        names.sort(key=lambda n: self._pressure(n), reverse=True)
        for name in names:
            ranges = choose_ranges(
                state.models[name].board.model,
                state.models[name].board.total,
                state.effective_target(name),
                self._heat(name),
                budget,
            )
            if not ranges:
                continue
            self._lease(peer, name, ranges)
            return True
        return False

    def _pressure(self, name: str) -> tuple[int, int, str]:
        state = self.state
        load = load_of(
            [state.coordinators[p] for p in state.models[name].coordinators], self.now, state.settings
        )
        return load.queue, load.busy, name

    def _heat(self, name: str) -> dict[int, int]:
        heat: dict[int, int] = {}
        for peer in self.state.models[name].coordinators:
            for layer, rows in (self.state.coordinators[peer].heat or {}).items():
                heat[layer] = heat.get(layer, 0) + rows
        return heat

    def _lease(self, peer: str, name: str, ranges: tuple[Range, ...]) -> None:
        state = self.state
        model = state.models[name]
        target = state.effective_target(name)
        scarce = tuple(scarcity(model.board.least(part), target) for part in ranges)
        lease = Lease(state.next_lease, peer, name, ranges, 0, self.now + LEASE_SECONDS)
        state.next_lease += 1
        state.leases[lease.id] = lease
        state.lease_of[peer] = lease.id
        state.granted += 1
        model.board.add(model.board.leased, ranges, +1)
        self.decisions.append(Granted(lease, model.offered.manifest, scarce))

    def _progress(self, peer: str, lease_id: int, progress: int) -> None:
        lease = self.state.leases.get(lease_id)
        if lease is None or lease.peer != peer or progress <= lease.progress:
            return
        self.state.leases[lease_id] = replace(lease, progress=progress, expires_at=self.now + LEASE_SECONDS)

    def _drop_lease(self, lease: Lease) -> None:
        state = self.state
        del state.leases[lease.id]
        state.lease_of.pop(lease.peer, None)
        board = state.models[lease.model].board
        board.add(board.leased, lease.ranges, -1)

    def _end_lease(self, lease: Lease, why: str) -> None:
        self._drop_lease(lease)
        self.decisions.append(LeaseEnded(lease, why))

    # --- coverage ----------------------------------------------------------------------------------------

    def _coverage(self, event: CoverageReported) -> None:
        state = self.state
        peer = event.peer
        known = state.workers.get(peer)
        if known is not None and known.model == event.model and known.ranges == event.ranges:
            state.workers[peer] = replace(
                known,
                seen=self.now,
                rate=event.rate or known.rate,
                addresses=event.addresses,
                connected=event.connected,
            )
            if known.retiring:
                self.decisions.append(Retire(peer, "the load has gone"))
                return
            if event.addresses != known.addresses or event.connected != known.connected:
                self._map_changed(event.model)
            self.decisions.append(Wired(peer, state.workers[peer].expires_at()))
            return
        why = self._coverage_refusal(event)
        if why:
            state.refused += 1
            self.decisions.append(NotWired(peer, why))
            return
        if known is not None:
            self._remove(peer)
        lease = state.leases.get(event.lease)
        if lease is None and not self._fills_a_hole(event):
            self.decisions.append(Retire(peer, "every expert that it has is covered"))
            return
        if lease is not None:
            self._drop_lease(lease)
        model = state.models[event.model]
        state.workers[peer] = Coverage(
            peer,
            event.model,
            event.ranges,
            self.now,
            event.rate,
            event.addresses,
            event.device,
            event.connected,
        )
        model.workers.add(peer)
        model.board.add(model.board.live, event.ranges, +1)
        self._map_changed(event.model)
        self.decisions.append(Wired(peer, state.workers[peer].expires_at()))
        if lease is not None and lease.ranges != event.ranges:
            self._serve_waiting()  # it serves less than was leased to it

    def _kept(self, event: CoverageKept) -> None:
        """It counts as before, until it has been silent for as long as a connected one may be."""
        state = self.state
        seen = self.now - (COVERAGE_TTL - SILENT_SECONDS)
        report = CoverageReported(event.peer, event.model, 0, event.ranges)
        if event.peer in state.workers or self._coverage_refusal(report):
            return
        state.workers[event.peer] = Coverage(
            event.peer, event.model, event.ranges, seen, event.rate, event.addresses, event.device, False
        )
        model = state.models[event.model]
        model.workers.add(event.peer)
        model.board.add(model.board.live, event.ranges, +1)
        self._map_changed(event.model)

    def _coverage_refusal(self, event: CoverageReported) -> str:
        state = self.state
        if event.peer in state.quarantine:
            return f"quarantined: {state.quarantine[event.peer]}"
        model = state.models.get(event.model)
        if model is None:
            return f"model {event.model!r} is not served here"
        if not model.board.valid(event.ranges):
            return "its ranges are not ranges of the model's experts"
        if event.peer not in state.workers and len(state.workers) >= MAX_WORKERS:
            return f"{MAX_WORKERS} workers are registered already"
        if event.lease == 0:
            return ""
        lease = state.leases.get(event.lease)
        if lease is None:
            return ""  # it has ended; what the peer has may still fill a hole
        if lease.peer != event.peer or lease.model != event.model:
            return "the lease is another peer's"
        if not all(_inside(part, lease.ranges) for part in event.ranges):
            return "its ranges are not those of its lease"
        return ""

    def _fills_a_hole(self, event: CoverageReported) -> bool:
        """Whether any of these experts has fewer replicas than are wanted."""
        model = self.state.models[event.model]
        # Without any worker and load nothing is wanted; yet after a restart the first to come back would be sent
        # away before the second is there, so it is measured by the base target.
        settings = self.state.settings
        target = max(self.state.effective_target(event.model), settings.base)
        if self.now < self.state.settles_at:
            target = settings.base + settings.boost
        return any(model.board.least(part) < target for part in event.ranges)

    def _remove(self, peer: str) -> None:
        """Forget a worker, and its lease: its cells are wanted again."""
        state = self.state
        lease = state.leases.get(state.lease_of.get(peer, 0))
        if lease is not None:
            self._end_lease(lease, "the volunteer is gone")
        worker = state.workers.pop(peer, None)
        if worker is None:
            return
        model = state.models[worker.model]
        model.retiring.discard(peer)
        if not worker.retiring:
            model.workers.discard(peer)
            model.board.add(model.board.live, worker.ranges, -1)
            self._map_changed(worker.model)

    def _drain(self, name: str) -> None:
        """The target has fallen: retire whoever is not needed for it, the slowest first."""
        state = self.state
        model = state.models[name]
        target = model.saturation.target(state.settings)
        changed = False
        for worker in sorted((state.workers[p] for p in model.workers), key=lambda w: (w.rate, w.peer)):
            live = [model.board.live[model.board.index[layer]][lo:hi] for layer, lo, hi in worker.ranges]
            if min(min(part) for part in live) <= target:
                continue
            state.workers[worker.peer] = replace(worker, retiring=True)
            model.workers.discard(worker.peer)
            model.retiring.add(worker.peer)
            model.board.add(model.board.live, worker.ranges, -1)
            state.retired += 1
            changed = True
            self.decisions.append(Retire(worker.peer, "the load has gone"))
        for lease in [held for held in state.leases.values() if held.model == name]:
            if min(model.board.least(part) for part in lease.ranges) > target:
                self._end_lease(lease, "the load has gone")
        if changed:
            self._map_changed(name)

    def _map_changed(self, name: str) -> None:
        model = self.state.models[name]
        model.version += 1
        self.decisions = [d for d in self.decisions if not (isinstance(d, MapChanged) and d.model == name)]
        self.decisions.append(MapChanged(name, model.version))


def _inside(part: Range, ranges: Sequence[Range]) -> bool:
    layer, lo, hi = part
    return any(at == layer and first <= lo and hi <= end for at, first, end in ranges)
