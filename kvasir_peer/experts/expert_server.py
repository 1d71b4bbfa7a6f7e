"""A worker's side of ``/kvasir/experts/1``: rows from nobody but the map's dispatchers, weighted sums back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import trio

from kvasir_peer.errors import EngineError, LinkError, WireError
from kvasir_peer.net.link import Priority
from kvasir_peer.wire import experts
from kvasir_peer.wire.experts import NO_EXPERT, Bounds

if TYPE_CHECKING:
    from kvasir_peer.agent.engine import Engine
    from kvasir_peer.experts.dispatch_map import DispatchMap
    from kvasir_peer.net.link import Link

logger = logging.getLogger(__name__)

HELLO_SECONDS = 10.0  # for the first frame of a link
MAP_SECONDS = 5.0  # a dispatcher may know a newer map than the worker; it looks for so long
DRAIN_SECONDS = 1.0  # for frames under way when the owner wants the machine back

Range = tuple[int, int, int]


@dataclass(frozen=True)
class ServerStatistics:
    """Counters since the start.

    Attributes:
        links: dispatchers that are connected.
        frames, rows, pairs: computed; ``failed``: frames that could not be.
        refused: links and frames of strangers, or that broke the protocol.
        held_ms: time of the engine.
    """

    links: int
    frames: int
    rows: int
    pairs: int
    failed: int
    refused: int
    held_ms: float


class ExpertServer:
    """Serves the experts that the engine has loaded.

    Args:
        engine: with a bank, once :meth:`serve_ranges` has been called.
        current_map: the newest dispatch map, or None.
        newer_map: waits until there is a newer one.
        precision: of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        current_map: Callable[[], DispatchMap | None],
        newer_map: Callable[[], trio.Event],
        precision: Literal["exact", "fast"],
    ) -> None:
        self._engine = engine
        self._current_map = current_map
        self._newer_map = newer_map
        self._precision = precision
        self._model = ""
        self._ranges: tuple[Range, ...] = ()
        self._layers: dict[int, np.ndarray] = {}
        self._links: set[Link] = set()
        self._busy = 0
        self._idle = trio.Event()
        self._open = False
        self._frames = self._rows = self._pairs = self._failed = self._refused = 0
        self._held_ms = 0.0

    # -- what is served -------------------------------------------------------------------------------------

    def serve_ranges(self, model: str, ranges: tuple[Range, ...]) -> None:
        """The engine has these experts loaded: take links."""
        self._model, self._ranges, self._open = model, ranges, True
        self._layers = {}
        for layer, lo, hi in ranges:
            held = self._layers.setdefault(layer, np.zeros(NO_EXPERT + 1, np.bool_))
            held[lo:hi] = True
            held[NO_EXPERT] = True  # no expert is always there

    def map_changed(self) -> None:
        """Let go of dispatchers that are in the map no more."""
        current = self._current_map()
        for link in list(self._links):
            if current is None or not current.may_dispatch(link.remote_peer):
                link.close()

    async def drain(self, reason: str) -> None:
        """Take nothing new, answer what is under way, and close all links; done in about a second."""
        self._open = False
        with trio.move_on_after(DRAIN_SECONDS, shield=True):
            for link in list(self._links):
                try:
                    await link.send(experts.CODEC.encode(experts.Leaving(reason)))
                except LinkError as error:
                    logger.debug("a dispatcher was gone before it heard of the leave: %s", error)
            while self._busy:
                self._idle = trio.Event()
                await self._idle.wait()
        for link in list(self._links):
            link.close()

    # -- links ----------------------------------------------------------------------------------------------

    async def take_link(self, link: Link) -> None:
        """Serve one dispatcher until it leaves."""
        bounds = await self._welcome(link)
        if bounds is None:
            self._refused += 1
            return
        self._links.add(link)
        try:
            async with trio.open_nursery() as nursery:
                await self._receive(link, bounds, nursery)
        except* LinkError as group:
            logger.debug("a dispatcher's link ended: %s", group.exceptions[0])
        except* WireError as group:
            self._refused += 1
            error = group.exceptions[0]
            logger.warning("rows from %s are refused: %s", link.remote_peer, error)
            if isinstance(error, WireError):
                await self._refuse(link, error)
        finally:
            self._links.discard(link)

    async def _refuse(self, link: Link, error: WireError) -> None:
        try:
            with trio.move_on_after(1):
                await link.send(experts.CODEC.encode(experts.Refusal(error.code, str(error)[:400])))
        except LinkError as gone:
            logger.debug("a refusal was not heard: %s", gone)

    async def _welcome(self, link: Link) -> Bounds | None:
        """What the link may carry; None for a dispatcher that is refused and has been told why."""
        with trio.move_on_after(HELLO_SECONDS) as scope:
            hello, _ = experts.OPENING.decode(await link.receive())
        if scope.cancelled_caught or not isinstance(hello, experts.Hello):
            raise WireError("unexpected", "an experts link must begin with a hello", peer=link.remote_peer)
        current = await self._map_for(hello, link.remote_peer)
        refusal = ""
        code = "stranger"
        if current is None or not current.may_dispatch(link.remote_peer):
            refusal = f"{link.remote_peer} is not in the dispatch map: rows are taken from nobody else"
        elif not self._open or hello.model != self._model:
            code, refusal = "model", "experts of that model are not served here now"
        elif hello.dtype != current.dtype or not 1 <= hello.max_rows <= current.max_rows:
            code = "bounds"
            refusal = f"frames of {hello.max_rows} rows in {hello.dtype} are not what the dispatch map says"
        if current is None or refusal:
            logger.info("%s is refused (%s): %s", link.remote_peer, code, refusal)
            await link.send(experts.OPENING.encode(experts.Refusal(code, refusal)))
            return None
        bounds = Bounds(current.n_embd, hello.dtype, hello.max_rows, current.experts)
        welcome = experts.Welcome(self._ranges, experts.MAX_OUTSTANDING, self._precision)
        link.max_frame = bounds.rows_frame
        await link.send(experts.OPENING.encode(welcome))
        return bounds

    async def _map_for(self, hello: experts.Hello, peer: str) -> DispatchMap | None:
        with trio.move_on_after(MAP_SECONDS):
            while True:
                current = self._current_map()
                if current is not None and (current.may_dispatch(peer) or current.version >= hello.version):
                    return current
                await self._newer_map().wait()
        return self._current_map()

    async def _receive(self, link: Link, bounds: Bounds, nursery: trio.Nursery) -> None:
        outstanding = 0

        async def compute(message: experts.Rows, buffer: int) -> None:
            nonlocal outstanding
            try:
                await self._compute(link, bounds, message, buffer)
            finally:
                outstanding -= 1

        while True:
            message, payload = experts.CODEC.decode(await link.receive())
            if not isinstance(message, experts.Rows):
                raise WireError(
                    "unexpected", f"{type(message).__name__} from a dispatcher", peer=link.remote_peer
                )
            bounds.check_rows(message, payload)
            self._check_experts(message, payload)
            if outstanding >= experts.MAX_OUTSTANDING:
                raise WireError(
                    "oversize", f"more than {outstanding} frames outstanding", peer=link.remote_peer
                )
            if not self._open:
                await link.send(experts.CODEC.encode(experts.Failed(message.id, "the worker is leaving")))
                continue
            buffer = await self._engine.take_buffer()
            self._engine.buffer(buffer)[: len(payload)] = payload
            outstanding += 1
            nursery.start_soon(compute, message, buffer)

    def _check_experts(self, message: experts.Rows, payload: memoryview) -> None:
        held = self._layers.get(message.layer)
        ids = np.frombuffer(payload[: 2 * message.rows * message.experts], "<u2")
        if held is None or not held[ids].all():
            raise WireError("experts", f"rows for experts of layer {message.layer} that are not held here")

    async def _compute(self, link: Link, bounds: Bounds, message: experts.Rows, buffer: int) -> None:
        self._busy += 1
        engine = self._engine
        sums = b""
        reason = ""
        held_ms = 0.0
        try:
            with trio.CancelScope(shield=True):  # the engine writes to the buffer in any case
                done = await engine.compute_experts(
                    buffer, message.layer, message.rows, message.experts, bounds.dtype, "experts"
                )
                sums, held_ms = bytes(engine.buffer(buffer)[: done.size]), done.held_ms
        except EngineError as error:
            reason = str(error)[:200]
        finally:
            engine.free_buffer(buffer)
            self._busy -= 1
            if not self._busy:
                self._idle.set()
        if reason:
            self._failed += 1
            await link.send(experts.CODEC.encode(experts.Failed(message.id, reason)), Priority.DECODE)
            return
        self._frames += 1
        self._rows += message.rows
        self._pairs += message.rows * message.experts
        self._held_ms += held_ms
        await self.answer(link, experts.Sums(message.id, message.rows, round(held_ms, 3)), sums)

    async def answer(self, link: Link, message: experts.Sums, sums: bytes) -> None:
        """Send sums back. Raises LinkError."""
        await link.send(experts.CODEC.encode(message, sums), Priority.DECODE)

    def statistics(self) -> ServerStatistics:
        """A snapshot."""
        return ServerStatistics(
            len(self._links),
            self._frames,
            self._rows,
            self._pairs,
            self._failed,
            self._refused,
            self._held_ms,
        )
