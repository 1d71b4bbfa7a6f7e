"""Crashes with real processes behind a relay: coordinator, then bridge, are killed; texts and coverage survive."""

from __future__ import annotations

import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "swarm"))

from swarm_processes import DATA, Peer, expected_greedy

from kvasir_peer.experts.roll import Roll
from kvasir_peer.settings import LEDGER_FILE

MODEL = DATA / "stories260K-moe8x2.gguf"
PATIENCE = 180.0  # nothing is timed by it: a machine whose cores many share loads and answers slowly
ROWS = 20  # pairs that workers must have computed for a coordinator to say that they share its work
COMMON = ("--threads", "1", "--no-direct", "--precision", "exact", "--engine", "onnx")


class Bench:
    """The processes of the test, by name; started again with the same home."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peers: dict[str, Peer] = {}
        self.port = 0

    def start(self, name: str, *arguments: str, **environment: str) -> Peer:
        home = ("--home", str(self.folder / name))
        self.peers[name] = Peer(name, [*arguments, *home], environment=environment)
        return self.peers[name]

    def bridge(self, relay: str) -> None:
        bridge = self.start(
            "bridge",
            *("kvasir-peer", "bridge", "--model", str(MODEL), "--name", "small", "--relay", relay),
            *("--stages", "0", "--port", str(self.port), "--no-direct", "--experts-dtype", "f32"),
            *("--ticket-role", "volunteer", "--ticket-role", "coordinator"),
        )
        self.ticket = bridge.wait_for(lambda line: line.startswith("kvasir1"))
        self.base_url = bridge.wait_for(lambda line: line.startswith("http://"))
        self.port = int(self.base_url.split(":")[2].split("/")[0])

    def coordinator(self, name: str) -> Peer:
        # Slow experts of its own: with quick ones it would ask nobody.
        return self.start(
            name, "kvasir-peer", "coordinator", self.ticket, *COMMON, KVASIR_EXPERT_FLOOR_MS="1.5"
        )

    def recruitment(self) -> dict:
        root = self.base_url.removesuffix("/v1")
        return httpx.get(f"{root}/api/moe/recruitment", timeout=20).json()["models"][0]

    def until(self, condition: Callable[[dict], bool], what: str, seconds: float = PATIENCE) -> float:
        """Seconds until the bridge says so."""
        began = time.monotonic()
        while True:
            try:
                found = self.recruitment()
                if condition(found):
                    return time.monotonic() - began
            except httpx.HTTPError:
                found = {}
            assert time.monotonic() - began < seconds, (what, found, self.outputs())
            time.sleep(0.2)

    def wait_for_roll(self, workers: int, coordinators: int) -> None:
        """Until the bridge has written down who takes part."""
        deadline = time.monotonic() + PATIENCE
        while True:
            with closing(sqlite3.connect(self.folder / "bridge" / LEDGER_FILE)) as base:
                (data,) = base.execute("SELECT data FROM kept WHERE name = 'roll'").fetchone()
            roll = msgspec.msgpack.decode(data, type=Roll)
            if (len(roll.workers), len(roll.coordinators)) == (workers, coordinators):
                return
            assert time.monotonic() < deadline, roll
            time.sleep(0.2)

    def outputs(self) -> str:
        return "\n".join(f"{name}: {line}" for name, peer in self.peers.items() for line in peer.lines[-15:])


@pytest.fixture
def bench(tmp_path):
    found = Bench(tmp_path)
    yield found
    alive = [peer for peer in found.peers.values() if peer.process.poll() is None]
    for peer in alive:  # the relay first: nobody waits for a goodbye
        peer.process.terminate()
    for peer in alive:
        peer.end()


class Clients:
    """Ask again and again; every answer is kept."""

    def __init__(self, bench: Bench, count: int) -> None:
        self.case = min(expected_greedy(MODEL.name, min_gap=0.02), key=lambda c: len(c["prompt_ids"]))
        self.texts: list[str] = []
        self.errors: list[str] = []
        self._bench = bench
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        body = {
            "model": "small",
            "prompt": self.case["prompt"],
            "max_tokens": len(self.case["ids"]),
            "temperature": 0,
        }
        while not self._stop.is_set():
            try:
                answer = httpx.post(f"{self._bench.base_url}/completions", json=body, timeout=PATIENCE)
            except httpx.HTTPError as error:
                self.errors.append(repr(error))
                time.sleep(0.5)
                continue
            if answer.status_code == 200:
                self.texts.append(answer.json()["choices"][0]["text"])
            else:
                self.errors.append(answer.text)
                time.sleep(0.3)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)


@pytest.mark.timeout(600)
def test_texts_and_coverage_survive_a_killed_coordinator_and_a_killed_bridge(bench: Bench) -> None:
    relay = bench.start("relay", "kvasir-relay", "--listen", "/ip4/127.0.0.1/tcp/0")
    address = next(w for w in relay.wait_for(lambda line: "/p2p/" in line).split() if "/p2p/" in w)
    bench.bridge(address)
    names = ("coordinator0", "coordinator1")
    coordinators = [bench.coordinator(name) for name in names]
    volunteers = [
        bench.start(f"volunteer{i}", "kvasir-peer", "volunteer", bench.ticket, "--disk", "1400K", *COMMON)
        for i in range(2)
    ]
    for peer in coordinators:
        peer.wait_for_text("requests at once", PATIENCE)
    bench.until(lambda s: s["coordinators"] == 2, "both coordinators are polled")
    clients = Clients(bench, 4)
    try:
        ids = {name: peer.lines[0].split()[-1] for name, peer in zip(names, coordinators, strict=True)}
        bench.until(
            lambda s: (
                len(s["dispatch"]) == 2 and all(d["remote_pairs"] > ROWS for d in s["dispatch"].values())
            ),
            "volunteers compute for both",
        )

        # A coordinator dies in the middle of its answers.
        coordinators[0].kill()
        took = bench.until(lambda s: s["coordinators"] == 1, "the dead coordinator is out")
        assert took < 10, "a closed connection is noticed at once"
        answered = len(clients.texts)
        bench.until(lambda s: len(clients.texts) > answered + 4, "the other one answers")
        again = bench.coordinator(names[0])
        again.wait_for_text("requests at once", PATIENCE)
        bench.until(
            lambda s: s["dispatch"].get(ids[names[0]], {}).get("remote_pairs", 0) > ROWS,
            "the one that came back is used, and its workers are wired again",
        )
        assert clients.errors == []
    finally:
        clients.end()
    text = clients.case["text"]
    assert set(clients.texts) == {text}

    # The bridge dies. Whoever took part is known to the next one; nobody fetches or loads anything.
    bench.wait_for_roll(2, 2)
    said = [len(peer.lines) for peer in volunteers]
    bench.peers["bridge"].kill()
    bench.bridge(address)
    clients = Clients(bench, 4)
    try:
        took = bench.until(
            lambda s: s["workers"] == 2 and sum(d["remote_pairs"] for d in s["dispatch"].values()) > 0,
            "coordinators and workers are back",
        )
        before = sum(d["remote_pairs"] for d in bench.recruitment()["dispatch"].values())
        took += bench.until(
            lambda s: sum(d["remote_pairs"] for d in s["dispatch"].values()) > before, "remote rows go on"
        )
        assert took < 60, f"remote rows went on after {took:.1f} s"
    finally:
        clients.end()
    assert set(clients.texts) == {text}
    for peer, count in zip(volunteers, said, strict=True):
        later = "\n".join(peer.lines[count:])
        assert peer.process.poll() is None
        assert "fetching" not in later and "loading" not in later, later
