"""The table that a bench prints as it grows, and writes as JSON: name, value, unit, goal (or null), holds (or null)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Rows:
    """Rows in the order in which they were measured."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, name: str, value: float, unit: str, goal: str = "", holds: bool | None = None) -> None:
        """A number, with its goal and whether it holds where there is one."""
        self._take(
            {"name": name, "value": round(value, 6), "unit": unit, "goal": goal or None, "holds": holds}
        )

    def not_run(self, name: str, why: str) -> None:
        """What could not be measured here, and why."""
        self._take({"name": name, "value": None, "unit": f"not run: {why}", "goal": None, "holds": None})

    def _take(self, row: Row) -> None:
        self.rows.append(row)
        verdict = "" if row["holds"] is None else ("  holds" if row["holds"] else "  MISSED")
        value = "" if row["value"] is None else f"{row['value']:.5g}"
        print(f"{row['name']:66} {value:>10} {row['unit']:12} {row['goal'] or '':14}{verdict}", flush=True)

    def write(self, file: Path | None) -> None:
        """Keep them as JSON, where a file is given."""
        if file is not None:
            file.write_text(json.dumps(self.rows, indent=1))

    @property
    def missed(self) -> int:
        """How many goals were missed."""
        return sum(row["holds"] is False for row in self.rows)
