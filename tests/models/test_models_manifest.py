"""Manifests: what is in them, that there is one encoding, and that a peer can't send a wrong one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from helpers_models import DATA, DENSE, MOE, write_model
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_peer.errors import ModelFileError, WireError
from kvasir_peer.models import manifest as module
from kvasir_peer.models.gguf import GgufFile
from kvasir_peer.models.manifest import (
    MAX_CHUNK_BYTES,
    LayerPage,
    Manifest,
    PageTensor,
    assemble,
    build_manifest,
    chunk_borders,
    chunk_count,
    decode_page,
    decode_root,
    page_names,
    page_of,
)
from kvasir_peer.models.manifest_cache import MAX_ENTRIES, ManifestCache, cached_manifest
from kvasir_peer.models.ranges import StreamHasher
from kvasir_peer.wire import chunks as wire_chunks


def made(path: Path, **options: object) -> Manifest:
    with GgufFile.open(path) as model:
        return build_manifest(model, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def moe() -> Manifest:
    return made(MOE)


@pytest.mark.parametrize("path", [DENSE, MOE], ids=lambda path: path.stem)
def test_every_chunk_has_the_hash_of_its_bytes(path: Path) -> None:
    manifest = made(path)
    assert list(manifest.pages) == list(page_names(5))
    seen = {}
    with GgufFile.open(path) as model:
        for name, page in manifest.pages.items():
            for tensor in page.tensors:
                assert page_of(tensor.name) == name
                end = 0
                for chunk in tensor.chunks():
                    view = model.tensor_view(tensor.name)[chunk.offset : chunk.offset + chunk.size]
                    assert hashlib.sha256(view).digest() == chunk.hash
                    assert chunk.offset == end and 0 < chunk.size <= MAX_CHUNK_BYTES
                    end += chunk.size
                seen[tensor.name] = end
        assert seen == {name: info.n_bytes for name, info in model.tensors.items()}
        assert manifest.n_bytes == model.n_bytes


def test_the_format_is_the_documented_one(moe: Manifest) -> None:
    """Peers of different versions meet in one swarm: another encoding of the same model would part them."""
    documented = (DATA.parent.parent / "docs" / "models.md").read_text()
    for fact in (
        moe.id,
        moe.root.pages[2].hash.hex(),
        f"{moe.root.pages[2].encoded_bytes} bytes",
        moe.root.encode()[:2].hex(" "),
        moe.pages["blk.0"].encode()[:6].hex(" "),
    ):
        assert fact in documented


def test_each_expert_is_a_chunk_of_its_own(moe: Manifest) -> None:
    stacked = [t for t in moe.pages["blk.2"].tensors if "_exps" in t.name]
    assert len(stacked) == 3
    for tensor in stacked:
        assert [chunk.size for chunk in tensor.chunks()] == [64 * 172 * 2] * 8


def test_pages_tell_the_parts_apart(tmp_path: Path) -> None:
    manifest = made(write_model(tmp_path / "m.gguf", rope_factors=True))
    names = {page: [tensor.name for tensor in found.tensors] for page, found in manifest.pages.items()}
    assert names["common"] == ["rope_freqs.weight"]
    assert names["head"] == ["token_embd.weight"]
    assert names["tail"] == ["output.weight", "output_norm.weight"]
    assert names["blk.1"] == ["blk.1.attn_norm.weight", "blk.1.attn_q.weight", "blk.1.ffn_up.weight"]
    assert not manifest.root.tied
    assert made(write_model(tmp_path / "t.gguf", tied=True)).root.tied


def test_the_root_has_the_metadata_without_the_tokenizer(tmp_path: Path) -> None:
    metadata = made(write_model(tmp_path / "m.gguf")).root.metadata
    assert metadata["llama.block_count"] == 3 and metadata["llama.attention.head_count_kv"] == [2, 2, 2]
    assert metadata["tokenizer.ggml.bos_token_id"] == 1
    assert not {"tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.chat_template"} & metadata.keys()
    assert list(metadata) == sorted(metadata)


def test_the_id_is_the_models_not_the_files(tmp_path: Path) -> None:
    whole = made(write_model(tmp_path / "whole.gguf"))
    split = made(write_model(tmp_path / "split.gguf", shard_tensors=3))
    assert whole.id == split.id == hashlib.sha256(whole.root.encode()).hexdigest()
    assert whole.pages == split.pages
    assert made(tmp_path / "whole.gguf", name="another").id != whole.id
    assert made(tmp_path / "whole.gguf", threads=1).id == whole.id


def test_encoding_and_decoding_gives_the_same(moe: Manifest) -> None:
    again = Manifest.decode(moe.encode(), moe.id)
    assert (again.root, again.pages, again.id) == (moe.root, moe.pages, moe.id)
    assert again.encode() == moe.encode()


def test_a_manifest_may_be_fetched_page_by_page(moe: Manifest) -> None:
    mine = Manifest(decode_root(moe.root.encode(), moe.id))
    mine.add_page("blk.3", moe.pages["blk.3"].encode())
    assert mine.id == moe.id and list(mine.pages) == ["blk.3"]
    assert Manifest.decode(mine.encode()).pages == {"blk.3": moe.pages["blk.3"]}
    with pytest.raises(WireError, match=r"page blk\.2 is not the one|page blk\.2 has"):
        mine.add_page("blk.2", moe.pages["blk.3"].encode())
    with pytest.raises(KeyError):
        mine.add_page("blk.5", moe.pages["blk.3"].encode())


def test_the_wire_and_the_models_mean_the_same_chunk() -> None:
    assert wire_chunks.MAX_CHUNK_BYTES == MAX_CHUNK_BYTES


# --- chunk borders ---


@given(
    experts=st.integers(0, 9),
    each=st.integers(1, 3 * MAX_CHUNK_BYTES) | st.sampled_from([MAX_CHUNK_BYTES, MAX_CHUNK_BYTES + 1]),
)
def test_borders_cover_a_tensor_and_stop_at_experts(experts: int, each: int) -> None:
    name, shape = (
        ("blk.0.ffn_up_exps.weight", (experts, each)) if experts else ("blk.0.ffn_up.weight", (each,))
    )
    total = each * max(1, experts)
    borders = list(chunk_borders(name, shape, total))
    assert len(borders) == chunk_count(name, shape, total)
    end = 0
    for offset, size in borders:
        assert offset == end and 0 < size <= MAX_CHUNK_BYTES
        assert offset // each == (offset + size - 1) // each  # within one expert
        end += size
    assert end == total


def test_a_vector_with_one_number_for_each_expert_is_one_chunk() -> None:
    assert list(chunk_borders("blk.0.ffn_down_exps.scale", (64,), 256)) == [(0, 256)]


# --- what peers may not send ---


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 1 << 20), value=st.integers(1, 255))
def test_a_changed_byte_is_noticed(moe: Manifest, at: int, value: int) -> None:
    data = bytearray(moe.encode())
    data[at % len(data)] ^= value
    with pytest.raises(WireError):
        Manifest.decode(bytes(data), moe.id)


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 1 << 20), value=st.integers(1, 255))
def test_a_changed_root_is_refused_or_another_model(moe: Manifest, at: int, value: int) -> None:
    data = bytearray(moe.root.encode())
    data[at % len(data)] ^= value
    try:
        root = decode_root(bytes(data))
    except WireError as error:
        assert error.code in ("manifest", "oversize")
    else:
        assert Manifest(root).id != moe.id and root.encode() == data


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_root(data)
    with pytest.raises(WireError):
        Manifest.decode(data)


def with_page(root: module.ManifestRoot, name: str, data: bytes, n_bytes: int) -> module.ManifestRoot:
    """A root that lists these bytes as one of its pages: what a lying bridge would send."""
    pages = list(root.pages)
    pages[page_names(root.n_layer).index(name)] = module.PageReference(
        hashlib.sha256(data).digest(), len(data), n_bytes
    )
    return msgspec.structs.replace(root, pages=tuple(pages))


def tensor(
    name: str = "blk.0.w", shape: tuple[int, ...] = (8,), kind: int = 0, chunks: int = 1
) -> PageTensor:
    return PageTensor(name, shape, kind, bytes(32 * chunks))


LIES = {
    "wrong page": (LayerPage("blk.0", (tensor("blk.1.w"),)), "does not belong on page blk.0"),
    "other name": (LayerPage("blk.1", ()), "another name"),
    "not sorted": (LayerPage("blk.0", (tensor("blk.0.b"), tensor("blk.0.a"))), "not sorted"),
    "twice": (LayerPage("blk.0", (tensor(), tensor())), "not sorted"),
    "no name": (LayerPage("blk.0", (tensor(""),)), "empty or too long"),
    "long name": (LayerPage("blk.0", (tensor("blk.0." + "w" * 300),)), "empty or too long"),
    "type": (LayerPage("blk.0", (tensor(kind=5),)), "ggml type 5"),
    "dims": (LayerPage("blk.0", (tensor(shape=(1,) * 5),)), "impossible shape"),
    "no dims": (LayerPage("blk.0", (tensor(shape=()),)), "impossible shape"),
    "negative": (LayerPage("blk.0", (tensor(shape=(-8, -1)),)), "impossible shape"),
    "huge": (LayerPage("blk.0", (tensor(shape=(1 << 62, 1 << 62)),)), "chunks, the page lists 32 bytes"),
    "many experts": (
        LayerPage("blk.0", (tensor("blk.0.w_exps.weight", (1 << 62, 1)),)),
        "chunks, the page lists",
    ),
    "half block": (LayerPage("blk.0", (tensor(shape=(33,), kind=2),)), "whole number of Q4_0 blocks"),
    "too few hashes": (LayerPage("blk.0", (tensor(chunks=0),)), "1 chunks, the page lists 0 bytes"),
    "half a hash": (LayerPage("blk.0", (PageTensor("blk.0.w", (8,), 0, bytes(33)),)), "lists 33 bytes"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_page_that_cannot_be_is_refused(moe: Manifest, lie: str) -> None:
    page, expected = LIES[lie]
    root = with_page(moe.root, "blk.0", page.encode(), 32)
    with pytest.raises(WireError, match=expected) as caught:
        decode_page(page.encode(), root, "blk.0")
    assert str(caught.value).isprintable()


def test_a_page_must_have_the_bytes_that_the_root_says(moe: Manifest) -> None:
    page = LayerPage("blk.0", (tensor(),))
    assert decode_page(page.encode(), with_page(moe.root, "blk.0", page.encode(), 32), "blk.0") == page
    with pytest.raises(WireError, match="32 bytes of tensors, not 31"):
        decode_page(page.encode(), with_page(moe.root, "blk.0", page.encode(), 31), "blk.0")


def test_a_tied_root_with_an_output_is_refused(moe: Manifest) -> None:
    root = msgspec.structs.replace(moe.root, tied=True)
    with pytest.raises(WireError, match="the tail has its own"):
        decode_page(moe.pages["tail"].encode(), root, "tail")


def test_there_is_one_encoding(moe: Manifest) -> None:
    root = moe.root
    unsorted = msgspec.structs.replace(root, metadata=dict(reversed(root.metadata.items())))
    with pytest.raises(WireError, match="not sorted"):
        decode_root(unsorted.encode())
    fields = msgspec.msgpack.decode(root.encode())
    with pytest.raises(WireError, match="one encoding"):
        decode_root(msgspec.msgpack.encode([*fields, "one more field"]))
    page = msgspec.msgpack.encode(["blk.0", [], 1])
    with pytest.raises(WireError, match="one encoding"):
        decode_page(page, with_page(root, "blk.0", page, 0), "blk.0")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"format": 2}, "manifest format 2"),
        ({"n_layer": 0}, "a manifest of 0 layers"),
        ({"n_layer": 4}, "can't have 8 pages"),
        ({"n_layer": 1 << 40}, "can't have 8 pages"),
        ({"architecture": ""}, "names no architecture"),
        ({"metadata": {"k": "x" * (module.MAX_TEXT + 1)}}, "'k' is too long"),
        ({"metadata": {"k": [0] * (module.MAX_LIST + 1)}}, "'k' is too long"),
    ],
)
def test_a_root_that_cannot_be_is_refused(moe: Manifest, change: dict[str, object], expected: str) -> None:
    with pytest.raises(WireError, match=expected):
        decode_root(msgspec.structs.replace(moe.root, **change).encode())


@pytest.mark.parametrize(
    "change", [{"hash": b"short"}, {"encoded_bytes": 0}, {"encoded_bytes": 1 << 30}, {"n_bytes": -1}]
)
def test_an_entry_of_the_root_that_cannot_be_is_refused(moe: Manifest, change: dict[str, object]) -> None:
    pages = (msgspec.structs.replace(moe.root.pages[0], **change), *moe.root.pages[1:])
    with pytest.raises(WireError, match="impossible entry for page common"):
        decode_root(msgspec.structs.replace(moe.root, pages=pages).encode())


def test_too_large_is_refused_before_decoding(moe: Manifest) -> None:
    for decode in (decode_root, Manifest.decode):
        limit = module.MAX_ROOT_BYTES if decode is decode_root else module.MAX_MANIFEST_BYTES
        with pytest.raises(WireError) as caught:
            decode(bytes(limit + 1))
        assert caught.value.code == "oversize"
    with pytest.raises(WireError) as caught:
        decode_page(moe.pages["head"].encode() + b"x", moe.root, "head")
    assert caught.value.code == "oversize"


# --- files that contradict themselves ---


def test_layers_and_tensors_must_agree(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"block_count is 2, but the file has tensors of blk\.2"):
        made(write_model(tmp_path / "few.gguf", block_count=2))
    with pytest.raises(ModelFileError, match=r"block_count is 4, but the file has no tensors of blk\.3"):
        made(write_model(tmp_path / "many.gguf", block_count=4))
    with pytest.raises(ModelFileError, match="block_count is '100000', not a number of layers up to 1024"):
        made(write_model(tmp_path / "absurd.gguf", block_count=100_000))


def test_unknown_tensors_reach_every_stage(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", extra={"odd.weight": np.zeros(8, np.float32)})
    assert [t.name for t in made(path).pages["common"].tensors] == ["odd.weight"]


# --- making one ---


def test_progress_reaches_the_end_and_may_stop_the_work() -> None:
    told: list[tuple[int, int]] = []
    with GgufFile.open(DENSE) as model:
        build_manifest(model, progress=lambda done, total: told.append((done, total)))
        assert told[-1] == (model.n_bytes, model.n_bytes)
        assert [done for done, _ in told] == sorted(done for done, _ in told)

        def stop(done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            build_manifest(model, progress=stop)


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(1, 200_000), min_size=1, max_size=60))
def test_hashing_a_stream_gives_the_same_manifest(sizes: list[int]) -> None:
    def pieces(data: bytes) -> Iterator[bytes]:
        at = turn = 0
        while at < len(data):
            size = sizes[turn % len(sizes)] + 4096
            yield data[at : at + size]
            at += size
            turn += 1

    with GgufFile.open(MOE) as model:
        hasher = StreamHasher(model.tensors.values())
        for piece in pieces(MOE.read_bytes()[hasher.start :]):
            hasher.feed(piece)
        streamed = assemble(
            model.metadata,
            model.tensors,
            hasher.finish(),
            name=str(model.metadata["general.name"]),
            where="m",
        )
    assert streamed.id == made(MOE).id


def test_a_stream_that_ends_early_gives_no_manifest() -> None:
    with GgufFile.open(DENSE) as model:
        hasher = StreamHasher(model.tensors.values())
    hasher.feed(DENSE.read_bytes()[hasher.start : -1])
    with pytest.raises(ModelFileError, match="ended at byte"):
        hasher.finish()


# --- the cache ---


def test_a_second_start_hashes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "m.gguf")
    cache = ManifestCache(tmp_path / "cache")
    with GgufFile.open(path) as model:
        first = cache.for_file(model)
    monkeypatch.setattr(module, "_sha256", None)
    with GgufFile.open(path) as model:
        again = cached_manifest(model, tmp_path / "cache")
    assert (again.id, again.pages) == (first.id, first.pages)


def test_a_changed_file_is_hashed_again(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    cache = ManifestCache(tmp_path / "cache")
    with GgufFile.open(path) as model:
        first = cache.for_file(model)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    with GgufFile.open(path) as model:
        second = cache.for_file(model)
        assert cache.for_file(model, name="mine").root.name == "mine"
    assert second.id != first.id
    assert second.id == made(path).id


def test_a_damaged_entry_is_made_again(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    cache = ManifestCache(tmp_path / "cache")
    with GgufFile.open(path) as model:
        first = cache.for_file(model)
        (entry,) = (tmp_path / "cache").iterdir()
        for damage in (entry.read_bytes()[:-5], b"", made(DENSE).encode()):
            entry.write_bytes(damage)
            assert cache.for_file(model).id == first.id
            assert entry.read_bytes() == first.encode()


def test_the_cache_keeps_a_bounded_number(tmp_path: Path) -> None:
    manifest = made(write_model(tmp_path / "m.gguf"))
    cache = ManifestCache(tmp_path / "cache")
    for turn in range(MAX_ENTRIES + 3):
        cache.put(turn, manifest)
    assert len(list((tmp_path / "cache").iterdir())) == MAX_ENTRIES


def test_a_cache_that_cannot_be_written_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_bytes(b"a file, not a folder")
    path = write_model(tmp_path / "m.gguf")
    with GgufFile.open(path) as model:
        assert ManifestCache(tmp_path / "cache").for_file(model).id == made(path).id
    assert "the next start hashes again" in caplog.text
