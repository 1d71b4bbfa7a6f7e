"""A model as a bridge serves it: file or https source, manifest, chunks, tokenizer, chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import trio

from kvasir_peer.agent.chunk_transfer import ChunkBytes
from kvasir_peer.engines.architectures import ModelShape, parse
from kvasir_peer.errors import ModelFileError, UsageError
from kvasir_peer.models.chat_template import ChatTemplate
from kvasir_peer.models.gguf import GgufFile, TensorInfo
from kvasir_peer.models.manifest import Manifest
from kvasir_peer.models.manifest_cache import cached_manifest
from kvasir_peer.models.sources import ChunkSource
from kvasir_peer.models.tokenizer import Tokenizer
from kvasir_peer.progress import Progress, Report

DEFAULT_CONTEXT = 4096  # positions: the KV cache of every slot takes memory at every stage


@dataclass(frozen=True)
class BridgeModel:
    """An open model.

    Attributes:
        name: for clients.
        manifest: with all pages.
        metadata: as the file has it, tokenizer included.
        tensors: all of them.
        shape: sizes, from the architecture table.
        chunks: the weights by hash.
        tokenizer, chat_template: None for the template where the model has none.
    """

    name: str
    manifest: Manifest
    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]
    shape: ModelShape
    chunks: ChunkBytes
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    def context_length(self, wanted: int) -> int:
        """Positions of each request: as set, else the model's own up to 4096.

        Raises:
            UsageError: more than the model was made for.
        """
        most = self.shape.context_length
        if wanted > most:
            raise UsageError(f"--context-length {wanted} is more than the {most} positions of {self.name}")
        return wanted or min(most, DEFAULT_CONTEXT)


def client_name(model: str) -> str:
    """What clients call a model that its owner gave no name: its file's name without the ending.

    Unlike ``general.name`` in the file it has no spaces, and tells the quantisation.
    """
    file = unquote(urlsplit(model).path) if "://" in model else model
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", Path(file).name, flags=re.IGNORECASE)


def public_address(model: str) -> str:
    """The https address of a model that others may be told; empty for a file, and for one that may hold a key."""
    if "://" not in model:
        return ""
    parts = urlsplit(model)
    private = parts.username or parts.password or parts.query
    return "" if private or parts.scheme != "https" else model


def shape_of(model: str, metadata: Mapping[str, object], tensors: Mapping[str, TensorInfo]) -> ModelShape:
    """Sizes of a model.

    Raises:
        ModelFileError: no engine computes it; names the file.
    """
    try:
        return parse(metadata, tensors)
    except ModelFileError as error:
        raise ModelFileError(f"{model}: {error}") from None


async def open_model(model: str, name: str, state: Path, report: Report) -> BridgeModel:
    """Open a GGUF by path or https address; the long part (hashing) runs in a thread and reports.

    Args:
        model: path, or an address.
        name: for clients; the model's own where empty.
        state: folder in which manifests are kept, so that a second start is quick.

    Raises:
        ModelFileError: it is no model that can be served.
    """

    def progress(done: int, total: int) -> None:
        trio.from_thread.run_sync(report, Progress("manifest", f"hashing {model}", done, total, "bytes"))

    if "://" in model:
        from kvasir_peer.net.https_model import open_https_model

        remote = await open_https_model(model, state, progress=report, check=parse)
        metadata, tensors, manifest = remote.metadata, remote.tensors, remote.manifest
        chunks: ChunkBytes = remote
    else:
        gguf = await trio.to_thread.run_sync(lambda: GgufFile.open(Path(model).expanduser()))
        metadata, tensors = gguf.metadata, gguf.tensors
        # An architecture that nobody here can compute is refused before the long work.
        shape_of(model, metadata, tensors)
        manifest = await trio.to_thread.run_sync(lambda: cached_manifest(gguf, state, progress=progress))
        chunks = ChunkSource(gguf, manifest)
    shape = shape_of(model, metadata, tensors)
    tokenizer = await trio.to_thread.run_sync(Tokenizer.from_gguf, metadata)
    template = await trio.to_thread.run_sync(ChatTemplate.from_gguf, metadata)
    report(
        Progress("manifest", f"{manifest.root.name}: {shape.n_layer} layers, {manifest.n_bytes / 1e6:.0f} MB")
    )
    return BridgeModel(
        name or client_name(model), manifest, metadata, tensors, shape, chunks, tokenizer, template
    )
