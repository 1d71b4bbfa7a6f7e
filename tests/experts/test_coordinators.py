"""The bridge and its coordinators over real links: an answer goes on wherever it can, and its text has no seam."""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
from helpers_experts import LOOPBACK, until

from kvasir_peer.agent import answer
from kvasir_peer.errors import BusyError, NotReadyError
from kvasir_peer.experts import coordinators
from kvasir_peer.experts.coordinators import Coordinators
from kvasir_peer.net.link import Link
from kvasir_peer.net.node import Node
from kvasir_peer.wire import coordinator as wire
from kvasir_peer.wire import ring
from kvasir_peer.wire.sampling import Sampling

PROMPT, COUNT = [1, 2, 3], 40


def following(tokens: list[int]) -> int:
    """The token of this toy model: it depends on all that came before."""
    return (31 * sum(tokens) + 7 * len(tokens)) % 499 + 1


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


@dataclass
class Scripted:
    """A coordinator whose model is quick and whose manners the test decides."""

    node: Node
    slots: int = 4
    context: int = 4096
    mute: bool = False  # says nothing any more, over links that stand
    busy_until: float = -math.inf
    retry_after: float = 0.2
    submits: list[ring.Submit] = field(default_factory=list)
    links: set[Link] = field(default_factory=set)

    async def take(self, link: Link) -> None:
        await link.receive()
        welcome = wire.Welcome(self.slots, self.context, 512, 0)
        codec = welcome.codec()
        link.max_frame = welcome.submit_frame
        await link.send(wire.OPENING.encode(welcome))
        self.links.add(link)
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    message, _ = codec.decode(await link.receive())
                    if self.mute:
                        continue
                    if isinstance(message, wire.SlotsWanted):
                        await link.send(codec.encode(wire.Slots(message.nonce, 1, self.slots, 0)))
                    elif isinstance(message, ring.Submit):
                        self.submits.append(message)
                        if trio.current_time() < self.busy_until:
                            no = ring.Ended(message.request, "busy", "the queue is full", self.retry_after)
                            await link.send(codec.encode(no))
                        else:
                            nursery.start_soon(self._answer, link, codec, message)
        finally:
            self.links.discard(link)

    async def _answer(self, link: Link, codec, message: ring.Submit) -> None:
        tokens = list(message.tokens)
        for _ in range(message.max_tokens):
            await trio.sleep(0.01)
            if self.mute:
                return
            token = following(tokens)
            output = ring.Output(message.request, 0, len(tokens) - 1, token)
            await link.send(codec.encode(wire.Tokens((output,))))
            tokens.append(token)


@dataclass
class Bench:
    book: Coordinators
    peers: list[Scripted]
    nursery: trio.Nursery

    async def answer(self, count: int = COUNT) -> list[int]:
        sampling = Sampling(temperature=0.0, prompt_length=len(PROMPT))
        found = []
        async with self.book.generate(PROMPT, count, sampling, frozenset()) as tokens:
            async for token in tokens:
                if token.token >= 0:
                    found.append(token.token)
        return found


@asynccontextmanager
async def bench(count: int, **scripted: int) -> AsyncIterator[Bench]:
    async with (
        Node.open(secrets.token_bytes(32), listen=[LOOPBACK]) as bridge,
        Node.open(secrets.token_bytes(32), listen=[LOOPBACK]) as one,
        Node.open(secrets.token_bytes(32), listen=[LOOPBACK]) as two,
        trio.open_nursery() as nursery,
    ):
        book = Coordinators(bridge, "model")
        peers = [Scripted(node, **scripted) for node in (one, two)[:count]]
        for peer in peers:
            peer.node.handle(wire.PROTOCOL, wire.MAX_OPENING_FRAME, peer.take)
            nursery.start_soon(book.keep, peer.node.peer_id, tuple(peer.node.addresses()))
        await until(lambda: len(book.peers) == count)
        yield Bench(book, peers, nursery)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def asking(b: Bench, count: int, begun: int) -> AsyncIterator[list[list[int]]]:
    """So many clients at once, from when more than ``begun`` tokens have come; at the end all answers are there."""
    answers: list[list[int]] = []

    async def ask() -> None:
        answers.append(await b.answer())

    async with trio.open_nursery() as clients:
        for _ in range(count):
            clients.start_soon(ask)
        await until(lambda: b.book.statistics().tokens > begun)
        yield answers


def cut(peer: Scripted) -> None:
    for link in list(peer.links):
        link.close()


async def test_answers_of_a_lost_coordinator_go_on_at_another_without_a_seam() -> None:
    async with bench(2) as b:
        async with asking(b, 6, 60) as answers:
            assert len(b.peers[0].submits) == 3, "requests are shared out"
            cut(b.peers[0])
            b.book.drop(b.peers[0].node.peer_id)
        assert answers == [expected(PROMPT, COUNT)] * 6
        figures = b.book.statistics()
        assert figures.resubmitted == 3 and figures.finished == 6 and figures.failed == 0
        later = [s for s in b.peers[1].submits if len(s.tokens) > len(PROMPT)]
        assert len(later) == 3, "they went on from the tokens that were sent, not from the beginning"


async def test_an_answer_that_has_begun_waits_for_a_full_queue_and_a_new_one_is_told() -> None:
    async with bench(2) as b:
        one, two = b.peers
        async with asking(b, 2, 10) as answers:
            two.busy_until = trio.current_time() + 0.5
            cut(one)
            b.book.drop(one.node.peer_id)
            with pytest.raises(BusyError, match="full"):
                await b.answer()
        assert answers == [expected(PROMPT, COUNT)] * 2
        assert b.book.statistics().resubmitted >= 2, "refused, then taken"


async def test_a_coordinator_that_is_silent_is_left() -> None:
    async with bench(2) as b:
        one, two = b.peers
        async with asking(b, 2, 10) as answers:
            assert await b.book.slots(two.node.peer_id, 5.0) is not None
            one.mute = True
            for _ in range(coordinators.SILENT_POLLS):
                assert one.node.peer_id in b.book.peers
                assert await b.book.slots(one.node.peer_id, 0.1) is None
        assert answers == [expected(PROMPT, COUNT)] * 2


async def test_without_a_coordinator_an_answer_waits_for_one_and_then_says_why_it_ends(monkeypatch) -> None:
    monkeypatch.setattr(coordinators, "PAUSE_COMMENT_SECONDS", 0.05)
    async with bench(1) as b:
        async with asking(b, 1, 5) as answers:
            cut(b.peers[0])  # and it comes back: the bridge dials again by itself
        assert answers == [expected(PROMPT, COUNT)]
        monkeypatch.setattr(answer, "PAUSE_LIMIT_SECONDS", 0.3)
        async with trio.open_nursery() as clients:

            async def gone() -> None:
                await until(lambda: b.book.statistics().tokens > COUNT + 5)
                b.book.drop(b.peers[0].node.peer_id)
                cut(b.peers[0])

            clients.start_soon(gone)
            with pytest.raises(NotReadyError, match="no coordinator serves this model"):
                await b.answer()
        with pytest.raises(NotReadyError, match="no coordinator"):
            await b.answer()


async def test_a_long_answer_goes_where_it_fits() -> None:
    async with bench(2) as b:
        one, two = b.peers
        first = min(b.peers, key=lambda p: p.node.peer_id)
        b.book._attached[first.node.peer_id].welcome = wire.Welcome(4, 16, 512, 0)
        assert await b.answer() == expected(PROMPT, COUNT)
        assert first.submits == [] and len(one.submits) + len(two.submits) == 1
