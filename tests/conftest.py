"""What tests of several rooms need."""

import hashlib
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_BYTES = 98_362_432
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as a GGUF of 98 MB: a real chat model, quantised.

    From ``KVASIR_TEST_MODEL``, else from where ``make test`` puts it. On a machine of one's own a test that needs
    it is left out where it is not there; in CI it must be there.
    """
    path = Path(os.environ.get("KVASIR_TEST_MODEL") or ROOT / ".cache" / "models" / SMOLLM2_NAME)
    if not path.is_file():
        if os.environ.get("CI"):
            pytest.fail(f"{path} is missing: make model brings it")
        pytest.skip(f"{path} is missing: make model brings it")
    if path.stat().st_size != SMOLLM2_BYTES:
        pytest.fail(f"{path} has {path.stat().st_size} bytes, not {SMOLLM2_BYTES}: remove it, run make model")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != SMOLLM2_SHA256:
            pytest.fail(
                f"{path} is not the file that the expectations were made with: remove it, run make model"
            )
    return path
