"""The peer to compare with: llama.cpp's RPC back end, splitting a model over as many processes as the ring has stages.

It needs ``ggml-rpc-server`` and ``llama-server`` of one build with RPC on (docs/benchmarks.md says how to make them),
given by flags. Both sides serve the same file with 20 ms between their processes (a delaying proxy), to 1, 8 and 32
clients of the same HTTP API; one thread for each process, every prompt computed anew, boundaries of f32 there and f16
here, as both have them by default. Both stand all the time, and are asked by turns.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import trio
from ring_parts import HERE, ROOT, Process
from rows import Rows

STAGES = 3
DELAY = 0.020  # seconds one way between processes
TOKENS = 48
CLIENTS = (1, 8, 32)
ROUNDS = 3  # by turns; the median counts
# Stages of a bench share the cores of one machine, where batches in flight wait for each other, which those of a real
# ring do not: what fewer and larger ones would do is shown beside.
FEW = 4
READY_SECONDS = 180.0
PROMPT = "Once upon a time"


async def beside_llama_cpp(rows: Rows, options: argparse.Namespace) -> None:
    """Tokens per second of both, side by side; says why where it is not run."""
    server, rpc, model = options.llama_server, options.llama_rpc_server, options.model
    if not (server and rpc):
        rows.not_run(
            "llama.cpp RPC, 20 ms between processes",
            "needs --llama-rpc-server and --llama-server of a build with RPC on; building llama.cpp takes over 20 min",
        )
        return
    model = model or ROOT / "tests" / "data" / "stories260K.gguf"
    async with _llama(server, rpc, model) as theirs, _ours(model) as ours, _ours(model, FEW) as few:
        for url in (theirs, ours, few):
            await _rate(url, max(CLIENTS))  # warm: every slot has been used
        for clients in CLIENTS:
            rates = [[await _rate(url, clients) for url in (theirs, ours, few)] for _ in range(ROUNDS)]
            _add(rows, model.name, clients, *(statistics.median(side) for side in zip(*rates, strict=True)))


def _add(rows: Rows, model: str, clients: int, they: float, we: float, few: float) -> None:
    requests = f"{clients} request{'' if clients == 1 else 's'}"
    rows.add(f"{model}: llama.cpp RPC, 20 ms, {requests}", they, "tokens/s")
    rows.add(f"{model}: the ring, 20 ms, {requests}", we, "tokens/s")
    goal = clients == 8
    rows.add(
        f"{model}: the ring / llama.cpp RPC, {requests}",
        we / they,
        "times",
        ">= 2" if goal else "",
        we >= 2 * they if goal else None,
    )
    rows.add(f"{model}: the ring with {FEW} batches in flight at most, {requests}", few, "tokens/s")


async def _rate(base_url: str, clients: int) -> float:
    """Tokens per second of so many clients together."""
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    async with httpx.AsyncClient(timeout=READY_SECONDS, trust_env=False) as client:
        model = (await client.get(f"{base_url}/models")).json()["data"][0]["id"]
        got = 0

        async def one() -> None:
            nonlocal got
            answer = await client.post(f"{base_url}/completions", json={**body, "model": model})
            if answer.status_code != 200:
                raise SystemExit(f"{base_url} answered {answer.status_code}: {answer.text[:300]}")
            tokens = answer.json()["usage"]["completion_tokens"]
            if tokens != TOKENS:
                raise SystemExit(f"{base_url} gave {tokens} tokens instead of {TOKENS}: take another prompt")
            got += tokens

        began = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(clients):
                nursery.start_soon(one)
        return got / (time.perf_counter() - began)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _answers(url: str, what: str) -> None:
    """Wait until a server is up, and says so."""
    async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
        with trio.move_on_after(READY_SECONDS):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    answer = await client.get(url)
                    if answer.status_code == 200 and answer.json().get("ready", True):
                        return
                await trio.sleep(0.2)
    raise SystemExit(f"{what} did not come up within {READY_SECONDS:.0f} s")


def _start(*command: str | Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextlib.asynccontextmanager
async def _llama(server: Path, rpc: Path, model: Path) -> AsyncIterator[str]:
    """Base URL of llama-server over delayed RPC servers, each with an equal share of the layers."""
    ports = [_free_port() for _ in range(STAGES)]
    running = [
        _start(rpc, "--host", "127.0.0.1", "--port", str(port), "--threads", "1", "--device", "CPU")
        for port in ports
    ]
    proxies = [Process(str(HERE / "delay.py"), "127.0.0.1", str(port), "1") for port in ports]
    try:
        near = [proxy.line() for proxy in proxies]
        for proxy in proxies:
            proxy.ask(str(DELAY))
        port = _free_port()
        running.append(
            _start(
                *(server, "--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
                *("--rpc", ",".join(f"127.0.0.1:{p}" for p in near), "--n-gpu-layers", "999"),
                *("--tensor-split", ",".join(["1"] * STAGES), "--parallel", "32", "--cont-batching"),
                *("--ctx-size", str(32 * 256), "--threads", "1", "--split-mode", "layer", "--fit", "off"),
                # What one answer leaves behind must not make the next one's prompt free.
                *("--no-cache-prompt", "--cache-ram", "0", "--slot-prompt-similarity", "0"),
            )
        )
        await _answers(f"http://127.0.0.1:{port}/health", "llama-server")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        for process in running:
            process.kill()
            process.wait()
        for proxy in proxies:
            proxy.end()


@contextlib.asynccontextmanager
async def _ours(model: Path, in_flight: int = 0) -> AsyncIterator[str]:
    """Base URL of a bridge whose peers reach their relay through delaying proxies; ``in_flight`` 0 is free."""
    with tempfile.TemporaryDirectory() as home:
        parts: list[Process] = []
        try:
            relay = Process(
                *("-m", "kvasir_peer.commands.child", "kvasir-relay"),
                *("--home", f"{home}/relay", "--listen", "/ip4/127.0.0.1/tcp/0"),
            )
            parts.append(relay)
            address = await trio.to_thread.run_sync(relay.line)
            while "/p2p/" not in address:
                address = await trio.to_thread.run_sync(relay.line)
            port = address.split("/tcp/")[1].split("/")[0]
            delay = Process(str(HERE / "delay.py"), "127.0.0.1", port, str(STAGES + 1))
            parts.append(delay)
            own = [address.replace(f"/tcp/{port}", f"/tcp/{delay.line()}") for _ in range(STAGES + 1)]
            delay.ask(str(DELAY / 2))
            command = ("-m", "kvasir_peer.commands.child", "kvasir-peer")
            bridge = Process(
                *(*command, "bridge", "--model", str(model), "--relay", own[0], "--stages", str(STAGES)),
                *("--home", f"{home}/bridge", "--port", "0", "--no-direct", "--max-requests", "32"),
                *("--context-length", "256", "--max-in-flight", str(in_flight)),
            )
            parts.append(bridge)
            ticket = base_url = ""
            while not (ticket and base_url):
                line = await trio.to_thread.run_sync(bridge.line)
                ticket = line if line.startswith("kvasir1") else ticket
                base_url = line if line.startswith("http://") else base_url
            for number in range(STAGES):
                os.environ["KVASIR_TICKET"] = ticket
                parts.append(
                    Process(
                        *(*command, "stage", "--home", f"{home}/{number}", "--relay", own[number + 1]),
                        *("--threads", "1", "--no-direct"),
                    )
                )
            await _answers(f"{base_url.removesuffix('/v1')}/health", "the ring")
            yield base_url
        finally:
            os.environ.pop("KVASIR_TICKET", None)
            for part in reversed(parts):
                part.end()


if __name__ == "__main__":
    sys.exit("run bench/ring.py --only llama")
