"""From the bytes of a request to what is to be computed, or to an error that names the parameter."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import msgspec

from kvasir_peer.api.errors import ApiError
from kvasir_peer.api.schema import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    Message,
    Parameters,
    Role,
)
from kvasir_peer.api.service import GenerationRequest, ServedModel
from kvasir_peer.errors import UsageError, WireError
from kvasir_peer.models.tokenizer import Tokenizer
from kvasir_peer.wire.sampling import Sampling

DEFAULT_COMPLETION_TOKENS = (
    16  # of /v1/completions, as OpenAI has it; chat answers go on to the context's end
)

UNSUPPORTED_ROLES = ("tool", "function")  # OpenAI has them, and we refuse them by name

Request = TypeVar("Request", ChatRequest, CompletionRequest)

_PATH = re.compile(r"^(?P<what>.*) - at `(?P<path>[^`]*)`$", re.DOTALL)
_FIELD = re.compile(r"^Object (?P<how>contains unknown|missing required) field `(?P<name>.*)`$", re.DOTALL)

# How tokens are drawn for a client that says nothing about it. The whole distribution at temperature 1 (OpenAI's
# default, which anything that is asked for brings back) makes small models ramble.
UNASKED_SAMPLING = Sampling(temperature=0.8, top_p=0.95, min_p=0.05)


@dataclass(frozen=True)
class Asked:
    """A request that is fit to be computed.

    Attributes:
        model: the model.
        generations: one for each answer, in the order of their index.
        stops: texts that end an answer.
        stream: whether the answer goes out as it comes.
        include_usage: whether a stream ends with the usage.
        logprobs: whether log-probabilities are wanted.
        prompt_tokens: tokens of all prompts, each once.
    """

    model: ServedModel
    generations: list[GenerationRequest]
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    prompt_tokens: int


def decode(body: bytes, kind: type[Request]) -> Request:
    """Parse and check a request's JSON.

    Raises:
        ApiError: 400 with the parameter's name.
    """
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"the request's body is no valid JSON: {error}") from None
    _refuse_unsupported(request)
    return request


def chat(request: ChatRequest, model: ServedModel) -> Asked:
    """What a chat request asks for. Blocks (template, tokenizer): call it from a thread.

    Raises:
        ApiError: 400 with the parameter's name.
        KvasirError: the chat template is of no use.
    """
    if model.chat_template is None:
        raise ApiError(
            f"the model {model.id!r} has no chat template: use /v1/completions",
            param="model",
            code="chat_not_supported",
        )
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise ApiError("give max_completion_tokens or max_tokens, not both", param="max_tokens")
    if request.top_logprobs and not request.logprobs:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    knows_developer = "developer" in model.chat_template.source
    messages = [_message(message, n, knows_developer) for n, message in enumerate(request.messages)]
    _bound_text(model, "".join(message["content"] for message in messages), "messages")
    try:
        prompt = _templated(model.tokenizer, model.chat_template.render(messages))
    except UsageError as error:
        if type(error) is not UsageError:
            raise
        raise ApiError(str(error), param="messages") from None
    return _asked(
        request,
        model,
        [prompt],
        max_tokens=request.max_completion_tokens or request.max_tokens,
        max_name="max_completion_tokens" if request.max_completion_tokens else "max_tokens",
        prompt_name="messages",
        logprobs=bool(request.logprobs),
        top_logprobs=request.top_logprobs or 0,
    )


def completion(request: CompletionRequest, model: ServedModel) -> Asked:
    """What a completion request asks for. Blocks (tokenizer): call it from a thread.

    Raises:
        ApiError: 400 with the parameter's name.
    """
    if request.echo:
        raise ApiError("echo is not supported: put the prompt before the answer yourself", param="echo")
    if request.suffix:
        raise ApiError("suffix is not supported: only continuations can be computed", param="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError("best_of is not supported: ask for n answers and choose yourself", param="best_of")
    prompts = _prompts(request.prompt, model)
    return _asked(
        request,
        model,
        prompts,
        max_tokens=request.max_tokens or DEFAULT_COMPLETION_TOKENS,
        max_name="max_tokens" if request.max_tokens else "",
        prompt_name="prompt",
        logprobs=request.logprobs is not None,
        top_logprobs=request.logprobs or 0,
    )


def _invalid(text: str) -> ApiError:
    """msgspec's words for what does not fit, as OpenAI's error."""
    match = _PATH.match(text)
    what, path = (match["what"], match["path"]) if match else (text, "$")
    param = path.removeprefix("$").lstrip(".")
    if field := _FIELD.match(what):
        param = f"{param}.{field['name']}" if param else field["name"]
        if field["how"] == "missing required":
            return ApiError(
                f"the parameter {param!r} is missing", param=param, code="missing_required_parameter"
            )
        return ApiError(f"the parameter {param!r} is unknown", param=param, code="unknown_parameter")
    if not param:
        return ApiError(f"the request's body has to be a JSON object: {what}")
    if param.endswith(".role") and what.startswith("Invalid enum"):
        what += f"; there are {', '.join(role for role in get_args(Role) if role not in UNSUPPORTED_ROLES)}"
    return ApiError(f"the parameter {param!r} is wrong: {what}", param=param, code="invalid_value")


def _refuse_unsupported(request: Parameters) -> None:
    """Refuse what OpenAI has and we cannot do; empty values, which some clients send always, ask for nothing."""
    for name in (
        "tools",
        "functions",
        "function_call",
        "audio",
        "prediction",
        "web_search_options",
        "verbosity",
    ):
        if getattr(request, name):
            raise _unsupported(name)
    if request.reasoning_effort not in (None, "none"):
        raise _unsupported("reasoning_effort")
    if request.tool_choice not in (None, "none", "auto"):
        raise _unsupported("tool_choice")
    if request.response_format is not None and request.response_format.get("type") != "text":
        raise _unsupported("response_format")
    if request.modalities and request.modalities != ["text"]:
        raise _unsupported("modalities")
    if request.store:
        raise _unsupported("store")
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options needs stream to be true", param="stream_options")


def _unsupported(name: str) -> ApiError:
    only = " but for text" if name in ("response_format", "modalities") else ""
    return ApiError(f"{name} is not supported here{only}", param=name, code="unsupported_parameter")


def _message(message: Message, n: int, knows_developer: bool) -> dict[str, Any]:
    """A message as templates take it: text only, and OpenAI's newer ``developer`` as ``system`` where it is unknown."""
    where = f"messages[{n}]"
    if message.role in UNSUPPORTED_ROLES:
        raise ApiError(
            f"messages of the role {message.role!r} are not supported here",
            param=f"{where}.role",
            code="unsupported_value",
        )
    for name in ("tool_calls", "tool_call_id", "function_call", "audio", "refusal"):
        if getattr(message, name):
            raise _unsupported(f"{where}.{name}")
    content = message.content
    if isinstance(content, list):
        texts: list[str] = []
        for k, part in enumerate(content):
            if part.type != "text" or part.text is None:
                raise ApiError(
                    f"content of the type {part.type!r} is not supported here, only text",
                    param=f"{where}.content[{k}].type",
                    code="unsupported_value",
                )
            texts.append(part.text)
        content = "".join(texts)
    if content is None:
        if message.role != "assistant":
            raise ApiError(f"{where} has no content", param=f"{where}.content", code="invalid_value")
        content = ""
    role = "system" if message.role == "developer" and not knows_developer else message.role
    taken: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        taken["name"] = message.name
    if message.reasoning_content is not None:
        taken["reasoning_content"] = message.reasoning_content
    return taken


def _templated(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of what a template wrote; some templates write the beginning-of-sequence token themselves, others don't."""
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


def _prompts(prompt: str | list[Any], model: ServedModel) -> list[list[int]]:
    """Ids of each prompt of a completion request."""
    if isinstance(prompt, str):
        return [_prompt(prompt, model, "prompt")]
    if not prompt:
        raise ApiError("prompt is an empty list", param="prompt", code="invalid_value")
    if all(isinstance(item, int) for item in prompt):
        return [_prompt(prompt, model, "prompt")]
    if len(prompt) > MAX_CHOICES:
        raise ApiError(f"prompt has {len(prompt)} entries, at most {MAX_CHOICES}", param="prompt")
    return [_prompt(item, model, f"prompt[{n}]") for n, item in enumerate(prompt)]


def _prompt(prompt: object, model: ServedModel, name: str) -> list[int]:
    if isinstance(prompt, str):
        _bound_text(model, prompt, name)
        ids = model.tokenizer.encode(prompt, parse_special=True)
        if not ids:
            raise ApiError(f"{name} is empty", param=name, code="invalid_value")
        return ids
    # bool is a kind of int in Python, but true is no token
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
        raise ApiError(f"{name} has to be text, or a list of token ids", param=name, code="invalid_value")
    _bound_tokens(model, prompt, name)
    return prompt


def _bound_tokens(model: ServedModel, tokens: Sequence[int], name: str) -> None:
    size = len(model.tokenizer)
    if not all(0 <= token < size for token in tokens):
        raise ApiError(f"{name} has a token outside 0 to {size - 1}", param=name, code="invalid_value")


def _bound_text(model: ServedModel, text: str, name: str) -> None:
    """Refuse a text that cannot fit, before time is spent on its tokens."""
    least = len(text) // model.tokenizer.max_token_characters
    if least > model.context_length:
        raise _too_long(model, f"at least {least} tokens are in the {name}", name)


def _too_long(model: ServedModel, how: str, name: str) -> ApiError:
    return ApiError(
        f"the model's maximum context length is {model.context_length} tokens, but {how}; shorten one of them",
        param=name,
        code="context_length_exceeded",
    )


def _asked(
    request: Parameters,
    model: ServedModel,
    prompts: list[list[int]],
    *,
    max_tokens: int | None,
    max_name: str,
    prompt_name: str,
    logprobs: bool,
    top_logprobs: int,
) -> Asked:
    n = request.n or 1
    if n * len(prompts) > MAX_CHOICES:
        raise ApiError(f"{len(prompts)} prompts with n = {n} are more than {MAX_CHOICES} answers", param="n")
    bias = _logit_bias(request, model)
    chosen = (request.temperature, request.top_k, request.top_p, request.min_p, request.typical_p)
    usual = UNASKED_SAMPLING if all(value is None for value in chosen) else Sampling()
    seed = secrets.randbits(64) if request.seed is None else request.seed % (1 << 64)
    generations: list[GenerationRequest] = []
    for prompt in prompts:
        room = model.context_length - len(prompt)
        if room < 1:
            raise _too_long(
                model, f"{len(prompt)} are in the {prompt_name}, and an answer needs 1", prompt_name
            )
        if max_tokens is not None and max_tokens > room and max_name:
            how = f"{len(prompt)} are in the {prompt_name} and {max_tokens} in {max_name}"
            raise _too_long(model, how, max_name)
        for k in range(n):
            sampling = Sampling(
                temperature=_or(request.temperature, usual.temperature),
                top_k=max(0, _or(request.top_k, 0)),  # -1 also stands for "all"
                top_p=_or(request.top_p, usual.top_p),
                min_p=_or(request.min_p, usual.min_p),
                typical_p=_or(request.typical_p, 1.0),
                repetition_penalty=_or(request.repetition_penalty, 1.0),
                presence_penalty=_or(request.presence_penalty, 0.0),
                frequency_penalty=_or(request.frequency_penalty, 0.0),
                logit_bias=bias,
                seed=(seed + k) % (1 << 64),  # each answer its own, all repeatable
                logprobs=logprobs,
                top_logprobs=top_logprobs,
                prompt_length=len(prompt),
            )
            try:
                sampling.check()
            except WireError as error:
                raise ApiError(str(error), code="invalid_value") from None
            generations.append(
                GenerationRequest(
                    model=model.id,
                    prompt=prompt,
                    max_tokens=room if max_tokens is None else min(max_tokens, room),
                    sampling=sampling,
                    stop_tokens=model.tokenizer.end_ids,
                    deadline=None,
                )
            )
    stop = request.stop or []
    return Asked(
        model=model,
        generations=generations,
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        stream=bool(request.stream),
        include_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        logprobs=logprobs,
        prompt_tokens=sum(map(len, prompts)),
    )


Value = TypeVar("Value")


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def _logit_bias(request: Parameters, model: ServedModel) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (request.logit_bias or {}).items():
        if not key.isascii() or not key.isdigit() or int(key[:20]) >= len(model.tokenizer):
            raise ApiError(
                f"logit_bias has the key {key[:30]!r}, which is no token id",
                param="logit_bias",
                code="invalid_value",
            )
        bias[int(key)] = value
    return bias
