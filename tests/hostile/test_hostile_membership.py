"""A stage that sees another membership than the head composed, or an unexpected one, refuses it by name.

The stage under test is real, and so are its runner and its cache; its neighbours are played by the test, with their
keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec
import pytest
import trio
import trio.testing

from kvasir_peer import identity
from kvasir_peer.errors import LinkError, WireError
from kvasir_peer.net.link import Link
from kvasir_peer.net.memory import memory_link_pair
from kvasir_peer.ring.head import HeadEpoch, HeadState
from kvasir_peer.ring.requests import RingRequests
from kvasir_peer.ring.stage import RingBroken, StageEpoch
from kvasir_peer.serving.widths import Widths
from kvasir_peer.wire import ring
from kvasir_peer.wire.membership import FLAG_OUTPUT, GENESIS, chain_digest, compose
from kvasir_peer.wire.sampling import GREEDY
from kvasir_peer.wire.tensors import tensor_bytes
from tests.ring.helpers_epochs import BRIDGE, IntegerEngine, Member, Net, plan_of

WIDTHS = Widths(batch_rows=16, micro_batch_rows=4, max_in_flight=4, max_requests=4, context_length=32)
SECONDS = 10.0  # for anything here; it takes milliseconds


def row(request: int, position: int, *, slot: int = 0, token: int = 5, flags: int = 0) -> tuple[int, ...]:
    """A row that passes all three stages."""
    return (request, slot, 1, position, token, flags, 3)


@dataclass
class Attack:
    """The head of a ring of three, in the hands of whoever attacks its second stage."""

    net: Net
    head: Member
    stage: Member
    tail: Member
    epoch: StageEpoch
    received: list[ring.Batch]
    ended: list[RingBroken]

    def batch(
        self, sequence: int, previous: bytes, *rows: tuple[int, ...], signer: Member | None = None
    ) -> ring.Batch:
        """What an honest head would send."""
        plan = self.epoch.plan
        membership = compose(list(rows), [GREEDY for r in rows if r[5] & FLAG_OUTPUT]).encode()  # type: ignore[arg-type]
        digest = chain_digest(plan.id.encode(), plan.epoch, sequence, previous, membership)
        trace = (ring.StageTrace(0, 1.0, 0.0, 0.0, 0),)
        signature = (signer or self.head).key.sign(digest)
        return ring.Batch(plan.id, plan.epoch, sequence, membership, digest, signature, trace)

    async def open(self, who: Member, *, epoch: int = 1) -> tuple[Link, object]:
        """A batches link to the stage, and the answer to its hello."""
        link = await self.net.node(who.peer).open_link(
            self.stage.peer, ring.PROTOCOL, max_frame=ring.MAX_OPENING_FRAME
        )
        await link.send(ring.OPENING.encode(ring.Hello("batches", self.epoch.plan.id, epoch)))
        return link, ring.OPENING.decode(await link.receive())[0]

    async def send(self, link: Link, batch: ring.Batch, *, boundary: int | None = None) -> None:
        """A batch with a boundary of the right size, or of another."""
        rows = int.from_bytes(batch.membership[:4], "little")
        size = tensor_bytes("f32", rows, self.epoch.plan.n_embd) if boundary is None else boundary
        await link.send(self.epoch.codec.encode(batch, bytes(size)))

    async def refusal(self, link: Link) -> ring.Refusal:
        """What the stage says when it refuses."""
        while True:
            message, _ = self.epoch.codec.decode(await link.receive())
            if isinstance(message, ring.Refusal):
                return message


@contextlib.asynccontextmanager
async def attack() -> AsyncIterator[Attack]:
    """A stage that serves epoch 1, its next one being a sink."""
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            net = Net(nursery)
            members = [Member(engine=IntegerEngine()) for _ in range(3)]
            plan = plan_of(members, [0, 2, 4, 6], WIDTHS)
            engine = members[1].engine
            engine.load(plan, 1)
            epoch = StageEpoch(
                plan,
                1,
                net.node(members[1].peer),  # type: ignore[arg-type]
                engine,  # type: ignore[arg-type]
                identity.verify,
                sign=members[1].key.sign,
            )
            received: list[ring.Batch] = []
            ended: list[RingBroken] = []

            async def take(link: Link) -> None:
                hello, _ = ring.OPENING.decode(await link.receive())
                await epoch.admit(link, hello)

            async def sink(link: Link) -> None:
                ring.OPENING.decode(await link.receive())
                await link.send(ring.OPENING.encode(ring.Welcome(1)))
                link.max_frame = plan.max_batch_frame
                while True:
                    message, _ = epoch.codec.decode(await link.receive())
                    if isinstance(message, ring.Batch):
                        received.append(message)

            async def run(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
                try:
                    await epoch.run(task_status=task_status)
                except RingBroken as error:
                    ended.append(error)

            net.handlers = {members[1].peer: take, members[2].peer: sink}
            await nursery.start(run)
            yield Attack(net, members[0], members[1], members[2], epoch, received, ended)
            nursery.cancel_scope.cancel()


def with_another_row(attack: Attack, good: ring.Batch) -> ring.Batch:
    other = compose([row(9, 0)], []).encode()
    return msgspec.structs.replace(attack.batch(1, good.digest, row(7, 1)), membership=other)


def with_another_digest(attack: Attack, good: ring.Batch) -> ring.Batch:
    signed = attack.batch(1, good.digest, row(7, 1))
    return msgspec.structs.replace(attack.batch(1, good.digest, row(9, 0)), signature=signed.signature)


def signed_by_somebody_else(attack: Attack, good: ring.Batch) -> ring.Batch:
    return attack.batch(1, good.digest, row(7, 1), signer=attack.tail)


def without_its_predecessor(attack: Attack, good: ring.Batch) -> ring.Batch:
    return attack.batch(1, GENESIS, row(7, 1))


def again(attack: Attack, good: ring.Batch) -> ring.Batch:
    return good


def ahead_of_its_turn(attack: Attack, good: ring.Batch) -> ring.Batch:
    return attack.batch(2, good.digest, row(7, 1))


def of_another_epoch(attack: Attack, good: ring.Batch) -> ring.Batch:
    return msgspec.structs.replace(attack.batch(1, good.digest, row(7, 1)), epoch=2)


def of_another_plan(attack: Attack, good: ring.Batch) -> ring.Batch:
    return msgspec.structs.replace(attack.batch(1, good.digest, row(7, 1)), plan="another")


def with_a_slot_twice(attack: Attack, good: ring.Batch) -> ring.Batch:
    return attack.batch(1, good.digest, row(7, 1), row(8, 0, slot=1), row(9, 0))


def with_a_token_that_is_none(attack: Attack, good: ring.Batch) -> ring.Batch:
    return attack.batch(1, good.digest, row(7, 1, token=100))


def with_a_gap(attack: Attack, good: ring.Batch) -> ring.Batch:
    return attack.batch(1, good.digest, row(7, 1), row(7, 3))


def with_too_many_rows(attack: Attack, good: ring.Batch) -> ring.Batch:
    return attack.batch(1, good.digest, *(row(7, 1 + i) for i in range(5)))


def with_an_invented_trace(attack: Attack, good: ring.Batch) -> ring.Batch:
    batch = attack.batch(1, good.digest, row(7, 1))
    return msgspec.structs.replace(batch, trace=batch.trace * 2)


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (with_another_row, "membership"),
        (with_another_digest, "signature"),
        (signed_by_somebody_else, "signature"),
        (without_its_predecessor, "membership"),
        (again, "sequence"),
        (ahead_of_its_turn, "sequence"),
        (of_another_epoch, "epoch"),
        (of_another_plan, "epoch"),
        (with_a_slot_twice, "membership"),
        (with_a_token_that_is_none, "membership"),
        (with_a_gap, "membership"),
        (with_too_many_rows, "oversize"),
        (with_an_invented_trace, "trace"),
    ],
)
async def test_a_batch_that_the_head_did_not_compose_is_refused_by_name(
    spoil: Callable[[Attack, ring.Batch], ring.Batch], code: str
) -> None:
    async with attack() as made:
        link, answer = await made.open(made.head)
        assert isinstance(answer, ring.Welcome)
        link.max_frame = made.epoch.plan.max_batch_frame
        good = made.batch(0, GENESIS, row(7, 0))
        await made.send(link, good)
        await made.send(link, spoil(made, good), boundary=5 * 16 if spoil is with_too_many_rows else None)
        refusal = await made.refusal(link)
        assert refusal.code == code
        await trio.testing.wait_all_tasks_blocked()
        (broken,) = made.ended
        assert f"stage 1 refused a batch ({code})" in str(broken)
        assert made.stage.engine.stack is not None and made.stage.engine.stack.rows <= 1
        assert [batch.sequence for batch in made.received] in ([], [0]), "nothing else went on"


async def test_a_boundary_of_another_size_is_refused() -> None:
    async with attack() as made:
        link, _ = await made.open(made.head)
        link.max_frame = made.epoch.plan.max_batch_frame
        await made.send(link, made.batch(0, GENESIS, row(7, 0)), boundary=17)
        assert (await made.refusal(link)).code == "shape"


async def test_a_row_that_builds_on_what_is_not_in_the_cache_is_not_computed() -> None:
    async with attack() as made:
        link, _ = await made.open(made.head)
        link.max_frame = made.epoch.plan.max_batch_frame
        first = made.batch(0, GENESIS, row(7, 0))
        await made.send(link, first)
        await made.send(
            link, made.batch(1, first.digest, row(8, 1))
        )  # another request's entries lie before it
        await trio.testing.wait_all_tasks_blocked()
        (broken,) = made.ended
        assert "slot 0 holds 1 positions of request 7, a row of request 8 builds on 1" in str(broken)
        assert broken.cache_lost, "the bridge hears of it, and has the stage compute everything again"


async def test_strangers_and_other_epochs_get_no_link_and_harm_nobody() -> None:
    async with attack() as made:
        link, answer = await made.open(made.head)
        assert isinstance(answer, ring.Welcome)
        for who, epoch, code in (
            (made.tail, 1, "stranger"),
            (made.head, 2, "epoch"),
            (made.head, 1, "unexpected"),
        ):
            other, refusal = await made.open(who, epoch=epoch)
            assert isinstance(refusal, ring.Refusal) and refusal.code == code
            with pytest.raises(LinkError):
                await other.receive()
        assert [error.code for error in made.net.refused] == ["stranger", "epoch", "unexpected"]
        link.max_frame = made.epoch.plan.max_batch_frame
        await made.send(link, made.batch(0, GENESIS, row(7, 0)))
        while not made.received:
            await trio.testing.wait_all_tasks_blocked()
        assert not made.ended


# --- what head and bridge make of the tail's word ---------------------------------------------------------------------


def results(plan_id: str = "ring") -> ring.Result:
    output = ring.Output(7, 1, 0, 3)
    return ring.Result(plan_id, 1, 0, bytes(32), (output,), (ring.StageTrace(0, 1.0, 0.0, 0.0, 0),) * 2)


async def bridge_of(epoch: int = 1, requests: RingRequests | None = None) -> RingRequests:
    """The bridge's requests, attached to a ring of that epoch."""
    made = RingRequests() if requests is None else requests
    plan = msgspec.structs.replace(plan_of([Member(), Member()], [0, 1, 2], WIDTHS), epoch=epoch)
    await made.attach(plan, memory_link_pair(ring.PROTOCOL)[0])
    return made


async def test_the_bridge_takes_no_token_of_a_batch_on_which_head_and_tail_disagree() -> None:
    requests = await bridge_of()
    requests.composed(ring.Composed("ring", 1, 0, b"\1" * 32))
    with pytest.raises(WireError, match="different memberships") as caught:
        requests.result(results())
    assert caught.value.code == "membership"
    assert requests.statistics().digest_mismatches == 1 and requests.statistics().tokens == 0


async def test_a_head_that_speaks_twice_does_not_stand_in_for_the_tail() -> None:
    requests = await bridge_of()
    requests.composed(ring.Composed("ring", 1, 0, b"\1" * 32))
    with pytest.raises(WireError, match="a second time"):
        requests.composed(ring.Composed("ring", 1, 0, b"\1" * 32))


async def test_the_bridge_does_not_compare_what_different_epochs_said() -> None:
    requests = await bridge_of()
    requests.composed(ring.Composed("ring", 1, 0, b"\1" * 32))
    for stale in (
        lambda: requests.result(msgspec.structs.replace(results(), epoch=2, digest=b"\2" * 32)),
        lambda: requests.composed(ring.Composed("ring", 0, 0, b"\2" * 32)),
        lambda: requests.result(results("another")),
    ):
        with pytest.raises(WireError, match="not the present one") as caught:
            stale()
        assert caught.value.code == "epoch"
    # What was said before stands beside it: the tail of the present epoch is still compared with its head.
    requests.result(msgspec.structs.replace(results(), digest=b"\1" * 32))
    requests.composed(ring.Composed("ring", 1, 1, b"\3" * 32))
    await bridge_of(2, requests)
    with pytest.raises(WireError, match="not the present one"):
        requests.result(msgspec.structs.replace(results(), sequence=1, digest=b"\3" * 32))
    requests.result(msgspec.structs.replace(results(), epoch=2, sequence=1, digest=b"\4" * 32))
    requests.composed(ring.Composed("ring", 2, 1, b"\4" * 32))
    assert requests.statistics().digest_mismatches == 0


async def test_nothing_is_taken_from_a_ring_before_there_is_one() -> None:
    with pytest.raises(WireError, match="not the present one"):
        RingRequests().result(results())


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda result: msgspec.structs.replace(result, digest=b"\1" * 32), "membership"),
        (lambda result: msgspec.structs.replace(result, sequence=1), "sequence"),
        (lambda result: msgspec.structs.replace(result, epoch=2), "sequence"),
        (lambda result: msgspec.structs.replace(result, outputs=()), "outputs"),
        (
            lambda result: msgspec.structs.replace(
                result, outputs=tuple(msgspec.structs.replace(o, request=9) for o in result.outputs)
            ),
            "outputs",
        ),
    ],
)
async def test_the_head_takes_no_result_that_does_not_answer_its_batch(
    spoil: Callable[[ring.Result], ring.Result], code: str
) -> None:
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            net = Net(nursery)
            members = [Member(engine=IntegerEngine()) for _ in range(2)]
            plan = plan_of(members, [0, 3, 6], WIDTHS)
            members[0].engine.load(plan, 0)
            batches: trio.MemorySendChannel[ring.Batch]
            batches, composed = trio.open_memory_channel[ring.Batch](8)
            head = HeadEpoch(
                plan,
                0,
                net.node(members[0].peer),  # type: ignore[arg-type]
                members[0].engine,  # type: ignore[arg-type]
                identity.verify,
                state=HeadState(plan),
                sign=members[0].key.sign,
            )

            async def take(link: Link) -> None:
                hello, _ = ring.OPENING.decode(await link.receive())
                await head.admit(link, hello)

            async def tail(link: Link) -> None:
                ring.OPENING.decode(await link.receive())
                await link.send(ring.OPENING.encode(ring.Welcome(1)))
                link.max_frame = plan.max_batch_frame
                while True:
                    message, _ = head.codec.decode(await link.receive())
                    if isinstance(message, ring.Batch):
                        await batches.send(message)

            net.handlers = {members[0].peer: take, members[1].peer: tail, BRIDGE.peer_id: tail}

            async def run() -> None:
                with pytest.raises(RingBroken, match=rf"\({code}\)"):
                    await head.run()
                nursery.cancel_scope.cancel()

            nursery.start_soon(run)
            requests = await opened(net, BRIDGE.peer_id, members[0], "requests")
            results_link = await opened(net, members[1].peer, members[0], "results")
            results_link.max_frame = requests.max_frame = plan.max_result_frame
            await requests.send(head.codec.encode(ring.Submit(7, (1, 2), 4, replace_length(2), ())))
            await requests.send(head.codec.encode(ring.Resumed()))
            batch = await composed.receive()
            trace = tuple(ring.StageTrace(stage, 1.0, 0.0, 0.0, 0) for stage in range(2))
            good = ring.Result("ring", 1, batch.sequence, batch.digest, (ring.Output(7, 1, 1, 3),), trace)
            await results_link.send(head.codec.encode(spoil(good)))
            await trio.sleep_forever()


def replace_length(length: int):  # type: ignore[no-untyped-def]
    return msgspec.structs.replace(GREEDY, prompt_length=length)


async def opened(net: Net, who: str, to: Member, purpose: ring.Purpose) -> Link:
    """A welcomed link."""
    link = await net.node(who).open_link(to.peer, ring.PROTOCOL, max_frame=ring.MAX_OPENING_FRAME)
    await link.send(ring.OPENING.encode(ring.Hello(purpose, "ring", 1)))
    answer, _ = ring.OPENING.decode(await link.receive())
    assert isinstance(answer, ring.Welcome)
    return link
