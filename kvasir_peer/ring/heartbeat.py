"""Silence on a ring's links: who opened a link pings on it, and both sides notice when nothing comes any more.

A peer whose process is stopped keeps its connections; only its silence tells. It is counted in beats of this side's own
loop, not read off the clock: a peer that slept itself, and wakes to a clock that has moved on, blames nobody for the
time that it has missed.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import trio

from kvasir_peer.errors import LinkError
from kvasir_peer.net.link import Priority
from kvasir_peer.wire import ring

if TYPE_CHECKING:
    from kvasir_peer.net.link import Link
    from kvasir_peer.wire.codec import Codec

BEAT_SECONDS = 1.5
# Beats without a frame until a peer counts as silent, so 7.5 to 9 seconds: with the time for it to acknowledge the next
# epoch and for that to be planned, a stopped stage is replaced within 15 seconds.
SILENT_BEATS = 5


async def beat(link: Link, codec: Codec, *, pings: bool) -> None:
    """Watch a link until it is silent.

    Args:
        link: its frames are received by somebody else.
        codec: of the plan.
        pings: whether this side sends the pings (the one that opened the link); else it only expects them.

    Raises:
        LinkError: the other side is silent, or the link has ended.
    """
    heard, silent = -1, 0
    for nonce in itertools.count():
        if pings:
            await link.send(codec.encode(ring.Ping(nonce)), Priority.CONTROL)
        await trio.sleep(BEAT_SECONDS)
        received = link.statistics().frames_received
        silent = silent + 1 if received == heard else 0
        heard = received
        if silent >= SILENT_BEATS:
            raise LinkError(
                f"{link.remote_peer} has said nothing for {SILENT_BEATS * BEAT_SECONDS:.0f} s",
                peer=link.remote_peer,
            )
