"""The OpenAPI description of the OpenAI routes, made from the structures that check and write them."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from kvasir_peer import __version__
from kvasir_peer.api.errors import ErrorObject
from kvasir_peer.api.schema import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    Model,
    ModelList,
)

_TYPES = (
    ChatRequest,
    ChatCompletion,
    ChatChunk,
    CompletionRequest,
    Completion,
    Model,
    ModelList,
    ErrorObject,
)
_REFUSALS = {
    "400": "a parameter is unknown or wrong, or the prompt is too long",
    "401": "no valid API key",
    "404": "no such model",
    "413": "the body is too large",
    "415": "the body is not sent as JSON",
    "421": "the Host header is not this server's",
    "429": "too many requests; Retry-After says when to ask again",
    "500": "an error of the server",
    "503": "the model cannot be served yet; the message names what is missing, Retry-After when to ask again",
}


@functools.cache
def document() -> bytes:
    """The description as JSON."""
    references, components = msgspec.json.schema_components(
        _TYPES, ref_template="#/components/schemas/{name}"
    )
    schema: dict[Any, Any] = dict(zip(_TYPES, references, strict=True))
    # The structure takes any list; what the list may hold is checked by hand.
    text, tokens = {"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}}
    properties: dict[str, Any] = components["CompletionRequest"]["properties"]
    properties["prompt"] = {
        "anyOf": [
            text,
            tokens,
            {"type": "array", "items": text},
            {"type": "array", "items": tokens},
        ]
    }

    def answers(description: str, content: dict[str, Any], *codes: str) -> dict[str, Any]:
        error = {"application/json": {"schema": schema[ErrorObject]}}
        refusals = {code: {"description": _REFUSALS[code], "content": error} for code in codes}
        return {"200": {"description": description, "content": content}, **refusals}

    def post(summary: str, request: Any, whole: Any, part: Any) -> dict[str, Any]:
        return {
            "post": {
                "summary": summary,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": schema[request]}},
                },
                "responses": answers(
                    "the answer; with stream true as server-sent events that end with [DONE]",
                    {
                        "application/json": {"schema": schema[whole]},
                        "text/event-stream": {"schema": schema[part]},
                    },
                    *_REFUSALS,
                ),
            }
        }

    models = answers("the models", {"application/json": {"schema": schema[ModelList]}}, "401", "421")
    model = answers("the model", {"application/json": {"schema": schema[Model]}}, "401", "404", "421")
    name = {"name": "model", "in": "path", "required": True, "schema": text}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Kvasir peer",
                "version": __version__,
                "description": "OpenAI's API on a bridge.",
            },
            "paths": {
                "/v1/models": {"get": {"summary": "List the models", "responses": models}},
                "/v1/models/{model}": {
                    "get": {"summary": "Describe a model", "parameters": [name], "responses": model}
                },
                "/v1/chat/completions": post("Answer a conversation", ChatRequest, ChatCompletion, ChatChunk),
                "/v1/completions": post("Continue a text", CompletionRequest, Completion, Completion),
            },
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{"key": []}, {}],
        }
    )
