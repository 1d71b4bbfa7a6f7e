"""What a dispatcher of expert rows says of itself to its bridge, in a coordinator's answers and a stage's reports."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

# Far beyond what any machine counts, so that whatever was taken can be added up and shown.
Count = Annotated[int, Meta(ge=0, le=1 << 48)]


class DispatchFigures(msgspec.Struct, frozen=True, array_like=True):
    """Counters since the dispatcher's start, then its workers as they stand.

    Attributes:
        frames: sent to workers; ``hedges``: parts that were sent to a second one, or computed here meanwhile.
        late: frames that missed their deadline; ``fallbacks``: parts that no worker answered.
        shadows: first tries; ``checks``: parts computed again; ``skipped``: checks that were given up.
        refused: sums that were plainly wrong; ``caught``: workers that were found to lie.
        attached, proven: workers with a link; those of them that have computed.
        closed, half_open, open: workers by their breaker.
    """

    frames: Count = 0
    hedges: Count = 0
    late: Count = 0
    fallbacks: Count = 0
    shadows: Count = 0
    checks: Count = 0
    skipped: Count = 0
    refused: Count = 0
    caught: Count = 0
    attached: Count = 0
    proven: Count = 0
    closed: Count = 0
    half_open: Count = 0
    open: Count = 0


# Those of the fields that count for ever, and those that tell how it stands.
COUNTERS = ("frames", "hedges", "late", "fallbacks", "shadows", "checks", "skipped", "refused", "caught")
GAUGES = ("attached", "proven", "closed", "half_open", "open")
