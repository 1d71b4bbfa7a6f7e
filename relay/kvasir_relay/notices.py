"""Log lines that strangers can cause, in bounded number."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("kvasir_relay")

EVERY_SECONDS = 60.0  # one line of a kind in this time; scanners knock all day


class Notices:
    """Writes a line of a kind at most once a minute, with the number of those left out."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warn(self, kind: str, text: str, *arguments: object) -> None:
        """Write ``text`` unless one of its kind was written just now.

        Args:
            kind: one of a fixed set of words; never anything that a peer chose.
        """
        now = time.monotonic()
        last = self._last.get(kind)
        if last is not None and now - last < EVERY_SECONDS:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._last[kind] = now
        more = self._left_out.pop(kind, 0)
        suffix = f" ({more} more of these were not written)" if more else ""
        log.warning(text + suffix, *arguments, extra={"kind": kind})
