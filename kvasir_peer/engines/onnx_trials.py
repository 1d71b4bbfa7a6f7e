"""Small computations by one operator each, with numpy's beside them, for :mod:`kvasir_peer.engines.onnx_probe`.

Each returns what the operator has computed and what numpy has, for random weights and inputs that are the same every
time. An operator that is missing or fails is an ``EngineError``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.engines import panels, quants
from kvasir_peer.engines.architectures import AttentionShape, RopeShape
from kvasir_peer.engines.base import F32, Precision
from kvasir_peer.engines.onnx_attention import attention_graph
from kvasir_peer.engines.onnx_graph import Graph, Runtime
from kvasir_peer.engines.onnx_linear import Matrix, forward_node
from kvasir_peer.engines.onnx_parts import Heads
from kvasir_peer.engines.onnx_row_attention import RowAttentions
from kvasir_peer.engines.rope import RopeTable, rotate
from kvasir_peer.models.split_experts import FLOAT16_SCALES


def try_product(runtime: Runtime, bits: int, block: int, level: int) -> tuple[F32, F32]:
    """``MatMulNBits``: codes of some bits, with a scale per block, at an accuracy level."""
    rng = np.random.default_rng(bits * 100 + block + level)
    n, rows, columns = 3, 48, 128
    x = rng.standard_normal((n, columns)).astype(np.float32)
    packed, scales, weights = _random_codes(rng, (rows, columns), bits, block)
    g = Graph()
    y = g.op(
        "MatMulNBits",
        g.input("x", ["n", columns]),
        g.weight(packed.reshape(rows, columns // block, -1)),
        g.weight(scales),
        microsoft=True,
        K=columns,
        N=rows,
        bits=bits,
        block_size=block,
        accuracy_level=level,
    )
    g.output(y, "y", ["n", rows])
    return g.session(runtime).run({"x": x})[0], x @ weights.T


def try_experts(runtime: Runtime, bits: int) -> tuple[F32, F32]:
    """``QMoE`` with given router weights."""
    rng = np.random.default_rng(bits)
    n, experts, width, hidden, block = 4, 6, 64, 96, 32
    x = rng.standard_normal((n, width)).astype(np.float32)
    up_packed, up_scales, up = _random_codes(rng, (experts, 2 * hidden, width), bits, block)
    down_packed, down_scales, down = _random_codes(rng, (experts, width, hidden), bits, block)
    # Two of three choices count, one of them only a little; the rest have no weight and must add nothing.
    mix = np.zeros((n, experts), np.float32)
    chosen = np.zeros_like(mix)
    for row in range(n):
        ids = rng.permutation(experts)[:2]
        chosen[row, ids] = 1.0
        mix[row, ids] = (0.7, 0.05)
    g = Graph()
    y = g.op(
        "QMoE",
        g.input("x", ["n", width]),
        g.input("chosen", ["n", experts]),
        g.weight(up_packed),
        g.weight(up_scales),
        "",
        g.weight(down_packed),
        g.weight(down_scales),
        *[""] * 7,
        g.input("mix", ["n", experts]),
        microsoft=True,
        k=3,
        activation_type="swiglu",
        activation_alpha=1.0,
        activation_beta=0.0,
        swiglu_fusion=1,
        normalize_routing_weights=0,
        expert_weight_bits=bits,
        block_size=block,
        weights_prepacked=0,
        accuracy_level=4,
    )
    g.output(y, "y", ["n", width])
    got = g.session(runtime).run({"x": x, "chosen": chosen, "mix": mix})[0]
    both = np.einsum("nk,efk->nef", x, up)
    gate, linear = both[..., 0::2], both[..., 1::2]
    each = np.einsum("nef,ekf->nek", gate / (1.0 + np.exp(-gate)) * linear, down)
    return got, np.einsum("ne,nek->nk", mix, each).astype(np.float32)


def try_attention(runtime: Runtime, n_slots: int, n_rows: int) -> tuple[F32, F32]:
    """``GroupQueryAttention``: the next rows of neighbouring slots."""
    rng = np.random.default_rng(n_rows)
    n_head, n_kv, length, context, past = 4, 2, 32, 24, 7
    heads = Heads(True, n_head, n_kv, length, length, False)
    rope = RopeShape("halves", length, 10000.0)
    shape = AttentionShape(n_head, n_kv, length, length, length**-0.5, 0, 0.0, rope)
    table = RopeTable(rope)
    cos, sin = table(np.arange(context, dtype=np.int32))
    session = attention_graph(shape, heads, cos, sin, sinks=False).session(runtime)
    keys = rng.standard_normal((n_slots, n_kv, context, length)).astype(np.float32)
    values = rng.standard_normal(keys.shape).astype(np.float32)
    qkv = rng.standard_normal((n_slots, n_rows, heads.q + heads.k + heads.v)).astype(np.float32)
    # Slots are of different lengths; rows stand at the positions from `begin` on.
    begin = past + 3 * np.arange(n_slots)
    expected = _attention(qkv, keys.copy(), values.copy(), begin, shape, table)
    last = (begin + n_rows - 1).astype(np.int32)
    total = np.array(last.max() + 1, np.int32)
    got = np.empty((n_slots, n_rows, heads.attended), np.float32)
    session.bind(
        {"qkv": qkv, "past_k": keys, "past_v": values, "last": last, "total": total},
        {"attention": got, "present_k": keys, "present_v": values},
    )()
    return got, expected


def try_linears(runtime: Runtime, library: Path, precision: Precision) -> tuple[F32, F32]:
    """``Linear`` of the C kernels: the type that is furthest off, every type's results made of the same size."""
    got, expected = [], []
    for type_id in panels.TYPES:
        ours, numpys = try_linear(runtime, library, precision, type_id)
        size = np.sqrt(np.mean(numpys**2))
        got.append(ours / size)
        expected.append(numpys / size)
    # One that is wrong must not hide among the others.
    worst = max(
        range(len(got)), key=lambda i: float(np.nan_to_num(np.mean((got[i] - expected[i]) ** 2), nan=np.inf))
    )
    return got[worst], expected[worst]


def try_linear(runtime: Runtime, library: Path, precision: Precision, type_id: int) -> tuple[F32, F32]:
    """``Linear`` of the C kernels, for one type."""
    rng = np.random.default_rng(type_id)
    # Two panels, one of them not full, and rows for all widths of the kernel.
    n, rows, columns = 15, 20, 512
    blocks, weights = _random_blocks(rng, type_id, rows, columns)
    x, bias = rng.standard_normal((n, columns)).astype(np.float32), np.ones(rows, np.float32)
    g = Graph()
    packed = g.resident(panels.pack(blocks, type_id, rows, columns))
    inputs = [g.input("x", ["n", columns]), packed, g.resident(bias)]
    exact = int(precision == "exact")
    y = g.own(library, "Linear", *inputs, type=type_id, rows=rows, columns=columns, exact=exact)
    g.output(y, "y", ["n", rows])
    return g.session(runtime).run({"x": x})[0], x @ weights.T + bias


def try_embedding(runtime: Runtime, library: Path) -> tuple[F32, F32]:
    """``Embedding`` of the C kernels."""
    rows, columns, kind = 20, 256, quants.BY_NAME["Q6_K"].id
    blocks, weights = _random_blocks(np.random.default_rng(3), kind, rows, columns)
    g = Graph()
    inputs = [g.input("tokens", ["n", 1], np.int32), g.resident(panels.pack(blocks, kind, rows, columns))]
    y = g.own(library, "Embedding", *inputs, type=kind, rows=rows, columns=columns, scale=2.0)
    g.output(y, "hidden", ["n", columns])
    tokens = np.arange(rows, dtype=np.int32)[::-1, None]
    return g.session(runtime).run({"tokens": np.ascontiguousarray(tokens)})[0], 2.0 * weights[tokens[:, 0]]


def try_forward(runtime: Runtime, library: Path, precision: Precision) -> tuple[F32, F32]:
    """``FeedForward`` of the C kernels, with experts."""
    rng = np.random.default_rng(1)
    n, experts, columns, width = 4, 6, 64, 96
    kind = quants.BY_NAME["Q8_0"].id
    x = rng.standard_normal((n, columns)).astype(np.float32)
    shapes = ((width, columns), (width, columns), (columns, width))
    g = Graph()
    inputs, weights = [g.input("x", ["n", columns])], []
    for rows, wide in shapes:
        blocks, values = _random_blocks(rng, kind, experts * rows, wide)
        inputs.append(g.resident(panels.pack(blocks, kind, experts * rows, wide)))
        weights.append(values.reshape(experts, rows, wide))
    # One choice is out of range and adds nothing.
    places = np.array([[0, 5], [3, -1], [3, 2], [1, 0]], np.int32)
    mix = rng.random((n, 2)).astype(np.float32)
    inputs += [g.input("places", ["n", "k"], np.int32), g.input("mix", ["n", "k"])]
    infos = [Matrix("", np.empty(0, np.uint8), kind, rows, wide) for rows, wide in shapes]
    y = forward_node(g, library, inputs, infos, columns, width, experts, "silu", precision)[0]
    g.output(y, "y", ["n", columns])
    got = g.session(runtime).run({"x": x, "places": places, "mix": mix})[0]
    gate, up = (np.einsum("nk,efk->nef", x, w) for w in weights[:2])
    each = np.einsum("nef,ekf->nek", gate / (1.0 + np.exp(-gate)) * up, weights[2])
    dense = np.zeros((n, experts), np.float32)
    for row, column in np.argwhere(places >= 0):
        dense[row, places[row, column]] += mix[row, column]
    return got, np.einsum("ne,nek->nk", dense, each).astype(np.float32)


def try_row_attention(runtime: Runtime, library: Path) -> tuple[F32, F32]:
    """``Attention`` of the C kernels: three slots, 20 rows each, by one call; then one row each."""
    rng = np.random.default_rng(2)
    n_slots, n_rows, context = 3, 20, 32
    heads = Heads(True, 4, 2, 32, 32, False)
    rope = RopeShape("halves", 32, 10000.0)
    shape = AttentionShape(4, 2, 32, 32, 32**-0.5, 0, 0.0, rope)
    attentions = RowAttentions(library, n_slots, context, n_slots * n_rows, runtime)
    attentions.add(shape, heads, RopeTable(rope), None)
    g = Graph()
    width = heads.q + heads.k + heads.v
    inputs = [g.input("slots", ["n", 1], np.int32), g.input("positions", ["n", 1], np.int32)]
    y = attentions.node(g, 0, [g.input("qkv", ["n", width])], *inputs)
    g.output(y, "attention", ["n", heads.attended])
    session = g.session(runtime)
    qkv = rng.standard_normal((n_slots, n_rows + 1, width)).astype(np.float32)
    got = []
    for begin, end in ((0, n_rows), (n_rows, n_rows + 1)):
        some = np.ascontiguousarray(qkv[:, begin:end]).reshape(-1, width)
        slots = np.repeat(np.arange(n_slots, dtype=np.int32), end - begin)[:, None]
        positions = np.tile(np.arange(begin, end, dtype=np.int32), n_slots)[:, None]
        result = session.run({"qkv": some, "slots": slots, "positions": positions})[0]
        got.append(result.reshape(n_slots, end - begin, -1))
    keys = np.zeros((n_slots, 2, context, 32), np.float32)
    begins = np.zeros(n_slots, np.int64)
    expected = _attention(qkv, keys, np.zeros_like(keys), begins, shape, RopeTable(rope))
    return np.concatenate(got, axis=1), expected


def _random_blocks(
    rng: np.random.Generator, type_id: int, rows: int, columns: int
) -> tuple[NDArray[np.uint8], F32]:
    """Return blocks of a type with scales of moderate size, and what they stand for, [rows, columns]."""
    t = quants.quant_type(type_id)
    blocks: NDArray[np.uint8] = rng.integers(
        0, 256, (rows * columns // t.block, t.block_bytes), dtype=np.uint8
    )
    for at in FLOAT16_SCALES.get(t.name, ()):
        half = (rng.random(len(blocks)) * 0.02 + 0.01).astype(np.float16)
        blocks[:, at : at + 2] = half.view(np.uint8).reshape(-1, 2)
    if t.name == "MXFP4":
        blocks[:, 0] = rng.integers(120, 124, len(blocks))
    return blocks, quants.dequantize(blocks, type_id, (rows, columns))


def _random_codes(
    rng: np.random.Generator, shape: tuple[int, ...], bits: int, block: int
) -> tuple[NDArray[np.uint8], F32, F32]:
    """Return packed codes, scales, and the weights that they stand for, [..., columns]."""
    codes: NDArray[np.uint8] = rng.integers(0, 1 << bits, shape, dtype=np.uint8)
    scales = (rng.random((*shape[:-1], shape[-1] // block)) * 0.02 + 0.01).astype(np.float32)
    weights = (codes.astype(np.float32) - (1 << (bits - 1))) * np.repeat(scales, block, axis=-1)
    packed = codes if bits == 8 else codes[..., 0::2] | np.left_shift(codes[..., 1::2], np.uint8(4))
    return packed, scales, weights


def _attention(
    qkv: F32, keys: F32, values: F32, begin: NDArray[np.int64], shape: AttentionShape, table: RopeTable
) -> F32:
    """Attention by its definition, in numpy."""
    n_slots, n_rows, _ = qkv.shape
    heads, n_kv, length = shape.n_head, shape.n_head_kv, shape.key_length
    out = np.empty((n_slots, n_rows, heads, length), np.float32)
    for slot in range(n_slots):
        positions = (begin[slot] + np.arange(n_rows)).astype(np.int32)
        cos, sin = table(positions)
        q, k, v = np.split(qkv[slot].reshape(n_rows, -1, length), [heads, heads + n_kv], axis=1)
        q, k = rotate(q, cos, sin, shape.rope.style), rotate(k, cos, sin, shape.rope.style)
        keys[slot][:, positions] = k.transpose(1, 0, 2)
        values[slot][:, positions] = v.transpose(1, 0, 2)
        for row, position in enumerate(positions):
            for head in range(heads):
                group = head // (heads // n_kv)
                scores = keys[slot, group, : position + 1] @ q[row, head] * shape.scale
                weights = np.exp(scores - scores.max())
                out[slot, row, head] = weights / weights.sum() @ values[slot, group, : position + 1]
    return out.reshape(n_slots, n_rows, -1)
