"""Bandwidth limits, shared fairly. The decisions are pure; :meth:`Shaper.run` is the clock that drives them.

Each direction of a circuit is a flow. A flow that has bytes waiting asks for an allowance; the shaper grants them in
turn, a quantum at a time, as the token buckets of the circuit, of its two peers and of the whole relay allow. Flows
that carry little (:attr:`Flow.sparse`) are served before those that carry bulk, so that a decode message does not
wait behind somebody's prefill (the idea of fq_codel, RFC 8290, section 4.2).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import trio

from kvasir_relay.buckets import TokenBucket
from kvasir_relay.config import Bandwidth

QUANTUM_BYTES = (
    16 * 1024
)  # one turn of a flow: below it the cost of a message is felt, above it the wait for others
QUANTUM_SECONDS = 0.002  # at high rates a turn is this long instead, so that the timer is not what limits


class Flow(Protocol):
    """One direction of a circuit, as the shaper sees it."""

    queued: int
    allowance: int
    shares: Shares | None

    @property
    def sparse(self) -> bool:
        """Whether it carries little."""

    def granted(self) -> None:
        """The allowance grew."""


class Shares:
    """The buckets that a circuit draws from: its own, and those of its one or two peers."""

    __slots__ = ("buckets", "peers")

    def __init__(self, peers: tuple[bytes, ...], buckets: tuple[TokenBucket, ...]) -> None:
        self.peers = peers
        self.buckets = buckets


@dataclass(slots=True)
class _PeerBucket:
    bucket: TokenBucket
    circuits: int


@dataclass(frozen=True, slots=True)
class ShaperStatistics:
    """What the shaper does.

    Attributes:
        waiting: flows that have bytes and no allowance.
        peers: peers with a bucket of their own.
        granted_bytes: granted since the start.
    """

    waiting: int
    peers: int
    granted_bytes: int


class Shaper:
    """All bandwidth limits of a relay.

    Args:
        bandwidth: the limits.
        now: seconds, a clock that never goes back.
    """

    def __init__(self, bandwidth: Bandwidth, now: float) -> None:
        self._bandwidth = bandwidth
        self._total = TokenBucket(bandwidth.total, self._burst(bandwidth.total), now)
        self._peers: dict[bytes, _PeerBucket] = {}
        self._circuits: set[TokenBucket] = set()
        self._waiting: tuple[deque[Flow], deque[Flow]] = (deque(), deque())  # sparse, bulk
        self._members: set[Flow] = set()
        self._granted = 0
        self._wanted = trio.Event()

    def _burst(self, rate: float) -> float:
        return rate * self._bandwidth.burst_time

    @property
    def active(self) -> bool:
        """Whether anything is limited."""
        return bool(self._bandwidth.total or self._bandwidth.peer or self._bandwidth.circuit)

    def change(self, bandwidth: Bandwidth, now: float) -> None:
        """New limits, for live circuits too."""
        self._bandwidth = bandwidth
        self._total.change(bandwidth.total, self._burst(bandwidth.total), now)
        for held in self._peers.values():
            held.bucket.change(bandwidth.peer, self._burst(bandwidth.peer), now)
        for bucket in self._circuits:
            bucket.change(bandwidth.circuit, self._burst(bandwidth.circuit), now)
        self._wanted.set()

    def join(self, peers: tuple[bytes, ...], now: float) -> Shares:
        """A circuit between these peers (each named once) begins."""
        rates = self._bandwidth
        own = TokenBucket(rates.circuit, self._burst(rates.circuit), now)
        self._circuits.add(own)
        buckets = [own]
        for peer in peers:
            held = self._peers.get(peer)
            if held is None:
                held = _PeerBucket(TokenBucket(rates.peer, self._burst(rates.peer), now), 0)
                self._peers[peer] = held
            held.circuits += 1
            buckets.append(held.bucket)
        return Shares(peers, tuple(buckets))

    def leave(self, shares: Shares, *flows: Flow) -> None:
        """The circuit of these flows has ended."""
        self._circuits.discard(shares.buckets[0])
        for peer in shares.peers:
            held = self._peers[peer]
            held.circuits -= 1
            if not held.circuits:
                del self._peers[peer]
        for flow in flows:
            if flow in self._members:
                self._members.discard(flow)
                for queue in self._waiting:
                    if flow in queue:
                        queue.remove(flow)

    def want(self, flow: Flow) -> None:
        """The flow has bytes waiting and no allowance left."""
        if flow not in self._members:
            self._members.add(flow)
            self._waiting[0 if flow.sparse else 1].append(flow)
            self._wanted.set()

    def turn(self, now: float) -> float | None:
        """Grant what can be granted now.

        Returns:
            seconds after which another turn can grant something, or None when no flow waits.
        """
        soonest = math.inf
        for queue in self._waiting:
            for _ in range(len(queue)):
                flow = queue[0]
                wait = self._grant(flow, now)
                if wait < 0:  # the relay as a whole has no tokens: nobody else has a turn either
                    return -wait
                queue.popleft()
                if wait:
                    soonest = min(soonest, wait)
                    queue.append(flow)
                else:
                    self._members.discard(flow)
                    flow.granted()  # asks again, for another turn, if it has more
        if self._members:
            # Those that asked again while being served have their turn at once.
            return 0.0 if math.isinf(soonest) else soonest
        return None

    def _grant(self, flow: Flow, now: float) -> float:
        """0 when granted; seconds to wait otherwise, negative when it is the relay's own bucket that is empty."""
        shares = flow.shares
        buckets = shares.buckets if shares is not None else ()
        rates = [bucket.rate for bucket in (*buckets, self._total) if bucket.rate]
        quantum = QUANTUM_BYTES
        if rates:
            quantum = max(quantum, int(min(rates) * QUANTUM_SECONDS))
        n = min(quantum, flow.queued)
        total = self._total.wait(n, now)
        if total:
            return -total
        wait = max((bucket.wait(n, now) for bucket in buckets), default=0.0)
        if wait:
            return wait
        for bucket in (*buckets, self._total):
            bucket.take(n, now)
        flow.allowance += n
        self._granted += n
        return 0.0

    async def run(self) -> None:
        """Give turns for ever."""
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            wait = self.turn(trio.current_time())
            while wait is not None:
                await trio.sleep(wait)
                wait = self.turn(trio.current_time())

    def statistics(self) -> ShaperStatistics:
        """A snapshot."""
        return ShaperStatistics(len(self._members), len(self._peers), self._granted)
