"""Streamed answers as a client sees them: the text, when each piece came, and what was said during pauses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import trio
from swarm_processes import DATA, expected_greedy

from kvasir_peer.models.gguf import GgufFile
from kvasir_peer.models.tokenizer import Tokenizer

MODEL = "stories260K.gguf"
ANSWER_SECONDS = 180.0  # for one answer, pauses included


@dataclass
class Streamed:
    """One answer.

    Attributes:
        prompt: what was asked.
        expected: the text of an unbroken answer.
        times: when each piece came, seconds on trio's clock.
        remarks: comments that were not empty.
        ended: whether the stream said that it is done.
        error: an error object within the stream, or None.
    """

    prompt: str
    expected: str
    text: str = ""
    times: list[float] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    finish: str = ""
    ended: bool = False
    error: dict | None = None

    @property
    def exact(self) -> bool:
        """It came to its end, with the unbroken text."""
        return self.ended and self.error is None and self.text == self.expected


def cases(count: int, *, model: Path = DATA / MODEL) -> list[dict]:
    """So many greedy cases, each with ``text``; they come around again where there are fewer."""
    found = expected_greedy(model.name)
    with GgufFile.open(model) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf.metadata)
    return [{**case, "text": tokenizer.decode(case["ids"])} for case in (found * count)[:count]]


async def ask(base_url: str, model: str, case: dict, news: Callable[[], None] = lambda: None) -> Streamed:
    """Stream one answer to its end."""
    answer = Streamed(case["prompt"], case["text"])
    await fill(answer, base_url, model, len(case["ids"]), news)
    return answer


async def fill(
    answer: Streamed, base_url: str, model: str, max_tokens: int, news: Callable[[], None]
) -> None:
    """Stream into ``answer``; ``news`` is called with each piece."""
    body = {
        "model": model,
        "prompt": answer.prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    async with (
        httpx.AsyncClient(timeout=ANSWER_SECONDS, trust_env=False) as client,
        client.stream("POST", f"{base_url}/completions", json=body) as got,
    ):
        if got.status_code != 200:
            answer.error = json.loads(await got.aread())["error"]
            return
        async for line in got.aiter_lines():
            if line.startswith(":") and line[1:].strip():
                answer.remarks.append(line[1:].strip())
            elif line == "data: [DONE]":
                answer.ended = True
            elif line.startswith("data: "):
                data = json.loads(line[6:])
                if "error" in data:
                    answer.error = data["error"]
                for choice in data.get("choices", ()):
                    answer.text += choice["text"]
                    answer.finish = choice.get("finish_reason") or answer.finish
                    answer.times.append(trio.current_time())
                    news()


class Streams:
    """Several answers at once; use within a nursery.

    Args:
        asked: cases.
    """

    def __init__(self, base_url: str, model: str, asked: Sequence[dict]) -> None:
        self._base_url, self._model = base_url, model
        self._cases = asked
        self.answers = [Streamed(case["prompt"], case["text"]) for case in asked]
        self._moved = trio.Event()

    def _news(self) -> None:
        self._moved.set()
        self._moved = trio.Event()

    async def run(self) -> None:
        """Until every answer has ended."""
        async with trio.open_nursery() as nursery:
            for answer, case in zip(self.answers, self._cases, strict=True):
                nursery.start_soon(fill, answer, self._base_url, self._model, len(case["ids"]), self._news)

    async def have(self, pieces: int) -> None:
        """Wait until so many pieces have come in all."""
        while sum(len(answer.times) for answer in self.answers) < pieces:
            await self._moved.wait()

    def silence_after(self, moment: float) -> float:
        """Seconds from a moment until the first token that followed a pause: the longest gap of all that came later.

        Pieces under way at the moment still arrive, so the gap is looked for, not just the first piece.
        """
        times = sorted(t for answer in self.answers for t in answer.times if t >= moment - 0.5)
        gaps = [(b - a, b) for a, b in zip([moment, *times], times, strict=False) if b >= moment]
        return max(gaps)[1] - moment if gaps else float("nan")
