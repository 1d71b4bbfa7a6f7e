"""A bridge whose ring is played: what its pages say is derived by the real telemetry from batches that never were."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import trio
from helpers_api import Scripted, Server, serving

from kvasir_peer.agent.loop_lag import LagStatistics
from kvasir_peer.api.dashboard import JoinInfo, dashboard_routes
from kvasir_peer.api.metrics import BridgeStatistics, metrics_routes
from kvasir_peer.api.swarm import swarm_routes
from kvasir_peer.net.host import HostStatistics
from kvasir_peer.net.node import LinkTraffic, NodeStatistics
from kvasir_peer.net.relays import RelayStatistics
from kvasir_peer.ring.requests import RequestStatistics
from kvasir_peer.ring.telemetry import Timeline
from kvasir_peer.ring.volunteering import Orders, Report, StageFigures
from tests.ring.helpers_telemetry import TrueRing

NAME = "org/small-1"  # as the scripted service has it
PEERS = ("12D3KooWFirstFirstFirst1", "12D3KooWSecondSecond22", "12D3KooWThirdThird3333")
FIGURES = StageFigures(
    batches=9,
    bytes_in=1000,
    bytes_out=2000,
    path="relayed",
    round_trip_ms=21.0,
    engine_bytes=123,
    agent_bytes=45,
)


@dataclass
class PlayedBridge:
    """The services of all routes but OpenAI's.

    Attributes:
        state: of the ring.
        true: the ring whose batches are played.
    """

    state: str = "serving"
    true: TrueRing = field(
        default_factory=lambda: TrueRing([0.03, 0.05, 0.02], [0.01] * 3, start=trio.current_time())
    )

    def __post_init__(self) -> None:
        for stage, peer in enumerate(PEERS):
            self.true.telemetry.figures(stage, peer, 1, FIGURES)

    async def play(self) -> None:
        """Three requests decode, for as long as nobody cancels it."""
        at = trio.current_time()
        for request in (101, 102, 103):
            self.true.batch(at, [(request, 16, False)])
        while True:
            for request in (101, 102, 103):
                self.true.batch(trio.current_time(), [(request, 1, True)])
                await trio.sleep(0.05)

    # -- swarm routes ---------------------------------------------------------------------------------------

    async def stage_poll(self, peer: str, report: Report) -> Orders:
        raise AssertionError("nobody polls here")

    def admitted(self, peer: str) -> bool:
        return False

    def manifest_bytes(self, model: str, page: str | None) -> bytes:
        raise KeyError(model)

    def ring_status(self, model: str) -> dict[str, Any]:
        if model != NAME:
            raise KeyError(model)
        telemetry, serving = self.true.telemetry, self.state == "serving"
        window = telemetry.window(trio.current_time())
        state = telemetry.state(window, 3)
        shown = (
            msgspec.to_builtins(state) if serving else {"name": "", "stage": None, "link": None, "text": ""}
        )
        missing = "" if serving else "1 of 3 stages are here"
        return {
            "model": NAME,
            "manifest": "m" * 64,
            "state": self.state,
            "missing": missing,
            "ring_state": shown if serving else {**shown, "text": missing},
            "window": {k: v for k, v in msgspec.to_builtins(window).items() if k != "stages"},
            "epoch": 1 if serving else 0,
            "plan": "plan" if serving else "",
            "widths": {"max_in_flight": 9} if serving else None,
            "dtype": "f16",
            "wanted_stages": 3,
            "forecast": None,
            "refused_peers": 0,
            "requests": msgspec.to_builtins(self._requests()),
            "bridge": {"peer": "12D3KooWBridge", "lag_p99_ms": 1.0},
            "stages": [
                {
                    "stage": index,
                    "peer": peer,
                    "first": 2 * index,
                    "end": 2 * index + 2,
                    "state": "serving",
                    "why": "because",
                    "reason": "",
                    "engine": "onnx",
                    "transfer": None,
                    "figures": msgspec.to_builtins(FIGURES),
                    "window": msgspec.to_builtins(window.stages[index]),
                }
                for index, peer in enumerate(PEERS)
            ]
            if serving
            else [],
            "others": []
            if serving
            else [
                {
                    "peer": PEERS[0],
                    "role": "wait",
                    "slice": None,
                    "state": "idle",
                    "why": "it waits <b>here</b>",
                }
            ],
        }

    def ring_timeline(self, model: str, seconds: float, after: int) -> Timeline:
        if model != NAME:
            raise KeyError(model)
        return self.true.telemetry.timeline(
            trio.current_time(), seconds, after=after, active=frozenset((101, 102, 103))
        )

    def models_status(self) -> list[dict[str, Any]]:
        return [{"model": NAME, "manifest": "m" * 64, "state": self.state}]

    # -- pages ----------------------------------------------------------------------------------------------

    def _requests(self) -> RequestStatistics:
        return RequestStatistics(3, 10, 5, 1, 1, 432, 0, 2, 1, 7)

    def statistics(self) -> BridgeStatistics:
        telemetry = self.true.telemetry
        window = telemetry.window(trio.current_time())
        return BridgeStatistics(
            model=NAME,
            started=1_700_000_000.0,
            serving=self.ready(),
            state=telemetry.state(window, 3),
            epoch=1,
            peers=3,
            refused_peers=4,
            ring=telemetry.statistics(),
            window=window,
            figures=(FIGURES, FIGURES, None),
            requests=self._requests(),
            node=NodeStatistics(
                "12D3KooWBridge",
                ("/ip4/10.9.8.7/tcp/4001",),
                HostStatistics(3, 4, 0, 5, 6, {"connections": 1}, 2),
                (RelayStatistics("12D3KooWRelay", "/ip4/10.9.8.7", "reserved", 1.0, True, 2, 3, 1, ""),),
                (),
                (),
                {"/kvasir/ring/1": 2},
                {"/kvasir/ring/1": LinkTraffic(5, 10, 20, 3000, 4000)},
            ),
            lag=LagStatistics(1.0, 9.0, 20.0, 3000),
        )

    def ready(self) -> bool:
        return self.state == "serving"

    def join_info(self) -> JoinInfo:
        return JoinInfo("kvasir", ["volunteer", "stage"], 4_000_000_000, 1)


@asynccontextmanager
async def played(
    bridge: PlayedBridge, service: Scripted | None = None, **options: Any
) -> AsyncIterator[Server]:
    """The bridge behind a real server, for as long as the block lasts."""
    routes = [*metrics_routes(bridge), *dashboard_routes(bridge), *swarm_routes(bridge)]
    async with trio.open_nursery() as nursery, serving(service, routes=routes, **options) as server:
        nursery.start_soon(bridge.play)
        yield server
        nursery.cancel_scope.cancel()
