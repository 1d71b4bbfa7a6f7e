"""The elastic loop in short, with real processes behind a relay: recruited, exact, paused, resumed.

The whole loop, with retirement and a second surge, runs in ``bench/elastic.py``.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import trio

sys.path.insert(0, str(Path(__file__).parent.parent / "swarm"))

from streams import Streamed, cases, fill
from swarm_processes import DATA, Peer, expected_greedy

from kvasir_peer.experts.worker_health import MAX_DEADLINE

MODEL = DATA / "stories260K-moe8x2.gguf"
PATIENCE = 60.0
STREAMS = 8
ROOM = 2.0  # seconds that a busy machine may hold a token up for, beside a worker's deadline


@pytest.fixture
def swarm(tmp_path):
    peers: list[Peer] = []

    def start(name: str, *arguments: str, **environment: str) -> Peer:
        peer = Peer(name, arguments, environment=environment)
        peers.append(peer)
        return peer

    yield start
    for peer in reversed(peers):
        peer.end()


def poll(base_url: str) -> dict:
    root = base_url.removesuffix("/v1")
    return httpx.get(f"{root}/api/moe/recruitment", timeout=20).json()["models"][0]


def rows_given(base_url: str) -> dict[str, int]:
    """Rows of each volunteer that the coordinator has used so far."""
    (dispatch,) = poll(base_url)["dispatch"].values()
    return dispatch["rows"]


async def eight_streams(base_url: str, volunteers: list[Peer]) -> list[Streamed]:
    """Answers of eight streams; in their midst one volunteer's agent is killed, and another one stopped."""
    found = [case for case in cases(64, model=MODEL) if len(case["prompt_ids"]) < 16]
    chosen = [case for case in found if case["min_top2_logit_gap"] > 0.02][:STREAMS]
    answers = [Streamed(case["prompt"], case["text"]) for case in chosen]
    events = [(4, lambda: volunteers[1].kill()), (12, lambda: volunteers[0].send(signal.SIGSTOP))]

    def news() -> None:
        while events and all(len(answer.times) >= events[0][0] for answer in answers):
            events.pop(0)[1]()

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            for answer, case in zip(answers, chosen, strict=True):
                nursery.start_soon(fill, answer, base_url, "small", len(case["ids"]), news)
    assert not events and len(answers) == STREAMS
    return answers


def test_volunteers_are_recruited_when_busy_and_change_no_token(swarm, tmp_path) -> None:
    relay = swarm("relay", "kvasir-relay", "--home", str(tmp_path / "r"), "--listen", "/ip4/127.0.0.1/tcp/0")
    address = next(w for w in relay.wait_for(lambda line: "/p2p/" in line).split() if "/p2p/" in w)
    bridge = swarm(
        "bridge",
        *("kvasir-peer", "bridge", "--home", str(tmp_path / "b"), "--model", str(MODEL), "--name", "small"),
        *("--relay", address, "--stages", "0", "--port", "0", "--no-direct", "--experts-dtype", "f32"),
        *("--ticket-role", "volunteer", "--ticket-role", "coordinator"),
    )
    ticket = bridge.wait_for(lambda line: line.startswith("kvasir1"))
    base_url = bridge.wait_for(lambda line: line.startswith("http://"))
    common = ("--threads", "1", "--no-direct", "--precision", "exact", "--engine", "onnx")
    coordinator = swarm(
        "coordinator",
        *("kvasir-peer", "coordinator", ticket, "--home", str(tmp_path / "c"), *common),
        # Slow experts of its own: with quick ones it would ask nobody.
        KVASIR_EXPERT_FLOOR_MS="1.5",
    )
    volunteers = [
        swarm(
            f"volunteer{i}",
            *(
                "kvasir-peer",
                "volunteer",
                ticket,
                "--home",
                str(tmp_path / f"v{i}"),
                "--disk",
                "1400K",
                *common,
            ),
        )
        for i in range(2)
    ]
    coordinator.wait_for_text("requests at once")
    case = min(expected_greedy(MODEL.name, min_gap=0.02), key=lambda c: len(c["prompt_ids"]))
    texts: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        body = {"model": "small", "prompt": case["prompt"], "max_tokens": len(case["ids"]), "temperature": 0}
        while not stop.is_set():
            answer = httpx.post(f"{base_url}/completions", json=body, timeout=PATIENCE)
            if answer.status_code == 200:
                texts.append(answer.json()["choices"][0]["text"])

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        deadline = time.monotonic() + PATIENCE
        while not any(d["remote_pairs"] > 200 for d in poll(base_url)["dispatch"].values()):
            assert time.monotonic() < deadline, poll(base_url)
            time.sleep(0.3)
        state = poll(base_url)
        assert state["saturated"] and state["workers"] == 2 and state["effective_target"] == 3
        ranges = [tuple(map(tuple, worker["ranges"])) for worker in state["covered_by"]]
        assert ranges[0] != ranges[1]
        paused = swarm("pause", "kvasir-peer", "pause", "--home", str(tmp_path / "v0"))
        assert paused.process.wait(30) == 0
        volunteers[0].wait_for_text("paused", 20)
        deadline = time.monotonic() + 20
        while poll(base_url)["workers"] != 1:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        swarm("resume", "kvasir-peer", "resume", "--home", str(tmp_path / "v0"))
        volunteers[0].wait_for_text("serves experts", PATIENCE)
        deadline = time.monotonic() + PATIENCE
        before = rows_given(base_url)
        while len(before) != 2 or any(
            rows_given(base_url)[peer] < rows + 20 for peer, rows in before.items()
        ):
            assert time.monotonic() < deadline, poll(base_url)
            time.sleep(0.3)
    finally:
        stop.set()
        for client in clients:
            client.join(PATIENCE)
    assert texts and set(texts) == {case["text"]}
    for answer in trio.run(eight_streams, base_url, volunteers):
        assert answer.exact, answer
        assert np.diff(answer.times).max() < MAX_DEADLINE + ROOM
    volunteers[0].send(signal.SIGCONT)
    assert volunteers[0].end() == 0
    given = json.loads((tmp_path / "v0" / "given.json").read_text())
    assert given["rows"] > 0
