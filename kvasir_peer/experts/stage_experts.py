"""Expert dispatch for a ring stage: the coordinator's dispatcher, over the layers that the stage has loaded.

A stage can't take back what it has sent on. When a worker is caught it tells the head which requests have used its
rows, and from which position on (:mod:`kvasir_peer.ring.taints`), and the bridge whom to keep out.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import trio

from kvasir_peer.engines.architectures import parse
from kvasir_peer.engines.orders import ArenaShape
from kvasir_peer.errors import LinkError, RefusedError
from kvasir_peer.experts.dispatch_policy import DispatchSettings, SlotReading
from kvasir_peer.experts.dispatcher import (
    EXPERT_BUFFERS,
    Dispatcher,
    DispatcherConfig,
    DispatchStatistics,
    RowOrigins,
)
from kvasir_peer.experts.market_client import MarketClient
from kvasir_peer.experts.market_figures import figures_of
from kvasir_peer.experts.passing import PassingRequests
from kvasir_peer.experts.verification import Mode
from kvasir_peer.experts.volunteering import DispatchReport, Work
from kvasir_peer.models.gguf import TensorInfo
from kvasir_peer.models.slices import StageSlice, tensors_of
from kvasir_peer.wire.experts import rows_bytes
from kvasir_peer.wire.membership import FLAG_OUTPUT, Membership

if TYPE_CHECKING:
    from kvasir_peer.agent.engine import Engine
    from kvasir_peer.models.manifest import Manifest
    from kvasir_peer.net.node import Node

logger = logging.getLogger(__name__)

ACTIVE_SECONDS = 3.0  # a slot that had a row within this is busy
REPORT_SECONDS = 5.0  # between two words to the bridge on what workers have done; at once when one is caught


@dataclass(frozen=True)
class _Loaded:
    model: str
    layers: tuple[int, ...]
    n_embd: int
    experts: int
    slots: int


class StageExperts:
    """Use :meth:`run` for as long as the stage peer runs.

    Args:
        node, engine: the stage's.
        bridge, bridge_addresses: whose dispatch map counts.
        precision: of the engine.
        settings, mode: of dispatch and checks.
        verify: checks the bridge's signature.
    """

    def __init__(
        self,
        node: Node,
        engine: Engine,
        *,
        bridge: str,
        bridge_addresses: tuple[str, ...],
        precision: Literal["exact", "fast"],
        settings: DispatchSettings,
        mode: Mode,
        verify: Callable[[str, bytes, bytes], bool],
    ) -> None:
        self._node = node
        self._engine = engine
        self._bridge = bridge
        self._addresses = bridge_addresses
        self._precision = precision
        self._settings = settings
        self._mode = mode
        self._verify = verify
        self._loaded: _Loaded | None = None
        self._changed = trio.Event()
        self._dispatcher: Dispatcher | None = None
        self._requests = PassingRequests()
        self._taint_news = trio.Event()
        self._caught_news = trio.Event()

    # -- what the stage peer tells --------------------------------------------------------------------------

    def arena(self, shape: ArenaShape, manifest: Manifest, first: int, end: int, rows: int) -> ArenaShape:
        """An arena in which routed rows fit too; the same where the layers have no experts."""
        found = self._experts_of(manifest, first, end)
        if found is None:
            return shape
        room = rows_bytes(rows, found.experts, found.n_embd, "f32")
        return ArenaShape(shape.buffers + EXPERT_BUFFERS, max(shape.buffer_bytes, room))

    def loaded(self, manifest: Manifest, first: int, end: int, slots: int) -> None:
        """The engine has these layers from now on."""
        found = self._experts_of(manifest, first, end)
        self._set(
            None if found is None else _Loaded(manifest.id, found.layers, found.n_embd, found.experts, slots)
        )

    def unloaded(self) -> None:
        """The engine has nothing any more."""
        self._set(None)

    def _set(self, loaded: _Loaded | None) -> None:
        self._loaded = loaded
        self._requests = PassingRequests()
        self._changed.set()
        self._changed = trio.Event()

    def _experts_of(self, manifest: Manifest, first: int, end: int) -> _Loaded | None:
        part = StageSlice(first, end, manifest.root.n_layer)
        tensors = {
            t.name: TensorInfo(t.name, t.shape, t.type, t.n_bytes, 0) for t in tensors_of(manifest, part)
        }
        shape = parse(manifest.root.metadata, tensors)
        layers = tuple(at for at in range(first, end) if shape.layers[at].moe is not None)
        if not layers:
            return None
        used = max(moe.n_used for at in layers if (moe := shape.layers[at].moe) is not None)
        return _Loaded(manifest.id, layers, shape.n_embd, used, 0)

    # -- what a batch asks ----------------------------------------------------------------------------------

    def pass_of(self, membership: Membership, stage: int) -> tuple[tuple[int, ...], object]:
        """At which layers the next pass hands out its routed rows, and its context for the engine."""
        table = membership.rows[membership.rows["through"] > stage]
        forgotten = self._requests.passes(table, trio.current_time())
        if self._dispatcher is None:
            return (), None
        exposure = self._dispatcher.exposure
        # What is computed again stays exposed: tokens that came of it before may have been handed out.
        for request in forgotten:
            exposure.finished(request)
        layers = self._dispatcher.layers()
        if not layers:
            return (), None
        places = tuple(zip(table["request"].tolist(), table["position"].tolist(), strict=True))
        wanted = tuple(
            place for place, flags in zip(places, table["flags"].tolist(), strict=True) if flags & FLAG_OUTPUT
        )
        return layers, RowOrigins(places, wanted)

    # -- what must be made again: see :class:`~kvasir_peer.ring.taints.TaintSource` -------------------------------

    def taints(self) -> Iterable[tuple[int, tuple[int, int, int]]]:
        """Requests that used rows of workers that lied, until they have passed again, and a little longer."""
        return self._requests.taints()

    def taint_news(self) -> trio.Event:
        """Set as soon as there is more of it than now."""
        return self._taint_news

    def _caught(self, peer: str, why: str, rewinds: Mapping[int, int]) -> None:
        if self._requests.taint(rewinds):
            logger.warning("%d requests have used rows of %s, which lied: %s", len(rewinds), peer, why)
            self._taint_news.set()
            self._taint_news = trio.Event()
        self._caught_news.set()
        self._caught_news = trio.Event()

    async def _read_slots(self) -> SlotReading:
        """Slots that had rows lately: a stage sees requests only as they pass."""
        now = trio.current_time()
        busy = self._requests.busy(now, ACTIVE_SECONDS)
        return SlotReading(busy, self._loaded.slots if self._loaded is not None else 1, 0, now)

    # -- life -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Dispatch for whatever is loaded, until cancelled."""
        async with self._node.http_client(self._bridge, self._addresses) as http:
            market = MarketClient(http, self._bridge, self._verify)
            while True:
                changed, loaded = self._changed, self._loaded
                async with trio.open_nursery() as nursery:
                    if loaded is not None:
                        nursery.start_soon(self._dispatch, loaded, market)
                    await changed.wait()
                    nursery.cancel_scope.cancel()

    async def _dispatch(self, loaded: _Loaded, market: MarketClient) -> None:
        dispatcher = Dispatcher(
            self._node,
            self._engine,
            DispatcherConfig(
                loaded.model,
                loaded.layers,
                loaded.n_embd,
                loaded.experts,
                self._precision,
                self._settings,
                self._mode,
            ),
            read_slots=self._read_slots,
            caught=self._caught,
        )
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(dispatcher.run)
                self._dispatcher = dispatcher
                nursery.start_soon(self._report, dispatcher, loaded.model, market)
                await market.follow_map(loaded.model, 0, dispatcher.follow)
        finally:
            self._dispatcher = None

    async def _report(self, dispatcher: Dispatcher, model: str, market: MarketClient) -> None:
        """Tell the bridge what workers have done for this stage, and at once of those that lied."""
        run = secrets.randbits(62)
        told = DispatchReport(model, run)
        while True:
            news = self._caught_news
            figures = dispatcher.statistics()
            report = DispatchReport(
                model,
                run,
                figures.mode,
                figures.local_pairs,
                figures.remote_pairs,
                tuple(sorted(figures.heat.items())),
                tuple(Work(*work) for work in figures.work),
                tuple((peer, why[:200]) for peer, why in figures.caught),
                figures_of(figures),
            )
            try:
                if report != told:
                    await market.report(report)
                    told = report
            except (LinkError, RefusedError) as error:
                logger.info("the bridge was not told what workers have done: %s", error)
            with trio.move_on_after(REPORT_SECONDS):
                await news.wait()

    def statistics(self) -> DispatchStatistics | None:
        """The dispatcher's, or None while nothing with experts is loaded."""
        return self._dispatcher.statistics() if self._dispatcher is not None else None
