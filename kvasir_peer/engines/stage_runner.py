"""A stage's arithmetic on the engine side: membership and boundary in, boundary or tokens out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Container, Generator, Sequence

import numpy as np
import numpy.typing as npt

from kvasir_peer.engines.base import F32, ExpertBank, ExpertWork, LayerStack, Rows, Steps
from kvasir_peer.engines.sampling import sample
from kvasir_peer.errors import CacheError
from kvasir_peer.wire.codec import Buffer
from kvasir_peer.wire.membership import FLAG_OUTPUT, Limits, decode_membership
from kvasir_peer.wire.ring import Output
from kvasir_peer.wire.sampling import Sampling
from kvasir_peer.wire.tensors import decode_tensor, encode_tensor

# Of a measurement: a pass for warming up and three that count; a share of a second of patience for slow ones.
MEASURED_ROWS, MEASURED_PASSES, MEASURE_SECONDS = 8, 4, 1.5


class StageRunner:
    """One loaded stack, the boundary's dtype, and what the tail needs to sample.

    Args:
        stack: the loaded layers.
        limits: the plan's widths; a membership outside them is refused.
        stage: index of the stage in the ring.
        dtype: the boundary's.
    """

    def __init__(self, stack: LayerStack, limits: Limits, stage: int, dtype: str) -> None:
        self._stack = stack
        self._limits = limits
        self._stage = stage
        self._dtype = dtype
        self.head = stack.spec.first == 0
        self.tail = stack.spec.end == stack.shape.n_layer
        self._width = stack.shape.n_embd
        self.bank = stack.local_bank()
        self._slowed = False
        # Token of each position, for the penalties; rows bring their tokens, so a rewind mends it by itself.
        self._tokens = np.zeros((limits.slots, limits.context_length), np.int32) if self.tail else None
        self._held: dict[int, tuple[int, int]] = {}  # slot: request, positions

    def run(self, membership: Buffer, boundary: Buffer, out: memoryview) -> tuple[int, tuple[Output, ...]]:
        """Compute one batch.

        Args:
            membership: as it travels with the batch.
            boundary: bytes of ``[rows, n_embd]``; empty at the head.
            out: where the next boundary is written; may be the memory of ``boundary``.

        Returns:
            Bytes written to ``out``, and the sampled tokens (at the tail, where nothing is written).

        Raises:
            WireError: a membership or boundary that is not within the plan.
            EngineError: rows that the stack refuses.
        """
        steps = self.steps(membership, boundary, out, frozenset())
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value
        raise AssertionError("a pass without layers to stop at runs through")

    def slow_down(self, bank: ExpertBank) -> None:
        """Compute experts by another bank than the stack's own, for measurements."""
        self.bank, self._slowed = bank, True

    def slots(self, membership: Buffer) -> frozenset[int]:
        """Slots of which the stage computes rows. Raises WireError as :meth:`run`."""
        rows = decode_membership(membership, self._limits).rows
        return frozenset(rows["slot"][rows["through"] > self._stage].tolist())

    def steps(
        self, membership: Buffer, boundary: Buffer, out: memoryview, layers: Container[int]
    ) -> Generator[ExpertWork, F32, tuple[int, tuple[Output, ...]]]:
        """As :meth:`run`, but at ``layers`` the routed rows are yielded, and their sums are sent back.

        What is yielded is valid until the next step; ``boundary`` is read before the first one.
        """
        batch = decode_membership(membership, self._limits)
        table = batch.rows[batch.rows["through"] > self._stage]
        if not len(table):
            return 0, ()  # rows that only earlier stages had to compute again
        self._check_cache(table)
        rows = Rows(
            table["slot"].astype(np.int32),
            table["position"].astype(np.int32),
            table["token"].astype(np.int32),
            (table["flags"] & FLAG_OUTPUT) != 0,
        )
        hidden = None if self.head else decode_tensor(boundary, self._dtype, len(rows), self._width)
        if not self._slowed and not any(
            layer in layers for layer in range(self._stack.spec.first, self._stack.spec.end)
        ):
            result = self._stack.forward(rows, hidden)
        else:
            result = yield from self._compute(rows, hidden, layers)
        if self._tokens is None:
            further = result[table["through"] > self._stage + 1]
            return encode_tensor(further, self._dtype, out).nbytes, ()
        self._tokens[rows.slots, rows.positions] = rows.tokens
        return 0, self._sample(table, rows, result, batch.samplings)

    def _check_cache(self, table: npt.NDArray[np.void]) -> None:
        """Refuse rows that build on positions which are not there, and note those that will be.

        Whoever composes believes something about this cache, which may be wrong after a stage was lost: a wrong
        token would be worse than computing again.

        Raises:
            CacheError: nothing was computed.
        """
        starts = np.flatnonzero(np.diff(table["slot"].astype(np.int64), prepend=-1))
        noted = {}
        for start, end in zip(starts, [*starts[1:], len(table)], strict=True):
            request, slot = int(table["request"][start]), int(table["slot"][start])
            first, (holder, held) = int(table["position"][start]), self._held.get(slot, (-1, 0))
            if first > (held if holder == request else 0):
                has = f"{held} positions of request {holder}" if held else "nothing"
                raise CacheError(f"slot {slot} holds {has}, a row of request {request} builds on {first}")
            noted[slot] = (request, first + int(end - start))
        self._held |= noted

    def _compute(self, rows: Rows, hidden: F32 | None, layers: Container[int]) -> Steps:
        """All layers; routed experts here, but at ``layers``."""
        bank = self.bank
        assert bank is not None
        stack = self._stack.steps(rows, hidden)
        try:
            work = next(stack)
            while True:
                if work.layer in layers:
                    sums = yield work
                else:
                    sums = bank.compute(work.layer, work.x, work.ids, work.weights)
                work = stack.send(sums)
        except StopIteration as stop:
            return stop.value

    def _sample(
        self, table: npt.NDArray[np.void], rows: Rows, logits: F32, samplings: Sequence[Sampling]
    ) -> tuple[Output, ...]:
        assert self._tokens is not None
        wanted = np.flatnonzero(rows.wants_output)
        if not len(wanted):
            return ()
        positions = rows.positions[wanted]
        histories = [
            self._tokens[slot, : position + 1]
            for slot, position in zip(rows.slots[wanted], positions, strict=True)
        ]
        sampled = sample(logits, samplings, positions, histories)
        return tuple(
            Output(
                int(table["request"][row]),
                int(table["incarnation"][row]),
                int(table["position"][row]),
                one.token,
                one.logprob,
                one.top,
                int(table["slot"][row]),
            )
            for row, one in zip(wanted, sampled, strict=True)
        )

    def measure(self) -> tuple[tuple[int, float], ...]:
        """Rows and seconds of a few passes, the least of several each; for a stage that holds nothing yet.

        The passes fill the beginning of a slot, which counts as empty.
        """
        most = min(MEASURED_ROWS, self._limits.rows, self._limits.context_length)
        end = time.perf_counter() + MEASURE_SECONDS
        found = []
        for count in sorted({1, most}):
            rows = Rows(
                np.zeros(count, np.int32),
                np.arange(count, dtype=np.int32),
                np.zeros(count, np.int32),
                np.arange(count) == count - 1,  # decodes want an output each, prompts one in all
            )
            hidden = None if self.head else np.full((count, self._width), 0.01, np.float32)
            times = []
            for _ in range(MEASURED_PASSES):
                began = time.perf_counter()
                self._stack.forward(rows, hidden)
                times.append(time.perf_counter() - began)
                if time.perf_counter() > end:
                    break
            found.append((count, min(times)))
        return tuple(found)

    def retarget(self, stage: int, stages: int) -> None:
        """Take another index, in a ring of another number of stages; weights and KV cache stay."""
        self._stage = stage
        self._limits = dataclasses.replace(self._limits, stages=stages)

    def close(self) -> None:
        """Give all memory back."""
        self._stack.close()
