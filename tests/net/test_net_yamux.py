"""The multiplexer alone: bytes in, bytes out."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import trio
import trio.testing
from helpers_net import pattern

from kvasir_peer.errors import LinkError, WireError
from kvasir_peer.net import yamux
from kvasir_peer.net.yamux import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    PING,
    RST,
    SYN,
    WINDOW_UPDATE,
    MuxedStream,
    Yamux,
)

ROOM = 65519


def mux(*, initiator: bool = True, **options: object) -> tuple[Yamux, list[MuxedStream]]:
    inbound: list[MuxedStream] = []
    made = Yamux(
        remote_peer="other",
        initiator=initiator,
        on_stream=inbound.append,
        on_writable=lambda: None,
        **options,
    )
    return made, inbound


def pulled(source: Yamux, room: int = ROOM) -> bytes:
    buffer = memoryview(bytearray(room))
    return bytes(buffer[: source.pull(buffer)])


def frames(data: bytes) -> list[tuple[int, int, int, int, bytes]]:
    """(type, flags, stream, length, payload) of each frame."""
    found = []
    position = 0
    while position < len(data):
        version, kind, flags, stream, length = HEADER.unpack_from(data, position)
        assert version == 0
        position += HEADER.size
        body = length if kind == DATA else 0
        found.append((kind, flags, stream, length, data[position : position + body]))
        position += body
    return found


def join(a: Yamux, b: Yamux, cut: Callable[[], int] = lambda: ROOM) -> None:
    """Move bytes both ways until there are none, in pieces of ``cut()``."""
    while True:
        moved = False
        for source, target in ((a, b), (b, a)):
            data = pulled(source)
            moved = moved or bool(data)
            while data:
                size = cut()
                target.feed(memoryview(data[:size]))
                data = data[size:]
        if not moved:
            return


async def test_exact_bytes_of_a_stream_s_life() -> None:
    near, _ = mux()
    stream = near.open()
    stream.send_nowait(b"hello")
    stream.finish()
    assert frames(pulled(near)) == [
        (WINDOW_UPDATE, SYN, 1, 0, b""),
        (DATA, 0, 1, 5, b"hello"),
    ]
    assert frames(pulled(near)) == [(WINDOW_UPDATE, FIN, 1, 0, b"")]
    far, inbound = mux(initiator=False)
    far.feed(memoryview(HEADER.pack(0, DATA, SYN | FIN, 1, 2) + b"ab"))
    assert frames(pulled(far)) == [(WINDOW_UPDATE, ACK, 1, 0, b"")]
    assert await inbound[0].receive_some() == b"ab"
    assert await inbound[0].receive_some() == b""
    inbound[0].close()
    assert frames(pulled(far)) == [(WINDOW_UPDATE, FIN, 1, 0, b"")]
    assert not far.streams


async def test_streams_of_both_sides_have_odd_and_even_numbers() -> None:
    near, near_in = mux()
    far, far_in = mux(initiator=False)
    assert [near.open().id for _ in range(2)] == [1, 3]
    assert [far.open().id for _ in range(2)] == [2, 4]
    join(near, far)
    assert [s.id for s in near_in] == [2, 4]
    assert [s.id for s in far_in] == [1, 3]


async def test_bytes_arrive_whole_however_they_are_cut() -> None:
    rng = random.Random(7)
    near, _ = mux()
    far, inbound = mux(initiator=False)
    sent = [pattern(rng.randrange(1, 200_000)) for _ in range(5)]
    streams = [near.open() for _ in sent]
    for stream, data in zip(streams, sent, strict=True):
        stream.send_nowait(data)
    received = [bytearray() for _ in sent]
    for _ in range(20):
        join(near, far, lambda: rng.choice((1, 5, 11, 12, 13, 700, 70_000)))
        for stream, into in zip(inbound, received, strict=True):
            while stream.statistics().bytes_buffered:
                into += await stream.receive_some(rng.randrange(1, 90_000))
        if [len(into) for into in received] == [len(data) for data in sent]:
            break
    assert [bytes(into) for into in received] == sent


async def test_a_sender_stops_at_the_window_and_goes_on_when_it_opens() -> None:
    near, _ = mux()
    far, inbound = mux(initiator=False)
    stream = near.open()
    data = pattern(1_000_000)
    stream.send_nowait(data)
    join(near, far)
    assert 0 <= yamux.INITIAL_WINDOW_BYTES - far.buffered_bytes < yamux.USEFUL_ROOM_BYTES
    received = bytearray()
    while len(received) < len(data):
        received += await inbound[0].receive_some()
        join(near, far)
    assert received == data


async def test_more_than_the_window_closes_the_connection() -> None:
    far, _ = mux(initiator=False)
    far.feed(
        memoryview(
            HEADER.pack(0, DATA, SYN, 1, yamux.INITIAL_WINDOW_BYTES) + bytes(yamux.INITIAL_WINDOW_BYTES)
        )
    )
    with pytest.raises(WireError) as caught:
        far.feed(memoryview(HEADER.pack(0, DATA, 0, 1, 1)))
    assert caught.value.code == "window"


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (HEADER.pack(1, DATA, SYN, 1, 0), "malformed"),
        (HEADER.pack(0, 9, 0, 1, 0), "malformed"),
        (HEADER.pack(0, DATA, SYN, 1, 16 * 1024 * 1024), "window"),
        (HEADER.pack(0, DATA, 0, 7, 10), "unexpected"),
        (HEADER.pack(0, DATA, SYN, 2, 0), "unexpected"),
        (HEADER.pack(0, DATA, SYN, 0, 0), "unexpected"),
        (HEADER.pack(0, DATA, SYN, 1, 0) * 2, "unexpected"),
        (
            HEADER.pack(0, WINDOW_UPDATE, SYN, 1, 0) + HEADER.pack(0, WINDOW_UPDATE, 0, 1, 0xFFFFFFFF) * 2,
            "window",
        ),
        (HEADER.pack(0, GO_AWAY, 0, 0, 1), "closed"),
    ],
    ids=[
        "version",
        "type",
        "length",
        "never-opened",
        "parity",
        "zero",
        "twice",
        "window-overflow",
        "go-away",
    ],
)
async def test_broken_frames_close_the_connection(frame: bytes, code: str) -> None:
    far, _ = mux(initiator=False)
    with pytest.raises(WireError) as caught:
        far.feed(memoryview(frame))
    assert caught.value.code == code


async def test_more_inbound_streams_than_allowed_are_reset_and_places_come_back() -> None:
    near, _ = mux()
    far, inbound = mux(initiator=False, max_inbound_streams=3)
    streams = [near.open() for _ in range(5)]
    join(near, far)
    assert len(inbound) == 3
    assert [s.closed for s in streams] == [False, False, False, True, True]
    with pytest.raises(LinkError):
        await streams[4].receive_some()
    inbound[0].reset()
    streams.append(near.open())
    join(near, far)
    assert len(inbound) == 4 and not streams[-1].closed


async def test_urgent_bytes_go_first_and_bulk_takes_turns() -> None:
    near, _ = mux()
    bulk = [near.open() for _ in range(2)]
    for stream in bulk:
        stream.priority = yamux.Priority.WEIGHTS
        stream.send_nowait(bytes(100_000))
    pulled(near)
    urgent = near.open()
    urgent.priority = yamux.Priority.DECODE
    urgent.send_nowait(b"now")
    order = [frame[2] for frame in frames(pulled(near)) if frame[0] == DATA]
    assert order[0] == urgent.id
    turns = []
    while data := pulled(near, 20_000):
        turns += [frame[2] for frame in frames(data) if frame[0] == DATA]
    assert max(turns[:4].count(stream.id) for stream in bulk) <= 3


async def test_a_stream_that_changes_class_gets_no_more_turns_than_others() -> None:
    near, _ = mux()
    one, other = near.open(), near.open()
    for round_ in range(50):
        for stream in (one, other):
            stream.priority = yamux.Priority.PREFILL
            stream.send_nowait(bytes(600))
        one.priority = yamux.Priority(round_ % 4)
        near.ready(one)
        pulled(near, 1300)
    entries = sum(queue.count(one) for queue in near._ready)
    assert entries <= yamux.CLASSES


async def test_cancelled_writes_queue_nothing_and_break_nothing() -> None:
    near, _ = mux()
    far, inbound = mux(initiator=False)
    stream = near.open()
    await stream.send_all(bytes(yamux.SEND_QUEUE_BYTES))
    for _ in range(20):
        with trio.move_on_after(0.001) as scope:
            await stream.send_all(b"never sent")
        assert scope.cancelled_caught
    received = bytearray()
    join(near, far)
    while len(received) < yamux.SEND_QUEUE_BYTES:
        received += await inbound[0].receive_some()
        join(near, far)
    await stream.send_all(b"sent")
    join(near, far)
    assert await inbound[0].receive_some() == b"sent"
    assert not any(received)


async def test_reset_ends_both_sides_with_a_reason() -> None:
    near, _ = mux()
    far, inbound = mux(initiator=False)
    stream = near.open()
    stream.send_nowait(b"x")
    join(near, far)
    inbound[0].reset("no thanks")
    join(near, far)
    with pytest.raises(LinkError, match="reset"):
        await stream.receive_some()
    with pytest.raises(LinkError, match="no thanks"):
        await inbound[0].send_all(b"y")
    assert not near.streams and not far.streams


async def test_data_for_a_closed_stream_resets_it_and_costs_no_memory() -> None:
    near, _ = mux()
    far, inbound = mux(initiator=False)
    stream = near.open()
    join(near, far)
    inbound[0].close()
    stream.send_nowait(bytes(300_000))
    join(near, far)
    assert far.buffered_bytes == 0
    assert stream.closed and not far.streams


async def test_an_end_that_never_comes_is_not_waited_for_for_ever(
    autojump_clock: trio.testing.MockClock,
) -> None:
    near, _ = mux()
    far, inbound = mux(initiator=False)
    near.open()
    join(near, far)
    inbound[0].close()
    far.sweep(trio.current_time())
    assert far.streams
    await trio.sleep(yamux.LINGER_S + 1)
    far.sweep(trio.current_time())
    assert not far.streams


async def test_pings_are_answered_and_matched_by_value(autojump_clock: trio.testing.MockClock) -> None:
    near, _ = mux()
    far, _ = mux(initiator=False)
    near.ping(trio.current_time())
    (ping,) = frames(pulled(near))
    await trio.sleep(0.5)
    near.feed(memoryview(HEADER.pack(0, PING, ACK, 0, ping[3] + 1)))
    assert near.min_round_trip is None
    far.feed(memoryview(HEADER.pack(0, PING, SYN, 0, ping[3])))
    near.feed(memoryview(pulled(far)))
    assert near.min_round_trip == pytest.approx(0.5)
    assert near.ping_since is None


async def test_pings_without_end_close_the_connection() -> None:
    far, _ = mux(initiator=False)
    with pytest.raises(WireError) as caught:
        for _ in range(3):
            far.feed(memoryview(HEADER.pack(0, PING, SYN, 0, 1) * 10_000))
    assert caught.value.code == "flood"


async def test_the_window_grows_with_rate_and_round_trip_and_little_below_a_millisecond(
    autojump_clock: trio.testing.MockClock,
) -> None:
    for round_trip, least, most in (
        (0.0005, yamux.INITIAL_WINDOW_BYTES, yamux.SHORT_WINDOW_BYTES),
        (0.04, 4 * yamux.INITIAL_WINDOW_BYTES, yamux.MAX_WINDOW_BYTES),
    ):
        near, _ = mux()
        far, inbound = mux(initiator=False)
        far.min_round_trip, far.round_trips_seen = round_trip, 9
        stream = near.open()
        stream.send_nowait(bytes(8_000_000))
        for _ in range(200):
            join(near, far)
            while inbound[0].statistics().bytes_buffered:
                await inbound[0].receive_some()
            await trio.sleep(0.004)
        assert least <= inbound[0].target_window <= most


async def test_a_window_grows_though_bulk_leaves_a_part_of_it_free_and_grants_are_late(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """On a long line a window of which just under half came in each round trip never grew: 3 MB/s of 40."""
    near, _ = mux()
    far, inbound = mux(initiator=False)
    far.min_round_trip, far.round_trips_seen = 0.04, 9
    stream = near.open()
    stream.set_source(Endless(), classed=True)
    stream.notify()
    for _ in range(20):
        while data := pulled(near, 65_519 - 12):
            far.feed(memoryview(data))
        await trio.sleep(0.02)
        for received in inbound:
            while received.statistics().bytes_buffered:
                await received.receive_some()
        while data := pulled(far):
            near.feed(memoryview(data))
        await trio.sleep(0.02)
    assert inbound[0].target_window > 4 * yamux.INITIAL_WINDOW_BYTES


class Endless:
    """A source that always has bulk, and does not cut it to crumbs."""

    def urgency(self) -> int:
        return int(yamux.Priority.PREFILL)

    def pull(self, room: memoryview) -> int:
        return len(room) if len(room) >= 256 else 0


@pytest.mark.parametrize("short", [True, False])
async def test_little_bulk_is_on_its_way_while_decode_messages_use_a_short_line(
    short: bool, autojump_clock: trio.testing.MockClock
) -> None:
    near, _ = mux()
    far, inbound = mux(initiator=False)
    near.min_round_trip = 0.0005 if short else 0.02
    bulk, urgent = near.open(), near.open()
    urgent.priority = yamux.Priority.DECODE
    bulk.set_source(Endless(), classed=True)
    bulk.notify()
    join(near, far)
    alone = yamux.INITIAL_WINDOW_BYTES - yamux.RESERVE_BYTES
    assert alone - far.buffered_bytes < yamux.USEFUL_ROOM_BYTES

    async def on_its_way() -> int:
        """The most that waits at the other side over some grants, each taken as soon as it is given."""
        most = 0
        for _ in range(8):
            taken = 0
            while taken < yamux.INITIAL_WINDOW_BYTES // yamux.GRANT_PART:
                taken += len(await inbound[0].receive_some(16_384))
            join(near, far)
            most = max(most, far.buffered_bytes)
        return most

    await on_its_way()
    urgent.send_nowait(b"a token")
    join(near, far)
    await inbound[1].receive_some()
    await on_its_way()
    urgent.send_nowait(b"a token")
    join(near, far)
    await inbound[1].receive_some()
    beside = await on_its_way()
    assert (beside <= yamux.BESIDE_URGENT_BYTES) == short
    assert beside >= yamux.INITIAL_WINDOW_BYTES // yamux.GRANT_PART, "it goes on"
    await trio.sleep(2 * yamux.URGENT_S)
    assert await on_its_way() > yamux.BESIDE_URGENT_BYTES, "the whole window again"
    # A muxer that never grants again what it said it would: the window is what counts then.
    urgent.send_nowait(b"a token")
    join(near, far)
    bulk._outstanding = 10**9
    await trio.sleep(2 * yamux.STALE_S)
    near.sweep(trio.current_time())
    assert await on_its_way() > yamux.BESIDE_URGENT_BYTES


async def test_go_away_takes_no_new_streams() -> None:
    near, _ = mux()
    far, inbound = mux(initiator=False)
    stream = near.open()
    join(near, far)
    far.go_away()
    join(near, far)
    with pytest.raises(LinkError):
        near.open()
    stream.send_nowait(b"old ones go on")
    join(near, far)
    assert await inbound[0].receive_some() == b"old ones go on"


async def test_a_reset_after_the_end_is_told_once_to_whoever_still_sends() -> None:
    near, _ = mux()
    stream = near.open()
    ends: list[str] = []
    stream.set_sink(lambda data: None, ends.append)
    near.feed(memoryview(HEADER.pack(0, WINDOW_UPDATE, FIN, 1, 0)))
    assert ends == [""]
    near.feed(memoryview(HEADER.pack(0, WINDOW_UPDATE, RST, 1, 0)))
    near.lose("the connection is gone")
    assert ends == ["", "the other side reset the stream"]


async def test_small_pieces_that_nobody_takes_cost_their_bytes_and_no_more() -> None:
    """Each as a view would keep the message that it came in: 64 KiB for one byte."""
    far, inbound = mux(initiator=False)
    count = 20_000
    padding = HEADER.pack(0, PING, ACK, 0, 9) * 100
    far.feed(memoryview(HEADER.pack(0, WINDOW_UPDATE, SYN, 1, 0)))
    for _ in range(count):
        far.feed(memoryview(bytes(HEADER.pack(0, DATA, 0, 1, 1) + b"x" + padding)))
    assert far.buffered_bytes == count
    assert not inbound[0]._chunks and len(inbound[0]._small) == count
    far.feed(memoryview(HEADER.pack(0, DATA, 0, 1, 1000) + b"y" * 1000))
    far.feed(memoryview(HEADER.pack(0, DATA, FIN, 1, 1) + b"z"))
    received = bytearray()
    while data := await inbound[0].receive_some():
        received += data
    assert bytes(received) == b"x" * count + b"y" * 1000 + b"z"
    assert far.buffered_bytes == 0


async def test_streams_that_are_opened_and_reset_without_end_close_the_connection(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """No bound of open streams is met by that, and each costs a task."""
    far, _ = mux(initiator=False)
    frames_of = (
        HEADER.pack(0, WINDOW_UPDATE, SYN, number, 0) + HEADER.pack(0, WINDOW_UPDATE, RST, number, 0)
        for number in range(1, 2**20, 2)
    )
    for _ in range(int(yamux.STREAMS_AT_ONCE)):
        far.feed(memoryview(next(frames_of)))
    await trio.sleep(1)
    for _ in range(int(yamux.STREAMS_PER_SECOND)):
        far.feed(memoryview(next(frames_of)))
    pulled(far)
    with pytest.raises(WireError) as caught:
        for _ in range(100):
            far.feed(memoryview(next(frames_of)))
    assert caught.value.code == "flood"
    assert not far.streams


async def test_a_reset_in_a_data_frame_is_seen() -> None:
    near, _ = mux()
    stream = near.open()
    pulled(near)
    near.feed(memoryview(HEADER.pack(0, DATA, RST, 1, 0)))
    with pytest.raises(LinkError):
        await stream.receive_some()
