"""A ring of real peers in three homes, its bridge in one of them: the answers are exact whatever path they take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from helpers_lab import HOMES, Lab
from helpers_peers import PATIENCE, wait

from kvasir_peer.models.gguf import GgufFile
from kvasir_peer.models.tokenizer import Tokenizer
from tests.swarm.swarm_processes import DATA, Peer, expected_greedy

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

HOME_A, _, HOME_C = HOMES
MODEL = DATA / "stories260K.gguf"
BRIDGE = "c"
STAGES = ("a", "b", "d")
EXACT = ("--boundary", "f32", "--context-length", "256", "--max-requests", "4")


class Ring:
    """A bridge and three stages, each on its machine."""

    def __init__(self, network: Lab, relay: str, folder: Path) -> None:
        self._network = network
        self._folder = folder
        self.bridge = self._start(
            BRIDGE,
            *("bridge", "--model", str(MODEL), "--relay", relay, "--stages", "3", "--port", "0"),
            *EXACT,
        )
        self.stages: dict[str, Peer] = {}

    def _start(self, machine: str, role: str, *flags: str) -> Peer:
        command = ["kvasir-peer", role, *flags, "--home", str(self._folder / machine)]
        return self._network.within(machine, Peer, machine, command)

    def start_stages(self) -> None:
        """Start them with the bridge's ticket."""
        ticket = self.bridge.wait_for(lambda line: line.startswith("kvasir1"))
        self.url = self.bridge.wait_for(lambda line: line.startswith("http://"))
        for machine in STAGES:
            flags = ("--threads", "1", "--engine", "onnx", "--precision", "exact")
            self.stages[machine] = self._start(machine, "stage", ticket, *flags)

    def _get(self, path: str) -> Any:
        return self._network.within(BRIDGE, lambda: httpx.get(path, timeout=20, trust_env=False).json())

    def status(self) -> dict[str, Any]:
        """``GET /api/ring/{model}``."""
        model = self._get(f"{self.url}/models")["data"][0]["id"]
        return self._get(f"{self.url.removesuffix('/v1')}/api/ring/{model}")

    def wait_until_serving(self) -> dict[str, Any]:
        """The status of the ring that serves."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError, LookupError):
                status = self.status()
                if status["state"] == "serving":
                    return status
            time.sleep(0.2)
        raise AssertionError(f"no ring in {PATIENCE} s:\n{self.outputs()}")

    def paths(self) -> dict[frozenset[str], str]:
        """The path between each two machines that are neighbours in the ring."""
        machines = []
        paths = []
        for stage in self.status()["stages"]:
            machines += [name for name, peer in self.stages.items() if stage["peer"] in peer.output]
            paths.append((stage["figures"] or {}).get("path", ""))
        following = [*machines[1:], *machines[:1]]
        return {frozenset(pair): path for *pair, path in zip(machines, following, paths, strict=True)}

    def complete(self, case: dict[str, Any]) -> str:
        """A greedy answer, by the official client on the bridge's machine."""
        return self._network.within(BRIDGE, self._complete, case)

    def _complete(self, case: dict[str, Any]) -> str:
        with openai.OpenAI(base_url=self.url, api_key="none", timeout=90, max_retries=0) as client:
            model = client.models.list().data[0].id
            stream = client.completions.create(
                model=model, prompt=case["prompt"], max_tokens=len(case["ids"]), temperature=0, stream=True
            )
            return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)

    def outputs(self) -> str:
        """What everybody printed last."""
        peers = {"bridge": self.bridge, **self.stages}
        return "\n".join(f"--- {name}\n" + "\n".join(peer.lines[-40:]) for name, peer in peers.items())

    def end(self) -> None:
        """End everybody."""
        for peer in (*self.stages.values(), self.bridge):
            peer.end()


@pytest.fixture
def ring(network: Lab, relay: str, tmp_path: Path) -> Iterator[Ring]:
    """A serving ring."""
    found = Ring(network, relay, tmp_path)
    try:
        found.start_stages()
        found.wait_until_serving()
        yield found
    finally:
        found.end()


def test_a_ring_across_three_homes_answers_exactly_on_every_path(network: Lab, ring: Ring) -> None:
    cases = expected_greedy(MODEL.name)[:4]
    with GgufFile.open(MODEL) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf.metadata)
    expected = [tokenizer.decode(case["ids"]) for case in cases]

    assert ring.complete(cases[0]) == expected[0], ring.outputs()

    def settled(a_to_d: str) -> bool:
        wanted = {frozenset("ab"): "relayed", frozenset("bd"): "relayed", frozenset("ad"): a_to_d}
        return ring.paths() == wanted

    wait(lambda: settled("direct"), "a and d are directly connected, and nobody to b", ring.paths)
    epoch = ring.status()["epoch"]
    with ThreadPoolExecutor(len(cases)) as clients:
        before = ring.status()["requests"]["tokens"]
        answers = [clients.submit(ring.complete, case) for case in cases]
        wait(
            lambda: ring.status()["requests"]["tokens"] >= before + 20, "answers are under way", ring.outputs
        )
        network.cut(HOME_A, HOME_C)
        assert [answer.result() for answer in answers] == expected, ring.outputs()
    wait(lambda: settled("relayed"), "everybody is back on the relay", ring.paths)
    network.mend(HOME_A, HOME_C)
    status = ring.status()
    assert status["epoch"] == epoch, f"the ring was made anew:\n{ring.outputs()}"
    assert status["requests"]["failed"] == status["requests"]["digest_mismatches"] == 0
