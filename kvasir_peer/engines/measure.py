"""How fast a machine reads memory and computes an expert: what volunteers and stages are limited by."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kvasir_peer.engines.base import BankSpec, create_bank
from kvasir_peer.engines.self_test import RandomExperts, unsaid

# An expert of Qwen3-30B-A3B, and as many as no processor's cache holds.
EXPERT_WIDTH, EXPERT_HIDDEN, EXPERTS = 2048, 768, 24
EXPERT_ROWS = (1, 4, 16)
_READ_BYTES = 400 << 20  # far over any cache
_READ_ROUNDS = 6
_EXPERT_ROUNDS = 2  # over all experts


def read_bandwidth(threads: int) -> float:
    """Bytes a second that this machine reads from memory, by the best of several plain passes over a large array."""
    data = np.ones(_READ_BYTES // 8, np.float64)
    pieces = np.array_split(data, threads * 4)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_READ_ROUNDS):
            begin = time.perf_counter()
            list(pool.map(np.max, pieces))
            best = max(best, data.nbytes / (time.perf_counter() - begin))
    return best


@dataclass(frozen=True, slots=True)
class ExpertTime:
    """What one expert of four-bit weights (Q4_0) takes, its weights not in any cache.

    Attributes:
        rows: rows that go through it in one call.
        seconds: of a call; the median.
        file_bytes: bytes of the expert in a GGUF file.
    """

    rows: int
    seconds: float
    file_bytes: int


def expert_times(engine: str, device: str = "cpu", *, threads: int = 0) -> list[ExpertTime]:
    """Time one expert for each of :data:`EXPERT_ROWS`.

    Raises:
        EngineError: the engine or device does not work.
        UsageError: the engine is not installed.
    """
    source = RandomExperts("Q4_0", experts=EXPERTS, width=EXPERT_WIDTH, hidden=EXPERT_HIDDEN)
    file_bytes = sum(info.n_bytes for info in source.tensors.values()) // EXPERTS
    generator = np.random.default_rng(0)
    with unsaid():
        spec = BankSpec(((0, 0, EXPERTS),), max(EXPERT_ROWS), threads=threads, device=device)
        bank = create_bank(engine, source, spec)
    found = []
    try:
        for rows in EXPERT_ROWS:
            x = generator.standard_normal((rows, EXPERT_WIDTH), np.float32)
            weights = np.ones((rows, 1), np.float32)
            samples = []
            for expert in (*range(EXPERTS),) * _EXPERT_ROUNDS:
                ids = np.full((rows, 1), expert, np.int32)
                begin = time.perf_counter()
                bank.compute(0, x, ids, weights)
                samples.append(time.perf_counter() - begin)
            found.append(ExpertTime(rows, statistics.median(samples), file_bytes))
    finally:
        bank.close()
    return found
