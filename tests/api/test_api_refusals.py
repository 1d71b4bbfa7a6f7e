"""What the OpenAI routes refuse, and that the client learns what, where, and what to do."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
import trio
from helpers_api import CONTEXT, MODEL, Scripted, saying, serving, until

from kvasir_peer.errors import BusyError, EngineError, ModelFileError, NotReadyError, UsageError
from kvasir_peer.models.chat_template import ChatTemplate

DOCUMENTATION = Path(__file__).resolve().parents[2] / "docs" / "http-api.md"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": MODEL, "prompt": "Hi"}


def user(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi", **message}]}


WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 1}, "temprature"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": -1}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 5}, "presence_penalty"),
    ({"seed": 1 << 70}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
    ({"n": 1000}, "n"),
    ({"n": 0}, "n"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"nothing": 1}}, "stream_options.nothing"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"258": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1000}}, "logit_bias[...]"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"store": True}, "store"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": None}, "messages"),
    (user(role="wizard"), "messages[0].role"),
    (user(role="tool"), "messages[0].role"),
    (user(content=None), "messages[0].content"),
    (user(content=5), "messages[0].content"),
    (user(content=[{"type": "image_url", "image_url": {}}]), "messages[0].content[0].type"),
    (user(colour="red"), "messages[0].colour"),
    (user(role="assistant", tool_calls=[{}]), "messages[0].tool_calls"),
    ({"model": 5}, "model"),
    ({"model": None}, "model"),
]

WRONG_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"echo": True}, "echo"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 4}, "best_of"),
    ({"logprobs": 30}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [258]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a"] * 17}, "prompt"),
    ({"prompt": ["a"] * 9, "n": 2}, "n"),
    ({"messages": []}, "messages"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
]


async def test_wrong_parameters_are_named() -> None:
    cases = [("/v1/chat/completions", CHAT, *case) for case in WRONG_CHATS]
    cases += [("/v1/completions", COMPLETION, *case) for case in WRONG_COMPLETIONS]
    async with serving() as server:
        for path, good, change, param in cases:
            got = await server.post(path, json={**good, **change})
            error = got.json()["error"]
            assert (got.status_code, error["type"]) == (400, "invalid_request_error"), change
            assert error["param"] == param, (change, error)
            assert (
                param.rpartition(".")[2].partition("[")[0] in error["message"]
                and "\n" not in error["message"]
            )
        assert server.service.requests == []


async def test_a_missing_parameter_is_named() -> None:
    async with serving() as server:
        for path, body, param in [
            ("/v1/chat/completions", {"model": MODEL}, "messages"),
            ("/v1/completions", {"prompt": "a"}, "model"),
        ]:
            error = (await server.post(path, json=body)).json()["error"]
            assert (error["param"], error["code"]) == (param, "missing_required_parameter")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"model": NaN}',
        gzip.compress(b"{}"),
    ],
    ids=["empty", "cut", "list", "null", "no UTF-8", "surrogate", "deep", "NaN", "packed"],
)
async def test_bodies_that_are_no_request(body: bytes) -> None:
    async with serving() as server:
        got = await server.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert got.status_code == 400 and got.json()["error"]["type"] == "invalid_request_error"


async def test_the_official_client_raises_its_own_errors() -> None:
    async with serving(keys=["a-key-of-the-owner"]) as server:

        def errors() -> list[type[Exception]]:
            raised: list[type[Exception]] = []
            for key, options in [
                ("wrong", {}),
                ("a-key-of-the-owner", {"model": "other"}),
                ("a-key-of-the-owner", {"n": 99}),
            ]:
                with server.client(key) as client, pytest.raises(openai.APIStatusError) as caught:
                    client.completions.create(**{**COMPLETION, **options})
                raised.append(type(caught.value))
            return raised

        found = await trio.to_thread.run_sync(errors)
        assert found == [openai.AuthenticationError, openai.NotFoundError, openai.BadRequestError]


async def test_a_prompt_over_the_context() -> None:
    async with serving() as server:
        for body, param in [
            ({"prompt": "x" * CONTEXT}, "prompt"),
            ({"prompt": "x" * 100_000}, "prompt"),
            ({"prompt": "x" * 150, "max_tokens": 51}, "max_tokens"),
        ]:
            error = (await server.post("/v1/completions", json={"model": MODEL, **body})).json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert f"maximum context length is {CONTEXT} tokens" in error["message"]
        assert server.service.requests == []
        # the default of 16 tokens is what there is room for, and no demand
        assert (await server.complete("x" * (CONTEXT - 2))).usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("refusal", "status", "code", "retry_after"),
    [
        (NotReadyError("layers 3 to 5 have no stage", retry_after=7.2), 503, "model_not_ready", "8"),
        (BusyError("64 requests wait", retry_after=0.1), 429, "rate_limit_exceeded", "1"),
        (UsageError("top_logprobs is over 5"), 400, None, None),
        (EngineError("the engine crashed"), 500, None, None),
    ],
)
async def test_refusals_of_the_service(
    refusal: Any, status: int, code: str | None, retry_after: str | None
) -> None:
    async with serving(Scripted(refusal=refusal)) as server:
        for stream in (False, True):
            got = await server.post("/v1/chat/completions", json={**CHAT, "stream": stream, "n": 2})
            assert got.status_code == status
            assert got.json()["error"]["message"] == str(refusal) and got.json()["error"]["code"] == code
            assert got.headers.get("retry-after") == retry_after


async def test_no_more_requests_are_under_way_than_the_documentation_says() -> None:
    found = re.search(r"has (\d+) requests under way at most", DOCUMENTATION.read_text())
    assert found is not None
    room = int(found[1]) - 1
    async with serving() as server:
        server.api._current = room
        assert (await server.post("/v1/completions", json=COMPLETION)).status_code == 200
        await until(lambda: server.api._current == room)
        server.api._current += 1
        got = await server.post("/v1/completions", json=COMPLETION)
    error = got.json()["error"]
    assert (got.status_code, error["code"], got.headers["retry-after"]) == (429, "rate_limit_exceeded", "2")
    assert error["message"] == "too many requests are under way; ask again later"


async def test_a_model_that_is_not_ready_says_what_is_missing() -> None:
    async with serving(Scripted(ready=False, missing="layers 3 to 5 have no stage")) as server:
        got = await server.post("/v1/completions", json=COMPLETION)
        assert got.status_code == 503 and int(got.headers["retry-after"]) >= 1
        assert "layers 3 to 5 have no stage" in got.json()["error"]["message"]
        listed = (await server.get("/v1/models")).json()["data"][0]
        assert (listed["ready"], listed["missing"]) == (False, "layers 3 to 5 have no stage")


async def test_an_error_before_the_end_of_a_whole_answer() -> None:
    script = [*saying("Hel")[:3], NotReadyError("no stage has come back", retry_after=3)]
    async with serving(Scripted(lambda request: script)) as server:
        got = await server.post("/v1/chat/completions", json=CHAT)
        assert got.status_code == 503 and got.headers["retry-after"] == "3"


async def test_a_model_without_a_chat_still_completes() -> None:
    async with serving(Scripted(template=None)) as server:
        error = (await server.post("/v1/chat/completions", json=CHAT)).json()["error"]
        assert error["code"] == "chat_not_supported" and "/v1/completions" in error["message"]
        assert (await server.complete()).choices[0].text == "Hello!"


async def test_what_a_chat_template_refuses() -> None:
    picky = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    hostile = ChatTemplate(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", seconds=0.3
    )
    async with serving(Scripted(template=picky)) as server:
        got = await server.post("/v1/chat/completions", json=CHAT)
        assert (got.status_code, got.json()["error"]["param"]) == (400, "messages")
        assert "roles must alternate" in got.json()["error"]["message"]
    async with serving(Scripted(template=hostile)) as server:
        assert (await server.post("/v1/chat/completions", json=CHAT)).status_code == 500
    picky.close()
    hostile.close()


async def test_a_bug_is_an_error_object_too() -> None:
    class Broken(Scripted):
        def models(self) -> Any:
            raise RuntimeError("a bug")

    async with serving(Broken()) as server:
        got = await server.post("/v1/completions", json=COMPLETION)
        assert (got.status_code, got.json()["error"]["type"]) == (500, "server_error")
        assert "a bug" not in got.text


@pytest.mark.parametrize("error", [EngineError("x"), ModelFileError("x")])
async def test_our_own_faults_are_500(error: Exception) -> None:
    async with serving(Scripted(refusal=error)) as server:  # type: ignore[arg-type]
        assert (await server.post("/v1/completions", json=COMPLETION)).status_code == 500


async def test_routes_that_are_not_there() -> None:
    async with serving() as server:
        got = await server.get("/v1/embeddings")
        assert got.status_code == 404 and got.json()["error"]["code"] == "unknown_url"
        got = await server.get("/v1/completions")
        assert got.status_code == 405 and "error" in got.json()
        got = await server.get("/v1/models/none")
        assert got.status_code == 404 and got.json()["error"]["code"] == "model_not_found"


async def test_the_description_names_what_is_taken() -> None:
    async with serving() as server:
        described = (await server.get("/openapi.json")).json()
        assert described["openapi"].startswith("3.")
        schemas = described["components"]["schemas"]
        taken = schemas["ChatRequest"]["properties"]
        assert {"messages", "temperature", "top_k", "min_p", "seed", "stream_options"} <= taken.keys()
        for path, kind in [("/v1/chat/completions", "ChatRequest"), ("/v1/completions", "CompletionRequest")]:
            body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert body == {"$ref": f"#/components/schemas/{kind}"}
        references = json.dumps(described).split('"#/components/schemas/')[1:]
        assert {reference.partition('"')[0] for reference in references} <= schemas.keys()
