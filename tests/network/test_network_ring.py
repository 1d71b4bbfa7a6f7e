"""A ring of real peers in three homes, with its bridge and a volunteer: answers are exact whatever path they take."""

from __future__ import annotations

import contextlib
import threading
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

from kvasir_peer import running
from kvasir_peer.models.gguf import GgufFile
from kvasir_peer.models.tokenizer import Tokenizer
from tests.swarm.swarm_processes import DATA, Peer, expected_greedy

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

HOME_A, _, HOME_C = HOMES
MODEL = DATA / "stories260K-moe8x2.gguf"
BRIDGE = "c"
STAGES = ("a", "b", "d")
VOLUNTEER = "e"
CLIENTS = 2
EXACT = ("--boundary", "f32", "--experts-dtype", "f32", "--context-length", "256")
BUSY = ("--saturation-threshold", "1")  # one answer is enough for the volunteer to be wanted
COMPUTE = ("--threads", "1", "--engine", "onnx", "--precision", "exact")


class Ring:
    """A bridge, three stages and a volunteer, each on its machine."""

    def __init__(self, network: Lab, relay: str, folder: Path) -> None:
        self._network = network
        self._folder = folder
        self.bridge = self._start(
            BRIDGE,
            *("bridge", "--model", str(MODEL), "--relay", relay, "--stages", "3", "--port", "0"),
            *("--max-requests", str(CLIENTS), *EXACT, *BUSY),
        )
        self.others: dict[str, Peer] = {}

    def _start(self, machine: str, role: str, *flags: str) -> Peer:
        command = ["kvasir-peer", role, *flags, "--home", str(self._folder / machine)]
        return self._network.within(machine, Peer, machine, command)

    def start_others(self) -> None:
        """Start stages and volunteer with the bridge's ticket."""
        ticket = self.bridge.wait_for(lambda line: line.startswith("kvasir1"))
        self.url = self.bridge.wait_for(lambda line: line.startswith("http://"))
        for machine in STAGES:
            self.others[machine] = self._start(machine, "stage", ticket, *COMPUTE, *BUSY)
        self.others[VOLUNTEER] = self._start(VOLUNTEER, "volunteer", ticket, *COMPUTE)

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
            machines += [name for name, peer in self.others.items() if stage["peer"] in peer.output]
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

    def rows_given(self) -> int:
        """Rows of experts that the volunteer has computed."""
        return running.given(self._folder / VOLUNTEER).rows

    def outputs(self) -> str:
        """What everybody printed last."""
        peers = {"bridge": self.bridge, **self.others}
        return "\n".join(f"--- {name}\n" + "\n".join(peer.lines[-40:]) for name, peer in peers.items())

    def end(self) -> None:
        """End everybody, at once: how peers leave is for other tests."""
        for peer in (*self.others.values(), self.bridge):
            peer.kill()


@pytest.fixture
def ring(network: Lab, relay: str, tmp_path: Path) -> Iterator[Ring]:
    """A serving ring."""
    found = Ring(network, relay, tmp_path)
    try:
        found.start_others()
        found.wait_until_serving()
        yield found
    finally:
        found.end()


class Clients:
    """Ask one case after the other, some at once, until the end of the block; every answer must be exact."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._cases = expected_greedy(MODEL.name)
        with GgufFile.open(MODEL) as gguf:
            tokenizer = Tokenizer.from_gguf(gguf.metadata)
        self._expected = [tokenizer.decode(case["ids"]) for case in self._cases]
        self._leave = threading.Event()
        self.answered = 0

    def _ask(self, number: int) -> None:
        while not self._leave.is_set():
            at = number % len(self._cases)
            assert self._ring.complete(self._cases[at]) == self._expected[at], self._ring.outputs()
            self.answered += 1
            number += CLIENTS

    def __enter__(self) -> Clients:
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._asking = [self._pool.submit(self._ask, number) for number in range(CLIENTS)]
        return self

    def __exit__(self, *exception: object) -> None:
        self._leave.set()
        self._pool.shutdown()
        for asking in self._asking:
            asking.result()

    def go_on(self) -> None:
        """Until each client has had an answer that began after now."""
        wanted = self.answered + 2 * CLIENTS
        wait(lambda: self.answered >= wanted or self._failed(), "answers come", self._ring.outputs)

    def _failed(self) -> bool:
        return any(asking.done() for asking in self._asking)


def test_a_ring_across_three_homes_answers_exactly_on_every_path(network: Lab, ring: Ring) -> None:
    def settled(a_to_d: str) -> bool:
        wanted = {frozenset("ab"): "relayed", frozenset("bd"): "relayed", frozenset("ad"): a_to_d}
        return ring.paths() == wanted

    epoch = ring.status()["epoch"]
    with Clients(ring) as clients:
        wait(lambda: settled("direct"), "a and d are directly connected, and nobody to b", ring.paths)
        wait(lambda: ring.rows_given() > 0, "the volunteer computes experts", ring.outputs)
        clients.go_on()
        network.cut(HOME_A, HOME_C)
        wait(lambda: settled("relayed"), "everybody is back on the relay", ring.paths)
        clients.go_on()
        network.mend(HOME_A, HOME_C)
    status = ring.status()
    assert status["epoch"] == epoch, f"the ring was made anew:\n{ring.outputs()}"
    assert status["requests"]["failed"] == status["requests"]["digest_mismatches"] == 0
