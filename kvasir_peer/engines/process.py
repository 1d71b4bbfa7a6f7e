"""The engine process: weights and arithmetic, no network, no key, no event loop.

Started by an agent as ``python -m kvasir_peer.engines.process SOCKET ARENA`` with two inherited file descriptors.
One thread reads orders and queues them; the main thread carries them out in order of urgency. When the agent's
end of the socket closes, for whatever reason, the process ends at once: an engine never outlives its agent.
"""

from __future__ import annotations

import itertools
import os
import queue
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import msgspec
import psutil

import kvasir_peer.errors as errors
from kvasir_peer.engines import orders
from kvasir_peer.engines.arena import Arena
from kvasir_peer.engines.orders import ArenaShape
from kvasir_peer.wire.membership import Limits

# Urgency of orders: the ring's passes must keep their sequence, so prefill and decode share a class.
_CONTROL, _RING = 0, 1


class EngineProcess:
    """The loop of the main thread and the state of what is loaded."""

    def __init__(self, channel: socket.socket, arena_descriptor: int) -> None:
        self._channel = channel
        self._arena_descriptor = arena_descriptor
        self._arena: Arena | None = None
        self._runner: object | None = None
        self._stage = 0
        self._orders: queue.PriorityQueue[tuple[int, int, msgspec.Struct]] = queue.PriorityQueue()
        self._count = itertools.count()
        self._process = psutil.Process()

    def run(self) -> None:
        """Carry out orders until told to quit."""
        threading.Thread(target=self._read, name="orders", daemon=True).start()
        self._answer(orders.Ready(os.getpid()))
        while True:
            idle_since = time.perf_counter()
            _, _, order = self._orders.get()
            starved = time.perf_counter() - idle_since
            if isinstance(order, orders.Quit):
                return
            try:
                if isinstance(order, orders.Pass):
                    self._pass(order, starved)
                elif isinstance(order, orders.LoadStage):
                    self._load(order)
                elif isinstance(order, orders.Retarget):
                    self._retarget(order)
                elif isinstance(order, orders.Forget):
                    self._forget()
                    self._answer(orders.Forgotten(order.job, self._resident()))
            except errors.KvasirError as error:
                self._fail(order, type(error).__name__, str(error))
            except MemoryError as error:
                self._fail(order, "ResourceError", f"out of memory: {error}")
            except (ValueError, IndexError, KeyError, RuntimeError, OSError, TypeError) as error:
                # A library's own error: the order fails by name, the process and its other work go on.
                self._fail(order, "EngineError", f"{type(error).__name__}: {error}".splitlines()[0][:500])

    def _fail(self, order: msgspec.Struct, error: str, message: str) -> None:
        self._answer(orders.Failed(getattr(order, "job", 0), error, message))

    def _pass(self, order: orders.Pass, starved: float) -> None:
        from kvasir_peer.engines.stage_runner import StageRunner

        if not isinstance(self._runner, StageRunner) or self._arena is None or order.stage != self._stage:
            raise errors.EngineError("a batch came for a stage that is not loaded")
        started = time.perf_counter()
        buffer = self._arena.buffer(order.buffer)
        try:
            size, outputs = self._runner.run(order.membership, buffer[: order.boundary_bytes], buffer)
        finally:
            buffer.release()
        held = time.perf_counter() - started
        self._answer(orders.PassDone(order.job, size, outputs, held * 1e3, starved * 1e3))

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
        self._map_arena(order.arena)
        self._answer(
            orders.Loaded(
                order.job,
                time.perf_counter() - started,
                memory.weights,
                memory.kv,
                memory.workspace,
                self._resident(),
                tuple(getattr(stack, "notes", ())),
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
        allowed = order.memory_limit or psutil.virtual_memory().available
        if order.device == "cpu" and memory.total > allowed:
            raise errors.ResourceError(
                f"layers {order.first} to {order.end - 1} need {memory.total / 1e6:.0f} MB "
                f"({memory.weights / 1e6:.0f} weights, {memory.kv / 1e6:.0f} KV cache, "
                f"{memory.workspace / 1e6:.0f} workspace), {allowed / 1e6:.0f} MB are allowed; "
                "give more with --memory, or take fewer layers, slots or a shorter context"
            )
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
        self._runner.retarget(order.stage, order.stages)
        self._answer(orders.Retargeted(order.job))

    def _map_arena(self, shape: ArenaShape) -> None:
        if self._arena is not None:
            self._arena.close()
        self._arena = Arena(self._arena_descriptor, shape)

    def _forget(self) -> None:
        if self._runner is not None:
            self._runner.close()  # type: ignore[attr-defined]
            self._runner = None

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
                urgency = _RING if isinstance(order, orders.Pass | orders.Retarget) else _CONTROL
                self._orders.put((urgency, next(self._count), order))
                if isinstance(order, orders.Quit):
                    return
        except (OSError, errors.WireError):
            pass  # the agent is gone, or not an agent: the process ends below, in both cases
        # The main thread may be deep in a matrix product that nothing interrupts.
        os._exit(0)


def _open_source(order: orders.LoadStage):  # type: ignore[no-untyped-def]
    from kvasir_peer.models.sources import GgufSource, StoreSource

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
