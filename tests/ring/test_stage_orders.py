"""What a stage does with orders and links that come at an awkward moment."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import pytest
import trio
import trio.testing
from helpers_epochs import BRIDGE, Member, Net, plan_of

from kvasir_peer import identity
from kvasir_peer.agent.membership import Membership
from kvasir_peer.errors import ResourceError, WireError
from kvasir_peer.net.memory import memory_link_pair
from kvasir_peer.ring.stage import StageEpoch
from kvasir_peer.ring.stage_peer import StagePeer, _Prepared
from kvasir_peer.ring.volunteering import Orders
from kvasir_peer.serving.widths import Widths
from kvasir_peer.wire import ring

WIDTHS = Widths(batch_rows=8, micro_batch_rows=4, max_in_flight=2, max_requests=2, context_length=64)


async def test_an_epoch_that_is_over_takes_no_link() -> None:
    """A link that is welcomed then would hang until its other end gives up."""
    async with trio.open_nursery() as nursery:
        net, members = Net(nursery), [Member(), Member(), Member()]
        plan = plan_of(members, [0, 1, 2, 3], WIDTHS)
        epoch = StageEpoch(
            plan,
            1,
            net.node(members[1].peer),  # type: ignore[arg-type]
            members[1].engine,  # type: ignore[arg-type]
            identity.verify,
            sign=members[1].key.sign,
        )
        with trio.CancelScope() as scope:
            scope.cancel()
            await epoch.run()
        here, there = memory_link_pair(ring.PROTOCOL, peers=(members[0].peer, members[1].peer))
        with pytest.raises(WireError, match="epoch 1 is over here"):
            await epoch.admit(there, ring.Hello("batches", plan.id, 1))
        refusal, _ = ring.OPENING.decode(await here.receive())
        assert refusal.code == "epoch"


def stage(home: Path, node: object) -> tuple[StagePeer, list[str]]:
    """A stage that does not run, and the lines that its owner reads."""
    told: list[str] = []
    peer = StagePeer(
        node,  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        Membership(BRIDGE.peer_id, (), "", home, 1, 1, "onnx", "cpu", "exact", 1),
        sign=identity.Identity.generate().sign,
        verify=identity.verify,
        report=lambda progress: told.append(progress.line()),
    )
    return peer, told


def test_a_stage_that_leaves_says_so_in_words_that_make_sense(tmp_path: Path) -> None:
    peer, told = stage(tmp_path, SimpleNamespace())
    peer._nursery = SimpleNamespace(start_soon=lambda task: None)  # type: ignore[assignment]
    peer._plan, peer._state = plan_of([Member(), Member()], [0, 1, 2], WIDTHS), "serving"
    peer.leave()
    assert told == ["stop: the bridge looks for somebody to take this place"]


async def test_a_bridge_that_does_not_answer_is_a_problem_until_it_does(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    answers = iter([503, 503, 200])

    async def answer(request: httpx.Request) -> httpx.Response:
        status = next(answers, None)
        if status is None:
            await trio.sleep_forever()
        return httpx.Response(status or 0, content=msgspec.json.encode(Orders("wait")))

    def client(*bridge: object) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://bridge")

    peer, told = stage(tmp_path, SimpleNamespace(http_client=client, addresses=tuple))
    peer._state = "serving"
    with trio.move_on_after(5):
        await peer._poll()
    first, second, last = told
    assert first == second and first.startswith("problem: the bridge does not answer; trying again (")
    assert last == "ready: the bridge answers again"


async def test_a_slice_that_its_engine_has_no_memory_for_makes_it_say_that_it_takes_more(
    tmp_path: Path,
) -> None:
    async def refuse(order: object, progress: object) -> None:
        raise ResourceError("layers 0 to 1 need more than is allowed")

    members = [Member(), Member()]
    peer, _ = stage(tmp_path, SimpleNamespace(peer_id=members[0].peer))
    peer._engine, peer._store = SimpleNamespace(load_stage=refuse), SimpleNamespace(root=tmp_path)  # type: ignore[assignment]
    peer._manifest_file = tmp_path / "manifest"
    plan = plan_of(members, [0, 4, 8], WIDTHS)
    said = [peer._expansion]
    for end in (4, 4, 3, *[4, 3] * 12):
        part = _Prepared(plan.model, 0, end, plan.widths, plan.dtype)
        with pytest.raises(ResourceError):
            await peer._load(plan, part, "layers")
        said.append(peer._expansion)
    assert said[:4] == pytest.approx([2.0, 2.2, 2.2, 2.42]), (
        "standing by: once for each slice, not for each try"
    )
    assert said[-1] == 16.0, "what is said is never refused as absurd"
    # With a place in a plan each refusal counts: by what it says the same slice may still seem to fit.
    peer._plan, peer._expansion = plan, 2.0
    part = _Prepared(plan.model, 0, 4, plan.widths, plan.dtype)
    for expected in (2.2, 2.42):
        with pytest.raises(ResourceError):
            await peer._load(plan, part, "layers")
        assert peer._expansion == pytest.approx(expected)


async def test_an_order_that_comes_before_an_epoch_has_begun_ends_it_all_the_same(tmp_path: Path) -> None:
    """Between the order to go and the task's first step another order may come, of another task."""
    async with trio.open_nursery() as nursery:
        net, members = Net(nursery), [Member(), Member()]
        plan = plan_of(members, [0, 1, 2], WIDTHS)
        peer, _ = stage(tmp_path, net.node(members[1].peer))
        peer._nursery, peer._plan, peer._state = nursery, plan, "loaded"
        peer._start_epoch(plan)
        assert peer._epoch is not None
        peer._stop_serving()
        peer._plan = None  # as it stands by from now on
        await trio.testing.wait_all_tasks_blocked()
        assert peer._epoch is None, "it would go on looking for neighbours that are long in another epoch"
        nursery.cancel_scope.cancel()
