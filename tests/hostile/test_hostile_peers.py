"""Invited peers that lie, storm and break off: they may stop a ring, but the bridge and honest peers go on."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import trio
from helpers_hostile import Besieged, besieged, offer, poll, until

from kvasir_peer import ticket
from kvasir_peer.errors import KvasirError, LinkError
from kvasir_peer.net.link import Link
from kvasir_peer.net.node import Node
from kvasir_peer.roles.stage import run_stage
from kvasir_peer.settings import StageSettings
from kvasir_peer.wire import chunks, ring

MANY = 200

ABSURD: list[dict[str, Any]] = [
    {"offer": offer(memory=-1)},
    {"offer": offer(memory=10**400)},
    {"offer": offer(disk=-(10**30))},
    {"offer": offer(read_bytes_per_second=-5.0)},
    {"offer": offer(read_bytes_per_second=1e-300)},
    {"offer": offer(read_bytes_per_second=1e15)},
    {"offer": offer(addresses=["/ip4/127.0.0.1/tcp/1"] * 2_000)},
    {"offer": offer(addresses=["/ip4/127.0.0.1/tcp/1"] * 17)},
    {"offer": offer(addresses=["nonsense", "", "/", "\0", "/ip4/127.0.0.1/tcp/1/p2p/x"])},
    {"offer": offer(engine="\x1b[2J" * 8)},
    {"offer": offer(on_disk=[[5, 1], [0, 60_000]], loaded=[3, 3])},
    {"figures": {"batches": 10**400}},
    {"figures": {"held_ms": 1e15, "path": "\n\x1b[31m"}},
    {"transfer": {"done": 9, "total": 3}, "state": "fetching"},
    {"transfer": {"done": -(10**300), "total": 10**300}, "state": "fetching"},
    {"plan": "x" * 128, "epoch": (1 << 32) - 1, "state": "serving", "running": True, "kept": True},
    {"epoch": 1 << 70},
    {"state": "broken", "reason": "\x1b[2J" * 4000, "lost": "nobody"},
    {"leaving": True, "state": "idle", "standby": [0, 5]},
    {"wait": -1.0},
    {"wait": 1e9},
]


async def test_a_peer_that_lies_in_its_reports_changes_nothing_for_others(tmp_path: Path) -> None:
    async with (
        besieged(tmp_path) as bridge,
        bridge.attacker() as (_, liar),
        bridge.attacker() as (_, stranger),
        bridge.attacker() as (_, honest),
    ):
        answer = await poll(stranger, "")
        assert answer.status_code == 403 and "ticket" in answer.text
        for path in ("/api/manifest/x", "/api/manifest/../../etc/passwd", "/api/manifest/%2e%2e%2f/root"):
            assert (await stranger.get(path)).status_code in (403, 404)

        for report in ABSURD:
            answer = await poll(liar, bridge.secret, **report)
            assert answer.status_code in (200, 400), (report, answer.status_code, answer.text[:200])
            await bridge.lives()
        for body in (b"", b"[" * 60_000, b'{"x":' * 10_000, b"\xff" * 100, b'{"offer":NaN}', b"0" * 100_000):
            answer = await liar.post("/api/stage-volunteer", content=body)
            assert answer.status_code in (400, 413), (body[:20], answer.status_code)

        # The last of its offers were fit for a stage; with an honest peer beside it there is a plan.
        await poll(liar, bridge.secret, offer=offer(addresses=["nonsense"]))
        await poll(honest, bridge.secret)
        status = await bridge.lives()
        assert status["epoch"] >= 1 and len(status["stages"]) == 2

        # Loaded, broken, loaded, broken: epochs go by, and the bridge with them.
        for round_ in range(6):
            status = await bridge.lives()
            known = {"plan": status["plan"], "epoch": status["epoch"], "kept": True}
            await poll(honest, bridge.secret, state="loaded", **known)
            bad = offer(memory=10**30, addresses=["x"] * 200) if round_ % 2 else offer(memory=1 << 40)
            answer = await poll(liar, bridge.secret, state="loaded", offer=bad, **known)
            if answer.status_code == 200:
                await poll(liar, bridge.secret, state="broken", reason="no reason", lost="nobody", **known)
            await trio.sleep(0.1)
        await bridge.lives()


async def test_a_ticket_is_good_for_its_roles_until_its_end_only(tmp_path: Path) -> None:
    async with besieged(tmp_path, ticket_roles=("volunteer",)) as bridge, bridge.attacker() as (_, client):
        invited = ticket.parse(bridge.ticket)
        wider = ticket.Ticket(
            invited.relays,
            invited.bridge,
            invited.swarm,
            frozenset(ticket.ROLES),
            invited.expires,
            invited.secret,
        )
        bare = invited.secret.hex()
        for shown in (invited.credential(), wider.credential(), bare, "", "ff" * 22, "no hexadecimal"):
            answer = await poll(client, shown)
            assert answer.status_code == 403, shown
        answer = await client.post("/api/coordinator", json={"secret": wider.credential()})
        assert answer.status_code == 403
        own = (tmp_path / "bridge" / "swarm.secret").read_text()
        past = int(time.time()) - 1
        over = ticket.Ticket(
            invited.relays,
            invited.bridge,
            invited.swarm,
            frozenset({"stage"}),
            past,
            ticket.secret_for(bytes.fromhex(own), {"stage"}, past),
        )
        assert (await poll(client, over.credential())).status_code == 403
        body = {"memory": 1 << 30, "disk": 1 << 30, "secret": invited.credential()}
        assert (await client.post("/api/expert-volunteer", json=body)).status_code == 200


async def test_storms_of_polls_and_of_connections_pass(tmp_path: Path) -> None:
    async with besieged(tmp_path) as bridge, bridge.attacker() as (node, client):
        assert (await poll(client, bridge.secret)).status_code == 200

        async def hold() -> None:
            async with node.http_client(bridge.bridge) as one:
                try:
                    await poll(one, bridge.secret, wait=50.0)
                except httpx.HTTPError:
                    return  # a stream too many is closed

        async with trio.open_nursery() as nursery:
            for _ in range(MANY):
                nursery.start_soon(hold)
            await trio.sleep(1.0)
            await bridge.lives()
            nursery.cancel_scope.cancel()  # all leave in the middle

        async def storm() -> None:
            async with Node.open(os.urandom(32), relays=[bridge.relay], direct=False) as one:
                with trio.move_on_after(20):
                    async with one.http_client(bridge.bridge) as other:
                        try:
                            await poll(other, "")
                        except httpx.HTTPError:
                            return

        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(storm)
        async with bridge.attacker() as (_, honest):
            assert (await poll(honest, bridge.secret)).status_code == 200
        await bridge.lives()


async def _opened(node: Node, bridge: Besieged, protocol: str, *frames: bytes | list[Any]) -> Link:
    link = await node.open_link(bridge.bridge, protocol, max_frame=1 << 20)
    for frame in frames:
        await link.send(frame)
    return link


async def _ends(link: Link) -> None:
    """The other side closes the link."""
    with trio.fail_after(30), pytest.raises(KvasirError):
        while True:
            message, _ = ring.OPENING.decode(await link.receive())
            assert isinstance(message, ring.Refusal)


async def test_links_that_make_no_sense_end_alone(tmp_path: Path) -> None:
    hello = ring.OPENING.encode
    async with besieged(tmp_path) as bridge, bridge.attacker() as (node, client):
        await poll(client, bridge.secret)
        for first in (
            hello(ring.Hello("tokens", "plan", 1)),
            hello(ring.Hello("tokens", "p" * 900, (1 << 63) - 1)),
            hello(ring.Hello("batches", "plan", 1)),
            hello(ring.Hello("requests", "plan", -1)),
            hello(ring.Welcome(1)),
            b"",
            b"\x01",
            b"\xff" * 600,
            bytes(ring.MAX_OPENING_FRAME + 1),
            bytes(1 << 19),
        ):
            try:
                link = await _opened(node, bridge, ring.PROTOCOL, first)
                await _ends(link)
            except LinkError:
                continue  # it was closed before all was sent
        await bridge.lives()

    async with besieged(tmp_path / "again") as bridge, bridge.attacker() as (node, client):
        await poll(client, bridge.secret)
        wants = chunks.CODEC.encode(chunks.Want(tuple(os.urandom(32) for _ in range(64))))
        links = [await _opened(node, bridge, chunks.PROTOCOL) for _ in range(8)]
        async with trio.open_nursery() as nursery:
            for link in links:

                async def ask(link: Link = link) -> None:
                    for _ in range(4):
                        await link.send(wants)
                    for _ in range(64):
                        message, _ = chunks.CODEC.decode(await link.receive())
                        assert isinstance(message, chunks.Lack)
                    link.close()  # three quarters of the answers are still to come

                nursery.start_soon(ask)
        for bad in (b"\x01\x02\x00\x00\x00\xc4\x00", bytes(4000), hello(ring.Hello("tokens", "x", 1))):
            link = await _opened(node, bridge, chunks.PROTOCOL, bad)
            with trio.fail_after(30), pytest.raises(LinkError):
                await link.receive()
        await bridge.lives()


RAW: list[bytes] = [
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /api/stage-volunteer HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 50\r\n\r\nhello",
    b"POST /api/stage-volunteer HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /api/stage-volunteer HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n"
    + b"x" * 5_000_000,
    b"POST /api/stage-volunteer HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /api/stage-volunteer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx",
    b"GET /api/ring HTTP/9.9\r\nHost: x\r\n\r\n",
    b"GET \xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /api/manifest/%ff%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://other/api/ring HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x00" * 1000,
    b"GET /api/ring HTTP/1.1\r\nHost: x\r\n\r\n" * 300,  # nobody reads the answers
]


async def test_http_that_breaks_the_protocol_costs_its_stream_only(tmp_path: Path) -> None:
    async with besieged(tmp_path) as bridge, bridge.attacker() as (node, client):
        await poll(client, bridge.secret)

        async def send(data: bytes) -> None:
            _, stream = await node._open_stream(bridge.bridge, "/http/1.1", ())
            try:
                with trio.move_on_after(5):
                    await stream.send_all(data)
                    answer = await stream.receive_some(65536)
                    assert not answer or answer.startswith(b"HTTP/1.1 "), answer[:60]
            except LinkError:
                pass  # closed in the middle of what was sent
            finally:
                stream.reset("enough")

        async def drip() -> None:
            """A request that never ends."""
            _, stream = await node._open_stream(bridge.bridge, "/http/1.1", ())
            for byte in b"POST /api/stage-volunteer HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{":
                await stream.send_all(bytes([byte]))
            await trio.sleep(2)
            stream.reset("enough")

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(drip)
            for data in RAW:
                await send(data)
        assert (await poll(client, bridge.secret)).status_code == 200
        await bridge.lives()


class _Fake:
    """A stage that is none: it holds the places it is given and says what it likes."""

    def __init__(self, node: Node, client: httpx.AsyncClient, bridge: Besieged) -> None:
        self.node, self.client, self.bridge = node, client, bridge
        self.plan, self.epoch = "", 0
        self.taken: list[tuple[str, Link]] = []
        self.came = trio.Event()
        node.handle(ring.PROTOCOL, 1 << 20, self._take)

    async def _take(self, link: Link) -> None:
        hello, _ = ring.OPENING.decode(await link.receive())
        await link.send(ring.OPENING.encode(ring.Welcome(hello.epoch)))
        self.taken.append((hello.purpose, link))
        self.came.set()
        await trio.sleep_forever()

    async def say(self, state: str, **more: Any) -> None:
        known = {"plan": self.plan, "epoch": self.epoch} if self.epoch else {}
        answer = await poll(
            self.client,
            self.bridge.secret,
            state=state,
            kept=True,
            offer=offer(addresses=self.node.addresses()),
            **known,
            **more,
        )
        assert answer.status_code == 200, answer.text

    async def follow(self) -> None:
        """Take the present plan, and be loaded for it."""
        status = await self.bridge.lives()
        self.plan, self.epoch = status["plan"], status["epoch"]
        await self.say("loaded")

    async def open(self, peer: str, purpose: ring.Purpose) -> Link:
        """A welcomed link."""
        while True:
            link = await self.node.open_link(peer, ring.PROTOCOL, max_frame=1 << 20)
            await link.send(ring.OPENING.encode(ring.Hello(purpose, self.plan, self.epoch)))
            answer, _ = ring.OPENING.decode(await link.receive())
            if isinstance(answer, ring.Welcome):
                return link
            link.close()
            await trio.sleep(0.1)


def _frame(kind: int, *fields: Any) -> bytes:
    header = msgspec.msgpack.encode(list(fields))
    return bytes([kind]) + len(header).to_bytes(4, "little") + header


@pytest.mark.parametrize("who", ["head", "tail"])
async def test_a_ring_of_liars_cannot_end_its_bridge(tmp_path: Path, who: str) -> None:
    output = [1, 1, 0, 5, 0.0, [], 0]
    trace = [0, 1.0, 1.0, 0.0, 0, 1.0, 0.0, 1, 1]
    absurd = {
        "tail": lambda fake: [
            _frame(7, fake.plan, fake.epoch, 0, bytes(32), [output] * 200, [trace]),
            _frame(7, fake.plan, fake.epoch, 1 << 63, b"", [output], [[0, 1e308, -1e308, 0.0, -5]] * 70),
        ],
        "head": lambda fake: [
            _frame(8, fake.plan, fake.epoch, -1, b"", [[1, -5, True]] * 500),
            _frame(11, -1, "busy", "x" * 3000, float("nan")),
        ],
    }[who]
    async with (
        besieged(tmp_path) as bridge,
        bridge.attacker() as (first, one),
        bridge.attacker() as (second, two),
    ):
        head, tail = _Fake(first, one, bridge), _Fake(second, two, bridge)
        await head.say("idle")
        await tail.say("idle")
        for number in range(2):
            before = head.epoch

            async def planned(before: int = before) -> bool:
                for fake in (head, tail):
                    await fake.follow()
                status = await bridge.lives()
                return status["state"] == "starting" and status["epoch"] > before

            await until(planned, "the next epoch starts")
            with trio.fail_after(30):
                links = {
                    "head": await head.open(bridge.bridge, "tokens"),
                    "tail": await tail.open(bridge.bridge, "tokens"),
                }
            attacker = {"head": head, "tail": tail}[who]
            await links[who].send(absurd(attacker)[number])
            with trio.fail_after(30), pytest.raises(LinkError):
                while True:
                    await links[who].receive()
            await bridge.lives()


async def test_a_tail_that_lies_cannot_end_an_honest_head(tmp_path: Path) -> None:
    async with besieged(tmp_path) as bridge, trio.open_nursery() as nursery:
        said: list[str] = []
        home = tmp_path / "stage"
        home.mkdir()
        own = StageSettings(home=home, ticket=bridge.ticket, threads=1, direct=False, engine="onnx")

        async def serve() -> None:
            await run_stage(own, report=lambda progress: said.append(progress.line()))
            raise AssertionError("the honest stage ended by itself")

        nursery.start_soon(serve)

        async def joined() -> bool:
            return "1 of 2" in (await bridge.lives())["missing"]

        await until(joined, "the honest stage has joined")
        async with bridge.attacker() as (node, client):
            tail = _Fake(node, client, bridge)
            await tail.say("idle")
            for token in (1 << 40, -1, 4096):

                async def starts(before: int = tail.epoch) -> bool:
                    await tail.follow()
                    status = await bridge.lives()
                    return status["state"] == "starting" and status["epoch"] > before

                await until(starts, "the next epoch starts")
                head = (await bridge.lives())["stages"][0]["peer"]
                assert head != node.peer_id
                with trio.fail_after(60):
                    results = await tail.open(head, "results")
                    tokens = await tail.open(bridge.bridge, "tokens")

                    async def ask() -> None:
                        async with httpx.AsyncClient(base_url=bridge.base_url, timeout=60) as user:
                            body = {"model": "stories260K", "prompt": "Once", "max_tokens": 2}
                            while True:
                                if (await user.post("/v1/completions", json=body)).status_code == 200:
                                    return
                                await trio.sleep(0.2)

                    async with trio.open_nursery() as users:
                        users.start_soon(ask)
                        while not any(purpose == "batches" for purpose, _ in tail.taken):
                            await tail.came.wait()
                            await trio.sleep(0.05)
                        link = next(link for purpose, link in reversed(tail.taken) if purpose == "batches")
                        codec = ring.codec(_WIDE)
                        while True:
                            message, _ = codec.decode(await link.receive())
                            if isinstance(message, ring.Batch):
                                break
                        row = int.from_bytes(message.membership[4:12], "little")
                        answer = [row, 1, 4, token, 0.0, [], 0]
                        trace = [0, 1.0, 1.0, 0.0, 0, 1.0, 0.0, 1, 1]
                        await results.send(
                            _frame(
                                7,
                                tail.plan,
                                tail.epoch,
                                message.sequence,
                                message.digest,
                                [answer],
                                [trace] * 2,
                            )
                        )
                        with pytest.raises(LinkError):
                            while True:
                                await results.receive()
                        users.cancel_scope.cancel()
                    tokens.close()
                    tail.taken.clear()
                    tail.came = trio.Event()
        await bridge.lives()
        nursery.cancel_scope.cancel()


_WIDE = ring.Limits(
    rows=4096, slots=4096, context_length=1 << 20, vocab=1 << 22, top_logprobs=20, stages=ring.MAX_STAGES
)
