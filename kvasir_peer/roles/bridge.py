"""The bridge role: opens the model, plans and mends the ring, answers OpenAI clients."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import trio
from starlette.applications import Starlette

from kvasir_peer import identity
from kvasir_peer import ticket as tickets
from kvasir_peer.agent.chunk_transfer import serve_chunks
from kvasir_peer.agent.loop_lag import LoopLag
from kvasir_peer.api import openai
from kvasir_peer.api.dashboard import JoinInfo, dashboard_routes
from kvasir_peer.api.experts import expert_routes
from kvasir_peer.api.metrics import BridgeStatistics, metrics_routes
from kvasir_peer.api.swarm import swarm_routes
from kvasir_peer.errors import BusyError, RefusedError, SettingsError
from kvasir_peer.experts.coordinators import NOBODY
from kvasir_peer.experts.dispatch_policy import SlotReading
from kvasir_peer.experts.ledger import Ledger
from kvasir_peer.experts.market_service import MarketService, MarketSettings
from kvasir_peer.experts.recruitment import RecruitmentSettings
from kvasir_peer.experts.volunteering import Ask, Coverage, Given, Join, Joined, Wiring
from kvasir_peer.net.node import Node
from kvasir_peer.progress import Progress, Report
from kvasir_peer.ring.manager import RingManager, RingSettings
from kvasir_peer.ring.measurements import MeasurementsFile
from kvasir_peer.ring.telemetry import Timeline
from kvasir_peer.ring.volunteering import Orders
from kvasir_peer.ring.volunteering import Report as StageReport
from kvasir_peer.roles.reaching import reach_relays
from kvasir_peer.roles.served_model import BridgeModel, open_model, public_address
from kvasir_peer.settings import LEDGER_FILE, BridgeReady, BridgeSettings
from kvasir_peer.ticket import Ticket
from kvasir_peer.wire import chunks, ring

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 3.0  # for open answers when the bridge is told to end


class Bridge:
    """One bridge: what its routes and its OpenAI API ask for."""

    def __init__(
        self,
        model: BridgeModel,
        manager: RingManager,
        market: MarketService,
        node: Node,
        lag: LoopLag,
        ticket: Ticket,
        max_queue: int,
    ) -> None:
        self.model = model
        self.manager = manager
        self.market = market
        self._node = node
        self._lag = lag
        self._ticket = ticket
        self._max_queue = max_queue
        self._started = int(time.time())

    # -- swarm routes ---------------------------------------------------------------------------------------

    async def stage_poll(self, peer: str, report: StageReport) -> Orders:
        """See :class:`~kvasir_peer.api.swarm.SwarmService`."""
        if not self.manager.settings.stages:
            raise RefusedError("this bridge has no ring: its coordinators compute whole models", peer=peer)
        return await self.manager.poll(peer, _with_secret(report, self.manager.settings.secret, "stage"))

    def admitted(self, peer: str) -> bool:
        """See :class:`~kvasir_peer.api.swarm.SwarmService`."""
        return self.manager.admitted(peer) or self.market.admitted(peer)

    def manifest_bytes(self, model: str, page: str | None) -> bytes:
        """See :class:`~kvasir_peer.api.swarm.SwarmService`."""
        manifest = self.model.manifest
        if model != manifest.id:
            raise KeyError(model)
        return manifest.root.encode() if page is None else manifest.pages[page].encode()

    def ring_status(self, model: str) -> Mapping[str, Any]:
        """See :class:`~kvasir_peer.api.swarm.SwarmService`."""
        if model not in (self.model.name, self.model.manifest.id):
            raise KeyError(model)
        return {"model": self.model.name, "manifest": self.model.manifest.id, **self.manager.status()}

    def ring_timeline(self, model: str, seconds: float, after: int) -> Timeline:
        """See :class:`~kvasir_peer.api.swarm.SwarmService`."""
        if model not in (self.model.name, self.model.manifest.id):
            raise KeyError(model)
        return self.manager.timeline(seconds, after)

    def models_status(self) -> list[Mapping[str, Any]]:
        """See :class:`~kvasir_peer.api.swarm.SwarmService`."""
        return [{"model": self.model.name, "manifest": self.model.manifest.id, "state": self.manager.state}]

    # -- pages ----------------------------------------------------------------------------------------------

    def statistics(self) -> BridgeStatistics:
        """See :class:`~kvasir_peer.api.metrics.MetricsService`."""
        overview = self.manager.statistics()
        return BridgeStatistics(
            model=self.model.name,
            started=self._started,
            serving=self.ready(),
            state=overview.state,
            epoch=overview.epoch,
            peers=overview.peers,
            refused_peers=overview.refused_peers,
            ring=overview.totals,
            window=overview.window,
            figures=overview.figures,
            requests=self.manager.requests.statistics(),
            node=self._node.statistics(),
            lag=self._lag.statistics(),
            experts=self.market.statistics(),
        )

    def ready(self) -> bool:
        """See :class:`~kvasir_peer.api.metrics.MetricsService`."""
        return self.manager.requests.attached or self.market.coordinators.attached

    def join_info(self) -> JoinInfo:
        """See :class:`~kvasir_peer.api.dashboard.DashboardService`."""
        ticket = self._ticket
        return JoinInfo(ticket.swarm, ticket.ordered_roles(), ticket.expires, len(ticket.relays))

    # -- OpenAI ---------------------------------------------------------------------------------------------

    def models(self) -> list[openai.ServedModel]:
        """See :class:`~kvasir_peer.api.openai.CompletionService`."""
        # A request may come while the ring is being mended: it waits for that.
        admits = self.ready() or self.manager.requests.admits
        return [
            openai.ServedModel(
                id=self.model.name,
                tokenizer=self.model.tokenizer,
                chat_template=self.model.chat_template,
                context_length=self.manager.settings.context_length,
                created=self._started,
                ready=admits,
                missing="" if admits else self._missing(),
            )
        ]

    def _missing(self) -> str:
        return self.manager.missing() if self.manager.settings.stages else NOBODY

    @contextlib.asynccontextmanager
    async def generate(
        self, request: openai.GenerationRequest
    ) -> AsyncIterator[AsyncIterator[openai.TokenEvent]]:
        """See :class:`~kvasir_peer.api.openai.CompletionService`."""
        # A coordinator has the whole model on one machine, which is quicker than any ring.
        coordinators = self.market.coordinators
        ring_alone = self.manager.settings.stages and not coordinators.attached
        requests = self.manager.requests if ring_alone else coordinators
        if requests.attached:
            slots = self.manager.settings.max_requests if ring_alone else coordinators.total_slots
            waiting = requests.statistics().active - slots
            if waiting >= self._max_queue:
                raise BusyError(
                    f"{max(0, waiting)} requests wait already for one of {slots} places; ask again later"
                )
        async with requests.generate(
            request.prompt,
            request.max_tokens,
            request.sampling,
            request.stop_tokens,
            priority=request.priority,
            deadline=math.inf if request.deadline is None else request.deadline,
        ) as tokens:
            yield _events(tokens)


async def _events(tokens: AsyncIterator[Any]) -> AsyncIterator[openai.TokenEvent]:
    async for token in tokens:
        yield openai.TokenEvent(token.token, token.logprob, token.top, token.final, token.remark)


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket.

    Raises:
        SettingsError: the port is in use, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"can't listen on {host}:{port}: {error.strerror}; take another with --port, or --port 0 for a free one"
        ) from None
    listener.setblocking(False)
    return listener


async def serve_http(app: Any, listener: socket.socket, stop: Callable[[], Any]) -> None:
    """Serve an ASGI application with hypercorn until ``stop`` returns."""
    import hypercorn.config
    import hypercorn.trio

    config = hypercorn.config.Config()
    # hypercorn closes what it is given; the caller's socket stays the caller's.
    config.bind = [f"fd://{os.dup(listener.fileno())}"]
    config.graceful_timeout = DRAIN_SECONDS
    config.keep_alive_timeout = 75.0
    config.accesslog = None
    config.errorlog = logging.getLogger("kvasir_peer.http")
    await hypercorn.trio.serve(app, config, shutdown_trigger=stop, mode="asgi")


@dataclass(frozen=True)
class _Invitation:
    ticket: Ticket
    text: str
    own: bytes
    """The bridge's own secret, which tickets' secrets are made of."""


def _invite(settings: BridgeSettings, peer: str) -> _Invitation:
    """The swarm's ticket; the bridge's secret is made once and kept, so that old tickets work after a restart."""
    file = settings.home / "swarm.secret"
    try:
        own = bytes.fromhex(file.read_text().strip())
    except FileNotFoundError:
        own = secrets.token_bytes(tickets.SECRET_BYTES)
        file.touch(mode=0o600)
        file.write_text(own.hex())
    except ValueError:
        own = b""
    if len(own) != tickets.SECRET_BYTES:
        raise SettingsError(f"{file} does not hold 32 hexadecimal digits: remove it, and tickets begin anew")
    roles, expires = frozenset(settings.ticket_roles), int(time.time() + settings.ticket_lifetime)
    ticket = Ticket(
        settings.relays,
        peer,
        settings.swarm,
        roles,
        expires,
        tickets.secret_for(own, roles, expires),
    )
    return _Invitation(ticket, ticket.encode(), own)


Shown = TypeVar("Shown", StageReport, Ask, Coverage, Join)


def _with_secret(body: Shown, own: bytes, role: str) -> Shown:
    """What a peer sent, with the bridge's own secret in place of a credential that is good for the role, else none."""
    if not body.secret:
        return body
    good = tickets.admits(own, body.secret, role=role, now=time.time())
    return msgspec.structs.replace(body, secret=own.hex() if good else "")


class _Market:
    """The market behind a door that looks at tickets; see :class:`~kvasir_peer.api.experts.ExpertsService`."""

    def __init__(self, market: MarketService, own: bytes) -> None:
        self._market = market
        self._own = own
        self.would_give = market.would_give
        self.dispatcher = market.dispatcher
        self.dispatch_map = market.dispatch_map
        self.demand = market.demand
        self.recruitment = market.recruitment
        self.admitted = market.admitted

    async def volunteer(self, peer: str, ask: Ask) -> Given:
        """An idle peer asks for work."""
        return await self._market.volunteer(peer, _with_secret(ask, self._own, "volunteer"))

    async def coverage(self, caller: str | None, body: Coverage) -> Wiring:
        """A volunteer claims what it serves."""
        return await self._market.coverage(caller, _with_secret(body, self._own, "volunteer"))

    async def coordinator(self, peer: str, join: Join) -> Joined:
        """A coordinator is there."""
        return await self._market.coordinator(peer, _with_secret(join, self._own, "coordinator"))


class _RingOfBridge:
    """See :class:`~kvasir_peer.experts.market_service.RingView`."""

    def __init__(self, manager: RingManager) -> None:
        self._manager = manager

    def dispatchers(self) -> list[str]:
        """Peer ids of the plan's stages."""
        return [stage["peer"] for stage in self._manager.status()["stages"]]

    def admitted(self, peer: str) -> bool:
        """Peers that offered themselves as stages have shown a ticket."""
        return self._manager.admitted(peer)

    def slots(self) -> SlotReading | None:
        """Requests under way against the plan's slots."""
        requests = self._manager.requests
        if not requests.attached:
            return None
        slots = self._manager.settings.max_requests
        active = requests.statistics().active
        return SlotReading(min(active, slots), slots, max(0, active - slots), trio.current_time())


def _market_settings(settings: BridgeSettings, secret: bytes) -> MarketSettings:
    recruitment = RecruitmentSettings(
        saturation_threshold=settings.saturation_threshold,
        base=settings.base_replicas,
        boost=settings.boost_replicas,
        calm_after=settings.calm_after,
    )
    return MarketSettings(secret, settings.experts_dtype, settings.micro_batch_rows, recruitment)


async def run_bridge(
    settings: BridgeSettings, *, ready: Callable[[BridgeReady], None], report: Report
) -> None:
    """Serve until cancelled.

    Args:
        ready: told once, when stages can join and the HTTP server answers.
        report: told what happens.

    Raises:
        ModelFileError, SettingsError: said before anything is started.
        LinkError: no relay could be reached.
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(listen(settings.host, settings.port)))
        me = identity.load_or_create(settings.identity_path)
        report(Progress("start", me.peer_id))
        model = await open_model(settings.model, settings.name, settings.home / "manifests", report)
        invitation = _invite(settings, me.peer_id)
        async with Node.open(
            me.private_key,
            relays=settings.relays,
            invites=settings.relay_invites,
            listen=settings.listen,
            direct=settings.direct,
            muxer=settings.muxer,
        ) as node:
            await reach_relays(node, report)
            ring_settings = RingSettings(
                stages=settings.stages,
                secret=invitation.own,
                dtype=settings.boundary,
                batch_rows=settings.batch_rows,
                micro_batch_rows=settings.micro_batch_rows,
                max_in_flight=settings.max_in_flight,
                max_requests=settings.max_requests,
                context_length=model.context_length(settings.context_length),
                top_logprobs=settings.top_logprobs,
                engine=settings.engine,
            )
            lag = LoopLag()
            manager = RingManager(
                node,
                model.manifest,
                model.shape,
                ring_settings,
                sign=me.sign,
                report=report,
                lag=lag,
                measured=await MeasurementsFile.open(settings.home / "measured.json", time.time),
            )
            ledger = stack.enter_context(
                contextlib.closing(await trio.to_thread.run_sync(Ledger, settings.home / LEDGER_FILE))
            )
            market = MarketService(
                node,
                model.name,
                model.manifest,
                model.shape,
                _market_settings(settings, invitation.own),
                sign=me.sign,
                verify=identity.verify,
                ledger=ledger,
                report=report,
                ring=_RingOfBridge(manager) if settings.stages else None,
                web=public_address(settings.model),
            )
            bridge = Bridge(model, manager, market, node, lag, invitation.ticket, settings.max_queue)
            control = [*swarm_routes(bridge), *expert_routes(_Market(market, invitation.own))]
            node.serve_http(Starlette(routes=control))
            node.handle(ring.PROTOCOL, ring.MAX_OPENING_FRAME, manager.take_link)
            node.handle(
                chunks.PROTOCOL,
                chunks.MAX_WANT_FRAME,
                lambda link: serve_chunks(link, lambda: [model.chunks]),
                accept=bridge.admitted,
            )
            port = listener.getsockname()[1]
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            app = openai.create_app(
                bridge,
                keys=settings.api_keys,
                routes=[*metrics_routes(bridge), *dashboard_routes(bridge), *control],
                host=settings.host,
            )
            async with trio.open_nursery() as nursery:
                stop = trio.Event()
                nursery.start_soon(lag.run)
                if settings.stages:
                    nursery.start_soon(manager.run)
                nursery.start_soon(market.run)
                nursery.start_soon(serve_http, app, listener, stop.wait)
                ready(BridgeReady(invitation.text, f"http://{host}:{port}/v1", model.name, me.peer_id))
                waits_for = f"{settings.stages} stages" if settings.stages else "a coordinator"
                report(Progress("plan", f"waiting for {waits_for} to join with the ticket"))
                await trio.sleep_forever()
