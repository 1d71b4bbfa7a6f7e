"""The market's routes, on TCP and over libp2p streams (see :mod:`kvasir_peer.api.swarm` for who the caller is)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvasir_peer.api.swarm import bounded_body, error, peer_of
from kvasir_peer.errors import RefusedError, WireError
from kvasir_peer.experts.volunteering import (
    MAX_BODY_BYTES,
    MAX_WAIT,
    Ask,
    Coverage,
    DispatchReport,
    Given,
    Heard,
    Join,
    Joined,
    MapAnswer,
    Wiring,
)


class ExpertsService(Protocol):
    """What the routes ask of a bridge."""

    async def volunteer(self, peer: str, ask: Ask) -> Given:
        """Answer an idle peer; RefusedError when it may not take part."""
        ...

    def would_give(self, ask: Ask) -> Given:
        """What a volunteer with this budget would get."""
        ...

    async def coverage(self, caller: str | None, body: Coverage) -> Wiring:
        """Take a signed claim; RefusedError, WireError."""
        ...

    async def coordinator(self, peer: str, join: Join) -> Joined:
        """A coordinator is there; RefusedError."""
        ...

    async def dispatcher(self, peer: str, report: DispatchReport) -> Heard:
        """What a dispatching stage has seen; RefusedError."""
        ...

    async def dispatch_map(self, model: str, after: int, wait: float) -> MapAnswer:
        """The signed map; KeyError for an unknown model."""
        ...

    def demand(self, model: str | None) -> Sequence[dict[str, object]]:
        """What is wanted."""
        ...

    def recruitment(self) -> Sequence[dict[str, object]]:
        """Load and targets of each model."""
        ...

    def admitted(self, peer: str) -> bool:
        """Whether the peer has shown a good ticket."""
        ...


def expert_routes(service: ExpertsService) -> list[Route]:
    """The routes, for a Starlette application."""
    asks = msgspec.json.Decoder(Ask)
    claims = msgspec.json.Decoder(Coverage)
    joins = msgspec.json.Decoder(Join)
    reports = msgspec.json.Decoder(DispatchReport)

    async def parse(request: Request, decoder: Any) -> Any:
        body = await bounded_body(request, MAX_BODY_BYTES)
        if body is None:
            return error(413, f"a body has at most {MAX_BODY_BYTES} bytes")
        try:
            found = decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            return error(400, f"the body does not parse: {problem}")
        if not 0 <= found.wait <= MAX_WAIT:
            return error(400, f"wait is {found.wait}, it may be 0 to {MAX_WAIT:.0f} seconds")
        return found

    def answer(body: msgspec.Struct) -> Response:
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def of_peer(
        request: Request,
        decoder: Any,
        serve: Callable[[str, Any], Awaitable[msgspec.Struct]],
        over_libp2p: str,
    ) -> Response:
        """Answer a peer whose key has proved who it is, and who says something that parses."""
        peer = peer_of(request)
        if peer is None:
            return error(403, f"{over_libp2p} over libp2p, where its key proves who it is")
        body = await parse(request, decoder)
        if isinstance(body, Response):
            return body
        try:
            return answer(await serve(peer, body))
        except RefusedError as refusal:
            return error(403, str(refusal))

    async def volunteer(request: Request) -> Response:
        if request.method == "GET":
            return answer(service.would_give(_budget(request)))
        return await of_peer(request, asks, service.volunteer, "a peer volunteers")

    async def coverage(request: Request) -> Response:
        claim = await parse(request, claims)
        if isinstance(claim, Response):
            return claim
        try:
            return answer(await service.coverage(peer_of(request), claim))
        except RefusedError as refusal:
            return error(403, str(refusal))
        except WireError as problem:
            return error(403 if problem.code in ("signature", "stranger") else 400, str(problem))

    async def coordinator(request: Request) -> Response:
        return await of_peer(request, joins, service.coordinator, "a coordinator joins")

    async def dispatcher(request: Request) -> Response:
        return await of_peer(request, reports, service.dispatcher, "a stage reports")

    async def dispatch_map(request: Request) -> Response:
        peer = peer_of(request)
        if peer is not None and not service.admitted(peer):
            return error(403, "show a ticket first: POST /api/expert-volunteer or /api/coordinator")
        query = request.query_params
        try:
            after, wait = int(query.get("after", "0")), float(query.get("wait", "0"))
        except ValueError:
            return error(400, "after is a version, wait a number of seconds")
        if not 0 <= wait <= MAX_WAIT:
            return error(400, f"wait is {wait}, it may be 0 to {MAX_WAIT:.0f} seconds")
        try:
            return answer(await service.dispatch_map(query.get("model", ""), after, wait))
        except KeyError:
            return error(404, f"no model {query.get('model', '')[:80]!r} here")

    async def demand(request: Request) -> Response:
        return JSONResponse({"models": service.demand(request.query_params.get("model"))})

    async def recruitment(request: Request) -> Response:
        return JSONResponse({"models": service.recruitment()})

    return [
        Route("/api/expert-volunteer", volunteer, methods=["GET", "POST"]),
        Route("/api/expert-coverage", coverage, methods=["POST"]),
        Route("/api/coordinator", coordinator, methods=["POST"]),
        Route("/api/dispatcher", dispatcher, methods=["POST"]),
        Route("/api/dispatch-map", dispatch_map, methods=["GET"]),
        Route("/api/expert-demand", demand, methods=["GET"]),
        Route("/api/moe/recruitment", recruitment, methods=["GET"]),
    ]


def _budget(request: Request) -> Ask:
    query = request.query_params
    try:
        return Ask(memory=int(query.get("memory", "0")), disk=int(query.get("disk", "0")))
    except ValueError:
        return Ask()
