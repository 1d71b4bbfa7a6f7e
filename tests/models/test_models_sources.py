"""Sources: the same bytes from a file and from chunks, and no more of either than is needed."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers_models import DENSE, MOE, write_model

from kvasir_peer.errors import ModelFileError, ResourceError
from kvasir_peer.models.gguf import GgufFile
from kvasir_peer.models.manifest import MAX_CHUNK_BYTES, Chunk, Manifest, build_manifest
from kvasir_peer.models.ranges import plan_ranges
from kvasir_peer.models.slices import ExpertSlice, Slice, StageSlice, chunks_of
from kvasir_peer.models.sources import ChunkSource, GgufSource, StoreSource, TensorSource, expert_bytes
from kvasir_peer.models.store import ChunkReader, ChunkStore


@pytest.fixture(scope="module")
def moe() -> Iterator[tuple[GgufFile, Manifest]]:
    with GgufFile.open(MOE) as model:
        yield model, build_manifest(model)


class RecordingReader(ChunkReader):
    """Remembers which chunks were read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: list[bytes] = []

    def read_into(self, digest: bytes, buffer: memoryview, *, verify: bool = False) -> None:
        self.read.append(digest)
        super().read_into(digest, buffer, verify=verify)


def fill(root: Path, model: GgufFile, manifest: Manifest, part: Slice) -> list[Chunk]:
    source = ChunkSource(model, manifest)
    chunks = chunks_of(manifest, part)
    with ChunkStore(root, 1 << 30) as store:
        for chunk in store.missing(chunks):
            store.put(chunk.hash, source.chunk_bytes(chunk.hash))
    return chunks


@pytest.mark.parametrize(
    "part", [StageSlice(0, 2, 5), StageSlice(2, 4, 5), StageSlice(4, 5, 5), StageSlice(0, 5, 5)]
)
def test_a_stage_reads_the_same_from_chunks_and_from_the_file(
    tmp_path: Path, moe: tuple[GgufFile, Manifest], part: StageSlice
) -> None:
    fill(tmp_path, *moe, part)
    whole: TensorSource = GgufSource(MOE)
    mine: TensorSource = StoreSource(ChunkReader(tmp_path), moe[1], part, verify=True)
    assert mine.metadata == whole.metadata and "tokenizer.ggml.tokens" not in mine.metadata
    for name, info in mine.tensors.items():
        theirs = whole.tensors[name]
        assert (info.shape, info.type, info.n_bytes) == (theirs.shape, theirs.type, theirs.n_bytes)
        assert mine.read(name).dtype == np.uint8 and mine.read(name).shape == (info.n_bytes,)
        assert np.array_equal(mine.read(name), whole.read(name))
        if "_exps" in name:
            assert np.array_equal(mine.read_experts(name, 2, 5), whole.read_experts(name, 2, 5))
    mine.release()
    whole.release()
    assert ("token_embd.weight" in mine.tensors) == part.head
    assert ("output.weight" in mine.tensors) == part.tail


def test_a_volunteer_reads_its_experts_and_no_other_chunk(
    tmp_path: Path, moe: tuple[GgufFile, Manifest]
) -> None:
    part = ExpertSlice(((1, 0, 2), (1, 5, 8), (3, 3, 4)))
    chunks = fill(tmp_path, *moe, part)
    reader = RecordingReader(tmp_path)
    source, whole = StoreSource(reader, moe[1], part), GgufSource(MOE)
    assert len(source.tensors) == 6 and source.tensors["blk.1.ffn_up_exps.weight"].shape == (8, 172, 64)
    name = "blk.1.ffn_down_exps.weight"
    assert np.array_equal(source.read_experts(name, 6, 8), whole.read_experts(name, 6, 8))
    each = source.tensors[name].n_bytes // 8
    assert reader.read == [c.hash for c in chunks if c.tensor == name and c.offset >= 6 * each]
    for lo, hi in ((2, 3), (0, 3), (4, 6), (0, 8)):
        with pytest.raises(
            ResourceError, match=r"byte [\d,]+ of blk\.1\.ffn_down_exps.weight and more is not a part"
        ):
            source.read_experts(name, lo, hi)
    with pytest.raises(ResourceError):
        source.read(name)
    with pytest.raises(KeyError):
        source.read("blk.2.ffn_up_exps.weight")
    for lo, hi in ((0, 0), (7, 9), (-1, 2), (3, 2)):
        with pytest.raises(ValueError, match="has 8 experts, no range"):
            source.read_experts(name, lo, hi)


def test_experts_come_out_of_small_tensors_that_are_not_cut_at_them(tmp_path: Path) -> None:
    scale = np.arange(4, dtype=np.float32)
    path = write_model(tmp_path / "m.gguf", n_expert=4, extra={"blk.0.ffn_up_exps.scale": scale})
    part = ExpertSlice(((0, 1, 3),))
    with GgufFile.open(path) as model:
        manifest = build_manifest(model)
        fill(tmp_path / "store", model, manifest, part)
    source = StoreSource(ChunkReader(tmp_path / "store"), manifest, part)
    assert source.read_experts("blk.0.ffn_up_exps.scale", 1, 3).view(np.float32).tolist() == [1.0, 2.0]


def test_absent_chunks_are_named(tmp_path: Path, moe: tuple[GgufFile, Manifest]) -> None:
    part = StageSlice(2, 3, 5)
    chunks = fill(tmp_path, *moe, part)
    source = StoreSource(ChunkReader(tmp_path), moe[1], part)
    with ChunkStore(tmp_path, 1 << 30) as store:
        store.remove(next(c.hash for c in chunks if c.tensor == "blk.2.attn_q.weight"))
    with pytest.raises(ResourceError, match=r"a chunk of blk\.2\.attn_q\.weight has been removed"):
        source.read("blk.2.attn_q.weight")
    with pytest.raises(
        ResourceError, match=r"1 of \d+ chunks of layers \[2, 3\) of 5 .* is of blk\.2\.attn_q"
    ):
        StoreSource(ChunkReader(tmp_path), moe[1], part)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tensor of three chunks."""
    array = np.random.default_rng(1).standard_normal((9 << 18,)).astype(np.float32)
    return write_model(tmp_path_factory.mktemp("large") / "m.gguf", extra={"blk.0.large.weight": array})


def test_a_tensor_of_many_chunks_takes_one_allocation(tmp_path: Path, large: Path) -> None:
    part = StageSlice(0, 1, 3)
    with GgufFile.open(large) as model:
        manifest = build_manifest(model)
        chunks = fill(tmp_path, model, manifest, part)
        expected = bytes(model.tensor_view("blk.0.large.weight"))
    assert sum(chunk.tensor == "blk.0.large.weight" for chunk in chunks) == 3
    source = StoreSource(ChunkReader(tmp_path), manifest, part)
    tracemalloc.start()
    array = source.read("blk.0.large.weight")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert array.tobytes() == expected
    assert peak < array.nbytes + 64_000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_release_gives_the_mapped_pages_back(large: Path) -> None:
    def mapped() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssFile")).split()[1])

    source = GgufSource(large)
    expected = int(source.read("blk.0.large.weight").sum())
    full = mapped()
    source.release()
    assert full - mapped() > 8 << 20
    assert int(source.read("blk.0.large.weight").sum()) == expected  # they come back


def test_a_model_file_serves_its_chunks(moe: tuple[GgufFile, Manifest], large: Path) -> None:
    model, manifest = moe
    source = ChunkSource(model, manifest)
    for chunk in chunks_of(manifest, StageSlice(0, 5, 5)):
        view = source.chunk_bytes(chunk.hash)
        assert view.readonly and len(view) == chunk.size and source.has(chunk.hash)
    with pytest.raises(KeyError):
        source.chunk_bytes(bytes(32))
    assert not source.has(bytes(32))
    with pytest.raises(ModelFileError, match=r"the manifest of .* is of another file"):
        ChunkSource(model, build_manifest(GgufFile.open(DENSE)))
    with GgufFile.open(large) as other, pytest.raises(ModelFileError, match="is of another file"):
        ChunkSource(other, manifest)


def test_serving_does_not_leave_the_model_in_memory(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = []
    with GgufFile.open(large) as model:
        manifest = build_manifest(model)
        source = ChunkSource(model, manifest)
        monkeypatch.setattr(model, "release", lambda: released.append(True))
        chunk = max(chunks_of(manifest, StageSlice(0, 1, 3)), key=lambda chunk: chunk.size)
        for _ in range(40):
            source.chunk_bytes(chunk.hash)
    assert chunk.size == MAX_CHUNK_BYTES and len(released) == 2  # at every 64 MiB of 160


def test_expert_ranges() -> None:
    with GgufFile.open(MOE) as model:
        info = model.tensors["blk.0.ffn_up_exps.weight"]
    assert expert_bytes(info, 1, 3) == (22016, 66048)


# --- ranges for web servers ---


def test_ranges_bring_every_chunk_once_and_join_neighbours(moe: tuple[GgufFile, Manifest]) -> None:
    model, manifest = moe
    chunks = chunks_of(manifest, StageSlice(0, 5, 5))
    for max_bytes, max_gap in ((1 << 30, 1 << 30), (100_000, 0), (1, 0), (1 << 20, 65536)):
        ranges = plan_ranges(model.tensors, chunks, max_bytes=max_bytes, max_gap=max_gap)
        found = [chunk for each in ranges for chunk in each.chunks]
        assert len(found) == len({c.hash for c in chunks}) and {c.hash for c in found} == {
            c.hash for c in chunks
        }
        data = MOE.read_bytes()
        for each in ranges:
            assert each.end - each.start <= max_bytes or len(each.chunks) == 1
            for chunk, view in each.cut(data[each.start : each.end]):
                assert view == model.tensor_view(chunk.tensor)[chunk.offset : chunk.offset + chunk.size]
        if max_gap == 1 << 30:
            assert len(ranges) == 1


def test_ranges_skip_what_nobody_wants(moe: tuple[GgufFile, Manifest]) -> None:
    chunks = chunks_of(moe[1], ExpertSlice(((0, 0, 3), (0, 6, 7))))
    ranges = plan_ranges(moe[0].tensors, chunks, max_bytes=1 << 20, max_gap=1000)
    assert [len(each.chunks) for each in ranges] == [3, 1] * 3  # gate, down, up
    assert sum(each.end - each.start for each in ranges) == sum(chunk.size for chunk in chunks)


def test_ranges_of_a_split_model_stay_in_their_files(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", shard_tensors=4)
    with GgufFile.open(path) as model:
        manifest = build_manifest(model)
        ranges = plan_ranges(model.tensors, chunks_of(manifest, StageSlice(0, 3, 3)), max_bytes=1 << 30)
        assert [each.shard for each in ranges] == [0, 1, 2]
        for each in ranges:
            data = model.paths[each.shard].read_bytes()[each.start : each.end]
            for chunk, view in each.cut(data):
                assert view == model.tensor_view(chunk.tensor)[chunk.offset : chunk.offset + chunk.size]
