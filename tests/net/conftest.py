"""What several tests of the network room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers_net import RelayProcess


@pytest.fixture(scope="session")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    """A relay for all tests that leave it alive."""
    process = RelayProcess(tmp_path_factory.mktemp("relay"))
    try:
        yield process.start_blocking()
    finally:
        process.kill()
