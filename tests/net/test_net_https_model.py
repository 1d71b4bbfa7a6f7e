"""A model on a web server, against a real server on loopback, well-behaved and not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import gguf
import numpy as np
import pytest
import trio
from helpers_https import FileServer, tls_contexts

from kvasir_peer.errors import LinkError, ModelFileError, NotReadyError
from kvasir_peer.models.gguf import GgufFile
from kvasir_peer.models.manifest import Manifest, build_manifest
from kvasir_peer.models.manifest_cache import ManifestCache
from kvasir_peer.models.slices import ExpertSlice, StageSlice, chunks_of
from kvasir_peer.net import https_model
from kvasir_peer.net.https_model import HttpsModel, check_url, open_https_model, shown
from kvasir_peer.progress import Progress

MOE = Path(__file__).parent.parent / "data" / "stories260K-moe8x2.gguf"


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(https_model, "OPEN_RETRY_DELAYS", (0.01, 0.01))
    monkeypatch.setattr(https_model, "RETRY_DELAYS", (0.01, 0.01, 0.01))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    folder = tmp_path / "www"
    folder.mkdir()
    shutil.copy(MOE, folder / "moe.gguf")
    with FileServer(folder).running() as server:
        yield server


@pytest.fixture(scope="module")
def local() -> Manifest:
    with GgufFile.open(MOE) as model:
        return build_manifest(model)


def asked(server: FileServer) -> int:
    """Bytes that were asked for since the last look."""
    spans = [wanted.removeprefix("bytes=").split("-") for _, wanted in server.requests]
    server.requests.clear()
    return sum(int(end) - int(start) + 1 for start, end in spans)


async def test_a_bridge_gets_the_manifest_and_serves_chunks_without_the_file(
    server: FileServer, local: Manifest
) -> None:
    told: list[tuple[int, int]] = []
    async with HttpsModel.open(f"{server.url}/moe.gguf") as model:
        assert model.architecture == "llama"
        assert len(model.metadata["tokenizer.ggml.tokens"]) == 512  # type: ignore[arg-type]
        assert len(model.tensors) == 53
        assert asked(server) == https_model.FIRST_RANGE
        manifest = await model.load_manifest(progress=lambda done, total: told.append((done, total)))
        assert (manifest.id, manifest.pages) == (local.id, local.pages)
        assert told[-1] == (model.n_bytes, model.n_bytes)
        assert [done for done, _ in told] == sorted(done for done, _ in told)
        assert model.n_bytes <= asked(server) < model.n_bytes + 10_000  # once

        with GgufFile.open(MOE) as file:
            for chunk in chunks_of(manifest, StageSlice(1, 3, 5)):
                expected = file.tensor_view(chunk.tensor)[chunk.offset : chunk.offset + chunk.size]
                assert await model.chunk(chunk.hash) == expected
                assert model.has(chunk.hash)
        assert len(server.requests) == 1  # neighbours come together
        with pytest.raises(KeyError):
            await model.chunk(bytes(32))
        statistics = model.statistics()
        assert statistics.wrong_chunks == 0 and statistics.served_chunks == 62
        assert statistics.received_bytes > 2 * model.n_bytes


async def test_many_at_once_share_a_request(server: FileServer, local: Manifest) -> None:
    async with HttpsModel.open(f"{server.url}/moe.gguf") as model:
        model.use_manifest(local)
        server.requests.clear()
        got: list[bytes] = []

        async def fetch(digest: bytes) -> None:
            got.append(await model.chunk(digest))

        async with trio.open_nursery() as nursery:
            for chunk in chunks_of(local, ExpertSlice(((2, 0, 8),))):
                nursery.start_soon(fetch, chunk.hash)
        assert len(got) == 24 and len(server.requests) == 1


async def test_chunks_can_be_had_from_a_thread(
    server: FileServer, local: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    chunk = chunks_of(local, StageSlice(0, 1, 5))[0]
    async with HttpsModel.open(f"{server.url}/moe.gguf") as model:
        model.use_manifest(local)
        data = await trio.to_thread.run_sync(model.chunk_bytes, chunk.hash)
        assert len(data) == chunk.size
        (server.folder / "moe.gguf").unlink()
        model._kept.clear()
        with pytest.raises(KeyError):
            await trio.to_thread.run_sync(model.chunk_bytes, chunk.hash)
        assert "404" in caplog.text


async def test_a_slice_can_be_fetched_straight_from_the_server(server: FileServer, local: Manifest) -> None:
    wanted = chunks_of(local, ExpertSlice(((0, 1, 3), (3, 0, 1))))
    async with HttpsModel.open(f"{server.url}/moe.gguf") as model:
        server.requests.clear()
        found = {chunk.hash: bytes(data) async for chunk, data in model.chunks(wanted)}
    assert found.keys() == {chunk.hash for chunk in wanted}
    assert asked(server) < 2_000_000  # by ranges, not the file


async def test_a_second_start_does_not_read_the_file_again(
    server: FileServer, local: Manifest, tmp_path: Path
) -> None:
    cache = ManifestCache(tmp_path / "cache")
    for turn in range(2):
        async with HttpsModel.open(f"{server.url}/moe.gguf?download=true") as model:
            server.requests.clear()
            assert (await model.load_manifest(cache=cache)).id == local.id
            assert len(server.requests) == (0 if turn else 1)
    server.etag = '"two"'
    async with HttpsModel.open(f"{server.url}/moe.gguf") as model:
        server.requests.clear()
        await model.load_manifest(cache=cache)
        assert server.requests  # another file, as far as one can see
    server.etag = ""
    for _ in range(2):
        async with HttpsModel.open(f"{server.url}/moe.gguf") as model:
            server.requests.clear()
            await model.load_manifest(cache=cache)
            assert server.requests  # nothing shows that it is the same file


async def test_a_header_larger_than_the_first_range(server: FileServer, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(server.folder / "big.gguf", "llama")
    writer.add_token_list([f"a rather long token number {i}" for i in range(90_000)])
    writer.add_block_count(1)
    writer.add_tensor("blk.0.w", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    async with HttpsModel.open(f"{server.url}/big.gguf") as model:
        assert len(model.metadata["tokenizer.ggml.tokens"]) == 90_000  # type: ignore[arg-type]
    assert asked(server) <= 4 << 20
    assert (server.folder / "big.gguf").stat().st_size > 2 << 20


async def test_a_split_model(server: FileServer) -> None:
    writer = gguf.GGUFWriter(server.folder / "split.gguf", "llama", split_max_tensors=2)
    writer.add_block_count(4)
    for layer in range(4):
        writer.add_tensor(f"blk.{layer}.w", np.full(1000, layer, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile.open(server.folder / "split-00001-of-00002.gguf") as file:
        expected = build_manifest(file)
    async with HttpsModel.open(f"{server.url}/split-00002-of-00002.gguf") as model:
        manifest = await model.load_manifest()
        assert manifest.id == expected.id
        for chunk in chunks_of(manifest, StageSlice(0, 4, 4)):
            assert len(await model.chunk(chunk.hash)) == 4000
    (server.folder / "split-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelFileError, match=r"split-00002-of-00002\.gguf: the server answered 404"):
        async with HttpsModel.open(f"{server.url}/split-00001-of-00002.gguf"):
            pass


async def test_open_with_manifest_for_a_bridge(server: FileServer, local: Manifest, tmp_path: Path) -> None:
    told: list[Progress] = []
    url = f"{server.url}/moe.gguf"
    model = await open_https_model(url, tmp_path / "state", progress=told.append)
    assert model.manifest.id == local.id
    assert told[-1].step == "manifest" and told[-1].done == told[-1].total == model.n_bytes
    assert "MB)" in told[-1].line() and url in told[-1].line()
    await model.aclose()

    def refuse(metadata: object, tensors: object) -> None:
        raise ModelFileError("unknown architecture")

    server.requests.clear()
    with pytest.raises(ModelFileError, match="unknown architecture"):
        await open_https_model(url, tmp_path / "other", check=refuse)
    assert len(server.requests) == 1  # the header, no more
    async with HttpsModel.open(url) as unread:
        with pytest.raises(NotReadyError, match="has not been hashed yet"):
            _ = unread.manifest


# --- servers that misbehave ---


async def test_broken_connections_go_on_where_they_stopped(server: FileServer, local: Manifest) -> None:
    async with HttpsModel.open(f"{server.url}/moe.gguf") as model:
        server.requests.clear()
        server.break_after = [500_000, 0, 700_001, 3, 0, 0]
        assert (await model.load_manifest()).id == local.id
        assert len(server.requests) == 7
        assert asked(server) < 7 * model.n_bytes
        assert model.statistics().received_bytes < model.n_bytes + https_model.FIRST_RANGE + 10_000


async def test_a_server_that_is_busy_is_asked_again(server: FileServer, local: Manifest) -> None:
    def busy(number: int, handler: BaseHTTPRequestHandler) -> bool:
        if number % 3:
            handler.send_error(503 if number % 2 else 429)
        return bool(number % 3)

    server.misbehave = busy
    async with HttpsModel.open(f"{server.url}/moe.gguf") as model:
        assert (await model.load_manifest()).id == local.id


async def test_a_server_that_stays_broken_is_given_up(server: FileServer, local: Manifest) -> None:
    async with HttpsModel.open(f"{server.url}/moe.gguf") as model:
        model.use_manifest(local)
        server.break_after = [0] * 100
        with pytest.raises(LinkError, match=r"moe\.gguf: can't be read: "):
            await model.chunk(chunks_of(local, StageSlice(0, 1, 5))[0].hash)


async def test_a_server_without_ranges_is_refused(tmp_path: Path) -> None:
    shutil.copy(MOE, tmp_path / "moe.gguf")
    with FileServer(tmp_path, ranges=False).running() as server:
        with pytest.raises(
            ModelFileError, match=r"does not answer Range requests .*; download the file"
        ) as caught:
            async with HttpsModel.open(f"{server.url}/moe.gguf"):
                pass
        assert caught.value.exit_status == 2 and len(server.requests) == 1


async def test_changed_bytes_serve_nobody(server: FileServer, local: Manifest) -> None:
    async with HttpsModel.open(f"{server.url}/moe.gguf") as model:
        model.use_manifest(local)
        server.change = lambda start, body: body[:-1] + bytes([body[-1] ^ 1])
        with pytest.raises(ModelFileError, match="was changed on the server; start the bridge again"):
            for chunk in chunks_of(local, StageSlice(0, 5, 5)):
                await model.chunk(chunk.hash)
        assert model.statistics().wrong_chunks == 1


async def test_a_file_that_changes_while_it_is_hashed_is_refused(server: FileServer) -> None:
    async with HttpsModel.open(f"{server.url}/moe.gguf") as model:
        server.etag = '"two"'
        with pytest.raises(ModelFileError, match="was changed on the server while it was read"):
            await model.load_manifest()
    server.etag = ""
    async with HttpsModel.open(f"{server.url}/moe.gguf") as model:
        with (server.folder / "moe.gguf").open("ab") as file:
            file.write(b"more")
        with pytest.raises(ModelFileError, match="was changed on the server while it was read"):
            await model.load_manifest()


@pytest.mark.parametrize(
    ("content_range", "encoding", "expected"),
    [
        ("bytes 0-99/1000", "gzip", "compresses what it sends"),
        ("bytes 5-104/1000", "identity", "answers Range requests wrongly"),
        ("bytes 0-99/*", "identity", "answers Range requests wrongly"),
        ("bytes 0-99999999/100000000", "identity", "answers Range requests wrongly"),
        ("bytes 0-49/1000", "identity", "sends more than was asked for"),
    ],
)
async def test_wrong_answers_are_refused(
    server: FileServer, content_range: str, encoding: str, expected: str
) -> None:
    def wrong(number: int, handler: BaseHTTPRequestHandler) -> bool:
        handler.send_response(206)
        handler.send_header("Content-Range", content_range)
        handler.send_header("Content-Encoding", encoding)
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        handler.wfile.write(bytes(100))
        return True

    server.misbehave = wrong
    with pytest.raises(ModelFileError, match=expected):
        async with HttpsModel.open(f"{server.url}/moe.gguf"):
            pass


@pytest.mark.parametrize(
    ("path", "expected"),
    [("absent.gguf", "answered 404"), ("text.gguf", "not a GGUF"), ("empty.gguf", "or the file is empty")],
)
async def test_what_is_no_model_is_refused(server: FileServer, path: str, expected: str) -> None:
    (server.folder / "text.gguf").write_text("just a text of some length")
    (server.folder / "empty.gguf").touch()
    with pytest.raises(ModelFileError, match=expected) as caught:
        async with HttpsModel.open(f"{server.url}/{path}"):
            pass
    assert "\n" not in str(caught.value)


async def test_a_header_without_end_is_given_up(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(https_model, "MAX_HEADER", 4 << 20)
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    key = (1).to_bytes(8, "little") + b"k" + (8).to_bytes(4, "little") + (1 << 30).to_bytes(8, "little")
    with (server.folder / "endless.gguf").open("wb") as file:
        file.write(head + key)
        file.truncate(2 << 30)  # sparse: takes no disk
    with pytest.raises(ModelFileError, match="its header takes over 4,194,304 bytes"):
        async with HttpsModel.open(f"{server.url}/endless.gguf"):
            pass
    assert asked(server) == https_model.FIRST_RANGE


async def test_nobody_at_the_address() -> None:
    with pytest.raises(
        ModelFileError, match=r"can't be read: .*connect.*; check the address and the connection"
    ):
        async with HttpsModel.open("http://127.0.0.1:1/moe.gguf"):
            pass


# --- addresses ---


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://example.org/m.gguf", "plain http could be changed on the way; use https://"),
        ("http://127.0.0.1.example.org/m.gguf", "plain http"),
        ("ftp://example.org/m.gguf", "not an https:// address"),
        ("https:///m.gguf", "not an https:// address"),
        ("https://example.org:port/m", "not an address"),
    ],
)
def test_addresses_that_are_refused(url: str, expected: str) -> None:
    with pytest.raises(ModelFileError, match=expected):
        check_url(url)


def test_secrets_of_an_address_are_not_shown() -> None:
    assert (
        shown(check_url("https://me:secret@example.org/m.gguf?token=abc#x")) == "https://example.org/m.gguf"
    )
    with pytest.raises(ModelFileError) as caught:
        check_url("http://me:secret@example.org/m.gguf?token=abc")
    assert "secret" not in str(caught.value) and "abc" not in str(caught.value)


async def test_redirects_are_followed_on_this_machine_and_not_to_plain_http(
    server: FileServer, local: Manifest
) -> None:
    to = ["/moe.gguf"]

    def redirect(number: int, handler: BaseHTTPRequestHandler) -> bool:
        if handler.path != "/moved.gguf":
            return False
        handler.send_response(302)
        handler.send_header("Location", to[0])
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    server.misbehave = redirect
    async with HttpsModel.open(f"{server.url}/moved.gguf") as model:
        assert (await model.load_manifest()).id == local.id
    for target, expected in (
        ("http://example.org/m.gguf", "plain http could be changed"),
        ("/moved.gguf", "redirects"),
    ):
        to[0] = target
        with pytest.raises(ModelFileError, match=expected):
            async with HttpsModel.open(f"{server.url}/moved.gguf"):
                pass


async def test_tls_is_checked(tmp_path: Path, local: Manifest) -> None:
    shutil.copy(MOE, tmp_path / "moe.gguf")
    for_server, for_client = tls_contexts(tmp_path)
    with FileServer(tmp_path).running(for_server) as server:
        async with HttpsModel.open(f"{server.url}/moe.gguf", verify=for_client) as model:
            assert (await model.load_manifest()).id == local.id
        server.requests.clear()
        with pytest.raises(ModelFileError, match="certificate"):
            async with HttpsModel.open(f"{server.url}/moe.gguf"):
                pass
        assert not server.requests
