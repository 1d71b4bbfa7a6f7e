"""The stage role: composes node, engine process, chunk store and the ring's stage peer."""

from __future__ import annotations

from collections.abc import Callable

import trio

from kvasir_peer import identity
from kvasir_peer.experts.dispatch_policy import DispatchSettings
from kvasir_peer.experts.stage_experts import StageExperts
from kvasir_peer.progress import Report
from kvasir_peer.ring.stage_peer import StagePeer
from kvasir_peer.roles.member import open_member
from kvasir_peer.settings import StageSettings

FREE_MEMORY_SHARE = 0.75  # of what is free, where the owner sets no limit: the machine stays usable


class Leaving:
    """The owner's wish to have the machine back, which may come before there is a peer that could hear it."""

    def __init__(self) -> None:
        self._wanted = False
        self._leave: Callable[[], None] | None = None
        self._starting: trio.CancelScope | None = None

    def begin(self) -> None:
        """Hand the place over, and end; end at once while there is none."""
        self._wanted = True
        if self._leave is not None:
            self._leave()
        elif self._starting is not None:
            self._starting.cancel()

    def tell(self, leave: Callable[[], None]) -> None:
        """From now on ``leave`` is called."""
        self._leave, self._starting = leave, None
        if self._wanted:
            leave()

    def during(self, scope: trio.CancelScope) -> None:
        """Until :meth:`tell`, cancel this scope."""
        self._starting = scope
        if self._wanted:
            scope.cancel()


async def run_stage(settings: StageSettings, report: Report, leaving: Leaving | None = None) -> None:
    """Serve as a stage until cancelled, or until its place is handed over.

    Args:
        leaving: the owner's wish to end in order; none but cancelling where it is not given.

    Raises:
        TicketError: there is no ticket, or it is no good.
        LinkError: no relay could be reached.
        RefusedError: the bridge does not let this peer in.
    """
    leaving = leaving or Leaving()
    with trio.CancelScope() as scope:
        leaving.during(scope)
        await _run(settings, report, leaving)


async def _run(settings: StageSettings, report: Report, leaving: Leaving) -> None:
    async with (
        open_member(settings, "stage", report, memory_share=FREE_MEMORY_SHARE) as member,
        trio.open_nursery() as nursery,
    ):
        experts = StageExperts(
            member.node,
            member.engine,
            bridge=member.membership.bridge,
            bridge_addresses=(),
            precision=member.membership.precision,
            settings=DispatchSettings(saturation_threshold=settings.saturation_threshold),
            mode="strict" if settings.checks == "strict" else "sampled",
            verify=identity.verify,
        )
        peer = StagePeer(
            member.node,
            member.engine,
            member.store,
            member.membership,
            sign=member.me.sign,
            verify=identity.verify,
            report=report,
            experts=experts,
        )
        nursery.start_soon(experts.run)
        leaving.tell(peer.leave)
        await peer.run()
        nursery.cancel_scope.cancel()
