"""A real swarm whose agents share one event loop: real libp2p hosts, relay and engine processes, but quick to start."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import trio
from swarm_processes import START_SECONDS, Peer

from kvasir_peer.progress import Progress
from kvasir_peer.roles.bridge import run_bridge
from kvasir_peer.roles.stage import run_stage
from kvasir_peer.settings import BridgeReady, BridgeSettings, StageSettings


class InProcessSwarm:
    """What a test sees of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base_url = ""
        self.model = ""
        self.ticket = ""
        self.relay: Peer
        self.relay_port = 0
        self.lines: list[str] = []
        self.scopes: dict[str, trio.CancelScope] = {}

    def report(self, name: str) -> Any:
        """A report of one peer, kept for a failed test."""

        def tell(progress: Progress) -> None:
            self.lines.append(f"{name}: {progress.line()}")

        return tell

    async def status(self) -> dict:
        """``GET /api/ring/{model}``."""
        async with httpx.AsyncClient() as client:
            answer = await client.get(
                f"{self.base_url.removesuffix('/v1')}/api/ring/{self.model}", timeout=20
            )
        return answer.json()

    async def wait_until_serving(self, *, after_epoch: int = 0, seconds: float = START_SECONDS) -> dict:
        """The status, once an epoch after ``after_epoch`` serves."""
        with trio.move_on_after(seconds):
            while True:
                status = await self.status()
                if status["state"] == "serving" and status["epoch"] > after_epoch:
                    return status
                await trio.sleep(0.1)
        raise AssertionError("no ring:\n" + "\n".join(self.lines[-60:]))


def start_relay(folder: Path, port: int = 0) -> tuple[Peer, str]:
    """A relay process and its address."""
    relay = Peer(
        "relay", ["kvasir-relay", "--home", str(folder / "relay"), "--listen", f"/ip4/127.0.0.1/tcp/{port}"]
    )
    line = relay.wait_for(lambda text: "/p2p/" in text)
    return relay, next(word for word in line.split() if "/p2p/" in word)


@contextlib.asynccontextmanager
async def swarm_in_process(
    folder: Path,
    model: Path | str,
    *,
    stages: int,
    engines: Sequence[str] = ("onnx",),
    precision: str = "exact",
    **bridge: Any,
) -> AsyncIterator[InProcessSwarm]:
    """A serving swarm.

    Args:
        model: a file, or an address.
        engines: of the stages, in turn.
        bridge: settings of the bridge.
    """
    swarm = InProcessSwarm(folder)
    swarm.relay, address = await trio.to_thread.run_sync(start_relay, folder)
    swarm.relay_port = int(address.split("/tcp/")[1].split("/")[0])
    try:
        async with trio.open_nursery() as nursery:
            ready = trio.Event()

            def take(found: BridgeReady) -> None:
                swarm.base_url, swarm.model, swarm.ticket = found.base_url, found.model, found.ticket
                ready.set()

            settings = BridgeSettings(
                home=folder / "bridge",
                **{
                    "model": str(model),
                    "relays": (address,),
                    "stages": stages,
                    "port": 0,
                    "direct": False,
                    **bridge,
                },
            )
            settings.home.mkdir(parents=True)
            nursery.start_soon(lambda: run_bridge(settings, ready=take, report=swarm.report("bridge")))
            with trio.fail_after(START_SECONDS):
                await ready.wait()
            for index in range(stages):
                home = folder / f"stage{index}"
                home.mkdir()
                own = StageSettings(
                    home=home,
                    ticket=swarm.ticket,
                    threads=1,
                    direct=False,
                    precision=precision,
                    muxer=settings.muxer,
                    engine=engines[index % len(engines)],
                )
                nursery.start_soon(run_in_scope, swarm, f"stage{index}", own)
            await swarm.wait_until_serving()
            try:
                yield swarm
            finally:
                nursery.cancel_scope.cancel()
    finally:
        await trio.to_thread.run_sync(swarm.relay.end)


async def run_in_scope(swarm: InProcessSwarm, name: str, settings: StageSettings) -> None:
    """One stage, which a test may end by its scope."""
    with trio.CancelScope() as swarm.scopes[name]:
        await run_stage(settings, report=swarm.report(name))
