"""Clients of the OpenAI API that dawdle, and words of models and peers that would steer a terminal."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from kvasir_peer.api.errors import ApiError
from kvasir_peer.api.guards import BodyTooSlow, Guards
from kvasir_peer.commands.common import Reporter
from kvasir_peer.commands.terminal import PrintableFormatter, printable, printable_json
from kvasir_peer.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
EVIL = "\x1b]0;owned\x07\x1b[2Jred\r\x9b31m"


async def _refused(request: Request, error: Exception) -> PlainTextResponse:
    assert isinstance(error, ApiError)
    return PlainTextResponse(type(error).__name__, error.status)


async def _ask(messages: list[dict], *, seconds: float) -> tuple[int, bytes]:
    """Status and body of the answer to a POST whose messages come one by one, then nothing more."""

    async def whole(request: Request) -> PlainTextResponse:
        body = await request.body()
        await trio.sleep(2 * seconds)  # computing is not waiting for the body
        left = (await request.receive())["type"]
        return PlainTextResponse(f"{len(body)} {left}")

    app = Starlette(
        routes=[Route("/", whole, methods=["POST"])],
        middleware=[Middleware(Guards, body_seconds=seconds)],
        exception_handlers={ApiError: _refused},
    )
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }
    sent: list[dict] = []
    left = iter(messages)

    async def receive() -> dict:
        await trio.lowlevel.checkpoint()
        message = next(left, None)
        if message is None:
            await trio.sleep_forever()
        assert message is not None
        return message

    async def send(message: dict) -> None:
        sent.append(message)

    with trio.fail_after(30):
        await app(scope, receive, send)
    return sent[0]["status"], sent[1]["body"]


async def test_a_body_that_does_not_come_holds_no_place(autojump_clock: trio.abc.Clock) -> None:
    piece = {"type": "http.request", "body": b"ab", "more_body": True}
    end = {"type": "http.request", "body": b"c", "more_body": False}
    gone = {"type": "http.disconnect"}
    assert await _ask([piece, piece], seconds=5) == (408, BodyTooSlow.__name__.encode())
    assert await _ask([piece, piece, end, gone], seconds=5) == (200, b"5 http.disconnect")


def test_no_control_character_reaches_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert printable("a\tb\nc é 👩‍🚀") == "a\tb\nc é 👩‍🚀"
    assert printable(EVIL) == "]0;owned[2Jred31m"
    assert printable_json({EVIL: [EVIL, 1, None]}) == {printable(EVIL): [printable(EVIL), 1, None]}

    Reporter(json_lines=False)(Progress("problem", f"it said {EVIL}"))
    shown = capsys.readouterr().err
    assert "it said" in shown and "\x1b" not in shown and "\r" not in shown

    record = logging.LogRecord("kvasir_peer", logging.WARNING, "", 0, "a peer said %s", (EVIL,), None)
    assert "\x1b" not in PrintableFormatter("%(message)s").format(record)


def test_nor_by_an_error_of_the_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "kvasir_peer.cli", "chat", f"{EVIL}x"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 2 and "is no address" in run.stderr and "\x1b" not in run.stderr
