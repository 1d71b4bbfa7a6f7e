"""A bridge that is started again: who took part goes on taking part, and nobody fetches or loads anything again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import trio
from helpers_experts import LOOPBACK, until
from helpers_market import Swarm, model
from helpers_volunteers import QUARTER, bridge, volunteer

from kvasir_peer.experts.dispatch_policy import SlotReading
from kvasir_peer.experts.market import RETURN_SECONDS, SILENT_SECONDS, MarketState
from kvasir_peer.experts.market_messages import (
    Caught,
    CoordinatorUp,
    CoverageKept,
    CoverageReported,
    MapChanged,
    Retire,
    SlotsRead,
    Tick,
    Wired,
)
from kvasir_peer.experts.market_views import dispatch_map
from kvasir_peer.experts.recruitment import RecruitmentSettings
from kvasir_peer.experts.roll import MAX_AGE, Roll, RollWorker, decode_roll, encode_roll
from kvasir_peer.identity import Identity

HALVES = (((0, 0, 8), (1, 0, 8)), ((0, 8, 16), (1, 8, 16)))


def restarted() -> Swarm:
    """A market just after its bridge's restart."""
    swarm = Swarm(RecruitmentSettings(base=1, boost=1))
    swarm._carry_out = lambda decision: None  # type: ignore[method-assign]
    swarm.state = MarketState(swarm.settings, settles_at=RETURN_SECONDS)
    swarm.offer(model(2))
    return swarm


def pass_time(swarm: Swarm, seconds: float) -> None:
    for _ in range(int(seconds)):
        swarm.now += 1.0
        swarm.tell(Tick())


def test_kept_workers_are_in_the_map_at_once_and_out_again_unless_they_are_heard_of() -> None:
    swarm = restarted()
    for peer, half in (("a", HALVES[0]), ("b", HALVES[1])):
        swarm.tell(CoverageKept(peer, "moe", half, 5.0, ("/p2p/" + peer,)))
    assert [w.peer for w in dispatch_map(swarm.state, "moe")[1]] == ["a", "b"]
    pass_time(swarm, 5)
    decisions = swarm.tell(CoverageReported("a", "moe", 7, HALVES[0], 5.0, ("/p2p/a",)))
    assert [type(d) for d in decisions] == [MapChanged, Wired], (
        "a number of a lease from before is no obstacle"
    )
    pass_time(swarm, SILENT_SECONDS - 6)
    assert [w.peer for w in dispatch_map(swarm.state, "moe")[1]] == ["a", "b"]
    pass_time(swarm, 3)
    assert [w.peer for w in dispatch_map(swarm.state, "moe")[1]] == ["a"]
    swarm.check()


def test_a_kept_worker_that_was_quarantined_or_whose_ranges_make_no_sense_is_not_wired() -> None:
    swarm = restarted()
    swarm.tell(Caught("liar", "zeros"))
    for kept in (
        CoverageKept("liar", "moe", HALVES[0]),
        CoverageKept("a", "moe", ((9, 0, 4),)),
        CoverageKept("b", "other", HALVES[0]),
    ):
        assert swarm.tell(kept) == []
    assert dispatch_map(swarm.state, "moe")[1] == []
    swarm.check()


def test_all_that_come_back_are_taken_and_the_surplus_goes_once_it_is_known_that_there_is_no_load() -> None:
    for busy in (False, True):
        swarm = restarted()
        swarm.tell(CoordinatorUp("c", "moe"))
        for peer in ("a", "b"):
            decisions = swarm.tell(CoverageReported(peer, "moe", 0, HALVES[0], ord(peer)))
            assert isinstance(decisions[-1], Wired), "nobody is sent away before the load is known"
        assert isinstance(swarm.tell(CoverageReported("c", "moe", 0, HALVES[0]))[-1], Retire)
        retired = []
        for _ in range(int(RETURN_SECONDS) + 2):
            swarm.now += 1.0
            swarm.tell(SlotsRead("c", SlotReading(4 if busy else 0, 8, 0, swarm.now)))
            for peer in ("a", "b"):
                decisions = swarm.tell(CoverageReported(peer, "moe", 0, HALVES[0], ord(peer)))
                retired += [d.peer for d in decisions if isinstance(d, Retire)]
            swarm.tell(Tick())
        assert set(retired) == (set() if busy else {"a"}), "the slower of the two"
        swarm.check()


def test_a_roll_that_is_old_or_of_another_model_or_no_roll_calls_nobody() -> None:
    worker = RollWorker("a", HALVES[0], 1000.0, 5.0, ("/p2p/a",), "onnx cpu")
    gone = msgspec.structs.replace(worker, peer="gone", seen=1000.0 - MAX_AGE)
    roll = Roll("model", 1000.0, (worker, gone))
    data = encode_roll(roll)
    assert decode_roll(data, "model", 1010.0).workers == (worker,)
    for wrong, name, now in (
        (data, "model", 1000.0 + MAX_AGE + 1),
        (data, "another", 1010.0),
        (data, "model", 900.0),
        (None, "model", 1010.0),
        (b"\xc1", "model", 1010.0),
    ):
        assert decode_roll(wrong, name, now).workers == ()


async def test_who_is_paused_while_it_waits_is_given_no_lease(tmp_path: Path) -> None:
    async with bridge(tmp_path) as b, volunteer(b, tmp_path / "one", disk=QUARTER) as one:
        await until(lambda: one.node.peer_id in b.service._state.waiting)
        one.volunteer.pause()
        await until(lambda: one.node.peer_id not in b.service._state.waiting)
        b.saturate()
        assert b.service._state.leases == {} and b.service._state.granted == 0
        one.volunteer.resume()
        await one.serves()


async def test_volunteers_serve_on_over_a_restart_of_the_bridge(tmp_path: Path) -> None:
    me = Identity.generate()

    ended = trio.Event()

    async def serve(listen: str, task_status) -> None:
        with trio.CancelScope() as scope:
            async with bridge(tmp_path, me, listen=listen) as b:
                task_status.started((b, scope))
                await trio.sleep_forever()
        ended.set()

    async with trio.open_nursery() as nursery:
        b, running = await nursery.start(serve, LOOPBACK)
        port = b.node.addresses()[0].split("/tcp/")[1].split("/")[0]
        async with (
            volunteer(b, tmp_path / "one", disk=QUARTER) as one,
            volunteer(b, tmp_path / "two", disk=QUARTER) as two,
        ):
            b.saturate()
            had = {x.node.peer_id: await x.serves() for x in (one, two)}
            await until(lambda: len(b.service._state.workers) == 2)
            await b.service.flush()
            version, before = b.service._version, [x.fetched for x in (one, two)]
            running.cancel()
            await ended.wait()
            b, running = await nursery.start(serve, f"/ip4/127.0.0.1/tcp/{port}")
            assert b.service._version > version
            workers = b.service._state.workers
            assert {c.peer: c.ranges for c in workers.values()} == had, "before anybody has said anything"
            began = trio.current_time()
            await until(lambda: all(c.connected for c in workers.values()))
            assert trio.current_time() - began < 6.0
            for x, fetched in zip((one, two), before, strict=True):
                assert x.fetched == fetched and x.volunteer.statistics().leases == 1
                assert x.volunteer.statistics().state == "serving"
        running.cancel()
