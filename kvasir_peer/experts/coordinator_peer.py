"""The life of a coordinator: joins, fetches and loads the whole model, takes requests from the bridge, dispatches."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import trio

from kvasir_peer.agent.chunk_transfer import Download, TransferProgress
from kvasir_peer.agent.manifest_fetch import fetch_manifest
from kvasir_peer.agent.membership import Membership
from kvasir_peer.engines import orders
from kvasir_peer.engines.architectures import ModelShape
from kvasir_peer.errors import EngineError, LinkError, RefusedError, WireError
from kvasir_peer.experts.coordinator import Coordinator
from kvasir_peer.experts.dispatch_policy import DispatchSettings, SlotReading
from kvasir_peer.experts.dispatcher import EXPERT_BUFFERS, Dispatcher, DispatcherConfig
from kvasir_peer.experts.market_client import MarketClient, download_sources
from kvasir_peer.experts.market_figures import figures_of
from kvasir_peer.experts.patience import Patience
from kvasir_peer.experts.verification import Mode
from kvasir_peer.experts.volunteering import Join, Joined
from kvasir_peer.models.slices import StageSlice, chunks_of
from kvasir_peer.net.link import Priority
from kvasir_peer.progress import Progress, Report, silent
from kvasir_peer.serving.widths import Widths
from kvasir_peer.wire import coordinator as wire
from kvasir_peer.wire import ring
from kvasir_peer.wire.experts import rows_bytes
from kvasir_peer.wire.tensors import tensor_bytes

if TYPE_CHECKING:
    from kvasir_peer.agent.engine import Engine
    from kvasir_peer.models.store import ChunkStore
    from kvasir_peer.net.link import Link
    from kvasir_peer.net.node import Node

logger = logging.getLogger(__name__)

JOIN_WAIT = 10.0  # seconds that the bridge holds the heartbeat
HELLO_SECONDS = 10.0
NEWS_QUEUED = 4096  # messages for the bridge that wait for its link


@dataclass(frozen=True)
class CoordinatorConfig:
    """What the role decides before the coordinator starts.

    Attributes:
        slots: requests computed at once.
        context_length: positions of each; 0 is the model's, at most 4,096.
        remote: see :class:`~kvasir_peer.experts.dispatcher.DispatcherConfig`.
        expert_floor_ms: least time of the own experts for each row-expert pair; for measurements.
    """

    membership: Membership
    slots: int
    context_length: int
    micro_batch_rows: int
    max_in_flight: int
    top_logprobs: int
    settings: DispatchSettings
    mode: Mode = "sampled"
    remote: Literal["auto", "all"] = "auto"
    expert_floor_ms: float = 0.0


def experts_used(shape: ModelShape) -> int:
    """The most experts that a row is routed to."""
    return max((layer.moe.n_used for layer in shape.layers if layer.moe is not None), default=1)


def whole_model(
    shape: ModelShape,
    widths: Widths,
    weights: orders.StoreWeights | orders.GgufWeights,
    *,
    engine: str,
    device: str,
    precision: str,
    threads: int,
    memory: int = 0,
    expert_floor_ms: float = 0.0,
) -> orders.LoadStage:
    """Load all layers as one stage, with room for routed rows in its arena."""
    rows = widths.micro_batch_rows
    room = max(
        rows_bytes(rows, experts_used(shape), shape.n_embd, "f32"), tensor_bytes("f32", rows, shape.n_embd)
    )
    return orders.LoadStage(
        job=0,
        weights=weights,
        engine=engine,
        stage=0,
        stages=1,
        first=0,
        end=shape.n_layer,
        n_layer=shape.n_layer,
        n_embd=shape.n_embd,
        vocab=shape.n_vocab,
        n_slots=widths.max_requests,
        context_length=widths.context_length,
        max_rows=rows,
        dtype="f32",
        top_logprobs=widths.top_logprobs,
        precision=precision,
        threads=threads,
        device=device,
        arena=orders.ArenaShape(widths.max_in_flight + 1 + EXPERT_BUFFERS, room),
        memory_limit=memory,
        expert_floor_ms=expert_floor_ms,
    )


class CoordinatorPeer:
    """Use :meth:`run`."""

    def __init__(
        self,
        node: Node,
        engine: Engine,
        store: ChunkStore,
        config: CoordinatorConfig,
        *,
        verify: Callable[[str, bytes, bytes], bool],
        report: Report = silent,
    ) -> None:
        self._node = node
        self._engine = engine
        self._store = store
        self._config = config
        self._membership = config.membership
        self._verify = verify
        self._tell = report
        self._run = secrets.randbits(62)
        self._links: dict[Link, trio.MemorySendChannel[list[bytes]]] = {}
        self._core: Coordinator | None = None
        self._dispatcher: Dispatcher | None = None
        self._welcome: wire.Welcome | None = None
        self._model = ""
        self._crashed = trio.Event()

    # -- life -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            RefusedError: the bridge does not let this peer in.
            ResourceError: the model does not fit.
        """
        mine = self._membership
        async with self._node.http_client(mine.bridge, mine.bridge_addresses) as http:
            self._market = MarketClient(http, mine.bridge, self._verify)
            joined = await self._join()
            order, shape, widths = await self._fetch(joined)
            self._model = joined.manifest
            await self._reload(order)
            await self._serve(order, shape, widths)

    async def _join(self) -> Joined:
        patience = Patience()
        while True:
            try:
                self._tell(Progress("plan", "asks the bridge for its model"))
                return await self._market.join(Join(self._membership.secret))
            except LinkError as error:
                self._tell(Progress("plan", f"the bridge does not answer; trying again ({error})"))
                await patience.pause()

    async def _fetch(self, joined: Joined) -> tuple[orders.LoadStage, ModelShape, Widths]:
        from kvasir_peer.engines.architectures import parse
        from kvasir_peer.models.sources import StoreSource

        config, mine = self._config, self._membership
        file = mine.manifest(joined.manifest)
        part = StageSlice(0, joined.n_layer, joined.n_layer)
        manifest = await fetch_manifest(self._market.http, joined.manifest, part, file)
        chunks = chunks_of(manifest, part)

        def progress(p: TransferProgress) -> None:
            self._tell(Progress("fetch", f"fetching {joined.model}", p.done_bytes, p.total_bytes, "bytes"))

        await trio.to_thread.run_sync(self._store.ensure_room, chunks)
        await trio.to_thread.run_sync(self._store.pin, "coordinator", [c.hash for c in chunks])
        await Download(self._node, self._store, chunks, progress).run(download_sources(joined.sources))
        source = await trio.to_thread.run_sync(StoreSource, self._store, manifest, part)
        shape = parse(source.metadata, source.tensors)
        widths = Widths(
            max(256, config.micro_batch_rows),
            config.micro_batch_rows,
            config.max_in_flight,
            config.slots,
            config.context_length or min(shape.context_length, 4096),
            config.top_logprobs,
        )
        order = whole_model(
            shape,
            widths,
            orders.StoreWeights(str(self._store.root), str(file)),
            engine=mine.engine,
            device=mine.device,
            precision=mine.precision,
            threads=mine.threads,
            memory=mine.memory,
            expert_floor_ms=config.expert_floor_ms,
        )
        return order, shape, widths

    async def _load(self, order: orders.LoadStage) -> None:
        def progress(done: int, total: int) -> None:
            self._tell(Progress("load", "loading the model", done, total, "bytes"))

        self._crashed = trio.Event()
        self._engine.crashed = self._crashed.set
        answer = await self._engine.load_stage(order, progress)
        for note in answer.notes:
            logger.warning("%s", note)
        self._tell(
            Progress("load", f"loaded in {answer.seconds:.1f} s, {answer.resident_bytes / 1e6:.0f} MB")
        )

    async def _serve(self, order: orders.LoadStage, shape: ModelShape, widths: Widths) -> None:
        config = self._config
        layers = tuple(layer.index for layer in shape.layers if layer.moe is not None)
        dispatcher: Dispatcher | None = None
        if layers:
            dispatcher = Dispatcher(
                self._node,
                self._engine,
                DispatcherConfig(
                    self._model,
                    layers,
                    shape.n_embd,
                    experts_used(shape),
                    config.membership.precision,
                    config.settings,
                    config.mode,
                    config.remote,
                ),
                read_slots=self._read_slots,
                caught=lambda peer, why, rewinds: core.caught(peer, why, rewinds),
            )
        self._dispatcher = dispatcher
        core = self._core = Coordinator(self._engine, widths, self._news, dispatcher)
        self._welcome = wire.Welcome(config.slots, order.context_length, order.vocab, config.top_logprobs)
        self._node.handle(
            wire.PROTOCOL,
            wire.MAX_OPENING_FRAME,
            self._take_link,
            accept=lambda p: p == config.membership.bridge,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._heartbeat)
            if dispatcher is not None:
                await nursery.start(dispatcher.run)
                nursery.start_soon(self._market.follow_map, self._model, 0, dispatcher.follow)
            self._tell(Progress("ready", f"takes {config.slots} requests at once"))
            while True:
                try:
                    await core.run()
                except EngineError as error:
                    self._tell(Progress("problem", str(error)))
                    await self._reload(order)
                    core.recover()
                    self._tell(Progress("ready", "goes on with all requests"))

    async def _reload(self, order: orders.LoadStage) -> None:
        patience = Patience()
        while True:
            try:
                await self._load(order)
                return
            except EngineError as error:
                logger.warning("the model could not be loaded, it is tried again: %s", error)
                await patience.pause()

    async def _heartbeat(self) -> None:
        patience = Patience()
        while True:
            join = Join(
                self._membership.secret,
                "",
                self._model,
                tuple(self._node.addresses())[:16],
                JOIN_WAIT,
            )
            try:
                await self._market.join(join)
                patience.succeeded()
            except (LinkError, RefusedError) as error:
                logger.warning("the bridge was not told that this coordinator is there: %s", error)
                await patience.pause()

    async def _read_slots(self) -> SlotReading:
        """The dispatcher reads its own slots as anybody else would: a snapshot, off every lock of serving."""
        assert self._core is not None
        return self._core.slots()

    # -- the bridge's link ----------------------------------------------------------------------------------

    async def _take_link(self, link: Link) -> None:
        with trio.move_on_after(HELLO_SECONDS) as scope:
            hello, _ = wire.OPENING.decode(await link.receive())
        if scope.cancelled_caught or not isinstance(hello, wire.Hello):
            raise WireError("unexpected", "a coordinator's link begins with a hello", peer=link.remote_peer)
        if hello.model != self._model or self._welcome is None:
            await link.send(wire.OPENING.encode(ring.Refusal("model", "another model is loaded here")))
            return
        link.max_frame = self._welcome.submit_frame
        await link.send(wire.OPENING.encode(self._welcome))
        send, receive = trio.open_memory_channel[list[bytes]](NEWS_QUEUED)
        self._links[link] = send
        taken: set[int] = set()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_news, link, receive)
                await self._receive(link, self._welcome, taken)
        except* LinkError as group:
            logger.info("the bridge's link ended: %s", group.exceptions[0])
        finally:
            del self._links[link]
            assert self._core is not None
            for request in taken:  # the bridge submits them again, here or elsewhere
                self._core.cancel(request)

    async def _send_news(self, link: Link, news: trio.MemoryReceiveChannel[list[bytes]]) -> None:
        async for frame in news:
            await link.send(frame, Priority.DECODE)

    async def _receive(self, link: Link, welcome: wire.Welcome, taken: set[int]) -> None:
        core = self._core
        assert core is not None
        codec = welcome.codec()
        while True:
            message, _ = codec.decode(await link.receive())
            if isinstance(message, wire.SlotsWanted):
                await link.send(codec.encode(self._slots(message.nonce)))
            elif isinstance(message, ring.Submit):
                taken.add(message.request)
                core.submit(message)
            elif isinstance(message, ring.Cancel):
                taken.discard(message.request)
                core.cancel(message.request)
            else:
                raise WireError("unexpected", f"{type(message).__name__} from a bridge")

    def _news(self, outputs: tuple[ring.Output, ...], ended: tuple[ring.Ended, ...]) -> None:
        if self._welcome is None:
            return
        codec = self._welcome.codec()
        messages = [wire.Tokens(outputs)] if outputs else []
        for link, news in list(self._links.items()):
            for message in (*messages, *ended):
                try:
                    news.send_nowait([bytes(piece) for piece in codec.encode(message)])
                except trio.WouldBlock:
                    # A bridge that takes no news for thousands of messages has lost its answers anyway.
                    logger.warning("the bridge does not take its tokens: its link is closed")
                    link.close()

    def _slots(self, nonce: int) -> wire.Slots:
        assert self._core is not None
        reading = self._core.slots()
        if self._dispatcher is None:
            return wire.Slots(nonce, reading.busy, reading.total, reading.queue, self._run)
        figures = self._dispatcher.statistics()
        return wire.Slots(
            nonce,
            reading.busy,
            reading.total,
            reading.queue,
            self._run,
            figures.mode,
            figures.local_pairs,
            figures.remote_pairs,
            tuple(sorted(figures.heat.items())),
            tuple(wire.WorkerRows(*work) for work in figures.work[-wire.MAX_WORKERS :]),
            tuple((peer, why[:200]) for peer, why in figures.caught[-wire.MAX_CAUGHT :]),
            figures_of(figures),
        )
