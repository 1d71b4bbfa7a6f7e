"""Experts by volunteers as metrics: market, dispatch, checks. No label holds a peer id: all is summed over peers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvasir_peer.api.metric_families import counter, gauge, labelled

if TYPE_CHECKING:
    from kvasir_peer.experts.market_figures import ExpertsStatistics


def experts_metrics(e: ExpertsStatistics) -> Iterator[Metric]:
    """All families of one snapshot."""
    yield from _market(e)
    yield from _dispatch(e)


def _market(e: ExpertsStatistics) -> Iterator[Metric]:
    yield gauge("experts_coordinators", "Dispatchers whose slots were read lately.", e.coordinators)
    slots = ((("busy",), e.busy), (("all",), e.slots), (("queued",), e.queue))
    yield labelled(
        GaugeMetricFamily,
        "experts_slots",
        "Slots of coordinators, and requests that wait.",
        ("state",),
        slots,
    )
    yield gauge(
        "experts_saturated", "1 while more volunteers are wanted than in the calm.", float(e.saturated)
    )
    targets = ((("base",), e.base_target), (("effective",), e.target))
    yield labelled(
        GaugeMetricFamily, "experts_target", "Replicas of each expert that are wanted.", ("kind",), targets
    )
    volunteers = (
        (("serving",), e.wired),
        (("fetching",), e.leases),
        (("waiting",), e.waiting),
        (("retiring",), e.retiring),
        (("quarantined",), e.quarantined),
    )
    yield labelled(
        GaugeMetricFamily, "experts_volunteers", "Volunteers, by what they are at.", ("state",), volunteers
    )
    yield counter("experts_leases", "Leases that were granted.", e.granted)
    yield counter("experts_retirements", "Volunteers that were told to go.", e.retired)
    yield counter("experts_refusals", "Offers and claims that were refused.", e.refused)


def _dispatch(e: ExpertsStatistics) -> Iterator[Metric]:
    pairs = ((("local",), e.counts["local_pairs"]), (("remote",), e.counts["remote_pairs"]))
    yield labelled(
        CounterMetricFamily,
        "experts_pairs",
        "Pairs of row and expert, by who computed them.",
        ("where",),
        pairs,
    )
    for name, text, key in (
        ("frames", "Frames with rows that went to workers.", "frames"),
        ("hedges", "Parts that a second worker, or the own experts, were asked for as well.", "hedges"),
        ("deadline_misses", "Frames that were not answered in time.", "late"),
        ("fallbacks", "Parts that no worker answered.", "fallbacks"),
        ("shadows", "First tries of workers, which nobody waits for.", "shadows"),
        ("checks", "Parts that were computed again to be compared.", "checks"),
        ("skipped_checks", "Checks that were given up because too many waited.", "skipped"),
        ("refused_sums", "Answers of workers that were plainly wrong.", "refused"),
        ("caught", "Workers that were found to lie, by each dispatcher.", "caught"),
    ):
        yield counter(f"experts_{name}", text, e.counts[key])
    yield counter("experts_rows", "Rows of workers that were used.", e.rows)
    yield counter(
        "experts_rows_checked", "Rows of workers that were computed again and found right.", e.checked
    )
    yield gauge("experts_links", "Links of dispatchers to workers.", e.workers["attached"])
    yield gauge("experts_links_proven", "Links over which a worker has computed.", e.workers["proven"])
    breakers = ((name.replace("_", "-"),) for name in ("closed", "half_open", "open"))
    values = (e.workers[name] for name in ("closed", "half_open", "open"))
    yield labelled(
        GaugeMetricFamily,
        "experts_breakers",
        "Links to workers, by whether work goes there: closed (yes), half-open (one try), open (no).",
        ("state",),
        zip(breakers, values, strict=True),
    )
