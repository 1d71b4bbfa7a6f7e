"""The timeline of a ring as JSON: seconds on the bridge's clock, to a tenth of a millisecond."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvasir_peer.errors import UsageError

if TYPE_CHECKING:
    from kvasir_peer.ring.telemetry import Timeline

DEFAULT_SECONDS = 10.0
MAX_SECONDS = 60.0


def asked(seconds: str | None, after: str | None) -> tuple[float, int]:
    """The query's ``seconds`` and ``after``.

    Raises:
        UsageError: they are not within their bounds.
    """
    try:
        span = DEFAULT_SECONDS if seconds is None else float(seconds)
    except ValueError:
        span = 0.0
    if not 0 < span <= MAX_SECONDS:
        raise UsageError(f"seconds is {str(seconds)[:20]!r}, it must be over 0 and at most {MAX_SECONDS:.0f}")
    if after is None:
        return span, -1
    if len(after) > 18 or not after.isascii() or not after.isdigit():
        raise UsageError(f"after is {after[:20]!r}, it must be the number of a batch")
    return span, int(after)


def to_json(timeline: Timeline) -> dict[str, Any]:
    """The body of ``GET /api/ring/{model}/timeline``."""
    return {
        "now": round(timeline.now, 4),
        "seconds": timeline.seconds,
        "epoch": timeline.epoch,
        "stages": timeline.stages,
        "batches": [
            {
                "number": batch.number,
                "epoch": batch.epoch,
                "sequence": batch.sequence,
                "rows": batch.rows,
                "tokens": batch.tokens,
                "composed": None if batch.composed is None else round(batch.composed, 4),
                "returned": round(batch.returned, 4),
                "runs": batch.runs,
                "bars": [(round(bar.start, 4), round(bar.end, 4)) for bar in batch.bars],
            }
            for batch in timeline.batches
        ],
        "requests": [
            {
                "request": request.number,
                "prefill_rows": request.prefill_rows,
                "tokens": request.tokens,
                "first": round(request.first, 4),
                "last": round(request.last, 4),
                "active": request.active,
            }
            for request in timeline.requests
        ],
    }
