"""A worker of a stage lies: everything behind its rows is made again, head, tail and bridge agree on what counts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import trio
from helpers_epochs import VOCAB, IntegerEngine, Member, MemoryRing, memory_ring, mix, moved, plan_of
from hypothesis import given
from hypothesis import strategies as st
from test_ring_epochs import (
    CONTEXT,
    LAYERS,
    SOME,
    all_cuts,
    all_widths,
    check_that_nothing_is_left,
    in_virtual_time,
    speeds,
)

from kvasir_peer import identity
from kvasir_peer.errors import WireError
from kvasir_peer.experts.passing import REMEMBERED_ENDED, SAID_AGAIN_SECONDS, PassingRequests
from kvasir_peer.experts.verification import Exposure
from kvasir_peer.ring.head import HeadEpoch, HeadState
from kvasir_peer.ring.taints import TaintLog, TaintSpeaker, Voids
from kvasir_peer.serving.widths import Widths
from kvasir_peer.wire import ring
from kvasir_peer.wire.membership import Membership, decode_membership
from kvasir_peer.wire.sampling import GREEDY

WIDTHS = Widths(batch_rows=32, micro_batch_rows=8, max_in_flight=6, max_requests=4, context_length=CONTEXT)


@dataclass
class Volunteers:
    """A stage's experts, as the ring sees them: a worker whose rows count at once, and that is caught later."""

    lying: bool = False
    lied: trio.Event = field(default_factory=trio.Event)
    requests: PassingRequests = field(default_factory=PassingRequests)
    exposure: Exposure = field(default_factory=Exposure)
    news: trio.Event = field(default_factory=trio.Event)

    def pass_of(self, membership: Membership, stage: int) -> tuple[tuple[int, ...], object]:
        rows = membership.rows[membership.rows["through"] > stage]
        for request in self.requests.passes(rows, trio.current_time()):
            self.exposure.finished(request)
        return (), None

    def catch(self) -> None:
        """The worker is out, and all that has used its rows is named."""
        self.lying = False
        self.requests.taint(self.exposure.caught("worker"))
        self.news.set()
        self.news = trio.Event()

    def taints(self) -> list[tuple[int, tuple[int, int, int]]]:
        return self.requests.taints()

    def taint_news(self) -> trio.Event:
        return self.news

    def arena(self, shape: Any, manifest: Any, first: int, end: int, rows: int) -> Any:
        return shape

    def loaded(self, manifest: Any, first: int, end: int, slots: int) -> None: ...

    def unloaded(self) -> None: ...


class HelpedEngine(IntegerEngine):
    """An engine whose hidden values come from a volunteer, who may lie."""

    def __init__(self, seconds: tuple[float, float] = (0.0, 0.0)) -> None:
        super().__init__(seconds)
        self.experts = Volunteers()
        self._busy_with = trio.Lock()

    async def compute(self, buffer: int, membership: bytes, boundary_bytes: int, generation: int) -> Any:
        assert self.runner is not None and self.stack is not None
        async with self._busy_with:
            if lying := self.experts.lying:
                # Noted as the rows come back, which is before the pass goes on: a catch later than that names them.
                rows = decode_membership(membership, self.runner._limits).rows
                rows = rows[rows["through"] > self.runner._stage]
                places = zip(rows["request"].tolist(), rows["position"].tolist(), strict=True)
                self.experts.exposure.used("worker", places)
                self.experts.lied.set()
            self.stack.lie = int(lying)
            try:
                return await super().compute(buffer, membership, boundary_bytes, generation)
            finally:
                self.stack.lie = 0


def wrong_places(prompt: tuple[int, ...], answer: list[int]) -> list[int]:
    """Places of the answer whose token is not what follows from the text before it."""
    memory, text, wrong = [0] * LAYERS, [*prompt, *answer], []
    for position in range(len(text) - 1):
        hidden = text[position]
        for layer in range(LAYERS):
            memory[layer] = mix(memory[layer], hidden, layer)
            hidden = mix(memory[layer], position, 1000 + layer)
        if position + 1 >= len(prompt) and hidden % VOCAB != text[position + 1]:
            wrong.append(position + 1 - len(prompt))
    return wrong


def helped(count: int, seconds: tuple[float, float] = (0.01, 0.001)) -> list[Member]:
    return [Member(engine=HelpedEngine(seconds)) for _ in range(count)]


def volunteers(member: Member) -> Volunteers:
    assert isinstance(member.engine, HelpedEngine)
    return member.engine.experts


async def answers_of(
    ring_: MemoryRing,
    prompts: list[tuple[int, ...]],
    count: int,
    meanwhile: Any,
) -> int:
    """Ask everything; the number of tokens that do not follow from the text before them."""
    wrong: list[int] = []

    async def one(prompt: tuple[int, ...]) -> None:
        answer = await ring_.ask(prompt, count)
        assert len(answer) == count
        wrong.append(len(wrong_places(prompt, answer)))

    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(one, prompt)
        nursery.start_soon(meanwhile)
    await trio.sleep(0.1)  # the word on answers that ended before it was said is still on its way
    return sum(wrong)


lies = st.tuples(st.integers(0, 3), st.floats(0.0, 1.5), st.floats(0.001, 0.6), st.booleans())
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20).map(tuple)


@SOME
@given(
    all_cuts(),
    all_widths(),
    st.lists(prompts, min_size=1, max_size=6),
    st.lists(lies, min_size=1, max_size=4),
    st.lists(speeds, min_size=4, max_size=4),
)
def test_whatever_lies_where_and_when_only_what_was_handed_out_before_can_be_wrong(
    cuts: list[int],
    widths: Widths,
    asked: list[tuple[int, ...]],
    events: list[tuple[int, float, float, bool]],
    seconds: list[tuple[float, float]],
) -> None:
    async def main() -> None:
        async with memory_ring() as ring_:
            members = [Member(engine=HelpedEngine(seconds[i])) for i in range(len(cuts) - 1)]
            await ring_.begin(members, plan_of(members, cuts, widths))

            async def lie() -> None:
                async with trio.open_nursery() as nursery:
                    for where, at, lasts, breaks in events:
                        nursery.start_soon(lie_once, where % len(members), at, lasts, breaks)

            changing = trio.Lock()

            async def lie_once(where: int, at: float, lasts: float, breaks: bool) -> None:
                await trio.sleep(at)
                volunteers(members[where]).lying = True
                await trio.sleep(lasts)
                volunteers(members[where]).catch()
                if breaks:  # before the head can have heard of it
                    async with changing:
                        await ring_.end()
                        assert ring_.plan is not None
                        await ring_.begin(members, moved(ring_.plan, members, cuts, []))

            wrong = await answers_of(ring_, asked, 25, lie)
            assert wrong <= ring_.requests.statistics().suspect_tokens
            await check_that_nothing_is_left(ring_, members[0], members)

    in_virtual_time(main)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_new_head_makes_again_what_a_stage_named_while_the_old_one_was_lost(place: int) -> None:
    """The stage says it in the next epoch too, and the bridge believes no position behind it."""

    async def main() -> None:
        async with memory_ring() as ring_:
            members, cuts = helped(3), [0, 2, 4, LAYERS]
            await ring_.begin(members, plan_of(members, cuts, WIDTHS))
            asked = [tuple(range(n, n + 8)) for n in range(4)]

            async def lie() -> None:
                await trio.sleep(0.5)
                volunteers(members[place]).lying = True
                await trio.sleep(0.2)
                volunteers(members[place]).catch()
                await ring_.end()
                if place:
                    members[0] = helped(1)[0]
                fresh = members[:1] if place else []
                assert ring_.plan is not None
                await ring_.begin(members, moved(ring_.plan, members, cuts, fresh))

            wrong = await answers_of(ring_, asked, 40, lie)
            assert 0 < wrong <= ring_.requests.statistics().suspect_tokens <= 60
            assert ring_.requests.statistics().rewound >= 4

    in_virtual_time(main)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_tokens_that_are_not_sent_yet_are_made_again(place: int) -> None:
    """Nothing wrong is handed out after the stage has named it, though batches were under way: no token is lost."""
    given: list[tuple[float, int]] = []
    caught_at = 0.0

    async def main() -> None:
        nonlocal caught_at
        async with memory_ring() as ring_:
            members = helped(3, (0.05, 0.001))
            await ring_.begin(members, plan_of(members, [0, 2, 4, LAYERS], WIDTHS))
            result = ring_.requests.result

            def watched(message: ring.Result) -> None:
                result(message)
                given.extend((trio.current_time(), o.position) for o in message.outputs if not o.void)

            ring_.requests.result = watched  # type: ignore[method-assign]

            async def lie() -> None:
                nonlocal caught_at
                await trio.sleep(0.62)
                volunteers(members[place]).lying = True
                await volunteers(members[place]).lied.wait()  # the pass is still under way
                caught_at = trio.current_time()
                volunteers(members[place]).catch()

            prompt = (5, 6, 7)
            wrong = await answers_of(ring_, [prompt], 30, lie)
            assert wrong == ring_.requests.statistics().suspect_tokens == 0
            assert ring_.requests.statistics().rewound == 1
            figures = members[0].head.scheduler.statistics()  # type: ignore[union-attr]
            assert figures.rewinds >= 1 and figures.tokens == 30

    in_virtual_time(main)
    places = [position for _, position in given]
    assert places == sorted(set(places)), "every place is handed out once, in order"
    assert any(at > caught_at for at, _ in given)


# --- who may say so ------------------------------------------------------------------------------------------------


def spoken(**changes: Any) -> tuple[Any, list[Member], ring.Tainted]:
    members = helped(3)
    plan = plan_of(members, [0, 2, 4, LAYERS], WIDTHS)
    (message,) = TaintSpeaker(plan, 1, members[1].key.sign).fresh([(1, (7, 2, 5))])
    return plan, members, msgspec.structs.replace(message, **changes)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"epoch": 2}, "epoch"),
        ({"plan": "other"}, "epoch"),
        ({"number": 1}, "sequence"),
        ({"stage": 0}, "signature"),
        ({"stage": 2}, "stranger"),
        ({"rewinds": ((7, 2, 4),)}, "signature"),
        ({"rewinds": ((8, 2, 5),)}, "signature"),
        ({"signature": bytes(64)}, "signature"),
    ],
)
def test_what_a_stage_has_not_said_here_and_now_is_refused(changes: dict[str, Any], code: str) -> None:
    plan, members, message = spoken(**changes)
    with pytest.raises(WireError) as caught:
        TaintLog(plan, identity.verify, 2).take(message, members[1].peer)
    assert caught.value.code == code


def test_a_word_counts_once() -> None:
    plan, members, message = spoken()
    log = TaintLog(plan, identity.verify)
    log.take(message, members[2].peer)
    with pytest.raises(WireError) as caught:
        log.take(message, members[2].peer)
    assert caught.value.code == "sequence"


def test_a_stage_says_each_piece_of_news_once_and_in_bounded_messages() -> None:
    members = helped(3)
    plan = plan_of(members, [0, 2, 4, LAYERS], WIDTHS)
    speaker = TaintSpeaker(plan, 1, members[1].key.sign)
    news = [(number, (number, 1, 3)) for number in range(1, 151)]
    messages = speaker.fresh(reversed(news))
    assert [len(m.rewinds) for m in messages] == [64, 64, 22]
    assert [rewind for m in messages for rewind in m.rewinds] == [rewind for _, rewind in news]
    log = TaintLog(plan, identity.verify)
    for message in messages:
        log.take(message, members[2].peer)
        frame = b"".join(bytes(piece) for piece in ring.codec(plan.limits()).encode(message))
        assert len(frame) <= ring.max_result_frame(plan.limits())
    assert speaker.fresh(news) == []
    (again,) = speaker.fresh([*news, (151, (4, 2, 1))])
    assert again.rewinds == ((4, 2, 1),) and again.number == 3


def test_only_tokens_of_void_incarnations_are_kept_back() -> None:
    voids = Voids()
    outputs = tuple(
        ring.Output(request, incarnation, 3, 9) for request, incarnation in ((1, 2), (1, 3), (2, 2))
    )
    assert voids.mark(outputs) is outputs
    voids.taint([(1, 2, 0)])
    assert [o.void for o in voids.mark(outputs)] == [True, False, False]
    voids.taint([(1, 1, 0)])
    assert [o.void for o in voids.mark(outputs)] == [True, False, False], "never less than before"


# --- what a stage knows by what passes ------------------------------------------------------------------------------


def rows(*runs: tuple[int, int, int, int, int]) -> Any:
    """(request, slot, incarnation, first position, count) of each run."""
    from kvasir_peer.wire.membership import compose

    return compose(
        [
            (request, slot, incarnation, position, 1, 0, 3)
            for request, slot, incarnation, first, count in runs
            for position in range(first, first + count)
        ],
        [],
    ).rows


def test_a_stage_sees_ends_in_what_passes_and_remembers_them_for_a_while() -> None:
    passing = PassingRequests()
    assert passing.passes(rows((7, 0, 1, 0, 4), (8, 1, 1, 0, 2)), 0.0) == ()
    passing.passes(rows((7, 0, 1, 4, 1)), 1.0)
    assert passing.busy(2.5, 2.0) == 1
    # A request may go on in another slot, under another head: its old one then says nothing of it.
    passing.passes(rows((7, 2, 1, 0, 5)), 1.0)
    passing.passes(rows((100, 0, 2, 0, 1)), 1.0)
    passing.passes(rows((101, 1, 2, 0, 2)), 1.0)  # 8 has ended, 7 has not
    assert passing.taint({7: 3, 8: 1})
    assert [rewind for _, rewind in passing.taints()] == [(7, 1, 3), (8, 1, 1)]
    forgotten = [passing.passes(rows((200 + n, 1, 3 + n, 0, 1)), 2.0) for n in range(REMEMBERED_ENDED)]
    assert forgotten == [()] * (REMEMBERED_ENDED - 1) + [(8,)]
    assert not passing.taint({8: 1}) and passing.taint({101: 0})


async def test_what_a_stage_names_before_the_bridge_has_named_it_is_made_again_too() -> None:
    """A new head hears of wrong rows first, and then that all stages hold the text that came of them."""
    members = [Member(), Member(), Member()]
    plan = plan_of(members, [0, 2, 4, LAYERS], WIDTHS)
    made = HeadEpoch(
        plan,
        0,
        None,  # type: ignore[arg-type]
        members[0].engine,  # type: ignore[arg-type]
        identity.verify,
        sign=members[0].key.sign,
        state=HeadState(plan),
    )
    made._rewind(ring.Tainted(plan.id, plan.epoch, 1, 0, ((7, 1, 4),), b""))
    sampling = msgspec.structs.replace(GREEDY, prompt_length=6)
    for request in (7, 8):
        tokens = tuple(range(10))
        made._under_way.append(
            ring.Submit(request, tokens, 5, sampling, (), slot=request - 7, computed=(9, 9, 9))
        )
    assert made._resume(0.0) == []
    batch = made.state.scheduler.next_batch(0.0)
    assert batch is not None
    first = {row.request: row.position for row in reversed(batch.rows)}
    assert first == {7: 4, 8: 9}


def test_what_is_to_be_made_again_is_remembered_until_it_was() -> None:
    passing = PassingRequests()
    passing.passes(rows((7, 0, 1, 0, 9), (8, 1, 4, 0, 9)), 0.0)
    assert not passing.taint({99: 3}), "a request that never passed"
    assert passing.taint({7: 5, 8: 2})
    numbers = itertools.count(1)
    assert passing.taints() == [(next(numbers), (7, 1, 5)), (next(numbers), (8, 4, 2))]
    passing.passes(rows((7, 0, 2, 7, 2)), 0.0)
    assert passing.taints()[0] == (3, (7, 2, 5)), (
        "rewound, but not that far: it is news of this incarnation too"
    )
    passing.taint({7: 8})
    assert passing.taints()[0] == (4, (7, 2, 5)), "the earliest position counts"
    passing.passes(rows((7, 0, 3, 5, 3)), 0.0)
    passing.passes(rows((9, 1, 5, 0, 1)), 1.0)
    again = [(4, (7, 2, 5)), (2, (8, 4, 2))]
    assert passing.taints() == again, "nobody knows yet whether the bridge has heard of it"
    passing.passes(rows((9, 1, 5, 1, 1)), SAID_AGAIN_SECONDS)
    assert passing.taints() == again
    passing.passes(rows((9, 1, 5, 2, 1)), SAID_AGAIN_SECONDS + 0.1)
    assert passing.taints() == again[1:]
    passing.passes(rows((9, 1, 5, 3, 1)), SAID_AGAIN_SECONDS + 1.1)
    assert passing.taints() == []


@pytest.mark.parametrize("slots", [1, 4])
def test_a_new_head_counts_incarnations_on_from_those_that_are_void(slots: int) -> None:
    """Else the tail would keep its tokens back as if they were of the old ones, and the epoch would break."""

    async def main() -> None:
        async with memory_ring() as ring_:
            members, cuts = helped(3), [0, 2, 4, LAYERS]
            widths = msgspec.structs.replace(WIDTHS, max_requests=slots)
            await ring_.begin(members, plan_of(members, cuts, widths))
            for n in range(6 * slots):  # so each slot has had some incarnations
                assert len(await ring_.ask((n,), 3)) == 3

            async def lie() -> None:
                await trio.sleep(0.5)
                volunteers(members[1]).lying = True
                await trio.sleep(0.2)
                volunteers(members[1]).catch()
                await ring_.end()
                members[0] = helped(1)[0]
                assert ring_.plan is not None
                await ring_.begin(members, moved(ring_.plan, members, cuts, members[:1]))

            wrong = await answers_of(ring_, [tuple(range(n, n + 8)) for n in range(4)], 30, lie)
            assert 0 < wrong <= ring_.requests.statistics().suspect_tokens
            assert ring_.broke == []

    in_virtual_time(main)


def test_answers_that_have_ended_are_counted_once() -> None:
    """Their slots are others' by then; the word is said in two epochs."""

    async def main() -> None:
        async with memory_ring() as ring_:
            members, cuts = helped(3), [0, 2, 4, LAYERS]
            widths = msgspec.structs.replace(WIDTHS, max_requests=1)
            await ring_.begin(members, plan_of(members, cuts, widths))
            volunteers(members[1]).lying = True
            answers = [await ring_.ask(prompt, 5) for prompt in ((1, 2), (3,))]
            volunteers(members[1]).lying = False
            await ring_.ask((4,), 5)
            volunteers(members[1]).catch()
            for _ in range(2):
                await trio.sleep(0.1)
                figures = ring_.requests.statistics()
                assert (figures.suspect_tokens, figures.rewound) == (10, 0)
                assert ring_.plan is not None
                await ring_.end()
                await ring_.begin(members, moved(ring_.plan, members, cuts, []))
            assert all(
                wrong_places(prompt, answer) for prompt, answer in zip(((1, 2), (3,)), answers, strict=True)
            )

    in_virtual_time(main)


def test_a_word_that_has_not_reached_the_bridge_is_said_once_more_though_all_was_made_again() -> None:
    """The epoch ends between the head, which has heard and begun anew, and the bridge."""

    async def main() -> None:
        async with memory_ring() as ring_:
            members, cuts = helped(3), [0, 2, 4, LAYERS]
            await ring_.begin(members, plan_of(members, cuts, WIDTHS))
            tainted, lost = ring_.requests.tainted, []

            async def lie() -> None:
                await trio.sleep(0.5)
                volunteers(members[1]).lying = True
                await trio.sleep(0.2)
                ring_.requests.tainted = lambda message: (lost.append(message), (0, 0))[1]  # type: ignore[method-assign]
                volunteers(members[1]).catch()
                await trio.sleep(0.3)
                assert lost and members[0].head is not None
                assert members[0].head.scheduler.statistics().rewinds >= 4
                await ring_.end()
                ring_.requests.tainted = tainted  # type: ignore[method-assign]
                assert ring_.plan is not None
                await ring_.begin(members, moved(ring_.plan, members, cuts, []))

            wrong = await answers_of(ring_, [tuple(range(n, n + 8)) for n in range(4)], 40, lie)
            assert 0 < wrong <= ring_.requests.statistics().suspect_tokens
            assert ring_.broke == []

    in_virtual_time(main)
