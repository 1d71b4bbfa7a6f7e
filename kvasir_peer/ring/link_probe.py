"""How far two peers are apart: the time of an empty frame, and the rate of a large one, over a link of its own.

The bridge says who measures with whom, to both sides; anybody else is refused, so nobody can have a peer take in frames
at will. A measurement takes a few round trips and a few hundred kilobytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from kvasir_peer.errors import LinkError, WireError
from kvasir_peer.ring.offers import LinkTime
from kvasir_peer.wire import ring

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvasir_peer.net.link import Link
    from kvasir_peer.net.node import Node

EMPTY_PINGS = 4  # the least of them counts: frames wait behind others, none is early
FULL_PINGS = 2
FULL_BYTES = 96 << 10  # a boundary of a dozen rows of a large model
MAX_PINGS = EMPTY_PINGS + FULL_PINGS
MAX_PROBE_FRAME = FULL_BYTES + ring.MAX_OPENING_FRAME
PROBE_SECONDS = 20.0  # for all of it: 30 KB/s and half a second of delay
# A rate is told from the difference of two times; where it is under this share of the empty frame's, it is noise.
LEAST_DIFFERENCE = 0.1


async def measure(node: Node, peer: str, addresses: Sequence[str]) -> LinkTime:
    """Measure the way to a peer.

    Raises:
        LinkError: it could not be reached in time, or does not want to be measured.
    """
    with trio.move_on_after(PROBE_SECONDS):
        link = await node.open_link(
            peer, ring.PROTOCOL, max_frame=ring.MAX_OPENING_FRAME, addresses=addresses
        )
        try:
            await link.send(ring.OPENING.encode(ring.Hello("probe", "", 0)))
            answer, _ = ring.OPENING.decode(await link.receive())
            if not isinstance(answer, ring.Welcome):
                raise LinkError(f"{peer} refused: {getattr(answer, 'reason', answer)}", peer=peer)
            empty = min([await _round_trip(link, nonce, b"") for nonce in range(EMPTY_PINGS)])
            payload = bytes(FULL_BYTES)
            full = min([await _round_trip(link, EMPTY_PINGS + n, payload) for n in range(FULL_PINGS)])
        except WireError as error:
            raise LinkError(f"{peer} answered what makes no sense: {error}", peer=peer) from error
        finally:
            link.close()
        more = full - empty
        rate = FULL_BYTES / more if more > LEAST_DIFFERENCE * empty else 0.0
        return LinkTime(empty / 2, rate)
    raise LinkError(f"{peer} could not be measured within {PROBE_SECONDS:.0f} s", peer=peer)


async def _round_trip(link: Link, nonce: int, payload: bytes) -> float:
    began = trio.current_time()
    await link.send(ring.OPENING.encode(ring.Ping(nonce), payload))
    while True:
        message, _ = ring.OPENING.decode(await link.receive())
        if isinstance(message, ring.Pong) and message.nonce == nonce:
            return trio.current_time() - began


async def answer(link: Link) -> None:
    """Answer the pings of one measurement."""
    link.max_frame = MAX_PROBE_FRAME
    await link.send(ring.OPENING.encode(ring.Welcome(0)))
    with trio.move_on_after(PROBE_SECONDS):
        for _ in range(MAX_PINGS):
            try:
                message, _ = ring.OPENING.decode(await link.receive())
            except LinkError:
                return
            if not isinstance(message, ring.Ping):
                raise WireError("unexpected", "only pings belong on a probe link", peer=link.remote_peer)
            await link.send(ring.OPENING.encode(ring.Pong(message.nonce)))
