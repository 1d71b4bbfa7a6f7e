"""Chunks on disk, named by their SHA-256.

::

    ROOT/chunks/ab/abcdef...   one file for each chunk, named by its hash in hex
    ROOT/partial/              chunks being written; emptied when the store is opened
    ROOT/lock                  held by the one process that writes

A chunk is checked against its hash, written aside, synced and then renamed, so that a file with a chunk's name is a
whole chunk whenever the power fails. What was used last is remembered in the files' modification times.

:class:`ChunkStore` is for the agent: it alone adds and removes. :class:`ChunkReader` is for everybody else who may
read the folder, such as the engine process. Both may be called from any thread, and both wait for the disk: not from
an event loop.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from kvasir_peer.errors import ResourceError, UsageError
from kvasir_peer.models.manifest import HASH_BYTES, MAX_CHUNK_BYTES, Chunk

MIN_DISK_FREE = (
    256 << 20
)  # bytes of the disk that the store leaves free: a full disk hurts the machine's owner

_sync = getattr(
    os, "fdatasync", os.fsync
)  # a new file's size is part of its data for both; macOS has fsync alone


@dataclass(frozen=True)
class StoredChunk:
    """One chunk in a store.

    Attributes:
        hash: its SHA-256.
        size: bytes.
        last_used: seconds since 1970.
        pinned: whether it may not be evicted now.
    """

    hash: bytes
    size: int
    last_used: float
    pinned: bool


@dataclass(frozen=True)
class StoreStatistics:
    """What a store holds, and what it has done since it was opened.

    Attributes:
        chunks: chunks held.
        bytes: their bytes.
        pinned_bytes: those that may not be evicted now.
        limit_bytes: the most it may hold.
        disk_free_bytes: free on its disk, without what is left to the owner.
        added_chunks: chunks put in.
        added_bytes: their bytes.
        evicted_chunks: chunks thrown out for room.
        evicted_bytes: their bytes.
        refused_chunks: chunks that came with the wrong bytes.
        damaged_chunks: chunks found damaged on disk, and removed.
    """

    chunks: int
    bytes: int
    pinned_bytes: int
    limit_bytes: int
    disk_free_bytes: int
    added_chunks: int
    added_bytes: int
    evicted_chunks: int
    evicted_bytes: int
    refused_chunks: int
    damaged_chunks: int


class DamagedChunkError(ResourceError):
    """A chunk on disk is not what it was; a store has removed it already."""


class ChunkReader:
    """Reads the chunks of a store's folder; changes nothing, and needs no lock.

    Args:
        root: the store's folder.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._chunks = self.root / "chunks"

    def path(self, digest: bytes) -> Path:
        """Where a chunk lies, or would lie."""
        name = digest.hex()
        return self._chunks / name[:2] / name

    def has(self, digest: bytes) -> bool:
        """Whether the chunk is here."""
        return self.path(digest).exists()

    def missing(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Those chunks that aren't here, each hash once, in order."""
        return [
            chunk for chunk in {chunk.hash: chunk for chunk in chunks}.values() if not self.has(chunk.hash)
        ]

    def read_into(self, digest: bytes, buffer: memoryview, *, verify: bool = False) -> None:
        """Read a chunk straight into a buffer of its size.

        Args:
            digest: its hash.
            buffer: writable bytes, as many as the chunk has.
            verify: check the hash again, against a disk that lies.

        Raises:
            KeyError: the chunk isn't here.
            ResourceError: the file is damaged, or can't be read.
        """
        try:
            fd = os.open(self.path(digest), os.O_RDONLY)
        except FileNotFoundError:
            raise KeyError(digest.hex()) from None
        except OSError as error:  # says nothing about the chunk: too many open files, a changed mode
            raise ResourceError(f"{self.path(digest)}: can't be read: {error.strerror}") from None
        try:
            at = 0
            if os.fstat(fd).st_size == len(buffer):
                while at < len(buffer) and (count := os.readv(fd, [buffer[at:]])):
                    at += count
        except OSError as error:
            self._damaged(digest, error.strerror or str(error))
        finally:
            os.close(fd)
        if at < len(buffer):
            self._damaged(digest, f"it should have {len(buffer):,} bytes")
        if verify and hashlib.sha256(buffer).digest() != digest:
            self._damaged(digest, "its bytes have changed")

    def chunk_bytes(self, digest: bytes) -> memoryview:
        """The bytes of a chunk, for another peer, checked once more.

        Raises:
            KeyError: the chunk isn't here, or no longer whole.
            ResourceError: the disk can't be read.
        """
        try:
            size = self.path(digest).stat().st_size
        except FileNotFoundError:
            raise KeyError(digest.hex()) from None
        buffer = memoryview(bytearray(min(size, MAX_CHUNK_BYTES)))
        try:
            self.read_into(digest, buffer, verify=True)
        except DamagedChunkError:
            raise KeyError(digest.hex()) from None
        return buffer.toreadonly()

    def _damaged(self, digest: bytes, why: str) -> NoReturn:
        raise DamagedChunkError(
            f"{self.root}: chunk {digest.hex()[:12]} is damaged on disk ({why}); it must be fetched again"
        )


@dataclass
class _Entry:
    size: int
    last_used: float


class ChunkStore(ChunkReader):
    """The store of one peer: adds, evicts, keeps to its limit. Close it, or use it as a context manager.

    Chunks that nobody has pinned are evicted, the least recently used first, when room is needed.

    Args:
        root: its folder, made if absent.
        limit_bytes: the most that its chunks may take.
        min_disk_free: bytes of the disk that stay free.

    Raises:
        UsageError: another process writes to this store.
        ResourceError: the folder can't be used.
    """

    def __init__(
        self, root: str | os.PathLike[str], limit_bytes: int, *, min_disk_free: int = MIN_DISK_FREE
    ) -> None:
        super().__init__(root)
        self.limit_bytes = limit_bytes
        self._min_disk_free = min_disk_free
        self._partial = self.root / "partial"
        self._mutex = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._used = 0
        self._reserved = 0  # bytes of chunks that are being written
        self._pins: dict[str, frozenset[bytes]] = {}
        self._pin_count: Counter[bytes] = Counter()
        self._added, self._added_bytes = 0, 0
        self._evicted, self._evicted_bytes = 0, 0
        self._refused, self._found_damaged = 0, 0
        self._lock_fd: int | None = None
        try:
            self._chunks.mkdir(parents=True, exist_ok=True)
            self._partial.mkdir(exist_ok=True)
            self._lock()
            self._scan()
        except OSError as error:
            self.close()
            raise ResourceError(f"{self.root}: the store can't be used: {error.strerror or error}") from None
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        self._lock_fd = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock_fd, 20, 0).decode("ascii", "replace").strip()
            raise UsageError(
                f"{self.root}: another kvasir-peer uses this store{f' (process {owner})' if owner else ''}; "
                "stop it, or give this one a home of its own with --home"
            ) from None
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, b"%d\n" % os.getpid(), 0)

    def _scan(self) -> None:
        """Learn what is here; drop what a crash has left."""
        for left in self._partial.iterdir():
            left.unlink()
        found: list[tuple[float, bytes, int]] = []
        for folder in os.scandir(self._chunks):
            if not folder.is_dir(follow_symlinks=False):
                continue
            for file in os.scandir(folder.path):
                digest = _digest(file.name)
                if digest is None or file.name[:2] != folder.name or not file.is_file(follow_symlinks=False):
                    continue  # not ours
                status = file.stat(follow_symlinks=False)
                if 0 < status.st_size <= MAX_CHUNK_BYTES:
                    found.append((status.st_mtime, digest, status.st_size))
                else:
                    Path(file.path).unlink()
        for last_used, digest, size in sorted(found):
            self._entries[digest] = _Entry(size, last_used)
            self._used += size

    # --- reading ---

    def has(self, digest: bytes) -> bool:
        with self._mutex:
            return digest in self._entries

    def read_into(self, digest: bytes, buffer: memoryview, *, verify: bool = False) -> None:
        try:
            super().read_into(digest, buffer, verify=verify)
        except KeyError:
            self._forget(digest)  # somebody has removed the file
            raise
        with self._mutex:
            self._touch(digest)

    def listing(self) -> list[StoredChunk]:
        """All chunks, the least recently used first."""
        with self._mutex:
            return [
                StoredChunk(digest, entry.size, entry.last_used, self._pin_count[digest] > 0)
                for digest, entry in self._entries.items()
            ]

    def statistics(self) -> StoreStatistics:
        """What the store holds and has done."""
        with self._mutex:
            return StoreStatistics(
                chunks=len(self._entries),
                bytes=self._used,
                pinned_bytes=self._pinned_bytes(),
                limit_bytes=self.limit_bytes,
                disk_free_bytes=max(0, self._disk_room()),
                added_chunks=self._added,
                added_bytes=self._added_bytes,
                evicted_chunks=self._evicted,
                evicted_bytes=self._evicted_bytes,
                refused_chunks=self._refused,
                damaged_chunks=self._found_damaged,
            )

    # --- adding ---

    def ensure_room(self, chunks: Iterable[Chunk]) -> None:
        """Refuse, before anything is fetched, a slice that has no place here.

        Raises:
            ResourceError: with the numbers.
        """
        with self._mutex:
            wanted = {chunk.hash: chunk.size for chunk in chunks}
            need = sum(size for digest, size in wanted.items() if digest not in self._entries)
            kept = self._reserved + sum(
                entry.size
                for digest, entry in self._entries.items()
                if digest in wanted or self._pin_count[digest]
            )
            evictable = self._used + self._reserved - kept
            whole = sum(wanted.values())
            if need + kept > self.limit_bytes:
                raise ResourceError(
                    f"{self.root}: the slice takes {_size(whole)}, {_size(need)} of them still to be fetched, but the "
                    f"store's limit of {_size(self.limit_bytes)} leaves room for {_size(self.limit_bytes - kept)}; "
                    "raise the limit or take a smaller slice"
                )
            room = self._disk_room() + evictable
            if need > room:
                raise ResourceError(
                    f"{self.root}: {_size(need)} are still to be fetched, but the disk has room for {_size(room)} "
                    f"({_size(self._min_disk_free)} stay free); free some disk or take a smaller slice"
                )

    def put(self, digest: bytes, data: bytes | bytearray | memoryview) -> bool:
        """Check a chunk and keep it.

        Args:
            digest: the SHA-256 that it must have.
            data: its bytes.

        Returns:
            Whether it was new.

        Raises:
            ValueError: the bytes are not those of this chunk.
            ResourceError: no room, with the numbers; or the disk gave an error.
        """
        size = len(data)
        if not 0 < size <= MAX_CHUNK_BYTES or hashlib.sha256(data).digest() != digest:
            with self._mutex:
                self._refused += 1
            raise ValueError(f"{size:,} bytes that are not chunk {digest.hex()[:12]}")
        with self._mutex:
            if digest in self._entries:
                self._touch(digest)
                return False
            self._make_room(size)
            self._reserved += size
        try:
            new = self._write(digest, data)
        except OSError as error:
            raise ResourceError(
                f"{self.root}: can't write a chunk of {size:,} bytes: {_reason(error)}"
            ) from None
        finally:
            with self._mutex:
                self._reserved -= size
        return new

    def _write(self, digest: bytes, data: bytes | bytearray | memoryview) -> bool:
        fd, name = tempfile.mkstemp(dir=self._partial)
        aside = Path(name)
        try:
            with os.fdopen(fd, "wb", buffering=0) as file:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
                _sync(file.fileno())
            path = self.path(digest)
            path.parent.mkdir(exist_ok=True)
            with self._mutex:
                if digest in self._entries:  # another thread was quicker with the same chunk
                    return False
                aside.replace(path)
                self._entries[digest] = _Entry(len(data), time.time())
                self._used += len(data)
                self._added += 1
                self._added_bytes += len(data)
                return True
        finally:
            aside.unlink(missing_ok=True)

    # --- keeping and evicting ---

    def pin(self, owner: str, digests: Iterable[bytes]) -> None:
        """Keep chunks, those that are here and those that will come, until the owner unpins or pins others.

        Pinning counts as using them.
        """
        wanted = frozenset(digests)
        with self._mutex:
            self._unpin(owner)
            self._pins[owner] = wanted
            self._pin_count.update(wanted)
            for digest in wanted & self._entries.keys():
                self._touch(digest)

    def unpin(self, owner: str) -> None:
        """Let the owner's chunks be evicted; does nothing for an owner without pins."""
        with self._mutex:
            self._unpin(owner)

    def _unpin(self, owner: str) -> None:
        for digest in self._pins.pop(owner, ()):
            self._pin_count[digest] -= 1
            if not self._pin_count[digest]:
                del self._pin_count[digest]

    def evict(self, n_bytes: int) -> int:
        """Throw out unpinned chunks, least recently used first, until so many bytes are free of them.

        Returns:
            Bytes that were freed; less than asked for when all that is left is pinned.
        """
        with self._mutex:
            return self._evict(n_bytes)

    def remove(self, digest: bytes) -> None:
        """Throw out one chunk, pinned or not; does nothing where it isn't here."""
        with self._mutex:
            if digest in self._entries:
                self._drop(digest)

    def close(self) -> None:
        """Let another process use the store."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside, with the mutex held ---

    def _touch(self, digest: bytes) -> None:
        entry = self._entries.get(digest)
        if entry is None:
            return
        entry.last_used = time.time()
        self._entries.move_to_end(digest)
        with contextlib.suppress(FileNotFoundError):  # removed by hand: found out when it is read
            os.utime(self.path(digest), (entry.last_used, entry.last_used))

    def _pinned_bytes(self) -> int:
        return sum(self._entries[digest].size for digest in self._pin_count if digest in self._entries)

    def _disk_room(self) -> int:
        """Bytes that may still be written to the disk; below 0 when it is fuller than it should be."""
        return shutil.disk_usage(self.root).free - self._reserved - self._min_disk_free

    def _make_room(self, size: int) -> None:
        """Evict what has to go for a chunk; nothing when that wouldn't be enough."""
        over = self._used + self._reserved + size - self.limit_bytes
        short = size - self._disk_room()
        if over <= 0 and short <= 0:
            return
        pinned = self._pinned_bytes()
        evictable = self._used - pinned
        if over > evictable:
            raise ResourceError(
                f"{self.root}: no room for a chunk of {size:,} bytes: of the limit of {_size(self.limit_bytes)}, "
                f"{_size(pinned + self._reserved)} are in use; raise the limit or take a smaller slice"
            )
        if short > evictable:
            raise ResourceError(
                f"{self.root}: no room for a chunk of {size:,} bytes: the disk has "
                f"{_size(shutil.disk_usage(self.root).free)} free, of which {_size(self._min_disk_free)} stay free; "
                "free some disk or take a smaller slice"
            )
        self._evict(max(over, short))

    def _evict(self, n_bytes: int) -> int:
        freed = 0
        victims = []
        for digest, entry in self._entries.items():
            if freed >= n_bytes:
                break
            if not self._pin_count[digest]:
                victims.append(digest)
                freed += entry.size
        for digest in victims:
            self._drop(digest)
        self._evicted += len(victims)
        self._evicted_bytes += freed
        return freed

    def _drop(self, digest: bytes) -> int:
        size = self._entries.pop(digest).size
        self._used -= size
        self.path(digest).unlink(missing_ok=True)
        return size

    def _forget(self, digest: bytes) -> None:
        with self._mutex:
            if digest in self._entries and not self.path(digest).exists():
                self._drop(digest)

    def _damaged(self, digest: bytes, why: str) -> NoReturn:
        with self._mutex:
            self._found_damaged += 1
            if digest in self._entries:
                self._drop(digest)
        super()._damaged(digest, why)


def _digest(name: str) -> bytes | None:
    try:
        digest = bytes.fromhex(name)
    except ValueError:
        return None
    return digest if len(digest) == HASH_BYTES and name == digest.hex() else None


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f} MB" if abs(n_bytes) >= 100_000 else f"{n_bytes / 1e3:,.1f} kB"


def _reason(error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "the disk is full; free some, or lower the store's limit" if full else error.strerror or str(error)
