"""A bridge's market with its model's chunks, and whole volunteers with engines of their own, on real hosts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio
from helpers_experts import LOOPBACK, MODEL, until
from starlette.applications import Starlette

from kvasir_peer import identity
from kvasir_peer.agent.chunk_transfer import serve_chunks
from kvasir_peer.agent.engine import open_engine
from kvasir_peer.agent.membership import Membership
from kvasir_peer.api.experts import expert_routes
from kvasir_peer.api.swarm import swarm_routes
from kvasir_peer.engines.architectures import parse
from kvasir_peer.experts import market_messages
from kvasir_peer.experts.dispatch_policy import SlotReading
from kvasir_peer.experts.ledger import Ledger
from kvasir_peer.experts.market_service import MarketService, MarketSettings
from kvasir_peer.experts.recruitment import RecruitmentSettings
from kvasir_peer.experts.volunteer import Volunteer, VolunteerConfig
from kvasir_peer.identity import Identity
from kvasir_peer.models.gguf import GgufFile
from kvasir_peer.models.manifest import Manifest, build_manifest
from kvasir_peer.models.sources import ChunkSource
from kvasir_peer.models.store import ChunkStore
from kvasir_peer.net.node import Node
from kvasir_peer.progress import silent
from kvasir_peer.wire import chunks

SECRET = bytes(range(16))
NAME = "small"
QUARTER = 700_000  # bytes of disk: a quarter of the small model's experts


@dataclass
class Bridge:
    """The bridge under test; of what it does for rings, only manifests are served."""

    service: MarketService
    node: Node
    me: Identity
    manifest: Manifest
    sent_bytes: int = 0

    def admitted(self, peer: str) -> bool:
        return self.service.admitted(peer)

    def manifest_bytes(self, model: str, page: str | None) -> bytes:
        if model != self.manifest.id:
            raise KeyError(model)
        return self.manifest.root.encode() if page is None else self.manifest.pages[page].encode()

    def sent(self, count: int) -> None:
        self.sent_bytes += count

    def saturate(self) -> None:
        """As two busy readings of a coordinator would."""
        self.service._apply(market_messages.CoordinatorUp("coordinator", NAME))
        for i in range(2):
            reading = SlotReading(4, 8, 0, trio.current_time() + i * 1e-3)
            self.service._apply(market_messages.SlotsRead("coordinator", reading))


@asynccontextmanager
async def bridge(
    home: Path, me: Identity | None = None, web: str = "", listen: str = LOOPBACK
) -> AsyncIterator[Bridge]:
    """Base 1, boost 1; on loopback."""
    me = me or Identity.generate()
    gguf = GgufFile.open(MODEL)
    manifest = build_manifest(gguf, name=NAME)
    source = ChunkSource(gguf, manifest)
    ledger = Ledger(home / "ledger")
    settings = MarketSettings(SECRET, "f32", 16, RecruitmentSettings(base=1, boost=1))
    async with Node.open(me.private_key, listen=[listen]) as node, trio.open_nursery() as nursery:
        service = MarketService(
            node,
            NAME,
            manifest,
            parse(gguf.metadata, gguf.tensors),
            settings,
            sign=me.sign,
            verify=identity.verify,
            ledger=ledger,
            report=silent,
            web=web,
        )
        found = Bridge(service, node, me, manifest)
        node.serve_http(Starlette(routes=[*expert_routes(service), *swarm_routes(found)]))  # type: ignore[arg-type]
        node.handle(
            chunks.PROTOCOL,
            chunks.MAX_WANT_FRAME,
            lambda link: serve_chunks(link, lambda: [source], found.sent),
            accept=found.admitted,
        )
        nursery.start_soon(service.run)
        yield found
        nursery.cancel_scope.cancel()
    ledger.close()


@dataclass
class Running:
    """A volunteer under test."""

    volunteer: Volunteer
    node: Node
    store: ChunkStore

    async def serves(self, seconds: float = 60.0) -> tuple[tuple[int, int, int], ...]:
        """Once it serves: its ranges."""
        await until(lambda: self.volunteer.statistics().state == "serving", seconds)
        return self.volunteer.statistics().ranges

    @property
    def fetched(self) -> int:
        """Bytes that came over the network."""
        return self.store.statistics().added_bytes


@asynccontextmanager
async def volunteer(
    of: Bridge, home: Path, *, disk: int = 1 << 30, local_web: bool = False, me: Identity | None = None
) -> AsyncIterator[Running]:
    """It asks for work at once; it leaves in order with the context."""
    me = me or Identity.generate()
    async with (
        open_engine() as engine,
        Node.open(me.private_key, listen=[LOOPBACK]) as node,
        trio.open_nursery() as nursery,
    ):
        addresses = tuple(of.node.addresses())
        membership = Membership(
            of.me.peer_id, addresses, SECRET.hex(), home, 1 << 30, disk, "onnx", "cpu", "exact", 1
        )
        config = VolunteerConfig(membership, local_web=local_web)
        with ChunkStore(home / "store", 1 << 30) as store:
            one = Volunteer(node, engine, store, config, sign=me.sign, verify=identity.verify)
            node.handle(chunks.PROTOCOL, chunks.MAX_WANT_FRAME, one.give_chunks)
            nursery.start_soon(one.run)
            yield Running(one, node, store)
            nursery.cancel_scope.cancel()
