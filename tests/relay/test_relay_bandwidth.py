"""Bandwidth is limited, shared fairly, and small messages do not wait behind large ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import trio
from helpers_relay import joined, joined_circuit, make_config, receive, running_relay, until
from hypothesis import given
from hypothesis import strategies as st

from kvasir_peer.net.yamux import DATA, HEADER_BYTES, MuxedStream, Yamux
from kvasir_relay.buckets import RateTable, TokenBucket
from kvasir_relay.circuits import SPARSE_BURST_BYTES, SPARSE_BYTES_PER_SECOND, Buffers, Circuit
from kvasir_relay.config import Bandwidth, Limits
from kvasir_relay.counters import Counters
from kvasir_relay.limits import Ledger
from kvasir_relay.shaper import QUANTUM_BYTES, Shaper, Shares

# --- buckets -----------------------------------------------------------------------------------------------------


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(100, 50, now=0.0)
    assert bucket.take(50, 0.0)
    assert not bucket.take(1, 0.0)
    assert bucket.wait(10, 0.0) == pytest.approx(0.1)
    assert not bucket.take(10, 0.09)
    assert bucket.take(10, 0.1)
    assert bucket.level(1000.0) == 50


def test_more_than_a_burst_is_taken_from_a_full_bucket_and_paid_off() -> None:
    bucket = TokenBucket(100, 50, now=0.0)
    assert bucket.take(150, 0.0)
    assert bucket.level(0.0) == -100
    assert bucket.wait(1, 0.0) == pytest.approx(1.01)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 200)), min_size=1, max_size=200))
def test_a_bucket_never_gives_more_than_burst_and_rate(steps: list[tuple[float, int]]) -> None:
    bucket = TokenBucket(100, 200, now=0.0)
    now, given_out = 0.0, 0
    for pause, n in steps:
        now += pause
        if bucket.take(n, now):
            given_out += n
    assert given_out <= 200 + 100 * now + 1e-6


def test_a_rate_table_stays_within_its_capacity() -> None:
    table = RateTable(per_minute=60, burst=2, capacity=100)
    for key in range(1000):
        assert table.take(key, 0.0)
    assert table.statistics().keys <= 100
    assert table.take(999, 0.0)
    assert not table.take(999, 0.0)
    assert table.take("after a while the full ones are forgotten", 100.0)
    assert table.statistics().keys == 1


# --- the shaper, in virtual time ---------------------------------------------------------------------------------


@dataclass(eq=False)
class SomeFlow:
    """A flow with ``want`` bytes always waiting, or one message now and then."""

    shaper: Shaper
    shares: Shares | None
    queued: int
    sparse: bool = False
    bulk: bool = True
    allowance: int = 0
    sent: int = 0
    log: list[float] = field(default_factory=list)

    def granted(self) -> None:
        n = min(self.allowance, self.queued)
        self.allowance -= n
        self.sent += n
        if not self.bulk:
            self.queued -= n
        if self.queued:
            self.shaper.want(self)


def run_until(shaper: Shaper, now: float, end: float) -> float:
    """Give turns as the clock would."""
    while now < end:
        wait = shaper.turn(now)
        if wait is None:
            return end
        now += max(wait, 1e-6)
    return now


def test_the_total_is_shared_evenly_by_circuits_of_any_number_of_peers() -> None:
    shaper = Shaper(Bandwidth(total=1_000_000), 0.0)
    flows = []
    for number in range(10):
        peers = (b"greedy", bytes([number])) if number < 8 else (bytes([number]), bytes([99 - number]))
        flow = SomeFlow(shaper, shaper.join(peers, 0.0), queued=1 << 30)
        shaper.want(flow)
        flows.append(flow)
    run_until(shaper, 0.0, 10.0)
    sent = [flow.sent for flow in flows]
    assert sum(sent) == pytest.approx(10_000_000 + 250_000, rel=0.02)
    assert min(sent) >= 0.95 * sum(sent) / len(sent)


def test_a_circuit_that_wants_less_leaves_the_rest_to_the_others() -> None:
    shaper = Shaper(Bandwidth(total=1_000_000), 0.0)
    large = [SomeFlow(shaper, shaper.join((bytes([n]),), 0.0), queued=1 << 30) for n in range(2)]
    for flow in large:
        shaper.want(flow)
    small = SomeFlow(shaper, shaper.join((b"s",), 0.0), queued=0, bulk=False)
    now = 0.0
    for _ in range(100):  # 1 KB every 0.1 s: a hundredth of the total
        small.queued += 1000
        shaper.want(small)
        now = run_until(shaper, now, now + 0.1)
    assert small.sent == 100_000
    assert min(flow.sent for flow in large) > 0.45 * 10_000_000


def test_a_sparse_flow_waits_for_one_quantum_and_not_for_the_queue() -> None:
    shaper = Shaper(Bandwidth(total=1_000_000), 0.0)
    for number in range(50):
        shaper.want(SomeFlow(shaper, shaper.join((bytes([number]),), 0.0), queued=1 << 30))
    now = run_until(shaper, 0.0, 2.0)
    small = SomeFlow(shaper, shaper.join((b"s",), 0.0), queued=1000, sparse=True, bulk=False)
    shaper.want(small)
    start = now
    while small.queued:
        wait = shaper.turn(now)
        assert wait is not None
        now += max(wait, 1e-6)
    assert now - start <= 2 * QUANTUM_BYTES / 1_000_000


def test_limits_of_circuit_and_peer_hold_together() -> None:
    shaper = Shaper(Bandwidth(total=0, peer=300_000, circuit=200_000, burst_time=0.1), 0.0)
    one = SomeFlow(shaper, shaper.join((b"a", b"b"), 0.0), queued=1 << 30)
    two = SomeFlow(shaper, shaper.join((b"a", b"c"), 0.0), queued=1 << 30)
    alone = SomeFlow(shaper, shaper.join((b"d", b"e"), 0.0), queued=1 << 30)
    for flow in (one, two, alone):
        shaper.want(flow)
    run_until(shaper, 0.0, 10.0)
    assert one.sent + two.sent == pytest.approx(3_000_000, rel=0.05)
    assert min(one.sent, two.sent) > 0.45 * (one.sent + two.sent)
    assert alone.sent == pytest.approx(2_000_000, rel=0.05)


def test_what_ends_leaves_nothing_behind() -> None:
    shaper = Shaper(Bandwidth(total=1000, peer=1000), 0.0)
    shares = shaper.join((b"a", b"b"), 0.0)
    flow = SomeFlow(shaper, shares, queued=1 << 20)
    shaper.turn(0.0)
    shaper.want(flow)
    shaper.turn(0.0)
    shaper.leave(shares, flow)
    assert shaper.turn(1.0) is None
    statistics = shaper.statistics()
    assert (statistics.waiting, statistics.peers) == (0, 0)


def test_new_limits_hold_for_what_runs() -> None:
    shaper = Shaper(Bandwidth(total=1_000_000), 0.0)
    flow = SomeFlow(shaper, shaper.join((b"a",), 0.0), queued=1 << 30)
    shaper.want(flow)
    now = run_until(shaper, 0.0, 5.0)
    before = flow.sent
    shaper.change(Bandwidth(total=100_000), now)
    run_until(shaper, now, now + 5.0)
    assert flow.sent - before == pytest.approx(500_000, rel=0.15)


# --- the relay ---------------------------------------------------------------------------------------------------


async def pour(stream: MuxedStream) -> None:
    while True:
        await stream.send_all(bytes(32 * 1024))


async def count(stream: MuxedStream, into: list[int], number: int) -> None:
    while data := await stream.receive_some(1 << 20):
        into[number] += len(data)


@pytest.mark.parametrize("limit", ["total", "peer", "circuit"])
async def test_the_rate_of_real_circuits(limit: str) -> None:
    rate, seconds = 2_000_000, 0.8
    limits = {f"bandwidth__{limit}": rate, "bandwidth__burst_time": "50ms"}
    async with running_relay(**limits) as relay, joined(relay, 3) as (a, b, c):
        got = [0, 0]
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number, target in enumerate((b, c)):
                near, far = await joined_circuit(a, target)
                nursery.start_soon(pour, near)
                nursery.start_soon(count, far, got, number)
            await trio.sleep(seconds)
            took = trio.current_time() - start
            nursery.cancel_scope.cancel()
        allowed = rate * (took + 0.05) + 2 * QUANTUM_BYTES
        if limit == "circuit":
            assert max(got) <= allowed
            assert sum(got) > rate * seconds, "two circuits together have more than one"
        else:
            assert sum(got) <= allowed
            assert sum(got) > rate * seconds / 4, "far below what is allowed"
        if limit == "total":
            assert min(got) > 0.7 * sum(got) / 2


async def test_small_messages_pass_bulk_when_bandwidth_is_short() -> None:
    async with running_relay(bandwidth__total=1_000_000) as relay, joined(relay, 4) as (a, b, c, d):
        got = [0]
        async with trio.open_nursery() as nursery:
            near, far = await joined_circuit(a, b)
            nursery.start_soon(pour, near)
            nursery.start_soon(count, far, got, 0)
            small, small_far = await joined_circuit(c, d)
            await trio.sleep(0.5)
            times = []
            for _ in range(10):
                start = trio.current_time()
                await small.send_all(bytes(1000))
                await receive(small_far, 1000)
                times.append(trio.current_time() - start)
                await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
        assert got[0] > 300_000, "bulk stood still"
        # A window of bulk (256 KiB) waits for its turn all the time: behind it, each message would take 260 ms.
        assert sorted(times)[5] < 0.13


async def test_flows_are_told_apart_by_what_they_carry() -> None:
    async with running_relay() as relay, joined(relay, 2) as (a, b):
        near, far = await joined_circuit(a, b)
        [circuit] = relay.hop.circuits
        up, down = circuit.flows
        for _ in range(5):
            await near.send_all(bytes(1000))
            await receive(far, 1000)
        assert up.sparse
        total = SPARSE_BURST_BYTES * 4
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(near.send_all, bytes(total))
            await receive(far, total)
        if total - (trio.current_time() - start) * SPARSE_BYTES_PER_SECOND > SPARSE_BURST_BYTES:
            assert not up.sparse
        assert down.sparse


async def test_reload_changes_the_rate_of_live_circuits() -> None:
    async with running_relay() as relay, joined(relay, 2) as (a, b):
        listen = list(relay.config.listen)
        near, far = await joined_circuit(a, b)
        got = [0]

        async def passed(n: int) -> None:
            before = got[0]
            await until(lambda: got[0] >= before + n)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pour, near)
            nursery.start_soon(count, far, got, 0)
            await passed(5_000_000)
            relay.reload(make_config(listen=listen, bandwidth__total=200_000), frozenset())
            await passed(SPARSE_BURST_BYTES)
            before, start = got[0], trio.current_time()
            await trio.sleep(0.5)
            assert got[0] - before <= 200_000 * (trio.current_time() - start + 0.25) + 256 * 1024
            relay.reload(make_config(listen=listen, bandwidth__total=300_000), frozenset())
            assert relay.statistics().shaper.peers == 2
            relay.reload(make_config(listen=listen), frozenset())
            await passed(5_000_000)
            assert relay.statistics().shaper.peers == 0
            nursery.cancel_scope.cancel()


async def test_a_small_message_overtakes_bulk_on_the_way_to_the_same_peer() -> None:
    """Both wait for one slow connection; the relay cannot read them, but it can tell how much each carries."""
    connections = [
        Yamux(remote_peer=name, initiator=False, on_stream=lambda _: None, on_writable=lambda: None)
        for name in ("bulk", "small", "slow receiver")
    ]
    bulk_from, small_from, to = connections
    room = memoryview(bytearray(65519))
    living: set[Circuit] = set()
    flows, targets = [], []
    for number, origin in enumerate((bulk_from, small_from)):
        target = to.open()
        circuit = Circuit(
            (bytes([number]), b"receiver"),
            origin.open(),
            target,
            ledger=Ledger(Limits(), 0.0),
            shaper=Shaper(Bandwidth(), 0.0),
            counters=Counters(),
            buffers=Buffers(living, 0),
            max_bytes=0,
            on_end=lambda _: None,
        )
        circuit.join()
        flows.append(circuit.flows[0])
        targets.append(target)
    to.pull(room[: 2 * HEADER_BYTES])  # that the streams were opened
    flows[0].receive(memoryview(bytes(200_000)))
    flows[1].receive(memoryview(bytes(1000)))
    assert not flows[0].sparse
    to.pull(room)
    kind, stream, length = room[1], int.from_bytes(room[4:8], "big"), int.from_bytes(room[8:12], "big")
    assert (kind, stream, length) == (DATA, targets[1].id, 1000)
    second = HEADER_BYTES + 1000
    assert int.from_bytes(room[second + 4 : second + 8], "big") == targets[0].id
    assert flows[0].queued == 200_000 - (65519 - second - HEADER_BYTES)


def test_an_empty_shaper_has_nothing_to_wait_for() -> None:
    assert Shaper(Bandwidth(), 0.0).turn(math.pi) is None
