"""The next epoch of a plan, when stages are lost or leave."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvasir_peer.ring.offers import (
    Forecast,
    Ground,
    Place,
    Planned,
    Slice,
    StageOffer,
    layers_text,
)
from kvasir_peer.ring.plan import Plan
from kvasir_peer.ring.planner import MAX_CANDIDATES, Search, assemble, plan_ring, standbys

# Where neighbours share the layers of a lost stage, borders tried for each gap.
BORDERS_TRIED = 12


def replan(
    plan: Plan,
    lost: Iterable[str],
    ground: Ground,
    keeping: Mapping[str, Slice] | None = None,
) -> Planned:
    """The next epoch of a plan, without the peers that were lost.

    Survivors keep their layers where that is possible at all. Each lost stage goes, by preference, to a peer that has
    its slice loaded, then to one that has it on disk, then to any that can hold it, then to its neighbours; when
    none of that covers the layers, the ring is planned anew from whoever is left. No peer ever gets all layers.

    A peer that has come to say that its engine can't hold its slice loses it to another that can; where there is none,
    the ring is planned anew, and it may get fewer layers.

    Args:
        plan: the present one.
        lost: peers that have no place any more.
        ground: with the offers of everybody who is there, survivors included.
        keeping: slices that peers without a place keep ready.
    """
    gone = set(lost)
    here = {offer.peer: offer for offer in ground.offers if offer.peer not in gone}
    ground = replace(ground, offers=tuple(here.values()), wishes=replace(ground.wishes, dtype=plan.dtype))
    search = Search(ground, plan.bridge)
    stages: list[StageOffer | None] = [here.get(stage.peer) for stage in plan.stages]
    parts: list[Slice] = [(stage.first, stage.end) for stage in plan.stages]
    too_large = {
        i
        for i, offer in enumerate(stages)
        if offer is not None and offer.loaded != parts[i] and not search.fits(offer, *parts[i])
    }
    stages = [None if i in too_large else offer for i, offer in enumerate(stages)]
    words: dict[str, str] = {}
    taken = {offer.peer for offer in stages if offer is not None}
    for i in [i for i, offer in enumerate(stages) if offer is None]:
        substitute = _substitute(
            search, parts[i], [o for o in here.values() if o.peer not in taken], stages, i
        )
        if substitute is not None:
            offer, how = substitute
            stages[i] = offer
            taken.add(offer.peer)
            words[offer.peer] = f"{layers_text(parts[i])}, in place of {plan.stages[i].peer}: {how}"
    if any(offer is None for offer in stages):
        # Neighbours would leave the one with too much without anything.
        merged = None if too_large else _merge(search, stages, parts)
        if merged is None:
            return _anew(plan, ground, stages=None)
        before = {o.peer: parts[i] for i, o in enumerate(stages) if o is not None}
        kept_stages, parts = merged
        stages = list(kept_stages)
        for offer, part in zip(kept_stages, parts, strict=True):
            if before[offer.peer] != part:
                words[offer.peer] = (
                    f"{layers_text(part)}: it takes over from its neighbour, as no standby fits"
                )
    order = [offer for offer in stages if offer is not None]
    cuts = [0, *(end for _, end in parts)]
    made = assemble(search, order, cuts, plan.id, plan.epoch + 1, plan.bridge_addresses)
    forecast = search.forecast(order, cuts)
    places = [
        Place(o.peer, "stage", words.get(o.peer, f"{layers_text(parts[i])}: it keeps its place"), parts[i])
        for i, o in enumerate(order)
    ]
    members = {o.peer for o in order}
    spare = [o for o in here.values() if o.peer not in members]
    places += standbys(search, made, spare, forecast, order, {}, keeping)
    return Planned(made, "", tuple(places), forecast)


def forecast_now(plan: Plan, ground: Ground) -> Forecast | None:
    """What a plan's ring should do by what is known now; None where one of its peers is not there."""
    present = _present(plan, ground)
    if present is None:
        return None
    search, order, cuts = present
    return search.forecast(order, cuts)


def better_ring(plan: Plan, ground: Ground, factor: float) -> tuple[Planned, Forecast] | None:
    """A ring planned anew, where it would be so many times as good; with the forecast of the present one."""
    present = forecast_now(plan, ground)
    planned = _anew(plan, ground, ground.wishes.stages)
    if present is None or planned.plan is None or planned.forecast is None:
        return None
    return (planned, present) if planned.forecast.score > factor * present.score else None


@dataclass(frozen=True, slots=True)
class Swap:
    """A stage's place that somebody else would fill better.

    Attributes:
        peer, stage: who would come, and in whose place.
        part: the layers.
        planned: the next epoch with it; all others keep their layers.
        present: what the ring should do as it is.
    """

    peer: str
    stage: str
    part: Slice
    planned: Planned
    present: Forecast


def best_swap(plan: Plan, ground: Ground, factor: float) -> Swap | None:
    """The one change of a stage's peer that makes the ring best, where that is so many times as good.

    Only what was measured counts, of the two peers and of the ways between the newcomer and its neighbours: a guess
    would be a reason to change the stage back as soon as it is measured.
    """
    found = _present(plan, ground)
    if found is None:
        return None
    search, order, cuts = found
    present = search.forecast(order, cuts)
    members = {offer.peer for offer in order}
    spare = [offer for offer in ground.offers if offer.peer not in members and _measured(offer)]
    spare = sorted(spare, key=lambda o: (o.pass_base + o.pass_row, o.peer))[:MAX_CANDIDATES]
    best: tuple[float, str, int, StageOffer] | None = None
    for i, stage in enumerate(order):
        near = (order[i - 1], order[(i + 1) % len(order)])
        if stage.bridge or not _measured(stage):
            continue
        for offer in spare:
            if not all(ground.links.measured(offer.peer, other.peer) for other in near):
                continue
            if not search.fits(offer, cuts[i], cuts[i + 1]):
                continue
            score = search.forecast([*order[:i], offer, *order[i + 1 :]], cuts).score
            if score > factor * present.score and (best is None or (score, offer.peer) > best[:2]):
                best = (score, offer.peer, i, offer)
    if best is None:
        return None
    _, _, i, newcomer = best
    part, replaced = (cuts[i], cuts[i + 1]), order[i]
    order = [*order[:i], newcomer, *order[i + 1 :]]
    forecast = search.forecast(order, cuts)
    made = assemble(search, order, cuts, plan.id, plan.epoch + 1, plan.bridge_addresses)
    words = (
        f"{layers_text(part)}, in place of {replaced.peer}: the ring does {forecast.alone:.1f} tokens/s alone and "
        f"{forecast.together:.1f} together with it, {present.alone:.1f} and {present.together:.1f} without"
    )
    places = [
        Place(
            o.peer,
            "stage",
            words if o is newcomer else f"{layers_text((cuts[j], cuts[j + 1]))}: it keeps its place",
            (cuts[j], cuts[j + 1]),
        )
        for j, o in enumerate(order)
    ]
    left = [o for o in ground.offers if o.peer not in {o.peer for o in order}]
    places += standbys(search, made, left, forecast, order, {}, {replaced.peer: part})
    return Swap(newcomer.peer, replaced.peer, part, Planned(made, "", tuple(places), forecast), present)


def _present(plan: Plan, ground: Ground) -> tuple[Search, list[StageOffer], list[int]] | None:
    """A plan's ring as the search sees it, its stages and cuts; None where one of its peers is not there."""
    here = {offer.peer: offer for offer in ground.offers}
    order = [here[stage.peer] for stage in plan.stages if stage.peer in here]
    if len(order) < len(plan.stages):
        return None
    wishes = replace(ground.wishes, dtype=plan.dtype, widths=plan.widths)
    search = Search(replace(ground, wishes=wishes), plan.bridge)
    return search, order, [0, *(stage.end for stage in plan.stages)]


def _measured(offer: StageOffer) -> bool:
    return offer.pass_base > 0 or offer.pass_row > 0


def _substitute(
    search: Search,
    part: Slice,
    spare: Sequence[StageOffer],
    stages: Sequence[StageOffer | None],
    place: int,
) -> tuple[StageOffer, str] | None:
    able = [o for o in spare if search.fits(o, *part)]
    if not able:
        return None
    near = [o for o in (stages[place - 1], stages[(place + 1) % len(stages)]) if o is not None]

    def cost(offer: StageOffer) -> tuple[int, float]:
        readiness = 0 if offer.loaded == part else 1 if part in offer.on_disk else 2
        way = sum(search.links.between(offer.peer, o.peer).seconds for o in near)
        return readiness, offer.line(search.needs, *part).seconds(1) + way

    best = min(able, key=lambda o: (*cost(o), o.peer))
    return best, ("it has them loaded", "it has them on disk", "it fetches them")[cost(best)[0]]


def _merge(
    search: Search, stages: Sequence[StageOffer | None], parts: Sequence[Slice]
) -> tuple[list[StageOffer], list[Slice]] | None:
    """Let neighbours share the layers of the places that are empty; None when fewer than two stages would be left."""
    survivors = [(offer, parts[i]) for i, offer in enumerate(stages) if offer is not None]
    if len(survivors) < 2:
        return None
    order = [offer for offer, _ in survivors]
    best: tuple[float, list[int]] | None = None
    # Each gap between neighbouring survivors is cut once; the ends go to the outermost ones.
    options = []
    for (_, left), (_, right) in itertools.pairwise(survivors):
        step = max(1, (right[0] - left[1]) // (BORDERS_TRIED - 1))
        options.append([*range(left[1], right[0], step), right[0]])
    for cuts in itertools.product(*options):
        whole = [0, *cuts, search.needs.n_layer]
        if all(search.fits(o, whole[i], whole[i + 1]) for i, o in enumerate(order)):
            moved = sum((whole[i], whole[i + 1]) != part for i, (_, part) in enumerate(survivors))
            # Each survivor whose layers change has to load and compute again, which is a pause for everybody.
            score = search.forecast(order, whole).score / (1.0 + 0.5 * moved)
            if best is None or score > best[0]:
                best = (score, whole)
    if best is None:
        return None
    whole = best[1]
    return order, [(whole[i], whole[i + 1]) for i in range(len(order))]


def _anew(plan: Plan, ground: Ground, stages: int | None) -> Planned:
    planned = plan_ring(
        replace(ground, wishes=replace(ground.wishes, stages=stages, dtype=plan.dtype)),
        bridge=plan.bridge,
        plan_id=plan.id,
        epoch=plan.epoch + 1,
        bridge_addresses=plan.bridge_addresses,
    )
    if planned.plan is not None:
        return planned
    here = {offer.peer for offer in ground.offers}
    holes = [s for s in plan.stages if s.peer not in here]
    if not holes:
        return planned
    text = ", ".join(layers_text((s.first, s.end)) for s in holes)
    return replace(planned, missing=f"nobody can take over {text}: {planned.missing}")
