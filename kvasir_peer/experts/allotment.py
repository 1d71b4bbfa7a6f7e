"""Which experts a volunteer gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvasir_peer.experts.market_messages import Budget, ExpertModel, Range

# Ranges of one lease: a worker serves many layers, but its demand must fit an answer.
MAX_RANGES = 64


def choose_ranges(
    model: ExpertModel,
    counts: Sequence[Sequence[int]],
    target: int,
    heat: Mapping[int, int],
    budget: Budget,
) -> tuple[Range, ...]:
    """What to give to a volunteer.

    Args:
        model: of which.
        counts: replicas and leases, ``[layers][experts]``.
        target: replicas wanted.
        heat: rows routed per layer; layers that are not in it are coldest.
        budget: what fits.

    Returns:
        Ranges, sorted: the emptiest cells (what the volunteer has on disk already first), hottest layer first, as
        many as fit the budget. Empty when nothing is wanted, or when not even one expert fits.
    """
    level = min((min(row) for row in counts), default=target)
    if level >= target:
        return ()
    room = budget.bytes(model)
    width = max(map(len, counts), default=0)
    # Whatever a volunteer says it has, there is no more than the model.
    held = {
        (layer, expert)
        for layer, lo, hi in set(budget.held)
        if layer in model.layers
        for expert in range(lo, min(hi, width))
    }
    order = sorted(
        range(len(model.layers)),
        key=lambda i: (-heat.get(model.layers[i], 0), model.layers[i]),
    )
    chosen: dict[int, set[int]] = {}
    spans = 0
    for on_disk in (True, False) if held else (False,):
        for i in order:
            layer, size = model.layers[i], model.expert_bytes[i]
            if size > room:
                continue
            ours = chosen.get(layer, set())
            for expert in [e for e, count in enumerate(counts[i]) if count == level]:
                if expert in ours or ((layer, expert) in held) != on_disk:
                    continue
                joins = (expert - 1 in ours) + (expert + 1 in ours)
                if size > room or spans + 1 - joins > MAX_RANGES:
                    break
                spans += 1 - joins
                ours.add(expert)
                room -= size
            if ours:
                chosen[layer] = ours
    return tuple((layer, lo, hi) for layer in sorted(chosen) for lo, hi in _runs(sorted(chosen[layer])))


def _runs(experts: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted numbers as runs ``[lo, hi)``."""
    out: list[tuple[int, int]] = []
    for expert in experts:
        if out and out[-1][1] == expert:
            out[-1] = (out[-1][0], expert + 1)
        else:
            out.append((expert, expert + 1))
    return out
