"""Slices: the parts of any partition cover a model exactly, and are what roles need."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from helpers_models import MOE
from hypothesis import given
from hypothesis import strategies as st

from kvasir_peer.errors import NotReadyError
from kvasir_peer.models.gguf import GgufFile, TensorInfo
from kvasir_peer.models.manifest import Chunk, Manifest, assemble, build_manifest, chunk_count
from kvasir_peer.models.slices import (
    ExpertSlice,
    Slice,
    StageSlice,
    bytes_of,
    chunks_of,
    pages_of,
    tensors_of,
)


def described(n_layer: int, n_expert: int, tied: bool, common: bool) -> Manifest:
    """A manifest of a model that exists nowhere; each chunk's hash is its own."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (50, 8), "token_embd_norm.weight": (8,)}
    if common:
        shapes["rope_freqs.weight"] = (4,)
    for layer in range(n_layer):
        shapes[f"blk.{layer}.attn_q.weight"] = (3 << 20, 1)
        if n_expert:
            shapes[f"blk.{layer}.ffn_gate_inp.weight"] = (n_expert, 8)
            shapes[f"blk.{layer}.ffn_up_exps.weight"] = (n_expert, 5 << 18, 1)  # 5 MiB each: two chunks
            shapes[f"blk.{layer}.ffn_up_exps.bias"] = (n_expert, 16)
            shapes[f"blk.{layer}.ffn_up_exps.scale"] = (n_expert,)
    shapes["output_norm.weight"] = (8,)
    if not tied:
        shapes["output.weight"] = (50, 8)
    tensors, hashes, number = {}, {}, 0
    for name, shape in shapes.items():
        n_bytes = 4
        for size in shape:
            n_bytes *= size
        tensors[name] = TensorInfo(name, shape, 0, n_bytes, 0)
        count = chunk_count(name, shape, n_bytes)
        hashes[name] = b"".join((number + i).to_bytes(32, "big") for i in range(count))
        number += count
    metadata = {"general.architecture": "llama", "llama.block_count": n_layer}
    return assemble(metadata, tensors, hashes, name="m", where="m")


def places(chunks: list[Chunk]) -> Counter[tuple[str, int]]:
    return Counter((chunk.tensor, chunk.offset) for chunk in chunks)


@given(data=st.data(), n_layer=st.integers(1, 6), moe=st.booleans(), tied=st.booleans(), common=st.booleans())
def test_the_stages_of_any_partition_cover_each_chunk_once(
    data: st.DataObject, n_layer: int, moe: bool, tied: bool, common: bool
) -> None:
    manifest = described(n_layer, 3 if moe else 0, tied, common)
    cuts = sorted(data.draw(st.sets(st.integers(1, n_layer - 1)))) if n_layer > 1 else []
    stages = [
        StageSlice(first, end, n_layer) for first, end in zip([0, *cuts], [*cuts, n_layer], strict=True)
    ]
    taken = Counter[tuple[str, int]]()
    for stage in stages:
        taken += places(chunks_of(manifest, stage))
        assert bytes_of(manifest, stage) == sum(t.n_bytes for t in tensors_of(manifest, stage))
        assert places(chunks_of(manifest, stage)).most_common(1)[0][1] == 1
    expected = places([c for page in manifest.pages.values() for t in page.tensors for c in t.chunks()])
    for place in expected:
        if place[0] == "rope_freqs.weight":
            expected[place] = len(stages)
        if tied and place[0] == "token_embd.weight":
            expected[place] = len({stages[0], stages[-1]})
    assert taken == expected


@given(data=st.data())
def test_expert_slices_of_any_partition_cover_each_expert_once(data: st.DataObject) -> None:
    n_expert, n_layer = 5, 2
    manifest = described(n_layer, n_expert, False, True)
    taken = Counter[tuple[str, int]]()
    for layer in range(n_layer):
        cuts = sorted(data.draw(st.sets(st.integers(1, n_expert - 1))))
        for lo, hi in zip([0, *cuts], [*cuts, n_expert], strict=True):
            chunks = chunks_of(manifest, ExpertSlice(((layer, lo, hi),)))
            assert sum(c.size for c in chunks if c.tensor.endswith("weight")) == (hi - lo) * 5 << 20
            taken += places([c for c in chunks if not c.tensor.endswith("scale")])
    expected = places(
        [
            c
            for page in manifest.pages.values()
            for t in page.tensors
            if "_exps." in t.name
            for c in t.chunks()
        ]
    )
    assert taken == Counter({place: n for place, n in expected.items() if not place[0].endswith("scale")})


def test_several_ranges_of_one_layer_and_of_several() -> None:
    manifest = described(3, 6, False, True)
    together = chunks_of(manifest, ExpertSlice(((0, 1, 2), (0, 4, 6), (2, 0, 1))))
    apart = [chunks_of(manifest, ExpertSlice((part,))) for part in ((0, 1, 2), (0, 4, 6), (2, 0, 1))]
    assert set(together) == {chunk for chunks in apart for chunk in chunks}
    assert len(together) == len(set(together))
    assert not [chunk for chunk in together if "attn" in chunk.tensor or "inp" in chunk.tensor]


def test_a_stage_needs_only_its_own_pages() -> None:
    with GgufFile.open(MOE) as model:
        whole = build_manifest(model)
    stage, experts = StageSlice(1, 3, 5), ExpertSlice(((2, 0, 4), (4, 1, 2)))
    assert pages_of(whole.root, stage) == ["common", "blk.1", "blk.2"]
    assert pages_of(whole.root, experts) == ["blk.2", "blk.4"]
    mine = Manifest(whole.root)
    with pytest.raises(NotReadyError, match="page common of model"):
        chunks_of(mine, stage)
    for name in pages_of(whole.root, stage):
        mine.add_page(name, whole.pages[name].encode())
    assert chunks_of(mine, stage) == chunks_of(whole, stage)


def test_the_tail_of_a_tied_model_takes_the_embedding_alone() -> None:
    manifest = described(2, 0, True, False)
    assert pages_of(manifest.root, StageSlice(1, 2, 2)) == ["common", "head", "blk.1", "tail"]
    assert [t.name for t in tensors_of(manifest, StageSlice(1, 2, 2))] == [
        "token_embd.weight",
        "blk.1.attn_q.weight",
        "output_norm.weight",
    ]
    assert pages_of(manifest.root, StageSlice(0, 2, 2)).count("head") == 1


@pytest.mark.parametrize("layers", [(0, 0, 3), (2, 1, 3), (-1, 2, 3), (0, 4, 3), (3, 3, 3)])
def test_stage_slices_that_cannot_be_are_refused(layers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="are not a part of 3 layers"):
        StageSlice(*layers)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(dict(zip(("first", "end", "n_layer"), layers, strict=True)), StageSlice)


@pytest.mark.parametrize(
    "ranges",
    [
        (),
        ((0, 2, 2),),
        ((0, 3, 1),),
        ((-1, 0, 1),),
        ((0, -1, 1),),
        ((1, 0, 1), (0, 0, 1)),
        ((0, 0, 2), (0, 1, 3)),
    ],
)
def test_expert_slices_that_cannot_be_are_refused(ranges: tuple[tuple[int, int, int], ...]) -> None:
    with pytest.raises(ValueError, match=r"sorted, apart and not empty|without a range"):
        ExpertSlice(ranges)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (StageSlice(0, 2, 4), "the model has 3 layers"),
        (ExpertSlice(((3, 0, 1),)), "layer 3 of a model with 3 layers"),
        (ExpertSlice(((0, 2, 5),)), r"experts \[2, 5\) of layer 0, which has 4 experts"),
    ],
)
def test_slices_of_another_model_are_refused(part: Slice, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        chunks_of(described(3, 4, False, False), part)


def test_a_dense_layer_has_no_experts() -> None:
    with pytest.raises(ValueError, match="which has 0 experts"):
        chunks_of(described(3, 0, False, False), ExpertSlice(((0, 0, 1),)))


def test_slices_say_what_they_are() -> None:
    assert str(StageSlice(1, 3, 5)) == "layers [1, 3) of 5"
    assert str(ExpertSlice(((0, 1, 3), (2, 0, 1)))) == "experts 1-2 of layer 0, 0-0 of layer 2"
    assert StageSlice(0, 2, 5).head and not StageSlice(0, 2, 5).tail and StageSlice(2, 5, 5).tail
