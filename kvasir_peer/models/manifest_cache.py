"""Manifests that were made before, so that a second start doesn't hash the model again.

An entry is found by what identifies the file without reading it: its path, size and modification time, or for a web
address its size and the server's validator. Each entry is checked as if it came from a stranger; a bad one is made
again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvasir_peer.errors import WireError
from kvasir_peer.models.gguf import GgufFile, TensorInfo
from kvasir_peer.models.manifest import FORMAT, Manifest, Progress, build_manifest, model_name

logger = logging.getLogger(__name__)

MAX_ENTRIES = 32  # the oldest go; an entry is some kilobytes to some megabytes


class ManifestCache:
    """A folder of manifests.

    Args:
        folder: made when the first entry is written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)

    def get(self, key: object, tensors: Mapping[str, TensorInfo]) -> Manifest | None:
        """The manifest kept under a key, or None where there is none that describes these tensors."""
        path = self._path(key)
        try:
            manifest = Manifest.decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except (WireError, OSError):
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        described = {t.name: (t.shape, t.type) for page in manifest.pages.values() for t in page.tensors}
        return manifest if described == {t.name: (t.shape, t.type) for t in tensors.values()} else None

    def put(self, key: object, manifest: Manifest) -> None:
        """Keep a manifest; a reader sees all of it or nothing. A folder that can't be written costs only a warning."""
        try:
            self._write(self._path(key), manifest.encode())
        except OSError as error:
            logger.warning(
                "%s: the manifest can't be kept, the next start hashes again: %s", self._folder, error
            )

    def _write(self, path: Path, data: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        fd, aside = tempfile.mkstemp(dir=self._folder, suffix=".partial")
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            Path(aside).replace(path)
        finally:
            Path(aside).unlink(missing_ok=True)
        entries = sorted(self._folder.glob("*.manifest"), key=lambda entry: entry.stat().st_mtime)
        for entry in entries[:-MAX_ENTRIES]:
            entry.unlink(missing_ok=True)

    def for_file(
        self, gguf: GgufFile, *, name: str | None = None, progress: Progress | None = None
    ) -> Manifest:
        """The manifest of an open model file: the kept one, or a new one, which is then kept.

        The arguments are those of :func:`~kvasir_peer.models.manifest.build_manifest`.

        Raises:
            ModelFileError: the header contradicts itself.
        """
        name = name or model_name(gguf.metadata, gguf.path.name)
        key = (name, [str(path.resolve()) for path in gguf.paths], gguf.stamps)
        manifest = self.get(key, gguf.tensors)
        if manifest is None:
            manifest = build_manifest(gguf, name=name, progress=progress)
            self.put(key, manifest)
        return manifest

    def _path(self, key: object) -> Path:
        return self._folder / f"{hashlib.sha256(repr((FORMAT, key)).encode()).hexdigest()[:32]}.manifest"


def cached_manifest(
    gguf: GgufFile,
    folder: str | os.PathLike[str],
    *,
    name: str | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """The manifest of an open model file, from a folder of manifests or made now; see :class:`ManifestCache`."""
    return ManifestCache(folder).for_file(gguf, name=name, progress=progress)
