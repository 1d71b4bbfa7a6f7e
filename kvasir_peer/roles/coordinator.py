"""The coordinator role: composes node, engine process, chunk store and the experts' coordinator."""

from __future__ import annotations

import logging
import time

import psutil
import trio

from kvasir_peer import identity
from kvasir_peer.agent.engine import open_engine
from kvasir_peer.engines.choice import choose_engine
from kvasir_peer.experts.coordinator_peer import CoordinatorConfig, CoordinatorNews, CoordinatorPeer
from kvasir_peer.experts.dispatch_policy import DispatchSettings
from kvasir_peer.models.store import ChunkStore
from kvasir_peer.net.node import Node
from kvasir_peer.progress import Progress, Report, Step
from kvasir_peer.settings import CoordinatorSettings

logger = logging.getLogger(__name__)

RELAY_SECONDS = 30.0  # for the first reservation; a peer without one can't be reached
FREE_MEMORY_SHARE = 0.75  # of what is free, where the owner sets no limit: the machine stays usable

_STEPS: dict[str, Step] = {
    "joining": "plan",
    "fetching": "fetch",
    "loading": "load",
    "serving": "ready",
    "problem": "problem",
}


async def run_coordinator(settings: CoordinatorSettings, *, report: Report) -> None:
    """Coordinate until cancelled.

    Raises:
        TicketError: there is no ticket, or it is no good.
        LinkError: no relay could be reached.
        RefusedError: the bridge does not let this peer in.
        ResourceError: the model does not fit.
    """
    invitation = settings.invitation(now=time.time(), role="coordinator")
    me = identity.load_or_create(settings.identity_path)
    report(Progress("start", me.peer_id))
    engine_name, device = choose_engine(settings.engine, settings.device)
    store = await trio.to_thread.run_sync(ChunkStore, settings.store_path, settings.disk_limit())
    memory = settings.memory or int(psutil.virtual_memory().available * FREE_MEMORY_SHARE)
    relays = settings.relays or invitation.relays

    def tell(news: CoordinatorNews) -> None:
        unit = "bytes" if news.total else ""
        report(Progress(_STEPS[news.state], news.text, news.done, news.total, unit))

    async with Node.open(
        me.private_key,
        relays=relays,
        invites=settings.relay_invites,
        listen=settings.listen,
        direct=settings.direct,
    ) as node:
        await node.relays_ready(RELAY_SECONDS)
        report(Progress("relay", f"reachable through a relay; computes with {engine_name} on {device}"))
        async with open_engine() as engine:
            peer = CoordinatorPeer(
                node,
                engine,
                store,
                CoordinatorConfig(
                    bridge=invitation.bridge,
                    bridge_addresses=(),
                    secret=invitation.credential(),
                    home=settings.home,
                    memory=memory,
                    engine=engine_name,
                    device=device,
                    precision="exact" if settings.precision == "exact" else "fast",
                    threads=settings.threads,
                    slots=settings.slots,
                    context_length=settings.context_length,
                    micro_batch_rows=settings.micro_batch_rows,
                    max_in_flight=settings.max_in_flight,
                    top_logprobs=settings.top_logprobs,
                    settings=DispatchSettings(saturation_threshold=settings.saturation_threshold),
                    mode="strict" if settings.checks == "strict" else "sampled",
                    remote="all" if settings.remote == "all" else "auto",
                    expert_floor_ms=settings.expert_floor_ms,
                ),
                verify=identity.verify,
                report=tell,
            )
            await peer.run()
