"""``kvasir-peer bench``."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from kvasir_peer.commands.swarm import cores
from kvasir_peer.errors import KvasirError, UsageError


def measure(
    *,
    engine: Annotated[str, Parameter(help="auto (all that are installed), onnx or torch.")] = "auto",
    device: Annotated[str, Parameter(help="cpu, cuda …; empty takes the best.")] = "",
    threads: Annotated[int, Parameter(help="Threads of computation; 0 for all cores.")] = 0,
) -> int:
    """Measure this machine: memory bandwidth, which kernels work, how long an expert takes.

    The expert is one of Qwen3-30B-A3B with random four-bit weights, read from memory each time. Other programs at work
    make the numbers smaller. Ends with status 1 if an engine does not work.
    """
    from kvasir_peer.engines.choice import choose_engine, installed

    if threads < 0:
        raise UsageError(f"--threads {threads}: give 0 or more")
    if engine not in ("auto", "onnx", "torch"):
        raise UsageError(f"--engine {engine}: give auto, onnx or torch")
    used = threads or cores()
    names = [engine] if engine != "auto" else [name for name in ("onnx", "torch") if installed(name)]
    chosen = [choose_engine(name, device) for name in names] or [choose_engine(engine, device)]

    from kvasir_peer.engines import measure as measuring

    bandwidth = measuring.read_bandwidth(used)
    print(f"memory        {bandwidth / 1e9:.1f} GB/s read by {used} threads", flush=True)
    failed = False
    for name, where in chosen:
        label = f"{name}, {where}"
        try:
            if name == "onnx":
                _kernels(where)
            times = measuring.expert_times(name, where, threads=used)
        except KvasirError as error:
            failed = True
            print(f"{label:<13} {error}", flush=True)
            continue
        for found in times:
            rate = found.file_bytes / found.seconds
            share = f", {rate / bandwidth:.0%} of the memory's" if where == "cpu" else ""
            print(
                f"{label:<13} an expert with {found.rows:>2} rows: {found.seconds * 1e3:.2f} ms, "
                f"{found.rows / found.seconds:,.0f} rows/s, weights at {rate / 1e9:.1f} GB/s{share}",
                flush=True,
            )
    return 1 if failed else 0


def _kernels(device: str) -> None:
    from kvasir_peer.engines.onnx_probe import probe

    for trial in probe(device).trials:
        verdict = f"works, error {trial.deviation:.1g}" if trial.works else trial.remark
        print(f"{'onnx kernel':<13} {trial.name}: {verdict}", flush=True)
