"""The month's count of carried bytes, kept across restarts."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from kvasir_relay.limits import Ledger

log = logging.getLogger("kvasir_relay")

MONTH_FILE = "month.json"


def this_month() -> str:
    """``2031-05``, in UTC."""
    return time.strftime("%Y-%m", time.gmtime())


def read_back(home: Path, ledger: Ledger) -> None:
    """Take up the count where it was left; a file that makes no sense is reported and begun anew."""
    path = home / MONTH_FILE
    carried = 0
    try:
        kept = json.loads(path.read_text())
        if kept["month"] == this_month():
            carried = int(kept["bytes"])
    except FileNotFoundError:
        pass  # the first start
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the month's count in %s cannot be read and begins anew: %s", path, error)
    ledger.begin_month(this_month(), carried)


def store(home: Path, ledger: Ledger) -> None:
    """Write the count; whole or not at all."""
    path = home / MONTH_FILE
    temporary = path.with_suffix(".new")
    try:
        temporary.write_text(json.dumps({"month": ledger.month, "bytes": ledger.month_bytes}))
        temporary.replace(path)
    except OSError as error:
        log.warning("the month's count cannot be written to %s: %s", path, error)
