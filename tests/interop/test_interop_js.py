"""js-libp2p as relay, as peer, and in a browser: phones come that way."""

from __future__ import annotations

import secrets
from pathlib import Path

import numpy as np
import pytest
import trio
from helpers_interop import PageServer, chromium, program

from kvasir_peer.errors import LinkError, RefusedError
from kvasir_peer.experts.worker_link import WorkerLink, open_worker_link
from kvasir_peer.net.link import Link, Priority
from kvasir_peer.net.node import Node
from kvasir_peer.wire import experts
from kvasir_peer.wire.experts import NO_EXPERT, Bounds

pytestmark = pytest.mark.timeout(180)

WIDTH = 96
BOUNDS = Bounds(n_embd=WIDTH, dtype="f32", max_rows=64, max_experts=4)
SIZES = "0,1,4,255,16384,16385,70000,1000000"
PATHS = pytest.mark.parametrize(
    ("relay", "transport"),
    [("our relay", "tcp"), ("our relay", "websocket"), ("js relay", "websocket")],
    indirect=["relay"],
)


def key() -> bytes:
    return secrets.token_bytes(32)


async def echo(link: Link) -> None:
    """Send back each frame, with the priority after that of control, until the end."""
    while True:
        await link.send(await link.receive(), Priority.DECODE)


async def ask_for_sums(node: Node, address: str) -> None:
    """Have routed rows computed by the worker at ``address``, several frames at once, and check each sum."""
    peer = address.rpartition("/p2p/")[2]
    link = await open_worker_link(node, peer, (address,), "model", 1, BOUNDS)
    assert link.ranges == ((3, 0, 8), (4, 0, 8))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_run_until_closed, link)
        with trio.fail_after(60):
            async with trio.open_nursery() as asking:
                for number in range(8):
                    asking.start_soon(_ask, link, 3 + number % 2, 1 + 9 * number, number)
            with pytest.raises(RefusedError, match="layer 5 is not here"):
                await link.ask(5, *_rows(1, 0), Priority.DECODE)
        nursery.cancel_scope.cancel()


async def _run_until_closed(link: WorkerLink) -> None:
    try:
        await link.run()
    except LinkError:
        return


def _rows(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(seed)
    ids = numbers.integers(-1, 8, (rows, 4)).astype(np.int32)
    return ids, numbers.random((rows, 4), np.float32), numbers.standard_normal((rows, WIDTH), np.float32)


async def _ask(link: WorkerLink, layer: int, rows: int, seed: int) -> None:
    ids, weights, x = _rows(rows, seed)
    answer = await link.ask(layer, ids, weights, x, Priority.DECODE)
    assert NO_EXPERT not in ids
    factors = np.where(ids < 0, 0.0, weights.astype(np.float64) * (ids + 1)).sum(axis=1)
    np.testing.assert_allclose(answer.sums, factors[:, None] * x, rtol=1e-6)


async def test_a_js_relay_carries_links_between_our_peers(libp2p_relay: dict[str, str]) -> None:
    async with (
        Node.open(key(), relays=[libp2p_relay["tcp"]], direct=False) as one,
        Node.open(key(), relays=[libp2p_relay["websocket"]], direct=False) as two,
    ):
        for node in (one, two):
            await node.relays_ready(30)
        two.handle("/kvasir/test/echo/1", 16 * 1024 * 1024, echo)
        link = await one.open_link(two.peer_id, "/kvasir/test/echo/1", addresses=two.addresses())
        assert link.path == "relayed"
        with trio.fail_after(60):
            for size in (0, 1, 16_384, 300_000, 4 * 1024 * 1024):
                frame = secrets.token_bytes(size)
                await link.send(frame)
                assert await link.receive() == frame
        for node in (one, two):
            (held,) = node.statistics().relays
            assert held.state == "reserved" and held.failures == 0


@PATHS
async def test_a_js_peer_calls_our_peer_through_a_relay(
    relay: dict[str, str], transport: str, workspace: Path
) -> None:
    async with Node.open(key(), relays=[relay["tcp"]], direct=False) as node:
        await node.relays_ready(30)
        node.handle(experts.PROTOCOL, 2 * 1024 * 1024, echo)
        address = f"{relay[transport]}/p2p-circuit/p2p/{node.peer_id}"
        with program("js peer", ("node", workspace / "peer.js", "call", address, SIZES)) as caller:
            assert await caller.hear("echoed", "failed") == f"echoed {4 * len(SIZES.split(','))}"


async def test_a_js_peer_is_told_why_its_link_is_refused(
    kvasir_relay: dict[str, str], workspace: Path
) -> None:
    async with Node.open(key(), relays=[kvasir_relay["tcp"]], direct=False) as node:
        await node.relays_ready(30)
        node.handle(experts.PROTOCOL, 1024, echo, accept=lambda peer: "you are not in the dispatch map")
        address = f"{kvasir_relay['tcp']}/p2p-circuit/p2p/{node.peer_id}"
        with program("js peer", ("node", workspace / "peer.js", "call", address, "1000")) as caller:
            said = await caller.hear("echoed", "failed")
        assert said == "failed refused: you are not in the dispatch map"
        assert node.statistics().refused == {experts.PROTOCOL: 1}


@PATHS
async def test_a_js_worker_computes_for_our_peer_through_a_relay(
    relay: dict[str, str], transport: str, workspace: Path
) -> None:
    with program("js worker", ("node", workspace / "peer.js", "serve", relay[transport])) as worker:
        address = (await worker.hear("listening")).split()[1]
        async with Node.open(key()) as node:
            await ask_for_sums(node, address)
            assert await worker.hear("served") == "served to the end"


async def test_a_web_page_calls_and_computes_through_our_relay(
    kvasir_relay: dict[str, str], workspace: Path, tmp_path: Path
) -> None:
    server = PageServer(workspace)
    try:
        async with Node.open(key(), relays=[kvasir_relay["tcp"]]) as node:
            await node.relays_ready(30)
            node.handle(experts.PROTOCOL, 2 * 1024 * 1024, echo)
            relay = kvasir_relay["websocket"]
            target = f"{relay}/p2p-circuit/p2p/{node.peer_id}"
            page = f"{server.url}?relay={relay}&target={target}&sizes={SIZES}"
            with program("chromium", chromium(page, tmp_path / "profile")) as browser:
                said = await server.hear("echoed", lambda: browser.output[-3000:])
                assert said == f"echoed {4 * len(SIZES.split(','))}"
                address = (await server.hear("listening", lambda: browser.output[-3000:])).split()[1]
                await ask_for_sums(node, address)
                said = await server.hear("served", lambda: browser.output[-3000:])
                assert said == "served to the end"
    finally:
        server.close()
