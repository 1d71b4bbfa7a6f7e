"""A batch as the scheduler composes it: the exact list of rows that goes to every stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvasir_peer.wire.membership import FLAG_DECODE, FLAG_OUTPUT, Membership, compose
from kvasir_peer.wire.sampling import Sampling

Phase = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True)
class Row:
    """One token position of one request.

    Attributes:
        request: request id.
        slot: KV slot at every stage, 0 to ``max_requests - 1``.
        incarnation: of the slot; grows whenever the slot gets another request or its request is rewound. At a
            stage, a row of a newer incarnation makes all entries of the slot at its position and later void.
        position: of the token in the text.
        token: token id that the head embeds.
        phase: ``decode`` for the one row of a request that continues its answer; ``prefill`` for rows of a
            prompt, and of a text that is computed again.
        wants_output: whether the tail samples the next token from this row.
        through: how many stages, from the head on, compute this row. Less than all where the later stages
            still hold its KV entries (a stage before them was replaced): they leave the row out and keep what
            they have.
        sampling: how the tail samples; None where no output is wanted.
    """

    request: int
    slot: int
    incarnation: int
    position: int
    token: int
    phase: Phase
    wants_output: bool
    through: int
    sampling: Sampling | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that pass the stages together.

    Attributes:
        seq: grows by one for each batch of a scheduler.
        rows: rows of one request are consecutive, with consecutive ascending positions. May be empty when only
            slots are released.
        released: ``(slot, incarnation)`` whose request has ended: stages forget KV entries of that and of
            older incarnations, before they compute the rows.
    """

    seq: int
    rows: tuple[Row, ...]
    released: tuple[tuple[int, int], ...] = ()

    def rows_at(self, stage: int) -> int:
        """Rows that the stage with this index (0 is the head) computes."""
        return sum(row.through > stage for row in self.rows)

    def membership(self) -> Membership:
        """What stages are told of it."""
        rows = [
            (
                row.request,
                row.slot,
                row.incarnation,
                row.position,
                row.token,
                (FLAG_DECODE if row.phase == "decode" else 0) | (FLAG_OUTPUT if row.wants_output else 0),
                row.through,
            )
            for row in self.rows
        ]
        return compose(
            rows, [row.sampling for row in self.rows if row.wants_output and row.sampling is not None]
        )
