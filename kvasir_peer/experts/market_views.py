"""What the market shows to whoever asks: demand, recruitment, the dispatch map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from kvasir_peer.experts.market import MarketState, scarcity
from kvasir_peer.experts.market_messages import Coverage, Range
from kvasir_peer.experts.recruitment import load_of


def demand(state: MarketState, model: str | None = None) -> list[dict[str, object]]:
    """The body of ``GET /api/expert-demand``; all models, or one."""
    out: list[dict[str, object]] = []
    for name, known in state.models.items():
        if model is not None and name != model:
            continue
        target = state.effective_target(name)
        layers = []
        for i, layer in enumerate(known.offered.layers if target else ()):
            segments = []
            for lo, hi, count in _segments(known.board.live[i]):
                segments.append(
                    {
                        "experts": [lo, hi],
                        "replicas": count,
                        "target": target,
                        "scarcity": round(scarcity(count, target), 4),
                    }
                )
            layers.append({"layer": layer, "segments": segments})
        out.append(
            {
                "model": name,
                "manifest": known.offered.manifest,
                "n_layer": known.offered.n_layer,
                "n_expert": known.offered.n_expert,
                "base_target": state.settings.base,
                "effective_target": target,
                "recruiting": known.saturation.saturated,
                "layers": layers,
            }
        )
    return out


def _segments(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    out: list[tuple[int, int, int]] = []
    for expert, count in enumerate(counts):
        if out and out[-1][2] == count:
            out[-1] = (out[-1][0], expert + 1, count)
        else:
            out.append((expert, expert + 1, count))
    return out


def recruitment(state: MarketState, now: float) -> list[dict[str, object]]:
    """The body of ``GET /api/moe/recruitment``."""
    out: list[dict[str, object]] = []
    for name, known in state.models.items():
        load = load_of([state.coordinators[p] for p in known.coordinators], now, state.settings)
        out.append(
            {
                "model": name,
                "busy": load.busy,
                "slots": load.slots,
                "queue": load.queue,
                "coordinators": load.coordinators,
                "saturated": known.saturation.saturated,
                "recruiting": known.saturation.saturated,
                "base_target": state.settings.base,
                "effective_target": state.effective_target(name),
                "workers": len(known.workers),
                "retiring": len(known.retiring),
                "leases": sum(lease.model == name for lease in state.leases.values()),
                "reading_age": None if load.age is None else round(load.age, 1),
            }
        )
    return out


# Of each kind so many are looked at when a volunteer asks who has its chunks: enough to find some in a large swarm.
_LOOKED_AT = 256


def holders(
    state: MarketState, model: str, asker: str, ranges: Sequence[Range]
) -> list[tuple[str, tuple[str, ...], int]]:
    """Who has chunks of these experts: (peer, addresses, how many of the experts), most first.

    Workers that serve them, and idle volunteers that have them on disk.
    """
    wanted: dict[int, set[int]] = {}
    for layer, lo, hi in ranges:
        wanted.setdefault(layer, set()).update(range(lo, hi))

    def candidates() -> Iterator[tuple[str, tuple[str, ...], Sequence[Range]]]:
        for peer in islice(state.models[model].workers, _LOOKED_AT):
            worker = state.workers[peer]
            yield peer, worker.addresses, worker.ranges
        for peer, (budget, _) in islice(state.waiting.items(), _LOOKED_AT):
            if budget.held:
                yield peer, budget.addresses, budget.held

    found = []
    for peer, addresses, has in candidates():
        common = sum(
            len(wanted[layer].intersection(range(lo, hi))) for layer, lo, hi in has if layer in wanted
        )
        if common and peer != asker:
            found.append((peer, addresses, common))
    return sorted(found, key=lambda one: (-one[2], one[0]))


def dispatch_map(state: MarketState, model: str) -> tuple[int, list[Coverage]]:
    """Version, and who serves what: the workers that are wired, by peer id."""
    known = state.models[model]
    return known.version, [state.workers[p] for p in sorted(known.workers)]
