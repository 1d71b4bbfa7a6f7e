"""The engine process: weights and arithmetic, no network, no key, no event loop.

Started by an agent as ``python -m kvasir_peer.engines.process SOCKET ARENA`` with two inherited file descriptors.
One thread reads orders and queues them; the main thread carries them out in order of urgency. When the agent's
end of the socket closes, for whatever reason, the process ends at once: an engine never outlives its agent.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import psutil

import kvasir_peer.errors as errors
from kvasir_peer.engines import orders
from kvasir_peer.engines.arena import Arena
from kvasir_peer.engines.base import F32, ExpertBank, ExpertWork, MemoryEstimate, Precision
from kvasir_peer.engines.choice import free_memory
from kvasir_peer.engines.expert_runner import ExpertRunner, FlooredBank
from kvasir_peer.engines.footprint import RESERVE, expansion
from kvasir_peer.engines.heap import trim_heap
from kvasir_peer.engines.interleaving import Interleaving
from kvasir_peer.engines.orders import ArenaShape
from kvasir_peer.wire.experts import encode_rows, rows_bytes
from kvasir_peer.wire.membership import Limits
from kvasir_peer.wire.ring import Output

# Urgency of orders: the ring's passes must keep their sequence, so prefill and decode share a class.
_CONTROL, _RING, _EXPERTS = 0, 1, 2
# Within a class the order that came first goes first, but others that come within this time (seconds) go before it.
# The own part of rows that workers share lets passes go first, at the beginning and between its slices: a pass soon
# stands at its next layer, and then workers have something to do again. A check waits for a quiet moment, but not for
# ever: an engine under load has none.
PATIENCE = {"ring": 0.0, "shared": 0.2, "experts": 0.0, "checks": 0.5}
SLICE_SECONDS = 0.005
PAIR_GAIN = 0.1  # of the running mean of the own experts' time for each row-expert pair


@dataclass
class _Begun:
    """A pass between its first step and its last; times in seconds."""

    order: orders.Pass
    steps: Generator[ExpertWork, F32, tuple[int, tuple[Output, ...]]]
    sums: tuple[int, int] | None = None  # shape of what is awaited
    held: float = 0.0
    starved: float = 0.0
    resumed: bool = True


@dataclass
class _Sliced:
    """Routed rows of which some slices are computed; times in seconds."""

    slices: Generator[int, None, int]
    buffer: memoryview
    held: float = 0.0


class EngineProcess:
    """The loop of the main thread and the state of what is loaded."""

    def __init__(self, channel: socket.socket, arena_descriptor: int) -> None:
        self._channel = channel
        self._arena_descriptor = arena_descriptor
        self._arena: Arena | None = None
        self._runner: object | None = None
        self._stage = 0
        self._target = 0
        # Urgency, due time, number.
        self._orders: queue.PriorityQueue[tuple[int, float, int, msgspec.Struct]] = queue.PriorityQueue()
        self._count = itertools.count()
        self._process = psutil.Process()
        self._bank: ExpertBank | None = None
        self._experts: ExpertRunner | None = None
        self._interleaving = Interleaving()
        self._passes: dict[int, _Begun] = {}
        self._sliced: dict[int, _Sliced] = {}
        self._pair_seconds = SLICE_SECONDS  # of the own experts, until some were measured

    def run(self) -> None:
        """Carry out orders until told to quit."""
        threading.Thread(target=self._read, name="orders", daemon=True).start()
        self._answer(orders.Ready(os.getpid()))
        while True:
            idle_since = time.perf_counter()
            item = self._orders.get()
            order = item[-1]
            starved = time.perf_counter() - idle_since
            if isinstance(order, orders.Quit):
                return
            try:
                if isinstance(order, orders.Pass):
                    self._pass(order, starved)
                elif isinstance(order, orders.Resume):
                    self._resume(order)
                elif isinstance(order, orders.ExpertPass):
                    if self._expert_pass(order):
                        self._orders.put(item)
                elif isinstance(order, orders.LoadBank):
                    self._load_bank(order)
                elif isinstance(order, orders.LoadStage):
                    self._load(order)
                elif isinstance(order, orders.Retarget):
                    self._retarget(order)
                elif isinstance(order, orders.Forget):
                    self._forget()
                    self._answer(orders.Forgotten(order.job, self._resident()))
                elif isinstance(order, orders.Try):
                    factor = expansion(order.engine, order.device, order.precision)
                    self._answer(orders.Tried(order.job, factor))
            except Exception as error:
                if not self._failed(order, error):
                    raise

    def _failed(self, order: msgspec.Struct, error: BaseException) -> bool:
        """Answer that an order failed; False for an error that no order may cause."""
        if isinstance(error, errors.KvasirError):
            self._fail(order, type(error).__name__, str(error))
        elif isinstance(error, MemoryError):
            self._fail(order, "ResourceError", f"out of memory: {error}")
        elif type(error).__name__ == "OutOfMemoryError":  # torch's, on a GPU
            reason = str(error).splitlines()[0][:300]
            self._fail(
                order,
                "ResourceError",
                f"the GPU is out of memory: {reason} End other programs that use it, or take fewer layers or slots",
            )
        elif isinstance(error, ValueError | IndexError | KeyError | RuntimeError | OSError | TypeError):
            # A library's own error: the order fails by name, the process and its other work go on.
            self._fail(order, "EngineError", f"{type(error).__name__}: {error}".splitlines()[0][:500])
        else:
            return False
        return True

    def _fail(self, order: msgspec.Struct, error: str, message: str) -> None:
        self._answer(orders.Failed(getattr(order, "job", 0), error, message))

    def _pass(self, order: orders.Pass, starved: float) -> None:
        from kvasir_peer.engines.stage_runner import StageRunner

        if not isinstance(self._runner, StageRunner) or self._arena is None or order.stage != self._target:
            raise errors.EngineError(
                "a batch came for a stage that is not loaded, or of an epoch that is over"
            )
        runner = self._runner
        buffer = self._arena.buffer(order.buffer)
        alone = not order.layers and not self._passes
        slots = frozenset() if alone else runner.slots(order.membership)
        self._interleaving.add(order.job, slots, order.layers)
        steps = runner.steps(
            order.membership, buffer[: order.boundary_bytes], buffer, frozenset(order.layers)
        )
        self._passes[order.job] = _Begun(order, steps, starved=starved)
        self._go_on()

    def _resume(self, order: orders.Resume) -> None:
        begun = self._passes.get(order.job)
        if begun is not None:  # else its stage has been replaced
            begun.resumed = True
            self._go_on()

    def _go_on(self) -> None:
        """Step whatever pass may be stepped, the oldest first."""
        found = True
        while found:
            found = False
            for job, begun in self._passes.items():
                if begun.resumed and self._interleaving.may_step(job):
                    self._step(job, begun)
                    found = True
                    break

    def _step(self, job: int, begun: _Begun) -> None:
        assert self._arena is not None
        started = time.perf_counter()
        buffer = self._arena.buffer(begun.order.buffer)
        begun.resumed = False
        try:
            if begun.sums is None:
                work = next(begun.steps)
            else:
                rows, width = begun.sums
                size = rows * width * 4
                work = begun.steps.send(np.frombuffer(buffer[:size], "<f4").reshape(rows, width).copy())
            begun.sums = work.x.shape
            encode_rows(work.ids, work.weights, work.x, "f32", buffer)
        except StopIteration as stop:
            self._end(job)
            size, outputs = stop.value
            held = (begun.held + time.perf_counter() - started) * 1e3
            self._answer(orders.PassDone(job, size, outputs, held, begun.starved * 1e3))
        except Exception as error:
            self._end(job)
            if not self._failed(begun.order, error):
                raise
        else:
            begun.held += time.perf_counter() - started
            self._interleaving.stopped(job, work.layer)
            self._answer(orders.Routed(job, work.layer, *work.ids.shape))
        finally:
            buffer.release()

    def _end(self, job: int) -> None:
        del self._passes[job]
        self._interleaving.remove(job)

    def _drop_passes(self) -> None:
        """Give up passes that still wait for sums: their stage is replaced."""
        for job in list(self._passes):
            self._passes[job].steps.close()
            self._end(job)
            self._answer(orders.Failed(job, "EngineError", "the batch was given up: its stage was replaced"))

    def _expert_pass(self, order: orders.ExpertPass) -> bool:
        """Compute routed rows, or the next slice of them; whether there are more."""
        if self._experts is None or self._arena is None or order.loaded != self._stage:
            raise errors.EngineError("routed rows came for experts that are not loaded")
        started = time.perf_counter()
        sliced = self._sliced.pop(order.job, None)
        if sliced is None:
            buffer = self._arena.buffer(order.buffer)
            width = self._bank.shape.n_embd  # type: ignore[union-attr]
            data = buffer[: rows_bytes(order.rows, order.experts, width, order.dtype)]
            most = max(1, int(SLICE_SECONDS / self._pair_seconds)) if order.urgency == "shared" else 0
            sliced = _Sliced(
                self._experts.run(
                    data, order.layer, order.rows, order.experts, order.dtype, buffer, slices_of=most
                ),
                buffer,
            )
        try:
            pairs = next(sliced.slices)
        except StopIteration as stop:
            sliced.buffer.release()
            held = sliced.held + time.perf_counter() - started
            self._answer(orders.ExpertsDone(order.job, stop.value, held * 1e3))
            return False
        except BaseException:
            sliced.buffer.release()
            raise
        spent = time.perf_counter() - started
        sliced.held += spent
        self._pair_seconds += PAIR_GAIN * (spent / max(1, pairs) - self._pair_seconds)
        self._sliced[order.job] = sliced
        return True

    def _drop_slices(self) -> None:
        for sliced in self._sliced.values():
            sliced.slices.close()
            sliced.buffer.release()
        self._sliced.clear()

    def _load_bank(self, order: orders.LoadBank) -> None:
        from kvasir_peer.engines.base import BankSpec, create_bank, estimate_bank

        self._forget()
        started = time.perf_counter()
        source = _open_bank_source(order)
        precision: Precision = "exact" if order.precision == "exact" else "fast"
        spec = BankSpec(order.ranges, order.max_rows, precision, order.threads, order.device)
        memory = estimate_bank(order.engine, source.metadata, source.tensors, spec)
        _refuse_what_does_not_fit(order, memory, self._resident(), "these experts", "fewer experts")
        self._bank = create_bank(order.engine, source, spec)
        source.release()
        if order.expert_floor_ms > 0:
            self._bank = FlooredBank(self._bank, order.expert_floor_ms / 1e3)
        self._experts, self._stage = ExpertRunner(self._bank, order.max_rows), order.job
        self._map_arena(order.arena)
        seconds = time.perf_counter() - started
        self._answer(orders.Loaded(order.job, seconds, memory.weights, 0, memory.workspace, self._resident()))

    def _load(self, order: orders.LoadStage) -> None:
        from kvasir_peer.engines.stage_runner import StageRunner

        self._forget()
        started = time.perf_counter()
        source = _open_source(order)
        stack, memory = self._make_stack(order, source)
        source.release()
        limits = Limits(
            order.max_rows,
            order.n_slots,
            order.context_length,
            order.vocab,
            order.top_logprobs,
            order.stages,
        )
        self._runner, self._stage = StageRunner(stack, limits, order.stage, order.dtype), order.job
        self._target = order.job
        if order.expert_floor_ms > 0 and self._runner.bank is not None:
            self._runner.slow_down(FlooredBank(self._runner.bank, order.expert_floor_ms / 1e3))
        self._bank = self._runner.bank
        if self._bank is not None:
            self._experts = ExpertRunner(self._bank, order.max_rows)
        self._map_arena(order.arena)
        took = time.perf_counter() - started
        passes = self._runner.measure() if order.measure else ()
        self._answer(
            orders.Loaded(
                order.job,
                took,
                memory.weights,
                memory.kv,
                memory.workspace,
                self._resident(),
                tuple(getattr(stack, "notes", ())),
                passes,
            )
        )

    def _make_stack(self, order: orders.LoadStage, source):  # type: ignore[no-untyped-def]
        from kvasir_peer.engines.base import StackSpec, create_stack, estimate_stack

        spec = StackSpec(
            order.first,
            order.end,
            order.n_slots,
            order.context_length,
            order.max_rows,
            precision="exact" if order.precision == "exact" else "fast",
            threads=order.threads,
            device=order.device,
        )
        memory = estimate_stack(order.engine, source.metadata, source.tensors, spec)
        what = f"layers {order.first} to {order.end - 1}"
        less = "fewer layers, slots or a shorter context"
        _refuse_what_does_not_fit(order, memory, self._resident(), what, less)
        last = 0.0

        def progress(done: int, total: int) -> None:
            nonlocal last
            if done >= total or time.monotonic() - last > 0.25:  # seconds: a person sees no finer steps
                last = time.monotonic()
                self._answer(orders.Progress(order.job, done, total))

        return create_stack(order.engine, source, spec, progress), memory

    def _retarget(self, order: orders.Retarget) -> None:
        from kvasir_peer.engines.stage_runner import StageRunner

        if not isinstance(self._runner, StageRunner):
            raise errors.EngineError("no stage is loaded")
        self._drop_passes()
        self._runner.retarget(order.stage, order.stages)
        self._target = order.job
        self._answer(orders.Retargeted(order.job))

    def _map_arena(self, shape: ArenaShape) -> None:
        if self._arena is not None:
            self._arena.close()
        self._arena = Arena(self._arena_descriptor, shape)

    def _forget(self) -> None:
        self._drop_passes()
        self._drop_slices()
        if self._runner is not None:
            self._runner.close()  # type: ignore[attr-defined]
            self._runner = None
        elif self._bank is not None:
            self._bank.close()
        self._bank = self._experts = None
        # The owner gets the memory back, not just the next load: allocators keep what they once had.
        gc.collect()
        trim_heap()

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)

    def _answer(self, message: msgspec.Struct) -> None:
        self._channel.sendall(orders.pack(message))

    def _read(self) -> None:
        """The reader thread: orders into the queue; the end of the socket ends the process."""
        stream = self._channel.makefile("rb")
        try:
            while True:
                prefix = stream.read(orders.LENGTH.size)
                if len(prefix) < orders.LENGTH.size:
                    break
                (size,) = orders.LENGTH.unpack(prefix)
                order, _ = orders.CODEC.decode(stream.read(size))
                patience = PATIENCE[order.urgency] if isinstance(order, orders.ExpertPass) else 0.0
                self._orders.put((_urgency(order), time.monotonic() + patience, next(self._count), order))
                if isinstance(order, orders.Quit):
                    return
        except (OSError, errors.WireError):
            pass  # the agent is gone, or not an agent: the process ends below, in both cases
        # The main thread may be deep in a matrix product that nothing interrupts.
        os._exit(0)


def _refuse_what_does_not_fit(
    order: orders.LoadStage | orders.LoadBank, memory: MemoryEstimate, process: int, what: str, less: str
) -> None:
    """Hold what loading will take, at the worst, against what is allowed, or else against what is free.

    Args:
        order: to load.
        memory: what was estimated.
        process: bytes that the process has before.
        what, less: for the message: what does not fit, and what would.

    Raises:
        ResourceError: with the numbers.
    """
    # On a GPU what counts is the GPU's memory, of which the process has nothing yet.
    process = process if order.device == "cpu" else 0
    need = int(memory.total * RESERVE) + process
    limit = order.memory_limit
    # What is free does not count what the process has already.
    allowed = limit or free_memory(order.device) + process
    if need > allowed:
        raise errors.ResourceError(
            f"{what} need {math.ceil(need / 1e6)} MB ({memory.weights / 1e6:.0f} weights, "
            f"{memory.kv / 1e6:.0f} KV cache, {memory.workspace / 1e6:.0f} workspace, a tenth more to be safe, "
            f"{process / 1e6:.0f} the engine itself), {allowed // 1_000_000} MB are "
            f"{'allowed' if limit else 'free'}; {'give more with --memory' if limit else 'end other programs'}, "
            f"or take {less}"
        )


def _urgency(order: object) -> int:
    if isinstance(order, orders.Pass | orders.Resume):
        return _RING
    if isinstance(order, orders.ExpertPass):
        return _EXPERTS if order.urgency == "experts" else _RING
    return _CONTROL


def _open_bank_source(order: orders.LoadBank):  # type: ignore[no-untyped-def]
    from kvasir_peer.models.sources import GgufSource, StoreSource

    if isinstance(order.weights, orders.GgufWeights):
        return GgufSource(Path(order.weights.path))
    from kvasir_peer.models.manifest import Manifest
    from kvasir_peer.models.slices import ExpertSlice
    from kvasir_peer.models.store import ChunkReader

    manifest = Manifest.decode(Path(order.weights.manifest).read_bytes())
    return StoreSource(ChunkReader(Path(order.weights.store)), manifest, ExpertSlice(order.ranges))


def _open_source(order: orders.LoadStage):  # type: ignore[no-untyped-def]
    from kvasir_peer.models.sources import GgufSource, StoreSource

    if isinstance(order.weights, orders.NoWeights):
        from kvasir_peer.engines.synthetic import SyntheticSource

        return SyntheticSource(order.n_layer, order.n_embd, order.vocab)
    if isinstance(order.weights, orders.GgufWeights):
        return GgufSource(Path(order.weights.path))
    from kvasir_peer.models.manifest import Manifest
    from kvasir_peer.models.slices import StageSlice
    from kvasir_peer.models.store import ChunkReader

    manifest = Manifest.decode(Path(order.weights.manifest).read_bytes())
    store = ChunkReader(Path(order.weights.store))
    return StoreSource(store, manifest, StageSlice(order.first, order.end, order.n_layer))


def main() -> None:
    """Entry of the process."""
    # Ctrl-C goes to the whole terminal group; the agent decides when its engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    EngineProcess(channel, int(sys.argv[2])).run()


if __name__ == "__main__":
    main()
