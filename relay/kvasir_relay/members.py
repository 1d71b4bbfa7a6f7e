"""Who is connected to the relay, and what each connection holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from kvasir_peer.net.connection import Connection
from kvasir_relay.invites import Invite
from kvasir_relay.limits import Address, Taken

if TYPE_CHECKING:
    from kvasir_relay.circuits import Circuit


@dataclass(eq=False, slots=True)
class Reservation:
    """A peer's right to be the target of circuits, over one of its connections.

    Attributes:
        member: the connection over which it is told about circuits.
        expires: trio time.
        taken: its place in the ledger.
    """

    member: Member
    expires: float
    taken: Taken


@dataclass(eq=False, slots=True)
class Member:
    """An authenticated connection and what it holds.

    Attributes:
        connection: Noise and Yamux.
        peer: peer id as bytes; ``peer_id`` is the same as text.
        address, port: where the peer comes from, behind a proxy too.
        since: trio time.
        invite: the one that was shown on this connection.
        circuits: that run over it, as source or target.
        asking: circuits that it asked for and whose targets have not answered.
        used_at: trio time when it last asked for something or a circuit of it ended.
    """

    connection: Connection
    peer: bytes
    address: Address
    port: int
    since: float
    invite: Invite | None = None
    circuits: set[Circuit] = field(default_factory=set)
    asking: set[trio.CancelScope] = field(default_factory=set)
    used_at: float = 0.0

    @property
    def peer_id(self) -> str:
        """The peer id as text."""
        return self.connection.remote_peer
