"""Running the command as a person does: in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"


def environment(**changes):
    """This process's environment without settings of Kvasir, with the packages of this checkout to be found."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVASIR_")}
    kept.pop("ORT_DISABLE_TELEMETRY", None)
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "relay")])
    return kept | changes


def kvasir(*arguments, timeout=60, **changes):
    """Run ``kvasir-peer`` with these arguments; a finished process with text output."""
    return subprocess.run(
        [sys.executable, "-m", "kvasir_peer.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        check=False,
    )
