"""What every role that joins with a ticket and computes is made of: key, chunk store, node at its relays, engine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import trio

from kvasir_peer import identity
from kvasir_peer.agent.engine import Engine, open_engine
from kvasir_peer.agent.membership import Membership
from kvasir_peer.engines.choice import choose_engine, free_memory
from kvasir_peer.identity import Identity
from kvasir_peer.models.store import ChunkStore
from kvasir_peer.net.node import Node
from kvasir_peer.progress import Progress, Report
from kvasir_peer.roles.reaching import reach_relays
from kvasir_peer.settings import ComputingSettings


@dataclass(frozen=True)
class Member:
    """The parts, all of them running.

    Attributes:
        me: its key.
        engine: the process.
        membership: by its ticket and its settings.
    """

    me: Identity
    node: Node
    store: ChunkStore
    engine: Engine
    membership: Membership


@asynccontextmanager
async def open_member(
    settings: ComputingSettings, role: str, report: Report, *, memory_share: float
) -> AsyncIterator[Member]:
    """Start what a role is made of, and end it with the context.

    Args:
        memory_share: of what is free, where the owner sets no limit.

    Raises:
        TicketError: there is no ticket, or it is no good.
        UsageError, ResourceError: the chunk store can't be used.
        LinkError: no relay could be reached.
    """
    invitation = settings.invitation(now=time.time(), role=role)
    me = identity.load_or_create(settings.identity_path)
    report(Progress("start", me.peer_id))
    engine_name, device = choose_engine(settings.engine, settings.device)
    membership = Membership(
        bridge=invitation.bridge,
        bridge_addresses=(),
        secret=invitation.credential(),
        home=settings.home,
        memory=settings.memory or int(free_memory(device) * memory_share),
        disk=settings.disk_limit(),
        engine=engine_name,
        device=device,
        precision="exact" if settings.precision == "exact" else "fast",
        threads=settings.threads,
    )
    relays = settings.relays or invitation.relays
    with await trio.to_thread.run_sync(ChunkStore, settings.store_path, membership.disk) as store:
        async with Node.open(
            me.private_key,
            relays=relays,
            invites=settings.relay_invites,
            listen=settings.listen,
            direct=settings.direct,
            muxer=settings.muxer,
        ) as node:
            plural = "s" if len(relays) != 1 else ""
            report(Progress("relay", f"reserving a place at {len(relays)} relay{plural}"))
            await reach_relays(node, report)
            report(Progress("load", f"computes with {engine_name} on {device}"))
            async with open_engine() as engine:
                factor = await engine.expansion(engine_name, device, membership.precision)
                yield Member(me, node, store, engine, replace(membership, expansion=factor))
