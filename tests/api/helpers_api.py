"""A real HTTP server with the OpenAI routes over a service whose answers a test writes itself."""

from __future__ import annotations

import contextlib
import functools
import math
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import hypercorn.config
import hypercorn.trio
import openai
import trio

from kvasir_peer.api.openai import GenerationRequest, OpenAI, ServedModel, TokenEvent, create_app
from kvasir_peer.errors import KvasirError
from kvasir_peer.models.chat_template import CHATML, ChatTemplate
from kvasir_peer.models.tokenizer import BYTE_OF, Tokenizer

MODEL = "org/small-1"
BYTES = 256  # ids below are bytes, in the order of BYTE_OF
START, END = 256, 257
CONTEXT = 200

T = TypeVar("T")


@functools.cache
def tokenizer() -> Tokenizer:
    """Every byte is a token, and ChatML's two special ones are tokens."""
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*BYTE_OF, "<|im_start|>", "<|im_end|>"],
            "tokenizer.ggml.token_type": [1] * BYTES + [3, 3],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.bos_token_id": START,
            "tokenizer.ggml.eos_token_id": END,
        }
    )


@functools.cache
def chat_template() -> ChatTemplate:
    return ChatTemplate(CHATML)


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special=False)


def text(tokens: Iterable[int]) -> str:
    return tokenizer().decode(tokens, special=True)


def saying(answer: str, final: str = "stop") -> list[TokenEvent]:
    """An answer token by token; it ends with the end token, or in the middle for want of room."""
    tokens = ids(answer)
    events = [
        TokenEvent(token, -(n + 1) / 8, ((token, -(n + 1) / 8), ((token + 1) % BYTES, -math.inf)))
        for n, token in enumerate(tokens)
    ]
    if final == "stop":
        return [*events, TokenEvent(END, -0.5, ((END, -0.5),), "stop")]
    last = events[-1]
    return [*events[:-1], TokenEvent(last.token, last.logprob, last.top, "length")]


Script = Callable[[GenerationRequest], Sequence[TokenEvent | KvasirError | float]]


@dataclass
class Scripted:
    """A service that plays a script: tokens, pauses (seconds), errors; and that keeps an account of it.

    Attributes:
        script: what a request is answered with; a request over ``max_tokens`` is cut short.
        refusal: what requests are refused with at entry.
        places: answers that run at once; others wait at entry.
        requests: those that came.
        running: how many run now.
        ended: set when one has ended, in whatever way.
        sent: tokens given out.
    """

    script: Script = field(default=lambda request: saying("Hello!"))
    refusal: KvasirError | None = None
    places: trio.CapacityLimiter | None = None
    ready: bool = True
    missing: str = ""
    template: ChatTemplate | None = field(default_factory=chat_template)
    requests: list[GenerationRequest] = field(default_factory=list)
    running: int = 0
    ended: trio.Event = field(default_factory=trio.Event)
    sent: int = 0

    def models(self) -> list[ServedModel]:
        return [
            ServedModel(MODEL, tokenizer(), self.template, CONTEXT, 1_700_000_000, self.ready, self.missing)
        ]

    @contextlib.asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[AsyncIterator[TokenEvent]]:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        async with self.places or contextlib.nullcontext():
            self.running += 1
            try:
                yield self._events(request)
            finally:
                self.running -= 1
                self.ended.set()

    async def _events(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        n = 0
        for step in self.script(request):
            await trio.lowlevel.checkpoint()
            if isinstance(step, float):
                await trio.sleep(step)
            elif isinstance(step, KvasirError):
                raise step
            else:
                n += step.token >= 0
                self.sent += 1
                if n == request.max_tokens and not step.final:
                    yield TokenEvent(step.token, step.logprob, step.top, "length")
                    return
                yield step


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    service: Scripted
    api: OpenAI
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30, **options)

    async def ask(self, call: Callable[[openai.OpenAI], T]) -> T:
        """Let the official client call, in a thread of its own."""

        def asked() -> T:
            with self.client() as client:
                return call(client)

        return await trio.to_thread.run_sync(asked)

    async def chat(self, content: str = "Hi", **options: Any) -> Any:
        messages = [{"role": "user", "content": content}]
        return await self.ask(
            lambda client: _all(client.chat.completions.create(model=MODEL, messages=messages, **options))
        )

    async def complete(self, prompt: Any = "Hi", **options: Any) -> Any:
        return await self.ask(
            lambda client: _all(client.completions.create(model=MODEL, prompt=prompt, **options))
        )

    async def post(self, path: str, **options: Any) -> httpx.Response:
        """A request that the official client would not send."""
        async with httpx.AsyncClient(base_url=self.url, timeout=30, trust_env=False) as client:
            return await client.post(path, **options)

    async def get(self, path: str, **options: Any) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, timeout=30, trust_env=False) as client:
            return await client.get(path, **options)


def _all(answer: Any) -> Any:
    """A whole answer as it is; of a stream, all chunks."""
    return list(answer) if isinstance(answer, openai.Stream) else answer


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so, for 20 seconds at most."""
    with trio.fail_after(20):
        while not condition():
            await trio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(service: Scripted | None = None, **options: Any) -> AsyncIterator[Server]:
    """Run a server on loopback as long as the block lasts; ``options`` are those of ``create_app``."""
    service = service or Scripted()
    app = create_app(service, **options)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    port = listener.getsockname()[1]
    config = hypercorn.config.Config()
    config.bind = [f"fd://{listener.detach()}"]  # hypercorn closes it
    config.graceful_timeout = 0.1
    config.accesslog = config.errorlog = None
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        serve = functools.partial(hypercorn.trio.serve, shutdown_trigger=stop.wait, mode="asgi")
        await nursery.start(serve, app, config)
        yield Server(service, app.state.openai, port)
        stop.set()
