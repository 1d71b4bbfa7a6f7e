"""Families of metrics, as short calls: all names begin with ``kvasir_``."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


def gauge(name: str, text: str, value: float) -> Metric:
    """One value that may fall."""
    return GaugeMetricFamily(f"kvasir_{name}", text, value=value)


def counter(name: str, text: str, value: float) -> Metric:
    """One value that never falls."""
    return CounterMetricFamily(f"kvasir_{name}", text, value=value)


def labelled(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    labels: tuple[str, ...],
    samples: Iterable[tuple[tuple[str, ...], float]],
) -> Metric:
    """A value for each combination of labels that is given."""
    family = kind(f"kvasir_{name}", text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family
