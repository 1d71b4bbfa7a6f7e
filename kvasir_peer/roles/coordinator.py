"""The coordinator role: composes node, engine process, chunk store and the experts' coordinator."""

from __future__ import annotations

from kvasir_peer import identity
from kvasir_peer.experts.coordinator_peer import CoordinatorConfig, CoordinatorPeer
from kvasir_peer.experts.dispatch_policy import DispatchSettings
from kvasir_peer.progress import Report
from kvasir_peer.roles.member import open_member
from kvasir_peer.settings import CoordinatorSettings

FREE_MEMORY_SHARE = 0.75  # of what is free, where the owner sets no limit: the machine stays usable


async def run_coordinator(settings: CoordinatorSettings, report: Report) -> None:
    """Coordinate until cancelled.

    Raises:
        TicketError: there is no ticket, or it is no good.
        LinkError: no relay could be reached.
        RefusedError: the bridge does not let this peer in.
        ResourceError: the model does not fit.
    """
    async with open_member(settings, "coordinator", report, memory_share=FREE_MEMORY_SHARE) as member:
        config = CoordinatorConfig(
            member.membership,
            slots=settings.slots,
            context_length=settings.context_length,
            micro_batch_rows=settings.micro_batch_rows,
            max_in_flight=settings.max_in_flight,
            top_logprobs=settings.top_logprobs,
            settings=DispatchSettings(saturation_threshold=settings.saturation_threshold),
            mode="strict" if settings.checks == "strict" else "sampled",
            remote="all" if settings.remote == "all" else "auto",
            expert_floor_ms=settings.expert_floor_ms,
        )
        peer = CoordinatorPeer(
            member.node, member.engine, member.store, config, verify=identity.verify, report=report
        )
        await peer.run()
