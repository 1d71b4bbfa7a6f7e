"""A model file on a web server, read by ranges: ``--model https://…``.

The file never lies on this machine. What a bridge does with such a model:

1. It reads the header by growing ranges (a megabyte, then double), which gives metadata, tokenizer and tensors. A
   server that doesn't answer ranges is refused here, before anything long begins.
2. It streams once through all of the file and hashes each chunk as it comes by; the bytes are dropped at once, only
   the hashes stay, as the manifest. A stream that breaks goes on where it stopped. This first reading is believed,
   as far as TLS shows that it came from the server that was named: from then on the model *is* what was hashed, its id
   says so, and the manifest may be kept for later starts.
3. When a peer asks for a chunk, the bytes are read again by range and held against the manifest's hash. A file that
   was changed on the server, or bytes that broke on the way, serve nobody.

``https`` only, for every hop of a redirect too; plain ``http`` is for a server on this machine (127.0.0.1).
"""

from __future__ import annotations

import hashlib
import logging
import re
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import httpx
import trio

from kvasir_peer.errors import LinkError, ModelFileError, NotReadyError
from kvasir_peer.models.gguf import (
    GgufHeader,
    HeaderIncompleteError,
    TensorInfo,
    architecture_of,
    join_headers,
    parse_header,
    shard_names,
)
from kvasir_peer.models.manifest import Chunk, Manifest, Progress, assemble, layer_count, model_name
from kvasir_peer.models.manifest_cache import ManifestCache
from kvasir_peer.models.ranges import ByteRange, StreamHasher, plan_ranges
from kvasir_peer.progress import Progress as ProgressRecord
from kvasir_peer.progress import Report, silent

logger = logging.getLogger(__name__)

FIRST_RANGE = 1 << 20  # bytes; the header of a small model, and no great loss for another
MAX_HEADER = 128 << 20  # bytes; a vocabulary of 300,000 tokens takes 12 MB
WINDOW = 4 << 20  # bytes asked for at once when serving: small tensors come with their neighbours
MAX_WINDOWS = 8  # kept after use, as a peer asks for neighbours one after the other
FETCH_RANGE = 16 << 20  # bytes of one request when many chunks are fetched
MAX_CONNECTIONS = 4
MAX_REDIRECTS = 5
CLOSE_SECONDS = 2.0  # for a polite end of TLS; then the sockets just go
FEED_BYTES = 1 << 20  # handed to the hashing thread at once
OPEN_RETRY_DELAYS = (0.5, 1.0)  # seconds; somebody waits who may have mistyped the address
RETRY_DELAYS = (0.5, 1.0, 2.0, 5.0, 10.0)  # seconds; begun anew after every progress
TIMEOUT = httpx.Timeout(30.0, connect=10.0)  # a server silent for 30 s is asked again

_LOOPBACK = {"127.0.0.1", "::1", "localhost"}
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


@dataclass(frozen=True)
class HttpsModelStatistics:
    """What a model on a web server has cost.

    Attributes:
        requests: ranges asked for.
        received_bytes: bytes that came.
        served_chunks: chunks handed out.
        wrong_chunks: chunks whose bytes did not have the manifest's hash.
    """

    requests: int
    received_bytes: int
    served_chunks: int
    wrong_chunks: int


class _Validator(NamedTuple):
    """By what one can see that a file on a server is still the same."""

    size: int
    etag: str
    modified: str

    def may_be(self, other: _Validator) -> bool:
        """Whether nothing shows that the file is another one."""
        if self.size != other.size:
            return False
        if self.etag and other.etag:
            return self.etag.removeprefix("W/") == other.etag.removeprefix("W/")
        return not (self.modified and other.modified) or self.modified == other.modified


class _Retry(Exception):
    """Worth another try; the text is why."""


def check_url(url: str) -> httpx.URL:
    """The address of a model, if it is one that may be used.

    Raises:
        ModelFileError: it is not.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ModelFileError(f"{url[:200]!a}: not an address: {error}") from None
    if parsed.scheme == "http" and parsed.host not in _LOOPBACK:
        raise ModelFileError(f"{shown(parsed)}: plain http could be changed on the way; use https://")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ModelFileError(f"{shown(parsed)}: not an https:// address of a GGUF file")
    return parsed


def is_local(url: str) -> bool:
    """Whether an address leads to this machine. Raises ModelFileError where it is none that may be used."""
    return check_url(url).host in _LOOPBACK


def shown(url: httpx.URL) -> str:
    """An address for messages: without a password, and without a query that may hold a key."""
    return str(url.copy_with(username=None, password=None, query=None, fragment=None))


class HttpsModel:
    """A model on a web server; made by :meth:`connect` or :meth:`open`.

    Attributes:
        urls: its files in order; one, unless the model is split.
        metadata: keys and values, with the tokenizer.
        tensors: by name; offsets are in their files.
    """

    def __init__(self, urls: list[httpx.URL], client: httpx.AsyncClient) -> None:
        self.urls = urls
        self.metadata: Mapping[str, object] = {}
        self.tensors: Mapping[str, TensorInfo] = {}
        self._client = client
        self._limit = trio.CapacityLimiter(MAX_CONNECTIONS)
        self._validators: list[_Validator | None] = [None] * len(urls)
        self._manifest: Manifest | None = None
        self._windows: dict[bytes, ByteRange] = {}
        self._kept: OrderedDict[ByteRange, dict[bytes, bytes]] = OrderedDict()
        self._coming: dict[ByteRange, trio.Event] = {}
        self._delays: tuple[float, ...] = OPEN_RETRY_DELAYS
        self._requests = self._received = self._served = self._wrong = 0

    @classmethod
    async def connect(cls, url: str, *, verify: object = True) -> Self:
        """Read a model's header; to be closed with :meth:`aclose`.

        Args:
            url: of its file, or of any file of a split model, all under one address.
            verify: as httpx takes it: True, or an ``ssl.SSLContext`` with other roots.

        Raises:
            ModelFileError: no such file, no ranges, not a GGUF; one line that says which.
        """
        first = check_url(url)
        folder, _, name = first.path.rpartition("/")
        names = shard_names(name) or [name]
        urls = [first.copy_with(path=f"{folder}/{each}") for each in names] if len(names) > 1 else [first]
        local = first.host in _LOOPBACK

        async def check_hop(request: httpx.Request) -> None:
            if check_url(str(request.url)).host in _LOOPBACK and not local:
                raise ModelFileError(f"{shown(first)}: the server redirects to this machine itself")

        client = httpx.AsyncClient(
            verify=verify,  # type: ignore[arg-type]
            follow_redirects=True,
            max_redirects=MAX_REDIRECTS,
            timeout=TIMEOUT,
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
            headers={"Accept-Encoding": "identity", "User-Agent": "kvasir-peer"},
            event_hooks={"request": [check_hop]},
            trust_env=not local,  # a proxy can't reach a server on this machine
        )
        model = cls(urls, client)
        try:
            await model._read_headers()
        except BaseException as error:
            await model.aclose()
            if isinstance(error, LinkError):
                raise ModelFileError(f"{error}; check the address and the connection") from None
            raise
        model._delays = RETRY_DELAYS
        return model

    async def aclose(self) -> None:
        """Close the connections, at once even where the task is cancelled."""
        with trio.move_on_after(CLOSE_SECONDS, shield=True):
            await self._client.aclose()

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, *, verify: object = True) -> AsyncIterator[Self]:
        """As :meth:`connect`; the connections close with the context."""
        model = await cls.connect(url, verify=verify)
        try:
            yield model
        finally:
            await model.aclose()

    @property
    def where(self) -> str:
        """The address for messages."""
        return shown(self.urls[0])

    @property
    def architecture(self) -> str:
        """``general.architecture``; raises :class:`ModelFileError` where the file names none."""
        return architecture_of(self.metadata, self.where)

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(info.n_bytes for info in self.tensors.values())

    def statistics(self) -> HttpsModelStatistics:
        """What it has cost so far."""
        return HttpsModelStatistics(self._requests, self._received, self._served, self._wrong)

    # --- header and manifest ---

    async def _read_headers(self) -> None:
        headers = [await self._read_header(shard) for shard in range(len(self.urls))]
        self.metadata, self.tensors = join_headers(headers, [shown(url) for url in self.urls])

    async def _read_header(self, shard: int) -> GgufHeader:
        data = bytearray()
        wanted = FIRST_RANGE
        while True:
            data += await self._read(shard, len(data), wanted)
            validator = self._validators[shard]
            assert validator is not None  # every answer brings one
            try:
                # A big vocabulary takes tens of milliseconds.
                return await trio.to_thread.run_sync(
                    parse_header, bytes(data), validator.size, shown(self.urls[shard])
                )
            except HeaderIncompleteError as error:
                wanted = max(error.needed, 2 * len(data))
            if wanted > MAX_HEADER:
                raise ModelFileError(
                    f"{shown(self.urls[shard])}: damaged: its header takes over {MAX_HEADER:,} bytes"
                )

    @property
    def manifest(self) -> Manifest:
        """The model's manifest, once it was loaded or given; before that, NotReadyError."""
        if self._manifest is None:
            raise NotReadyError(f"{self.where} has not been hashed yet")
        return self._manifest

    async def load_manifest(
        self, *, name: str | None = None, progress: Progress | None = None, cache: ManifestCache | None = None
    ) -> Manifest:
        """Make the model's manifest, after which its chunks can be served.

        Streams through the whole file, unless the cache has its manifest.

        Args:
            name: the model's name for people; the file's own where None.
            progress: told (bytes done, bytes in all).
            cache: where manifests are kept.

        Raises:
            ModelFileError: the header contradicts itself, or the file changes while it is read.
            LinkError: the server can't be reached any more.
        """
        layer_count(self.metadata, self.tensors, self.where)  # before the long work
        name = name or model_name(self.metadata, self.urls[0].path.rpartition("/")[2])
        key = (name, [shown(url) for url in self.urls], self._validators)
        # Without a validator another file of the same size would be taken for this one.
        keep = cache is not None and all(each and (each.etag or each.modified) for each in self._validators)
        manifest = cache.get(key, self.tensors) if cache and keep else None
        if manifest is None:
            manifest = await self._hash(name, progress)
            if cache and keep:
                await trio.to_thread.run_sync(cache.put, key, manifest)
        self.use_manifest(manifest)
        return manifest

    def use_manifest(self, manifest: Manifest) -> None:
        """Serve the chunks of this manifest of the model, however it was come by: each is checked by its hash."""
        chunks = [c for page in manifest.pages.values() for tensor in page.tensors for c in tensor.chunks()]
        self._manifest = manifest
        ranges = plan_ranges(self.tensors, chunks, max_bytes=WINDOW)
        self._windows = {chunk.hash: window for window in ranges for chunk in window.chunks}

    async def _hash(self, name: str, progress: Progress | None) -> Manifest:
        hashes: dict[str, bytes] = {}
        total, before = self.n_bytes, 0
        for shard in range(len(self.urls)):
            mine = [info for info in self.tensors.values() if info.shard == shard]
            hasher = StreamHasher(mine)

            async def take(piece: bytes, hasher: StreamHasher = hasher, before: int = before) -> None:
                await trio.to_thread.run_sync(hasher.feed, piece)
                if progress is not None:
                    progress(min(before + hasher.position - hasher.start, total), total)

            await self._stream(shard, hasher.start, hasher.end, take)
            hashes |= hasher.finish()
            before += sum(info.n_bytes for info in mine)
        if progress is not None:
            progress(total, total)
        return assemble(self.metadata, self.tensors, hashes, name=name, where=self.where)

    # --- chunks ---

    def has(self, digest: bytes) -> bool:
        """Whether the model has such a chunk."""
        return digest in self._windows

    async def chunk(self, digest: bytes) -> bytes:
        """The bytes of a chunk, checked.

        Raises:
            KeyError: the model has no such chunk.
            ModelFileError: the file on the server is no longer the one that was hashed.
            LinkError: the server can't be reached.
        """
        window = self._windows[digest]
        while window not in self._kept:
            if window in self._coming:
                await self._coming[window].wait()
                continue
            self._coming[window] = trio.Event()
            try:
                self._kept[window] = await self._fetch(window)
            finally:
                self._coming.pop(window).set()
            while len(self._kept) > MAX_WINDOWS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(window)
        self._served += 1
        return self._kept[window][digest]

    def chunk_bytes(self, digest: bytes) -> memoryview:
        """As :meth:`chunk`, for a thread that trio started; a server that fails is as a chunk that isn't here.

        Raises:
            KeyError: the model has no such chunk, or it can't be had now (which is logged).
        """
        try:
            return memoryview(trio.from_thread.run(self.chunk, digest))
        except (LinkError, ModelFileError) as error:
            logger.warning("a chunk can't be served: %s", error)
            raise KeyError(digest.hex()) from None

    async def chunks(self, wanted: Iterable[Chunk]) -> AsyncIterator[tuple[Chunk, memoryview]]:
        """Fetch many chunks in the order of the file, in few requests, each checked; each hash once.

        Raises:
            ModelFileError: the file on the server is no longer the one that was hashed.
            LinkError: the server can't be reached.
        """
        for window in plan_ranges(self.tensors, wanted, max_bytes=FETCH_RANGE):
            found = await self._fetch(window)
            for chunk in window.chunks:
                yield chunk, memoryview(found[chunk.hash])

    async def _fetch(self, window: ByteRange) -> dict[bytes, bytes]:
        data = await self._read(window.shard, window.start, window.end)
        found, wrong = await trio.to_thread.run_sync(_checked, window, data)
        if wrong is not None:
            self._wrong += 1
            raise ModelFileError(
                f"{shown(self.urls[window.shard])}: bytes of {wrong.tensor} are not those that were hashed: the file "
                "was changed on the server; start the bridge again to serve the new one"
            )
        return found

    # --- ranges ---

    async def _read(self, shard: int, start: int, end: int) -> bytes:
        """Bytes ``[start, end)`` of a file; fewer where the file ends before."""
        data = bytearray()

        async def take(piece: bytes) -> None:
            data.extend(piece)

        await self._stream(shard, start, end, take)
        return bytes(data)

    async def _stream(
        self, shard: int, start: int, end: int, take: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Hand over bytes ``[start, end)`` of a file in pieces of about a megabyte.

        A connection that breaks is made again, and goes on at the byte where it stopped.
        """
        at, failures, pending = start, 0, bytearray()
        while at < end:
            before = at
            try:
                async with (
                    self._limit,
                    self._client.stream(
                        "GET", self.urls[shard], headers={"Range": f"bytes={at}-{end - 1}"}
                    ) as response,
                ):
                    self._requests += 1
                    last = self._check(response, shard, at, end)
                    async for piece in response.aiter_raw():
                        at += len(piece)
                        self._received += len(piece)
                        if at > last:
                            raise ModelFileError(
                                f"{shown(self.urls[shard])}: the server sends more than was asked for"
                            )
                        pending += piece
                        if len(pending) >= FEED_BYTES:
                            await take(bytes(pending))
                            pending.clear()
                if at == before:
                    raise _Retry("the server sent nothing")
                failures = 0
            except (httpx.UnsupportedProtocol, httpx.TooManyRedirects) as error:
                raise ModelFileError(f"{shown(self.urls[shard])}: {error}") from None
            except (httpx.TransportError, _Retry) as error:
                reason = _reason(error)
                failures = 1 if at > before else failures + 1
                if failures > len(self._delays) or _is_certificate_error(error):
                    raise LinkError(f"{shown(self.urls[shard])}: can't be read: {reason}") from None
                delay = self._delays[failures - 1]
                logger.info("%s, byte %d: %s; trying again in %.1f s", self.where, at, reason, delay)
                await trio.sleep(delay)
            validator = self._validators[shard]
            end = min(end, validator.size if validator else end)
        if pending:
            await take(bytes(pending))

    def _check(self, response: httpx.Response, shard: int, at: int, end: int) -> int:
        """Hold an answer against what was asked; returns past the last byte that it brings.

        Raises:
            ModelFileError: it is of no use.
            _Retry: another time it may be.
        """
        where = shown(self.urls[shard])
        status = response.status_code
        if status in (408, 425, 429) or status >= 500:
            raise _Retry(f"the server answered {status} {response.reason_phrase}")
        if status in (200, 416):
            raise ModelFileError(
                f"{where}: the server does not answer Range requests (or the file is empty); download the file and "
                "give its path"
            )
        if status != 206:
            raise ModelFileError(
                f"{where}: the server answered {status} {response.reason_phrase}; check the address"
            )
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ModelFileError(
                f"{where}: the server compresses what it sends; download the file and give its path"
            )
        match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if match is None or int(match[1]) != at or not at < int(match[2]) + 1 <= end:
            raise ModelFileError(
                f"{where}: the server answers Range requests wrongly; download the file instead"
            )
        found = _Validator(
            int(match[3]), response.headers.get("etag", ""), response.headers.get("last-modified", "")
        )
        known = self._validators[shard]
        if known is None:
            self._validators[shard] = found
        elif not found.may_be(known):
            raise ModelFileError(
                f"{where}: the file was changed on the server while it was read; start again"
            )
        return int(match[2]) + 1


def _checked(window: ByteRange, data: bytes) -> tuple[dict[bytes, bytes], Chunk | None]:
    """The chunks of a window, and the first whose bytes are wrong."""
    found: dict[bytes, bytes] = {}
    for chunk, view in window.cut(data):
        if hashlib.sha256(view).digest() != chunk.hash:
            return found, chunk
        found[chunk.hash] = bytes(view)
    return found, None


def _reason(error: BaseException) -> str:
    """What went wrong in words; httpx often leaves them to the error behind its own."""
    return next((str(at) for at in _behind(error) if str(at)), type(error).__name__)


def _behind(error: BaseException) -> Iterator[BaseException]:
    """An error, the one that caused it, and so on."""
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__ or at.__context__


def _is_certificate_error(error: BaseException) -> bool:
    """Whether a server's certificate is behind an error: that does not mend itself."""
    return any(isinstance(at, ssl.SSLCertVerificationError) for at in _behind(error))


async def open_https_model(
    url: str,
    folder: Path,
    *,
    name: str | None = None,
    progress: Report = silent,
    check: Callable[[Mapping[str, object], Mapping[str, TensorInfo]], object] = lambda metadata, tensors: (
        None
    ),
) -> HttpsModel:
    """A model on a web server with its manifest, ready to serve; the caller closes it.

    Args:
        url: of its file, or of any file of a split model.
        folder: where manifests are kept, so that a second start doesn't stream through the file again.
        name: the model's name for people; the file's own where None.
        progress: told how far the hashing is.
        check: given metadata and tensors before the long work; raises when it is in vain.

    Raises:
        ModelFileError: it is no model that can be served, in one line.
        LinkError: the server was lost on the way.
    """
    model = await HttpsModel.connect(url)
    try:
        check(model.metadata, model.tensors)
        await model.load_manifest(
            name=name,
            progress=lambda done, total: progress(
                ProgressRecord("manifest", f"hashing {model.where}", done, total, "bytes")
            ),
            cache=ManifestCache(folder),
        )
    except BaseException:
        await model.aclose()
        raise
    return model
