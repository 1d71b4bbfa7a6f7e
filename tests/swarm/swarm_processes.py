"""A real swarm for tests: every peer a process of its own, reached only through a real relay on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent.parent
DATA = ROOT / "tests" / "data"
START_SECONDS = 90.0  # imports of several processes at once on two busy cores

_RUN = (
    "import sys; sys.argv[0] = sys.argv.pop(1); "
    "from importlib import import_module; "
    "import_module('kvasir_relay.cli' if sys.argv[0] == 'kvasir-relay' else 'kvasir_peer.cli').main()"
)


class Peer:
    """One process; what it prints is kept."""

    def __init__(
        self, name: str, arguments: Sequence[str], *, environment: dict[str, str] | None = None
    ) -> None:
        self.name = name
        self.lines: list[str] = []
        self.times: list[float] = []  # of the lines
        self._news: queue.Queue[str | None] = queue.Queue()
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "relay")]),
            "PYTHONUNBUFFERED": "1",
            **(environment or {}),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", _RUN, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=variables,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.times.append(time.monotonic())
            self.lines.append(line.rstrip("\n"))
            self._news.put(line.rstrip("\n"))
        self._news.put(None)

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return "\n".join(self.lines)

    def wait_for(self, wanted: Callable[[str], bool], seconds: float = START_SECONDS) -> str:
        """The first further line that is wanted."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._news.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"{self.name} did not say it within {seconds} s:\n{self.output}"
                ) from None
            if line is None:
                raise AssertionError(f"{self.name} ended with {self.process.wait()}:\n{self.output}")
            if wanted(line):
                return line

    def wait_for_text(self, text: str, seconds: float = START_SECONDS) -> str:
        """The first further line that holds ``text``."""
        return self.wait_for(lambda line: text in line, seconds)

    def send(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self, seconds: float = 15.0) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{self.name} did not end within {seconds} s:\n{self.output}") from None
        finally:
            self._reader.join(5)

    def kill(self) -> None:
        """kill -9, at once."""
        self.process.kill()
        self.process.wait()


class Swarm:
    """A relay, a bridge and stages, each with a home under ``folder``."""

    def __init__(self, folder: Path, model: Path, *, stages: int) -> None:
        self.folder = folder
        self.model = model
        self.count = stages
        self.relay_port = 0
        self.stage_flags: dict[str, Sequence[str]] = {}
        self.stages: dict[str, Peer] = {}
        self.ended: list[Peer] = []  # earlier processes of peers that were started again

    def start_relay(self) -> None:
        """Start it, on the same port and with the same key as before where there was one."""
        self.relay = Peer(
            "relay",
            [
                "kvasir-relay",
                "--home",
                str(self.folder / "relay"),
                "--listen",
                f"/ip4/127.0.0.1/tcp/{self.relay_port}",
            ],
        )
        address = self.relay.wait_for(lambda line: "/p2p/" in line)
        self.relay_address = next(word for word in address.split() if "/p2p/" in word)
        self.relay_port = int(self.relay_address.split("/tcp/")[1].split("/")[0])

    def start_bridge(self, *flags: str) -> None:
        """Start the bridge, and learn its ticket and address."""
        self.bridge = Peer(
            "bridge",
            [
                *("kvasir-peer", "bridge", "--home", str(self.folder / "bridge"), "--model", str(self.model)),
                *("--relay", self.relay_address, "--stages", str(self.count), "--port", "0", "--no-direct"),
                *flags,
            ],
        )
        self.ticket = self.bridge.wait_for(lambda line: line.startswith("kvasir1"))
        self.base_url = self.bridge.wait_for(lambda line: line.startswith("http://"))

    def start_stage(self, name: str, *flags: str) -> Peer:
        """Start a stage peer, with the home of an earlier one of that name if there was one."""
        if name in self.stages:
            self.ended.append(self.stages[name])
            flags = flags or tuple(self.stage_flags[name])
        self.stage_flags[name] = flags
        self.stages[name] = Peer(
            name,
            [
                *("kvasir-peer", "stage", self.ticket, "--home", str(self.folder / name)),
                *("--threads", "1", "--no-direct"),
                *flags,
            ],
        )
        return self.stages[name]

    def status(self) -> dict:
        """``GET /api/ring/{model}``."""
        root = self.base_url.removesuffix("/v1")
        model = httpx.get(f"{self.base_url}/models", timeout=10).json()["data"][0]["id"]
        return httpx.get(f"{root}/api/ring/{model}", timeout=10).json()

    def name_of(self, peer: str) -> str:
        """Name of the stage process with this peer id."""
        return next(name for name, stage in self.stages.items() if f"start: {peer}" in stage.output)

    def wait_for_standbys(self, count: int, seconds: float = START_SECONDS) -> dict:
        """The ring's status once so many peers stand by, each with its slice loaded, no slice twice before all once."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError, LookupError):
                status = self.status()
                ready = [o for o in status["others"] if o["role"] == "standby" and o["slice"] == o["loaded"]]
                if status["state"] == "serving" and len(ready) >= count:
                    return status
            time.sleep(0.1)
        raise AssertionError(f"no {count} standbys within {seconds} s\n{self.outputs()}")

    def wait_until_serving(self, seconds: float = START_SECONDS, *, after_epoch: int = 0) -> dict:
        """The ring's status once it serves an epoch after ``after_epoch``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.bridge.process.poll() is not None:
                raise AssertionError(f"the bridge ended:\n{self.bridge.output}")
            with contextlib.suppress(httpx.HTTPError, LookupError):
                status = self.status()
                if status["state"] == "serving" and status["epoch"] > after_epoch:
                    return status
            time.sleep(0.1)
        raise AssertionError(f"no ring within {seconds} s\n{self.outputs()}")

    def outputs(self, most: int = 400) -> str:
        """What every peer printed last, in the order of time, for a failed test."""
        peers = [getattr(self, "relay", None), getattr(self, "bridge", None), *self.stages.values()]
        peers = [*peers, *self.ended]
        said = sorted(
            (when, peer.name, line)
            for peer in peers
            if peer is not None
            for when, line in zip(peer.times, peer.lines, strict=False)
        )
        return "\n".join(f"{when:10.2f} {name:<8} {line}" for when, name, line in said[-most:])

    def end(self) -> None:
        """End all peers; the bridge first, so that no stage looks for a successor."""
        peers = [getattr(self, "bridge", None), *self.stages.values(), getattr(self, "relay", None)]
        for peer in peers:
            if peer is not None and peer.process.poll() is None:
                peer.end()


@contextlib.contextmanager
def running_swarm(
    folder: Path,
    model: Path,
    *,
    stages: int = 3,
    standbys: int = 0,
    bridge: Sequence[str] = (),
    engines: Sequence[str] = ("onnx",),
    stage: Sequence[str] = ("--precision", "exact"),
) -> Iterator[Swarm]:
    """A serving swarm; everything is ended afterwards.

    Args:
        standbys: further peers, which keep slices ready.
        engines: of the stages, in turn.
    """
    swarm = Swarm(folder, model, stages=stages)
    try:
        swarm.start_relay()
        swarm.start_bridge(*bridge)
        for index in range(stages + standbys):
            swarm.start_stage(f"stage{index}", "--engine", engines[index % len(engines)], *stage)
        swarm.wait_until_serving()
        yield swarm
    finally:
        swarm.end()
        if "KVASIR_TEST_LOGS" in os.environ:  # a folder, for whoever wants to look closer
            log = Path(os.environ["KVASIR_TEST_LOGS"]) / f"{folder.name}.log"
            log.write_text(swarm.outputs(1_000_000))


def expected_greedy(model: str, *, min_gap: float = 0.01, file: str = "expected_greedy.json") -> list[dict]:
    """The greedy continuations on which two implementations agree, far enough from a tie to be compared."""
    cases = json.loads((DATA / file).read_text())
    return [case for case in cases if case["model"] == model and case["min_top2_logit_gap"] > min_gap]
