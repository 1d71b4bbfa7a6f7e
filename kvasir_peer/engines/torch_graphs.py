"""Decode passes with fixed buffers, so that a CUDA device can record one and play it again.

A decode pass of a few rows is some thousand small kernels; starting them one by one takes the host longer than the
device takes to run them. Recorded as a CUDA graph they start as one. That needs every address and every shape to
stay as they were, so passes come in few shapes (rows and reach are rounded up, missing rows repeat the last one,
which writes the same keys twice) and their numbers are copied into buffers.

On a device without graphs the same buffers are used and the pass is computed anew, which is how tests on a CPU run
this code.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvasir_peer.engines.base import F32, Rows
from kvasir_peer.engines.torch_attention import POSITIONS_STEP, Pass

if TYPE_CHECKING:
    from kvasir_peer.engines.torch_stack import TorchStack

_log = logging.getLogger(__name__)

# Most rows of a recorded pass: beyond, kernels are large enough to hide their own start.
MAX_ROWS = 16
# Recorded passes that are kept; five sizes of batch, and as many lengths as one is likely to meet.
MAX_GRAPHS = 24
# Runs before recording, in which libraries choose kernels and allocate their own memory.
_WARM_UP = 2
# Largest difference between a replay and the plain pass, relative to the largest value.
_TOLERANCE = 1e-2


@dataclass(frozen=True, eq=False)
class _Recorded:
    """A pass of one shape: buffers, and how to run it."""

    batch: Pass
    tokens: Tensor  # int64 [rows]; read at the head
    hidden: Tensor  # float32 [rows, n_embd]; read elsewhere
    play: Callable[[], Tensor]


class DecodeGraphs:
    """Decode passes of a stack, recorded as they come up.

    Args:
        stack: whose layers are run; its experts must be computed without waiting for the device.
    """

    def __init__(self, stack: TorchStack) -> None:
        self._stack = stack
        self._known: OrderedDict[tuple[int, int], _Recorded] = OrderedDict()
        self._pool: Any = None
        layers = stack.shape.layers[stack.spec.first : stack.spec.end]
        used = max((layer.moe.n_used for layer in layers if layer.moe is not None), default=0)
        # Beyond, experts would be sorted on the host, which waits for the device.
        rows = min(MAX_ROWS, stack.options.gather_pairs // used) if used else MAX_ROWS
        self._max_rows = 1 << rows.bit_length() >> 1  # the power of two that is not larger

    def takes(self, rows: Rows) -> bool:
        """Whether the rows are a pass of this kind: few, and each of another slot."""
        return len(rows) <= self._max_rows and len(np.unique(rows.slots)) == len(rows)

    def run(self, rows: Rows, hidden: F32 | None) -> Tensor | None:
        """Compute a pass.

        Args:
            rows: for which :meth:`takes` is true.
            hidden: float32 [n, n_embd], or None at the head.

        Returns:
            Hidden state or logits of all n rows (whatever they want), or None when this device can't do it.
        """
        n = len(rows)
        shape = self._shape(rows)
        recorded = self._known.get(shape)
        if recorded is None:
            recorded = self._record(shape, rows, hidden)
            if recorded is None:
                return None
            self._known[shape] = recorded
            if len(self._known) > MAX_GRAPHS:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(shape)
            self._fill(recorded, rows, hidden)
        return recorded.play()[:n]

    def clear(self) -> None:
        """Forget all recorded passes."""
        self._known.clear()

    def _shape(self, rows: Rows) -> tuple[int, int]:
        """Rows and reach, rounded up to powers of two."""
        context = self._stack.spec.context_length
        reach = max(POSITIONS_STEP, 1 << int(rows.positions.max()).bit_length())
        return 1 << (len(rows) - 1).bit_length(), min(reach, context)

    def _record(self, shape: tuple[int, int], rows: Rows, hidden: F32 | None) -> _Recorded | None:
        stack = self._stack
        count, reach = shape
        padded = _padded(rows, count)
        batch = stack.singles_pass(padded, reach)
        device = stack.options.device
        recorded = _Recorded(
            batch,
            torch.zeros(count, dtype=torch.int64, device=device),
            torch.zeros((count, stack.shape.n_embd), device=device),
            lambda: stack.compute_fixed(recorded.tokens, recorded.hidden, batch),
        )
        self._fill(recorded, rows, hidden)
        if device.type != "cuda":
            return recorded
        try:
            return self._capture(recorded)
        except RuntimeError as error:
            self._max_rows = 0
            _log.warning("decode passes run without CUDA graphs: %s", str(error).splitlines()[0])
            return None

    def _capture(self, recorded: _Recorded) -> _Recorded:
        """Record what ``recorded.play`` does on a CUDA device, and compare the first replay with it."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                plain = recorded.play()
        torch.cuda.current_stream().wait_stream(side)
        plain = plain.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = recorded.play()
        self._pool = graph.pool()

        def play() -> Tensor:
            graph.replay()
            return result

        difference = (play() - plain).abs().max()
        if not bool(difference <= _TOLERANCE * plain.abs().max()):
            raise RuntimeError(f"a replay differs from the plain pass by {float(difference):.3g}")
        return _Recorded(recorded.batch, recorded.tokens, recorded.hidden, play)

    def _fill(self, recorded: _Recorded, rows: Rows, hidden: F32 | None) -> None:
        """Copy the numbers of a pass into the buffers."""
        count = len(recorded.tokens)
        padded = _padded(rows, count)
        fresh = self._stack.singles_pass(padded, recorded.batch.reach)
        recorded.batch.slots.copy_(fresh.slots)
        recorded.batch.positions.copy_(fresh.positions)
        for rope, (cos, sin) in fresh.ropes.items():
            recorded.batch.ropes[rope][0].copy_(cos)
            recorded.batch.ropes[rope][1].copy_(sin)
        if hidden is None:
            recorded.tokens.copy_(torch.from_numpy(padded.tokens.astype(np.int64)))
        else:
            again = np.minimum(np.arange(count), len(rows) - 1)
            recorded.hidden.copy_(torch.from_numpy(hidden[again]))


def _padded(rows: Rows, count: int) -> Rows:
    """Rows with the last one repeated up to a count."""
    again = np.minimum(np.arange(count), len(rows) - 1)
    return Rows(rows.slots[again], rows.positions[again], rows.tokens[again], rows.wants_output[again])
