"""A swarm of volunteers and coordinators around the market, in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from kvasir_peer.experts.dispatch_policy import SlotReading
from kvasir_peer.experts.market import MarketState, apply
from kvasir_peer.experts.market_messages import (
    Budget,
    CoordinatorUp,
    CoverageReported,
    Decision,
    Event,
    ExpertModel,
    Granted,
    LeaseEnded,
    LeaseProgress,
    MapChanged,
    ModelOffered,
    NotNeeded,
    NotWired,
    Poll,
    Range,
    Retire,
    SaturationChanged,
    SlotsRead,
    SlotsUnread,
    Tick,
    VolunteerAsked,
    Wired,
    WorkerLeft,
)
from kvasir_peer.experts.recruitment import RecruitmentSettings

MB = 1 << 20


def model(layers: int = 4, experts: int = 16, size: int = 10 * MB, name: str = "moe") -> ExpertModel:
    return ExpertModel(name, "f" * 64, layers, tuple(range(layers)), experts, (size,) * layers)


@dataclass
class Volunteer:
    name: str
    budget: Budget
    fetch_seconds: float
    state: str = "idle"
    lease: int = 0
    ranges: tuple[Range, ...] = ()
    model: str = ""
    retired_at: float | None = None
    served_times: int = 0


@dataclass
class Swarm:
    settings: RecruitmentSettings = field(default_factory=RecruitmentSettings)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.state = MarketState(self.settings)
        self.volunteers: dict[str, Volunteer] = {}
        self.load: dict[str, Callable[[float], tuple[int, int, int] | None]] = {}
        self.log: list[tuple[float, Decision]] = []
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = 0
        self.dead: set[str] = set()
        self.heat: dict[int, int] | None = None
        self.at(0.0, self._tick)

    def at(self, time: float, action: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, (time, self.order, action))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.events and self.events[0][0] <= end:
            self.now, _, action = heapq.heappop(self.events)
            action()
        self.now = end

    def _tick(self) -> None:
        self.tell(Tick())
        self.at(self.now + 0.5, self._tick)

    def tell(self, event: Event) -> list[Decision]:
        self.state, decisions = apply(self.state, event, self.now)
        for decision in decisions:
            if not isinstance(decision, Poll | Wired):
                self.log.append((self.now, decision))
            self._carry_out(decision)
        return decisions

    def offer(self, what: ExpertModel) -> None:
        self.tell(ModelOffered(what))

    def coordinator(self, peer: str, name: str, load: Callable[[float], tuple[int, int, int] | None]) -> None:
        """``load(now)``: (busy, total, queue), or None for no answer."""
        self.load[peer] = load
        self.tell(CoordinatorUp(peer, name))

    def volunteer(
        self,
        name: str,
        megabytes: int = 160,
        *,
        fetch: float = 3.0,
        rate: float = 100.0,
        start: float | None = None,
    ) -> Volunteer:
        budget = Budget(megabytes * MB, 100_000 * MB, expansion=1.0, rate=rate)
        self.volunteers[name] = Volunteer(name, budget, fetch)
        self.at(self.now if start is None else start, lambda: self._ask(name))
        return self.volunteers[name]

    def _ask(self, name: str) -> None:
        v = self.volunteers[name]
        if name in self.dead or v.state not in ("idle", "waiting"):
            return
        v.state = "waiting"
        self.tell(VolunteerAsked(name, v.budget, wait=50.0))

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Poll(peer):
                answer = self.load[peer](self.now)
                if answer is None:
                    self.at(self.now + 4.0, lambda: self.tell(SlotsUnread(peer)) and None)
                else:
                    reading = SlotReading(*answer, at=self.now)
                    self.at(self.now + 0.01, lambda: self.tell(SlotsRead(peer, reading, self.heat)) and None)
            case Granted(lease):
                v = self.volunteers[lease.peer]
                v.state, v.lease, v.ranges, v.model = "fetching", lease.id, lease.ranges, lease.model
                for i in range(1, 4):
                    self.at(
                        self.now + v.fetch_seconds * i / 4,
                        lambda i=i: self._progress(lease.peer, lease.id, i),
                    )
                self.at(self.now + v.fetch_seconds, lambda: self._register(lease.peer, lease.id))
            case NotNeeded(peer):
                self.volunteers[peer].state = "idle"
                self.at(self.now + 2.0, lambda: self._ask(peer))
            case LeaseEnded(lease):
                v = self.volunteers[lease.peer]
                if v.lease == lease.id and v.state == "fetching":
                    v.state, v.lease = "idle", 0
                    self.at(self.now + 1.0, lambda: self._ask(lease.peer))
            case Retire(peer):
                v = self.volunteers[peer]
                if v.state == "serving":
                    v.state, v.retired_at = "retired", self.now
                    self.at(self.now + 1.0, lambda: self._gone(peer))
            case NotWired(peer):
                self.volunteers[peer].state = "idle"
            case MapChanged() | SaturationChanged() | Wired():
                pass

    def _progress(self, peer: str, lease: int, step: int) -> None:
        if peer not in self.dead and self.volunteers[peer].lease == lease:
            self.tell(LeaseProgress(peer, lease, step))

    def _register(self, peer: str, lease: int) -> None:
        v = self.volunteers[peer]
        if peer not in self.dead and v.state == "fetching" and v.lease == lease:
            v.state = "serving"
            v.served_times += 1
            self._heartbeat(peer)

    def _heartbeat(self, peer: str) -> None:
        v = self.volunteers[peer]
        if peer not in self.dead and v.state == "serving":
            self.tell(CoverageReported(peer, v.model, v.lease, v.ranges, v.budget.rate, ("/p2p/" + peer,)))
            self.at(self.now + 10.0, lambda: self._heartbeat(peer))

    def _gone(self, peer: str) -> None:
        if peer not in self.dead and self.volunteers[peer].state == "retired":
            self.volunteers[peer].state = "idle"
            self.tell(WorkerLeft(peer))
            self._ask(peer)

    def kill(self, peer: str, *, closed: bool = True) -> None:
        self.dead.add(peer)
        if closed:
            self.tell(WorkerLeft(peer))

    # --- looking ---------------------------------------------------------------------------------------

    def serving(self, name: str = "moe") -> list[str]:
        return sorted(v.name for v in self.volunteers.values() if v.state == "serving" and v.model == name)

    def replicas(self, name: str = "moe") -> list[list[int]]:
        return [list(row) for row in self.state.models[name].board.live]

    def check(self) -> None:
        """Counts agree with leases and coverage."""
        for known in self.state.models.values():
            board = known.board
            live = [[0] * known.offered.n_expert for _ in known.offered.layers]
            leased = [[0] * known.offered.n_expert for _ in known.offered.layers]
            for peer in known.workers:
                for layer, lo, hi in self.state.workers[peer].ranges:
                    for e in range(lo, hi):
                        live[board.index[layer]][e] += 1
            for lease in self.state.leases.values():
                if lease.model == known.offered.model:
                    for layer, lo, hi in lease.ranges:
                        for e in range(lo, hi):
                            leased[board.index[layer]][e] += 1
            assert board.live == live and board.leased == leased
            both = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(live, leased, strict=True)]
            assert board.total == both
            cells = {c: n for c, n in board._cells.items() if n}
            counted: dict[int, int] = {}
            for i in range(len(live)):
                for count in board.total[i]:
                    counted[count] = counted.get(count, 0) + 1
            assert cells == counted
        assert set(self.state.lease_of) == {lease.peer for lease in self.state.leases.values()}
