"""What a peer says of itself, made into what the market may believe: nothing of it can break a plan.

A plan has to pass its check whoever is in it, and a market has to go on whatever it is told. So numbers that make no
sense count as not given, and addresses that do not lead to the peer, or are too many, are left out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvasir_peer.errors import UsageError
from kvasir_peer.net import maddr
from kvasir_peer.ring import stage_market as market
from kvasir_peer.ring.offers import PASS_SECONDS, LinkTime, ModelNeeds, StageOffer
from kvasir_peer.ring.plan import MAX_ADDRESS, MAX_ADDRESSES, MAX_LAYERS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvasir_peer.ring.volunteering import LinkReport, Measured, Offer, Report

# Slower than this (bytes of weights per second, seconds per layer) no peer is of use, and numbers beyond stay finite.
LEAST_READ_RATE, MOST_LAYER_SECONDS = 1e4, 3600.0
LEAST_LAYER_SECONDS = 1e-7  # quicker is no layer of anything
MOST_LINK_SECONDS, LEAST_LINK_RATE = 60.0, 100.0
MAX_BYTES = 1 << 50  # of memory or disk
MAX_SLICES = 64  # on disk, that a report may name
MAX_WORDS = 300  # characters of a reason; it is shown to clients


def reported(peer: str, report: Report, needs: ModelNeeds) -> market.Reported:
    """A poll as the market of a model takes it."""
    return market.Reported(
        peer,
        _offered(peer, report.offer, needs),
        report.state,
        report.plan,
        report.epoch,
        report.running,
        words(report.reason),
        report.lost,
        report.kept,
        report.leaving,
        report.transfer.done if report.transfer else 0,
        report.wait,
    )


def link_times(report: Report) -> dict[str, LinkTime]:
    """What a peer has measured, by the other peer."""
    return {link.peer: link_time(link) for link in report.links}


def link_time(link: LinkReport) -> LinkTime:
    """What somebody says of one way."""
    return LinkTime(min(link.seconds, MOST_LINK_SECONDS), link.rate if link.rate >= LEAST_LINK_RATE else 0.0)


def _offered(peer: str, offer: Offer, needs: ModelNeeds) -> StageOffer:
    rate = offer.read_bytes_per_second
    base, row = _per_layer(offer.measured, needs)
    return StageOffer(
        peer,
        min(max(offer.memory, 0), MAX_BYTES),
        min(max(offer.disk, 0), MAX_BYTES),
        engine=offer.engine[:32],
        expansion=offer.expansion,
        read_rate=rate if LEAST_READ_RATE <= rate < math.inf else 0.0,
        pass_base=base,
        pass_row=row,
        addresses=leading_to(peer, offer.addresses),
        on_disk=frozenset(part for part in offer.on_disk[:MAX_SLICES] if _is_slice(part)),
        loaded=offer.loaded if offer.loaded is not None and _is_slice(offer.loaded) else None,
    )


def _per_layer(measured: Measured | None, needs: ModelNeeds) -> tuple[float, float]:
    """Seconds of a layer and pass, and of a layer and row; zeros where nothing (believable) was measured."""
    if measured is None or measured.model != needs.model:
        return 0.0, 0.0
    if not (_is_slice((measured.first, measured.end)) and measured.end <= needs.n_layer):
        return 0.0, 0.0
    layers = needs.layers_of(measured.first, measured.end)
    # Passes that take no longer than what each has beside its layers were measured all the same.
    base = max(LEAST_LAYER_SECONDS, (measured.base - PASS_SECONDS) / layers)
    row = measured.row / layers
    if measured.base + measured.row <= 0 or base + row > MOST_LAYER_SECONDS:
        return 0.0, 0.0
    return base, row


def _is_slice(part: tuple[int, int]) -> bool:
    return 0 <= part[0] < part[1] <= MAX_LAYERS


def leading_to(peer: str, addresses: Iterable[str]) -> tuple[str, ...]:
    """Those of the addresses that make sense and lead to the peer, as many as a plan holds."""
    good = []
    for text in addresses:
        if len(text) > MAX_ADDRESS:
            continue
        try:
            address = maddr.parse(text)
        except UsageError:
            continue
        if (address.through or address.peer) == peer:
            good.append(text)
        if len(good) == MAX_ADDRESSES:
            break
    return tuple(good)


def words(text: str) -> str:
    """A peer's own words, on one line that can be shown."""
    line = " ".join(text.split())
    line = "".join(character for character in line if character.isprintable())
    return line if len(line) <= MAX_WORDS else line[: MAX_WORDS - 1] + "…"
