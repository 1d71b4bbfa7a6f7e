"""An engine without weights: it takes as long as it is told to, and computes nothing.

For measuring everything around engines (scheduling, links, distance) with passes of a known cost, on any machine and
with boundaries as wide as those of large models. Its device says how long a pass takes: ``30ms+10ms`` is a floor of
30 ms, and 10 ms for each row. It waits without using the processor, so a whole ring of it fits on one machine.

It is deterministic: each token follows from the one before it and its position, whatever the stages and batches.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvasir_peer.engines.base import F32, ExpertBank, LayerStack, MemoryEstimate, Rows, StackSpec, Steps
from kvasir_peer.errors import EngineError, UsageError

if TYPE_CHECKING:
    from kvasir_peer.engines.architectures import ModelShape
    from kvasir_peer.engines.base import BankSpec, Progress
    from kvasir_peer.models.gguf import TensorInfo
    from kvasir_peer.models.sources import TensorSource

# The only values that cross: tokens, in the first column of a boundary; f16 holds whole numbers exactly up to here.
MAX_VOCAB = 2048

_COST = re.compile(r"(\d+(?:\.\d+)?)ms\+(\d+(?:\.\d+)?)ms\Z")


@dataclass(frozen=True)
class SyntheticShape:
    """What a runner asks of a model's shape."""

    n_layer: int
    n_embd: int
    n_vocab: int


class SyntheticSource:
    """A model without tensors.

    Args:
        n_layer, n_embd, vocab: its sizes.
    """

    def __init__(self, n_layer: int, n_embd: int, vocab: int) -> None:
        self.metadata: Mapping[str, Any] = {
            "synthetic.n_layer": n_layer,
            "synthetic.n_embd": n_embd,
            "synthetic.vocab": vocab,
        }
        self.tensors: Mapping[str, TensorInfo] = {}

    def release(self) -> None:
        """There is nothing to give back."""


def parse_cost(device: str) -> tuple[float, float]:
    """``(seconds of any pass, seconds of each row)`` of a device such as ``30ms+10ms``.

    Raises:
        UsageError: it does not have this form.
    """
    match = _COST.match(device)
    if match is None:
        raise UsageError(f"device {device!r} of the synthetic engine: write the cost of a pass as 30ms+10ms")
    return float(match[1]) / 1e3, float(match[2]) / 1e3


def follower(token: int, position: int, vocab: int) -> int:
    """The token that follows ``token`` at ``position``."""
    return (31 * token + 7 * position + 1) % vocab


class SyntheticStack(LayerStack):
    """Layers that take their time."""

    def __init__(self, shape: SyntheticShape, spec: StackSpec) -> None:
        if shape.n_vocab > MAX_VOCAB:
            raise EngineError(f"the synthetic engine has at most {MAX_VOCAB} tokens, not {shape.n_vocab}")
        self.spec = spec
        self.shape = cast("ModelShape", shape)
        self._floor, self._row = parse_cost(spec.device)

    def memory(self) -> MemoryEstimate:
        """Nothing but the boundary of a pass."""
        return _estimate(self.shape.n_embd, self.spec)

    def forward(self, rows: Rows, hidden: F32 | None) -> F32:
        """See :meth:`LayerStack.forward`."""
        due = time.perf_counter() + self._floor + self._row * len(rows)
        rows.check(self.spec, self.shape.n_vocab if hidden is None else 0)
        tokens = rows.tokens if hidden is None else hidden[:, 0].astype(np.int64)
        if self.spec.end == self.shape.n_layer:
            wanted = np.flatnonzero(rows.wants_output)
            out = np.zeros((len(wanted), self.shape.n_vocab), np.float32)
            for place, row in enumerate(wanted):
                out[place, follower(int(tokens[row]), int(rows.positions[row]), self.shape.n_vocab)] = 1.0
        else:
            out = np.zeros((len(rows), self.shape.n_embd), np.float32)
            out[:, 0] = tokens
        time.sleep(max(0.0, due - time.perf_counter()))
        return out

    def steps(self, rows: Rows, hidden: F32 | None) -> Steps:
        """It has no routed experts, so it never stops."""
        yield from ()
        return self.forward(rows, hidden)

    def local_bank(self) -> ExpertBank | None:
        """None."""
        return None

    def close(self) -> None:
        """There is nothing to give back."""


def _estimate(n_embd: int, spec: StackSpec) -> MemoryEstimate:
    return MemoryEstimate(0, 0, 4 * n_embd * spec.max_rows)


def _shape(metadata: Mapping[str, Any]) -> SyntheticShape:
    try:
        return SyntheticShape(
            *(int(metadata[f"synthetic.{name}"]) for name in ("n_layer", "n_embd", "vocab"))
        )
    except KeyError:
        raise UsageError("the synthetic engine computes no model's weights; it is for measurements") from None


def make_stack(source: TensorSource, spec: StackSpec, progress: Progress | None) -> LayerStack:
    """See :func:`kvasir_peer.engines.base.create_stack`."""
    return SyntheticStack(_shape(source.metadata), spec)


def make_bank(source: TensorSource, spec: BankSpec) -> ExpertBank:
    """It has no experts.

    Raises:
        UsageError: always.
    """
    raise UsageError("the synthetic engine has no experts")


def estimate_stack(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], spec: StackSpec
) -> MemoryEstimate:
    """See :func:`kvasir_peer.engines.base.estimate_stack`."""
    return _estimate(_shape(metadata).n_embd, spec)


def estimate_bank(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], spec: BankSpec
) -> MemoryEstimate:
    """It has no experts.

    Raises:
        UsageError: always.
    """
    raise UsageError("the synthetic engine has no experts")
