"""Weights between real peers: every chunk once, after breaks too, and never a wrong one."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio

from kvasir_peer.agent.chunk_transfer import Download, TransferProgress, serve_chunks
from kvasir_peer.errors import LinkError, RefusedError, WireError
from kvasir_peer.models.gguf import GgufFile
from kvasir_peer.models.manifest import Chunk, Manifest, build_manifest
from kvasir_peer.models.slices import StageSlice, chunks_of
from kvasir_peer.models.sources import ChunkSource
from kvasir_peer.models.store import ChunkStore
from kvasir_peer.net.link import Link
from kvasir_peer.net.node import Node
from kvasir_peer.wire import chunks

MODEL = Path(__file__).parent.parent / "data" / "stories260K-moe8x2.gguf"


@asynccontextmanager
async def peers(count: int) -> AsyncIterator[list[Node]]:
    """Nodes that listen on loopback."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                Node.open(secrets.token_bytes(32), listen=["/ip4/127.0.0.1/tcp/0"], direct=True)
            )
            for _ in range(count)
        ]


class Source:
    """A model file whose chunks are given out, and counted."""

    def __init__(self) -> None:
        self.gguf = GgufFile.open(MODEL)
        self.manifest: Manifest = build_manifest(self.gguf)
        self.chunks = ChunkSource(self.gguf, self.manifest)
        self.asked: list[bytes] = []

    def chunk_bytes(self, digest: bytes) -> memoryview:
        self.asked.append(digest)
        return self.chunks.chunk_bytes(digest)

    def wanted(self) -> list[Chunk]:
        return chunks_of(self.manifest, StageSlice(1, 4, 5))


def serve(node: Node, handler: Callable[[Link], object]) -> tuple[str, tuple[str, ...]]:
    node.handle(chunks.PROTOCOL, chunks.MAX_WANT_FRAME, handler)  # type: ignore[arg-type]
    return node.peer_id, tuple(node.addresses())


async def test_a_slice_is_fetched_once_and_a_second_download_fetches_nothing(tmp_path: Path) -> None:
    source, seen = Source(), list[TransferProgress]()
    async with peers(2) as (server, taker):
        place = serve(server, lambda link: serve_chunks(link, lambda: [source]))
        with ChunkStore(tmp_path, 1 << 30) as store:
            await Download(taker, store, source.wanted(), seen.append).run([place])
            assert store.missing(source.wanted()) == []
            assert sorted(source.asked) == sorted({chunk.hash for chunk in source.wanted()})
            await Download(taker, store, source.wanted()).run([place])
    assert len(source.asked) == len({chunk.hash for chunk in source.wanted()})
    total = sum({chunk.hash: chunk.size for chunk in source.wanted()}.values())
    assert (seen[-1].done_bytes, seen[-1].total_bytes, seen[-1].seconds_left) == (total, total, 0.0)
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)


async def test_a_download_that_breaks_goes_on_where_it_stopped(tmp_path: Path) -> None:
    source, links = Source(), 0

    async def breaks(link: Link) -> None:
        """Gives 15 chunks, then is gone in the middle of an answer."""
        nonlocal links
        links += 1
        message, _ = chunks.CODEC.decode(await link.receive())
        for digest in message.hashes[:15]:
            await link.send(chunks.CODEC.encode(chunks.Have(digest), source.chunk_bytes(digest)))
        await trio.sleep(0.05)
        link.close()

    async with peers(2) as (server, taker):
        place = serve(server, breaks)
        with ChunkStore(tmp_path, 1 << 30) as store, trio.fail_after(60):
            await Download(taker, store, source.wanted()).run([place])
            assert store.missing(source.wanted()) == []
    count = len({chunk.hash for chunk in source.wanted()})
    assert links == -(-count // 15) or links == -(-count // 15) + 1
    assert len(source.asked) == len(set(source.asked)) == count, "nothing was fetched twice"


async def test_a_wrong_chunk_is_dropped_and_fetched_from_another_peer(tmp_path: Path) -> None:
    source = Source()

    async def lies(link: Link) -> None:
        message, _ = chunks.CODEC.decode(await link.receive())
        good = bytes(source.chunk_bytes(message.hashes[0]))
        await link.send(chunks.CODEC.encode(chunks.Have(message.hashes[0]), good[:-1] + b"?"))
        await trio.sleep_forever()

    async with peers(3) as (liar, honest, taker):
        places = [serve(liar, lies), serve(honest, lambda link: serve_chunks(link, lambda: [source]))]
        with ChunkStore(tmp_path, 1 << 30) as store, trio.fail_after(60):
            await Download(taker, store, source.wanted()).run(places)
            assert store.missing(source.wanted()) == []
            for chunk in source.wanted():
                assert bytes(store.chunk_bytes(chunk.hash)) == bytes(source.chunks.chunk_bytes(chunk.hash))
        with ChunkStore(tmp_path / "other", 1 << 30) as store, trio.fail_after(60):
            with pytest.raises(WireError, match="wrong chunk"):
                await Download(taker, store, source.wanted()).run(places[:1])
            assert store.listing() == []


async def test_a_peer_that_lacks_a_chunk_is_passed_over_and_nobody_left_is_said(tmp_path: Path) -> None:
    source = Source()
    async with peers(3) as (poor, rich, taker):
        places = [
            serve(poor, lambda link: serve_chunks(link, list)),
            serve(rich, lambda link: serve_chunks(link, lambda: [source])),
        ]
        with ChunkStore(tmp_path, 1 << 30) as store, trio.fail_after(60):
            with pytest.raises(RefusedError, match="lacks chunk"):
                await Download(taker, store, source.wanted()).run(places[:1])
            await Download(taker, store, source.wanted()).run(places)
            assert store.missing(source.wanted()) == []


async def test_whoever_shows_no_ticket_gets_no_chunks() -> None:
    source = Source()
    async with peers(2) as (server, taker):
        server.handle(
            chunks.PROTOCOL,
            chunks.MAX_WANT_FRAME,
            lambda link: serve_chunks(link, lambda: [source]),
            accept=lambda peer: "no ticket was shown",
        )
        link = await taker.open_link(
            server.peer_id, chunks.PROTOCOL, max_frame=chunks.MAX_CHUNK_FRAME, addresses=server.addresses()
        )
        with pytest.raises(LinkError), trio.fail_after(10):
            await link.send(chunks.CODEC.encode(chunks.Want((source.wanted()[0].hash,))))
            await link.receive()
    assert source.asked == []


async def test_too_many_wants_break_only_that_link() -> None:
    source = Source()
    async with peers(2) as (server, taker):
        peer, addresses = serve(server, lambda link: serve_chunks(link, lambda: [source]))
        greedy = await taker.open_link(
            peer, chunks.PROTOCOL, max_frame=chunks.MAX_CHUNK_FRAME, addresses=addresses
        )
        polite = await taker.open_link(
            peer, chunks.PROTOCOL, max_frame=chunks.MAX_CHUNK_FRAME, addresses=addresses
        )
        await greedy.send(chunks.CODEC.encode(chunks.Want((source.wanted()[0].hash,) * 65)))
        with pytest.raises(LinkError), trio.fail_after(10):
            await greedy.receive()
        await polite.send(chunks.CODEC.encode(chunks.Want((source.wanted()[0].hash,))))
        with trio.fail_after(10):
            answer, payload = chunks.CODEC.decode(await polite.receive())
        assert answer == chunks.Have(source.wanted()[0].hash) and len(payload) == source.wanted()[0].size
