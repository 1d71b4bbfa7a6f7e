"""Offers and a model for planning tests."""

from __future__ import annotations

from kvasir_peer.ring.offers import ModelNeeds, StageOffer
from kvasir_peer.serving.widths import Widths

MB = 1 << 20
WIDTHS = Widths(batch_rows=256, micro_batch_rows=16, max_in_flight=16, max_requests=8, context_length=512)


def needs(n_layer: int = 24, layer: int = 50 * MB, head: int = 60 * MB, tail: int = 60 * MB) -> ModelNeeds:
    return ModelNeeds("m" * 64, 2048, 32_000, (layer,) * n_layer, head, tail, kv_bytes=4096)


def offer(peer: str, memory: int = 8000, rate: float = 5e9, **more: object) -> StageOffer:
    """``memory`` in MiB."""
    values: dict[str, object] = {
        "disk": 100_000 * MB,
        "read_rate": rate,
        "addresses": (f"/p2p/{peer}",),
        **more,
    }
    return StageOffer(peer, memory * MB, **values)  # type: ignore[arg-type]
