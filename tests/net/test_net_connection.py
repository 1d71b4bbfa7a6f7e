"""A connection over a line without tasks: heartbeats, and what happens when nothing comes back."""

from __future__ import annotations

import secrets

import pytest
import trio
import trio.testing

from kvasir_peer.net import connection as connections
from kvasir_peer.net.connection import Connection
from kvasir_peer.net.noise import ReceiveCipher, Secured, SendCipher


class Line:
    """Carries what one side pulls to the other at once, until it is cut."""

    def __init__(self) -> None:
        self.cut = False
        self.slow = False
        self.sides: tuple[Connection, Connection]
        self._room = memoryview(bytearray(70_000))
        self._moving = False

    def wake(self) -> None:
        """Move both ways until there is nothing."""
        if self._moving or self.slow:
            return
        self._moving = True
        moved = True
        while moved:
            moved = False
            for source, target in (self.sides, self.sides[::-1]):
                while size := source.pull(self._room):
                    moved = True
                    if not self.cut:
                        target.feed(memoryview(bytes(self._room[:size])))
        self._moving = False

    def flush(self) -> None:
        """Nothing is kept back."""

    def abort(self) -> None:
        """Nothing holds it open."""


def joined() -> tuple[Line, Connection, Connection]:
    """Two connections that have agreed on a multiplexer."""
    line = Line()
    keys = secrets.token_bytes(32), secrets.token_bytes(32)
    sides = []
    for name, initiator in (("a", False), ("b", True)):
        there, back = keys if initiator else keys[::-1]
        secured = Secured(name, initiator, SendCipher(there), ReceiveCipher(back))
        sides.append(
            Connection(
                secured,
                path="direct",
                address="",
                on_stream=lambda connection, stream: None,
                on_closed=lambda connection, reason: None,
            )
        )
    line.sides = (sides[0], sides[1])
    for side in sides:
        side.start(line)
    line.wake()
    assert all(side.ready.is_set() and not side.closed.is_set() for side in sides)
    return line, sides[0], sides[1]


@pytest.mark.parametrize(("busy", "within"), [(0, 30.0), (1, 16.0)], ids=["idle", "with links"])
async def test_a_silent_peer_is_gone_within_its_time(
    busy: int, within: float, autojump_clock: trio.testing.MockClock
) -> None:
    line, near, far = joined()
    near.busy = far.busy = busy
    for _ in range(300):
        await trio.sleep(1)
        for side in (near, far):
            side.tick(trio.current_time())
    assert not near.closed.is_set(), "one that answers is kept"
    for offset in (0.0, 0.9):  # at any point between two heartbeats
        line, near, far = joined()
        near.busy = busy
        await trio.sleep(connections.HEARTBEAT_BUSY_S - 1 + offset)
        line.cut = True
        began = trio.current_time()
        while not near.closed.is_set():
            await trio.sleep(1)
            near.tick(trio.current_time())
        assert trio.current_time() - began <= within
        assert "nothing came" in near.reason


async def test_one_that_came_again_from_elsewhere_is_doubted_for_three_seconds(
    autojump_clock: trio.testing.MockClock,
) -> None:
    line, near, _ = joined()
    line.slow = True
    near.doubt()
    await trio.sleep(1)
    line.slow = False
    line.wake()
    await trio.sleep(4)
    near.tick(trio.current_time())
    assert not near.closed.is_set(), "it has answered"
    line.cut = True
    near.doubt()
    for _ in range(int(connections.DEAD_DOUBTED_S) + 1):
        await trio.sleep(1)
        near.tick(trio.current_time())
    assert near.closed.is_set()
