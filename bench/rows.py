"""The table that a bench prints as it grows, and writes as JSON: a list of rows with five fields.

``name``; ``value``, a number, or ``not run``; ``unit``; ``goal``, a comparison such as ``>= 1.3``, empty where there is
none; ``holds``, null where there is no goal or nothing was run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
NOT_RUN = "not run"


class Rows:
    """Rows in the order in which they were measured."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, name: str, value: float, unit: str, goal: str = "", holds: bool | None = None) -> None:
        """A number, with its goal and whether it holds where there is one."""
        self._take({"name": name, "value": round(value, 6), "unit": unit, "goal": goal, "holds": holds})

    def not_run(self, name: str, why: str) -> None:
        """What could not be measured here, and why."""
        self._take({"name": name, "value": NOT_RUN, "unit": "", "goal": "", "holds": None}, f"  {why}")

    def _take(self, row: Row, remark: str = "") -> None:
        self.rows.append(row)
        verdict = remark if row["holds"] is None else ("  holds" if row["holds"] else "  MISSED")
        value = row["value"] if row["value"] == NOT_RUN else f"{row['value']:.5g}"
        print(f"{row['name']:66} {value:>10} {row['unit']:12} {row['goal']:14}{verdict}", flush=True)

    def write(self, file: Path | None) -> None:
        """Keep them as JSON, where a file is given."""
        if file is not None:
            file.write_text(json.dumps(self.rows, indent=1) + "\n")

    @property
    def missed(self) -> int:
        """How many goals were missed."""
        return sum(row["holds"] is False for row in self.rows)
