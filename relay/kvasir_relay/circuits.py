"""A circuit: two streams joined at the relay, without a task or a lock of its own.

Bytes that arrive on one stream are queued for the other in the reader's own task, and leave when the other
connection's writer has room; only then is the sender told that it may send as many again. So at most one window
(256 KiB at first) waits for a slow receiver in each direction, and a fast one costs one copy.

Nothing of what is carried can be read here: inside runs the Noise session of the two peers. What the relay can tell
is how much a flow carries, and it sends flows that carry little before those that carry much.

A circuit is one thing: whatever ends one of its streams, other than a proper half-close, ends the other, and no
other circuit of these peers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import trio

from kvasir_peer.net.yamux import USEFUL_ROOM_BYTES, MuxedStream, Priority
from kvasir_relay.limits import Ledger, LimitError
from kvasir_relay.shaper import Shaper, Shares

if TYPE_CHECKING:
    from kvasir_relay.counters import Counters

# A flow that stays under this rate, with bursts of no more than these bytes, goes before bulk. A ring of a large
# model sends 16 KB per token and hop, some hundred tokens a second at best; a prefill fills what the line gives.
SPARSE_BYTES_PER_SECOND = 2_000_000
SPARSE_BURST_BYTES = 128 * 1024

_DECODE, _PREFILL = int(Priority.DECODE), int(Priority.PREFILL)


class Flow:
    """One direction of a circuit: the sink of one stream, the source of the other.

    Attributes:
        queued: bytes that wait here.
        carried: bytes that arrived since the circuit began.
        pieces: in how many pieces they came; what each costs does not depend on its size.
        allowance: bytes that may leave; counts only while bandwidth is limited.
        shares: the bandwidth buckets that this flow draws from, or None when nothing is limited.
    """

    __slots__ = (
        "_bucket_level",
        "_bucket_time",
        "_circuit",
        "_direction",
        "_end",
        "_from",
        "_left",
        "_queue",
        "_sample",
        "_to",
        "allowance",
        "carried",
        "pieces",
        "queued",
        "shares",
    )

    def __init__(
        self, circuit: Circuit, origin: MuxedStream, destination: MuxedStream, direction: int
    ) -> None:
        self._circuit = circuit
        self._from = origin
        self._to = destination
        self._direction = direction
        self._queue: deque[memoryview] = deque()
        self._end = False
        self._bucket_level = 0.0
        self._bucket_time = 0.0
        self._sample: tuple[int, float] | None = None  # (bytes that had arrived before it, when it arrived)
        self._left = 0
        self.queued = 0
        self.carried = 0
        self.pieces = 0
        self.allowance = 0
        self.shares: Shares | None = None

    @property
    def sparse(self) -> bool:
        """Whether it carries little: it goes before bulk."""
        return self._bucket_level <= SPARSE_BURST_BYTES and self.queued <= SPARSE_BURST_BYTES

    # --- the sink of the stream that bytes come from -----------------------------------------------------------

    def receive(self, data: memoryview) -> None:
        """Bytes came."""
        if self._circuit.reason:
            return
        if self._to.closed:  # reset by its peer after a half-close, of which nobody is told
            self._circuit.end("peer_left")
            return
        n = len(data)
        now = time.perf_counter()
        spent = self._bucket_level - (now - self._bucket_time) * SPARSE_BYTES_PER_SECOND
        self._bucket_level = (spent if spent > 0 else 0.0) + n
        self._bucket_time = now
        if self._sample is None:
            self._sample = (self.carried, now)
        self.carried += n
        self.pieces += 1
        self.queued += n
        # A view keeps the whole encrypted message that it came in (up to 64 KiB) in memory: a small part of one is
        # copied, so that nobody makes the relay hold much more than his window.
        self._queue.append(data if 2 * n >= len(data.obj) else memoryview(bytes(data)))  # type: ignore[arg-type]
        if self._circuit.carry(n, self._direction):
            self._forward()

    def limit(self, shares: Shares | None) -> None:
        """Draw from these buckets from now on; None for no limit."""
        self.shares = shares
        self.allowance = 0
        if self.queued:
            self._forward()

    def _forward(self) -> None:
        if self.shares is not None and self.allowance <= 0:
            self._circuit.shaper.want(self)
        else:
            self._to.notify()

    def end(self, reason: str) -> None:
        """The stream that bytes come from has ended; "" when it did so properly."""
        if reason:
            self._circuit.end("peer_left")
            return
        self._end = True
        if not self.queued:
            self._finish()

    def _finish(self) -> None:
        self._to.finish()
        self._circuit.half_closed()

    # --- the source of the stream that bytes go to --------------------------------------------------------------

    def urgency(self) -> int | None:
        """Class of what waits, or None when nothing may be sent."""
        if not self.queued or (self.shares is not None and self.allowance <= 0):
            return None
        return _DECODE if self.sparse else _PREFILL

    def pull(self, room: memoryview) -> int:
        """Move bytes into ``room``."""
        limit = len(room)
        if limit < USEFUL_ROOM_BYTES and limit < self.queued:
            return 0
        if self.shares is not None:
            limit = min(limit, self.allowance)
        queue = self._queue
        count = 0
        while queue and count < limit:
            data = queue[0]
            n = len(data)
            if n <= limit - count:
                room[count : count + n] = data
                queue.popleft()
                count += n
            else:
                n = limit - count
                room[count:limit] = data[:n]
                queue[0] = data[n:]
                count = limit
        self.queued -= count
        self._circuit.buffers.release(count)
        self._left += count
        sample = self._sample
        if sample is not None and self._left > sample[0]:
            self._circuit.counters.waited(time.perf_counter() - sample[1])
            self._sample = None
        if self.shares is not None:
            self.allowance -= count
            if self.queued and self.allowance <= 0:
                self._circuit.shaper.want(self)
        self._from.consumed(count)
        if self._end and not self.queued:
            self._finish()
        return count

    def granted(self) -> None:
        """The shaper allowed some bytes."""
        self._to.notify()

    def drop(self) -> None:
        """Forget what is queued."""
        self._queue.clear()
        self._circuit.buffers.release(self.queued)
        self.queued = 0


TO_TARGET, TO_SOURCE = 0, 1


class Buffers:
    """Bytes that wait in all circuits, within a bound.

    Slow receivers make bytes wait, and windows grow on long lines. When all together are more than the bound, the
    circuit with the most waiting is ended: that is the one whose receiver stands still while its sender pours.

    Args:
        circuits: those that live.
        bound: bytes; 0 for none. May be changed.
    """

    def __init__(self, circuits: Collection[Circuit], bound: int) -> None:
        self._circuits = circuits
        self.bound = bound
        self.held = 0

    def take(self, n: int) -> None:
        """``n`` more bytes wait."""
        self.held += n
        if self.bound and self.held > self.bound:
            largest = max(self._circuits, key=lambda circuit: circuit.queued, default=None)
            if largest is not None:
                largest.end("buffer_bytes")

    def release(self, n: int) -> None:
        """``n`` bytes have left, or were dropped."""
        self.held -= n


class Circuit:
    """Two joined streams.

    Args:
        peers: source and target, as bytes; the same peer once only. The first sends ``flows[0]``, the last
            ``flows[1]``.
        source, target: their streams, past all negotiation.
        ledger, shaper, counters, buffers: the relay's books.
        max_bytes: both directions together; 0 for no limit.
        on_end: called once, with the reason: ``closed`` when both sides ended properly.

    Attributes:
        active_at: when something was carried last, trio time.
        reason: why it ended, or "" while it lives.
    """

    def __init__(
        self,
        peers: tuple[bytes, ...],
        source: MuxedStream,
        target: MuxedStream,
        *,
        ledger: Ledger,
        shaper: Shaper,
        counters: Counters,
        buffers: Buffers,
        max_bytes: int,
        on_end: Callable[[Circuit], None],
    ) -> None:
        self.peers = peers
        self.shaper = shaper
        self.counters = counters
        self.buffers = buffers
        self.reason = ""
        self.ended = trio.Event()
        self.active_at = trio.current_time()
        self._ledger = ledger
        self._streams = (source, target)
        self._max_bytes = max_bytes
        self._open_halves = 2
        self._on_end = on_end
        self.flows = (
            Flow(self, source, target, TO_TARGET),
            Flow(self, target, source, TO_SOURCE),
        )
        self._shares: Shares | None = None

    def join(self) -> None:
        """Begin to carry. What has come on the streams already is carried first."""
        self.reshape()
        source, target = self._streams
        to_target, to_source = self.flows
        target.set_source(to_target, classed=False)
        source.set_source(to_source, classed=False)
        source.set_sink(to_target.receive, to_target.end)
        if not self.reason:
            target.set_sink(to_source.receive, to_source.end)

    def reshape(self) -> None:
        """Bandwidth limits came or went while the circuit lives."""
        if self.shaper.active == (self._shares is not None):
            return
        if self._shares is None:
            self._shares = self.shaper.join(self.peers, trio.current_time())
        else:
            self.shaper.leave(self._shares, *self.flows)
            self._shares = None
        for flow in self.flows:
            flow.limit(self._shares)

    @property
    def carried(self) -> int:
        """Bytes, both directions together."""
        return self.flows[0].carried + self.flows[1].carried

    @property
    def queued(self) -> int:
        """Bytes that wait here, both directions together."""
        return self.flows[0].queued + self.flows[1].queued

    def carry(self, n: int, direction: int) -> bool:
        """Count bytes that arrived; False when they ended the circuit, because a limit is used up."""
        now = trio.current_time()
        self.active_at = now
        self.counters.carried(direction, n)
        self.buffers.take(n)
        try:
            self._ledger.carry(self.peers, n, now)
        except LimitError as error:
            self.end(error.limit)
            return False
        if self._max_bytes and self.carried > self._max_bytes:
            self.end("circuit_bytes")
        return not self.reason

    def half_closed(self) -> None:
        """One direction has ended properly and everything in it is on its way."""
        self._open_halves -= 1
        if not self._open_halves:
            self.end("closed")

    def end(self, reason: str) -> None:
        """End both streams; a second time does nothing.

        After a proper end of both directions the streams are done anyway; in all other cases both are reset, with
        nothing written into them, so that no peer can take a word of the relay for the other peer's data.
        """
        if self.reason:
            return
        self.reason = reason
        if reason != "closed":
            for stream in self._streams:
                stream.reset(reason)
        for flow in self.flows:
            flow.drop()
        if self._shares is not None:
            self.shaper.leave(self._shares, *self.flows)
            for flow in self.flows:
                flow.shares = None
        self.ended.set()
        self._on_end(self)
