"""The bridge's hand on one model's ring: polls and links go in, signed plans and *go* come out.

A thin shell around :mod:`kvasir_peer.ring.stage_market`, which decides who gets which layers and what follows when
something breaks; here its decisions are carried out.
"""

from __future__ import annotations

import base64
import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from kvasir_peer import identity
from kvasir_peer.agent.loop_lag import LoopLag
from kvasir_peer.engines.footprint import NO_FLOATS, floats_of
from kvasir_peer.errors import LinkError, RefusedError, UsageError, WireError
from kvasir_peer.progress import Progress
from kvasir_peer.ring import link_probe, planner
from kvasir_peer.ring import stage_market as market
from kvasir_peer.ring.admission import leading_to, link_times, reported
from kvasir_peer.ring.heartbeat import beat
from kvasir_peer.ring.link_times import MAX_MEASURED, LinkTimes
from kvasir_peer.ring.measurements import Measurements, MeasurementsFile
from kvasir_peer.ring.offers import Forecast, ModelNeeds, Wishes
from kvasir_peer.ring.plan import Plan, PlanStage, sign_plan
from kvasir_peer.ring.questions import Question, unanswered
from kvasir_peer.ring.replanning import forecast_now
from kvasir_peer.ring.requests import RingRequests
from kvasir_peer.ring.taints import TaintLog
from kvasir_peer.ring.telemetry import (
    RingState,
    RingStatistics,
    RingTelemetry,
    RingWindow,
    Timeline,
)
from kvasir_peer.ring.volunteering import Orders, Report, Source, StageFigures
from kvasir_peer.serving.widths import Widths
from kvasir_peer.wire import ring

if TYPE_CHECKING:
    from kvasir_peer.engines.architectures import ModelShape
    from kvasir_peer.models.manifest import Manifest
    from kvasir_peer.net.link import Link
    from kvasir_peer.net.node import Node, PeerEvent

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25  # between two looks of the market at what time alone changes
OPEN_SECONDS = 40.0  # to open the requests link, and for both tokens links to come
RETRY_SECONDS = 0.2  # between two tries to reach the head
HELLO_SECONDS = 10.0  # for the first frame of a link
IN_FLIGHT_PER_STAGE = 3  # batches, where nothing is set: one computed, one waiting, one on the way
MAX_AUTOMATIC_IN_FLIGHT = 64
KV_VALUE_BYTES = 4  # float32, what the engines keep on the CPU
PLAN_SECONDS = 10.0  # for one plan; 256 peers and 80 layers take two seconds of one core
PLANNERS = 2  # threads: a ring to mend must not wait for a question of less haste
KEEP_SECONDS = 10.0  # between two looks at whether something measured is new and to be kept
LAST_KEEP_SECONDS = 2.0  # for keeping it when the bridge ends


@dataclass(frozen=True)
class RingSettings:
    """What the bridge's owner decides; widths as in :class:`~kvasir_peer.serving.widths.Widths`, 0 for automatic."""

    stages: int
    secret: bytes
    dtype: str
    batch_rows: int
    micro_batch_rows: int
    max_in_flight: int
    max_requests: int
    context_length: int
    top_logprobs: int
    engine: str = "auto"

    def widths(self) -> Widths:
        """The declared widths of the ring."""
        automatic = min(MAX_AUTOMATIC_IN_FLIGHT, IN_FLIGHT_PER_STAGE * max(2, self.stages))
        return Widths(
            max(self.batch_rows, self.micro_batch_rows),
            self.micro_batch_rows,
            self.max_in_flight or automatic,
            self.max_requests,
            self.context_length,
            self.top_logprobs,
        )


def needs_of(manifest: Manifest, shape: ModelShape) -> ModelNeeds:
    """The sizes that planning goes by."""
    root = manifest.root
    head = root.page("head").n_bytes
    head_floats, tail_floats = (floats_of(manifest.pages[name].tensors) for name in ("head", "tail"))
    return ModelNeeds(
        model=manifest.id,
        n_embd=shape.n_embd,
        vocab=shape.n_vocab,
        layer_bytes=tuple(root.page(f"blk.{layer}").n_bytes for layer in range(root.n_layer)),
        head_bytes=head,
        tail_bytes=root.page("tail").n_bytes + (head if root.tied else 0),
        kv_bytes=KV_VALUE_BYTES * max(sum(layer.attention.cache_widths) for layer in shape.layers),
        layer_floats=tuple(
            floats_of(manifest.pages[f"blk.{layer}"].tensors) for layer in range(root.n_layer)
        ),
        head_floats=head_floats,
        tail_floats=tail_floats + (head_floats if root.tied else NO_FLOATS),
    )


@dataclass(frozen=True)
class RingOverview:
    """How a ring stands.

    Attributes:
        state: in a name and in words.
        window: the last seconds.
        totals: counters since the bridge started.
        epoch: of the plan, 0 without one.
        peers: that offer themselves now, stages included.
        refused_peers: polls without a good ticket.
        figures: what each stage's peer last said of itself.
    """

    state: RingState
    window: RingWindow
    totals: RingStatistics
    epoch: int
    peers: int
    refused_peers: int
    figures: tuple[StageFigures | None, ...]


class RingManager:
    """One ring at its bridge.

    Args:
        node: the bridge's.
        manifest, shape: of the model.
        settings: the owner's.
        sign: with the bridge's key.
        report: told what happens.
        lag: the bridge's own loop, shown in the status.
        measured: file for what peers and links were measured at; None keeps nothing.

    Raises:
        PlanError: no ring can be as the settings say.
    """

    def __init__(
        self,
        node: Node,
        manifest: Manifest,
        shape: ModelShape,
        settings: RingSettings,
        *,
        sign: Callable[[bytes], bytes],
        report: Callable[[Progress], None],
        lag: LoopLag,
        measured: MeasurementsFile | None = None,
    ) -> None:
        self.settings = settings
        self.requests = RingRequests()
        self._node = node
        self._sign = sign
        self._tell = report
        self._lag = lag
        needs = needs_of(manifest, shape)
        wishes = Wishes(settings.widths(), stages=settings.stages, dtype=settings.dtype)
        if settings.stages:
            planner.check_wishes(needs, wishes)
        self._market = market.MarketState(
            needs=needs,
            wishes=wishes,
            bridge=node.peer_id,
            plan_id=secrets.token_hex(8),
            bridge_addresses=leading_to(node.peer_id, node.addresses()),
        )
        self._reports: dict[str, Report] = {}
        self._polls: dict[str, trio.Event] = {}
        self._plan: Plan | None = None
        self._signed = b""
        self._going = False
        self._token_links: dict[str, Link] = {}
        self._links_changed = trio.Event()
        self._refused = 0
        self._measured_file = measured
        self._measured = measured.content if measured is not None else Measurements()
        self._link_times = LinkTimes(node.peer_id, self._measured.ways())
        self._market.links = self._link_times.links
        self._questions: dict[str, Question] = {}  # to be thought about next, by name
        self._thinking: set[str] = set()
        self._planners = trio.CapacityLimiter(PLANNERS)
        self.telemetry = RingTelemetry()
        self._nursery: trio.Nursery | None = None
        node.on_peer(self._peer_event)

    # -- events into the market, decisions out of it --------------------------------------------------------

    def _apply(self, event: market.Event) -> None:
        self._market, decisions = market.apply(self._market, event, trio.current_time())
        for decision in decisions:
            self._carry_out(decision)
        for peer in self._reports.keys() - self._market.members.keys():
            self._forget(peer)
        self.requests.waits_for(self.missing(), mending=self._market.mends)

    def _carry_out(self, decision: market.Decision) -> None:
        match decision:
            case market.Adopt(plan, _, _, why):
                self._plan, self._going = plan, False
                self._signed = sign_plan(plan, self._sign)
                self._tell(Progress("plan", f"epoch {plan.epoch} ({why}): {describe(plan)}"))
                for stage in plan.stages:
                    self._wake(stage.peer)
            case market.Go(plan):
                self._going = True
                assert self._nursery is not None
                self._nursery.start_soon(self._connect, plan)
            case market.Halt(_, why):
                self._tell(Progress("problem", f"the ring stands still: {why}"))
                self._halt(why)
            case market.Wake(peer):
                self._wake(peer)
            case market.GiveUp(why):
                self.requests.give_up(why)
            case market.Note(text):
                self._tell(Progress("plan", text))
            case market.Think(name, question):
                self._questions[name] = question
                if self._nursery is not None:
                    self._begin_thinking(self._nursery, name)

    def _begin_thinking(self, nursery: trio.Nursery, name: str) -> None:
        if name not in self._thinking:
            self._thinking.add(name)
            nursery.start_soon(self._think, name)

    async def _think(self, name: str) -> None:
        """Answer the questions of one name, the newest only, beside the event loop."""
        while (question := self._questions.pop(name, None)) is not None:
            answer = unanswered(question, PLAN_SECONDS)
            with trio.move_on_after(PLAN_SECONDS):
                answer = await trio.to_thread.run_sync(
                    question.answer, abandon_on_cancel=True, limiter=self._planners
                )
            self._apply(market.Thought(name, question, answer))
        self._thinking.discard(name)

    def _forget(self, peer: str) -> None:
        """Nothing is kept of a peer that is gone: over a bridge's life any number of them come by."""
        del self._reports[peer]
        self._link_times.forget(peer)
        self._wake(peer)

    def _wake(self, peer: str) -> None:
        held = self._polls.pop(peer, None)
        if held is not None:
            held.set()

    def _halt(self, why: str) -> None:
        self._going = False
        self.telemetry.ended(trio.current_time())
        self.requests.detach(f"the ring is being mended: {why}")
        links, self._token_links = list(self._token_links.values()), {}
        for link in links:
            link.close()
        self._links_change()

    def _links_change(self) -> None:
        self._links_changed.set()
        self._links_changed = trio.Event()

    def _peer_event(self, event: PeerEvent) -> None:
        if event.peer in self._reports and self._nursery is not None:
            gone = event.state == "gone"
            if gone:
                self._link_times.forget(event.peer)  # it may come back from somewhere else
            self._apply(market.Disconnected(event.peer) if gone else market.Connected(event.peer))

    async def run(self) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for name in list(self._questions):
                self._begin_thinking(nursery, name)
            nursery.start_soon(self._keep_measured)
            while True:
                addresses = leading_to(self._node.peer_id, self._node.addresses())
                if addresses != self._market.bridge_addresses:
                    self._apply(market.AddressesChanged(addresses))
                self._apply(market.Tick(self.requests.statistics().active))
                await trio.sleep(TICK_SECONDS)

    async def _keep_measured(self) -> None:
        """Write what was measured to its file, now and then, and at the end."""
        file = self._measured_file
        if file is None:
            return
        try:
            while True:
                await trio.sleep(KEEP_SECONDS)
                await file.keep()
        finally:
            with trio.move_on_after(LAST_KEEP_SECONDS, shield=True):
                await file.keep()

    # -- what peers say -------------------------------------------------------------------------------------

    def admitted(self, peer: str) -> bool:
        """Whether the peer has shown a good ticket."""
        return peer in self._reports

    async def poll(self, peer: str, report: Report) -> Orders:
        """Take a stage's report, and answer when there is news for it or its wait is over.

        Raises:
            RefusedError: it shows no good ticket.
        """
        self._admit(peer, report)
        self._reports[peer] = report
        self._note_figures(peer, report)
        self._take_links(peer, report)
        known = peer in self._market.members
        offer = self._measured.completed(peer, report.offer, self._market.needs.model, time.time())
        self._apply(reported(peer, msgspec.structs.replace(report, offer=offer), self._market.needs))
        if peer not in self._market.members:
            await trio.sleep(report.wait)  # so that it does not ask again at once
            return Orders("wait", f"{market.MAX_MEMBERS} peers have volunteered here already")
        if not known:
            self._measure_soon()
        orders = self._news(peer, report)
        if orders is None and report.wait > 0 and not self._links_due(peer):
            self._wake(peer)  # an older poll of the same peer has nothing to wait for any more
            held = self._polls[peer] = trio.Event()
            try:
                with trio.move_on_after(report.wait):
                    await held.wait()
            finally:
                if self._polls.get(peer) is held:
                    del self._polls[peer]
            orders = self._news(peer, report)
        return self._with_links(peer, orders or self._standing(peer, report))

    def _links_due(self, peer: str) -> bool:
        return bool(self._link_times.due(peer, list(self._market.members), trio.current_time()))

    def _measure_soon(self) -> None:
        """Somebody has come: whoever is to measure the way there, or to be measured, hears it at once."""
        for other in list(self._polls):
            self._wake(other)

    def _take_links(self, peer: str, report: Report) -> None:
        """What a peer has measured goes to the planner."""
        now, members = trio.current_time(), list(self._market.members)
        taken = False
        for other, way in link_times(report).items():
            if self._link_times.take(peer, other, way, members, now):
                self._measured.way(peer, other, way, time.time())
                taken = True
        if taken:
            self._apply(market.LinksMeasured(self._link_times.links))

    def _with_links(self, peer: str, orders: Orders) -> Orders:
        """Have a peer measure its way to others, and let it be measured by them."""
        members = list(self._market.members)
        now = trio.current_time()
        due = self._link_times.due(peer, members, now)
        self._link_times.asked(peer, due, now)
        measure: list[Source] = []
        for other in due:
            if other == self._node.peer_id:
                measure += self._sources_here()
            elif other in self._reports:
                addresses = leading_to(other, self._reports[other].offer.addresses)
                measure.append(Source(other, addresses))
        neighbours = [member for member in members[:MAX_MEASURED] if member != peer]
        return msgspec.structs.replace(orders, measure=tuple(measure), neighbours=tuple(neighbours))

    def _note_figures(self, peer: str, report: Report) -> None:
        plan = self._plan
        if report.figures is None or plan is None or (report.plan, report.epoch) != (plan.id, plan.epoch):
            return
        index = plan.index_of(peer)
        if index is not None:
            self.telemetry.figures(index, peer, report.epoch, report.figures)

    def _admit(self, peer: str, report: Report) -> None:
        if peer in self._reports:
            return
        try:
            secret = bytes.fromhex(report.secret)
        except ValueError:
            secret = b""
        if not hmac.compare_digest(secret, self.settings.secret):
            self._refused += 1
            raise RefusedError(
                "this ticket is not good here: ask whoever runs the bridge for a new one", peer=peer
            )

    def _news(self, peer: str, report: Report) -> Orders | None:
        """What the peer does not know or do yet, or None."""
        order = market.order_for(self._market, peer)
        plan = order.plan
        if order.kind == "stage" and plan is not None:
            if (report.plan, report.epoch) != (plan.id, plan.epoch):
                return self._with_plan("stage", order, plan)
            if order.go and not report.running and report.state == "loaded":
                return Orders("stage", order.why, epoch=plan.epoch, go=True, model=plan.model)
            return None
        if order.kind == "standby" and self._plan is not None:
            if (report.standby, report.preload) != (order.slice, order.preload):
                return self._with_plan("standby", order, self._plan)
            return None
        if order.kind == "retire" or (order.kind == "wait" and report.epoch):
            return Orders(order.kind, order.why)
        return None

    def _with_plan(self, assigned: str, order: market.Order, plan: Plan) -> Orders:
        signed = base64.b64encode(self._signed).decode()
        return Orders(
            "stage" if assigned == "stage" else "standby",
            order.why,
            plan=signed,
            epoch=plan.epoch,
            model=plan.model,
            slice=order.slice,
            preload=order.preload,
            sources=self._sources_here(),
        )

    def _sources_here(self) -> tuple[Source, ...]:
        return (Source(self._node.peer_id, self._market.bridge_addresses),)

    def _standing(self, peer: str, report: Report) -> Orders:
        """The answer when nothing is new: the peer goes on with what it does."""
        order = market.order_for(self._market, peer)
        return Orders(order.kind, order.why or self._market.missing, epoch=report.epoch)

    # -- the ring's links -----------------------------------------------------------------------------------

    def _current(self, plan: Plan) -> bool:
        return self._going and self._plan is plan

    async def _connect(self, plan: Plan) -> None:
        """Open the requests link to the head, wait for the tokens links, and submit; then watch the head's link."""
        head = plan.stages[0].peer
        try:
            link = await self._open_requests(plan, head)
            with trio.fail_after(OPEN_SECONDS):
                while len(self._token_links) < 2 and self._current(plan):
                    await self._links_changed.wait()
            if not self._current(plan):
                link.close()
                return
            self.telemetry.began(plan, trio.current_time())
            await self.requests.attach(plan, link)
            self._apply(market.RingServes(plan.epoch))
            self._tell(Progress("ready", f"the ring serves, epoch {plan.epoch}"))
            await self._watch(plan, link)
        except trio.TooSlowError:
            self._broke(plan, f"head and tail did not open their links within {OPEN_SECONDS:.0f} s")
        except (LinkError, WireError) as error:
            self._broke(plan, f"the link to the head: {error}", head)

    async def _watch(self, plan: Plan, link: Link) -> None:
        """Ping the head, and take nothing from it here but its answers; both ends see when the other is silent."""
        codec = ring.codec(plan.limits())

        async def ping() -> None:
            try:
                await beat(link, codec, pings=True)
            except LinkError as error:
                self._broke(plan, f"the link to the head: {error}", link.remote_peer)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ping)
            nursery.start_soon(self.requests.send_cancels, link)
            await self._take_answers(plan, link)
            nursery.cancel_scope.cancel()

    async def _take_answers(self, plan: Plan, link: Link) -> None:
        codec = ring.codec(plan.limits())
        try:
            while True:
                message, _ = codec.decode(await link.receive())
                if isinstance(message, ring.Refusal):
                    raise WireError(message.code, message.reason, peer=link.remote_peer)
        except (LinkError, WireError) as error:
            self._broke(plan, f"the link to the head: {error}", link.remote_peer)

    async def _open_requests(self, plan: Plan, head: str) -> Link:
        reason = "no answer"
        with trio.move_on_after(OPEN_SECONDS):
            while self._current(plan):
                link: Link | None = None
                try:
                    link = await self._node.open_link(
                        head, ring.PROTOCOL, max_frame=ring.MAX_OPENING_FRAME, addresses=plan.addresses(head)
                    )
                    await link.send(ring.OPENING.encode(ring.Hello("requests", plan.id, plan.epoch)))
                    answer, _ = ring.OPENING.decode(await link.receive())
                    if isinstance(answer, ring.Welcome):
                        link.max_frame = ring.max_request_frame(plan.limits())
                        welcomed, link = link, None
                        return welcomed
                    reason = getattr(answer, "reason", "no welcome")
                except (LinkError, WireError, UsageError) as error:
                    reason = str(error)
                finally:
                    if link is not None:
                        link.close()
                await trio.sleep(RETRY_SECONDS)
        raise LinkError(reason, peer=head)

    async def take_link(self, link: Link) -> None:
        """The tail or the head opens its tokens link."""
        with trio.move_on_after(HELLO_SECONDS) as scope:
            hello, _ = ring.OPENING.decode(await link.receive())
        if scope.cancelled_caught or not isinstance(hello, ring.Hello):
            raise WireError("unexpected", "a ring link must begin with a hello", peer=link.remote_peer)
        if hello.purpose == "probe" and self.admitted(link.remote_peer):
            await link_probe.answer(link)
            return
        if hello.purpose != "tokens":
            raise WireError("unexpected", "a bridge takes tokens links", peer=link.remote_peer)
        plan = self._plan
        if plan is None or not self._current(plan) or (hello.plan, hello.epoch) != (plan.id, plan.epoch):
            await self._refuse(link, "epoch", f"epoch {hello.epoch} is not the present one")
            return
        if link.remote_peer not in (plan.stages[0].peer, plan.stages[-1].peer):
            await self._refuse(link, "stranger", "only head and tail of the ring send tokens here")
            raise WireError("stranger", f"{link.remote_peer} is neither head nor tail", peer=link.remote_peer)
        link.max_frame = ring.max_result_frame(plan.limits())
        await link.send(ring.OPENING.encode(ring.Welcome(plan.epoch)))
        self._token_links[link.remote_peer] = link
        self._links_change()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_tokens, plan, link)
            await self._guard_tokens(plan, link, self._take_news(plan, link))
            nursery.cancel_scope.cancel()

    async def _watch_tokens(self, plan: Plan, link: Link) -> None:
        await self._guard_tokens(plan, link, beat(link, ring.codec(plan.limits()), pings=False))

    async def _guard_tokens(self, plan: Plan, link: Link, task: Awaitable[None]) -> None:
        try:
            await task
        except (LinkError, WireError) as error:
            self._broke(plan, f"the tokens link of {link.remote_peer}: {error}", link.remote_peer)

    async def _refuse(self, link: Link, code: str, reason: str) -> None:
        await link.send(ring.OPENING.encode(ring.Refusal(code, reason)))

    async def _take_news(self, plan: Plan, link: Link) -> None:
        codec = ring.codec(plan.limits())
        is_tail = link.remote_peer == plan.stages[-1].peer
        taints = TaintLog(plan, identity.verify)
        while True:
            message, _ = codec.decode(await link.receive())
            if not self._current(plan):
                return
            if isinstance(message, ring.Ping):
                await link.send(codec.encode(ring.Pong(message.nonce)))
            elif is_tail and isinstance(message, ring.Result):
                self.requests.result(message)
                self.telemetry.returned(message, trio.current_time())
            elif is_tail and isinstance(message, ring.Tainted):
                taints.take(message, link.remote_peer)
                answers, tokens = self.requests.tainted(message)
                if answers or tokens:
                    self._tell(
                        Progress(
                            "problem",
                            f"a worker of stage {message.stage + 1} lied: {answers} answers are computed again from "
                            f"there, {tokens} tokens that may be wrong were given out before",
                        )
                    )
            elif not is_tail and isinstance(message, ring.Composed):
                self.requests.composed(message)
                self.telemetry.composed(message, trio.current_time())
            elif not is_tail and isinstance(message, ring.Ended):
                self.requests.ended(message)
            else:
                raise WireError("unexpected", f"{type(message).__name__} from {link.remote_peer}")

    def _broke(self, plan: Plan, why: str, peer: str = "") -> None:
        if self._current(plan):
            self._apply(market.RingBroke(plan.epoch, why, peer))

    # -- what people ask ------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """``gathering`` peers, ``loading``, ``starting``, ``serving`` or ``mending``."""
        phase = self._market.phase
        return "loading" if phase == "preparing" else phase

    def missing(self) -> str:
        """What stands between a client and an answer; empty when nothing does."""
        if self.requests.attached:
            return ""
        plan, text = self._plan, self._market.missing
        if self._market.phase == "preparing" and plan is not None:
            for stage in plan.stages:
                report = self._reports.get(stage.peer)
                if report is not None and report.transfer is not None and report.transfer.total:
                    return f"{text}, {100 * report.transfer.done // report.transfer.total} % of one slice is there"
        return text or "no ring has been planned yet"

    def status(self) -> Mapping[str, Any]:
        """Plan, state and figures, for ``GET /api/ring/{model}``."""
        plan, forecast = self._plan, self._forecast()
        lag = self._lag.statistics()
        window = self._window()
        state = self._ring_state(window)
        totals = self.telemetry.statistics().stages
        return {
            "state": self.state,
            "missing": self.missing(),
            "ring_state": msgspec.to_builtins(state),
            "window": {
                name: value for name, value in msgspec.to_builtins(window).items() if name != "stages"
            },
            "epoch": plan.epoch if plan else 0,
            "plan": plan.id if plan else "",
            "widths": msgspec.structs.asdict(plan.widths) if plan else None,
            "dtype": self.settings.dtype,
            "wanted_stages": self.settings.stages,
            "forecast": msgspec.to_builtins(forecast) if forecast else None,
            "words": self._words(),
            "refused_peers": self._refused,
            "requests": msgspec.to_builtins(self.requests.statistics()),
            "bridge": {
                "peer": self._node.peer_id,
                "lag_p99_ms": lag.p99_ms,
                "ring_bytes": self._ring_bytes(),
            },
            "stages": [
                {
                    **self._stage_status(index, stage),
                    "window": msgspec.to_builtins(window.stages[index])
                    if index < len(window.stages)
                    else None,
                    "totals": msgspec.to_builtins(totals[index]) if index < len(totals) else None,
                }
                for index, stage in enumerate(plan.stages)
            ]
            if plan
            else [],
            "others": [
                self._other_status(peer) for peer in self._market.members if not self._has_place(peer)
            ],
        }

    def _forecast(self) -> Forecast | None:
        """What the ring should do, by what has been measured until now."""
        state = self._market
        if state.plan is None:
            return None
        ground = state.ground(member.offer for member in state.members.values())
        return forecast_now(state.plan, ground) or state.forecast

    def _words(self) -> list[str]:
        """Plan and forecast for a person to read."""
        state, forecast = self._market, self._forecast()
        if state.plan is None or forecast is None:
            waiting = [f"{place.peer}: {place.why}" for place in state.places]
            return [self.missing() or "no ring has been planned yet", *waiting]
        return planner.describe(state.plan, state.needs, forecast, state.places)

    def _ring_bytes(self) -> int:
        """Bytes of frames that the bridge has sent and received on this epoch's ring links."""
        links = [*self._token_links.values(), *self.requests.links()]
        figures = [link.statistics() for link in links]
        return sum(f.bytes_sent + f.bytes_received for f in figures)

    def _window(self) -> RingWindow:
        self._note_bridge_links()
        return self.telemetry.window(trio.current_time())

    def _note_bridge_links(self) -> None:
        if self._plan is not None:
            head, tail = self._plan.stages[0].peer, self._plan.stages[-1].peer
            self.telemetry.bridge_links(self._round_trip(head), self._round_trip(tail))

    def _round_trip(self, peer: str) -> float:
        link = self._token_links.get(peer)
        return (link.statistics().round_trip_p50 or 0.0) if link is not None else 0.0

    def _ring_state(self, window: RingWindow) -> RingState:
        if self.state != "serving":
            return RingState("", None, None, self.missing())
        return self.telemetry.state(window, self.requests.statistics().active)

    def statistics(self) -> RingOverview:
        """A snapshot."""
        plan, window = self._plan, self._window()
        reports = [self._reports.get(stage.peer) for stage in plan.stages] if plan else []
        return RingOverview(
            self._ring_state(window),
            window,
            self.telemetry.statistics(),
            plan.epoch if plan else 0,
            len(self._market.members),
            self._refused,
            tuple(report.figures if report else None for report in reports),
        )

    def timeline(self, seconds: float, after: int) -> Timeline:
        """The last seconds of the ring, for ``GET /api/ring/{model}/timeline``."""
        self._note_bridge_links()
        return self.telemetry.timeline(
            trio.current_time(), seconds, after=after, active=self.requests.active_ids()
        )

    def _has_place(self, peer: str) -> bool:
        return self._plan is not None and self._plan.index_of(peer) is not None

    def _stage_status(self, index: int, stage: PlanStage) -> Mapping[str, Any]:
        report = self._reports.get(stage.peer) if stage.peer in self._market.members else None
        return {
            "stage": index,
            "peer": stage.peer,
            "first": stage.first,
            "end": stage.end,
            "state": report.state if report else "gone",
            "why": market.order_for(self._market, stage.peer).why,
            "reason": report.reason if report else "",
            "engine": report.offer.engine if report else "",
            "transfer": msgspec.to_builtins(report.transfer) if report and report.transfer else None,
            "figures": msgspec.to_builtins(report.figures) if report and report.figures else None,
        }

    def _other_status(self, peer: str) -> Mapping[str, Any]:
        order = market.order_for(self._market, peer)
        report = self._reports[peer]
        return {
            "peer": peer,
            "role": order.kind,
            "slice": order.slice,
            "loaded": report.offer.loaded,
            "state": report.state,
            "why": order.why,
        }


def describe(plan: Plan) -> str:
    """A plan in one line."""
    return ", ".join(f"{stage.peer[-6:]} layers {stage.first}-{stage.end - 1}" for stage in plan.stages)
