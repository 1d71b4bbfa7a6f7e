"""Driving stacks of layers as a ring does: whole prompts, chunks, and several requests in one pass."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvasir_peer.engines.base import LayerStack, Rows


def forward(stacks: Sequence[LayerStack], rows: Rows) -> np.ndarray:
    """Run rows through all stages; return the tail's logits."""
    hidden = None
    for stack in stacks:
        hidden = stack.forward(rows, hidden)
    assert hidden is not None
    return hidden


def prefill(
    stacks: Sequence[LayerStack], tokens: Sequence[int], *, slot: int = 0, chunk: int = 0, first: int = 0
) -> np.ndarray:
    """Feed tokens from a position on, in chunks; return the logits after each, [n, vocabulary]."""
    chunk = chunk or len(tokens)
    parts = []
    for a in range(0, len(tokens), chunk):
        part = tokens[a : a + chunk]
        n = len(part)
        rows = Rows.of([slot] * n, range(first + a, first + a + n), part, [True] * n)
        parts.append(forward(stacks, rows))
    return np.concatenate(parts)


def greedy(
    stacks: Sequence[LayerStack], prompt: Sequence[int], count: int, *, slot: int = 0, chunk: int = 0
) -> list[int]:
    """Continue one prompt greedily."""
    row = prefill(stacks, prompt, slot=slot, chunk=chunk)[-1]
    tokens = [int(row.argmax())]
    while len(tokens) < count:
        position = len(prompt) + len(tokens) - 1
        row = forward(stacks, Rows.of([slot], [position], [tokens[-1]], [True]))[0]
        tokens.append(int(row.argmax()))
    return tokens


def greedy_together(
    stacks: Sequence[LayerStack], prompts: Sequence[Sequence[int]], count: int, *, chunk: int
) -> list[list[int]]:
    """Continue several prompts, one slot each, with chunks of prompts and decodes in the same passes.

    Requests start one pass after another, so that every mixture of prefill and decode comes up.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    fed = [0] * len(prompts)
    step = 0
    while any(len(answer) < count for answer in answers):
        slots, positions, tokens, wants, owners = [], [], [], [], []
        for slot, prompt in enumerate(prompts[: step + 1]):
            answer = answers[slot]
            if len(answer) == count:
                continue
            part = list(prompt[fed[slot] : fed[slot] + chunk]) if fed[slot] < len(prompt) else [answer[-1]]
            slots += [slot] * len(part)
            positions += range(fed[slot], fed[slot] + len(part))
            tokens += part
            fed[slot] += len(part)
            done = fed[slot] >= len(prompt)
            wants += [False] * (len(part) - 1) + [done]
            if done:
                owners.append(slot)
        logits = forward(stacks, Rows.of(slots, positions, tokens, wants))
        assert len(logits) == len(owners)
        for slot, row in zip(owners, logits, strict=True):
            answers[slot].append(int(row.argmax()))
        step += 1
    return answers


def path_of_data(name: str) -> Path:
    """A file of ``tests/data``."""
    return Path(__file__).resolve().parent.parent / "data" / name
