"""Weights between peers: chunks asked for by hash, checked, and put into the store as they come.

A download that breaks goes on where it stopped, since every chunk that was verified is in the store already.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import trio

from kvasir_peer.errors import KvasirError, LinkError, RefusedError, WireError
from kvasir_peer.wire import chunks

if TYPE_CHECKING:
    from kvasir_peer.models.manifest import Chunk
    from kvasir_peer.models.store import ChunkStore
    from kvasir_peer.net.link import Link
    from kvasir_peer.net.node import Node

logger = logging.getLogger(__name__)

STALL_SECONDS = 30.0  # without a whole chunk of at most 4 MiB: under 140 KB/s, another source is worth a try
OUTSTANDING_BYTES = 16 << 20  # wanted and not yet here; keeps a fast link busy, bounds memory at both ends
RETRY_DELAYS = (0.2, 1.0, 2.0, 5.0, 10.0, 10.0)  # seconds before each new link after a break


class ChunkBytes(Protocol):
    """Where a peer takes the chunks that it serves from."""

    def chunk_bytes(self, digest: bytes) -> memoryview | bytes:
        """The chunk's bytes; KeyError when this peer does not have it."""
        ...


@dataclass(frozen=True)
class TransferProgress:
    """How far a download is."""

    done_bytes: int
    total_bytes: int
    bytes_per_second: float
    seconds_left: float


async def serve_chunks(
    link: Link, sources: Callable[[], Sequence[ChunkBytes]], sent: Callable[[int], None] = lambda n: None
) -> None:
    """Answer wants on a link until the asker closes it.

    Args:
        link: an accepted ``/kvasir/chunks/1`` link.
        sources: looked through in order for each chunk, at each want.
        sent: told the bytes of each chunk that went out.
    """
    from kvasir_peer.net.link import Priority

    link.max_frame = chunks.MAX_WANT_FRAME
    while True:
        try:
            message, _ = chunks.CODEC.decode(await link.receive())
        except LinkError:
            return
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
    """

    def __init__(
        self,
        node: Node,
        store: ChunkStore,
        wanted: Sequence[Chunk],
        report: Callable[[TransferProgress], None] = lambda p: None,
    ) -> None:
        self._node = node
        self._store = store
        self._sizes = {chunk.hash: chunk.size for chunk in wanted}
        self._report = report
        self._total = sum(self._sizes.values())
        missing = {chunk.hash for chunk in store.missing(wanted)}
        self._todo = deque(h for h in self._sizes if h in missing)
        self._done = self._total - sum(self._sizes[h] for h in missing)
        self._had = self._done
        self._began = trio.current_time()

    async def run(self, peers: Sequence[tuple[str, Sequence[str]]]) -> None:
        """Fetch what is missing, from one peer after another while they last.

        Args:
            peers: (peer id, addresses) of those that may have the chunks, best first.

        Raises:
            LinkError: no peer could be reached any more; what was verified stays in the store.
            RefusedError, WireError: every peer lacks a chunk, or sent a wrong one.
            ResourceError: the disk is full.
        """
        failures = 0
        last: KvasirError | None = None
        useless: set[str] = set()  # peers that lack what is missing, or lie about it: asking again won't help
        self._tell()
        while self._todo:
            if failures >= len(RETRY_DELAYS) * len(peers):
                raise last or LinkError("no peer to fetch weights from")
            left = [source for source in peers if source[0] not in useless]
            if not left:
                raise last or LinkError("no peer to fetch weights from")
            peer, addresses = left[failures % len(left)]
            before = len(self._todo)
            try:
                await self._fetch_from(peer, addresses)
                continue
            except (LinkError, RefusedError, WireError) as error:
                last = error
                if not isinstance(error, LinkError):
                    useless.add(peer)
                logger.warning("fetching weights from %s: %s", peer, error)
            failures = 1 if len(self._todo) < before else failures + 1
            await trio.sleep(RETRY_DELAYS[min(failures - 1, len(RETRY_DELAYS) - 1)])

    async def _fetch_from(self, peer: str, addresses: Sequence[str]) -> None:
        link = await self._node.open_link(
            peer, chunks.PROTOCOL, max_frame=chunks.MAX_CHUNK_FRAME, addresses=addresses
        )
        outstanding: set[bytes] = set()
        try:
            while self._todo or outstanding:
                await self._ask(link, outstanding)
                with trio.move_on_after(STALL_SECONDS) as scope:
                    message, payload = chunks.CODEC.decode(await link.receive())
                if scope.cancelled_caught:
                    raise LinkError(f"no chunk from {peer} for {STALL_SECONDS:.0f} s", peer=peer)
                if isinstance(message, chunks.Lack):
                    raise RefusedError(
                        f"{peer} lacks chunk {message.hash.hex()[:12]}: {message.reason}", peer=peer
                    )
                if not isinstance(message, chunks.Have) or message.hash not in outstanding:
                    raise WireError("unexpected", f"{peer} sent a chunk that was not asked for", peer=peer)
                # put() checks the hash, and writes to disk: neither belongs on the event loop.
                try:
                    await trio.to_thread.run_sync(self._store.put, message.hash, payload)
                except ValueError as error:
                    raise WireError("hash", f"{peer} sent a wrong chunk: {error}", peer=peer) from None
                outstanding.discard(message.hash)
                self._done += self._sizes[message.hash]
                self._tell()
        finally:
            self._todo.extendleft(outstanding)
            with trio.move_on_after(1, shield=True):
                await link.aclose()

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
