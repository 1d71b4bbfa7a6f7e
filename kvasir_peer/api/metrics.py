"""``GET /metrics`` for Prometheus and ``GET /health``: what the bridge's parts count, read when asked.

No label holds a peer id, an address or a client's text: stages are named by their index, all else by words of ours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from kvasir_peer import __version__
from kvasir_peer.api.experts_metrics import experts_metrics
from kvasir_peer.api.metric_families import counter, gauge, labelled

if TYPE_CHECKING:
    from kvasir_peer.agent.loop_lag import LagStatistics
    from kvasir_peer.api.openai import OpenAIStatistics
    from kvasir_peer.experts.market_figures import ExpertsStatistics
    from kvasir_peer.net.node import NodeStatistics
    from kvasir_peer.ring.requests import RequestStatistics
    from kvasir_peer.ring.telemetry import RingState, RingStatistics, RingWindow
    from kvasir_peer.ring.volunteering import StageFigures

STATES = ("starved", "saturated", "blocked", "stalled")
OUTCOMES = ("answered", "broken", "refused", "disconnected")


@dataclass(frozen=True)
class BridgeStatistics:
    """All that a bridge counts.

    Attributes:
        model: name of the model for clients.
        started: Unix time, seconds.
        serving: whether requests can be submitted.
        state: of the ring.
        epoch: of the ring's plan, 0 without one.
        peers: that offer themselves to the ring now, stages and others.
        refused_peers: without a good ticket.
        ring, window: counters, and the last seconds.
        figures: what each stage's peer last said of itself; None where it has not.
        requests: of the ring.
        node: connections, links and relays.
        lag: of the bridge's event loop.
        experts: market and dispatch; None where the model has no experts.
    """

    model: str
    started: float
    serving: bool
    state: RingState
    epoch: int
    peers: int
    refused_peers: int
    ring: RingStatistics
    window: RingWindow
    figures: tuple[StageFigures | None, ...]
    requests: RequestStatistics
    node: NodeStatistics
    lag: LagStatistics
    experts: ExpertsStatistics | None = None


class MetricsService(Protocol):
    """What the routes ask of a bridge."""

    def statistics(self) -> BridgeStatistics:
        """A snapshot."""
        ...

    def ready(self) -> bool:
        """Whether requests can be submitted."""
        ...


def metrics_routes(service: MetricsService) -> list[BaseRoute]:
    """The routes, for the application that :func:`kvasir_peer.api.openai.create_app` makes."""

    async def metrics(request: Request) -> Response:
        registry = CollectorRegistry()  # of this answer alone, apart from the library's global one
        registry.register(BridgeCollector(service.statistics(), request.app.state.openai.statistics()))
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": kind, "cache-control": "no-store"})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "ready": service.ready()}, headers={"cache-control": "no-store"})

    return [
        Route("/metrics", metrics, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
    ]


class BridgeCollector(Collector):
    """One snapshot as metric families."""

    def __init__(self, bridge: BridgeStatistics, openai: OpenAIStatistics) -> None:
        self._bridge = bridge
        self._openai = openai

    def describe(self) -> Iterator[Metric]:
        """Nothing is known before it is collected."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from self._process()
        yield from self._clients()
        yield from self._ring()
        yield from self._stages()
        yield from self._stage_windows()
        yield from self._engines()
        if self._bridge.experts is not None:
            yield from experts_metrics(self._bridge.experts)
        yield from self._network()

    def _process(self) -> Iterator[Metric]:
        b = self._bridge
        info = (((__version__, b.model), 1.0),)
        yield labelled(GaugeMetricFamily, "info", "Version and model; always 1.", ("version", "model"), info)
        yield gauge("start_time_seconds", "Unix time at which the bridge started.", b.started)
        lag = (
            (("0.5",), b.lag.p50_ms / 1e3),
            (("0.99",), b.lag.p99_ms / 1e3),
            (("1",), b.lag.max_ms / 1e3),
        )
        yield labelled(
            GaugeMetricFamily,
            "loop_lag_seconds",
            "By how much the event loop was late, over the last half minute.",
            ("quantile",),
            lag,
        )
        process = psutil.Process()
        with process.oneshot():
            memory, times = process.memory_info().rss, process.cpu_times()
        yield gauge("resident_bytes", "Memory of the bridge's process that is in RAM.", memory)
        modes = ((("user",), times.user), (("system",), times.system))
        yield labelled(CounterMetricFamily, "cpu_seconds", "CPU time of the process.", ("mode",), modes)
        if sys.platform == "linux":
            count = sum(1 for _ in Path(f"/proc/{os.getpid()}/fd").iterdir())
            yield gauge("open_files", "Open file descriptors.", count)

    def _clients(self) -> Iterator[Metric]:
        o = self._openai
        yield gauge("http_requests_current", "Requests for answers under way.", o.current)
        yield labelled(
            CounterMetricFamily,
            "http_requests",
            "Requests for answers that ended, by how: whole, broken off, refused, or left by the client.",
            ("outcome",),
            (((outcome,), getattr(o, outcome)) for outcome in OUTCOMES),
        )
        yield counter("prompt_tokens", "Tokens of prompts that were read.", o.prompt_tokens)
        yield counter("completion_tokens", "Tokens of answers that were written.", o.completion_tokens)

    def _ring(self) -> Iterator[Metric]:
        b, r, ring = self._bridge, self._bridge.requests, self._bridge.ring
        yield gauge("requests_active", "Requests that the ring has or will have.", r.active)
        yield counter("requests_submitted", "Requests given to the ring.", r.submitted)
        ended = (
            (("finished",), r.finished),
            (("cancelled",), r.cancelled),
            (("failed",), r.failed),
        )
        yield labelled(CounterMetricFamily, "requests_ended", "Requests that ended.", ("how",), ended)
        yield counter("requests_resubmitted", "Requests that went on under another epoch.", r.resubmitted)
        yield counter("requests_rewound", "Requests made again in part: a worker lied.", r.rewound)
        yield counter(
            "suspect_tokens",
            "Tokens handed out before that may be wrong, of ended answers too.",
            r.suspect_tokens,
        )
        yield counter("tokens", "Tokens handed out.", r.tokens)
        yield counter(
            "digest_mismatches",
            "Batches in which head and tail did not name the same rows.",
            r.digest_mismatches,
        )
        yield gauge("ring_serving", "1 while requests can be submitted.", float(b.serving))
        yield labelled(
            GaugeMetricFamily,
            "ring_state",
            "1 for the state that the ring is in.",
            ("state",),
            (((name,), float(b.state.name == name)) for name in STATES),
        )
        yield gauge("ring_epoch", "Epoch of the ring's plan; 0 without one.", b.epoch)
        yield gauge("ring_peers", "Peers that offer themselves to the ring, stages included.", b.peers)
        yield counter("ring_refused_peers", "Polls of peers without a good ticket.", b.refused_peers)
        yield counter("ring_epochs", "Epochs that began to serve.", ring.epochs)
        yield counter("ring_batches", "Batches that came back.", ring.batches)
        yield counter("ring_rows", "Rows of batches that came back.", ring.rows)
        yield counter("ring_tokens", "Tokens sampled, also such as nobody waited for.", ring.tokens)
        yield counter("ring_unusable_traces", "Batches whose trace made no sense.", ring.unusable)
        yield gauge("ring_in_flight", "Batches under way.", ring.in_flight)
        yield gauge(
            "ring_round_trip_seconds",
            "From the head's word of a batch to its tokens, median of the last ten seconds.",
            b.window.round_trip_ms / 1e3,
        )

    def _stages(self) -> Iterator[Metric]:
        stages = self._bridge.ring.stages
        for name, text, attribute in (
            ("batches", "Batches computed.", "batches"),
            ("rows", "Rows computed.", "rows"),
            ("held_seconds", "Time in which the engine had a batch.", "held_seconds"),
            ("starved_seconds", "Time in which the engine had nothing to do.", "starved_seconds"),
            (
                "blocked_seconds",
                "Time in which results waited for the next stage's link to take them.",
                "blocked_seconds",
            ),
            ("boundary_bytes", "Hidden states handed on.", "boundary_bytes"),
            ("received_bytes", "Hidden states received, as the stage reports.", "bytes_in"),
            ("sent_bytes", "Frames sent to the next stage, as the stage reports.", "bytes_out"),
            ("engine_restarts", "Engine processes that had to be started again.", "engine_restarts"),
        ):
            yield labelled(
                CounterMetricFamily,
                f"ring_stage_{name}",
                text,
                ("stage",),
                (((str(index),), getattr(stage, attribute)) for index, stage in enumerate(stages)),
            )

    def _stage_windows(self) -> Iterator[Metric]:
        stages = self._bridge.window.stages
        for name, text, attribute in (
            ("held_ratio", "Share of the last ten seconds in which the engine had a batch.", "held"),
            ("starved_ratio", "Share in which it had none, and nothing waited for the link.", "starved"),
            ("blocked_ratio", "Share in which it had none, while results waited for the link.", "blocked"),
            ("link_busy_ratio", "Share in which something waited for the link to the next stage.", "link"),
            ("queue", "Batches that a batch found before it, on average.", "queue"),
        ):
            yield labelled(
                GaugeMetricFamily,
                f"ring_stage_{name}",
                text,
                ("stage",),
                (((str(index),), getattr(stage, attribute)) for index, stage in enumerate(stages)),
            )
        yield labelled(
            GaugeMetricFamily,
            "ring_stage_link_round_trip_seconds",
            "To the next stage and back.",
            ("stage", "path"),
            (
                ((str(index), stage.path), stage.round_trip_ms / 1e3)
                for index, stage in enumerate(stages)
                if stage.path
            ),
        )

    def _engines(self) -> Iterator[Metric]:
        figures = self._bridge.figures
        for name, text, attribute, scale in (
            ("engine_resident_bytes", "Memory of the stage's engine process.", "engine_bytes", 1.0),
            ("agent_resident_bytes", "Memory of the stage's agent process.", "agent_bytes", 1.0),
            ("loop_lag_seconds", "Lateness of the stage's event loop, 99th percentile.", "lag_p99_ms", 1e-3),
        ):
            yield labelled(
                GaugeMetricFamily,
                f"ring_stage_{name}",
                text,
                ("stage",),
                (
                    ((str(index),), getattr(known, attribute) * scale)
                    for index, known in enumerate(figures)
                    if known is not None
                ),
            )

    def _network(self) -> Iterator[Metric]:
        node = self._bridge.node
        paths = [connection.path for connection in node.connections]
        yield labelled(
            GaugeMetricFamily,
            "net_connections",
            "Connections to peers and relays.",
            ("path",),
            (((path,), paths.count(path)) for path in ("direct", "relayed")),
        )
        made = ((("inbound",), node.host.inbound), (("outbound",), node.host.outbound))
        yield labelled(
            CounterMetricFamily, "net_connections_made", "Connections that were made.", ("direction",), made
        )
        yield counter(
            "net_handshakes_failed",
            "Connections that never proved who they are.",
            node.host.failed_handshakes,
        )
        states = [relay.state for relay in node.relays]
        yield labelled(
            GaugeMetricFamily,
            "net_relays",
            "Relays, by how it stands with the place there.",
            ("state",),
            (((state,), states.count(state)) for state in sorted({*states, "reserved"})),
        )
        for name, text, attribute in (
            ("connects", "Connections made to relays.", "connects"),
            ("reservations", "Places that relays granted, renewals included.", "reservations"),
            ("failures", "Failures with relays.", "failures"),
        ):
            total = sum(getattr(relay, attribute) for relay in node.relays)
            yield counter(f"net_relay_{name}", text, total)
        links = [link.protocol for link in node.links]
        traffic = sorted(node.traffic.items())
        yield labelled(
            GaugeMetricFamily,
            "net_links",
            "Links open.",
            ("protocol",),
            (((protocol,), links.count(protocol)) for protocol, _ in traffic),
        )
        yield labelled(
            CounterMetricFamily,
            "net_links_opened",
            "Links that were opened.",
            ("protocol",),
            (((protocol,), carried.links) for protocol, carried in traffic),
        )
        for unit, text in (("frames", "Frames on links."), ("bytes", "Payload of frames on links.")):
            yield labelled(
                CounterMetricFamily,
                f"net_link_{unit}",
                text,
                ("protocol", "direction"),
                (
                    ((protocol, direction), getattr(carried, f"{unit}_{direction}"))
                    for protocol, carried in traffic
                    for direction in ("sent", "received")
                ),
            )
        yield labelled(
            CounterMetricFamily,
            "net_links_refused",
            "Links of peers that were turned away.",
            ("protocol",),
            (((protocol,), count) for protocol, count in sorted(node.refused.items())),
        )
