"""What a role needs of a model: which pages, tensors and chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvasir_peer.errors import NotReadyError
from kvasir_peer.models.manifest import Chunk, Manifest, ManifestRoot, PageTensor, is_stacked


class StageSlice(msgspec.Struct, frozen=True):
    """Layers ``[first, end)`` of a model, with the embedding at the head, and norm and output at the tail.

    Where the output matrix is the embedding (a *tied* model), the tail takes ``token_embd.weight`` too.

    Attributes:
        first: first layer.
        end: past the last layer.
        n_layer: layers of the whole model.
    """

    first: int
    end: int
    n_layer: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end <= self.n_layer:
            raise ValueError(f"layers [{self.first}, {self.end}) are not a part of {self.n_layer} layers")

    @property
    def head(self) -> bool:
        """Whether the slice starts the model."""
        return self.first == 0

    @property
    def tail(self) -> bool:
        """Whether the slice ends the model."""
        return self.end == self.n_layer

    def __str__(self) -> str:
        return f"layers [{self.first}, {self.end}) of {self.n_layer}"


class ExpertSlice(msgspec.Struct, frozen=True):
    """Experts of some layers, without anything else of those layers.

    Attributes:
        ranges: (layer, lo, hi): experts ``[lo, hi)`` of a layer; sorted, apart from each other.
    """

    ranges: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        if not self.ranges:
            raise ValueError("an expert slice without a range")
        last = (-1, 0)
        for layer, lo, hi in self.ranges:
            if not 0 <= lo < hi or layer < 0 or (layer, lo) < last:
                raise ValueError(
                    f"experts [{lo}, {hi}) of layer {layer}: ranges must be sorted, apart and not empty"
                )
            last = (layer, hi)

    def __str__(self) -> str:
        shown = ", ".join(f"{lo}-{hi - 1} of layer {layer}" for layer, lo, hi in self.ranges[:3])
        return f"experts {shown}{', ...' if len(self.ranges) > 3 else ''}"


Slice = StageSlice | ExpertSlice


def pages_of(root: ManifestRoot, part: Slice) -> list[str]:
    """Names of the pages that a slice needs.

    Raises:
        ValueError: the model has no such layers.
    """
    if isinstance(part, ExpertSlice):
        layers = sorted({layer for layer, _, _ in part.ranges})
        if layers[-1] >= root.n_layer:
            raise ValueError(f"layer {layers[-1]} of a model with {root.n_layer} layers")
        return [f"blk.{layer}" for layer in layers]
    if part.n_layer != root.n_layer:
        raise ValueError(f"{part}, but the model has {root.n_layer} layers")
    names = ["common"]
    if part.head or (part.tail and root.tied):
        names.append("head")
    names += [f"blk.{layer}" for layer in range(part.first, part.end)]
    if part.tail:
        names.append("tail")
    return names


def tensors_of(manifest: Manifest, part: Slice) -> list[PageTensor]:
    """The tensors that a slice needs, all or (stacked ones of an expert slice) a part of each.

    Raises:
        ValueError: the model has no such layers or experts.
        NotReadyError: a page that the slice needs isn't here yet.
    """
    names = pages_of(manifest.root, part)
    if absent := [name for name in names if name not in manifest.pages]:
        raise NotReadyError(f"page {absent[0]} of model {manifest.id[:12]} has not been fetched yet")
    found: list[PageTensor] = []
    for name in names:
        for tensor in manifest.pages[name].tensors:
            if isinstance(part, ExpertSlice):
                wanted = "_exps." in tensor.name
            else:
                wanted = name != "head" or part.head or tensor.name == "token_embd.weight"
            if wanted:
                found.append(tensor)
    if isinstance(part, ExpertSlice):
        _check_experts(found, part)
    return found


def _check_experts(tensors: Sequence[PageTensor], part: ExpertSlice) -> None:
    for layer, lo, hi in part.ranges:
        counts = {tensor.shape[0] for tensor in tensors if tensor.name.startswith(f"blk.{layer}.")}
        if not counts or min(counts) < hi:
            raise ValueError(
                f"experts [{lo}, {hi}) of layer {layer}, which has {min(counts, default=0)} experts"
            )


def chunks_of(manifest: Manifest, part: Slice) -> list[Chunk]:
    """The chunks that a slice needs. Tensors with the same content have chunks with the same hash.

    Raises:
        ValueError: the model has no such layers or experts.
        NotReadyError: a page that the slice needs isn't here yet.
    """
    chunks: list[Chunk] = []
    for tensor in tensors_of(manifest, part):
        found = tensor.chunks()
        if isinstance(part, ExpertSlice) and is_stacked(tensor.name, tensor.shape):
            each = tensor.n_bytes // tensor.shape[0]
            ranges = [(lo, hi) for layer, lo, hi in part.ranges if tensor.name.startswith(f"blk.{layer}.")]
            found = [c for c in found if any(lo * each <= c.offset < hi * each for lo, hi in ranges)]
        chunks += found
    return chunks


def bytes_of(manifest: Manifest, part: Slice) -> int:
    """Bytes of a slice's tensors. On disk it may be less, where tensors have the same content."""
    return sum(chunk.size for chunk in chunks_of(manifest, part))
