"""The swarm's control routes: one handler set, served on a TCP port and over libp2p streams.

Over a libp2p stream the caller is its peer id (``scope["kvasir_peer"]``, proven by the Noise handshake). On TCP
nobody is anybody, so routes on which a peer acts for itself answer 403 there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvasir_peer.api import timeline
from kvasir_peer.errors import NotReadyError, RefusedError, UsageError
from kvasir_peer.ring.volunteering import MAX_BODY_BYTES, MAX_WAIT, Orders, Report

if TYPE_CHECKING:
    from kvasir_peer.ring.telemetry import Timeline

PEER_KEY = "kvasir_peer"  # of the ASGI scope
_MANIFEST_TYPE = "application/vnd.kvasir.manifest"


class SwarmService(Protocol):
    """What the routes ask of a bridge."""

    async def stage_poll(self, peer: str, report: Report) -> Orders:
        """Answer a stage's poll; RefusedError when the peer may not take part."""
        ...

    def admitted(self, peer: str) -> bool:
        """Whether the peer has shown a good ticket."""
        ...

    def manifest_bytes(self, model: str, page: str | None) -> bytes:
        """An encoded root (``page`` None) or page; KeyError when there is none."""
        ...

    def ring_status(self, model: str) -> Mapping[str, Any]:
        """Plan, state and figures of a model's ring (by name or manifest id); KeyError for an unknown model."""
        ...

    def ring_timeline(self, model: str, seconds: float, after: int) -> Timeline:
        """The last seconds of a model's ring, batches with a higher number than ``after``; KeyError as above."""
        ...

    def models_status(self) -> list[Mapping[str, Any]]:
        """Name, manifest id and state of each model."""
        ...


def error(status: int, message: str) -> JSONResponse:
    """The body that every swarm route uses for a refusal."""
    return JSONResponse({"error": {"message": message}}, status)


def peer_of(request: Request) -> str | None:
    """Peer id of the caller, or None on TCP."""
    peer = request.scope.get(PEER_KEY)
    return peer if isinstance(peer, str) else None


async def bounded_body(request: Request, limit: int) -> bytes | None:
    """The body, or None when it is over ``limit`` bytes (nothing more is read then)."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > limit:
            return None
    return bytes(data)


def swarm_routes(service: SwarmService) -> list[Route]:
    """The routes, for a Starlette application."""
    reports = msgspec.json.Decoder(Report)

    async def stage_volunteer(request: Request) -> Response:
        peer = peer_of(request)
        if peer is None:
            return error(403, "a stage volunteers over libp2p, where its key proves who it is")
        body = await bounded_body(request, MAX_BODY_BYTES)
        if body is None:
            return error(413, f"a report has at most {MAX_BODY_BYTES} bytes")
        try:
            report = reports.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            return error(400, f"the report does not parse: {problem}")
        if not 0 <= report.wait <= MAX_WAIT:
            return error(400, f"wait is {report.wait}, it may be 0 to {MAX_WAIT:.0f} seconds")
        try:
            orders = await service.stage_poll(peer, report)
        except RefusedError as refusal:
            return error(403, str(refusal))
        return Response(msgspec.json.encode(orders), media_type="application/json")

    async def manifest(request: Request) -> Response:
        peer = peer_of(request)
        if peer is not None and not service.admitted(peer):
            return error(403, "show a ticket first: POST /api/stage-volunteer")
        model, page = request.path_params["model"], request.path_params.get("page")
        try:
            data = service.manifest_bytes(model, page)
        except KeyError:
            return error(404, f"no such model or page here: {model[:80]} {page or ''}".rstrip())
        # Named by its hash, so it never changes.
        return Response(data, media_type=_MANIFEST_TYPE, headers={"cache-control": "public, immutable"})

    async def ring(request: Request) -> Response:
        try:
            return JSONResponse(service.ring_status(request.path_params["model"]))
        except KeyError:
            return error(404, f"no model {request.path_params['model'][:80]!r} here")
        except NotReadyError as problem:
            return error(503, str(problem))

    async def ring_timeline(request: Request) -> Response:
        peer, model = peer_of(request), request.path_params["model"]
        if peer is not None and not service.admitted(peer):
            return error(403, "show a ticket first: POST /api/stage-volunteer")
        try:
            seconds, after = timeline.asked(
                request.query_params.get("seconds"), request.query_params.get("after")
            )
            found = service.ring_timeline(model, seconds, after)
        except UsageError as problem:
            return error(400, str(problem))
        except KeyError:
            return error(404, f"no model {model[:80]!r} here")
        return Response(msgspec.json.encode(timeline.to_json(found)), media_type="application/json")

    async def rings(request: Request) -> Response:
        return JSONResponse({"models": service.models_status()})

    return [
        Route("/api/stage-volunteer", stage_volunteer, methods=["POST"]),
        Route("/api/manifest/{model}", manifest, methods=["GET"]),
        Route("/api/manifest/{model}/{page}", manifest, methods=["GET"]),
        Route("/api/ring", rings, methods=["GET"]),
        Route("/api/ring/{model:path}/timeline", ring_timeline, methods=["GET"]),
        Route("/api/ring/{model:path}", ring, methods=["GET"]),
    ]
