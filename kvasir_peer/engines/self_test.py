"""A small computation by an engine, compared with numpy: whether this machine computes right, and how fast.

A layer of four experts with random weights is made in memory, once in float32 and once in four-bit blocks, and some
rows go through it. That takes the same kernels as real work: block-quantised products, the activation, the sum over
experts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.engines import quants
from kvasir_peer.engines.base import F32, BankSpec, Precision, create_bank
from kvasir_peer.errors import EngineError
from kvasir_peer.models.gguf import TensorInfo

_WIDTH, _HIDDEN, _EXPERTS, _USED, _ROWS = 256, 512, 4, 2, 4
# Relative (root mean square) error. Exact: float32 in another order of summation. Fast: activations in eight bits
# (0.55 to 0.87 % was measured between processors for one product; here are three, one after the other) or in
# half precision.
_MOST_ERROR: Mapping[Precision, float] = {"exact": 1e-4, "fast": 3e-2}
_CASES: tuple[tuple[str, Precision], ...] = (("F32", "exact"), ("Q4_0", "fast"))
_DISTINCT = (
    1 << 16
)  # random blocks; beyond they are repeated, because making more takes longer than it is worth
_SECONDS = 0.3  # of repeated passes to time one


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What a test found.

    Attributes:
        engine, device: as asked for.
        exact_error: relative root-mean-square error with float32 weights and activations.
        fast_error: the same with four-bit weights and what is native to the engine.
        pass_ms: one pass of 4 rows over the four-bit layer, milliseconds; the best of some.
    """

    engine: str
    device: str
    exact_error: float
    fast_error: float
    pass_ms: float


class RandomExperts:
    """A :class:`~kvasir_peer.models.sources.TensorSource` of one layer of experts with random weights.

    Args:
        type_name: ``F32`` or ``Q4_0``.
        experts: how many.
        width: of the rows that go in and come out.
        hidden: neurons of an expert.
    """

    def __init__(
        self, type_name: str, *, experts: int = _EXPERTS, width: int = _WIDTH, hidden: int = _HIDDEN
    ) -> None:
        self.type = quants.BY_NAME[type_name]
        self._experts = experts
        generator = np.random.default_rng(1)
        self._raw: dict[str, NDArray[np.uint8]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for suffix, out, columns in (("gate", hidden, width), ("up", hidden, width), ("down", width, hidden)):
            name, shape = f"blk.0.ffn_{suffix}_exps.weight", (experts, out, columns)
            if type_name == "F32":
                values = generator.standard_normal(shape, np.float32) / np.float32(columns) ** 0.5
                raw = values.view(np.uint8).reshape(-1)
            else:  # Q4_0: blocks of a float16 scale and 16 bytes of codes
                count = experts * out * columns // 32
                blocks = generator.integers(0, 256, (min(count, _DISTINCT), 18), np.uint8)
                blocks[:, :2] = np.full((len(blocks), 1), 0.2 / columns**0.5, np.float16).view(np.uint8)
                raw = np.resize(blocks, (count, 18)).reshape(-1)
            self._raw[name] = raw
            self.tensors[name] = TensorInfo(name, shape, self.type.id, raw.nbytes, 0)
        self.metadata: Mapping[str, object] = {
            "general.architecture": "llama",
            "llama.block_count": 1,
            "llama.embedding_length": width,
            "llama.feed_forward_length": hidden,
            "llama.context_length": 64,
            "llama.attention.head_count": 4,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.expert_count": experts,
            "llama.expert_used_count": _USED,
            "llama.vocab_size": 32,
        }

    def read(self, name: str) -> NDArray[np.uint8]:
        return self._raw[name]

    def read_experts(self, name: str, lo: int, hi: int) -> NDArray[np.uint8]:
        size = self._raw[name].nbytes // self._experts
        return self._raw[name][lo * size : hi * size]

    def release(self) -> None:
        """Nothing to give back."""

    def expected(self, x: F32, ids: NDArray[np.int32], weights: F32) -> F32:
        """The layer's result by numpy, in float64 inside."""
        gate, up, down = (
            quants.dequantize(self.read(name), info.type, info.shape).astype(np.float64)
            for name, info in self.tensors.items()
        )
        result = np.zeros((len(x), _WIDTH))
        for row in range(len(x)):
            for expert, weight in zip(ids[row], weights[row], strict=True):
                gated = gate[expert] @ x[row]
                hidden = gated / (1 + np.exp(-gated)) * (up[expert] @ x[row])
                result[row] += weight * (down[expert] @ hidden)
        return result.astype(np.float32)


@contextmanager
def unsaid() -> Iterator[None]:
    """Keep what loading says of dequantised types from the owner: these weights are none of theirs."""
    log = logging.getLogger("kvasir_peer.engines.base")

    def drop(record: logging.LogRecord) -> bool:
        return False

    log.addFilter(drop)
    try:
        yield
    finally:
        log.removeFilter(drop)


def run(engine: str, device: str = "cpu", *, threads: int = 0) -> SelfTest:
    """Compute with an engine, and compare with numpy.

    Raises:
        EngineError: it computes wrong, or not at all.
        UsageError: it is not installed.
    """
    generator = np.random.default_rng(2)
    x = generator.standard_normal((_ROWS, _WIDTH), np.float32)
    ids = np.array([[row % _EXPERTS, (row + 1) % _EXPERTS] for row in range(_ROWS)], np.int32)
    weights = np.full((_ROWS, _USED), 0.5, np.float32)
    errors: dict[Precision, float] = {}
    best = float("inf")
    for type_name, precision in _CASES:
        source = RandomExperts(type_name)
        with unsaid():
            spec = BankSpec(((0, 0, _EXPERTS),), _ROWS, precision, threads, device)
            bank = create_bank(engine, source, spec)
        try:
            expected = source.expected(x, ids, weights)
            end = time.monotonic() + _SECONDS
            while True:
                began = time.monotonic()
                found = bank.compute(0, x, ids, weights)
                now = time.monotonic()
                best = min(best, now - began) if precision == "fast" else best
                if now > end:
                    break
        finally:
            bank.close()
        error = float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))
        most = _MOST_ERROR[precision]
        if not error <= most:  # also for NaN
            raise EngineError(
                f"the {engine} engine on {device} computes wrong: {type_name} weights, error {error:.2g}, "
                f"at most {most:.2g} is normal; update its packages, or choose another engine"
            )
        errors[precision] = error
    return SelfTest(engine, device, errors["exact"], errors["fast"], best * 1000)
