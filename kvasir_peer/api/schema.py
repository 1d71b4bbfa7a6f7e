"""Requests and answers of OpenAI's API as typed structures: what they check, they also document (``/openapi.json``).

A parameter that we do not know is refused by its name, never ignored: an answer that silently lacks what was asked for
is worse than an error. Parameters that only describe the caller (``user``, ``metadata``...) are taken and not used.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_CHOICES = 16  # answers of one request: n, times the prompts
MAX_STOPS = 16  # stop strings; OpenAI takes 4
MAX_STOP_CHARACTERS = 512  # of one stop string
MAX_MESSAGES = 4096

Temperature = Annotated[float, Meta(ge=0, le=2)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(gt=0, le=10)]
TopK = Annotated[int, Meta(ge=-1, le=1 << 30)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=1, le=1 << 30)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stops = Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)]
TokenId = Annotated[int, Meta(ge=0)]
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ContentPart(msgspec.Struct):
    """A piece of a message; only text can be taken."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One message of a conversation."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    # Clients send back what an assistant's message had; all but empty ones are refused.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How to stream.

    Attributes:
        include_usage: send a last chunk with the tokens used.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Parameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of completion take."""

    model: str
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: TopK | None = None
    min_p: Fraction | None = None
    typical_p: Fraction | None = None
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=300)] | None = None
    seed: Seed | None = None
    max_tokens: Count | None = None
    n: Choices | None = None
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # They describe the caller, and change nothing.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    service_tier: str | None = None
    # Named so that they can be refused with a reason.
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Any = None


class ChatRequest(Parameters, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class CompletionRequest(Parameters, forbid_unknown_fields=True, kw_only=True):
    """``POST /v1/completions``. The prompt is text, token ids, or a list of either."""

    # One of str, list[str], list[int], list[list[int]]: JSON Schema can say it, msgspec's unions cannot.
    prompt: str | list[Any]
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Count | None = None


class TopLogprob(msgspec.Struct):
    """A token that could have been."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """A token of the answer and its chances."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat answer's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a completion's tokens, column by column."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


FinishReason = Literal["stop", "length"]


class ChatMessage(msgspec.Struct):
    """The answer."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One of ``n`` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class Usage(msgspec.Struct):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(msgspec.Struct):
    """A whole chat answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, omit_defaults=True):
    """What is new."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct):
    """What is new in one of ``n`` answers."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(msgspec.Struct):
    """An event of a streamed chat answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionChoice(msgspec.Struct):
    """One completion, or what is new in it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class Completion(msgspec.Struct):
    """A whole completion, or an event of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    object: Literal["text_completion"] = "text_completion"


class Model(msgspec.Struct):
    """A model.

    Attributes:
        context_length: tokens of prompt and answer together.
        ready: whether it can be served now, or as soon as a ring is mended that just broke.
        missing: what is missing, where it is not.
    """

    id: str
    created: int
    context_length: int
    ready: bool
    missing: str
    object: Literal["model"] = "model"
    owned_by: str = "kvasir-peer"


class ModelList(msgspec.Struct):
    """All models."""

    data: list[Model]
    object: Literal["list"] = "list"
