"""Nodes on loopback: links, HTTP, refusals, and a clean end."""

from __future__ import annotations

import json
import logging

import httpx
import pytest
import trio
from helpers_net import ECHO, LOOPBACK, echo_link, key, nodes, pattern, until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from kvasir_peer.errors import LinkError
from kvasir_peer.identity import Identity
from kvasir_peer.net import http
from kvasir_peer.net.link import Link, Priority
from kvasir_peer.net.node import Node, PeerEvent


async def test_a_link_carries_frames_of_any_size() -> None:
    async with nodes(2) as (a, b):
        a.handle(ECHO, 8_000_000, echo_link)
        link = await b.open_link(a.peer_id, ECHO, addresses=a.addresses())
        assert link.remote_peer == a.peer_id and link.path == "direct"
        for size in (0, 1, 1000, 16 * 1024, 5_000_000):
            data = pattern(size)
            await link.send(data, Priority.PREFILL)
            assert bytes(await link.receive()) == data


async def test_the_handler_knows_the_caller_and_may_refuse() -> None:
    async with nodes(3) as (a, friend, stranger):
        seen: list[str] = []

        async def handler(link: Link) -> None:
            seen.append(link.remote_peer)
            await echo_link(link)

        a.handle(ECHO, 1000, handler, accept=lambda peer: peer == friend.peer_id or "who are you")
        link = await friend.open_link(a.peer_id, ECHO, addresses=a.addresses())
        refused = await stranger.open_link(a.peer_id, ECHO, addresses=a.addresses())
        await link.send(b"hi")
        assert bytes(await link.receive()) == b"hi"
        with pytest.raises(LinkError, match=r"refuses .*who are you"):
            await refused.receive()
        with pytest.raises(LinkError, match="who are you"):
            await refused.send(b"please")
        assert seen == [friend.peer_id]
        assert a.statistics().refused == {ECHO: 1}


async def test_a_frame_over_the_limit_ends_its_link_and_no_other() -> None:
    async with nodes(2) as (a, b):
        a.handle(ECHO, 1000, echo_link)
        bad = await b.open_link(a.peer_id, ECHO, addresses=a.addresses())
        good = await b.open_link(a.peer_id, ECHO)
        await bad.send(bytes(1001))
        with pytest.raises(LinkError):
            await bad.receive()
        await good.send(b"fine")
        assert bytes(await good.receive()) == b"fine"
        (connection,) = a.host.connections(b.peer_id)
        assert connection.statistics().violations == {"oversize": 1}


async def test_a_failing_handler_costs_its_own_stream_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with nodes(2) as (a, b):

        async def broken(link: Link) -> None:
            await link.receive()
            raise KeyError("a mistake")

        a.handle("/broken/1", 1000, broken)
        a.handle(ECHO, 1000, echo_link)
        bad = await b.open_link(a.peer_id, "/broken/1", addresses=a.addresses())
        good = await b.open_link(a.peer_id, ECHO)
        with caplog.at_level(logging.CRITICAL, "kvasir_peer.net.host"):
            await bad.send(b"x")
            with pytest.raises(LinkError):
                await bad.receive()
        await good.send(b"fine")
        assert bytes(await good.receive()) == b"fine"


async def test_an_unknown_protocol_and_an_unknown_peer_are_said_in_one_line() -> None:
    async with nodes(2) as (a, b):
        with pytest.raises(LinkError, match="does not speak /nothing/1"):
            await b.open_link(a.peer_id, "/nothing/1", addresses=a.addresses())
        with pytest.raises(LinkError, match="no address"):
            await b.connect(Identity.generate().peer_id)
        # Addresses come from other peers: what is wrong with them is no mistake of whoever sits at the keyboard.
        nonsense = "/ip4/127.0.0.1/tcp/1/p2p/nonsense"
        elsewhere = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
        for bad, words in ((nonsense, "no peer id"), (elsewhere, "does not lead")):
            with pytest.raises(LinkError, match=words):
                await b.connect(a.peer_id, [bad])
        async with nodes(1) as (d,):
            await d.connect(a.peer_id, [nonsense, *a.addresses(), elsewhere])
        dead = f"/ip4/127.0.0.1/tcp/1/p2p/{a.peer_id}"
        async with nodes(1) as (c,):
            with pytest.raises(LinkError, match=r"cannot reach .*: Connection refused"):
                await c.connect(a.peer_id, [dead])


async def test_a_wrong_peer_behind_an_address_is_refused() -> None:
    async with nodes(3) as (a, b, c):
        port = a.addresses()[0].split("/p2p/")[0]
        with pytest.raises(LinkError, match="handshake"):
            await b.connect(c.peer_id, [f"{port}/p2p/{c.peer_id}"])


async def test_peers_come_and_go_at_once() -> None:
    async with nodes(1) as (a,):
        events: list[PeerEvent] = []
        a.on_peer(events.append)
        async with nodes(1) as (b,):
            await b.connect(a.peer_id, a.addresses())
            await until(lambda: events)
            assert a.peers() == {b.peer_id: "direct"}
            assert (events[0].peer, events[0].state) == (b.peer_id, "connected")
        await until(lambda: len(events) == 2, timeout=5)
        assert events[1].state == "gone" and not a.peers()


async def test_a_port_in_use_is_said_before_anything_runs() -> None:
    async with nodes(1) as (a,):
        taken = a.host.listening[0]
        with pytest.raises(OSError, match=r"cannot listen on .*choose another port"):
            async with Node.open(key(), listen=[taken]):
                pytest.fail("it ran")


async def test_a_node_ends_clean_while_everything_is_in_use() -> None:
    async with nodes(1) as (a,):
        a.handle(ECHO, 10_000_000, echo_link)

        async def endless(scope: object, receive: object, send: object) -> None:
            await trio.sleep_forever()

        a.serve_http(endless)
        # Leaving the block with links, a request and a dial under way must neither hang nor raise.
        with trio.fail_after(20):
            async with nodes(1) as (b,), trio.open_nursery() as nursery:
                link = await b.open_link(a.peer_id, ECHO, addresses=a.addresses())

                async def flood() -> None:
                    with pytest.raises(LinkError):
                        while True:
                            await link.send(bytes(100_000), Priority.WEIGHTS)

                async def ask() -> None:
                    async with b.http_client(a.peer_id) as client:
                        await client.get("/")

                nursery.start_soon(flood)
                nursery.start_soon(ask)
                await until(lambda: len(b.host.connections(a.peer_id)[0].mux.streams) >= 2)
                link.close()
                nursery.cancel_scope.cancel()
        await until(lambda: not a.peers(), timeout=5)


async def test_leaving_by_cancellation_closes_connections() -> None:
    async with nodes(1) as (a,):
        with trio.move_on_after(10) as scope:
            async with nodes(1) as (b,):
                await b.connect(a.peer_id, a.addresses())
                scope.cancel()
                await trio.sleep_forever()
        await until(lambda: not a.peers(), timeout=5)


async def test_a_receiver_that_stalls_for_eight_seconds_loses_nothing(
    mock_clock: trio.testing.MockClock,
) -> None:
    mock_clock.rate = 8.0  # heartbeats and deadlines run eight times as fast
    async with nodes(2) as (a, b):

        async def slow(link: Link) -> None:
            await trio.sleep(8)
            await echo_link(link)

        a.handle(ECHO, 10_000_000, slow)
        link = await b.open_link(a.peer_id, ECHO, addresses=a.addresses())
        data = pattern(6_000_000)
        await link.send(data, Priority.PREFILL)
        assert bytes(await link.receive()) == data


# --- HTTP ---


async def _who(request: Request) -> JSONResponse:
    body = await request.body()
    return JSONResponse(
        {"peer": request.scope["kvasir_peer"], "bytes": len(body), "q": request.query_params.get("q")}
    )


async def _stream(request: Request) -> StreamingResponse:
    async def parts():
        for number in range(5):
            yield f"part {number}\n".encode()

    return StreamingResponse(parts())


def _app(left: trio.Event | None = None) -> Starlette:
    async def poll(request: Request) -> JSONResponse:
        while not await request.is_disconnected():
            await trio.sleep(0.01)
        if left is not None:
            left.set()
        return JSONResponse({})

    async def fail(request: Request) -> JSONResponse:
        raise KeyError("a mistake")

    return Starlette(
        routes=[
            Route("/who", _who, methods=["GET", "POST"]),
            Route("/stream", _stream),
            Route("/poll", poll),
            Route("/fail", fail),
        ]
    )


async def test_http_knows_the_caller_and_keeps_one_stream() -> None:
    async with nodes(2) as (a, b):
        a.serve_http(_app())
        async with b.http_client(a.peer_id, a.addresses()) as client:
            for number in range(5):
                response = await client.post("/who", params={"q": f"ü{number}"}, content=bytes(100_000))
                assert response.json() == {"peer": b.peer_id, "bytes": 100_000, "q": f"ü{number}"}
            assert str(client.base_url).lower() == f"http://{a.peer_id}".lower()
            (connection,) = b.host.connections(a.peer_id)
            assert len([s for s in connection.mux.streams.values() if s.protocol == http.PROTOCOL]) == 1


async def test_http_answers_stream_and_requests_run_beside_each_other() -> None:
    async with nodes(2) as (a, b):
        left = trio.Event()
        a.serve_http(_app(left))
        async with b.http_client(a.peer_id, a.addresses()) as client, trio.open_nursery() as nursery:
            nursery.start_soon(client.get, "/poll")
            async with client.stream("GET", "/stream") as response:
                text = "".join([part async for part in response.aiter_text()])
            assert text == "".join(f"part {n}\n" for n in range(5))
            nursery.cancel_scope.cancel()
        with trio.fail_after(10):
            await left.wait()


async def test_a_caller_that_is_gone_when_its_answer_comes_is_no_mistake_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked, answered = trio.Event(), trio.Event()

    async def late(request: Request) -> JSONResponse:
        asked.set()
        while not await request.is_disconnected():
            await trio.sleep(0.01)
        answered.set()
        return JSONResponse({"much": "x" * 100_000})

    async with nodes(2) as (a, c):
        a.serve_http(Starlette(routes=[Route("/late", late), Route("/who", _who)]))
        async with (
            nodes(1) as (b,),
            trio.open_nursery() as nursery,
            b.http_client(a.peer_id, a.addresses()) as client,
        ):
            nursery.start_soon(client.get, "/late")
            await asked.wait()
            nursery.cancel_scope.cancel()
        with trio.fail_after(10):
            await answered.wait()
        async with c.http_client(a.peer_id, a.addresses()) as client:
            assert (await client.get("/who")).status_code == 200
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_http_bodies_over_the_limit_and_bad_requests_are_refused() -> None:
    async with nodes(2) as (a, b):
        a.serve_http(_app(), max_body=1000)
        async with b.http_client(a.peer_id, a.addresses()) as client:
            response = await client.post("/who", content=bytes(1001))
            assert response.status_code == 413
            assert (await client.post("/who", content=bytes(1000))).json()["bytes"] == 1000
            assert (await client.get("/nothing")).status_code == 404
        (connection,) = b.host.connections(a.peer_id)
        for garbage in (
            b"GET / HTTP/9.9\r\n\r\n",
            b"\x00\x01\x02\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
        ):
            stream = await connection.open_stream(http.PROTOCOL)
            await stream.send_all(garbage)
            answer = b""
            while part := await stream.receive_some():
                answer += part
            assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 505")), garbage[:20]


async def test_http_client_says_what_went_wrong() -> None:
    async with nodes(2) as (a, b):
        async with b.http_client(a.peer_id, a.addresses()) as client:
            with pytest.raises(httpx.ConnectError, match="does not speak"):
                await client.get("/")
        a.serve_http(_app())
        async with b.http_client(a.peer_id, a.addresses(), timeout=0.2) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.get("/poll")


async def test_a_failing_application_is_a_500_and_the_peer_lives_on() -> None:
    async with nodes(2) as (a, b):
        a.serve_http(_app())
        async with b.http_client(a.peer_id, a.addresses()) as client:
            response = await client.get("/fail")
            assert response.status_code == 500
            assert json.loads((await client.get("/who")).text)["peer"] == b.peer_id


async def test_direct_false_listens_on_nothing() -> None:
    async with Node.open(key(), listen=[LOOPBACK], direct=False) as node:
        assert node.host.listening == [] and node.addresses() == []
