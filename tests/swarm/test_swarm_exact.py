"""The greedy continuations of two implementations come out of rings of real peers, token for token."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
import trio
from swarm_in_process import InProcessSwarm, swarm_in_process
from swarm_processes import DATA, expected_greedy

from kvasir_peer.models.gguf import GgufFile
from kvasir_peer.models.tokenizer import Tokenizer

DENSE, MOE = "stories260K.gguf", "stories260K-moe8x2.gguf"


def complete(base_url: str, model: str, case: dict) -> str:
    """The text that continues a case's prompt, streamed by the official client."""
    client = openai.OpenAI(base_url=base_url, api_key="none", timeout=90, max_retries=0)
    stream = client.completions.create(
        model=model, prompt=case["prompt"], max_tokens=len(case["ids"]), temperature=0, stream=True
    )
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def text_of(model: str, ids: list[int]) -> str:
    """What the expected tokens read as; special tokens are no text."""
    with GgufFile.open(DATA / model) as gguf:
        return Tokenizer.from_gguf(gguf.metadata).decode(ids)


async def check(swarm: InProcessSwarm, cases: list[dict], *, together: int) -> None:
    """Every case, several at once; texts must be exact."""
    texts: dict[int, str] = {}
    limiter = trio.CapacityLimiter(together)

    async def one(index: int) -> None:
        texts[index] = await trio.to_thread.run_sync(
            complete, swarm.base_url, swarm.model, cases[index], limiter=limiter
        )

    async with trio.open_nursery() as nursery:
        for index in range(len(cases)):
            nursery.start_soon(one, index)
    for index, case in enumerate(cases):
        assert texts[index] == text_of(case["model"], case["ids"])
    status = await swarm.status()
    assert status["requests"]["digest_mismatches"] == 0
    assert status["requests"]["finished"] >= len(cases)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "stages", "engines", "rows", "muxer"),
    [
        (DENSE, 2, ("onnx",), 64, "stock"),
        (DENSE, 3, ("torch",), 4, "own"),
        (DENSE, 5, ("onnx", "torch"), 64, "own"),
        (MOE, 2, ("torch",), 64, "own"),
        (MOE, 3, ("onnx",), 4, "own"),
        (MOE, 5, ("torch", "onnx"), 64, "own"),
    ],
)
async def test_greedy_is_exact_alone_and_with_eight_requests_at_once(
    tmp_path: Path, model: str, stages: int, engines: tuple[str, ...], rows: int, muxer: str
) -> None:
    cases = expected_greedy(model)
    if stages == 3:
        longer = expected_greedy(model, file="longer_greedy.json")
        assert len(longer) == 4 and all(len(case["ids"]) == 192 for case in longer)
        cases = longer + cases
    async with swarm_in_process(
        tmp_path,
        DATA / model,
        stages=stages,
        engines=engines,
        boundary="f32",
        context_length=256,
        micro_batch_rows=rows,
        muxer=muxer,
    ) as swarm:
        await check(swarm, cases[:1], together=1)
        await check(swarm, cases, together=8)
