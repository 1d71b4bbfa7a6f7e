"""The market's routes over real streams: who is let in, whose coverage counts, what survives a restart."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import pytest
import trio
from helpers_experts import LOOPBACK, MODEL, until
from starlette.applications import Starlette

from kvasir_peer import identity
from kvasir_peer.api.experts import expert_routes
from kvasir_peer.engines.architectures import parse
from kvasir_peer.errors import LinkError, PlanError, RefusedError, WireError
from kvasir_peer.experts import market_messages
from kvasir_peer.experts.dispatch_map import DispatchMap, MapDispatcher, MapWorker, decode_map, sign_map
from kvasir_peer.experts.ledger import Ledger
from kvasir_peer.experts.market_client import MarketClient
from kvasir_peer.experts.market_service import MarketService, MarketSettings
from kvasir_peer.experts.recruitment import RecruitmentSettings
from kvasir_peer.experts.volunteering import Ask, Claim, DispatchReport, Join, Work, sign_claim
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
async def peer(of: Bridge, me: Identity | None = None) -> AsyncIterator[Peer]:
    me = me or Identity.generate()
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


@pytest.mark.parametrize("route", ["expert-volunteer", "coordinator", "dispatcher"])
async def test_without_a_key_that_proves_who_it_is_nobody_takes_part(route: str) -> None:
    unused = SimpleNamespace(volunteer=None, coordinator=None, dispatcher=None)
    app = Starlette(routes=expert_routes(unused))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://bridge") as client:
        answer = await client.post(f"/api/{route}", json={"memory": 1, "disk": 1})
    assert answer.status_code == 403 and "over libp2p" in answer.json()["error"]["message"]


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


def report(of: Bridge, run: int, workers=(), caught=()) -> DispatchReport:
    work = tuple(Work(*one) for one in workers)
    return DispatchReport(of.service._manifest.id, run, "load", 5, 6, ((0, 9),), work, tuple(caught))


async def test_a_stages_word_on_workers_counts_and_nobody_elses(tmp_path) -> None:
    me = Identity.generate()
    async with bridge(tmp_path / "ledger", me) as b, peer(b) as stage, peer(b) as worker, peer(b) as other:
        saturate(b)
        given = await worker.market.ask(offer())
        assert (await worker.cover(worker.claim(given))).wired
        with pytest.raises(RefusedError, match="dispatch map"):
            await stage.market.report(report(b, 1, [(worker.me.peer_id, 100, 10)]))
        b.service._ring_peers = (stage.me.peer_id,)
        b.service._ring = RingOf(stage.me.peer_id)  # type: ignore[assignment]
        await other.market.ask(offer())
        for rows in (100, 160):
            work = [(worker.me.peer_id, rows, rows // 10), ("12D3KooWNobody", 1 << 40, 0)]
            await stage.market.report(report(b, 1, work, [("12D3KooWNobody", "zeros")]))
        await b.service.flush()
        await stage.market.report(report(b, 1, [(worker.me.peer_id, 170, 17)]))  # not written before the end
        assert b.service.refused["report"] == 1 and b.service.refused["unknown worker"] == 4
        assert b.service._state.quarantine == {}, "nobody who could come is kept out for a name"
        caught = [(worker.me.peer_id, "a row differs")]
        await stage.market.report(report(b, 1, [(worker.me.peer_id, 170, 17)], caught))
        assert "differs" in b.service._state.quarantine[worker.me.peer_id]
        assert worker.me.peer_id not in b.service._state.workers
        lines = b.service.recruitment()[0]
        assert lines["refused_by_reason"] == {"report": 1, "unknown worker": 4}
        assert lines["dispatch"][stage.me.peer_id]["remote_pairs"] == 6  # type: ignore[index]
    async with bridge(tmp_path / "ledger", me) as b, peer(b, stage.me) as stage:
        b.service._ring_peers = (stage.me.peer_id,)
        b.service._ring = RingOf(stage.me.peer_id)  # type: ignore[assignment]
        # The stage has gone on meanwhile, and counts from its own start.
        await stage.market.report(report(b, 1, [(worker.me.peer_id, 200, 20)]))
    kept = Ledger(tmp_path / "ledger")
    assert [(g.peer, g.rows, g.checked) for g in kept.given()] == [(worker.me.peer_id, 200, 20)]
    kept.close()


@dataclass
class RingOf:
    """A ring of one dispatching stage."""

    stage: str

    def dispatchers(self) -> list[str]:
        return [self.stage]

    def admitted(self, peer: str) -> bool:
        return peer == self.stage

    def slots(self) -> None:
        return None


async def test_a_claim_that_somebody_has_kept_is_refused(tmp_path) -> None:
    """Over TCP the signature alone speaks: what was signed once must not bring a worker back that has left."""
    async with bridge(tmp_path / "ledger") as b, peer(b) as one:
        saturate(b)
        given = await one.market.ask(offer())
        kept = sign_claim(one.claim(given), one.me.sign, secret=SECRET.hex())
        assert (await b.service.coverage(None, kept)).wired
        assert (await one.cover(one.claim(given, leaving=True))).retire
        with pytest.raises(WireError, match="before one that is known"):
            await b.service.coverage(None, kept)
        assert b.service._state.workers == {} and b.service.refused["stale"] == 1
        with pytest.raises(RefusedError, match="not signed"):
            await one.cover(one.claim(given), sign=Identity.generate().sign)
        assert b.service.refused["signature"] == 1


def test_sums_of_a_ledger_never_overflow(tmp_path) -> None:
    kept = Ledger(tmp_path / "ledger")
    for _ in range(5):
        kept.add([("w", (1 << 62) - 1, 1 << 48)])
    assert kept.given()[0].rows <= (1 << 63) - 1 and kept.given()[0].checked == 5 << 48
    kept.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"version": -1},
        {"issued": math.nan},
        {"n_layer": 0},
        {"n_embd": 1 << 20},
        {"max_rows": 0},
        {"max_rows": 1 << 20},
        {"experts": 0},
        {"dtype": "f64"},
        {"workers": (MapWorker("p", ((0, 0, 4),)), MapWorker("p", ((1, 0, 4),)))},
        {"workers": (MapWorker("p", ((0, 4, 4),)),)},
        {"workers": (MapWorker("p", ((-1, 0, 4),)),)},
        {"workers": (MapWorker("p", ((0, 0, 4),), (), math.nan),)},
        {"workers": (MapWorker("p", ((0, 0, 4),), (), -1.0),)},
        {"workers": (MapWorker("p" * 200, ((0, 0, 4),)),)},
        {"dispatchers": (MapDispatcher("p" * 200),)},
        {"dispatchers": tuple(MapDispatcher(str(i)) for i in range(300))},
    ],
)
def test_a_signed_map_that_cannot_be_is_refused_too(changes) -> None:
    me = Identity.generate()
    value = DispatchMap("m", 3, me.peer_id, 1.0, 5, 64, 2, "f16", 16, (MapWorker("p", ((0, 0, 4),)),))
    bad = msgspec.msgpack.encode(msgspec.structs.replace(value, **changes))
    signed = msgspec.msgpack.encode((bad, me.sign(b"kvasir dispatch map 1\0" + bad)))
    with pytest.raises(PlanError):
        decode_map(signed, me.peer_id, identity.verify)
