"""The ring's bench runs, and what it says of leaks holds: slots, streams, tasks, files, shared memory and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(180)
def test_requests_that_are_cancelled_at_random_leave_nothing_behind(tmp_path: Path) -> None:
    table = tmp_path / "rows.json"
    ran = subprocess.run(
        [sys.executable, "bench/ring.py", "--only", "leaks", "--count", "120", "--json", str(table)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "relay")])},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = {row["name"]: row for row in json.loads(table.read_text())}
    held = [name for name, row in rows.items() if row["holds"] is not None]
    assert len(held) == 12 and all(rows[name]["holds"] for name in held), ran.stdout
