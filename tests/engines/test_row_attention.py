"""Attention by the C kernels, against its definition in numpy."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir_peer.engines.architectures import AttentionShape, MlaShape, RopeShape
from kvasir_peer.engines.kernels.library import Library
from kvasir_peer.engines.onnx_graph import Graph, Runtime, Session
from kvasir_peer.engines.onnx_parts import Heads
from kvasir_peer.engines.onnx_row_attention import RowAttentions, cache_floats
from kvasir_peer.engines.rope import RopeTable, rotate
from kvasir_peer.errors import EngineError

PLAIN = AttentionShape(6, 2, 32, 32, 32**-0.5, 0, 0.0, RopeShape("halves", 32, 10000.0))
MLA = MlaShape(q_rank=0, kv_rank=48, nope=16, rope=16, value=24, split=True)
SHAPES = {
    "plain": PLAIN,
    "adjacent": replace(PLAIN, rope=RopeShape("adjacent", 32, 10000.0)),
    "part of a head is rotated": replace(PLAIN, rope=RopeShape("halves", 12, 10000.0)),
    "one head": replace(PLAIN, n_head=1, n_head_kv=1),
    "each query has its key": replace(PLAIN, n_head=5, n_head_kv=5),
    "many queries to a key": replace(PLAIN, n_head=22, n_head_kv=2),
    "odd widths": replace(PLAIN, key_length=20, value_length=28, rope=RopeShape("halves", 20, 10000.0)),
    "wide values": replace(PLAIN, value_length=144),
    "a window": replace(PLAIN, window=5),
    "a window of blocks": replace(PLAIN, window=32),
    "a cap": replace(PLAIN, softcap=0.7),
    "latent": replace(PLAIN, mla=MLA, rope=RopeShape("adjacent", 16, 10000.0)),
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def heads_of(shape: AttentionShape, packed: bool) -> Heads:
    if shape.mla is not None:
        width = shape.mla.kv_rank + shape.mla.rope
        return Heads(False, shape.n_head, 1, width, shape.mla.kv_rank, True)
    return Heads(packed, shape.n_head, shape.n_head_kv, shape.key_length, shape.value_length, False)


@dataclass
class Case:
    """One layer's attention, a session of it, and the definition's own cache."""

    shape: AttentionShape
    heads: Heads
    context: int
    sinks: np.ndarray | None
    session: Session
    keys: dict[tuple[int, int], np.ndarray]
    values: dict[tuple[int, int], np.ndarray]

    @classmethod
    def of(
        cls,
        library: Library,
        shape: AttentionShape,
        *,
        slots: int = 4,
        context: int = 90,
        packed: bool = True,
        sinks: np.ndarray | None = None,
        threads: int = 2,
    ) -> "Case":
        heads = heads_of(shape, packed)
        attentions = RowAttentions(library.path, slots, context, 1, Runtime(threads))
        attentions.add(shape, heads, RopeTable(shape.rope), sinks)
        g = Graph()
        widths = {"qkv": heads.q + heads.k + heads.v} if heads.packed else {"q": heads.q, "k": heads.k}
        if not heads.packed and not heads.latent:
            widths["v"] = heads.v
        projected = [g.input(name, ["n", width]) for name, width in widths.items()]
        places = [g.input(name, ["n", 1], np.int32) for name in ("slots", "positions")]
        g.output(attentions.node(g, 0, projected, *places), "y", ["n", heads.attended])
        return cls(shape, heads, context, sinks, g.session(Runtime(threads)), {}, {})

    def random(self, n: int, rng: np.random.Generator) -> np.ndarray:
        return rng.standard_normal((n, self.heads.q + self.heads.k + self.heads.v)).astype(np.float32)

    def run(self, qkv: np.ndarray, slots: list[int], positions: list[int]) -> np.ndarray:
        heads = self.heads
        places = {
            "slots": np.array(slots, np.int32)[:, None],
            "positions": np.array(positions, np.int32)[:, None],
        }
        if heads.packed:
            return self.session.run({"qkv": qkv, **places})[0]
        parts = np.split(qkv, [heads.q, heads.q + heads.k], axis=1)
        named = {name: np.ascontiguousarray(part) for name, part in zip("qkv", parts, strict=True)}
        if heads.latent:
            del named["v"]
        return self.session.run({**named, **places})[0]

    def define(self, qkv: np.ndarray, slots: list[int], positions: list[int]) -> np.ndarray:
        """What it should be, in float64."""
        heads, shape = self.heads, self.shape
        n = len(qkv)
        q, k, v = np.split(qkv, [heads.q, heads.q + heads.k], axis=1)
        q, k = q.reshape(n, heads.n_head, heads.key), k.reshape(n, heads.n_head_kv, heads.key)
        begin = heads.key - shape.rope.dimensions if heads.latent else 0
        cos, sin = RopeTable(shape.rope)(np.array(positions, np.int32))
        q, k = q.copy(), k.copy()
        for x in (q, k):
            x[..., begin:] = rotate(x[..., begin:], cos, sin, shape.rope.style)
        v = k[..., : heads.value] if heads.latent else v.reshape(n, heads.n_head_kv, heads.value)
        for row in range(n):
            self.keys[slots[row], positions[row]] = k[row].astype(np.float64)
            self.values[slots[row], positions[row]] = v[row].astype(np.float64)
        out = np.empty((n, heads.n_head, heads.value))
        for row in range(n):
            end = positions[row] + 1
            low = max(0, end - shape.window) if shape.window else 0
            keys = np.stack([self.keys[slots[row], t] for t in range(low, end)])
            values = np.stack([self.values[slots[row], t] for t in range(low, end)])
            for head in range(heads.n_head):
                of = head // (heads.n_head // heads.n_head_kv)
                scores = keys[:, of] @ q[row, head].astype(np.float64) * shape.scale
                if shape.softcap:
                    scores = shape.softcap * np.tanh(scores / shape.softcap)
                top = scores.max() if self.sinks is None else max(scores.max(), self.sinks[head])
                weights = np.exp(scores - top)
                total = weights.sum() + (0.0 if self.sinks is None else np.exp(self.sinks[head] - top))
                out[row, head] = weights @ values[:, of] / total
        return out.reshape(n, -1)

    def check(self, qkv: np.ndarray, slots: list[int], positions: list[int]) -> np.ndarray:
        got, expected = self.run(qkv, slots, positions), self.define(qkv, slots, positions)
        assert np.abs(got - expected).max() < 3e-6 * np.abs(expected).max()
        return got


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


@each_shape
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "apart"])
def test_any_rows_of_any_slots_at_once(kernels: Library, shape: AttentionShape, packed: bool) -> None:
    """Prompts in chunks, decodes, slots in any order, over borders of blocks and shares."""
    case = Case.of(kernels, shape, packed=packed)
    rng = np.random.default_rng(0)
    case.check(case.random(37, rng), [2] * 37, list(range(37)))
    case.check(case.random(3, rng), [0] * 3, [0, 1, 2])
    case.check(
        case.random(1 + 20 + 1 + 16, rng),
        [3] + [2] * 20 + [0] + [1] * 16,
        [0, *range(37, 57), 3, *range(16)],
    )
    case.check(case.random(4, rng), [1, 0, 3, 2], [16, 4, 1, 57])
    case.check(case.random(32, rng), [2] * 32, list(range(58, 90)))


def test_a_head_may_give_weight_to_nothing(kernels: Library) -> None:
    """Sinks, as gpt-oss has them: below, among and far above the scores."""
    sinks = np.array([-20.0, 0.0, 1.0, 2.0, 5.0, 60.0], np.float32)
    case = Case.of(kernels, PLAIN, sinks=sinks)
    rng = np.random.default_rng(1)
    case.check(case.random(20, rng), [1] * 20, list(range(20)))
    case.check(case.random(2, rng), [1, 0], [20, 0])


@each_shape
def test_a_row_is_the_same_bits_in_any_chunks_and_on_any_threads(
    kernels: Library, shape: AttentionShape
) -> None:
    rng = np.random.default_rng(2)
    whole = Case.of(kernels, shape, threads=1)
    qkv = whole.random(60, rng)
    expected = whole.run(qkv, [1] * 60, list(range(60)))
    for threads, sizes in ((1, [1] * 60), (2, [7, 16, 1, 36]), (4, [59, 1])):
        case = Case.of(kernels, shape, threads=threads)
        at = 0
        for size in sizes:
            # Beside rows of another slot, before and after.
            rows = np.concatenate([case.random(1, rng), qkv[at : at + size], case.random(2, rng)])
            slots = [0] + [1] * size + [3] * 2
            got = case.run(rows, slots, [0, *range(at, at + size), 0, 1])
            assert same_bits(got[1 : 1 + size], expected[at : at + size])
            at += size


@each_shape
def test_a_slot_that_is_taken_again_forgets(kernels: Library, shape: AttentionShape) -> None:
    """What stands behind a row, of a longer request before it or of what is computed again, has no influence."""
    rng = np.random.default_rng(3)
    used, fresh = Case.of(kernels, shape), Case.of(kernels, shape)
    spoilt = used.random(50, rng)
    spoilt[::3] = np.nan
    used.run(spoilt, [2] * 50, list(range(50)))
    qkv = used.random(21, rng)
    assert same_bits(used.run(qkv, [2] * 21, list(range(21))), fresh.run(qkv, [2] * 21, list(range(21))))
    again = used.random(5, rng)
    expected = fresh.run(again, [2] * 5, list(range(9, 14)))
    assert same_bits(used.run(again, [2] * 5, list(range(9, 14))), expected)
    assert np.isfinite(expected).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_request_that_is_no_number_spoils_itself_only(kernels: Library, bad: float) -> None:
    rng = np.random.default_rng(4)
    case, other = Case.of(kernels, PLAIN), Case.of(kernels, PLAIN)
    qkv = case.random(30, rng)
    expected = other.run(qkv, [0] * 10 + [1] * 10 + [2] * 10, [*range(10)] * 3)
    qkv[12] = bad
    got = case.run(qkv, [0] * 10 + [1] * 10 + [2] * 10, [*range(10)] * 3)
    assert same_bits(got[:10], expected[:10]) and same_bits(got[20:], expected[20:])
    assert np.isnan(got[12]).all()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_of_passes(kernels: Library, data: st.DataObject) -> None:
    shape = SHAPES[data.draw(st.sampled_from(sorted(SHAPES)))]
    case = Case.of(kernels, shape, slots=3, context=40, packed=data.draw(st.booleans()))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    lengths = [0, 0, 0]
    for _ in range(data.draw(st.integers(1, 4))):
        slots, positions = [], []
        for slot in data.draw(st.permutations(range(3))):
            # A slot goes on, begins anew, or is left out.
            begin = data.draw(st.integers(0, lengths[slot]))
            count = data.draw(st.integers(0, min(18, 40 - begin)))
            slots += [slot] * count
            positions += range(begin, begin + count)
            if count:
                lengths[slot] = begin + count
        if slots:
            case.check(case.random(len(slots), rng), slots, positions)


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(("slot", "position"), [(4, 0), (-1, 0), (0, 96), (0, -1)])
def test_a_row_outside_of_the_cache_is_refused(kernels: Library, slot: int, position: int) -> None:
    case = Case.of(kernels, PLAIN)
    with pytest.raises(EngineError, match="outside of the cache"):
        case.run(case.random(1, np.random.default_rng(0)), [slot], [position])


def broken(kernels: Library, **changed: object) -> None:
    """Run attention with some inputs or attributes that are not as they should be."""
    shape, context, slots = PLAIN, 32, 2
    heads = heads_of(shape, True)
    keys, values = (slots * floats for floats in cache_floats(heads, context))
    cos, sin = RopeTable(shape.rope)(np.arange(context, dtype=np.int32))
    n = 3
    arrays = {
        "qkv": np.zeros((n, heads.q + heads.k + heads.v), np.float32),
        "k": None,
        "v": None,
        "slots": np.zeros((n, 1), np.int32),
        "positions": np.arange(n, dtype=np.int32)[:, None],
        "keys": np.zeros(keys, np.float32),
        "values": np.zeros(values, np.float32),
        "cos": cos,
        "sin": sin,
        "sinks": None,
    }
    attributes = {
        "heads": 6, "kv_heads": 2, "key": 32, "value": 32, "slots": slots, "context": context, "rotated": 32,
        "from": 0, "adjacent": 0, "latent": 0, "window": 0, "scale": 0.1, "cap": 0.0,
    }  # fmt: skip
    for name, value in changed.items():
        if name in arrays and not isinstance(value, int):
            arrays[name] = value  # type: ignore[assignment]
        else:
            attributes[name.removeprefix("a_")] = value  # type: ignore[assignment]
    g = Graph()
    names = ["" if a is None else g.input(name, list(a.shape), a.dtype) for name, a in arrays.items()]
    while not names[-1]:
        names.pop()
    y = g.own(kernels.path, "Attention", *names, **attributes)
    g.output(y, "y", [n, 192])
    g.session(Runtime(1)).run({name: a for name, a in arrays.items() if a is not None})


def test_the_same_attention_without_a_fault_is_taken(kernels: Library) -> None:
    broken(kernels)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"qkv": np.zeros((3, 319), np.float32)}, "do not fit each other"),
        ({"slots": np.zeros((2, 1), np.int32)}, "size"),
        ({"positions": np.zeros((4, 1), np.int32)}, "size"),
        ({"keys": np.zeros(2 * 2 * 32 * 32 - 1, np.float32)}, "size"),
        ({"values": np.zeros(7, np.float32)}, "size"),
        ({"cos": np.zeros((31, 16), np.float32)}, "size"),
        ({"sinks": np.zeros(5, np.float32)}, "size"),
        ({"values": None}, "missing"),
        ({"k": np.zeros((3, 64), np.float32)}, "do not fit each other"),
        ({"a_slots": 0}, "out of range"),
        ({"a_context": 40}, "do not fit each other"),
        ({"heads": 5}, "do not fit each other"),
        ({"key": 4096}, "do not fit each other"),
        ({"rotated": 34}, "do not fit each other"),
        ({"rotated": 31}, "do not fit each other"),
        ({"window": -1}, "out of range"),
    ],
    ids=str,
)
def test_attention_that_cannot_be_is_refused(kernels: Library, changed: dict[str, object], says: str) -> None:
    with pytest.raises(EngineError, match=says):
        broken(kernels, **changed)
