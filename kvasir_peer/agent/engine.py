"""The agent's handle on its engine process: orders out, answers back, restarts.

The event loop only moves small messages here; tensors lie in the arena, arithmetic runs in the other process.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec
import trio

import kvasir_peer.errors as errors
from kvasir_peer.engines import orders
from kvasir_peer.engines.arena import Arena, create_arena_file
from kvasir_peer.engines.footprint import expansion_untried
from kvasir_peer.errors import EngineError, WireError
from kvasir_peer.wire.codec import PREFIX_BYTES

logger = logging.getLogger(__name__)

READY_SECONDS = 60.0  # importing the libraries of an engine on a slow, busy machine
TRY_SECONDS = 120.0  # compiling kernels on a slow, busy machine; the compiler has a deadline of its own
QUIT_SECONDS = 2.0  # an idle engine ends in milliseconds; one inside a product is killed after this
RESTART_DELAYS = (0.1, 0.5, 2.0, 5.0, 15.0)  # seconds before each restart in a row; the last one stays
HEALTHY_SECONDS = 60.0  # after so long without a crash the delays begin anew


@dataclass(frozen=True)
class EngineStatistics:
    """What an engine has done.

    Attributes:
        running: whether the process is up.
        pid: its process id, 0 when down.
        restarts: how often it was restarted after a crash.
        passes: batches computed.
        held_ms: time spent with batches, milliseconds.
        starved_ms: time spent waiting for a batch, milliseconds.
        resident_bytes: memory of the process as of the last load.
    """

    running: bool
    pid: int
    restarts: int
    passes: int
    held_ms: float
    starved_ms: float
    resident_bytes: int


@dataclass(frozen=True)
class RoutedPass:
    """A pass that waits for the sums of its routed rows.

    Attributes:
        job: number of its order.
        buffer: of the arena; has the rows (:mod:`kvasir_peer.wire.experts`, f32), and takes the sums, f32.
        layer, rows, experts: what is routed.
        context: as submitted with the batch.
    """

    job: int
    buffer: int
    layer: int
    rows: int
    experts: int
    context: object = None


class _Connection:
    """One run of the process: its socket, its unanswered orders."""

    def __init__(self, process: subprocess.Popen[bytes], stream: trio.SocketStream) -> None:
        self.process = process
        self.stream = stream
        self.waiting: dict[int, tuple[trio.Event, list[msgspec.Struct]]] = {}
        self.buffers: dict[int, tuple[int, object]] = {}  # of the passes under way, and their context
        self.begun: set[int] = set()  # passes under way that have handed out rows
        self.send_lock = trio.Lock()
        self.lost = False

    def lose(self) -> None:
        self.lost = True
        for event, _ in self.waiting.values():
            event.set()


class Engine:
    """One engine process, restarted when it dies. Made by :func:`open_engine`.

    Attributes:
        crashed: called (without arguments) after each crash, before the restart; what was loaded is gone.
        routed: called when a pass stands at one of the layers for which it was submitted.
    """

    def __init__(self) -> None:
        self._arena_file = create_arena_file()
        self._arena: Arena | None = None
        self._connection: _Connection | None = None
        self._up = trio.Event()
        self._jobs = itertools.count(1)
        self._stage = 0
        self._target = 0
        self._free: list[int] = []
        self._freed = trio.Event()
        self._progress: dict[int, Callable[[int, int], None]] = {}
        self.crashed: Callable[[], None] = lambda: None
        self.routed: Callable[[RoutedPass], None] = lambda rows: None
        self._restarts = 0
        self._passes = 0
        self._held_ms = 0.0
        self._starved_ms = 0.0
        self._resident = 0

    # -- orders ---------------------------------------------------------------------------------------------

    async def expansion(self, engine: str, device: str, precision: str) -> float:
        """Bytes of memory for each byte of block-quantised weights, with the kernels that work here.

        Where they can't be tried it is what the engine takes without; loading then says what is wrong.
        """
        job = next(self._jobs)
        try:
            with trio.fail_after(TRY_SECONDS):
                answer = await self._ask(orders.Try(job, engine, device, precision), job)
        except (errors.KvasirError, trio.TooSlowError) as error:
            logger.warning("the engine's kernels were not tried: %s", str(error) or "it does not answer")
            return expansion_untried(engine, device, precision)
        assert isinstance(answer, orders.Tried)
        return answer.expansion

    async def load_stage(
        self, order: orders.LoadStage, progress: Callable[[int, int], None] | None = None
    ) -> orders.Loaded:
        """Load a stage; ``order.job`` is set here.

        Raises:
            EngineError, ResourceError, ModelFileError, ...: what the engine process said.
        """
        if self._arena is not None:
            self._arena.close()
        self._arena = Arena(self._arena_file, order.arena)
        self._free = list(range(order.arena.buffers))
        self._freed.set()
        job = next(self._jobs)
        if progress is not None:
            self._progress[job] = progress
        try:
            answer = await self._ask(msgspec.structs.replace(order, job=job), job)
        finally:
            self._progress.pop(job, None)
        assert isinstance(answer, orders.Loaded)
        self._stage = self._target = job
        self._resident = answer.resident_bytes
        return answer

    async def retarget(self, stage: int, stages: int) -> None:
        """Give the loaded stage another index; batches of before are over, and all buffers free, after it."""
        job = next(self._jobs)
        answer = await self._ask(orders.Retarget(job, stage, stages), job)
        assert isinstance(answer, orders.Retargeted)
        self._target = job
        if self._arena is not None:
            self._free = list(range(self._arena.shape.buffers))
            self._freed.set()

    def kill(self) -> None:
        """End the process, which does not answer any more; it is restarted, and :attr:`crashed` is called."""
        if self._connection is not None and not self._connection.lost:
            self._connection.process.kill()

    async def forget(self) -> None:
        """Give the memory of what is loaded back to the machine."""
        job = next(self._jobs)
        answer = await self._ask(orders.Forget(job), job)
        assert isinstance(answer, orders.Forgotten)
        self._stage, self._resident = 0, answer.resident_bytes

    async def take_buffer(self) -> int:
        """Index of a free buffer of the arena; waits until there is one."""
        while not self._free:
            # One event for all who wait: whoever wakes up too late waits for the next one with the others.
            if self._freed.is_set():
                self._freed = trio.Event()
            await self._freed.wait()
        return self._free.pop()

    def free_buffer(self, index: int) -> None:
        """Give a buffer back."""
        self._free.append(index)
        self._freed.set()

    def buffer(self, index: int) -> memoryview:
        """The memory of a buffer."""
        if self._arena is None:
            raise EngineError("no stage is loaded")
        return self._arena.buffer(index)

    async def load_bank(self, order: orders.LoadBank) -> orders.Loaded:
        """Load experts; ``order.job`` is set here. Raises as :meth:`load_stage`."""
        if self._arena is not None:
            self._arena.close()
        self._arena = Arena(self._arena_file, order.arena)
        self._free = list(range(order.arena.buffers))
        self._freed.set()
        job = next(self._jobs)
        answer = await self._ask(msgspec.structs.replace(order, job=job), job)
        assert isinstance(answer, orders.Loaded)
        self._stage = job
        self._resident = answer.resident_bytes
        return answer

    async def submit(
        self,
        buffer: int,
        membership: bytes,
        boundary_bytes: int,
        layers: tuple[int, ...] = (),
        context: object = None,
    ) -> PendingPass:
        """Hand a batch to the engine; it is computed after those submitted before.

        Args:
            layers: at which the routed rows go to :attr:`routed`; whoever takes them must resume the pass.
            context: comes back with the routed rows.
        """
        job = next(self._jobs)
        connection = self._current()
        waiter = (trio.Event(), list[msgspec.Struct]())
        connection.waiting[job] = waiter
        connection.buffers[job] = (buffer, context)
        await self._send(
            connection, orders.Pass(job, self._target, buffer, membership, boundary_bytes, layers)
        )
        return PendingPass(self, connection, job, waiter)

    async def compute_experts(
        self, buffer: int, layer: int, rows: int, experts: int, dtype: str, urgency: orders.Urgency
    ) -> orders.ExpertsDone:
        """Sums of the routed rows in a buffer (:mod:`kvasir_peer.wire.experts`), written to the same buffer.

        Shield it where the caller may be cancelled: the engine writes to the buffer all the same.

        Raises:
            EngineError: nothing is loaded that has these experts, or the process died.
        """
        job = next(self._jobs)
        order = orders.ExpertPass(job, self._stage, buffer, layer, rows, experts, dtype, urgency)
        answer = await self._ask(order, job)
        assert isinstance(answer, orders.ExpertsDone)
        return answer

    async def resume(self, work: RoutedPass, sums: bytes | memoryview) -> None:
        """Go on with a pass; nothing happens where it was given up meanwhile.

        Args:
            sums: f32 ``[rows, n_embd]``.
        """
        connection = self._current()
        if work.job in connection.buffers:  # else the buffer may be another pass's by now
            self.buffer(work.buffer)[: len(sums)] = sums
            await self._send(connection, orders.Resume(work.job))

    def statistics(self) -> EngineStatistics:
        """A snapshot."""
        up = self._connection is not None and not self._connection.lost
        return EngineStatistics(
            up,
            self._connection.process.pid if up and self._connection else 0,
            self._restarts,
            self._passes,
            self._held_ms,
            self._starved_ms,
            self._resident,
        )

    # -- plumbing -------------------------------------------------------------------------------------------

    def _current(self) -> _Connection:
        if self._connection is None or self._connection.lost:
            raise EngineError("the engine process is down; it is being restarted")
        return self._connection

    async def _ask(self, order: msgspec.Struct, job: int) -> msgspec.Struct:
        with trio.fail_after(READY_SECONDS):
            await self._up.wait()
        connection = self._current()
        waiter = (trio.Event(), list[msgspec.Struct]())
        connection.waiting[job] = waiter
        try:
            await self._send(connection, order)
            await waiter[0].wait()
        finally:
            connection.waiting.pop(job, None)
        return _checked(waiter[1])

    async def _send(self, connection: _Connection, order: msgspec.Struct) -> None:
        data = orders.pack(order)
        try:
            # Shielded: half an order on the socket would break all that follow. The socket is local and the
            # engine's reader thread always drains it, so this takes no longer than a copy.
            with trio.CancelScope(shield=True):
                async with connection.send_lock:
                    await connection.stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            connection.lose()

    def _answered(self, connection: _Connection, message: msgspec.Struct) -> None:
        if isinstance(message, orders.Progress):
            report = self._progress.get(message.job)
            if report is not None:
                report(message.done, message.total)
            return
        if isinstance(message, orders.Routed):
            known = connection.buffers.get(message.job)
            if known is not None:
                connection.begun.add(message.job)
                self.routed(
                    RoutedPass(message.job, known[0], message.layer, message.rows, message.experts, known[1])
                )
            return
        connection.buffers.pop(getattr(message, "job", 0), None)
        connection.begun.discard(getattr(message, "job", 0))
        if isinstance(message, orders.PassDone):
            self._passes += 1
            self._held_ms += message.held_ms
            self._starved_ms += message.starved_ms
        waiter = connection.waiting.pop(getattr(message, "job", 0), None)
        if waiter is not None:
            waiter[1].append(message)
            waiter[0].set()

    async def _read(self, connection: _Connection) -> None:
        """Take answers until the process's end of the socket closes, or makes no sense any more.

        The process reads files that come from elsewhere, so it is not believed blindly either.
        """
        data = bytearray()
        while True:
            try:
                piece = await connection.stream.receive_some(1 << 16)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            if not piece:
                return
            data += piece
            while len(data) >= orders.LENGTH.size:
                (size,) = orders.LENGTH.unpack_from(data)
                end = orders.LENGTH.size + size
                if size > orders.MAX_ORDER_BYTES + PREFIX_BYTES:
                    logger.error("the engine process announces an answer of %d bytes and is ended", size)
                    connection.process.kill()
                    return
                if len(data) < end:
                    break
                try:
                    message, _ = orders.CODEC.decode(bytes(data[orders.LENGTH.size : end]))
                except WireError as error:
                    logger.error("the engine process makes no sense and is ended: %s", error)
                    connection.process.kill()
                    return
                del data[:end]
                if isinstance(message, orders.Ready):
                    self._up.set()
                else:
                    self._answered(connection, message)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the process, and start it again whenever it dies, until cancelled."""
        crashes = 0
        while True:
            began = trio.current_time()
            try:
                connection = self._spawn()
            except OSError as error:
                if not self._restarts:
                    raise EngineError(f"the engine process can't be started: {error}") from None
                # The machine is short of memory or processes for now; the network's side goes on meanwhile.
                crashes += 1
                delay = RESTART_DELAYS[min(crashes, len(RESTART_DELAYS)) - 1]
                logger.warning("the engine process can't be started (%s); again in %.1f s", error, delay)
                await trio.sleep(delay)
                continue
            self._connection = connection
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._announce, connection, task_status)
                    await self._read(connection)
                    nursery.cancel_scope.cancel()
            finally:
                self._up = trio.Event()
                connection.lose()
                await _end(connection)
            status = connection.process.returncode
            self._restarts += 1
            crashes = 1 if trio.current_time() - began > HEALTHY_SECONDS else crashes + 1
            delay = RESTART_DELAYS[min(crashes, len(RESTART_DELAYS)) - 1]
            logger.warning("engine process ended (%s); restart in %.1f s", _reason(status), delay)
            self.crashed()
            await trio.sleep(delay)

    async def _announce(self, connection: _Connection, task_status: trio.TaskStatus[None]) -> None:
        with trio.move_on_after(READY_SECONDS) as scope:
            await self._up.wait()
        if scope.cancelled_caught:
            why = f"the engine process did not come up within {READY_SECONDS:.0f} s"
            if not self._restarts:
                raise EngineError(why)
            logger.warning("%s; it is started again", why)
            connection.process.kill()
            return
        with contextlib.suppress(RuntimeError):  # a restart: the task had started before
            task_status.started()

    def _spawn(self) -> _Connection:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as unless_started:
            unless_started.callback(ours.close)
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "kvasir_peer.engines.process",
                    str(theirs.fileno()),
                    str(self._arena_file),
                ],
                pass_fds=(theirs.fileno(), self._arena_file),
                stdin=subprocess.DEVNULL,
            )
            unless_started.pop_all()
        return _Connection(process, trio.SocketStream(trio.socket.from_stdlib_socket(_non_blocking(ours))))

    def _close(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        os.close(self._arena_file)


@dataclass
class PendingPass:
    """A batch that the engine has; :meth:`result` waits for it."""

    _engine: Engine
    _connection: _Connection
    _job: int
    _waiter: tuple[trio.Event, list[msgspec.Struct]]

    @property
    def begun(self) -> bool:
        """Whether it has handed out rows, or is through; False for one that waits, or runs without a stop."""
        return self._job in self._connection.begun or self._waiter[0].is_set()

    async def result(self) -> orders.PassDone:
        """The computed batch.

        Raises:
            EngineError: the process died, or refused the batch.
            WireError: the membership or boundary is not within the plan.
        """
        await self._waiter[0].wait()
        answer = _checked(self._waiter[1])
        assert isinstance(answer, orders.PassDone)
        return answer


def _checked(answers: list[msgspec.Struct]) -> msgspec.Struct:
    if not answers:
        raise EngineError("the engine process died; it is being restarted")
    answer = answers[0]
    if isinstance(answer, orders.Failed):
        kind = getattr(errors, answer.error, EngineError)
        if not (isinstance(kind, type) and issubclass(kind, errors.KvasirError)):
            kind = EngineError
        if kind is errors.WireError:
            raise errors.WireError("batch", answer.message)
        raise kind(answer.message)
    return answer


def _non_blocking(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    return sock


def _reason(status: int | None) -> str:
    if status is not None and status < 0:
        return f"signal {-status}"
    return f"exit status {status}"


async def _end(connection: _Connection) -> None:
    """End a process: ask, then kill. Short, so it may run shielded."""
    with trio.CancelScope(shield=True):
        with trio.move_on_after(QUIT_SECONDS):
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                async with connection.send_lock:
                    await connection.stream.send_all(orders.pack(orders.Quit()))
                while await connection.stream.receive_some(1 << 16):
                    pass  # late answers; the end of the stream is the end of the process
        if connection.process.poll() is None:
            connection.process.kill()
        await trio.to_thread.run_sync(connection.process.wait)
        await connection.stream.aclose()


@contextlib.asynccontextmanager
async def open_engine() -> AsyncIterator[Engine]:
    """An engine process for as long as the block lasts.

    Raises:
        EngineError: the process did not come up.
    """
    engine = Engine()
    failure: Exception | None = None
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            try:
                yield engine
            except Exception as error:  # noqa: BLE001 - raised again
                failure = error  # from inside, the nursery would wrap it in a group
            finally:
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
    finally:
        engine._close()
