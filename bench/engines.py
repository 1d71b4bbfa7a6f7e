"""How fast the onnxruntime engine is, beside llama.cpp on the same machine, in the same run, with as many threads.

    python bench/engines.py [--quick] [--threads N] [--spin] [--json FILE] [--model SMOLLM2.gguf] [--only PART]

What counts are ratios: times drift with whatever else the machine does. The two engines take turns, and a sample in
which a thread of this process had to wait for a core for more than 2 % of it is dropped (Linux; read from schedstat).
With one thread the processor's time is taken, which waiting does not touch. Without enough clean samples no goal counts
as held.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import synthetic
import torch_device
from llama_batches import LlamaBatches

from kvasir_peer.engines import quants
from kvasir_peer.engines.base import BankSpec, LayerStack, Rows, StackSpec, create_bank, create_stack
from kvasir_peer.engines.choice import installed
from kvasir_peer.models.sources import GgufSource

CONTEXT_BEFORE = 64  # tokens in the cache of each request when decoding begins
PREFILL = 512
SLOTS = 16
# Share of a sample that threads may have waited for a core.
CLEAN = 0.02

GOALS = {
    "Q4_0": {1: 1.0, 4: 1.3, 16: 1.4},
    "Q8_0": {1: 1.0, 4: 1.3, 16: 1.4},
    "Q4_K_M": {1: 0.85, 4: 1.0, 16: 1.0},
    "SmolLM2 Q4_1": {1: 0.95, 4: 1.3, 16: 1.6},
}
PREFILL_GOAL = 1.2
BANDWIDTH_GOAL = 0.6
OVERHEAD_GOAL = 0.05
LOADING_GOAL = 1.0  # seconds for 100 MB
# The torch engine on a GPU at batch 1: bytes of the file that a step needs, against copying within the card's memory.
BATCHED_GOAL, FUSED_GOAL = 0.1, 0.5
READ_BYTES = 256 << 20  # far over any cache


@dataclass
class Row:
    """One line of the table."""

    name: str
    value: float | None
    unit: str
    goal: float | None
    holds: bool | None
    remark: str

    def as_json(self) -> dict[str, object]:
        """What is kept, as :mod:`rows` has it, and the remark."""
        value = "not run" if self.value is None else round(self.value, 4)
        sign = "<=" if self.unit in ("s", "of the step") else ">="  # what is a time, or lost, should be small
        goal = "" if self.goal is None else f"{sign} {self.goal:g}"
        row = {"name": self.name, "value": value, "unit": self.unit, "goal": goal, "holds": self.holds}
        return row | {"remark": self.remark}

    def __str__(self) -> str:
        value = "not run" if self.value is None else f"{self.value:.2f}"
        goal = "" if self.goal is None else f"goal {self.goal:.2f}"
        verdict = "holds" if self.holds else "?" if self.holds is None or "only" in self.remark else "MISSED"
        return f"{self.name:46} {value:>7} {self.unit:18} {goal:9}  {verdict:6}  {self.remark}"


# ------------------------------------------------------------------------------------------------ samples


def waited() -> float:
    """Seconds that the threads of this process have waited for a core so far; 0 where that can't be read."""
    total = 0
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return 0.0
    for task in tasks.iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[1])
        except OSError:
            continue  # a thread that has just ended
    return total / 1e9


@dataclass
class Samples:
    """Times of one thing, seconds; clean ones apart."""

    clean: list[float]
    all: list[float]

    @classmethod
    def none(cls) -> Samples:
        return cls([], [])

    def take(self, work: Callable[[], object], threads: int) -> None:
        """Run once."""
        clock = time.process_time if threads == 1 else time.perf_counter
        before, begin = waited(), clock()
        work()
        seconds = clock() - begin
        self.all.append(seconds)
        if threads == 1 or waited() - before <= CLEAN * seconds:
            self.clean.append(seconds)

    @property
    def enough(self) -> bool:
        """Whether there are clean samples to go by."""
        return len(self.clean) >= min(5, len(self.all))

    def best(self) -> tuple[float, str]:
        """Median of the clean samples, or a low percentile of all where too few are clean."""
        clean = f"{len(self.clean)} of {len(self.all)} clean"
        if self.enough:
            return statistics.median(self.clean), clean
        return float(np.percentile(self.all, 10)), f"only {clean}: p10 of all"


def by_turns(
    theirs: Callable[[], object], ours: Callable[[], object], threads: int, blocks: int, each: int
) -> tuple[Samples, Samples]:
    """Take blocks of samples of two things by turns."""
    a, b = Samples.none(), Samples.none()
    for _ in range(blocks):
        for samples, work in ((a, theirs), (b, ours)):
            time.sleep(0.02)  # threads of the other one that still spin go to sleep
            work()
            for _ in range(each):
                samples.take(work, threads)
    return a, b


# ---------------------------------------------------------------------------------------------- comparisons


@contextmanager
def both(path: Path, threads: int, context: int) -> Iterator[tuple[LlamaBatches, LayerStack]]:
    """Load a model in both engines."""
    with GgufSource(path) as source:
        n_layer = next(int(str(v)) for k, v in source.metadata.items() if k.endswith(".block_count"))
        spec = StackSpec(0, n_layer, SLOTS, context, PREFILL, threads=threads)
        begin = time.perf_counter()
        stack = create_stack("onnx", source, spec)
        print(f"  {path.name}: loaded in {time.perf_counter() - begin:.1f} s", flush=True)
        with LlamaBatches(path, threads, SLOTS, SLOTS * context) as llama:
            yield llama, stack
        stack.close()


def timed(stack: LayerStack, rows: Rows) -> float:
    begin = time.perf_counter()
    stack.forward(rows, None)
    return time.perf_counter() - begin


def compare(name: str, path: Path, threads: int, blocks: int, each: int) -> list[Row]:
    """Decode at batch 1, 4 and 16, and prefill, of one model in both engines."""
    rows: list[Row] = []
    context = PREFILL + 64
    rng = np.random.default_rng(0)
    with both(path, threads, context) as (llama, stack):
        vocabulary = stack.shape.n_vocab
        for batch, goal in GOALS[name].items():
            llama.clear()
            prompt = rng.integers(0, vocabulary, CONTEXT_BEFORE).tolist()
            for slot in range(batch):
                at = ([slot] * CONTEXT_BEFORE, range(CONTEXT_BEFORE), prompt, [False] * CONTEXT_BEFORE)
                llama.forward(*at)
                stack.forward(Rows.of(*at), None)
            # Both go on at positions of their own.
            places = {"llama": CONTEXT_BEFORE, "onnx": CONTEXT_BEFORE}

            def step(who: str, batch: int = batch, places: dict[str, int] = places) -> object:
                tokens = rng.integers(0, vocabulary, batch).tolist()
                at = (list(range(batch)), [places[who]] * batch, tokens, [True] * batch)
                places[who] += 1
                return llama.forward(*at) if who == "llama" else stack.forward(Rows.of(*at), None)

            theirs, ours = by_turns(lambda: step("llama"), lambda: step("onnx"), threads, blocks, each)
            rows.append(_row(f"{name}, decode, batch {batch}", theirs, ours, goal))
        tokens = rng.integers(0, vocabulary, PREFILL).tolist()
        at = ([0] * PREFILL, range(PREFILL), tokens, [False] * (PREFILL - 1) + [True])

        def prefill() -> None:
            llama.clear()
            llama.forward(*at)

        theirs, ours = by_turns(
            prefill, lambda: stack.forward(Rows.of(*at), None), threads, max(2, blocks // 3), 2
        )
        rows.append(_row(f"{name}, prefill of {PREFILL}", theirs, ours, PREFILL_GOAL))
        rows.append(overhead(name, stack))
    return rows


def _row(name: str, theirs: Samples, ours: Samples, goal: float) -> Row:
    (a, clean_a), (b, clean_b) = theirs.best(), ours.best()
    remark = f"llama.cpp {a * 1e3:.2f} ms ({clean_a}), onnx {b * 1e3:.2f} ms ({clean_b})"
    clean = theirs.enough and ours.enough
    return Row(name, a / b, "x llama.cpp", goal, clean and a / b >= goal, remark)


def overhead(name: str, stack: LayerStack) -> Row:
    """Time of a decode step that is not onnxruntime's, as a part of the step.

    The same step is timed with all runs of sessions left out, and whole.
    """
    from kvasir_peer.engines import onnx_graph

    rows = Rows.of([0], [CONTEXT_BEFORE], [1], [True])
    nothing = [np.zeros((1, stack.shape.n_embd), np.float32)]
    bound, run = onnx_graph.Bound.__call__, onnx_graph.Session.run
    whole = min(timed(stack, rows) for _ in range(30))
    onnx_graph.Bound.__call__ = lambda self: None  # type: ignore[method-assign]
    onnx_graph.Session.run = lambda self, inputs: nothing  # type: ignore[method-assign, assignment, return-value]
    try:
        loop = min(timed(stack, rows) for _ in range(100))
    finally:
        onnx_graph.Bound.__call__, onnx_graph.Session.run = bound, run  # type: ignore[method-assign]
    share = loop / whole
    remark = f"{loop * 1e6:.0f} of {whole * 1e6:.0f} us"
    return Row(
        f"{name}, Python's share of a step",
        share,
        "of the step",
        OVERHEAD_GOAL,
        share <= OVERHEAD_GOAL,
        remark,
    )


def one_expert(path: Path, threads: int, rounds: int) -> Row:
    """One expert of the Qwen3 shape, one row, its weights not in any cache; by turns with plain reading."""
    with GgufSource(path) as source:
        n = synthetic.EXPERTS
        bank = create_bank("onnx", source, BankSpec(((0, 0, n),), max_rows=1, threads=threads))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, synthetic.WIDTH)).astype(np.float32)
    weights = np.ones((1, 1), np.float32)
    samples, reads = Samples.none(), Samples.none()
    reader = Reader(threads)
    for _ in range(rounds):
        for expert in rng.permutation(n).tolist():
            ids = np.array([[expert]], np.int32)
            samples.take(lambda ids=ids: bank.compute(0, x, ids, weights), threads)  # type: ignore[misc]
        for _ in range(4):
            reads.take(reader.read, threads)
    bank.close()
    reader.close()
    (seconds, clean), (read_seconds, _) = samples.best(), reads.best()
    kind = quants.BY_NAME["Q4_0"]
    n_bytes = 3 * synthetic.EXPERT_WIDTH * quants.row_bytes(kind.id, synthetic.WIDTH)
    of_machine = reader.n_bytes / read_seconds
    share = n_bytes / seconds / of_machine
    best = n_bytes / min(samples.all) / (reader.n_bytes / min(reads.all))
    remark = (
        f"{seconds * 1e6:.0f} us ({clean}), {n_bytes / seconds / 1e9:.1f} of {of_machine / 1e9:.1f} GB/s; "
        f"counts the file's bytes; best by best {best:.2f}"
    )
    holds = samples.enough and reads.enough and share >= BANDWIDTH_GOAL
    return Row("one expert, 1 row, Q4_0", share, "of read bandwidth", BANDWIDTH_GOAL, holds, remark)


def loading(path: Path, threads: int, engine: str) -> Row:
    """Seconds that loading 100 MB of weights takes: a whole small model, without the import of the engine."""
    name = f"loading 100 MB, SmolLM2 Q4_1, {engine}"
    if not installed(engine):
        return Row(name, None, "s", LOADING_GOAL, None, f"{engine} is not installed")
    samples = Samples.none()
    with GgufSource(path) as source:
        n_bytes = sum(info.n_bytes for info in source.tensors.values())
        n_layer = next(int(str(v)) for k, v in source.metadata.items() if k.endswith(".block_count"))
        spec = StackSpec(0, n_layer, 1, 512, 64, threads=threads)
        create_stack(engine, source, spec).close()
        for _ in range(4):
            samples.take(lambda: create_stack(engine, source, spec).close(), threads)
    seconds = min(samples.clean or samples.all)
    seconds *= 100e6 / n_bytes
    remark = f"best of {len(samples.all)}, of {n_bytes / 1e6:.0f} MB"
    holds = seconds <= LOADING_GOAL  # whatever disturbed it can only have made it slower
    return Row(name, seconds, "s", LOADING_GOAL, holds, remark)


def on_a_gpu(path: Path | None, device: str, steps: int) -> list[Row]:
    """The torch engine on the Q4_0 layers; without a device the rows say why they were not run."""
    ways = (("batched dequantisation", False, BATCHED_GOAL), ("fused kernel", True, FUSED_GOAL))
    rows = []
    copies = torch_device.copy_bandwidth(device) if path else 0.0
    for how, fused, goal in ways:
        name = f"torch on a GPU, Q4_0, {how}"
        if path is None:
            reason = torch_device.missing()
            rows.append(Row(f"{name}, batch 1", None, "of copy bandwidth", goal, None, reason))
            works = [f"decode, batch {batch}" for batch in (1, 4, 16)] + [f"prefill of {PREFILL}"]
            rows += [Row(f"{name}, {work}", None, "tokens/s", None, None, reason) for work in works]
            continue
        found = torch_device.measure(path, device, PREFILL, fused=fused, steps=steps)
        share = found.useful / copies
        remark = f"{found.useful / 1e9:.1f} of {copies / 1e9:.1f} GB/s"
        rows.append(Row(f"{name}, batch 1", share, "of copy bandwidth", goal, share >= goal, remark))
        works = {f"decode, batch {batch}": rate for batch, rate in found.decode.items()}
        works[f"prefill of {PREFILL}"] = found.prefill
        rows += [Row(f"{name}, {work}", rate, "tokens/s", None, None, "") for work, rate in works.items()]
    return rows


class Reader:
    """Reads a large array, as fast as the machine can."""

    def __init__(self, threads: int) -> None:
        self._data = np.ones(READ_BYTES // 8, np.float64)
        self._pieces = np.array_split(self._data, threads)
        self._pool = ThreadPoolExecutor(threads)
        self.n_bytes = self._data.nbytes

    def read(self) -> None:
        """Read all of it once."""
        list(self._pool.map(np.max, self._pieces))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="two synthetic layers and few samples")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--spin", action="store_true", help="let threads wait spinning, as llama.cpp's do")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct Q4_1; left out without it")
    parser.add_argument("--only", action="append", help="a part: smollm2, Q4_0, Q8_0, Q4_K_M, expert, gpu")
    parser.add_argument("--torch-device", default="", help="where the part gpu runs, instead of on a GPU")
    options = parser.parse_args()
    if options.spin:
        os.environ["KVASIR_ENGINE_SPIN"] = str(options.threads)
    blocks, each, layers = (4, 8, 2) if options.quick else (8, 12, 4)
    parts = options.only or ["smollm2", "Q4_0", "Q8_0", "Q4_K_M", "expert", "gpu"]
    rows: list[Row] = []
    print(f"{options.threads} threads, load {os.getloadavg()[0]:.1f}", flush=True)
    if "smollm2" in parts and options.model:
        rows += [loading(options.model, options.threads, engine) for engine in ("onnx", "torch")]
        rows += compare("SmolLM2 Q4_1", options.model, options.threads, blocks, each)
    gpu = options.torch_device or ("" if torch_device.missing() else "cuda")
    if "gpu" in parts and not gpu:
        rows += on_a_gpu(None, "", 0)
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("Q4_0", "Q8_0", "Q4_K_M"):
            on_gpu = kind == "Q4_0" and "gpu" in parts and bool(gpu)
            if kind not in parts and not (kind == "Q4_0" and "expert" in parts) and not on_gpu:
                continue
            path = Path(folder) / f"{kind}.gguf"
            synthetic.write_qwen3moe(path, kind, layers)
            if kind == "Q4_0" and "expert" in parts:
                rows.append(one_expert(path, options.threads, 2 if options.quick else 6))
            if kind in parts:
                rows += compare(kind, path, options.threads, blocks, max(2, each // 3))
            if on_gpu:
                rows += on_a_gpu(path, gpu, 12 if options.quick else 48)
            path.unlink()
    for row in rows:
        print(row)
    if options.json:
        options.json.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
