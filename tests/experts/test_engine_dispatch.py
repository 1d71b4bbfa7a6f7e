"""Passes that hand out their routed rows: exact, interleaved, and in order where they share a slot."""

from __future__ import annotations

import numpy as np
import pytest
import trio
from helpers_experts import ALL_LAYERS, N_EMBD, N_EXPERT, bank_order, cases, stage_order

from kvasir_peer.agent.engine import Engine, RoutedPass, open_engine
from kvasir_peer.engines.interleaving import Interleaving
from kvasir_peer.errors import EngineError
from kvasir_peer.wire.experts import rows_bytes
from kvasir_peer.wire.membership import FLAG_DECODE, FLAG_OUTPUT, compose
from kvasir_peer.wire.sampling import GREEDY


def rows_of(slot: int, tokens: list[int], first: int) -> bytes:
    last = len(tokens) - 1
    rows = [
        (
            slot + 1,
            slot,
            1,
            p,
            tokens[p],
            (FLAG_OUTPUT if p == last else 0) | (FLAG_DECODE if first == last else 0),
            1,
        )
        for p in range(first, len(tokens))
    ]
    return compose(rows, [GREEDY]).encode()


async def continue_text(
    engine: Engine, slot: int, case: dict, layers: tuple[int, ...], count: int
) -> list[int]:
    tokens, computed = list(case["prompt_ids"]), 0
    for _ in range(count):
        buffer = await engine.take_buffer()
        pending = await engine.submit(buffer, rows_of(slot, tokens, computed), 0, layers)
        (output,) = (await pending.result()).outputs
        engine.free_buffer(buffer)
        computed = len(tokens)
        tokens.append(output.token)
    return tokens[len(case["prompt_ids"]) :]


class Elsewhere:
    """Sends the routed rows of one engine to another, whole or the halves of the experts to two."""

    def __init__(self, engine: Engine, banks: list[Engine], nursery: trio.Nursery) -> None:
        self.engine, self.banks, self.nursery = engine, banks, nursery
        self.most = self.now = self.routed = 0
        engine.routed = lambda rows: nursery.start_soon(self.serve, rows)

    async def serve(self, rows: RoutedPass) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        self.routed += 1
        size = rows_bytes(rows.rows, rows.experts, N_EMBD, "f32")
        data = bytes(self.engine.buffer(rows.buffer)[:size])
        await trio.sleep(0.002)  # as if on a network: other passes are computed meanwhile
        sums = np.zeros((rows.rows, N_EMBD), np.float32)
        for bank in self.banks:
            buffer = await bank.take_buffer()
            bank.buffer(buffer)[:size] = data
            done = await bank.compute_experts(buffer, rows.layer, rows.rows, rows.experts, "f32", "experts")
            assert done.size == sums.nbytes
            sums += np.frombuffer(bank.buffer(buffer)[: done.size], "<f4").reshape(sums.shape)
            bank.free_buffer(buffer)
        self.now -= 1
        await self.engine.resume(rows, sums.tobytes())


async def test_texts_are_exact_with_all_experts_elsewhere_and_passes_interleaved() -> None:
    engine, others = "onnx", ("torch", "onnx")
    halves = [tuple((layer, lo, lo + N_EXPERT // 2) for layer in ALL_LAYERS) for lo in (0, N_EXPERT // 2)]
    texts: dict[int, list[int]] = {}
    chosen = cases()[:3]
    async with open_engine() as whole, open_engine() as low, open_engine() as high:
        await whole.load_stage(stage_order(engine=engine))
        await low.load_bank(bank_order(halves[0], others[0]))
        await high.load_bank(bank_order(halves[1], others[1]))
        async with trio.open_nursery() as nursery:
            elsewhere = Elsewhere(whole, [low, high], nursery)
            async with trio.open_nursery() as streams:

                async def stream(slot: int) -> None:
                    texts[slot] = await continue_text(whole, slot, chosen[slot], ALL_LAYERS, 12)

                for slot in range(len(chosen)):
                    streams.start_soon(stream, slot)
    assert texts == {slot: case["ids"][:12] for slot, case in enumerate(chosen)}
    assert elsewhere.most >= 2 and elsewhere.routed >= 12 * len(ALL_LAYERS) * len(chosen)


async def test_own_experts_compute_a_part_and_passes_of_a_replaced_stage_are_given_up() -> None:
    case = cases()[0]
    async with open_engine() as engine:
        await engine.load_stage(stage_order())
        async with trio.open_nursery() as nursery:
            Elsewhere(engine, [engine], nursery)
            assert await continue_text(engine, 0, case, (1, 3), 8) == case["ids"][:8]
        stopped = trio.Event()
        engine.routed = lambda rows: stopped.set()
        pending = await engine.submit(await engine.take_buffer(), rows_of(0, case["prompt_ids"], 0), 0, (0,))
        with trio.fail_after(20):
            await stopped.wait()
        await engine.load_stage(stage_order())
        with pytest.raises(EngineError, match="replaced"):
            await pending.result()
        with pytest.raises(EngineError, match="layer 99"):
            await engine.compute_experts(await engine.take_buffer(), 99, 1, 1, "f32", "experts")


def test_passes_that_share_a_slot_keep_their_order_at_every_layer() -> None:
    passes = Interleaving()
    passes.add(1, {0, 1}, (0, 2))
    passes.add(2, {1}, (0, 2))
    passes.add(3, {5}, ())
    assert passes.may_step(1) and not passes.may_step(2) and passes.may_step(3)
    passes.stopped(1, 0)
    assert passes.may_step(2)
    passes.stopped(2, 0)
    assert not passes.may_step(2), "layer 1 and 2 of the first pass are not written yet"
    passes.stopped(1, 2)
    assert passes.may_step(2)
    passes.stopped(2, 2)
    assert not passes.may_step(2)
    passes.remove(1)
    assert passes.may_step(2)
    passes.add(4, {1}, ())
    assert not passes.may_step(4), "a pass that runs through must find everything written"
    passes.remove(2)
    assert passes.may_step(4)
