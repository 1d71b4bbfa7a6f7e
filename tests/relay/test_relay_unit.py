"""The systemd unit: it parses, and is as closed as it says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from helpers_relay import ROOT

from kvasir_relay.config import load

UNIT = ROOT / "packaging" / "kvasir-relay.service"

# systemd's own score of exposure, times ten: below 2.0 is "OK". A unit that only talks TCP can be far below.
THRESHOLD = "15"

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


@needs_systemd
def test_the_unit_parses(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/usr/bin/kvasir-relay", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert UNIT.name not in done.stderr, done.stderr


@needs_systemd
def test_the_unit_is_closed() -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={THRESHOLD}", str(UNIT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_unit_waits_longer_than_the_drain() -> None:
    [stop] = [line for line in UNIT.read_text().splitlines() if line.startswith("TimeoutStopSec=")]
    config = load({}, {}, ROOT / "packaging" / "kvasir-relay.toml")
    assert int(stop.partition("=")[2].removesuffix("s")) > 2 * config.drain_time
