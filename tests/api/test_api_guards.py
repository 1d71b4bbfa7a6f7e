"""Keys, host names, body sizes: what is refused before any route sees it."""

import json

import pytest
import trio
from helpers_api import MODEL, Scripted, serving, until
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

COMPLETION = {"model": MODEL, "prompt": "Hi"}
KEY = "a-key-of-the-owner"


async def raw(port: int, request: bytes) -> bytes:
    """Send bytes as they are, and read the whole answer to a connection that is then closed."""
    connection = await trio.open_tcp_stream("127.0.0.1", port)
    await connection.send_all(request)
    answer = b""
    with trio.fail_after(20):
        async for data in connection:
            answer += data
            head, _, body = answer.partition(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            if length and len(body) >= int(length):
                break
    await connection.aclose()
    return answer


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:1234", 200),
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("[::1]:8000", 200),
        ("127.7.7.7", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("192.168.1.5", 421),
        ("", 421),
        ("[::1", 421),
    ],
)
async def test_host_names_on_loopback(host: str, status: int) -> None:
    async with serving() as server:
        answer = await raw(server.port, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert int(answer.split()[1]) == status
        if status == 421:
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "unknown_host"


async def test_more_host_names_and_public_addresses() -> None:
    async with serving(hosts=["models.example"]) as server:
        assert (await server.get("/v1/models", headers={"Host": "models.example:443"})).status_code == 200
        assert (await server.get("/v1/models", headers={"Host": "other.example"})).status_code == 421
    async with serving(host="0.0.0.0", keys=[KEY]) as server:
        headers = {"Host": "any.example", "Authorization": f"Bearer {KEY}"}
        assert (await server.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (f"Bearer {KEY}", 200),
        (f"bearer  {KEY}", 200),
        ("Bearer another-good-key-1", 200),
        (f"Bearer {KEY}x", 401),
        (f"Bearer {KEY[:-1]}", 401),
        ("Bearer", 401),
        (f"Basic {KEY}", 401),
        (KEY, 401),
        ("Bearer schlüssel", 401),
        (None, 401),
    ],
)
async def test_keys(authorization: str | None, status: int) -> None:
    headers = {} if authorization is None else {"Authorization": authorization.encode()}
    async with serving(keys=[KEY, "another-good-key-1"]) as server:
        got = await server.post("/v1/completions", json=COMPLETION, headers=headers)
        assert got.status_code == status
        if status == 401:
            assert got.json()["error"]["code"] == "invalid_api_key"
            assert got.headers["www-authenticate"] == "Bearer"
            assert KEY not in got.text


async def test_other_routes_stand_behind_the_same_guards() -> None:
    async def secret(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(len(await request.body())))

    routes = [Route("/api/secret", secret, methods=["GET", "POST"]), Route("/health", secret)]
    async with serving(keys=[KEY], routes=routes, max_body=1000) as server:
        assert (await server.get("/api/secret")).status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        assert (await server.get("/api/secret", headers=headers)).text == "0"
        assert (await server.get("/health")).status_code == 200
        assert (await server.post("/api/secret", headers=headers, content=b"x" * 1001)).status_code == 413


async def test_a_body_over_the_limit_is_refused_unread() -> None:
    """By what it announces; and without an announcement as soon as it is over, not when it has come."""
    async with serving(max_body=1000) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        answer = await raw(server.port, head + b"Content-Length: 1000000000000\r\n\r\n")
        assert answer.split()[1] == b"413"
        answer = await raw(server.port, head + b"Transfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001)
        assert answer.split()[1] == b"413" and b"request_too_large" in answer
        padded = json.dumps(COMPLETION).ljust(1000).encode()
        headers = {"Content-Type": "application/json"}
        assert (await server.post("/v1/completions", content=padded, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
async def test_what_a_web_page_may_post_anywhere_is_refused(kind: str | None) -> None:
    async with serving() as server:
        headers = {} if kind is None else {"Content-Type": kind}
        got = await server.post("/v1/completions", content=json.dumps(COMPLETION).encode(), headers=headers)
        assert got.status_code == 415 and server.service.requests == []


async def test_a_client_that_leaves_while_it_sends() -> None:
    async with serving(Scripted()) as server:
        connection = await trio.open_tcp_stream("127.0.0.1", server.port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        await connection.send_all(head + b"Content-Length: 100\r\n\r\n{")
        await connection.aclose()
        await until(lambda: server.api.statistics().disconnected == 1)
        assert server.service.requests == []
