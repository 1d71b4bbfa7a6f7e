"""Commands that only report answer at once, and import nothing heavy."""

import subprocess
import sys
import time

import pytest
from helpers_unit import environment, kvasir

LIMIT_SECONDS = 0.3
ATTEMPTS = 12  # the machine may be busy: the best of so many counts

HEAVY = (
    "libp2p",
    "torch",
    "onnxruntime",
    "onnx",
    "tokenizers",
    "starlette",
    "hypercorn",
    "trio",
    "httpx",
    "numpy",
)


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("id",), ("status",)], ids=" ".join)
def test_reports_are_quick(tmp_path, arguments):
    if arguments[0] in ("id", "status"):
        arguments = (*arguments, "--home", str(tmp_path))
    best = float("inf")
    for _ in range(ATTEMPTS):
        began = time.perf_counter()
        result = kvasir(*arguments)
        best = min(best, time.perf_counter() - began)
        assert result.returncode == 0, result.stderr
        if best < LIMIT_SECONDS:
            break
    assert best < LIMIT_SECONDS


@pytest.mark.parametrize(
    "arguments", [["--help"], ["id"], ["status"], ["stage", "--help"], ["bridge", "--help"]]
)
def test_reports_import_nothing_heavy(tmp_path, arguments):
    code = (
        "import sys\n"
        "from kvasir_peer.cli import run\n"
        f"run({arguments!r})\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(KVASIR_HOME=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stderr.strip().splitlines()[-1] == "[]"
