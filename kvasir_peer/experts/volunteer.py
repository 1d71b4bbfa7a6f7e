"""The life of a volunteer: asks the market, fetches and loads the experts it is given, serves, frees them again."""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import trio

from kvasir_peer.agent.chunk_transfer import Download, TransferProgress, serve_chunks
from kvasir_peer.agent.manifest_fetch import fetch_manifest
from kvasir_peer.agent.membership import Membership
from kvasir_peer.engines import orders
from kvasir_peer.engines.footprint import process_bytes
from kvasir_peer.errors import KvasirError, LinkError, RefusedError, ResourceError, WireError
from kvasir_peer.experts.expert_server import ExpertServer, ServerStatistics
from kvasir_peer.experts.market_client import MarketClient, download_sources
from kvasir_peer.experts.patience import Patience
from kvasir_peer.experts.permits import permits
from kvasir_peer.experts.volunteering import (
    MAX_RANGES,
    Ask,
    Claim,
    Coverage,
    Given,
    Wiring,
    sign_claim,
)
from kvasir_peer.models.held import held_experts
from kvasir_peer.models.manifest import Manifest
from kvasir_peer.models.slices import ExpertSlice, chunks_of
from kvasir_peer.progress import Progress, Report, Step, silent
from kvasir_peer.wire import chunks as wire_chunks
from kvasir_peer.wire import experts

if TYPE_CHECKING:
    from kvasir_peer.agent.engine import Engine
    from kvasir_peer.experts.dispatch_map import DispatchMap
    from kvasir_peer.models.store import ChunkStore
    from kvasir_peer.net.link import Link
    from kvasir_peer.net.node import Node

logger = logging.getLogger(__name__)

IDLE_WAIT = 40.0  # seconds that the bridge holds a request for work
HEARTBEAT_WAIT = 8.0  # seconds that it holds a coverage report: the heartbeat, well under the 30 s of silence
PROGRESS_SECONDS = 2.0  # between two reports of a download
# Serving, after the bridge was lost: quick, as its experts stay out of the map until it has heard of them.
HEARTBEAT_DELAYS = (0.25, 0.5, 1.0, 2.0)
LEAST_BETWEEN = 2.0  # seconds between two offers: one that is kept out is told so at once
REST_SECONDS = 1.0  # between giving a lease back, or retiring, and the next offer
MAX_ASKERS = 4  # peers that fetch chunks from here at once: the owner's uplink is theirs first
FRAME_BUFFERS = 16  # frames that the engine may hold, over all dispatchers
DEFAULT_MAX_ROWS = 64

State = Literal["idle", "fetching", "loading", "serving", "paused", "problem"]

_STEPS: dict[State, Step] = {
    "idle": "plan",
    "fetching": "fetch",
    "loading": "load",
    "serving": "ready",
    "paused": "stop",
    "problem": "problem",
}


@dataclass(frozen=True)
class VolunteerConfig:
    """What the role decides before the volunteer starts.

    Attributes:
        local_web: fetch from web servers on this machine too; for tests.
        rate: row-expert pairs per second, as measured; 0 where it was not.
    """

    membership: Membership
    model: str = ""
    rate: float = 0.0
    local_web: bool = False


@dataclass(frozen=True)
class VolunteerStatistics:
    """A snapshot; ``leases``, ``retired`` and ``given_bytes`` (of chunks, to other peers) since the start."""

    state: State
    lease: int
    ranges: tuple[tuple[int, int, int], ...]
    leases: int
    retired: int
    served: ServerStatistics
    given_bytes: int


class Volunteer:
    """Use :meth:`run`.

    Args:
        node: up, with its relays.
        engine: a running engine process.
        store: for chunks.
        sign, verify: with this peer's key; by peer id.
        report: told what happens.
    """

    def __init__(
        self,
        node: Node,
        engine: Engine,
        store: ChunkStore,
        config: VolunteerConfig,
        *,
        sign: Callable[[bytes], bytes],
        verify: Callable[[str, bytes, bytes], bool],
        report: Report = silent,
    ) -> None:
        self._node = node
        self._engine = engine
        self._store = store
        self._config = config
        self._membership = config.membership
        self._sign = sign
        self._verify = verify
        self._tell = report
        self._state: State = "idle"
        self._map: DispatchMap | None = None
        self._map_event = trio.Event()
        self._given: Given | None = None
        self._leases = self._retired = 0
        self._asking = False
        self._askers: set[Link] = set()
        self._given_bytes = 0
        self._held_model = ""
        self._held: tuple[tuple[int, int, int], ...] = ()
        self._share = 1.0  # of the memory for experts that is offered
        self._paused = False
        self._resumed = trio.Event()
        self._work = trio.CancelScope()
        self._crashed = trio.Event()
        self._server = ExpertServer(
            engine,
            current_map=lambda: self._map,
            newer_map=lambda: self._map_event,
            precision=config.membership.precision,
        )

    # -- the owner's wishes ---------------------------------------------------------------------------------

    def pause(self) -> None:
        """Hand back what is under way, and give the memory back."""
        self._paused = True
        self._work.cancel()
        for link in list(self._askers):
            link.close()

    def resume(self) -> None:
        """Be a volunteer again."""
        self._paused = False
        self._resumed.set()

    # -- chunks for other volunteers --------------------------------------------------------------------------

    async def give_chunks(self, link: Link) -> None:
        """Answer a peer that the bridge permits to fetch chunks; a few at a time, none while paused."""
        if self._paused or len(self._askers) >= MAX_ASKERS:
            return  # the link closes, and the asker goes on to the next source
        self._askers.add(link)
        try:
            await serve_chunks(link, lambda: [self._store], self._gave, self._permitted_to(link.remote_peer))
        finally:
            self._askers.discard(link)

    def _permitted_to(self, peer: str) -> Callable[[wire_chunks.Permit], bool]:
        return lambda permit: permits(
            permit.data,
            permit.signature,
            bridge=self._membership.bridge,
            peer=peer,
            now=time.time(),
            verify=self._verify,
        )

    def _gave(self, count: int) -> None:
        self._given_bytes += count

    # -- life -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Volunteer until cancelled; what is under way is handed back first.

        Raises:
            RefusedError: the bridge does not let this peer in.
        """
        self._node.handle(experts.PROTOCOL, experts.MAX_HELLO_FRAME, self._server.take_link)
        self._engine.crashed = self._engine_crashed
        mine = self._membership
        async with self._node.http_client(mine.bridge, mine.bridge_addresses) as http:
            self._market = MarketClient(http, mine.bridge, self._verify)
            await trio.to_thread.run_sync(self._look_at_disk)
            try:
                patience = Patience()
                while True:
                    try:
                        await self._round()
                        patience.succeeded()
                    except LinkError as error:
                        self._set("idle", f"the bridge does not answer; trying again ({error})")
                        await patience.pause()
            finally:
                with trio.move_on_after(3, shield=True):
                    await self._leave("its owner wants the machine back")

    def _look_at_disk(self) -> None:
        """Which experts of the model that came last are on disk: the bridge gives those again, and tells others."""
        files = sorted(self._membership.manifests.glob("*.manifest"), key=lambda file: file.stat().st_mtime)
        for file in files[-1:]:
            try:
                manifest = Manifest.decode(file.read_bytes(), file.stem)
            except (OSError, WireError) as error:
                logger.info("%s is not used: %s", file, error)
                continue
            self._held = held_experts(manifest, self._store.has)[:MAX_RANGES]
            self._held_model = manifest.id

    async def _round(self) -> None:
        """One round of work, ended early by a pause, which lasts until the owner resumes."""
        with trio.CancelScope() as self._work:
            if not self._paused:
                await self._volunteer()
        if self._paused:
            with trio.move_on_after(3, shield=True):
                await self._leave("its owner has paused it")
            self._set("paused", "paused; kvasir-peer resume goes on")
            while self._paused:
                self._resumed = trio.Event()
                await self._resumed.wait()
            self._set("idle", "goes on")

    async def _leave(self, reason: str) -> None:
        given, self._given = self._given, None
        if self._asking:
            await self._withdraw()
        await self._server.drain(reason)
        if given is not None:
            try:
                with trio.move_on_after(1.5):
                    await self._market.cover(self._claim(given, leaving=True))
            except KvasirError as error:
                logger.info("the bridge was not told of the leave: %s", error)
            await self._free()

    async def _withdraw(self) -> None:
        """Offer nothing in place of what the bridge still holds: it would lease experts to a peer that is gone."""
        self._asking = False
        try:
            with trio.move_on_after(1.5):
                answer = await self._market.ask(msgspec.structs.replace(self._offer(), memory=0, disk=0))
                if answer.assigned:
                    await self._market.ask(self._offer(lease=answer.lease, give_back=True))
        except KvasirError as error:
            logger.info("the bridge was not told that nothing is offered any more: %s", error)

    async def _free(self) -> None:
        self._store.unpin("volunteer")
        try:
            await self._engine.forget()
        except KvasirError as error:
            logger.info("the engine was not told to free its memory: %s", error)

    def _engine_crashed(self) -> None:
        self._crashed.set()

    def _set(self, state: State, text: str, done: int = 0, total: int = 0) -> None:
        self._state = state
        self._tell(Progress(_STEPS[state], text, done, total, "bytes" if total else ""))

    # -- one lease ------------------------------------------------------------------------------------------

    async def _volunteer(self) -> None:
        """Ask, fetch, load, serve until retired."""
        self._set("idle", "waits until it is needed")
        began = trio.current_time()
        self._asking = True
        given = await self._market.ask(self._offer(wait=IDLE_WAIT))
        self._asking = False
        if not given.assigned:
            self._set("idle", given.why or "not needed at present")
            await trio.sleep_until(max(began + LEAST_BETWEEN, trio.current_time() + 0.2))
            return
        self._leases += 1
        self._given = given
        try:
            await self._fetch_and_load(given)
        except LinkError as error:
            await self._give_back(given, error)
            raise
        except KvasirError as error:
            await self._give_back(given, error)
            await trio.sleep(REST_SECONDS)
            return
        await self._serve(given)

    def _offer(self, *, wait: float = 0.0, lease: int = 0, progress: int = 0, give_back: bool = False) -> Ask:
        config, mine = self._config, self._membership
        return Ask(
            secret=mine.secret,
            memory=int(max(0, mine.memory - process_bytes(mine.engine)) * self._share),
            disk=mine.disk,
            expansion=mine.expansion,
            rate=config.rate,
            addresses=tuple(self._node.addresses()),
            device=f"{mine.engine} {mine.device}",
            model=config.model,
            held=() if lease else self._held,
            manifest="" if lease else self._held_model,
            wait=wait,
            lease=lease,
            progress=progress,
            give_back=give_back,
        )

    async def _give_back(self, given: Given, error: KvasirError) -> None:
        self._given = None
        self._set("problem", f"the experts could not be loaded: {error}")
        if isinstance(error, ResourceError):
            self._share /= 2  # the estimate of what fits was too high: offer less
        try:
            await self._market.ask(self._offer(lease=given.lease, give_back=True))
        except KvasirError as problem:
            logger.info("the lease was not given back, it will end by itself: %s", problem)
        await self._free()

    async def _fetch_and_load(self, given: Given) -> None:
        part = ExpertSlice(given.triples)
        progress = [0]

        async def report() -> None:
            told = -1
            while True:
                if progress[0] > told:  # only growth renews a lease
                    told = progress[0]
                    try:
                        await self._market.ask(self._offer(lease=given.lease, progress=told))
                    except LinkError as error:
                        logger.info("progress was not heard: %s", error)
                await trio.sleep(PROGRESS_SECONDS)

        def transferred(p: TransferProgress) -> None:
            progress[0] = p.done_bytes
            self._set("fetching", f"fetching {part}", p.done_bytes, p.total_bytes)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(report)
            failure: KvasirError | None = None
            try:
                file = self._membership.manifest(given.manifest)
                manifest = await fetch_manifest(self._market.http, given.manifest, part, file)
                chunks = chunks_of(manifest, part)
                await trio.to_thread.run_sync(self._store.ensure_room, chunks)
                await trio.to_thread.run_sync(self._store.pin, "volunteer", [c.hash for c in chunks])
                download = Download(
                    self._node,
                    self._store,
                    chunks,
                    transferred,
                    permit=_permit(given),
                    local_web=self._config.local_web,
                )
                await download.run(download_sources(given.sources))
                await trio.to_thread.run_sync(self._look_at_disk)
                self._set("loading", f"loading {part}")
                await self._load(given, file, manifest.root.metadata)
            except KvasirError as error:
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _load(self, given: Given, manifest: Path, metadata: object) -> None:
        mine = self._membership
        wanted = await self._newest_map(given)
        self._crashed = trio.Event()
        order = orders.LoadBank(
            0,
            orders.StoreWeights(str(self._store.root), str(manifest)),
            mine.engine,
            given.triples,
            wanted.max_rows,
            mine.precision,
            mine.threads,
            mine.device,
            orders.ArenaShape(FRAME_BUFFERS, wanted.bounds().rows_payload(wanted.max_rows, wanted.experts)),
            mine.memory,
        )
        answer = await self._engine.load_bank(order)
        self._set(
            "loading", f"loaded in {answer.seconds:.1f} s, {answer.resident_bytes / 1e6:.0f} MB of memory"
        )

    async def _newest_map(self, given: Given) -> DispatchMap:
        """The dispatch map tells the sizes of frames, also while nobody is in it."""
        found = await self._market.dispatch_map(given.manifest, 0, 0.0)
        if found is None:
            raise LinkError("the bridge has no dispatch map yet")
        self._take_map(found)
        return found

    def _take_map(self, found: DispatchMap) -> None:
        if self._map is None or self._map.model != found.model or found.version > self._map.version:
            self._map = found
            self._map_event.set()
            self._map_event = trio.Event()
            self._server.map_changed()

    async def _serve(self, given: Given) -> None:
        self._server.serve_ranges(given.manifest, given.triples)
        ended = ""
        async with trio.open_nursery() as nursery:

            async def heartbeats() -> None:
                nonlocal ended
                ended = await self._heartbeats(given)
                nursery.cancel_scope.cancel()

            async def crash() -> None:
                nonlocal ended
                await self._crashed.wait()
                ended = "the engine process died and is being restarted"
                nursery.cancel_scope.cancel()

            nursery.start_soon(heartbeats)
            nursery.start_soon(crash)
            assert self._map is not None, "loading has read it"
            nursery.start_soon(self._market.follow_map, given.manifest, self._map.version, self._take_map)
        self._retired += 1
        self._set("idle", ended)
        await self._leave(ended)
        await trio.sleep(REST_SECONDS)

    async def _heartbeats(self, given: Given) -> str:
        """Register and register again; why it is over."""
        patience = Patience(HEARTBEAT_DELAYS)
        wired = False
        while True:
            try:
                answer: Wiring = await self._market.cover(
                    self._claim(given, wait=HEARTBEAT_WAIT if wired else 0.0)
                )
                patience.succeeded()
            except LinkError as error:
                logger.warning("%s", error)
                await patience.pause()
                continue
            except RefusedError as error:
                return str(error)
            if answer.retire:
                return answer.why or "the bridge needs this peer no longer"
            if not answer.wired:
                return f"the bridge did not wire these experts: {answer.why}"
            if not wired:
                wired = True
                self._set("serving", f"serves {ExpertSlice(given.triples)}")

    def _claim(self, given: Given, *, wait: float = 0.0, leaving: bool = False) -> Coverage:
        mine, served = self._membership, self._server.statistics()
        rate = served.pairs / (served.held_ms / 1e3) if served.held_ms > 0 else self._config.rate
        claim = Claim(
            self._node.peer_id,
            mine.bridge,
            time.time(),
            given.model,
            given.lease,
            given.triples,
            tuple(self._node.addresses())[:16],
            f"{mine.engine} {mine.device}"[:128],
            rate,
            leaving,
        )
        return sign_claim(claim, self._sign, wait=wait, secret=mine.secret)

    def statistics(self) -> VolunteerStatistics:
        """A snapshot."""
        given = self._given
        return VolunteerStatistics(
            self._state,
            given.lease if given else 0,
            given.triples if given else (),
            self._leases,
            self._retired,
            self._server.statistics(),
            self._given_bytes,
        )


def _permit(given: Given) -> wire_chunks.Permit | None:
    """The bridge's permit as the chunk protocol carries it."""
    if given.permit is None:
        return None
    try:
        data, signature = (base64.b64decode(text, validate=True) for text in given.permit)
        if len(data) > wire_chunks.MAX_PERMIT or len(signature) > wire_chunks.MAX_SIGNATURE:
            raise ValueError("it is too large")
    except ValueError as error:
        raise WireError("malformed", f"the bridge's permit to fetch chunks does not parse: {error}") from None
    return wire_chunks.Permit(data, signature)
