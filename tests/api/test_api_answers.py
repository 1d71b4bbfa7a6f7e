"""Answers of the OpenAI routes, asked for by the official client over HTTP."""

import json

import pytest
import trio
from helpers_api import CONTEXT, END, MODEL, Scripted, ids, saying, serving, text, until

from kvasir_peer.api import generation
from kvasir_peer.api.openai import GenerationRequest, TokenEvent
from kvasir_peer.errors import EngineError

PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def said(chunks: list, index: int = 0) -> str:
    return "".join(
        choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == index
    )


async def test_models() -> None:
    async with serving() as server:
        models = await server.ask(lambda client: client.models.list().data)
        assert [model.id for model in models] == [MODEL]
        model = await server.ask(lambda client: client.models.retrieve(MODEL))
        assert (model.id, model.object, model.created) == (MODEL, "model", 1_700_000_000)
        assert (await server.get(f"/v1/models/{MODEL}")).json()["context_length"] == CONTEXT


async def test_a_whole_chat_answer() -> None:
    async with serving() as server:
        answer = await server.chat()
        assert (
            answer.object == "chat.completion" and answer.model == MODEL and answer.id.startswith("chatcmpl-")
        )
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].message.content == "Hello!"
        assert answer.choices[0].finish_reason == "stop" and answer.choices[0].logprobs is None
        (request,) = server.service.requests
        assert text(request.prompt) == PROMPT
        assert request.max_tokens == CONTEXT - len(request.prompt)
        assert request.stop_tokens == {END}
        assert answer.usage.prompt_tokens == len(request.prompt)
        assert answer.usage.completion_tokens == 7  # the end token is computed like any other
        assert answer.usage.total_tokens == len(request.prompt) + 7


async def test_a_streamed_chat_answer_event_by_event() -> None:
    async with serving(Scripted(lambda request: saying("né"))) as server:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        got = await server.post("/v1/chat/completions", json=body)
        assert got.headers["content-type"] == "text/event-stream; charset=utf-8"
        *events, done, rest = got.text.split("\n\n")
        assert done == "data: [DONE]" and rest == ""
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)
        assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
            {"role": "assistant", "content": ""},
            {"content": "n"},
            {"content": "é"},
            {},
        ]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]


async def test_a_stream_with_usage() -> None:
    async with serving() as server:
        chunks = await server.chat(stream=True, stream_options={"include_usage": True})
        assert said(chunks) == "Hello!"
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 7
        assert chunks[-1].usage.prompt_tokens == len(server.service.requests[0].prompt)


async def test_tokens_leave_as_they_come() -> None:
    """The first text is with the client while the answer is still being computed."""
    service = Scripted(lambda request: [*saying("Hel")[:3], 600.0])
    async with serving(service) as server:

        def first() -> str:
            with server.client() as client:
                messages = [{"role": "user", "content": "Hi"}]
                with client.chat.completions.create(model=MODEL, messages=messages, stream=True) as stream:
                    for chunk in stream:
                        if chunk.choices[0].delta.content:
                            return chunk.choices[0].delta.content
            raise AssertionError("no text came")

        assert "H" in await trio.to_thread.run_sync(first)


async def test_a_whole_and_a_streamed_completion() -> None:
    async with serving(Scripted(lambda request: saying(" there"))) as server:
        answer = await server.complete("Hi", max_tokens=50)
        assert answer.object == "text_completion" and answer.choices[0].text == " there"
        assert answer.choices[0].finish_reason == "stop" and answer.usage.total_tokens == 2 + 7
        assert server.service.requests[0].prompt == ids("Hi")
        chunks = await server.complete("Hi", stream=True, stream_options={"include_usage": True})
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == " there"
        assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage.completion_tokens == 7
        assert server.service.requests[1].max_tokens == 16  # OpenAI's default


async def test_prompts_of_every_form_are_answered_in_their_order() -> None:
    service = Scripted(lambda request: saying(f"<{text(request.prompt)}>"))
    async with serving(service) as server:
        answer = await server.complete(["a", "b"], n=2)
        assert [choice.text for choice in answer.choices] == ["<a>", "<a>", "<b>", "<b>"]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage.prompt_tokens == 2
        assert (await server.complete(ids("token"))).choices[0].text == "<token>"
        answer = await server.complete([ids("x"), ids("y")])
        assert [choice.text for choice in answer.choices] == ["<x>", "<y>"]


async def test_several_answers_stream_side_by_side() -> None:
    service = Scripted(lambda request: saying("even" if request.sampling.seed % 2 == 0 else "odd"))
    async with serving(service) as server:
        chunks = await server.chat(stream=True, n=3, seed=4)
        assert [said(chunks, index) for index in range(3)] == ["even", "odd", "even"]
        ends = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        assert sorted(ends) == [0, 1, 2]


async def test_answers_that_wait_for_a_place_are_answered_all_the_same() -> None:
    long = "x" * 150
    service = Scripted(lambda request: saying(long), places=trio.CapacityLimiter(1))
    async with serving(service) as server:
        answer = await server.complete("Hi", n=5, max_tokens=190)
        assert [choice.text for choice in answer.choices] == [long] * 5
        chunks = await server.chat(stream=True, n=5, max_tokens=155)
        assert [said(chunks, index) for index in range(5)] == [long] * 5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "heard"),
    [
        ("END", "one two "),  # spans three tokens
        (["zzz", "two", " E"], "one "),
        (["e t"], "on"),
        ("never", "one two END three"),
        ("ree", "one two END th"),  # at the very end
    ],
)
async def test_stop_strings_end_an_answer_and_are_no_part_of_it(
    stream: bool, stop: str | list[str], heard: str
) -> None:
    async with serving(Scripted(lambda request: saying("one two END three"))) as server:
        answer = await server.chat(stop=stop, stream=stream)
        if stream:
            assert said(answer) == heard and answer[-1].choices[0].finish_reason == "stop"
        else:
            assert answer.choices[0].message.content == heard and answer.choices[0].finish_reason == "stop"


async def test_text_that_only_begins_like_a_stop_string_comes_in_the_end() -> None:
    async with serving(Scripted(lambda request: saying("a EN", "length"))) as server:
        answer = await server.chat(stop="END")
        assert answer.choices[0].message.content == "a EN" and answer.choices[0].finish_reason == "length"


async def test_nothing_is_computed_after_a_stop_string() -> None:
    service = Scripted(lambda request: [*saying("stop here")[:9], 600.0, *saying("more")])
    async with serving(service) as server:
        answer = await server.chat(stop=" ")
        assert answer.choices[0].message.content == "stop"
        await until(lambda: not service.running)


async def test_one_of_several_answers_is_cancelled_alone() -> None:
    """An answer that found its stop string is computed no further while others go on."""
    stopped = trio.Event()

    def script(request: GenerationRequest) -> list[TokenEvent | float]:
        return [*saying("stop!")[:5], 600.0] if request.sampling.seed == 0 else [0.2, *saying("fine")]

    service = Scripted(script)
    async with serving(service) as server, trio.open_nursery() as nursery:

        async def ask() -> None:
            answer = await server.chat(n=2, seed=0, stop="!")
            assert [choice.message.content for choice in answer.choices] == ["stop", "fine"]
            stopped.set()

        nursery.start_soon(ask)
        with trio.fail_after(20):
            await service.ended.wait()
            await stopped.wait()


async def test_max_tokens() -> None:
    async with serving() as server:
        answer = await server.chat(max_tokens=3)
        assert answer.choices[0].message.content == "Hel" and answer.choices[0].finish_reason == "length"
        answer = await server.chat(max_completion_tokens=2)
        assert answer.choices[0].message.content == "He" and answer.usage.completion_tokens == 2


async def test_log_probabilities_of_a_chat() -> None:
    async with serving(Scripted(lambda request: saying("é!"))) as server:
        answer = await server.chat(logprobs=True, top_logprobs=2)
        content = answer.choices[0].logprobs.content
        assert [token.bytes for token in content] == [[0xC3], [0xA9], [0x21]]
        assert [token.logprob for token in content] == [-0.125, -0.25, -0.375]
        assert content[2].token == "!" and content[0].token == "�"
        assert [top.logprob for top in content[2].top_logprobs] == [-0.375, -9999.0]
        sampling = server.service.requests[0].sampling
        assert sampling.logprobs and sampling.top_logprobs == 2
        chunks = await server.chat(logprobs=True, stream=True)
        streamed = [
            token.bytes[0]
            for chunk in chunks
            for choice in chunk.choices
            if choice.logprobs
            for token in choice.logprobs.content
        ]
        assert bytes(streamed).decode() == "é!"


async def test_log_probabilities_of_a_completion() -> None:
    async with serving(Scripted(lambda request: saying("ab END c"))) as server:
        answer = await server.complete("Hi", logprobs=1, stop="END")
        logprobs = answer.choices[0].logprobs
        assert logprobs.tokens == ["a", "b", " "]  # none of the stop string's
        assert logprobs.text_offset == [0, 1, 2]
        assert logprobs.token_logprobs == [-0.125, -0.25, -0.375]
        assert logprobs.top_logprobs[0] == {"a": -0.125, "b": -9999.0}
        answer = await server.complete("Hi", logprobs=0)
        assert answer.choices[0].logprobs.top_logprobs is None


async def test_parameters_reach_the_sampler() -> None:
    async with serving() as server:
        extra = {"top_k": 5, "min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.1}
        await server.chat(
            temperature=0.5,
            top_p=0.8,
            seed=-1,
            presence_penalty=1.5,
            frequency_penalty=-0.5,
            logit_bias={"65": 5},
            extra_body=extra,
        )
        sampling = server.service.requests[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.8, 5, 0.1)
        assert (sampling.typical_p, sampling.repetition_penalty) == (0.9, 1.1)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -0.5)
        assert sampling.logit_bias == {65: 5.0} and sampling.seed == (1 << 64) - 1
        assert sampling.prompt_length == len(server.service.requests[0].prompt)
        await server.chat(extra_body={"top_k": -1})
        assert server.service.requests[1].sampling.top_k == 0


async def test_seeds_are_random_unless_given() -> None:
    async with serving() as server:
        await server.chat()
        await server.chat(n=2)
        await server.chat(n=2, seed=7)
        seeds = [request.sampling.seed for request in server.service.requests]
        assert len(set(seeds)) == 5 and set(seeds[3:]) == {7, 8}


async def test_messages_of_every_form() -> None:
    async with serving() as server:
        messages = [
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            # as clients send an answer back
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "annotations": []},
            {"role": "user", "content": "c", "name": "Ann"},
        ]
        await server.ask(
            lambda client: client.chat.completions.create(model=MODEL, messages=messages, tools=[])
        )
        assert text(server.service.requests[0].prompt) == (
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
            "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
        )


async def test_pauses_are_comments_that_clients_skip() -> None:
    def script(request: GenerationRequest) -> list[TokenEvent]:
        hello = saying("Hello")
        return [*hello[:2], TokenEvent(-1, comment="a stage was lost,\n data: waiting"), *hello[2:]]

    async with serving(Scripted(script)) as server:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        got = await server.post("/v1/chat/completions", json=body)
        assert ": a stage was lost, data: waiting\n\n" in got.text
        assert said(await server.chat(stream=True)) == "Hello"
        assert (await server.chat()).choices[0].message.content == "Hello"


async def test_an_error_within_a_stream_is_an_error_of_the_client() -> None:
    async with serving(
        Scripted(lambda request: [*saying("Hel")[:3], EngineError("the engine crashed")])
    ) as server:

        def ask() -> tuple[str, str]:
            heard = ""
            with server.client() as client:
                messages = [{"role": "user", "content": "Hi"}]
                try:
                    for chunk in client.chat.completions.create(model=MODEL, messages=messages, stream=True):
                        heard += chunk.choices[0].delta.content or ""
                except Exception as error:  # noqa: BLE001  that is what is looked at
                    return heard, str(error)
            return heard, "no error"

        assert await trio.to_thread.run_sync(ask) == ("Hel", "the engine crashed")
        await until(lambda: server.api.statistics().broken == 1)


async def test_an_answer_that_breaks_off_is_no_answer() -> None:
    """A service that ends without a reason has at least said all that it said."""
    async with serving(Scripted(lambda request: saying("Hel")[:3])) as server:
        answer = await server.chat()
        assert answer.choices[0].message.content == "Hel" and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_takes_its_answer_with_it(stream: bool) -> None:
    service = Scripted(lambda request: [*saying("Hel")[:3], 600.0])
    async with serving(service) as server:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
        connection = await trio.open_tcp_stream("127.0.0.1", server.port)
        payload = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(payload)}\r\n"
        await connection.send_all(head.encode() + b"Content-Type: application/json\r\n\r\n" + payload)
        await until(lambda: service.sent == 3)
        assert service.running == 1
        await connection.aclose()
        with trio.fail_after(20):
            await service.ended.wait()
        assert service.running == 0
        assert server.api.statistics().disconnected == 1


async def test_a_client_that_takes_nothing_gives_its_place_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "STALLED_SECONDS", 0.2)
    remark = TokenEvent(-1, comment="x" * 100_000)
    service = Scripted(lambda request: [remark] * 10_000)  # more than all buffers on the way can hold
    async with serving(service) as server:
        payload = json.dumps({"model": MODEL, "prompt": "Hi", "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(payload)}\r\n"
        connection = await trio.open_tcp_stream("127.0.0.1", server.port)
        await connection.send_all(head.encode() + b"Content-Type: application/json\r\n\r\n" + payload)
        with trio.fail_after(30):
            await service.ended.wait()
        assert service.sent < 10_000
        await connection.aclose()


async def test_statistics_count_what_was_done() -> None:
    async with serving() as server:
        await server.chat()
        await server.post("/v1/completions", json={"model": "none", "prompt": "a"})
        await until(lambda: server.api.statistics().current == 0)  # the last byte of an answer is not its end
        got = server.api.statistics()
        assert (got.answered, got.refused, got.current, got.completion_tokens) == (1, 1, 0, 7)
        assert got.prompt_tokens == len(server.service.requests[0].prompt)
