"""Prometheus metrics of a relay. No label ever holds a peer id or an address: all label values come from our code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from kvasir_peer import __version__
from kvasir_relay.counters import WAIT_BUCKETS
from kvasir_relay.server import RelayStatistics

CONTENT_TYPE = CONTENT_TYPE_LATEST


class RelayCollector(Collector):
    """Reads the relay's statistics when asked; keeps nothing.

    Args:
        statistics: gives a snapshot.
    """

    def __init__(self, statistics: Callable[[], RelayStatistics]) -> None:
        self._statistics = statistics
        self._started = time.time()

    def describe(self) -> Iterator[Metric]:
        """Nothing to say before the first scrape."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All families."""
        s = self._statistics()
        counters, ledger = s.counters, s.ledger

        info = GaugeMetricFamily("kvasir_relay_info", "Version of the relay; always 1.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info

        def gauge(name: str, text: str, value: float) -> Metric:
            return GaugeMetricFamily(f"kvasir_relay_{name}", text, value=value)

        def counter(name: str, text: str, value: float) -> Metric:
            return CounterMetricFamily(f"kvasir_relay_{name}", text, value=value)

        yield gauge("start_time_seconds", "Unix time at which the relay started.", self._started)
        yield gauge("draining", "1 while the relay takes nothing new.", float(s.draining))
        yield gauge("peers", "Different peers connected.", s.peers)
        yield gauge("connections", "Connections open.", ledger.connections)
        yield gauge("handshakes", "Connections that have not proved who they are.", ledger.handshakes)
        yield gauge("reservations", "Reservations held.", ledger.reservations)
        yield gauge("circuits", "Circuits open.", ledger.circuits)
        yield gauge("month_bytes", "Bytes carried in this calendar month (UTC).", ledger.month_bytes)
        yield gauge("buffered_bytes", "Bytes that wait in circuits.", s.buffered_bytes)
        yield gauge("waiting_flows", "Directions of circuits that wait for bandwidth.", s.shaper.waiting)
        yield gauge("loop_lag_seconds", "By how much the last tick of the event loop was late.", s.loop_lag)
        yield counter("connections_accepted", "Connections accepted.", counters.connections)
        yield counter(
            "handshakes_failed", "Connections that never proved who they are.", counters.handshakes_failed
        )
        yield counter(
            "reservations_granted", "Reservations granted, renewals included.", counters.reservations
        )
        yield counter("circuits_opened", "Circuits opened.", counters.circuits)

        carried = CounterMetricFamily(
            "kvasir_relay_carried_bytes", "Bytes carried by circuits.", labels=["direction"]
        )
        carried.add_metric(["to_target"], counters.bytes_to_target)
        carried.add_metric(["to_source"], counters.bytes_to_source)
        yield carried

        ended = CounterMetricFamily(
            "kvasir_relay_circuits_ended", "Circuits that ended, by reason.", labels=["reason"]
        )
        for reason, count in sorted(counters.circuits_ended.items()):
            ended.add_metric([reason], count)
        yield ended

        refusals = CounterMetricFamily(
            "kvasir_relay_refusals",
            "What was refused, and which limit or rule it was.",
            labels=["what", "reason"],
        )
        for (what, reason), count in sorted(counters.refusals.items()):
            refusals.add_metric([what, reason], count)
        yield refusals

        total = 0
        buckets = []
        for bound, count in zip((*WAIT_BUCKETS, float("inf")), counters.wait_counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), total))
        yield HistogramMetricFamily(
            "kvasir_relay_queue_seconds",
            "How long bytes waited at the relay before they were sent on (a sample of them).",
            buckets=buckets,
            sum_value=counters.wait_sum,
        )

        times = os.times()
        cpu = CounterMetricFamily("kvasir_relay_cpu_seconds", "CPU time of the process.", labels=["mode"])
        cpu.add_metric(["user"], times.user)
        cpu.add_metric(["system"], times.system)
        yield cpu
        yield gauge("resident_bytes", "Memory of the process that is in RAM.", resident_bytes())
        if (files := open_files()) is not None:
            yield gauge("open_files", "Open file descriptors.", files)


def resident_bytes() -> int:
    """Memory of this process that is in RAM. From /proc where there is one: a hardened unit shows little else."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import psutil

        return int(psutil.Process().memory_info().rss)


def open_files() -> int | None:
    """Open descriptors of this process, where the system tells."""
    try:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        return None


class Exporter:
    """The registry of one relay, apart from prometheus-client's global one."""

    def __init__(self, statistics: Callable[[], RelayStatistics]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(RelayCollector(statistics))

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
