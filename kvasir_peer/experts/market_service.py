"""The market at the bridge: feeds polls, claims and readings to the pure rules, and acts on their decisions."""

from __future__ import annotations

import base64
import hmac
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec
import trio

from kvasir_peer.engines.footprint import RESERVE, floats_of
from kvasir_peer.errors import RefusedError, WireError
from kvasir_peer.experts import market, market_messages, market_views
from kvasir_peer.experts.coordinators import Coordinators
from kvasir_peer.experts.dispatch_map import DispatchMap, MapDispatcher, MapWorker, sign_map
from kvasir_peer.experts.dispatch_policy import SlotReading
from kvasir_peer.experts.market_figures import DispatchTotals, ExpertsStatistics, experts_statistics
from kvasir_peer.experts.market_messages import Budget, Decision, Event, ExpertModel
from kvasir_peer.experts.permits import PERMIT_SECONDS, ChunkPermit, sign_permit
from kvasir_peer.experts.recruitment import DEFAULT_RECRUITMENT, RecruitmentSettings
from kvasir_peer.experts.roll import Roll, RollCoordinator, RollWorker, decode_roll, encode_roll
from kvasir_peer.experts.tallies import decode_tallies, encode_tallies
from kvasir_peer.experts.volunteering import (
    Ask,
    Claim,
    Coverage,
    DispatchReport,
    Given,
    Heard,
    Join,
    Joined,
    LeasedRange,
    MapAnswer,
    Source,
    Wiring,
    check_claim,
)
from kvasir_peer.progress import Progress, Report

if TYPE_CHECKING:
    from kvasir_peer.engines.architectures import ModelShape
    from kvasir_peer.experts.ledger import Ledger
    from kvasir_peer.models.manifest import Manifest
    from kvasir_peer.net.node import Node, PeerEvent

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25  # between two looks at what time has changed
REISSUE_SECONDS = 30.0  # a map is signed again while it has workers, so that their coverage is seen to go on
LEDGER_SECONDS = 5.0  # between two writes of what was given
COORDINATOR_SILENT = 40.0  # seconds after which a coordinator that neither polls nor is connected is gone
MAX_ADMITTED = 20_000
MAX_HOLDERS = 3  # peers that are named to a volunteer as having its chunks, before the bridge itself
RING = "ring"  # the ring's name among the coordinators


@dataclass(frozen=True)
class MarketSettings:
    """What the bridge's owner decides.

    Attributes:
        secret: of the ticket.
        dtype: of rows and sums between dispatchers and workers.
        max_rows: most rows of one frame.
        recruitment: thresholds, targets and periods.
    """

    secret: bytes
    dtype: str = "f16"
    max_rows: int = 64
    recruitment: RecruitmentSettings = DEFAULT_RECRUITMENT


@dataclass
class _Joined:
    seen: float
    addresses: tuple[str, ...] = ()
    polling: int = 0


@dataclass
class _Waiter:
    answer: Given | None = None
    event: trio.Event = field(default_factory=trio.Event)

    def set(self, answer: Given) -> None:
        if self.answer is None:
            self.answer = answer
            self.event.set()


def expert_model(name: str, manifest: Manifest, shape: ModelShape) -> ExpertModel | None:
    """What the market offers of a model; None where it has no routed experts."""
    layers = tuple(layer.index for layer in shape.layers if layer.moe is not None)
    if not layers:
        return None
    sizes, least = [], 1.0
    for layer in layers:
        tensors = [t for t in manifest.pages[f"blk.{layer}"].tensors if "_exps." in t.name]
        sizes.append(sum(t.n_bytes // t.shape[0] for t in tensors))
        floats = [floats_of([t]) for t in tensors if len(t.shape) > 2]  # biases are few
        least = max([least, *(RESERVE * f.loaded / f.file for f in floats if f.file)])
    moe = shape.layers[layers[0]].moe
    assert moe is not None
    return ExpertModel(name, manifest.id, shape.n_layer, layers, moe.n_expert, tuple(sizes), least)


class RingView(Protocol):
    """What the market sees of a ring of the same model: its stages may dispatch too."""

    def dispatchers(self) -> Sequence[str]:
        """Peer ids of its stages."""
        ...

    def slots(self) -> SlotReading | None:
        """How busy it is; None while there is no ring."""
        ...

    def admitted(self, peer: str) -> bool:
        """Whether a peer has shown a good ticket to the ring."""
        ...


class MarketService:
    """The experts of one model at its bridge.

    Args:
        node: the bridge's.
        name, manifest, shape: of the model.
        settings: the owner's.
        sign, verify: with the bridge's key; by peer id.
        ledger: what was given, and who is quarantined.
        report: told what happens.
        ring: of the same model, where there is one.
        web: address of the model's file on a web server that anybody may ask; empty where there is none.
    """

    def __init__(
        self,
        node: Node,
        name: str,
        manifest: Manifest,
        shape: ModelShape,
        settings: MarketSettings,
        *,
        sign: Callable[[bytes], bytes],
        verify: Callable[[str, bytes, bytes], bool],
        ledger: Ledger,
        report: Report,
        ring: RingView | None = None,
        web: str = "",
    ) -> None:
        self.settings = settings
        self._web = web
        self._named: Counter[str] = Counter()
        self._ring = ring
        self._ring_peers: tuple[str, ...] = ()
        self.name = name
        self._node = node
        self._manifest = manifest
        self._shape = shape
        self._sign = sign
        self._verify = verify
        self._ledger = ledger
        self._tell = report
        self.coordinators = Coordinators(node, manifest.id, self._coordinators_changed)
        self._state = market.MarketState(
            settings.recruitment,
            # No number of a lease from before a restart may be taken for one from after it.
            next_lease=int(time.time() * 1e3),
            settles_at=trio.current_time() + market.RETURN_SECONDS,
        )
        self._admitted = ledger.admitted(settings.secret)
        self._joined: dict[str, _Joined] = {}
        self._waiters: dict[str, _Waiter] = {}
        self._retire: dict[str, str] = {}
        self._worker_news: dict[str, trio.Event] = {}
        self._gone: set[str] = set()
        self._map = b""
        self._version = 0
        self._issued = 0.0
        self._newer = trio.Event()
        self._tallies = decode_tallies(ledger.kept("tallies"))
        self._totals = DispatchTotals()
        self._rows = self._checked = 0
        self._given: dict[str, tuple[int, int]] = {}
        self._claimed: dict[str, float] = {}  # time of the newest claim of each worker
        self._ring_heat: dict[str, Mapping[int, int]] = {}
        self.refused: Counter[str] = Counter()  # claims and reports, by reason
        self._modes: dict[str, Mapping[str, object]] = {}
        self._nursery: trio.Nursery | None = None
        offered = expert_model(name, manifest, shape)
        if offered is not None:
            self._apply(market_messages.ModelOffered(offered))
        for peer, reason in ledger.quarantined().items():
            self._apply(market_messages.Caught(peer, reason))
        self._kept_somebody = True
        self._call_roll(decode_roll(ledger.kept("roll"), manifest.id))
        self._issue()
        node.on_peer(self._peer_event)

    # -- life -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Decide until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._write_ledger)
            for peer, joined in self._joined.items():
                nursery.start_soon(self.coordinators.keep, peer, joined.addresses)
            while True:
                self._look(trio.current_time())
                await trio.sleep(TICK_SECONDS)

    def _look(self, now: float) -> None:
        self._look_at_ring()
        self._apply(market_messages.Tick())
        if self._state.workers and now - self._issued > REISSUE_SECONDS:
            self._issue()
        for peer, joined in list(self._joined.items()):
            if not joined.polling and now - joined.seen > COORDINATOR_SILENT:
                self._lose(peer)

    def _look_at_ring(self) -> None:
        """A ring is to the market one more coordinator, whose slots the bridge knows itself."""
        if self._ring is None or self.name not in self._state.models:
            return
        peers = tuple(sorted(self._ring.dispatchers()))
        if peers != self._ring_peers:
            for gone in set(self._ring_peers) - set(peers):
                self._modes.pop(gone, None)
                self._totals.gone(gone)
                self._ring_heat.pop(gone, None)
            self._ring_peers = peers
            self._issue()
            event = market_messages.CoordinatorUp(RING, self.name) if peers else None
            self._apply(event or market_messages.CoordinatorDown(RING))

    def _apply(self, event: Event) -> Sequence[Decision]:
        """One event through the rules, and what they decide; the decisions, for whoever asked."""
        now = trio.current_time()
        self._state, decisions = market.apply(self._state, event, now)
        for decision in decisions:
            self._act(decision, now)
        return decisions

    def _act(self, decision: Decision, now: float) -> None:
        match decision:
            case market_messages.Poll(peer, timeout):
                if self._nursery is not None:
                    self._nursery.start_soon(self._poll, peer, timeout)
            case market_messages.Granted(lease, _, scarcity):
                self._tell(
                    Progress("plan", f"{lease.peer} is asked for {len(lease.ranges)} ranges of experts")
                )
                waiter = self._waiters.get(lease.peer)
                if waiter is not None:
                    waiter.set(self._given_of(lease, scarcity, now))
            case market_messages.NotNeeded(peer, why):
                waiter = self._waiters.get(peer)
                if waiter is not None:
                    waiter.set(Given(False, why))
            case market_messages.Retire(peer, why):
                self._retire[peer] = why
                self._worker_news.pop(peer, trio.Event()).set()
            case market_messages.MapChanged():
                self._issue()
            case market_messages.SaturationChanged(model, saturated, target):
                word = "saturated" if saturated else "calm again"
                self._tell(
                    Progress("plan", f"{model} is {word}: {target} replicas of each expert are wanted")
                )
            case market_messages.LeaseEnded(lease, why):
                logger.info("the lease of %s has ended: %s", lease.peer, why)

    def _call_roll(self, roll: Roll) -> None:
        """Count with those that took part before the bridge was restarted; whoever is not heard of soon is gone."""
        if self.name not in self._state.models:
            return
        for worker in roll.workers:
            if worker.peer in self._admitted:
                self._apply(
                    market_messages.CoverageKept(
                        worker.peer,
                        self.name,
                        worker.ranges,
                        worker.rate,
                        worker.addresses,
                        worker.device,
                    )
                )
        for one in roll.coordinators:
            if one.peer in self._admitted:
                self._joined[one.peer] = _Joined(trio.current_time(), one.addresses)
                self._apply(market_messages.CoordinatorUp(one.peer, self.name))

    def _present(self) -> Roll:
        now, wall = trio.current_time(), time.time()
        workers = [
            RollWorker(w.peer, w.ranges, wall - (now - w.seen), w.rate, w.addresses[:16], w.device)
            for w in self._state.workers.values()
            if not w.retiring
        ]
        coordinators = [RollCoordinator(peer, joined.addresses) for peer, joined in self._joined.items()]
        return Roll(self._manifest.id, wall, tuple(workers), tuple(coordinators))

    # -- who may take part ----------------------------------------------------------------------------------

    def admitted(self, peer: str) -> bool:
        """Whether the peer has shown a good ticket."""
        return peer in self._admitted or (self._ring is not None and self._ring.admitted(peer))

    def _admit(self, peer: str, secret: str) -> None:
        if peer in self._admitted:
            return
        try:
            shown = bytes.fromhex(secret)
        except ValueError:
            shown = b""
        if not hmac.compare_digest(shown, self.settings.secret):
            raise RefusedError(
                "this ticket is not good here: ask whoever runs the bridge for a new one", peer=peer
            )
        if len(self._admitted) >= MAX_ADMITTED:
            raise RefusedError(f"{MAX_ADMITTED} peers have joined already", peer=peer)
        self._admitted.add(peer)
        if self._nursery is not None:
            self._nursery.start_soon(trio.to_thread.run_sync, self._ledger.admit, peer, self.settings.secret)

    def _peer_event(self, event: PeerEvent) -> None:
        """A closed connection is noticed at once, and forgiven when it comes back by itself."""
        if event.state == "gone":
            if event.peer in self._state.workers:
                self._apply(market_messages.WorkerLeft(event.peer))
            joined = self._joined.get(event.peer)
            if joined is not None and not joined.polling:
                self._lose(event.peer)

    # -- volunteers -----------------------------------------------------------------------------------------

    async def volunteer(self, peer: str, ask: Ask) -> Given:
        """Answer an idle peer, when there is something for it or its wait is over.

        Raises:
            RefusedError: it shows no good ticket.
        """
        self._admit(peer, ask.secret)
        if ask.lease:
            return self._lease_news(peer, ask)
        waiter = self._waiters[peer] = _Waiter()
        self._retire.pop(peer, None)
        budget = Budget(
            ask.memory,
            ask.disk,
            ask.expansion,
            ask.rate,
            ask.addresses,
            ask.device,
            ask.model,
            ask.held if ask.manifest == self._manifest.id else (),
        )
        self._apply(market_messages.VolunteerAsked(peer, budget, ask.wait))
        try:
            with trio.move_on_after(ask.wait + 2):
                await waiter.event.wait()
        finally:
            if self._waiters.get(peer) is waiter:
                del self._waiters[peer]
                if waiter.answer is None:
                    self._apply(market_messages.VolunteerWent(peer))
        return waiter.answer or Given(False, "nobody is needed at present")

    def would_give(self, ask: Ask) -> Given:
        """What a volunteer with this budget would get now, without a lease."""
        from kvasir_peer.experts.allotment import choose_ranges

        known = self._state.models.get(self.name)
        if known is None:
            return Given(False, "this model has no experts")
        target = self._state.effective_target(self.name)
        budget = Budget(ask.memory, ask.disk, ask.expansion)
        ranges = choose_ranges(known.offered, known.board.total, target, {}, budget)
        leased = tuple(LeasedRange(layer, (lo, hi)) for layer, lo, hi in ranges)
        return Given(
            False,
            "no lease: POST takes one",
            0,
            self.name,
            self._manifest.id,
            leased,
            0.0,
            self._own_sources(),
        )

    def _lease_news(self, peer: str, ask: Ask) -> Given:
        if ask.give_back:
            self._apply(market_messages.LeaseReturned(peer, ask.lease))
            return Given(False, "given back")
        self._apply(market_messages.LeaseProgress(peer, ask.lease, ask.progress))
        lease = self._state.leases.get(ask.lease)
        if lease is None or lease.peer != peer:
            return Given(False, "the lease has ended")
        return self._given_of(lease, (0.0,) * len(lease.ranges), trio.current_time())

    def _given_of(self, lease: market_messages.Lease, scarcity: Sequence[float], now: float) -> Given:
        ranges = tuple(
            LeasedRange(layer, (lo, hi), round(scarce, 4))
            for (layer, lo, hi), scarce in zip(lease.ranges, scarcity, strict=True)
        )
        return Given(
            True,
            "",
            lease.id,
            lease.model,
            self._manifest.id,
            ranges,
            max(0.0, lease.expires_at - now),
            (*self._holders(lease), *self._own_sources()),
            self._permit(lease.peer),
        )

    def _holders(self, lease: market_messages.Lease) -> tuple[Source, ...]:
        """Peers that have the lease's chunks, those that were named least among equals: many upload, not one."""
        found = market_views.holders(self._state, lease.model, lease.peer, lease.ranges)
        found.sort(key=lambda one: (-one[2], self._named[one[0]], one[0]))
        chosen = found[:MAX_HOLDERS]
        if len(self._named) > MAX_ADMITTED:
            self._named.clear()
        self._named.update(peer for peer, _, _ in chosen)
        return tuple(Source(peer, addresses[:16]) for peer, addresses, _ in chosen)

    def _permit(self, peer: str) -> tuple[str, str]:
        permit = ChunkPermit(self._node.peer_id, peer, self._manifest.id, time.time() + PERMIT_SECONDS)
        data, signature = sign_permit(permit, self._sign)
        return base64.b64encode(data).decode(), base64.b64encode(signature).decode()

    def _own_sources(self) -> tuple[Source, ...]:
        """The bridge itself; before it the web server that it would have to ask."""
        own = Source(self._node.peer_id, tuple(self._node.addresses()))
        return (Source("", (), self._web), own) if self._web else (own,)

    async def coverage(self, caller: str | None, body: Coverage) -> Wiring:
        """Take a signed claim; held while nothing changes for the worker.

        Args:
            caller: peer id of the connection; None over TCP, where the signature alone speaks.

        Raises:
            RefusedError: no ticket, or somebody else's claim. WireError: a claim that is not good.
        """
        try:
            claim = self._claim(caller, body)
        except WireError as error:
            self.refused[error.code] += 1
            raise
        except RefusedError:
            self.refused["stranger"] += 1
            raise
        peer = claim.peer
        if claim.leaving:
            self._apply(market_messages.WorkerLeft(peer))
            return Wiring(False, "left", retire=True)
        connected = peer in self._node.peers()
        decisions = self._apply(
            market_messages.CoverageReported(
                peer,
                claim.model,
                claim.lease,
                claim.ranges,
                claim.rate,
                claim.addresses,
                claim.device,
                connected,
            )
        )
        wired: market_messages.Wired | None = None
        for decision in decisions:
            if isinstance(decision, market_messages.Retire) and decision.peer == peer:
                return Wiring(False, decision.why, retire=True)
            if isinstance(decision, market_messages.NotWired) and decision.peer == peer:
                return Wiring(False, decision.why)
            if isinstance(decision, market_messages.Wired) and decision.peer == peer:
                wired = decision
        if wired is None:
            return Wiring(False, "the bridge knows nothing of these experts")
        if body.wait > 0 and peer not in self._retire:
            event = self._worker_news.setdefault(peer, trio.Event())
            with trio.move_on_after(body.wait):
                await event.wait()
        if peer in self._retire:
            return Wiring(False, self._retire[peer], retire=True)
        return Wiring(True, expires_in=max(0.0, wired.expires_at - trio.current_time()))

    def _claim(self, caller: str | None, body: Coverage) -> Claim:
        claim = check_claim(body, self._node.peer_id, time.time(), self._verify)
        peer = claim.peer
        if caller is not None and caller != peer:
            raise RefusedError("coverage is registered by the key that serves it", peer=caller)
        # Who speaks over libp2p has proved its key just now; over TCP a claim may be one that somebody has kept.
        if caller is None and claim.time <= self._claimed.get(peer, 0.0):
            raise WireError("stale", "the coverage claim was made before one that is known", peer=peer)
        self._admit(peer, body.secret)
        self._claimed[peer] = max(claim.time, self._claimed.get(peer, 0.0))
        return claim

    # -- the dispatch map -----------------------------------------------------------------------------------

    def _issue(self) -> None:
        """Sign the map as it stands now."""
        now = trio.current_time()
        workers: list[MapWorker] = []
        if self.name in self._state.models:
            _, covered = market_views.dispatch_map(self._state, self.name)
            workers = [
                MapWorker(c.peer, c.ranges, c.addresses[:16], max(0.0, c.expires_at() - now)) for c in covered
            ]
        self._version = max(self._version + 1, int(time.time() * 1e3))
        self._issued = now
        moe = next((layer.moe for layer in self._shape.layers if layer.moe is not None), None)
        value = DispatchMap(
            self._manifest.id,
            self._version,
            self._node.peer_id,
            time.time(),
            self._shape.n_layer,
            self._shape.n_embd,
            moe.n_used if moe is not None else 1,
            self.settings.dtype,
            self.settings.max_rows,
            tuple(workers),
            tuple(MapDispatcher(peer) for peer in self._dispatchers()),
        )
        self._map = sign_map(value, self._sign)
        self._newer.set()
        self._newer = trio.Event()

    def _dispatchers(self) -> list[str]:
        return sorted({*self._joined, *self._ring_peers})

    async def dispatch_map(self, model: str, after: int, wait: float) -> MapAnswer:
        """The signed map once it is newer than ``after``, or after ``wait`` seconds. Raises KeyError."""
        if model not in ("", self.name, self._manifest.id):
            raise KeyError(model)
        with trio.move_on_after(wait):
            while self._version <= after:
                await self._newer.wait()
        if self._version <= after:
            return MapAnswer(self._version, "")
        return MapAnswer(self._version, base64.b64encode(self._map).decode())

    # -- coordinators ---------------------------------------------------------------------------------------

    async def coordinator(self, peer: str, join: Join) -> Joined:
        """A coordinator says that it is there; held as its heartbeat.

        Raises:
            RefusedError: no good ticket, or another model than the one served here.
        """
        self._admit(peer, join.secret)
        answer = Joined(self.name, self._manifest.id, self._shape.n_layer, self._own_sources())
        if join.model not in ("", self.name):
            raise RefusedError(f"no model {join.model[:80]!r} is served here, {self.name} is", peer=peer)
        if not join.manifest:
            return answer
        if join.manifest != self._manifest.id:
            raise RefusedError("the model was replaced by another version: load it again", peer=peer)
        known = self._joined.get(peer)
        if known is None:
            known = self._joined[peer] = _Joined(trio.current_time(), join.addresses[:16])
            self._apply(market_messages.CoordinatorUp(peer, self.name))
            self._issue()
            self._tell(Progress("plan", f"{peer} coordinates {self.name}"))
        if self._nursery is not None:
            self._nursery.start_soon(self.coordinators.keep, peer, join.addresses[:16])
        known.seen, known.addresses = trio.current_time(), join.addresses[:16]
        known.polling += 1
        try:
            await trio.sleep(join.wait)
        finally:
            known.polling -= 1
            known.seen = trio.current_time()
            if known.polling == 0 and peer not in self._node.peers():
                self._lose(peer)
        return answer

    def _lose(self, peer: str) -> None:
        if self._joined.pop(peer, None) is not None:
            self.coordinators.drop(peer)
            self._modes.pop(peer, None)
            self._totals.gone(peer)
            self._apply(market_messages.CoordinatorDown(peer))
            self._issue()
            self._tell(Progress("problem", f"the coordinator {peer} is gone"))

    def _coordinators_changed(self) -> None:
        self._tell(Progress("ready", f"{len(self.coordinators.peers)} coordinators take requests"))

    async def _poll(self, peer: str, timeout: float) -> None:
        if peer == RING:
            reading = self._ring.slots() if self._ring is not None else None
            if reading is not None:
                heat: Counter[int] = Counter()
                for of_stage in self._ring_heat.values():
                    heat.update(of_stage)
                self._apply(market_messages.SlotsRead(RING, reading, heat or None))
            else:
                self._apply(market_messages.SlotsUnread(RING))
            return
        found = await self.coordinators.slots(peer, timeout)
        if found is None:
            self._apply(market_messages.SlotsUnread(peer))
            return
        now = trio.current_time()
        reading = SlotReading(found.busy, max(1, found.total), found.queue, now)
        self._modes[peer] = {
            "mode": found.mode,
            "local_pairs": found.local_pairs,
            "remote_pairs": found.remote_pairs,
            **msgspec.structs.asdict(found.figures),
            "rows": {worker.peer: worker.rows for worker in found.workers},
        }
        self._totals.told(peer, found.run, found.local_pairs, found.remote_pairs, found.figures)
        self._apply(market_messages.SlotsRead(peer, reading, dict(found.heat)))
        await self._take_caught(found.caught)
        self._count(peer, found.run, ((w.peer, w.rows, w.checked) for w in found.workers))

    async def dispatcher(self, peer: str, report: DispatchReport) -> Heard:
        """What a stage of the ring has seen of workers.

        Raises:
            RefusedError: it is not one that the dispatch map names, or speaks of another model.
        """
        if peer not in self._dispatchers() or report.model != self._manifest.id:
            self.refused["report"] += 1
            raise RefusedError("only who is named by this model's dispatch map reports on workers", peer=peer)
        self._modes[peer] = {
            "mode": report.mode,
            "local_pairs": report.local_pairs,
            "remote_pairs": report.remote_pairs,
            **msgspec.structs.asdict(report.figures),
        }
        self._totals.told(peer, report.run, report.local_pairs, report.remote_pairs, report.figures)
        self._ring_heat[peer] = dict(report.heat)
        await self._take_caught(report.caught)
        self._count(peer, report.run, ((w.peer, w.rows, w.checked) for w in report.workers))
        return Heard()

    async def _take_caught(self, caught: Iterable[tuple[str, str]]) -> None:
        for peer, why in caught:
            if not self.admitted(peer):
                self.refused["unknown worker"] += 1  # nobody who could come here is kept out by it
            elif peer not in self._state.quarantine:
                await self._quarantine(peer, why[:300])

    async def _quarantine(self, peer: str, why: str) -> None:
        self._tell(Progress("problem", f"the worker {peer} is quarantined: {why}"))
        self._apply(market_messages.Caught(peer, why))
        self._retire[peer] = f"quarantined: {why}"
        self._worker_news.pop(peer, trio.Event()).set()
        await trio.to_thread.run_sync(self._ledger.quarantine, peer, why)

    def _count(self, dispatcher: str, run: int, work: Iterable[tuple[str, int, int]]) -> None:
        told: dict[tuple[str, str], int] = {}
        for peer, rows, checked in work:
            if self.admitted(peer):
                told[peer, "rows"], told[peer, "checked"] = rows, checked
            else:
                self.refused["unknown worker"] += 1  # nobody else can have given anything
        more = self._tallies.more(dispatcher, run, told)
        for peer in {peer for peer, _ in more}:
            rows, checked = more.get((peer, "rows"), 0), more.get((peer, "checked"), 0)
            before = self._given.get(peer, (0, 0))
            self._given[peer] = (before[0] + rows, before[1] + checked)
            self._rows += rows
            self._checked += checked

    async def _write_ledger(self) -> None:
        try:
            while True:
                await trio.sleep(LEDGER_SECONDS)
                await self.flush()
        finally:
            with trio.CancelScope(shield=True):  # milliseconds
                await self._write_given()  # not who takes part: at the end nobody does

    async def flush(self) -> None:
        """Write what was given since the last time, and who takes part."""
        await self._write_given()
        present = self._present()
        anybody = bool(present.workers or present.coordinators)
        if anybody or self._kept_somebody:
            await trio.to_thread.run_sync(self._ledger.keep, "roll", encode_roll(present))
        self._kept_somebody = anybody

    async def _write_given(self) -> None:
        given, self._given = self._given, {}
        if given:
            rows = [(peer, count, checked) for peer, (count, checked) in given.items()]
            await trio.to_thread.run_sync(self._ledger.add, rows, {"tallies": encode_tallies(self._tallies)})

    def statistics(self) -> ExpertsStatistics | None:
        """A snapshot, or None where the model has no experts."""
        return experts_statistics(
            self._state, self.name, trio.current_time(), self._totals, self._rows, self._checked
        )

    # -- what is shown --------------------------------------------------------------------------------------

    def demand(self, model: str | None) -> list[dict[str, object]]:
        """The body of ``GET /api/expert-demand``."""
        return market_views.demand(self._state, model)

    def recruitment(self) -> list[dict[str, object]]:
        """The body of ``GET /api/moe/recruitment``, with what each coordinator says of its dispatch."""
        found = market_views.recruitment(self._state, trio.current_time())
        for one in found:
            one["dispatch"] = dict(self._modes)
            one["refused_by_reason"] = dict(self.refused)
            one["covered_by"] = [
                {
                    "peer": worker.peer,
                    "ranges": worker.ranges,
                    "rate": worker.rate,
                    "device": worker.device,
                    "retiring": worker.retiring,
                }
                for worker in self._state.workers.values()
                if worker.model == one["model"]
            ]
        return found
