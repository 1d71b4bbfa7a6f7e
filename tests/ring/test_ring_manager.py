"""The bridge's hand on a ring: what it keeps of peers, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio.testing

from kvasir_peer import identity
from kvasir_peer.agent.loop_lag import LoopLag
from kvasir_peer.engines.architectures import parse
from kvasir_peer.errors import PlanError, RefusedError, WireError
from kvasir_peer.models.gguf import GgufFile
from kvasir_peer.models.manifest import build_manifest
from kvasir_peer.net.memory import memory_link_pair
from kvasir_peer.net.node import PeerEvent
from kvasir_peer.progress import Progress
from kvasir_peer.ring import stage_market as market
from kvasir_peer.ring.manager import HELLO_SECONDS, RingManager, RingSettings
from kvasir_peer.ring.volunteering import Offer, Report
from kvasir_peer.wire import ring

MODEL = Path(__file__).resolve().parents[1] / "data" / "stories260K.gguf"
SECRET = b"a ticket's secret"
KEY = identity.Identity.generate()
OFFER = Offer(memory=1, disk=1, engine="onnx")  # too little for any place: nothing is planned with it


@dataclass
class Node:
    """What a manager uses of a node until a ring goes."""

    peer_id: str = KEY.peer_id
    watchers: list = field(default_factory=list)

    def addresses(self) -> list[str]:
        return []

    def on_peer(self, watcher: object) -> None:
        self.watchers.append(watcher)


def manager_of(**more: object) -> tuple[RingManager, list[Progress]]:
    with GgufFile.open(MODEL) as file:
        manifest, shape = build_manifest(file), parse(file.metadata, file.tensors)
    values: dict = {
        "stages": 3,
        "secret": SECRET,
        "dtype": "f16",
        "batch_rows": 64,
        "micro_batch_rows": 16,
        "max_in_flight": 0,
        "max_requests": 4,
        "context_length": 128,
        "top_logprobs": 0,
    }
    said: list[Progress] = []
    settings = RingSettings(**{**values, **more})
    made = RingManager(Node(), manifest, shape, settings, sign=KEY.sign, report=said.append, lag=LoopLag())  # type: ignore[arg-type]
    return made, said


def report(secret: bytes = SECRET, **more: object) -> Report:
    return Report(OFFER, secret.hex(), **more)  # type: ignore[arg-type]


async def test_peers_that_come_and_go_for_ever_leave_nothing_behind(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Over a thousand, a hundred at a time; whoever comes then is let in as the first was."""
    made, _ = manager_of()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(11):
            peers = [f"peer-{number}-{each}" for each in range(100)]
            async with trio.open_nursery() as polls:
                for peer in peers:
                    polls.start_soon(made.poll, peer, report(wait=10.0))
                await trio.testing.wait_all_tasks_blocked()
                assert all(made.admitted(peer) for peer in peers)
                polls.cancel_scope.cancel()  # they break off while their polls are held
            for peer in peers:
                made._peer_event(PeerEvent(peer, "gone", "direct", "it is over"))
            await trio.sleep(market.GONE_SECONDS + 1)
            assert not any(made.admitted(peer) for peer in peers)
        left = (made._reports, made._polls, made._market.members, made._link_times._asked)
        assert [len(table) for table in left] == [0, 0, 0, 0]
        orders = await made.poll("the last", report())
        assert orders.assigned == "wait" and made.admitted("the last")
        nursery.cancel_scope.cancel()


async def test_who_finds_no_room_waits_and_takes_none(autojump_clock: trio.testing.MockClock) -> None:
    made, _ = manager_of()
    for number in range(market.MAX_MEMBERS):
        await made.poll(f"peer-{number}", report(wait=0.0))
    began = trio.current_time()
    orders = await made.poll("one more", report(wait=10.0))
    assert trio.current_time() - began == 10 and orders.assigned == "wait"
    assert "256 peers have volunteered here already" in orders.why
    assert not made.admitted("one more") and len(made._reports) == market.MAX_MEMBERS


async def test_only_a_good_ticket_opens() -> None:
    made, _ = manager_of()
    for secret in (b"", b"another ticket's"):
        with pytest.raises(RefusedError, match="ticket"):
            await made.poll("peer", report(secret))
    assert not made.admitted("peer") and made.statistics().refused_peers == 2


async def test_a_link_that_says_nothing_is_refused_in_words(autojump_clock: trio.testing.MockClock) -> None:
    made, _ = manager_of()
    here, _there = memory_link_pair(ring.PROTOCOL)
    began = trio.current_time()
    with pytest.raises(WireError, match="must begin with a hello"):
        await made.take_link(here)
    assert trio.current_time() - began == HELLO_SECONDS


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"micro_batch_rows": 4096, "max_requests": 4096}, "take fewer rows or requests"),
        ({"stages": 1}, "two stages or more"),
        ({"stages": 9}, "the model has 5 layers"),
    ],
)
def test_a_ring_that_can_never_be_is_refused_before_anything_runs(more: dict, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        manager_of(**more)
