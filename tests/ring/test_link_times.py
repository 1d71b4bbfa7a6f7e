"""Who measures the way to whom, and that two peers really do."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from helpers_epochs import Net

from kvasir_peer.errors import LinkError
from kvasir_peer.net.link import Link
from kvasir_peer.ring import link_probe
from kvasir_peer.ring.link_times import MAX_MEASURED, MEASURED_FOR, RETRY_AFTER, LinkTimes
from kvasir_peer.ring.offers import LinkTime
from kvasir_peer.wire import ring


def test_each_pair_is_measured_once_and_the_bridge_by_all() -> None:
    times = LinkTimes("bridge")
    members = ["c", "a", "b"]
    due = {peer: times.due(peer, members, 0.0) for peer in members}
    assert due == {"a": ["bridge", "c", "b"], "b": ["bridge", "c"], "c": ["bridge"]}
    for peer, others in due.items():
        times.asked(peer, others, 0.0)
        assert times.due(peer, members, 1.0) == []
    assert times.due("a", members, RETRY_AFTER) == ["bridge", "c", "b"], "no answer came"
    for peer, others in due.items():
        for other in others:
            assert times.take(peer, other, LinkTime(0.01), members, 2.0)
    assert all(times.due(peer, members, RETRY_AFTER + 2.0) == [] for peer in members)
    assert times.due("a", members, MEASURED_FOR + 2.0) == ["bridge", "c", "b"], "the way may have changed"


def test_what_nobody_asked_for_is_not_taken() -> None:
    times = LinkTimes("bridge")
    assert not times.take("a", "b", LinkTime(9.0), ["a", "b"], 0.0)
    times.asked("a", ["b"], 0.0)
    assert not times.take("a", "b", LinkTime(9.0), ["a"], 0.0), "it is no member any more"
    assert times.links.pairs == {}


def test_links_hold_for_both_directions_and_others_are_as_usual() -> None:
    times = LinkTimes("bridge")
    members = ["a", "b", "c"]
    for peer, other, seconds in (("a", "b", 0.01), ("a", "c", 0.05), ("b", "bridge", 0.02)):
        times.asked(peer, [other], 0.0)
        times.take(peer, other, LinkTime(seconds, 1e6), members, 0.0)
    links = times.links
    assert links.between("b", "a") == links.between("a", "b") == LinkTime(0.01, 1e6)
    assert links.between("bridge", "b").seconds == 0.02
    assert links.between("b", "c").seconds == 0.02, "the middle one"
    times.forget("a")
    assert set(times.links.pairs) == {("b", "bridge")}


def test_what_is_remembered_counts_until_it_is_measured_or_a_peer_leaves() -> None:
    times = LinkTimes("bridge", {("b", "a"): LinkTime(0.03), ("a", "c"): LinkTime(0.04)})
    members = ["a", "b", "c"]
    assert times.links.between("a", "b").seconds == 0.03
    assert times.due("a", members, 0.0) == ["bridge", "b", "c"], "it is measured all the same"
    times.asked("a", ["b"], 0.0)
    times.take("a", "b", LinkTime(0.01), members, 1.0)
    assert times.links.between("a", "b").seconds == 0.01
    times.forget("c")
    assert set(times.links.pairs) == {("a", "b")}


def test_a_crowd_is_not_measured() -> None:
    times = LinkTimes("bridge")
    members = [f"{number:03}" for number in range(100)]
    assert len(times.due("000", members, 0.0)) == MAX_MEASURED
    assert times.due("050", members, 0.0) == []


async def test_two_peers_measure_the_way() -> None:
    async with trio.open_nursery() as nursery:
        net = Net(nursery)

        async def take(link: Link) -> None:
            hello, _ = ring.OPENING.decode(await link.receive())
            assert hello.purpose == "probe"
            await link_probe.answer(link)

        async def refuse(link: Link) -> None:
            await link.receive()
            await link.send(ring.OPENING.encode(ring.Refusal("stranger", "not here")))

        net.handlers = {"near": take, "closed": refuse}
        found = await link_probe.measure(net.node("me"), "near", ())  # type: ignore[arg-type]
        assert 0 < found.seconds < 5
        with pytest.raises(LinkError, match="closed refused: not here"):
            await link_probe.measure(net.node("me"), "closed", ())  # type: ignore[arg-type]
        await trio.testing.wait_all_tasks_blocked()
        assert net.serving == 0, "the link was closed on both sides"


async def test_a_probe_takes_only_so_many_pings_of_so_many_bytes() -> None:
    async with trio.open_nursery() as nursery:
        net = Net(nursery)

        async def take(link: Link) -> None:
            await link.receive()
            await link_probe.answer(link)

        net.handlers = {"near": take}

        async def opened() -> Link:
            link = await net.node("me").open_link("near", ring.PROTOCOL, max_frame=ring.MAX_OPENING_FRAME)
            await link.send(ring.OPENING.encode(ring.Hello("probe", "", 0)))
            await link.receive()
            return link

        link = await opened()
        for nonce in range(link_probe.MAX_PINGS):
            await link.send(ring.OPENING.encode(ring.Ping(nonce)))
            await link.receive()
        with pytest.raises(LinkError):
            await link.receive()
        link = await opened()
        await link.send(ring.OPENING.encode(ring.Ping(0), bytes(link_probe.MAX_PROBE_FRAME)))
        with pytest.raises(LinkError):
            await link.receive()
