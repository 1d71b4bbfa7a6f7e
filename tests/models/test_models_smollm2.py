"""A real quantised chat model through the models room."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from kvasir_peer.models.gguf import GgufArray, GgufFile
from kvasir_peer.models.manifest import Manifest, build_manifest
from kvasir_peer.models.slices import StageSlice, bytes_of, chunks_of
from kvasir_peer.models.sources import ChunkSource, GgufSource, StoreSource
from kvasir_peer.models.store import ChunkReader, ChunkStore


def test_the_header_of_a_real_model_is_read_at_once(smollm2_path: Path) -> None:
    spent = []
    for _ in range(5):
        start = time.thread_time()  # processor time: other work on the machine doesn't count
        with GgufFile.open(smollm2_path) as model:
            spent.append(time.thread_time() - start)
    assert min(spent) < 0.05
    tokens = model.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, GgufArray) and len(tokens) == 49_152 and tokens[1] == "<|im_start|>"


def test_a_stage_holds_its_part_and_no_more(smollm2_path: Path, tmp_path: Path) -> None:
    with GgufFile.open(smollm2_path) as model:
        manifest = build_manifest(model)
        assert manifest.root.tied and manifest.root.n_layer == 30
        parts = [StageSlice(0, 12, 30), StageSlice(12, 24, 30), StageSlice(24, 30, 30)]
        embedding = model.tensors["token_embd.weight"].n_bytes
        assert (
            sum(bytes_of(manifest, part) for part in parts) == model.n_bytes + embedding
        )  # at head and tail
        source = ChunkSource(model, manifest)
        chunks = chunks_of(manifest, parts[1])
        with ChunkStore(tmp_path, bytes_of(manifest, parts[1])) as store:
            store.ensure_room(chunks)
            for chunk in store.missing(chunks):
                store.put(chunk.hash, source.chunk_bytes(chunk.hash))
            assert {entry.hash for entry in store.listing()} == {chunk.hash for chunk in chunks}
    decoded = Manifest.decode(manifest.encode(), manifest.id)
    mine, whole = StoreSource(ChunkReader(tmp_path), decoded, parts[1]), GgufSource(smollm2_path)
    assert mine.metadata == whole.metadata
    assert len(mine.tensors) == 12 * 9
    for name in mine.tensors:
        assert np.array_equal(mine.read(name), whole.read(name))
    whole.close()
