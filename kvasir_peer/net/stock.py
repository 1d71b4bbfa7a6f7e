"""py-libp2p's own multiplexer in the place of ours, on the same connections and below the same links.

Ours is quicker, bounds what strangers may send, and sends by priority to the byte; this one is the spare: for a peer
with whom ours has failed (``Host`` does that by itself), or for all by the setting ``muxer``. :class:`StockMux` has the
interface of :class:`~kvasir_peer.net.yamux.Yamux`, plaintext in and out, and keeps the streams of that module; between
them runs py-libp2p's muxer (its ``IMuxedConn``), unmodified, on a pipe, with two tasks for each stream.

What is lost with it: streams of a connection are served in turn, whatever their priority (a link still sends its own
most urgent piece first); speed (docs/benchmarks.md); and py-libp2p does not hold the other side to its windows, so a
connection with too much unread is closed, looked at once a second. Its faults that would show above are kept away:
whole frames are queued or none, so that a cancelled task leaves nothing half-sent (Y5); nothing is written without
window, so that it never gives up after 5 s (Y1); and pings of ours notice a dead peer (Y6).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import trio

from kvasir_peer.errors import LinkError, WireError
from kvasir_peer.net import upstream
from kvasir_peer.net.yamux import (
    FIN,
    GO_AWAY,
    GO_AWAY_NORMAL,
    HEADER,
    MAX_BUFFERED_BYTES,
    PING,
    RST,
    SYN,
    MuxedStream,
    Priority,
    Yamux,
)

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 * 1024  # of a stream at once; other streams of the connection wait for so much
QUEUED_BYTES = 128 * 1024  # of whole frames that wait for the socket before a stream has to
MAX_OUTBOUND_STREAMS = 256  # py-libp2p's own bound, beyond which it waits without a word
WINDOW_LOOK_S = 0.01  # between looks whether the other side has granted window; py-libp2p's own pace (Y2)


class _Pipe(upstream.IRawConnection):  # type: ignore[misc]
    """What the stock muxer takes for the encrypted connection."""

    def __init__(self, initiator: bool, on_written: Callable[[], None]) -> None:
        self.is_initiator = initiator
        self._on_written = on_written
        self._in = bytearray()
        self._out: deque[memoryview] = deque()
        self._out_bytes = 0
        self._came = trio.Event()
        self._room = trio.Event()
        self._closed = False

    # --- the stock muxer's side ---

    async def read(self, n: int | None = None) -> bytes:
        while not self._in and not self._closed:
            self._came = trio.Event()
            await self._came.wait()
        data = bytes(self._in[:n])
        del self._in[:n]
        return data

    async def write(self, data: bytes) -> None:
        """Queue a whole frame; waits only before it does."""
        while self._out_bytes >= QUEUED_BYTES and not self._closed:
            self._room = trio.Event()
            await self._room.wait()
        self.queue(data)

    async def close(self) -> None:
        self.shut()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None

    def get_transport_addresses(self) -> list[Any]:
        return []

    def get_connection_type(self) -> Any:
        return None

    # --- our side ---

    def queue(self, frame: bytes) -> None:
        """Send a frame, whatever waits."""
        self._out.append(memoryview(frame))
        self._out_bytes += len(frame)
        self._on_written()

    @property
    def waits(self) -> bool:
        """Whether there is something to send."""
        return bool(self._out)

    def feed(self, data: memoryview) -> int:
        """Bytes came; returns how many wait to be read."""
        self._in += data
        self._came.set()
        return len(self._in)

    def pull(self, room: memoryview) -> int:
        """Move bytes into ``room``."""
        count = 0
        while self._out and count < len(room):
            data = self._out[0]
            step = min(len(data), len(room) - count)
            room[count : count + step] = data[:step]
            count += step
            if step == len(data):
                self._out.popleft()
            else:
                self._out[0] = data[step:]
        self._out_bytes -= count
        if self._out_bytes < QUEUED_BYTES:
            self._room.set()
        return count

    def shut(self) -> None:
        """The end, for whoever reads or writes."""
        self._closed = True
        self._came.set()
        self._room.set()


class _Carried:
    """The state between one of our streams and one of the stock muxer's."""

    def __init__(self) -> None:
        self.wanted = trio.Event()  # something is to be sent, or done
        self.granted = trio.Event()  # more may be received
        self.finish = False
        self.reset = False

    def wake(self) -> None:
        self.wanted.set()
        self.granted.set()


class StockMux(Yamux):
    """As :class:`Yamux`, with py-libp2p's muxer inside.

    Args:
        nursery: where its tasks live until the connection is gone.
        options: see :class:`Yamux`.
    """

    def __init__(self, *, nursery: trio.Nursery, **options: Any) -> None:
        super().__init__(**options)
        self._wake = options["on_writable"]
        self._pipe = _Pipe(options["initiator"], self._wake)
        peer = upstream.PeerID.from_base58(self.remote_peer)
        pipe: Any = self._pipe
        self._stock: Any = upstream.StockYamux(pipe, peer, is_initiator=options["initiator"])
        self._carried: dict[MuxedStream, _Carried] = {}
        self._next_inbound_id = 2 if options["initiator"] else 1
        self._scope = trio.CancelScope()
        self._tasks: trio.Nursery | None = None
        self._early: list[tuple[MuxedStream, Any]] = []
        self._measured = 0.0
        nursery.start_soon(self._run)

    async def _run(self) -> None:
        reason = "py-libp2p's muxer has ended"
        try:
            with self._scope:
                async with trio.open_nursery() as self._tasks:
                    for stream, raw in self._early:
                        self._tasks.start_soon(self._carry, stream, raw)
                    self._tasks.start_soon(self._accept)
                    await self._stock.start()
                    self._tasks.cancel_scope.cancel()
        except* Exception:
            logger.exception("py-libp2p's muxer to %s failed", self.remote_peer)
            reason = "py-libp2p's muxer failed"
        finally:
            self._pipe.shut()
            self._break(reason)

    def _break(self, reason: str) -> None:
        if not self.lost and self.on_broken is not None:
            self.on_broken(reason)

    async def _accept(self) -> None:
        while True:
            try:
                raw = await self._stock.accept_stream()
            except upstream.BaseLibp2pError:
                return
            if self._inbound >= self._max_inbound:
                self.violations["streams"] = self.violations.get("streams", 0) + 1
                await raw.reset()
                continue
            self._count_opened()
            stream = MuxedStream(self, self._next_inbound_id, inbound=True)
            self._next_inbound_id += 2
            self.streams[stream.id] = stream
            self._inbound += 1
            self._begin(stream, raw)
            self._on_stream(stream)

    # --- one stream ------------------------------------------------------------------------------------------

    def _begin(self, stream: MuxedStream, raw: Any) -> None:
        self._carried[stream] = _Carried()
        if self._tasks is None:
            self._early.append((stream, raw))
        else:
            self._tasks.start_soon(self._carry, stream, raw)

    async def _carry(self, stream: MuxedStream, raw: Any) -> None:
        """Move bytes between the two until both have ended."""
        state = self._carried[stream]
        try:
            if raw is None:
                raw = await self._stock.open_stream()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._receive, stream, state, raw, nursery.cancel_scope)
                await self._send(stream, state, raw, nursery.cancel_scope)
        except* upstream.BaseLibp2pError as group:
            self.forget(stream)
            stream.lost(f"the stream was lost: {group.exceptions[0]}")
        except* Exception:
            # A mistake of ours, or of py-libp2p, that one peer has found must not cost all others their connections.
            logger.exception("a stream of %s failed", self.remote_peer)
            self._break("internal error")
        finally:
            del self._carried[stream]

    async def _receive(self, stream: MuxedStream, state: _Carried, raw: Any, both: trio.CancelScope) -> None:
        while True:
            while stream.receive_window <= 0:
                state.granted = trio.Event()
                await state.granted.wait()
            try:
                data = await raw.read(min(PIECE_BYTES, stream.receive_window))
            except (upstream.MuxedStreamEOF, upstream.MuxedStreamReset):
                if not raw.reset_received:
                    stream.fin_received()
                    return
                self.forget(stream)
                stream.lost("the other side reset the stream")
                both.cancel()
                return
            stream.receive_window -= len(data)
            stream.data_received(memoryview(data))

    async def _send(self, stream: MuxedStream, state: _Carried, raw: Any, both: trio.CancelScope) -> None:
        room = memoryview(bytearray(PIECE_BYTES))
        while True:
            state.wanted = trio.Event()
            if state.reset:
                await raw.reset()
                both.cancel()
                return
            urgency = stream.urgency()
            count = 0 if urgency is None else stream.pull(room, urgency)
            if count:
                await self._write(state, raw, bytes(room[:count]))
                stream.send_window += count
                stream.finish_if_drained()
                continue
            if state.finish:
                await raw.close()
                return
            await state.wanted.wait()

    @staticmethod
    async def _write(state: _Carried, raw: Any, data: bytes) -> None:
        """Write without ever asking for more than the window, which it would wait for in a way of its own."""
        while data and not state.reset:
            window = raw.send_window
            if window <= 0 and not raw.send_closed and not raw.closed:
                await trio.sleep(WINDOW_LOOK_S)
                continue
            await raw.write(data[: max(window, 1)])
            data = data[max(window, 1) :]

    # --- what our streams ask of their multiplexer -------------------------------------------------------------

    def open(self) -> MuxedStream:
        """See :meth:`Yamux.open`."""
        if self.lost:
            raise LinkError("the connection is gone", peer=self.remote_peer)
        if sum(not stream.inbound for stream in self._carried) >= MAX_OUTBOUND_STREAMS:
            raise LinkError(f"{MAX_OUTBOUND_STREAMS} streams are open", peer=self.remote_peer)
        stream = MuxedStream(self, self._next_id, inbound=False)
        self._next_id += 2
        self.streams[stream.id] = stream
        self._begin(stream, None)
        return stream

    def queue_control(self, kind: int, flags: int, stream_id: int, value: int) -> None:
        """A stream grants window, ends or resets; its tasks do it."""
        stream = self.streams.get(stream_id)
        state = self._carried.get(stream) if stream is not None else None
        if state is not None:
            state.finish = state.finish or bool(flags & FIN)
            state.reset = state.reset or bool(flags & RST)
            state.wake()

    def ready(self, stream: MuxedStream) -> None:
        """See :meth:`Yamux.ready`."""
        state = self._carried.get(stream)
        if state is not None:
            state.wanted.set()

    def ping(self, now: float) -> None:
        """See :meth:`Yamux.ping`; whatever comes next is taken for a sign of life, and no time is measured by it."""
        if self._ping_sent is None:
            self._ping_sent = now
            self._stock._ping_sent_time = now  # it takes any answer for that to its own ping
            self._pipe.queue(HEADER.pack(0, PING, SYN, 0, 0))

    def go_away(self, code: int = GO_AWAY_NORMAL) -> None:
        """See :meth:`Yamux.go_away`."""
        self._pipe.queue(HEADER.pack(0, GO_AWAY, 0, 0, code))

    def sweep(self, now: float) -> None:
        """See :meth:`Yamux.sweep`; and look at what py-libp2p keeps. Raises nothing: the connection is closed."""
        super().sweep(now)
        measured = self._stock.rtt()
        if measured and measured != self._measured and self.on_round_trip is not None:
            self._measured = measured
            self.on_round_trip(measured)
        waiting = self.buffered_bytes + sum(map(len, self._stock.stream_buffers.values()))
        if waiting > MAX_BUFFERED_BYTES:
            self.violations["oversize"] = self.violations.get("oversize", 0) + 1
            self._break(f"over {MAX_BUFFERED_BYTES} bytes wait unread on one connection")

    def lose(self, reason: str) -> None:
        """See :meth:`Yamux.lose`."""
        super().lose(reason)
        self._pipe.shut()
        self._scope.cancel()

    # --- the connection's side -----------------------------------------------------------------------------------

    def feed(self, data: memoryview) -> None:
        """See :meth:`Yamux.feed`."""
        self._ping_sent = None
        if self._pipe.feed(data) > MAX_BUFFERED_BYTES:
            raise WireError("oversize", f"over {MAX_BUFFERED_BYTES} bytes wait unread on one connection")

    def pull(self, room: memoryview) -> int:
        """See :meth:`Yamux.pull`; frames may be cut."""
        count = self._pipe.pull(room)
        self.exhausted = not self._pipe.waits
        return count

    def urgency(self) -> int | None:
        """See :meth:`Yamux.urgency`: which class is on its way cannot be told."""
        return int(Priority.PREFILL) if self._pipe.waits else None
