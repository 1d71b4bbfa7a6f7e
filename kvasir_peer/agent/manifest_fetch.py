"""Fetching a manifest from a bridge: the root, then just the pages that a slice needs, each checked by its hash."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import trio

from kvasir_peer.errors import LinkError, RefusedError, ResourceError
from kvasir_peer.models.manifest import MAX_PAGE_BYTES, MAX_ROOT_BYTES, Manifest, decode_root
from kvasir_peer.models.slices import Slice, pages_of

if TYPE_CHECKING:
    import httpx

FETCH_SECONDS = 60.0  # for one page of at most 4 MiB


async def fetch_manifest(client: httpx.AsyncClient, model: str, part: Slice, file: Path) -> Manifest:
    """The manifest with the slice's pages, from ``file`` as far as it is there, else from the bridge.

    Args:
        client: speaks to the bridge's swarm routes.
        model: manifest id; what comes is checked against it.
        part: what the pages are needed for.
        file: where the manifest is kept; the engine process reads it there.

    Raises:
        LinkError: the bridge could not be reached.
        RefusedError: the bridge does not have the model.
        ResourceError: the manifest can't be written.
        WireError: what came is not the manifest of that id.
    """
    manifest = await trio.to_thread.run_sync(_kept, file, model)
    if manifest is None:
        root = decode_root(await _get(client, f"/api/manifest/{model}", MAX_ROOT_BYTES), model)
        manifest = Manifest(root)
    missing = [name for name in pages_of(manifest.root, part) if name not in manifest.pages]
    for name in missing:
        manifest.add_page(name, await _get(client, f"/api/manifest/{model}/{name}", MAX_PAGE_BYTES))
    if missing:
        await trio.to_thread.run_sync(_keep, file, manifest.encode())
    return manifest


def _kept(file: Path, model: str) -> Manifest | None:
    from kvasir_peer.errors import WireError

    try:
        return Manifest.decode(file.read_bytes(), model)
    except (OSError, WireError):
        return None  # not there, or damaged: it is fetched again


def _keep(file: Path, data: bytes) -> None:
    unfinished = file.with_suffix(".part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(data)
        unfinished.replace(file)
    except OSError as error:
        raise ResourceError(
            f"cannot write {file}: {error.strerror or error}; make room, or mend it"
        ) from None


async def _get(client: httpx.AsyncClient, path: str, limit: int) -> bytes:
    import httpx

    data = bytearray()
    try:
        with trio.fail_after(FETCH_SECONDS):
            async with client.stream("GET", path) as answer:
                if answer.status_code != 200:
                    raise RefusedError(f"the bridge answered {answer.status_code} to {path}")
                async for piece in answer.aiter_raw():
                    data += piece
                    if len(data) > limit:
                        raise RefusedError(f"the bridge sent over {limit:,} bytes for {path}")
    except (httpx.HTTPError, trio.TooSlowError) as error:
        raise LinkError(f"fetching {path} from the bridge failed: {error}") from error
    return bytes(data)
