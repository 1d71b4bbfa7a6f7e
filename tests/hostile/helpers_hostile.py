"""A real bridge behind a real relay, and peers that have its ticket and mean it harm."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import trio

from kvasir_peer import ticket
from kvasir_peer.net.node import Node
from kvasir_peer.roles.bridge import run_bridge
from kvasir_peer.settings import BridgeReady, BridgeSettings

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests" / "data" / "stories260K.gguf"
DEADLINE = 60.0  # seconds for a step; generous, machines may be busy

_RELAY = "import sys; from kvasir_relay.cli import main; sys.argv[0] = 'kvasir-relay'; main()"


class Besieged:
    """What an attacker sees of a bridge.

    Attributes:
        base_url: of its TCP port, without ``/v1``.
        ticket: as text.
        secret: the ticket's credential, in hexadecimal.
        bridge: peer id.
        relay: address.

    """

    def __init__(self, relay: str, found: BridgeReady) -> None:
        self.relay = relay
        self.base_url = found.base_url.removesuffix("/v1")
        self.ticket = found.ticket
        self.bridge = found.peer_id
        self.secret = ticket.parse(found.ticket).credential()
        self.said: list[str] = []

    @contextlib.asynccontextmanager
    async def attacker(self) -> AsyncIterator[tuple[Node, httpx.AsyncClient]]:
        """A peer of its own, reserved at the relay, and its HTTP client to the bridge."""
        async with Node.open(os.urandom(32), relays=[self.relay], direct=False) as node:
            await node.relays_ready(DEADLINE)
            async with node.http_client(self.bridge) as client:
                yield node, client

    async def lives(self) -> dict[str, Any]:
        """The bridge answers on every page that its owner looks at; returns the ring's status."""
        async with httpx.AsyncClient(base_url=self.base_url, timeout=DEADLINE) as client:
            for page in ("/health", "/metrics", "/v1/models", "/api/ring"):
                answer = await client.get(page)
                assert answer.status_code == 200, (page, answer.status_code, answer.text[:300])
            name = (await client.get("/v1/models")).json()["data"][0]["id"]
            answer = await client.get(f"/api/ring/{name}")
            assert answer.status_code == 200, answer.text[:300]
            return dict(answer.json())


def offer(**changes: Any) -> dict[str, Any]:
    """An honest-looking offer of a machine that is large enough for the model."""
    return {"memory": 4 << 30, "disk": 4 << 30, "engine": "onnx", **changes}


async def poll(client: httpx.AsyncClient, secret: str, **report: Any) -> httpx.Response:
    """One report; ``offer`` is honest where none is given."""
    body = {"offer": offer(), "secret": secret, **report}
    return await client.post("/api/stage-volunteer", json=body)


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until a condition holds; AssertionError after :data:`DEADLINE`."""
    with trio.move_on_after(DEADLINE):
        while not await condition():
            await trio.sleep(0.05)
        return
    raise AssertionError(f"it did not come to this: {what}")


def _start_relay(folder: Path) -> tuple[subprocess.Popen[str], str]:
    (folder / "bridge").mkdir(parents=True)
    relay = subprocess.Popen(
        [sys.executable, "-c", _RELAY, "--home", str(folder / "relay"), "--listen", "/ip4/127.0.0.1/tcp/0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "relay")])},
    )
    assert relay.stdout is not None
    for line in relay.stdout:
        if "/p2p/" in line:
            return relay, next(word for word in line.split() if "/p2p/" in word)
    raise AssertionError("the relay did not start")


@contextlib.asynccontextmanager
async def besieged(folder: Path, **settings: Any) -> AsyncIterator[Besieged]:
    """A bridge that serves, in this process; that it ends by itself fails the test."""
    relay, address = await trio.to_thread.run_sync(_start_relay, folder)
    try:
        home = folder / "bridge"
        own = BridgeSettings(
            home=home,
            **{
                "model": str(MODEL),
                "relays": (address,),
                "port": 0,
                "direct": False,
                "stages": 2,
                **settings,
            },
        )
        async with trio.open_nursery() as nursery:
            ready = trio.Event()
            found: list[BridgeReady] = []
            said: list[str] = []

            def take(what: BridgeReady) -> None:
                found.append(what)
                ready.set()

            async def serve() -> None:
                await run_bridge(own, ready=take, report=lambda progress: said.append(progress.line()))
                raise AssertionError("the bridge ended by itself")

            nursery.start_soon(serve)
            with trio.fail_after(DEADLINE):
                await ready.wait()
            target = Besieged(address, found[0])
            target.said = said
            yield target
            nursery.cancel_scope.cancel()
    finally:
        relay.terminate()
        await trio.to_thread.run_sync(relay.wait)
