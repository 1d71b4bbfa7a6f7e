"""Fixtures of the interoperability tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_interop import js_relay, js_workspace, our_relay


@pytest.fixture(scope="session")
def workspace() -> Path:
    """Where the JavaScript programs are, ready to run."""
    return js_workspace()


@pytest.fixture(scope="session")
def kvasir_relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Our relay: its addresses."""
    with our_relay(tmp_path_factory.mktemp("relay")) as addresses:
        yield addresses


@pytest.fixture(scope="session")
def libp2p_relay(workspace: Path) -> Iterator[dict[str, str]]:
    """The relay of js-libp2p: its addresses."""
    with js_relay(workspace) as addresses:
        yield addresses


@pytest.fixture
def relay(request: pytest.FixtureRequest) -> dict[str, str]:
    """The relay that a test's parameter names: its addresses."""
    return request.getfixturevalue("kvasir_relay" if request.param == "our relay" else "libp2p_relay")
