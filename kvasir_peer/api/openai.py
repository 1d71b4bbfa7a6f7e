"""OpenAI's API: models, chat completions, completions; whole or streamed.

The routes hold no state of their own: they check what is asked, turn text into tokens and tokens into text, and leave
the computing to a :class:`CompletionService`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from kvasir_peer.api import answers, asked, openapi
from kvasir_peer.api.answers import Answer, ChatAnswer, CompletionAnswer
from kvasir_peer.api.asked import Asked
from kvasir_peer.api.choice import Choice, Piece
from kvasir_peer.api.errors import ApiError, api_error
from kvasir_peer.api.generation import Generations, Tagged, generating
from kvasir_peer.api.guards import MAX_BODY_BYTES, Guards
from kvasir_peer.api.schema import ChatRequest, CompletionRequest, Model, ModelList, Usage
from kvasir_peer.api.service import CompletionService, GenerationRequest, ServedModel, TokenEvent
from kvasir_peer.errors import BusyError, KvasirError, NotReadyError
from kvasir_peer.settings import is_loopback

__all__ = [
    "CompletionService",
    "GenerationRequest",
    "OpenAI",
    "OpenAIStatistics",
    "ServedModel",
    "TokenEvent",
    "create_app",
]

MAX_CONCURRENT = 512  # requests under way, waiting ones included; each holds a body and a connection
MAX_PREPARING = 4  # threads that render templates and tokenize
PING_SECONDS = 15.0  # of silence in a stream; proxies cut connections that are silent for 30 or 60 s


@dataclass(frozen=True)
class OpenAIStatistics:
    """What the routes have done so far.

    Attributes:
        current: requests under way.
        answered: answers that were completed.
        broken: streamed answers that ended with an error.
        refused: requests answered with an error.
        disconnected: answers whose client went away.
        prompt_tokens, completion_tokens: tokens read and written.
    """

    current: int
    answered: int
    broken: int
    refused: int
    disconnected: int
    prompt_tokens: int
    completion_tokens: int


class OpenAI:
    """The OpenAI routes over one service."""

    def __init__(self, service: CompletionService) -> None:
        self._service = service
        self._preparing = trio.CapacityLimiter(MAX_PREPARING)
        self._current = self._answered = self._broken = self._refused = self._disconnected = 0
        self._prompt_tokens = self._completion_tokens = 0

    @property
    def routes(self) -> list[BaseRoute]:
        """The routes, for a Starlette application."""
        return [
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{model:path}", self._model, methods=["GET"]),
            Route("/v1/chat/completions", _Post(self, ChatRequest, asked.chat, ChatAnswer), methods=["POST"]),
            Route(
                "/v1/completions",
                _Post(self, CompletionRequest, asked.completion, CompletionAnswer),
                methods=["POST"],
            ),
            Route("/openapi.json", self._openapi, methods=["GET"]),
        ]

    def statistics(self) -> OpenAIStatistics:
        """What has been done so far."""
        return OpenAIStatistics(
            self._current,
            self._answered,
            self._broken,
            self._refused,
            self._disconnected,
            self._prompt_tokens,
            self._completion_tokens,
        )

    async def _models(self, request: Request) -> Response:
        return _json(ModelList([_model(model) for model in self._service.models()]))

    async def _model(self, request: Request) -> Response:
        try:
            return _json(_model(self._find(request.path_params["model"])))
        except ApiError as error:
            return error.response()

    async def _openapi(self, request: Request) -> Response:
        return Response(openapi.document(), media_type="application/json")

    def _find(self, name: str) -> ServedModel:
        models = self._service.models()
        for model in models:
            if model.id == name:
                return model
        known = ", ".join(repr(model.id) for model in models[:10]) or "none"
        raise ApiError(
            f"there is no model {name[:100]!r} here, only: {known}",
            status=404,
            param="model",
            code="model_not_found",
        )


class _Post:
    """One route that computes (an ASGI application)."""

    def __init__(
        self,
        api: OpenAI,
        kind: type[Any],
        prepare: Callable[[Any, ServedModel], Asked],
        answer: Callable[[Asked], Answer],
    ) -> None:
        self._api = api
        self._kind = kind
        self._prepare = prepare
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        api = self._api
        api._current += 1
        last_sent = False

        async def tracked(message: Message) -> None:
            nonlocal last_sent
            last_sent = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        async def leave_with_client() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            if not last_sent:  # servers say the same after the end of an answer
                api._disconnected += 1
                nursery.cancel_scope.cancel()

        try:
            body = await self._body(Request(scope, receive))
            async with trio.open_nursery() as nursery:
                # A client that goes away takes its answer with it, at whatever point that is.
                nursery.start_soon(leave_with_client)
                try:
                    if await self._serve(body, scope, receive, tracked):
                        api._answered += 1
                    else:
                        api._broken += 1
                except ApiError as error:
                    api._refused += 1
                    await error.response()(scope, receive, tracked)
                except KvasirError as error:
                    api._refused += 1
                    await api_error(error).response()(scope, receive, tracked)
                nursery.cancel_scope.cancel()
        except ClientDisconnect:
            api._disconnected += 1
        except ApiError as error:
            api._refused += 1
            await error.response()(scope, receive, send)
        finally:
            api._current -= 1

    async def _body(self, request: Request) -> bytes:
        if self._api._current > MAX_CONCURRENT:
            raise api_error(BusyError("too many requests are under way; ask again later"))
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError("send JSON, with the header 'Content-Type: application/json'", status=415)
        return await request.body()

    async def _serve(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer; whether the answer was whole."""
        api = self._api
        request = asked.decode(body, self._kind)
        model = api._find(request.model)
        if not model.ready:
            raise NotReadyError(
                f"the model {model.id!r} cannot be served yet: {model.missing or 'it is being set up'}"
            )
        wanted = await trio.to_thread.run_sync(
            functools.partial(self._prepare, request, model), limiter=api._preparing, abandon_on_cancel=True
        )
        answer = self._answer(wanted)
        choices = [
            Choice(model.tokenizer, wanted.stops, generation.stop_tokens) for generation in wanted.generations
        ]
        problem: ApiError | None = None
        whole = True
        async with generating(api._service, wanted.generations) as generations:
            api._prompt_tokens += wanted.prompt_tokens
            try:
                if wanted.stream:
                    whole = await _stream(wanted, answer, choices, generations, send)
                else:
                    problem = await _collect(wanted, answer, choices, generations, scope, receive, send)
            finally:
                api._completion_tokens += sum(choice.n_tokens for choice in choices)
        if problem is not None:  # raised here: out of a nursery it would come wrapped in a group
            raise problem
        return whole


async def _collect(
    wanted: Asked,
    answer: Answer,
    choices: list[Choice],
    generations: Generations,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> ApiError | None:
    """Answer when all is there."""
    pieces: list[list[Piece]] = [[] for _ in choices]
    open_choices = len(choices)
    async for index, item in generations.events:
        match _advance(choices[index], item):
            case ApiError() as error:
                return error
            case Piece() as piece:
                pieces[index].append(piece)
                if piece.finish:
                    generations.cancel(index)
                    open_choices -= 1
        if not open_choices:
            break
    if open_choices:
        return ApiError("the answer broke off", status=500, kind="server_error")
    joined = [
        Piece(
            "".join(piece.text for piece in parts),
            tuple(token for piece in parts for token in piece.tokens),
            parts[-1].finish,
        )
        for parts in pieces
    ]
    await Response(answer.whole(joined, _usage(wanted, choices)), media_type="application/json")(
        scope, receive, send
    )
    return None


async def _stream(
    wanted: Asked,
    answer: Answer,
    choices: list[Choice],
    generations: Generations,
    send: Send,
) -> bool:
    """Answer as it comes, as server-sent events; whether it came to its end."""
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # nginx would collect events
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})

    await write(b"".join(answer.first(index) for index in range(len(choices))) or answers.PING)
    open_choices = len(choices)
    while open_choices:
        with trio.move_on_after(PING_SECONDS) as silence:
            try:
                batch = [await generations.events.receive()]
            except trio.EndOfChannel:
                broken = ApiError("the answer broke off", status=500, kind="server_error")
                await write(answers.error_event(broken))
                break
        if silence.cancelled_caught:
            await write(answers.PING)
            continue
        batch += _waiting(generations.events)  # what has come in the meantime goes out in one write
        data = b""
        failed = False
        for index, item in batch:
            if isinstance(item, TokenEvent) and item.token < 0:
                data += answers.comment(item.comment)
                continue
            match _advance(choices[index], item):
                case ApiError() as error:
                    data += answers.error_event(error)
                    failed = True
                    break
                case Piece() as piece:
                    data += answer.more(index, piece)
                    if piece.finish:
                        generations.cancel(index)
                        open_choices -= 1
        if data:
            await write(data)
        if failed:
            break
    else:
        tail = answer.usage(_usage(wanted, choices)) if wanted.include_usage else b""
        await write(tail + answers.DONE)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return not open_choices


def _waiting(events: trio.MemoryReceiveChannel[Tagged]) -> list[Tagged]:
    waiting: list[Tagged] = []
    while True:
        try:
            waiting.append(events.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            return waiting


def _advance(choice: Choice, item: TokenEvent | KvasirError | None) -> Piece | ApiError | None:
    """What an event does to an answer; None where it changes nothing."""
    if isinstance(item, KvasirError):
        return api_error(item)
    if choice.finish:
        return None  # tokens that were under way when a stop string was found
    if item is None:
        return choice.end()
    return choice.push(item) if item.token >= 0 else None


def _usage(wanted: Asked, choices: Sequence[Choice]) -> Usage:
    written = sum(choice.n_tokens for choice in choices)
    return Usage(wanted.prompt_tokens, written, wanted.prompt_tokens + written)


def _model(model: ServedModel) -> Model:
    return Model(model.id, model.created, model.context_length, model.ready, model.missing)


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such route, another method) as OpenAI's error objects."""
    assert isinstance(error, HTTPException)
    code = "unknown_url" if error.status_code == 404 else None
    headers = dict(error.headers or {})
    what = {
        404: "there is no such route here: /openapi.json lists them; the base URL ends in /v1",
        405: f"this route takes {headers.get('Allow', 'another method')}",
    }
    text = f"{request.method} {request.url.path[:200]}: {what.get(error.status_code, error.detail)}"
    return ApiError(text, status=error.status_code, code=code, headers=headers).response()


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _bug(request: Request, error: Exception) -> Response:
    return ApiError(
        "an internal error happened; the server's log has it", status=500, kind="server_error"
    ).response()


def create_app(
    service: CompletionService,
    *,
    keys: Iterable[str] = (),
    routes: Sequence[BaseRoute] = (),
    host: str = "127.0.0.1",
    hosts: Collection[str] = (),
    max_body: int = MAX_BODY_BYTES,
) -> Starlette:
    """The application that a bridge serves on its TCP port; the OpenAI routes are ``app.state.openai``.

    Args:
        service: what computes.
        keys: bearer keys, one of which a client must send; none needed if empty.
        routes: more routes, behind the same guards.
        host: address that the server binds. On loopback the ``Host`` header is checked against loopback's names; an
            address that others reach has names that only its owner knows, and keys instead.
        hosts: more names that the ``Host`` header may have.
        max_body: bytes of a request's body.
    """
    api = OpenAI(service)
    known = hosts if is_loopback(host) else None
    app = Starlette(
        routes=[*api.routes, *routes],
        middleware=[Middleware(Guards, keys=tuple(keys), hosts=known, max_body=max_body)],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error, Exception: _bug},
    )
    app.state.openai = api
    return app
