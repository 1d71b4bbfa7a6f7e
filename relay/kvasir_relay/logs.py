"""Log lines: text for people, or one JSON object a line. Payload is never in them, and addresses never at ``info``."""

from __future__ import annotations

import json
import logging
import sys
import time

from kvasir_relay.config import Log

_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {
    "message",
    "asctime",
    "taskName",
}


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


class TextFormatter(logging.Formatter):
    """``2031-05-04T12:00:00Z info  the text  name=value``."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = f"{_time(record)} {record.levelname.lower():7} {record.getMessage()}"
        for name, value in _extra(record).items():
            line += f"  {name}={value}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """``{"time":…,"level":…,"text":…}`` and what else the line carries."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        fields: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))


def set_up(settings: Log) -> None:
    """Write to standard error as the settings say; may be called again."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    level = getattr(logging, settings.level.upper())
    for name in ("kvasir_relay", "kvasir_peer"):
        logging.getLogger(name).setLevel(level)
    if settings.level != "debug":
        # Breaks of the protocol by single peers are in the metrics; a scanner would fill the disk with them.
        logging.getLogger("kvasir_peer.net").setLevel(logging.ERROR)
