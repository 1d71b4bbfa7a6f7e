"""The market's routes over real streams: who is let in, whose coverage counts, what survives a restart."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import trio
from helpers_experts import LOOPBACK, MODEL, until
from starlette.applications import Starlette

from kvasir_peer import identity
from kvasir_peer.api.experts import expert_routes
from kvasir_peer.engines.architectures import parse
from kvasir_peer.errors import LinkError, PlanError, RefusedError
from kvasir_peer.experts import market_messages
from kvasir_peer.experts.dispatch_map import decode_map, sign_map
from kvasir_peer.experts.ledger import Ledger
from kvasir_peer.experts.market_client import MarketClient
from kvasir_peer.experts.market_service import MarketService, MarketSettings
from kvasir_peer.experts.recruitment import RecruitmentSettings
from kvasir_peer.experts.volunteering import Ask, Claim, Join, sign_claim
from kvasir_peer.identity import Identity
from kvasir_peer.models.gguf import GgufFile
from kvasir_peer.models.manifest import build_manifest
from kvasir_peer.net.node import Node
from kvasir_peer.progress import silent

SECRET = bytes(range(16))
MODEL_NAME = "small"
BUDGET = 1_000_000  # bytes: less than half of the small model's experts


@dataclass
class Bridge:
    service: MarketService
    node: Node
    me: Identity


@asynccontextmanager
async def bridge(ledger: Path, me: Identity | None = None) -> AsyncIterator[Bridge]:
    me = me or Identity.generate()
    gguf = GgufFile.open(MODEL)
    manifest = build_manifest(gguf, name=MODEL_NAME)
    shape = parse(gguf.metadata, gguf.tensors)
    kept = Ledger(ledger)
    settings = MarketSettings(SECRET, recruitment=RecruitmentSettings(base=1, boost=1))
    async with Node.open(me.private_key, listen=[LOOPBACK]) as node, trio.open_nursery() as nursery:
        service = MarketService(
            node,
            MODEL_NAME,
            manifest,
            shape,
            settings,
            sign=me.sign,
            verify=identity.verify,
            ledger=kept,
            report=silent,
        )
        node.serve_http(Starlette(routes=expert_routes(service)))
        nursery.start_soon(service.run)
        yield Bridge(service, node, me)
        nursery.cancel_scope.cancel()
    kept.close()


@dataclass
class Peer:
    me: Identity
    node: Node
    market: MarketClient
    bridge: str

    def claim(self, given, **changes) -> Claim:
        claim = Claim(
            self.me.peer_id,
            self.bridge,
            time.time(),
            given.model,
            given.lease,
            given.triples,
            (),
            "test",
            100.0,
        )
        return msgspec.structs.replace(claim, **changes)

    async def cover(self, claim: Claim, *, sign=None, wait: float = 0.0):
        return await self.market.cover(
            sign_claim(claim, sign or self.me.sign, wait=wait, secret=SECRET.hex())
        )


@asynccontextmanager
async def peer(of: Bridge) -> AsyncIterator[Peer]:
    me = Identity.generate()
    async with (
        Node.open(me.private_key, listen=[LOOPBACK]) as node,
        node.http_client(of.me.peer_id, of.node.addresses()) as http,
    ):
        yield Peer(me, node, MarketClient(http, of.me.peer_id, identity.verify), of.me.peer_id)


def offer(**changes) -> Ask:
    return msgspec.structs.replace(
        Ask(SECRET.hex(), memory=BUDGET, disk=BUDGET, expansion=1.0, rate=100.0), **changes
    )


def saturate(of: Bridge) -> None:
    """As two busy readings of a coordinator would."""
    from kvasir_peer.experts.dispatch_policy import SlotReading

    of.service._apply(market_messages.CoordinatorUp("coordinator", MODEL_NAME))
    for i in range(2):
        reading = SlotReading(4, 8, 0, trio.current_time() + i * 1e-3)
        of.service._apply(market_messages.SlotsRead("coordinator", reading))


async def test_volunteers_wait_for_demand_and_get_different_ranges(tmp_path) -> None:
    async with bridge(tmp_path / "ledger") as b, peer(b) as one, peer(b) as two:
        assert (await one.market.ask(offer())).why.startswith("all is calm")
        got = {}
        async with trio.open_nursery() as nursery:

            async def wait(name: str, who: Peer) -> None:
                got[name] = await who.market.ask(offer(wait=20.0))

            nursery.start_soon(wait, "one", one)
            nursery.start_soon(wait, "two", two)
            await until(lambda: len(b.service._state.waiting) == 2)
            saturate(b)
        first, second = got["one"].triples, got["two"].triples
        assert got["one"].assigned and got["two"].assigned and first != second
        assert got["one"].sources[0].peer == b.me.peer_id
        wired = await one.cover(one.claim(got["one"]))
        assert wired.wired and 100 < wired.expires_in <= 120
        found = await two.market.dispatch_map(MODEL_NAME, 0, 0.0)
        assert found is not None
        assert [(w.peer, w.ranges) for w in found.workers] == [(one.me.peer_id, first)]
        assert await two.market.dispatch_map(MODEL_NAME, found.version, 0.0) is None
        gone = await one.cover(one.claim(got["one"], leaving=True))
        assert gone.retire
        newer = await two.market.dispatch_map(MODEL_NAME, found.version, 5.0)
        assert newer is not None and newer.workers == ()


async def test_strangers_are_refused_and_nobody_covers_for_another(tmp_path) -> None:
    async with bridge(tmp_path / "ledger") as b, peer(b) as one, peer(b) as two:
        with pytest.raises(RefusedError, match="ticket"):
            await one.market.ask(offer(secret=""))
        with pytest.raises(RefusedError, match="ticket"):
            await one.market.join(Join("00" * 16))
        with pytest.raises(RefusedError, match="ticket"):
            await one.market.dispatch_map(MODEL_NAME, 0, 0.0)
        saturate(b)
        given = await one.market.ask(offer())
        with pytest.raises(RefusedError, match="not signed"):
            await one.cover(one.claim(given), sign=two.me.sign)
        with pytest.raises(RefusedError, match="key that serves"):
            await two.cover(one.claim(given), sign=one.me.sign)
        with pytest.raises(RefusedError, match="another bridge"):
            await one.cover(one.claim(given, bridge=two.me.peer_id))
        with pytest.raises(LinkError, match="another time"):
            await one.cover(one.claim(given, time=time.time() - 3600))
        stolen = await two.cover(two.claim(given))
        assert not stolen.wired and "another peer's" in stolen.why
        assert b.service._state.workers == {}
        assert (await one.cover(one.claim(given))).wired


async def test_a_held_heartbeat_ends_at_once_when_a_worker_is_quarantined_and_that_survives(tmp_path) -> None:
    me = Identity.generate()
    async with bridge(tmp_path / "ledger", me) as b, peer(b) as one:
        saturate(b)
        given = await one.market.ask(offer())
        assert (await one.cover(one.claim(given))).wired
        answers = []
        async with trio.open_nursery() as nursery:

            async def heartbeat() -> None:
                answers.append(await one.cover(one.claim(given), wait=30.0))

            nursery.start_soon(heartbeat)
            await until(lambda: b.service._worker_news)
            with trio.fail_after(10):
                await b.service._quarantine(one.me.peer_id, "zeros")
        assert answers[0].retire and "zeros" in answers[0].why
        b.service._given[one.me.peer_id] = (320, 20)
        await b.service.flush()
    kept = Ledger(tmp_path / "ledger")
    assert [(g.peer, g.rows, g.checked) for g in kept.given()] == [(one.me.peer_id, 320, 20)]
    assert kept.quarantined() == {one.me.peer_id: "zeros"}
    assert one.me.peer_id in kept.admitted(SECRET)
    kept.close()
    async with bridge(tmp_path / "ledger", me) as b:
        assert one.me.peer_id in b.service._state.quarantine
        assert b.service.admitted(one.me.peer_id)


def test_a_map_that_was_changed_or_is_another_bridges_is_refused() -> None:
    from kvasir_peer.experts.dispatch_map import DispatchMap, MapWorker

    me, other = Identity.generate(), Identity.generate()
    value = DispatchMap("m", 3, me.peer_id, 1.0, 5, 64, 2, "f16", 16, (MapWorker("p", ((0, 0, 4),)),))
    signed = sign_map(value, me.sign)
    assert decode_map(signed, me.peer_id, identity.verify) == value
    for data, bridge_id in (
        (signed, other.peer_id),
        (signed[:-1] + bytes([signed[-1] ^ 1]), me.peer_id),
        (sign_map(value, other.sign), other.peer_id),
        (b"\xc1", me.peer_id),
    ):
        with pytest.raises(PlanError):
            decode_map(data, bridge_id, identity.verify)
    with pytest.raises(PlanError, match="not of this model"):
        sign_map(msgspec.structs.replace(value, workers=(MapWorker("p", ((9, 0, 4),)),)), me.sign)
