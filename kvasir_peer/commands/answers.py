"""What a client of the OpenAI API understands of an answer, without any I/O: stream lines and refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from kvasir_peer.errors import BusyError, KvasirError, LinkError, NotReadyError, UsageError


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Remark:
    """A comment in the stream: the answer pauses, and why."""

    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the whole request."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class End:
    """The answer is whole; ``reason`` is ``stop`` or ``length``."""

    reason: str


Event = Text | Remark | Usage | End


def read_line(line: str) -> list[Event]:
    """What one line of a completion's event stream says, chat or not; [] for lines that say nothing.

    Raises:
        KvasirError: the stream carries an error object, or is no event stream.
    """
    line = line.rstrip("\r\n")
    if line.startswith(":"):
        remark = line[1:].strip()
        return [Remark(remark)] if remark else []
    if not line.startswith("data:"):
        return []
    data = line[5:].strip()
    if data == "[DONE]":
        return []
    try:
        chunk = json.loads(data)
        if "error" in chunk:
            raise KvasirError(str(chunk["error"].get("message", chunk["error"])))
        events: list[Event] = []
        for choice in chunk.get("choices", []):
            content = choice.get("delta", {}).get("content") or choice.get("text")
            if content:
                events.append(Text(str(content)))
            if choice.get("finish_reason"):
                events.append(End(str(choice["finish_reason"])))
        usage = chunk.get("usage")
        if usage:
            events.append(Usage(int(usage["prompt_tokens"]), int(usage["completion_tokens"])))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise LinkError(f"the server sent something that is no completion: {data[:80]!r}") from None
    return events


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> KvasirError:
    """The error for an HTTP answer that is not 200."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        message = f"the server answered {status}: {body[:200].decode(errors='replace').strip()}"
    try:
        retry_after = min(60.0, max(0.5, float(headers.get("retry-after", "5"))))
    except ValueError:
        retry_after = 5.0
    if status == 503:
        return NotReadyError(message, retry_after=retry_after)
    if status == 429:
        return BusyError(message, retry_after=retry_after)
    if status in (401, 403):
        return UsageError(f"{message} (give the bridge's key with --api-key)")
    if 400 <= status < 500:
        return UsageError(message)
    return KvasirError(message)
