"""How every role comes to its relays, and keeps its owner told about them."""

from __future__ import annotations

from kvasir_peer.net.node import Node
from kvasir_peer.progress import Progress, Report

RELAY_SECONDS = 30.0  # for the first reservation; a peer without one can't be reached


async def reach_relays(node: Node, report: Report) -> None:
    """Wait for a place at one relay; from now on, say how it stands with all of them whenever that changes.

    The others are not waited for: one that is down, or refuses us, must not keep the role from its work.

    Raises:
        LinkError: no relay gave a place in time; says why for each.
    """
    node.on_relays(lambda words: report(Progress("relay", words)))
    await node.relays_ready(RELAY_SECONDS, count=1)
