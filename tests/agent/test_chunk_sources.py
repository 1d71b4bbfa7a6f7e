"""Several sources of one slice: each gives what it has, and is left when it lacks, lies, stalls or is not the model."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import trio
from test_chunk_transfer import MODEL, Source, peers, serve

sys.path.insert(0, str(Path(__file__).parent.parent / "net"))

from helpers_https import FileServer

from kvasir_peer.agent import chunk_transfer
from kvasir_peer.agent.chunk_transfer import Download, WebSource, serve_chunks
from kvasir_peer.errors import LinkError, RefusedError
from kvasir_peer.models.store import ChunkStore
from kvasir_peer.net.link import Link
from kvasir_peer.wire import chunks

PERMIT = chunks.Permit(b"may fetch", b"signed")


class Part:
    """A peer that has only some of the chunks."""

    def __init__(self, source: Source, wanted: set[bytes]) -> None:
        self.source, self.wanted = source, wanted

    def chunk_bytes(self, digest: bytes) -> memoryview:
        if digest not in self.wanted:
            raise KeyError(digest.hex())
        return self.source.chunk_bytes(digest)


async def test_each_source_gives_what_it_has(tmp_path: Path) -> None:
    source = Source()
    digests = sorted({chunk.hash for chunk in source.wanted()})
    halves = [Part(source, set(digests[::2])), Part(source, set(digests[1::2]))]
    async with peers(3) as (one, two, taker):
        places = [
            serve(node, lambda link, part=part: serve_chunks(link, lambda: [part]))
            for node, part in zip((one, two), halves, strict=True)
        ]
        with ChunkStore(tmp_path, 1 << 30) as store, trio.fail_after(30):
            await Download(taker, store, source.wanted()).run(places)
            assert store.missing(source.wanted()) == []
    assert sorted(source.asked) == digests, "each chunk from one of them, once"


async def test_a_source_that_stalls_is_left_for_another(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(chunk_transfer, "STALL_SECONDS", 0.3)
    source = Source()

    async def stalls(link: Link) -> None:
        """Gives one chunk, then nothing, over a link that stands."""
        message, _ = chunks.CODEC.decode(await link.receive())
        digest = message.hashes[0]
        await link.send(chunks.CODEC.encode(chunks.Have(digest), source.chunk_bytes(digest)))
        await trio.sleep_forever()

    async with peers(3) as (slow, good, taker):
        places = [serve(slow, stalls), serve(good, lambda link: serve_chunks(link, lambda: [source]))]
        with ChunkStore(tmp_path, 1 << 30) as store, trio.fail_after(30):
            await Download(taker, store, source.wanted()).run(places)
            assert store.missing(source.wanted()) == []
    assert len(source.asked) == len(set(source.asked)), "what the slow one gave was not fetched again"


async def test_chunks_are_given_to_those_with_a_permit_only(tmp_path: Path) -> None:
    source = Source()
    shown: list[chunks.Permit] = []

    def permitted(permit: chunks.Permit) -> bool:
        shown.append(permit)
        return permit == PERMIT

    async with peers(2) as (server, taker):
        place = serve(server, lambda link: serve_chunks(link, lambda: [source], permitted=permitted))
        with ChunkStore(tmp_path, 1 << 30) as store, trio.fail_after(60):
            for permit in (None, chunks.Permit(b"may fetch", b"forged")):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(chunk_transfer, "RETRY_DELAYS", (0.01, 0.01))
                    with pytest.raises((RefusedError, LinkError)):
                        await Download(taker, store, source.wanted(), permit=permit).run([place])
            assert source.asked == []
            await Download(taker, store, source.wanted(), permit=PERMIT).run([place])
            assert store.missing(source.wanted()) == []
    assert PERMIT in shown


async def test_a_web_server_with_the_file_is_a_source_and_one_with_another_file_is_left(
    tmp_path: Path,
) -> None:
    source = Source()
    folder = tmp_path / "www"
    folder.mkdir()
    shutil.copy(MODEL, folder / "moe.gguf")
    shutil.copy(MODEL.parent / "stories260K.gguf", folder / "dense.gguf")
    with FileServer(folder).running() as web:
        async with peers(2) as (server, taker):
            place = serve(server, lambda link: serve_chunks(link, lambda: [source]))
            with ChunkStore(tmp_path / "a", 1 << 30) as store, trio.fail_after(30):
                sources = [WebSource(f"{web.url}/moe.gguf"), place]
                await Download(taker, store, source.wanted(), local_web=True).run(sources)
                assert store.missing(source.wanted()) == [] and source.asked == []
            with ChunkStore(tmp_path / "b", 1 << 30) as store, trio.fail_after(30):
                sources = [WebSource(f"{web.url}/dense.gguf"), place]
                await Download(taker, store, source.wanted(), local_web=True).run(sources)
                assert store.missing(source.wanted()) == [] and source.asked
            web.requests.clear()
            with (
                ChunkStore(tmp_path / "c", 1 << 30) as store,
                pytest.raises(RefusedError, match="this machine itself"),
            ):
                await Download(taker, store, source.wanted()).run([WebSource(f"{web.url}/moe.gguf")])
            assert web.requests == [], "no bridge makes a peer ask what runs on the peer's own machine"
