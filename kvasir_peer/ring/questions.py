"""What the market wants planned: its inputs as values, and the answer by the planner's pure functions.

Planning many peers takes longer than an event loop may stand still. So the market
(:mod:`kvasir_peer.ring.stage_market`) never plans: it says what it wants to know, goes on, and is told the answer
later; whoever runs it has the question answered in a worker thread. An answer counts only for the question that the
market would ask at that moment: where something has changed meanwhile, it asks again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvasir_peer.errors import PlanError
from kvasir_peer.ring.offers import Forecast, Ground, Planned, Slice
from kvasir_peer.ring.plan import Plan
from kvasir_peer.ring.planner import plan_ring
from kvasir_peer.ring.replanning import Swap, best_swap, better_ring, replan


@dataclass(frozen=True, slots=True)
class Better:
    """A ring planned anew, and what the present one should do."""

    planned: Planned
    present: Forecast


@dataclass(frozen=True, slots=True)
class Answer:
    """What came out, each part where its question asks for it.

    Attributes:
        planned: a plan, or what is missing.
        better: a ring that is so much better than the present one, if there is any.
        swap: a stage's place that somebody else would fill so much better, if there is any.
    """

    planned: Planned | None = None
    better: Better | None = None
    swap: Swap | None = None


@dataclass(frozen=True, slots=True)
class FirstRing:
    """A ring of whoever is there."""

    ground: Ground
    bridge: str
    plan_id: str
    epoch: int
    addresses: tuple[str, ...]

    def answer(self) -> Answer:
        """See :func:`~kvasir_peer.ring.planner.plan_ring`."""
        try:
            planned = plan_ring(
                self.ground,
                bridge=self.bridge,
                plan_id=self.plan_id,
                epoch=self.epoch,
                bridge_addresses=self.addresses,
            )
        except PlanError as error:
            planned = Planned(None, str(error), ())
        return Answer(planned)


@dataclass(frozen=True, slots=True)
class NextEpoch:
    """The next epoch of a plan.

    Attributes:
        plan: the present one.
        gone: stages that have no place any more.
        barred: peers that have failed: they get a place only if there is no other way.
        keeping: slices that peers without a place keep ready.
    """

    ground: Ground
    plan: Plan
    gone: frozenset[str]
    barred: frozenset[str] = frozenset()
    keeping: tuple[tuple[str, Slice], ...] = ()

    def answer(self) -> Answer:
        """See :func:`~kvasir_peer.ring.replanning.replan`."""
        planned = self._without(self.gone | self.barred)
        if planned.plan is None and self.barred:
            # Nobody else is there: one that has failed may do better this time.
            planned = self._without(self.gone)
        return Answer(planned)

    def _without(self, lost: frozenset[str]) -> Planned:
        return replan(self.plan, lost, self.ground, dict(self.keeping))


@dataclass(frozen=True, slots=True)
class BetterRing:
    """Whether the ring planned anew is so many times as good."""

    ground: Ground
    plan: Plan
    factor: float

    def answer(self) -> Answer:
        """See :func:`~kvasir_peer.ring.replanning.better_ring`."""
        found = better_ring(self.plan, self.ground, self.factor)
        return Answer(better=Better(*found) if found is not None else None)


@dataclass(frozen=True, slots=True)
class Standbys:
    """Who keeps which slice ready, and whether a ring with them would be better."""

    next_epoch: NextEpoch
    better: BetterRing

    def answer(self) -> Answer:
        """Both."""
        return replace(self.next_epoch.answer(), better=self.better.answer().better)


@dataclass(frozen=True, slots=True)
class BetterStage:
    """Whether somebody without a place would make the ring so many times as good in the place of a stage."""

    ground: Ground
    plan: Plan
    factor: float

    def answer(self) -> Answer:
        """See :func:`~kvasir_peer.ring.replanning.best_swap`."""
        return Answer(swap=best_swap(self.plan, self.ground, self.factor))


Question = FirstRing | NextEpoch | BetterRing | Standbys | BetterStage


def unanswered(question: Question, seconds: float) -> Answer:
    """What to go on with when planning did not come to its end in time."""
    if isinstance(question, BetterRing | BetterStage):
        return Answer()
    ground = question.next_epoch.ground if isinstance(question, Standbys) else question.ground
    why = f"planning with {len(ground.offers)} peers took over {seconds:.0f} s, and is tried again"
    return Answer(Planned(None, why, ()))
