"""``--memory`` caps hold: what does not fit is refused in words, what is let in stays below them as it serves."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest

from kvasir_peer.agent.engine import Engine, open_engine
from kvasir_peer.engines import orders
from kvasir_peer.errors import ResourceError
from kvasir_peer.wire.experts import encode_rows, rows_bytes
from kvasir_peer.wire.membership import FLAG_OUTPUT, compose
from kvasir_peer.wire.sampling import GREEDY

WIDTH, HIDDEN, EXPERTS, USED = 1024, 512, 32, 4
ROWS, SLOTS, CONTEXT = 64, 2, 128


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with experts, Q4_0, 60 MB: large beside what the libraries take by chance."""
    path = tmp_path_factory.mktemp("caps") / "model.gguf"
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for key, value in {
        "block_count": 2,
        "context_length": 4096,
        "embedding_length": WIDTH,
        "feed_forward_length": HIDDEN,
        "expert_feed_forward_length": HIDDEN,
        "expert_count": EXPERTS,
        "expert_used_count": USED,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "vocab_size": 512,
    }.items():
        writer.add_uint32(f"qwen3moe.{key}", value)
    writer.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6)

    def matrix(name: str, *shape: int) -> None:
        blocks = rng.integers(0, 256, (int(np.prod(shape)) // 32, 18), dtype=np.uint8)
        blocks[:, :2] = np.array([0.01], np.float16).view(np.uint8)
        raw = blocks.reshape(*shape[:-1], shape[-1] // 32 * 18)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def norm(name: str, width: int) -> None:
        writer.add_tensor(name, np.ones(width, np.float32))

    matrix("token_embd.weight", 512, WIDTH)
    matrix("output.weight", 512, WIDTH)
    norm("output_norm.weight", WIDTH)
    for layer in ("blk.0", "blk.1"):
        for name, width in (
            ("attn_norm", WIDTH),
            ("ffn_norm", WIDTH),
            ("attn_q_norm", 64),
            ("attn_k_norm", 64),
        ):
            norm(f"{layer}.{name}.weight", width)
        matrix(f"{layer}.attn_q.weight", 512, WIDTH)
        matrix(f"{layer}.attn_k.weight", 128, WIDTH)
        matrix(f"{layer}.attn_v.weight", 128, WIDTH)
        matrix(f"{layer}.attn_output.weight", WIDTH, 512)
        writer.add_tensor(f"{layer}.ffn_gate_inp.weight", rng.standard_normal((EXPERTS, WIDTH), np.float32))
        matrix(f"{layer}.ffn_gate_exps.weight", EXPERTS, HIDDEN, WIDTH)
        matrix(f"{layer}.ffn_up_exps.weight", EXPERTS, HIDDEN, WIDTH)
        matrix(f"{layer}.ffn_down_exps.weight", EXPERTS, WIDTH, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def needed(error: ResourceError) -> int:
    """Bytes that the refusal asks for."""
    found = re.search(
        r"need (\d+) MB \(\d+ weights, .*?\), (\d+) MB are allowed; give more with --memory", str(error)
    )
    assert found is not None, error
    assert int(found[1]) > int(found[2])
    return int(found[1]) * 1_000_000


async def needed_at_last(load: Callable[[int], Awaitable[object]], match: str) -> int:
    """Bytes that loading needs, asked until the process itself has stopped growing by being asked."""
    before = 0
    for _ in range(8):
        with pytest.raises(ResourceError, match=match) as refused:
            await load(100_000_000)
        cap = needed(refused.value)
        if abs(cap - before) <= 1_000_000:
            return cap
        before = cap
    raise AssertionError(f"what is needed does not settle: {cap} after {before}")


def resident(engine: Engine) -> int:
    """What the operating system counts, without the buffers that agent and engine share."""
    memory = psutil.Process(engine.statistics().pid).memory_info()
    return int(memory.rss)


@pytest.mark.parametrize("engine_name", ["onnx", "torch"])
async def test_a_stage_stays_below_its_cap(model: Path, engine_name: str) -> None:
    def order(limit: int) -> orders.LoadStage:
        return orders.LoadStage(
            job=0,
            weights=orders.GgufWeights(str(model)),
            engine=engine_name,
            stage=0,
            stages=2,
            first=0,
            end=1,
            n_layer=2,
            n_embd=WIDTH,
            vocab=512,
            n_slots=SLOTS,
            context_length=CONTEXT,
            max_rows=ROWS,
            dtype="f32",
            top_logprobs=0,
            precision="fast",
            threads=1,
            device="cpu",
            arena=orders.ArenaShape(1, ROWS * WIDTH * 4),
            memory_limit=limit,
        )

    async with open_engine() as engine:
        cap = await needed_at_last(
            lambda limit: engine.load_stage(order(limit)), r"^layers 0 to 0 need .*fewer layers, slots"
        )
        with pytest.raises(ResourceError):
            await engine.load_stage(order(cap - 2_000_000))
        await engine.load_stage(order(cap + 2_000_000))
        for slot in range(SLOTS):
            for first in range(0, CONTEXT, ROWS):
                end = first + ROWS
                rows = [
                    (slot + 1, slot, 1, p, p % 512, FLAG_OUTPUT if p == end - 1 else 0, 2)
                    for p in range(first, end)
                ]
                buffer = await engine.take_buffer()
                await (await engine.submit(buffer, compose(rows, [GREEDY]).encode(), 0)).result()
                engine.free_buffer(buffer)
        assert resident(engine) <= cap + 2_000_000


@pytest.mark.parametrize("engine_name", ["onnx", "torch"])
async def test_a_bank_stays_below_its_cap(model: Path, engine_name: str) -> None:
    def order(limit: int) -> orders.LoadBank:
        return orders.LoadBank(
            job=0,
            weights=orders.GgufWeights(str(model)),
            engine=engine_name,
            ranges=((0, 0, 24), (1, 0, 16)),
            max_rows=ROWS,
            precision="fast",
            threads=1,
            device="cpu",
            arena=orders.ArenaShape(1, rows_bytes(ROWS, USED, WIDTH, "f32")),
            memory_limit=limit,
        )

    rng = np.random.default_rng(0)
    async with open_engine() as engine:
        cap = await needed_at_last(
            lambda limit: engine.load_bank(order(limit)), r"^these experts need .*fewer experts$"
        )
        with pytest.raises(ResourceError):
            await engine.load_bank(order(cap - 2_000_000))
        await engine.load_bank(order(cap + 2_000_000))
        for layer in (0, 1):
            ids = rng.permuted(np.tile(np.arange(16, dtype=np.int32), (ROWS, 1)), axis=1)[:, :USED].copy()
            weights = np.full((ROWS, USED), 0.25, np.float32)
            x = rng.standard_normal((ROWS, WIDTH), np.float32)
            buffer = await engine.take_buffer()
            encode_rows(ids, weights, x, "f32", engine.buffer(buffer))
            await engine.compute_experts(buffer, layer, ROWS, USED, "f32", "experts")
            engine.free_buffer(buffer)
        assert resident(engine) <= cap + 2_000_000
