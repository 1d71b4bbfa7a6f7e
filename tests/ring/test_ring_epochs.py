"""Whatever comes in between, every token of every request equals its solo run: the real head and stages, in memory."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
import pytest
import trio
import trio.testing
from helpers_epochs import VOCAB, IntegerEngine, Member, MemoryRing, memory_ring, moved, plan_of, solo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir_peer.ring.head import HeadState
from kvasir_peer.serving.widths import Widths

SOME = settings(
    max_examples=int(os.environ.get("KVASIR_TEST_EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
LAYERS, CONTEXT = 6, 48
VIRTUAL_SECONDS = 2000.0  # far more than any of it takes in virtual time


@dataclass(frozen=True)
class Ask:
    """A request: when it comes, and after how many tokens its client goes (None: never)."""

    at: float
    prompt: tuple[int, ...]
    max_tokens: int
    stop: frozenset[int]
    hang_up: int | None

    @property
    def expected(self) -> list[int]:
        return solo(self.prompt, self.max_tokens, LAYERS, self.stop)


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    prompt = tuple(draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)))
    return Ask(
        draw(st.floats(0.0, 2.0)),
        prompt,
        draw(st.integers(1, CONTEXT - len(prompt))),
        frozenset(draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))),
        draw(st.one_of(st.none(), st.integers(0, 20))),
    )


@st.composite
def all_widths(draw: st.DrawFn) -> Widths:
    micro = draw(st.integers(1, 12))
    return Widths(
        batch_rows=micro + draw(st.integers(0, 40)),
        micro_batch_rows=micro,
        max_in_flight=draw(st.integers(1, 8)),
        max_requests=draw(st.integers(1, 6)),
        context_length=CONTEXT,
    )


@st.composite
def all_cuts(draw: st.DrawFn) -> list[int]:
    inner = draw(st.sets(st.integers(1, LAYERS - 1), min_size=1, max_size=3))
    return [0, *sorted(inner), LAYERS]


speeds = st.tuples(st.floats(0.0, 0.05), st.floats(0.0, 0.01))


def in_virtual_time(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(VIRTUAL_SECONDS):
            await main()

    trio.run(bounded, clock=trio.testing.MockClock(autojump_threshold=0))


async def all_of(ring: MemoryRing, requests: Sequence[Ask], meanwhile: Callable[[], Awaitable[None]]) -> None:
    """Ask everything at its time, and compare what comes with the solo runs."""

    async def one(ask: Ask) -> None:
        await trio.sleep(ask.at)
        tokens = await ring.ask(ask.prompt, ask.max_tokens, stop=ask.stop, hang_up=ask.hang_up)
        wanted = ask.expected if ask.hang_up is None else ask.expected[: ask.hang_up]
        assert tokens == wanted

    async with trio.open_nursery() as nursery:
        for ask in requests:
            nursery.start_soon(one, ask)
        nursery.start_soon(meanwhile)


async def nothing() -> None:
    """No more happens than the requests."""


async def check_that_nothing_is_left(ring: MemoryRing, head: Member, members: Sequence[Member]) -> None:
    """Slots, batches, buffers, requests: all are free again once the last answer has ended."""
    assert head.head is not None and ring.plan is not None
    scheduler = head.head.scheduler
    with trio.fail_after(60):
        while not scheduler.idle:  # a cancel is still on its way, or the batch that tells the stages of it
            await trio.sleep(0.05)
    figures = scheduler.statistics()
    assert figures.live == figures.queued == figures.in_flight == figures.rows_in_flight == 0
    assert ring.requests.statistics().active == 0
    assert ring.requests.statistics().digest_mismatches == 0
    for member in members:
        assert sorted(member.engine.free) == list(range(ring.plan.widths.max_in_flight + 1))
        assert member.epoch is not None and member.epoch.statistics().queue == 0


@SOME
@given(
    all_cuts(),
    all_widths(),
    st.lists(asks(), min_size=1, max_size=8),
    st.lists(speeds, min_size=4, max_size=4),
)
def test_every_token_equals_the_solo_run(
    cuts: list[int], widths: Widths, requests: list[Ask], seconds: list[tuple[float, float]]
) -> None:
    async def main() -> None:
        async with memory_ring() as ring:
            members = [Member(engine=IntegerEngine(seconds[i])) for i in range(len(cuts) - 1)]
            await ring.begin(members, plan_of(members, cuts, widths))
            await all_of(ring, requests, nothing)
            assert ring.broke == []
            await check_that_nothing_is_left(ring, members[0], members)
            await ring.end()
            assert ring.net.serving == 0, "no task outlives its epoch"

    in_virtual_time(main)


@st.composite
def changes(draw: st.DrawFn) -> tuple[float, str, int]:
    kind = draw(st.sampled_from(["break", "replace", "restart", "merge"]))
    return draw(st.floats(0.05, 3.0)), kind, draw(st.integers(0, 3))


@SOME
@given(
    all_cuts(),
    all_widths(),
    st.lists(asks(), min_size=1, max_size=8),
    st.lists(changes(), min_size=1, max_size=4),
    st.floats(0.0, 1.0),
)
def test_epochs_that_come_and_go_change_no_token(
    cuts: list[int],
    widths: Widths,
    requests: list[Ask],
    events: list[tuple[float, str, int]],
    pause: float,
) -> None:
    """A stage (the head too) is replaced, loses its cache, or gives its layers to a neighbour; or links just break."""

    async def main() -> None:
        async with memory_ring() as ring:
            members = [Member(engine=IntegerEngine((0.01, 0.001))) for _ in cuts[1:]]
            borders = list(cuts)
            await ring.begin(members, plan_of(members, borders, widths))
            changing, heads, mended = trio.Lock(), 0, 0

            async def change() -> None:
                nonlocal heads
                for after, kind, where in events:
                    await trio.sleep(after)
                    async with changing:
                        await ring.end()
                        place, fresh = where % len(members), []
                        if kind == "replace":
                            members[place] = Member(engine=IntegerEngine((0.01, 0.001)))
                            fresh = [members[place]]
                        elif kind == "restart":
                            members[place].engine.stack = None
                            fresh = [members[place]]
                        elif kind == "merge" and len(members) > 2:
                            del members[place]
                            del borders[place if place else 1]  # the one before takes the layers, or the next
                            fresh = [m for m in members if not _holds(m, borders, members)]
                        heads += kind in ("replace", "merge") and place == 0
                        await trio.sleep(pause)
                        assert ring.plan is not None
                        await ring.begin(members, moved(ring.plan, members, borders, fresh))

            async def mend() -> None:
                """What the bridge does when an epoch breaks by itself: nothing is believed of any cache."""
                nonlocal mended
                while True:
                    await ring.broken.wait()
                    async with changing:
                        if ring.broken.is_set():
                            assert any(error.cache_lost for error in ring.broke), ring.broke
                            mended += 1
                            await ring.end()
                            assert ring.plan is not None
                            await ring.begin(members, moved(ring.plan, members, borders, members))

            ring.nursery.start_soon(mend)
            await all_of(ring, requests, change)
            assert mended <= heads, "only a new head may not know what its stages hold"
            await check_that_nothing_is_left(ring, members[0], members)

    in_virtual_time(main)


def _holds(member: Member, borders: list[int], members: list[Member]) -> bool:
    """Whether the member's engine has the slice that it is to have now."""
    place = members.index(member)
    stack = member.engine.stack
    return stack is not None and (stack.spec.first, stack.spec.end) == (borders[place], borders[place + 1])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_only_what_the_new_stage_lacks_is_computed_again(place: int) -> None:
    """Stages after the replaced one keep their caches, also when the head is new and must be told of them."""
    widths = Widths(
        batch_rows=32, micro_batch_rows=8, max_in_flight=6, max_requests=4, context_length=CONTEXT
    )
    texts = [Ask(0.0, tuple(range(n, n + 8)), 40, frozenset(), None) for n in range(4)]
    positions = sum(
        len(ask.prompt) + ask.max_tokens - 1 for ask in texts
    )  # the last token is not computed on
    known, again = 0, [0, 0, 0]

    async def main() -> None:
        nonlocal known
        async with memory_ring() as ring:
            members = [Member(engine=IntegerEngine((0.01, 0.001))) for _ in range(3)]
            cuts = [0, 2, 4, LAYERS]
            await ring.begin(members, plan_of(members, cuts, widths))

            async def replace() -> None:
                nonlocal known
                await trio.sleep(1.2)
                await ring.end()
                known = sum(active.computed for active in ring.requests._active.values())
                members[place] = Member(engine=IntegerEngine((0.01, 0.001)))
                await ring.begin(members, moved(ring.plan, members, cuts, [members[place]]))

            await all_of(ring, texts, replace)
            for stage, member in enumerate(members):
                assert member.engine.stack is not None
                again[stage] = member.engine.stack.rows - positions

    in_virtual_time(main)
    assert 80 < known < positions
    in_flight = widths.batch_rows
    for stage in range(3):
        if stage < place:  # rows go through all stages up to the one that lacks them
            assert known <= again[stage] <= known + in_flight
        else:
            assert 0 <= again[stage] <= in_flight


def test_a_head_that_got_its_place_back_does_not_go_by_what_it_once_knew() -> None:
    """Another was the head in between, and gave the slots to others."""
    widths = Widths(batch_rows=8, micro_batch_rows=4, max_in_flight=2, max_requests=2, context_length=CONTEXT)
    members = [Member(), Member(), Member()]
    first = plan_of(members, [0, 2, 4, LAYERS], widths)
    state = HeadState(first)
    following = moved(first, members, [0, 2, 4, LAYERS], [])
    assert state.follows(first) and state.follows(following)
    assert not state.follows(moved(following, members, [0, 2, 4, LAYERS], []))
    other = moved(first, [members[1], members[0], members[2]], [0, 2, 4, LAYERS], [])
    assert not state.follows(other)
    wider = msgspec.structs.replace(widths, max_requests=3)
    assert not state.follows(msgspec.structs.replace(following, widths=wider))

    async def main() -> None:
        """A goes while another is the head, which gives B and C the slots that A and B have had."""
        async with memory_ring() as ring:
            for member in members:
                member.engine.seconds = (0.01, 0.001)
            spare = Member(engine=IntegerEngine((0.01, 0.001)))
            narrow = msgspec.structs.replace(first, widths=Widths(4, 4, 1, 2, CONTEXT))
            await ring.begin(members, narrow)
            gone = trio.CancelScope()

            async def a() -> None:
                with gone:
                    await ring.ask(range(30), 10)

            async def change() -> None:
                await trio.sleep(0.45)  # in the middle of two prompts
                await ring.end()
                assert ring.requests.statistics().tokens == 0
                gone.cancel()
                for head in (spare, members[0]):
                    head.engine.stack = None
                    now = [head, *members[1:]]
                    await ring.begin(now, moved(ring.plan, now, [0, 2, 4, LAYERS], [head]))
                    await trio.sleep(0.5)
                    if head is spare:
                        await ring.end()

            ring.nursery.start_soon(a)
            texts = [Ask(0.1 * n, tuple(range(n, n + 30)), 10, frozenset(), None) for n in (1, 2)]
            await all_of(ring, texts, change)
            assert not any(error.cache_lost for error in ring.broke), ring.broke

    in_virtual_time(main)


def test_what_a_replaced_stage_has_not_computed_again_is_not_believed_by_the_next_head() -> None:
    """A stage loses its cache, and the head is replaced before the stage has computed all of the text again."""
    widths = Widths(batch_rows=1, micro_batch_rows=1, max_in_flight=1, max_requests=1, context_length=CONTEXT)
    ask = Ask(0.0, tuple(range(19)), 29, frozenset(), None)

    async def main() -> None:
        async with memory_ring() as ring:
            members = [Member(engine=IntegerEngine((0.01, 0.001))) for _ in range(2)]
            await ring.begin(members, plan_of(members, [0, 2, LAYERS], widths))

            async def change() -> None:
                await trio.sleep(0.6)
                await ring.end()
                known = ring.requests.statistics().tokens
                members[1].engine.stack = None
                await ring.begin(members, moved(ring.plan, members, [0, 2, LAYERS], [members[1]]))
                await trio.sleep(0.3)
                await ring.end()
                assert ring.requests.statistics().tokens == known > 0, "the stage has computed all again"
                members[0] = Member(engine=IntegerEngine((0.01, 0.001)))
                await ring.begin(members, moved(ring.plan, members, [0, 2, LAYERS], [members[0]]))

            await all_of(ring, [ask], change)
            assert not any(error.cache_lost for error in ring.broke), ring.broke
            await check_that_nothing_is_left(ring, members[0], members)

    in_virtual_time(main)
