"""Weights between peers: chunks asked for by hash, checked, and put into the store as they come.

A download that breaks goes on where it stopped, since every chunk that was verified is in the store already. Sources
are tried one after the other: each gives what it has, and is left for the next when it lacks the rest, lies or stalls.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import trio

from kvasir_peer.errors import KvasirError, LinkError, ModelFileError, RefusedError, WireError
from kvasir_peer.wire import chunks

if TYPE_CHECKING:
    from kvasir_peer.models.manifest import Chunk
    from kvasir_peer.models.store import ChunkStore
    from kvasir_peer.net.link import Link
    from kvasir_peer.net.node import Node

logger = logging.getLogger(__name__)

STALL_SECONDS = 30.0  # without a whole chunk of at most 4 MiB: under 140 KB/s, another source is worth a try
OUTSTANDING_BYTES = 16 << 20  # wanted and not yet here; keeps a fast link busy, bounds memory at both ends
PERMIT_SECONDS = 10.0  # for the first frame of an asker that must show a permit
RETRY_DELAYS = (0.2, 1.0, 2.0, 5.0, 10.0, 10.0)  # seconds before each new link after a break


class ChunkBytes(Protocol):
    """Where a peer takes the chunks that it serves from."""

    def chunk_bytes(self, digest: bytes) -> memoryview | bytes:
        """The chunk's bytes; KeyError when this peer does not have it."""
        ...


@dataclass(frozen=True)
class WebSource:
    """The model's file on a web server that answers Range requests."""

    url: str


PeerSource = tuple[str, Sequence[str]]  # peer id, addresses


@dataclass(frozen=True)
class TransferProgress:
    """How far a download is."""

    done_bytes: int
    total_bytes: int
    bytes_per_second: float
    seconds_left: float


async def serve_chunks(
    link: Link,
    sources: Callable[[], Sequence[ChunkBytes]],
    sent: Callable[[int], None] = lambda n: None,
    permitted: Callable[[chunks.Permit], bool] | None = None,
) -> None:
    """Answer wants on a link until the asker closes it.

    Args:
        link: an accepted ``/kvasir/chunks/1`` link.
        sources: looked through in order for each chunk, at each want.
        sent: told the bytes of each chunk that went out.
        permitted: judges the permit that the asker must show first; None where the peer was let in already.

    Raises:
        RefusedError: no permit, or one that is not good. WireError: what came makes no sense.
    """
    from kvasir_peer.net.link import Priority

    link.max_frame = chunks.MAX_WANT_FRAME
    if permitted is not None:
        with trio.move_on_after(PERMIT_SECONDS) as scope:
            message, _ = chunks.CODEC.decode(await link.receive())
        if scope.cancelled_caught or not isinstance(message, chunks.Permit) or not permitted(message):
            raise RefusedError(
                f"{link.remote_peer} has no permit to fetch chunks here", peer=link.remote_peer
            )
    while True:
        try:
            message, _ = chunks.CODEC.decode(await link.receive())
        except LinkError:
            return
        if isinstance(message, chunks.Permit):
            continue
        if not isinstance(message, chunks.Want):
            raise WireError("unexpected", "only wants belong here", peer=link.remote_peer)
        for digest in message.hashes:
            data = await trio.to_thread.run_sync(_find, digest, sources())
            if data is None:
                reply = chunks.CODEC.encode(chunks.Lack(digest, "this peer does not have it"))
            else:
                reply = chunks.CODEC.encode(chunks.Have(digest), data)
                sent(len(data))
            try:
                await link.send(reply, Priority.WEIGHTS)
            except LinkError:
                return


def _find(digest: bytes, sources: Sequence[ChunkBytes]) -> memoryview | bytes | None:
    for source in sources:
        try:
            return source.chunk_bytes(digest)
        except KeyError:
            continue
    return None


class Download:
    """One slice on its way into a store.

    Args:
        node: the peer's node.
        store: where verified chunks go.
        wanted: the slice's chunks.
        report: told the progress after each chunk.
        permit: shown to peers that give chunks only to those whom the bridge permits it.
        local_web: take files from web servers on this machine too; for tests. A bridge must not make others ask
            what runs on their own machines.
    """

    def __init__(
        self,
        node: Node,
        store: ChunkStore,
        wanted: Sequence[Chunk],
        report: Callable[[TransferProgress], None] = lambda p: None,
        *,
        permit: chunks.Permit | None = None,
        local_web: bool = False,
    ) -> None:
        self._node = node
        self._store = store
        self._permit = permit
        self._local_web = local_web
        self._chunks = {chunk.hash: chunk for chunk in wanted}
        self._sizes = {chunk.hash: chunk.size for chunk in wanted}
        self._report = report
        self._total = sum(self._sizes.values())
        missing = {chunk.hash for chunk in store.missing(wanted)}
        self._todo = deque(h for h in self._sizes if h in missing)
        self._done = self._total - sum(self._sizes[h] for h in missing)
        self._had = self._done
        self._began = trio.current_time()

    async def run(self, sources: Sequence[PeerSource | WebSource]) -> None:
        """Fetch what is missing, from one source after another while they last.

        Args:
            sources: those that may have the chunks, best first.

        Raises:
            LinkError: no source could be reached any more; what was verified stays in the store.
            RefusedError, WireError, ModelFileError: every source lacks a chunk, or sent a wrong one.
            ResourceError: the disk is full.
        """
        failures = 0
        last: KvasirError | None = None
        left = list(sources)
        self._tell()
        while self._todo:
            if not left or failures >= len(RETRY_DELAYS) * len(sources):
                raise last or LinkError("nobody to fetch weights from")
            source = left[failures % len(left)]
            before = len(self._todo)
            try:
                if isinstance(source, WebSource):
                    await self._fetch_from_web(source.url)
                else:
                    await self._fetch_from(*source)
                continue
            except (LinkError, RefusedError, WireError, ModelFileError) as error:
                last = error
                name = source.url if isinstance(source, WebSource) else source[0]
                logger.warning("fetching weights from %s: %s", name, error)
                if not isinstance(error, LinkError):
                    # It lacks what is missing, or lies about it: asking again won't help, another may be asked at once.
                    left.remove(source)
                    failures = 0
                    continue
            failures = 1 if len(self._todo) < before else failures + 1
            await trio.sleep(RETRY_DELAYS[min(failures - 1, len(RETRY_DELAYS) - 1)])

    async def _fetch_from(self, peer: str, addresses: Sequence[str]) -> None:
        link = await self._node.open_link(
            peer, chunks.PROTOCOL, max_frame=chunks.MAX_CHUNK_FRAME, addresses=addresses
        )
        outstanding: set[bytes] = set()
        lacking: list[bytes] = []
        try:
            if self._permit is not None:
                await link.send(chunks.CODEC.encode(self._permit))
            while self._todo or outstanding:
                await self._ask(link, outstanding)
                with trio.move_on_after(STALL_SECONDS) as scope:
                    message, payload = chunks.CODEC.decode(await link.receive())
                if scope.cancelled_caught:
                    raise LinkError(f"no chunk from {peer} for {STALL_SECONDS:.0f} s", peer=peer)
                if not isinstance(message, chunks.Have | chunks.Lack) or message.hash not in outstanding:
                    raise WireError("unexpected", f"{peer} sent a chunk that was not asked for", peer=peer)
                if isinstance(message, chunks.Lack):
                    outstanding.discard(message.hash)
                    lacking.append(message.hash)  # the next source may have it
                    continue
                # put() checks the hash, and writes to disk: neither belongs on the event loop.
                try:
                    await trio.to_thread.run_sync(self._store.put, message.hash, payload)
                except ValueError as error:
                    raise WireError("hash", f"{peer} sent a wrong chunk: {error}", peer=peer) from None
                outstanding.discard(message.hash)
                self._done += self._sizes[message.hash]
                self._tell()
            if lacking:
                raise RefusedError(f"{peer} lacks chunk {lacking[0].hex()[:12]} of those wanted", peer=peer)
        finally:
            self._todo.extendleft((*outstanding, *lacking))
            with trio.move_on_after(1, shield=True):
                await link.aclose()

    async def _fetch_from_web(self, url: str) -> None:
        from kvasir_peer.net.https_model import HttpsModel, is_local

        if is_local(url) and not self._local_web:
            raise RefusedError(f"{url[:200]!a} leads to this machine itself")
        got: set[bytes] = set()
        try:
            async with HttpsModel.open(url) as model:
                missing = [self._chunks[digest] for digest in self._todo]
                if any(chunk.tensor not in model.tensors for chunk in missing):
                    raise ModelFileError(f"{model.where}: not the model that is wanted")
                async for chunk, data in model.chunks(missing):
                    await trio.to_thread.run_sync(self._store.put, chunk.hash, data)
                    got.add(chunk.hash)
                    self._done += chunk.size
                    self._tell()
        finally:
            self._todo = deque(digest for digest in self._todo if digest not in got)

    async def _ask(self, link: Link, outstanding: set[bytes]) -> None:
        flying = sum(self._sizes[h] for h in outstanding)
        batch: list[bytes] = []
        while self._todo and len(outstanding) < chunks.MAX_WANTS:
            size = self._sizes[self._todo[0]]
            if outstanding and flying + size > OUTSTANDING_BYTES:
                break
            digest = self._todo.popleft()
            outstanding.add(digest)
            batch.append(digest)
            flying += size
        if not batch:
            return
        try:
            await link.send(chunks.CODEC.encode(chunks.Want(tuple(batch))))
        except LinkError:
            # What has arrived already is still there to be received; the end of the link says the rest.
            outstanding.difference_update(batch)
            self._todo.extendleft(reversed(batch))
            if not outstanding:
                raise

    def _tell(self) -> None:
        elapsed = trio.current_time() - self._began
        rate = (self._done - self._had) / elapsed if elapsed > 0 else 0.0
        left = (self._total - self._done) / rate if rate > 0 else math.inf
        self._report(
            TransferProgress(self._done, self._total, rate, 0.0 if self._done == self._total else left)
        )
