"""Volunteers get their chunks from each other, from disk, or from the web; the bridge sends what nobody else has."""

from __future__ import annotations

import dataclasses
import secrets
import shutil
import sys
import time
from pathlib import Path

import msgspec
import pytest
from helpers_experts import LOOPBACK, MODEL, until
from helpers_volunteers import QUARTER, bridge, volunteer

sys.path.insert(0, str(Path(__file__).parent.parent / "net"))

from helpers_https import FileServer

from kvasir_peer.agent import chunk_transfer
from kvasir_peer.agent.chunk_transfer import Download
from kvasir_peer.errors import KvasirError
from kvasir_peer.experts import volunteer as volunteer_module
from kvasir_peer.experts.permits import PERMIT_SECONDS, ChunkPermit, permits, sign_permit
from kvasir_peer.identity import Identity, verify
from kvasir_peer.models.slices import ExpertSlice, chunks_of
from kvasir_peer.models.store import ChunkStore
from kvasir_peer.net.link import Link
from kvasir_peer.net.node import Node
from kvasir_peer.wire import chunks


async def test_a_second_volunteer_fetches_from_the_first_and_a_third_past_a_liar(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(chunk_transfer, "STALL_SECONDS", 0.5)
    async with bridge(tmp_path) as b, volunteer(b, tmp_path / "one") as one:
        b.saturate()
        ranges = await one.serves()
        assert b.sent_bytes == one.fetched > 0
        before = b.sent_bytes
        async with volunteer(b, tmp_path / "two") as two:
            assert await two.serves() == ranges, "two replicas of each expert are wanted"
            assert two.fetched == one.fetched and b.sent_bytes == before, "the bridge sent nothing again"
            assert one.volunteer.statistics().given_bytes == two.fetched
        await until(lambda: len(b.service._state.workers) == 1)

        async def lies(link: Link) -> None:
            while True:
                message, _ = chunks.CODEC.decode(await link.receive())
                if isinstance(message, chunks.Want):
                    digest = message.hashes[0]
                    data = bytes(one.store.chunk_bytes(digest))
                    await link.send(chunks.CODEC.encode(chunks.Have(digest), data[:-1] + b"?"))

        one.node.handle(chunks.PROTOCOL, chunks.MAX_WANT_FRAME, lies)
        async with volunteer(b, tmp_path / "three") as three:
            assert await three.serves() == ranges
            assert b.sent_bytes == before + three.fetched, "it was left for the bridge"
            assert three.store.statistics().refused_chunks == 1


async def test_a_volunteer_is_given_again_what_it_has_on_disk_and_fetches_nothing(tmp_path: Path) -> None:
    first, second = Identity.generate(), Identity.generate()
    async with bridge(tmp_path) as b:
        b.saturate()
        async with (
            volunteer(b, tmp_path / "one", disk=QUARTER, me=first) as one,
            volunteer(b, tmp_path / "two", disk=QUARTER, me=second) as two,
        ):
            had = {await one.serves(), await two.serves()}
            assert len(had) == 2
            had_by_second = two.volunteer.statistics().ranges
        await until(lambda: not b.service._state.workers)
        sent = b.sent_bytes
        async with volunteer(b, tmp_path / "two", disk=QUARTER, me=second) as two:
            assert await two.serves() == had_by_second
            assert two.fetched == 0 and b.sent_bytes == sent


async def test_an_idle_volunteer_with_chunks_on_disk_is_named_as_their_source(tmp_path: Path) -> None:
    async with bridge(tmp_path) as b:
        async with volunteer(b, tmp_path / "one", disk=QUARTER) as one:
            b.saturate()
            ranges = await one.serves()
        await until(lambda: not b.service._state.workers)
        # What one has is covered twice already, and everything else too: it waits.
        board = b.service._state.models["small"].board
        everything = [(layer, 0, 8) for layer in range(5)]
        for _ in range(2):
            board.add(board.live, everything, +1)
        async with volunteer(b, tmp_path / "one", disk=QUARTER) as one:
            await until(lambda: one.node.peer_id in b.service._state.waiting)
            board.add(board.live, ranges, -1)  # and now somebody quicker is served first
            budget = b.service._state.waiting.pop(one.node.peer_id)
            assert budget[0].memory == (1 << 30) - (200 << 20), "the process itself is not for experts"
            sent = b.sent_bytes
            b.service._state.waiting[one.node.peer_id] = (unable(budget[0]), budget[1])
            async with volunteer(b, tmp_path / "two", disk=QUARTER) as two:
                assert await two.serves() == ranges
                assert two.fetched > 0 and b.sent_bytes == sent
                assert one.volunteer.statistics().given_bytes == two.fetched


def unable(budget):
    """A budget too small for any expert, so that its owner goes on waiting."""
    return dataclasses.replace(budget, memory=0)


async def test_the_web_server_that_has_the_model_is_asked_before_the_bridge(tmp_path: Path) -> None:
    folder = tmp_path / "www"
    folder.mkdir()
    shutil.copy(MODEL, folder / "moe.gguf")
    with FileServer(folder).running() as web:
        async with (
            bridge(tmp_path, web=f"{web.url}/moe.gguf") as b,
            volunteer(b, tmp_path / "one", disk=QUARTER, local_web=True) as one,
        ):
            b.saturate()
            await one.serves()
            assert one.fetched > 0 and b.sent_bytes == 0
            assert web.requests


def test_a_permit_is_for_one_peer_of_one_bridge_and_for_a_time() -> None:
    bridge_key, other = Identity.generate(), Identity.generate()
    permit = ChunkPermit(bridge_key.peer_id, "asker", "model", 1000.0 + PERMIT_SECONDS)
    data, signature = sign_permit(permit, bridge_key.sign)

    def good(data: bytes = data, signature: bytes = signature, **changes: object) -> bool:
        values = {"bridge": bridge_key.peer_id, "peer": "asker", "now": 1000.0} | changes
        return permits(data, signature, verify=verify, **values)  # type: ignore[arg-type]

    assert good()
    assert not good(peer="somebody else")
    assert not good(bridge=other.peer_id)
    assert not good(now=1000.0 + 2 * PERMIT_SECONDS)
    assert not good(data=b"\xc1")
    assert not good(signature=other.sign(data))
    forged = msgspec.msgpack.encode(msgspec.structs.replace(permit, peer="somebody else"))
    assert not good(data=forged, peer="somebody else")


async def test_a_volunteer_gives_nothing_to_strangers_to_too_many_or_while_its_owner_has_paused_it(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(chunk_transfer, "RETRY_DELAYS", (0.01, 0.01))
    async with (
        bridge(tmp_path) as b,
        volunteer(b, tmp_path / "one", disk=QUARTER) as one,
        Node.open(secrets.token_bytes(32), listen=[LOOPBACK]) as asker,
    ):
        b.saturate()
        part = ExpertSlice(await one.serves())
        wanted = chunks_of(b.manifest, part)
        place = (one.node.peer_id, tuple(one.node.addresses()))
        data, signature = sign_permit(
            ChunkPermit(b.me.peer_id, asker.peer_id, b.manifest.id, time.time() + 60), b.me.sign
        )
        permit = chunks.Permit(data, signature)

        async def fetch(shown: chunks.Permit | None) -> int:
            """Bytes that the volunteer gave."""
            before = one.volunteer.statistics().given_bytes
            with ChunkStore(tmp_path / secrets.token_hex(4), 1 << 30) as store:
                try:
                    await Download(asker, store, wanted, permit=shown).run([place])
                except KvasirError:
                    assert store.listing() == []
            return one.volunteer.statistics().given_bytes - before

        assert await fetch(None) == 0
        assert await fetch(chunks.Permit(data, b.me.sign(b"something else"))) == 0
        assert await fetch(permit) == one.fetched > 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(volunteer_module, "MAX_ASKERS", 0)
            assert await fetch(permit) == 0
        one.volunteer.pause()
        assert await fetch(permit) == 0
        one.volunteer.resume()
