"""The market of stages: who gets layers, who stands by, when the ring goes, and what follows when something breaks.

Pure: ``apply(state, event, now) -> (state, decisions)``. The bridge's ring manager turns polls, closed connections and
its own links into events, carries the decisions out, and answers each poll with :func:`order_for`. Planning takes
longer than an event may: it is asked for (:class:`Think`), and the answer is an event (:class:`Thought`).

The life of an epoch: a plan is made (:class:`Adopt`), every stage fetches, loads and reports ``loaded``, the ring goes
(:class:`Go`), the links stand (:class:`RingServes`). It ends when a stage is gone, reports that it broke, or does
not acknowledge; then :class:`Halt`, and the next plan.

What is believed about KV caches decides whether tokens stay right, so it is kept here and nowhere else: ``cached``
holds the places ``(peer, first, end)`` that a ring has served with, less every one whose peer was gone since, or has
said that its cache is lost. A plan names as fresh every stage that is not in ``cached``, however many plans came and
went in between, and whichever of them the head has seen.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from kvasir_peer.ring.offers import (
    Forecast,
    Ground,
    Links,
    Memory,
    ModelNeeds,
    Place,
    Planned,
    Slice,
    StageOffer,
    Wishes,
    layers_text,
)
from kvasir_peer.ring.plan import Plan
from kvasir_peer.ring.questions import (
    Answer,
    Better,
    BetterRing,
    BetterStage,
    FirstRing,
    NextEpoch,
    Question,
    Standbys,
)

StageState = Literal["idle", "fetching", "loading", "loaded", "serving", "broken"]

# A closed connection may be replaced by another path within this (seconds); a neighbour's word that the peer is lost
# makes it certain at once.
GONE_SECONDS = 3.0
# A peer is silent when its next poll is so much (seconds) overdue. With polls held for 10 s that is 14 s.
POLL_GRACE = 4.0
# A peer that a neighbour has lost must acknowledge the next epoch within this (seconds): its connection to the bridge
# may still look alive although the process is stopped.
SUSPECT_SECONDS = 3.0
# From the first sign of trouble to the next plan (seconds): who else was hit shows within it.
SETTLE_SECONDS = 0.4
# Without a number of stages to wait for, the ring is planned so long (seconds) after the last peer came.
GATHER_SECONDS = 3.0
# A lease lives by progress: a download or load that stands still for so long (seconds) is given to somebody else.
STUCK_SECONDS = 60.0
# From *go* until all links stand (seconds).
START_SECONDS = 45.0
# A peer that could not hold its place twice within this (seconds) gets none for as long again.
FAILURE_MEMORY = 180.0
FAILURES_ALLOWED = 2
# A leaving peer keeps its place so long (seconds) at most while its successor loads.
HANDOVER_SECONDS = 180.0
# Layers that nobody covers for so long (seconds) end the requests that wait for them.
GIVE_UP_SECONDS = 120.0
# A plan that could not be made is tried again after this (seconds) even if nothing seems to have changed.
LOOK_SECONDS = 5.0
# Pauses between plans that did not come to serve, or not for long (seconds): a ring that can't stand must not spin.
BACKOFF = (0.0, 0.5, 2.0, 5.0, 10.0)
# Loading again for what the first passes have shown must make the ring so much better (times its score, and seconds per
# token of one request); measurements are noisy, and everybody waits for it.
REBALANCE, REBALANCE_SECONDS = 1.25, 0.010
# A ring planned anew that is so much better is worth a word; what was computed and loaded would be lost with it.
WORTH_A_WORD = 1.1
# A stage's place goes to a latecomer that makes the ring so much better (times its score): measured passes differ by a
# tenth from one time to the next, and everybody waits while the newcomer computes its caches. If one of three even
# stages took no time at all, the ring would be 1.3 times as good.
SWAP = 1.2
# So long (seconds) a ring has served before its places are looked at, and so long the gain must have held before one
# changes hands: what is gone by then was noise.
SWAP_SETTLED, SWAP_HOLDS = 30.0, 60.0
# So much longer (seconds) a moment is waited for in which nothing is computed and nobody has to wait.
SWAP_PATIENCE = 300.0
# Between two such changes (seconds): with the gain that each must bring, a ring cannot go back and forth.
SWAP_PAUSE = 600.0
STABLE_SECONDS = 5.0  # of serving, after which the pauses begin anew
MAX_MEMBERS = 256


# --- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reported:
    """A poll of a peer that the bridge has let in. Fields as in :class:`kvasir_peer.ring.volunteering.Report`.

    Attributes:
        offer: with what it holds on disk and loaded.
        progress: bytes done of a download or load; only that it changes matters.
        wait: seconds for which the poll may be held.
    """

    peer: str
    offer: StageOffer
    state: StageState = "idle"
    plan: str = ""
    epoch: int = 0
    running: bool = False
    reason: str = ""
    lost: str = ""
    kept: bool = False
    leaving: bool = False
    progress: int = 0
    wait: float = 10.0


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The peer's last connection to the bridge has closed."""

    peer: str


@dataclass(frozen=True, slots=True)
class Connected:
    """The peer is connected again."""

    peer: str


@dataclass(frozen=True, slots=True)
class RingServes:
    """All links of the epoch stand, requests are submitted."""

    epoch: int


@dataclass(frozen=True, slots=True)
class RingBroke:
    """The bridge itself sees that the epoch can't go on; ``peer`` is on the other side of what broke, if known."""

    epoch: int
    why: str
    peer: str = ""


@dataclass(frozen=True, slots=True)
class LinksMeasured:
    """Newer times between peers."""

    links: Links


@dataclass(frozen=True, slots=True)
class AddressesChanged:
    """Where the bridge is reached from now on; it goes into the next plan."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed.

    Attributes:
        active: requests under way; a stage that nobody can replace leaves when there are none.
    """

    active: int = 0


@dataclass(frozen=True, slots=True)
class Thought:
    """The answer to a :class:`Think` that was asked under this name."""

    name: str
    question: Question
    answer: Answer


Event = (
    Reported
    | Disconnected
    | Connected
    | RingServes
    | RingBroke
    | LinksMeasured
    | AddressesChanged
    | Tick
    | Thought
)

# --- decisions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Adopt:
    """Sign this plan and answer the polls of its members with it."""

    plan: Plan
    forecast: Forecast | None
    places: tuple[Place, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Go:
    """Every stage is loaded: tell them to open their links, and open the bridge's own."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Halt:
    """The epoch does not go on: close its links; streams pause."""

    epoch: int
    why: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Answer the poll of this peer that is held: there is news, or its next poll is to show that it lives."""

    peer: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Nobody has covered the layers for too long: end the requests that wait, with this reason."""

    why: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something a person should read."""

    text: str


@dataclass(frozen=True, slots=True)
class Think:
    """Have a question answered (``question.answer()``, which takes long), and tell the answer by :class:`Thought`.

    A later question of the same name takes this one's place.
    """

    name: str
    question: Question


Decision = Adopt | Go | Halt | Wake | GiveUp | Note | Think


# --- state --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Member:
    """What is known of a peer.

    Attributes:
        due: when the last of its polls is answered at the latest; a report that is not held changes nothing in it.
    """

    peer: str
    joined: float
    report: Reported
    seen: float
    due: float
    gone_since: float | None = None
    progress_at: float = 0.0
    suspect_since: float | None = None
    failures: tuple[float, ...] = ()
    standby: Slice | None = None
    preload: bool = False
    leaving_since: float | None = None
    released: bool = False  # it may go, whatever becomes of its place

    @property
    def offer(self) -> StageOffer:
        return self.report.offer

    def barred(self, now: float) -> bool:
        """Whether it has failed too often to be given a place."""
        recent = [t for t in self.failures if now - t < FAILURE_MEMORY]
        return len(recent) >= FAILURES_ALLOWED

    def at(self, plan: Plan, *states: StageState) -> bool:
        """Whether it reports this epoch, and one of these states."""
        return (self.report.plan, self.report.epoch) == (plan.id, plan.epoch) and self.report.state in states


@dataclass(frozen=True, slots=True)
class ComingSwap:
    """Somebody gets ready to take a stage's place; ``since`` then the gain has held."""

    peer: str
    stage: str
    since: float


@dataclass
class MarketState:
    """One ring's market. :func:`apply` never changes a state that it was given.

    Attributes:
        needs, wishes, links, memory: as in :class:`~kvasir_peer.ring.offers.Ground`.
        bridge, plan_id: as for :func:`~kvasir_peer.ring.planner.plan_ring`.
        bridge_addresses: where the bridge is reached.
        members: by peer id.
        plan: of the present epoch, also while it is halted.
        phase: ``gathering`` peers, ``preparing`` (stages load), ``starting`` (links), ``serving``, or ``mending``
            (halted, no plan covers the layers yet).
        missing: what stands between a client and an answer, when nothing is served.
        places: what was said to each peer.
        has_served: whether a ring has stood at all.
        cached: places whose KV cache is known to be there.
        epoch: the highest that was ever used.
    """

    needs: ModelNeeds
    wishes: Wishes
    bridge: str
    plan_id: str
    links: Links = field(default_factory=Links)
    bridge_addresses: tuple[str, ...] = ()
    memory: Memory | None = None
    members: dict[str, Member] = field(default_factory=dict)
    plan: Plan | None = None
    phase: Literal["gathering", "preparing", "starting", "serving", "mending"] = "gathering"
    missing: str = ""
    places: tuple[Place, ...] = ()
    forecast: Forecast | None = None
    has_served: bool = False
    cached: frozenset[tuple[str, int, int]] = frozenset()
    epoch: int = 0
    phase_since: float = 0.0
    trouble_since: float | None = None
    trouble: str = ""
    suspected: bool = False  # whether ``trouble`` names a peer that was lost
    uncovered_since: float | None = None
    gave_up: bool = False
    attempts: int = 0
    last_join: float = 0.0
    planned_at: float = 0.0
    refused: int = 0
    looked_at: float = 0.0
    stale: bool = True  # something changed since a plan was last looked for in vain
    active: int = 0
    rebalanced: bool = False
    standing: object = None  # whom standbys were last sought for
    asked: Mapping[str, Question] = field(default_factory=dict)  # and not answered yet
    answers: Mapping[str, tuple[Question, Answer]] = field(default_factory=dict)  # the last one of each name
    swap: ComingSwap | None = None
    swapped_at: float = -math.inf

    @property
    def mends(self) -> bool:
        """Whether a ring that has served is on its way back: nobody is known to be missing."""
        return self.has_served and self.phase != "serving" and self.uncovered_since is None

    def ground(self, offers: Iterable[StageOffer]) -> Ground:
        """What planning goes by, with these offers."""
        return Ground(tuple(offers), self.needs, self.links, self.wishes, self.memory)

    def summary(self) -> Mapping[str, object]:
        """For the status page."""
        return {
            "phase": self.phase,
            "epoch": self.epoch,
            "missing": self.missing,
            "members": len(self.members),
            "standbys": sum(m.standby is not None for m in self.members.values()),
            "refused": self.refused,
        }


@dataclass(frozen=True, slots=True)
class Order:
    """What a peer should do.

    Attributes:
        kind: ``stage`` to follow ``plan``; ``standby`` to keep ``slice`` ready; ``wait``; ``retire`` to give all back.
        why: in words, for its owner.
        plan: the present plan, for a stage.
        go: the links may be opened.
        slice: layers ``(first, end)`` to hold.
        preload: whether a standby should load them as well (memory allows it, or it is about to take over).
    """

    kind: Literal["stage", "standby", "wait", "retire"]
    why: str = ""
    plan: Plan | None = None
    go: bool = False
    slice: Slice | None = None
    preload: bool = False


def order_for(state: MarketState, peer: str) -> Order:
    """The standing order of a peer."""
    member = state.members.get(peer)
    if member is None:
        return Order("wait", "the bridge does not know this peer yet")
    why = next((p.why for p in state.places if p.peer == peer), "")
    plan = state.plan
    if member.released:
        return Order("retire", "nobody could take its place")
    if plan is not None and plan.index_of(peer) is not None:
        return Order(
            "stage",
            why,
            plan,
            go=state.phase in ("starting", "serving") and member.at(plan, "loaded", "serving"),
        )
    if member.report.leaving:
        return Order("retire", "its place is with another peer now")
    if member.standby is not None:
        return Order("standby", why, slice=member.standby, preload=member.preload)
    return Order("wait", why or state.missing)


# --- the machine --------------------------------------------------------------------------------------------------


def apply(state: MarketState, event: Event, now: float) -> tuple[MarketState, list[Decision]]:
    """Take an event in; returns the next state and what is to be done."""
    market = _Market(copy.copy(state), now)
    market.state.members = dict(state.members)
    market.take(event)
    market.decide()
    market.wake(state)
    return market.state, market.decisions


class _Market:
    """One step: works on a copy of the state that nobody else sees yet."""

    def __init__(self, state: MarketState, now: float) -> None:
        self.state = state
        self.now = now
        self.decisions: list[Decision] = []

    # --- taking events in --------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        state = self.state
        match event:
            case Reported():
                self._reported(event)
            case Disconnected(peer):
                if peer in state.members and state.members[peer].gone_since is None:
                    self._set(peer, gone_since=self.now)
            case Connected(peer):
                if peer in state.members:
                    self._set(peer, gone_since=None)
            case RingServes(epoch):
                if state.plan is not None and epoch == state.plan.epoch and state.phase == "starting":
                    self._serves(state.plan)
            case RingBroke(epoch, why, peer):
                if state.plan is not None and epoch == state.plan.epoch:
                    self._trouble(why, peer)
            case LinksMeasured(links):
                state.links = links
            case AddressesChanged(addresses):
                state.bridge_addresses = addresses
            case Tick(active):
                state.active = active
            case Thought(name, question, answer):
                if state.asked.get(name) == question:
                    state.asked = {n: q for n, q in state.asked.items() if n != name}
                    state.answers = {**state.answers, name: (question, answer)}

    def _reported(self, event: Reported) -> None:
        state = self.state
        known = state.members.get(event.peer)
        if known is None:
            if len(state.members) >= MAX_MEMBERS:
                state.refused += 1
                return
            known = Member(event.peer, self.now, event, self.now, self.now, progress_at=self.now)
            state.last_join = self.now
            self.decisions.append(Note(f"{event.peer} offers to be a stage"))
        changed = (event.state, event.progress, event.epoch) != (
            known.report.state,
            known.report.progress,
            known.report.epoch,
        )
        if known.report.offer != event.offer or event.peer not in state.members:
            state.stale = True
        leaving = known.leaving_since if known.leaving_since is not None else self.now
        state.members[event.peer] = replace(
            known,
            report=event,
            seen=self.now,
            due=max(known.due, self.now + event.wait),
            gone_since=None,
            suspect_since=None,  # it lives
            progress_at=self.now if changed else known.progress_at,
            leaving_since=leaving if event.leaving else None,
        )
        plan = state.plan
        if plan is None or (event.plan, event.epoch) != (plan.id, plan.epoch):
            return
        index = plan.index_of(event.peer)
        if index is None:
            return
        # A serving stage fills its cache, whatever it had when it was loaded.
        if not event.kept and (event.state == "broken" or state.phase == "preparing"):
            # With its slice loaded it means that the head believed what is not so, of this cache and maybe of others:
            # all is computed again once, where one stage after the other would break an epoch of its own.
            stage = plan.stages[index]
            mistaken = event.state == "broken" and event.offer.loaded == (stage.first, stage.end)
            state.cached = frozenset(c for c in state.cached if not mistaken and c[0] != event.peer)
        if event.state == "broken" and not known.at(plan, "broken"):
            if not event.lost and state.phase in ("preparing", "starting"):
                failures = tuple(t for t in known.failures if self.now - t < FAILURE_MEMORY)
                self._set(event.peer, failures=(*failures, self.now))
            self._trouble(event.reason or f"{event.peer} could not go on", event.lost)

    def _serves(self, plan: Plan) -> None:
        state = self.state
        self._phase("serving")
        state.has_served = True
        state.cached = frozenset((s.peer, s.first, s.end) for s in plan.stages)
        state.missing, state.uncovered_since, state.gave_up = "", None, False

    def _trouble(self, why: str, suspect: str = "") -> None:
        state = self.state
        if state.trouble_since is not None:
            if suspect and not state.suspected:
                # The first word came from somebody who was told by others: this one names who was lost.
                state.trouble, state.suspected = why, True
                state.missing = f"the ring is being mended: {why}"
        else:
            state.trouble_since, state.trouble, state.suspected = self.now, why, bool(suspect)
            if state.phase == "serving" and self.now - state.phase_since > STABLE_SECONDS:
                state.attempts = 0
            if state.phase in ("starting", "serving") and state.plan is not None:
                self.decisions.append(Halt(state.plan.epoch, why))
                self._phase("mending")
                state.missing = f"the ring is being mended: {why}"
        member = state.members.get(suspect)
        if member is not None and member.suspect_since is None:
            self._set(suspect, suspect_since=self.now)

    # --- deciding ----------------------------------------------------------------------------------------

    def decide(self) -> None:
        state = self.state
        self._bury()
        plan = state.plan
        if plan is None:
            self._gather()
            self._give_up()
            return
        lost = self._lost(plan)
        if lost:
            self._trouble(f"{lost[0]} {'leaves' if lost[0] in state.members else 'is gone'}")
        for stage in plan.stages:
            member = state.members.get(stage.peer)
            if member is not None and self._stuck(member, plan):
                failures = (self.now,) * FAILURES_ALLOWED
                self._set(stage.peer, failures=failures, progress_at=self.now)
                self._trouble(f"{stage.peer} made no progress for {STUCK_SECONDS:.0f} s")
        if state.phase == "starting" and self.now - state.phase_since > START_SECONDS:
            self._trouble(f"the links did not stand within {START_SECONDS:.0f} s")
        if state.trouble_since is not None:
            self._mend(plan)
        elif state.phase == "preparing":
            self._start(plan)
        elif state.phase == "serving":
            self._hand_over(plan)
            if state.phase == "serving":
                self._improve(plan)
        if state.uncovered_since is not None:
            self._release()
        self._assign_standbys()
        self._give_up()

    def _bury(self) -> None:
        """Forget whoever is gone."""
        for member in list(self.state.members.values()):
            why = self._gone(member)
            if why:
                del self.state.members[member.peer]
                self.state.stale = True
                self.state.cached = frozenset(c for c in self.state.cached if c[0] != member.peer)
                if self._has_place(member.peer):
                    self.state.attempts = max(0, self.state.attempts - 1)  # no fault of the plan's
                self.decisions.append(Note(f"{member.peer} is gone: {why}"))

    def _gone(self, member: Member) -> str:
        now = self.now
        if member.gone_since is not None:
            if member.suspect_since is not None:
                return "its connection closed, and its neighbour has lost it"
            if now - member.gone_since > GONE_SECONDS:
                return "its connection closed"
        if now > member.due + POLL_GRACE:
            return f"it has been silent for {now - member.seen:.0f} s"
        since = member.suspect_since
        asked = self.state.planned_at
        if since is not None and asked >= since and now - asked > SUSPECT_SECONDS:
            return "its neighbour has lost it, and it does not acknowledge the next epoch"
        return ""

    def _stuck(self, member: Member, plan: Plan) -> bool:
        if member.at(plan, "loaded", "serving", "broken"):
            return False
        return self.now - max(member.progress_at, self.state.planned_at) > STUCK_SECONDS

    def _offers(self) -> list[StageOffer]:
        """Of everybody who may have a place."""
        return [
            m.offer for m in self.state.members.values() if not m.barred(self.now) and not m.report.leaving
        ]

    def _think(self, name: str, question: Question) -> Answer | None:
        """The answer to a question; None while it is not known, and then somebody is at it."""
        state = self.state
        known = state.answers.get(name)
        if known is not None and known[0] == question:
            return known[1]
        if state.asked.get(name) != question:
            state.asked = {**state.asked, name: question}
            self.decisions.append(Think(name, question))
        return None

    def _gather(self) -> None:
        state = self.state
        quiet = self.now - state.last_join >= GATHER_SECONDS
        if state.wishes.stages is None and not quiet:
            state.missing = state.missing or "peers are gathering"
            return
        if not self._worth_looking():
            return
        ground = state.ground(self._offers())
        question = FirstRing(ground, state.bridge, state.plan_id, state.epoch + 1, state.bridge_addresses)
        planned = self._planned("ring", question)
        if planned is not None:
            self._adopt(planned, "the ring is complete")

    def _planned(self, name: str, question: FirstRing | NextEpoch) -> Planned | None:
        """A plan that was looked for, or why there is none; None while somebody is at it."""
        state = self.state
        answer = self._think(name, question)
        if answer is None or answer.planned is None:
            return None
        state.stale, state.looked_at = False, self.now
        if answer.planned.plan is None:
            # It may be one that was not thought to its end: the next look begins anew.
            state.answers = {n: a for n, a in state.answers.items() if n != name}
        return answer.planned

    def _worth_looking(self) -> bool:
        """Whether planning may give another answer than last time: something has changed, or a bar may have ended."""
        state = self.state
        return state.stale or state.uncovered_since is None or self.now - state.looked_at >= LOOK_SECONDS

    def _mend(self, plan: Plan) -> None:
        state = self.state
        since = state.trouble_since
        assert since is not None
        pause = BACKOFF[min(state.attempts, len(BACKOFF) - 1)]
        if self.now < max(since + SETTLE_SECONDS, state.planned_at + pause):
            return
        if not self._worth_looking():
            return
        # The pauses bound how often one that has failed is tried again.
        barred = frozenset(m.peer for m in state.members.values() if m.barred(self.now))
        planned = self._planned("mend", self._next_epoch(plan, frozenset(self._lost(plan)), barred))
        if planned is not None:
            self._adopt(planned, state.trouble)

    def _next_epoch(
        self,
        plan: Plan,
        gone: frozenset[str],
        barred: frozenset[str] = frozenset(),
        keeping: Mapping[str, Slice] | None = None,
    ) -> NextEpoch:
        state = self.state
        members = [m.offer for m in state.members.values() if m.peer not in gone]
        # A leaving peer keeps its place in trouble, but gets no new one.
        members = [
            o
            for o in members
            if not state.members[o.peer].report.leaving
            or (plan.index_of(o.peer) is not None and not state.members[o.peer].released)
        ]
        if keeping is None:
            keeping = {m.peer: m.standby for m in state.members.values() if m.standby is not None}
        return NextEpoch(
            state.ground(members),
            replace_epoch(plan, state.epoch, state.bridge_addresses),
            gone,
            barred,
            tuple(keeping.items()),
        )

    def _adopt(self, planned: Planned, why: str) -> None:
        state = self.state
        state.places = planned.places
        if planned.plan is None:
            if state.has_served and planned.missing != state.missing:
                self.decisions.append(Note(f"the ring can't be mended yet: {planned.missing}"))
            state.missing = planned.missing
            if state.uncovered_since is None:
                state.uncovered_since = self.now
            if state.plan is not None:
                self._phase("mending")
            return
        plan = self._with_fresh(msgspec.structs.replace(planned.plan, created=self.now))
        state.plan, state.forecast, state.epoch = plan, planned.forecast, plan.epoch
        state.planned_at = self.now
        state.answers, state.swap = {}, None
        state.attempts += 1
        state.trouble_since, state.trouble, state.uncovered_since = None, "", None
        state.missing = "stages are loading"
        for stage in plan.stages:
            self._set(stage.peer, standby=None, preload=False)
        self._phase("preparing")
        self.decisions.append(Adopt(plan, planned.forecast, planned.places, why))

    def _with_fresh(self, plan: Plan) -> Plan:
        """Name the stages whose KV cache is not known to be there."""
        cached = self.state.cached
        return replace_fresh(
            plan, tuple(s.peer for s in plan.stages if (s.peer, s.first, s.end) not in cached)
        )

    def _start(self, plan: Plan) -> None:
        state = self.state
        members = [state.members[s.peer] for s in plan.stages]
        if not all(m.at(plan, "loaded", "serving") for m in members):
            waiting = [m for m in members if not m.at(plan, "loaded", "serving")]
            state.missing = (
                f"{len(waiting)} of {len(members)} stages are not loaded yet ({waiting[0].report.state})"
            )
            return
        right = self._with_fresh(plan)
        if right.fresh != plan.fresh:
            # A cache was lost while the stages were loading: the head must know before anything is computed.
            state.epoch += 1
            again = replace_epoch(right, state.epoch, state.bridge_addresses)
            state.plan, state.planned_at = again, self.now
            self._phase("preparing")
            self.decisions.append(Adopt(again, state.forecast, state.places, "a stage has lost its cache"))
            return
        if not state.has_served and self._rebalance(plan):
            return
        self._phase("starting")
        state.missing = "the stages are connecting to each other"
        self.decisions.append(Go(plan))

    def _rebalance(self, plan: Plan) -> bool:
        """Cut the layers again, once, where the passes and links measured meanwhile show a much better ring.

        True where the ring does not go with this plan, or not yet.
        """
        state = self.state
        offers = self._offers()
        stages = [o for o in offers if plan.index_of(o.peer) is not None]
        if state.rebalanced or any(not (o.pass_base or o.pass_row) for o in stages):
            return False
        answer = self._think("rebalance", BetterRing(state.ground(offers), plan, REBALANCE))
        if answer is None:
            return True
        state.rebalanced = True
        if answer.better is None:
            return False
        planned, present = answer.better.planned, answer.better.present
        assert planned.forecast is not None
        if 1 / present.alone - 1 / planned.forecast.alone < REBALANCE_SECONDS:
            return False
        self._adopt(
            planned,
            f"measured passes show a better cut: {planned.forecast.alone:.1f} tokens/s alone instead of "
            f"{present.alone:.1f}",
        )
        return True

    # --- standbys and leaving ------------------------------------------------------------------------------

    def _assign_standbys(self) -> None:
        """Peers without a place keep a slice ready; planning has said which, newcomers are given one here."""
        state = self.state
        plan = state.plan
        if plan is None:
            return
        valid = {(s.first, s.end) for s in plan.stages}
        spare = [
            m
            for m in state.members.values()
            if not self._has_place(m.peer) and not m.report.leaving and not m.barred(self.now)
        ]
        keeping = {m.peer: m.standby for m in spare if m.standby is not None and m.standby in valid}
        keeping = self._spread(keeping, valid)
        if all(m.peer in keeping for m in spare) or self._lost(plan):
            return
        standing = (plan.epoch, tuple((m.peer, m.offer.memory, m.offer.expansion, m.standby) for m in spare))
        if standing == state.standing:
            return
        question = Standbys(
            self._next_epoch(plan, frozenset(), keeping=keeping),
            BetterRing(state.ground(self._offers()), plan, WORTH_A_WORD),
        )
        answer = self._think("standbys", question)
        if answer is None or answer.planned is None:
            return
        state.standing, planned = standing, answer.planned
        if planned.plan is None:
            return
        said = {p.peer: p for p in state.places if p.role == "stage"}
        state.places = tuple(said.get(p.peer, p) for p in planned.places)
        parts = {p.peer: p.slice for p in state.places if p.role == "standby"}
        for member in spare:
            if member.peer not in keeping:
                self._set(member.peer, standby=parts.get(member.peer), preload=member.peer in parts)
        if answer.better is not None:
            self._say_who_would_help(answer.better)

    def _say_who_would_help(self, better: Better) -> None:
        """Tell both owners of a latecomer that would make the ring better if it were planned anew."""
        state = self.state
        planned, present = better.planned, better.present
        assert planned.plan is not None and planned.forecast is not None
        helpers = [s.peer for s in planned.plan.stages if not self._has_place(s.peer)]
        words = (
            f"planned anew with it, the ring would do {planned.forecast.alone:.1f} tokens/s alone and "
            f"{planned.forecast.together:.1f} together, now it does {present.alone:.1f} and {present.together:.1f}"
        )
        for peer in helpers:
            self.decisions.append(Note(f"{peer} would make the ring better: {words}"))
        state.places = tuple(
            replace(p, why=f"{p.why}; {words}") if p.peer in helpers else p for p in state.places
        )

    def _spread(self, keeping: dict[str, Slice], valid: set[Slice]) -> dict[str, Slice]:
        """Free one standby of a slice that has several, while another slice has none."""
        counts = Counter(keeping.values())
        coming = self.state.swap.peer if self.state.swap is not None else ""
        doubled = [peer for peer, part in keeping.items() if counts[part] > 1 and peer != coming]
        if not doubled or all(counts[part] for part in valid):
            return keeping
        youngest = max(doubled, key=lambda peer: (self.state.members[peer].joined, peer))
        return {peer: part for peer, part in keeping.items() if peer != youngest}

    def _has_place(self, peer: str) -> bool:
        return self.state.plan is not None and self.state.plan.index_of(peer) is not None

    def _hand_over(self, plan: Plan) -> None:
        """Give a leaving peer's place to somebody else, who loads before the ring is stopped for it."""
        state = self.state
        for stage in plan.stages:
            member = state.members[stage.peer]
            if member.leaving_since is None:
                continue
            part = (stage.first, stage.end)
            answer = self._think(f"without {stage.peer}", self._next_epoch(plan, frozenset({stage.peer})))
            if answer is None or answer.planned is None:
                continue
            planned = answer.planned
            if planned.plan is None:
                state.places = tuple(
                    replace(p, why=f"it cannot leave yet: {planned.missing}") if p.peer == stage.peer else p
                    for p in state.places
                )
                if not state.active:
                    self._set(stage.peer, released=True)
                    self._trouble(f"{stage.peer} leaves: {planned.missing}")
                    return
                continue
            successor = next((s.peer for s in planned.plan.stages if (s.first, s.end) == part), None)
            waited = self.now - member.leaving_since
            if successor is not None and waited < HANDOVER_SECONDS:
                heir = state.members[successor]
                if heir.offer.loaded != part:
                    if heir.standby != part or not heir.preload:
                        self._set(successor, standby=part, preload=True)
                    continue
            why = f"{stage.peer} leaves, {layers_text(part)} go to {successor or 'its neighbours'}"
            self.decisions.append(Halt(plan.epoch, why))
            state.attempts = 0
            self._adopt(planned, why)
            return

    def _improve(self, plan: Plan) -> None:
        """Give a stage's place to a latecomer that fills it much better: it loads first, then the place changes hands.

        All others keep their layers and their caches. Whoever gives the place up stands by with its layers.
        """
        state = self.state
        calm = (
            self.now - state.phase_since >= SWAP_SETTLED
            and self.now - state.swapped_at >= SWAP_PAUSE
            and all(state.members[stage.peer].leaving_since is None for stage in plan.stages)
        )
        if not calm:
            state.swap = None
            return
        present = replace_epoch(plan, state.epoch, state.bridge_addresses)
        answer = self._think("swap", BetterStage(state.ground(self._offers()), present, SWAP))
        if answer is None:
            return
        found = answer.swap
        if found is None:
            state.swap = None
            return
        coming = state.swap
        if coming is None or (coming.peer, coming.stage) != (found.peer, found.stage):
            coming = state.swap = ComingSwap(found.peer, found.stage, self.now)
        heir = state.members[found.peer]
        if heir.offer.loaded != found.part:
            if heir.standby != found.part or not heir.preload:
                self._set(found.peer, standby=found.part, preload=True)
            return
        held = self.now - coming.since
        if held < SWAP_HOLDS or (state.active and held < SWAP_HOLDS + SWAP_PATIENCE):
            return
        assert found.planned.forecast is not None
        why = (
            f"{layers_text(found.part)} go from {found.stage} to {found.peer}, which makes the ring better: "
            f"{found.planned.forecast.alone:.1f} tokens/s alone instead of {found.present.alone:.1f}"
        )
        self.decisions.append(Halt(plan.epoch, why))
        state.swapped_at, state.attempts = self.now, 0
        self._adopt(found.planned, why)

    def _release(self) -> None:
        """Nothing is computed, and nothing would be lost: let whoever leaves go."""
        for member in list(self.state.members.values()):
            if member.leaving_since is not None and not member.released:
                self._set(member.peer, released=True)

    def _lost(self, plan: Plan) -> list[str]:
        """Stages whose peers are gone, or may go."""
        members = self.state.members
        return [s.peer for s in plan.stages if s.peer not in members or members[s.peer].released]

    def _give_up(self) -> None:
        state = self.state
        since = state.uncovered_since
        if since is None or state.gave_up or not state.has_served:
            return
        if self.now - since > GIVE_UP_SECONDS:
            state.gave_up = True
            self.decisions.append(GiveUp(f"nobody has come for {GIVE_UP_SECONDS:.0f} s: {state.missing}"))

    # --- small things --------------------------------------------------------------------------------------

    def _set(self, peer: str, **changes: object) -> None:
        self.state.members[peer] = replace(self.state.members[peer], **changes)  # type: ignore[arg-type]

    def _phase(self, phase: Literal["gathering", "preparing", "starting", "serving", "mending"]) -> None:
        self.state.phase, self.state.phase_since = phase, self.now

    def wake(self, before: MarketState) -> None:
        """Whoever has another order than before is to hear of it; whoever is suspected of being dead must answer."""
        for peer, member in self.state.members.items():
            known = before.members.get(peer)
            if known is None:
                continue
            suspected = member.suspect_since is not None and known.suspect_since is None
            if suspected or order_for(self.state, peer) != order_for(before, peer):
                self.decisions.append(Wake(peer))


def replace_epoch(plan: Plan, epoch: int, addresses: tuple[str, ...]) -> Plan:
    """The plan under another epoch, with the bridge's present addresses."""
    return msgspec.structs.replace(plan, epoch=epoch, bridge_addresses=addresses or plan.bridge_addresses)


def replace_fresh(plan: Plan, fresh: tuple[str, ...]) -> Plan:
    """The plan with other stages named fresh."""
    return msgspec.structs.replace(plan, fresh=fresh)
