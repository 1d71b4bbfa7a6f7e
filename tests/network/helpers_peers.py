"""The test's side of the lab's peers, each a process on its machine (``lab_peer.py``)."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers_lab import Lab

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 90.0  # seconds until something has failed; a busy machine needs some


def environment() -> dict[str, str]:
    """For Python programs of this repository."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "relay")])}


class LabPeer:
    """A node on a machine of the lab, which echoes frames and can be told to talk to others.

    Attributes:
        peer_id: its name.
    """

    def __init__(self, lab: Lab, machine: str, relay: str, log: Path) -> None:
        self.machine = machine
        self._log = log
        with log.open("w") as file:
            self._process: subprocess.Popen[str] = lab.within(
                machine,
                subprocess.Popen,
                [sys.executable, str(Path(__file__).with_name("lab_peer.py")), relay],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment(),
            )
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def wait_until_ready(self) -> None:
        """Until the relay has given it a place."""
        self.peer_id: str = self._answer()["peer"]

    def ask(self, word: str, other: LabPeer) -> dict[str, Any]:
        """The answer to one command about another peer, which must not fail."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({word: other.peer_id}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=PATIENCE)
        except queue.Empty:
            line = ""
        assert line, f"the peer on {self.machine} does not answer:\n{self._log.read_text()}"
        answer: dict[str, Any] = json.loads(line)
        assert not answer.get("failure"), f"{answer['failure']}\n{self._log.read_text()}"
        return answer

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._reader.join(5)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def peers(lab: Lab, relay: str, machines: str, logs: Path) -> Iterator[dict[str, LabPeer]]:
    """Ready peers by their machines' names."""
    started = {machine: LabPeer(lab, machine, relay, logs / f"{machine}.log") for machine in machines}
    try:
        for peer in started.values():
            peer.wait_until_ready()
        yield started
    finally:
        for peer in started.values():
            peer.end()


class Conversation:
    """A link from one peer to another that always carries numbered frames, there and back.

    Every frame comes back, in order, and none twice; a failed step of a test says so otherwise.
    """

    def __init__(self, peer: LabPeer, other: LabPeer) -> None:
        self._peer, self._other = peer, other
        peer.ask("talk", other)

    def state(self) -> dict[str, Any]:
        """What the peer says of it."""
        return self._peer.ask("state", self._other)

    @property
    def path(self) -> str:
        """``relayed`` or ``direct``."""
        return self.state()["path"]

    def wait_for_path(self, path: str, why: str) -> None:
        """Until the link has gone over to that path."""
        wait(lambda: self.path == path, f"{path}: {why}", self.state)

    def go_on(self, frames: int = 50) -> None:
        """Until so many more frames have come back."""
        wanted = self.state()["returned"] + frames
        wait(lambda: self.state()["returned"] >= wanted, f"frame {wanted} comes back", self.state)

    def stop(self) -> None:
        """Close the link."""
        self._peer.ask("stop", self._other)


def wait(condition: Callable[[], object], what: str, context: Callable[[], object] = str) -> None:
    """Until the condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not in {PATIENCE} s: {what}; {context()}"
        time.sleep(0.05)
