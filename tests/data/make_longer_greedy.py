"""Make ``longer_greedy.json``: long greedy continuations on which llama.cpp and the torch engine agree.

Run by hand from the repository's root: ``python tests/data/make_longer_greedy.py``. Kept are cases in which every
token is the same and the two best logits are never nearer than 0.01.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import xllamacpp

from kvasir_peer.engines.base import Rows, StackSpec, create_stack
from kvasir_peer.models.gguf import GgufFile
from kvasir_peer.models.sources import GgufSource
from kvasir_peer.models.tokenizer import Tokenizer

DATA = Path(__file__).parent
MODELS = ("stories260K.gguf", "stories260K-moe8x2.gguf")
PROMPTS = (
    "One day, a little girl named Mia found a key.",
    "The dog and the cat were best friends. They",
    "Ben wanted to fly like a bird, so he",
    "It was raining and Sue could not go out to play.",
    "The old man had a boat. Every morning he",
    "Max was a small bunny who liked carrots.",
    "There was a big tree in the garden. Under the tree",
    "Anna and her brother went to the beach.",
    "A frog sat on a leaf and sang a song.",
    "The king was sad because he lost his crown.",
    "Jack had a new toy car. It was blue and fast.",
    "Mom made a cake for the party.",
)
LENGTH = 192
CASES = 4  # of each model
MIN_GAP = 0.01


def own(path: Path, prompt: list[int], length: int) -> tuple[list[int], float]:
    """Greedy tokens of the torch engine in float32, and the smallest gap between the two best logits."""
    with GgufFile.open(path) as gguf:
        n_layer = int(gguf.metadata["llama.block_count"])  # type: ignore[call-overload]
    stack = create_stack(
        "torch", GgufSource(path), StackSpec(0, n_layer, 1, 256, 64, precision="exact", threads=2)
    )
    tokens, start, gap = list(prompt), 0, np.inf
    while len(tokens) < len(prompt) + length:
        end = len(tokens)
        wants = np.arange(start, end) == end - 1
        rows = Rows.of([0] * (end - start), range(start, end), tokens[start:], wants)
        best = np.sort(stack.forward(rows, None)[0])[-2:]
        logits = stack.forward(Rows.of([0], [end - 1], tokens[-1:], [True]), None)[0]
        gap = min(gap, float(best[1] - best[0]))
        start = end
        tokens.append(int(logits.argmax()))
    stack.close()
    return tokens[len(prompt) :], gap


def llama(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of llama.cpp with a float32 KV cache."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 256
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.warmup = False
    server = xllamacpp.Server(params)
    found = []
    for prompt in prompts:
        answer = server.handle_completions(
            {
                "prompt": prompt,
                "max_tokens": LENGTH,
                "temperature": 0,
                "return_tokens": True,
                "n_probs": 1,
                "logprobs": 1,
            }
        )
        verbose = answer.get("__verbose", answer)
        probabilities = answer["choices"][0].get("logprobs", {}).get("content", [])
        found.append(verbose.get("tokens") or [entry["id"] for entry in probabilities])
    return found


def main() -> None:
    """Write the file."""
    cases = []
    for model in MODELS:
        path = DATA / model
        with GgufFile.open(path) as gguf:
            tokenizer = Tokenizer.from_gguf(gguf.metadata)
        prompts = [tokenizer.encode(text) for text in PROMPTS]
        kept = 0
        for text, prompt, theirs in zip(PROMPTS, prompts, llama(path, prompts), strict=True):
            ours, gap = own(path, prompt, LENGTH)
            same = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(theirs)
            )
            print(f"{model} {text[:30]!r}: {same} of {len(ours)} tokens equal, gap {gap:.4f}")
            if ours == theirs and gap > MIN_GAP and kept < CASES:
                kept += 1
                cases.append(
                    {
                        "model": model,
                        "prompt": text,
                        "prompt_ids": prompt,
                        "ids": ours,
                        "min_top2_logit_gap": round(gap, 4),
                    }
                )
    (DATA / "longer_greedy.json").write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    main()
