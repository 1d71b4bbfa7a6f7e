"""Commands that only report answer at once, and import nothing heavy."""

import resource
import subprocess
import sys

import pytest
from helpers_unit import environment, kvasir

LIMIT_SECONDS = 0.3
ATTEMPTS = 15  # a busy machine is slower now and then: the best counts

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
        # Processor time: the command only computes, so on a machine that is not busy this is how long it takes.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = kvasir(*arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert result.returncode == 0, result.stderr
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
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
