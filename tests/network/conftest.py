"""Fixtures of the tests in a network of their own."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from helpers_lab import RELAY_ADDRESS, Lab, lab, why_not
from helpers_peers import environment


@pytest.fixture(scope="session")
def network() -> Iterator[Lab]:
    """The network of ``helpers_lab.py``."""
    reason = why_not()
    if reason:
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with lab() as found:
        yield found


@pytest.fixture(scope="session")
def relay(network: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a ``kvasir-relay`` in the open."""
    home = tmp_path_factory.mktemp("relay")
    command = [sys.executable, "-m", "kvasir_relay", "--home", str(home)]
    command += ["--listen", f"/ip4/{RELAY_ADDRESS}/tcp/4001"]
    with (home / "log").open("w") as log:
        process = network.within(
            "relay",
            subprocess.Popen,
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment(),
        )
    try:
        line = process.stdout.readline()
        assert line.startswith("/ip4/"), (home / "log").read_text()
        yield line.strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
