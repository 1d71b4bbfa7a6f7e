"""The declared widths of a ring: what bounds every batch, every frame and every result.

Both ends of a link derive the same bounds from these numbers, and refuse a larger frame before they read it.
"""

from __future__ import annotations

import msgspec

from kvasir_peer.errors import PlanError
from kvasir_peer.wire.membership import MAX_MEMBERSHIP_BYTES, membership_bytes

# Upper limits of each width, so that a hostile plan cannot ask a stage for absurd memory. They are far over what
# any real ring uses.
MAX_BATCH_ROWS = 65_536
MAX_MICRO_BATCH_ROWS = 4_096
MAX_IN_FLIGHT = 256
MAX_REQUESTS = 4_096
MAX_CONTEXT_LENGTH = 1 << 22
MAX_TOP_LOGPROBS = 20


class Widths(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How much may be in a ring at once.

    Attributes:
        batch_rows: rows of all micro-batches in flight together; at least ``micro_batch_rows``.
        micro_batch_rows: rows of one physical pass; bounds each boundary frame.
        max_in_flight: micro-batches between the head's first and the tail's last act; the scheduler uses
            fewer when fewer keep the slowest stage busy.
        max_requests: slots, each a KV cache of ``context_length`` positions at every stage.
        context_length: tokens of one request, prompt and answer together.
        top_logprobs: best tokens with log-probabilities that a row may ask of the tail.
    """

    batch_rows: int
    micro_batch_rows: int
    max_in_flight: int
    max_requests: int
    context_length: int
    top_logprobs: int = 0

    def check(self) -> None:
        """Refuse widths that cannot be.

        Raises:
            PlanError: names the first width that is out of its range.
        """
        limits = (
            ("batch_rows", 1, MAX_BATCH_ROWS),
            ("micro_batch_rows", 1, MAX_MICRO_BATCH_ROWS),
            ("max_in_flight", 1, MAX_IN_FLIGHT),
            ("max_requests", 1, MAX_REQUESTS),
            ("context_length", 2, MAX_CONTEXT_LENGTH),
            ("top_logprobs", 0, MAX_TOP_LOGPROBS),
        )
        for name, low, high in limits:
            value = getattr(self, name)
            if not low <= value <= high:
                raise PlanError(f"width {name} is {value}, must be {low} to {high}")
        size = membership_bytes(self.micro_batch_rows, self.max_requests)
        if size > MAX_MEMBERSHIP_BYTES:
            raise PlanError(
                f"widths micro_batch_rows {self.micro_batch_rows} and max_requests {self.max_requests} allow batches "
                f"whose list of rows takes {size} bytes, at most {MAX_MEMBERSHIP_BYTES} are carried: take fewer rows "
                "or requests"
            )
        if self.batch_rows < self.micro_batch_rows:
            raise PlanError(
                f"width batch_rows is {self.batch_rows}, under micro_batch_rows {self.micro_batch_rows}: "
                "no full micro-batch could ever be sent"
            )
