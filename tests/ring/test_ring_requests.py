"""The bridge's side of requests: what a head is told when epochs, clients and deadlines come and go."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
import trio
import trio.testing
from helpers_epochs import Member, moved, plan_of

from kvasir_peer.errors import NotReadyError
from kvasir_peer.net.link import QUEUED_BYTES, Link, Priority
from kvasir_peer.net.memory import memory_link_pair
from kvasir_peer.ring.head import HeadState
from kvasir_peer.ring.plan import Plan
from kvasir_peer.ring.requests import DEADLINE_GRACE, MENDING_SECONDS, RingRequests
from kvasir_peer.serving.tokens import PAUSE_COMMENT_SECONDS, Token
from kvasir_peer.serving.widths import Widths
from kvasir_peer.wire import ring
from kvasir_peer.wire.sampling import GREEDY

WIDTHS = Widths(batch_rows=8, micro_batch_rows=4, max_in_flight=2, max_requests=2, context_length=64)


@dataclass
class Bridge:
    """A bridge's requests, with the head's end of the link in the hands of the test."""

    nursery: trio.Nursery
    members: list[Member] = field(default_factory=lambda: [Member(), Member(), Member()])
    requests: RingRequests = field(default_factory=RingRequests)
    plan: Plan | None = None
    sequence: int = 0

    async def attach(self, plan: Plan | None = None) -> Link:
        """Another epoch; the head's end of its link."""
        if plan is None:
            plan = plan_of(self.members, [0, 1, 2, 3], WIDTHS)
        here, there = memory_link_pair(ring.PROTOCOL, max_frame=1 << 20)
        self.plan, self.sequence = plan, 0
        await self.requests.attach(plan, here)
        self.nursery.start_soon(self.requests.send_cancels, here)
        return there

    def next(self, fresh: list[Member]) -> Plan:
        assert self.plan is not None
        return moved(self.plan, self.members, [0, 1, 2, 3], fresh)

    def token(self, request: int, position: int, token: int, slot: int = 0) -> None:
        """Head and tail speak of a batch that gave a token."""
        assert self.plan is not None
        name = ("ring", self.plan.epoch, self.sequence, bytes(32))
        output = ring.Output(request, 1, position, token, slot=slot)
        self.requests.composed(ring.Composed(*name))
        self.requests.result(ring.Result(*name, (output,), ()))
        self.sequence += 1

    async def ask(self, prompt: list[int], deadline: float = float("inf")) -> Asked:
        """A client; it goes when its scope is cancelled."""
        asked = Asked()
        begun = trio.Event()

        async def run() -> None:
            sampling = msgspec.structs.replace(GREEDY, prompt_length=len(prompt))
            with asked.scope:
                try:
                    async with self.requests.generate(
                        prompt, 20, sampling, frozenset(), deadline=deadline
                    ) as answer:
                        asked.request = max(self.requests.active_ids())
                        begun.set()
                        async for token in answer:
                            asked.tokens.append(token)
                except NotReadyError as error:
                    asked.error = str(error)

        self.nursery.start_soon(run)
        await begun.wait()
        return asked


@dataclass
class Asked:
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    request: int = 0
    tokens: list[Token] = field(default_factory=list)
    error: str = ""


@contextlib.asynccontextmanager
async def a_bridge() -> AsyncIterator[Bridge]:
    async with trio.open_nursery() as nursery:
        yield Bridge(nursery)
        nursery.cancel_scope.cancel()


async def fill(link: Link, plan: Plan) -> None:
    """The head does not take what comes, until nothing more goes out."""
    while link.statistics().bytes_queued < QUEUED_BYTES:
        await link.send(ring.codec(plan.limits()).encode(ring.Ping(0), bytes(1 << 16)), Priority.CONTROL)


async def heard(bridge: Bridge, link: Link) -> list[msgspec.Struct]:
    """What has come to the head until nothing more comes."""
    assert bridge.plan is not None
    codec, messages = ring.codec(bridge.plan.limits()), []
    await trio.testing.wait_all_tasks_blocked()
    while link.statistics().frames_unread:
        messages.append(codec.decode(await link.receive())[0])
        await trio.testing.wait_all_tasks_blocked()
    return messages


async def test_a_new_head_hears_for_each_stage_what_it_still_holds() -> None:
    """A stage that was replaced, and has not computed all of a text again, does not hold it under the next head."""
    async with a_bridge() as bridge:
        link = await bridge.attach()
        asked = await bridge.ask([1, 2, 3])
        assert [type(m) for m in await heard(bridge, link)] == [ring.Resumed, ring.Submit]
        bridge.token(asked.request, 2, 7, slot=1)

        bridge.requests.detach("stage 1 is lost")
        bridge.members[1] = Member()
        link = await bridge.attach(bridge.next([bridge.members[1]]))
        submit, _ = await heard(bridge, link)
        assert (submit.slot, submit.computed, submit.tokens) == (1, (3, 0, 3), (1, 2, 3, 7))

        # Before it has made a token the head is lost too; stage 1 is not fresh any more, and yet it does not hold it.
        bridge.requests.detach("the head is lost")
        bridge.members[0] = Member()
        link = await bridge.attach(bridge.next([bridge.members[0]]))
        submit, _ = await heard(bridge, link)
        assert submit.computed == (0, 0, 3)

        # With the next token all have it again.
        bridge.token(asked.request, 3, 8, slot=0)
        bridge.requests.detach("links broke")
        link = await bridge.attach(bridge.next([]))
        submit, _ = await heard(bridge, link)
        assert (submit.slot, submit.computed) == (0, (4, 4, 4))


async def test_a_slot_that_another_request_has_used_since_holds_nothing() -> None:
    async with a_bridge() as bridge:
        await bridge.attach()
        first, second = await bridge.ask([1, 2, 3]), await bridge.ask([4, 5])
        bridge.token(first.request, 2, 7, slot=0)
        bridge.token(second.request, 1, 8, slot=0)  # the head has ended the first, and that was not heard yet
        bridge.requests.detach("the head is lost")
        link = await bridge.attach(bridge.next([]))
        messages = await heard(bridge, link)
        assert [m.computed for m in messages[:2]] == [(2, 2, 2), ()]
        assert [m.request for m in messages[:2]] == [second.request, first.request]


async def test_who_goes_while_a_ring_is_attached_is_cancelled_at_the_head() -> None:
    """The link takes nothing for a while, in the middle of what goes on; nobody's going gets lost in it."""
    async with a_bridge() as bridge:
        await bridge.attach()
        gone = [await bridge.ask([n]) for n in range(4)]
        bridge.requests.detach("the head is lost")
        here, there = memory_link_pair(ring.PROTOCOL, max_frame=1 << 20)
        plan = bridge.plan = bridge.next([])
        await fill(here, plan)
        bridge.nursery.start_soon(bridge.requests.attach, plan, here)
        await trio.testing.wait_all_tasks_blocked()
        assert not bridge.requests.attached
        gone[0].scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        messages = [m for m in await heard(bridge, there) if not isinstance(m, ring.Ping)]
        assert bridge.requests.attached
        bridge.nursery.start_soon(bridge.requests.send_cancels, here)
        gone[1].scope.cancel()
        messages += await heard(bridge, there)
        state = HeadState(plan)
        resumed = next(n for n, m in enumerate(messages) if isinstance(m, ring.Resumed))
        state.resume(messages[:resumed], 0.0)
        for message in messages[resumed + 1 :]:
            assert isinstance(message, ring.Cancel)
            state.scheduler.cancel(message.request, 0.0)
        assert set(state.scheduler.request_ids()) == {gone[2].request, gone[3].request}


async def test_a_cancel_waits_for_a_link_that_takes_nothing() -> None:
    async with a_bridge() as bridge:
        here, there = memory_link_pair(ring.PROTOCOL, max_frame=1 << 20)
        bridge.plan = plan_of(bridge.members, [0, 1, 2, 3], WIDTHS)
        await bridge.requests.attach(bridge.plan, here)
        bridge.nursery.start_soon(bridge.requests.send_cancels, here)
        asked = await bridge.ask([1])
        await fill(here, bridge.plan)
        asked.scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert bridge.requests.statistics().cancelled == 1  # and nobody waited for the link
        messages = await heard(bridge, there)
        assert messages[-1] == ring.Cancel(asked.request)
        bridge.requests.detach("the test is over")


async def test_a_cancel_of_an_epoch_that_is_over_is_not_sent_to_the_next() -> None:
    async with a_bridge() as bridge:
        await bridge.attach()
        asked = await bridge.ask([1])
        bridge.requests.detach("the head is lost")
        asked.scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        link = await bridge.attach(bridge.next([]))
        assert [type(m) for m in await heard(bridge, link)] == [ring.Resumed]


async def test_an_answer_ends_at_its_deadline_even_where_no_head_says_so(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """While its ring is mended, and also where a head serves that has forgotten it."""
    for mended in (False, True):
        async with a_bridge() as bridge:
            await bridge.attach()
            began = trio.current_time()
            asked = await bridge.ask([1], deadline=began + 20)
            if mended:
                bridge.requests.detach("stage 1 is lost")
            while not asked.error:
                await trio.sleep(0.1)
            assert asked.error == "the deadline passed before the answer was complete"
            assert 20 < trio.current_time() - began < 20.2 + DEADLINE_GRACE + PAUSE_COMMENT_SECONDS
            assert bridge.requests.statistics().active == 0


async def asked_while_mended(bridge: Bridge) -> Asked:
    """A request that comes while no ring serves; what becomes of it stands in its fields."""
    asked = Asked()

    async def run() -> None:
        sampling = msgspec.structs.replace(GREEDY, prompt_length=1)
        with asked.scope:
            try:
                async with bridge.requests.generate([1], 20, sampling, frozenset()):
                    asked.request = max(bridge.requests.active_ids())
                    await trio.sleep_forever()
            except NotReadyError as error:
                asked.error = str(error)

    bridge.nursery.start_soon(run)
    await trio.testing.wait_all_tasks_blocked()
    return asked


async def test_a_request_that_comes_while_the_ring_is_mended_goes_to_the_next_head(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with a_bridge() as bridge:
        await heard(bridge, await bridge.attach())
        bridge.requests.detach("stage 1 is lost")
        bridge.requests.waits_for("stages are loading", mending=True)
        assert bridge.requests.admits and not bridge.requests.attached
        asked = await asked_while_mended(bridge)
        await trio.sleep(MENDING_SECONDS - 1)
        assert asked.error == "" and asked.request == 0
        link = await bridge.attach(bridge.next([]))
        assert [type(m) for m in await heard(bridge, link)] == [ring.Resumed, ring.Submit]
        assert asked.request in bridge.requests.active_ids()


async def test_a_request_does_not_wait_for_a_ring_that_nobody_mends(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with a_bridge() as bridge:
        await bridge.attach()
        bridge.requests.detach("stage 1 is lost")
        bridge.requests.waits_for("stages are loading", mending=True)
        waiting = await asked_while_mended(bridge)
        bridge.requests.waits_for("1 of 2 stages are here", mending=False)
        await trio.testing.wait_all_tasks_blocked()
        assert waiting.error == "1 of 2 stages are here"
        assert not bridge.requests.admits
        assert (await asked_while_mended(bridge)).error == "1 of 2 stages are here"


async def test_a_request_waits_no_longer_than_it_was_said(autojump_clock: trio.testing.MockClock) -> None:
    async with a_bridge() as bridge:
        await bridge.attach()
        bridge.requests.detach("stage 1 is lost")
        bridge.requests.waits_for("stages are loading", mending=True)
        asked = await asked_while_mended(bridge)
        await trio.sleep(MENDING_SECONDS + 1)
        assert asked.error == "stages are loading"
        assert bridge.requests.statistics().active == 0
