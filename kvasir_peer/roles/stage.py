"""The stage role: composes node, engine process, chunk store and the ring's stage peer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import psutil
import trio

from kvasir_peer import identity
from kvasir_peer.agent.engine import open_engine
from kvasir_peer.engines.choice import choose_engine
from kvasir_peer.experts.dispatch_policy import DispatchSettings
from kvasir_peer.experts.stage_experts import StageExperts
from kvasir_peer.models.store import ChunkStore
from kvasir_peer.net.node import Node
from kvasir_peer.progress import Progress, Report
from kvasir_peer.ring.stage_peer import StageNews, StagePeer, StagePeerConfig
from kvasir_peer.settings import StageSettings

logger = logging.getLogger(__name__)

RELAY_SECONDS = 30.0  # for the first reservation; a peer without one can't be reached
FREE_MEMORY_SHARE = 0.75  # of what is free, where the owner sets no limit: the machine stays usable

_STEPS = {"fetching": "fetch", "loading": "load", "loaded": "load", "serving": "ready", "broken": "problem"}


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


async def run_stage(settings: StageSettings, *, report: Report, leaving: Leaving | None = None) -> None:
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
    invitation = settings.invitation(now=time.time())
    me = identity.load_or_create(settings.identity_path)
    report(Progress("start", me.peer_id))
    engine_name, device = choose_engine(settings.engine, settings.device)
    store = await trio.to_thread.run_sync(ChunkStore, settings.store_path, settings.disk_limit())
    memory = settings.memory or int(psutil.virtual_memory().available * FREE_MEMORY_SHARE)
    relays = settings.relays or invitation.relays

    def tell(news: StageNews) -> None:
        step = _STEPS.get(news.state, "plan")
        report(Progress(step, news.text, news.done, news.total, "bytes" if news.total else ""))  # type: ignore[arg-type]

    async with Node.open(
        me.private_key,
        relays=relays,
        invites=settings.relay_invites,
        listen=settings.listen,
        direct=settings.direct,
    ) as node:
        report(
            Progress("relay", f"reserving a place at {len(relays)} relay{'s' if len(relays) != 1 else ''}")
        )
        await node.relays_ready(RELAY_SECONDS)
        report(Progress("relay", "reachable through a relay"))
        async with open_engine() as engine, trio.open_nursery() as nursery:
            experts = StageExperts(
                node,
                engine,
                bridge=invitation.bridge,
                bridge_addresses=(),
                precision="exact" if settings.precision == "exact" else "fast",
                settings=DispatchSettings(saturation_threshold=settings.saturation_threshold),
                mode="sampled" if settings.checks == "sampled" else "strict",
                verify=identity.verify,
            )
            peer = StagePeer(
                node,
                engine,
                store,
                StagePeerConfig(
                    bridge=invitation.bridge,
                    bridge_addresses=(),
                    secret=invitation.credential(),
                    home=settings.home,
                    memory=memory,
                    disk=settings.disk_limit(),
                    engine=engine_name,
                    device=device,
                    precision=settings.precision,
                    threads=settings.threads,
                ),
                sign=me.sign,
                verify=identity.verify,
                report=tell,
                experts=experts,
            )
            nursery.start_soon(experts.run)
            leaving.tell(peer.leave)
            await peer.run()
            nursery.cancel_scope.cancel()
