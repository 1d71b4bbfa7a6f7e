"""A peer of the lab: a node with a process of its own, told by lines of JSON what to do, answering each with one.

``{"talk": PEER}`` opens a link to another one and keeps numbered frames going there and back; ``{"state": PEER}`` says
how that goes; ``{"stop": PEER}`` ends it.
"""

from __future__ import annotations

import json
import secrets
import sys

import trio

from kvasir_peer.errors import KvasirError, LinkError
from kvasir_peer.net.link import Link, Priority
from kvasir_peer.net.node import Node

ECHO = "/kvasir/test/echo/1"
FRAME_BYTES = 16 * 1024
IN_FLIGHT = 4
PACE_S = 0.002  # a decode's: the test is not about speed
OPEN_S = 45.0


async def echo(link: Link) -> None:
    """Send back every frame until the end."""
    while True:
        await link.send(await link.receive(), Priority.DECODE)


class Conversation:
    """A link that always carries numbered frames; all must come back in order, none missing and none twice."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.returned = 0
        self.failure = ""
        self._stopped = False

    @staticmethod
    def _frame(number: int) -> bytes:
        return number.to_bytes(8, "big") + bytes(FRAME_BYTES - 8)

    async def run(self) -> None:
        """Until it is stopped, or something is wrong."""
        sent = 0
        try:
            while not self._stopped:
                while sent < self.returned + IN_FLIGHT:
                    await self.link.send(self._frame(sent), Priority.DECODE)
                    sent += 1
                frame = await self.link.receive()
                if frame != self._frame(self.returned):
                    number = int.from_bytes(frame[:8], "big")
                    self.failure = f"frame {number} came where {self.returned} was due"
                    return
                self.returned += 1
                await trio.sleep(PACE_S)
        except LinkError as error:
            if not self._stopped:
                self.failure = str(error)

    def stop(self) -> None:
        """Close the link."""
        self._stopped = True
        self.link.close()

    def state(self) -> dict[str, object]:
        """What a test wants to know."""
        figures = self.link.statistics()
        return {
            "returned": self.returned,
            "failure": self.failure,
            "path": figures.path,
            "address": self.link._connection.address if self.link._connection is not None else "",
            "path_changes": figures.path_changes,
            "round_trip_p50": figures.round_trip_p50,
        }


async def main(relay: str) -> None:
    """Run until standard input ends."""
    conversations: dict[str, Conversation] = {}
    listen = ["/ip4/0.0.0.0/tcp/0"]
    async with (
        Node.open(secrets.token_bytes(32), relays=[relay], listen=listen) as node,
        trio.open_nursery() as nursery,
    ):
        node.handle(ECHO, 2 * FRAME_BYTES, echo)
        await node.relays_ready(OPEN_S)
        print(json.dumps({"peer": node.peer_id}), flush=True)
        async for line in trio.wrap_file(sys.stdin):
            ((word, peer),) = json.loads(line).items()
            answer: dict[str, object] = {}
            try:
                if word == "talk":
                    with trio.fail_after(OPEN_S):
                        conversations[peer] = Conversation(await node.open_link(peer, ECHO))
                    nursery.start_soon(conversations[peer].run)
                else:
                    answer = conversations[peer].state()
                    if word == "stop":
                        conversations[peer].stop()
            except (KvasirError, trio.TooSlowError) as error:
                answer = {"failure": str(error) or "it took too long"}
            print(json.dumps(answer), flush=True)
        nursery.cancel_scope.cancel()


trio.run(main, sys.argv[1])
