"""From what peers offer to a plan, and what to say to each of them.

Pure: offers, a model's sizes and link times go in; a plan, a forecast and words come out. The aims, in order:

1. it fits: every stage holds its layers, the KV cache of all slots, and its work space in the memory offered;
2. it is quick: for one request alone (the sum of all passes and hops) and, at half the weight, for all slots
   together (the slowest stage). A peer that would make the ring slower by this measure gets no layers, so slow
   links lead to fewer and fatter stages by themselves;
3. the bridge's own machine is the head when it can be, since prompts then never leave it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvasir_peer.errors import PlanError
from kvasir_peer.ring.offers import (
    FORECAST_PROMPT,
    Forecast,
    Ground,
    LinkTime,
    ModelNeeds,
    Place,
    Planned,
    Slice,
    StageOffer,
    Wishes,
    forecast_of,
    gigabytes,
    layers_text,
    memory_needed,
)
from kvasir_peer.ring.plan import MAX_STAGES, ONE_STAGE, Plan, PlanStage
from kvasir_peer.serving.costs import Line, RingCosts
from kvasir_peer.wire.tensors import tensor_bytes

# A peer must improve the ring by this factor to be worth its own chance of failure.
WORTH_IT = 1.02
# Peers taken into the search; more than these are never in a good ring of one model.
MAX_CANDIDATES = 20


class Search:
    """Evaluates orders of peers and cuts of layers on one ground."""

    def __init__(self, ground: Ground, bridge: str) -> None:
        self.needs = ground.needs
        self.links = ground.links
        self.wishes = ground.wishes
        self.bridge = bridge
        self._memory = ground.memory
        self._fits: dict[tuple[str, int, int], bool] = {}
        self._row_bytes = tensor_bytes(self.wishes.dtype, 1, self.needs.n_embd)

    def memory(self, offer: StageOffer, first: int, end: int) -> int:
        if self._memory is not None:
            return self._memory(offer, first, end)
        return memory_needed(self.needs, self.wishes.widths, offer, first, end)

    def fits(self, offer: StageOffer, first: int, end: int) -> bool:
        key = (offer.peer, first, end)
        if key not in self._fits:
            self._fits[key] = (
                self.memory(offer, first, end) <= offer.memory
                and self.needs.file_bytes(first, end) <= offer.disk
            )
        return self._fits[key]

    def fits_anywhere(self, offer: StageOffer) -> bool:
        n = self.needs.n_layer
        return any(self.fits(offer, i, i + 1) for i in {0, n // 2, n - 1})

    def hops(self, order: Sequence[StageOffer]) -> list[LinkTime]:
        """Of each stage to the next, and of the tail to the head."""
        return [
            self.links.between(a.peer, b.peer) for a, b in zip(order, [*order[1:], order[0]], strict=True)
        ]

    def costs(self, order: Sequence[StageOffer], cuts: Sequence[int]) -> RingCosts:
        hops = self.hops(order)
        rates = [hop.rate for hop in hops[:-1] if hop.rate > 0]
        per_row = self._row_bytes / min(rates) if rates else 0.0
        transit = Line(sum(hop.seconds for hop in hops), sum(self._row_bytes / rate for rate in rates))
        lines = tuple(offer.line(self.needs, cuts[i], cuts[i + 1]) for i, offer in enumerate(order))
        return RingCosts(lines, per_row, transit)

    def forecast(self, order: Sequence[StageOffer], cuts: Sequence[int]) -> Forecast:
        return forecast_of(self.costs(order, cuts), self.wishes.widths)

    # --- order ------------------------------------------------------------------------------------------

    def order(self, offers: Sequence[StageOffer]) -> list[StageOffer]:
        """Head first, then so that the way round is short: nearest neighbours, improved by swaps of two."""
        head = min(
            offers,
            key=lambda o: (
                not (o.bridge and self.fits(o, 0, 1)),
                self.links.between(self.bridge, o.peer).seconds,
            ),
        )
        rest = [o for o in offers if o is not head]
        order = [head]
        while rest:
            nearest = min(rest, key=lambda o: self.links.between(order[-1].peer, o.peer).seconds)
            rest.remove(nearest)
            order.append(nearest)
        best = self._way(order)
        improved = len(order) > 3
        while improved:
            improved = False
            for i in range(1, len(order) - 1):
                for j in range(i + 1, len(order)):
                    trial = order[:i] + order[i : j + 1][::-1] + order[j + 1 :]
                    way = self._way(trial)
                    if way < best - 1e-9:
                        order, best, improved = trial, way, True
        return order

    def _way(self, order: Sequence[StageOffer]) -> float:
        return sum(hop.seconds for hop in self.hops(order))

    # --- cuts -------------------------------------------------------------------------------------------

    def cut(self, order: Sequence[StageOffer]) -> list[int] | None:
        """Borders ``[0, ..., n_layer]`` with the slowest stage as quick as memory allows; None when it cannot be."""
        slow = max(o.line(self.needs, 0, self.needs.n_layer).seconds(1) for o in order)
        cuts = self._fill(order, slow)
        if cuts is None:
            return None
        low, high = 0.0, slow
        for _ in range(24):
            middle = (low + high) / 2
            trial = self._fill(order, middle)
            if trial is None:
                low = middle
            else:
                cuts, high = trial, middle
        return cuts

    def _fill(self, order: Sequence[StageOffer], seconds: float) -> list[int] | None:
        """Give each stage in turn as many layers as take at most ``seconds`` and fit; at least one each."""
        n = self.needs.n_layer
        cuts = [0]
        for i, offer in enumerate(order):
            first = cuts[-1]
            most = n - (len(order) - 1 - i)
            end = first
            while end < most and offer.line(self.needs, first, end + 1).seconds(1) <= seconds:
                if not self.fits(offer, first, end + 1):
                    break
                end += 1
            if end == first:
                return None
            cuts.append(end)
        return cuts if cuts[-1] == n else None

    def polish(self, order: Sequence[StageOffer], cuts: list[int]) -> tuple[list[int], Forecast]:
        """Move single layers between stages while that makes the ring better, or as good and more even."""

        def rank(trial: Sequence[int]) -> tuple[Forecast, float]:
            costs = self.costs(order, trial)
            return forecast_of(costs, self.wishes.widths), sum(line.seconds(1) ** 2 for line in costs.stages)

        best, uneven = rank(cuts)
        while True:
            found = None
            for giver in range(len(order)):
                for taker in range(len(order)):
                    trial = _moved(cuts, giver, taker)
                    if trial is None or not all(
                        self.fits(o, trial[i], trial[i + 1]) for i, o in enumerate(order)
                    ):
                        continue
                    forecast, spread = rank(trial)
                    better = forecast.score > best.score * 1.0005
                    as_good = forecast.score > best.score * (1 - 1e-9) and spread < uneven * (1 - 1e-6)
                    if better or as_good:
                        best, uneven, found = forecast, spread, trial
            if found is None:
                return cuts, best
            cuts = found

    def solve(self, offers: Sequence[StageOffer]) -> _Ring | None:
        order = self.order(offers)
        cuts = self.cut(order)
        if cuts is None and len(order) > 2:
            # The order that is shortest may leave a small peer where a large layer is: try the roomy ones last.
            order = [order[0], *sorted(order[1:], key=lambda o: o.memory)]
            cuts = self.cut(order)
        if cuts is None:
            return None
        return _Ring(order, cuts, self.forecast(order, cuts))


@dataclass(frozen=True, slots=True)
class _Ring:
    order: list[StageOffer]
    cuts: list[int]
    forecast: Forecast


def _moved(cuts: Sequence[int], giver: int, taker: int) -> list[int] | None:
    """Borders after one layer has gone from one stage to another (those between shift); None if not possible."""
    if giver == taker or cuts[giver + 1] - cuts[giver] < 2:
        return None
    out = list(cuts)
    if giver < taker:
        for i in range(giver + 1, taker + 1):
            out[i] -= 1
    else:
        for i in range(taker + 1, giver + 1):
            out[i] += 1
    return out


def check_wishes(needs: ModelNeeds, wishes: Wishes) -> None:
    """Refuse wishes that no peers could ever meet.

    Raises:
        PlanError: one stage, more stages than layers, a model of one layer, or widths that cannot be.
    """
    wishes.widths.check()
    wanted = wishes.stages
    if wanted is not None and wanted < 2:
        raise PlanError(ONE_STAGE)
    if wanted is not None and wanted > min(needs.n_layer, MAX_STAGES):
        raise PlanError(
            f"{wanted} stages are asked for; the model has {needs.n_layer} layers, and a ring at most {MAX_STAGES} "
            "stages"
        )
    if needs.n_layer < 2:
        raise PlanError(
            "the model has a single layer, so one peer would hold all of it; a coordinator can serve it"
        )


def plan_ring(
    ground: Ground, *, bridge: str, plan_id: str, epoch: int = 1, bridge_addresses: tuple[str, ...] = ()
) -> Planned:
    """Make a plan from offers.

    Args:
        bridge: peer id of the bridge.
        plan_id: 1 to 128 characters.
        epoch: of the plan.
        bridge_addresses: where the bridge is reached.

    Raises:
        PlanError: wishes that can never be met (one stage; more stages than layers).
    """
    needs, wishes = ground.needs, ground.wishes
    check_wishes(needs, wishes)
    wanted = wishes.stages
    search = Search(ground, bridge)
    places: dict[str, Place] = {}
    usable = []
    for offer in ground.offers:
        if search.fits_anywhere(offer):
            usable.append(offer)
        else:
            places[offer.peer] = Place(offer.peer, "none", _too_small(search, offer))
    least = wanted or 2
    if len(usable) < least:
        few = f"{len(usable)} of {least} stages are here"
        small = f"; {len(places)} more offered too little memory or disk" if places else ""
        return Planned(None, few + small, (*places.values(), *_waiting(usable, few)))
    chosen = sorted(usable, key=lambda o: (not o.bridge, -_worth(o, needs)))
    chosen = chosen[: min(MAX_CANDIDATES if wanted is None else max(MAX_CANDIDATES, wanted), needs.n_layer)]
    ring, dropped = _choose(search, chosen, least, wanted or min(wishes.max_stages, needs.n_layer))
    if ring is None:
        have = sum(o.memory for o in usable)
        need = needs.file_bytes(0, needs.n_layer)
        disk = sum(o.disk for o in usable)
        of_disk = (
            f" of memory and {gigabytes(disk)} of disk" if disk < 2 * need else ""
        )  # else it is not what lacks
        missing = (
            f"{len(usable)} peers offer {gigabytes(have)}{of_disk} together, which does not hold {gigabytes(need)} of "
            f"weights and the caches of {wishes.widths.max_requests} requests"
        )
        return Planned(None, missing, (*places.values(), *_waiting(usable, missing)))
    cuts, forecast = search.polish(ring.order, ring.cuts)
    plan = assemble(search, ring.order, cuts, plan_id, epoch, bridge_addresses)
    for i, offer in enumerate(ring.order):
        places[offer.peer] = Place(
            offer.peer, "stage", _stage_words(search, ring.order, cuts, i, forecast), (cuts[i], cuts[i + 1])
        )
    spare = [offer for offer in usable if offer.peer not in places]
    for place in standbys(search, plan, spare, forecast, ring.order, dropped):
        places[place.peer] = place
    return Planned(plan, "", tuple(places[offer.peer] for offer in ground.offers), forecast)


def _worth(offer: StageOffer, needs: ModelNeeds) -> float:
    return offer.memory / max(offer.line(needs, 0, needs.n_layer).seconds(1), 1e-9)


def _choose(
    search: Search, offers: list[StageOffer], least: int, most: int
) -> tuple[_Ring | None, dict[str, float]]:
    """Begin with everybody and leave out, one after another, the peer without whom the ring is best."""
    current = list(offers)
    best = search.solve(current)
    dropped: dict[str, float] = {}
    while len(current) > least:
        trials = []
        for offer in current:
            ring = search.solve([o for o in current if o is not offer])
            if ring is not None:
                trials.append((ring.forecast.score, offer.peer, ring, offer))
        if not trials:
            if len(current) > most:
                return None, dropped
            break
        score, _, ring, offer = max(trials, key=lambda t: (t[0], t[1]))
        must = len(current) > most or best is None
        if not must and best is not None and score * WORTH_IT < best.forecast.score:
            break
        if best is not None:
            dropped[offer.peer] = best.forecast.score / score
        current.remove(offer)
        best = ring
    return best, dropped


def assemble(
    search: Search,
    order: Sequence[StageOffer],
    cuts: Sequence[int],
    plan_id: str,
    epoch: int,
    bridge_addresses: tuple[str, ...],
) -> Plan:
    costs = search.costs(order, cuts)
    hops = search.hops(order)
    rates = [hop.rate for hop in hops[:-1] if hop.rate > 0]
    plan = Plan(
        id=plan_id,
        epoch=epoch,
        bridge=search.bridge,
        model=search.needs.model,
        n_layer=search.needs.n_layer,
        n_embd=search.needs.n_embd,
        vocab=search.needs.vocab,
        stages=tuple(
            PlanStage(
                o.peer, cuts[i], cuts[i + 1], o.addresses, costs.stages[i].base, costs.stages[i].per_row
            )
            for i, o in enumerate(order)
        ),
        widths=search.wishes.widths,
        dtype=search.wishes.dtype,
        bridge_addresses=bridge_addresses,
        hop_seconds=sum(hop.seconds for hop in hops) / len(hops),
        link_rate=min(rates, default=0.0),
    )
    plan.check()
    return plan


# --- words ----------------------------------------------------------------------------------------------------


def _too_small(search: Search, offer: StageOffer) -> str:
    middle = search.needs.n_layer // 2
    need = search.memory(offer, middle, middle + 1)
    if need > offer.memory:
        return f"it offers {gigabytes(offer.memory)} of memory, a single layer takes {gigabytes(need)}"
    disk = search.needs.file_bytes(middle, middle + 1)
    return f"it offers {gigabytes(offer.disk)} of disk, a single layer takes {gigabytes(disk)}"


def _waiting(offers: Iterable[StageOffer], missing: str) -> list[Place]:
    return [Place(o.peer, "none", f"it waits for the ring to be complete: {missing}") for o in offers]


def _stage_words(
    search: Search, order: Sequence[StageOffer], cuts: Sequence[int], i: int, forecast: Forecast
) -> str:
    offer = order[i]
    part = (cuts[i], cuts[i + 1])
    held = search.costs(order, cuts).stages[i].seconds(1)
    words = f"{layers_text(part)}, {held * 1e3:.1f} ms a pass"
    if i == 0:
        near = "it is the bridge's own machine" if offer.bridge else "it is nearest to the bridge"
        words += f"; head, because {near}"
    elif i == len(order) - 1:
        words += "; tail, it makes the tokens"
    if i == forecast.slowest and len(order) > 1:
        words += "; the slowest stage, which sets the pace"
    elif not search.fits(offer, part[0], min(part[1] + 1, search.needs.n_layer)) or not search.fits(
        offer, max(part[0] - 1, 0), part[1]
    ):
        words += "; its memory holds no more"
    return words


def standbys(
    search: Search,
    plan: Plan,
    spare: Sequence[StageOffer],
    forecast: Forecast,
    order: Sequence[StageOffer],
    dropped: Mapping[str, float],
    keeping: Mapping[str, Slice] | None = None,
) -> list[Place]:
    """Give each peer that is left a slice to hold ready, the stages without a standby first, large ones first.

    Args:
        keeping: slices that peers keep ready already; they stay with them where the plan still has such a stage.
    """
    covered = dict.fromkeys(((s.first, s.end) for s in plan.stages), 0)
    kept = {peer: part for peer, part in (keeping or {}).items() if part in covered}
    for part in kept.values():
        covered[part] += 1
    places = []
    for offer in sorted(spare, key=lambda o: (o.peer not in kept, -o.memory)):
        why = _why_no_stage(search, offer, order, forecast, dropped)
        if offer.peer in kept:
            part = kept[offer.peer]
            places.append(Place(offer.peer, "standby", f"{why}; it keeps {layers_text(part)} ready", part))
            continue
        options = [part for part in covered if search.fits(offer, *part)]
        if not options:
            places.append(
                Place(offer.peer, "none", f"{why}; its memory holds no stage's slice as a standby either")
            )
            continue
        held = set(offer.on_disk) | ({offer.loaded} if offer.loaded else set())
        part = min(
            options,
            key=lambda p: (covered[p], p not in held, -search.needs.file_bytes(*p), p),
        )
        covered[part] += 1
        places.append(Place(offer.peer, "standby", f"{why}; it keeps {layers_text(part)} ready", part))
    return places


def _why_no_stage(
    search: Search,
    offer: StageOffer,
    order: Sequence[StageOffer],
    forecast: Forecast,
    dropped: Mapping[str, float],
) -> str:
    if search.wishes.stages is not None and len(order) >= search.wishes.stages:
        return f"the ring has the {search.wishes.stages} stages that were asked for"
    if len(order) >= search.needs.n_layer:
        return "the model has no more layers to give"
    with_it = search.solve([*order, offer])
    if with_it is None:
        return "no cut of the layers has a place for it"
    other = with_it.forecast
    if other.score <= forecast.score * WORTH_IT or offer.peer in dropped:
        return (
            f"with it the ring would do {other.alone:.1f} tokens/s alone and {other.together:.1f} together, "
            f"without it {forecast.alone:.1f} and {forecast.together:.1f}"
        )
    return "the ring is as large as it may be"


def describe(plan: Plan, needs: ModelNeeds, forecast: Forecast, places: Sequence[Place]) -> list[str]:
    """The plan in lines of text: rows, bytes, memory, forecast, and why each peer has its place."""
    widths = plan.widths
    kv = [needs.kv_bytes * s.layers * widths.context_length * widths.max_requests for s in plan.stages]
    lines = [
        f"{len(plan.stages)} stages, {plan.n_layer} layers, boundaries {plan.dtype}",
        f"up to {widths.micro_batch_rows} rows a pass, {widths.max_in_flight} passes in flight, "
        f"{widths.batch_rows} rows in flight, {widths.max_requests} requests of {widths.context_length} tokens",
        f"at most {gigabytes(plan.boundary_bytes)} a boundary, {plan.row_bytes} bytes per token and hop, "
        f"{plan.row_bytes * (len(plan.stages) - 1)} bytes per token over the ring",
        f"forecast: {forecast.alone:.1f} tokens/s alone, {forecast.together:.1f} with {forecast.requests} requests, "
        f"first token of {min(FORECAST_PROMPT, widths.context_length - 1)} after {forecast.first_token:.1f} s",
    ]
    if forecast.by_link:
        lines.append(
            "the slowest link sets the pace, not a stage"
            + ("" if plan.dtype == "int8" else ": --boundary int8 would let fewer bytes cross it")
        )
    words = {place.peer: place.why for place in places}
    for i, stage in enumerate(plan.stages):
        lines.append(
            f"stage {i + 1}: {stage.peer}: {words.get(stage.peer, layers_text((stage.first, stage.end)))}; "
            f"{gigabytes(needs.file_bytes(stage.first, stage.end))} of weights, {gigabytes(kv[i])} of caches"
        )
    lines += [f"{p.role}: {p.peer}: {p.why}" for p in places if p.role != "stage"]
    return lines
