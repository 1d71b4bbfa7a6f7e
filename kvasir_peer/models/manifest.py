"""The content-addressed description of a model: a root, and pages with the hash of every chunk.

A chunk is the unit that peers send each other and check. Where chunks begin and end is not written down anywhere: it
follows from a tensor's name, shape and type (:func:`chunk_borders`), so that a page lists hashes alone and no peer can
claim borders that don't fit. ``docs/models.md`` describes the format to the byte.

There is one encoding of each manifest: tensors and keys stand sorted, and decoding refuses bytes that encoding would
not have given. The model's id is the SHA-256 of the encoded root, in hex. How a GGUF was split into files, in which
order its tensors lie, and its tokenizer don't enter into it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import pairwise

import msgspec

from kvasir_peer.errors import ModelFileError, WireError
from kvasir_peer.models.gguf import (
    GGML_TYPES,
    MAX_DIMS,
    MAX_NAME_BYTES,
    GgufFile,
    TensorInfo,
    architecture_of,
    tensor_bytes,
)

FORMAT = 1
HASH_BYTES = 32  # SHA-256
MAX_CHUNK_BYTES = (
    4 << 20
)  # lost work when a transfer breaks stays small, and so does what a peer holds unchecked
MAX_LAYERS = 1024  # the deepest published models have about 130
MAX_ROOT_BYTES = 1 << 20
MAX_PAGE_BYTES = 4 << 20  # 131,000 chunks; a layer of 384 experts of 16 MiB has 5,000
MAX_MANIFEST_BYTES = 64 << 20  # root and all pages; the largest published models come to 5 MB
MAX_TEXT = 64 << 10  # characters of a metadata string in the root
MAX_LIST = 8192  # elements of a metadata array in the root
_HASHING_WINDOW = 64  # chunks handed to the hashing threads ahead of their results
_RELEASE_EVERY = 256 << 20  # bytes hashed before their mapped pages are given back

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all), from the thread that called. May raise, to give up."""

MetadataValue = bool | int | float | str | list[bool | int | float | str]


class Chunk(msgspec.Struct, frozen=True):
    """A piece of a tensor.

    Attributes:
        hash: SHA-256 of its bytes.
        size: bytes, at most 4 MiB.
        tensor: name of the tensor.
        offset: first byte, counted from the start of the tensor.
    """

    hash: bytes
    size: int
    tensor: str
    offset: int


def is_stacked(name: str, shape: Sequence[int]) -> bool:
    """Whether the outermost dimension of a tensor counts experts, each a matrix or a vector of its own."""
    return "_exps." in name and len(shape) >= 2


def chunk_borders(name: str, shape: Sequence[int], n_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of each chunk of a tensor, in order.

    A stacked tensor is first cut at its experts; whatever is larger than 4 MiB is then cut every 4 MiB.
    """
    units = shape[0] if is_stacked(name, shape) else 1
    each = n_bytes // units
    for start in range(0, n_bytes, each):
        for offset in range(start, start + each, MAX_CHUNK_BYTES):
            yield offset, min(MAX_CHUNK_BYTES, start + each - offset)


def chunk_count(name: str, shape: Sequence[int], n_bytes: int) -> int:
    """How many chunks :func:`chunk_borders` gives, without going through them."""
    units = shape[0] if is_stacked(name, shape) else 1
    return units * -(-(n_bytes // units) // MAX_CHUNK_BYTES)


class PageTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor and the hashes of its chunks.

    Attributes:
        name: GGUF name.
        shape: numpy order, outermost first.
        type: ggml type id.
        hashes: the chunks' hashes one after the other, 32 bytes each.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    hashes: bytes

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return tensor_bytes(self.shape, self.type)

    def chunks(self) -> list[Chunk]:
        """Its chunks, in order."""
        return [
            Chunk(self.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES], size, self.name, offset)
            for at, (offset, size) in enumerate(chunk_borders(self.name, self.shape, self.n_bytes))
        ]

    def check(self) -> None:
        """Refuse what no model file could hold.

        Raises:
            WireError: code ``manifest``.
        """
        shown = ascii(self.name[:64])
        if not 0 < len(self.name.encode("utf-8", "surrogatepass")) <= MAX_NAME_BYTES:
            raise WireError("manifest", f"tensor {shown} has a name that is empty or too long")
        if not 1 <= len(self.shape) <= MAX_DIMS or not all(0 < size < 1 << 63 for size in self.shape):
            raise WireError("manifest", f"tensor {shown} has an impossible shape")
        if self.type not in GGML_TYPES:
            raise WireError("manifest", f"tensor {shown} has ggml type {self.type}, which is not known")
        try:
            count = chunk_count(self.name, self.shape, self.n_bytes)
        except ValueError as error:
            raise WireError("manifest", f"tensor {shown}: {error}") from None
        if count * HASH_BYTES != len(self.hashes):
            raise WireError(
                "manifest",
                f"tensor {shown} has {count} chunks, the page lists {len(self.hashes)} bytes of hashes",
            )


class LayerPage(msgspec.Struct, frozen=True, array_like=True):
    """The tensors of one part of a model.

    Attributes:
        name: ``common`` (what every stage needs: RoPE factors and the like), ``head`` (embeddings), ``blk.N``
            (layer N), ``tail`` (last norm and output).
        tensors: sorted by name.
    """

    name: str
    tensors: tuple[PageTensor, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    def encode(self) -> bytes:
        """The page's bytes; their SHA-256 stands in the root."""
        return _ENCODER.encode(self)


class PageReference(msgspec.Struct, frozen=True, array_like=True):
    """What the root says of a page.

    Attributes:
        hash: SHA-256 of the encoded page.
        encoded_bytes: size of the encoded page.
        n_bytes: bytes of its tensors, so that disk and memory can be planned before the page is fetched.
    """

    hash: bytes
    encoded_bytes: int
    n_bytes: int


class ManifestRoot(msgspec.Struct, frozen=True, array_like=True):
    """What a model is.

    Attributes:
        format: version of this format, 1.
        name: the model's name for people.
        architecture: ``general.architecture``, such as ``llama``.
        n_layer: number of layers.
        tied: the output matrix is the token embedding, so that the tail needs ``token_embd.weight`` too.
        metadata: GGUF keys and values without the tokenizer, sorted by key.
        pages: one for each name of :func:`page_names`, in that order.
    """

    format: int
    name: str
    architecture: str
    n_layer: int
    tied: bool
    metadata: dict[str, MetadataValue]
    pages: tuple[PageReference, ...]

    def encode(self) -> bytes:
        """The root's bytes; their SHA-256 is the model's id."""
        return _ENCODER.encode(self)

    def page(self, name: str) -> PageReference:
        """The reference of a page by its name; KeyError where there is no such page."""
        try:
            return self.pages[page_names(self.n_layer).index(name)]
        except ValueError:
            raise KeyError(name) from None


class _Bundle(msgspec.Struct, frozen=True, array_like=True):
    """A root with some or all of its pages, for a file or a message."""

    root: bytes
    pages: dict[str, bytes]


_ENCODER = msgspec.msgpack.Encoder()
_ROOT_DECODER = msgspec.msgpack.Decoder(ManifestRoot)
_PAGE_DECODER = msgspec.msgpack.Decoder(LayerPage)
_BUNDLE_DECODER = msgspec.msgpack.Decoder(_Bundle)

_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,3})\.")


def page_names(n_layer: int) -> tuple[str, ...]:
    """The names of a model's pages, in the root's order."""
    return ("common", "head", *(f"blk.{layer}" for layer in range(n_layer)), "tail")


def page_of(tensor: str) -> str:
    """The name of the page that a tensor belongs on.

    A name that is not known goes on the page that every stage has: the engine there refuses it by name, or uses it.
    """
    if match := _LAYER.match(tensor):
        return f"blk.{match[1]}"
    if tensor.startswith(("token_", "position_embd")):
        return "head"
    return "tail" if tensor.startswith("output") else "common"


def decode_root(data: bytes, model_id: str | None = None) -> ManifestRoot:
    """Decode and check a root.

    Args:
        data: its bytes.
        model_id: the id that it must have, where that is known.

    Raises:
        WireError: codes ``oversize``, ``hash`` or ``manifest``.
    """
    if len(data) > MAX_ROOT_BYTES:
        raise WireError(
            "oversize", f"a manifest root of {len(data):,} bytes, at most {MAX_ROOT_BYTES:,} are allowed"
        )
    if model_id is not None and hashlib.sha256(data).hexdigest() != model_id:
        raise WireError("hash", f"the manifest root is not that of model {model_id[:64]!a}")
    try:
        root = _ROOT_DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError("manifest", f"the manifest root can't be decoded: {error}") from None
    if root.format != FORMAT:
        raise WireError(
            "manifest", f"manifest format {root.format} is not known, only {FORMAT}: one side is too old"
        )
    if not 1 <= root.n_layer <= MAX_LAYERS or len(root.pages) != root.n_layer + 3:
        raise WireError("manifest", f"a manifest of {root.n_layer} layers can't have {len(root.pages)} pages")
    for name, page in zip(page_names(root.n_layer), root.pages, strict=True):
        if len(page.hash) != HASH_BYTES or not 0 < page.encoded_bytes <= MAX_PAGE_BYTES or page.n_bytes < 0:
            raise WireError("manifest", f"the manifest root has an impossible entry for page {name}")
    if not root.architecture or not _is_sorted(root.metadata):
        raise WireError("manifest", "the manifest root names no architecture, or its keys are not sorted")
    for key, value in root.metadata.items():
        if isinstance(value, str | list) and len(value) > (MAX_TEXT if isinstance(value, str) else MAX_LIST):
            raise WireError("manifest", f"the manifest root's {key[:64]!a} is too long")
    if root.encode() != data:
        raise WireError("manifest", "the manifest root is not in the one encoding that is allowed")
    return root


def decode_page(data: bytes, root: ManifestRoot, name: str) -> LayerPage:
    """Decode a page and check it against its root.

    Raises:
        WireError: codes ``oversize``, ``hash`` or ``manifest``.
        KeyError: the model has no such page.
    """
    reference = root.page(name)
    if len(data) != reference.encoded_bytes:
        raise WireError(
            "oversize", f"page {name} has {len(data):,} bytes, the root says {reference.encoded_bytes:,}"
        )
    if hashlib.sha256(data).digest() != reference.hash:
        raise WireError("hash", f"page {name} is not the one that the root lists")
    try:
        page = _PAGE_DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError("manifest", f"page {name} can't be decoded: {error}") from None
    if page.name != name or not _is_sorted([tensor.name for tensor in page.tensors]):
        raise WireError("manifest", f"page {name} has another name, or its tensors are not sorted")
    for tensor in page.tensors:
        tensor.check()
        if page_of(tensor.name) != name:
            raise WireError("manifest", f"tensor {tensor.name[:64]!a} does not belong on page {name}")
    if page.n_bytes != reference.n_bytes:
        raise WireError(
            "manifest", f"page {name} has {page.n_bytes:,} bytes of tensors, not {reference.n_bytes:,}"
        )
    if name == "tail" and root.tied and any(tensor.name == "output.weight" for tensor in page.tensors):
        raise WireError(
            "manifest", "the root says that the output is the embedding, but the tail has its own"
        )
    if page.encode() != data:
        raise WireError("manifest", f"page {name} is not in the one encoding that is allowed")
    return page


def _is_sorted(names: Mapping[str, object] | Sequence[str]) -> bool:
    return all(before < after for before, after in pairwise(names))


class Manifest:
    """A root with those of its pages that are here.

    Attributes:
        root: what the model is.
        id: SHA-256 of the encoded root, in hex.
        pages: by name; all of them at the peer that has the model file, elsewhere those of the own slice.
    """

    def __init__(self, root: ManifestRoot, pages: Mapping[str, LayerPage] | None = None) -> None:
        self.root = root
        self.pages: dict[str, LayerPage] = dict(pages or {})
        self.id = hashlib.sha256(root.encode()).hexdigest()

    @property
    def n_bytes(self) -> int:
        """Bytes of all the model's tensors."""
        return sum(page.n_bytes for page in self.root.pages)

    def add_page(self, name: str, data: bytes) -> LayerPage:
        """Take in an encoded page that came from elsewhere.

        Raises:
            WireError: it is not the page that the root lists.
            KeyError: the model has no such page.
        """
        page = decode_page(data, self.root, name)
        self.pages[name] = page
        return page

    def encode(self) -> bytes:
        """Root and present pages in one."""
        return _ENCODER.encode(
            _Bundle(self.root.encode(), {name: self.pages[name].encode() for name in sorted(self.pages)})
        )

    @classmethod
    def decode(cls, data: bytes, model_id: str | None = None) -> Manifest:
        """The reverse of :meth:`encode`; everything is checked.

        Args:
            data: the bytes.
            model_id: the id that it must have, where that is known.

        Raises:
            WireError: codes ``oversize``, ``hash`` or ``manifest``.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise WireError(
                "oversize", f"a manifest of {len(data):,} bytes, at most {MAX_MANIFEST_BYTES:,} may come"
            )
        try:
            bundle = _BUNDLE_DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError("manifest", f"the manifest can't be decoded: {error}") from None
        manifest = cls(decode_root(bundle.root, model_id))
        for name, page in bundle.pages.items():
            try:
                manifest.add_page(name, page)
            except KeyError:
                raise WireError("manifest", f"the model has no page {name[:64]!a}") from None
        return manifest


# --- making one -----------------------------------------------------------------------------------------------------


def weight_metadata(metadata: Mapping[str, object]) -> dict[str, MetadataValue]:
    """The metadata that computing layers needs, sorted by key.

    Left out are the vocabulary and the chat templates (megabytes that only the peer needs which turns text into
    tokens), how the file was split, and whatever is longer than any hyper-parameter.
    """
    kept: dict[str, MetadataValue] = {}
    for key in sorted(metadata):
        value = metadata[key]
        if key.startswith(("split.", "tokenizer.chat_template")):
            continue
        if isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= MAX_TEXT):
            kept[key] = value
        elif isinstance(value, Sequence) and not key.startswith("tokenizer.") and len(value) <= MAX_LIST:
            kept[key] = [element for element in value if isinstance(element, bool | int | float | str)]
    return kept


def layer_count(metadata: Mapping[str, object], tensors: Mapping[str, TensorInfo], where: str) -> int:
    """``ARCHITECTURE.block_count``, checked against the tensors' names.

    Raises:
        ModelFileError: there is none, or it and the tensors contradict each other.
    """
    key = f"{architecture_of(metadata, where)}.block_count"
    count = metadata.get(key)
    if not isinstance(count, int) or not 1 <= count <= MAX_LAYERS:
        raise ModelFileError(
            f"{where}: {key} is {str(count)[:20]!a}, not a number of layers up to {MAX_LAYERS}"
        )
    pages = {page_of(name) for name in tensors}
    expected = set(page_names(count))
    if unexpected := sorted(pages - expected):
        raise ModelFileError(f"{where}: {key} is {count}, but the file has tensors of {unexpected[0]}")
    if empty := [f"blk.{layer}" for layer in range(count) if f"blk.{layer}" not in pages]:
        raise ModelFileError(f"{where}: {key} is {count}, but the file has no tensors of {empty[0]}")
    return count


def assemble(
    metadata: Mapping[str, object],
    tensors: Mapping[str, TensorInfo],
    hashes: Mapping[str, bytes],
    *,
    name: str,
    where: str,
) -> Manifest:
    """Put a manifest together from a model's header and the hashes of its chunks.

    Args:
        metadata: as the file has it.
        tensors: all of the model.
        hashes: for each tensor the hashes of its chunks, one after the other.
        name: the model's name for people.
        where: the file's name for messages.

    Raises:
        ModelFileError: the header contradicts itself.
    """
    n_layer = layer_count(metadata, tensors, where)
    on_page: dict[str, list[PageTensor]] = {page: [] for page in page_names(n_layer)}
    for tensor in sorted(tensors):
        info = tensors[tensor]
        on_page[page_of(tensor)].append(PageTensor(tensor, info.shape, info.type, hashes[tensor]))
    pages = {page: LayerPage(page, tuple(found)) for page, found in on_page.items()}
    references = []
    for page in pages.values():
        encoded = page.encode()
        if len(encoded) > MAX_PAGE_BYTES:
            raise ModelFileError(
                f"{where}: the list of chunks of {page.name} takes {len(encoded):,} bytes: too many"
            )
        references.append(PageReference(hashlib.sha256(encoded).digest(), len(encoded), page.n_bytes))
    root = ManifestRoot(
        format=FORMAT,
        name=name,
        architecture=architecture_of(metadata, where),
        n_layer=n_layer,
        tied="output.weight" not in tensors and "token_embd.weight" in tensors,
        metadata=weight_metadata(metadata),
        pages=tuple(references),
    )
    if len(root.encode()) > MAX_ROOT_BYTES:
        raise ModelFileError(
            f"{where}: its metadata takes over {MAX_ROOT_BYTES:,} bytes, even without the tokenizer"
        )
    return Manifest(root, pages)


def model_name(metadata: Mapping[str, object], file_name: str) -> str:
    """The name of a model for people: ``general.name``, else its file's name without the ending."""
    name = metadata.get("general.name")
    if isinstance(name, str) and name.strip() and len(name) <= 256:
        return name.strip()
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", file_name)


def build_manifest(
    gguf: GgufFile, *, name: str | None = None, progress: Progress | None = None, threads: int | None = None
) -> Manifest:
    """Hash every chunk of an open model file, in several threads.

    Takes as long as reading the file from disk does, or about a second for each gigabyte and core. Only a small part
    of the file is in this process's memory at a time.

    Args:
        gguf: the model.
        name: its name for people; the file's own where None. The name is part of what the id is made from.
        progress: told how far it is; what it raises ends the work at once.
        threads: how many hash; as many as there are cores where None.

    Raises:
        ModelFileError: the header contradicts itself.
    """
    layer_count(gguf.metadata, gguf.tensors, str(gguf.path))  # before the long work
    total, done, held = gguf.n_bytes, 0, 0
    digests: dict[str, list[bytes]] = {}
    running: dict[Future[bytes], tuple[str, int, int]] = {}
    pool = ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="hash")

    def collect(at_most: int) -> None:
        nonlocal done, held
        while len(running) > at_most:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                tensor, index, size = running.pop(future)
                digests[tensor][index] = future.result()
                done += size
                held += size
            if held >= _RELEASE_EVERY:
                gguf.release()
                held = 0
            if progress is not None:
                progress(done, total)

    try:
        # In the file's order, so that a disk reads forward.
        for info in sorted(gguf.tensors.values(), key=lambda info: (info.shard, info.offset)):
            view = gguf.tensor_view(info.name)
            digests[info.name] = [b""] * chunk_count(info.name, info.shape, info.n_bytes)
            for index, (offset, size) in enumerate(chunk_borders(info.name, info.shape, info.n_bytes)):
                collect(_HASHING_WINDOW - 1)
                running[pool.submit(_sha256, view[offset : offset + size])] = (info.name, index, size)
        collect(0)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        gguf.release()
    return assemble(
        gguf.metadata,
        gguf.tensors,
        {tensor: b"".join(parts) for tensor, parts in digests.items()},
        name=name or model_name(gguf.metadata, gguf.path.name),
        where=str(gguf.path),
    )


def _sha256(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()
