"""``GET /``: a page for people, in files of its own; it reads the same routes as anybody else.

The page needs nothing from elsewhere, and its Content-Security-Policy lets it have nothing from elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

PAGE = "index.html"
# Also listed in guards.OPEN_PATHS.
FILES = {
    PAGE: "text/html; charset=utf-8",
    "dashboard.css": "text/css; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "timeline.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again each time, and answered with 304 while it is the same
}


@dataclass(frozen=True)
class JoinInfo:
    """What a ticket holds, without its secret.

    Attributes:
        swarm: its name.
        roles: that it allows.
        expires: Unix time, seconds.
        relays: how many.
    """

    swarm: str
    roles: Sequence[str]
    expires: int
    relays: int


class DashboardService(Protocol):
    """What the routes ask of a bridge."""

    def join_info(self) -> JoinInfo:
        """How machines can join."""
        ...


@dataclass(frozen=True)
class _File:
    body: bytes
    kind: str
    etag: str

    def answer(self, request: Request) -> Response:
        headers = {**HEADERS, "etag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers={**headers, "content-type": self.kind})


def _file(name: str) -> _File:
    body = resources.files("kvasir_peer.api").joinpath("static", name).read_bytes()
    return _File(body, FILES[name], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def dashboard_routes(service: DashboardService) -> list[BaseRoute]:
    """The routes, for the application that :func:`kvasir_peer.api.openai.create_app` makes."""
    files = {name: _file(name) for name in FILES}

    async def page(request: Request) -> Response:
        return files[PAGE].answer(request)

    async def static(request: Request) -> Response:
        found = files.get(request.path_params["name"])
        return found.answer(request) if found is not None else Response("no such file\n", 404)

    async def join(request: Request) -> Response:
        info = service.join_info()
        return JSONResponse(
            {
                "swarm": info.swarm,
                "roles": list(info.roles),
                "expires": info.expires,
                "relays": info.relays,
            }
        )

    return [
        Route("/", page, methods=["GET"]),
        Route("/static/{name}", static, methods=["GET"]),
        Route("/api/join", join, methods=["GET"]),
    ]
