"""The chunk store: whole chunks only, within its limits, whatever happens."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvasir_peer.errors import ResourceError, UsageError
from kvasir_peer.models import store as module
from kvasir_peer.models.manifest import MAX_CHUNK_BYTES, Chunk
from kvasir_peer.models.store import ChunkReader, ChunkStore, DamagedChunkError


def data_of(number: int, size: int = 1000) -> bytes:
    return number.to_bytes(4, "big") * (size // 4)


def chunk_of(number: int, size: int = 1000) -> Chunk:
    return Chunk(hashlib.sha256(data_of(number, size)).digest(), size, f"t{number}", 0)


def put(store: ChunkStore, number: int, size: int = 1000) -> bytes:
    digest = chunk_of(number, size).hash
    store.put(digest, data_of(number, size))
    return digest


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore(tmp_path / "store", 10_000) as store:
        yield store


def files(store: ChunkReader) -> list[Path]:
    return [path for path in store.root.rglob("*") if path.is_file() and path.name != "lock"]


def test_what_is_put_is_read(store: ChunkStore) -> None:
    digest = chunk_of(1).hash
    assert not store.has(digest)
    with pytest.raises(KeyError):
        store.chunk_bytes(digest)
    assert store.put(digest, memoryview(data_of(1)))
    assert not store.put(digest, bytearray(data_of(1)))
    for reader in (store, ChunkReader(store.root)):
        assert reader.has(digest)
        assert reader.chunk_bytes(digest) == data_of(1) and reader.chunk_bytes(digest).readonly
        buffer = memoryview(bytearray(1000))
        reader.read_into(digest, buffer, verify=True)
        assert buffer == data_of(1)
    assert files(store) == [store.path(digest)]


def test_missing_chunks_are_told_once_each(store: ChunkStore) -> None:
    put(store, 1)
    wanted = [chunk_of(2), chunk_of(1), chunk_of(2), chunk_of(3)]
    for reader in (store, ChunkReader(store.root)):
        assert reader.missing(wanted) == [chunk_of(2), chunk_of(3)]


def test_wrong_bytes_are_refused_and_counted(store: ChunkStore) -> None:
    digest = chunk_of(1).hash
    for wrong in (data_of(2), b"", data_of(1)[:-1], bytes(MAX_CHUNK_BYTES + 1)):
        with pytest.raises(ValueError, match="that are not chunk"):
            store.put(digest, wrong)
    too_large = bytes(MAX_CHUNK_BYTES + 1)
    with pytest.raises(ValueError, match="4,194,305 bytes"):
        store.put(hashlib.sha256(too_large).digest(), too_large)
    assert store.statistics().refused_chunks == 5
    assert not store.has(digest) and not files(store)


def test_the_least_recently_used_go_first(store: ChunkStore) -> None:
    digests = [put(store, number) for number in range(10)]
    store.chunk_bytes(digests[0])  # used: now the last to go
    put(store, 10)
    put(store, 11)
    assert [store.has(digest) for digest in digests] == [True, False, False, *[True] * 7]
    statistics = store.statistics()
    assert (statistics.chunks, statistics.bytes) == (10, 10_000)
    assert (statistics.evicted_chunks, statistics.evicted_bytes) == (2, 2000)
    assert (statistics.added_chunks, statistics.added_bytes) == (12, 12_000)
    assert len(files(store)) == 10


def test_pinned_chunks_stay(store: ChunkStore) -> None:
    digests = [put(store, number) for number in range(10)]
    store.pin("plan", digests[:5])
    store.pin("other", digests[4:8])
    for number in range(10, 14):
        put(store, number)
    assert all(store.has(digest) for digest in digests[:8])
    store.unpin("plan")
    store.unpin("nobody")
    for number in range(20, 26):
        put(store, number)
    assert [store.has(digest) for digest in digests] == [False] * 4 + [True] * 4 + [False] * 2
    assert store.statistics().pinned_bytes == 4000
    store.pin("other", [])  # pinning again lets go of the first ones
    assert store.statistics().pinned_bytes == 0


def test_chunks_may_be_pinned_before_they_come(store: ChunkStore) -> None:
    store.pin("plan", [chunk_of(number).hash for number in range(8)])
    digests = [put(store, number) for number in range(8)]
    for number in range(10, 20):
        put(store, number)
    assert all(store.has(digest) for digest in digests)


def test_no_room_is_refused_with_the_numbers_and_evicts_nothing(store: ChunkStore) -> None:
    digests = [put(store, number) for number in range(10)]
    store.pin("plan", digests[:9])
    with pytest.raises(ResourceError, match=r"limit of 10\.0 kB, 9\.0 kB are in use; raise the limit"):
        put(store, 50, 2000)
    assert all(store.has(digest) for digest in digests)
    assert len(files(store)) == 10


def test_a_slice_without_room_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    with ChunkStore(tmp_path / "store", 100 << 20) as store:
        pinned = put(store, 1, 4 << 20)
        store.pin("plan", [pinned])
        put(store, 2, 4 << 20)  # may go
        store.ensure_room([chunk_of(number, 4 << 20) for number in range(2, 26)])
        with pytest.raises(
            ResourceError, match=r"takes 104\.9 MB, 100\.7 MB of them still to be fetched"
        ) as caught:
            store.ensure_room([chunk_of(number, 4 << 20) for number in range(2, 27)])
        assert "limit of 104.9 MB leaves room for 96.5 MB" in str(caught.value)
        assert caught.value.exit_status == 2


def disk_with(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=free))


def test_a_short_disk_is_refused_with_the_numbers(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = put(store, 1)
    disk_with(module.MIN_DISK_FREE + 1500, monkeypatch)
    store.ensure_room([chunk_of(2), chunk_of(3)])  # if the first goes
    with pytest.raises(ResourceError, match=r"the disk has room for 2\.5 kB \(268\.4 MB stay free\)"):
        store.ensure_room([chunk_of(number) for number in range(2, 6)])
    disk_with(module.MIN_DISK_FREE - 1, monkeypatch)
    with pytest.raises(ResourceError, match=r"the disk has 268\.4 MB free, of which 268\.4 MB stay free"):
        put(store, 2)
    assert store.has(digest)
    assert store.statistics().disk_free_bytes == 0
    disk_with(module.MIN_DISK_FREE + 10, monkeypatch)
    put(store, 3)
    assert not store.has(digest)  # it had to go


@pytest.mark.parametrize(
    ("code", "text"), [(errno.ENOSPC, "the disk is full"), (errno.EIO, "Input/output error")]
)
def test_a_disk_error_leaves_nothing(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch, code: int, text: str
) -> None:
    def fail(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken:
        broken.setattr(module, "_sync", fail)
        with pytest.raises(ResourceError, match=text):
            put(store, 1)
    assert not files(store) and store.statistics().bytes == 0
    put(store, 1)  # its bytes are not counted as being written any more
    store.limit_bytes = 1000
    put(store, 2)
    assert store.statistics().chunks == 1


KILLED_WHILE_WRITING = """
import hashlib, os, signal, sys
from kvasir_peer.models import store
chunks = store.ChunkStore(sys.argv[1], 1 << 20)
data = b"whole" * 100
chunks.put(hashlib.sha256(data).digest(), data)
store._sync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
chunks.put(hashlib.sha256(b"half").digest(), b"half")
"""


def test_a_crash_leaves_no_half_chunk(tmp_path: Path) -> None:
    root = tmp_path / "store"
    done = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, str(root)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert len(list((root / "partial").iterdir())) == 1  # it died while writing
    with ChunkStore(root, 1 << 20) as store:
        assert [entry.size for entry in store.listing()] == [500]
        assert not store.has(hashlib.sha256(b"half").digest())
        assert not list((root / "partial").iterdir())


def test_a_restart_keeps_chunks_and_their_order(tmp_path: Path) -> None:
    with ChunkStore(tmp_path, 10_000) as store:
        digests = [put(store, number) for number in range(3)]
        for age, digest in enumerate(digests):
            os.utime(store.path(digest), (1000 - age, 1000 - age))
        (store.root / "chunks" / "notes.txt").write_text("not ours")
        (store.path(digests[0]).parent / "readme").write_text("not ours")
        store.path(chunk_of(9).hash).parent.mkdir(exist_ok=True)
        store.path(chunk_of(9).hash).touch()  # what a file system may leave after the power failed
    with ChunkStore(tmp_path, 10_000) as store:
        assert [entry.hash for entry in store.listing()] == digests[::-1]
        assert [entry.last_used for entry in store.listing()] == [998, 999, 1000]
        assert store.statistics().bytes == 3000
        assert not store.path(chunk_of(9).hash).exists()
        assert (store.root / "chunks" / "notes.txt").exists()
        store.evict(1)
        assert [entry.hash for entry in store.listing()] == digests[1::-1]


def test_one_writer_only(store: ChunkStore) -> None:
    with pytest.raises(UsageError, match=rf"another kvasir-peer uses this store \(process {os.getpid()}\)"):
        ChunkStore(store.root, 10_000)
    put(store, 1)
    store.close()
    store.close()
    with ChunkStore(store.root, 10_000) as next_one:
        assert next_one.has(chunk_of(1).hash)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ResourceError, match="the store can't be used: Not a directory"):
        ChunkStore(tmp_path / "file" / "store", 1000)


@pytest.mark.parametrize("damage", [data_of(2), data_of(1)[:-4], data_of(1) + b"more", b""])
def test_damage_on_disk_is_found_and_removed(store: ChunkStore, damage: bytes) -> None:
    digest = put(store, 1)
    store.path(digest).write_bytes(damage)
    with pytest.raises(DamagedChunkError, match=r"is damaged on disk .* must be fetched again"):
        ChunkReader(store.root).read_into(digest, memoryview(bytearray(1000)), verify=True)
    assert store.path(digest).exists()  # a reader removes nothing
    with pytest.raises(KeyError):
        store.chunk_bytes(digest)
    assert not store.has(digest) and not files(store)
    assert store.statistics().damaged_chunks == 1 and store.statistics().bytes == 0
    put(store, 1)
    assert store.chunk_bytes(digest) == data_of(1)


def test_a_file_that_somebody_removed_is_missing(store: ChunkStore) -> None:
    digest = put(store, 1)
    store.path(digest).unlink()
    store.pin("plan", [digest])
    with pytest.raises(KeyError):
        store.read_into(digest, memoryview(bytearray(1000)))
    assert store.missing([chunk_of(1)]) == [chunk_of(1)] and store.statistics().bytes == 0


def test_chunks_can_be_removed(store: ChunkStore) -> None:
    digests = [put(store, number) for number in range(4)]
    store.pin("plan", digests[:2])
    store.remove(digests[0])
    store.remove(digests[0])
    assert store.evict(10_000) == 2000
    assert [(entry.hash, entry.pinned) for entry in store.listing()] == [(digests[1], True)]


def test_many_threads_keep_the_books_straight(tmp_path: Path) -> None:
    with ChunkStore(tmp_path, 8000) as store, ThreadPoolExecutor(8) as pool:

        def work(number: int) -> None:
            digest = put(store, number % 12)
            with contextlib.suppress(KeyError):  # evicted by another thread meanwhile
                assert store.chunk_bytes(digest) == data_of(number % 12)

        list(pool.map(work, range(200)))
        statistics = store.statistics()
        assert statistics.bytes == sum(path.stat().st_size for path in files(store)) <= 8000
        assert statistics.bytes == statistics.added_bytes - statistics.evicted_bytes
        assert statistics.damaged_chunks == 0
        assert store._reserved == 0
