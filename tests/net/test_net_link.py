"""Links: framing, order, priorities, limits; in memory, where every byte can be seen."""

from __future__ import annotations

import random
import struct

import pytest
import trio
import trio.testing
from helpers_net import pattern
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_peer.errors import LinkError, WireError
from kvasir_peer.net import link as links
from kvasir_peer.net import yamux
from kvasir_peer.net.framing import FIRST, LAST, OWN, Assembler
from kvasir_peer.net.link import Priority
from kvasir_peer.net.memory import memory_link_pair


async def test_frames_arrive_whole_and_in_order() -> None:
    rng = random.Random(3)
    here, there = memory_link_pair()
    sent = [pattern(rng.choice((0, 1, 100, 5000, 70_000, 900_000))) for _ in range(60)]

    async def send() -> None:
        for frame in sent:
            await here.send(frame, Priority.PREFILL)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        for frame in sent:
            assert bytes(await there.receive()) == frame


async def test_several_buffers_become_one_frame_and_may_change_afterwards() -> None:
    here, there = memory_link_pair()
    scratch = bytearray(b"b" * 10)
    await here.send([b"a", scratch, memoryview(bytes(range(6))).cast("H")])
    scratch[:] = b"x" * 10
    assert bytes(await there.receive()) == b"a" + b"b" * 10 + bytes(range(6))


async def test_urgent_frames_overtake_and_each_priority_keeps_its_order() -> None:
    here, there = memory_link_pair(max_frame=10_000_000)
    for number in range(3):
        await here.send(bytes([number]) + bytes(90_000), Priority.WEIGHTS)
    # The window is full of weights by now: what is left of them waits, and decode does not.
    await here.send(bytes([9]) + bytes(2_000_000), Priority.PREFILL)
    for number in range(3):
        await here.send(bytes([100 + number]), Priority.DECODE)
    await here.send(b"\xff", Priority.CONTROL)
    order = [bytes(await there.receive())[0] for _ in range(4)]
    assert order == [255, 100, 101, 102]
    rest = [bytes(await there.receive())[0] for _ in range(4)]
    assert [n for n in rest if n < 3] == [0, 1, 2]


async def test_the_reserve_lets_a_decode_frame_past_a_receiver_that_takes_nothing() -> None:
    here, there = memory_link_pair(max_frame=4_000_000)
    sent = 0
    with trio.move_on_after(0.2):
        while True:
            await here.send(bytes(500_000), Priority.PREFILL)
            sent += 1
    await here.send(b"token", Priority.DECODE)
    assert bytes(await there.receive()) == b"token"
    for _ in range(sent):
        assert len(await there.receive()) == 500_000


async def test_what_is_not_taken_is_bounded() -> None:
    here, there = memory_link_pair(max_frame=100_000)
    with trio.move_on_after(0.3) as scope:
        while True:
            await here.send(bytes(50_000), Priority.WEIGHTS)
    assert scope.cancelled_caught
    state = there.statistics()
    assert state.bytes_received <= links.UNREAD_BYTES + yamux.INITIAL_WINDOW_BYTES + 100_000
    assert here.statistics().bytes_queued <= links.QUEUED_BYTES + 60_000


async def test_empty_frames_that_are_not_taken_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _, there = memory_link_pair()
    frames = piece(FIRST | LAST, b"") * 5000
    # They count by what they cost here: no more window is granted, so the rest waits at the sender.
    there._receive_bytes(memoryview(frames))
    assert there._withheld == len(frames)
    # A window that has grown to 16 MiB would still let in millions.
    monkeypatch.setattr(links, "UNREAD_FRAMES", 6000)
    with pytest.raises(WireError, match="6000 frames wait to be taken"):
        there._receive_bytes(memoryview(frames))
    assert there._unread == 6000


async def test_a_small_frame_does_not_keep_the_message_that_it_came_in() -> None:
    _, there = memory_link_pair()
    for size, kept in ((10, 10), (8000, 8000), (20_000, 60_000 + 4)):
        message = struct.pack(">I", FIRST | LAST | size) + bytes(60_000)
        there._assembler = Assembler(100_000, there._deliver, there._own_received)
        there._assembler.feed(memoryview(message)[: 4 + size])
        frame = await there.receive()
        assert len(frame) == size and len(frame.obj) == kept


async def test_a_frame_over_the_limit_is_refused_before_memory_is_taken() -> None:
    here, there = memory_link_pair(max_frame=1000)
    await here.send(bytes(1000))
    assert len(await there.receive()) == 1000
    await here.send(bytes(200_000_000)[:100_000_000], Priority.WEIGHTS)
    with pytest.raises(LinkError, match=r"100000000 bytes, where 1000 are allowed"):
        await there.receive()
    assert there._assembler._frames == [None] * 4
    with pytest.raises(LinkError):
        await here.receive()
    there.max_frame = 10**9
    assert there.closed


async def test_the_limit_may_change_while_the_link_lives() -> None:
    here, there = memory_link_pair(max_frame=1000)
    there.max_frame = 5000
    await here.send(bytes(5000))
    assert len(await there.receive()) == 5000


async def test_closing_sends_what_is_queued_and_ends_both_sides() -> None:
    here, there = memory_link_pair()
    for number in range(10):
        await here.send(bytes([number]) * 20_000, Priority.PREFILL)
    await here.aclose()
    for number in range(10):
        assert bytes(await there.receive()) == bytes([number]) * 20_000
    with pytest.raises(LinkError):
        await there.receive()
    with pytest.raises(LinkError):
        await there.send(b"too late")
    with pytest.raises(LinkError):
        await here.send(b"too late")
    with pytest.raises(LinkError):
        await here.receive()
    assert here.closed and there.closed


async def test_a_waiting_receiver_and_sender_are_woken_by_the_end() -> None:
    here, there = memory_link_pair()

    async def waits_to_receive() -> None:
        with pytest.raises(LinkError):
            await there.receive()

    async def waits_to_send() -> None:
        with pytest.raises(LinkError):
            while True:
                await there.send(bytes(100_000), Priority.WEIGHTS)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(waits_to_receive)
        nursery.start_soon(waits_to_send)
        await trio.testing.wait_all_tasks_blocked()
        here.fail("broken")


async def test_cancelled_sends_leave_the_link_whole() -> None:
    here, there = memory_link_pair()
    sent: list[bytes] = []
    for number in range(40):
        frame = bytes([number]) * 60_000
        with trio.move_on_after(0.001) as scope:
            await here.send(frame, Priority.PREFILL)
        if not scope.cancelled_caught:
            sent.append(frame)
    assert 0 < len(sent) < 40
    for frame in sent:
        assert bytes(await there.receive()) == frame
    await here.send(b"still fine")
    assert bytes(await there.receive()) == b"still fine"


async def test_statistics_count_both_ways() -> None:
    here, there = memory_link_pair("/x/1", peers=("a", "b"))
    await here.send(bytes(10))
    await there.send(bytes(30_000))
    await there.receive()
    await here.receive()
    state = here.statistics()
    assert (state.peer, state.protocol, state.path) == ("b", "/x/1", "memory")
    assert (state.frames_sent, state.bytes_sent, state.frames_received, state.bytes_received) == (
        1,
        10,
        1,
        30_000,
    )
    assert state.goodput > 0


def _assembler(max_frame: int = 1000) -> tuple[Assembler, list[bytes], list[bytes]]:
    frames: list[bytes] = []
    messages: list[bytes] = []
    return (
        Assembler(max_frame, lambda cls, frame: frames.append(bytes(frame)), messages.append),
        frames,
        messages,
    )


def piece(flags: int, payload: bytes, cls: int = 0) -> bytes:
    return struct.pack(">I", cls << 30 | flags | len(payload)) + payload


@pytest.mark.parametrize(
    "data",
    [
        piece(0, b"middle of nothing"),
        piece(LAST, b"end of nothing"),
        piece(FIRST, b"abc"),
        piece(FIRST, struct.pack(">I", 10) + b"abc") + piece(FIRST | LAST, b"again"),
        piece(FIRST, struct.pack(">I", 10) + b"abc") + piece(LAST, b"short"),
        piece(FIRST, struct.pack(">I", 10) + b"abc") + piece(LAST, b"much too long"),
        piece(FIRST, struct.pack(">I", 1001)),
        piece(FIRST, struct.pack(">I", 0xFFFFFFFF)),
        piece(FIRST | LAST, bytes(1001)),
        piece(OWN, b""),
        piece(OWN, bytes(257)),
    ],
    ids=range(11),
)
@pytest.mark.parametrize("cut", [1, 3, 10_000])
def test_broken_pieces_are_refused(data: bytes, cut: int) -> None:
    assembler, frames, _ = _assembler()
    with pytest.raises(WireError):
        for start in range(0, len(data), cut):
            assembler.feed(memoryview(data[start : start + cut]))
    assert not frames


def test_any_cut_gives_the_same_frames() -> None:
    data = (
        piece(OWN, b"\x01 own")
        + piece(FIRST, struct.pack(">I", 10) + b"abc", 2)
        + piece(FIRST | LAST, b"urgent", 1)
        + piece(0, b"", 2)
        + piece(LAST, b"defghij", 2)
        + piece(FIRST | LAST, b"", 0)
    )
    for cut in range(1, len(data) + 1):
        assembler, frames, messages = _assembler()
        for start in range(0, len(data), cut):
            assembler.feed(memoryview(data[start : start + cut]))
        assert frames == [b"urgent", b"abcdefghij", b""] and messages == [b"\x01 own"]


@pytest.mark.parametrize(
    "message", [b"\x01", b"\x03", b"\x05", b"\x06", b"\x06" + bytes(8), b"\x09", b"\x02late"]
)
async def test_link_messages_out_of_turn_are_refused(message: bytes) -> None:
    _, there = memory_link_pair()
    with pytest.raises(WireError):
        there._own_received(message)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.integers(1, 40))
def test_random_bytes_end_in_a_wire_error_or_nothing(data: bytes, cut: int) -> None:
    assembler, frames, _ = _assembler()
    try:
        for start in range(0, len(data), cut):
            assembler.feed(memoryview(data[start : start + cut]))
    except WireError:
        pass
    assert all(len(frame) <= 1000 for frame in frames)
