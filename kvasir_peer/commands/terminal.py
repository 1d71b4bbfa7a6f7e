"""Text of others on one's own terminal: models, peers and bridges may say what they like, not steer the terminal."""

from __future__ import annotations

import logging
from typing import Any

# Control characters (C0, DEL, C1) move the cursor, rename the window, or hide what was there; lines and tabs may stay.
_HARMLESS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """``text`` without characters that a terminal would obey."""
    return text.translate(_HARMLESS)


def printable_json(value: Any) -> Any:
    """A parsed JSON value, every text in it printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [printable_json(item) for item in value]
    if isinstance(value, dict):
        return {printable(key): printable_json(item) for key, item in value.items()}
    return value


class PrintableFormatter(logging.Formatter):
    """Log lines, which hold reasons that other peers gave."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        return printable(super().format(record))
