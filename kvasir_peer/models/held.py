"""Which experts of a model a peer has on disk."""

from __future__ import annotations

from collections.abc import Callable

from kvasir_peer.models.manifest import Manifest, is_stacked


def held_experts(manifest: Manifest, has: Callable[[bytes], bool]) -> tuple[tuple[int, int, int], ...]:
    """Ranges (layer, lo, hi) of experts of which every chunk is here, by the pages that the manifest has.

    Args:
        has: whether the chunk with this hash is in the store.
    """
    found: list[tuple[int, int, int]] = []
    for layer in range(manifest.root.n_layer):
        page = manifest.pages.get(f"blk.{layer}")
        tensors = [t for t in page.tensors if "_exps." in t.name] if page is not None else []
        if not tensors:
            continue
        held = [True] * min(t.shape[0] for t in tensors)
        for tensor in tensors:
            each = tensor.n_bytes // tensor.shape[0]
            for chunk in tensor.chunks():
                if has(chunk.hash):
                    continue
                if not is_stacked(tensor.name, tensor.shape):
                    held = []  # every expert of the layer needs it
                elif chunk.offset // each < len(held):
                    held[chunk.offset // each] = False
        lo: int | None = None
        for expert, here in enumerate([*held, False]):
            if here and lo is None:
                lo = expert
            elif not here and lo is not None:
                found.append((layer, lo, expert))
                lo = None
    return tuple(found)
